"""Whatever is in the files of a trace, the answer is a workload or one clear line."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import given
from hypothesis import strategies as st

from tests.formats.fuzzing import any_input, workload_or_one_line
from tests.formats.megatron.recordings import run

ODD = st.sampled_from(
    [-1, 0, 1, 2**31, 2**70, 1.5, float("nan"), True, None, "0", "mtp", [], {}, [[1, 2]], [[]], [[[1]]]]
)
NAMES = ("step", "layer", "rank", "block", "num_tokens", "topk", "top_indices", "mtp_idx", "hs_offset")
ROWS = st.lists(st.lists(st.integers(-2, 9), min_size=2, max_size=2), max_size=4)
CHANGES = st.lists(
    st.tuples(st.integers(0, 30), st.sampled_from(NAMES), st.one_of(ODD, st.integers(0, 3), ROWS)), max_size=3
)


@given(
    st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=4, unique=True), min_size=1, max_size=4),
    CHANGES,
    st.lists(st.tuples(st.integers(0, 10**6), st.one_of(st.binary(max_size=3), st.just(b"\n"))), max_size=3),
    st.booleans(),
)
@any_input
def test_any_trace(layers, changes, edits, compact):
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        ranks = [run(own, rank, seed=rank, steps=1, tokens=3) for rank, own in enumerate(layers)]
        records = [record for rank in ranks for record in rank]
        for place, name, value in changes:
            records[place % len(records)][name] = value
        for rank, own in enumerate(ranks):
            text = "".join(
                json.dumps(record, separators=(",", ":") if compact else None) + "\n" for record in own
            ).encode()
            if not rank:
                for place, inserted in edits:
                    at = place % len(text)
                    text = text[:at] + inserted + text[at + 1 :]
            (folder / f"router_trace_rank{rank}.jsonl").write_bytes(text)
        workload_or_one_line(folder)
