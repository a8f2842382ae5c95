"""`study` and `drift` answer as the pages' jobs do, and say in one line what is missing."""

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from engine import store
from engine.cli.commands import STUDIES
from engine.compare.affinity import sorted_choices
from engine.compare.baseline import baseline_of
from engine.compare.capacity import ladder, parts_of
from engine.compare.contention import exclusive_and_colocated
from engine.compare.drift import PASSES
from engine.compare.sensitivity import USUAL_VALUES
from engine.compare.sweep import usual_values
from engine.errors import InputError
from engine.formats import read_model, read_sizes
from engine.formats.writers import write_npz
from engine.jobs.kinds import HANDLERS, handler_of
from engine.jobs.tasks import ServingAsk
from engine.problem import Problem
from engine.serving.step import ServingStep
from engine.store.problems import as_json, problem_arguments
from engine.systems import SYSTEMS, run
from engine.training import usual_step
from tests.cases.cli import ALPHA
from tests.cases.problems import small
from tests.cases.samples import chained, with_memory
from tests.jobs.asking import FakeContext, in_json, strict
from tests.strategies import cluster_of, make_gpu

TIMES = ("runtime", "created")


def timeless(found):
    """An answer without the seconds that searches took."""
    if isinstance(found, dict):
        return {key: timeless(value) for key, value in found.items() if key not in TIMES}
    return [timeless(value) for value in found] if isinstance(found, list) else found


@pytest.fixture
def problem() -> Problem:
    return small()


@pytest.fixture
def inputs(problem: Problem, tmp_path: Path, own_data_folder: Path) -> list:
    """The problem's files as options, with a second recording beside them."""
    write_npz(problem.workload, tmp_path / "small.npz")
    write_npz(chained(1, 400, 3, 8, 0.8, "chains"), tmp_path / "chains.npz")
    for name in ("cluster", "model"):
        (tmp_path / f"{name}.json").write_text(getattr(problem, name).to_json())
    return ["--workload", tmp_path / "small.npz", "--cluster", tmp_path / "cluster.json", "--model", tmp_path / "model.json"]


def answered(name: str, problem: Problem, asked: dict) -> dict:
    store.save_workload(problem.workload)
    return strict(in_json(handler_of(name))(problem_arguments(problem) | asked, FakeContext()))


def plan_of(problem: Problem) -> dict:
    return as_json(baseline_of(problem))


LATENCY = {"field": "latency", "values": USUAL_VALUES["latency"], "system": None, "options": {}}
AFFINITY = {"gpus": 4, "first_choice": True, "sizes": [50, 100], "seeds": 1, "time_limit": 0.1}
NOISE = {"levels": [0.5], "seeds": 1, "noise": "layers", "options": {"aurora": {"time_limit": 60}}}
FRONT = {"points": 3, "over": "worst", "max_moves": 0, "time_limit": 0.1}
LINA = {"lengths": [1], "options": {"batch_tokens": 100, "copies": 64}}
CASES = {
    "affinity": (["sizes=50,100", "seeds=1", "time_limit=0.1"], lambda problem: AFFINITY),
    "sensitivity": (["share=0.1"], lambda problem: {"plan": plan_of(problem), "share": 0.1}),
    "contention": ([], lambda problem: {"plan": plan_of(problem)}),
    "imprecision": (["levels=0.5", "seeds=1", "time_limit=60"], lambda problem: NOISE),
    "curve": (["field=latency", "system=null"], lambda problem: {"plans": [plan_of(problem)]} | LATENCY),
    "capacity": (["target=0.01", "system=linear"], lambda problem: capacity_of(problem)),
    "replan": (
        ['change={"network": 2}', "system=linear"],
        lambda problem: {"change": {"network": 2}, "system": "linear", "options": {}, "parent": baseline_of(problem).id},
    ),
    "front": (["points=3", "time_limit=0.1"], lambda problem: FRONT),
    "matrix": (["system=linear"], lambda problem: {"recordings": [problem.workload.digest], "system": "linear", "options": {}}),
    "lina": (
        ["lengths=1", "batch_tokens=100"],
        lambda problem: {"lengths": [1], "options": {"batch_tokens": 100, "copies": 64}},
    ),
}
"""By study: settings, and the question that the page asks with them."""


