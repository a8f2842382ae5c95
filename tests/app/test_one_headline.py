"""One plan, one set of numbers: time, tokens/s, gain and payback of a serving plan on every page, in the report, in the list of
saved plans and by the command line; and the phases of recordings."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from streamlit.testing.v1 import AppTest

from app.review import report
from engine import store, units
from engine.catalogue import cluster_presets
from engine.compare.held_out import of_phase, phase_of
from engine.compare.standing import Migration, Risk, Standing
from engine.plan import Plan
from engine.serving.step import ServingStep
from engine.store import team
from engine.store.database import database
from engine.workload import DECODE, PREFILL, ExpertLoad, RoutingTrace
from tests.cases.cli import ALPHA, CommandLine
from tests.cases.pages import finished, gain, metrics, pick, press, put, run, run_the_job, said, titles, visit
from tests.cases.reviews import save, table
from tests.cases.sessions import JOB, open_plan

pytestmark = pytest.mark.usefixtures("warm_python")

STEP = ServingStep(phase="decode", sequences=4000, context=10, output=10)
LAYERS, EXPERTS = 8, 16


def recording(name: str, seed: int) -> ExpertLoad:
    """Popular experts that differ a little from recording to recording."""
    popular = np.random.default_rng(1).pareto(1.2, (LAYERS, EXPERTS)) + 0.2
    noise = np.random.default_rng(seed).lognormal(0, 0.35, (LAYERS, EXPERTS))
    return ExpertLoad(name, np.round(40_000 * popular * noise), tuple(range(LAYERS)))


RECORDINGS = [recording(name, seed) for seed, name in enumerate(("decode_mon", "decode_tue", "decode_wed", "prefill_mon"))]


@dataclass(frozen=True)
class Files:
    """The same inputs for the command line."""

    folder: Path
    plan: Plan

    def arguments(self, app: AppTest) -> list[object]:
        (self.folder / "plan.json").write_text(self.plan.to_json())
        (self.folder / "cluster.json").write_text(app.session_state["cluster"].to_json())
        (self.folder / "model.json").write_text(app.session_state["model"].to_json())
        (self.folder / "config.json").write_text(json.dumps(ALPHA))
        (self.folder / "step.json").write_text(STEP.to_json())
        options: list[object] = [self.folder / "plan.json"]
        for each in RECORDINGS:
            np.savez(self.folder / f"{each.name}.npz", load=each.load)
            options += ["--workload", self.folder / f"{each.name}.npz"]
        for name in ("cluster", "model", "config"):
            options += [f"--{name}", self.folder / f"{name}.json"]
        return [*options, "--serving", self.folder / "step.json"]


@pytest.fixture
def served(sample: AppTest, tmp_path: Path) -> AppTest:
    """A session with a decode step as its goal, four recordings, and a plan made of the first."""
    cluster = cluster_presets()["lancet-p3dn-2-nodes"].cluster
    path = tmp_path / "config.json"
    path.write_text(json.dumps(ALPHA))
    digests = {store.save_workload(each): each.name for each in RECORDINGS}
    values = {"workloads": digests, "workload": RECORDINGS[0].digest, "cluster": cluster.part(list(range(8)))}
    model = sample.session_state["model"].digest
    values |= {"serving": STEP, "servings": {model: STEP}, "configs": {model: store.save_config(path)}, "person": "Ana"}
    for name, value in values.items():
        sample.session_state[name] = value
    sample.plan = open_plan(sample, "eplb", {"redundant": 8}, JOB)
    return sample


LINE = {"Simulated time per token": "seconds", "Tokens/s per GPU": "per GPU", "In all": "in all", "Per user": "per user"}


def line(app: AppTest) -> dict[str, str]:
    return gain(app) | {name: value for name, value in metrics(app).items() if name in LINE}


def test_every_page_file_and_command_has_the_same_numbers(
    served: AppTest, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = CommandLine(capsys).json("verdict", *Files(tmp_path, served.plan).arguments(served))
    told = answer["headline"]
    assert told["scope"] == "held out" and told["span"] == "token" and told["gain"] == pytest.approx(answer["gain_held_out"])
    assert [part["part"] for part in answer["parts"]] == ["decode_tue", "decode_wed"], "prefill does not judge a decode step"
    assert told["payback_steps"] == pytest.approx(answer["break_even_steps"]) and told["lowest"] < told["highest"]
    wanted = {
        "Gain over Linear placement, held out": units.signed(told["gain"]),
        "Simulated time per token": units.seconds(told["seconds"]),
        "Tokens/s per GPU": units.digits(told["tokens_per_second_per_gpu"]),
        "In all": units.digits(told["tokens_per_second"]),
        "Per user": units.digits(told["tokens_per_second_per_user"]),
    }
    spread = f"{units.signed(told['lowest'])} to {units.signed(told['highest'])} on 2 recordings"
    beside = f"{wanted['Simulated time per token']} · {wanted['Gain over Linear placement, held out']} held out"
    payback = f"pays back after {units.digits(np.ceil(told['payback_steps']))} steps"
    for page in ("optimise", "timeline", "what_if", "launch"):
        visit(served, page)
        assert line(served) == wanted, page
        assert spread in said(served.caption) and beside in said(served.caption), page
        assert payback in next(metric.help for metric in served.metric if metric.label == "Moves"), page

    team.add_workspace(database(), "Autumn", "Ana")
    visit(served, "review")
    saved = save(served, "ours", question="")
    reports = []
    monkeypatch.setattr("app.review.report.html", lambda dossier, made=report.html: reports.append(made(dossier)) or "")
    for judged in (False, True):
        if judged:
            press(served, "Judge this plan")
            finished("verdict")
            run(served)
            assert metrics(served)["Gain held out"] == units.signed(told["gain"])
            assert f"after {metrics(served)['Pays back after']}" in payback
        put(served, report=True)
        assert line(served) == wanted and spread in said(served.caption)
        assert f"it {payback}" in said(served.markdown) and "Nothing was held out" not in said(served.markdown)
        assert all(f"<dd>{value}</dd>" in reports[-1] for value in wanted.values())
        assert payback in reports[-1] and "Nothing was held out" not in reports[-1]
        press(served, "Show the list alone")
        assert table(served)["Gain"].tolist() == pytest.approx([1 + told["gain"]])
        served.session_state["reviewed"] = (saved.number, None)
        visit(served, "review")


def test_a_figure_follows_its_inputs_on_every_page(served: AppTest) -> None:
    before = line(visit(served, "timeline"))
    put(served, cost={"source": "datasheet", "compute_efficiency": 0.3, "memory_efficiency": 0.3})
    after = line(visit(served, "timeline"))
    assert after["Simulated time per token"] != before["Simulated time per token"]
    for page in ("optimise", "what_if", "launch"):
        assert line(visit(served, page)) == after, page
        assert after["Simulated time per token"] in said(served.caption)


def test_the_sliders_of_what_if_forecast_the_whole_step(served: AppTest) -> None:
    visit(served, "what_if")
    time = line(served)["Simulated time per token"]
    assert any(time in chart.proto.alt for chart in served.get("plotly_chart"))
    assert "The whole step is simulated" in said(served.caption)
    next(slider for slider in served.select_slider if slider.label == "Computation speed").set_value(2.0)
    run(served)
    assert any(f"instead of {time}" in chart.proto.alt for chart in served.get("plotly_chart"))


def test_the_sensitivity_and_the_sweep_of_what_if_are_of_the_whole_step(served: AppTest) -> None:
    visit(served, "what_if")
    now = line(served)
    assert "MoE layers alone" not in said(served.caption)
    pick(served, "what-if-study", "sensitivity")
    found = run_the_job(served, "Run the sensitivity study", "sensitivity").result
    assert units.seconds(found["total"]) == now["Simulated time per token"] and found["phase"] == "decode"
    assert units.digits(found["rate"]) == now["Tokens/s per GPU"]
    assert [point["title"] for point in found["points"]][:2] == ["network bandwidth", "computation speed"]
    assert titles(served, "what-if-tornado")[0].startswith("Time per token: ")

    pick(served, "what-if-study", "curve")
    served.checkbox(key="what-if-anew").uncheck().run()
    found = run_the_job(served, "Run the sweep", "curve").result
    times = {point["value"]: point["total"] for point in found["points"] if point["series"] == served.plan.name}
    assert units.seconds(times[1.0]) == now["Simulated time per token"]
    assert [times[value] for value in sorted(times)] == sorted(times.values(), reverse=True)
    assert titles(served, "what-if-curve")[0].startswith("Time per token: ")
    other = STEP.model_copy(update={"sequences": 2000})
    put(served, serving=other, servings={served.session_state["model"].digest: other})
    assert not titles(served, "what-if-curve"), "it was of another step"


def test_without_others_a_gain_is_called_in_sample(served: AppTest) -> None:
    put(served, workloads={RECORDINGS[0].digest: RECORDINGS[0].name})
    shown = line(visit(served, "timeline"))
    assert any(name == "Gain over Linear placement, in sample" for name in shown) and "held out" not in " ".join(shown)
    put(served, workloads={each.digest: each.name for each in (RECORDINGS[0], RECORDINGS[3])})
    assert "on prefill_mon of prefill" in said(visit(served, "timeline").caption), (
        "the other phase is better than none, but said"
    )


def test_phases_are_read_from_tokens_or_names() -> None:
    named = {
        "decode_in2000": "decode",
        "r1-prefill.2": "prefill",
        "Decode": "decode",
        "predecoded": None,
        "prefill_decode": None,
    }
    assert {name: phase_of(recording(name, 0)) for name in named} == named
    experts = np.zeros((4, 2, 1), np.int16)
    for phases, wanted in ((DECODE, "decode"), (PREFILL, "prefill"), ((0, 1, 1, 1), None)):
        trace = RoutingTrace("prefill", experts, 4, phase=np.broadcast_to(np.array(phases, np.int8), 4).copy())
        assert phase_of(trace) == wanted
    names = [each.name for each in of_phase(RECORDINGS, "prefill", lambda each: each)]
    assert names == ["prefill_mon"] and len(of_phase(RECORDINGS[:3], "prefill", lambda each: each)) == 3


def test_a_headline_in_words() -> None:
    move = Migration(copies=3, bytes=3e6, seconds=1.0, bound=1.0, steps=20.0)
    times = {"seconds": 1.0, "deployed_seconds": 2.0, "tokens_per_second": 4.0, "bound": 0.5, "bound_covers": ""}
    plan = {"plan": "new", "deployed": "old", "is_deployed": False, "span": "pass", "move": move, "gpus": 8}
    in_sample = Standing(**plan, **times, risks=())
    assert in_sample.gain == 2 and in_sample.gain_words == "+100.0 % in sample" and in_sample.tokens_in_all == 32
    assert in_sample.payback == "after 20 passes, 20 s" and in_sample.tokens_per_user is None
    held = Standing(**plan, **times, risks=(Risk("a", 1.0, 1.1), Risk("b", 1.0, 1.3)))
    assert held.gain == pytest.approx(1.2) and held.gain_words == "+20.0 % held out (+10.0 % to +30.0 % on 2 recordings)"
    even = Standing(**plan, **times, risks=(Risk("a", 1.0, 1.2), Risk("b", 1.0, 1.2)))
    assert even.gain_words == "+20.0 % held out (+20.0 % on each of 2 recordings)"
    assert held.against == "+20.0 % over old, held out"
    assert Standing(**plan, **times, risks=None, recorded=False).gain_words == "+100.0 %"
