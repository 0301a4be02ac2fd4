"""Trains torchtitan models in replica groups that may be lost and come back (docs/torchtitan.md)."""
