"""The kinds of jobs: the question, the answer and the handler of each.

A kind is a handler `handler(ask, context) -> answer`. The annotations of its parameter `ask` and of its return value name two
frozen models, an `Ask` and an `Answer`, which stand in the handler's module. The job folder holds both as JSON
(`engine.jobs.protocol`). A handler is named here rather than imported: a worker, and a page,
loads the modules that it needs and no more.
"""

import importlib
from collections.abc import Callable, Mapping
from typing import get_type_hints

from pydantic import ConfigDict, JsonValue

from engine.errors import InputError
from engine.jobs.protocol import REQUEST, RESULT, Context
from engine.jobs.runner import Job
from engine.schema import Frozen

HANDLERS = {
    "optimise": "engine.jobs.tasks:optimise",
    "launch": "engine.jobs.launches:launch",
    "calibrate": "engine.jobs.launches:calibrate_devices",
    "affinity": "engine.jobs.studies:affinity_study",
    "sweep": "engine.jobs.studies:sweep_study",
    "sensitivity": "engine.jobs.studies:sensitivity_study",
    "curve": "engine.jobs.studies:curve_study",
    "contention": "engine.jobs.studies:contention_study",
    "imprecision": "engine.jobs.studies:imprecision_study",
    "capacity": "engine.jobs.studies:capacity_study",
    "replan": "engine.jobs.studies:replan",
    "front": "engine.jobs.scores:find_front",
    "matrix": "engine.jobs.scores:score_matrix",
    "verdict": "engine.jobs.judgements:verdict",
    "redundancy": "engine.jobs.judgements:redundancy_study",
    "drift": "engine.jobs.judgements:drift_study",
    "size": "engine.jobs.tasks:size",
    "deployments": "engine.jobs.studies:deployments_study",
    "lina": "engine.jobs.scores:lina_study",
    "record": "engine.jobs.recordings:record",
    "reproduce": "engine.jobs.papers:reproduce_paper",
}
"""The only work that a job can do: `module:function` by kind."""

Document = dict[str, JsonValue]
"""A document (a cluster, a plan, …) as JSON; whoever opens it names it in the message on a fault."""


class Ask(Frozen):
    """The question that a job is given. Keys that it does not know are notes of whoever asked, or of another version."""

    model_config = ConfigDict(extra="ignore")


class Answer(Frozen):
    """The findings of a job, so far or final. Keys of other versions are passed over; numbers may be infinite."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=True)


Handler = Callable[[Ask, Context], Answer]


def handler_of(kind: str, handlers: Mapping[str, str] = HANDLERS) -> Handler:
    """The function that does jobs of a kind. Raises InputError if there is none."""
    if kind not in handlers:
        raise InputError(f"{REQUEST}: no job is of the kind '{kind}'; the kinds are {', '.join(sorted(handlers))}")
    module, function = handlers[kind].split(":")
    return getattr(importlib.import_module(module), function)


def ask_type(handler: Handler) -> type[Ask]:
    """The model of a handler's question."""
    return get_type_hints(handler)["ask"]


def answer_type(handler: Handler) -> type[Answer]:
    """The model of a handler's answer."""
    return get_type_hints(handler)["return"]


def answered(handler: Handler, arguments: Document, context: Context) -> Answer:
    """Do a job from its question in JSON. Raises InputError if the question is faulty."""
    return handler(ask_type(handler).from_dict(arguments, REQUEST), context)


def read_answer(job: Job) -> Answer | None:
    """The answer of a job so far; None while there is none. Raises InputError if it is damaged, or of a version that
    kept other fields."""
    if (result := job.result) is None:
        return None
    try:
        return answer_type(handler_of(job.request.kind)).from_dict(result, RESULT)
    except InputError as error:
        fault = str(error).removeprefix(f"{RESULT}: ")
        raise InputError(f"{job.folder / RESULT} is damaged ({fault}); run the job again") from None
