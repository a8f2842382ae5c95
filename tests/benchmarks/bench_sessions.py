"""Many people at once on one studio: `python -m tests.benchmarks.bench_sessions [SESSIONS]` (default 20).

Every session is a real websocket client that speaks the protocol of a browser: it uploads a cluster and a recording of its
own name (two sessions each upload the same contents under different names), opens the sample's model and visits every page,
all sessions at once. A page that shows an error, or the name of another session's recording or cluster anywhere in the
server's messages, ends the run with exit code 1. Printed: answer times of a page, alone and with all at once, and the growth
of the server's memory for each session.
"""

import io
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import requests
from streamlit.proto.BackMsg_pb2 import BackMsg
from streamlit.proto.ForwardMsg_pb2 import ForwardMsg
from streamlit.proto.WidgetStates_pb2 import WidgetState
from websockets.sync.client import connect

from app.state.stored import Session as Opened
from app.state.stored import write
from engine import store
from engine.cli.output import table
from engine.cluster import Cluster
from engine.formats import read_cluster
from engine.model import MoEModel
from engine.units import seconds, size
from engine.workload import RoutingTrace
from tests.browser.conftest import free_port, studios
from tests.cases.cli import SAMPLES

NAMES = re.compile(rb"own(?:cluster|recording)(\d\d)")
LIMIT = 120.0
"""Seconds that a page may take before the run is given up."""
ELSEWHERE = "operate"
"""A page that shows nothing of the open session."""


