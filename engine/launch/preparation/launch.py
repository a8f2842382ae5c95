"""A launch as a person asks for it, and as `prepare` makes it ready: the input of its ranks, their destination, and the
lines of the pre-flight check."""

from dataclasses import dataclass, replace
from typing import Any, Literal

from engine.cluster import Cluster
from engine.errors import InputError
from engine.goal import Goal, goal_of
from engine.launch.places.destination import SCHEDULERS, Destination
from engine.launch.places.testbed import Testbed
from engine.launch.rank.instructions import OwnModel, RankInstructions, uses_nodes
from engine.model import MoEModel
from engine.plan import Plan
from engine.training import TrainingStep
from engine.workload import RoutingTrace, Workload

On = Literal["local", "testbed", "slurm", "kubernetes"]
PLACES = {"local": "this machine", "testbed": "testbed", "slurm": "Slurm", "kubernetes": "Kubernetes"}
"""Names of the places of a launch's ranks, for people."""

SMALLER = "Smaller model"
"""Name of the check that says by how much the model of a launch was shrunk."""
ROUTING = "Routing"
"""Name of the checks that say of what the tokens of a launch were made, if they were not recorded."""

SETTINGS = ("ranks", "tokens", "repeats", "limit", "dtype", "scale")
"""Fields of a launch that are JSON as they are."""


@dataclass(frozen=True, eq=False)
class Launch:
    """A person's request to run plans: their choices, and the arguments of a job. `prepare` makes it ready.

    plans: run in turn in one job, so that they can be compared, the one in question first
    cluster: as drawn, for a testbed and for advice on send orders before a launch
    second: recording and model that share the ranks, for plans of two models
    scale: of a testbed, see `testbed.emulated`
    destination: of a launch by a scheduler, which also gives the number of ranks
    tokens: number of the recording's to replay, evenly spaced, or to make of a workload that has none (default: as many as
        `inference.FLOP_BUDGET` allows); a second one is replayed to the same part
    repeats: timed passes
    limit: seconds
    dtype: of all numbers (default: on GPUs the model's own, bf16 if it cannot be computed in; on CPUs fp32)
    step: of plans for training
    own: the model itself, on texts, instead of replayed routing; the workload is then the one that the plans were made for
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
    own: OwnModel | None = None

    @property
    def goal(self) -> Goal:
        """The goal of the run, told by its inputs; plans with another one are refused."""
        return goal_of(training=self.step is not None, two_models=self.second is not None)

    def to_arguments(self) -> dict[str, Any]:
        """The arguments of a job, as plain JSON; the recordings must be in the data folder."""
        from engine.store import problems  # here and below, as ranks have no use for its readers

        documents = {role: getattr(self, role) for role in ("cluster", "destination", "step", "own")}
        settings = {name: getattr(self, name) for name in ("on", *SETTINGS)}
        inputs = problems.input_arguments(self.workload, self.model, self.second, **documents)
        return {"plans": [problems.as_json(plan) for plan in self.plans]} | inputs | settings

    @classmethod
    def from_arguments(cls, arguments: dict[str, Any]) -> "Launch":
        """The launch that `to_arguments` described. Raises InputError if the data folder has lost a recording."""
        from engine.store import problems

        on = arguments.get("on", "local")
        if on not in PLACES:
            raise InputError(f"a launch runs on {' or '.join(PLACES)}, not on {on!a}")
        return cls(
            plans=tuple(Plan.from_dict(plan, "plan") for plan in plans_in(arguments)),
            **problems.inputs_from(arguments),
            on=on,
            own=OwnModel.from_dict(arguments["own"], "own model") if arguments.get("own") else None,
            destination=SCHEDULERS[on].from_dict(arguments["destination"], on) if on in SCHEDULERS else None,
            **{name: arguments[name] for name in SETTINGS if name in arguments},
        )


def plans_in(arguments: dict[str, Any]) -> list[dict[str, Any]]:
    """The plans of a launch's arguments, as JSON. The first version ran one."""
    return arguments["plans"] if "plans" in arguments else [arguments["plan"]]


@dataclass(frozen=True)
class Check:
    """One line of the pre-flight check. warning: true if a person should think before going on, although nothing forbids it."""

    name: str
    passed: bool
    text: str
    warning: bool = False


@dataclass(frozen=True, eq=False)
class PreparedLaunch:
    """A launch made ready by `prepare`. Without testbed and destination the ranks run on this machine as it is.

    plans: as asked for, before they were folded onto the ranks
    workloads: replayed, of the model and of a second one; routing logs, except in a step with balanced routing; none of a
        person's own model, which routes itself
    limit: seconds
    testbed: emulates its links, not yet built
    destination: of a launch by a scheduler
    profile: tokens of the recording that a plan's scheduler at run time has learnt from
    """

    plans: tuple[Plan, ...]
    instructions: RankInstructions
    workloads: tuple[Workload, ...]
    limit: float
    checks: tuple[Check, ...]
    testbed: Testbed | None = None
    destination: Destination | None = None
    profile: RoutingTrace | None = None

    @property
    def failed(self) -> Check | None:
        """The first check that did not pass."""
        return next((check for check in self.checks if not check.passed), None)

    @property
    def ready(self) -> bool:
        """True if all checks passed."""
        return self.failed is None

    def check(self) -> None:
        """Raise InputError unless all checks passed."""
        if self.failed:
            raise InputError(f"pre-flight: {self.failed.name.lower()}: {self.failed.text}")

    @property
    def smaller(self) -> str:
        """The words on a model that was shrunk to fit; empty if it was not."""
        return next((check.text for check in self.checks if check.name == SMALLER), "")

    @property
    def routing(self) -> str:
        """The words on tokens that were not recorded; empty if all were."""
        return "; ".join(check.text for check in self.checks if check.name == ROUTING)

    @property
    def tokens(self) -> int:
        """Tokens of the (first) recording that are replayed, that all ranks feed into a training step, or that a person's own
        model reads and writes."""
        step, own = self.instructions.step, self.instructions.own
        if own is not None:
            return own.tokens
        return self.workloads[0].tokens if step is None else step.tokens * self.instructions.ranks

    def on_testbed(self, testbed: Testbed) -> "PreparedLaunch":
        """The same launch on emulated links. Raises InputError if they are not for its ranks."""
        instructions = self.instructions
        if instructions.backend != "gloo" or instructions.ranks != testbed.ranks:
            raise InputError(
                f"{testbed.name} has links for {testbed.ranks} ranks on CPUs, the launch is of {instructions.ranks} ranks on "
                f"{instructions.backend.upper()}"
            )
        relayed = [plan.name for plan in instructions.plans if uses_nodes(plan)]
        if relayed and testbed.tiers is None:
            raise InputError(f"{testbed.name} has no nodes, in which the ranks of {relayed[0]} relay for each other")
        known = {"bandwidth": tuple(testbed.bandwidth.tolist()), "tiers": testbed.tiers}
        return replace(self, instructions=instructions.model_copy(update=known), testbed=testbed)
