"""Whether the open recording can be trusted, and a button for what mends it."""

import streamlit as st

from app import cached, state
from app.text import plain
from engine.errors import InputError
from engine.finding import Finding
from engine.formats.remedies import REMEDIES, Remedy, mend, what_was_done
from engine.plan import Placement
from engine.workload import Workload

LEVELS = {
    "ok": (st.success, ":material/check_circle:"),
    "warning": (st.warning, ":material/warning:"),
    "error": (st.error, ":material/error:"),
}


def show(workload: Workload, findings: list[Finding]) -> None:
    """A sentence a finding, the worst first, with a button for what mends it. Open where there is an error, else a button."""
    ranked = _ranked(findings)
    worst = ranked[0].severity
    title, icon = f"Checks: {worst}", LEVELS[worst][1]
    with st.expander(title, expanded=True, icon=icon) if has_error(findings) else st.popover(title, icon=icon):
        named = {finding.remedy for finding in ranked} & set(REMEDIES)  # a file of a newer version may name others
        if sum(REMEDIES[name].automatic for name in named) > 1:
            st.button("Fix all of it", icon=":material/healing:", on_click=_mend_all, args=(workload, findings))
        for finding in ranked:
            remedy = finding.remedy if finding.remedy in named else None
            named.discard(remedy)  # offered once
            _finding(workload, finding, remedy)


def has_error(findings: list[Finding]) -> bool:
    """Whether what was recorded cannot be trusted as it is."""
    return any(finding.severity == "error" for finding in findings)


def _ranked(findings: list[Finding]) -> list[Finding]:
    """The worst first."""
    order = list(LEVELS)
    return sorted(findings, key=lambda finding: -order.index(finding.severity))


def _finding(workload: Workload, finding: Finding, remedy: str | None) -> None:
    show, icon = LEVELS[finding.severity]
    if remedy is None:
        show(plain(finding.message), icon=icon)
        return
    with st.container(horizontal=True, horizontal_alignment="right", vertical_alignment="center"):
        show(plain(finding.message), icon=icon)
        _button(workload, REMEDIES[remedy])


def _button(workload: Workload, remedy: Remedy) -> None:
    ran = _placement_that_ran(workload) if remedy.needs_placement else None
    lacking = remedy.needs_placement and ran is None
    st.button(
        remedy.title(workload),
        key=f"remedy-{remedy.name}",
        icon=":material/healing:",
        disabled=lacking,
        help="Open the plan that ran: drop its file on this page." if lacking else None,
        on_click=_apply,
        args=(remedy, workload, *(() if ran is None else (ran,))),
    )


def _placement_that_ran(workload: Workload) -> Placement | None:
    """That of the plan that counts as deployed, where it has as many layers as the recording."""
    placement = cached.placement_in_use()
    return placement if placement is not None and placement.layers == workload.layers else None


def _apply(remedy: Remedy, workload: Workload, *more: Placement) -> None:
    """Before the page is drawn, so that all of it shows the mended recording."""
    try:
        _open(remedy.apply(workload, *more))
    except InputError as error:
        state.notice(str(error))


def _mend_all(workload: Workload, findings: list[Finding]) -> None:
    try:
        _open(mend(workload, findings))
    except InputError as error:
        state.notice(str(error))


def _open(mended: Workload) -> None:
    state.open_workload(mended)
    state.notice(f"{what_was_done(mended)[-1]} The recording as it was stays in the list of workloads.")
