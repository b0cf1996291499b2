"""Prompt lookup: draft what followed the last time these tokens stood in the text."""

from collections.abc import Sequence

import numpy as np
import torch

from specdec_lab.drafting.protocol import Drafter, Row, Tree, chains
from specdec_lab.errors import require


class NGram(Drafter):
    """Looks the last n tokens up in prompt and output, longest n first, most recent match first.

    Prompt lookup decoding (github.com/apoorvumang/prompt-lookup-decoding; 2304.04487 for the idea). What it
    drafts is not drawn at random, so q is one-hot.
    """

    name = "ngram"

    def __init__(self, longest: int = 3, shortest: int = 1) -> None:
        require("longest", longest, 1 <= longest <= 16, "1 … 16")
        require("shortest", shortest, 1 <= shortest <= longest, f"1 … longest ({longest})")
        self.longest, self.shortest = longest, shortest

    def propose(self, rows: Sequence[Row], lengths: Sequence[int]) -> Tree:
        """Draft up to lengths[r] tokens for each row; none where nothing matches."""
        drafts = [self._lookup(row.tokens, length) for row, length in zip(rows, lengths, strict=True)]
        width = max(map(len, drafts))
        tokens = torch.zeros(len(rows), width, dtype=torch.long)
        for row, draft in enumerate(drafts):
            tokens[row, : len(draft)] = torch.tensor(draft, dtype=torch.long)
        return chains(tokens, [len(draft) for draft in drafts])

    def _lookup(self, tokens: Sequence[int], length: int) -> list[int]:
        """What followed the match, and where that runs into the end of the text, the same again."""
        text = np.asarray(tokens)
        for n in range(min(self.longest, len(text) - 1), self.shortest - 1, -1):
            windows = np.lib.stride_tricks.sliding_window_view(text[:-1], n)
            hits = np.flatnonzero((windows == text[-n:]).all(1))
            if len(hits):
                after = text[hits[-1] + n :]
                return np.resize(after, length).tolist()
        return []
