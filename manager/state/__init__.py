"""The training state of a rank: what it consists of, how it is copied aside, and how it is put back in place."""
