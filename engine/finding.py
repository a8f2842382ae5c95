"""What is known of a recording beside its numbers: sentences on whether it can be trusted, and where it comes from."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from engine.errors import one_line
from engine.schema import Frozen

Severity = Literal["ok", "warning", "error"]


class Finding(Frozen):
    """One sentence on a recording. error: plans made on it would be wrong; warning: they may be.

    code: names the check, for scripts; message: made one line, as names out of a file may be part of it; rows: first token
    concerned and the one after the last; layers: MoE layers, as in the workload; remedy: the mending in
    `engine.formats.remedies` that does what the sentence advises, None where a person must
    """

    severity: Severity
    code: str = Field(pattern="^[a-z][a-z0-9-]*$")
    message: Annotated[str, BeforeValidator(lambda text: one_line(text) if isinstance(text, str) else text)]
    rows: tuple[int, int] | None = None
    layers: tuple[int, ...] = ()
    remedy: str | None = None


class Origin(Frozen):
    """Where a recording comes from: its format, and what its reader saw that its numbers alone no longer show."""

    format: str
    findings: tuple[Finding, ...] = ()
