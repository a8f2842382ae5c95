"""Stand-ins for servers of SGLang and vLLM: the HTTP that their documentation and sources describe, with arrays we choose.

Written from SGLang's srt/entrypoints/http_server.py and srt/eplb/expert_distribution.py, and from vLLM's documentation of
`--enable-return-routed-experts` and of the OpenAI API; they know nothing of our client.
"""

import base64
import io
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import torch


class StandIn:
    """A server in a thread, at `url`.

    Answers are in `answers`, from path to a function of the request's JSON (None for GET) to the reply: JSON, text, bytes,
    a `Reply`, or None for 404.
    """

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, object]] = []
        self.headers: list[dict[str, str]] = []
        self.answers: dict = {}
        stand_in = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self._answer(None)

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                self._answer(json.loads(body) if body else {})

            def _answer(self, body: object) -> None:
                stand_in.requests.append((self.command, self.path, body))
                stand_in.headers.append(dict(self.headers))
                make = stand_in.answers.get(self.path)
                made = make(body) if make else None
                if not isinstance(made, Reply):
                    made = Reply(404, {"detail": "Not Found"}) if made is None else Reply(200, made)
                made.send(self)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.handle_error = lambda *_: None  # a client that leaves is no fault here
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def asked(self, path: str) -> list[object]:
        """The bodies of the requests to a path, in order."""
        return [body for _, asked, body in list(self.requests) if asked == path]


class Reply:
    """A status and a body; truncated: fewer bytes than announced; slowly: a byte every so many seconds."""

    def __init__(
        self, status: int, body: object, headers: dict | None = None, truncated: bool = False, slowly: float = 0
    ) -> None:
        self.status, self.headers, self.truncated, self.slowly = status, headers or {}, truncated, slowly
        text = body if isinstance(body, str | bytes) else json.dumps(body)
        self.body = text.encode() if isinstance(text, str) else text

    def send(self, handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(self.status)
        for name, value in self.headers.items():
            handler.send_header(name, value)
        handler.send_header("Content-Length", str(len(self.body)))
        handler.end_headers()
        try:
            if self.truncated:
                handler.wfile.write(self.body[: len(self.body) // 2])
                handler.close_connection = True
            elif self.slowly:
                for at in range(len(self.body)):
                    handler.wfile.write(self.body[at : at + 1])
                    handler.wfile.flush()
                    time.sleep(self.slowly)
            else:
                handler.wfile.write(self.body)
        except OSError:
            handler.close_connection = True


def routing(tokens: int, layers: int, k: int, experts: int, seed: int) -> np.ndarray:
    """int[token, layer, k], k different experts each."""
    ids = np.random.default_rng(seed).random((tokens, layers, experts))
    return ids.argsort(axis=2)[:, :, :k]


class SGLang(StandIn):
    """SGLang with a recorder and with routing in answers: a token a word, decoder layer 0 dense."""

    def __init__(
        self, folder: Path, layers: int = 4, k: int = 2, experts: int = 8, ranks: int = 1, mode: str | None = "stat"
    ) -> None:
        super().__init__()
        self.folder, self.layers, self.k, self.experts, self.ranks = folder, layers, k, experts, ranks
        self.recording, self.dumps = False, 0
        self.info = {"model_path": "/models/tiny", "tp_size": ranks, "pp_size": 1, "enable_eplb": False, "version": "0.5.9"}
        self.info |= {"expert_distribution_recorder_mode": mode, "enable_expert_distribution_metrics": False}
        self.info |= {"enable_return_routed_experts": True}
        self.answers = {
            "/server_info": lambda body: self.info,
            "/start_expert_distribution_record": lambda body: self._record(True),
            "/stop_expert_distribution_record": lambda body: self._record(False),
            "/dump_expert_distribution_record": lambda body: self._dump(),
            "/generate": self.generate,
        }

    def _record(self, recording: bool) -> str:
        self.recording = recording
        return f"{'Start' if recording else 'Stop'} recording the expert distribution.\n"

    def _dump(self) -> str:
        """The dump of `torch.save`: for all ranks at once in the mode `stat`, by every rank in the others."""
        self.dumps += 1
        if self.info["expert_distribution_recorder_mode"] == "stat":
            counts = torch.full((2, self.layers, self.experts), self.dumps, dtype=torch.int32)
            path = self.folder / f"expert_distribution_recorder_{time.time()}.pt"
            torch.save({"rank": 0, "logical_count": counts}, path)
        else:
            for rank in range(self.ranks):
                records = {"records": [], "last_physical_to_logical_map": torch.zeros(self.layers, self.experts)}
                torch.save(records, self.folder / f"expert_distribution_recorder_{time.time()}_{rank}.pt")
        return "Dump expert distribution record.\n"

    def generate(self, body: dict) -> object:
        prompt = tokens_of(body.get("text", body.get("input_ids")))
        completion = body["sampling_params"]["max_new_tokens"]
        meta = {"prompt_tokens": prompt, "completion_tokens": completion, "finish_reason": {"type": "length"}}
        if body.get("return_routed_experts"):
            ids = self.ids(prompt + completion - 1).astype("<i4")
            meta["routed_experts"] = base64.b64encode(ids.tobytes()).decode()
        return {"text": "…", "meta_info": meta}

    def ids(self, rows: int) -> np.ndarray:
        """The choices of an answer of so many rows: the same each time."""
        ids = routing(rows, self.layers, self.k, self.experts, rows)
        ids[:, 0] = 0
        return ids


class Vllm(StandIn):
    """vLLM with `--enable-return-routed-experts`: a token a word, MoE layers alone."""

    def __init__(self, layers: int = 3, k: int = 2, experts: int = 8) -> None:
        super().__init__()
        self.layers, self.k, self.experts = layers, k, experts
        self.generated = 0
        self.answers = {
            "/v1/models": lambda body: {"object": "list", "data": [{"id": "tiny"}, {"id": "an-adapter"}]},
            "/v1/completions": self.complete,
            "/metrics": lambda body: (
                "# HELP vllm:eplb_balancedness_avg Mean balancedness.\n"
                "# TYPE vllm:eplb_balancedness_avg gauge\n"
                'vllm:eplb_balancedness_avg{engine="0",model_name="tiny"} 0.71\n'
                f'vllm:generation_tokens_total{{engine="0",model_name="tiny"}} {float(self.generated)}\n'
                'vllm:num_requests_running{engine="0",model_name="tiny"} 1.0\n'
            ),
        }

    def complete(self, body: dict) -> object:
        prompt, completion = tokens_of(body["prompt"]), body["max_tokens"]
        self.generated += completion
        file = io.BytesIO()
        np.save(file, self.ids(prompt + completion - 1).astype(np.uint8))
        choice = {"index": 0, "text": "…", "finish_reason": "length"}
        choice["routed_experts"] = base64.b64encode(file.getvalue()).decode()
        usage = {"prompt_tokens": prompt, "completion_tokens": completion}
        return {"object": "text_completion", "model": body["model"], "choices": [choice], "usage": usage}

    def ids(self, rows: int) -> np.ndarray:
        """The choices of an answer of so many rows: the same each time."""
        return routing(rows, self.layers, self.k, self.experts, rows)


def tokens_of(prompt: str | list[int]) -> int:
    return len(prompt.split()) if isinstance(prompt, str) else len(prompt)


def fault(done: tuple[int, str, str]) -> str:
    """The one line of a command that was refused."""
    code, out, err = done
    assert (code, out) == (2, ""), (code, out, err)
    *_, line = err.splitlines()
    assert line.startswith("error: ") and err.endswith("\n")
    return line.removeprefix("error: ")
