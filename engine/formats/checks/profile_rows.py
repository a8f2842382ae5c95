"""Checks of the origin of tokens: rows of profiling or warm-up, padding, phases that are mixed, and ranks without tokens.

Rows of profiling or warm-up are thousands of consecutive tokens with the same choices, as engines make them from dummy inputs
when they start (vllm #56716, #57151). They put all mass on k experts of each layer. Prefill and decode run at other times,
often on other GPUs, and like other experts.

Padding rows lie between real ones: engines fill a batch up to a size that they captured a CUDA graph for, and every token that
fills it makes the same choices in all layers, pass after pass. A row that recurs is not padding as such: the first token of
every request is one row, and a prompt that requests share is many, each followed by the same next one. Padding recurs far more
often than any row of text, next to itself, before and after anything. Rows that repeat the one before without a common one are
tokens recorded twice, or filled up with the last. In one or two layers text is no other: there it is said that a row may be
padding.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from engine import units
from engine.formats.checks.copies import copies_of_rows, never_chosen, rows_of, skew_of
from engine.formats.source import error, ok, warning
from engine.workload import DECODE, PREFILL, Finding, RoutingTrace

LONGEST, SHARE = 64, 0.05
"""Identical rows one after another, in number or as part of all tokens, beyond which a stretch is suspect."""
FEWEST = 8
"""Fewer identical rows show nothing in a short recording."""
FEWEST_STRETCHES, FALSE_ALARM = 20, 1e-3
"""Stretches needed to show their usual length, and the chance that a longer one is wrongly taken for profile rows."""
MOST_CHANCE = 0.05
"""Distance by chance alone above which nothing can be said of two phases that are no further apart."""
APART = 0.02
"""Distance between the loads of two phases, less that of so few tokens by chance, from which planning on both misleads."""
RECURRING, RECURRING_SHARE = 16, 0.01
"""Times that a row must recur, in number and as part of all tokens."""
TIMES, MOST_ROWS = 10, 8
"""Factor by which it must recur more often than any row of text, and number of such rows that there may be."""
BEYOND_CHANCE = 1.5
"""Factor by which it must recur more often than if layers chose independently of each other."""
FEWEST_LAYERS, PART = 4, 0.2
"""From so many layers on, a row also stands out if the others have less than such a part of it in common."""
OFTEN = 0.05
"""Share from which a row alone among others is no first token of requests: those would be of twenty tokens."""
IN_RUNS, LIKELIER = 0.4, 4
"""Share of the tokens of a row that follow one of it, and times that this must be the share of all other rows, from which it
may be padding where few layers are recorded."""
REPEATED = 0.1
"""Share of tokens that repeat the one before, from which they are suspect."""
MOST_SORTED = 1 << 20
"""Rows that are sorted."""


@dataclass(frozen=True)
class Stretch:
    """Tokens first … end - 1, which made the same choices in all layers (or several such series, one after another)."""

    first: int
    end: int

    @property
    def tokens(self) -> int:
        return self.end - self.first


def profile_stretches(trace: RoutingTrace) -> list[Stretch]:
    """Suspect stretches in their order; a recording that is nothing but one is a stretch too."""
    same = _same_as_next(trace)
    edges = np.concatenate([[0], np.flatnonzero(~same) + 1, [trace.tokens]])
    first, length = edges[:-1], np.diff(edges)
    suspect = (length > min(LONGEST, SHARE * trace.tokens)) & (length >= FEWEST)
    if not suspect.any():
        return []
    if len(length) >= FEWEST_STRETCHES:
        # As many as may well follow one another, if lengths fall off as nine in ten do: e^(-usual / mean) = 1 / 10.
        usual = np.quantile(length, 0.9, method="lower")
        suspect &= length > usual * np.log(len(length) / FALSE_ALARM) / np.log(10)
    else:  # too few stretches to show it: as if every token were like this row as often as those elsewhere are
        for at in np.flatnonzero(suspect):
            elsewhere = np.delete(trace.experts, np.s_[first[at] : first[at] + length[at]], axis=0)
            share = (1 + (elsewhere == trace.experts[first[at]]).all(axis=(1, 2)).sum()) / (2 + len(elsewhere))
            suspect[at] = length[at] > np.log(trace.tokens / FALSE_ALARM) / -np.log(share)
    stretches: list[Stretch] = []
    for start, end in zip(first[suspect].tolist(), (first + length)[suspect].tolist(), strict=True):
        if stretches and stretches[-1].end == start:
            start = stretches.pop().first
        stretches.append(Stretch(start, end))
    return stretches


def _same_as_next(trace: RoutingTrace) -> np.ndarray:
    """True for every token, bool[token - 1], if the next one chose the same in every layer. Tokens without any choice are
    padding and like no other."""
    experts = trace.experts
    same = (experts[1:, 0] == experts[:-1, 0]).all(axis=1)
    alike = np.flatnonzero(same)
    # Most differ in the first layer, and only the few others are looked at whole.
    for start in range(0, len(alike), 4096):
        part = alike[start : start + 4096]
        rows = experts[part]
        same[part] = (experts[part + 1] == rows).all(axis=(1, 2)) & (rows >= 0).any(axis=(1, 2))
    return same


def check_profile_rows(trace: RoutingTrace) -> Iterator[Finding]:
    """Findings on profile rows, with the skew of the recording with and without them."""
    stretches = profile_stretches(trace)
    if not stretches:
        return
    longest = max(stretches, key=lambda stretch: stretch.tokens)
    cut = sum(stretch.tokens for stretch in stretches)
    if cut == trace.tokens:
        if trace.k == 1 and len(stretches) == 1:
            return  # every layer has a single expert, which `check_layers` says
        yield error(
            "profile-rows",
            f"All {cut:,} tokens are in stretches that made the same choices in every layer, as an engine's dummy "
            "inputs do at its start: there is no routing of real text here; record while requests are served.",
            rows=(longest.first, longest.end),
        )
        return
    inside = np.concatenate([np.arange(stretch.first, stretch.end) for stretch in stretches])
    rest = trace.load - trace.part(inside).load
    others = f", {cut:,} with those in {len(stretches) - 1} other places" if len(stretches) > 1 else ""
    text = (
        f"Tokens {longest.first:,} to {longest.end - 1:,} made the same choices in every layer ({longest.tokens:,} tokens"
        f"{others}; {units.share(cut / trace.tokens)} of the recording), {_origin(trace, longest)}. With them the skew reads "
        f"{skew_of(trace.load):.1f}×, without them {skew_of(rest):.1f}×: cut them."
    )
    yield warning("profile-rows", text, rows=(longest.first, longest.end), remedy="cut-profile-rows")


def _origin(trace: RoutingTrace, stretch: Stretch) -> str:
    """Words on the origin of a stretch, by its place in the recording."""
    if trace.source_rank is not None:
        ranks = np.unique(trace.source_rank[stretch.first : stretch.end])
        alone = [rank for rank in ranks if (trace.source_rank == rank).sum() <= stretch.tokens]
        if alone and len(ranks) == len(alone):
            named = "rank " + " and ".join(map(str, alone[:3])) + (" …" if len(alone) > 3 else "")
            return f"all that {named} sent, as an idle data-parallel rank does, which takes part with dummy batches"
    if stretch.first == 0:
        return "as an engine's dummy inputs do while it profiles or warms up"
    return "as padding of batches, dummy batches of idle ranks or an engine's profile run do"


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
    unwritten = never_chosen(trace)
    if unwritten.any() and not unwritten.all():
        return Padding(unwritten, 1, _runs(unwritten))
    others = np.ones(trace.tokens, bool)
    for stretch in profile_stretches(trace):  # which are told of by themselves
        others[stretch.first : stretch.end] = False
    others &= (trace.experts >= 0).any(axis=(1, 2))
    tokens = np.flatnonzero(others)
    if len(tokens) < RECURRING:
        return None
    row = rows_of(trace, tokens)
    padding = np.zeros(trace.tokens, bool)
    rows = [value for value in _frequent(row) if _is_padding(trace, tokens, row, row == value)]
    padding[tokens[np.isin(row, rows)]] = True
    if not rows:
        again = np.flatnonzero((row[1:] == row[:-1]) & (np.diff(tokens) == 1)) + 1
        apart = (row[8:] == row[:-8]).mean() if len(row) > 8 else 1.0  # where text repeats itself, tokens near it do too
        if len(again) < RECURRING or len(again) < max(REPEATED, TIMES * apart) * len(row) or copies_of_rows(trace) > 1:
            return None
        padding[tokens[again]] = True
    if padding[tokens].all():
        return None  # a gate that knows one row alone, of which other checks tell
    return Padding(padding, len(rows), _runs(padding))


def _runs(padding: np.ndarray) -> int:
    return int(np.count_nonzero(np.diff(padding, prepend=False) & padding))


def _frequent(row: np.ndarray) -> np.ndarray:
    """The rows that recur far more often than all others, by chance ones of a long recording."""
    if len(row) > MOST_SORTED:
        row = row[np.random.default_rng(0).integers(len(row), size=MOST_SORTED)]
    values, counts = np.unique(row, return_counts=True)
    order = np.argsort(-counts, kind="stable")[: MOST_ROWS + 1]
    most = np.append(counts[order], 1)
    for rows in range(min(MOST_ROWS, len(order)), 0, -1):
        if most[rows - 1] >= max(RECURRING, RECURRING_SHARE * len(row), TIMES * most[rows]):
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


def _repeated_row(trace: RoutingTrace) -> tuple[np.ndarray, float, float] | None:
    """(True for the tokens of one row that stand next to another of it, bool[token], share of the row's tokens that follow one
    of it, the same share of all other rows) for a row that may be padding in a recording of a few layers; None without one."""
    tokens = np.flatnonzero((trace.experts >= 0).any(axis=(1, 2)))
    if trace.layers >= FEWEST_LAYERS or len(tokens) < RECURRING or profile_stretches(trace):
        return None
    row = rows_of(trace, tokens)
    values, counts = np.unique(row, return_counts=True)
    again = row[1:] == row[:-1]
    for value in values[np.argsort(-counts, kind="stable")][:MOST_ROWS]:
        same = row == value
        follows = np.append(False, again) & same
        number, others = follows.sum(), (again & ~same[1:]).sum() / max((~same).sum(), 1)
        if same.mean() >= OFTEN and number >= max(RECURRING, IN_RUNS * same.sum(), LIKELIER * others * same.sum()):
            beside = np.zeros(trace.tokens, bool)
            beside[tokens[follows | np.append(follows[1:], False)]] = True
            return beside, number / same.sum(), others
    return None


def _perhaps(trace: RoutingTrace) -> Iterator[Finding]:
    if copies_of_rows(trace) > 1 or (found := _repeated_row(trace)) is None:
        return
    beside, follows, others = found
    left = trace.part(~beside)
    yield warning(
        "repeated-row",
        f"{beside.sum():,} of {trace.tokens:,} tokens ({units.share(beside.mean())}) are one row of choices in runs: "
        f"{units.share(follows)} of its tokens follow one like them, of other rows {units.share(others)}. They may be padding, "
        f"or text that repeats a token, as blanks do: {trace.layers} layer{'s' * (trace.layers > 1)} cannot tell. With them "
        f"the skew reads {skew_of(trace.load):.2f}×, without them {skew_of(left.load):.2f}×: record all layers, which tell.",
    )


def check_padding_rows(trace: RoutingTrace) -> Iterator[Finding]:
    """The finding on padding rows, with the skew of the recording with and without them. They stay until a person cuts them."""
    if (padding := padding_rows(trace)) is None:
        yield from _perhaps(trace)
        return
    number = int(np.count_nonzero(padding.tokens))
    kept = skew_of(trace.part(~padding.tokens).load)
    made = f"are {'one row' if padding.rows == 1 else f'{padding.rows} rows'} of choices, far more often than any other row"
    why = "padding, as engines fill a batch up to the size of a CUDA graph"
    if never_chosen(trace)[padding.tokens].all():
        made = "have expert 0 as every choice in every layer, which no router makes"
        why = "rows of a buffer that nobody wrote, as padding leaves them"
    elif not padding.rows:
        made = "repeat all choices of the token before"
        why = "padding with the last token, or tokens that several ranks recorded"
    yield warning(
        "padding-rows",
        f"{number:,} of {trace.tokens:,} tokens ({units.share(number / trace.tokens)}) {made}, {number / padding.runs:.2g} at "
        f"a time in {padding.runs:,} places: {why}. They are still in: with them the skew reads {skew_of(trace.load):.2f}×, "
        f"without them {kept:.2f}×: cut them (inspect --fix).",
        remedy="cut-padding-rows",
    )


def check_phases(trace: RoutingTrace) -> Iterator[Finding]:
    """Findings on the difference between the loads of the phases, if the recording has tokens with choices of both."""
    chose = np.zeros(0, bool) if trace.phase is None else (trace.experts >= 0).any(axis=(1, 2))
    if not chose.any() or len(np.unique(trace.phase[chose])) < 2:
        return
    share = float((trace.phase[chose] == PREFILL).mean())
    distance, chance = distance_of_phases(trace)
    mixed = (
        f"Prefill ({units.share(share)} of the tokens) and decode are mixed. Their loads differ by "
        f"{units.share(distance)} of the token copies (total variation on average over layers; so few tokens differ by "
        f"{units.share(chance)} by chance alone)"
    )
    if distance - chance <= APART and chance > MOST_CHANCE:
        yield ok("phases-mixed", f"{mixed}: too few to tell whether one plan may serve both.")
        return
    if distance - chance <= APART:
        yield ok("phases-mixed", f"{mixed}: one plan may serve both.")
        return
    yield warning(
        "phases-mixed", f"{mixed}: plan for each alone. For instances that prefill, keep the prefill.", remedy="keep-prefill"
    )
    yield warning(
        "phases-mixed",
        f"For instances that decode, keep the decode ({units.share(1 - share)} of the tokens).",
        remedy="keep-decode",
    )


def distance_of_phases(trace: RoutingTrace) -> tuple[float, float]:
    """(total variation between the experts' shares of prefill and of decode on average over layers with both, its mean if both
    phases drew from the same shares)"""
    rarer = trace.part(trace.phase == (PREFILL if 2 * (trace.phase == PREFILL).sum() < trace.tokens else DECODE))
    counts = np.stack([rarer.load, trace.load - rarer.load], axis=1)  # float64[layer, phase, expert]
    counts = counts[(counts.sum(axis=2) > 0).all(axis=1)]
    if not len(counts):
        return 0.0, 0.0
    total = counts.sum(axis=2, keepdims=True)
    shares = counts / total
    both = counts.sum(axis=1) / total.sum(axis=1)
    deviation = np.sqrt(both * (1 - both) * (1 / total).sum(axis=1))  # of the difference of two shares
    distance = np.abs(shares[:, 0] - shares[:, 1]).sum(axis=1) / 2
    chance = np.sqrt(2 / np.pi) * deviation.sum(axis=1) / 2
    return float(distance.mean()), float(chance.mean())


def check_ranks(trace: RoutingTrace) -> Iterator[Finding]:
    """Findings on ranks without tokens, or on the number of GPUs that the sequences of a recording suffice for."""
    if trace.source_rank is not None:
        present = np.unique(trace.source_rank)
        ranks = int(present[-1]) + 1
        if gaps := ranks - len(present):
            missing = int((present != np.arange(len(present))).argmax())
            yield warning(
                "silent-ranks",
                f"{gaps} of {ranks} source ranks have no tokens (first: rank {missing}); add the missing ranks' files, "
                "or drop source_rank to spread the tokens evenly.",
            )
        else:
            yield ok("silent-ranks", f"All {ranks} source ranks have tokens.")
    elif trace.sequence is not None and trace.tokens > 1 and (trace.sequence == trace.sequence[0]).all():
        yield warning(
            "one-sequence", "All tokens belong to one sequence, so they would all start on one GPU; record several requests."
        )
    elif trace.sequence is not None:
        yield ok(
            "sequences",
            f"{trace.sources:,} sequences are distributed over the GPUs; on a cluster of more than {trace.sources:,} GPUs "
            "some would start with no tokens.",
        )
