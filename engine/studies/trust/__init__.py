"""How far to trust predictions: each beside a public measurement, on settings that were fitted and on those that were not."""

from engine.studies.trust.prediction import Prediction, Summary, summaries
from engine.studies.trust.table import SECTIONS, predictions

__all__ = ["SECTIONS", "Prediction", "Summary", "predictions", "summaries"]
