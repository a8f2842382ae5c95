"""The ranks of a launch in two tiers: nodes with links of their own, and the fabric between them."""

import numpy as np

from engine.network import Network
from engine.plan import Plan
from engine.schema import Frozen


def uses_nodes(plan: Plan) -> bool:
    """Whether ranks of a node pass rows on to each other, so that all have to know which nodes there are."""
    return plan.send_order.mode == "two-tier" or (plan.travel is not None and plan.travel.unit == "node")


class Tiers(Frozen):
    """node: of every rank; port, link: bytes/s of every rank in each direction, to the fabric and to the other ranks of its
    node. No rank is of two nodes. A link of 0: it meets them on the fabric."""

    node: tuple[int, ...]
    port: tuple[float, ...]
    link: tuple[float, ...]

    @property
    def network(self) -> Network:
        """Without start-ups. All ranks make the same one, whatever they measure."""
        port = np.array(self.port)
        return Network(port, port, np.array(self.link), np.array(self.node), 0.0, np.zeros(len(port)))
