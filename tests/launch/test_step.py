"""Planned training steps on real Gloo ranks: the gradients of the unplanned step for every plan, and the order of events. Steps
as launches: refusals, and steps made smaller."""

import os
import shutil
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from engine.catalogue import cluster_presets
from engine.costs import Datasheet
from engine.launch.places.devices import Devices
from engine.launch.places.fold import of_layers
from engine.launch.preparation import prepare
from engine.launch.preparation.launch import Launch, PreparedLaunch
from engine.launch.preparation.memory import USABLE
from engine.launch.preparation.settled import parts_of_layers
from engine.launch.rank.instructions import MACHINE_TIMES, REPORT
from engine.launch.results.comparison import compare
from engine.launch.results.run import read_run
from engine.launch.running import clusters
from engine.launch.running.local import run_here
from engine.overlap.transformer import transformer_step
from engine.plan import Overlap, PartitionRange, Pipeline, Placement, Priority, expert_groups
from engine.problem import make_problem
from engine.result import never
from engine.simulate.streams import POLICIES
from engine.simulate.training import price_step
from engine.simulate.training.program import program_of
from engine.systems import TRAINING
from engine.systems import run as plan_with
from engine.systems.base import silent
from engine.systems.pieces import linear_placement
from engine.systems.training.coordinator import micro_ops
from engine.systems.training.lina import packed_placement
from engine.training import balanced_load
from engine.workload import ExpertLoad, RoutingTrace
from tests import everything, warm
from tests.cases import steps
from tests.cases.cluster_launches import destination
from tests.cases.processes import processes_of
from tests.cases.refusals import refusal
from tests.cases.steps import MODEL, RANKS, STEP, plan_by, plan_of, problem
from tests.cases.training import problem_of
from tests.launch.step_ranks import Case, Outcome, run
from tests.strategies import cluster_of, make_gpu

SLOW = 0.004
LIMITS = ("micro_op", "bucket") if everything.WANTED else ("micro_op",)
"""The ways to cut gradients that every policy is tried with; "all experts everywhere" has buckets in any case."""
MANY = RANKS if everything.WANTED else 2
"""Ranks of a step that is the same on any number of them: four send each other three times as much as two."""
UNDER = {"dw.2.experts_down": "dx.1.combine", "dw.head": "dx.2.combine"}
UNDER |= dict.fromkeys(("dw.2.qkv", "dw.1.experts_up"), "dx.1.dispatch")


def by_system(name: str, ranks: int = 2) -> Case:
    """A step that a system plans for slow links, so that cutting pays."""
    cluster = cluster_of(*(make_gpu(send=3e5) for _ in range(ranks)), latency=1e-5)
    planned = problem_of(cluster, k=2, batch=4, gate="top-k", routing="recorded")
    settings = {"micro_op_mb": 0.01} if name == "lina" else {}
    plan = plan_with(TRAINING[name], planned, settings).result.solution
    model = planned.model.model_copy(update={"dtype": "fp32"})
    return Case(name if ranks == 2 else f"{name}, {ranks} ranks", plan, model, planned.step)


def pipeline(forward: int, backward: int, order: str = "dispatch-first", layers: int = 2) -> Pipeline:
    return Pipeline(forward=(forward,) * layers, backward=(backward,) * layers, order=order)


def cut(first: str, last: str, parts: int) -> PartitionRange:
    return PartitionRange(first=first, last=last, parts=parts)


