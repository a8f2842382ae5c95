"""Models, recordings and plans for launches on this machine, and the checks that hold for every run."""

from dataclasses import replace

import numpy as np
import pandas as pd

from engine import store
from engine.launch.places.devices import Devices
from engine.launch.preparation import inference
from engine.launch.preparation.launch import Launch, PreparedLaunch
from engine.launch.results.run import Run
from engine.model import MoEModel
from engine.plan import Placement, Plan
from engine.timeline import INFERENCE_KINDS, NETWORK_KINDS, Timeline
from engine.workload import RoutingTrace
from tests.cases.launch_plans import beside, plan_in, skewed

STEPS = tuple(kind for kind in INFERENCE_KINDS if kind not in ("attention", "prompt_gather", "all_gather"))
LAYERS, EXPERTS, K = 3, 8, 2
MODEL = MoEModel(name="tiny", layers=LAYERS, experts=EXPERTS, experts_per_token=K, d_model=32, d_ff=64)
BIG = MODEL.model_copy(update={"d_model": 256, "d_ff": 512})
"""A model with a hundred passes longer than any test waits."""
HOST = Devices(gpus=(), memory=(), cores=2, host_memory=8 * 2.0**30)


def recording(tokens: int = 300, padding: float = 0.0) -> RoutingTrace:
    """Skewed routing for `MODEL`. padding: share of tokens without a choice"""
    return skewed(tokens, MODEL, padding)


def placement(*slots: tuple[int, ...]) -> Placement:
    """The same slots in every layer, one tuple a GPU."""
    return Placement(experts=EXPERTS, experts_of_gpu=(slots,) * LAYERS, model_layers=tuple(range(LAYERS)))


EVEN = placement((0, 1), (2, 3), (4, 5), (6, 7))
UNEVEN = placement((0, 1, 2, 7), (3, 7), (4, 5), (6,))
"""Slots 4, 2, 2 and 1; expert 7 has two homes."""


def plan_for(trace: RoutingTrace, mode: str, where: Placement = EVEN, model: MoEModel = MODEL) -> Plan:
    """A plan in an order for the traffic of a recording on four GPUs."""
    return plan_in(mode, trace, where, model)


def prepare(mode: str = "concurrent", ranks: int | None = 2, **more) -> PreparedLaunch:
    """A launch of one plan. more: trace, plan, model and devices, and options of `Launch`"""
    trace = more.pop("trace", None) or recording()
    plan = more.pop("plan", None) or plan_for(trace, mode)
    model, devices = more.pop("model", MODEL), more.pop("devices", HOST)
    return inference.prepare_inference(Launch((plan,), trace, model, ranks=ranks, **{"repeats": 3} | more), devices)


def hold_together(launch: PreparedLaunch, whole: Run) -> None:
    """Assert the rules of every finished launch."""
    ranks, repeats = launch.instructions.ranks, launch.instructions.repeats
    assert whole.tokens == launch.workloads[0].tokens and whole.device == "CPU" and whole.clock_error == 0
    assert whole.profile.ranks == ranks and len(whole.runs) == len(launch.instructions.plans)
    kinds = STEPS if ranks > 1 else tuple(kind for kind in STEPS if kind not in NETWORK_KINDS)
    for run in whole.runs:
        assert 0 <= run.difference.error <= 1e-5
        assert len(run.totals) == repeats and run.measured.total == sorted(run.totals)[repeats // 2]
        assert run.predicted.resources == run.measured.resources
        for timeline in (run.predicted, run.measured):
            events = timeline.events
            assert (events["start"] >= 0).all() and (events["end"] >= events["start"]).all()
            assert events["end"].max() == timeline.total and events["start"].min() == 0
            assert events["kind"].notna().all() and events["stream"].notna().all()
            at_work = {(row.kind, row.layer, row.resource) for row in events.itertuples()}
            assert at_work == {(k, layer, rank) for k in kinds for layer in range(LAYERS) for rank in range(ranks)}
        for before, after in (("gate", "dispatch"), ("dispatch", "ffn"), ("ffn", "combine"), ("combine", "aggregate")):
            for layer in range(LAYERS):
                earlier, later = (of(run.measured, kind, layer) for kind in (before, after))
                assert not len(earlier) or not len(later) or earlier["end"].max() <= later["start"].min() + 1e-4


def of(timeline: Timeline, kind: str, layer: int) -> pd.DataFrame:
    return timeline.events[(timeline.events["kind"] == kind) & (timeline.events["layer"] == layer)]


def sent(timeline: Timeline, kind: str, layer: int, ranks: int, model: int = 0) -> np.ndarray:
    """float64[src, dst] bytes of one all-to-all."""
    events = timeline.events
    events = events[(events["kind"] == kind) & (events["layer"] == layer) & (events["model"] == model)]
    traffic = np.zeros((ranks, ranks))
    np.add.at(traffic, (events["resource"], events["peer"]), events["bytes"])
    return traffic


def launch_arguments(model: MoEModel, **more) -> dict:
    """Arguments of a launch job of a matched plan on two ranks."""
    trace = recording(300 if model is MODEL else 2000)
    plan = plan_for(trace, "matched", model=model)
    saved, plans = store.save_workload(trace), [plan.model_dump(mode="json", exclude_none=True)]
    return {"workload": saved, "model": model.model_dump(mode="json"), "plans": plans, "ranks": 2} | more


OTHER = MODEL.model_copy(update={"name": "other", "experts_per_token": 1, "d_model": 48, "ffn_matrices": 2})


def recording_b() -> RoutingTrace:
    """A recording of the other model: fewer tokens, one expert each, other experts popular, and padding."""
    trace = recording(150, padding=0.2)
    experts = np.where(trace.experts >= 0, EXPERTS - 1 - trace.experts, -1)[:, :, :1]
    return replace(trace, name="b", experts=np.ascontiguousarray(experts, dtype=np.int16))


def pair_of(mode_a: str, mode_b: str, a: RoutingTrace, b: RoutingTrace) -> Plan:
    return beside(plan_for(a, mode_a), plan_for(b, mode_b, UNEVEN, OTHER))
