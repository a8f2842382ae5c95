"""How tokens travel to their experts and back: what is sent once, and in which number formats."""

from typing import Literal

from pydantic import model_validator

from engine.cluster import BITS_PER_DTYPE
from engine.model import MoEModel
from engine.schema import Frozen

TravelUnit = Literal["copies", "gpu", "node"]
Dtype = Literal["fp32", "bf16", "fp16", "fp8"]
Replicas = Literal["fewest"]

NUMBERS_PER_SCALE, BYTES_PER_SCALE = 128, 4
"""A row of 8-bit numbers carries a 32-bit scale for each group of so many (DeepSeek-V3 §3.3.2, DeepEP)."""
BYTES_PER_WEIGHT = 4


class Travel(Frozen):
    """What an engine sends for a token. A row is a token's hidden vector.

    unit: what gets one row of a token.
        "copies": every (token, expert) pair, as the papers have it and DeepEP's low-latency kernels do
        "gpu": every GPU that has one of its experts, as NCCL paths do
        "node": every node that has one. The row enters at the GPU with the sender's place in its node, and goes from there over
            the node's links, once to each further GPU with one of the experts (DeepEP's normal kernels). Where GPUs have no
            links each is a node of its own. Combine goes the same way back, reduced at every stop.
    dispatch, combine: number format of the rows there and back; absent: the model's
    replicas: which copy of an expert serves a token. Absent: its copies in turn. "fewest": each token the copies that touch
        fewest GPUs (with unit "node": nodes) beside its own, and of equal ones the GPU with the fewest choices so far
    """

    unit: TravelUnit = "copies"
    dispatch: Dtype | None = None
    combine: Dtype | None = None
    replicas: Replicas | None = None

    @model_validator(mode="after")
    def _copies_are_chosen_where_rows_are_shared(self) -> "Travel":
        if self.replicas == "fewest" and self.unit == "copies":
            raise ValueError(
                "replicas: where every copy of a token travels on its own no choice saves rows; use gpu or node"
            )
        return self

    def row_bytes(self, model: MoEModel) -> tuple[float, float]:
        """Bytes of a row in dispatch and in combine. One that serves several experts brings the token's gate weights along,
        because their outputs are summed up before they return."""
        out, back = (_row_bytes(dtype, model) for dtype in (self.dispatch, self.combine))
        return out + (0 if self.unit == "copies" else BYTES_PER_WEIGHT * model.experts_per_token), back

    @property
    def in_words(self) -> str:
        """`one row per node, fp8 out, bf16 back`."""
        unit = {"copies": "one row per token copy", "gpu": "one row per GPU", "node": "one row per node"}[self.unit]
        formats = [f"{dtype} {way}" for dtype, way in ((self.dispatch, "out"), (self.combine, "back")) if dtype]
        chosen = (
            [f"each token to the copies that touch fewest {self.unit.replace('gpu', 'GPU')}s"] if self.replicas else []
        )
        return ", ".join([unit, *formats, *chosen])


def _row_bytes(dtype: Dtype | None, model: MoEModel) -> float:
    """Only a format that is named has scales: in 8 bits of a model as the papers have it there are none."""
    scales = -(-model.d_model // NUMBERS_PER_SCALE) * BYTES_PER_SCALE if dtype == "fp8" else 0
    return model.d_model * BITS_PER_DTYPE[dtype or model.dtype] / 8 + scales
