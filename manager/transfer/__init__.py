"""Serving a reduced entry to a peer that missed it, and fetching one."""
