"""The inputs of sizing: node types with prices, the clusters that they make, a target in a person's words, and the step or pass
whose time counts."""

import heapq
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Self

import numpy as np
from pydantic import Field, model_validator

from engine.catalogue import node_types
from engine.cluster import MOST_GPUS, Cluster, Node
from engine.costs import CostModel
from engine.errors import InputError
from engine.formats import read_sizes
from engine.model import MoEModel
from engine.plan import Travel
from engine.result import Floats
from engine.schema import Frozen, StartUp
from engine.serving.aiconfigurator import choose_operators_of
from engine.serving.sizes import TransformerSizes, usual_serving
from engine.serving.step import Operators, Phase, ServingStep, load_of_step
from engine.units import digits, seconds
from engine.workload import TrafficMatrix, Workload

Vector = tuple[int, ...]
"""Nodes of every type of a catalogue, in its order."""


class NodeOffer(Frozen):
    """Nodes that can be had."""

    type: str = Field(min_length=1, max_length=50, description="a node type of the catalogue, or any name beside `node`")
    price: float = Field(ge=0, le=1e9, description="of one node, an hour")
    most: int = Field(ge=1, le=1000, description="how many can be had")
    node: Node | None = Field(default=None, description="GPUs and links as in a cluster file; absent: those of the type")
    latency: StartUp | None = Field(default=None, description="seconds to start a transfer over the fabric; absent: the type's")

    @model_validator(mode="after")
    def _known(self) -> Self:
        if self.node is None and self.type not in node_types():
            raise ValueError(
                f"no node type '{self.type}' is known: describe it as `node`, or take one of {', '.join(node_types())}"
            )
        return self

    @cached_property
    def drawn(self) -> Node:
        """The node."""
        return node_types()[self.type].node(self.type) if self.node is None else self.node

    @cached_property
    def start_up(self) -> float:
        """Seconds to start a transfer over the fabric."""
        usual = 0.0 if self.node is not None else node_types()[self.type].fabric_latency
        return usual if self.latency is None else self.latency


class Catalogue(Frozen):
    """Node types to choose from. Prices are those of the person who typed them."""

    nodes: tuple[NodeOffer, ...] = Field(min_length=1, max_length=12)
    currency: str = Field(default="$", min_length=1, max_length=4)

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        names = [offer.type for offer in self.nodes]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"two offers are called '{twice[0]}'; put them into one, or give each its own name")
        return self

    def price(self, vector: Vector) -> float:
        """The price of a cluster, an hour."""
        return float(sum(count * offer.price for count, offer in zip(vector, self.nodes, strict=True)))

    def counts(self, vector: Vector) -> dict[str, int]:
        """Nodes of every type that a cluster has."""
        return {offer.type: count for count, offer in zip(vector, self.nodes, strict=True) if count}

    def in_words(self, vector: Vector) -> str:
        """`2 × hgx-h100 + 1 × l40s-pcie`."""
        return in_words(self.counts(vector))

    def money(self, price: float) -> str:
        """`$12.50`."""
        return f"{self.currency}{price:,.2f}"

    def cluster(self, vector: Vector) -> Cluster:
        """The cluster; its fabric starts a transfer as slowly as the slowest of its types."""
        nodes = [
            offer.drawn.model_copy(update={"name": f"{offer.type}-{index}"})
            for count, offer in zip(vector, self.nodes, strict=True)
            for index in range(count)
        ]
        latency = max(offer.start_up for count, offer in zip(vector, self.nodes, strict=True) if count)
        data = {"name": self.in_words(vector)[:80], "nodes": [node.model_dump() for node in nodes], "latency": latency}
        return Cluster.from_dict(data, "the cluster")

    def by_price(self) -> Iterator[Vector]:
        """Every cluster once, the cheapest first; of equally cheap ones those of fewer types, then of fewer nodes. Clusters of
        more than `MOST_GPUS` GPUs are left out."""

        def ranked(vector: Vector) -> tuple[float, int, int, Vector]:
            return round(self.price(vector), 6), sum(map(bool, vector)), sum(vector), vector

        sizes = [len(offer.drawn.gpus) for offer in self.nodes]
        heap = [ranked((0,) * len(self.nodes))]
        while heap:
            vector = heapq.heappop(heap)[-1]
            if any(vector):
                yield vector
            last = max((place for place, count in enumerate(vector) if count), default=0)
            for place in range(last, len(vector)):
                larger = (*vector[:place], vector[place] + 1, *vector[place + 1 :])
                if larger[place] <= self.nodes[place].most and np.dot(larger, sizes) <= MOST_GPUS:
                    heapq.heappush(heap, ranked(larger))


