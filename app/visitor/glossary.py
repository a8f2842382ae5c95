"""Terms of the trade on the pages, with meaning and source; and the guide through a first visit on a sample, a line a page."""

from dataclasses import dataclass

import streamlit as st

from app import state
from app.tables import plain


@dataclass(frozen=True)
class Term:
    """One or two sentences on a term, and the paper and section, or the program, that it comes from.

    also: other spellings on the pages
    """

    meaning: str
    source: str
    also: tuple[str, ...] = ()


TERMS = {
    "affinity": Term(
        "How strongly the expert of one layer predicts the expert of the next: the share of the tokens of expert A that go "
        "on to expert B.",
        "ExFlow §IV-B",
    ),
    "aggregate": Term(
        "Weighing and adding up the outputs of a token's experts, after which the next layer begins.", "Aurora §2.1"
    ),
    "all-gather": Term(
        "Every GPU gets what every other one has. In context-coherent execution one of the prompts before the first layer and "
        "one of the tokens after the last replace the way back of every layer. Each token crosses the fabric once per node, "
        "and the node's links spread it.",
        "ExFlow §IV-A",
    ),
    "all-reduce": Term(
        "Every GPU gets the sum of what all of them have: the gradients of the layers that each holds a copy of.",
        "Lina §2.2",
        ("all-reduces",),
    ),
    "all-to-all": Term(
        "Every GPU sends something else to every other one. It ends when the last of them has sent and received all of it.",
        "Aurora §2.1, §2.2",
        ("all-to-alls",),
    ),
    "α–β cost": Term(
        "Time as a latency α plus β for every byte or operation, fitted to measurements.", "PipeMoE §IV-A", ("α–β",)
    ),
    "balancedness": Term(
        "The mean load of the GPUs divided by the largest: 1 when all have as much to do, a half when the fullest has twice "
        "the mean.",
        "EPLB; SGLang and vLLM call other means of it so; its inverse is Lina's imbalance, §2.2",
    ),
    "bound": Term(
        "A time that no plan of the stated kind can beat, proven. For an all-to-all: the bytes of its busiest port over that "
        "port's bandwidth.",
        "Aurora §4.2, Theorem 4.2; §5.2, Theorem 5.2",
    ),
    "capacity factor": Term(
        "How many tokens an expert takes at most, as a multiple of an even share. Tokens above it are dropped.", "Lancet §2.1"
    ),
    "colocation": Term(
        "Two models on the same GPUs: while one computes, the other communicates.", "Aurora §6", ("two models",)
    ),
    "combine": Term(
        "The second all-to-all of an MoE layer: the experts' outputs go back to where the tokens came from.",
        "Aurora §2.1; PipeMoE §II-B",
    ),
    "contention": Term(
        "What a port loses while several sends meet there: with every further one a byte takes longer. "
        "Many-to-one contention is known as incast.",
        "What-if's slider; `engine/cluster.py`",
    ),
    "context-coherent": Term(
        "Every GPU holds the context of every token, so that a token goes on from the GPU of its expert instead of going "
        "back first.",
        "ExFlow §IV-A",
        ("context_coherent",),
    ),
    "critical path": Term(
        "The chain of events of which each had to wait for the one before: the total time is its length.",
        "Kelley and Walker 1959, Critical-path planning and scheduling",
        ("all GPUs wait for",),
    ),
    "dispatch": Term(
        "The first all-to-all of an MoE layer: every token is sent to the GPUs of its experts.", "Aurora §2.1; PipeMoE §II-B"
    ),
    "exchange of sizes": Term(
        "Every GPU tells every other one how many rows it will send for each expert, before an all-to-all that carries real "
        "tokens only.",
        "Lancet §6, Figure 10",
    ),
    "exposed communication": Term(
        "Time in which the network is busy and nothing computes. Only this part of communication makes a pass longer.",
        "Lancet §7.1, there non-overlapped communication",
    ),
    "gap": Term(
        "How far a plan is above a proven bound, in per cent of the bound. No plan of that kind can be better by more.",
        "integer programming, as in ExFlow §IV-D",
        ("above the bound", "above its bound", "above that bound", "left to gain"),
    ),
    "gate": Term(
        "The small network in front of the experts that chooses for every token which of them it goes to.", "Aurora §2.1"
    ),
    "GPU utilisation": Term(
        "Compute time (gate, experts, aggregation) over total time, mean over the GPUs.", "Aurora §8.1", ("utilisation",)
    ),
    "held out": Term(
        "Not used to make the plan: another recording, or the later half of its own. What a plan gains there is what it would "
        "gain on traffic to come.",
        "statistics; see docs/verdict.md",
        ("held-out",),
    ),
    "joint order": Term(
        "A matched order of both models' sends together: the first model's go as if it were alone, and the second's fill the "
        "ports that idle meanwhile.",
        "Aurora §6.1, Table 2",
        ("joint",),
    ),
    "kept local": Term(
        "Share of the hops from layer to layer that end on the GPU, or the node, where they began.",
        "ExFlow §V-C, §V-D",
        ("kept on GPU", "kept on node", "stays on its GPU"),
    ),
    "knob": Term(
        "A choice of a plan that can be changed by itself: placement, experts per GPU, copies, execution, send order. Turned "
        "alone it may save more, or less, than on top of others.",
        "Switchyard; see docs/best.md",
    ),
    "matched order": Term(
        "Sends in phases in which each GPU sends to one other and receives from one other, so that no two meet at a port.",
        "Aurora §4.2, Algorithm 1",
        ("matched",),
    ),
    "micro-op": Term(
        "A small equal piece of an all-reduce. An all-to-all that arrives waits for one piece at most.", "Lina §4.2"
    ),
    "migration": Term(
        "Copying expert weights from the placement in use to that of another plan; it pays after as many passes as win its "
        "time back.",
        "Lina §5.2, §7.3.1, on what scheduling again costs",
        ("copies to move", "moving to a plan", "of moving"),
    ),
    "overlap": Term(
        "Share of communication during which something computes, so that it costs no time of its own.", "Lancet §1, §7.1"
    ),
    "overload factor": Term(
        "The largest load of a GPU divided by the mean: 1 when all have as much to do. The inverse of balancedness in every "
        "layer; less 1 it is the imbalance ratio.",
        "Megatron-LM, pull request #4110; imbalance ratio: TensorRT-LLM",
    ),
    "partition range": Term(
        "The run of operators around an all-to-all that is cut into parts, so that one part computes while another is sent.",
        "Lancet §5.1",
    ),
    "persistence": Term(
        "Part of what a plan made for the held-out recordings would gain there that the judged plan keeps. At 100 % last "
        "hour's plan serves this hour as well as a fresh one.",
        "forecasting, where yesterday's weather is the forecast to beat; see docs/verdict.md",
    ),
    "pipeline degree": Term(
        "Into how many parts the tokens of a layer are cut, so that experts compute on one while the next is being sent.",
        "PipeMoE §II-C, §IV-B",
    ),
    "placement": Term("Which GPU holds which experts of every layer.", "ExFlow §IV-D; Aurora §5.1"),
    "popularity": Term(
        "Share of a batch's tokens that go to an expert. Some experts get many times the mean.", "Lina §2.2, Figure 6"
    ),
    "rank": Term(
        "One process of a launch, with a GPU of its own or a share of the CPU cores.", "PyTorch, torch.distributed", ("ranks",)
    ),
    "RCS": Term("Random communication scheduling: every GPU sends in random order. A baseline.", "Aurora §8.1"),
    "REC": Term("Random expert colocation: experts of two models are paired at random. A baseline.", "Aurora §8.1"),
    "replica": Term(
        "A further copy of a popular expert on another GPU, which takes part of its tokens.", "Lina §5.2", ("replicas",)
    ),
    "RGA": Term("Random GPU assignment: experts go to GPUs at random. A baseline.", "Aurora §8.1"),
    "roofline": Term(
        "Time of a kernel as the longer of its operations over the peak rate and its bytes over the memory's bandwidth.",
        "Williams, Waterman and Patterson 2009, Roofline",
    ),
    "routing log": Term("Which experts every token went to in every layer, recorded while a model ran.", "ExFlow §IV-B, §V-G"),
    "shared order": Term(
        "Sends in phases in which a GPU may serve several peers at once within its bandwidth, so that a fast one need not "
        "wait for a slow peer.",
        "Aurora §5.2, Theorem 5.2, which on mixed GPUs needs it",
        ("shared",),
    ),
    "SJF": Term("Shortest job first: every GPU sends its smallest message first. A baseline.", "Aurora §8.1"),
    "skew": Term("Tokens of a layer's busiest expert over the mean of its experts.", "Lina §2.2, Figure 6"),
    "slot": Term(
        "Room for one expert on a GPU. With more slots than experts, some experts have replicas.",
        "DeepSeek EPLB, there physical expert",
        ("slots",),
    ),
    "traffic matrix": Term(
        "Bytes that every GPU sends to every other one in an all-to-all.", "Aurora §3, §4.2", ("traffic matrices",)
    ),
    "two-tier order": Term(
        "Sends in phases in which each node sends to one other over all its ports at once. Its GPUs balance the bytes over "
        "their links before, and spread them after.",
        "FAST, NSDI'26",
        ("two-tier",),
    ),
    "weight gradient": Term(
        "dW, what training changes a layer's weights by. Nothing waits for it before the update, so it can be computed while "
        "an all-to-all runs.",
        "Lancet §2.3, §4",
        ("weight gradients", "gradient of weights"),
    ),
}

