"""vLLM over HTTP: completions that return their routing, and the metrics of its expert load balancer.

Sources: vLLM's documentation, training/routed_experts (latest) and training/routed_experts_replay (0.21), and of the metrics
distributed/eplb/metrics.py.
"""

import re

import numpy as np

from engine.errors import InputError
from engine.formats.routed_experts import decode_lists, decode_npy, without_cached
from engine.formats.source import quoted
from engine.model import MoEModel
from engine.recording.per_request import Ask, Prompt
from engine.recording.server import Server, ServerError

ROUTING_FLAG = "--enable-return-routed-experts"
MAX_METRICS_BYTES = 16 * 1024**2

_METRIC = re.compile(
    r"^(vllm:(?:eplb_\w+|prompt_tokens_total|generation_tokens_total)(?:\{[^}]*\})?) ([0-9.eE+-]+)$", re.MULTILINE
)


def served_model(server: Server) -> str:
    """The name of the first model that the server offers; adapters come after it. Raises InputError."""
    try:
        models = server.get_object("/v1/models").get("data")
    except ServerError as error:
        if error.status == 404:
            raise InputError(f"{server.url}: has no /v1/models; is this a vLLM server?") from None
        raise
    name = models[0].get("id") if isinstance(models, list) and models and isinstance(models[0], dict) else None
    if not isinstance(name, str):
        raise InputError(f"{server.url}/v1/models: names no model")
    return name


def asker(server: Server, served: str, model: MoEModel | None, max_tokens: int) -> Ask:
    """A function that sends one prompt to `/v1/completions` and decodes the routing of its tokens, -1 for a cached prefix.

    served: the server's name for its model
    model: the model to hold answers against, if it is known
    """

    def ask(prompt: Prompt) -> np.ndarray:
        body = {"model": served, "prompt": prompt, "max_tokens": max_tokens}
        answer = server.post_for_json("/v1/completions", body)
        experts = without_cached(_routing(server, answer), answer.get("usage"), answer["choices"][0])
        if model is not None:
            highest = int(experts.max())
            ids = model.experts if highest < model.router_choices else highest + 1
            model.check_recording(experts.shape[1], ids, experts.shape[2], served)
        return experts

    return ask


def _routing(server: Server, answer: object) -> np.ndarray:
    """The choices in one answer, int16[row, MoE layer, k]: in base64 as one array, prompt first; in lists (0.14 to 0.21) as
    two."""
    where = f"{server.url}/v1/completions"
    choices = answer.get("choices") if isinstance(answer, dict) else None
    if not (isinstance(choices, list) and choices and isinstance(choices[0], dict)):
        raise InputError(f"{where}: answers without choices; is this a vLLM server?")
    routing, prompt = choices[0].get("routed_experts"), answer.get("prompt_routed_experts")
    if not routing and not prompt:
        raise InputError(f"{where}: answers without routed experts; start the server with {ROUTING_FLAG}")
    if isinstance(routing, str):
        return decode_npy(routing)
    parts = [decode_lists(part) for part in (prompt, routing) if part]
    if len({part.shape[1:] for part in parts}) > 1:
        raise InputError(f"{where}: prompt and completion differ in layers or experts per token")
    return np.concatenate(parts)


def read_metrics(server: Server) -> dict[str, float]:
    """The load balancer's gauges and the tokens so far, out of `/metrics`, by name and labels; empty if the server has no such
    page. Raises InputError."""
    try:
        text = server.get("/metrics", MAX_METRICS_BYTES).decode("utf-8", errors="replace")
    except ServerError:
        return {}
    metrics = {}
    for name, value in _METRIC.findall(text):
        try:
            metrics[name] = float(value)
        except ValueError:
            raise InputError(f"{server.url}/metrics: {name} is {quoted(value)}, not a number") from None
    return metrics
