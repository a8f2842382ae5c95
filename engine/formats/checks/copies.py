"""Checks of the choices themselves: ids and repetitions that no top-k router makes, padding, gates that are limited to some
groups of experts, and copies of tokens.

The same tokens are counted several times by every rank of a data-parallel group (vllm #22167), and by tensor-parallel ranks
that all see the same tokens (Megatron-Core without sequence parallelism).
"""

from collections.abc import Iterator

import numpy as np

from engine import units
from engine.formats.source import error, ok, warning
from engine.model import MoEModel
from engine.workload import DECODE, PREFILL, ExpertLoad, Finding, RoutingTrace

FEWEST_TOKENS = 64
"""Tokens of a block; shorter ones may be alike by chance."""
FEWEST_COUNTS = 32
"""Different counts that must have a factor in common before it means something: 2; fewer have to have a larger one."""
NEARLY_ALL, MOST_COUNTED = 0.98, 1 << 23
"""Share of the tokens that must come in copies, as a recording may begin or end between two, and tokens that are counted."""
TOKENS_AT_ONCE = 1 << 14
"""Tokens whose choices are multiplied at once."""
FEWEST_CHOICES = 12
"""Choices of a token that are not all without computation by chance."""
MOST_COPIES = 64
ALIGNMENT = 128
"""DeepEP's dispatch rounds up the tokens of each expert to multiples of this if DeepGEMM follows, and SGLang's recorder counts
those (srt/layers/moe/token_dispatcher/deepep.py, `expert_alignment`)."""
ROWS_AT_ONCE = 1 << 16
"""Rows of choices that stay in the processor's cache."""
FEWEST_ROWS, MOST_GROUPS = 4096, 64
"""Choices of tokens in layers that show whether a gate is limited to groups, and how many groups there may be."""


def factor_of_counts(loads: ExpertLoad) -> int:
    """The greatest common divisor of all counts; 1 if counts are no whole numbers or too few differ."""
    counts = loads.load[loads.load > 0]
    if (counts != np.rint(counts)).any() or counts.max(initial=0) >= 2**53:
        return 1
    different = np.unique(counts.astype(np.int64))
    factor = int(np.gcd.reduce(different)) if len(different) else 1
    return factor if len(different) * np.log2(factor) >= FEWEST_COUNTS else 1


def is_rounded(loads: ExpertLoad) -> bool:
    """True if counts were rounded up pass by pass, which leaves layers that saw the same tokens with different totals; copies
    leave them with the same."""
    return factor_of_counts(loads) % ALIGNMENT == 0 and bool(np.ptp(loads.load.sum(axis=1)) > 0)


