"""The open session of a browser tab. Nothing else names keys of `st.session_state`, except a widget its own.

`session.x` reads a field that is kept: it is stored in the data folder under a token in the address (`address`), so that a
reload, another tab or a restarted server finds the session as it was. `change` and `update` write such fields, as do the
functions of `changes`. `visit.x` is a field that ends with the tab; it is read and assigned.
"""

# ruff: noqa: F401  names that this package offers
from app.state.address import (
    asked_link,
    begin_anew,
    change,
    keep_older,
    open_newer,
    restore,
    store_again,
    update,
    was_overtaken,
    write_link,
)
from app.state.changes import (
    add_cost_source,
    add_imported,
    add_launch_job,
    add_plan_job,
    add_recording,
    add_saved,
    begin_tour,
    forget_choices,
    graph,
    is_empty,
    keep_choice,
    name_plan,
    open_cluster,
    open_graph,
    open_pairs,
    open_serving,
    open_step,
    open_workload,
    others,
    person,
    remember_config,
    remember_model,
    remove_plan,
    remove_workload,
    restore_plan,
    serving,
    serving_of_model,
    set_study_job,
    step_of_model,
    study_jobs,
    take_plan,
)
from app.state.fields import TYPED, ReviewVisit, session, visit
from app.state.stored import DATASHEET
