"""How to record with each engine: the same words for the Workload page and for docs/recording.md.

The texts are in `guide_sglang.py`, `guide_vllm.py` and `guide_others.py`; this file says what they consist of.
"""

from typing import Literal

from pydantic import Field

from engine.schema import Frozen


class Way(Frozen):
    """One way to record with an engine.

    key: names it, and its estimate in `estimate.ESTIMATES`
    start: what to start the engine with, or to run, as one would type it
    then: what to do while it runs, as one would type it; "" when there is nothing to do
    ours: our command that does the same, "" where there is none
    gives: what comes out, and what a plan can do with it
    size: what its size grows with
    traps: what has led to wrong plans
    source: where this was read
    """

    key: str = Field(pattern=r"^[a-z-]+$")
    title: str = Field(min_length=1)
    kind: Literal["loads", "routing", "plan"]
    start: str = Field(min_length=1)
    then: str = ""
    ours: str = ""
    gives: str = Field(min_length=1)
    size: str = Field(min_length=1)
    traps: tuple[str, ...] = Field(min_length=1)
    source: str = Field(min_length=1)


class EngineGuide(Frozen):
    """How to record with one engine. advice: which way to take when."""

    name: str = Field(min_length=1)
    advice: str = Field(min_length=1)
    ways: tuple[Way, ...] = Field(min_length=1)


def as_markdown(guide: EngineGuide) -> str:
    """The guide to one engine as a section of docs/recording.md."""
    return "\n\n".join([f"## {guide.name}", guide.advice, *map(_way_as_markdown, guide.ways)]) + "\n"


def _way_as_markdown(way: Way) -> str:
    kind = "python" if way.start.startswith(("from ", "import ")) else "text"
    parts = [f"### {way.title}", f"```{kind}\n{way.start}\n```"]
    if way.then:
        parts.append(f"```text\n{way.then}\n```")
    if way.ours:
        parts.append(f"Or with Switchyard, once the server runs:\n\n```sh\n{way.ours}\n```")
    parts += [f"**What comes out.** {way.gives}", f"**Size.** {way.size}"]
    parts.append("\n".join(f"* {trap}" for trap in way.traps))
    parts.append(f"Source: {way.source}.")
    return "\n\n".join(parts)
