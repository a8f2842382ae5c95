"""`inspect`, `convert` and `synthetic`: the content of files and the mending of recordings, a recording in another format, and
a synthetic one."""

import argparse
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from engine import formats, store
from engine.cli.output import answer
from engine.compare.imbalance import ImbalanceRecipe
from engine.compare.inspection import inspect
from engine.compare.synthetic import USUAL_STEPS, Recipe
from engine.errors import InputError
from engine.files import replace_atomically
from engine.formats.placements import facts_of_log, open_plan_file
from engine.formats.remedies import REMEDIES, mend, what_was_done
from engine.formats.source import MAX_FILE_BYTES
from engine.formats.writers import write_npz, write_recording, writer_for
from engine.model import MoEModel
from engine.plan import Placement
from engine.timeline import over_layers
from engine.units import ratio, share, size
from engine.workload import Finding, Workload


def run_inspect(options: argparse.Namespace) -> int:
    if not options.fix and (extra := next((name for name in ("output", "keep") if getattr(options, name)), None)):
        raise InputError(f"{'-o' if extra == 'output' else '--' + extra} goes with --fix")
    with store.scratch() as folder:
        inspected = list(_inspected(options, folder))
    answer(options, inspected[0] if len(inspected) == 1 else {"files": inspected}, _inspected_as_text)
    return 0


def _inspected(options: argparse.Namespace, scratch: Path) -> Iterable[dict]:
    model = formats.read_model(options.model) if options.model else None
    read = partial(formats.read_workload, model=model, stages=options.stages, deployed=options.deployed)
    named = [formats.split_member(file) for file in options.files]
    parts = formats.parts([path for path, member in named if member is None], scratch, model)
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
                "belongs": part.format.belongs,
                "checks": [finding.model_dump(mode="json") for finding in _findings(part)],
            }


def _findings(part: formats.Part) -> list[Finding]:
    """The findings on files that are no recording."""
    if part.format.kind == "pairs":
        return formats.findings_of_pairs(part.paths)
    if part.format.name == "vllm-log":
        return facts_of_log(part.paths[0])
    return formats.findings_of_times(part.paths[0]) if part.format.kind in ("measurements", "profile") else []


def _recording(workload: Workload, path: Path, options: argparse.Namespace, model: MoEModel | None) -> dict:
    """The answer of `inspect` for a recording. path: of the recording, without its suffix"""
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


def _mended(workload: Workload, findings: Sequence[Finding], options: argparse.Namespace, model: MoEModel | None) -> Workload:
    """The workload after the remedies that the options ask for, and all those that need no decision."""
    if options.deployed and any(finding.remedy == "fold-slots" for finding in findings):
        workload = REMEDIES["fold-slots"].apply(workload, _placement_that_ran(options.deployed, model))
    workload = mend(workload, findings)
    return REMEDIES[f"keep-{options.keep}"].apply(workload) if options.keep else workload


def _placement_that_ran(path: Path, model: MoEModel | None) -> Placement:
    """The expert in every slot, whichever GPUs they are on."""
    file = open_plan_file(path)
    if file.plan is not None:
        return file.plan.placement
    if model is None:
        raise InputError(f"{path.name}: the plan of a serving engine needs --model beside it")
    return file.deployed(model, None).placement


def _check_output(output: Path, files: Sequence[str]) -> None:
    """Raise InputError if a command would write over its own input."""
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
        limit = f"files are read here up to {size(MAX_FILE_BYTES)}"
        print(f"{options.output.name} has {size(written.size)}; {limit}", file=sys.stderr)
    seen = inspect(workload, model)
    content = {"name": workload.name, "kind": seen.kind, "from": seen.format, "file": str(options.output)}
    content |= {"format": written.format, "bytes": written.size, "lost": list(written.lost)}
    said = f"{workload.name}: written as {written.format} to {options.output} ({size(written.size)})"
    answer(options, content, lambda _: said)
    return 0


def _one_recording(options: argparse.Namespace, model: MoEModel | None, scratch: Path) -> Workload:
    """The one recording that the files are."""
    known = {"model": model, "stages": options.stages, "deployed": options.deployed}
    named = [formats.split_member(file) for file in options.files]
    if any(member is not None for _, member in named):
        if len(named) > 1:
            raise InputError(f"{options.files[0]}: FILE::NAME is a recording of its own; convert one at a time")
        ((path, member),) = named
        return formats.read_workload(path, member=member, **known)
    return formats.read_workload([path for path, _ in named], scratch=scratch, **known)