PAGES = {
    title: tuple(terms.split(", "))
    for title, terms in {
        "Workload": "routing log, traffic matrix, popularity, skew, affinity, all-to-all, dispatch, combine",
        "Cluster": "all-to-all, all-reduce, α–β cost, roofline",
        "Affinity": "affinity, routing log, kept local, placement, replica, bound, all-to-all",
        "Optimise": "knob, placement, slot, replica, RCS, SJF, RGA, REC, matched order, joint order, shared order, two-tier "
        "order, context-coherent, colocation, bound, gap, balancedness, overload factor, kept local, migration, held out, "
        "exposed communication, weight gradient, capacity factor",
        "Timeline": "gate, dispatch, combine, aggregate, all-gather, all-reduce, exchange of sizes, weight gradient, "
        "critical path, bound, "
        "exposed communication, overlap, GPU utilisation, overload factor",
        "What-if": "contention, micro-op, pipeline degree, partition range, exposed communication, overlap, bound",
        "Review": "placement, bound, gap, balancedness, overload factor, kept local, exposed communication, migration, held "
        "out, persistence",
        "Papers": "all-to-all, all-reduce, exposed communication, weight gradient",
        "Launch": "rank, all-to-all, dispatch, combine, overload factor",
    }.items()
}
"""The terms that the page of a title uses, in the order in which a reader meets them."""


