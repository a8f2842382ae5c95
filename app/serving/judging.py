"""The open serving step as an argument of jobs that judge plans in it."""

from typing import Any

from app import state
from app.serving.figures import check_cluster
from app.serving.model import beside_experts
from engine.errors import InputError
from engine.problem import Problem


def arguments(problem: Problem) -> dict[str, Any]:
    """`serving` for the step, where one is open for the problem's model and can be timed on its cluster; nothing elsewhere."""
    step, model = state.serving(), state.model()
    if step is None or model is None or model.digest != problem.model.digest:
        return {}
    try:
        check_cluster(problem)
        beside = beside_experts(model)
    except InputError:
        return {}
    step, sizes = (part.model_dump(mode="json", exclude_none=True) for part in (step, beside.sizes))
    return {"serving": {"step": step, "sizes": sizes, "config": None if beside.config is None else str(beside.config)}}
