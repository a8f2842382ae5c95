"""A person's own model launched: the pace of its tokens under every plan, its events, and its logits and tokens beside those of
the plain model; everything that is refused before it is loaded; and its end when it is stopped or loses a rank."""

import json
import sys
import time
import weakref
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

pytest.importorskip("transformers")

from engine.cli import main
from engine.cli.launch import as_text
from engine.goal import Goal
from engine.jobs.launches import LaunchAnswer, LaunchAsk, describe_run, launch
from engine.jobs.protocol import Context
from engine.launch.own.check import Outputs, Unplanned
from engine.launch.own.run import executors_of
from engine.launch.places.devices import Devices
from engine.launch.preparation.launch import Launch, PreparedLaunch
from engine.launch.preparation.prepare import prepare
from engine.launch.rank.context import RankContext
from engine.launch.rank.difference import Difference
from engine.launch.rank.instructions import INSTRUCTIONS, OwnModel
from engine.launch.results.own import Besides, whole_exchanges, with_besides
from engine.launch.results.run import Run
from engine.launch.running import clusters
from engine.launch.running.local import run_here
from engine.launch.running.processes import WORKER, commands_of, run_processes
from engine.launch.running.torchx_application import dry_run
from engine.plan import Placement, Plan, Travel, together
from engine.recording.own_model import read_texts
from engine.result import never
from engine.runtime.checkpoint import SWITCH
from engine.runtime.describe import describe, describe_here
from engine.runtime.exchange.recorder import Recorder
from engine.runtime.generation import passes
from engine.runtime.weights import load_model
from engine.systems.base import silent
from engine.timeline import SIZES
from engine.training import balanced_load
from tests.cases.cluster_launches import destination
from tests.cases.launches import HOST
from tests.cases.plans import plan_of as plan_at
from tests.cases.processes import processes_of, ranks_of
from tests.cases.refusals import refusal
from tests.cases.testbeds import needs_testbed, nothing_left
from tests.cases.tiny_models import CONFIGS, config_of, model_of, plan_of, saved
from tests.cases.two_nodes import cluster_of

__all__ = ["nothing_left"]  # a fixture
TEXTS = ["w5 w17 w3 w40 w2", "w8 w9", "w60 w61 w62"]
NEW = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A model with a dense layer, shared experts and a tokenizer."""
    return saved(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def plans() -> tuple[Plan, ...]:
    """With replicas; and as laid out by default."""
    model = model_of("deepseek_v3")
    return plan_of(model, 2, "eplb", algorithm="eplb"), plan_of(model, 2)


@pytest.fixture(scope="module")
def prepared(folder, plans) -> PreparedLaunch:
    return prepare(asked(folder, plans), HOST)


@pytest.fixture(scope="module")
def ran(launch_once, prepared) -> Run:
    return launch_once(prepared)


def asked(folder: Path, plans: tuple[Plan, ...], prompts=TEXTS, new_tokens: int = NEW, **more) -> Launch:
    texts = read_texts(folder, prompts, new_tokens)
    own = OwnModel(folder=str(folder), prompts=texts.ids, new_tokens=new_tokens)
    return Launch(plans, balanced_load(texts.model), texts.model, own=own, **{"ranks": 2, "repeats": 2} | more)


def described(run: Run) -> LaunchAnswer:
    """The answer as it comes out of a job's folder."""
    return LaunchAnswer.from_dict(json.loads(json.dumps(describe_run(run).model_dump(mode="json"))), "answer")


# A whole launch.


def test_the_checks_say_what_will_run(prepared):
    assert prepared.ready and prepared.tokens == 10 + 3 * NEW and not prepared.workloads
    text = {check.name: check.text for check in prepared.checks}
    assert "3 of 2 to 5 tokens, dealt to 2 ranks in turn, and 4 new tokens of each" in text["Texts"]
    assert "2 tokens of padding" in text["Texts"] and "2 timed passes of each of 2 plans" in text["Texts"]
    assert "experts that a rank holds under any of the 2 plans, loaded once" in text["Weights"]
    assert text["Numbers"].startswith("fp32. Logits are compared with those of the model without a plan")
    assert "DeepseekV3ForCausalLM" in text["Model"]


