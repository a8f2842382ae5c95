"""Replication against every placement of small instances, by rules that hold for all, and DeepSeek's EPLB to the letter."""

from itertools import combinations_with_replacement, product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import strategies as st

from engine.errors import IllegalError, InputError
from engine.formats import read_workload
from engine.placement.replication import ReplicationInstance, balancedness, replicate, share_of_slot
from engine.placement.replication.bounds import least_time
from engine.placement.replication.eplb import eplb
from engine.placement.replication.exact import best_layout
from engine.placement.replication.instance import _partitions, groups_of_nodes
from engine.placement.replication.search import search
from engine.result import Limits, Status, never
from tests.cases.examples import tried
from tests.oracles.placing import check_replication
from tests.strategies import seeds

DATA = Path(__file__).resolve().parents[3] / "shared" / "data" / "deepseek-r1-loads"
SPEEDS = (1.0, 0.8, 0.5, 0.4)


def checked(result, instance: ReplicationInstance) -> np.ndarray:
    """The validator's balancedness float64[load, layer], after holding the result's claims against it."""
    balance = check_replication(
        result.solution, instance.loads, instance.gpus, instance.slots_of_gpu, instance.split, instance.speed
    )
    assert result.solution.dtype == np.int64
    assert result.objective == pytest.approx(balance.min(), rel=1e-6)
    assert balancedness(result.solution, instance) == pytest.approx(balance, rel=1e-6)
    assert result.objective <= result.bound <= 1
    assert (result.status is Status.OPTIMAL) == (result.bound <= result.objective * (1 + 1e-6))
    return balance


def random_loads(rng: np.random.Generator, loads: int, layers: int, experts: int, kind: str) -> np.ndarray:
    if kind == "integer":
        return rng.integers(0, 9, (loads, layers, experts)).astype(float)
    return np.floor(20 * np.exp(1.5 * rng.standard_normal((loads, layers, experts))))


