"""The job that computes figures and tables of the papers."""

from engine.jobs.kinds import Answer, Ask
from engine.jobs.protocol import Context
from engine.reproduce.exhibits import Exhibit
from engine.reproduce.papers import reproduce
from engine.schema import Frozen


class ReproduceAsk(Ask):
    """paper: a name of `PAPERS`; figure: as the paper numbers it; None: all of them"""

    paper: str
    figure: str | None = None


class Computed(Frozen):
    """number: of the figure or table"""

    number: str
    exhibit: Exhibit


class ReproduceAnswer(Answer):
    """Those that are ready, in the paper's order."""

    exhibits: tuple[Computed, ...] = ()


def reproduce_paper(ask: ReproduceAsk, context: Context) -> ReproduceAnswer:
    """Compute figures and tables of a paper, one after the other."""
    answer = ReproduceAnswer()
    for _, entry, exhibit in reproduce(ask.paper, ask.figure, context.stop, context.report):
        answer = ReproduceAnswer(exhibits=(*answer.exhibits, Computed(number=entry.number, exhibit=exhibit)))
        context.keep(answer)
    return answer
