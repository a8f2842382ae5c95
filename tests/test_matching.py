"""Which models of the catalogue a recording may come from."""

import numpy as np
import pytest

from engine.catalogue import model_presets
from engine.catalogue.packaged import models_that_fit
from engine.compare.synthetic import Recipe
from engine.workload import ExpertLoad, TrafficMatrix
from tests.strategies import make_model

PRESETS = {name: preset.model for name, preset in model_presets().items()}


@pytest.mark.parametrize("name", PRESETS)
def test_a_recording_of_a_preset_fits_that_preset(name):
    recording = Recipe(tokens=16, skew=0.6, affinity=0.3).draw(PRESETS[name])
    assert any(name in names for names in models_that_fit(recording, PRESETS))


def test_models_of_identical_sizes_are_one_and_others_are_not():
    model = make_model(3, 8)
    models = {
        "a": model,
        "wider": model.model_copy(update={"d_ff": 2 * model.d_ff}),
        "b": model.model_copy(update={"name": "b", "batch": 7, "sequence_length": 9}),
        "deeper": make_model(4, 8),
        "more": make_model(3, 9),
        "k": model.model_copy(update={"experts_per_token": model.experts_per_token + 1}),
    }
    recording = Recipe(tokens=16, skew=0.6, affinity=0.3).draw(model)
    assert models_that_fit(recording, models) == [("a", "b"), ("wider",)]
    loads = ExpertLoad("loads", np.ones((3, 8)), None)
    assert models_that_fit(loads, models) == [("a", "b"), ("wider",), ("k",)], "loads do not tell experts per token"


def test_a_traffic_matrix_tells_no_model():
    assert models_that_fit(TrafficMatrix("t", np.ones((3, 8, 8)), 1.0), PRESETS) == []
