"""What is planned for. Every problem and every plan has one goal."""

from enum import StrEnum


class Goal(StrEnum):
    """The value is how the goal reads in a sentence."""

    INFERENCE = "inference"  # one model has the GPUs to itself
    TWO_MODELS = "two models"  # inference of two models on the same GPUs (Aurora §6, §7)
    TRAINING = "a training step"


def goal_of(training: bool, two_models: bool) -> Goal:
    """The goal of what has a training step, or a second model, or neither."""
    if training:
        return Goal.TRAINING
    return Goal.TWO_MODELS if two_models else Goal.INFERENCE
