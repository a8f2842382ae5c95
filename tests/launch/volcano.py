"""What a Job of Volcano may be, as its CustomResourceDefinition jobs.batch.volcano.sh (v1alpha1, volcano.sh) has it: the fields
that a person sets, but for the pods' templates, which are Kubernetes' own. Written down anew as a JSON schema that, unlike
the original, refuses every other field."""

from typing import Any

EVENTS = (
    "*",
    "PodPending",
    "PodRunning",
    "PodFailed",
    "PodEvicted",
    "Unknown",
    "TaskCompleted",
    "OutOfSync",
    "CommandIssued",
    "JobUpdated",
    "TaskFailed",
)
ACTIONS = (
    "AbortJob",
    "RestartJob",
    "RestartTask",
    "RestartPod",
    "RestartPartition",
    "TerminateJob",
    "CompleteJob",
    "ResumeJob",
)
"""The definition takes any text for these; the controller acts on these."""

LABEL = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
NAME = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"
COUNT = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}


def _fields(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


POLICIES = {
    "type": "array",
    "items": _fields(
        action={"enum": list(ACTIONS)},
        event={"enum": list(EVENTS)},
        events={"type": "array", "items": {"enum": list(EVENTS)}},
        exitCode={"type": "integer"},
        timeout={"type": "string"},
    ),
}
TASK = _fields(
    ("name", "replicas", "template"),
    name={"type": "string", "maxLength": 63, "pattern": LABEL},
    replicas=COUNT,
    minAvailable=COUNT,
    maxRetry=COUNT,
    policies=POLICIES,
    template={"type": "object"},
)
SPEC = _fields(
    ("tasks",),
    schedulerName={"type": "string", "maxLength": 63},
    queue={"type": "string", "maxLength": 253, "pattern": NAME},
    maxRetry=COUNT,
    minAvailable=COUNT,
    minSuccess=COUNT | {"minimum": 1},
    plugins={"type": "object", "additionalProperties": {"type": "array", "items": {"type": "string"}}},
    policies=POLICIES,
    priorityClassName={"type": "string", "maxLength": 253, "pattern": NAME},
    runningEstimate={"type": "string"},
    tasks={"type": "array", "items": TASK},
    ttlSecondsAfterFinished=COUNT,
)
JOB = _fields(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "batch.volcano.sh/v1alpha1"},
    kind={"const": "Job"},
    metadata=_fields(
        ("name",),
        name={"type": "string", "maxLength": 63, "pattern": LABEL},
        namespace={"type": "string"},
        labels={"type": "object", "additionalProperties": {"type": "string"}},
        annotations={"type": "object", "additionalProperties": {"type": "string"}},
    ),
    spec=SPEC,
)