def cases() -> list[Case]:
    every, two_ranks = [by_system(name) for name in TRAINING], linear_placement(problem(ranks=2))
    for policy in POLICIES:
        for limit in LIMITS:
            priority = Priority(policy=policy, **{limit: 3e3})
            plan = plan_of(two_ranks, priority, pipeline=pipeline(1, 2, "interleaved"))
            every.append(Case(f"{policy}, {limit}", plan, MODEL, STEP, slow=SLOW))
    ranges = (cut("1.projection", "2.dispatch", 3), cut("2.experts_up", "2.combine", 2), cut("2.aggregate", "head", 4))
    overlap = Overlap(ranges=ranges, under=UNDER)
    every.append(Case("ranges, filled", plan_of(overlap=overlap), MODEL, STEP))
    irregular = overlap.model_copy(update={"irregular": True})
    every.append(Case("ranges, irregular", plan_of(overlap=irregular), MODEL, STEP))
    placed = linear_placement(problem(ranks=MANY))
    every.append(Case("moved", plan_of(placed, overlap=Overlap(under=UNDER)), MODEL, STEP, slow=10 * SLOW))
    many = plan_of(placed, pipeline=pipeline(5, 3))
    loose = STEP.model_copy(update={"capacity_factor": 0.0, "tied_embeddings": False})
    every.append(Case("no capacity", many, MODEL, loose))
    every.append(Case("more parts than rows", many, MODEL, STEP.model_copy(update={"batch": 1, "sequence_length": 3})))
    whole = STEP.model_copy(update={"gate": "batch-prioritised", "routing": "balanced", "capacity_factor": 1.5})
    behind = plan_of(placed, overlap=Overlap(ranges=(cut("1.dispatch", "2.layer_norm_2", 3),), irregular=True))
    every.append(Case("whole batch gate", behind, MODEL, whole))
    packed = packed_placement(problem(), 4)
    plan = plan_of(packed, pipeline=pipeline(2, 3), overlap=Overlap(under=UNDER, irregular=True))
    every.append(Case("packed", plan, MODEL, STEP, probed=True))
    single = packed_placement(problem(), 8)
    every.append(Case("all experts everywhere", plan_of(single, Priority(policy="fair", bucket=2e4)), MODEL, STEP))
    every.append(Case("through the host", plan_of(placed, pipeline=pipeline(2, 3)), MODEL, STEP, staged=True))
    shared = MODEL.model_copy(update={"shared_experts": 2, "ffn_matrices": 2})
    every.append(Case("shared experts", plan_of(placed, pipeline=pipeline(2, 2)), shared, STEP))
    for dtype in ("fp32", "bf16"):
        model = MODEL.model_copy(update={"dtype": dtype})
        every.append(Case(dtype, plan_of(placed, pipeline=pipeline(2, 2)), model, STEP, double=False, probed=dtype == "fp32"))
    uneven = Placement.from_gpu_of_expert(np.array([[0, 0, 2, 2, 0, 2, 0, 0], [1, 0, 1, 2, 2, 2, 1, 0]]), 3, (1, 2))
    every.append(Case("three ranks", plan_of(uneven, pipeline=pipeline(3, 2)), MODEL, STEP))
    alone = Placement.from_gpu_of_expert(np.zeros((2, 8), dtype=int), 1, (1, 2))
    every.append(Case("one rank", plan_of(alone, overlap=overlap), MODEL, STEP))
    if everything.WANTED:  # twice as many ranks take twice as long
        every += [by_system(name, 4) for name in TRAINING]
    return every


CASES = {case.name: case for case in cases()}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory, warm_process) -> dict[str, list[Outcome]]:
    environment = os.environ | {warm.ADDRESS: str(warm_process), "OMP_NUM_THREADS": "1"}
    return run(list(CASES.values()), tmp_path_factory.mktemp("ranks"), environment)


@pytest.mark.parametrize("name", CASES)
def test_a_planned_step_has_the_gradients_of_the_unplanned_one(outcomes, name):
    case, first = CASES[name], outcomes[name][0]
    if case.double:
        assert first.difference.error < 1e-12
    else:
        assert 0 < first.difference.share < 1
    assert all(outcome.repeated and outcome.updated for outcome in outcomes[name])
    assert all(outcome.difference is None for outcome in outcomes[name][1:])


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.probed])
def test_what_one_rank_alone_has_wrong_is_seen(outcomes, name):
    """A gradient that all ranks should have alike, and a number that is none."""
    changed, no_number = outcomes[name][0].spoilt
    assert changed.error > 0.5 and no_number.error == float("inf") and changed.share > 1


@pytest.mark.parametrize("name", CASES)
def test_every_task_of_the_program_is_one_event(outcomes, name):
    case = CASES[name]
    own = problem(case.model, case.step, case.ranks)
    priced = price_step(own, case.plan.placement, case.plan.overlap is not None and case.plan.overlap.irregular)
    program = program_of(case.plan, own, priced)
    for outcome in outcomes[name]:
        assert [label for *_, label in outcome.events] == list(program.labels)
        reduced = sum(size for kind, *_, size, _ in outcome.events if kind == "all_reduce")
        number = 8 if case.double else own.model.bytes_per_number
        wanted = number * sum(program.sent[task] for task in program.pieces)
        assert reduced * own.model.bytes_per_number == pytest.approx(wanted)


