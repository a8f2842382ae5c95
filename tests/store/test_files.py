"""Files of the data folder: kept by digest, found again, private to their owner."""

import json
import os
import stat
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from app.state.stored import Session, write
from engine import store
from engine.catalogue import cluster_presets, model_presets
from engine.cluster import Cluster
from engine.compare.figures import Metrics, Migration, metrics
from engine.costs import Datasheet
from engine.errors import InputError
from engine.files import write_atomically
from engine.jobs import runner, tasks
from engine.jobs.protocol import Context
from engine.model import MoEModel
from engine.plan import Plan
from engine.problem import Problem, make_problem
from engine.provenance import metrics_digests, simulation_digest
from engine.serving.roofline import RooflineOperators
from engine.serving.sizes import usual_sizes
from engine.serving.step import ServingStep
from engine.simulate import events, simulate
from engine.simulate.serving import serve
from engine.store import served
from engine.store.database import database
from engine.store.problems import problem_arguments
from engine.systems import SYSTEMS, run
from engine.workload import ExpertLoad, RoutingTrace, TrafficMatrix
from tests.jobs.asking import in_json

rng = np.random.default_rng(5)
EXPERTS = rng.integers(-1, 6, (20, 3, 2), dtype=np.int16)
SEQUENCE = np.repeat(np.arange(4, dtype=np.int32), 5)

MIXED = cluster_presets()["mixed-8"].cluster
WORKLOADS = {
    "trace": RoutingTrace("a trace", EXPERTS, 6),
    "trace with columns": RoutingTrace("späť", EXPERTS, 8, SEQUENCE, SEQUENCE % 2),
    "loads": ExpertLoad("loads", rng.random((3, 6)), (1, 2, 5)),
    "traffic": TrafficMatrix("traffic", rng.random((2, 4, 4)), 256.0),
}


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS)
def test_a_recording_comes_back_as_it_was(workload, own_data_folder):
    digest = store.save_workload(workload)
    assert store.save_workload(workload) == digest, "saving twice keeps one file"
    back = store.load_workload(digest)
    assert type(back) is type(workload) and back is not workload
    for part in ("name", "layers", "num_experts", "k", "model_layers", "bytes_per_token"):
        assert getattr(back, part, None) == getattr(workload, part, None)
    assert digest == workload.digest == back.digest, "of all arrays"
    assert [path.name for path in own_data_folder.rglob("*") if path.is_file()] == [f"{digest}.npz"]


def test_a_document_comes_back_as_it_was_and_is_not_taken_for_another():
    for document in (MIXED, model_presets()["DeepSeek-V2-Lite"].model):
        digest = store.save_document(document)
        assert digest == document.digest
        assert store.load_document(type(document), digest) == document
    with pytest.raises(InputError, match=MIXED.digest):
        store.load_document(MoEModel, MIXED.digest)


@pytest.mark.parametrize(
    "digest",
    [
        *("", "a" * 63, "a" * 65, "A" * 64, "a" * 64 + "\n", "../" + "a" * 61, "/etc/passwd", "..", "a" * 60 + "/../"),
        "0" * 64,  # one that was never saved
    ],
)
def test_what_is_not_a_kept_digest_is_refused(digest, own_data_folder):
    with pytest.raises(InputError, match="recording"):
        store.load_workload(digest)
    for kind in (Cluster, MoEModel):
        with pytest.raises(InputError, match="of this plan is not in the data folder"):
            store.load_document(kind, digest)
    store.save_document(MIXED)
    (own_data_folder / "outside.json").write_text(MIXED.to_json())  # a file where the name would lead
    with pytest.raises(InputError):
        store.load_document(Cluster, "../outside")


def test_a_session_comes_back_and_the_later_one_counts(own_data_folder):
    assert store.load_session("abcd-EF_12") is None
    for plan in ("first", "zweiter Plan · größer"):
        store.save_session("abcd-EF_12", json.dumps({"plan": plan}))
    assert json.loads(store.load_session("abcd-EF_12")) == {"plan": "zweiter Plan · größer"}
    assert store.load_session("abcd-EF_13") is None
    assert [path.name for path in (own_data_folder / "sessions").iterdir()] == ["abcd-EF_12.json"]


