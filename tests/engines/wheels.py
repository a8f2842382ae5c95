"""Pinned packages of the engines, read without being installed, and single functions of theirs."""

import ast
import random
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch


class Row(NamedTuple):
    """A row of the table."""

    compared: str
    """Ours and theirs, in words."""

    package: str
    """The package with its version."""

    agreement: str
    """How far they agree, in figures."""

    holds: bool
    """Whether they agree as far as they should."""


def wheel_of(requirement: str, folder: Path) -> zipfile.ZipFile:
    """The wheel of a pinned package, as the package index has it."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", "-d", str(folder)]
    subprocess.run([*command, requirement], check=True, stderr=subprocess.DEVNULL)
    name = requirement.partition("==")[0].replace("-", "_")
    return zipfile.ZipFile(next(folder.glob(f"{name}-*.whl")))


def functions_of(source: str, names: Iterable[str], **around: Any) -> dict[str, Callable]:
    """These functions of a module, compiled from its text without its imports. around: the names that they use."""
    wanted = set(names)
    tree = ast.parse(source)
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in wanted]
    for node in tree.body:
        node.decorator_list, node.returns = [], None
        for argument in (*node.args.args, *node.args.kwonlyargs):
            argument.annotation = None
    space = {"torch": torch, "random": random, **around}
    exec(compile(tree, "engine", "exec"), space)
    return {name: space[name] for name in wanted}
