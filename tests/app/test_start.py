"""Modules are loaded once, garbage is found, and downloaded tables compute nothing."""

import csv
import gc
import io
import re
import sys
import types
import weakref
from pathlib import Path

import pandas as pd
import pytest

from app import tables, warm_up
from engine.cluster import Cluster, Gpu, Node
from engine.errors import InputError
from engine.formats import packaged
from engine.simulate import fair_share


@pytest.fixture
def thawed(monkeypatch: pytest.MonkeyPatch):
    """Objects that a test freezes are thawed after it."""
    monkeypatch.setattr(warm_up, "_seen", 0)
    yield
    gc.unfreeze()


def test_only_new_modules_are_worth_a_walk(thawed, monkeypatch: pytest.MonkeyPatch) -> None:
    warm_up.spare()
    frozen = gc.get_freeze_count()
    assert frozen > 10_000 and len(gc.get_objects()) < frozen
    held = [[] for _ in range(1000)]
    warm_up.spare()
    assert gc.get_freeze_count() <= frozen, "nothing was imported"
    for number in range(warm_up.MANY):
        monkeypatch.setitem(sys.modules, f"new_{number}", types.ModuleType(f"new_{number}"))
    warm_up.spare()
    assert gc.get_freeze_count() >= frozen + len(held)


def test_garbage_of_a_later_run_is_collected(thawed) -> None:
    class Part:
        pass

    warm_up.spare()
    part = Part()
    part.itself, alive = part, weakref.ref(part)
    del part
    gc.collect()
    assert alive() is None


APP = Path(warm_up.__file__).parent


def test_every_module_of_the_studio_is_imported_and_the_simulation_compiled() -> None:
    for begin in (warm_up.begin, warm_up.begin_simulation):
        loading = begin()
        loading.join(60)
        assert not loading.is_alive() and begin() is loading, "once a process"
    files = [path.relative_to(APP.parent).with_suffix("") for path in APP.rglob("*.py") if path.stem != "main"]
    modules = {".".join(path.parts).removesuffix(".__init__") for path in files}
    assert len(modules) > 80 and modules <= set(sys.modules)
    assert fair_share.run.signatures and packaged._models.cache_info().currsize


FORMULAS = (
    "=1+1",
    '=HYPERLINK("http://attacker.example","plan")',
    *("+1+cmd|' /C calc'!A0", "-2+3+cmd|' /C calc'!A0", "@SUM(A1)", "\t=1", "\r=1", "\n=1", "＝1+1", "＠SUM(A1)"),
    *("+1/A1", "-1,2;3", "+.A1", "-", "- in October"),
)


def test_a_formula_becomes_text_and_names_and_figures_stay():
    assert [tables.cell(text) for text in FORMULAS] == [f"'{text}" for text in FORMULAS]
    for text in ("", "Aurora", "+0.7 %", "-15 %", "-1.2e-05", "+3 µs", "-2.1 GB/s", "1=1", "a@b", "−5"):
        assert tables.cell(text) == text


def test_a_table_keeps_all_else():
    frame = pd.DataFrame({"=A1": ["=x", "y"], "n": [1, -2.5], "list": [["=z", "a"], []]}, index=[3, "@B2"])
    safe = tables.without_formulas(frame)
    assert safe.columns.tolist() == ["'=A1", "n", "list"] and safe.index.tolist() == [3, "'@B2"]
    assert safe["'=A1"].tolist() == ["'=x", "y"] and safe["n"].tolist() == [1, -2.5]
    assert safe["list"].tolist() == [["'=z", "a"], []]
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
    writes = re.compile(r"\bst\.(dataframe|table)\(|\.to_csv\(|csv\.(writer|DictWriter)\(")
    files = [*(root / "app").rglob("*.py"), *(root / "pages").rglob("*.py")]
    assert [path for path in files if writes.search(path.read_text(encoding="utf-8"))] == [root / "app" / "tables.py"]
