"""Which sequence a token belongs to, and in which phase it was routed: the recorder notes positions, but no requests.

A pass is parts of sequences one after another: one token each when decoding, as many as `extend_seq_lens` says when
extending. A part continues a sequence of this rank that ends where the part begins: when decoding, the first such one in
the order of the batch, which SGLang keeps and to whose end it adds what it has extended; when extending, the one that ran
last, as chunks of a prompt do. What is missing in a pass that decodes has ended, as a rule. Between sequences of equal
length, one of which has just ended, that is a guess.
"""

from collections import defaultdict, deque

import numpy as np

from engine.workload import DECODE, PREFILL

EXTEND, DECODING, MIXED, IDLE, TARGET_VERIFY = 1, 2, 3, 4, 5
"""SGLang's `ForwardMode` (srt/model_executor/forward_batch_info.py). Later values have changed their meaning between
versions."""


class Sequences:
    """The sequences of one rank, pass by pass in their order."""

    def __init__(self) -> None:
        self._running: dict[int, deque[tuple[int, int]]] = defaultdict(deque)
        """By the position that may come next: (turn, sequence), the turns counting parts of passes."""
        self._ended: dict[int, deque[tuple[int, int]]] = defaultdict(deque)
        self._turn_of: list[int] = []
        self._turns = self._first_running = 0

    def follow(self, mode: int, positions: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """int64[token]: numbers of sequences, from 0. mode: the pass's `forward_mode`; positions: int64[token]; lengths:
        int64[part], of at least 1 each"""
        ends = np.cumsum(lengths)
        parts = list(zip(positions[ends - lengths].tolist(), positions[ends - 1].tolist(), strict=True))
        decodes = mode in (DECODING, MIXED, TARGET_VERIFY)
        sequences = [
            self._continued(start, decodes and (mode != MIXED or length == 1))
            for (start, _), length in zip(parts, lengths.tolist(), strict=True)
        ]
        if decodes:
            self._first_running = self._turns
        # Only now: what ends in this pass cannot be continued in it.
        for sequence, (_, end), length in zip(sequences, parts, lengths.tolist(), strict=True):
            self._turn_of[sequence] = self._turns
            # Of drafts under verification, at least one is accepted.
            for following in range(end + 2 - length if mode == TARGET_VERIFY else end + 1, end + 2):
                self._running[following].append((self._turns, sequence))
            self._turns += 1
        return np.repeat(np.array(sequences, np.int64), lengths)

    def _continued(self, start: int, decodes: bool) -> int:
        """The sequence that a part continues from this position, or a new one."""
        running, ended = self._running[start], self._ended[start]
        if decodes:
            while running and running[0][0] < self._first_running:
                ended.append(running.popleft())
        for candidates, take in ((running, running.popleft if decodes else running.pop), (ended, ended.pop)):
            while candidates and start > 0:
                turn, sequence = take()
                if self._turn_of[sequence] == turn:  # it has not run since
                    return sequence
        self._turn_of.append(-1)
        return len(self._turn_of) - 1


def parts_of_pass(mode: int, positions: np.ndarray, extended: np.ndarray | None) -> np.ndarray:
    """int64[part]: how many tokens of each sequence are in a pass. positions: int64[token]; extended: int64[part] or None, the
    pass's `extend_seq_lens`"""
    tokens = len(positions)
    if mode == DECODING:
        return np.ones(tokens, np.int64)
    if extended is not None and ((extended >= 0) & (extended <= tokens)).all() and extended.sum() == tokens:
        return extended[extended > 0]
    # Drafts under verification: a run of positions is of one sequence.
    starts = np.flatnonzero(np.diff(positions, prepend=positions[0] - 2) != 1)
    return np.diff(starts, append=tokens)


def phase_of_pass(mode: int, lengths: np.ndarray, extends: bool) -> np.ndarray:
    """int8[token]: `PREFILL` or `DECODE`. In a mixed pass, parts of one token are taken to decode. extends: whether the
    pass says how many tokens it extends sequences by"""
    if mode == MIXED:
        phase = np.where(lengths == 1, DECODE, PREFILL)
    else:
        prefills = mode == EXTEND or (mode not in (DECODING, TARGET_VERIFY) and extends)
        phase = np.full(len(lengths), PREFILL if prefills else DECODE)
    return np.repeat(phase.astype(np.int8), lengths)
