"""Choosing sources for a cluster, on the command line and in a job; and how far they are from each other."""

import argparse
import importlib
import json

import numpy as np
import pytest

from engine import costs, store
from engine.catalogue import cluster_presets, gpu
from engine.cluster import Cluster, Node
from engine.network import Network
from engine.problem import Problem
from engine.store.problems import problem_arguments, problem_from
from engine.workload import RoutingTrace
from tests.cases.refusals import refusal
from tests.costs.silicon import needs_tables
from tests.costs.source_errors import COLUMNS, cross_errors
from tests.strategies import cluster_of, make_gpu, make_model

GPU = make_gpu()
PAIR = cluster_of(GPU, GPU)
LINE = costs.Line(alpha=1e-3, beta=1e-9)
PROFILE = costs.CostProfile(name="fitted", origin="a test", gemm={"type-0": LINE}, memory={"type-0": LINE})
GEMMS = costs.GemmTimes(gpu="type-0", dtype="bf16", points=[(1, 64, 64, 1e-3), (100, 64, 64, 2e-3)])
EXCHANGES = costs.CollectiveTimes(operation="all_to_all", ranks=2, points=[(1e3, 1e-2), (1e6, 2e-2)])
COMPUTATION = costs.Profiled(costs.MeasuredTimes(name="gemms", origin="a test", gemm=(GEMMS,)))
NETWORK = costs.Profiled(costs.MeasuredTimes(name="net", origin="a test", collectives=(EXCHANGES,)))
SOURCES = [
    costs.Datasheet(),
    costs.Datasheet(launch=1e-6),
    costs.AlphaBeta(PROFILE),
    COMPUTATION,
    NETWORK,
    costs.Combined(costs.AlphaBeta(PROFILE), NETWORK),
]


# Two sources as one


def test_each_part_comes_from_its_source_and_both_are_named():
    shared = costs.AlphaBeta(
        PROFILE.model_copy(update={"ranks": 4, "cores": 1, "gate": {"type-0": costs.Line(alpha=5, beta=0)}})
    )
    both, model = costs.Combined(shared, NETWORK), make_model(1, 4)
    assert shared.source in both.source and NETWORK.source in both.source
    tokens = np.array([0.0, 3.0])
    assert both.gemm(GPU, tokens, 8, 8, "bf16").tolist() == shared.gemm(GPU, tokens, 8, 8, "bf16").tolist()
    assert both.memory_pass(GPU, tokens).tolist() == shared.memory_pass(GPU, tokens).tolist()
    work = np.array([1.0, 2.0, 3.0])
    assert both.together(work).tolist() == shared.together(work).tolist() != work.tolist()
    for part in ("gate", "expert_ffn", "aggregate"):
        assert getattr(both, part)(GPU, tokens, model).tolist() == getattr(shared, part)(GPU, tokens, model).tolist()
    for part in ("all_to_all", "all_reduce"):
        assert getattr(both, part)(PAIR, tokens).tolist() == getattr(NETWORK, part)(PAIR, tokens).tolist()
    assert both.network(PAIR).send.tolist() == NETWORK.network(PAIR).send.tolist() != Network.of(PAIR).send.tolist()
    assert both.lacks_network(cluster_of(GPU, GPU, GPU)) == NETWORK.lacks_network(cluster_of(GPU, GPU, GPU))
    assert both.lacks_computation(cluster_of(make_gpu(9))) == shared.lacks_computation(cluster_of(make_gpu(9)))


@pytest.mark.parametrize(
    ("names", "computation", "network"),
    [
        ("", "datasheet", "datasheet"),
        ("datasheet", "datasheet", "datasheet"),
        ("gemms net", "gemms", "net"),
        ("net gemms", "gemms", "net"),
        ("net datasheet", "datasheet", "net"),
        ("gemms datasheet", "gemms", "datasheet"),
        ("profile", "profile", "profile"),
        ("net profile", "profile", "net"),
    ],
)
def test_every_part_is_the_first_sources_that_has_it(names, computation, network):
    known = {"datasheet": costs.Datasheet(), "gemms": COMPUTATION, "net": NETWORK, "profile": costs.AlphaBeta(PROFILE)}
    combined = costs.combine({name: known[name] for name in names.split()}, PAIR)
    if computation == network:
        assert combined == known[computation]
    else:
        assert (combined.computation, combined.connection) == (known[computation], known[network])


def test_a_missing_part_is_named_with_every_reason_and_what_to_add():
    message = refusal(lambda: costs.combine({"gemms.csv": COMPUTATION}, PAIR))
    assert message == (
        "no source given has times of the network for this cluster: gemms has no all-to-all over 2 GPUs (it has no "
        "all-to-all at all); add the datasheet as a source"
    )
    three = cluster_of(GPU, GPU, GPU)
    message = refusal(lambda: costs.combine({"gemms.csv": COMPUTATION, "net.txt": NETWORK}, three))
    assert "gemms has no all-to-all" in message and "net has no all-to-all over 3 GPUs (it has 2)" in message
    assert "times of computation" in refusal(lambda: costs.combine({"net.txt": NETWORK}, PAIR))


def test_a_source_that_would_not_count_is_not_passed_over_in_silence():
    message = refusal(lambda: costs.combine({"datasheet": costs.Datasheet(), "net.txt": NETWORK}, PAIR))
    assert message.startswith("net.txt is not used: datasheet before it has all that it could add; name it first")


# The option


def cost_of(*names, cluster: Cluster = PAIR):
    """The costs that the option makes of these names and files; importing the command line takes two seconds."""
    option = argparse.Namespace(cost=[str(name) for name in names])
    return importlib.import_module("engine.cli.inputs").read_cost(option, cluster)


