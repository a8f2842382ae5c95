"""Checks of the origin of tokens: rows of profiling or warm-up, phases that are mixed, and ranks without tokens.

Rows of profiling or warm-up are thousands of consecutive tokens with the same choices, as engines make them from dummy inputs
when they start (vllm #56716, #57151). They put all mass on k experts of each layer. Prefill and decode run at other times,
often on other GPUs, and like other experts.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from engine import units
from engine.formats.checks.copies import skew_of
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
    yield warning(
        "profile-rows",
        f"Tokens {longest.first:,} to {longest.end - 1:,} made the same choices in every layer ({longest.tokens:,} tokens"
        f"{others}; {units.share(cut / trace.tokens)} of the recording), as an engine's dummy inputs do while it profiles "
        f"or warms up. With them the skew reads {skew_of(trace.load):.1f}×, without them {skew_of(rest):.1f}×: cut them.",
        rows=(longest.first, longest.end),
        remedy="cut-profile-rows",
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