def popover(page: str) -> None:
    """The terms of a page behind a quiet button."""
    with st.popover("Terms", icon=":material/menu_book:", type="tertiary"):
        st.markdown(
            "\n\n".join(f"**{name}** {TERMS[name].meaning} :small[:gray[*{TERMS[name].source}*]]" for name in PAGES[page])
        )


STEPS = {
    "Workload": ("workload", "The chart shows how unevenly experts are used in {workload}."),
    "Cluster": ("cluster", "{gpus}: drag one, or edit the table, and every page uses what you drew."),
    "Affinity": ("affinity", "Strong cells: experts that belong on one GPU."),
    "Optimise": ("optimise", "{plans} a proven bound."),
    "Timeline": ("timeline", "See where the plan wins time over its baselines."),
    "What-if": ("what_if", "Move a slider: what is the plan worth then?"),
    "Review": ("review", "Save a plan and it gets a page: what it gains, where it fails, and what others say about it."),
    "Launch": ("launch", "Start runs the plan as a real job on this machine and shows measured times over the predicted ones."),
}
"""The page's file and one sentence on the open inputs, by the title of the page."""


def show(page: str) -> None:
    """The guide's step of a page, if it has one and the tour is on."""
    if page not in STEPS or state.session.tour != "on":
        return
    titles = list(STEPS)
    at = titles.index(page)
    with st.container(horizontal=True, wrap=False, vertical_alignment="center", key="tour"):
        st.caption(f":material/explore: **Guide, {at + 1} of {len(titles)}.** {sentence(page)}", width="stretch")
        if page != titles[-1]:
            file, _ = STEPS[titles[at + 1]]
            st.page_link(f"../pages/{file}.py", label=f"Next: {titles[at + 1]}", icon=":material/arrow_forward:")
        st.button("End guide", type="tertiary", icon=":material/close:", on_click=state.change, kwargs={"tour": "seen"})


def sentence(page: str) -> str:
    """A page's sentence, with the names of the open inputs."""
    workload, cluster = state.session.workloads.get(state.session.workload or ""), state.session.cluster
    types = len({gpu.type for gpu in cluster.gpus}) if cluster else 0
    return STEPS[page][1].format(
        workload=f"“{plain(workload)}”" if workload else "what was recorded",
        plans="Each plan has" if state.session.plan_jobs else "Press Plan it: each plan gets",
        gpus=f"{len(cluster.gpus)} GPUs of {types} type{'s' * (types > 1)}" if cluster else "Nothing drawn yet",
    )
