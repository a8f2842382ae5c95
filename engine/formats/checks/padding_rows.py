"""Padding rows between real ones: engines fill a batch up to a size that they captured a CUDA graph for, and every token that
fills it makes the same choices in all layers, pass after pass.

A row that recurs is not padding as such: the first token of every request is one row, and a prompt that requests share is
many, each followed by the same next one. Padding recurs far more often than any row of text, next to itself, before and after
anything. Rows that repeat the one before without a common one are tokens recorded twice, or filled up with the last.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from engine import units
from engine.formats.checks.copies import skew_of
from engine.formats.checks.profile_rows import profile_stretches
from engine.formats.source import warning
from engine.workload import Finding, RoutingTrace

FEWEST, SHARE = 16, 0.01
"""Times that a row must recur, in number and as part of all tokens."""
TIMES, MOST_ROWS = 10, 8
"""Factor by which it must recur more often than any row of text, and number of such rows that there may be."""
BEYOND_CHANCE = 1.5
"""Factor by which it must recur more often than if layers chose independently of each other."""
FEWEST_LAYERS, PART = 4, 0.2
"""From so many layers on, a row also stands out if the others have less than such a part of it in common."""
OFTEN = 0.05
"""Share from which a row alone among others is no first token of requests: those would be of twenty tokens."""
REPEATED = 0.1
"""Share of tokens that repeat the one before, from which they are suspect."""
TOKENS_AT_ONCE, MOST_SORTED = 1 << 14, 1 << 20
"""Tokens whose choices are multiplied at once, and rows that are sorted."""


@dataclass(frozen=True)
class Padding:
    """Padding rows.

    tokens: bool[token]; True for padding
    rows: number of different ones; 0 if each repeats the token before it
    runs: number of places
    """

    tokens: np.ndarray
    rows: int
    runs: int


def padding_rows(trace: RoutingTrace) -> Padding | None:
    """The padding between the tokens of a trace, None without any."""
    others = np.ones(trace.tokens, bool)
    for stretch in profile_stretches(trace):  # which are told of by themselves
        others[stretch.first : stretch.end] = False
    others &= (trace.experts >= 0).any(axis=(1, 2))
    tokens = np.flatnonzero(others)
    if len(tokens) < FEWEST:
        return None
    row = _row_of(trace, tokens)
    padding = np.zeros(trace.tokens, bool)
    rows = [value for value in _frequent(row) if _is_padding(trace, tokens, row, row == value)]
    padding[tokens[np.isin(row, rows)]] = True
    if not rows:
        again = np.flatnonzero((row[1:] == row[:-1]) & (np.diff(tokens) == 1)) + 1
        apart = (row[8:] == row[:-8]).mean() if len(row) > 8 else 1.0  # where text repeats itself, tokens near it do too
        if len(again) < FEWEST or len(again) < max(REPEATED, TIMES * apart) * len(row):
            return None
        padding[tokens[again]] = True
    if padding[tokens].all():
        return None  # a gate that knows one row alone, of which other checks tell
    return Padding(padding, len(rows), int(np.count_nonzero(np.diff(padding, prepend=False) & padding)))


def _row_of(trace: RoutingTrace, tokens: np.ndarray) -> np.ndarray:
    """A number for every token, equal for those with the same choices in all layers: uint64[token]."""
    factors = np.random.default_rng(0).integers(2**64, size=trace.layers * trace.k, dtype=np.uint64) | np.uint64(1)
    row = np.empty(len(tokens), np.uint64)
    for start in range(0, len(tokens), TOKENS_AT_ONCE):
        block = trace.experts[tokens[start : start + TOKENS_AT_ONCE]]
        row[start : start + len(block)] = (block.reshape(len(block), -1).astype(np.uint64) * factors).sum(axis=1)
    return row


def _frequent(row: np.ndarray) -> np.ndarray:
    """The rows that recur far more often than all others, by chance ones of a long recording."""
    if len(row) > MOST_SORTED:
        row = row[np.random.default_rng(0).integers(len(row), size=MOST_SORTED)]
    values, counts = np.unique(row, return_counts=True)
    order = np.argsort(-counts, kind="stable")[: MOST_ROWS + 1]
    most = np.append(counts[order], 1)
    for rows in range(min(MOST_ROWS, len(order)), 0, -1):
        if most[rows - 1] >= max(FEWEST, SHARE * len(row), TIMES * most[rows]):
            return values[order[:rows]]
    return values[:0]


def _is_padding(trace: RoutingTrace, tokens: np.ndarray, row: np.ndarray, same: np.ndarray) -> bool:
    """True if the tokens of one row are padding. row, same: of each of `tokens`, its row, and True for this one"""
    places = np.flatnonzero(same)
    share, chosen = same.mean(), trace.experts[tokens]
    alike = (chosen == chosen[places[0]]).all(axis=2).mean(axis=0)  # float64[layer]
    # Where experts are popular by themselves, many other rows have a part of this one.
    has_part = trace.layers < FEWEST_LAYERS or (alike - share).mean() > PART * (1 - share)
    if share < BEYOND_CHANCE * alike.prod() and has_part:
        return False
    # The neighbours of its runs: of a shared prompt they are always the same.
    first, last = places[~same[places - 1] | (places == 0)], places[~np.append(same, False)[places + 1]]
    for beside in (row[first[first > 0] - 1], row[last[last < len(same) - 1] + 1]):
        if len(beside) and np.unique(beside, return_counts=True)[1].max() > max(1, len(beside) / 2):
            return False
    if len(first) <= len(places) / 2:
        return True
    if trace.sequence is None:
        return share >= OFTEN
    begins = np.unique(trace.sequence[tokens], return_index=True)[1]
    return bool(np.isin(places, begins).mean() < 0.5)


def check_padding_rows(trace: RoutingTrace) -> Iterator[Finding]:
    """The finding on padding rows, with the skew of the recording with and without them. They stay until a person cuts them."""
    if (padding := padding_rows(trace)) is None:
        return
    number = int(np.count_nonzero(padding.tokens))
    kept = skew_of(trace.part(~padding.tokens).load)
    made = f"are {'one row' if padding.rows == 1 else f'{padding.rows} rows'} of choices, far more often than any other row"
    why = "padding, as engines fill a batch up to the size of a CUDA graph"
    if not padding.rows:
        made = "repeat all choices of the token before"
        why = "padding with the last token, or tokens that several ranks recorded"
    yield warning(
        "padding-rows",
        f"{number:,} of {trace.tokens:,} tokens ({units.share(number / trace.tokens)}) {made}, {number / padding.runs:.2g} at "
        f"a time in {padding.runs:,} places: {why}. They are still in: with them the skew reads {skew_of(trace.load):.2f}×, "
        f"without them {kept:.2f}×: cut them (inspect --fix).",
        remedy="cut-padding-rows",
    )
