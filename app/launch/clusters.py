"""Launches by a scheduler: the place on the cluster, and the exact text that would be submitted."""

from pathlib import Path
from typing import Any

import streamlit as st

from app import failing, kept, state, widgets
from app.launch import history
from app.tables import plain, sentence
from engine.cluster import Cluster
from engine.errors import InputError
from engine.launch.places.destination import CPUS_PER_RANK, MEMORY_PER_RANK, SCHEDULERS, Destination, as_drawn, gpus_of
from engine.launch.preparation.launch import PreparedLaunch
from engine.launch.running.torchx_application import dry_run
from engine.workload import digest_of

GIB = 2.0**30
UNNAMED = "run-JOB"
"""Stands for the run folder's name, which is made when it is written."""
BY_HAND = "for those who submit by hand: all that the job reads, in the shared folder"


FIELDS: dict[str, dict[str, tuple[str, str, str]]] = {
    "slurm": {
        "shared": ("Shared folder", "/shared/switchyard", "one that the nodes see too, by an absolute path"),
        "seen_as": ("Seen by the nodes as", "the same", "where they have it, if at another place"),
        "partition": ("Partition", "the default one", "several with commas between"),
        "account": ("Account", "the default one", "what the time is booked on"),
        "image": (
            "Image",
            "none",
            "the project's image, for Pyxis; without one the nodes run this very installation, which they have to see at the "
            "same place",
        ),
    },
    "kubernetes": {
        "shared": ("Shared folder", "/mnt/shared", "where this machine has the volume"),
        "claim": ("Volume claim", "switchyard", "the PersistentVolumeClaim of the same volume"),
        "seen_as": ("Mounted at", "/shared", "where the job's pods see it"),
        "image": ("Image", "REGISTRY/NAME:TAG", "the project's image, where the cluster can pull it"),
        "namespace": ("Namespace", "default", "where the job is made"),
        "queue": ("Queue", "default", "Volcano's"),
    },
}
"""Texts that a person gives about a Slurm cluster, or a Kubernetes cluster with Volcano: label, placeholder and help."""
NEEDED = {
    "slurm": {"shared": "the shared folder"},
    "kubernetes": {"shared": "the shared folder", "claim": "the volume claim", "image": "the image"},
}


def destination(kind: str, cluster: Cluster) -> Destination | None:
    """The place of a kind; None until a person has given what it needs."""
    fields = _nodes(kind, cluster)
    with st.container(horizontal=True):
        for name, (label, placeholder, help) in FIELDS[kind].items():
            key = f"launch-{kind}-{label}"
            fields[name] = kept.text_input(label, placeholder=placeholder, help=help, width=200, key=key).strip()
    if missing := [text for name, text in NEEDED[kind].items() if not fields[name]]:
        st.info(f"Enter {' and '.join(missing)} to preview what would be submitted.", icon=":material/info:")
        return None
    with failing.saying(sentence):
        return SCHEDULERS[kind].from_dict({name: value for name, value in fields.items() if value != ""}, kind)
    return None


def _nodes(name: str, cluster: Cluster) -> dict[str, Any]:
    """Number and kind of nodes; unless a person says otherwise, as drawn."""
    try:
        drawn = as_drawn(cluster)
    except InputError as error:
        st.caption(plain(f"{error}."))
        drawn = {"nodes": 1, "gpus_per_node": 0}
    with st.container(horizontal=True):
        nodes = _number(name, "Nodes", 1, 1024, drawn["nodes"], "as many as drawn, unless you say otherwise")
        gpus = _number(name, "GPUs per node", 0, 64, drawn["gpus_per_node"], "0: the ranks compute on CPUs")
        usual = gpus or -(-len(cluster.gpus) // nodes)
        ranks = _number(name, "Ranks per node", 1, 1024, usual, "with GPUs, no more than there are", f"{usual}")
        cpus = _number(name, "CPUs per node", 1, 4096, CPUS_PER_RANK * ranks, "shared by its ranks", f"{ranks}")
        memory = _number(name, "GiB per node", 1, 2**20, int(MEMORY_PER_RANK / GIB) * ranks, "of host memory", f"{ranks}")
    fields = {
        "nodes": nodes,
        "gpus_per_node": gpus,
        "ranks_per_node": ranks,
        "cpus_per_node": cpus,
        "memory_per_node": memory * GIB,
    }
    if gpus:
        fields |= gpus_of(cluster)
    return fields


def _number(place: str, label: str, low: int, high: int, usual: int, help: str, of: str = "") -> int:
    """A number field. of: the usual number depends on this; when it changes, the field starts anew."""
    return kept.number_input(
        label, low, high, min(max(usual, low), high), width=140, help=help, key=f"launch-{place}-{label}-{usual}-{of}"
    )


def what_is_submitted(launch: PreparedLaunch) -> None:
    """Show the submitted text, a file of it, and a run folder for those who submit it by hand."""
    destination = launch.destination
    key = digest_of(launch.instructions.digest, destination.digest)
    folder = state.visit.run_folders.get(key)
    try:
        text = dry_run(launch, Path(folder or f"{destination.shared}/{UNNAMED}"))
    except InputError as error:
        st.error(sentence(str(error)), icon=":material/error:")
        return
    slurm = destination.scheduler == "slurm"
    st.code(text, language=None, height=340)  # as it is written; Streamlit's colours for shell text are too pale
    with st.container(horizontal=True):
        widgets.download("Download", text, "switchyard.sh" if slurm else "switchyard.yaml")
        refused = history.refusal()
        if not folder and st.button(
            "Write the run folder",
            icon=":material/create_new_folder:",
            help=refused or BY_HAND,
            disabled=bool(refused or not launch.ready),
        ):
            with failing.saying(sentence):
                state.visit.run_folders[key] = str(history.write(launch))
                st.rerun()
    if folder:
        how = "sbatch switchyard.sh" if slurm else "kubectl create -f switchyard.yaml"
        st.caption(
            f"The run folder {plain(folder)} is written. By hand: download, `{how}`, and when it has ended "
            f"`python -m engine collect {folder}`."
        )
    else:
        st.caption(f"{UNNAMED} stands for the run folder, which Submit makes.")
