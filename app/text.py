"""A person's text where markdown is read."""

import re


def plain(text: str) -> str:
    """Nothing in the text is markup."""
    return re.sub(r"([\\`*_{}\[\]()<>#+\-.!|~$:^&=\"'])", r"\\\1", " ".join(text.split()))


def sentence(text: str) -> str:
    """The same of an error or a summary, as a sentence. What begins with a file, an option or another word that is no word
    stays so."""
    first, *_ = text.split(" ")
    begun = f"{text[:1].upper()}{text[1:]}" if re.fullmatch(r"[a-z]+[,:;]?", first) else text
    return plain(begun if begun.endswith((".", "!", "?")) else f"{begun}.")