def test_logits_and_tokens_are_the_plain_models_under_every_plan(ran, plans):
    assert [run.plan for run in ran.runs] == list(plans)
    for run in ran.runs:
        assert 0 < run.difference.error < 1e-5 and run.difference.allowed == 1e-4
        assert run.generated.same_tokens is True


def test_the_pace_is_that_of_the_timed_passes(ran):
    for run in ran.runs:
        assert len(run.generated.passes) == len(run.totals) == 2
        for pace, total in zip(run.generated.passes, run.totals, strict=True):
            assert 0 < pace.prefill_seconds < total
            assert pace.prefill_seconds + (NEW - 1) * pace.token_seconds == pytest.approx(total)
            assert pace.tokens_per_second == pytest.approx(len(TEXTS) * NEW / total)
        assert run.generated.measured in run.generated.passes
        before = run.generated.predicted
        assert before.prefill_seconds + (NEW - 1) * before.token_seconds == pytest.approx(run.predicted.total)


def test_both_timelines_have_every_step_of_every_token_on_every_rank(ran):
    labels = ("prefill", *(f"token {number}" for number in range(2, NEW + 1)))
    kinds = ("attention", "gate", SIZES, "dispatch", "ffn", "combine", "aggregate")
    wanted = {(label, kind, layer, rank) for label in labels for kind in kinds for layer in (0, 1) for rank in (0, 1)}
    wanted |= {(label, "attention", -1, rank) for label in labels for rank in (0, 1)}
    for run in ran.runs:
        for timeline in (run.predicted, run.measured):
            events = timeline.events.assign(label=timeline.labels)
            assert {(row.label, row.kind, row.layer, row.resource) for row in events.itertuples()} == wanted
            assert (events["start"] >= -1e-9).all() and (events["end"] >= events["start"]).all()
            assert (events["peer"] == -1).all()
            for label, after in pairwise(labels):
                ends, starts = (events[events["label"] == one].groupby("resource") for one in (label, after))
                assert (ends["end"].max() <= starts["start"].min() + 1e-9).all()
        for rank in (0, 1):  # on a rank nothing but an exchange overlaps
            own = run.measured.events[run.measured.events["resource"] == rank].sort_values("start")
            assert (own["end"].to_numpy()[:-1] <= own["start"].to_numpy()[1:] + 1e-9).all()


def test_bytes_on_the_wire_are_those_of_the_plan(ran):
    for run in ran.runs:
        predicted, measured = (
            timeline.events.assign(label=timeline.labels)
            .groupby(["label", "layer", "kind", "resource"], observed=True)["bytes"]
            .sum()
            .sort_index()
            for timeline in (run.predicted, run.measured)
        )
        assert measured.sum() > 0
        if run.plan.placement.single:
            pd.testing.assert_series_equal(predicted, measured, check_names=False)
        else:  # copies serve in turn, and are predicted to serve equal shares
            assert measured.sum() == pytest.approx(predicted.sum(), rel=0.1)


def test_what_is_no_moe_layer_is_predicted_as_measured_under_the_last_plan(ran):
    deployed, where = ran.runs[-1], "attention"
    measured, predicted = (
        timeline.events[timeline.events["kind"] == where].assign(seconds=lambda own: own["end"] - own["start"])["seconds"].sum()
        for timeline in (deployed.measured, ran.runs[0].predicted)
    )
    assert predicted == pytest.approx(measured, rel=1.0)  # of one of two passes, and their median
    assert deployed.plan.name in ran.own.predicted_from


def test_the_answer_survives_json_and_says_all_in_words(ran, folder, prepared):
    answer = described(ran)
    assert answer.is_of_now and answer.own.folder == str(folder) and not answer.own.random_weights
    assert (answer.own.prompts, answer.own.prompt_tokens, answer.own.new_tokens, answer.own.padded) == (3, 10, NEW, 2)
    assert answer.own.not_compared == "" and len(answer.own.predicted_memory) == len(answer.own.measured_memory) == 2
    assert answer.runs[0].generated.measured.prefill_seconds == ran.runs[0].generated.measured.prefill_seconds
    text = as_text(answer)
    for part in ("first token", "each further token", "new tokens a second", "; the same tokens", "attention and all else"):
        assert part in text
    without = replace(ran, runs=tuple(replace(run, difference=None) for run in ran.runs))
    assert "not compared with the model without a plan" in as_text(described(without))


