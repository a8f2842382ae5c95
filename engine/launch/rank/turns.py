"""Which all-to-alls of two models NCCL lets run side by side.

Over NCCL kernels start in the order in which the host hands them over (see `settings`): what is handed over behind an
exchange waits until its last batch has begun. The meeting that ends an exchange of a begins only where that has ended, so
before the exchange of b it lets that one wait until all ranks have ended a's. Where both are one batch it comes behind the
exchange of b, which then begins as soon as all ranks have finished what feeds it. With phases nothing is won: those of b
begin with the last one of a at the earliest, and behind those of b the meeting would keep a's computation waiting for the
last of them. So it stays before them, and the network serves one all-to-all after the other. Both meetings come before a's
combine in any case, as b's experts would else wait for those of a on all ranks.

That kernels start as NCCL says takes a GPU to see; the order in which they are handed over does not.
"""

from engine.launch.rank.instructions import RankInstructions
from engine.plan import Plan


def left_open(instructions: RankInstructions, plan: Plan) -> bool:
    """Whether the meetings that end exchanges of both models are handed over when both exchanges have been."""
    by_node = plan.travel is not None and plan.travel.unit == "node"  # step by step
    in_one_batch = plan.send_order.mode == plan.send_order_b.mode == "concurrent" and not by_node
    return instructions.backend == "nccl" and in_one_batch


def in_turn(instructions: RankInstructions, plan: Plan) -> frozenset[tuple[str, int]]:
    """The all-to-alls of a layer, (kind, model), that begin only when the one before has ended on all ranks."""
    if instructions.backend != "nccl":
        return frozenset()
    if left_open(instructions, plan):
        return frozenset({("combine", 0)})
    return frozenset({("dispatch", 1), ("combine", 0), ("combine", 1)})
