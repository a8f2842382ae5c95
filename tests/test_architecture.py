"""Imports: which part may use which. The floors are lists in `engine/__init__.py` and `app/__init__.py`."""

import ast
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import networkx as nx
import pytest

import app
import engine
from engine import launch

ROOT = Path(__file__).parent.parent
IMPORT = re.compile(r"^ *(?:from [\w.]+ import (?:\([^)]*\)|[^(\n]+)|import [^\n]+)", re.MULTILINE)
"""A statement on lines of its own, as the formatter writes it. To parse the whole of every file takes ten times as long."""
LONG_TEXT = re.compile(r'"{3}.*?"{3}', re.DOTALL)
OURS = ("engine", "app", "pages", "tests")


def module_of(file: Path) -> str:
    """`engine.plan` of engine/plan/__init__.py, `engine.plan.placement` of engine/plan/placement.py."""
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


FILES = {module_of(file): file for top in OURS for file in sorted((ROOT / top).rglob("*.py"))}
PACKAGES = sorted(
    module for module, file in FILES.items() if file.name == "__init__.py" and module.startswith(("engine", "app"))
)


def modules_under(package: str) -> list[str]:
    return [module for module in FILES if module == package or module.startswith(package + ".")]


@cache
def imports_of(module: str) -> frozenset[str]:
    """The modules that a module names in its imports, those inside functions too: one of ours by its full name (`from
    engine.simulate import flows` is `engine.simulate.flows`), another one as it is written."""
    return frozenset(_imports(FILES[module].read_text(encoding="utf-8"), module))


def _imports(source: str, module: str) -> Iterator[str]:
    for node in (statement for text in IMPORT.findall(LONG_TEXT.sub("", source)) for statement in ast.parse(text.strip()).body):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module} imports relatively; write the full name"
            for alias in node.names:
                member = f"{node.module}.{alias.name}"
                yield member if member in FILES else node.module


def child_of(package: str, module: str) -> str | None:
    """The file or folder directly in the package that a module belongs to, "__init__" for the package's own file; None for a
    module elsewhere."""
    if module == package:
        return "__init__"
    return module.removeprefix(package + ".").split(".")[0] if module.startswith(package + ".") else None


def arrows(package: str) -> dict[tuple[str, str], str]:
    """The imports between children of a package, each with an example."""
    example_of = {}
    for module in modules_under(package):
        for imported in sorted(imports_of(module)):
            pair = child_of(package, module), child_of(package, imported)
            if pair[1] is not None and pair[0] != pair[1]:
                example_of.setdefault(pair, f"{module} imports {imported}")
    return example_of


def assert_none_imports(part: str, is_wrong: Callable[[str], bool]) -> None:
    pairs = [(module, imported) for module in modules_under(part) for imported in sorted(imports_of(module))]
    assert not [f"{module} imports {imported}" for module, imported in pairs if is_wrong(imported)]


def floors(package: ModuleType) -> dict[str, int]:
    """The floor of every part of a package, 1 at the ground, as the package's docstring lists them."""
    lines = re.findall(r"^    (\d) ([a-z_, ]+): ", package.__doc__, re.MULTILINE)
    return {part: int(floor) for floor, parts in lines for part in parts.split(", ")}


@pytest.mark.parametrize(("package", "most"), [(engine, 9), (app, 6)])
def test_the_list_of_floors_names_every_part_once(package, most):
    name = package.__name__
    listed = re.findall(r"[a-z_]+", ", ".join(re.findall(r"^    \d ([a-z_, ]+): ", package.__doc__, re.MULTILINE)))
    there = {child_of(name, module) for module in modules_under(name)} - {"__init__", "__main__"}
    assert sorted(listed) == sorted(there | ({"pages"} if package is app else set()))
    assert set(floors(package).values()) == set(range(1, most + 1))


@pytest.mark.parametrize("package", [engine, app])
def test_nothing_imports_upwards(package):
    floor_of = floors(package)
    wrong = [
        example
        for (above, below), example in arrows(package.__name__).items()
        if {above, below} <= set(floor_of) and floor_of[above] < floor_of[below]
    ]
    assert not wrong, "upwards: " + "; ".join(wrong)


def test_the_rooms_of_a_launch_import_one_way_in_the_order_of_its_docstring():
    name, listed = launch.__name__, launch.__doc__.split("in this list:")[1].split("`worker`")[0]
    rooms = [line.partition(":")[0] for line in listed.split("\n") if line]
    assert set(rooms) == {child_of(name, module) for module in modules_under(name)} - {"__init__", "worker"}
    below = {(room, other) for place, room in enumerate(rooms) for other in rooms[:place]}
    assert {pair for pair in arrows(name) if pair not in below} == {("worker", room) for room in ("rank", "step", "own")}


def test_nothing_in_the_engine_imports_through_its_front_door():
    """`engine` itself gathers nouns for those outside; inside, it would tie everything to them."""
    assert [example for (_, part), example in arrows("engine").items() if part == "__init__"] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_no_cycle_inside_a_package(package):
    example_of = arrows(package)
    for cycle in nx.simple_cycles(nx.DiGraph(list(example_of))):
        around = zip(cycle, [*cycle[1:], cycle[0]], strict=True)
        pytest.fail(f"a cycle in {package}: " + "; ".join(example_of[pair] for pair in around))


@pytest.mark.parametrize(
    ("part", "never"),
    [
        ("engine", ("streamlit", "plotly", "app", "pages", "tests")),
        ("app", ("pages", "tests")),
        ("app.charts", ("streamlit",)),
        ("pages", ("tests",)),
    ],
)
def test_what_a_part_never_imports(part, never):
    assert_none_imports(part, lambda imported: imported.split(".")[0] in never)


def test_charts_need_no_streamlit_through_others_either():
    graph = nx.DiGraph(
        (module, imported if imported in FILES else imported.split(".")[0])
        for module in modules_under("app")
        for imported in imports_of(module)
    )
    for chart in graph.nodes & set(modules_under("app.charts")):
        if nx.has_path(graph, chart, "streamlit"):
            pytest.fail(" → ".join(nx.shortest_path(graph, chart, "streamlit")))


def test_no_test_file_lends_to_another():
    """Helpers have one home in `tests/cases`, oracles in `tests/oracles`."""
    assert_none_imports("tests", lambda name: name.startswith("tests.") and name.rpartition(".")[2].startswith("test_"))
