"""Every word that is explained is used by the page that explains it, and says where it comes from."""

import ast
import re
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

from app.visitor.glossary import PAGES, TERMS
from tests.app.test_pages import ROOT, open_sample, visit

PAPERS = ("Aurora", "ExFlow", "Lancet", "Lina", "PipeMoE")
ELSEWHERE = {
    "balancedness",
    "contention",
    "critical path",
    "gap",
    "held out",
    "overload factor",
    "persistence",
    "rank",
    "roofline",
    "slot",
    "two-tier order",
}
"""Words that none of the five papers has."""
SHOWN = {"Optimise": "systems", "Cluster": "costs"}
"""Folders of the engine whose texts about systems, options and sources a page shows."""
COMMON = ("widgets", "glossary", "text", "state")
"""What every page imports says nothing about a page."""


def imported(path: Path) -> set[Path]:
    """The modules of `app` that a module imports, and what those import."""
    modules, waiting = set(), [path]
    while waiting:
        for node in ast.walk(ast.parse(waiting.pop().read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("app"):
                folder = ROOT.joinpath(*node.module.split("."))
                for module in (folder.with_suffix(".py"), *(folder / f"{name.name}.py" for name in node.names)):
                    if module.exists() and module not in modules and module.stem not in COMMON:
                        modules.add(module)
                        waiting.append(module)
    return modules


def texts(module: Path) -> list[str]:
    """The strings of a module, without what it says to its readers."""
    tree = ast.parse(module.read_text())
    docstrings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    return [
        str(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docstrings
    ]


def words_of(page: str) -> str:
    """All text in a page's own modules and in what else it shows."""
    path = ROOT / "pages" / f"{page.lower().replace('-', '_')}.py"
    modules = {path, *imported(path)}
    if page in SHOWN:
        modules |= set((ROOT / "engine" / SHOWN[page]).rglob("*.py"))
    return " ".join(text for module in modules for text in texts(module))


@pytest.mark.parametrize("page", PAGES)
def test_a_page_uses_the_words_that_it_explains(page: str) -> None:
    words = words_of(page)
    unused = [
        name
        for name in PAGES[page]
        if not any(re.search(rf"\b{re.escape(term)}", words, re.IGNORECASE) for term in (name, *TERMS[name].also))
    ]
    assert not unused


def test_every_word_is_on_a_page_and_none_twice() -> None:
    assert {name for names in PAGES.values() for name in names} == set(TERMS)
    assert all(len(set(names)) == len(names) for names in PAGES.values())


@pytest.mark.parametrize("name", TERMS)
def test_a_word_is_explained_in_a_sentence_or_two_and_cites_its_source(name: str) -> None:
    term = TERMS[name]
    assert 1 <= len(re.findall(r"\.(?:\s|$)", term.meaning)) <= 3 and term.meaning.endswith(".")
    cited = [paper for paper in PAPERS if paper in term.source]
    assert cited or name in ELSEWHERE
    for paper in cited:
        numbers = "[IV]+" if paper in ("ExFlow", "PipeMoE") else r"\d"
        assert re.search(rf"{paper}[^;]*§{numbers}", term.source) or name in ELSEWHERE


def test_every_page_offers_its_words() -> None:
    app = open_sample(AppTest.from_file(str(ROOT / "app" / "main.py"), default_timeout=60).run())
    for page in PAGES:
        path = f"pages/{page.lower().replace('-', '_')}.py"
        if (ROOT / path).exists():
            visit(app, Path(path).stem)
            assert any(TERMS[PAGES[page][0]].meaning in markdown.value for markdown in app.markdown), page
