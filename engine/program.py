"""The program as it is on this machine, a checkout or installed by pip: the name of its commands, and the place of its data.

A wheel has one package, `switchyard`, with this one, `app`, `pages` and the samples below it: names as common as these would
get in the way of others at the top. `switchyard.command`, which a checkout has in a folder of its own, then lies here too.
"""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
"""The folder of `engine`, `app`, `pages` and the samples, which has to be on Python's path."""
NAME = "switchyard"


def environment() -> dict[str, str]:
    """The variables with which another Python finds this program."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def is_installed(root: Path = ROOT) -> bool:
    """True if the program was installed, False in a checkout, also one that is installed as editable."""
    return root.name == NAME and (root / "command.py").is_file()


def command(root: Path = ROOT) -> str:
    """The beginning of a command line of ours, as a person types it."""
    return NAME if is_installed(root) else "python -m engine"


def as_typed(text: str) -> str:
    """A text with the commands in it as they are typed here. text: with those of a checkout, as the documentation has them"""
    return text.replace("python -m engine ", f"{command()} ")


def usual_data_folder(root: Path = ROOT) -> Path:
    """The data folder unless SWITCHYARD_DATA names one: `.switchyard` in a checkout; of an installed program, which an upgrade
    replaces, `switchyard` where this user's programs keep their data."""
    if not is_installed(root):
        return root / ".switchyard"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / NAME
    # A relative path is invalid by the XDG Base Directory Specification, and to be ignored.
    stated = Path(os.environ.get("XDG_DATA_HOME", ""))
    return (stated if stated.is_absolute() else Path.home() / ".local" / "share") / NAME


def how_to_get_models(root: Path = ROOT) -> str:
    """The command that installs what models out of folders need."""
    return f"run: python -m pip install {'transformers==5.23.0' if is_installed(root) else '-r requirements-models.txt'}"


def how_to_get_torchx(root: Path = ROOT) -> str:
    """The commands that install TorchX. No dependency can name it: it asks for an old urllib3, for its Ray scheduler alone."""
    if is_installed(root):
        return "run: python -m pip install --no-deps torchx==0.7.0"
    return "run: python -m pip install -r requirements.txt, then python -m pip install --no-deps -r requirements-no-deps.txt"
