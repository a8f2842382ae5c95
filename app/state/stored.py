"""The stored part of a browser session, and its JSON text: written, and read again by later versions."""

import json
import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationError

from engine.cluster import Cluster
from engine.compare.evidence import Thresholds
from engine.costs import choice
from engine.errors import InputError
from engine.model import MoEModel
from engine.plan import Travel
from engine.schema import Frozen, first_fault
from engine.serving.step import ServingStep
from engine.training import TrainingStep

VERSION = 3
"""Version of the text that `Session` is written as.

Raise it when a field is renamed or means something else, and let `read` mend the older texts. 1 had the same fields and no
version, 2 had the sliders of the What-if page apart from other choices.
"""
DATASHEET = {"source": "datasheet"}
_CONFIG = re.compile(r"[0-9a-f]{64}|[\w.-]{1,100}/[\w.-]{1,100}")
"""Python's own: as a pydantic pattern it takes 20 MB."""


def _is_cost(cost: dict[str, Any]) -> dict[str, Any]:
    try:
        choice.from_dict(cost)
    except InputError as error:
        raise ValueError(str(error)) from None
    return cost


def _is_of_file(cost: dict[str, Any]) -> dict[str, Any]:
    if cost["source"] not in ("profile", "measured"):
        raise ValueError("not a profile or measured times")
    return cost


def _is_config(config: str) -> str:
    if not _CONFIG.fullmatch(config):
        raise ValueError("neither a digest nor a checkpoint's name")
    return config


Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
"""SHA-256 of a recording or a document, or the id of a plan."""
Config = Annotated[str, AfterValidator(_is_config)]
"""Source of a model's Hugging Face `config.json`: a digest in the data folder, or a checkpoint of the packaged models."""
Cost = Annotated[dict[str, Any], AfterValidator(_is_cost)]
"""A cost source as `engine.costs.choice` writes it."""
CostOfFile = Annotated[Cost, AfterValidator(_is_of_file)]
"""A cost source that came from a file, and has its name."""


MOST_CHOICES = 400
"""Most widgets with a kept value; the pages have some 150."""
Scalar = bool | int | float | Annotated[str, Field(max_length=1000)] | None
Choice = Scalar | Annotated[list[Scalar], Field(max_length=1000)]
"""Value that a person chose on a widget: an option or a number, or several."""


class RemovedPlan(Frozen):
    """A plan that a person took from the list.

    name: its name then
    job: the newest job then; a later job that finds the plan brings it back
    """

    name: str
    job: str


