"""A deployment under arrivals: requests that come at random or as they were recorded, and the times that they see.

Servers batch continuously: before every step waiting requests join as far as there is room, and their prompts are taken with
the step, one on each replica of attention (before that and in order where the deployment has servers for them). A step takes
the seconds that `engine.serving.forecast` has for so many sequences of the mean length; a request goes to the server with the
fewest.
"""

import heapq
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from engine.errors import InputError, StoppedError
from engine.model import MoEModel
from engine.result import Floats, Ints, Stop, never
from engine.serving.deployment import Demand, Deployment
from engine.serving.forecast import Factors, Stack, fitted, times, work
from engine.serving.parts import DECODE, FIRST, PROMPT
from engine.serving.sizes import TransformerSizes

MOST_REQUESTS = 200_000
PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Requests:
    """arrival: float64[request] seconds, ascending; prompt, output: int64[request] tokens"""

    arrival: Floats
    prompt: Ints
    output: Ints

    def __post_init__(self) -> None:
        count = len(self.arrival)
        if not 0 < count <= MOST_REQUESTS:
            raise InputError(f"{count:,} requests; 1 to {MOST_REQUESTS:,} can be replayed")
        if np.any(np.diff(self.arrival) < 0) or min(self.prompt.min(), self.output.min()) < 1:
            raise InputError("requests need ascending times, and at least one token of prompt and of output each")


def at_random(rate: float, count: int, prompt: int, output: int, seed: int = 0) -> Requests:
    """Requests that arrive independently of each other (a Poisson process). rate: requests a second; count: of requests"""
    if not rate > 0:
        raise InputError(f"{rate:g} requests a second: a number above 0 is needed")
    gaps = np.random.default_rng(seed).exponential(1 / rate, count)
    return Requests(np.cumsum(gaps), np.full(count, prompt), np.full(count, output))


class Served(NamedTuple):
    """float64[request] seconds: to the first token; for each further one (0 of answers of one token); and the end of all."""

    first: Floats
    token: Floats
    end: Floats

    def percentiles(self) -> dict[str, dict[int, float]]:
        """Seconds by PERCENTILES, of the first token and of answers' tokens."""
        answers = self.token[self.token > 0]
        kinds = {"first": self.first, "token": answers if len(answers) else self.token}
        return {name: {at: float(np.percentile(each, at)) for at in PERCENTILES} for name, each in kinds.items()}


def serve_arrivals(
    requests: Requests,
    deployment: Deployment,
    model: MoEModel,
    sizes: TransformerSizes,
    factors: Factors | None = None,
    stop: Stop = never,
) -> Served:
    """Simulate the requests. Raises InputError as `forecast` does, and StoppedError once it was stopped.

    model, sizes: of the deployment's checkpoint
    factors: None: those that come with Switchyard
    """
    steps = _Steps.of(requests, deployment, model, sizes, factors or fitted())
    ready, taken = requests.arrival + steps.front, np.zeros(len(requests.arrival))
    if deployment.prefill is not None:
        lanes = [0.0] * (deployment.prefill.servers * deployment.prefill.data)
        for at, begin in enumerate(ready):
            free = max(heapq.heappop(lanes), begin)
            taken[at] = free + steps.prompt(requests.prompt[at])
            heapq.heappush(lanes, taken[at])
        ready = taken
    order = np.argsort(ready, kind="stable")
    servers = [_Server(steps, deployment.decode.data, deployment.prefill is None) for _ in range(deployment.decode.servers)]
    for number, at in enumerate(order):
        if number % 256 == 0 and stop():
            raise StoppedError("stopped before all requests were served")
        for server in servers:
            server.run(until=ready[at])
        min(servers, key=lambda server: server.load).queue.append((int(at), float(ready[at]), requests))
    for server in servers:
        server.run(until=np.inf)
    first, end = (np.array([0.0] * len(order)) for _ in range(2))
    for server in servers:
        for at, (begin, done) in server.done.items():
            first[at], end[at] = begin, done
    if deployment.prefill is not None:
        first = np.minimum(taken, end)
    token = (end - first) / np.maximum(requests.output - 1, 1) * (requests.output > 1)
    return Served(first - requests.arrival, token, end)