def test_random_weights_of_a_config_and_a_rank_without_a_text(launch_once, tmp_path, plans):
    (tmp_path / "config.json").write_text(config_of("deepseek_v3").to_json_string())
    launch = prepare(asked(tmp_path, plans[:1], [[5, 17, 3]], 1, repeats=1), HOST)
    checks = {check.name: check for check in launch.checks}
    assert checks["Model"].warning and "weights are random" in checks["Model"].text
    assert "1 rank has none, and computes on a token of any kind" in checks["Texts"].text
    run = launch_once(launch)
    assert run.own.random_weights and run.runs[0].generated.measured.token_seconds is None
    assert run.runs[0].difference.error < 1e-5 and run.runs[0].generated.same_tokens
    assert "has no weights" in as_text(described(run))


@needs_testbed
def test_on_the_testbed(launch_once, folder, plans, cold_python):
    cluster = cluster_of((1, None), (1, None))
    run = launch_once(prepare(asked(folder, plans, on="testbed", cluster=cluster)))
    assert all(one.difference.error < 1e-5 and one.generated.same_tokens for one in run.runs)


# The end of a launch.


def test_stop_ends_it_within_two_seconds(prepared, tmp_path, warm_python):
    begun = []

    def report(done, message, *more) -> None:
        if "token" in message and not begun:
            begun.append(time.monotonic())

    assert "stopped" in refusal(run_here, prepared, tmp_path / "run", lambda: bool(begun), report)
    assert time.monotonic() - begun[0] < 2
    assert not processes_of(tmp_path) and not (tmp_path / "run" / INSTRUCTIONS).exists(), "the texts are kept nowhere"


def test_a_rank_that_dies_is_one_line(prepared, tmp_path, warm_python):
    killed = []

    def report(done, message, *more) -> None:
        if "token" in message and not killed:
            (victim,) = [rank for rank in ranks_of(tmp_path) if rank.environ()["RANK"] == "1"]
            killed.append(victim)
            victim.kill()

    many = prepared.instructions.model_copy(update={"repeats": 50})
    text = refusal(run_here, replace(prepared, instructions=many), tmp_path / "run", never, report)
    assert killed and text.startswith("the launch failed: rank 1 was killed by signal 9") and "\n" not in text
    assert not processes_of(tmp_path) and not (tmp_path / "run" / INSTRUCTIONS).exists(), "the texts are kept nowhere"


# Refused before anything is loaded.


def test_what_does_not_fit_is_refused_in_a_line(folder, plans, tmp_path):
    other = plan_of(model_of("olmoe"), 2)
    more = Placement(experts=9, experts_of_gpu=((tuple(range(9)), (0,)),) * 2, model_layers=(1, 2))
    launch = asked(folder, plans)
    for changed, line in (
        ({"plans": (other,)}, "places the MoE layers 0, 1, and DeepseekV3ForCausalLM has 1, 2"),
        ({"plans": (plan_at(more),)}, "places 9 experts a layer, DeepseekV3ForCausalLM has 8"),
        ({"ranks": 3}, "3 ranks: choose between 1 and 2"),
        ({"repeats": 0}, "0 timed passes"),
        ({"second": (launch.workload, launch.model)}, "your own model runs alone"),
        ({"own": launch.own.model_copy(update={"prompts": ((5, 96),)})}, "text 1 has token 96, and the model knows 96"),
        ({"own": launch.own.model_copy(update={"prompts": ((5,), ())})}, "text 2 has no tokens"),
        ({"own": launch.own.model_copy(update={"new_tokens": 125})}, "longer than the model's 128 positions"),
        ({"own": launch.own.model_copy(update={"folder": str(tmp_path)})}, "config.json"),
    ):
        text = refusal(prepare, replace(launch, **changed), HOST)
        assert line in text and "\n" not in text, changed
    assert plans[0].goal is Goal.INFERENCE


