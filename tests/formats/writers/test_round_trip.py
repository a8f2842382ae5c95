"""What is written is read back as it was, as far as a format can carry it; and what it cannot carry is said."""

import io
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import InputError
from engine.formats import read_workload
from engine.formats.writers import WRITERS, write_recording
from engine.workload import ExpertLoad, RoutingTrace, TrafficMatrix
from tests.cases.examples import examples
from tests.formats.faults import refused
from tests.formats.fuzzing import EXAMPLES
from tests.formats.writers.recordings import FINDINGS, loads, traces, traffic, with_findings

quick = settings(max_examples=examples(15), deadline=None)


def back(workload, name, to=None, **known):
    """(what is read from what was written, what was lost)"""
    with TemporaryDirectory() as folder:
        written = write_recording(workload, Path(folder) / name, to)
        assert [file.name for file in Path(folder).iterdir()] == [name]  # no draft is left
        assert written.size == written.path.stat().st_size
        return read_workload(written.path, **known), written.lost


@quick
@given(st.one_of(traces(), loads(), traffic()))
def test_npz_carries_everything(workload):
    same, lost = back(with_findings(workload), "a.npz")
    assert (same.digest, lost) == (workload.digest, ())
    assert type(same) is type(workload)
    assert (same.origin.format, same.origin.findings) == ("npz", FINDINGS)
    assert back(workload, "a.npz")[0].origin.findings == ()


@quick
@given(traces(columns=()))
def test_npy_carries_choices(trace):
    same, lost = back(trace, "a.npy")
    assert (same.digest, lost) == (trace.digest, ())


@quick
@given(traces(columns=("sequence", "source_rank")), st.sampled_from(["a.csv", "a.parquet"]))
def test_tables_carry_choices_sequences_and_ranks(trace, name):
    same, lost = back(trace, name)
    assert (same.digest, lost) == (trace.digest, ())


@quick
@given(loads(columns=()), st.sampled_from(["a.csv", "a.parquet"]))
def test_tables_carry_loads(load, name):
    same, lost = back(load, name)
    assert (same.digest, lost) == (load.digest, ())


@quick
@given(traffic(), st.sampled_from(["a.csv", "a.parquet", "a.npy"]))
def test_tables_and_arrays_carry_traffic(matrix, name):
    same, lost = back(matrix, name, bytes_per_token=matrix.bytes_per_token)
    assert same.digest == matrix.digest
    assert lost == ("how many bytes a token copy is",)


@quick
@given(loads(columns=()))
def test_statistics_carry_loads_by_model_layer(load):
    same, lost = back(load, "a.json")
    assert (same.digest, lost) == (load.digest, ())


@quick
@given(st.one_of(traces(), loads(), traffic()))
def test_whatever_is_not_carried_is_said(workload):
    """A part that is not the same when it is read back has its phrase."""
    words = {"sequence": "sequence", "source_rank": "rank", "phase": "prefill", "model_layers": "layers of the model"}
    words |= {"by_source": "which rank", "by_step": "step"}
    for name, writer in WRITERS.items():
        if isinstance(workload, writer.carries) and name in ("npz", "npy", "csv", "parquet"):
            same, lost = back(workload, f"a{writer.suffix}", name)
            for part, word in words.items():
                before = getattr(workload, part, None)
                after = getattr(same, part, None)
                if isinstance(before, np.ndarray) and not np.array_equal(before, after if after is not None else ()):
                    assert any(word in phrase for phrase in lost), (name, part)


def test_a_kind_that_does_not_fit_is_refused(tmp_path):
    load = ExpertLoad("l", np.ones((2, 3)), (0, 1))
    with pytest.raises(InputError, match=r"^l: is expert loads, which a NumPy array cannot carry; npz, csv"):
        write_recording(load, tmp_path / "a.npy")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("name", "to", "says"), [("a.dat", None, "End the name in .npz"), ("a.npz", "word", "'word'")])
