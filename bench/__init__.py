"""Benches: one file each, ours beside the peer in the same run, so that the ratio counts and not the machine."""
