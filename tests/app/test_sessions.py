"""Sessions on one data folder: what one of them opens is not what another is shown."""

from threading import Barrier, Thread

import numpy as np
import pytest
from streamlit.testing.v1 import AppTest

from engine import store
from engine.workload import RoutingTrace
from tests.app.test_pages import ROOT, open_sample, visit


def log(name: str, seed: int = 0) -> RoutingTrace:
    experts = np.random.default_rng(seed).integers(0, 16, (64, 8, 1)).astype(np.int16)
    return RoutingTrace(name, experts, 16)


def session_with(name: str) -> AppTest:
    app = open_sample(AppTest.from_file(str(ROOT / "app" / "main.py"), default_timeout=60).run())
    digest = store.save_workload(log(name))
    app.session_state["workloads"], app.session_state["workload"] = {digest: name}, digest
    return app


def test_the_same_contents_under_two_names_keep_the_name_of_each_session() -> None:
    mine, yours = session_with("mine"), session_with("yours")
    for page in ("workload", "optimise", "affinity", "launch"):
        for app, own, other in ((mine, "mine", "yours"), (yours, "yours", "mine")):
            visit(app, page)
            shown = [button.label for button in app.button] + [
                popover.proto.popover.label for popover in app.get("popover")
            ]
            shown += [block.value for block in (*app.caption, *app.markdown, *app.info)]
            assert any(own in text.split() or own == text for text in shown), page
            assert not any(other in text.split() for text in shown), page


@pytest.mark.parametrize("seed", range(3))
def test_sessions_that_save_the_same_at_once_do_not_get_in_each_others_way(seed: int) -> None:
    ready, faults = Barrier(8), []

    def save() -> None:
        trace = log("any", seed)
        ready.wait()
        try:
            assert store.load_workload(store.save_workload(trace)).digest == trace.digest
        except Exception as error:
            faults.append(error)

    threads = [Thread(target=save) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
