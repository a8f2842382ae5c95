"""Measured times as a table."""

import pytest

from engine.costs import Profiled
from engine.formats import read_costs
from tests.formats.faults import refused as refused_by
from tests.strategies import cluster_of, make_gpu

TABLE = """Operation,gpu,dtype,m,n,k,bytes,ranks,seconds,note
gemm,type-0,bf16,16,64,32,,,1e-5,
gemm,type-0,bf16,16,64,32,,,3e-5,
gemm,type-0,bf16,16,64,32,,,1.5e-5,the median
gemm,type-0,bf16,256,64,32,,,4e-5,
gemm,type-0,fp8,16,64,32,,,5e-6,
memory,type-0,,,,,1e6,,1e-3,
all_to_all,,,,,,1024,4,1e-4,
all_to_all,,,,,,4096,4.0,2e-4,
all_to_all,,,,,,1024,8,3e-4,
all_reduce,,,,,,2048,4,4e-4,
send_receive,,,,,,512,4,5e-4,
"""


def saved(folder, text):
    path = folder / "times.csv"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_table_is_read(tmp_path):
    measured = read_costs(saved(tmp_path, "\ufeff" + TABLE))
    assert (measured.name, measured.origin) == ("times", "table times.csv")
    assert [(times.gpu, times.dtype, len(times.points)) for times in measured.gemm] == [
        ("type-0", "bf16", 2),
        ("type-0", "fp8", 1),
    ]
    assert measured.gemm[0].points[0] == (16, 64, 32, 1.5e-5)
    assert measured.ranks_of("all_to_all") == [4, 8]
    assert measured.ranks_of("all_reduce") == measured.ranks_of("send_receive") == [4]
    cost, card = Profiled(measured), make_gpu()
    assert float(cost.gemm(card, 16, 64, 32, "bf16")) == 1.5e-5
    assert float(cost.memory_pass(card, 5e5)) == 1e-3
    assert float(cost.all_to_all(cluster_of(*[card] * 4), 2560)) == pytest.approx(1.5e-4)


def test_columns_nobody_needs_may_be_absent(tmp_path):
    measured = read_costs(saved(tmp_path, "seconds,operation,bytes,ranks\n1,all_reduce,10,2\n"))
    assert measured.collectives[0].points == ((10, 1),)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("a,b\n1,2\n", ("column 'operation' is missing",)),
        ("operation,bytes\nmemory,2\n", ("column 'seconds' is missing",)),
        ("operation,seconds\n", ("header but no rows",)),
        (TABLE + "send,,,,,,1,1,1,\n", ("line 13", "operation 'send'", "gemm, memory, all_to_all, all_reduce")),
        (TABLE + "gemm,type-0,bf16,1,,3,,,1,\n", ("line 13", "gemm needs a value in column 'n'")),
        (TABLE + "gemm,type-0,int4,1,2,3,,,1,\n", ("line 13", "dtype 'int4'")),
        (TABLE + "memory,type-0,,,,,12,,0,\n", ("line 13", "column 'seconds' is '0', not a number above 0")),
        (TABLE + "memory,type-0,,,,,inf,,1,\n", ("line 13", "'inf'")),
        (TABLE + "memory,type-0,,,,,x,,1,\n", ("line 13", "column 'bytes' is 'x'")),
        (TABLE + "all_reduce,,,,,,10,1,1,\n", ("line 13", "column 'ranks' is '1', not a whole number of 2 or more")),
        (TABLE + "all_reduce,,,,,,10,2.5,1,\n", ("'2.5'",)),
        (TABLE + "memory\n", ("line 13",)),
    ],
)
def test_bad_tables_are_refused_with_the_line(tmp_path, text, parts):
    refused_by(saved(tmp_path, text), *parts, read=read_costs)
