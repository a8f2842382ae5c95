"""Stories of `commands.toml`, run through the command line's `main` in a folder of their own."""

import contextlib
import hashlib
import io
import json
import math
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from engine.cli import main

HERE = Path(__file__).parent
SAMPLES = HERE.parent.parent / "sample_traces"
ANSWERS = HERE / "answers"
SHARED = HERE.parent.parent.parent / "shared" / "data"
PROGRESS = re.compile(r" *\d+% ")
"""The beginning of a line about how far a command is."""
STORIES = {story["name"]: story for story in tomllib.loads((HERE / "commands.toml").read_text())["story"]}

CLOCK = {"runtime", "versions"}
"""Keys of figures that the clock and the machine decide."""

LONGEST = 40
"""Lists with more leaves than this are recorded as digest and sums; of dicts, those with more dicts."""


def needs_shared(name: str) -> bool:
    return any("shared/" in command for command in STORIES[name]["commands"])


def run_story(name: str, folder: Path) -> list[dict[str, Any]]:
    """Run a story's commands in an empty folder; SWITCHYARD_DATA must name a data folder of its own.

    Returns for every command: the exit code, the reduced answer, lines of standard error, and the files that are new.
    """
    _write_inputs(folder)
    (folder / "samples").symlink_to(SAMPLES)
    (folder / "shared").symlink_to(SHARED)
    with contextlib.chdir(folder):
        for file, content in STORIES[name].get("files", {}).items():
            Path(file).write_text(content)
        return [_run(command) for command in STORIES[name]["commands"]]


def differences(expected: Any, found: Any, path: str = "") -> Iterator[str]:
    """The places in which two answers differ; floats may differ by 1e-12 of themselves."""
    if isinstance(expected, dict) and isinstance(found, dict):
        for key in expected.keys() | found.keys():
            yield from differences(expected.get(key, "absent"), found.get(key, "absent"), f"{path}.{key}")
    elif isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        for index, pair in enumerate(zip(expected, found, strict=True)):
            yield from differences(*pair, f"{path}[{index}]")
    elif isinstance(expected, float) and isinstance(found, float):
        if not math.isclose(expected, found, rel_tol=1e-12):
            yield f"{path}: {expected!r} -> {found!r}"
    elif expected != found or type(expected) is not type(found):
        yield f"{path}: {expected!r} -> {found!r}"


def _write_inputs(folder: Path) -> None:
    """Two layers and every eighth sequence of the samples, on the first four GPUs: small enough for every system to end with
    a proof or by its own rule, never by its time limit."""
    for path in (SAMPLES / "tiny-moe").glob("*.npz"):
        with np.load(path) as recorded:
            experts = recorded["experts"][::8, :2]
            halved = experts // 2 if path.name.startswith("alpha") else experts
            np.savez(folder / path.name, experts=halved, sequence=recorded["sequence"][::8])
    for name, sizes in {"alpha": {"layers": 2, "experts": 8}, "beta": {"layers": 2}}.items():
        model = json.loads((SAMPLES / f"tiny-moe-{name}.json").read_text()) | sizes
        (folder / f"{name}.json").write_text(json.dumps(model))
    cluster = json.loads((SAMPLES / "mixed-8.json").read_text())
    (folder / "four.json").write_text(json.dumps(cluster | {"nodes": cluster["nodes"][:2]}))


def _run(command: str) -> dict[str, Any]:
    before = set(Path().iterdir())
    arguments, _, given = command.partition(" < ")
    out, errors, usual = io.StringIO(), io.StringIO(), sys.stdin
    sys.stdin = io.StringIO(given)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
            code = main(shlex.split(arguments))
    finally:
        sys.stdin = usual
    is_json = out.getvalue().startswith(("{", "["))
    return {
        "command": command,
        "code": code,
        "answer": _reduced(json.loads(out.getvalue())) if is_json else _reduced(out.getvalue().splitlines()),
        "errors": [line for line in errors.getvalue().splitlines() if not PROGRESS.match(line)],
        "files": {path.name: _content(path) for path in sorted(set(Path().iterdir()) - before) if path.is_file()},
    }


def _content(path: Path) -> Any:
    if path.suffix == ".json":
        return _reduced(json.loads(path.read_text()))
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _reduced(content: Any) -> Any:
    if isinstance(content, dict):
        return {key: _reduced(value) for key, value in content.items() if key not in CLOCK}
    if isinstance(content, str):
        return re.sub(r"found in [\d.]+ \S?s", "found in …", content)
    if not isinstance(content, list):
        return content
    leaves = list(_leaves(content))
    if len(leaves) <= LONGEST or (len(content) <= LONGEST and any(isinstance(value, dict) for value in content)):
        return [_reduced(value) for value in content]
    floats = [leaf for leaf in leaves if isinstance(leaf, float)]
    rest = json.dumps([leaf for leaf in leaves if not isinstance(leaf, float)])
    return {
        "length": len(content),
        "digest": hashlib.sha256(rest.encode()).hexdigest()[:16],
        "sum": math.fsum(floats),
        "weighted sum": math.fsum(index * value for index, value in enumerate(floats)),
    }


def _leaves(content: Any) -> Iterator[Any]:
    if isinstance(content, dict):
        for key, value in content.items():
            if key not in CLOCK:
                yield key
                yield from _leaves(value)
    elif isinstance(content, list):
        yield "["
        for value in content:
            yield from _leaves(value)
    else:
        yield _reduced(content)
