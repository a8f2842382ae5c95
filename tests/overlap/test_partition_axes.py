"""Axes of tensors against the enumeration of all assignments, the operators of an MoE transformer against Lancet, and the
operators that may run at once against a search for each pair."""

from itertools import product

import networkx as nx
import numpy as np
import pytest
from hypothesis import strategies as st

from engine.errors import IllegalError, InputError
from engine.overlap.operator_axes import FLOW, GATES, constraint_of, latest_last, range_axes, range_is_valid, range_problem
from engine.overlap.partition_axes import AxisConstraint, AxisProblem, count_axes, overlappable, partition_axes
from engine.result import Status
from tests.cases.examples import tried
from tests.oracles.overlapping import check_axes

AXES = (-1, 0, 1, "irregular")
ATTENTION = ("layer_norm", "qkv", "attention", "projection", "residual")
DENSE = (*ATTENTION, "layer_norm", "dense_ffn", "residual")
MOE = (*ATTENTION, "layer_norm", "gate", "dispatch", "experts", "combine", "aggregate", "residual")
HEAD = ("layer_norm", "projection", "loss")
MODEL = ("embedding", *DENSE, *MOE, *DENSE, *MOE, *HEAD)
CUTTABLE_GATES = [gate for gate, cuttable in GATES.items() if cuttable]


@st.composite
def problems(draw) -> AxisProblem:
    tensors = [f"t{number}" for number in range(draw(st.integers(1, 5)))]
    domains = {tensor: tuple(draw(st.lists(st.sampled_from(AXES), max_size=4, unique=True))) for tensor in tensors}
    constraints = []
    for _ in range(draw(st.integers(0, 4))):
        named = draw(st.lists(st.sampled_from(tensors), min_size=1, max_size=3))
        combination = st.tuples(*[st.sampled_from((*AXES, "elsewhere")) for _ in named])
        constraints.append(AxisConstraint(tuple(named), tuple(draw(st.lists(combination, min_size=2, max_size=40)))))
    return AxisProblem(domains, constraints)


def legal(problem: AxisProblem, axis_of_tensor: dict) -> bool:
    try:
        check_axes(
            axis_of_tensor, problem.domains, [(constraint.tensors, constraint.allowed) for constraint in problem.constraints]
        )
    except IllegalError:
        return False
    return True


@tried(150, problems())
def test_found_and_counted_as_by_enumeration(problem):
    chosen = product(*problem.domains.values())
    expected = sum(legal(problem, dict(zip(problem.domains, axes, strict=True))) for axes in chosen)
    assert count_axes(problem) == expected
    result = partition_axes(problem)
    if expected:
        assert result.status is Status.OPTIMAL and legal(problem, result.solution)
    else:
        assert result.status is Status.INFEASIBLE and result.solution is None
    assert result.objective == result.bound == 0


def test_more_solutions_than_one_could_list():
    # A cyclic chain of 60 tensors with three axes, neighbours different: 2^60 + 2 colourings, three at a time.
    names = [f"t{number}" for number in range(60)]
    different = tuple((a, b) for a in range(3) for b in range(3) if a != b)
    ring = [AxisConstraint((names[i - 1], names[i]), different) for i in range(60)]
    problem = AxisProblem(dict.fromkeys(names, (0, 1, 2)) | {"free": (0, 1)}, ring)
    assert count_axes(problem) == 2 * (2**60 + 2)
    assert legal(problem, partition_axes(problem).solution)


def test_a_count_that_is_too_entangled_is_refused_and_can_be_stopped():
    rng = np.random.default_rng(0)
    names = [f"t{number}" for number in range(24)]
    half = [pair for pair in product(range(6), repeat=2) if sum(pair) % 2]
    entangled = [AxisConstraint((a, b), tuple(half)) for a in names for b in rng.choice(names, 6) if a != b]
    entangled = AxisProblem(dict.fromkeys(names, tuple(range(6))), entangled)
    free = AxisProblem(
        dict.fromkeys(names, tuple(range(6))),
        [AxisConstraint((a, b), tuple(product(range(6), repeat=2))) for i, a in enumerate(names) for b in names[:i]],
    )
    assert count_axes(entangled, stop=lambda: True) is None
    with pytest.raises(InputError, match="too many tensors are tied"):
        count_axes(free)
    assert partition_axes(free).status is Status.OPTIMAL


def test_the_check_refuses_what_breaks_a_rule():
    domains, rule = {"a": (0, 1), "b": (0, 1)}, [(("a", "b"), ((0, 1),))]
    check_axes({"a": 0, "b": 1}, domains, rule)
    for axes, message in (
        ({"a": 0}, "not every tensor"),
        ({"a": 0, "b": 2}, "which it does not have"),
        ({"a": 1, "b": 1}, "constraint 0"),
    ):
        with pytest.raises(IllegalError, match=message):
            check_axes(axes, domains, rule)


def test_a_matrix_product_is_cut_by_rows_or_by_columns():
    problem = range_problem(["qkv"])
    assert [constraint.tensors for constraint in problem.constraints] == [("normed.0", "weight.0", "heads.1")]
    assert count_axes(problem) == 2
    rows, columns = {"normed.0": 0, "weight.0": -1, "heads.1": 0}, {"normed.0": -1, "weight.0": 1, "heads.1": 1}
    assert legal(problem, rows) and legal(problem, columns) and range_axes(["qkv"]) in (rows, columns)
    # Attention takes whole sequences, which leaves the rows.
    assert range_axes(["qkv", "attention"]) == rows | {"mixed.1": 0}
    assert count_axes(range_problem(["qkv", "attention"])) == 1