def in_words(nodes: Mapping[str, int]) -> str:
    """`2 × hgx-h100 + 1 × l40s-pcie`, of how many nodes of every type."""
    return " + ".join(f"{count} × {name}" for name, count in nodes.items())


@dataclass(frozen=True)
class Target:
    """Limits of a cluster and its plan.

    seconds: of a step or pass; None: as fast as the price allows
    price: an hour; None: any
    sequences: of all GPUs together; None: not said
    phase: of the step
    """

    seconds: float | None
    price: float | None = None
    sequences: int | None = None
    phase: Phase = "decode"


@dataclass(frozen=True)
class ServingTarget:
    """Limits of a deployment that users ask; None: no such limit.

    token, first_token: seconds at most for a token, and to the first one
    rate: tokens/s at least of all users together
    price: an hour at most
    users: at once, at least
    """

    token: float | None = None
    first_token: float | None = None
    rate: float | None = None
    price: float | None = None
    users: int | None = None

    @property
    def in_words(self) -> str:
        """`a token in 20 ms (50 tokens/s a user), first token in 2 s`; empty without limits."""
        said = [
            self.token and f"a token in {seconds(self.token)} ({digits(1 / self.token)} tokens/s a user)",
            self.first_token and f"first token in {seconds(self.first_token)}",
            self.rate and f"{self.rate:,.6g} tokens/s in all",
            self.users and f"{self.users:,} users at once",
            self.price and f"at most {self.price:,.6g} an hour",
        ]
        return ", ".join(filter(None, said))

    @property
    def in_all(self) -> bool:
        """True if it names an amount for all users together, which takes as many replicas as it needs."""
        return self.rate is not None or self.users is not None


_NUMBER = (
    r"(?P<{0}>\d{{1,3}}(?:[,_ ]\d{{3}})+(?:\.\d+)?|\d+(?:\.\d+)?(?:e\d+)?)\s?(?:(?P<{0}k>k|thousand|m|million|b|bn|billion)\b)?"
)
_TIME = _NUMBER + r"\s?(?P<{0}_unit>ns|us|µs|μs|ms|milliseconds?|s|secs?|seconds?|min|minutes?)\b"
_MOST = (
    r"(?:(?:at most|no more than|up to|less than|faster than|cheaper than|within|under|below|max(?:imum)?|in|for|a budget of"
    r"|budget:?|<=?|≤)\s?)?"
)
_LEAST = r"(?:(?:at least|more than|no less than|over|above|min(?:imum)?|>=?|≥)\s?)?"
_A = r"\s?(?:/|a|an|per|each|every|for (?:a|one|each|every))\s?"
_RATE = rf"\s?(?:(?:tokens?|toks?){_A}(?:seconds?|secs?|s)|tps)\b"
_PARTS = (
    rf"(?:the )?(?:time to )?(?:the )?(?:first token|ttft)\s?(?:after|:|=)?\s?{_MOST}{_TIME.format('first')}",
    rf"{_MOST}{_TIME.format('first')}\s?(?:to|until|till|for|before)\s?(?:the )?first token",
    rf"(?:(?:a|each|every|one) token|tpot|itl|a pass)\s?(?::|=)?\s?{_MOST}{_TIME.format('time')}",
    rf"{_MOST}{_TIME.format('time')}(?:{_A}(?:output |generated )?(?:token|pass|step))?",
    rf"{_LEAST}{_NUMBER.format('speed')}{_RATE}{_A}(?:users?|requests?|sequences?)\b",
    rf"{_LEAST}{_NUMBER.format('rate')}\s?(?:tokens?|toks?){_A}(?P<rate_per>minute|min|hour|hr|h|day|month)\b"
    r"(?: (?:in all|in total|together|overall)\b)?",
    rf"{_LEAST}{_NUMBER.format('rate')}{_RATE}(?: (?:in all|in total|together|overall)\b)?",
    rf"(?:(?:at|for|with|of|on)\s)?{_NUMBER.format('count')}\s?(?:concurrent |parallel )?"
    r"(?:sequences|sequence|requests|request|users|user|prompts|prompt)\b(?: at (?:a time|once|the same time))?",
    rf"{_MOST}(?:[$€£¥]\s?|usd |eur |gbp )?{_NUMBER.format('price')}\s?(?:[$€£¥]|usd|dollars?|eur|euros?|gbp|pounds?)?"
    rf"{_A}(?P<price_per>hours?|hr|h|day|week|month|year)\b",
)
_HOURS = {"h": 1.0, "d": 24.0, "w": 168.0, "mo": 730.0, "y": 8760.0, "mi": 1 / 60}
"""Hours of a span by the letters that it begins with; of a month a twelfth of a year."""
_TIMES = {"": 1.0, "k": 1e3, "t": 1e3, "m": 1e6, "b": 1e9}
_UNITS = {"n": 1e-9, "u": 1e-6, "µ": 1e-6, "μ": 1e-6, "ms": 1e-3, "milli": 1e-3, "min": 60.0, "s": 1.0}
MOST_AT_ONCE = 1_000_000
MOST = {"first": 10**9, "time": 10**9, "speed": 10**9, "rate": 10**12, "count": 10**8, "price": 10**12}
WORDS = {"first": "time", "speed": "tokens/s", "rate": "tokens/s", "count": "number of sequences"}
EXAMPLES = "'50 ms a token', 'first token in 2 s', '20000 tokens/s at 512 sequences', 'at most $40 an hour'"
SERVING_EXAMPLES = (
    "'20 ms a token', '50 tokens/s a user', 'first token in 2 s', '5000 tokens/s in all', '200 users at once', "
    "'at most $40 an hour'"
)


