"""What decoding needs of a model: token ids in, hidden states and logits out, a cache that rolls back."""

from typing import Protocol

import torch
from torch import Tensor

from specdec_lab.models.cache import KVCache


class Model(Protocol):
    """A causal language model. It knows tensors; it does not know text, tasks or drafting."""

    name: str
    vocab_size: int
    context_length: int  # most positions it was made for
    device: torch.device
    dtype: torch.dtype
    parameters: int  # all parameters, tied weights counted once
    embedding_parameters: int  # those of them in embedding and head

    @property
    def nbytes(self) -> int:
        """Bytes of its own weights in every layout kept; weights it shares belong to their owner."""
        ...

    def new_cache(self, rows: int, max_len: int) -> KVCache:
        """An empty cache for `rows` sequences of up to `max_len` tokens."""
        ...

    def forward(self, tokens: Tensor, cache: KVCache, parents: Tensor | None = None, behind: int = 0) -> Tensor:
        """Run one block of tokens behind each row's committed prefix.

        tokens: LongTensor [rows, n], rows = cache.rows. parents: LongTensor [rows, n], the parent of each
        token inside the block (a lower index), -1 for the prefix, -2 for padding; None for a chain. Padding
        comes last in a row, so no real token sees it. behind: how many tokens of the same tree are in the cache
        already, not committed; parents then holds theirs, too: [rows, behind + n].
        Returns the final hidden states [rows, n, hidden_size]. Keys and values land behind the prefix and
        stay scratch until `cache.commit` or `cache.advance`.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """The head: [..., hidden_size] to float32 [..., vocab_size]."""
        ...
