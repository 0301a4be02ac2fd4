"""The demo: real processes, a real fault, and a table whose every line is a check."""
