"""The choice of a cost source: two sources as one, plain JSON and back, so that a job counts with the costs of the problem it
was started for, and the reasons for which a source cannot time the open cluster and model."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
from pydantic import Field

from engine.cluster import Cluster
from engine.costs.alpha_beta import AlphaBeta, CostProfile
from engine.costs.base import CostModel, Datasheet, Derived
from engine.costs.deepep import EXPERTS, WIDTH, DeepEP, travel_of
from engine.costs.measured import MeasuredTimes
from engine.costs.profiled import Profiled
from engine.costs.silicon import Silicon
from engine.errors import InputError
from engine.model import MoEModel
from engine.plan import Travel
from engine.schema import Frozen
from engine.workload import digest_of


@dataclass(frozen=True)
class Combined(Derived):
    """Computation from one source, the network from another."""

    computation: CostModel
    connection: CostModel

    @property
    def digest(self) -> str:
        return digest_of(self.computation.digest, self.connection.digest)

    @property
    def source(self) -> str:
        return f"computation: {self.computation.source}; network: {self.connection.source}"


def combine(sources: Mapping[str, CostModel], cluster: Cluster) -> CostModel:
    """One source for the cluster out of several, by name: computation and network each from the first that has them.

    Without any, the datasheet. Raises InputError when no source has a part, and when a source would not be used at all.
    """
    if not sources:
        return Datasheet()
    computation = _first(sources, cluster, "computation", "lacks_computation")
    connection = _first(sources, cluster, "the network", "lacks_network")
    if idle := set(sources) - {computation, connection}:
        raise InputError(
            f"{idle.pop()} is not used: {' and '.join(dict.fromkeys((computation, connection)))} before it has all that it "
            "could add; name it first, or leave it out"
        )
    if computation == connection:
        return sources[computation]
    return Combined(sources[computation], sources[connection])


def _first(sources: Mapping[str, CostModel], cluster: Cluster, part: str, reason: str) -> str:
    lacks = {name: getattr(source, reason)(cluster) for name, source in sources.items()}
    for name, why in lacks.items():
        if why is None:
            return name
    reasons = "; ".join(lacks.values())
    raise InputError(f"no source given has times of {part} for this cluster: {reasons}; add the datasheet as a source")


class _Shares(Frozen):
    compute_efficiency: float = Field(default=Datasheet.compute_efficiency, gt=0)
    memory_efficiency: float = Field(default=Datasheet.memory_efficiency, gt=0)
    launch: float = Field(default=Datasheet.launch, ge=0)


def to_dict(cost: CostModel) -> dict[str, Any]:
    """The source as JSON. A source of a kind that is not the engine's own raises TypeError."""
    match cost:
        case Datasheet():
            return {"source": "datasheet"} | asdict(cost)
        case Silicon() | DeepEP():
            return {"source": type(cost).__name__.lower()}
        case AlphaBeta():
            return {"source": "profile", "profile": cost.profile.model_dump(mode="json", exclude_none=True)}
        case Profiled():
            return {"source": "measured", "measured": cost.measured.model_dump(mode="json", exclude_none=True)}
        case Combined():
            return {"source": "combined", "computation": to_dict(cost.computation), "network": to_dict(cost.connection)}
    raise TypeError(f"{type(cost).__name__} has no JSON form")


def from_dict(data: object, where: str = "cost") -> CostModel:
    """The source that `to_dict` described; raises InputError that starts with `where`."""
    match data:
        case {"source": "datasheet", **shares}:
            return Datasheet(**_Shares.from_dict(shares, where).model_dump())
        case {"source": "silicon"}:
            return Silicon()
        case {"source": "deepep"}:
            return DeepEP()
        case {"source": "profile", "profile": profile}:
            return AlphaBeta(CostProfile.from_dict(profile, where))
        case {"source": "measured", "measured": measured}:
            return Profiled(MeasuredTimes.from_dict(measured, where))
        case {"source": "combined", "computation": computation, "network": network}:
            return Combined(from_dict(computation, f"{where} → computation"), from_dict(network, f"{where} → network"))
    raise InputError(f"{where}: not a cost source (datasheet, silicon, deepep, profile, measured or combined)")


def why_not(cost: CostModel, cluster: Cluster, model: MoEModel | None) -> str | None:
    """Reason for which a source cannot time the cluster and model; None: it can."""
    try:
        _ = cost.source
        if reason := cost.lacks_computation(cluster) or cost.lacks_network(cluster):
            return reason
        for gpu in dict.fromkeys(cluster.gpus) if model else ():
            cost.gemm(gpu, np.ones(1), model.d_ff, model.row_width, model.dtype)
    except InputError as error:
        return str(error)
    return None


class Measured(NamedTuple):
    """Times that were measured of a model's kernels, and how its tokens travel by them. words: both, for a person"""

    cost: CostModel
    travel: Travel
    words: str


OFF = {"datasheet": ("25 %", "47 %"), "silicon": ("5.1 %", "1.9 %"), "deepep": (None, "1.7 %")}
"""Errors of a GEMM and of an exchange by a source: of the datasheet in the mean, of measured tables in the median, of `deepep`
across nodes (docs/trust.md)."""
OFF_IN_A_STEP = "93 %"
"""Median error of the datasheet for a whole training step (docs/trust.md); of no other source is one known."""


def measured(cluster: Cluster, model: MoEModel) -> Measured | None:
    """The measured tables of a model on a cluster; None: none are of both.

    Models of DeepSeek-V3's sizes in fp8 travel by DeepEP's normal kernels, the best measured of all (docs/trust.md, exchanges
    across nodes).
    """
    if (model.d_model, model.experts, model.dtype) != (WIDTH, EXPERTS, "fp8"):
        return None
    sources = {"network": DeepEP(), "computation": Silicon()}
    try:
        cost = combine(sources, cluster)
    except InputError:
        return None
    if why_not(cost, cluster, model):
        return None
    travel = Travel(unit="node", combine=travel_of("node").combine)
    return Measured(
        cost,
        travel,
        f"DeepEP's measured exchanges, {OFF['deepep'][1]} off across nodes, and measured kernels; a row a node, bf16 back",
    )


def how_far_off(cost: CostModel, training: bool = False) -> str:
    """A source in a few words, with the error to expect where it is known. training: also that of a whole training step"""
    data = to_dict(cost)
    parts = (data.get("computation", data), data.get("network", data))
    # A datasheet with shares that somebody typed was held against nothing.
    asked = [part["source"] if part in ({"source": part["source"]}, to_dict(Datasheet())) else "" for part in parts]
    gemm, exchange = (OFF.get(source, (None, None))[place] for place, source in enumerate(asked))
    if gemm is None or exchange is None:
        return f"{short(data)}; how far off is not known before a launch"
    words = f"{short(data)}, typically {gemm} off for a GEMM and {exchange} for an exchange"
    if not training:
        return words
    known = data == to_dict(Datasheet())
    return (
        f"{words}; {OFF_IN_A_STEP} for training steps that papers measured" if known else f"{words}; unknown for a whole step"
    )


def short(cost: dict) -> str:
    """A source in a few words, from its JSON."""
    match cost:
        case {"source": "datasheet"}:
            return "datasheet"
        case {"source": "silicon"}:
            return "measured tables"
        case {"source": "deepep"}:
            return "DeepEP's tables"
        case {"source": "combined", "computation": computation, "network": network}:
            return f"{short(computation)}, network by {short(network)}"
    return name_in_file(cost)


def name_in_file(cost: dict) -> str:
    """The name of a source that came from a file, from its JSON."""
    return str(cost[cost["source"]]["name"])