def test_experts_alone_are_cut_by_capacity_and_irregularly_otherwise():
    alone = ["dispatch", "experts", "combine"]
    assert set(range_axes(alone).values()) == {"capacity"}
    assert set(range_axes(alone, "batch-prioritised").values()) == {"capacity"}
    after = range_axes([*alone, "aggregate", "residual"])
    assert [after[f"routed.{version}"] for version in range(4)] == ["irregular"] * 4 and after["branch.1"] == 0
    before = range_axes(["layer_norm", "gate", *alone])
    assert before["normed.1"] == 0 and before["routed.1"] == before["routed.4"] == "irregular"


@pytest.mark.parametrize("gate", GATES)
def test_every_operator_of_a_range_is_cut(gate):
    for kind in FLOW:
        for only_experts in (False, True):
            for combination in constraint_of(kind, gate, only_experts):
                assert combination[-1] != -1 and len(combination) == len(FLOW[kind][0]) + 1


@pytest.mark.parametrize("gate", CUTTABLE_GATES)
def test_a_gate_that_decides_on_parts_lets_the_whole_forward_pass_be_cut(gate):
    assert range_is_valid(MODEL[:-1], gate) and not range_is_valid(MODEL, gate) and not range_is_valid(["loss"], gate)
    assert latest_last(MODEL, gate).tolist() == [len(MODEL) - 2] * len(MODEL)


@pytest.mark.parametrize("gate", ["switch", "batch-prioritised"])
def test_the_latest_end_is_that_of_trying_every_range(gate):
    model = ("embedding", *DENSE, *MOE, *HEAD)
    latest = latest_last(model, gate)
    for first in range(len(model)):
        valid = [range_is_valid(model[first : last + 1], gate) for last in range(first, len(model))]
        assert valid == [last <= latest[first] for last in range(first, len(model))]


def test_shared_experts_join_the_residual_with_the_axis_of_the_tokens():
    layer = ["layer_norm", "gate", "dispatch", "shared_experts", "experts", "combine", "aggregate", "residual"]
    problem = range_problem(layer)
    assert problem.constraints[-1].tensors == ("stream.0", "branch.1", "shared.1", "stream.1")
    axes = range_axes(layer)
    assert axes["shared.1"] == axes["stream.1"] == 0 and axes["routed.2"] == "irregular"
    following = range_problem([*layer, "layer_norm", "dense_ffn", "residual"])
    assert following.constraints[-1].tensors == ("stream.1", "branch.2", "stream.2")


def test_unknown_operators_and_gates_are_said():
    with pytest.raises(InputError, match="no operator 'pooling'"):
        range_is_valid(["pooling"])
    with pytest.raises(InputError, match="no gate 'soft'"):
        latest_last(["experts"], "soft")


# Weight gradients that may run under an all-to-all


@tried(80, st.integers(2, 14), st.floats(0, 0.5), st.integers(0, 2**32 - 1))
def test_labels_equal_a_search_per_pair(nodes, density, seed):
    rng = np.random.default_rng(seed)
    graph = nx.DiGraph()
    names = [f"op{number}" for number in rng.permutation(nodes)]
    graph.add_nodes_from(sorted(names))
    graph.add_edges_from((names[i], names[j]) for i in range(nodes) for j in range(i + 1, nodes) if rng.random() < density)
    chosen = rng.permutation(names).tolist()
    split = rng.integers(0, nodes + 1)
    alltoalls, weight_gradients = chosen[:split], chosen[split:]
    allowed = overlappable(graph, alltoalls, weight_gradients)
    assert allowed.dtype == bool and allowed.shape == (len(weight_gradients), len(alltoalls))
    reached = {node: nx.descendants(graph, node) for node in chosen}
    assert allowed.tolist() == [[a not in reached[w] and w not in reached[a] for a in alltoalls] for w in weight_gradients]


def test_labels_of_a_large_graph():
    graph = nx.DiGraph()
    nx.add_path(graph, range(4000))
    graph.add_edges_from((4 * number, 4000 + number) for number in range(1000))
    alltoalls, weight_gradients = list(range(2, 4000, 40)), list(range(4000, 5000))
    allowed = overlappable(graph, alltoalls, weight_gradients)
    # The chain up to the operator a dW hangs on comes before it, the rest has nothing to do with it.
    assert (allowed == (np.array(alltoalls) > 4 * np.arange(1000)[:, None])).all()


@pytest.mark.parametrize(
    ("edges", "alltoalls", "weight_gradients", "message"),
    [
        ([("a", "b"), ("b", "a")], ["a"], ["b"], "in a circle"),
        ([("a", "b")], ["c"], ["b"], "'c' is not an operator"),
        ([("a", "b")], ["a"], ["a"], "'a' comes twice"),
    ],
)
def test_bad_graphs_are_named(edges, alltoalls, weight_gradients, message):
    with pytest.raises(InputError, match=message):
        overlappable(nx.DiGraph(edges), alltoalls, weight_gradients)
    with pytest.raises(InputError, match="directed"):
        overlappable(nx.Graph(edges), alltoalls, weight_gradients)
