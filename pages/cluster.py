"""The Cluster page: the hardware, drawn or edited as a table."""

import streamlit as st

from app import header, kept, state, widgets
from app.cluster import board, engines, measuring, table

actions = header.show("Cluster", "What do I have? Draw it, or edit the table; each follows the other.")

cluster = state.session.cluster
# The gallery goes once something is drawn, and then stays away: the board is not to jump while a person draws.
newcomer = cluster is None and state.visit.drawn[0] == 0
with actions:
    if not newcomer:
        # Another key with every cluster that is opened, which closes it.
        with st.popover("Presets", icon=":material/grid_view:", key=f"presets-{state.visit.edit_round}"):
            board.gallery()
    with st.popover("Import", icon=":material/upload_file:", help="files, nvidia-smi, nccl-tests, or this machine's GPUs"):
        board.import_panel()
    if cluster is None:
        widgets.sample_button("secondary")
# One place whatever is in it: where the board had another, the browser would draw it anew, and an edit under way would be lost.
with st.container():
    # Also where it stays empty: its gap would push the board down between a person's first and second drag.
    with st.container(horizontal=True, vertical_alignment="center"):
        if cluster is not None:
            table.offer_nvlink(cluster)
    if newcomer:
        st.info("No cluster is open yet. Choose a preset, import yours, or draw one below.", icon=":material/info:")
        board.gallery()
drawing = st.container()
figures, room, file = table.line()
# Before all that takes time: a run that ends early, as the next edit begins one, has to have taken up the edit before.
with drawing:
    board.board(cluster, room)
if cluster is None:
    st.stop()
table.totals(cluster, figures, file)

inventory, between, times, trusted = st.tabs(
    [
        ":gray[:material/table_rows: Inventory]",
        ":gray[:material/hub: Links between nodes]",
        ":gray[:material/timer: Costs]",
        ":gray[:material/verified: Trust]",
    ]
)
with inventory:
    table.show(cluster)
with between:
    table.speeds(cluster)
    measuring.show_pairs()
with times:
    st.caption("Every simulated time uses these costs; each page names them.")
    measuring.choose_costs(cluster, state.session.model)
    measuring.calibration_panel(cluster, state.session.model)
with trusted:
    measuring.show_trust()
    if kept.toggle("Compare whole engines with measurements", key="engines-shown"):
        engines.show()
