"""Checkpoints on disk: of a state that is final, whole before it has a name, and of which one at least always loads."""
