"""The form of a new launch: place, plans, limits, refusals, and the exact command or the text that a scheduler would get."""

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from app import cached, failing, kept, state, tables, widgets
from app.charts import launch as charts
from app.launch import history, own
from app.launch.history import Launched
from app.tables import plain, sentence
from engine import store, units
from engine.cluster import Cluster
from engine.errors import InputError, UndecidedError
from engine.goal import Goal
from engine.jobs.launches import RUN
from engine.jobs.runtimes import Estimate, expect
from engine.launch.places.destination import CPUS_PER_RANK, MEMORY_PER_RANK, SCHEDULERS, Destination, as_drawn, gpus_of
from engine.launch.places.devices import MOST_RANKS, Devices
from engine.launch.preparation.launch import Launch, On, PreparedLaunch
from engine.launch.preparation.prepare import prepare
from engine.launch.preparation.settled import usual_ranks
from engine.launch.rank.instructions import MAX_PLANS, MAX_REPEATS
from engine.launch.running.local import command_of
from engine.launch.running.torchx_application import dry_run
from engine.plan import Plan
from engine.problem import Problem
from engine.program import command
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


def destination_of(kind: str, cluster: Cluster) -> Destination | None:
    """The place of a kind; None until a person has given what it needs."""
    fields = _nodes(kind, cluster)
    with st.container(horizontal=True):
        for name, (label, placeholder, help) in FIELDS[kind].items():
            key = f"launch-{kind}-{label}"
            fields[name] = kept.text_input(label, placeholder=placeholder, help=help, width=200, key=key).strip()
    if missing := [text for name, text in NEEDED[kind].items() if not fields[name]]:
        st.info(f"Enter {units.in_a_row(missing)} to preview what would be submitted.", icon=":material/info:")
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
            f"`{command()} collect {folder}`."
        )
    else:
        st.caption(f"{UNNAMED} stands for the run folder, which Submit makes.")


WHERE = {
    "local": ":material/computer: This machine",
    "testbed": ":material/network_node: Testbed (emulated links)",
    "slurm": ":material/dns: Slurm",
    "kubernetes": ":material/sailing: Kubernetes",
}
USUAL_LIMIT, USUAL = 900, "automatic"


def form(problem: Problem, plan: Plan, past: list[Launched], actions: DeltaGenerator) -> None:
    """Show everything from the choice of the place to the button that starts, which goes into `actions`, at the top."""
    with st.container(horizontal=True, gap="medium"):
        runs_own = plan.goal is Goal.INFERENCE and _what(problem) == "own"
        place = kept.segments(
            "Where to run", list(WHERE), default="local", required=True, format_func=WHERE.get, key="launch-place"
        )
    devices, refused, fault, destination = cached.attached(), history.refusal(), None, None
    on_cluster = place in FIELDS
    if on_cluster:
        destination = destination_of(place, problem.cluster)
    else:
        st.markdown(f":material/memory: **Devices:** {plain(devices.summary)}")
        if devices.notes:
            st.caption(" · ".join(plain(note) for note in devices.notes))
    if place == "testbed":
        st.caption(
            "Every rank gets a network of its own whose link is as fast as its GPUs' ports are drawn, divided by the "
            "scale: a measured all-to-all before there is a cluster."
        )
        if not refused and (fault := cached.testbed_fault()):
            here = fault.replace("launch with --on local", "choose this machine above")
            st.warning(f"A testbed cannot be built here: {plain(here)}.", icon=":material/block:")
    given = own.choose() if runs_own else None
    launch = _chosen(place, destination, problem, plan, devices, runs_own)
    if (on_cluster and destination is None) or (runs_own and given is None):
        return
    if given is not None:
        texts, model = given
        launch = replace(launch, model=texts.texts.model, own=model)
    try:
        prepared = _prepared(launch, devices)
        cached.check_launch(launch)
        balances = {other.name: cached.balance(other, problem) for other in launch.plans}
    except UndecidedError as undecided:
        st.info(sentence(str(undecided)), icon=":material/info:")
        return
    except InputError as error:
        st.error(sentence(str(error)), icon=":material/error:")
        return
    left, right = st.columns(2, gap="large")
    with left:
        st.subheader("Pre-flight", anchor=False)
        checks = []
        for check in prepared.checks:
            colour, icon = ("green", "check_circle") if check.passed else ("red", "cancel")
            if check.warning:
                colour, icon = "orange", "warning"
            checks.append(f":{colour}[:material/{icon}:] **{check.name}**: {plain(check.text)}")
        st.markdown("  \n".join(checks))
        lines = [f"{plain(name)}: {tables.balance_sentence(even.factors)}" for name, even in balances.items()]
        st.caption("  \n".join([f"{tables.COLUMN} on the GPUs of the plan, all tokens", *lines]))
        not_now = fault or (None if on_cluster else history.why_not_now(past))
        expected = expect(prepared, [took for run in past if (took := run.brief.took)])
        _start(launch, refused, not_now, prepared, expected, actions)
    with right:
        if on_cluster:
            st.subheader("What is submitted", anchor=False)
            what_is_submitted(prepared)
        else:
            _command(prepared)