def test_full_buffers_are_sent_where_they_are_filled_and_real_rows_where_not(outcomes):
    def sent(name: str, label: str) -> list[float]:
        return [sum(size for *_, size, own in outcome.events if own.startswith(label)) for outcome in outcomes[name]]

    row = MODEL.d_model * 8
    for label in ("1.dispatch", "2.combine", "dx.2.dispatch", "dx.1.combine"):
        whole = sent("ranges, filled", label)
        assert sum(whole) == pytest.approx(RANKS * MODEL.experts * STEP.capacity(MODEL) * row)
        assert 0 < sum(sent("ranges, irregular", label)) < sum(whole)
    assert max(sent("no capacity", "1.dispatch")) <= STEP.tokens * MODEL.experts_per_token * row


@pytest.mark.parametrize("name", ["lancet", "ranges, irregular", "packed", "no capacity", "whole batch gate"])
def test_sizes_are_exchanged_before_real_tokens_only_are_sent(outcomes, name):
    """Each part's own (Lancet, Figure 10): the ranks have nothing else to go by, see `step_ranks.forget_sizes`."""
    case = CASES[name]
    kinds = ("dispatch",) if name == "no capacity" else ("dispatch", "combine")
    for outcome in outcomes[name]:
        sent = [(start, label) for kind, _, start, _, _, label in outcome.events if kind in kinds]
        wanted = {label: start for start, label in sent if not label.startswith("dx.")}
        sizes = {label: (end, size) for kind, _, _, end, size, label in outcome.events if kind == "sizes"}
        assert sizes.keys() == {f"sizes of {label}" for label in wanted} and wanted
        assert all(sizes[f"sizes of {label}"][0] <= start for label, start in wanted.items())
        assert {size for _, size in sizes.values()} == {8.0 * case.model.experts}
    filled = outcomes["ranges, filled"]
    assert not any(kind == "sizes" for outcome in filled for kind, *_ in outcome.events)


def spans(outcome: Outcome, *kinds: str) -> list[tuple[float, float, str]]:
    return [(start, end, label) for kind, _, start, end, _, label in outcome.events if kind in kinds]


def started_within(events: Sequence[tuple], others: Sequence[tuple]) -> list[tuple[str, str]]:
    return [(event[2], other[2]) for event in events for other in others if other[0] < event[0] < other[1]]


def test_micro_ops_give_way_to_all_to_alls_and_announcements_of_them(outcomes):
    for limit in LIMITS:
        for outcome in outcomes[f"priority, {limit}"]:
            exchanges, reductions = spans(outcome, "dispatch", "combine"), spans(outcome, "all_reduce")
            announced = [span for span in spans(outcome, "dx") if span[2].endswith("aggregate")]
            assert len(announced) == 2
            assert not started_within(reductions, exchanges) and not started_within(reductions, announced)
    # Without that rule they do meet.
    fair = outcomes["fair, micro_op"]
    assert any(started_within(spans(outcome, "all_reduce"), spans(outcome, "dispatch", "combine")) for outcome in fair)


def test_a_moved_weight_gradient_runs_under_its_all_to_all(outcomes):
    for outcome in outcomes["moved"]:
        event = {label: (start, end) for _, _, start, end, _, label in outcome.events}
        for gradient, exchange in UNDER.items():
            (start, end), (begin, over) = event[gradient], event[exchange]
            assert begin <= start < end <= over, (gradient, exchange)
            assert over - begin >= 10 * SLOW


def test_what_comes_next_in_the_program_waits_for_the_all_to_all(outcomes):
    """Computation and all-to-all of one stretch overlap, and nothing else does."""
    for outcome in outcomes["moved"]:
        under = [span for span in spans(outcome, "dense", "gate", "ffn", "aggregate", "dx", "dw") if span[2] not in UNDER]
        assert not started_within(under, spans(outcome, "dispatch", "combine"))
    for outcome in outcomes["fair, micro_op"]:
        cut = [span for span in spans(outcome, "dx", "dw") if "part" in span[2]]
        assert started_within(cut, spans(outcome, "dispatch", "combine"))