def capacity_of(problem: Problem) -> dict:
    ((title, part),) = parts_of(problem.cluster).items()
    sizes = ladder(problem.cluster, part)
    asked = {"part": [as_json(node) for node in part], "title": title, "target": 0.01, "sizes": sizes}
    return asked | {"system": "linear", "options": {}}


@pytest.mark.parametrize("name", CASES)
def test_a_study_answers_as_its_job(name: str, engine, inputs, problem: Problem) -> None:
    settings, asked = CASES[name]
    words = ["study", name, *inputs, *(word for setting in settings for word in ("--set", setting))]
    assert timeless(engine.json(*words)) == timeless(answered(name, problem, asked(problem)))


def test_a_study_times_a_whole_serving_step_as_its_job_does(engine, inputs, problem: Problem, tmp_path: Path) -> None:
    step = ServingStep(phase="decode", sequences=8, context=100, output=10)
    (tmp_path / "step.json").write_text(step.to_json())
    model, config = problem.model, tmp_path / "config.json"
    sizes = {"hidden_size": model.d_model, "num_hidden_layers": model.layers, "num_experts": model.experts}
    config.write_text(json.dumps(ALPHA | sizes))
    served = [*inputs, "--serving", tmp_path / "step.json", "--config", config]
    found = engine.json("study", "sensitivity", *served)
    serving = as_json(ServingAsk(step=step, sizes=read_sizes(config), config=config))
    asked = {"plan": plan_of(problem), "share": 0.25, "serving": serving}
    assert found == answered("sensitivity", problem, asked) and found["phase"] == "decode"
    assert "times no serving step" in engine.refused("study", "front", *served)


def test_every_study_of_the_pages_has_a_command() -> None:
    elsewhere = {"optimise", "launch", "calibrate", "verdict", "redundancy", "drift", "size", "reproduce", "record"}
    assert set(STUDIES) == set(HANDLERS) - elsewhere | {"utilisation"} == {*CASES, "sweep", "utilisation", "deployments"}
    assert sorted_choices(small().workload) is False


def test_a_sweep_is_over_a_training_step(engine, inputs, problem: Problem) -> None:
    step = replace(problem, step=usual_step(problem.model, 4).model_copy(update={"routing": "recorded"}))
    words = ["study", "sweep", *inputs, "--training", "usual", "--set", "kind=degree", "--set", "orders=interleaved"]
    found = engine.json(*words, "--set", "values=1,2")
    wanted = {"kind": "degree", "values": [1, 2], "settings": {"orders": ["interleaved"]}}
    assert [row["point"]["value"] for row in found["candidates"]] == [1, 2, None]
    assert timeless(found) == timeless(answered("sweep", step, {"sweep": wanted}))
    assert usual_values("micro_op", step)[0] == 1 and usual_values("range", step)[0] == 0


def test_utilisation_is_of_a_plan_for_two_models(engine, inputs, problem: Problem, tmp_path: Path) -> None:
    pair = replace(problem, second=problem)
    plan = run(SYSTEMS["linear"], pair).result.solution
    (tmp_path / "two.json").write_text(plan.to_json())
    words = [
        "study",
        "utilisation",
        "--plan",
        tmp_path / "two.json",
        *inputs,
        "--workload-b",
        inputs[1],
        "--model-b",
        inputs[5],
    ]
    found = engine.json(*words)["models"]
    parts = exclusive_and_colocated(plan, pair).parts
    assert [row["seconds"] for row in found] == [part.seconds for part in parts]
    assert [row["mean"] for row in found] == [part.mean for part in parts] and len(found[0]["gpu"]) == 4
    assert "both colocated" in engine.text(*words)
    assert "one plan for two models" in engine.refused("study", "utilisation", *inputs)


@pytest.fixture
def deployments(tmp_path: Path) -> list:
    """A question for the cheapest deployments, in words, without a target."""
    (tmp_path / "config.json").write_text(json.dumps(ALPHA))
    words = ["study", "deployments", "--model", tmp_path / "config.json", "--prompt", 100, "--output", 50]
    return [*words, "--price", "h200=3", "--price", "B300=6", "--most", 4]