@st.composite
def instances(draw, experts: int = 6, gpus: int = 4, split: str | None = None, even: bool | None = None):
    rng = np.random.default_rng(draw(seeds))
    experts, gpus = draw(st.integers(1, experts)), draw(st.integers(1, gpus))
    loads = random_loads(rng, draw(st.integers(1, 3)), draw(st.integers(1, 2)), experts, draw(st.sampled_from("is")))
    split = split or draw(st.sampled_from(["equal", "free"]))
    if draw(st.booleans()) if even is None else even:
        slots = gpus * (-(-experts // gpus) + draw(st.integers(0, 1)))
        return ReplicationInstance(loads, slots, gpus, split)
    slots_of_gpu = rng.integers(0, 4, gpus)
    while slots_of_gpu.sum() < experts:
        slots_of_gpu[rng.integers(gpus)] += 1
    speed = rng.choice(SPEEDS, gpus) if draw(st.booleans()) else None
    return ReplicationInstance(loads, int(slots_of_gpu.sum()), gpus, split, slots_of_gpu=slots_of_gpu, speed=speed)


def best_by_trying_all(instance: ReplicationInstance) -> float:
    """The optimum of each layer's worst load over all contents of all GPUs, least over layers."""
    experts, more = instance.loads.shape[2], (instance.gpus, instance.slots_of_gpu, instance.split, instance.speed)
    contents = [list(combinations_with_replacement(range(experts), int(slots))) for slots in instance.slots_of_gpu]
    rows = [[expert for gpu in gpus for expert in gpu] for gpus in product(*contents)]
    placed = [np.array([row]) for row in rows if len(set(row)) == experts]
    layers = (instance.loads[:, [layer]] for layer in range(instance.loads.shape[1]))
    return min(max(check_replication(row, loads, *more).min() for row in placed) for loads in layers)


@tried(25, instances(experts=3, gpus=3, split="equal"), st.booleans())
def test_equal_split_against_every_placement(instance, exact):
    result = replicate(instance, Limits(20, exact=exact))
    checked(result, instance)
    if np.prod([float(instance.loads.shape[2]) ** slots for slots in instance.slots_of_gpu]) > 3000:
        return
    optimum = best_by_trying_all(instance)
    assert result.objective <= optimum * (1 + 1e-9) and optimum <= result.bound * (1 + 1e-9)
    # A result's bound is never below its objective, so the limits are also held against the optimum by themselves.
    for layer, limit in enumerate(least_time(instance.relative, instance.slots_of_gpu, instance.speed)):
        layer_instance = instance.of_layer(layer)
        best_of_layer = best_by_trying_all(layer_instance)
        assert best_of_layer * limit <= 1 + 1e-9
        known = instance.layout(result.solution[[layer]])[0]
        assert best_of_layer * best_layout(layer_instance, known, 0.5, Limits(5.0, wall=60), never)[1] <= 1 + 1e-9
    if exact:
        assert result.status is Status.OPTIMAL
        assert result.objective == pytest.approx(optimum, rel=1e-6)


@pytest.mark.parametrize("seed", range(8))
def test_free_split_against_every_placement(seed):
    rng = np.random.default_rng(seed)
    slots_of_gpu = np.array([[2, 2], [1, 2, 1], [2, 1, 1], [1, 3]][seed % 4])
    gpus, slots = len(slots_of_gpu), int(slots_of_gpu.sum())
    speed = rng.choice(SPEEDS, gpus) if seed % 2 else np.ones(gpus)
    loads = random_loads(rng, 1 + seed % 3, 1, 3, "integer")
    instance = ReplicationInstance(loads, slots, gpus, "free", slots_of_gpu=slots_of_gpu, speed=speed)
    result = replicate(instance)
    checked(result, instance)
    assert result.status is Status.OPTIMAL
    assert result.objective == pytest.approx(best_by_trying_all(instance), rel=1e-6)
    search = replicate(instance, Limits(exact=False), effort=2)
    assert search.objective <= result.objective * (1 + 1e-6) and result.objective <= search.bound * (1 + 1e-6)


@tried(30, instances(experts=16, gpus=5))
def test_work_is_conserved_and_no_plan_beats_the_limits(instance):
    """All work is done, and max >= max(mean, heaviest replica)."""
    result = replicate(instance, Limits(exact=False), effort=2)
    share = share_of_slot(result.solution, instance)
    total = instance.loads.sum(axis=2)
    assert share.sum(axis=2) == pytest.approx(np.where(total > 0, instance.speed.sum(), 0.0))
    balance = checked(result, instance)
    if instance.alike:
        checked(replicate(instance, algorithm="eplb"), instance)
    assert balance.max() <= 1 + 1e-9
    replicas = np.array([np.bincount(row, minlength=instance.loads.shape[2]) for row in result.solution])
    heaviest = (instance.loads / replicas).max(axis=2) / instance.speed.max()
    assert instance.split == "free" or (heaviest * balance * instance.speed.sum() <= total * (1 + 1e-9)).all()


def test_limits_by_hand():
    """The one spare slot halves the 10, so that the 6 stays whole, though four GPUs would do the two in 4 each."""
    load = np.array([[[10.0, 6, 1, 1]]])
    assert least_time(load, np.ones(5, dtype=int), np.ones(5)) == pytest.approx([6.0])
    # With a GPU of speed 3 both have three GPUs at most, which are as fast as five.
    assert least_time(load, np.ones(5, dtype=int), np.array([3.0, 1, 1, 1, 1])) == pytest.approx([16 / 5])
    instance = ReplicationInstance(np.array([[[3.0, 1, 1, 1, 1, 1, 1]]]), 8, 4, split="equal")
    layout = instance.layout(replicate(instance, Limits(exact=False)).solution)[0]
    best, limit = best_layout(instance, layout, 0.5, Limits(5.0, wall=60), never)
    placed = check_replication(instance.slots_in(best[None]), instance.loads, 4)
    assert limit == pytest.approx(1 / placed.min(), rel=1e-6) and limit <= 1 / placed.min() * (1 + 1e-9)


@pytest.mark.parametrize(("load", "slots", "gpus"), [([3.0, 0, 6, 3, 7], 8, 2), ([5.0, 7, 8], 6, 3)])
def test_never_worse_than_eplb_even_where_two_replicas_on_one_gpu_help_it(load, slots, gpus):
    instance = ReplicationInstance(np.array([[load]]), slots, gpus)
    usual = replicate(instance, algorithm="eplb").objective
    layout = search(instance.relative, instance.slots_of_gpu, instance.speed, np.ones(1), 8, 0, never)
    assert balancedness(instance.slots_in(layout), instance).min() < usual  # else the example shows nothing
    assert replicate(instance, Limits(exact=False)).objective >= usual


@tried(25, instances(experts=12, gpus=4, even=True, split="equal"), seeds)
def test_free_is_never_slower_than_equal_and_best_never_worse_than_eplb(instance, seed):
    usual = checked(replicate(instance, algorithm="eplb"), instance)
    result = replicate(instance, Limits(seed=seed, exact=False), effort=2)
    equally, at_will = (
        checked(result, instance),
        check_replication(result.solution, instance.loads, instance.gpus, split="free"),
    )
    assert (at_will >= equally * (1 - 1e-6)).all()
    assert (equally.min(axis=0) >= usual.min(axis=0) * (1 - 1e-9)).all()
    free = ReplicationInstance(instance.loads, instance.slots, instance.gpus, "free")
    at_best, at_least = replicate(free, Limits(exact=False), effort=2), replicate(free, algorithm="eplb")
    assert at_best.objective >= at_least.objective * (1 - 1e-6)


@pytest.mark.parametrize(
    ("loads", "slots", "gpus", "more", "objective"),
    [
        # The mean of these loads is flat, so that a plan for it is as good as any; one plan serves both well.
        ([[8, 0, 1, 1, 0, 8, 1, 1], [0, 8, 1, 1, 8, 0, 1, 1]], 8, 2, {}, 1),
        # Two thirds of expert 0 on GPU 0: only two of its three replicas there make both GPUs equally slow.
        ([[6, 1, 3]], 5, 2, {"slots_of_gpu": np.array([3, 2])}, 1),
        # Faster GPUs and larger ones get more.
        ([[1] * 8], 8, 3, {"slots_of_gpu": np.array([4, 2, 2]), "speed": np.array([2.0, 1, 1])}, 1),
        # With as many slots everywhere the fast GPU cannot get its half.
        ([[1] * 9], 9, 3, {"speed": np.array([2.0, 1, 1])}, (9 / 4) / 3),
        # GPU 0 may hold one expert of the three alike, so it has at most a third of the work.
        ([[1] * 3], 4, 2, {"split": "free", "slots_of_gpu": np.array([1, 3])}, 0.75),
        # Groups of 4, 3, 2, 1: nodes of 5 and 5 at best, and 6 + 1 and 2 + 1 where one group outweighs all.
        ([[4, 3, 2, 1]], 4, 2, {"nodes": 2, "groups": 4}, 1),
        ([[6, 1, 2, 1]], 4, 2, {"nodes": 2, "groups": 4}, 5 / 7),
        # Too many dealings to try: the heaviest of 16 groups and the three lightest are 23 of 38.
        ([[20, *[1.2] * 15]], 16, 4, {"nodes": 4, "groups": 16}, 9.5 / 23.6),
    ],
)
def test_optima_by_hand(loads, slots, gpus, more, objective):
    instance = ReplicationInstance(np.array(loads, dtype=float)[:, None], slots, gpus, **more)
    result = replicate(instance)
    checked(result, instance)
    assert result.status is Status.OPTIMAL and result.objective == pytest.approx(objective)


def test_groups_stay_on_their_node():
    rng = np.random.default_rng(5)
    loads = rng.random((2, 4, 16))
    instance = ReplicationInstance(loads, 24, 8, nodes=2, groups=4)
    result, usual = replicate(instance), replicate(instance, algorithm="eplb")
    checked(result, instance)
    for answer in (result, usual):
        assert not any(set(left) & set(right) for left, right in answer.solution.reshape(4, 2, 12) // 4)
    assert result.objective >= usual.objective
    # What the groups cost: the same without them.
    assert replicate(ReplicationInstance(loads, 24, 8)).objective >= result.objective


def test_the_limit_of_groups_is_their_best_dealing():
    assert [len(_partitions(groups, nodes)) for groups, nodes in ((4, 2), (8, 4), (8, 2), (6, 6))] == [3, 105, 35, 1]
    assert _partitions(16, 4) is None
    load = np.random.default_rng(9).random((3, 2, 8))
    order, least = groups_of_nodes(load, 2, 4, 1.0)
    dealt = np.take_along_axis(load.reshape(3, 2, 4, 2).sum(axis=3), order[:, None], axis=2)
    assert dealt.reshape(3, 2, 2, 2).sum(axis=3).max(axis=(1, 2)) == pytest.approx(least)


def test_layers_and_loads_without_tokens():
    loads = np.zeros((2, 3, 4))
    loads[0, 1] = [4, 2, 1, 1]
    instance = ReplicationInstance(loads, 6, 2)
    result = replicate(instance)
    checked(result, instance)
    # Replicas of experts nobody asked for are spread, not heaped on the first.
    assert max(np.bincount(result.solution[0])) == 2
    assert replicate(ReplicationInstance(np.zeros((1, 1, 4)), 4, 2)).objective == 1.0


def test_progress_is_told():
    progress = []
    instance = ReplicationInstance(np.array([[[5.0, 3, 3, 2, 2, 1]]]), 6, 2)
    result = replicate(instance, report=lambda objective, bound: progress.append((objective, bound)))
    assert progress and progress[-1] == (result.objective, pytest.approx(result.bound))
    assert all(objective <= bound + 1e-12 for objective, bound in progress)


@pytest.mark.skipif(not DATA.is_dir(), reason="the shared recordings are not here")
def test_real_loads():
    """DeepSeek-R1, 288 slots on 32 GPUs: above EPLB on one workload, and far above it on the worst of four."""
    loads = np.stack([read_workload(path).load[::3] for path in sorted(DATA.glob("*.json"))])  # every third layer
    for load in loads:
        instance = ReplicationInstance(load[None], 288, 32)
        result = replicate(instance)
        assert checked(result, instance).min() >= 0.995
        assert replicate(instance, algorithm="eplb").objective < 0.99
    together = ReplicationInstance(loads, 288, 32)
    usual = balancedness(replicate(together, algorithm="eplb").solution, together)
    robust = balancedness(replicate(together, effort=0).solution, together)
    assert usual.mean(axis=1).min() < 0.78 and robust.min() > 0.97


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"slots_of_gpu": np.full(8, 3)}, "adds up to 24.* 16"),
        ({"slots_of_gpu": np.full(8, 1), "slots": 8}, "8 slots for 12 experts.* add 4"),
        ({"speed": np.r_[2.0, np.ones(7)], "nodes": 2, "groups": 2}, "leave groups"),
        ({"slots_of_gpu": np.array([1, 3] * 4), "algorithm": "eplb"}, "use 'best'"),
        ({"algorithm": "worst"}, "algorithm"),
    ],
)
def test_bad_input_says_what_would_do(more, says):
    fields = {"loads": np.ones((1, 2, 12)), "slots": 16, "gpus": 8, "algorithm": "best"} | more
    algorithm = fields.pop("algorithm")
    with pytest.raises(InputError, match=says):
        replicate(ReplicationInstance(**fields), algorithm=algorithm)
    for load in (np.ones(12), -EXAMPLE, EXAMPLE * np.nan):
        with pytest.raises(InputError, match="load"):
            eplb(load, slots=16, gpus=8, nodes=2, groups=4)