def test_the_systems_plans_are_cut_moved_and_packed():
    plans = {name: CASES[name].plan for name in TRAINING}
    assert plans["lancet"].overlap.ranges and plans["lancet"].overlap.under
    for name in ("pipemoe", "fastermoe", "lina"):
        assert max(plans[name].pipeline.forward + plans[name].pipeline.backward) > 1
    assert plans["lina"].priority.policy == "priority" and plans["raf"].priority.policy == "fifo"
    assert plans["deepspeed"].pipeline is None
    assert expert_groups(CASES["packed"].plan.placement) == 2
    assert expert_groups(CASES["all experts everywhere"].plan.placement) == RANKS


# As launches.
@pytest.mark.usefixtures("warm_python")
def test_lancet_and_pipemoe_in_one_launch_give_the_gradients_of_one_process(tmp_path):
    problem = steps.top_one_problem()
    launch = steps.prepare_step(*(plan_by(name, problem) for name in ("lancet", "pipemoe")), repeats=2)
    assert launch.ready and launch.instructions.step == steps.TOP_ONE_STEP and launch.tokens == 2 * steps.TOP_ONE_STEP.tokens
    whole = run_here(launch, tmp_path / "run", never, silent)
    assert whole.tokens == 64 and whole.profile.all_reduce is not None and not processes_of(tmp_path)
    for measured_plan in whole.runs:
        assert 0 <= measured_plan.difference.error <= 1e-4 and len(measured_plan.totals) == 2
        kinds = {"dense", "gate", "ffn", "aggregate", "dispatch", "combine", "dx", "dw", "all_reduce"}
        kinds |= {"sizes"} if measured_plan.plan.overlap else set()
        assert set(measured_plan.measured.events["kind"]) == set(measured_plan.predicted.events["kind"]) == kinds
        # The measured tasks are the simulated ones, on every rank.
        labels = set(measured_plan.predicted.labels)
        assert {label for label in measured_plan.measured.labels if label != "update"} >= labels - {"update"}
        laid = compare(measured_plan.predicted, measured_plan.measured)
        assert (laid.by_kind["measured"] > 0).all() and 0 <= laid.waiting < laid.measured
        total = laid.by_kind["measured"].sum()
        assert total == pytest.approx(laid.by_layer["measured"].sum()) and total > 0
    # The same files in the run folder of a cluster's job say the same.
    where = destination("slurm", tmp_path, gpus=0)
    clusters.write(replace(launch, destination=where), tmp_path / "cluster")
    for result in (REPORT, MACHINE_TIMES, "events-0.npz", "events-1.npz"):
        shutil.copy(tmp_path / "run" / result, tmp_path / "cluster")
    whole = read_run(launch, tmp_path / "run", where.devices.cores)
    for measured_plan, other in zip(whole.runs, clusters.collect(tmp_path / "cluster").runs, strict=True):
        assert measured_plan.totals == other.totals and measured_plan.predicted.total == other.predicted.total > 0


def test_what_a_cpu_cannot_do_in_seconds_is_left_out_and_said(monkeypatch):
    plan = plan_by("raf", steps.top_one_problem())
    whole = steps.prepare_step(plan)
    monkeypatch.setattr(prepare, "FLOP_BUDGET", 1.0)
    least = steps.prepare_step(plan)
    # An expert's buffer keeps a row.
    assert (least.instructions.step.batch, least.instructions.step.sequence_length) == (1, 4)
    text = {check.name: check.text for check in least.checks}
    assert "1 × 4 tokens on each rank instead of 4 × 8" in text["Step"]
    assert all("instead" not in check.text for check in whole.checks)


def test_what_makes_no_sense_is_refused_in_a_line():
    plan = plan_by("raf", steps.top_one_problem())
    provenance = plan.provenance.model_copy(update={"inputs": {"graph": "0" * 64}})
    inference = plan.model_copy(update={"priority": None, "pipeline": None, "overlap": None})
    for asked, more, says in (
        (plan, {"ranks": 3}, "between 1 and 2"),
        (plan, {"repeats": 0}, "0 timed passes"),
        (plan, {"limit": float("nan")}, "time limit"),
        (plan, {"dtype": "fp8"}, "fp32 or bf16"),
        (plan, {"workload": ExpertLoad("other", balanced_load(steps.TOP_ONE_MODEL).load[:1], (1,))}, "other"),
        (plan.model_copy(update={"provenance": provenance}), {}, "imported operators"),
        (inference, {}, "for inference"),
    ):
        assert says in refusal(steps.prepare_step, asked, **more)
    (failed,) = [check for check in steps.prepare_step(plan, devices=Devices((), (), 2, 1e5)).checks if not check.passed]
    assert failed.name == "Memory" and "smaller step" in failed.text


