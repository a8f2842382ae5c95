"""A person's own model and the texts for it, as pages that run one ask for them. Texts stay in the tab: they are kept in no
session and written to no disk."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import streamlit as st

from app import failing, kept, state
from app.tables import plain, sentence
from engine import formats, units
from engine.errors import InputError
from engine.formats.source import one_clear_line
from engine.program import how_to_get_models
from engine.recording.own_model import Texts, read_texts
from engine.recording.per_request import Prompt, prompts_in
from engine.runtime.checkpoint import SWITCH, folders

TYPED = Path("typed texts")
"""Stands for a file's name where texts were typed."""


@dataclass(frozen=True)
class OwnTexts:
    """A model's folder, and texts for it as it takes them. title: of the texts"""

    folder: Path
    texts: Texts
    title: str


def choose_folder(key: str) -> Path | None:
    """The chosen one of the folders with models that the operator lists; None if there are none, or no library for them, which
    is said. key: of its widget"""
    if find_spec("transformers") is None or find_spec("tokenizers") is None:
        st.info(plain(f"Models that run here need transformers; {how_to_get_models()}."), icon=":material/download:")
        return None
    listed = folders()
    if not listed:
        st.info(
            f"No model is listed. Start the studio with `{SWITCH}=/models`, a folder with models or one of them: config.json, "
            "tokenizer.json and safetensors files; see docs/operating.md.",
            icon=":material/folder_off:",
        )
        return None
    help = f"the folders that {SWITCH} lists, or that lie in listed ones"
    return Path(kept.selectbox("Model", [str(path) for path in listed], format_func=_title, key=key, help=help, width=420))


def say_sizes(folder: Path) -> None:
    """The model in a folder, in a line; or why it cannot be read."""
    with failing.saying(sentence):
        model = formats.read_model(folder / "config.json")
        weights = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        of = f"{units.size(weights)} of weights" if weights else "no weights, so random ones are drawn"
        st.caption(
            f"{plain(model.name)}: {len(model.moe_layers)} MoE layers × {model.experts} experts, top-{model.experts_per_token} "
            f"· {of}"
        )


def _title(path: str) -> str:
    """The name of a folder: in a download cache of Hugging Face the checkpoint's, elsewhere its own and that of the one
    above."""
    folder = Path(path)
    if folder.parent.name == "snapshots":
        return folder.parent.parent.name.removeprefix("models--").replace("--", "/")
    return "/".join(folder.parts[-2:])


Reader = Callable[[Path, Sequence[Prompt], int], Texts]
"""Makes tokens of texts, by the model's folder and the tokens to generate, see `read_texts`."""


def ask_for_texts(folder: Path, new_tokens: int, key: str, read: Reader = read_texts) -> OwnTexts | None:
    """Texts out of a file or typed, made into tokens; None until there are any, or if the model cannot take them, which is
    said. key: of the widgets"""
    upload, box = st.columns(2, gap="medium")
    with upload:
        file = st.file_uploader(
            "Texts",
            type=["txt", "jsonl"],
            key=f"{key}-file",
            help="One text a line; .jsonl: a text, a list of token ids, or an object with `prompt` or `text` a line.",
        )
    with box:
        typed = st.text_area("or typed, one a line", key=f"{key}-typed", height=136, disabled=file is not None)
    if file is None and not typed.strip():
        state.visit.own_texts = None
        return None
    name = TYPED if file is None else Path(file.name)
    of = f"{folder} {new_tokens} {typed if file is None else file.file_id}"
    if state.visit.own_texts is None or state.visit.own_texts[0] != of:
        with st.spinner("Making tokens of the texts"):
            content = typed.encode() if file is None else file.getvalue()
            try:
                with one_clear_line(name):
                    prompts = prompts_in(name, content)
                answer = read(folder, prompts, new_tokens)
            except InputError as error:
                answer = str(error)
            state.visit.own_texts = of, answer
    answer = state.visit.own_texts[1]
    if isinstance(answer, str):
        st.error(sentence(answer), icon=":material/error:")
        return None
    return OwnTexts(folder, answer, name.stem)
