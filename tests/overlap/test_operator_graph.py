"""Operator graphs: sizes against closed forms and the operators that may overlap (Lancet, figure 3); capacities of experts."""

from itertools import pairwise

import networkx as nx
import numpy as np
import pytest
from hypothesis import strategies as st

from engine.errors import InputError
from engine.launch.step.layout import kept
from engine.model import MoEModel
from engine.overlap.operator_graph import UPDATE_BYTES, Dependency, Gemm, Operator, OperatorGraph, with_backward
from engine.overlap.transformer import transformer_step
from engine.training import TrainingStep
from tests.cases.examples import tried
from tests.cases.refusals import refusal
from tests.oracles.capacity_passing import kept_by_micro_batches, kept_with_passing


def flops(operators) -> int:
    return sum(2 * gemm.count * gemm.m * gemm.n * gemm.k for operator in operators for gemm in operator.gemms)


def gpt(
    gpus=2, heads=4, batch=2, sequence_length=32, tied_embeddings=True, **sizes
) -> tuple[MoEModel, TrainingStep, OperatorGraph]:
    usual = {"layers": 4, "dense_layers": (0, 2), "experts": 4, "experts_per_token": 1, "d_model": 64, "d_ff": 128}
    model = MoEModel(name="GPT-2", **{"ffn_matrices": 2, "dtype": "fp16"} | usual | sizes)
    lengths = {"batch": batch, "sequence_length": sequence_length, "heads": heads, "tied_embeddings": tied_embeddings}
    step = TrainingStep(**lengths, dense_d_ff=4 * model.d_model, vocabulary=500)
    return model, step, transformer_step(model, step, gpus)


STEPS = {
    "layers": [2, 3, 4],
    "dense_layers": [(), (0,), (1,)],
    "experts": [4, 8],
    "experts_per_token": [1, 2],
    "heads": [1, 4],
    "d_model": [32, 64],
    "d_ff": [48, 128],
    "ffn_matrices": [2, 3],
    "shared_experts": [0, 1, 2],
    "batch": [1, 2, 3],
    "sequence_length": [16, 64],
    "gpus": [1, 2, 4],
    "tied_embeddings": [True, False],
    "dtype": ["fp32", "bf16"],
}
steps = st.builds(gpt, **{name: st.sampled_from(values) for name, values in STEPS.items()})


@tried(30, steps)
def test_flops_are_twice_weights_times_tokens_and_attention_and_numbers_sent_are_the_models(case):
    model, step, graph = case
    width, moe = model.d_model, len(model.moe_layers)
    visited = model.layers * 4 * width**2 + step.vocabulary * width
    visited += (model.layers - moe) * model.ffn_matrices * width * step.dense_d_ff
    expert = model.ffn_matrices * width * model.d_ff
    visited += moe * (width * model.experts + (model.experts_per_token + model.shared_experts) * expert)
    attention = model.layers * 4 * step.batch * step.sequence_length**2 * width
    assert flops(graph.of_phase("forward")) == 2 * visited * step.tokens + attention
    assert flops(graph.of_phase("dw")) == 2 * visited * step.tokens
    assert flops(graph.of_phase("dx")) == 2 * visited * step.tokens + 2 * attention
    operators = {operator.name: operator for operator in graph.operators}
    for forward in graph.of_phase("forward"):  # every gradient costs as much as its operator
        assert (f"dw.{forward.name}" in operators) == (forward.parameters > 0)
        assert (f"dx.{forward.name}" in operators) == (forward.kind != "embedding")
        if forward.parameters and forward.gemms:
            assert flops([operators[f"dw.{forward.name}"]]) == flops([forward])
            assert {gemm.tokens for gemm in operators[f"dw.{forward.name}"].gemms} == {"k"}
        if forward.kind != "embedding":
            times = 2 if forward.kind == "attention" else 1
            assert flops([operators[f"dx.{forward.name}"]]) == times * flops([forward])
            assert operators[f"dx.{forward.name}"].sent == forward.sent
    replicated = model.layers * 4 * width**2 + step.vocabulary * width * (1 if step.tied_embeddings else 2)
    replicated += (model.layers - moe) * model.ffn_matrices * width * step.dense_d_ff
    replicated += moe * width * (model.experts + model.shared_experts * model.ffn_matrices * model.d_ff)
    assert sum(operator.sent for operator in graph.of_phase("all_reduce")) == replicated * model.bytes_per_number
    own = sum(operator.parameters for operator in graph.of_phase("forward") if operator.kind == "experts")
    assert graph.operators[-1].moved == UPDATE_BYTES * (replicated + own)
    copies = step.tokens * model.experts_per_token * model.bytes_per_token
    assert [operator.sent for operator in graph.of_phase("forward") if operator.network] == [copies] * 2 * moe


