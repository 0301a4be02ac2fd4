"""Why did a rank end? Rules over the last lines of its log. Pure, standard library only."""

from lightkeeper.diagnose.classify import Diagnosis, classify, confidence_of

__all__ = ["Diagnosis", "classify", "confidence_of"]
