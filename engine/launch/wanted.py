"""What a launch is to run, and where: what a person chooses, and the arguments of a job."""

from dataclasses import dataclass, replace
from typing import Any, Literal

from engine import store
from engine.cluster import Cluster
from engine.errors import InputError
from engine.launch import testbed
from engine.launch.destination import SCHEDULERS, Destination
from engine.launch.devices import Devices
from engine.launch.preflight import cluster_checks, place_checks
from engine.launch.prepare import Launch, prepare
from engine.launch.prepare_step import prepare_step
from engine.launch.testbed import Testbed
from engine.model import MoEModel
from engine.plan import Plan
from engine.schema import Frozen
from engine.training import TrainingStep
from engine.workload import Workload

On = Literal["local", "testbed", "slurm", "kubernetes"]
PLACES = {"local": "this machine", "testbed": "testbed", "slurm": "Slurm", "kubernetes": "Kubernetes"}
"""Where the ranks of a launch can run, for people."""


@dataclass(frozen=True, eq=False)
class Wanted:
    """What a launch is to run, see `prepare`.

    plans: run in turn, the one in question first; second: recording and model that share the ranks; step: of plans for
    training
    cluster: as drawn; scale: of a testbed, see `testbed.emulated`; destination: of a launch by a scheduler, which also says
    how many ranks there are
    """

    plans: tuple[Plan, ...]
    workload: Workload
    model: MoEModel
    cluster: Cluster | None = None
    second: tuple[Workload, MoEModel] | None = None
    on: On = "local"
    scale: float | None = None
    destination: Destination | None = None
    ranks: int | None = None
    tokens: int | None = None
    repeats: int = 3
    limit: float = 900.0
    dtype: Literal["fp32", "bf16"] | None = None
    step: TrainingStep | None = None

    def to_arguments(self) -> dict[str, Any]:
        """The arguments of a job, as plain JSON; the recordings must be in the data folder."""
        found: dict[str, Any] = {
            "plans": [_json(plan) for plan in self.plans],
            "workload": self.workload.digest,
            "model": _json(self.model),
            "on": self.on,
            "ranks": self.ranks,
            "tokens": self.tokens,
            "repeats": self.repeats,
            "limit": self.limit,
            "dtype": self.dtype,
            "scale": self.scale,
        }
        if self.second is not None:
            found["second"] = {"workload": self.second[0].digest, "model": _json(self.second[1])}
        for role in ("cluster", "destination", "step"):
            if (document := getattr(self, role)) is not None:
                found[role] = _json(document)
        return found

    @classmethod
    def from_arguments(cls, arguments: dict[str, Any]) -> "Wanted":
        """What `to_arguments` described. Raises InputError when the data folder has lost a recording."""
        on = arguments.get("on", "local")
        if on not in PLACES:
            raise InputError(f"a launch runs on {' or '.join(PLACES)}, not on {on!a}")
        cluster, second, step = (arguments.get(role) for role in ("cluster", "second", "step"))
        return cls(
            plans=tuple(Plan.from_dict(plan, "plan") for plan in arguments["plans"]),
            workload=store.load_workload(arguments["workload"]),
            model=MoEModel.from_dict(arguments["model"], "model"),
            cluster=cluster and Cluster.from_dict(cluster, "cluster"),
            second=second
            and (store.load_workload(second["workload"]), MoEModel.from_dict(second["model"], "second model")),
            on=on,
            scale=arguments.get("scale"),
            destination=SCHEDULERS[on].from_dict(arguments["destination"], on) if on in SCHEDULERS else None,
            ranks=arguments.get("ranks"),
            tokens=arguments.get("tokens"),
            repeats=arguments.get("repeats", 3),
            limit=arguments.get("limit", 900.0),
            dtype=arguments.get("dtype"),
            step=step and TrainingStep.from_dict(step, "training step"),
        )

    def prepare(self, devices: Devices) -> tuple[Launch, Testbed | None]:
        """The launch, and where the links are emulated, their testbed (not yet built). Raises InputError when it makes no
        sense. devices: those of this machine."""
        ranks, bed = self.ranks, None
        if self.on == "testbed":
            devices = replace(devices, gpus=(), memory=())  # ranks in namespaces talk over Gloo, from the CPU
        elif self.destination is not None:
            devices, ranks = self.destination.devices, self.destination.ranks
        chosen = {"ranks": ranks, "repeats": self.repeats, "limit": self.limit, "dtype": self.dtype}
        if self.step is not None:
            launch = prepare_step(self.plans, self.workload, self.model, self.step, devices, **chosen)
        else:
            more = {"tokens": self.tokens, "second": self.second}
            launch = prepare(self.plans, self.workload, self.model, devices, **chosen, **more)
        if self.on == "testbed":
            bed = testbed.emulated(self.plans[0], self.cluster, launch.spec.ranks, self.scale)
        where = self.destination
        more = cluster_checks(launch, where, self.cluster) if where is not None else place_checks(launch, bed)
        return replace(launch, checks=(*launch.checks, *more)), bed


def _json(document: Frozen) -> dict[str, Any]:
    return document.model_dump(mode="json", exclude_none=True)