def test_memory_is_checked_before_anything_is_loaded_and_the_comparison_is_what_goes_first(tmp_path, plans):
    sizes = {"hidden_size": 512, "moe_intermediate_size": 8192, "intermediate_size": 512}
    (tmp_path / "config.json").write_text(config_of("deepseek_v3", **sizes).to_json_string())  # experts of 48 MiB, 16 of them
    launch = asked(tmp_path, plans[1:], [[5, 17, 3]], 2)

    def on(gpu: float) -> PreparedLaunch:
        devices = Devices(gpus=("H100",) * 2, memory=(gpu * 2.0**20,) * 2, cores=2, host_memory=2.0**36)
        return prepare(replace(launch, dtype="fp32"), devices)

    roomy, tight, small = on(2**16), on(16_000), on(512)
    assert roomy.instructions.own.compared and roomy.ready
    assert not small.ready and "pre-flight: memory" in refusal(small.check) and "fewer new tokens" in small.failed.text
    needed = [float(one.failed.text.split(", ")[1].split(" of ")[0]) if one.failed else 0.0 for one in (small,)]
    between = on(needed[0] * 1024 / 0.8 * 0.9)
    assert tight.ready and between.ready and not between.instructions.own.compared
    (comparison,) = [check for check in between.checks if check.name == "Comparison"]
    assert comparison.warning and "no room" in comparison.text


def test_parts_of_a_plan_that_a_live_model_does_not_follow_are_said(folder, plans):
    launch = asked(folder, (plans[1].model_copy(update={"execution": "context-coherent"}),))
    (line,) = [check for check in prepare(launch, HOST).checks if check.name == "Not followed"]
    assert line.warning and "run as vanilla" in line.text


def test_a_job_opens_listed_folders_alone(folder, plans, tmp_path, monkeypatch):
    from engine import store

    monkeypatch.delenv(SWITCH, raising=False)
    launch_asked = asked(folder, plans)
    store.save_workload(launch_asked.workload)
    ask = LaunchAsk.from_dict(launch_asked.to_arguments(), "ask")
    again = ask.launch()
    assert again.own == launch_asked.own and again.plans == plans and again.ranks == 2
    assert SWITCH in refusal(launch, ask, Context(tmp_path))


def test_a_process_without_the_libraries_asks_another_one_once(folder, tmp_path, monkeypatch, warm_python):
    here = describe_here(folder, "bf16")
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text('{"model_type": "llama"}')
    monkeypatch.delitem(sys.modules, "transformers")
    assert describe(folder, "bf16") == here and here.weights.shared < describe(folder, "fp32").weights.shared
    assert "the family 'llama' has no adapter" in refusal(describe, broken, "fp32")
    monkeypatch.setattr(sys, "executable", "none")
    assert describe(folder, "bf16") == here and "llama" in refusal(describe, broken, "fp32")


# On clusters.


def test_slurm_gets_the_folder_as_its_nodes_see_it(folder, plans, tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    inside = saved(shared / "model")
    size = {"gpus": 0, "nodes": 2}
    where = destination("slurm", shared, seen_as="/seen", **size)
    ready = prepare(asked(inside, plans, on="slurm", destination=where))
    assert ready.instructions.own.folder == "/seen/model" and ready.instructions.ranks == 2
    assert "engine.launch.worker" in dry_run(ready, shared / "run")
    assert prepare(asked(folder, plans, on="slurm", destination=where)).instructions.own.folder == str(folder)
    boxed = destination("slurm", shared, image="registry/switchyard:1", **size)
    assert "not in the shared folder" in refusal(prepare, asked(folder, plans, on="slurm", destination=boxed))


def test_results_of_a_cluster_are_read_from_its_run_folder(folder, plans, tmp_path, warm_python):
    where = destination("slurm", tmp_path, gpus=0, nodes=2)
    ready = prepare(asked(folder, plans[1:], new_tokens=2, on="slurm", destination=where, repeats=1))
    with clusters.new_run_folder(ready) as run_folder:
        assert "no report.json yet" in refusal(clusters.collect, run_folder)
        run_processes(commands_of(WORKER, 2, run_folder, None), 2, 100.0, run_folder, never, silent)
        run = clusters.collect(run_folder)
    assert run.tokens == ready.tokens and run.own.prompts == 3 and run.runs[0].generated.same_tokens


# The command.


def test_the_command_refuses_in_a_line(folder, plans, tmp_path, capsys):
    plan, texts = tmp_path / "plan.json", tmp_path / "texts.txt"
    plan.write_text(plans[0].to_json())
    texts.write_text("\n".join(TEXTS))
    of_model, of_texts = ("--model", str(folder)), ("--text", str(texts))
    for words, line in (
        (of_texts, "--model is missing"),
        ((*of_model, "--new-tokens", "3"), "--new-tokens goes with --text"),
        ((*of_model, *of_texts, "--new-tokens", "0"), "--new-tokens 0: at least one is needed"),
        ((*of_model, *of_texts, "--tokens", "9"), "--tokens does not go with --text"),
        ((*of_model, "--text", str(tmp_path / "none.txt")), "none.txt: there is no such file"),
        (("--model", str(tmp_path), *of_texts), "a model's folder has a config.json"),
        (
            (*of_model, *of_texts, "--new-tokens", "129"),
            "129 new tokens of each text do not fit into the model's 128 positions",
        ),
    ):
        assert main(["launch", str(plan), *words]) == 2, words
        assert line in capsys.readouterr().err, words
    assert main(["launch", "linear", *of_model, *of_texts]) == 2
    assert "linear: a bare placement needs --cluster" in capsys.readouterr().err


def test_the_command_takes_a_placement_by_word_and_shows_what_slurm_would_get(folder, tmp_path, capsys):
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS))
    (tmp_path / "cluster.json").write_text(cluster_of((1, None), (1, None)).model_dump_json())
    words = ["--on", "slurm", "--gpus-per-node", "0", "--nodes", "2", "--ranks-per-node", "1", "--shared", str(tmp_path)]
    given = ["--model", str(folder), "--text", str(tmp_path / "texts.txt"), "--cluster", str(tmp_path / "cluster.json")]
    assert main(["launch", "linear", *given, *words, "--json"]) == 0
    out = json.loads(capsys.readouterr().out)
    instructions = json.loads((Path(out["folder"]) / "spec.json").read_text())
    assert instructions["own"]["new_tokens"] == 20 and instructions["plans"][0]["name"] == "linear"