def test_the_option_takes_names_and_files_of_every_kind(tmp_path):
    profile, measured, table = (tmp_path / name for name in ("p.json", "m.json", "t.csv"))
    profile.write_text(PROFILE.to_json())
    measured.write_text(NETWORK.measured.to_json())
    table.write_text("operation,gpu,dtype,m,n,k,seconds\ngemm,type-0,bf16,1,64,64,0.5\ngemm,type-0,bf16,9,64,64,0.7\n")
    assert cost_of() == costs.Datasheet()
    assert cost_of("datasheet") == costs.Datasheet()
    assert cost_of(profile) == costs.AlphaBeta(PROFILE)
    both = cost_of(table, measured)
    assert both.connection == NETWORK
    assert float(both.gemm(GPU, 5, 64, 64, "bf16")) == pytest.approx(0.6)
    assert "twice at most" in refusal(lambda: cost_of(profile, measured, table))
    assert "no such file" in refusal(lambda: cost_of(tmp_path / "missing.json"))
    assert "silicone" in refusal(lambda: cost_of("silicone"))


@needs_tables
def test_silicon_counts_inside_a_node_and_the_datasheet_between_nodes():
    one_node, four_nodes = (cluster_presets()[name].cluster for name in ("hgx-h100-8", "hgx-h100-4-nodes"))
    assert cost_of("silicon", cluster=one_node) == costs.Silicon()
    message = refusal(lambda: cost_of("silicon", cluster=four_nodes))
    assert "the network" in message and "stop at one node" in message and "add the datasheet" in message
    both = cost_of("silicon", "datasheet", cluster=four_nodes)
    assert both == costs.Combined(costs.Silicon(), costs.Datasheet())
    assert "aiconfigurator" in both.source and "roofline" in both.source
    unknown = Cluster(name="u", nodes=(Node(name="n", gpus=(gpu("V100-32"),)),))
    assert "no tables of V100-32" in refusal(lambda: cost_of("silicon", cluster=unknown))


# In a job


@pytest.mark.parametrize("cost", [*SOURCES, costs.Silicon()], ids=lambda cost: type(cost).__name__)
def test_a_source_survives_the_way_to_a_job(cost):
    data = json.loads(json.dumps(costs.choice.to_dict(cost), allow_nan=False))
    assert costs.choice.from_dict(data) == cost


def test_a_job_counts_with_the_costs_of_its_problem(tmp_path, monkeypatch):
    monkeypatch.setenv("SWITCHYARD_DATA", str(tmp_path))
    trace = RoutingTrace("t", np.zeros((4, 1, 1), dtype=np.int16), 2)
    problem = Problem(trace, PAIR, make_model(1, 2), costs.Combined(costs.AlphaBeta(PROFILE), NETWORK))
    store.save_workload(trace)
    arguments = json.loads(json.dumps(problem_arguments(problem)))
    assert problem_from(arguments).cost == problem.cost
    del arguments["cost"]  # as jobs were written before they had one
    assert problem_from(arguments).cost == costs.Datasheet()


@pytest.mark.parametrize(
    ("data", "part"),
    [
        (None, "cost: not a cost source"),
        ({"source": "guess"}, "cost: not a cost source"),
        ({"source": "datasheet", "launch": -1}, "launch"),
        ({"source": "datasheet", "compute_efficiency": 0}, "compute_efficiency"),
        ({"source": "datasheet", "speed": 1}, "speed"),
        ({"source": "profile", "profile": {}}, "cost: name"),
        ({"source": "measured", "measured": {}}, "cost: name"),
        ({"source": "combined", "computation": {"source": "silicon"}, "network": 3}, "cost → network: not a cost"),
    ],
)
def test_a_bad_choice_is_refused(data, part):
    assert part in refusal(lambda: costs.choice.from_dict(data))


# Errors against each other


@needs_tables
def test_errors_of_every_source_are_finite_and_where_they_should_be():
    errors = cross_errors(["H200"])
    assert list(errors.columns) == COLUMNS
    assert set(errors.operation) == {"GEMM", "MoE FFN", "all-to-all", "all-reduce"}
    assert np.isfinite(errors[["mean", "worst"]].to_numpy()).all()
    assert (errors["mean"] <= errors.worst).all() and (errors.points > 0).all()
    mean = errors.set_index(["operation", "source"])["mean"]
    # α–β has one line for shapes from launch-bound to compute-bound: half of the time off on average would still be a
    # line, twice the time would be none. Its means are about 0.3 for GEMMs and 0.2 for collectives.
    for operation in ("GEMM", "all-to-all", "all-reduce"):
        assert 0 < mean[operation, "α–β"] < 0.5
        assert mean[operation, "profiled"] < mean[operation, "α–β"]
    # The learned half is a grid: between its sizes the error is about that of the tables' own noise.
    assert mean["GEMM", "profiled"] < 0.1


def test_sources_of_one_name_but_other_numbers_are_told_apart():
    def times(seconds: float) -> costs.Profiled:
        points = ((1e6, seconds), (2e6, 2 * seconds))
        collective = costs.CollectiveTimes(operation="all_to_all", ranks=2, points=points)
        return costs.Profiled(costs.MeasuredTimes(name="mine", origin="here", collectives=(collective,)))

    first, again, other = times(1e-3), times(1e-3), times(2e-3)
    assert first.source == other.source
    assert first.digest == again.digest != other.digest
    assert costs.Combined(costs.Datasheet(), first).digest == costs.Combined(costs.Datasheet(), again).digest
    assert costs.Combined(costs.Datasheet(), first).digest != costs.Combined(costs.Datasheet(), other).digest
    assert costs.Datasheet().digest != costs.Datasheet(launch=0.0).digest
