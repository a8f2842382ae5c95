"""Measured steps of serving engines: tables in the columns of aiconfigurator-core's `silicon_sample.csv`, and JSON as
InferenceX writes its results.

The users of a run are the `silicon_concurrency` that a source tells: batch sizes are nominal, and not reached where requests
wait. Prompts are random tokens, whose skew is no recording's.
"""

import csv
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pydantic

from engine.catalogue.packaged import every_gpu_type, machine_gpus, system_of
from engine.costs.silicon import folder_of
from engine.errors import InputError
from engine.formats.format import Format, Glance
from engine.formats.source import check_there, fault, ok, one_clear_line, quoted, read_json, warning
from engine.serving.deployment import BYTES_PER_WEIGHT, Demand, Deployment, MeasuredStep, Ranks
from engine.workload import Finding

TRUSTED = "db-dump"
"""Beginning of the sources of the package's table that say how a run was made; the others mix runs with and without speculation
and do not tell which."""
NEEDED = ("backend", "model_path", "system", "mode", "isl", "osl")
TOKEN, FIRST_TOKEN = "silicon_tpot_ms", "silicon_ttft_ms"
MILLISECONDS: dict[str, tuple[float, float]] = {TOKEN: (0.5, 1e4), FIRST_TOKEN: (1.0, 1e7)}
"""Least and most that any engine takes; less is seconds."""
PRECISIONS = {"fp16": "bf16", "bfloat16": "bf16", "fp8_block": "fp8", "nvfp4": "fp4", "mxfp4": "fp4", "int4_wo": "int4"}
"""Other names of number formats."""


MOST_REASONS = 20


class Refused(NamedTuple):
    """A row that is no measurement that can be. place: where it stands; why: a line for people"""

    id: str
    place: str
    why: str


def read_steps(path: Path) -> tuple[list[MeasuredStep], list[Refused]]:
    """The measured steps of a file, and the rows that are left out, in the file's order. Raises InputError for a file without
    such rows or columns."""
    steps, refused = [], []
    with one_clear_line(path):
        check_there(path)
        rows = list(_of_json(path) if path.suffix.lower() == ".json" else _of_table(path))
    for place, number, row in rows:
        id = _text(row, "id") or f"row {number}"
        try:
            steps.append(_step(id, _as_row(row) if "hw" in row else row))
        except InputError as error:
            refused.append(Refused(id, place, str(error)))
        except pydantic.ValidationError as error:
            first = error.errors()[0]
            names = ".".join(str(part) for part in first["loc"])
            why = str(first["msg"]).removeprefix("Value error, ")
            refused.append(Refused(id, place, f"{names}: {why}" if names else why))
    if not steps and not refused:
        raise fault(path, "has no rows of measured steps")
    return steps, refused


def findings(path: Path) -> list[Finding]:
    """The number of steps in a file, and of those that are left out, by the first of each reason. Raises InputError."""
    steps, refused = read_steps(path)
    found = [ok("steps", f"{len(steps):,} measured steps")]
    for reason in sorted({each.why for each in refused})[:MOST_REASONS]:
        alike = [each for each in refused if each.why == reason]
        rows = alike[0].place + (f" and {len(alike) - 1:,} more" if len(alike) > 1 else "")
        found.append(warning("no-step", f"left out, {rows}: {reason}"))
    return found


def is_trusted(step: MeasuredStep) -> bool:
    """True unless the source is one of the package's that do not tell if they speculated."""
    return not step.source or step.source.startswith(TRUSTED)


def _of_table(path: Path) -> Iterator[tuple[str, int, dict[str, Any]]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.DictReader(file, strict=True)
        rows.fieldnames = [(name or "").strip().lower() for name in rows.fieldnames or ()]
        lacking = [name for name in NEEDED if name not in rows.fieldnames]
        if not {"tp_size", "decode_tp_size"} & set(rows.fieldnames):
            lacking.append("tp_size or decode_tp_size")
        if lacking:
            known = ", ".join((*NEEDED, "tp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size", TOKEN, FIRST_TOKEN))
            raise fault(path, f"the columns {', '.join(lacking)} are missing; measured steps have {known}")
        for number, row in enumerate(rows, 1):
            yield f"line {rows.line_num}", number, row


def _of_json(path: Path) -> Iterator[tuple[str, int, dict[str, Any]]]:
    data = read_json(path)
    rows = data if isinstance(data, list) else [data]
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict) or not {"hw", "framework", "model", "tp"} <= set(row):
            raise fault(path, "is no list of results with hw, framework, model, tp, conc, isl and osl", f"result {number}")
        yield f"result {number}", number, row