class Session(Frozen):
    """The fields that a reload, another tab or a restarted server finds as they were.

    Every field has a default, so that a stored session can lack it, and a title, which names it if a stored value no longer
    fits.
    """

    version: int = Field(VERSION, ge=1, title="the version of the session")
    revision: int = Field(0, ge=0, title="how often the session was stored")
    workloads: dict[Digest, str] = Field({}, title="the list of recordings", description="names by digest")
    workload: Digest | None = Field(None, title="which recording is open")
    cluster: Cluster | None = Field(None, title="the cluster")
    pairs: Digest | None = Field(None, title="the measured pairs of GPUs")
    model: MoEModel | None = Field(None, title="the model")
    model_of: dict[Digest, MoEModel] = Field({}, title="the models of the recordings", description="by digest")
    second: Digest | None = Field(None, title="the second model", description="its recording; see model_of")
    others: list[Digest] = Field([], title="the recordings that a plan must serve as well")
    step: TrainingStep | None = Field(None, title="the training step", description="None: inference is planned")
    steps: dict[Digest, TrainingStep] = Field({}, title="the training steps of other models", description="by model")
    serving: ServingStep | None = Field(None, title="the serving step", description="None: no serving is planned")
    servings: dict[Digest, ServingStep] = Field({}, title="the serving steps of other models", description="by model")
    configs: dict[Digest, Config] = Field({}, title="the config.json files of models", description="by model")
    graph: Digest | None = Field(None, title="the imported operator graph")
    travel: Travel | None = Field(None, title="how tokens travel", description="None: one row per token copy")
    cost: Cost = Field(DATASHEET, title="the cost source")
    sources: dict[str, CostOfFile] = Field({}, title="the cost sources read from files", description="by name")
    plan_jobs: list[str] = Field([], title="the optimisation jobs", description="ids, newest first")
    study_jobs: dict[str, str] = Field({}, title="the studies", description="id of the newest of each kind")
    earlier_studies: list[str] = Field([], title="the earlier studies", description="ids, newest first")
    launch_jobs: list[str] = Field([], title="the launches", description="ids, newest first")
    taken: dict[Digest, str] = Field({}, title="the plans opened from sweeps", description="each with its job's id")
    saved: dict[Digest, int | None] = Field({}, title="the team's plans", description="each with its number there")
    imported: dict[Digest, Digest] = Field(
        {}, title="the plans read from files", description="each with the digest of its document"
    )
    plan: Digest | None = Field(None, title="which plan is open")
    plan_names: dict[Digest, str] = Field({}, title="the names of plans", description="those that a person gave")
    removed_plans: dict[Digest, RemovedPlan] = Field({}, title="the removed plans", description="the last one last")
    in_use: Digest | None = Field(None, title="which plan is deployed")
    choices: dict[Annotated[str, Field(max_length=200)], Choice] = Field(
        {}, max_length=MOST_CHOICES, title="the choices on the pages", description="by the widget's key, the newest last"
    )
    thresholds: Thresholds = Field(Thresholds(), title="the thresholds of verdicts")
    person: str | None = Field(None, title="your name")
    workspace: str | None = Field(None, title="the workspace that was looked at last")
    tour: Literal["on", "seen"] | None = Field(None, title="the guide")


def write(session: Session) -> str:
    """The text that `read` reads."""
    return json.dumps(session.model_dump(mode="json"))


def read(text: str) -> tuple[Session, str | None]:
    """Return the session in a stored text, with every field that still fits, and a sentence for people about the fields that do
    not fit and why; None: all of it fits."""
    try:
        stored = json.loads(text)
        if not isinstance(stored, dict):
            raise ValueError("it is not a JSON object")
    except (ValueError, RecursionError) as error:
        return Session(), f"The session of this address cannot be read ({error}), so an empty one is open."
    if "what_if" in stored and isinstance(positions := stored.pop("what_if"), dict):
        stored["choices"] = {f"what-if-{field}": position for field, position in positions.items()}
    fitting, left_out = _fitting(stored)
    version = fitting.pop("version", 1)
    session = Session().model_copy(update=fitting)
    if not left_out:
        return session, None
    fields = "; ".join(left_out).encode(errors="replace").decode()  # a page cannot show half a character
    by = "a later version of Switchyard" if version > VERSION else "another version of Switchyard, or is damaged"
    return session, f"This session was stored by {by}. What no longer fits is left out: {fields}."


def revision_of(text: str | None) -> int:
    """Count of writes of a stored session; 0 if it cannot be read, so that it can be stored again."""
    try:
        stored = json.loads(text or "{}")
        return Session.model_validate({"revision": stored.get("revision", 0)}).revision
    except (ValueError, RecursionError, AttributeError):
        return 0


def _fitting(stored: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The fields that fit, each validated on its own, and the titles of those that do not, with the reason."""
    fitting, left_out = {}, []
    for name, value in stored.items():
        if name not in Session.model_fields:
            left_out.append(f"{name[:40]} (this version does not know it)")
            continue
        try:
            fitting[name] = getattr(Session.model_validate({name: value}), name)
        except ValidationError as error:
            left_out.append(f"{Session.model_fields[name].title} ({first_fault(error)})")
    for name, missing in (
        ("second", fitting.get("second") not in fitting.get("model_of", {})),
        ("step", fitting.get("model") is None),
    ):
        if fitting.get(name) is not None and missing:
            del fitting[name]
            left_out.append(f"{Session.model_fields[name].title} (its model is left out)")
    return fitting, left_out
