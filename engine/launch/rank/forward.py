"""MoE layers forward, the steps one after another, each when all ranks have finished the previous one, as in
`engine.simulate.inference`."""

from collections.abc import Callable

from engine.launch.rank.communicator import Communicator
from engine.launch.rank.context import RankContext
from engine.launch.rank.difference import Difference
from engine.launch.rank.layers import Layers
from engine.launch.rank.shared_rows import RowsOfNodes, SharedRows
from engine.plan import Plan


def kind_of_layers(plan: Plan) -> type[Layers]:
    """The class that carries out a plan's layers, by the unit that its tokens travel to."""
    unit = "copies" if plan.travel is None else plan.travel.unit
    return {"copies": Layers, "gpu": SharedRows, "node": RowsOfNodes}[unit]


class Forward:
    """Executor of a plan for one model with vanilla execution."""

    def __init__(self, context: RankContext, plan: Plan) -> None:
        self.context, self.communicator = context, Communicator(context)
        self.model = self.layers_of(plan)

    def layers_of(self, plan: Plan) -> Layers:
        return kind_of_layers(plan)(self.context, plan, self.communicator)

    def begin(self) -> None:
        """Set the tokens to the beginning of a pass."""
        self.model.begin()

    def run(self, report: Callable[[float, str], None]) -> None:
        self.pass_through(report)
        self.model.forget()  # another plan may be next

    def pass_through(self, report: Callable[[float, str], None]) -> None:
        """Run all layers, from the first tokens."""
        model = self.model
        self.begin()
        for layer in range(model.layers):
            report(layer / model.layers, f"layer {layer + 1} of {model.layers}")
            with self.context.recorder.paused():
                self.prepare(layer)
            self.communicator.meet()
            model.gate(layer)
            self.communicator.meet()
            self.after_gate(layer)
            model.exchange("dispatch", layer)
            self.communicator.meet()
            model.ffn(layer)
            self.communicator.meet()
            model.exchange("combine", layer)
            self.communicator.meet()
            model.aggregate(layer)
            self.after_layer(layer)

    def prepare(self, layer: int) -> None:
        """Prepare a layer while all clocks are stopped."""
        self.model.ready(layer)

    def after_gate(self, layer: int) -> None:
        """Decide what follows from a layer's gate; the ranks have met before, and have to have met behind."""

    def after_layer(self, layer: int) -> None:
        """Wait for what has to be there before the next layer."""

    def difference(self) -> Difference | None:
        return self.model.difference()