def _as_row(result: Mapping[str, Any]) -> dict[str, Any]:
    """A result of InferenceX, whose times are in seconds, in the columns of a table."""
    gpus, experts = _count(result, "tp", 1), _count(result, "ep", 1) or 1
    spread = str(result.get("dp_attention")).lower() == "true"
    speculates = str(result.get("spec_decoding") or result.get("mtp") or "none").lower() not in ("none", "off", "false")
    of_column = {TOKEN: "tpot", FIRST_TOKEN: "ttft"}
    times = {column: result.get(f"median_{name}", result.get(f"mean_{name}")) for column, name in of_column.items()}
    return {
        "id": result.get("id"),
        "backend": result["framework"],
        "backend_version": result.get("image") or "",
        "model_path": result["model"],
        "system": re.split(r"[-_ ]", str(result["hw"]).lower())[0],
        "mode": "disagg" if str(result.get("disagg")).lower() == "true" else "agg",
        "speculates": speculates,
        "accepted": result.get("accepted"),
        "precision": result.get("precision"),
        "isl": result.get("isl"),
        "osl": result.get("osl"),
        "concurrency": result.get("conc"),
        "tp_size": 1 if spread else gpus,
        "attention_dp_size": gpus if spread else 1,
        "moe_ep_size": experts,
        "moe_tp_size": max(gpus // experts, 1),
        **{name: value * 1e3 for name, value in times.items() if isinstance(value, int | float)},
    }


def _step(id: str, row: Mapping[str, Any]) -> MeasuredStep:
    """A row. Raises InputError, or pydantic's ValidationError, for one that cannot be."""
    source, engine = _text(row, "silicon_data_source"), _text(row, "backend")
    named = _text(row, "system")
    kind = gpu_type_of(named) or named
    told = (_text(row, "precision") or _text(row, "moe_quant_mode")).lower()
    if not told:
        raise InputError("a value in column 'precision' is needed: the number format of the weights")
    precision = PRECISIONS.get(told, told)
    if precision not in BYTES_PER_WEIGHT:
        raise InputError(f"precision {quoted(precision)}; known are {', '.join((*BYTES_PER_WEIGHT, *PRECISIONS))}")
    if row.get("speculates") and not _text(row, "accepted"):
        raise InputError("the run speculated, and does not say how many tokens it added to a step: 'accepted'")
    mode = _text(row, "mode").lower()
    if mode not in ("agg", "disagg"):
        raise InputError(f"mode {quoted(mode)}; known are agg and disagg")
    if mode == "agg":
        decode, prefill = _ranks(row, ""), None
        machine = machine_gpus(kind)
        if machine and decode.gpus > machine:
            raise InputError(f"{decode.gpus} GPUs are more than the {machine} of one machine of {kind}")
    else:
        decode, prefill = _ranks(row, "decode_"), _ranks(row, "prefill_")
    concurrency = re.search(r"silicon_concurrency=(\d+)", source)
    users = int(concurrency[1]) if concurrency else _count(row, "concurrency")
    if users is None:
        batch = _count(row, "batch_size" if mode == "agg" else "decode_batch_size")
        if batch is None:
            raise InputError("how many users asked is not told: a column concurrency, or batch_size, is needed")
        users = batch * decode.data * decode.servers
    accepted = _number(_text(row, "accepted") or "0")
    if not accepted >= 0:
        raise InputError(f"column 'accepted' is {quoted(_text(row, 'accepted'))}, not a number of tokens that speculation adds")
    demand = Demand(prompt=_needed(row, "isl"), output=_needed(row, "osl"), users=users, accepted=accepted)
    deployment = Deployment(
        engine=engine,
        version=_text(row, "backend_version"),
        checkpoint=_text(row, "model_path"),
        gpu=kind,
        precision=precision,
        decode=decode,
        prefill=prefill,
    )
    times = {"first_token": _seconds(row, FIRST_TOKEN), "token": _seconds(row, TOKEN)}
    return MeasuredStep(id=id, deployment=deployment, demand=demand, source=source[:500], **times)


def gpu_type_of(system: str) -> str | None:
    """The GPU type of a name as people or the package write it, such as `h200_sxm` or `gb200`; None for no known one."""
    name = system_of(system.strip())
    for kind in every_gpu_type():
        if name in (system_of(kind), system_of(kind).removesuffix("_sxm"), folder_of(kind)):
            return kind
    return None


def _ranks(row: Mapping[str, Any], phase: str) -> Ranks:
    """phase: the beginning of its columns"""
    if (_count(row, f"{phase}pp_size") or 1) > 1:
        raise InputError("pipeline-parallel servers are not predicted")
    tensor, data = _needed(row, f"{phase}tp_size"), _count(row, f"{phase}attention_dp_size") or 1
    shared, spread = _count(row, f"{phase}moe_tp_size"), _count(row, f"{phase}moe_ep_size")
    if shared is None:
        shared = max(tensor * data // (spread or 1), 1)
    servers = _count(row, f"{phase}num_workers") or 1 if phase else 1
    return Ranks(tensor=tensor, data=data, expert_tensor=shared, expert=spread or 1, servers=servers)


def _text(row: Mapping[str, Any], column: str) -> str:
    value = row.get(column)
    return "" if value is None else str(value).strip()


def _needed(row: Mapping[str, Any], column: str) -> int:
    if (value := _count(row, column)) is None:
        raise InputError(f"a value in column '{column}' is needed")
    return value


def _count(row: Mapping[str, Any], column: str, least: int = 1) -> int | None:
    """A whole number; None where the cell is empty."""
    if not (text := _text(row, column)):
        return None
    number = _number(text)
    if number != number or number < least or number != int(number):
        raise InputError(f"column '{column}' is {quoted(text)}, not a whole number of {least} or more")
    return int(number)


def _seconds(row: Mapping[str, Any], column: str) -> float | None:
    """A time of milliseconds; None where the cell is empty."""
    if not (text := _text(row, column)):
        return None
    number, (least, most) = _number(text), MILLISECONDS[column]
    if not number > 0:
        raise InputError(f"column '{column}' is {quoted(text)}, not a number above 0")
    if not least <= number <= most:
        unit = "seconds" if number < least else "microseconds"
        raise InputError(f"column '{column}' is {text}, which no engine reaches in ms; is it in {unit}?")
    return number / 1e3


def _number(text: str) -> float:
    """The number in a cell; NaN for anything else."""
    try:
        number = float(text)
    except ValueError:
        return math.nan
    return number if math.isfinite(number) else math.nan


def _tells(glance: Glance) -> bool:
    return {"backend", "model_path", "isl", "osl"} <= set(glance.columns)


FORMATS = (Format("measured-steps", "measured steps of serving engines", "measurements", _tells),)
