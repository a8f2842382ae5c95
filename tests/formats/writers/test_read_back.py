"""What is written for other programs is read back by the readers of their formats, as far as these can carry it."""

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.formats import read_workload
from engine.formats.writers import write_recording
from engine.model import MoEModel
from tests.cases.examples import examples
from tests.formats.writers.recordings import loads, traces

quick = settings(max_examples=examples(15), deadline=None)


@quick
@given(loads(), st.sampled_from(["a.json", "a.pt"]))
def test_sglangs_statistics(load, name):
    with TemporaryDirectory() as folder:
        written = write_recording(load, Path(folder) / name)
        back = read_workload(written.path)
    assert back.model_layers == load.model_layers
    if any("rounded" in phrase for phrase in written.lost):
        assert np.abs(back.load - load.load).max() <= 2  # of up to four parts, each rounded
        return
    np.testing.assert_array_equal(back.load, load.load)
    if load.by_step is not None:
        np.testing.assert_array_equal(back.by_step, load.by_step)
    elif load.by_source is not None:
        np.testing.assert_array_equal(back.by_source, load.by_source)
    else:
        assert back.digest == load.digest


@quick
@given(traces(columns=("sequence", "source_rank", "model_layers")))
def test_moe_balance(trace):
    last = 0 if trace.model_layers is None else trace.model_layers[-1]
    dense = () if trace.model_layers is None else tuple(set(range(last + 1)) - set(trace.model_layers))
    model = MoEModel(
        name="m", layers=max(last + 1, trace.layers), dense_layers=dense, experts=trace.num_experts, experts_per_token=1,
        d_model=1, d_ff=1,
    )  # fmt: skip
    with TemporaryDirectory() as folder:
        back = read_workload(write_recording(trace, Path(folder) / "a.jsonl").path, model=model)
    sequence = np.zeros(trace.tokens, np.int32) if trace.sequence is None else trace.sequence
    numbers, first, of_token = np.unique(sequence, return_index=True, return_inverse=True)
    grouped = trace.part(np.argsort(first[of_token], kind="stable"))  # sequences in the order in which they begin
    np.testing.assert_array_equal(back.experts, grouped.experts)
    assert len(np.unique(back.sequence)) == len(numbers)
    if trace.source_rank is not None:
        np.testing.assert_array_equal(back.source_rank, grouped.source_rank)
    if trace.model_layers is not None:
        assert back.model_layers == trace.model_layers
