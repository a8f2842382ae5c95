"""The two base64 strings in which engines give one request's routing."""

import base64
import io
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import InputError
from engine.formats import routed_experts
from engine.formats.routed_experts import decode_int32, decode_lists, decode_npy
from tests.cases.examples import examples

# Two tokens of a model with three decoder layers, the first one dense, and k = 2, as SGLang's buffer holds them.
SGLANG_IDS = (0, 0, 3, 7, 255, 1, 0, 0, 0, 4, 2, 0)
SGLANG_TEXT = "AAAAAAAAAAADAAAABwAAAP8AAAABAAAAAAAAAAAAAAAAAAAABAAAAAIAAAAAAAAA"


def npy_text(array: np.ndarray, **options: object) -> str:
    file = io.BytesIO()
    np.save(file, array, **options)
    return base64.b64encode(file.getvalue()).decode()


def base64_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


def refused(decode, *arguments) -> str:
    with pytest.raises(InputError) as caught:
        decode(*arguments)
    message = str(caught.value)
    assert message.startswith("routed_experts: ")
    assert "\n" not in message
    return message


def test_int32_by_hand():
    assert base64.b64decode(SGLANG_TEXT) == struct.pack("<12i", *SGLANG_IDS)
    experts = decode_int32(SGLANG_TEXT, 3, 2)
    assert experts.dtype == np.int16
    assert experts.tolist() == [[[-1, -1], [3, 7], [255, 1]], [[-1, -1], [0, 4], [2, 0]]]


def test_npy_by_hand():
    header = b"{'descr': '|u1', 'fortran_order': False, 'shape': (2, 1, 2), }"
    header += b" " * (128 - 10 - len(header) - 1) + b"\n"
    data = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + bytes([5, 0, 200, 199])
    assert decode_npy(base64_of(data)).tolist() == [[[5, 0]], [[200, 199]]]


@pytest.mark.parametrize("dtype", ["u1", "<u2", ">u2", "<i4", "<i8"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_npy_of_every_width_and_order(dtype, order):
    ids = np.array([[[1, 2], [3, 4], [5, 6]], [[7, 8], [9, 10], [11, 127]]])
    np.testing.assert_array_equal(decode_npy(npy_text(ids.astype(dtype, order=order))), ids)


def test_rows_of_zeros_were_not_captured():
    ids = np.array([[[0, 0], [0, 3]], [[3, 0], [0, 0]]], np.uint8)
    assert decode_npy(npy_text(ids)).tolist() == [[[-1, -1], [0, 3]], [[3, 0], [-1, -1]]]


def test_expert_0_alone_stays_where_one_expert_is_chosen():
    assert decode_int32(base64_of(struct.pack("<3i", 0, 1, -1)), 1, 1).tolist() == [[[0]], [[1]], [[-1]]]


def test_narrower_numbers_where_the_server_says_so():
    text = base64_of(bytes([0, 0, 3, 7, 255, 1]))
    assert decode_int32(text, 3, 2, "uint8").tolist() == [[[-1, -1], [3, 7], [255, 1]]]
    assert decode_int32(base64_of(struct.pack("<2H", 511, 300)), 1, 2, dtype="uint16").tolist() == [[[511, 300]]]
    assert "dtype 'float32' is not one of int32, uint16, uint8" in refused(decode_int32, text, 3, 2, "float32")


def test_the_older_lists():
    assert decode_lists([[[5, 0], [0, 0]]]).tolist() == [[[5, 0], [-1, -1]]]
    assert "differ in length" in refused(decode_lists, [[[1, 2], [3]]])
    assert "whole numbers" in refused(decode_lists, [[[1.5]]])
    assert "whole numbers" in refused(decode_lists, {"data": "AAAA"})
    assert "at least one of each" in refused(decode_lists, [[1, 2]])


@given(st.integers(1, 5), st.integers(1, 4), st.integers(2, 3), st.randoms(use_true_random=False))
@settings(max_examples=examples(30))
def test_both_strings_carry_the_same_choices(rows, layers, k, random):
    ids = np.array([[random.sample(range(300), k) for _ in range(layers)] for _ in range(rows)], np.int32)
    np.testing.assert_array_equal(decode_int32(base64_of(ids.tobytes()), layers, k), ids)
    np.testing.assert_array_equal(decode_npy(npy_text(ids.astype(np.uint16))), ids)


@pytest.mark.parametrize(
    ("layers", "k", "text", "part"),
    [
        (3, 2, SGLANG_TEXT[:-4], "no whole number of tokens of 3 layers × 2"),
        (5, 2, SGLANG_TEXT, "48 bytes are no whole number"),
        (0, 2, SGLANG_TEXT, "no whole number"),
        (3, 2, SGLANG_TEXT[:-3], "not base64, or was cut short"),
        (3, 2, "AA*A", "not base64"),
        (3, 2, "é", "not base64"),
        (3, 2, "", "at least one of each"),
        (3, 2, None, "base64 text is needed, not NoneType"),
        (1, 1, base64_of(struct.pack("<2i", 4, -2)), "expert -2 is out of range 0 … 4095 (token 1, layer 0)"),
        (1, 1, base64_of(struct.pack("<i", 32768)), "expert 32768 is out of range"),
        (1001, 1, base64_of(bytes(4004)), "at most 1000 layers"),
    ],
)
def test_bad_int32(layers, k, text, part):
    assert part in refused(decode_int32, text, layers, k)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (SGLANG_TEXT, "bare int32 needs layers and k"),
        (base64_of(b"\x93NUMPY\x03\x00"), "version 3.0"),
        (base64_of(b"\x93NUMPY\x01\x00\x08\x00{'a': (("), "no readable .npy"),
        (npy_text(np.zeros((2, 2, 2))), "holds float64"),
        (npy_text(np.array([[[None]]])), "holds object"),
        (npy_text(np.zeros((2, 2), int)), "not [2, 2]"),
        (npy_text(np.zeros((2, 1, 65), int)), "at most 1000 layers and 64 experts"),
        (npy_text(np.ones((3, 2, 2), np.uint8))[:-4], "is cut short or too long: uint8 [3, 2, 2] needs 12"),
        (npy_text(np.full((1, 1, 2), -3)), "expert -3 is out of range"),
    ],
)
def test_bad_npy(text, part):
    assert part in refused(decode_npy, text)


def test_a_header_that_claims_terabytes_costs_nothing():
    header = b"{'descr': '<i8', 'fortran_order': False, 'shape': (1000000000000, 61, 8), }\n"
    data = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header
    assert "there are 0" in refused(decode_npy, base64_of(data))


def test_a_text_over_the_limit_is_not_decoded(monkeypatch):
    monkeypatch.setattr(routed_experts, "MAX_FILE_BYTES", 63)
    assert "more than the limit" in refused(decode_int32, SGLANG_TEXT, 3, 2)
