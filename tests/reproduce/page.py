"""docs/reproduced.md, the table of claims: `python -m tests.reproduce.page` computes all and writes it, in ten minutes."""

from pathlib import Path

from engine.reproduce.exhibits import Claim, Verdict, in_words
from engine.reproduce.papers import PAPERS, reproduce
from engine.result import never
from engine.systems.base import silent

PAGE = Path(__file__).parents[2] / "docs" / "reproduced.md"
HEAD = """# What of the papers comes out here

Numbers that the papers print of their figures and tables, from our engine on their clusters and settings, as
`python -m engine reproduce all` has it. The [Papers page](guide/papers.md) has the rule of the verdicts, draws charts and opens
settings. Why ours differ was tried by changing one thing at a time; the reasons stand below each table.
"""
TABLE = ["", "| | Quantity | The paper | Ours | |", "|---|---|---|---|---|"]


def tables() -> str:
    """A table a paper, with a row a claim and the reasons of those that are not reproduced."""
    lines = []
    for name, paper in PAPERS.items():
        made = reproduce(name, None, never, silent)
        claims = [(entry.number, claim) for _, entry, exhibit in made for claim in exhibit.claims]
        counts = ", ".join(f"{sum(claim.verdict is each for _, claim in claims)} {each.value}" for each in Verdict)
        lines += ["", f"## {paper.title}", "", f"{paper.source}: {counts}.", *TABLE]
        lines += [f"| {number} | {' | '.join(cells(claim))} |" for number, claim in claims]
        reasons: dict[str, None] = {}
        for number, claim in claims:
            if claim.verdict is not Verdict.REPRODUCED:
                reasons.setdefault(f"* {number}: {claim.why.rstrip('.')}.")
        lines += ["", *reasons]
    return "\n".join(lines) + "\n"


def cells(claim: Claim) -> list[str]:
    """The texts of a row."""
    return [claim.quantity, in_words(claim.published), in_words(claim.ours), claim.verdict.value]


if __name__ == "__main__":
    PAGE.write_text(HEAD + tables(), encoding="utf-8")