# The parts.


def test_together_is_all_that_a_gpu_holds_in_any():
    first = Placement(experts=4, experts_of_gpu=(((3, 1), (0, 2)),), model_layers=(5,))
    other = Placement(experts=4, experts_of_gpu=(((0, 1, 1), (2, 3)),), model_layers=(5,))
    assert together([first, other]).experts_of_gpu == (((0, 1, 3), (0, 2, 3)),)
    assert together([first]).experts_of_gpu == (((1, 3), (0, 2)),)


def alone(folder: Path, plans: tuple[Plan, ...], new_tokens: int = 3, **more) -> RankContext:
    """The context of a rank that is the only one."""
    launch = asked(folder, plans, [[5, 17, 3], [8, 9]], new_tokens, ranks=1, **more)
    cpu = torch.device("cpu")
    return RankContext(prepare(launch, HOST).instructions, (), 0, cpu, Recorder(0, cpu))


@pytest.mark.parametrize("family", CONFIGS)
def test_every_family_is_watched_and_compared(family, tmp_path, one_rank):
    context = alone(saved(tmp_path, family), (plan_of(model_of(family), 2),), 2)
    own, (executor,) = executors_of(context)
    context.recorder.begin(0, 1)
    executor.run(lambda *_: None)
    context.recorder.end()
    layers = range(len(context.instructions.model.moe_layers))
    each = [("attention", "gate", "gate", "ffn", "aggregate")] * len(layers)
    one_pass = [(kind, layer) for layer, kinds in zip(layers, each, strict=True) for kind in kinds] + [("attention", -1)]
    assert [(event[3], event[2]) for event in context.recorder._kept] == 2 * one_pass
    planned = weakref.ref(own.model)
    assert executor.difference().error < 1e-5 and planned() is None  # which made room for the plain one
    assert own.facts()["same_tokens"] == [True]
    assert len(own.routing) == 2 and own.routing[0].shape == (6, len(layers), 2)


def test_rows_in_few_bits_may_be_as_far_off_as_the_plain_model_with_such_rows(folder, plans, one_rank):
    exact, rough = plans[1], plans[1].with_parts(travel=Travel(dispatch="fp8", combine="bf16"), claim=None)
    own, executors = executors_of(alone(folder, (exact, rough)))
    for number, executor in enumerate(executors):
        own.context.recorder.begin(number, 0)
        executor.run(lambda *_: None)
        own.context.recorder.end()
    of_exact, of_rough = (executor.difference() for executor in executors)
    assert of_exact.error < 1e-5 and of_exact.allowed == 1e-4
    assert 1e-3 < of_rough.error < of_rough.allowed and of_rough.allowed >= 0.05


