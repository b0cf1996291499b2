"""Chains from a draft model: its scores over the main model's vocabulary, and token after token chosen from them."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from specdec_lab.constrain import masked
from specdec_lab.drafting.protocol import Row, Tree, chains
from specdec_lab.models.protocol import Model
from specdec_lab.sampling import distribution, draw, penalise, uniforms


def draft_chain(
    model: Model,
    rows: Sequence[Row],
    lengths: Sequence[int],
    vocab_size: int,
    state: Tensor,
    follow: Callable[[Tensor, int], Tensor],
    confidence: float = 0.0,
) -> Tree:
    """A chain of up to lengths[r] tokens for each row: drawn from q when sampling, arg-max and one-hot when greedy.

    state: the draft's hidden state [rows, hidden_size] behind the root; follow(tokens [rows], i): that behind token i.
    confidence: a chain ends before the product of the draft's largest probabilities falls below this; the token that
    is about to be drawn has no say in that, so q stays what it was. Nothing is drafted behind an end of sequence.
    """
    sampling, width, device = rows[0].sampling, max(lengths), state.device
    eos = torch.tensor(sorted(rows[0].eos), dtype=torch.long, device=device)
    u = None if sampling.greedy else uniforms([row.generator for row in rows], lengths, device)
    sure, ends = torch.ones(len(rows), device=device), torch.tensor(lengths, device=device)
    tokens = torch.zeros(len(rows), width, dtype=torch.long, device=device)
    q: list[Tensor] = []
    for i in range(width):
        scores = draft_scores(model, state, rows, tokens[:, :i], lengths, vocab_size)
        if u is not None:
            q.append(distribution(scores, sampling))
        if confidence:
            sure *= (scores.softmax(-1) if u is None else q[-1]).amax(-1)
            ends = torch.where(sure < confidence, ends.clamp(max=i), ends)
            if int(ends.max()) <= i:
                return chains(tokens[:, :i], ends.tolist(), torch.stack(q[:i], 1) if i and q else None)
        tokens[:, i] = scores.argmax(-1) if u is None else draw(q[-1], u[:, i])
        ends = torch.where(torch.isin(tokens[:, i], eos), ends.clamp(max=i + 1), ends)
        if int(ends.max()) <= i + 1:
            return chains(tokens[:, : i + 1], ends.tolist(), torch.stack(q, 1) if q else None)
        state = follow(tokens[:, i], i)
    return chains(tokens, ends.tolist(), torch.stack(q, 1) if q else None)


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
