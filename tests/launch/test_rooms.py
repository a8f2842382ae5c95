"""The rooms of `engine.launch` import one way, in the order that its docstring gives."""

import ast
from pathlib import Path

from engine import launch

FOLDER = Path(launch.__file__).parent
ROOMS = [line.partition(":")[0] for line in launch.__doc__.split("in this list:")[1].split("`worker`")[0].split("\n") if line]


def rooms_of(path: Path) -> set[str]:
    """The rooms that a file imports from."""
    imports = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
    modules = {f"{node.module}.{alias.name}" for node in imports for alias in node.names if node.module}
    return {module.split(".")[2] for module in modules if module.startswith("engine.launch.")}


def test_the_docstring_names_every_room_and_each_imports_only_from_those_before_it():
    assert set(ROOMS) == {path.parent.name for path in FOLDER.glob("*/__init__.py")}
    for place, room in enumerate(ROOMS):
        for path in (FOLDER / room).glob("*.py"):
            assert rooms_of(path) <= set(ROOMS[: place + 1]), path
    assert rooms_of(FOLDER / "worker.py") == {"rank", "step"}
