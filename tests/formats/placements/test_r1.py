"""DeepSeek-R1's loads, planned with replication for 32 GPUs, out to the engines that serve it: 61 layers, 58 of them MoE."""

from pathlib import Path

import numpy as np
import pytest

from engine import formats
from engine.catalogue import model_presets, node_types
from engine.cluster import Cluster
from engine.compare.redundancy import project_evenly
from engine.costs import Datasheet
from engine.errors import InputError
from engine.formats.placements import recognise, write_placement
from engine.plan import Plan
from engine.problem import Problem, make_problem
from engine.systems import SYSTEMS
from engine.systems.base import run
from engine.timeline import balancedness
from tests.formats.placements import checkers
from tests.formats.placements.cases import held_by

LOADS = Path(__file__).resolve().parents[4] / "shared" / "data" / "deepseek-r1-loads"
MOE = tuple(range(3, 61))
SIZES = (256, 32)

pytestmark = pytest.mark.skipif(not LOADS.is_dir(), reason="the shared recordings are not here")


@pytest.fixture(scope="module")
def problem() -> Problem:
    h100 = node_types()["hgx-h100"]
    cluster = Cluster(name="32 H100", nodes=tuple(h100.node(f"n{node}") for node in range(4)), latency=1e-5)
    workload = formats.read_workload(LOADS / "decode_in2000out100.json")
    return make_problem(workload, cluster, model_presets()["DeepSeek-R1"].model, Datasheet())


def planned(problem: Problem, algorithm: str) -> Plan:
    return run(SYSTEMS["eplb"], problem, {"redundant": 1, "algorithm": algorithm}).result.solution


def balance(plan: Plan, problem: Problem) -> float:
    """Mean over the layers of mean / most tokens of a GPU."""
    return float(balancedness(np.einsum("le,leg->lg", problem.workload.load, plan.placement.share)).mean())


def test_a_plan_goes_to_every_engine_that_has_replicas(problem):
    plan, model = planned(problem, "best"), problem.model
    held = held_by(plan.placement)
    assert (model.layers, model.moe_layers) == (61, MOE) and {len(slots) for row in held for slots in row} == {9}
    for name in ("r1.json", "r1.pt"):
        (content,) = write_placement("sglang", plan, model, name).files.values()
        assert checkers.sglang(content, 61, (0, 1, 2), *SIZES) == held
    export = write_placement("trtllm", plan, model, "r1.yaml")
    assert checkers.tensorrt_llm(export.files["r1.yaml"], MOE, *SIZES) == held
    export = write_placement("trtllm", plan, model, "r1.yaml", mtp=True)
    assert checkers.tensorrt_llm(export.files["r1.yaml"], MOE, *SIZES, mtp=61) == held
    export = write_placement("vllm", plan, model, "r1.jsonl")
    assert checkers.vllm(export.files["r1.jsonl"], 58, *SIZES) == held
    assert '\'{"num_redundant_experts": 32,' in export.lines[-1]
    assert recognise(Path("r1.jsonl"), export.files["r1.jsonl"]).deployed(model, 32).placement == plan.placement


def test_what_eplb_lays_twice_on_a_gpu_is_refused_and_projected(problem):
    """DeepSeek's greedy packing puts two replicas of an expert on one GPU in some layers; a second one there serves nobody."""
    plan, model = planned(problem, "eplb"), problem.model
    with pytest.raises(InputError, match=r"expert \d+ twice on GPU \d+; export its even projection"):
        write_placement("sglang", plan, model)
    projection = project_evenly(plan, problem)
    twice = sum(len(slots) - len(set(slots)) for row in held_by(plan.placement) for slots in row)
    assert projection.slots == 9 and projection.added == projection.dropped == twice > 0
    (content,) = write_placement("sglang", projection.plan, model).files.values()
    assert checkers.sglang(content, 61, (0, 1, 2), *SIZES) == held_by(projection.plan.placement)
    assert balance(projection.plan, problem) >= balance(plan, problem) - 0.005
    assert projection.after.total <= projection.before.total * 1.005
