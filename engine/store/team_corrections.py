"""Another name and note for a saved plan, by whoever saved it."""

import time

from sqlalchemy import insert, select, update

from engine.errors import InputError
from engine.store import tables
from engine.store.database import Database
from engine.store.team import LONGEST_TEXT, SavedPlan, clean_name, clean_text, find_saved


def correct_saved(db: Database, number: int, name: str, note: str, by: str, login: str | None = None) -> None:
    """Give a saved plan another name and note. What they were stays in the discussion of its reviews, under who changed it.
    Raises InputError for anybody but who saved it."""
    name, note = clean_name(name, "the plan"), clean_text(note, "the note", empty=True)
    before = find_saved(db, number)
    if not is_saver(before, by, login):
        raise InputError(f"only {before.by}, who saved this plan, may change its name and note")
    changes = [
        f"changed the {what} from “{old}” to “{new}”"
        for what, old, new in (("name", before.name, name), ("note", before.note, note))
        if old != new
    ]
    if not changes:
        return
    reviews = select(tables.review.c.id).where(tables.review.c.saved == number)
    row = {"text": "\n".join(changes)[:LONGEST_TEXT], "by": clean_name(by, "you"), "at": time.time(), "place": None}
    with db.writing() as connection:
        saved = tables.saved_plan
        connection.execute(update(saved).where(saved.c.number == number).values(name=name, note=note))
        for review in connection.scalars(reviews).all():
            connection.execute(insert(tables.comment).values(review=review, **row))


def is_saver(saved: SavedPlan, name: str, login: str | None) -> bool:
    """Whether a person is who saved a plan: by their login, by the typed name where there was none."""
    return saved.login == login if login or saved.login else saved.by == name
