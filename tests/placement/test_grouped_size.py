"""Fewer experts than GPUs, one slot each: exact, at any size."""

import numpy as np
import pytest

from engine.placement.grouped_assignment import assign_groups
from engine.result import Status
from tests.placement.test_assignment import mixed_instance, routing
from tests.placement.test_grouped_assignment import brute_force

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("gpus", "experts"), [(4, 3), (5, 2), (5, 4), (6, 1)])
@pytest.mark.parametrize("kind", ["integer", "float", "skewed"])
def test_idle_gpus_equal_every_choice(gpus, experts, kind):
    for seed in range(3):
        instance = mixed_instance(*routing(gpus, experts, seed, kind), computation=[0.2, 1.0, 3.0][seed])
        slots = np.ones(gpus, dtype=np.int64)
        result = assign_groups(instance, slots, exact_slots=False)
        assert result.status is Status.OPTIMAL
        assert np.bincount(result.solution, minlength=gpus).max() == 1
        assert result.solution.shape == (experts,)
        assert result.objective == instance.cost(result.solution) == pytest.approx(brute_force(instance, slots, False))
        assert result.bound == result.objective
