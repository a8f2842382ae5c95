"""The all-to-alls of two models that NCCL lets run at the same time.

Over NCCL, kernels start in the order in which the host hands them over (see `settings`): a kernel handed over behind an
exchange waits until the last batch of that exchange has begun. The meeting that ends an exchange of model a begins only
when that exchange has ended, so handed over before the exchange of b it delays b until all ranks have ended a's. If
both are one batch, the meeting comes behind the exchange of b, which then begins as soon as all ranks have finished the
step that feeds it. With phases nothing is won: those of b begin with the last one of a at the earliest, and behind
those of b the meeting would keep a's computation waiting for the last of them. So it stays before them, and the network
serves one all-to-all after the other. Both meetings come before a's combine in any case, as b's experts would otherwise
wait for those of a on all ranks.

Only a GPU shows that kernels start as NCCL says; the order in which they are handed over is tested without one.
"""

from engine.launch.rank.instructions import RankInstructions
from engine.plan import Plan


def left_open(instructions: RankInstructions, plan: Plan) -> bool:
    """True if the meetings that end the exchanges of both models are handed over after both exchanges."""
    by_node = plan.travel is not None and plan.travel.unit == "node"  # step by step
    in_one_batch = plan.send_order.mode == plan.send_order_b.mode == "concurrent" and not by_node
    return instructions.backend == "nccl" and in_one_batch


def in_turn(instructions: RankInstructions, plan: Plan) -> frozenset[tuple[str, int]]:
    """The all-to-alls of a layer, (kind, model), that begin only when the previous one has ended on all ranks."""
    if instructions.backend != "nccl":
        return frozenset()
    if left_open(instructions, plan):
        return frozenset({("combine", 0)})
    return frozenset({("dispatch", 1), ("combine", 0), ("combine", 1)})
