"""The tolerance between the output of a plan and that of a computation without one: a plan changes the time and place
of work, never its result.

In 32 bits only the order of sums differs, and a fixed bound tells rounding from a mistake. A model that computes in a
shorter format rounds after every step, and the effect depends on the model: the outputs of one layer in bf16 are off by some
thousandths of the largest, those of 48 gated layers by some hundredths. So its unplanned computation runs twice, in 32 bits and
in its own format, and the plan's may be `TIMES` as far from the first as the second is, tensor by tensor.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from engine.model import MoEModel
from engine.plan import Plan

if TYPE_CHECKING:
    import torch

TIMES = 3.0
"""The plan adds up in another order and in other parts: both errors are draws of one kind, not one number."""

ALWAYS = {"fp32": 1e-4, "bf16": 1e-2, "fp16": 2e-3, "fp8": 5e-2}
"""Allowed in any case, relative to the largest number, by the coarsest format in which numbers are computed or sent.
Both sides round to it, but the last bit of a sum before that can decide which of two neighbours a number becomes, and
by luck the unplanned computation is spared it: half a step is a sixteenth of a number in fp8."""


class Difference(NamedTuple):
    """A difference between two tensors.

    error: the largest difference, relative to the largest reference number; NaN or infinite if one is not a number
    allowed: the largest error that rounding explains
    """

    error: float
    allowed: float

    @property
    def share(self) -> float:
        """Share of the allowed error; infinite if something is not a number."""
        share = self.error / self.allowed
        return share if share == share else float("inf")


def coarsest(model: MoEModel, plan: Plan) -> str:
    """The coarsest number format that a launch of a plan computes or sends in, a key of `ALWAYS`."""
    formats = {model.dtype}
    if plan.travel is not None:
        formats |= {plan.travel.dispatch, plan.travel.combine} - {None}
    return max(formats, key=ALWAYS.__getitem__)


def allowed(number_format: str, unplanned: float = 0.0) -> float:
    """The tolerance of a plan's tensor.

    number_format: see `coarsest`
    unplanned: error of the unplanned tensor in the format of the model
    """
    return max(ALWAYS[number_format], TIMES * unplanned)


def in_words(dtype: str, number_format: str, of: str) -> str:
    """The tolerance of a plan's tensors, as the end of a sentence on the computation they are compared with.

    dtype: format of the computation
    number_format: see `coarsest`
    of: the base of the relative figures
    """
    least = f"{ALWAYS[number_format]:.2g} of {of}"
    if dtype == "fp32":
        return f", to a relative tolerance of {least}"
    return f" in fp32: it may be {TIMES:g} times as far from that as an unplanned one in {dtype} is, or {least}"


def worst(differences: Iterable[Difference]) -> Difference:
    """The difference that is nearest to its allowed error or farthest beyond."""
    return max(differences, key=lambda difference: difference.share)


def relative(tensor: "torch.Tensor", wanted: "torch.Tensor") -> float:
    """The largest difference over the largest number wanted; infinite if that is 0, and for NaN."""
    difference, largest = float((tensor.to(wanted.dtype) - wanted).abs().max()), float(wanted.abs().max())
    if difference == 0:
        return 0.0
    share = difference / largest if largest else float("inf")
    return share if share == share else float("inf")