@pytest.mark.parametrize(
    "token", ["", "short", "x" * 41, "../../etc", "abcdefg/../h", "abcdefgh\n", "abcdefg.", "abcdefgé", "abcdefgh\0"]
)
def test_what_is_not_a_token_is_refused(token, own_data_folder):
    with pytest.raises(InputError, match="session"):
        store.load_session(token)
    with pytest.raises(InputError, match="session"):
        store.save_session(token, "{}")
    assert not own_data_folder.exists() or not any(own_data_folder.rglob("*.json"))


def test_a_data_folder_that_cannot_be_written_is_bad_input(own_data_folder):
    own_data_folder.mkdir()
    for name in ("workloads", "documents", "sessions"):
        (own_data_folder / name).touch()
    for save, *arguments in (
        (store.save_workload, WORKLOADS["trace"]),
        (store.save_document, MIXED),
        (store.save_session, "abcdefgh", "{}"),
    ):
        with pytest.raises(InputError, match="cannot be written"):
            save(*arguments)


def test_a_damaged_recording_is_bad_input(own_data_folder):
    digest = store.save_workload(WORKLOADS["loads"])
    path = own_data_folder / "workloads" / f"{digest}.npz"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(InputError, match="damaged"):
        store.load_workload(digest)
    for parts in ({"load": np.ones(1)}, {"kind": "ExpertLoad"}, {"kind": "Dream", "name": "x"}, {"version": "x"}):
        np.savez(path, **parts)
        with pytest.raises(InputError, match="damaged"):
            store.load_workload(digest)


def kept_problem() -> Problem:
    model = MoEModel(name="tiny", layers=3, experts=6, experts_per_token=2, d_model=32, d_ff=64)
    store.save_workload(WORKLOADS["trace"])
    return make_problem(WORKLOADS["trace"], MIXED.part([0, 2, 4]), model, Datasheet())


def planned(problem: Problem) -> tuple[Plan, str]:
    """A plan that a job made, and the digest under which the job keeps its timeline."""
    asked = problem_arguments(problem) | {"systems": [{"name": "linear"}]}
    (candidate,) = in_json(tasks.optimise)(asked, Context(store.data_folder()))["candidates"]
    plan = Plan.from_dict(candidate["plan"], "plan")
    return plan, simulation_digest(plan, problem)


def test_a_simulated_timeline_comes_back_as_it_was_and_is_kept_where_it_took_long(own_data_folder, monkeypatch):
    problem = kept_problem()
    _, key = planned(problem)
    assert store.load_timeline(key) is None
    monkeypatch.setattr(store, "LONG", 0)
    with monkeypatch.context() as patch:
        patch.setattr(store, "LONGEST", 10)
        planned(problem)
        assert not (own_data_folder / "timelines").exists(), "it is too large"
    plan, key = planned(problem)
    kept, again = store.load_timeline(key), simulate(plan, problem)
    pd.testing.assert_frame_equal(kept.events, again.events, check_dtype=False)
    for name in ("resources", "source", "cost_source", "labels"):
        assert getattr(kept, name) == getattr(again, name)
    for column in ("kind", "stream"):
        assert list(kept.events[column].cat.categories) == list(again.events[column].cat.categories)
    with pytest.raises(InputError, match="not the digest"):
        store.load_timeline("../../etc/passwd")
    path = own_data_folder / "timelines" / f"{key}.npz"
    for about in ("{", "[]", "{}"):
        np.savez(path, about=np.asarray(about))
        assert store.load_timeline(key) is None
    path.write_bytes(b"PK torn")
    assert store.load_timeline(key) is None


def test_a_timeline_with_bundles_is_kept_however_few_they_are(own_data_folder, monkeypatch):
    monkeypatch.setattr(events, "MOST_SENDS", 0)
    plan, key = planned(problem := kept_problem())
    kept = store.load_timeline(key)
    assert kept.bundled and kept.total == simulate(plan, problem).total