def ranks_alike(workload: RoutingTrace | ExpertLoad) -> list[list[int]]:
    """Groups of source ranks with exactly the same tokens, or counts, in the order of their first ranks."""
    groups: dict[object, list[int]] = {}
    if isinstance(workload, ExpertLoad):
        for rank, counts in enumerate(() if workload.by_source is None else workload.by_source):
            if len(np.unique(counts)) >= FEWEST_COUNTS:
                groups.setdefault(counts.tobytes(), []).append(rank)
        return [ranks for ranks in groups.values() if len(ranks) > 1]
    tokens_of = {} if workload.source_rank is None else tokens_of_ranks(workload)
    same_ends: dict[tuple, list[int]] = {}
    for rank, tokens in tokens_of.items():
        if len(tokens) >= FEWEST_TOKENS:
            ends = workload.experts[tokens[[0, len(tokens) // 2, -1]]].tobytes()
            same_ends.setdefault((len(tokens), ends), []).append(rank)
    for key, ranks in same_ends.items():
        for rank in ranks if len(ranks) > 1 else ():
            block = workload.experts[tokens_of[rank]]
            if (block != block[0]).any():
                groups.setdefault((key, block.tobytes()), []).append(rank)
    return [ranks for ranks in groups.values() if len(ranks) > 1]


def tokens_of_ranks(trace: RoutingTrace) -> dict[int, np.ndarray]:
    """The tokens of each source rank that has any, int64[...], ascending."""
    order = np.argsort(trace.source_rank, kind="stable")
    ranks, starts = np.unique(trace.source_rank[order], return_index=True)
    return dict(zip(ranks.tolist(), np.split(order, starts[1:]), strict=True))


def blocks_in_turn(trace: RoutingTrace) -> int:
    """The number of equal blocks, one after another, that make the whole recording; 1 if there are none."""
    for copies in range(min(MOST_COPIES, trace.tokens // FEWEST_TOKENS), 1, -1):
        block = trace.tokens // copies
        if trace.tokens % copies or (trace.experts[0] != trace.experts[block]).any():
            continue
        if np.array_equal(trace.experts[:-block], trace.experts[block:]):
            return copies if (trace.experts[1:block] != trace.experts[0]).any() else 1
    return 1


def rows_of(trace: RoutingTrace, tokens: np.ndarray) -> np.ndarray:
    """A number for each of these tokens, equal for those with the same choices in all layers: uint64[token]."""
    factors = np.random.default_rng(0).integers(2**64, size=trace.layers * trace.k, dtype=np.uint64) | np.uint64(1)
    row = np.empty(len(tokens), np.uint64)
    for start in range(0, len(tokens), TOKENS_AT_ONCE):
        block = trace.experts[tokens[start : start + TOKENS_AT_ONCE]]
        row[start : start + len(block)] = (block.reshape(len(block), -1).astype(np.uint64) * factors).sum(axis=1)
    return row


def copies_of_rows(trace: RoutingTrace) -> int:
    """The number by which the tokens of nearly all rows divide, in whatever order they come; 1 if there is none."""
    if not 2 * FEWEST_TOKENS <= trace.tokens <= MOST_COUNTED:
        return 1
    counts = np.unique(rows_of(trace, np.arange(trace.tokens)), return_counts=True)[1]
    for copies in range(min(MOST_COPIES, int(counts.max())), 1, -1):
        divide = counts % copies == 0
        if np.count_nonzero(divide) >= FEWEST_TOKENS and counts[divide].sum() >= NEARLY_ALL * trace.tokens:
            return copies
    return 1


def first_of_copies(trace: RoutingTrace, copies: int) -> np.ndarray:
    """True for every token, bool[token], that is the first of so many with its row, or the first after them."""
    row = rows_of(trace, np.arange(trace.tokens))
    order = np.argsort(row, kind="stable")
    begins = np.flatnonzero(np.diff(row[order], prepend=~row[order[:1]]))
    at = np.arange(len(row)) - np.repeat(begins, np.diff(begins, append=len(row)))
    keep = np.empty(len(row), bool)
    keep[order] = at % copies == 0
    return keep


def check_token_copies(trace: RoutingTrace) -> Iterator[Finding]:
    """Findings on blocks of tokens that come several times."""
    if alike := ranks_alike(trace):
        yield _ranks(alike, "have the same tokens with the same choices")
    elif (copies := blocks_in_turn(trace)) > 1:
        text = (
            f"The recording is {copies} times the same {trace.tokens // copies:,} tokens, as {copies} ranks that "
            f"all see the same tokens record them, or the same requests sent {copies} times: every load reads "
            f"{copies} times too high. Keep the first."
        )
        yield warning("copies", text, rows=(trace.tokens // copies, trace.tokens), remedy="drop-copies")
    elif (copies := copies_of_rows(trace)) > 1:
        text = (
            f"Nearly every row of choices comes {copies} times or a multiple of that, one after another or pass by pass, as "
            f"{copies} ranks that all see the same tokens record them, or the same requests sent {copies} times: every load "
            f"reads {copies} times too high. Keep one of each {copies}."
        )
        yield warning("copies", text, remedy="drop-copies")


def check_load_copies(loads: ExpertLoad) -> Iterator[Finding]:
    """Findings on counts that several ranks have in common, or that are all multiples of one number."""
    if alike := ranks_alike(loads):
        yield _ranks(alike, "counted exactly the same")
    elif is_rounded(loads):
        total = loads.load.sum(axis=1)
        yield ok(
            "rounded-counts",
            f"All counts are multiples of {ALIGNMENT}, and the layers' totals differ by "
            f"{np.ptp(total) / total.max():.2g}: DeepEP's dispatch rounds up each expert's tokens in every pass. "
            "Loads read a little too high, most for experts that are seldom chosen.",
        )
    elif (factor := factor_of_counts(loads)) > 1:
        yield warning(
            "multiplied-counts",
            f"All counts are multiples of {factor}, as where each of {factor} tensor- or data-parallel ranks adds the same "
            f"tokens to a common sum, or the same requests were sent {factor} times. The shares of the experts are right, but "
            f"every load reads {factor} times too high: divide by {factor}, unless the requests were meant.",
            remedy="divide-by-copies",
        )


def _ranks(alike: list[list[int]], does: str) -> Finding:
    largest = max(alike, key=len)
    ranks = " and ".join(str(rank) for rank in largest[:2]) + (" …" if len(largest) > 2 else "")
    return warning(
        "copies",
        f"Ranks {ranks} {does} ({len(alike)} such groups, of up to {len(largest)} ranks), as tensor-parallel ranks do: loads "
        f"read up to {len(largest)} times too high. Keep one copy of each, its tokens distributed over these ranks in turn.",
        remedy="drop-copies",
    )


def has_no_computation(workload: RoutingTrace | ExpertLoad, model: MoEModel | None = None) -> bool:
    """True if tokens may choose to have nothing computed, by the model or the reader's finding; layers then count other
    numbers."""
    found = workload.origin.findings if workload.origin else ()
    return bool(model and model.zero_experts) or any(finding.code == "zero-experts" for finding in found)


def ids_outside(trace: RoutingTrace) -> Finding | None:
    """The finding on ids that are no expert's, after which nothing else can be said of a recording; None without any."""
    if trace.experts.min(initial=0) >= -1 and trace.experts.max(initial=0) < trace.num_experts:
        return None
    outside = (trace.experts < -1) | (trace.experts >= trace.num_experts)
    token, layer, _ = np.argwhere(outside)[0]
    return error(
        "ids-out-of-range",
        f"{outside.sum()} expert ids lie outside 0 … {trace.num_experts - 1}, the first at token {token}, layer "
        f"{layer}; fold physical slots back to logical experts, or correct the number of experts.",
    )


def check_choices(trace: RoutingTrace, model: MoEModel | None = None) -> Iterator[Finding]:
    """Findings on the sum of every layer, which must be tokens × k, on choices of no expert, and on experts chosen twice by one
    token."""
    expected, padded = trace.tokens * trace.k, trace.experts.min(initial=0) < 0
    padding = (trace.experts < 0).sum(axis=(0, 2)) if padded else np.zeros(trace.layers, dtype=np.int64)
    off = np.flatnonzero(trace.load.sum(axis=1) != expected - padding)
    if off.size:
        yield error(
            "conservation",
            f"Layer {off[0]} counts {trace.load[off[0]].sum():,.0f} choices, but tokens × k less padding is "
            f"{expected - padding[off[0]]:,}; record the layer again.",
            layers=tuple(off.tolist()),
        )
    else:
        less = " less the choices of no expert (−1)" if padding.any() else ""
        yield ok("conservation", f"Every layer's counts add up to tokens × k = {expected:,}{less}.")
    if padded:
        yield from _of_no_expert(trace, model)
    written = np.flatnonzero(~never_written(trace))  # the others are left to `check_layers`
    repeated = _repeats(trace)[:, written] & ~never_chosen(trace)[:, None]  # which `check_padding_rows` tells of
    if repeated.any():
        token, place = np.argwhere(repeated)[0]
        yield error(
            "repeated-choices",
            f"{repeated.sum()} times a token chose the same expert twice in one layer (first: token {token}, layer "
            f"{written[place]}); a top-k router cannot do that, so the axes or the id folding of the recording are wrong.",
            layers=tuple(written[repeated.any(axis=0)].tolist()),
        )


def _of_no_expert(trace: RoutingTrace, model: MoEModel | None) -> Iterator[Finding]:
    """Findings on choices of -1 by what leaves them: tokens without any, places that no token fills, and the rest. Layers
    without any choice are left to `check_layers`."""
    none = trace.experts < 0
    missed = none.all(axis=(1, 2))
    if has_no_computation(trace, model) and none[0].size < FEWEST_CHOICES:
        missed[:] = False
    if missed.any():
        said = f"{missed.sum():,} of {trace.tokens:,} tokens ({units.share(missed.mean())}) have no choice in any layer"
        whole = []
        for phase, word in () if trace.phase is None else ((PREFILL, "prefill"), (DECODE, "decode")):
            of_phase = trace.phase == phase
            said += f"; of {word} {units.share(missed[of_phase].mean())}" if of_phase.any() else ""
            whole += [word] if of_phase.any() and missed[of_phase].all() else []
        nothing = f" Nothing is known of {whole[0]}: record it too, if it is to be planned for." if len(whole) == 1 else ""
        yield warning(
            "tokens-not-captured",
            f"{said}. The capture missed them, as it may those of a cached prefix, or they are padding; they count for nothing."
            + nothing,
        )
    layers, places = ~none.all(axis=(0, 2)), ~none.all(axis=(0, 1))
    if 0 < (unused := int(np.count_nonzero(~places))) < trace.k:
        yield ok("unused-places", f"{unused} of the {trace.k} places for choices are never filled: k was {trace.k - unused}.")
    rest = none[~missed][:, layers][:, :, places]
    if not rest.any() or has_no_computation(trace):
        return
    share, worst = rest.mean(), rest.mean(axis=(0, 2))
    of_layer = f", most in layer {np.flatnonzero(layers)[worst.argmax()]} ({units.share(worst.max())})"
    if has_no_computation(trace, model):
        yield ok("zero-experts", f"{units.share(share)} of the choices are of no expert (−1){of_layer}: without computation.")
        return
    yield Finding(
        severity="warning" if share > 0.1 else "ok",
        code="dropped-choices",
        message=f"{units.share(share)} of the choices of tokens that have any are of no expert (−1){of_layer}, as a capacity "
        "limit that drops choices leaves them: loads are those after the drop."
        + (" To plan for all that was chosen, record without the limit." if share > 0.1 else ""),
    )


def _repeats(trace: RoutingTrace) -> np.ndarray:
    """True where a token chose an expert twice in a layer, bool[token, layer]."""
    rows = trace.experts.reshape(-1, trace.k)
    twice = np.zeros(len(rows), dtype=bool)
    for start in range(0, len(rows), ROWS_AT_ONCE):
        block = slice(start, start + ROWS_AT_ONCE)
        choices = np.ascontiguousarray(rows[block].T)
        for at, choice in enumerate(choices):
            for earlier in choices[:at]:
                if (same := choice == earlier).any():
                    twice[block] |= same & (choice >= 0)
    return twice.reshape(trace.tokens, trace.layers)


def never_chosen(trace: RoutingTrace) -> np.ndarray:
    """True for every token, bool[token], of which all choices in all layers are expert 0, which no router makes with k > 1: a
    row of a buffer of zeros in which nobody wrote."""
    if trace.k == 1:
        return np.zeros(trace.tokens, bool)
    zero = (trace.experts[:, 0] == 0).all(axis=1)
    zero[zero] = (trace.experts[zero] == 0).all(axis=(1, 2))
    return zero


def never_written(trace: RoutingTrace) -> np.ndarray:
    """True for every layer, bool[layer], where all choices are expert 0, more than there are tokens, so that some token would
    have chosen it twice: a buffer of zeros in which nobody wrote, as SGLang's is for dense layers
    (srt/layers/topk_capturer_base.py)."""
    total = trace.load.sum(axis=1)
    return (trace.load[:, 0] == total) & (total > trace.tokens)


def check_groups(trace: RoutingTrace) -> Iterator[Finding]:
    """The finding on a gate that is limited to groups of experts: their nodes are all that a row must be sent to."""
    if limit := limited_groups(trace):
        groups, most = limit
        yield ok(
            "limited-groups",
            f"No token's experts lie in more than {most} of {groups} groups of {trace.num_experts // groups}: the gate is "
            f"limited to groups. With a group to a node and one row per node, a token goes to at most {most} nodes.",
        )


def limited_groups(trace: RoutingTrace) -> tuple[int, int] | None:
    """(groups, most groups of a token) of a gate that chooses groups of consecutive experts before experts, as DeepSeek-V3's
    does (§2.1.2); None unless a large enough recording shows such a limit."""
    rows = trace.experts.reshape(-1, trace.k)
    if len(rows) < FEWEST_ROWS:
        return None
    sample = rows[:: len(rows) // FEWEST_ROWS]
    # Without a limit some token has more than tokens that choose at random have in the mean.
    usual = {
        groups: groups * (1 - (1 - 1 / groups) ** trace.k)
        for groups in range(2, min(MOST_GROUPS, trace.num_experts - 1) + 1)
        if trace.num_experts % groups == 0
    }
    most = _most_groups(sample, trace.num_experts, list(usual))
    possible = [groups for groups in usual if most[groups] < usual[groups]]
    most = _most_groups(rows, trace.num_experts, possible)
    limited = [groups for groups in possible if most[groups] < usual[groups]]
    tightest = min(limited, key=lambda groups: (most[groups], -groups), default=None)
    return None if tightest is None else (tightest, most[tightest])


def _most_groups(rows: np.ndarray, experts: int, candidates: list[int]) -> dict[int, int]:
    """The largest number of groups that the experts of a row (int16[row, k], -1 = none) lie in, by the number of groups."""
    # One bit a group; the last entry, which -1 picks, has none.
    bits = {
        groups: np.append(np.uint64(1) << (np.arange(experts) * groups // experts).astype(np.uint64), np.uint64(0))
        for groups in candidates
    }
    most = dict.fromkeys(candidates, 0)
    for start in range(0, len(rows) if candidates else 0, ROWS_AT_ONCE):
        choices = np.ascontiguousarray(rows[start : start + ROWS_AT_ONCE].T)
        for groups in candidates:
            touched = bits[groups][choices[0]]
            for choice in choices[1:]:
                touched |= bits[groups][choice]
            most[groups] = max(most[groups], int(np.bitwise_count(touched).max()))
    return most


def name_of(noun: str, numbers: np.ndarray) -> str:
    """`layer 3` or `layer 3 (and 4 more)`."""
    return f"{noun} {numbers[0]}" + (f" (and {len(numbers) - 1} more)" if len(numbers) > 1 else "")


def skew_of(load: np.ndarray) -> float:
    """Busiest expert / mean expert on average over layers with tokens; 1 without any. load: float64[layer, expert]"""
    load = load[load.any(axis=1)]
    return float((load.max(axis=1) / load.mean(axis=1)).mean()) if len(load) else 1.0
