"""Docstrings and comments are in plain English: the habits that made readers translate stay out."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MOST = {"what": 2.0, "whose": 0.4, "beside": 0.1}
"""Uses of a word per thousand; networkx has 0.1, 0.2 and 0.0."""
OPENERS = re.compile(r"(Of|What|Whether|Where|How|Which|Whose)\b")
"""First words of fragments; a docstring begins with the thing itself, or with a verb."""
STATEMENTS = ("body", "orelse", "finalbody", "handlers", "cases")
"""The fields of a statement with further ones inside."""
STRING = r"Q{3}(?:\\.|[^\\])*?Q{3}|Q(?:\\.|[^Q\\\n])*Q"
"""A string, with Q for its kind of quotes."""
STRING_OR_COMMENT = re.compile("|".join([STRING.replace("Q", '"'), STRING.replace("Q", "'"), r"(#[^\n]*)"]), re.DOTALL)
WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def docstrings(source: str) -> Iterator[str]:
    """Docstrings of modules, classes and functions, and the texts below constants and fields."""
    ahead = [ast.parse(source)]
    while ahead:
        node = ahead.pop()
        if isinstance(node, WITH_DOCSTRING) and (text := ast.get_docstring(node)):
            yield text
        if isinstance(node, ast.Module | ast.ClassDef):
            for part in node.body[1:]:
                if isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant) and isinstance(part.value.value, str):
                    yield part.value.value
        for field in STATEMENTS:  # expressions, most of the tree, have none
            ahead += getattr(node, field, ())


def comments(source: str) -> Iterator[str]:
    """The comments of a file; strings, which may have a `#` too, are stepped over."""
    if "#" in source:
        yield from filter(None, STRING_OR_COMMENT.findall(source))


@pytest.mark.parametrize("folders", [("engine",), ("app", "pages"), ("tests",)], ids="+".join)
def test_prose_is_plain(folders):
    words, fragments = Counter(), []
    for file in (file for folder in folders for file in (ROOT / folder).rglob("*.py")):
        source = file.read_text(encoding="utf-8")
        told = list(docstrings(source))
        fragments += [f"{file.relative_to(ROOT)}: {text.splitlines()[0]}" for text in told if OPENERS.match(text)]
        words.update(word for text in (*told, *comments(source)) for word in re.findall(r"[a-z']+", text.lower()))
    often = {word: 1000 * words[word] / words.total() for word in MOST}
    assert all(often[word] <= most for word, most in MOST.items()), often
    assert not fragments, "\n".join(fragments)