def test_a_timeline_that_cannot_be_kept_costs_no_plan(own_data_folder, monkeypatch):
    problem = kept_problem()
    monkeypatch.setattr(store, "LONG", 0)
    for name in ("timelines", "figures"):
        (own_data_folder / name).write_text("a file where the folder should be")
    assert planned(problem)


def test_figures_of_a_job_are_found_again_and_made_again_where_they_are_damaged(own_data_folder):
    plan, _ = planned(problem := kept_problem())
    expected, made = metrics(plan, problem), []

    def make() -> Metrics:
        made.append(plan)
        return expected

    def found() -> Metrics:
        return store.figures(Metrics, make, *metrics_digests(plan, problem))

    assert found() == expected and not made, "the job kept them"
    (path,) = (own_data_folder / "figures").iterdir()
    assert path.stat().st_mode & 0o077 == 0
    for damaged in (b"", b"{", b"[]", b"{}", b'{"total": "late"}', path.read_bytes()[:100], b"\xff\xfe\x00"):
        path.write_bytes(damaged)
        made.clear()
        assert found() == expected and made, damaged
        made.clear()
        assert found() == expected and not made, "they were kept anew"


def test_figures_depend_on_what_a_plan_claims_and_a_move_that_never_pays_is_kept_as_it_is(own_data_folder):
    problem = kept_problem()
    plan = run(SYSTEMS["linear"], problem).result.solution
    no_claim = plan.model_copy(update={"claim": None})
    with_bound, without = (
        store.figures(Metrics, partial(metrics, part, problem), *metrics_digests(part, problem)) for part in (plan, no_claim)
    )
    assert with_bound.bound is not None and without.bound is None
    never = Migration(3, 4.0, 5.0, 5.0, float("inf"))
    store.save_figures(never, "move")
    assert store.figures(Migration, pytest.fail, "move") == never


def test_a_plan_in_a_serving_step_comes_back_as_it_was(own_data_folder, monkeypatch):
    problem = make_problem(
        WORKLOADS["trace"], cluster_presets()["hgx-h100-8"].cluster.part([0, 1, 2]), kept_problem().model, Datasheet()
    )
    plan, sizes = run(SYSTEMS["linear"], problem).result.solution, usual_sizes(problem.model)
    source = RooflineOperators(problem.model, sizes, problem.cluster.gpus[0])
    step = serve(plan, problem, ServingStep(phase="decode", sequences=4, context=128), source, sizes)
    served.save_step(step, "few events")
    assert served.load_step("few events") is None
    monkeypatch.setattr(store, "LONG", 0)
    served.save_step(step, "step")
    kept = served.load_step("step")
    assert kept.figures == step.figures and kept.timeline.total == step.timeline.total
    assert kept.figures.to_dict() == step.figures.to_dict() and served.load_step("another") is None
    for path in (own_data_folder / "figures").iterdir():
        path.write_text('{"seconds": "late"}')
    assert served.load_step("step") is None


@pytest.fixture(autouse=True)
def usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_everything_in_the_data_folder_is_its_owners_alone(own_data_folder: Path) -> None:
    store.save_workload(RoutingTrace("a trace", np.zeros((4, 1, 1), np.int16), 2))
    store.save_document(MIXED)
    with store.alone_with_sessions():
        store.save_session("abcdefgh", write(Session()))
    with database().reading():
        pass
    job = runner.start("count", {"steps": 1, "pause": 0}, own_data_folder, module="tests.jobs.handlers")
    assert runner.wait(job, 60) is runner.State.DONE
    files = [path for path in own_data_folder.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} >= {".npz", ".json", ".db", ".txt", ".jsonl"}
    for path in (own_data_folder, *own_data_folder.rglob("*")):
        assert mode(path) == (0o700 if path.is_dir() else 0o600), path


def test_a_data_folder_of_an_older_version_is_closed_and_a_file_for_a_person_is_as_their_others(
    own_data_folder: Path, tmp_path: Path
) -> None:
    (own_data_folder / "sessions").mkdir(parents=True)
    own_data_folder.chmod(0o755)
    assert mode(store.data_folder()) == 0o700
    tmp_path.chmod(0o755)
    write_atomically(tmp_path / "plan.json", "{}")
    assert mode(tmp_path / "plan.json") == 0o644
