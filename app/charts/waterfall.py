"""The time of the deployed plan, and how it falls from knob to knob towards the proven floor."""

import plotly.graph_objects as go

from app.charts.ranked import BAR, BELOW, ROW, TICK, TIMES
from app.charts.theme import (
    NEUTRAL,
    SECOND,
    SMALLEST,
    TEAL,
    faint,
    finish,
    ink,
    legend_above,
    name_above_bar,
    plain,
    strokes,
    tips,
)
from engine.compare.waterfall import SAYS_LITTLE, Waterfall
from engine.units import TIME, scale_of, seconds, share

ROUND_OFF = 1e-9


def waterfall(turned: Waterfall, dark: bool = False, so_far: bool = False) -> go.Figure:
    """A bar for the deployed plan, below it a step for every knob, a bar for all of them, and what is left above the floor.

    dark: the page's theme
    so_far: True if more is yet to be turned
    """
    saved = [0.0 if abs(part) < ROUND_OFF * turned.deployed else part for part in turned.saved.values()]
    names = ["Deployed", *(row.knob for row in turned.rows), "Knobs so far" if so_far else "All knobs"]
    changed = (f"{'−' if part > 0 else '+'}{seconds(abs(part))}" if part else "0" for part in saved)
    said = [seconds(turned.deployed), *changed, seconds(turned.total)]
    texts = [f"deployed: {said[0]}"]
    for row, part in zip(turned.rows, saved, strict=True):
        alone, word = "" if row.alone is None else f"<br>alone: {seconds(row.alone)}", "saved" if part >= 0 else "lost"
        texts.append(f"{plain(row.knob)}: {seconds(row.after)} after the knobs above, {seconds(abs(part))} {word}{alone}")
    texts.append(f"{names[-1].lower()}: {said[-1]}")
    factor, unit = scale_of(turned.deployed, TIME)
    figure = go.Figure()
    figure.add_waterfall(
        x=[turned.deployed / factor, *(-part / factor for part in saved), turned.total / factor],
        y=[place + BELOW for place in range(len(names))],
        measure=["absolute", *["relative"] * len(saved), "total"],
        orientation="h",
        width=BAR,
        decreasing={"marker": {"color": TEAL}},
        increasing={"marker": {"color": faint(NEUTRAL)}},
        totals={"marker": {"color": NEUTRAL}},
        connector={"line": {"color": NEUTRAL, "width": 1}},
        showlegend=False,
        textposition="none",
        **tips(texts),
    )
    alone = [(place, row) for place, row in enumerate(turned.rows, start=1) if row.alone is not None]
    figure.add_scatter(
        x=[row.alone / factor for _, row in alone],
        y=[place + BELOW for place, _ in alone],
        mode="markers",
        name="This knob alone",
        marker={"symbol": "diamond-open", "size": 9, "color": SECOND, "line": {"width": 2}},
        **tips(f"{plain(row.knob)} alone: {seconds(row.alone)}" for _, row in alone),
    )
    if turned.floor is not None:
        left = turned.total - turned.floor
        names.append("Left at most")
        said.append(share(turned.left) if turned.left <= SAYS_LITTLE else f"> {share(SAYS_LITTLE)}")
        figure.add_bar(
            x=[left / factor],
            y=[len(names) - 1 + BELOW],
            base=[turned.floor / factor],
            orientation="h",
            width=BAR,
            marker={"color": faint(NEUTRAL), "line": {"color": NEUTRAL, "width": 1}, "pattern": {"shape": "/", "size": 6}},
            showlegend=False,
            **tips([f"at most {seconds(left)} is left, {said[-1]} above the floor (proven)"]),
        )
        figure.add_scatter(
            **strokes([turned.floor / factor] * len(names), [place + BELOW for place in range(len(names))], TICK),
            mode="lines",
            name=f"Floor, {seconds(turned.floor)} (proven)",
            line={"width": 1.5, "dash": "dash", "color": ink(dark)},
            hoverinfo="skip",
        )
    font = {"size": SMALLEST, "color": ink(dark)}
    right = {"x": 1, "xref": "paper", "xanchor": "left", "showarrow": False, "font": font}
    notes = []
    for place, (name, text) in enumerate(zip(names, said, strict=True)):
        notes += [right | {"y": place + BELOW, "text": f" {text}"}, name_above_bar(plain(name), place + BELOW - BAR / 2, dark)]
    height = 138 + ROW * len(names)
    layout = {
        "xaxis": {"title": f"time, {unit} (simulated, in sample)", "range": [0, turned.deployed / factor * 1.02 or 1]},
        "yaxis": {"range": [len(names) - 0.4, -0.6], "visible": False},
        "margin": {"r": TIMES},
        "annotations": notes,
    }
    words = turned.in_words
    title = plain(f"{words.partition(';')[0]} so far" if so_far else words)
    return finish(figure, title, height, top=76, barmode="overlay", legend=legend_above(height), **layout)