def read_target(text: str) -> Target:
    """The target of a text such as those of EXAMPLES, also several at once. Raises InputError for words that say nothing here,
    for two of a kind, and for a rate without a number of sequences."""
    number = _limits(text, EXAMPLES)
    if {"first", "time"} <= number.keys():
        raise InputError(f"the target '{text}' has two limits of a kind; give one of each, as in {EXAMPLES}")
    if not number.keys() & {"first", "time", "rate", "price"}:
        raise InputError(f"the target '{text}' names no limit; write such as {EXAMPLES}")
    count, seconds = number.get("count", 0.0), number.get("first", number.get("time"))
    if count % 1:
        raise InputError(f"the target '{text}': {count:g} is no number of sequences; write a whole one")
    if "rate" in number:
        if not count or "first" in number:
            raise InputError(
                f"the target '{text}': tokens/s need a number of sequences: write '20000 tokens/s at 512 sequences'"
            )
        seconds = min(count / number["rate"], seconds or np.inf)
    return Target(seconds, number.get("price"), int(count) or None, "prefill" if "first" in number else "decode")


def read_serving_target(text: str) -> ServingTarget:
    """The limits of a text such as those of SERVING_EXAMPLES, any of them together; of an empty one none. Raises InputError
    for other words, two limits of a kind, and a number of users that is not whole."""
    number = _limits(text, SERVING_EXAMPLES)
    count = number.get("count")
    if count is not None and (count % 1 or count > MOST_AT_ONCE):
        raise InputError(f"the target '{text}': write a whole number of users, at most {MOST_AT_ONCE:,}")
    users = None if count is None else int(count)
    return ServingTarget(number.get("time"), number.get("first"), number.get("rate"), number.get("price"), users)


def _limits(text: str, examples: str) -> dict[str, float]:
    """The numbers of a text, by their names in `_PARTS`: seconds, tokens/s, sequences, price; a speed as the time of a token.
    Raises InputError for words that say nothing, and for two numbers of a kind."""
    rest, found = " ".join(text.lower().split()), {}
    for pattern in _PARTS:
        while match := re.search(rf"(?<![\w.]){pattern}", rest):
            for name, value in match.groupdict().items():
                if value is None:
                    continue
                if name in MOST and (name in found or (name == "speed" and "time" in found)):
                    raise InputError(f"the target '{text}' has two limits of a kind; give one of each, as in {examples}")
                found[name] = value
            rest = f"{rest[: match.start()]} {rest[match.end() :]}"
    if left := re.sub(r"\b(?:and|with|,|;)\b|[,;.+&]", " ", rest).split():
        raise InputError(f"the target '{text}': '{' '.join(left)}' is not understood; write such as {examples}")
    number = {name: _number(found, name) for name in MOST if name in found}
    for name, value in number.items():
        if not 0 < value <= MOST[name]:
            words = WORDS.get(name, name)
            raise InputError(f"the target '{text}': its {words} must be above 0 and at most {MOST[name]:,}")
    for name in {"first", "time"} & number.keys():
        number[name] *= next(factor for unit, factor in _UNITS.items() if found[f"{name}_unit"].startswith(unit))
    if "speed" in number:
        number["time"] = 1 / number.pop("speed")
    for name, one in (("price", 1.0), ("rate", 3600.0)):
        if span := found.get(f"{name}_per"):
            number[name] /= one * next(hours for letters, hours in _HOURS.items() if span.startswith(letters))
    return number