def test_wrong_logits_and_other_tokens_are_found(folder, plans, one_rank):
    context = alone(folder, plans[1:])
    own = context.instructions.own
    steps = list(passes(load_model(folder), own.prompts, 3))
    tokens, logits = torch.stack([best for _, best in steps], dim=1), [step for step, _ in steps]
    unplanned = Unplanned(context)
    assert unplanned.difference(Outputs(tokens, [0, 1, 2], logits), 0).error == 0
    wrong = [*logits[:2], logits[2] + 1e-3 * logits[2].abs().max()]
    assert unplanned.difference(Outputs(tokens, [0, 1, 2], wrong), 0).share > 5
    other = tokens.clone()
    other[0, 2] += 1
    assert unplanned.difference(Outputs(other, [0, 1, 2], logits), 0).error == 0  # after it nothing is computed
    assert unplanned.same == [True, True, False]


def test_wrong_logits_of_another_rank_are_found(folder, prepared, one_rank, monkeypatch):
    cpu, own, model = torch.device("cpu"), prepared.instructions.own, load_model(folder)
    context = RankContext(prepared.instructions, (), 0, cpu, Recorder(0, cpu))
    of_ranks = []
    for rank in (0, 1):
        steps = list(passes(model, own.batch(rank, 2), NEW))
        of_ranks.append(Outputs(torch.stack([best for _, best in steps], dim=1), list(range(NEW)), [step for step, _ in steps]))

    def difference(wrong: float) -> Difference:
        sent = iter([of_ranks[1].tokens, *(logits + wrong for logits in of_ranks[1].logits)])
        monkeypatch.setattr("engine.launch.own.check.dist.recv", lambda place, rank: place.copy_(next(sent)))
        return Unplanned(context).difference(of_ranks[0], 0)

    assert difference(0.0).error == 0 and difference(0.1).share > 1


def test_in_16_bits_the_plain_model_is_computed_twice(folder, plans, one_rank):
    own, (executor,) = executors_of(alone(folder, plans[1:], dtype="bf16"))
    executor.run(lambda *_: None)
    found = executor.difference()
    off = max(own.unplanned._wanted[0].off)
    assert off > 1e-3 and found.allowed == max(0.01, 3 * off) and 0 < found.error < found.allowed


def test_a_predicted_pass_has_all_that_is_besides_its_layers():
    columns = ("resource", "stream", "start", "end", "kind", "layer", "model", "peer", "bytes")
    rows = []
    for layer, at in ((0, 0.0), (1, 10.0)):
        rows += [(rank, "compute", at, at + 1 + rank, "gate", layer, 0, -1, 0.0) for rank in (0, 1)]
        rows += [
            (0, "network", at + 2, at + 3, "dispatch", layer, 0, 1, 5.0),
            (0, "network", at + 2, at + 4, "dispatch", layer, 0, 1, 6.0),
        ]
        rows += [(rank, "compute", at + 4, at + 10, "ffn", layer, 0, -1, 0.0) for rank in (0, 1)]
    whole = whole_exchanges(pd.DataFrame(rows, columns=columns))
    sends = whole[whole["kind"] == "dispatch"].sort_values(["layer", "resource"])
    assert sends[["resource", "start", "end", "bytes", "peer"]].to_numpy().tolist()[:2] == [[0, 2, 4, 11, -1], [1, 2, 4, 0, -1]]
    others = Besides(np.array([[3.0, 1.0], [2.0, 2.0], [1.0, 4.0]]), np.array([3.0, 2.0, 4.0]))
    events = with_besides(whole, others, 0.5)
    assert events["end"].max() == 20 + 3 + 2 + 2 * 0.5 + 4
    of = dict(list(events[events["resource"] == 0].sort_values("start").groupby("kind")))
    assert of["attention"]["start"].tolist() == [0, 13.5, 26] and of["attention"]["layer"].tolist() == [0, 1, -1]
    assert of["gate"]["start"].tolist() == [3, 15.5] and of[SIZES]["start"].tolist() == [5, 17.5]
    assert of["dispatch"]["start"].tolist() == [5.5, 18]