WHAT = {"recorded": ":material/database: Recorded routing", "own": ":material/account_tree: Your model"}


def _what(problem: Problem) -> str:
    """The thing that runs: recorded routing through random weights, or a person's own model."""
    if problem.second is not None:
        return "recorded"
    return kept.segments("What runs", list(WHAT), default="recorded", required=True, format_func=WHAT.get, key="launch-what")


def _prepared(launch: Launch, devices: Devices) -> PreparedLaunch:
    """`prepare`, which takes seconds to look at a model for the first time. Raises InputError."""
    if launch.own is None:
        return prepare(launch, devices)
    with st.spinner("Looking at the model"):
        return prepare(launch, devices)


def _start(
    launch: Launch,
    refused: str | None,
    not_now: str | None,
    prepared: PreparedLaunch,
    expected: Estimate | None,
    actions: DeltaGenerator,
) -> None:
    if refused:
        st.warning(refused, icon=":material/lock:")
    label = "Start" if launch.destination is None else "Submit"
    if actions.button(
        label, type="primary", icon=":material/rocket_launch:", disabled=bool(refused or not_now) or not prepared.ready
    ):
        with failing.saying(sentence):
            store.save_workload(launch.workload)  # balanced routing was recorded nowhere
            history.start(launch.to_arguments())
            st.rerun()
    if refused:
        return
    if not_now:
        actions.caption(plain(not_now), width="stretch")
    elif prepared.failed:
        actions.markdown(f":red[:material/cancel:] **{prepared.failed.name}**: {plain(prepared.failed.text)}", width="stretch")
    else:
        actions.caption(
            plain(" ".join([_what_runs(launch, expected), *_what_it_cannot_show(launch, prepared)])), width="stretch"
        )


def _what_runs(launch: Launch, expected: Estimate | None) -> str:
    """The plans by name, for how long about and at most."""
    names = " and ".join(plan.name for plan in launch.plans)
    passes = f"{launch.repeats} timed pass{'' if launch.repeats == 1 else 'es'}"
    each = " each" if launch.plans[1:] else ""
    runs, most = f"Runs {names}, {passes}{each}", f"ends after {units.roughly(launch.limit)} at the latest"
    if expected is None:
        return f"{runs}; {most}."
    about = f"{runs}: {'at least' if expected.least else 'about'} {units.roughly(expected.seconds)} ({expected.how}); {most}."
    return f"{about} Raise the time limit, or choose fewer passes." if expected.seconds > launch.limit else about


def _what_it_cannot_show(launch: Launch, prepared: PreparedLaunch) -> list[str]:
    """Limits of ranks on this machine's CPU, which are alike and share a memory, not the network that the plan is for."""
    if launch.on != "local" or prepared.instructions.backend != "gloo":
        return []
    types = len({gpu.type for gpu in launch.cluster.gpus})
    kinds = f"{types} kinds of GPU" if types > 1 else "GPUs and links of their own"
    return [
        f"Its {prepared.instructions.ranks} ranks are equal and share this machine's CPU; the plan is for {kinds}. A gain need "
        "not show here: the run checks the output and the predicted times. Testbed emulates the drawn links, though not the "
        "GPUs."
    ]