class Session:
    """One browser: the last messages for each page, and their seconds. It begins on `page`, which `pages` of an earlier
    session names unless it is the first."""

    def __init__(
        self, port: int, number: int, open: ExitStack, query: str = "", page: str = "", pages: dict[str, str] | None = None
    ) -> None:
        self.number, self.server = number, f"http://127.0.0.1:{port}"
        address = f"ws://127.0.0.1:{port}/_stcore/stream"
        self.socket = open.enter_context(connect(address, subprotocols=["streamlit"], max_size=None, open_timeout=LIMIT))
        self.http = requests.Session()
        self.pages = dict(pages or {})
        self.widgets: dict[str, str] = {}
        self.known: dict[str, bytes] = {}
        self.sent: list[bytes] = []
        self.query, self.session, self.times, self.faults = query, "", {}, []
        self.run(page)

    def run(self, page: str, change: Callable[[BackMsg], None] | None = None) -> None:
        """Run the script of a page, with a widget changed or without, and wait until it has finished."""
        message = BackMsg()
        message.rerun_script.page_script_hash = self.pages.get(page, "")
        message.rerun_script.query_string = self.query
        if change:
            change(message)
        self.sent.clear()
        began = time.perf_counter()
        self.socket.send(message.SerializeToString())
        while True:
            received = self.receive()
            kind = received.WhichOneof("type")
            if kind == "new_session":
                self.session = received.new_session.initialize.session_id
            elif kind == "navigation":
                self.pages = {
                    app_page.url_pathname: app_page.page_script_hash
                    for app_page in received.navigation.app_pages
                    if not app_page.is_hidden
                }
            elif kind == "page_info_changed":
                self.query = received.page_info_changed.query_string
            elif kind == "delta":
                self.look_at(received)
            elif kind == "script_finished" and received.script_finished != ForwardMsg.FINISHED_EARLY_FOR_RERUN:
                break
        if received.script_finished != ForwardMsg.FINISHED_SUCCESSFULLY:
            self.faults.append(f"{page}: the script ended with {received.script_finished}")
        self.times[page] = time.perf_counter() - began

    def receive(self) -> ForwardMsg:
        content = self.socket.recv(timeout=LIMIT)
        message = ForwardMsg.FromString(content)
        if message.WhichOneof("type") == "ref_hash":
            content = self.known[message.ref_hash]  # sent before, as a browser keeps it
            message = ForwardMsg.FromString(content)
        elif message.hash:
            self.known[message.hash] = content
        self.sent.append(content)
        strangers = {int(number) for number in NAMES.findall(content)} - {self.number}
        if strangers:
            self.faults.append(f"was shown the names of {sorted(strangers)}")
        return message

    def look_at(self, message: ForwardMsg) -> None:
        element = message.delta.new_element
        kind = element.WhichOneof("type")
        if kind == "exception" or (kind == "alert" and element.alert.format == element.alert.ERROR):
            self.faults.append(str(element)[:300])
        if kind in ("button", "file_uploader", "slider"):
            self.widgets[getattr(element, kind).label] = getattr(element, kind).id

    def press(self, page: str, label: str) -> None:
        self.run(page, lambda message: setattr(state_of(message, self.widgets[label]), "trigger_value", True))

    def upload(self, page: str, begin: str, files: dict[str, bytes]) -> None:
        """Give files to the uploader whose label begins so, as a browser does: ask where to, put them there, then say so."""
        (uploader,) = (widget for label, widget in self.widgets.items() if label.startswith(begin))
        self.http.get(f"{self.server}/_stcore/health", timeout=LIMIT)
        token = self.http.cookies["_streamlit_xsrf"]
        request = BackMsg()
        request.file_urls_request.request_id = "files"
        request.file_urls_request.file_names.extend(files)
        request.file_urls_request.session_id = self.session
        self.socket.send(request.SerializeToString())
        while (answer := self.receive()).WhichOneof("type") != "file_urls_response":
            pass
        places = list(answer.file_urls_response.file_urls)
        for place, (name, content) in zip(places, files.items(), strict=True):
            to, headers = self.server + place.upload_url, {"X-Xsrftoken": token}
            answer = self.http.put(to, files={name: (name, content)}, headers=headers, timeout=LIMIT)
            answer.raise_for_status()

        def change(message: BackMsg) -> None:
            state = state_of(message, uploader)
            for place, (name, content) in zip(places, files.items(), strict=True):
                info = state.file_uploader_state_value.uploaded_file_info.add()
                info.file_id, info.name, info.size = place.file_id, name, len(content)
                info.file_urls.CopyFrom(place)

        self.run(page, change)

    def open_own(self) -> None:
        """The sample with a recording and a cluster of this session's name."""
        self.press("", "Open the sample")
        own = {f"ownrecording{self.number:02}.npz": recording(1 + self.number // 2)}
        self.upload("", "Routing logs", own | {f"owncluster{self.number:02}.json": cluster(self.number)})

    def visit(self) -> None:
        """Every page in turn; each that shows the session must name this session's recording and cluster."""
        for page in self.pages:
            self.run(page)
            content = b"".join(self.sent)
            for name in ("recording", "cluster") if page != ELSEWHERE else ():
                if f"own{name}{self.number:02}".encode() not in content:
                    self.faults.append(f"{page or 'first page'}: does not show its own {name}")


def state_of(message: BackMsg, widget: str) -> WidgetState:
    """A new state of a widget in a message."""
    return message.rerun_script.widget_states.widgets.add(id=widget)


def stored(token: str, recordings: list[RoutingTrace], cluster: Cluster, model: MoEModel, **more: Any) -> str:
    """Put a session into the data folder; returns the query of its address. recordings: of the model, the first one open; more:
    further fields"""
    names = {store.save_workload(recording): recording.name for recording in recordings}
    about = {"workloads": names, "workload": next(iter(names)), "model_of": dict.fromkeys(names, model)}
    store.save_session(token, write(Opened(**about, cluster=cluster, model=model, **more)))
    return f"session={token}"


def recording(variant: int) -> bytes:
    """The sample with its tokens turned by some, as a file."""
    with np.load(SAMPLES / "tiny-moe" / "alpha-code.npz") as sample:
        parts = {
            name: np.roll(array, variant, axis=0) if array.ndim and len(array) > 1000 else array
            for name, array in sample.items()
        }
    file = io.BytesIO()
    np.savez_compressed(file, **parts)
    return file.getvalue()


def cluster(number: int) -> bytes:
    mixed = read_cluster(SAMPLES / "mixed-8.json")
    return mixed.model_copy(update={"name": f"owncluster{number:02}"}).to_json().encode()


@contextmanager
def studio(folder: Path, warm_process: Path | None = None) -> Iterator[tuple[int, psutil.Process]]:
    """The port of a studio with a data folder of its own, and its process: whoever listens there, of a warm one a fork."""
    port = free_port()
    with studios(folder, warm_process) as start:
        start(port=port)
        at_port = (each.pid for each in psutil.net_connections("tcp4") if each.laddr.port == port and each.status == "LISTEN")
        yield port, psutil.Process(next(at_port))


def at_once(sessions: list[Session], act: Callable[[Session], None]) -> None:
    """All sessions do something at the same time; a fault in one is noted and does not end the others."""
    ready = threading.Barrier(len(sessions))

    def work(session: Session) -> None:
        ready.wait()
        try:
            act(session)
        except Exception as error:  # whatever ends a session is to be told
            session.faults.append(repr(error))

    with ThreadPoolExecutor(len(sessions)) as pool:
        list(pool.map(work, sessions))


def times(sessions: list[Session], page: str) -> str:
    ascending = sorted(session.times[page] for session in sessions if page in session.times)
    return f"{seconds(ascending[len(ascending) // 2])}, slowest {seconds(ascending[-1])}" if ascending else "none"


def main(count: int = 20) -> int:
    with tempfile.TemporaryDirectory() as folder, studio(Path(folder) / "data") as (port, process), ExitStack() as open:
        idle = process.memory_info().rss
        alone = Session(port, 99, open)
        alone.open_own()
        for _ in range(2):  # the second time as every later one: nothing is imported any more
            alone.visit()
        warm = process.memory_info().rss
        sessions = [Session(port, number, open) for number in range(count)]
        at_once(sessions, Session.open_own)
        at_once(sessions, Session.visit)
        full = process.memory_info().rss
    rows = [[page or "workload", seconds(alone.times[page]), times(sessions, page)] for page in alone.pages]
    print(table(["page", "alone", f"median of {count} at once"], rows))
    print(
        f"memory: {size(idle)} at the start, {size(warm)} with one session that has seen every page, {size(full)} with "
        f"{count} more: {size((full - warm) / count)} a session"
    )
    faults = [f"session {session.number}: {fault}" for session in (alone, *sessions) for fault in session.faults]
    print("\n".join(faults) or f"no errors, and none of {count + 1} sessions was sent anything of another's")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
