"""`inspect`: what a file is, and its mending where it is a recording. `convert`: a recording in another format."""

import argparse
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

from engine import formats, store
from engine.cli import text
from engine.cli.output import answer
from engine.compare.inspection import inspect
from engine.errors import InputError
from engine.formats.placements import open_plan_file
from engine.formats.remedies import REMEDIES, mend, what_was_done
from engine.formats.source import MAX_FILE_BYTES
from engine.formats.writers import write_recording, writer_for
from engine.model import MoEModel
from engine.plan import Placement
from engine.units import size
from engine.workload import Finding, Workload


def run_inspect(options: argparse.Namespace) -> int:
    if not options.fix and (extra := next((name for name in ("output", "keep") if getattr(options, name)), None)):
        raise InputError(f"{'-o' if extra == 'output' else '--' + extra} goes with --fix")
    with store.scratch() as folder:
        inspected = list(_inspected(options, folder))
    answer(options, inspected[0] if len(inspected) == 1 else {"files": inspected}, text.inspected)
    return 0


def _inspected(options: argparse.Namespace, scratch: Path) -> Iterable[dict]:
    model = formats.read_model(options.model) if options.model else None
    read = partial(formats.read_workload, model=model, stages=options.stages, deployed=options.deployed)
    named = [formats.split_member(file) for file in options.files]
    parts = formats.parts([path for path, member in named if member is None], scratch)
    members = [(path, member) for path, member in named if member is not None]
    if options.output and len(members) + len(parts) > 1:
        raise InputError(f"{options.output.name}: there are several recordings; mend one at a time, or leave out -o")
    for path, member in members:
        workload = read(path, member=member)
        yield _recording(workload, path.with_name(f"{path.stem}-{member}"), options, model)
    for part in parts:
        if part.format.is_recording:
            path = part.paths[0]
            folder = named[0][0].parent if path.is_relative_to(scratch) else path.parent
            yield _recording(read(part.paths), folder / part.name, options, model)
        else:
            yield {
                "name": part.name,
                "kind": part.format.kind,
                "format": part.format.name,
                "title": part.format.title,
                "belongs": formats.BELONGS[part.format.kind],
                "checks": [finding.model_dump(mode="json") for finding in _findings(part)],
            }


def _findings(part: formats.Part) -> list[Finding]:
    """Of what is no recording."""
    if part.format.kind == "pairs":
        return formats.findings_of_pairs(part.paths)
    return formats.findings_of_times(part.paths[0]) if part.format.kind in ("measurements", "profile") else []


def _recording(workload: Workload, path: Path, options: argparse.Namespace, model: MoEModel | None) -> dict:
    """What `inspect` answers of a recording. path: where it is, without its suffix"""
    seen = inspect(workload, model)
    if not options.fix:
        return seen.to_dict()
    mended = _mended(workload, seen.findings, options, model)
    if mended is workload:
        return seen.to_dict() | {"mended": None}
    output = options.output or path.with_name(f"{path.name}-mended.npz")
    _check_output(output, options.files)
    written = write_recording(mended, output, model=model)
    after = inspect(mended, model)
    done = what_was_done(mended)[len(what_was_done(workload)) :]
    return seen.to_dict() | {
        "mended": {
            "file": str(output),
            "format": written.format,
            "done": list(done),
            "lost": list(written.lost),
            "max_over_mean": after.skew.tolist(),
            "checks": [finding.model_dump(mode="json") for finding in after.findings],
        }
    }


def _mended(
    workload: Workload, findings: Sequence[Finding], options: argparse.Namespace, model: MoEModel | None
) -> Workload:
    """The workload after what the options ask for, and all that needs no asking."""
    if options.deployed and any(finding.remedy == "fold-slots" for finding in findings):
        workload = REMEDIES["fold-slots"].apply(workload, _placement_that_ran(options.deployed, model))
    workload = mend(workload, findings)
    return REMEDIES[f"keep-{options.keep}"].apply(workload) if options.keep else workload


def _placement_that_ran(path: Path, model: MoEModel | None) -> Placement:
    """Which expert was in which slot; of a serving engine's file not on which GPU, which does not matter here."""
    file = open_plan_file(path)
    if file.plan is not None:
        return file.plan.placement
    if model is None:
        raise InputError(f"{path.name}: the plan of a serving engine needs --model beside it")
    return file.deployed(model, 1).placement


def _check_output(output: Path, files: Sequence[str]) -> None:
    """Raise InputError where a command would write over what it reads."""
    read = [formats.split_member(file)[0].resolve() for file in files]
    if any(output.resolve() == path or path in output.resolve().parents for path in read if path.is_file()):
        raise InputError(f"{output.name}: is what is read; write to another file")
    folders = [path for path in read if path.is_dir()]
    if output.exists() and any(folder in output.resolve().parents for folder in folders):
        raise InputError(f"{output.name}: is in the folder that is read, and there already; write to another file")


def run_convert(options: argparse.Namespace) -> int:
    writer_for(options.output, options.to)
    _check_output(options.output, options.files)
    model = formats.read_model(options.model) if options.model else None
    with store.scratch() as folder:
        workload = _one_recording(options, model, folder)
    written = write_recording(workload, options.output, options.to, model)
    for lost in written.lost if not options.json else ():
        print(f"not in {options.output.name}: {lost}", file=sys.stderr)
    if written.size > MAX_FILE_BYTES:
        print(
            f"{options.output.name} has {size(written.size)}; files are read here up to {size(MAX_FILE_BYTES)}",
            file=sys.stderr,
        )
    seen = inspect(workload, model)
    answer(
        options,
        {
            "name": workload.name,
            "kind": seen.kind,
            "from": seen.format,
            "file": str(options.output),
            "format": written.format,
            "bytes": written.size,
            "lost": list(written.lost),
        },
        text.converted,
    )
    return 0


def _one_recording(options: argparse.Namespace, model: MoEModel | None, scratch: Path) -> Workload:
    """The recording in the files, which are one."""
    known = {"model": model, "stages": options.stages, "deployed": options.deployed}
    named = [formats.split_member(file) for file in options.files]
    if any(member is not None for _, member in named):
        if len(named) > 1:
            raise InputError(f"{options.files[0]}: FILE::NAME is a recording of its own; convert one at a time")
        ((path, member),) = named
        return formats.read_workload(path, member=member, **known)
    return formats.read_workload([path for path, _ in named], scratch=scratch, **known)
