"""Trains torchtitan models in replica groups that may be lost and come back (docs/torchtitan.md)."""

from lightkeeper.integrations.torchtitan.refusals import refuse_other_versions

refuse_other_versions()  # before anything imports torchtitan, and anew at every try
