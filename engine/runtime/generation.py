"""Tokens generated greedily by a model of transformers, pass after pass, of several sequences as one batch."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def passes(
    model: "PreTrainedModel",
    texts: Sequence[Sequence[int]],
    new_tokens: int,
    following: torch.Tensor | None = None,
    ends: Sequence[int] = (),
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Run the texts through the model, and then one token more of each at a time, until there are as many new ones as wanted or
    all sequences have ended. Yields, after each pass, the logits of the next tokens, [sequence, vocabulary], and those with
    the largest, int64[sequence]. The last ones are never computed with; with 0 new tokens there is one pass all the same.

    texts: ids of the tokens of each
    following: int64[sequence, new token]; computed with in place of those with the largest logits
    ends: tokens that end a sequence, after which it is padding
    """
    device, longest = model.device, max(map(len, texts))
    ids = torch.zeros((len(texts), longest), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, own in enumerate(texts):  # padding on the left, so that all go on from the last column
        ids[row, longest - len(own) :] = torch.tensor(own)
        mask[row, longest - len(own) :] = 1
    ids, mask, ends = ids.to(device), mask.to(device), torch.tensor(ends, dtype=torch.int64, device=device)
    alive, cache = mask.new_ones(len(texts)), None
    for step in range(max(new_tokens, 1)):
        if step:
            mask = torch.cat([mask, alive[:, None]], dim=1)
        place = (mask.cumsum(dim=1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        with torch.inference_mode():
            output = model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=place,
                past_key_values=cache,
                use_cache=new_tokens > 1,
                logits_to_keep=1,
            )
        logits = output.logits[:, -1]
        best = logits.argmax(dim=-1)
        yield logits, best
        cache, ids = output.past_key_values, (best if following is None else following[:, step])[:, None]
        if len(ends):
            alive = alive & ~torch.isin(ids[:, 0], ends)
            if not alive.any():
                return
