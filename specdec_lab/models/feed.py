"""Feeding rows of different lengths through a model in chunks: prefill, and a draft's catching up."""

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec_lab.models.cache import KVCache
from specdec_lab.models.protocol import Model

CHUNK = 256  # tokens of a prefill chunk; bounds the attention mask and the activations of long prompts


def feed(
    model: Model,
    cache: KVCache,
    tokens: Sequence[Sequence[int]],
    chunk: int = CHUNK,
    kept: list[list[Tensor]] | None = None,
) -> Tensor | None:
    """Append `tokens[row]` to each active row of the cache, at most `chunk` at a time, and no more than fit.

    kept: a list per row that gains the hidden states [n, hidden_size] of its tokens, chunk by chunk.
    Returns the hidden state of each row's last token [rows, hidden_size] (undefined for a row given none), or
    None when no row was given any.
    """
    last: Tensor | None = None
    start, longest = 0, max(map(len, tokens), default=0)
    while start < longest:
        # a block takes as many slots of every row: beside a long row, one that is far behind catches up in parts
        end = start + max(1, min(chunk, cache.max_len - max(cache.lengths)))
        pieces = [list(row[start:end]) for row in tokens]
        start = end
        width = max(map(len, pieces))
        block = torch.tensor([piece + [0] * (width - len(piece)) for piece in pieces], device=model.device)
        hidden = model.forward(block, cache)  # [rows, width, hidden_size]
        counts = [len(piece) for piece in pieces]
        cache.advance(counts)
        if kept is not None:
            for states, row, count in zip(kept, hidden, counts, strict=True):
                states.append(row[:count])
        ends = torch.tensor([max(count - 1, 0) for count in counts], device=model.device)
        here = hidden[torch.arange(len(counts), device=model.device), ends]  # [rows, hidden_size]
        fresh = torch.tensor([count > 0 for count in counts], device=model.device)[:, None]
        last = here if last is None else torch.where(fresh, here, last)
    return last
