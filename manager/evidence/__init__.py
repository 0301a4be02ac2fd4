"""What is kept of an incident, before anything is aborted or killed (`docs/evidence.md`)."""