def _chosen(
    place: On, destination: Destination | None, problem: Problem, plan: Plan, devices: Devices, runs_own: bool
) -> Launch:
    """The plans and numbers that a person chose. runs_own: True if no tokens are replayed"""
    compared = _compared(plan, problem)
    ranks = scale = None
    with st.container(horizontal=True):
        if place not in FIELDS:
            ranks = _ranks(place, (plan, *compared), problem.cluster, devices)
        training = plan.goal is Goal.TRAINING
        tokens = (
            None
            if runs_own
            else kept.number_input(
                "Tokens to replay",
                1,
                None,
                None,
                width=190,
                disabled=training,
                key=f"launch-tokens-{place}",
                placeholder="the step's own" if training else "automatic",
                help="evenly spaced over the recording, drawn to match expert loads, or made of a traffic matrix's bytes; "
                "automatic: as many as take a few seconds. Training steps set their own",
            )
        )
        help = "of every plan, after a warm-up; shown is the median one"
        repeats = kept.number_input("Timed passes", 1, MAX_REPEATS, 3, width=140, key="launch-repeats", help=help)
        help = "a launch that is not done by then is ended"
        limit = kept.number_input("Time limit, s", 10, 86_400, USUAL_LIMIT, step=60, width=150, key="launch-limit", help=help)
        help = "of weights and activations; automatic: the model's own on GPUs, fp32 on CPUs"
        dtype = kept.selectbox("Number format", [USUAL, "fp32", "bf16"], width=130, key="launch-dtype", help=help)
        if place == "testbed":
            help = "drawn bandwidth / emulated bandwidth; unless given, what brings the fastest port to 100 Mbit/s"
            scale = kept.number_input(
                "Scale", 1e-9, None, None, width=210, placeholder="fastest at 100 Mbit/s", key="launch-scale", help=help
            )
    second = problem.second and (problem.second.workload, problem.second.model)
    return Launch(
        (plan, *compared),
        problem.workload,
        problem.model,
        problem.cluster,
        second=second if plan.goal is Goal.TWO_MODELS else None,
        on=place,
        scale=scale,
        destination=destination,
        ranks=ranks,
        tokens=tokens,
        repeats=repeats,
        limit=float(limit),
        dtype=None if dtype == USUAL else dtype,
        step=problem.step if training else None,
    )


def _compared(plan: Plan, problem: Problem) -> list[Plan]:
    """The plans that run for comparison with the open one."""
    candidates = {id: candidate.plan for id, candidate in cached.candidates().items()}
    others = {id: other for id, other in candidates.items() if id != plan.id and alike(other, plan)}
    compared = kept.multiselect(
        "Compare with",
        list(others),
        widgets.usual_baselines(others, plan, widgets.baseline_id(problem))[:1],
        lambda id: others[id].name,
        max_selections=MAX_PLANS - 1,
        disabled=not others,
        key=f"launch-compare-{plan.id}",
        placeholder="The open plan alone" if others else "No other plan for this cluster and model",
        help="All plans run in turn in one job, A B A B, so that a drift affects all of them alike.",
    )
    return [others[id] for id in compared]


def _ranks(place: On, plans: Sequence[Plan], cluster: Cluster, devices: Devices) -> int | None:
    """Number of ranks; None while a person has to choose it."""
    gpus = plans[0].placement.gpus
    suitable = min(gpus, MOST_RANKS) if place == "testbed" else devices.default_ranks(gpus)
    try:
        usual = usual_ranks(plans, cluster, suitable)
    except UndecidedError:
        usual = None
    return kept.number_input(
        "Ranks",
        1,
        gpus,
        usual,
        width=140,
        placeholder="how many?",
        key=f"launch-ranks-{place}-{gpus}-{usual}",  # for another plan that needs another number the field starts anew
        help="with fewer ranks than GPUs, neighbouring GPUs of the plan share a rank",
    )


def alike(first: Plan, second: Plan) -> bool:
    """True if two plans are for the same sizes and the same goal, so that one launch can compare them."""
    if first.goal is not second.goal:
        return False
    sizes = ((plan.placement.layers, plan.placement.experts, plan.placement.gpus) for plan in (first, second))
    return next(sizes) == next(sizes)


def _command(launch: PreparedLaunch) -> None:
    st.subheader("Command", anchor=False)
    folder = store.data_folder() / "jobs" / "JOB" / RUN
    try:
        command = command_of(launch, folder)
    except InputError as error:
        st.caption(f"There is none: {plain(str(error))}.")
    else:
        text, caption = shlex.join(command), "JOB is the launch's folder, which is written when it starts."
        if launch.testbed is not None:
            text = text.replace(launch.testbed.namespace(0), "NAMESPACE")
            caption = f"Of rank 0; the others alike, each in a network namespace that is made when it starts. {caption}"
        st.code(text, language=None, wrap_lines=True)  # Streamlit's colours for shell text are too pale to read well
        st.caption(caption)
    if (testbed := launch.testbed) is not None:
        drawn = testbed.bandwidth * testbed.scale
        widgets.chart(charts.links(testbed.bandwidth, drawn, testbed.scale), "launch-links")
