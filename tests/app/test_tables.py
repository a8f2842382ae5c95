"""No text that a person or a file gave is computed by the spreadsheet that opens a downloaded table."""

import csv
import io
import re
from pathlib import Path

import pandas as pd
import pytest

from app import tables
from engine.cluster import Cluster, Gpu, Node
from engine.errors import InputError

FORMULAS = (
    "=1+1",
    '=HYPERLINK("http://attacker.example","plan")',
    "+1+cmd|' /C calc'!A0",
    "-2+3+cmd|' /C calc'!A0",
    "@SUM(A1)",
    "\t=1",
    "\r=1",
    "\n=1",
    "＝1+1",
    "＠SUM(A1)",
    "+1/A1",
    "-1,2;3",
    "+.A1",
    "-",
    "- in October",
)


@pytest.mark.parametrize("text", FORMULAS)
def test_a_formula_becomes_text(text):
    assert tables.cell(text) == f"'{text}"


@pytest.mark.parametrize(
    "text", ["", "Aurora", "+0.7 %", "-15 %", "-1.2e-05", "+3 µs", "-2.1 GB/s", "1=1", "a@b", "−5"]
)
def test_names_and_figures_stay(text):
    assert tables.cell(text) == text


def test_a_table_keeps_all_else():
    frame = pd.DataFrame({"=A1": ["=x", "y"], "n": [1, -2.5], "list": [["=z", "a"], []]}, index=[3, "@B2"])
    safe = tables.without_formulas(frame)
    assert safe.columns.tolist() == ["'=A1", "n", "list"] and safe.index.tolist() == [3, "'@B2"]
    assert (
        safe["'=A1"].tolist() == ["'=x", "y"]
        and safe["n"].tolist() == [1, -2.5]
        and safe["list"].tolist() == [["'=z", "a"], []]
    )
    rows = list(csv.reader(io.StringIO(tables.as_csv(frame))))
    assert rows[0][0] == "'=A1" and rows[1][0] == "'=x" and [row[1] for row in rows[1:]] == ["1.0", "-2.5"]


def test_the_page_shows_what_the_file_guards_and_marks_losses(monkeypatch):
    table = {"Plan": ["=1+1 mix", "'quoted"], "=B": [0.5, float("nan")]}
    drawn = {}
    monkeypatch.setattr(tables.st, "dataframe", lambda table, **options: drawn.update(options, table=table))
    tables.show(table, shown={"'=B": "{:.2f}×".format}, losses={"'=B": [True, False]})
    assert drawn["table"].data["Plan"].tolist() == ["'=1+1 mix", "'quoted"], "what is downloaded"
    html = drawn["table"].to_html()
    assert ">=1+1 mix<" in html and ">'quoted<" in html and ">0.50×<" in html and "nan" not in html
    assert html.count("color:") == 1 and drawn["column_config"]["'=B"]["label"] == "=B"
    tables.show({"Plan": ["Aurora", "linear"], "Above any placement's bound": ["3 %", None], "n": [1.0, float("nan")]})
    assert isinstance(drawn["table"], pd.DataFrame)
    assert drawn["table"]["Above any placement's bound"].tolist() == ["3 %", "—"] and drawn["table"]["n"].isna().any()


@pytest.mark.parametrize("name", ["=1+1", "@x", "+1+cmd|' /C calc'!A0", "-x"])
def test_the_names_of_a_cluster_are_no_formulas(name):
    """Its inventory is edited in a table, where an apostrophe would become part of the name."""
    rates = dict.fromkeys(("memory", "memory_bandwidth", "flops_fp32", "flops_fp16", "send_bandwidth"), 1e12)
    gpu = {"type": "H100", "receive_bandwidth": 1e12} | rates
    for broken in ({"type": name}, None):
        node = {"name": name if broken is None else "n", "gpus": [gpu | (broken or {})]}
        with pytest.raises(InputError, match="a spreadsheet would take it for a formula"):
            Cluster.from_dict({"name": "c", "nodes": [node]}, "c.json")
    assert Cluster(name="c", nodes=(Node(name="n-1", gpus=(Gpu(**gpu),)),)).nodes[0].name == "n-1"


def test_every_table_and_file_of_the_pages_goes_through_here():
    """Streamlit offers every table as a file, and pandas writes one from anywhere."""
    root = Path(tables.__file__).parent.parent
    wrote = [
        path.relative_to(root).as_posix()
        for path in (*(root / "app").rglob("*.py"), *(root / "pages").rglob("*.py"))
        if re.search(
            r"\bst\.(dataframe|table)\(|\.to_csv\(|csv\.(writer|DictWriter)\(", path.read_text(encoding="utf-8")
        )
    ]
    assert wrote == ["app/tables.py"]
