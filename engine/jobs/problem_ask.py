"""A job's question about a problem. Apart from `engine.jobs.kinds`, since a worker that waits has no need of problems."""

from engine.jobs.kinds import Ask, Document
from engine.problem import Problem
from engine.store.problems import problem_from


class ProblemAsk(Ask):
    """A question about a problem, as `engine.store.problems.problem_arguments` writes it.

    workload, others: digests of recordings in the data folder
    cost: None: the datasheet's
    """

    workload: str
    cluster: Document
    model: Document
    others: tuple[str, ...] = ()
    cost: Document | None = None
    second: Document | None = None
    in_use: Document | None = None
    step: Document | None = None
    graph: Document | None = None
    travel: Document | None = None

    def problem(self) -> Problem:
        """The problem with its recordings. Raises InputError if one is lost or a part does not fit."""
        arguments = {name: getattr(self, name) for name in ProblemAsk.model_fields}
        return problem_from({name: value for name, value in arguments.items() if value is not None})