@pytest.mark.parametrize("row", [[0, 1, 2, 2, 1], [0, 1, 2, 3, 1, 4], [0, 1, 1, 1, 0, 2], [0, 1, 2, 3, -1, 0]])
def test_the_check_refuses_illegal_plans(row):
    with pytest.raises(IllegalError):
        check_replication(np.array([row]), np.ones((1, 1, 4)), 2)


EXAMPLE = np.array(
    [[90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86], [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27]], dtype=float
)


def test_the_published_example():
    placed = eplb(EXAMPLE, slots=16, gpus=8, nodes=2, groups=4)
    assert placed.dtype == np.int64
    assert placed.tolist() == [
        [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
        [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
    ]
    assert check_replication(placed, EXAMPLE[None], 8)[0] == pytest.approx([0.828, 0.805], abs=5e-4)


@pytest.mark.parametrize(
    ("load", "slots", "gpus", "wanted"),
    [
        # 9 to GPU 0; 8 to GPU 1, which stays the lighter one and takes 2 as well and is full; 1 goes to GPU 0.
        ([9, 8, 2, 1], 4, 2, [0, 3, 1, 2]),
        # Ties go to the lower index.
        ([1, 1, 1, 1], 4, 2, [0, 2, 1, 3]),
        # The spare slots go to experts 0 and 1; experts 2 and 3, now heaviest, come first. Nothing keeps replicas apart.
        ([1, 1, 1, 1], 6, 2, [2, 0, 0, 3, 1, 1]),
        # One slot to a GPU: replicas stay in the order in which they are made, the further ones last.
        ([1, 5, 1], 4, 4, [0, 1, 2, 1]),
        # Replicas go to whoever has the heaviest: 12, 6, 5, 4, each is halved and so on in turn.
        ([12, 5, 3, 1], 8, 4, [0, 0, 0, 0, 1, 1, 2, 3]),
    ],
)
def test_eplb_by_hand(load, slots, gpus, wanted):
    (placed,) = eplb(np.array([load], dtype=float), slots, gpus).tolist()
    assert wanted in (placed, sorted(placed))


def test_layers_do_not_depend_on_each_other_and_units_change_nothing():
    load = np.random.default_rng(0).integers(0, 50, (6, 24)).astype(float)
    together = eplb(load, 32, 8, 4, 8).tolist()
    assert together == [eplb(load[[layer]], 32, 8, 4, 8)[0].tolist() for layer in range(6)]
    assert eplb(load * 2.0**200, 32, 8, 4, 8).tolist() == together == eplb(load * 2.0**-300, 32, 8, 4, 8).tolist()
    assert eplb(np.zeros((1, 4)), 8, 2).shape == (1, 8)


def test_groups_count_only_while_nodes_divide_them():
    """3 groups on 2 nodes: no policy keeps them together, so neither number has any effect."""
    load = np.random.default_rng(1).random((5, 15))
    assert eplb(load, 24, 8, nodes=2, groups=3).tolist() == eplb(load, 24, 8).tolist()
