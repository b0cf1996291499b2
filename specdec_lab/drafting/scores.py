"""A draft model's scores over the main model's vocabulary, under the processors that the main model obeys."""

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec_lab.constrain import masked
from specdec_lab.drafting.protocol import Row
from specdec_lab.models.protocol import Model
from specdec_lab.sampling import penalise


def draft_scores(
    model: Model, hidden: Tensor, rows: Sequence[Row], drafted: Tensor, lengths: Sequence[int], vocab_size: int
) -> Tensor:
    """Scores [rows, vocab_size] of the token behind `drafted` [rows, n], of which row r is to draft lengths[r].

    hidden: [rows, hidden_size]. What the draft's head lacks, and what a row's constraint refuses, gets -inf.
    """
    logits, vocabulary = model.logits(hidden), getattr(model, "vocabulary", None)
    scores = torch.full((len(rows), vocab_size), float("-inf"), device=logits.device)
    if vocabulary is None:
        width = min(vocab_size, logits.shape[-1])
        scores[:, :width] = logits[:, :width]
    else:
        scores.index_copy_(1, vocabulary, logits)
    if rows[0].sampling.repetition_penalty != 1:
        seen = [row.tokens + tokens for row, tokens in zip(rows, drafted.tolist(), strict=True)]
        scores = penalise(scores, seen, rows[0].sampling.repetition_penalty)
    if any(row.constraint for row in rows):
        allowed = [
            row.constraint.allowed(path) if row.constraint and len(path) < length else None
            for row, path, length in zip(rows, drafted.tolist(), lengths, strict=True)
        ]
        scores = masked(scores, allowed)
    return scores
