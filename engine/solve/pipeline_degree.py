"""`pipeline-degree`: into how many parts a layer's tokens are cut, so that all-to-alls hide behind experts."""

from typing import Any, Literal

from pydantic import Field

from engine.overlap.pipeline_degree import MOST_PARTS, DegreeInstance, Order, Streams, pipeline_degree
from engine.overlap.pipemoe_printed import pipemoe_printed
from engine.result import Result, Stop
from engine.schema import Frozen
from engine.solve.instance import Face, Options

ALGORITHMS = {"exact": pipeline_degree, "printed": pipemoe_printed}


class PipelineDegreeInstance(Frozen):
    """One layer. `order` is of a single network; `algorithm` "printed" is PipeMoE's Algorithm 1 as it stands."""

    alpha_comm: float = Field(ge=0)
    beta_comm: float = Field(ge=0)
    size_comm: float = Field(ge=0)
    alpha_comp: float = Field(ge=0)
    beta_comp: float = Field(ge=0)
    size_comp: float = Field(ge=0)
    max_degree: int = Field(ge=1, le=MOST_PARTS)
    streams: Streams = 1
    order: Order = "dispatch-first"
    algorithm: Literal["exact", "printed"] = "exact"


def _pipeline_degree(request: PipelineDegreeInstance, options: Options, stop: Stop) -> tuple[Result, dict[str, Any]]:
    instance = DegreeInstance(**request.model_dump(exclude={"algorithm"}))
    result = ALGORITHMS[request.algorithm](instance, stop)
    return result, {"degree": int(result.solution[0]), "time_of_degree": instance.time_of_degree()[0].tolist()}


KERNELS: dict[str, Face] = {"pipeline-degree": (PipelineDegreeInstance, _pipeline_degree)}
