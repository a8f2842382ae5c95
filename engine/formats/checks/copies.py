"""The same tokens counted several times: by every rank of a data-parallel group (vllm #22167) or by tensor-parallel
ranks that all see the same tokens (Megatron-Core without sequence parallelism)."""

from collections.abc import Iterator

import numpy as np

from engine.finding import Finding
from engine.workload import ExpertLoad, RoutingTrace

FEWEST_TOKENS = 64
"""Of a block: shorter ones may be alike by chance."""
FEWEST_COUNTS = 32
"""Different counts that must have a factor in common before it means something."""
MOST_COPIES = 64
ALIGNMENT = 128
"""To multiples of which DeepEP's dispatch rounds up the tokens of each expert where DeepGEMM follows, and SGLang's
recorder counts those (srt/layers/moe/token_dispatcher/deepep.py, `expert_alignment`)."""


def factor_of_counts(loads: ExpertLoad) -> int:
    """What every count of every layer is a multiple of; 1 where counts are no whole numbers or too few differ."""
    counts = loads.load[loads.load > 0]
    if (counts != np.rint(counts)).any() or counts.max(initial=0) >= 2**53:
        return 1
    different = np.unique(counts.astype(np.int64))
    return int(np.gcd.reduce(different)) if len(different) >= FEWEST_COUNTS else 1


def is_rounded(loads: ExpertLoad) -> bool:
    """Whether counts were rounded up pass by pass, which leaves layers that saw the same tokens with different totals; copies
    leave them with the same."""
    return factor_of_counts(loads) % ALIGNMENT == 0 and bool(np.ptp(loads.load.sum(axis=1)) > 0)


def ranks_alike(workload: RoutingTrace | ExpertLoad) -> list[list[int]]:
    """Groups of source ranks with exactly the same tokens, or counts, in the order of their first ranks."""
    if isinstance(workload, ExpertLoad):
        return _counts_alike(workload)
    if workload.source_rank is None:
        return []
    tokens_of = tokens_of_ranks(workload)
    same_ends: dict[tuple, list[int]] = {}
    for rank, tokens in tokens_of.items():
        if len(tokens) >= FEWEST_TOKENS:
            ends = workload.experts[tokens[[0, len(tokens) // 2, -1]]].tobytes()
            same_ends.setdefault((len(tokens), ends), []).append(rank)
    groups: dict[tuple, list[int]] = {}
    for key, ranks in same_ends.items():
        for rank in ranks if len(ranks) > 1 else ():
            block = workload.experts[tokens_of[rank]]
            if (block != block[0]).any():
                groups.setdefault((key, block.tobytes()), []).append(rank)
    return [ranks for ranks in groups.values() if len(ranks) > 1]


def tokens_of_ranks(trace: RoutingTrace) -> dict[int, np.ndarray]:
    """int64[...] for each source rank that has tokens, ascending."""
    order = np.argsort(trace.source_rank, kind="stable")
    ranks, starts = np.unique(trace.source_rank[order], return_index=True)
    return dict(zip(ranks.tolist(), np.split(order, starts[1:]), strict=True))


def _counts_alike(loads: ExpertLoad) -> list[list[int]]:
    groups: dict[bytes, list[int]] = {}
    for rank, counts in enumerate(() if loads.by_source is None else loads.by_source):
        if len(np.unique(counts)) >= FEWEST_COUNTS:
            groups.setdefault(counts.tobytes(), []).append(rank)
    return [ranks for ranks in groups.values() if len(ranks) > 1]


def blocks_in_turn(trace: RoutingTrace) -> int:
    """How many times the whole recording says the same, one block after another; 1 where it does not."""
    for copies in range(min(MOST_COPIES, trace.tokens // FEWEST_TOKENS), 1, -1):
        block = trace.tokens // copies
        if trace.tokens % copies or (trace.experts[0] != trace.experts[block]).any():
            continue
        if np.array_equal(trace.experts[:-block], trace.experts[block:]):
            return copies if (trace.experts[1:block] != trace.experts[0]).any() else 1
    return 1


def check_token_copies(trace: RoutingTrace) -> Iterator[Finding]:
    """Blocks of tokens that come several times."""
    if alike := ranks_alike(trace):
        yield _ranks(alike, "have the same tokens with the same choices")
    elif (copies := blocks_in_turn(trace)) > 1:
        yield Finding(
            severity="warning",
            code="copies",
            message=(
                f"The recording is {copies} times the same {trace.tokens // copies:,} tokens, as {copies} ranks that "
                f"all see the same tokens record them, or the same requests sent {copies} times: every load reads "
                f"{copies} times too high. Keep the first."
            ),
            rows=(trace.tokens // copies, trace.tokens),
            remedy="drop-copies",
        )


def check_load_copies(loads: ExpertLoad) -> Iterator[Finding]:
    """Counts that several ranks have in common, or that are all multiples of one number."""
    if alike := ranks_alike(loads):
        yield _ranks(alike, "counted exactly the same")
    elif is_rounded(loads):
        total = loads.load.sum(axis=1)
        yield Finding(
            severity="ok",
            code="rounded-counts",
            message=(
                f"All counts are multiples of {ALIGNMENT}, and the layers' totals differ by "
                f"{np.ptp(total) / total.max():.2g}: DeepEP's dispatch rounds up each expert's tokens in every pass. "
                "Loads read a little too high, most for experts that are seldom chosen."
            ),
        )
    elif (factor := factor_of_counts(loads)) > 1:
        yield Finding(
            severity="warning",
            code="multiplied-counts",
            message=(
                f"All counts are multiples of {factor}, as where each of {factor} data-parallel ranks adds the same "
                f"tokens to a common sum, or the same requests were sent {factor} times. The shares of the experts "
                f"are right, but every load reads {factor} times too high: divide by {factor}, unless the requests "
                "were meant."
            ),
            remedy="divide-by-copies",
        )


def _ranks(alike: list[list[int]], does: str) -> Finding:
    largest = max(alike, key=len)
    ranks = " and ".join(str(rank) for rank in largest[:2]) + (" …" if len(largest) > 2 else "")
    return Finding(
        severity="warning",
        code="copies",
        message=(
            f"Ranks {ranks} {does} ({len(alike)} such groups, of up to {len(largest)} ranks), as tensor-parallel "
            f"ranks do: loads read up to {len(largest)} times too high. Keep one copy of each, its tokens distributed over "
            "these ranks in turn."
        ),
        remedy="drop-copies",
    )
