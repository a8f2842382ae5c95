"""Names of DeepEP's kernels as profilers print them, and traces with them."""

import pytest

from engine.formats import read_costs
from engine.formats.measured.deepxtrace import kernel_of
from tests.formats.measured.test_kineto import kernel, operator, saved, trace


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "void deep_ep::intranode::dispatch<8, 768, 8192>(int4*, float*, int*)",
            ("intranode", "dispatch", 8, None, None),
        ),
        (
            "void deep_ep::intranode::dispatch<(int)4, (int)768, (int)8192>(int4 *, float *)",
            ("intranode", "dispatch", 4, None, None),
        ),
        (
            "void deep_ep::intranode::combine<__nv_bfloat16, 8, 768, 4096>(__nv_bfloat16*, float*)",
            ("intranode", "combine", 8, None, None),
        ),
        ("void deep_ep::intranode::cached_notify_combine<8>(void**, int*)", ("intranode", "notify", 8, None, None)),
        (
            "void deep_ep::internode::notify_dispatch<false, 4>(int const*, int*)",
            ("internode", "notify", None, 4, None),
        ),
        (
            "void deep_ep::internode::dispatch<false, 4, false, 7, 4>(int4*, deep_ep::internode::SourceMeta*)",
            ("internode", "dispatch", None, 4, None),
        ),
        (
            "void deep_ep::internode::combine<false, 4, __nv_bfloat16, 16, 4, 4, 16, 24>(int4*, float*)",
            ("internode", "combine", None, 4, None),
        ),
        ("void deep_ep::internode::cached_notify<false>(int, int)", ("internode", "notify", None, None, None)),
        (
            "void deep_ep::internode_ll::dispatch<(bool)1, (bool)1, (int)6144>(void *, void *)",
            ("low-latency", "dispatch", None, None, 6144),
        ),
        (
            "void deep_ep::internode_ll::combine<(bool)0, (int)6144, (int)11, (int)4>(void *, void *)",
            ("low-latency", "combine", None, None, 6144),
        ),
        (
            "void deep_ep::internode_ll::dispatch<true, 3, 10, 7168>(void*, float*)",
            ("low-latency", "dispatch", None, None, 7168),
        ),
        ("void dpsk::ep::internode::dispatch_ll(void*)", ("low-latency", "dispatch", None, None, None)),
        ("deep_ep::intranode::dispatch", ("intranode", "dispatch", None, None, None)),
    ],
)
def test_a_name_says_which_kernel_it_is(name, says):
    assert tuple(kernel_of(name)) == says


@pytest.mark.parametrize(
    "name",
    [
        "void deep_ep::internode::get_dispatch_layout<256, 32, 8>(long const*)",
        "void deep_ep::intranode::barrier<8>(int**)",
        "void deep_ep::internode_ll::clean_low_latency_buffer<512>(int*)",
        "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)",
        "void dispatch<8>(int)",
        "",
    ],
)
def test_other_kernels_are_none(name):
    assert kernel_of(name) is None


DISPATCH = "void deep_ep::intranode::dispatch<8, 768, 8192>(int4*)"


def test_a_trace_says_how_often_and_how_long_but_not_how_much(tmp_path):
    launches = [kernel(id=None, dur=100.0 + 10 * number, name=DISPATCH) for number in range(11)]
    measured = read_costs(saved(tmp_path, trace(*launches)))
    (times,) = measured.exchanges
    assert (times.kernels, times.part, times.gpus, times.launches) == ("intranode", "dispatch", 8, 11)
    assert (times.low, times.median, times.high) == pytest.approx((110e-6, 150e-6, 190e-6))
    assert not measured.collectives and not measured.gemm
    assert "11 DeepEP intranode dispatch kernels over 8 GPUs: 150 µs in the median" in measured.notes[0]
    assert "does not say how many tokens" in measured.notes[0]


def test_gemms_beside_them_are_still_read(tmp_path):
    measured = read_costs(saved(tmp_path, trace(operator(), kernel(), kernel(id=None, name=DISPATCH))))
    assert len(measured.gemm) == 1
    assert measured.exchanges[0].launches == 1


def test_saved_times_with_exchanges_are_read_back(tmp_path):
    measured = read_costs(saved(tmp_path, trace(kernel(id=None, name=DISPATCH))))
    path = tmp_path / "times.json"
    path.write_text(measured.to_json())
    assert read_costs(path) == measured
