"""The figures that a plan has to reach, each with a name and a reason; whoever decides may set others."""

from pydantic import Field

from engine.problem import MEMORY_SHARE
from engine.studies.judge import CONFIDENCE
from engine.systems.options import Options


class Thresholds(Options):
    """Shares unless another unit is said. They decide on the evidence and enter none of it.

    gain: below about a twentieth a canary cannot tell a plan from the difference between two servers, and whole steps are
        predicted to 4 to 11 % (docs/serving.md)
    try_gain: less does not repay the attention of whoever rolls it out
    worst_gain: a plan should lose on no recording that it is going to serve
    persistence: a plan that keeps less than half of the possible gain would have to be made anew all the time
    replica_gain: over the same system without replicas; less is not worth the keys and values that their memory could hold
    break_even_minutes: a sixth of the hour for which a plan is asked to serve
    memory: the rest is for activations, buffers and the runtime
    tokens_per_expert: counts scatter by 1 / √n: 25 by a fifth; of fewer nobody knows whether an expert is popular
    confidence: of the interval of the gain
    """

    gain: float = Field(
        0.05, ge=0, le=10, description="do it: minimum gain on recordings that the plan was not made from"
    )
    try_gain: float = Field(
        0.02, ge=0, le=10, description="try it: minimum gain on recordings that the plan was not made from"
    )
    worst_gain: float = Field(0.0, ge=-1, le=10, description="do it: minimum gain on the worst of them")
    persistence: float = Field(
        0.5, ge=0, le=1, description="do it: minimum part of the gain that is kept on held-out recordings"
    )
    replica_gain: float = Field(0.01, ge=0, le=10, description="do it: minimum gain from replicas")
    break_even_minutes: float = Field(
        10.0, ge=0, le=1e6, description="maximum time until the move pays off, in minutes"
    )
    memory: float = Field(MEMORY_SHARE, gt=0, le=1, description="maximum share of the fullest GPU's memory")
    tokens_per_expert: float = Field(25.0, ge=0, le=1e9, description="minimum token copies per expert, on average")
    confidence: float = Field(CONFIDENCE, ge=0.5, le=0.9999, description="that the gain lies in its interval")
