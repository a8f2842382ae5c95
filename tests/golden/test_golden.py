"""Answers of the command line, held against those recorded: what a refactoring must not change.

After a change that is meant, `python -m tests.golden.record` writes them anew; read the difference before committing it.
"""

import json

import pytest

from tests.golden.stories import ANSWERS, SHARED, STORIES, differences, needs_shared, run_story

MARKS = {
    name: [
        *([pytest.mark.everything] if story.get("everything") else []),
        pytest.mark.skipif(needs_shared(name) and not SHARED.exists(), reason=f"{SHARED} is not there"),
    ]
    for name, story in STORIES.items()
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks) for name, marks in MARKS.items()])
def test_answers_as_recorded(name, tmp_path):
    (tmp_path / "work").mkdir()
    found = json.loads(json.dumps(run_story(name, tmp_path / "work")))
    assert not list(differences(json.loads((ANSWERS / f"{name}.json").read_text()), found))
