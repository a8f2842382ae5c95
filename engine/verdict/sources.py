"""Which recordings a plan was made from, and which it has not seen."""

from collections.abc import Sequence

from engine.plan import Plan
from engine.serving.step import recording_of_step
from engine.studies.judge import Judge
from engine.workload import Workload

AT_STEP = ", at "
"""After the name of a recording that was brought to the tokens of a step, see `recording_of_step`."""


def split_by_origin(
    plan: Plan, recordings: Sequence[Workload], judge: Judge
) -> tuple[tuple[Workload, ...], tuple[Workload, ...]]:
    """(those that the plan was made from, the first of them the one it was planned for, none where one is missing; those that
    it has not seen), each once.

    A recording is known by a digest in the plan's provenance, its own or that of itself at the tokens of the judge's step; one
    at the tokens of another step, by its name.
    """
    roles = roles_of(plan)
    distinct = list({recording.digest: recording for recording in recordings}.values())
    known = {
        roles[digest]: recording for recording in distinct for digest in _digests(recording, judge) if digest in roles
    }
    own = {
        role: next((whole for whole in distinct if recording.name.startswith(whole.name + AT_STEP)), recording)
        for role, recording in known.items()
    }
    seen = {recording.digest for recording in (*known.values(), *own.values())}
    complete = set(own) == set(roles.values())
    unseen = tuple(other for other in distinct if other.digest not in seen)
    return tuple(own[role] for role in sorted(own)) if complete else (), unseen


def roles_of(plan: Plan) -> dict[str, str]:
    """The digests of the recordings that a plan was made from, each with its role."""
    return {
        digest: role
        for role, digest in plan.provenance.inputs.items()
        if role == "workload" or role.startswith("workload_also_")
    }


def _digests(recording: Workload, judge: Judge) -> list[str]:
    digests = [recording.digest]
    if judge.serving is not None:
        gpus = len(judge.problem.cluster.gpus)
        digests.append(recording_of_step(recording, judge.serving.step, judge.problem.model, gpus).digest)
    return digests