def test_no_such_format(tmp_path, name, to, says):
    with pytest.raises(InputError, match=says):
        write_recording(ExpertLoad("l", np.ones((2, 3)), (0, 1)), tmp_path / name, to)


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(InputError, match=r"^a\.csv: cannot be read or written"):
        write_recording(ExpertLoad("l", np.ones((2, 3)), (0, 1)), tmp_path / "none" / "a.csv")


EXPERTS = {"experts": np.zeros((4, 2, 2), np.int16)}
LOAD = {"expert_load": np.ones((2, 3))}


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        (EXPERTS | {"phase": np.array([0, 1, 2, 0])}, "phase must be 0 or 1"),
        (EXPERTS | {"phase": np.zeros(3)}, "each of 4 tokens"),
        (EXPERTS | {"model_layers": np.array([3])}, "each of 2 layers"),
        (EXPERTS | {"model_layers": np.array([3, 3])}, "ascending"),
        (EXPERTS | {"model_layers": np.array([0.5, 3])}, "whole numbers"),
        (EXPERTS | {"findings": np.frombuffer(b"[{}]", np.uint8)}, "findings"),
        (EXPERTS | {"findings": np.frombuffer(b"\xff", np.uint8)}, "findings"),
        (EXPERTS | {"findings": np.zeros(3)}, "JSON"),
        (LOAD | {"expert_load": np.ones(3)}, "[layers, experts]"),
        (LOAD | {"expert_load": np.ones((1001, 3))}, "at most 1000"),
        ({"traffic_bytes": np.zeros((2**23, 5), np.int8)}, "numbers are read"),
        (LOAD | {"by_step": np.zeros((2**23, 5), np.int8)}, "numbers are read"),
        (LOAD | {"expert_load": -np.ones((2, 3))}, "at least 0"),
        (LOAD | {"by_step": np.ones((2, 3))}, "by_step"),
        (LOAD | {"by_step": np.ones((2, 2, 3))}, "does not add up"),
        (LOAD | {"by_source": np.full((1, 2, 3), np.nan)}, "nan"),
        ({"traffic_bytes": np.ones((2, 3))}, "square"),
        ({"traffic_bytes": np.ones((2, 2)), "bytes_per_token": np.zeros(1)}, "bytes_per_token"),
    ],
)
def test_bad_archives(tmp_path, arrays, says):
    np.savez_compressed(tmp_path / "a.npz", **arrays)
    refused(tmp_path / "a.npz", says)


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.one_of(traces(), loads(), traffic()), st.data())
def test_any_damage_to_an_archive_is_one_clear_line(workload, data):
    """One array of what the writer wrote is another one: of another shape, other numbers or not there."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "a.npz"
        write_recording(with_findings(workload), path)
        with np.load(path) as archive:
            arrays = dict(archive)
        name = data.draw(st.sampled_from(sorted(arrays)))
        array = arrays.pop(name)
        other = [
            array.reshape(-1),
            array[None],
            array.astype(np.float32) - 0.5,
            array.reshape(-1)[:0],
            np.flip(array),
            None,
        ]
        other.append(array.astype(np.int64) * 10**9)
        if (changed := data.draw(st.sampled_from(other))) is not None:
            arrays[name] = changed
        buffer = io.BytesIO()
        np.savez(buffer, **arrays)
        path.write_bytes(buffer.getvalue())
        try:
            assert isinstance(read_workload(path), RoutingTrace | ExpertLoad | TrafficMatrix)
        except InputError as error:
            assert str(error).startswith("a.npz") and "\n" not in str(error)


def test_loads_lose_their_parts_in_tables():
    counts = np.arange(1.0, 13).reshape(2, 2, 3)
    load = ExpertLoad("l", counts.sum(axis=0), (0, 1), by_source=counts, by_step=counts)
    assert back(load, "a.csv")[1] == ("how much came from which rank", "how loads changed from step to step")
    assert back(replace(load, by_step=None), "a.json")[1] == ()
