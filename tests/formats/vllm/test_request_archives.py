"""Archives of single requests."""

import numpy as np
import pytest

from engine.errors import InputError
from engine.formats import identify, members, parts, read_workload
from tests.formats.faults import refused

FIRST = np.array([[[1, 4], [2, 0]], [[7, 3], [5, 6]]], np.uint8)


def request(folder, name, experts, **more):
    np.savez(folder / name, routed_experts=experts, **more)
    return folder / name


def test_files_are_requests_of_one_recording(tmp_path):
    ids = ("550e8400-e29b-41d4-a716-446655440000", "0b9c1f6e-03aa-4c8e-9d7f-b1e1a2c3d4e5")
    for name, rows in zip(ids, (2, 1), strict=True):
        path = request(
            tmp_path, f"{name}.npz", FIRST[:rows], prompt_token_ids=np.arange(1), output_token_ids=np.arange(rows)
        )
    assert identify(path).name == "npz-requests"
    assert members(path) == ()
    trace = read_workload(tmp_path)
    assert trace.experts.tolist() == [*FIRST[:1].tolist(), *FIRST.tolist()]
    assert trace.sequence.tolist() == [0, 1, 1]
    assert trace.phase.tolist() == [0, 0, 1]
    assert trace.origin.findings == ()


def test_files_come_in_the_order_of_their_numbers(tmp_path):
    for number in (10, 9, 2):
        request(tmp_path, f"request-{number}.npz", np.full((1, 1, 1), number))
    assert read_workload(tmp_path).experts.ravel().tolist() == [2, 9, 10]


def test_names_that_differ_in_more_than_numbers_are_recordings_of_their_own(tmp_path):
    paths = [request(tmp_path, f"{name}.npz", FIRST) for name in ("code-1", "code-2", "prose-1")]
    assert sorted(len(part.paths) for part in parts(paths)) == [1, 2]


def test_without_a_prompt_phases_are_open(tmp_path):
    trace = read_workload(request(tmp_path, "a.npz", FIRST, prompt_token_ids=np.array(None)))
    assert (trace.phase, trace.origin.findings[0].code) == (None, "phase-unknown")


def test_top_1(tmp_path):
    assert read_workload(request(tmp_path, "a.npz", FIRST[:, :, 0])).k == 1


@pytest.mark.parametrize(
    ("experts", "part"),
    [
        (FIRST[0, 0], "must be [tokens, layers, k]"),
        (FIRST[:0], "must be [tokens, layers, k]"),
        (np.array(None), "Python objects, which are never loaded"),
        (np.full((1, 2, 2), -3), "token 0, layer 0: expert -3"),
        (np.full((1, 2, 2), 0.5), "token 0, layer 0"),
    ],
)
def test_bad_requests(tmp_path, experts, part):
    refused(request(tmp_path, "a.npz", experts), part)


def test_the_file_at_fault_is_named(tmp_path):
    paths = [request(tmp_path, f"{name}.npz", experts) for name, experts in (("r1", FIRST), ("r2", FIRST[:, :1]))]
    with pytest.raises(InputError, match=r"r2.npz: has 1 layers and k = 2, but the first request 2 layers and k = 2"):
        read_workload(paths)
    paths[1] = request(tmp_path, "r2.npz", FIRST + 90)
    with pytest.raises(InputError, match=r"r2.npz, token 0, layer 0: expert 91 is out of range"):
        read_workload(paths, num_experts=8)
