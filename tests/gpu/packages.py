"""Packages that the check needs of a Python that was not set up for it, and the wheels that stand in for missing ones.

    python -m tests.gpu.packages                          the folders to put in front of PYTHONPATH, or the missing packages
    python -m tests.gpu.packages fetch [--python X.Y] [NAME ...]

Wheels lie in `.gpu-wheels/NAME`, as small as they came, and travel with the tree. They are unpacked where they are needed, and
only those of packages that the machine lacks, or has in an older major version, come before its own. Only the standard library
is imported here, for nothing else is certain to be there.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WHEELS, UNPACKED = ROOT / ".gpu-wheels", ROOT / ".gpu-wheels-unpacked"
OLDEST = (3, 11)
NEEDED = ("networkx", "numba", "numpy", "nvidia-ml-py", "pandas", "psutil", "pydantic", "scipy")
"""Packages that the check and the ranks import besides PyTorch. Their own requirements come along with their wheels."""
ALSO = ("ortools", "pyarrow", "PyYAML", "safetensors")
"""Packages without which some checks are skipped."""


def here() -> str:
    """The version of this Python, as `3.11`."""
    return ".".join(map(str, sys.version_info[:2]))


def pins() -> dict[str, str]:
    """The version of every package in requirements.txt, by its name there."""
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    matches = (re.match(r"([\w.-]+)(?:\[\w+\])?==([^\s;]+)", line) for line in lines)
    return {match[1]: match[2] for match in matches if match}


def lacking(names: Iterable[str] = ("torch", *NEEDED)) -> list[str]:
    """Those that this Python does not have, or in a major version below that of requirements.txt."""
    wanted = pins()
    return [name for name in names if _major(_installed(name)) < _major(wanted[name])]


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "-1"


def _major(text: str) -> int:
    return int(re.match(r"-?\d+", text)[0])


def wheels_of(name: str) -> list[Path]:
    """The wheels that were fetched for a package, where all of them are for this Python; else none."""
    wheels = sorted((WHEELS / name).glob("*.whl"))
    return wheels if all(map(_is_for_this_python, wheels)) else []


def _is_for_this_python(wheel: Path) -> bool:
    pythons, abi, _ = wheel.stem.rsplit("-", 3)[1:]
    mine = f"cp{here().replace('.', '')}"
    return abi in (mine, "abi3", "none") and (abi == "abi3" or bool({mine, "py3"} & set(pythons.split("."))))


def folders_of(names: Sequence[str]) -> list[Path]:
    """The folders in which the wheels of these packages lie unpacked."""
    folders = []
    for wheel in (wheel for name in names for wheel in wheels_of(name)):
        folder = UNPACKED / wheel.stem
        if not folder.exists():
            UNPACKED.mkdir(exist_ok=True)
            half = Path(tempfile.mkdtemp(dir=UNPACKED))
            with zipfile.ZipFile(wheel) as file:
                file.extractall(half)
            half.rename(folder)  # so that a torn folder is never taken for whole
        folders.append(folder)
    return list(dict.fromkeys(folders))


def missing_in_words(names: Sequence[str]) -> str:
    """One line: the missing packages, their versions, and the remedy."""
    wanted = pins()
    text = f"{sys.executable} (Python {here()}) lacks {', '.join(f'{name} {wanted[name]}' for name in names)}"
    if "torch" in names:
        text += "; PyTorch is the machine's own, install it there"
    if carried := " ".join(name for name in names if name != "torch"):
        command = f'make gpu-wheels GPU_PYTHON_VERSION={here()} GPU_WHEELS="{carried}"'
        text += f"; where there is a package index, run {command}, and take {WHEELS.name} along"
    return text


def fetch(names: Sequence[str], python: str) -> None:
    """The wheels of these packages and of their requirements, in the versions of requirements.txt, for CPython `python` on
    this kind of machine. Packages needed for themselves alone are left out: the machine's own may do."""
    wanted = pins()
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        constraints.write("".join(f"{name}=={pin}\n" for name, pin in wanted.items()))
        constraints.flush()
        for name in names:
            folder = WHEELS / name
            for old in folder.glob("*.whl"):
                old.unlink()
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
            command += ["--only-binary=:all:", "--implementation=cp", f"--python-version={python}"]
            command += [f"--constraint={constraints.name}", f"--dest={folder}", f"{name}=={wanted[name]}"]
            subprocess.run(command, check=True)
            for wheel in folder.glob("*.whl"):
                if (distribution := wheel.name.split("-")[0].replace("_", "-")) != name and distribution in NEEDED:
                    wheel.unlink()
    size = sum(wheel.stat().st_size for wheel in WHEELS.glob("*/*.whl"))
    print(f"{WHEELS.name} for Python {python}: {', '.join(names) or 'nothing lacks'}; {size / 2**20:.1f} MiB in all")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.packages")
    fetching = parser.add_subparsers(dest="command").add_parser("fetch")
    fetching.add_argument("names", nargs="*", metavar="NAME")
    fetching.add_argument("--python", metavar="X.Y")
    asked = parser.parse_args(arguments)
    if asked.command == "fetch":
        if unknown := sorted(set(asked.names) - {*NEEDED, *ALSO}):
            parser.error(f"{unknown[0]} is not needed: choose from {', '.join((*NEEDED, *ALSO))}")
        usual = NEEDED if asked.python not in (None, here()) else lacking(NEEDED)
        try:
            fetch(asked.names or usual, asked.python or here())
        except subprocess.CalledProcessError:  # pip has said why
            return 1
        return 0
    if sys.version_info < OLDEST:
        print(f"{sys.executable} is Python {here()}; Switchyard needs {'.'.join(map(str, OLDEST))} or newer", file=sys.stderr)
        return 1
    absent = lacking()
    if missing := [name for name in absent if not wheels_of(name)]:
        print(missing_in_words(missing), file=sys.stderr)
        return 1
    print(":".join(map(str, folders_of([*absent, *lacking(ALSO)]))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
