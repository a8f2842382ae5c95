"""The verdict line: the same figures of a plan on every page that shows one."""

from dataclasses import replace

import streamlit as st

from app import cached
from app.charts import theme as charts
from app.tables import plain, sentence
from engine import units
from engine.compare.standing import Span, Standing, gain_in_words, is_loss
from engine.errors import InputError
from engine.plan import Plan
from engine.problem import Problem
from engine.serving.figures import ServingFigures

TIMES: dict[Span, str] = {
    "pass": "Simulated pass",
    "step": "Simulated step",
    "token": "Simulated time per token",
    "prompt": "Simulated time to first token",
}
LARGE = "###### {}"
NAME = 22
"""Most characters of the baseline's name: a longer one would leave the figures next to it three rows in a window of 1024."""
RATES: dict[Span, str] = {
    "pass": "Through the MoE layers alone: attention and dense layers take the same under every plan.",
    "step": "Tokens trained on.",
    "token": "Generated tokens: of one GPU, of all, and of a sequence, which is a user's.",
    "prompt": "Tokens of the prompts: of one GPU, and of all.",
}


def show_plan(plan: Plan, problem: Problem, narrow: bool = False) -> None:
    """The line of a plan for the open problem; nothing if it cannot be simulated, which pages say where they need it.

    narrow: as for `show`
    """
    try:
        standing = cached.open_standing(plan, problem)
    except InputError:
        return
    show(standing, how_timed(plan, problem, cached.open_serving(problem)), narrow)


def how_timed(plan: Plan, problem: Problem, serving: cached.Serving | None) -> str:
    """The source of the times of a plan in a step, a pass or a training step."""
    figures = cached.figures_for(plan, problem, serving)
    if isinstance(figures, ServingFigures):
        return f"MoE layers: {figures.sources[1]}; the rest: {figures.sources[0]}"
    return f"{figures.how_simulated}; costs: {problem.source_of_times(plan.travel)}"


def say_made_for(plan: Plan, problem: Problem) -> None:
    """Name the inputs that a plan was made for, if they are not the open ones. Below the page's subject, as it takes a line."""
    if others := cached.made_for(plan, problem):
        names = plain(", ".join(others.values()))
        st.caption(f":material/info: Made for {names}; the figures are for what is open now.")


def show_plan_if_soon(plan: Plan, problem: Problem) -> None:
    """The line on pages that simulate nothing themselves; if that takes long, a link to the page that shows it."""
    try:
        soon = cached.is_soon(plan, problem)
    except InputError:
        return
    if soon:
        show_plan(plan, problem)
    else:
        st.caption("How this plan stands against what is deployed takes a while to simulate: the Timeline shows it.")


def show(standing: Standing, how: str, narrow: bool = False) -> None:
    """The line: the gain, large, and the figures that explain it.

    how: source of its times
    narrow: True next to a form: figures without room go on under the gain
    """
    line = st.container(border=True, horizontal=True, wrap=narrow, gap="small" if narrow else "medium", key="verdict-line")
    with line.container(gap=None, width="content"):
        _gain(standing)
    with line if narrow else line.container(horizontal=True, gap="small", vertical_alignment="center"):
        st.metric(TIMES[standing.span], units.seconds(standing.seconds), width="content", help=sentence(how))
        st.metric(standing.rate_name, units.digits(standing.tokens_per_second), width="content", help=RATES[standing.span])
        if standing.span in ("token", "prompt"):
            st.metric("In all", units.digits(standing.tokens_in_all), width="content", help="tokens/s of the cluster")
        if standing.tokens_per_user is not None:
            st.metric("Per user", units.digits(standing.tokens_per_user), width="content", help="tokens/s of a sequence")
        if standing.move is not None:  # before the bounds with their long names: in a window of 1024 two rows hold all
            _move(standing)
        st.metric(*standing.above_bounds, width="content", help=plain(standing.bound_covers))
    st.caption(plain(scope_in_words(standing)))
    if standing.is_held_out and is_loss((worst := standing.risks[0]).gain):
        st.caption(
            f":orange[:material/warning:] On {plain(worst.recording)} it is "
            f"{plain(gain_in_words(worst.gain, standing.deployed))}."
        )


def _gain(standing: Standing) -> None:
    """The largest figure of the line.

    `st.metric` has one size for all figures; a heading of the last level has one of its own in the theme, and no space above
    it.
    """
    if standing.is_deployed:
        st.caption("Deployed now")
        help = "Gains are counted from here. What runs today is chosen on the Optimise page."
        st.markdown(LARGE.format(units.share(0.0)), width="content", help=help)
        return
    name = plain(standing.deployed)
    scope = f", {standing.scope}" if standing.scope else ""
    st.caption(f"Gain over {plain(charts.shortened(standing.deployed, NAME))}{scope}")
    st.markdown(
        LARGE.format(units.signed(standing.gain - 1)),
        width="content",
        help=f"{standing.gain_words}: how much more gets done in the same time than by {name}, which counts as deployed and "
        f"takes {units.seconds(standing.deployed_seconds)} here. What is deployed is chosen on the Optimise page.",
    )


def _move(standing: Standing) -> None:
    move = standing.move
    if not move.copies:
        value, text = "nothing", "Every expert stays where it is."
    else:
        value = units.size(move.bytes)
        took = f"{units.seconds(move.seconds)} layer after layer"
        text = f"{move.copies:,} expert copies go to other GPUs: {took}. This pays back {standing.payback}."
    st.metric("Moves", value, width="content", help=text)


def scope_in_words(standing: Standing) -> str:
    """The recordings behind the gain, and its spread over them."""
    if standing.is_deployed:
        return "It is deployed: gains are counted from here."
    if standing.is_held_out:
        return f"{standing.gain_words}; time and tokens/s: on the open recording."
    if not standing.recorded:
        return "Routing is assumed, so nothing can be held out."
    if standing.risks is None:
        return f"{standing.gain_words}. Scoring the other open recordings takes a while: judge the plan on the Review page."
    return (
        f"{standing.gain_words}: on the recording that it was made from. To know its gain on other traffic, open another one "
        "of this model, or judge the plan on the Review page."
    )


def headline(plan: Plan, problem: Problem) -> str:
    """The title of a plan's chart: its time, and the comparison with the baseline if that can be simulated."""
    try:
        standing = cached.open_standing(plan, problem)
    except InputError:
        return charts.plain(f"{plan.name} takes {units.seconds(cached.metrics(plan, problem).total)}")
    title = f"{charts.shortened(plan.name, charts.NAME)} takes {units.seconds(standing.seconds)}"
    standing = replace(standing, deployed=charts.shortened(standing.deployed, charts.NAME))
    return charts.plain(f"{title}, {standing.against}" if not standing.is_deployed else f"{title}; it is deployed now")
