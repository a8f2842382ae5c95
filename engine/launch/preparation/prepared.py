"""A launch that is ready to run: what its ranks get, where they run, and what the pre-flight check says of it."""

from dataclasses import dataclass, replace

from engine.errors import InputError
from engine.launch.places.destination import Destination
from engine.launch.places.testbed import Testbed
from engine.launch.rank.instructions import RankInstructions
from engine.launch.rank.tiers import uses_nodes
from engine.plan import Plan
from engine.workload import Workload


@dataclass(frozen=True)
class Check:
    """One line of the pre-flight check. warning: whether a person should think before going on, although nothing forbids
    it."""

    name: str
    passed: bool
    text: str
    warning: bool = False


@dataclass(frozen=True, eq=False)
class PreparedLaunch:
    """What `prepare` makes of a launch.

    plans: as asked for, before they were folded onto the ranks; workloads: what is replayed, of the model and of a second
    one; limit: seconds; testbed: where its links are emulated, not yet built; destination: of a launch by a scheduler.
    Without either the ranks run on this machine as it is.
    """

    plans: tuple[Plan, ...]
    instructions: RankInstructions
    workloads: tuple[Workload, ...]
    limit: float
    checks: tuple[Check, ...]
    testbed: Testbed | None = None
    destination: Destination | None = None

    @property
    def failed(self) -> Check | None:
        """The first check that did not pass."""
        return next((check for check in self.checks if not check.passed), None)

    @property
    def ready(self) -> bool:
        """Whether all checks passed."""
        return self.failed is None

    def check(self) -> None:
        """Raise InputError unless all checks passed."""
        if self.failed:
            raise InputError(f"pre-flight: {self.failed.name.lower()}: {self.failed.text}")

    @property
    def tokens(self) -> int:
        """Of the (first) recording that are replayed, or that all ranks feed into a training step."""
        step = self.instructions.step
        return self.workloads[0].tokens if step is None else step.tokens * self.instructions.ranks

    def on_testbed(self, testbed: Testbed) -> "PreparedLaunch":
        """The same launch on emulated links. Raises InputError when they are not for its ranks."""
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