@dataclass(frozen=True)
class _Steps:
    """Seconds of steps, prompts and the front end.

    sequences, seconds: int64[point] of a server, and float64[point] of its step
    linear, square, fixed: of a prompt, for each token, each pair of tokens, and at least
    most: sequences that a server has room for
    """

    sequences: Ints
    seconds: Floats
    linear: float
    square: float
    fixed: float
    front: float
    most: int

    @classmethod
    def of(
        cls, requests: Requests, deployment: Deployment, model: MoEModel, sizes: TransformerSizes, factors: Factors
    ) -> "_Steps":
        alone = deployment.model_copy(
            update={
                "decode": deployment.decode.model_copy(update={"servers": 1}),
                "prefill": deployment.prefill or deployment.decode,
            }
        )
        prompt, output = (max(1, round(float(each.mean()))) for each in (requests.prompt, requests.output))
        ladder = np.unique(np.round(2 ** np.arange(0, 15, 0.5)).astype(np.int64))
        rows = [work(alone, Demand(prompt=prompt, output=output, users=int(users)), model, sizes) for users in ladder]
        fit = [row for row in rows if row.waits <= 0] or rows[:1]
        of = factors.of(deployment)
        timed = times(Stack.of(fit), np.repeat(of[None], len(fit), axis=0))
        room = next(
            (int(users / (1 + row.waits)) for users, row in zip(ladder, rows, strict=True) if row.waits > 0), int(ladder[-1])
        )
        tokens = {}
        for length in (prompt, 2 * prompt, 4 * prompt):
            row = work(alone, Demand(prompt=length, output=output, users=1), model, sizes)
            tokens[length] = float(times(Stack.of([row]), of[None]).of_first[0][: len(PROMPT)].sum())
        one, two, four = tokens.values()
        square = (four - 3 * two + 2 * one) / (6 * prompt**2)
        linear = (two - one) / prompt - 3 * prompt * square
        named = dict(zip(FIRST, timed.of_first[0][len(PROMPT) : len(PROMPT) + len(FIRST)].tolist(), strict=True))
        front = sum(named[part] for part in ("reading the prompt", "front end")) + (
            named["sending keys and values on"] if deployment.prefill else 0.0
        )
        seconds = np.maximum.accumulate(timed.of_token[:, : len(DECODE)].sum(axis=1))
        return cls(ladder[: len(fit)], seconds, linear, square, one - prompt * linear - prompt**2 * square, front, max(room, 1))

    def step(self, sequences: int) -> float:
        return float(np.interp(sequences, self.sequences, self.seconds))

    def prompt(self, tokens: int) -> float:
        return self.fixed + tokens * (self.linear + tokens * self.square)


class _Server:
    """One server's running and waiting requests. replicas: of attention; prompts: True if it takes them itself"""

    def __init__(self, steps: _Steps, replicas: int, prompts: bool) -> None:
        self.steps, self.replicas, self.prompts = steps, replicas, prompts
        self.now, self.passed = 0.0, 0
        self.queue: deque[tuple[int, float, Requests]] = deque()
        self.running: list[tuple[int, int]] = []  # (step at which it ends, request), a heap
        self.done: dict[int, tuple[float, float]] = {}

    @property
    def load(self) -> int:
        return len(self.queue) + len(self.running)

    def run(self, until: float) -> None:
        """Go on until this time, or until there is nothing to do."""
        while (self.running or self.queue) and self.now < until:
            if not self.running:
                self.now = max(self.now, self.queue[0][1])
                if self.now >= until:
                    return
            joining = self._joining()
            seconds = self.steps.step(max(len(self.running), 1))
            if joining:
                if self.prompts:
                    lengths = [self.steps.prompt(requests.prompt[at]) for at, _, requests in joining]
                    seconds += sum(lengths) / self.replicas
                count = 1
            else:
                count = self.running[0][0] - self.passed
                if np.isfinite(until):
                    count = min(count, max(1, int(np.ceil((until - self.now) / seconds))))
            self.now += count * seconds
            self.passed += count
            for at, _, _ in joining:
                self.done[at] = self.now, self.now
            while self.running and self.running[0][0] <= self.passed:
                _, at = heapq.heappop(self.running)
                self.done[at] = self.done[at][0], self.now

    def _joining(self) -> list[tuple[int, float, Requests]]:
        """Requests that begin with the next step."""
        free = min(self.steps.most - len(self.running), self.replicas if self.prompts else self.steps.most)
        joining = []
        while self.queue and len(joining) < free and self.queue[0][1] <= self.now:
            joining.append(self.queue.popleft())
            at, _, requests = joining[-1]
            heapq.heappush(self.running, (self.passed + int(requests.output[at]), at))
        return joining
