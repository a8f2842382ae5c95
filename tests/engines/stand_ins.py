"""Whole modules of an engine's wheel, run by their own text; all else that they import of the engines is stood in for."""

import __future__

import ast
import importlib
import sys
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

PACKAGES = ("einops", "pybase64", "sglang", "torch_npu", "vllm", "vllm_ascend")
"""Packages of which nothing is imported but what is asked for."""


class _StandIns(MetaPathFinder, Loader):
    """Finds the modules of `PACKAGES`.

    own: the file of each module that runs, by name
    given: values of stood-in modules, by name; every other value is a mock, which takes any call
    """

    def __init__(self, own: Mapping[str, Path], given: Mapping[str, Mapping[str, Any]]) -> None:
        self.own, self.given = own, given

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name.partition(".")[0] not in PACKAGES:
            return None
        return ModuleSpec(name, self, is_package=name not in self.own or self.own[name].name == "__init__.py")

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        if file := self.own.get(name):
            module.__file__ = str(file)
            exec(compile(file.read_bytes(), str(file), "exec"), module.__dict__)
            return
        module.__dict__.update(self.given.get(name, {}))

        def value(attribute: str) -> Any:
            if attribute.startswith("__"):
                raise AttributeError(attribute)
            inner = f"{name}.{attribute}"
            found = importlib.import_module(inner) if inner in self.own or inner in self.given else MagicMock(name=inner)
            return module.__dict__.setdefault(attribute, found)

        module.__getattr__ = value


@contextmanager
def modules_of(
    wheel: zipfile.ZipFile, folder: Path, own: tuple[str, ...], **given: Mapping[str, Any]
) -> Iterator[list[ModuleType]]:
    """The modules, as long as it lasts: their functions import too.

    folder: where their texts are put
    own: names of the modules that run
    given: values of others, by module, as `vllm__config={"ParallelConfig": …}`, with two underscores for a dot
    """
    files = {}
    for name in own:
        path = name.replace(".", "/")
        ending = next(ending for ending in (".py", "/__init__.py") if path + ending in wheel.NameToInfo)
        files[name] = Path(wheel.extract(path + ending, folder))
    finder = _StandIns(files, {name.replace("__", "."): values for name, values in given.items()})
    before = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in PACKAGES}
    for name in before:
        del sys.modules[name]
    sys.meta_path.insert(0, finder)
    try:
        yield [importlib.import_module(name) for name in own]
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.partition(".")[0] in PACKAGES]:
            del sys.modules[name]
        sys.modules.update(before)


def class_of(source: str, name: str, **around: Any) -> type:
    """A class of a module, compiled from its text alone. around: the names that it uses"""
    tree = ast.parse(source)
    tree.body = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    exec(compile(tree, "engine", "exec", __future__.annotations.compiler_flag, dont_inherit=True), around)
    return around[name]