@pytest.mark.parametrize(("gpus", "own"), [(1, 4), (2, 2), (4, 1)])
def test_experts_are_divided_over_the_gpus_and_their_tokens_multiplied(gpus, own):
    model, step, graph = gpt(gpus=gpus)
    up = next(operator for operator in graph.operators if operator.name == "1.experts_up")
    assert up.gemms == (Gemm(count=own, m=step.tokens * gpus // 4, n=model.d_ff, k=model.d_model),)
    assert up.parameters == own * model.d_model * model.d_ff


@tried(15, steps)
def test_program_order_the_update_last_weight_gradients_wait_for_their_own_and_files_keep_all(case):
    _, _, graph = case
    drawn = graph.graph()
    assert OperatorGraph.from_json(graph.to_json(), "graph") == graph
    again = OperatorGraph.of(drawn)
    assert again.operators == graph.operators
    assert sorted(again.dependencies, key=str) == sorted(graph.dependencies, key=str)
    assert nx.is_directed_acyclic_graph(drawn)
    place = {operator.name: index for index, operator in enumerate(graph.operators)}
    assert all(place[dependency.before] < place[dependency.after] for dependency in graph.dependencies)
    assert graph.operators[-1].phase == "update"
    before = nx.ancestors(drawn, "update")
    assert {operator.name for operator in graph.of_phase("dw", "all_reduce")} <= before
    assert not drawn.out_degree("update")
    phases = [operator.phase for operator in graph.operators]
    assert phases.index("all_reduce") > max(index for index, phase in enumerate(phases) if phase in ("dx", "dw"))
    for operator, after in pairwise(graph.operators):  # every dW just before its dX
        if operator.phase == "dw" and operator.kind != "embedding":
            assert after.name == f"dx.{operator.name[3:]}"
    for dw in graph.of_phase("dw"):  # each waits for its own gradient and holds up only the update
        forward = drawn.nodes[dw.name[3:]]["operator"]
        readers = {after for _, after, gradient in drawn.out_edges(forward.name, data="gradient") if gradient}
        readers = {name for name in readers if drawn.nodes[name]["operator"].phase == "forward"}
        assert set(drawn.predecessors(dw.name)) == {f"dx.{name}" for name in readers} and readers
        later = {drawn.nodes[name]["operator"].phase for name in nx.descendants(drawn, dw.name)}
        assert later <= {"all_reduce", "update"}


def test_all_to_alls_of_lower_layers_run_beside_weight_gradients_of_higher_ones():
    # Lancet figure 3: dW of layer N has no path from or to the backward all-to-alls of the layers before it.
    _, _, graph = gpt()
    drawn = graph.graph()
    exchanges = [operator for operator in graph.of_phase("dx") if operator.network]
    assert sorted({operator.layer for operator in exchanges}) == [1, 3] and len(exchanges) == 4
    for dw in graph.of_phase("dw"):
        for exchange in exchanges:
            apart = not nx.has_path(drawn, dw.name, exchange.name) and not nx.has_path(drawn, exchange.name, dw.name)
            if dw.layer > exchange.layer or dw.name == "dw.head":
                assert apart
            elif dw.layer < exchange.layer:
                assert nx.has_path(drawn, exchange.name, dw.name)
    # Inside a layer: the experts' gradients come between the two, the gate's needs only the combine to be undone.
    assert nx.has_path(drawn, "dx.3.combine", "dw.3.experts_down")
    assert not nx.has_path(drawn, "dx.3.dispatch", "dw.3.experts_up")
    assert not nx.has_path(drawn, "dx.3.dispatch", "dw.3.gate")
    assert nx.has_path(drawn, "dx.3.dispatch", "dw.3.projection")


def test_tied_embeddings_are_reduced_when_both_parts_are_there():
    needs = {dependency.before for dependency in gpt()[2].dependencies if dependency.after == "all_reduce.embedding"}
    assert needs == {"dw.embedding", "dw.head"}


def operator(name: str, kind: str = "dense_ffn", **more) -> Operator:
    return Operator(name=name, kind=kind, phase="forward", layer=0, **more)


def forward_of(*edges: tuple[str, str]) -> nx.DiGraph:
    graph = nx.DiGraph(name="hand-made")
    for name in dict.fromkeys(end for edge in edges for end in edge):
        graph.add_node(name, operator=operator(name, gemms=(Gemm(m=2, n=3, k=5),), parameters=15))
    graph.add_edges_from(edges, gradient=True)
    return graph


def test_backward_by_hand():
    graph = with_backward(forward_of(("a", "b"), ("b", "c")), 2.0)
    assert [node.name for node in graph.operators] == [
        *("a", "b", "c", "dw.c", "dx.c", "dw.b", "dx.b", "dw.a", "dx.a", "all_reduce.c", "all_reduce.b"),
        *("all_reduce.a", "update"),
    ]
    needs = {
        dependency.after: sorted(two.before for two in graph.dependencies if two.after == dependency.after)
        for dependency in graph.dependencies
    }
    assert needs == {
        "b": ["a"],
        "c": ["b"],
        "dx.c": ["c"],
        "dw.b": ["dx.c"],
        "dx.b": ["b", "dx.c"],
        "dw.a": ["dx.b"],
        "dx.a": ["a", "dx.b"],
        **{f"all_reduce.{name}": [f"dw.{name}"] for name in "abc"},
        "update": [f"{phase}.{name}" for phase in ("all_reduce", "dw") for name in "abc"],
    }
    gemms = {node.name: node.gemms for node in graph.operators}
    assert gemms["dx.b"] == (Gemm(m=2, n=5, k=3),)
    assert gemms["dw.b"] == (Gemm(m=5, n=3, k=2, tokens="k"),)
    assert [node.sent for node in graph.of_phase("all_reduce")] == [30.0] * 3
    assert graph.operators[-1].moved == 45 * UPDATE_BYTES
    with pytest.raises(InputError, match="need each other in a circle"):
        with_backward(forward_of(("a", "b"), ("b", "c"), ("c", "a")), 2.0)


@pytest.mark.parametrize(
    ("kind", "times"), [("attention", 2), ("aggregate", 2), ("gate", 1), ("layer_norm", 1), ("residual", 1)]
)
def test_both_factors_have_gradients_and_an_element_wise_one_reads_the_input_again(kind, times):
    graph = nx.DiGraph(name="one")
    graph.add_node("x", operator=operator("x", kind, gemms=(Gemm(m=2, n=3, k=5),), moved=8))
    dx = with_backward(graph, 2.0).of_phase("dx")
    assert (flops(dx), [node.moved for node in dx]) == (60 * times, [8 if kind == "residual" else 12])


@pytest.mark.parametrize(
    ("names", "edges", "says"),
    [
        (["a", "b", "a"], [], "two operators are called 'a'"),
        (["a", "b"], [("a", "c")], "names 'c', which is no operator"),
        (["a", "b"], [("c", "b")], "names 'c', which is no operator"),
        (["a", "b"], [("b", "a")], "'a' needs 'b', but is listed before it"),
        (["a", "b"], [("a", "a")], "'a' needs 'a', but is listed before it"),
        (["a", "b"], [("a", "b"), ("b", "a")], "'a' needs 'b', but is listed before it"),
        ([], [], "operators: "),
    ],
)
def test_bad_graphs_are_refused(names, edges, says):
    data = {
        "name": "bad",
        "operators": [operator(name).model_dump() for name in names],
        "dependencies": [Dependency(before=before, after=after).model_dump() for before, after in edges],
    }
    message = refusal(OperatorGraph.from_dict, data, "graph.json")
    assert message.startswith("graph.json: ") and says in message


@st.composite
def batches(draw) -> tuple[np.ndarray, int, int, np.ndarray]:
    """experts int[token, choice], number of experts, capacity, bounds of some uneven parts."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    tokens, k = draw(st.integers(0, 40)), draw(st.integers(1, 3))
    num_experts = draw(st.integers(k, 6))
    scores = rng.random((tokens, num_experts)) * rng.random(num_experts)
    experts = np.argsort(-scores, axis=1)[:, :k].astype(draw(st.sampled_from([np.int16, np.int64])))
    experts[rng.random(experts.shape) < draw(st.sampled_from([0.0, 0.1]))] = -1
    bounds = np.sort(rng.integers(0, tokens + 1, draw(st.integers(0, 4))))
    return experts, num_experts, draw(st.integers(0, 12)), np.array([0, *bounds, tokens])


@tried(150, batches(), st.sampled_from(["token", "choice"]))
def test_a_whole_batch_is_served_in_order(batch, service):
    experts, num_experts, capacity, bounds = batch
    tokens, choices = experts.shape
    if service == "token":
        served = [(token, choice) for token in range(tokens) for choice in range(choices)]
    else:
        served = [(token, choice) for choice in range(choices) for token in range(tokens)]
    left, expected = [capacity] * num_experts, np.zeros(experts.shape, dtype=bool)
    for token, choice in served:
        expert = experts[token, choice]
        if expert >= 0 and left[expert] > 0:
            left[expert] -= 1
            expected[token, choice] = True
    assert np.array_equal(kept(experts, num_experts, capacity, service), expected)
    if choices == 1:  # then both orders of service are one
        assert np.array_equal(kept_with_passing(experts, num_experts, capacity, bounds, service), expected)


@tried(150, batches())
def test_passing_capacity_drops_the_same_tokens_and_micro_batches_never_fewer(batch):
    experts, num_experts, capacity, bounds = batch
    whole = kept(experts, num_experts, capacity)
    assert np.array_equal(kept_with_passing(experts, num_experts, capacity, bounds), whole)
    uncut = np.bincount(experts[whole], minlength=num_experts)
    apart = kept_by_micro_batches(experts, num_experts, capacity, bounds)
    assert (np.bincount(experts[apart], minlength=num_experts) <= uncut).all()


@pytest.mark.parametrize(("experts", "message"), [([0, 1], "token, choice"), ([[0.5]], "integers"), ([[2]], "expert 2 of 2")])
def test_bad_input_is_said(experts, message):
    assert message in refusal(kept, np.array(experts), 2, 1)
