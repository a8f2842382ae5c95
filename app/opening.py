"""Dropped files: any page takes any file and brings it to its place in the session, with one function for each kind of file."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import streamlit as st

from app import cached, model_catalogue, state, uploads
from app.tables import plain
from engine import formats, store
from engine.catalogue.links import type_of
from engine.compare.baseline import plan_of_placement
from engine.costs import AlphaBeta, CostProfile, Profiled, choice
from engine.costs.pair_cluster import MeasuredPairs, draw_pairs
from engine.errors import InputError
from engine.formats.measured.nccl_pairs import read_pairs
from engine.formats.nvidia_topo import read_topology
from engine.formats.placements import Deployed, open_plan_file
from engine.model import MoEModel
from engine.overlap.operator_graph import OperatorGraph
from engine.plan import Plan
from engine.serving.step import ServingStep
from engine.training import TrainingStep
from engine.workload import RoutingTrace, TrafficMatrix, Workload

MOST_WORKLOADS = 64
"""Most recordings in one file: every one of them is read, kept and listed."""


@dataclass(frozen=True)
class Answer:
    """The answer to an uploaded file, in a sentence: its opening, or the reason of its refusal."""

    text: str
    refused: bool = False


@dataclass(frozen=True)
class Known:
    """Facts that files may lack: the model that was dropped with them, or else is open, and the type of GPUs."""

    model: MoEModel | None
    gpu_type: str | None


def receive(files: Sequence[tuple[str, bytes]], is_new: Sequence[bool], gpu_type: str | None = None) -> list[Answer | None]:
    """Open uploaded files, files of one recording together, and answer each. Parts of the session that nothing replaced stay
    open.

    files: (name, content)
    is_new: of each file; older ones are read only with new ones of their recording, else their answer is None
    gpu_type: of machines with files that do not name it
    """
    try:
        with uploads.as_files(files) as paths, store.scratch() as scratch:
            return _received(paths, is_new, scratch, gpu_type)
    except InputError as error:
        return [Answer(str(error), refused=True) if new else None for new in is_new]


def _received(paths: Sequence[Path], is_new: Sequence[bool], scratch: Path, gpu_type: str | None) -> list[Answer | None]:
    answers: list[list[Answer]] = [[] for _ in paths]
    upload_of: dict[Path, int] = {}
    parts: list[formats.Part] = []
    for place, path in enumerate(paths):
        try:
            inside = formats.single_files(path, scratch)
        except InputError as error:
            answers[place].append(Answer(str(error), refused=True))
            continue
        parts += inside
        upload_of |= {file: place for part in inside for file in part.paths}
    known, before = Known(_model_among(parts), gpu_type), set(state.session.workloads)
    last_recording = None
    order = list(_OPEN)
    for part in sorted(formats.joined(parts, known.model), key=lambda part: order.index(part.format.kind)):
        places = dict.fromkeys(upload_of[file] for file in part.paths)
        if not any(is_new[place] for place in places):
            continue
        try:
            answer = Answer(_OPEN[part.format.kind](part, known))
            if part.format.is_recording:
                last_recording = next(iter(places))
        except InputError as error:
            (place, *_), inside = places, not set(part.paths) & set(paths)
            text = f"{paths[place].name}: {error}" if inside else str(error)
            alone = "" if len(part.paths) == 1 else f"; none of the {len(part.paths)} files that belong together was opened"
            answer = Answer(text + alone, refused=True)
        for place in places:
            answers[place].append(answer)
    if known.model is None and last_recording is not None and (text := _open_model_of_new(before)):
        answers[last_recording].append(Answer(text))
    # One answer for an archive, from those of its files.
    return [
        Answer("; ".join(answer.text for answer in of_file), any(answer.refused for answer in of_file)) if of_file else None
        for of_file in answers
    ]


def _open_model_of_new(before: set[str]) -> str | None:
    """Open the only model that the recording opened last may come from, and say so. before: digests of the earlier recordings.

    A traffic matrix tells no model, so the recording before it counts.
    """
    new = (cached.recording(digest) for digest in reversed(state.session.workloads) if digest not in before)
    recording = next((recording for recording in new if not isinstance(recording, TrafficMatrix)), None)
    model = recording and model_catalogue.open_only_fit(recording)
    if model is None:
        return None
    sizes = model_catalogue.sizes_in_words(recording)
    state.visit.notice = f"{sizes} fits only {model.name}: it is open"
    return f"opened the model {model.name}, the only one of the catalogue with {sizes}"


def _model_among(parts: Sequence[formats.Part]) -> MoEModel | None:
    models = [part.paths[0] for part in parts if part.format.kind == "model"]
    with suppress(InputError):  # opening it says why
        return formats.read_model(models[0]) if models else state.session.model
    return state.session.model


def _recording(part: formats.Part, known: Known) -> str:
    names = formats.members(part.paths[0]) if len(part.paths) == 1 else ()
    if len(names) > MOST_WORKLOADS:
        raise InputError(
            f"{part.paths[0].name}: holds {len(names)} workloads, at most {MOST_WORKLOADS} are opened at once; save fewer"
        )
    workloads = [_read(part, member, known.model) for member in names or (None,)]
    for workload in workloads:
        state.open_workload(workload)
    return "opened " + " and ".join(workload.name for workload in workloads)


def _read(part: formats.Part, member: str | None, model: MoEModel | None) -> Workload:
    """The recording, checked against the open model's number of experts if it has its layers and k.

    A recording of another model is no fault, so its own sizes count then.
    """
    if model is None:
        return formats.read_workload(part.paths, member=member)
    facts = {"member": member, "bytes_per_token": model.bytes_per_token, "model": model}
    workload = formats.read_workload(part.paths, **facts)
    same = isinstance(workload, RoutingTrace) and (workload.layers, workload.k) == (
        len(model.moe_layers),
        model.experts_per_token,
    )
    if not same or workload.num_experts == model.experts:
        return workload
    return formats.read_workload(part.paths, num_experts=model.experts, **facts)


def _model(part: formats.Part, _: Known) -> str:
    (path,) = part.paths
    model, workload = formats.read_model(path), cached.workload()
    # A serving step assumes balanced routing if the recording is of another model; the first model always opens.
    checked = workload is not None and not isinstance(workload, TrafficMatrix) and state.serving() is None
    if state.session.model and checked and (fault := cached.model_fault(workload, model)):
        raise InputError(f"{path.name}: {fault}; the open model stays (open the model's recording first)")
    state.change(model=model)
    if part.format.name == "huggingface":
        state.remember_config(model, store.save_config(path))
    return f"opened the model {model.name}"


def _cluster(part: formats.Part, _: Known) -> str:
    cluster = formats.read_cluster(part.paths[0])
    state.open_cluster(cluster)
    return f"opened the cluster {cluster.name}"


def _topology(part: formats.Part, known: Known) -> str:
    drawn = read_topology(part.paths[0], known.gpu_type)
    state.open_cluster(drawn.cluster)
    return f"opened the cluster {drawn.cluster.name}: {'; '.join(drawn.notes)}"


def _pairs(part: formats.Part, known: Known) -> str:
    pairs, notes = read_pairs(part.paths)
    unknown = next((device for device in pairs.devices if type_of(device) is None), None)
    if unknown and known.gpu_type is None:
        raise InputError(
            f"'{unknown}' is not in the catalogue; choose the nearest GPU type on the Cluster page, for the logs in its drop "
            "zone"
        )
    host, *others = dict.fromkeys(pairs.hosts)
    drawn = draw_pairs(
        pairs, f"{host} and {len(others)} more host{'s' * (len(others) > 1)}" if others else host, known.gpu_type
    )
    state.open_cluster(drawn.cluster)
    state.open_pairs(MeasuredPairs.of(pairs))
    return f"opened the cluster {drawn.cluster.name}: {'; '.join((*notes, *drawn.notes))}"


def _costs(part: formats.Part, _: Known) -> str:
    profile = formats.read_costs(part.paths[0])
    fitted = isinstance(profile, CostProfile)
    state.add_cost_source(profile.name, choice.to_dict(AlphaBeta(profile) if fitted else Profiled(profile)))
    notes = [] if fitted else list(profile.notes or ())
    if formats.is_of_one_pair(part.paths[0]):
        notes.append(formats.OF_ONE_PAIR)
    said = f" ({'; '.join(notes)})" if notes else ""
    return f"read {profile.name}: choose it for computation or for the network on the Cluster page{said}"


def _step(part: formats.Part, _: Known) -> str:
    (path,) = part.paths
    if state.session.model is None:
        raise InputError(f"{path.name}: is {part.format.title}; open its model first")
    if part.format.name == "serving-step":
        state.open_serving(formats.read_document(ServingStep, path))
        return "opened the serving step: see the Optimise page"
    state.open_step(formats.read_document(TrainingStep, path))
    return "opened the training step: see the Optimise page"


def _graph(part: formats.Part, _: Known) -> str:
    (path,) = part.paths
    formats.read_document(OperatorGraph, path)
    raise InputError(f"{path.name}: is {part.format.title}; import it below the training step on the Optimise page")


def _plan(part: formats.Part, _: Known) -> str:
    """Open the plan that is deployed now."""
    (path,) = part.paths
    file, model, cluster = open_plan_file(path), state.session.model, state.session.cluster
    if model is None or cluster is None:
        missing = " and ".join(what for what, there in (("model", model), ("cluster", cluster)) if there is None)
        raise InputError(f"{path.name}: is {part.format.title}, not a recording: open its {missing} first")
    deployed = file.deployed(model, len(cluster.gpus))
    plan = file.plan or plan_of(deployed, path.name)
    try:
        if (problem := cached.problem()) is not None:
            cached.check_plan(plan, problem)
    except InputError as error:
        raise InputError(f"{path.name}: cannot count as deployed: {error}") from None
    state.add_imported(plan)
    state.update(in_use=plan.id)
    notes = f" ({'; '.join(deployed.notes)})" if deployed.notes else ""
    return f"{plan.name} counts as deployed now: {deployed.format}{notes}"


def plan_of(deployed: Deployed, name: str) -> Plan:
    """A placement of a serving engine, which sends all at once, as a plan."""
    travel, cluster = state.session.travel, state.session.cluster
    return plan_of_placement(deployed.placement, name, travel=travel and cluster and travel.on_nodes(cluster.node_sizes))


_OPEN: dict[formats.Kind, Callable[[formats.Part, Known], str]] = {
    "routing": _recording,
    "loads": _recording,
    "traffic": _recording,
    "model": _model,
    "topology": _topology,
    "pairs": _pairs,
    "cluster": _cluster,
    "measurements": _costs,
    "profile": _costs,
    "step": _step,
    "graph": _graph,
    "plan": _plan,
}
"""By kind, in the order in which dropped files are opened: a model must fit the recording that is open, and a plan its model
and cluster, so that all of them can be dropped at once."""


def show(key: str, label: str, help: str, gpu_type: str | None = None, tells: bool = True) -> None:
    """A drop zone, and below it the answers to the files of the last upload.

    key: of its widget
    label: kind of file that this page needs
    help: names of those files
    gpu_type: of machines with files that do not name it
    tells: True shows the answers here, else the page does

    Files of one recording may be dropped one after another: those still in the zone are read with them. A refused file is read
    again once another model or cluster is open, or another file leaves the zone, as either may have been the cause; its answer
    is shown again only if it changed.
    """
    files = st.file_uploader(
        label,
        accept_multiple_files=True,
        key=key,
        help=f"{help} Cluster, model, plan and measurement files are recognised as well.",
    )
    ids = [file.file_id for file in files]
    refused = {id: complaints for id in ids if (complaints := uploads.complaints([id]))}
    came = uploads.newly_in(key, ids)
    is_new = [uploads.first_time(f"{id} {gpu_type or ''}") for id in ids]
    open_now = " ".join(document.digest for document in (state.session.model, state.session.cluster) if document is not None)
    others_open = [uploads.first_time(f"{id} beside {open_now}") for id in ids]
    is_new = [new or (other and id in refused) for id, new, other in zip(ids, is_new, others_open, strict=True)]
    if any(is_new):
        answers = receive([(file.name, file.getvalue()) for file in files], is_new, gpu_type)
        answered = {id: answer for id, answer in zip(ids, answers, strict=True) if answer is not None}
        for id, answer in answered.items():
            uploads.answer(id, answer.text, answer.refused)
        otherwise = [id for id in answered if id in came or uploads.complaints([id]) != refused.get(id)]
        uploads.show_answers(key, otherwise, alone=bool(came))
        if answered:
            st.rerun()
    if tells:
        tell(uploads.shown_in(key, ids))


def tell(ids: Sequence[str]) -> None:
    """Answers to dropped files: those that were opened in a line, then the reasons of refusals."""
    if answers := uploads.answers(ids):
        st.caption(f":material/check: {plain(' · '.join(answers))}")
    for complaint in uploads.complaints(ids):
        st.error(plain(complaint), icon=":material/error:")
