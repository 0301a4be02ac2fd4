"""Outside of a job: its nodes, what is checked of them, who is told, and what is started again."""
