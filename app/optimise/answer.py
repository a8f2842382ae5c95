"""The answer that heads the results of the Optimise page: a sentence to send on, and which plan stays open."""

from collections.abc import Callable

import streamlit as st

from app import cached, kept, state
from app.tables import plain
from engine import units
from engine.compare.standing import Standing
from engine.compare.verdict import Verdict
from engine.compare.wording import WORDS
from engine.plan import Plan

Judged = Callable[[Plan], tuple[Verdict, float] | None]
"""The last verdict on a plan, and its time in seconds since the epoch; None if there is none."""
PINNED, AWAITED = "optimise-pinned", "optimise-awaited"
"""Keys of choices: begin of that which keeps a plan open, and the job that was started last."""


def show(plan: Plan, standing: Standing, judged: Judged) -> None:
    """The sentence on the open plan, and the choice to keep it open when a run finds a faster one."""
    last = judged(plan)
    text = in_a_sentence(standing, None if last is None else last[0])
    if any(not job.state.finished for job in cached.jobs(state.session.plan_jobs[:1])):
        text += " Still searching" + ("." if _is_kept_open(plan.id) else ": the best plan is opened at the end.")
    with st.container(border=True, horizontal=True, wrap=False, vertical_alignment="center", key="answer"):
        st.markdown(plain(text), width="stretch")
        kept.toggle(
            "Keep open", key=_key(plan.id), help="The best plan of the next run is opened, unless this one is kept open."
        )


def wait_for(job: str) -> None:
    """Count a job as the newest, and open its best plan once it has ended, also after a look at other pages."""
    state.add_plan_job(job)
    state.keep_choice(AWAITED, job)


def is_awaited(job: str | None) -> bool:
    """True if the best plan of an ended job is yet to be opened."""
    return job is not None and state.session.choices.get(AWAITED) == job


def take_first(best: str | None) -> None:
    """Open a plan that a job has found while it still searches; its best replaces it at the end. None: it has none yet"""
    if best is not None:
        state.update(plan=best)


def take(best: str | None) -> None:
    """Open the best plan of the awaited job, unless a person keeps the open one. best: None: it found none"""
    state.forget_choices(AWAITED)
    kept_open = cached.open_plan() is not None and _is_kept_open(state.session.plan)
    if best is not None and not kept_open:
        state.update(plan=best)


def _is_kept_open(plan: str) -> bool:
    return state.session.choices.get(_key(plan)) is True


def _key(plan: str) -> str:
    return f"{PINNED}-{plan[:16]}"


def in_a_sentence(standing: Standing, verdict: Verdict | None) -> str:
    """Change, gain here and on other traffic, price of the move, and advice. verdict: None: not judged yet"""
    if standing.is_deployed:
        return f"{standing.plan} is deployed now: {units.seconds(standing.seconds)}; nothing found here is better."
    times = f"{units.seconds(standing.seconds)} instead of {units.seconds(standing.deployed_seconds)}"
    parts = [f"{standing.plan} takes {times}", f"{standing.gain_words} over {standing.deployed}"]
    if standing.recorded and not standing.is_held_out and standing.span != "step":
        parts.append("its gain on other traffic is not known")
    if standing.move is not None:
        copies = standing.move.copies
        moved = f"{copies:,} expert cop{'ies' if copies > 1 else 'y'} ({units.size(standing.move.bytes)})"
        parts.append(f"moving {moved} pays back {standing.payback}" if copies else "no expert moves")
    advice = "not judged yet: Review says if it is worth it" if verdict is None else f"verdict: {WORDS[verdict.verdict]}"
    return f"{'; '.join([*parts, advice])}."