def _number(found: dict[str, str], name: str) -> float:
    return float(re.sub("[,_ ]", "", found[name])) * _TIMES[found.get(f"{name}k", "")[:1]]


@dataclass(frozen=True)
class Served:
    """A serving step of so many sequences on all GPUs together.

    operators: of a cluster
    """

    step: ServingStep
    sizes: TransformerSizes
    operators: Callable[[Cluster], Operators]
    sequences: int


@dataclass(frozen=True, eq=False)
class Need:
    """All that a cluster is sought for; its time is that of the slowest of the recordings.

    cost: times on every cluster of the catalogue
    served: the step that counts; None: a pass through the MoE layers with all tokens of a recording
    """

    recordings: tuple[Workload, ...]
    model: MoEModel
    catalogue: Catalogue
    cost: CostModel
    travel: Travel | None = None
    served: Served | None = None

    def __post_init__(self) -> None:
        for recording in self.recordings:
            if isinstance(recording, TrafficMatrix):
                raise InputError(
                    f"{recording.name} is traffic between its own GPUs and says nothing about others; name a routing log or "
                    "expert loads"
                )

    @property
    def counts_copies(self) -> bool:
        """True if every copy of a token travels on its own."""
        return self.travel is None or self.travel.unit == "copies"

    @cached_property
    def loads(self) -> tuple[Floats, ...]:
        """float64[layer, expert] token copies of every recording, in the step if one counts."""
        if self.served is None:
            return tuple(np.asarray(recording.load, dtype=np.float64) for recording in self.recordings)
        one = np.array([self.served.sequences])
        return tuple(load_of_step(each, self.served.step, self.model, 1, one).load for each in self.recordings)


@dataclass(frozen=True)
class Counted:
    """The step or pass that a target is about.

    served: None: a pass through the MoE layers
    sequences: each with a token in the pass; None: all tokens of the recording
    notes: for people; operators add theirs when they are timed
    """

    served: Served | None
    sequences: int | None
    phase: Phase
    notes: list[str] = field(default_factory=list)

    @property
    def unit(self) -> str:
        """The step or pass in words."""
        if self.served is not None:
            step = self.served.step
            whole = f"a whole {step.phase} step of {self.served.sequences:,} sequences on all GPUs together"
            return f"{whole}, {step.context:,} tokens in"
        if self.sequences:
            return f"a pass through the MoE layers with a token of {self.sequences:,} sequences"
        return "a pass through the MoE layers with all tokens of the recording"

    def recordings(self, recordings: Sequence[Workload], model: MoEModel) -> tuple[Workload, ...]:
        """Recordings at the tokens that count, where these are not those of a step."""
        if self.served is not None or not self.sequences:
            return tuple(recordings)
        step, sequences = usual_serving(self.phase), np.array([self.sequences])
        return tuple(load_of_step(each, step, model, 1, sequences) for each in recordings)


def counted(
    target: Target, model: MoEModel, step: ServingStep | None, config: Callable[[], Path], operators: str | None = None
) -> Counted:
    """The step or pass that a target is about. Raises InputError for a step that is not of the target's phase.

    step: that of a person, with the sequences of all GPUs together; None: the usual one if the target needs a step
    config: the `config.json` of the model; raises InputError where it is not known, which counts for decode of a number of
        sequences as their MoE layers alone
    operators: source of their times, see `choose_operators_of`
    """
    if step is None and not target.sequences and target.phase != "prefill":
        return Counted(None, None, target.phase)
    own, step = step is not None, usual_serving(target.phase) if step is None else step
    sequences = target.sequences or (step.sequences if own else 1)
    if target.phase == "prefill" and step.phase != "prefill":
        raise InputError("the target is of a prefill step, but the step is of decode; name one of prefill")
    if step.overlap == "two-batch" and sequences % 2:
        raise InputError(f"two-batch overlap needs an even number of sequences, not {sequences}")
    try:
        file = config()
    except InputError as error:
        if own or not target.sequences or target.phase == "prefill":
            raise
        return Counted(None, sequences, target.phase, [f"the MoE layers alone are counted, at {sequences:,} tokens: {error}"])
    sizes, notes = read_sizes(file), list[str]()

    def operators_on(cluster: Cluster) -> Operators:
        source, said = choose_operators_of(file, model, sizes, cluster, step, operators)
        notes.extend(note for note in said if note not in notes)
        return source

    return Counted(Served(step, sizes, operators_on, sequences), sequences, target.phase, notes)