@pytest.mark.usefixtures("warm_python")
def test_recorded_routing_is_replayed(tmp_path):
    step = steps.TOP_ONE_STEP.model_copy(update={"routing": "recorded"})
    experts = np.random.default_rng(3).integers(0, 4, (40, 2, 1)).astype(np.int16)
    trace = RoutingTrace("recorded", experts, 4)
    cluster = cluster_presets()["lancet-p3dn-2-nodes"].cluster.part([0, 8])
    problem = make_problem(trace, cluster, steps.TOP_ONE_MODEL, Datasheet(), step=step)
    launch = steps.prepare_step(plan_by("lancet", problem), step=step, workload=trace, repeats=1)
    (measured_plan,) = run_here(launch, tmp_path / "run", never, silent).runs
    assert 0 <= measured_plan.difference.error <= 1e-4


def test_a_model_in_fp16_is_computed_in_a_format_that_is_chosen_or_usual():
    plan, half = plan_by("raf", steps.top_one_problem()), steps.TOP_ONE_MODEL.model_copy(update={"dtype": "fp16"})
    gpus = Devices(("H200",) * 2, (80 * 2.0**30,) * 2, 16, 256 * 2.0**30)
    for devices, dtype, computed in (
        (steps.HOST, None, "fp32"),
        (steps.HOST, "bf16", "bf16"),
        (gpus, None, "bf16"),
        (gpus, "fp32", "fp32"),
    ):
        asked = Launch((plan,), balanced_load(half), half, step=steps.TOP_ONE_STEP, dtype=dtype)
        assert prepare.prepare_training(asked, devices).instructions.model.dtype == computed


def test_a_model_that_does_not_fit_is_narrowed_and_that_is_said():
    plan = plan_by("raf", steps.top_one_problem())
    large = steps.TOP_ONE_MODEL.model_copy(update={"d_model": 4096, "d_ff": 16384})
    step = steps.TOP_ONE_STEP.model_copy(update={"dense_d_ff": 16384, "vocabulary": 50_000, "heads": 32})
    asked = Launch((plan,), balanced_load(large), large, step=step)
    launch = prepare.prepare_training(asked, steps.HOST)
    small, own = launch.instructions.model, launch.instructions.step
    assert launch.ready and (small.d_model, small.d_ff, own.dense_d_ff, own.vocabulary) == (1024, 4096, 4096, 12_500)
    assert (small.layers, small.experts, own.heads) == (large.layers, large.experts, step.heads)
    assert "rows 1,024 of 4,096 wide" in launch.smaller and "of 8.00 GiB of a host, of which 6.40 GiB (80 %)" in launch.smaller
    roomy = prepare.prepare_training(asked, replace(steps.HOST, host_memory=1000 * 2.0**30))
    assert not roomy.smaller and roomy.instructions.model.d_model == 4096


@pytest.mark.usefixtures("warm_python")
def test_a_model_with_too_many_layers_runs_with_some_of_them_and_that_is_predicted(tmp_path):
    model = steps.TOP_ONE_MODEL.model_copy(update={"layers": 9, "dense_layers": (0, 4), "d_model": 128, "d_ff": 2048})
    step = steps.TOP_ONE_STEP.model_copy(update={"routing": "recorded"})
    trace = RoutingTrace("recorded", np.random.default_rng(3).integers(0, 4, (40, 7, 1)).astype(np.int16), 4)
    cluster = cluster_presets()["lancet-p3dn-2-nodes"].cluster.part([0, 8])
    plan = plan_by("lancet", make_problem(trace, cluster, model, Datasheet(), step=step))
    asked = Launch((plan,), trace, model, step=step, repeats=1)
    (memory,) = [check for check in prepare.prepare_training(asked, steps.HOST).checks if check.name == "Memory"]
    needed = float(memory.text.split()[4])
    launch = prepare.prepare_training(asked, replace(steps.HOST, host_memory=(needed - 0.02) * 2.0**30 / USABLE))
    small, workload = launch.instructions.model, launch.workloads[0]
    assert launch.ready and (small.layers, small.dense_layers, small.d_model) == (5, (0, 2), model.d_model)
    assert (
        "5 of 9 layers (0, 1, 4, 5, 8; counted anew from 0)" in launch.smaller and "Experts and routing stay" in launch.smaller
    )
    assert (workload.experts == trace.experts[:, [0, 3, 6]]).all()
    (measured_plan,) = run_here(launch, tmp_path / "run", never, silent).runs
    assert 0 <= measured_plan.difference.error <= 1e-4 and measured_plan.plan is plan
    for timeline in (measured_plan.predicted, measured_plan.measured):
        assert set(timeline.events["layer"]) == {-1, *range(5)}
        # By which Lina's coordinator would judge a packing that was launched.
        assert all(0 < seconds < timeline.total for seconds in micro_ops(timeline))


