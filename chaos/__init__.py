"""Faults for real processes: what is broken and how, on which jobs, by which rules the outcome is judged."""
