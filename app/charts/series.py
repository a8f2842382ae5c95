"""Series of the papers' charts by the theme: a kind of event, a part of a step or a system has the colour and the order that it
has on the other pages, and a sign of its own in the chart; models, recordings and numbers have colours of no kind."""

from collections.abc import Iterable
from itertools import cycle
from typing import NamedTuple

from app.charts.optimise import SCHEMES
from app.charts.theme import KIND_COLOURS, KIND_TITLES, NEUTRAL, PARTS, SECOND, TEAL
from app.charts.what_if_studies import STYLES

DASHES = ("solid", "dash", "dashdot", "dot")
SYMBOLS = ("circle", "diamond", "square", "cross")
PATTERNS = ("", "/", ".", "x", "\\", "-", "+", "|")
OTHERS = (TEAL, SECOND, NEUTRAL, "#882255", "#CC6677", "#6699CC", "#AA4466", "#661100")
"""Colours of series that are no kind, one after another."""

KINDS = {
    "all-to-all": "dispatch",
    "context-coherent, all-to-all": "dispatch",
    "context-coherent, all-gather": "all_gather",
    "experts": "ffn",
    "pipelining alone": "dispatch",
    "weight gradients alone": "dw",
    "other": "other",
}
"""The kind or part of the theme that a series is of."""

SYSTEMS = {
    "Aurora": STYLES["aurora"][0],
    "Aurora + Colocation": STYLES["aurora"][0],
    "Aurora, decoupled": STYLES["aurora"][0],
    "Aurora as printed": NEUTRAL,
    "Optimum": NEUTRAL,
    "Aurora + Exclusive": SECOND,
    "Lina": NEUTRAL,
    "SJF": STYLES["sjf"][0],
    "RCS": STYLES["rcs"][0],
    "RGA": STYLES["rga"][0],
    "REC": STYLES["rec"][0],
    "RGA + REC": STYLES["rga+rec"][0],
    "ExFlow": TEAL,
    "contiguous": NEUTRAL,
    "Lancet": TEAL,
    "PipeMoE": TEAL,
    "both": TEAL,
    "Tutel": SECOND,
    "FasterMoE": KIND_COLOURS["gate"],
    "RAF-like": KIND_COLOURS["dispatch"],
    "DeepSpeed": NEUTRAL,
    "DeepSpeed-MoE": NEUTRAL,
    "Lina (training)": TEAL,
}
"""Colours of systems in the order of their series: the paper's own in teal, as the open plan is on every page."""

MODELS = {"B/32": "/"}
"""Second models of two, hatched."""


class Series(NamedTuple):
    """A series in a chart. value: in its rows; title: in the legend; pattern: of bars; dash, symbol: of lines and points"""

    value: object
    title: str
    colour: str
    pattern: str
    dash: str
    symbol: str


def series_of(values: Iterable[object]) -> list[Series]:
    """The series of a chart in the order in which it draws them: known ones by the theme, the others behind as they come."""
    ranked = sorted(dict.fromkeys(values), key=_rank)
    taken = {colour for _, colour, _ in map(_known, map(str, ranked))}
    spare = cycle([colour for colour in OTHERS if colour not in taken] or OTHERS)
    found, used = [], []
    for turn, value in enumerate(ranked):
        title, colour, pattern = _known(str(value))
        colour = colour or next(spare)
        # A sign besides the colour: its own, or the first that no series has.
        free = [shape for shape in PATTERNS if shape not in used] or [PATTERNS[turn % len(PATTERNS)]]
        pattern = free[0] if pattern is None or pattern in used else pattern
        used.append(pattern)
        found.append(Series(value, title, colour, pattern, DASHES[turn % len(DASHES)], SYMBOLS[turn % len(SYMBOLS)]))
    return found


def _known(value: str) -> tuple[str, str | None, str | None]:
    """Title, colour and pattern of a series; None: no kind of the theme has one."""
    if value in SCHEMES:
        return SCHEMES[value]
    if value in KINDS:
        kind = KINDS[value]
        return value, PARTS[kind][1] if kind in PARTS else KIND_COLOURS[kind], None
    system, _, model = value.partition(", ")
    if value in SYSTEMS or system in SYSTEMS:
        return value, SYSTEMS.get(value, SYSTEMS.get(system)), MODELS.get(model)
    return value, SYSTEMS.get(value.split(" (")[0]), None


def _rank(value: object) -> tuple[int, int]:
    """Place of a series: kinds in the theme's order, schemes and systems in that of their table, others behind as they come."""
    text = str(value)
    if text in KINDS:
        order = [*PARTS, *(kind for kind in KIND_TITLES if kind not in PARTS)]
        return 0, order.index(KINDS[text])
    if text in SCHEMES:
        return 1, list(SCHEMES).index(text)
    for name in (text, text.split(" (")[0], text.partition(", ")[0]):
        if name in SYSTEMS:
            return 1, list(SYSTEMS).index(name)
    return 2, 0
