"""Files of the first version open in this one: recordings, documents, plans, jobs, launches and sessions."""

import contextlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from app.state.stored import read
from engine import store
from engine.cluster import Cluster
from engine.errors import InputError
from engine.jobs import protocol, runner
from engine.jobs.launches import brief_of
from engine.jobs.runner import State
from engine.model import MoEModel
from engine.plan import Plan
from engine.workload import ExpertLoad, RoutingTrace, TrafficMatrix
from tests.cases.pages import PAGES, offered_plans, studio, visit
from tests.jobs.handlers import LooseAnswer

KEPT = Path(__file__).parents[1] / "data" / "first_version"
TOKEN = "first-version"


@pytest.fixture(autouse=True)
def of_first_version(own_data_folder: Path) -> None:
    shutil.copytree(KEPT, own_data_folder)


def test_recordings_open_under_their_digests_and_documents_open() -> None:
    recordings = {path.stem: store.load_workload(path.stem) for path in (KEPT / "workloads").iterdir()}
    assert all(recording.digest == digest for digest, recording in recordings.items())
    assert set(map(type, recordings.values())) == {RoutingTrace, ExpertLoad, TrafficMatrix}
    kinds = []
    for path in (KEPT / "documents").iterdir():
        for kind in (Cluster, MoEModel, Plan):
            with contextlib.suppress(InputError):
                document = store.load_document(kind, path.stem)
                kinds.append(kind)
                # Plans have come to say how they are executed, and so are named otherwise than they were.
                assert kind is Plan or document.digest == path.stem
    assert sorted(kinds, key=str) == sorted((Cluster, MoEModel, Plan), key=str)


def test_jobs_and_launches_have_ended_as_they_had() -> None:
    launch, planned = runner.jobs(store.data_folder())
    assert [job.request.kind for job in (launch, planned)] == ["launch", "optimise"]
    for job in (launch, planned):
        assert job.state is State.DONE and job.error is None and job.progress.done > 0.5 and job.request.version == 1
    assert [candidate["plan"]["name"] for candidate in planned.result["candidates"]] == ["Aurora"]
    assert brief_of(launch).plans == ("Aurora",) and brief_of(launch).ranks == 2


def test_a_session_opens_in_full_and_so_does_every_page() -> None:
    session, left_out = read(store.load_session(TOKEN))
    assert left_out is None and session.revision == 0 and len(session.plan_jobs) == 1
    app = studio(session=TOKEN).run()
    for page in PAGES:
        visit(app, page)
        assert not app.error and not app.toast, page
    assert "its results cannot be shown here" in app.warning[0].value  # a launch, with a button that runs it again
    assert any("Aurora" in str(table.value.to_dict()) for table in app.dataframe)
    assert len(offered_plans(visit(app, "optimise"))) == 1


def test_what_is_kept_now_says_of_which_version_it_is_and_a_later_one_is_named(own_data_folder: Path) -> None:
    trace = RoutingTrace("new", np.zeros((4, 1, 1), np.int16), 2)
    digest = store.save_workload(trace)
    path = own_data_folder / "workloads" / f"{digest}.npz"
    with np.load(path) as file:
        arrays = dict(file)
    assert arrays["version"] == 1
    np.savez(path, **arrays | {"version": np.asarray(2)})
    with pytest.raises(InputError, match="later version of Switchyard"):
        store.load_workload(digest)

    job = runner.jobs(own_data_folder, "optimise")[0]
    plan = Plan.from_dict(job.result["candidates"][0]["plan"], "plan")
    assert json.loads(plan.to_json())["version"] == 1
    with pytest.raises(InputError, match="version: 2 is of a later Switchyard"):
        Plan.from_dict(plan.model_dump(mode="json") | {"version": 2, "colour": "red"}, "plan")

    protocol.replace_result(job.folder, LooseAnswer(**job.result))
    kept = json.loads((job.folder / "result.json").read_text())
    assert kept.pop("version") == 1 and kept == job.result
    (job.folder / "result.json").write_text(json.dumps(kept | {"version": 2}))
    with pytest.raises(InputError, match="later version of Switchyard"):
        _ = job.result
