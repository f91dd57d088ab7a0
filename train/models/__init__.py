"""Models that `--model` selects."""

from train.models.all_models import MODELS, build_from_settings, build_model

__all__ = ["MODELS", "build_from_settings", "build_model"]
