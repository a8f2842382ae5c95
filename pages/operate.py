"""The Operate page: is the studio healthy?"""

import streamlit as st

from app import failing, operate, tables, widgets
from app.tables import plain, sentence
from app.visitor import people
from engine import units
from engine.errors import InputError
from engine.jobs import runner
from engine.program import command
from engine.upkeep.health import health, line
from engine.webhook import WEBHOOK

SECONDS = 5


def refuse_others() -> None:
    """Stop here for visitors who may not see this: the navigation does not have the page for them, but a login may run out."""
    if not people.may_operate(st.context, st.user):
        st.error("This page is for the operator of the studio.", icon=":material/lock:")
        st.stop()


@failing.fragment(run_every=SECONDS)
def now() -> None:
    """The figures that change while one looks."""
    refuse_others()
    checks = health()
    if all(check.well for check in checks):
        st.success(plain(operate.healthy()), icon=":material/check_circle:")
    else:
        st.error(plain(line(checks)), icon=":material/error:")
    if fault := WEBHOOK.fault:
        st.warning(plain(f"{fault[0].upper()}{fault[1:]}."), icon=":material/webhook:")
    running, ended = operate.jobs()
    st.subheader(f"Jobs · {len(running)} running or waiting", anchor=False)
    for job in running:
        st.caption(f"{plain(job.request.kind)}, started {widgets.describe_time(job.started)}")
        widgets.job_row(job, runner.GRACE)
    if ended:
        alt = "Jobs that have ended, newest first"
        column_config = {"Why": st.column_config.TextColumn(width="large")}
        tables.show(operate.jobs_as_text(ended), hide_index=True, height="content", alt=alt, column_config=column_config)
    present = people.visitors()
    st.subheader(f"Here now · {len(present)}", anchor=False)
    tables.show(operate.visitors_as_text(present), hide_index=True, height="content", alt="Visitors of this studio")


def kept() -> None:
    """Data that takes space, and the part of it that may go."""
    room = operate.room()
    left, right = st.columns(2, gap="large")
    with left:
        st.subheader(f"Data folder · {units.size(room.taken)}", anchor=False)
        st.caption(f"{units.size(room.free)} of {units.size(room.total)} are free on its disk.")
        tables.show(
            operate.uses_as_text(room.uses),
            hide_index=True,
            height="content",
            alt="What takes space, the most first",
            column_config={"Share": st.column_config.ProgressColumn(format="%.0f %%", max_value=100)},
        )
    with right:
        try:
            cleaning = operate.what_would_go()
        except InputError as error:
            st.subheader("Removable", anchor=False)
            st.error(sentence(str(error)), icon=":material/error:")
            return
        st.subheader(f"Removable · {units.size(sum(going.size for going in cleaning.going))}", anchor=False)
        st.caption(
            f"Unused for {cleaning.days} days or more, and nothing that stays refers to it. This page deletes nothing; run:"
        )
        st.code(f"{command()} clean", language=None)
        if cleaning.going:
            tables.show(operate.going_as_text(cleaning), hide_index=True, height="content", alt="What clean would remove")


with st.container(horizontal=True, horizontal_alignment="distribute", vertical_alignment="bottom"):
    st.header("Administration", anchor=False, width="content")
    with st.container(horizontal=True, width="content"):
        people.show()
st.caption(f"Is the studio healthy? Its jobs, who is here, and what takes space. Times are in {operate.zone()}.")
refuse_others()
now()
kept()
