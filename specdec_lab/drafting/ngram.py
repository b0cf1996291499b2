"""Prompt lookup: draft what followed the last time these tokens stood in the text."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from specdec_lab.drafting.protocol import Drafter, Row, Tree, chains
from specdec_lab.errors import require, whole


@dataclass(frozen=True)
class Match:
    """What the end of a text was found to repeat."""

    length: int  # tokens that agree, up to the longest looked for; 0 = nothing found. The longer, the surer
    draft: tuple[int, ...]  # the tokens behind them


class NGram(Drafter):
    """Looks the last n tokens up in prompt and output, longest n first, most recent match first.

    Prompt lookup decoding (github.com/apoorvumang/prompt-lookup-decoding; 2304.04487 for the idea). What it
    drafts is not drawn at random, so q is one-hot. Each token of a text is indexed once, so that a step takes the
    same time at its end as at its beginning.
    """

    name = "ngram"

    def __init__(self, longest: int = 8, shortest: int = 1) -> None:
        require("longest", longest, whole(longest) and 1 <= longest <= 16, "1 … 16")
        require("shortest", shortest, whole(shortest) and 1 <= shortest <= longest, f"1 … longest ({longest})")
        self.longest, self.shortest = longest, shortest
        self._texts: list[_Index] = []  # of each row

    def start(self, rows: Sequence[Row], max_len: int, hidden: Sequence[torch.Tensor] = ()) -> None:
        """New sequences; forget the old ones."""
        self._texts = [_Index(self.longest, self.shortest) for _ in rows]

    def propose(self, rows: Sequence[Row], lengths: Sequence[int]) -> Tree:
        """Draft up to lengths[r] tokens for each row; none where nothing matches."""
        drafts = [match.draft for match in self.matches(rows, lengths)]
        width = max(map(len, drafts))
        tokens = torch.zeros(len(rows), width, dtype=torch.long)
        for row, draft in enumerate(drafts):
            tokens[row, : len(draft)] = torch.tensor(draft, dtype=torch.long)
        return chains(tokens, [len(draft) for draft in drafts])

    def matches(self, rows: Sequence[Row], lengths: Sequence[int]) -> list[Match]:
        """The longest match of each row with a draft of up to lengths[r] tokens.

        Where the match runs into the end of the text the draft goes round; it ends with an end of sequence, or before
        the first token that the row's constraint refuses.
        """
        assert len(self._texts) == len(rows), "start() comes first"
        return [self._match(r, row, length) for r, (row, length) in enumerate(zip(rows, lengths, strict=True))]

    def _match(self, index: int, row: Row, length: int) -> Match:
        n, after = self._texts[index].find(row.tokens)
        if n == 0:
            return Match(0, ())
        draft = np.resize(row.tokens[after : after + max(length, 1)], length).tolist()
        ends = next((i + 1 for i, token in enumerate(draft) if token in row.eos), length)
        return Match(n, tuple(_allowed(draft[:ends], row)))

    def drop(self, row: int) -> None:
        """Row `row` has finished; the last row takes its index."""
        self._texts[row] = self._texts[-1]
        self._texts.pop()


def _allowed(draft: list[int], row: Row) -> list[int]:
    """The draft up to the first token that the row's constraint refuses."""
    if row.constraint is not None:
        for i, token in enumerate(draft):
            if not row.constraint.allowed(draft[:i])[token]:
                return draft[:i]
    return draft


class _Index:
    """Where each n-gram of one growing text ended last, for every n from shortest to longest."""

    def __init__(self, longest: int, shortest: int) -> None:
        self.longest, self.shortest = longest, shortest
        self._behind: dict[tuple[int, ...], int] = {}  # n-gram -> the position behind its last occurrence
        self._known = 0  # tokens whose n-grams are in it

    def find(self, tokens: Sequence[int]) -> tuple[int, int]:
        """(n, the position behind the last earlier occurrence of the last n tokens) for the largest n; (0, 0)."""
        for end in range(self._known + 1, len(tokens)):  # what the text ends with has nothing behind it yet
            for n in range(self.shortest, min(self.longest, end) + 1):
                self._behind[tuple(tokens[end - n : end])] = end
        self._known = max(self._known, len(tokens) - 1)
        for n in range(min(self.longest, len(tokens) - 1), self.shortest - 1, -1):
            if after := self._behind.get(tuple(tokens[-n:])):
                return n, after
        return 0, 0
