"""One certificate check over all kernels: an answer, stopped or not, is legal, has its objective and keeps its bound; the same
seed gives the same answer."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from engine.result import Status, never
from engine.solve import KERNELS, Options, face
from tests.cases.kernels import CHAIN, FOUR, INSTANCES, LAYER, REPLICATE, SPLIT, TWO_TIER
from tests.cases.placements import permutation_affinity, random_tokens
from tests.oracles.recomputed import MORE_IS_BETTER, held_against_the_rules


def larger() -> dict[str, dict[str, Any]]:
    """Instances with something to stop in the middle of; other kernels are asked with their small ones."""
    rng = np.random.default_rng(3)
    return INSTANCES | {
        "order": {"traffic": rng.integers(1, 10**6, (16, 16)).tolist(), "bandwidth": 1e6},
        "two-tier": TWO_TIER | {"traffic": rng.integers(1, 10**6, (8, 8)).tolist(), "gpus_per_node": 2},
        "assign": {"tokens": rng.integers(0, 50, (24, 24)).tolist()}
        | {name: rng.random(24).tolist() for name in ("bandwidth", "seconds_per_token")},
        "colocate": dict(zip(FOUR, rng.random((4, 40)).tolist(), strict=True)),
        "colocate-heterogeneous": {"cost": rng.random((8, 8, 8)).tolist()},
        "affinity": {"transitions": permutation_affinity(5, 12, 2000).tolist(), "gpus": 4, "gpus_per_node": 2},
        "coactivation": {"experts": random_tokens(1, 100, 12, 3, 0).tolist(), "source_gpu": [0, 1, 2, 3] * 25, "gpus": 4},
        "replicate": REPLICATE,
        "replicate-devices": {"popularity": rng.exponential(size=6).tolist(), "devices": 4, "max_experts_per_device": 3},
        "pipeline-degree": LAYER,
        "weight-gradients": SPLIT,
        "partition": {"ops": CHAIN["ops"][:3] * 10},
    }


LARGER = larger()


def answer_of(kernel: str, stop: Callable[[], bool], time_limit: float = 1.0, **options: Any) -> dict[str, Any]:
    """The answer of a kernel as `solve` gives it, but with a stop of our own."""
    schema, call = face(kernel)
    result, solution = call(schema.from_dict(LARGER[kernel], kernel), Options(time_limit=time_limit, **options), stop)
    return {"status": result.status.value, "objective": result.objective, "bound": result.bound, **solution}


@pytest.fixture(scope="module", params=KERNELS)
def unstopped(request) -> tuple[str, dict[str, Any]]:
    return request.param, answer_of(request.param, never)


def test_an_answer_is_legal_and_within_its_bound(unstopped):
    kernel, answer = unstopped
    held_against_the_rules(kernel, LARGER[kernel], answer, 1e-6 if kernel == "replicate" else 1e-9)


@pytest.mark.parametrize("after", [0, 1, 7, 60])
def test_a_stopped_answer_is_legal_and_its_bound_holds_for_the_unstopped_one(unstopped, after):
    kernel, full = unstopped
    asked = 0

    def stop() -> bool:
        nonlocal asked
        asked += 1
        return asked > after

    answer = answer_of(kernel, stop)
    held_against_the_rules(kernel, LARGER[kernel], answer, 1e-6 if kernel == "replicate" else 1e-9)
    slack = 1e-6 * abs(full["objective"])
    if kernel in MORE_IS_BETTER:
        assert answer["bound"] >= full["objective"] - slack and answer["objective"] <= full["bound"] + slack
    else:
        assert answer["bound"] <= full["objective"] + slack and answer["objective"] >= full["bound"] - slack
    if asked > after:
        assert answer["status"] == Status.CANCELLED or answer["bound"] == pytest.approx(answer["objective"], rel=1e-9)
    else:
        assert answer["status"] == full["status"]


@pytest.mark.parametrize("kernel", [kernel for kernel in KERNELS if kernel not in ("affinity", "coactivation")])
def test_same_seed_same_answer(kernel):
    """Affinity and co-activation have the same check with their clocks set aside, in their own tests."""
    first, second = (answer_of(kernel, never, 60.0, seed=3, exact=False) for _ in range(2))
    assert first == second
