"""The rooms of `engine.launch` import one way, in the order that its docstring gives."""

import ast
from pathlib import Path

from engine import launch

FOLDER = Path(launch.__file__).parent
ROOMS = [line.partition(":")[0] for line in launch.__doc__.split("in this list:")[1].split("`worker`")[0].split("\n") if line]


def imported_by(path: Path) -> set[str]:
    """The modules of the engine that a file imports."""
    imports = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
    modules = {f"{node.module}.{alias.name}" for node in imports for alias in node.names if node.module}
    return {module for module in modules if module.startswith("engine.")}


def rooms_of(modules: set[str]) -> set[str]:
    return {module.split(".")[2] for module in modules if module.startswith("engine.launch.")}


def test_the_docstring_names_every_room():
    assert set(ROOMS) == {path.parent.name for path in FOLDER.glob("*/__init__.py")}


def test_every_room_imports_only_from_those_before_it():
    for place, room in enumerate(ROOMS):
        for path in (FOLDER / room).glob("*.py"):
            assert rooms_of(imported_by(path)) <= set(ROOMS[: place + 1]), path
    assert rooms_of(imported_by(FOLDER / "worker.py")) == {"rank", "step"}
