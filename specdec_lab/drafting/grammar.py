"""Drafts for nothing: the tokens that a grammar forces (its jump-forward decoding, as in SGLang, 2312.07104)."""

from collections.abc import Sequence

import torch

from specdec_lab.drafting.protocol import Drafter, Row, Tree, chains


class GrammarDrafter(Drafter):
    """Drafts as long as a row's constraint allows a single token; nothing in a row without a constraint.

    What it drafts is not drawn at random, so q is one-hot; p is, too, so all of it is accepted.
    """

    name = "grammar"

    def propose(self, rows: Sequence[Row], lengths: Sequence[int]) -> Tree:
        """Draft up to lengths[r] tokens for each row; none where there is a choice."""
        drafts = [
            row.constraint.forced(most=length) if row.constraint else []
            for row, length in zip(rows, lengths, strict=True)
        ]
        tokens = torch.zeros(len(rows), max(map(len, drafts)), dtype=torch.long)
        for row, draft in enumerate(drafts):
            tokens[row, : len(draft)] = torch.tensor(draft, dtype=torch.long)
        return chains(tokens, [len(draft) for draft in drafts])
