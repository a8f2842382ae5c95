"""A person's text where markdown is read."""

import re


def plain(text: str) -> str:
    """Nothing in the text is markup."""
    return re.sub(r"([\\`*_{}\[\]()<>#+\-.!|~$:^&=\"'])", r"\\\1", " ".join(text.split()))
