"""Traffic that the recorder notes beside tokens (`misc_objects`, mode `per_token`, DeepEP's normal kernels): by layer, how
many tokens a rank sends to each rank. A token goes once to a rank, for however many experts there.

The recorder hangs the same list into the records of all passes and empties it at every start of one, so a dump holds the
traffic of the last pass alone (srt/eplb/expert_distribution.py, `_DetailSinglePassGatherer`).
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from engine.finding import Finding, Origin
from engine.formats.arrays import MAX_RANKS, MAX_SPLIT, traffic_matrix
from engine.formats.sglang import dumps
from engine.formats.sglang.dumps import Dump
from engine.formats.source import Source
from engine.workload import TrafficMatrix

SENT = "num_tokens_per_rank"


def read_traffic(sources: Sequence[Source], name: str) -> TrafficMatrix:
    """The dispatch between all ranks, every layer that has any. name: of the format. Raises InputError, also where the
    file of a rank is missing."""
    amounts, passes, written = None, 0, 0
    senders: set[int] = set()
    for dump in dumps.read_ranks(sources):
        senders.add(dump.rank)
        lists = {id(record["misc_objects"]): record for record in dump.records if record.get("misc_objects")}
        passes, written = max(passes, len(dump.records)), max(written, len(lists))
        for record in lists.values():
            for layer, tokens in _rows(dump, record):
                if amounts is None:
                    amounts = _no_traffic(dump, len(tokens))
                if len(tokens) != amounts.shape[1] or dump.rank >= len(tokens) or layer >= len(amounts):
                    raise dump.source.fault(
                        f"another number of ranks or layers than elsewhere, {len(tokens)}", dump.place(record)
                    )
                amounts[layer, dump.rank] += tokens
    if amounts is None:
        raise sources[0].fault("holds no traffic (misc_objects): only DeepEP's normal kernels note it")
    if missing := set(range(amounts.shape[1])) - senders:
        raise sources[0].fault(
            f"traffic between {amounts.shape[1]} ranks needs the files of all; that of rank {min(missing)} is missing"
        )
    matrix = traffic_matrix(sources[0], amounts[amounts.any(axis=(1, 2))] * sources[0].bytes_per_token)
    findings = ()
    if written < passes:
        message = (
            f"The traffic is of {written} of {passes} passes: SGLang's recorder keeps one list for all, so only the "
            "last pass is left. For more, record the tokens and let the studio count what they send."
        )
        findings = (Finding(severity="warning", code="traffic-of-last-pass", message=message),)
    return replace(matrix, origin=Origin(format=name, findings=findings))


def _no_traffic(dump: Dump, ranks: int) -> np.ndarray:
    """float64[decoder layer, src, dst] of zeros, once that many can be."""
    layers = len(dump.logical_of_slot)
    if not 2 <= ranks <= MAX_RANKS or layers * ranks * ranks > MAX_SPLIT:
        raise dump.source.fault(f"traffic of {layers} layers between {ranks} ranks is more than can be planned for")
    return np.zeros((layers, ranks, ranks))


def _rows(dump: Dump, record: dict) -> list[tuple[int, np.ndarray]]:
    """(decoder layer, float64[dst]) of every dispatch that a record notes."""
    rows = []
    for entry in record["misc_objects"] if isinstance(record["misc_objects"], list) else [None]:
        layer = entry.get("layer_id") if isinstance(entry, dict) else None
        counts = entry.get(SENT) if isinstance(entry, dict) else None
        whole = isinstance(counts, list) and all(type(count) is int and 0 <= count < 2**53 for count in counts)
        if type(layer) is not int or layer < 0 or not whole:
            raise dump.source.fault(
                f"needs a 'layer_id' and a list of whole numbers {SENT!r}", f"{dump.place(record)}, misc_objects"
            )
        rows.append((layer, np.array(counts, np.float64)))
    return rows
