"""Whether a node may join a job: small checks, each in a process of its own, each with a limit."""
