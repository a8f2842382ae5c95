"""What did I record, and can I trust it?"""

import pandas as pd
import streamlit as st

from app import cached, drop_zone, header, kept, model_catalogue, samples, state, tables, widgets
from app.charts import workload as charts
from app.workload import checks, guide, recordings, save, welcome
from engine import units
from engine.balance import over_layers
from engine.workload import RoutingTrace

ROWS_SHOWN = 1000

header.show("Workload", "What did I record, and can I trust it?")

welcomed = state.is_empty() and not state.brings_own()
if welcomed:
    welcome.show()

drop, gallery = st.columns([2, 3], gap="large")
with drop:
    st.subheader("Your recordings", anchor=False)
    drop_zone.show(
        "recordings",
        "Routing logs, expert loads, traffic matrices, a model's config.json",
        "Recordings of SGLang, vLLM, TensorRT-LLM and Megatron-Core, tables, NumPy files; several files of one recording, "
        "or an archive of them (docs/formats.md).",
    )
    st.caption("A red file is above 200 MB: cut it to fewer tokens, or save it as .npz or Parquet, which are smaller.")
    recordings.show()
    guide.button()
    model_catalogue.search("workload")
with gallery:
    st.subheader("Samples", anchor=False)
    st.caption("Real routing of two small models, recorded on held-out text; see sample_traces/README.md.")
    for first in range(0, len(samples.RECORDINGS), 4):
        with st.container(horizontal=True):
            for sample in samples.RECORDINGS[first : first + 4]:
                if st.button(sample.title, key=sample.file, help=sample.text):
                    samples.open_recording(sample)
                    st.rerun()
    st.caption(
        "As large as the real thing, but synthetic: drawn by a power law with some affinity, recorded by nobody."
    )
    if st.button(
        "DeepSeek-R1's size", key="large", help="58 MoE layers × 256 experts, top-8, on four nodes of eight H100"
    ):
        with st.spinner("Drawing 4,096 tokens through 58 layers …"):
            samples.open_large()
        st.rerun()

workload = cached.workload()
if workload is None:
    if welcomed:
        st.info("Drop a recording, or open one of the samples.", icon=":material/info:")
    else:
        st.info("Drop a recording, open one of the samples, or take everything at once:", icon=":material/info:")
        widgets.sample_button()
    st.stop()

inspection = cached.inspection()
with st.container(horizontal=True, horizontal_alignment="distribute"):
    with st.container(horizontal=True, gap="large", width="content"):
        st.metric("Recorded", inspection.title)
        if inspection.tokens is not None:
            st.metric("Tokens", f"{inspection.tokens:,}")
        st.metric("MoE layers × experts", f"{inspection.layers} × {inspection.experts}")
        skew = inspection.balance.factors
        st.metric(
            "Worst skew",
            units.ratio(skew["max"]),
            help=f"busiest expert / mean expert of a layer; over layers {units.ratio(skew['mean'])} in the mean, "
            f"{over_layers(skew)}",
        )
        if inspection.layers > 1:
            st.metric(
                "Skew, p50 – p95",
                f"{units.ratio(skew['p50'])} – {units.ratio(skew['p95'])}",
                help=f"busiest expert / mean expert, of half the layers at most the first, of 95 % at most the second; "
                f"{over_layers(skew)}",
            )
        if inspection.predicted is not None and len(inspection.predicted):
            st.metric(
                "Affinity",
                units.share(float(inspection.predicted.mean())),
                help=f"how often the likeliest next expert is right, given the present one; by chance "
                f"{units.share(1 / inspection.experts)} (ExFlow §III)",
            )
    with st.container(horizontal=True, width="content", vertical_alignment="center"):
        save.popover(workload)
        st.page_link("../pages/optimise.py", label="Next: make a plan", icon=":material/arrow_forward:")

checks.show(workload, inspection.findings)

view = kept.segments(
    "Show", ["Popularity", "Traffic", "Table"], default="Popularity", label_visibility="collapsed", key="workload-view"
)
if view == "Popularity":
    widgets.chart(charts.popularity(workload.load), "popularity")
elif view == "Traffic":
    problem = widgets.needed_problem()
    layer = kept.slider("MoE layer", 0, workload.layers - 1, 0, key="traffic-layer") if workload.layers > 1 else 0
    plan = cached.open_plan()
    placement, whose = widgets.placement_to_show(plan, problem)
    travel = plan.travel if plan is not None and placement is plan.placement else problem.travel
    how = "" if travel is None else f" with {travel.in_words}"
    st.caption(
        f"Bytes of the dispatch all-to-all under {whose}{how}; combine is the same backwards. Sequences are spread "
        "round-robin over the GPUs unless the recording names their ranks."
    )
    widgets.chart(charts.traffic(problem.traffic(placement, travel)[layer], problem.cluster.gpu_names), "traffic")
elif isinstance(workload, RoutingTrace):
    head = workload.experts[:ROWS_SHOWN]
    columns = {f"layer {i}": [" ".join(map(str, row)) for row in head[:, i]] for i in range(workload.layers)}
    st.caption(f"The experts of the first {len(head):,} of {workload.tokens:,} tokens")
    tables.show(pd.DataFrame(columns).rename_axis("token"))
else:
    tables.show(pd.DataFrame(workload.load).rename_axis("layer"))
