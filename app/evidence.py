"""Measured times for the open model and cluster, chosen where nobody chose others."""

from app import cached, state
from app.state.stored import DATASHEET
from engine.costs import choice

KEY = "evidence"
"""Key of the choice that holds the model and cluster that this was last looked at for, and True if the tables were taken."""


def choose() -> None:
    """Take the measured tables of a model and cluster just opened, and the way of travelling that they are of, and say so.

    They are given up where they have no times of what is opened next. A person's own choice stays, and so does a plan's.
    """
    cluster, model = state.session.cluster, state.session.model
    if cluster is None or model is None:
        return
    of = f"{cluster.digest} {model.name}"
    seen, taken = state.session.choices.get(KEY, (None, False))
    if seen == of:
        return
    now, found = state.session.cost, choice.measured(cluster, model)
    takes = found is not None and now == DATASHEET and state.session.travel is None and cached.open_plan() is None
    gives_up = taken and found is None and choice.why_not(choice.from_dict(now), cluster, model) is not None
    if takes:
        state.update(cost=choice.to_dict(found.cost), travel=found.travel)
        state.visit.notice = f"Times come from {found.words}. Cluster has other sources, Optimise other ways of travelling"
    elif gives_up:
        state.update(cost=DATASHEET, travel=None)
        state.visit.notice = f"{choice.short(now).capitalize()} has no times of {cluster.name}: the datasheet is used"
    state.keep_choice(KEY, (of, takes or (taken and not gives_up)))
