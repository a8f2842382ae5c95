"""`clean`, `backup`, `restore` and `health`: for operators of a studio."""

import argparse
import time
from typing import Any

from engine.cli.output import answer, table
from engine.store import data_folder
from engine.store.database import address, database
from engine.units import size
from engine.upkeep import retention
from engine.upkeep.backup import backup, restore
from engine.upkeep.health import KINDS, health, line
from engine.upkeep.retention import Cleaning

SESSIONS = KINDS["sessions"]
"""The kind that is listed without names: the name of a session opens it."""


def run_clean(options: argparse.Namespace) -> int:
    folder = data_folder()
    cleaning = retention.clean(database(), folder, retention.policy(), time.time(), remove=not options.dry_run)
    content = {
        "removed": not options.dry_run,
        "days": cleaning.days,
        "bytes": sum(going.size for going in cleaning.going),
        "stays": cleaning.stays,
        "going": [
            {
                "kind": going.kind,
                "path": going.kind if going.kind == SESSIONS else going.path.relative_to(folder).as_posix(),
                "bytes": going.size,
                "used": going.used,
            }
            for going in cleaning.going
        ],
    }
    answer(options, content, lambda content: _cleaned(content, cleaning))
    return 0


def _cleaned(content: dict[str, Any], cleaning: Cleaning) -> str:
    """Every part to remove with name and size, then the sums."""
    sums: dict[str, tuple[int, int]] = {}
    for part in content["going"]:
        count, bytes_so_far = sums.get(part["kind"], (0, 0))
        sums[part["kind"]] = count + 1, bytes_so_far + part["bytes"]
    lines = [
        f"{part['kind']}: {part['path']}, {size(part['bytes'])}, {_day(part['used'])}"
        for part in content["going"]
        if part["kind"] != SESSIONS
    ]
    if sums:
        rows = [[kind, str(count), size(of_kind)] for kind, (count, of_kind) in sums.items()]
        lines.append(table(["kind", "number", "size"], rows))
    done = "removed" if content["removed"] else "would go"
    lines.append(
        f"{size(content['bytes'])} {done}: unused for {cleaning.days} days or more, and nothing that stays refers to it; "
        f"{size(content['stays'])} {'are left' if content['removed'] else 'would be left'}"
    )
    return "\n".join(lines)


def _day(moment: float) -> str:
    return time.strftime("%Y-%m-%d", time.localtime(moment))


def run_backup(options: argparse.Namespace) -> int:
    manifest = backup(database(), data_folder(), options.file)
    content = {"file": str(options.file), "bytes": options.file.stat().st_size, "rows": manifest.rows}
    answer(options, content, lambda content: f"{_rows(content['rows'])}: {options.file}, {size(content['bytes'])}")
    return 0


def run_restore(options: argparse.Namespace) -> int:
    manifest = restore(address(), data_folder(), options.file)
    content = {"file": str(options.file), "created": manifest.created, "rows": manifest.rows}
    answer(options, content, lambda content: f"restored {_rows(content['rows'])} of {_day(manifest.created)}")
    return 0


def _rows(rows: dict[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in rows.items())


def run_health(options: argparse.Namespace) -> int:
    checks = health()
    well = all(check.well for check in checks)
    answer(options, {"well": well, "checks": [vars(check) for check in checks]}, lambda content: line(checks))
    return 0 if well else 1