USUAL_SKEW, USUAL_AFFINITY = 1.0, 0.5


def run_synthetic(options: argparse.Namespace) -> int:
    if options.output.suffix.lower() != ".npz":
        raise InputError(f"{options.output}: a synthetic recording is written as .npz")
    trace = _recipe(options).draw(formats.read_model(options.model))
    try:
        with replace_atomically(options.output) as draft:  # whole or not at all
            write_npz(trace, draft)
    except OSError as error:
        raise InputError(f"{options.output} cannot be written: {error.strerror}") from None
    content = {"recording": inspect(trace).to_dict(), "saved": str(options.output)}
    answer(options, content, lambda _: f"{_inspected_as_text(content['recording'])}\nsaved the recording: {options.output}")
    return 0


def _recipe(options: argparse.Namespace) -> Recipe | ImbalanceRecipe:
    """The recipe that the options ask for. Raises InputError if they ask for two at once."""
    steps = min(USUAL_STEPS, max(options.tokens, 1)) if options.steps is None else options.steps
    if options.preset is None:
        if options.steps is not None and not options.drift:
            raise InputError("--steps is of presets and of --drift; give one of them too")
        skew = USUAL_SKEW if options.skew is None else options.skew
        affinity = USUAL_AFFINITY if options.affinity is None else options.affinity
        return Recipe(options.tokens, skew, affinity, options.seed, options.drift or 0.0, steps)
    if any(value is not None for value in (options.skew, options.affinity, options.drift)):
        raise InputError("a preset has no --skew, no --affinity and no --drift: give either --preset or these")
    return ImbalanceRecipe(options.preset, options.tokens, steps, options.seed)


CHOSEN_BY = {"keep-prefill": "--keep prefill", "keep-decode": "--keep decode", "fold-slots": "--deployed FILE"}
"""The options of `inspect --fix` for remedies that need a decision or a file."""


def _inspected_as_text(answer: dict[str, Any]) -> str:
    return "\n\n".join(_file_as_text(file) for file in answer.get("files", [answer]))


def _file_as_text(recording: dict[str, Any]) -> str:
    checks = [f"  {check['severity']}: {check['message']}" for check in recording["checks"]]
    if "max_over_mean" not in recording:
        belongs = "" if any(check["severity"] == "error" for check in recording["checks"]) else f"; {recording['belongs']}"
        return "\n".join([f"{recording['name']}: {recording['title']}{belongs}", *checks])
    skew = recording["skew"]
    sizes = f"{recording['layers']} MoE layers × {recording['experts']} experts"
    if recording["tokens"] is not None:
        sizes = f"{recording['tokens']:,} tokens × {sizes}, top-{recording['k']}"
    lines = [f"{recording['name']}: {recording['title']}, {sizes}"]
    lines.append(f"  skew (busiest expert / mean): {ratio(skew['mean'])} on average over layers; {over_layers(skew)}")
    if recording["foretold_share"]:
        mean = sum(recording["foretold_share"]) / len(recording["foretold_share"])
        lines.append(
            f"  affinity: the likeliest next expert is right for {share(mean)} of tokens (by chance: "
            f"{share(1 / recording['experts'])})"
        )
    lines += checks
    if recording.get("mended"):
        mended = recording["mended"]
        left = [check for check in mended["checks"] if check["severity"] != "ok"]
        skew = mended["max_over_mean"]
        lines += [
            f"mended: {mended['file']}, skew {ratio(min(skew))} to {ratio(max(skew))}",
            *(f"  {done}" for done in mended["done"]),
            *(f"  not in the file: {lost}" for lost in mended["lost"]),
            *(f"  still {check['severity']}: {check['message']}" for check in left),
        ]
    elif "mended" in recording:
        remedies = [check["remedy"] for check in recording["checks"]]
        options = " or ".join(CHOSEN_BY[remedy] for remedy in remedies if remedy in CHOSEN_BY)
        lines.append("nothing was mended, and nothing written" + (f"; choose with {options}" if options else ""))
    return "\n".join(lines)