@pytest.mark.parametrize(
    ("layers", "dense", "kept"),
    [
        (4, (), [range(4), (0, 3)]),
        (8, (0, 2, 4, 6), [range(8), (0, 1, 6, 7)]),
        (8, (1, 3, 5, 7), [range(8), (0, 5, 6, 7)]),
        (6, (0, 1, 2), [range(6)]),
        (7, (), [range(7), (0, 3, 6)]),
    ],
)
def test_layers_that_are_kept_are_spread_and_have_their_dense_ones(layers, dense, kept):
    model = MODEL.model_copy(update={"layers": layers, "dense_layers": dense})
    assert list(parts_of_layers(model)) == [tuple(own) for own in kept]


def test_a_plan_keeps_the_cuts_and_overlaps_of_the_layers_that_are_left():
    model = MODEL.model_copy(update={"layers": 5, "dense_layers": ()})
    whole = plan_of(
        linear_placement(problem(model)),
        pipeline=Pipeline(forward=(1, 2, 3, 4, 5), backward=(5, 4, 3, 2, 1)),
        overlap=Overlap(
            ranges=(
                PartitionRange(first="0.qkv", last="1.gate", parts=2),
                PartitionRange(first="1.dispatch", last="1.combine", parts=2),
                PartitionRange(first="1.aggregate", last="head", parts=4),
            ),
            under={
                "dw.head": "dx.4.combine",
                "dw.4.qkv": "dx.3.combine",
                "dw.2.qkv": "dx.1.dispatch",
                "dw.1.qkv": "dx.0.combine",
                "dw.0.qkv": "dx.0.combine",
            },
        ),
    )
    forward = [operator.name for operator in transformer_step(model, STEP, RANKS).of_phase("forward")]
    small = of_layers(whole, (0, 2, 4), forward)
    assert small.placement.model_layers == (0, 1, 2) and small.parent == whole.id
    assert small.placement.experts_of_gpu == whole.placement.experts_of_gpu[::2]
    assert small.pipeline == Pipeline(forward=(1, 3, 5), backward=(5, 3, 1))
    assert [(cut.first, cut.last, cut.parts) for cut in small.overlap.ranges] == [
        ("0.qkv", "0.residual_2", 2),
        ("1.layer_norm_1", "head", 4),
    ]
    assert small.overlap.under == {
        "dw.head": "dx.2.combine",
        "dw.2.qkv": "dx.1.combine",
        "dw.1.qkv": "dx.0.dispatch",
        "dw.0.qkv": "dx.0.combine",
    }


def test_folding_keeps_all_to_alls_of_packed_experts_or_says_how_many_ranks_do():
    packed = Placement(
        experts=4, experts_of_gpu=(tuple(((0, 1), (2, 3))[gpu % 2] for gpu in range(8)),) * 2, model_layers=(1, 2)
    )
    plan = plan_of(packed)

    def on(ranks: int | None) -> PreparedLaunch:
        asked = Launch((plan,), balanced_load(steps.TOP_ONE_MODEL), steps.TOP_ONE_MODEL, step=steps.TOP_ONE_STEP, ranks=ranks)
        return prepare.prepare_training(asked, steps.HOST)

    for ranks, held in ((2, [(0, 1), (2, 3)]), (4, [(0, 1), (2, 3)] * 2), (None, [(0, 1), (2, 3)] * 2)):
        (folded,) = on(ranks).instructions.plans
        assert list(folded.placement.experts_of_gpu[0]) == held and expert_groups(folded.placement) == len(held) // 2
    for ranks, says in ((3, "use 2 or 4 ranks"), (1, "the only rank would hold all experts")):
        (warned,) = [check for check in on(ranks).checks if check.name == "All-to-all"]
        assert warned.warning and says in warned.text