def test_the_cheapest_deployments_answer_as_their_job(engine, deployments: list, tmp_path: Path) -> None:
    found = engine.json(*deployments, "--target", "5 ms a token", "--set", "engines=sglang", "--set", "formats=bf16,fp8")
    config = tmp_path / "config.json"
    model, sizes = read_model(config), read_sizes(config)
    asked = {"model": as_json(model), "sizes": as_json(sizes), "checkpoint": model.name, "prompt": 100, "output": 50, "most": 4}
    asked |= {"target": "5 ms a token", "engines": ["sglang"], "formats": ["bf16", "fp8"], "prices": {"H200": 3, "B300": 6}}
    assert found == strict(in_json(handler_of("deployments"))(asked, FakeContext()))
    assert {row["deployment"]["engine"] for row in found["points"]} == {"sglang"}

    text = engine.text(*deployments, "--target", "9 ms a token")
    best = [row for row in found["points"] if row["best"]]
    lines = text.splitlines()
    assert best and " tokens/s a GPU, $" in lines[0] and lines[2].split()[:2] == ["GPUs", "engine"]
    assert " reaches beyond the target" in text
    assert "note: weights are bf16 as the checkpoint's" in text and "was never measured" in text
    assert "left out, B300-SXM: 3 engine modes never measured on it" in text
    nothing = engine.text(*deployments, "--target", "0.1 ms a token")
    assert nothing.startswith("no deployment is predicted to meet the target") and "; the nearest takes " in nothing


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--price H9000=1", "study deployments: prices: no GPU type 'H9000'; known are "),
        ("--price H200=much", "--price H200=much: write a number, such as H200=3.5"),
        ("--price h200=4", "--price h200=4: give every GPU type one price"),
        ("--price H200=4", "study deployments: prices: H200 has two prices; give it one"),
        ("--price B200", "--price B200: write KEY=VALUE"),
        ("--price B200=-1", "the price of B200 must be above 0 and at most 1e9 an hour, not -1"),
        ("--target fast", "'fast' is not understood; write such as '20 ms a token'"),
        ("--set users=5", "study deployments has no 'users' to --set (it has: formats, engines, extrapolate, currency)"),
        ("--set formats=fp3", "study deployments: formats"),
        ("--set engines=llama", "no engine 'llama' was measured; known are sglang, trtllm, vllm"),
        ("--also x.npz", "study deployments needs no --also; leave it out"),
        ("--plan x.json", "study deployments needs no --plan; leave it out"),
        ("--model nobody/knows-it", "no packaged model is called nobody/knows-it; name its config.json with --config"),
        ("--prompt 0", "--prompt is missing: a number of tokens"),
    ],
)
def test_deployments_that_cannot_be_asked_for_are_refused_in_a_line(words: str, said: str, engine, deployments: list) -> None:
    assert said in engine.refused(*deployments, *words.split())


def test_options_of_deployments_are_of_no_other_study(engine, inputs) -> None:
    assert "--price is for study deployments" in engine.refused("study", "contention", *inputs, "--price", "H200=3")
    assert "--model is missing: its config.json, or its name" in engine.refused("study", "deployments", "--price", "H200=3")


def test_answers_in_words(engine, inputs, tmp_path: Path) -> None:
    also = ["--also", tmp_path / "chains.npz"]
    said = {
        "affinity --set sizes=50 --set seeds=1 --set time_limit=0.1": "no placement keeps more than",
        "contention": "as things are",
        "curve --set field=network --set values=1,2 --set system=null": "Linear placement",
        "capacity --set target=0.01 --set system=linear --set sizes=1": "built from 2 × type-0",
        "matrix --set system=linear": "chains",
    }
    for words, text in said.items():
        assert text in engine.text("study", *words.split(), *inputs, *(also if words[0] in "am" else [])), words
    inputs[3].write_text(cluster_of(make_gpu()).to_json())
    assert "ordering changes nothing here; orders save at most 0.0 % as things are" in engine.text(
        "study", "contention", *inputs
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("capacity", "study capacity needs --set target=…"),
        ("curve --set field=width --set values=a,b", "study curve: values → 0: Input should be a number (and 1 more)"),
        ("affinity --set sizes=0", "every sample needs a size of at least one token"),
        ("capacity --set target=1 --set system=best-of-all", "'best-of-all' does not plan inference; those that do: aurora, "),
        ("matrix --set system=lancet", "'lancet' does not plan inference"),
        ("curve --set field=latency --set system=lancet", "'lancet' does not plan"),
        ("replan --set change={} --set system=lancet", "'lancet' does not plan"),
        ("capacity --set target=1 --set title=half", "the cluster has no part 'half'"),
        ("contention --set noise=1", "study contention has no 'noise' (it has: none)"),
        ("curve --set field=colour --set system=null", "study curve: field: Input should be"),
        ("sensitivity --set share", "--set share: write KEY=VALUE"),
        ("front --set points=many", "study front: points"),
        ("matrix --set system=linear --set redundant=1", "redundant"),
    ],
)
def test_what_cannot_be_studied_is_refused_in_a_line(words: str, said: str, engine, inputs) -> None:
    assert said in engine.refused("study", *words.split(), *inputs)


def test_a_study_that_was_stopped_says_so_and_no_more_than_it_knows(engine, inputs, monkeypatch) -> None:
    told = []
    monkeypatch.setattr("engine.cli.study.progress", lambda: nullcontext(lambda *of: told.append(of)))
    monkeypatch.setattr("engine.cli.study.stopped_by_signals", lambda: nullcontext(lambda: len(told) > 4))
    said = engine.text("study", "contention", *inputs)
    assert said.endswith("\nstopped: these are the answers so far\n") and "from where on ordering pays is not known" in said
    assert "never pays" not in said


def test_a_plan_is_kept_where_knobs_cannot_be_turned_from_what_is_deployed(engine, inputs, problem: Problem, tmp_path) -> None:
    inputs[3].write_text(with_memory(problem, [8, 1, 1, 1]).cluster.to_json())
    words = ["plan", *inputs, "--system", "linear", "--set", "slots=uneven", "--waterfall", "-o", tmp_path / "kept.json"]
    code, out, err = engine(*words)
    assert code == 0 and "Linear placement" in out and (tmp_path / "kept.json").exists()
    assert "the knobs cannot be turned from what is deployed, see --in-use: 8 experts per layer do not fit" in err
    again = engine(*words[:-2], "--in-use", tmp_path / "kept.json")
    assert again[0] == 0 and "Uneven experts" in again[1]


def test_drift_answers_as_its_job_and_its_table_ranks_policies(engine, inputs, problem: Problem, tmp_path) -> None:
    words = ["drift", *inputs, "--parts", 3, "--system", "eplb", "--set", "algorithm=eplb"]
    found = engine.json(*words)
    asked = {"recordings": [problem.workload.digest], "parts": 3, "system": "eplb", "options": {"algorithm": "eplb"}}
    job = answered("drift", problem, asked)["drift"]
    assert {key: found[key] for key in job} == job and job["passes"] == PASSES and len(job["windows"]) == 2
    assert found["best"] == job["policies"][0]["name"] and found["best"] in found["sentence"]
    assert found["limit"] <= job["policies"][0]["total"] <= min(found["never"], found["always"])
    text = engine.text(*words, "--deployed", "linear", "--passes", 2)
    assert "deployed at first: linear; 2 passes a window" in text and "never move" in text and "limit: " in text
    several = engine.json("drift", *inputs[:2], tmp_path / "chains.npz", inputs[1], *inputs[2:], *words[-4:])
    assert [window["name"] for window in several["windows"]] == ["chains", "small"], "in the order given"
    with pytest.raises(InputError, match="one recording is cut into windows; 2 were given"):
        answered("drift", problem, asked | {"recordings": asked["recordings"] * 2})
    with pytest.raises(InputError, match="by one of aurora, "):
        answered("drift", problem, asked | {"system": "lancet"})


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--system", "eplb"], "3 to 64 windows, not 1"),
        (["--system", "lancet", "--parts", "3"], "lancet does not plan inference of one model"),
        (["--system", "eplb", "--training", "usual"], "inference of one model"),
        (["--system", "eplb", "--parts", "3", "--set", "seedling=1"], "seedling"),
    ],
)
def test_what_is_no_history_is_refused_in_a_line(more: list[str], said: str, engine, inputs) -> None:
    assert said in engine.refused("drift", *inputs, *more)
