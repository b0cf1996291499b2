"""Greedy decoding against transformers, token for token: every draft, task and draft length."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from specdec_lab.decoding import Decoder
from specdec_lab.metrics import first_difference
from specdec_lab.models import zoo
from specdec_lab.tasks import load_prompts

TIE = 1e-3  # a top-2 margin below this is a tie: another order of summation may turn it


@dataclass(frozen=True)
class Check:
    """One text of one setting against the reference. `margin` is the reference's top-2 margin at `diverges`."""

    draft: str
    draft_length: int
    task: str
    prompt_id: str
    tokens: int
    diverges: int | None = None
    margin: float | None = None

    @property
    def verdict(self) -> str:
        """ "equal", "tie" (differs where the reference itself is undecided) or "WRONG"."""
        if self.diverges is None:
            return "equal"
        return "tie" if self.margin is not None and self.margin < TIE else "WRONG"


def verify(
    main: zoo.Main,
    reference: Any,
    drafts: Sequence[str] = ("1:2", "1:3", "1:4", "ngram"),
    draft_lengths: Sequence[int] = (1, 4, 8),
    tasks: Sequence[str] = ("json", "code", "prose"),
    prompts: int = 20,
    max_new_tokens: int = 64,
    tick: Callable[[int], Any] = lambda count: None,
) -> list[Check]:
    """Compare every setting with `reference`, a transformers model; tick(1) is called after each text."""
    decoders = [("none", 0, _decoder(main, "none", 0))]
    decoders += [(name, length, _decoder(main, name, length)) for name in drafts for length in draft_lengths]
    checks = []
    for task in tasks:
        for row in load_prompts(task, prompts):
            ids = decoders[0][2].encode(row.prompt)
            expected = generate(reference, ids, max_new_tokens, main.eos)
            for name, length, decoder in decoders:
                got = decoder.generate(ids, max_new_tokens=max_new_tokens).tokens
                where = first_difference(got, expected)
                margin = None if where is None else _margin(reference, [*ids, *expected[:where]])
                checks.append(Check(name, length, task, row.id, len(expected), where, margin))
                tick(1)
    return checks


def generate(model: Any, ids: Sequence[int], max_new_tokens: int, eos: Sequence[int], **settings: Any) -> list[int]:
    """New tokens of transformers' own greedy `generate`."""
    tokens = torch.tensor([list(ids)], device=model.device)
    with torch.inference_mode():
        out = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            eos_token_id=list(eos) or None,
            pad_token_id=eos[0] if eos else 0,
            **settings,
        )
    return out[0, len(ids) :].tolist()


@torch.inference_mode()
def _margin(model: Any, ids: Sequence[int]) -> float:
    top = model(torch.tensor([list(ids)], device=model.device)).logits[0, -1].topk(2).values
    return float(top[0] - top[1])


def _decoder(main: zoo.Main, name: str, length: int) -> Decoder:
    return Decoder(main.model, zoo.load_drafter(name, main), length, main.tokenizer, eos=main.eos)


def table(checks: Sequence[Check]) -> str:
    """Counts per draft and draft length, then one line per text that differs."""
    lines = [f"{'draft':8}{'length':>7}{'texts':>7}{'tokens':>8}{'equal':>7}{'tie':>5}{'WRONG':>7}"]
    for name, length in dict.fromkeys((check.draft, check.draft_length) for check in checks):
        part = [check for check in checks if (check.draft, check.draft_length) == (name, length)]
        counts = [sum(check.verdict == verdict for check in part) for verdict in ("equal", "tie", "WRONG")]
        tokens = sum(check.tokens for check in part)
        lines.append(f"{name:8}{length:7}{len(part):7}{tokens:8}{counts[0]:7}{counts[1]:5}{counts[2]:7}")
    for check in checks:
        if check.diverges is not None:
            lines.append(
                f"{check.verdict}: {check.draft} length {check.draft_length}, {check.task} {check.prompt_id}, "
                f"token {check.diverges}, top-2 margin {check.margin:.2e}"
            )
    return "\n".join(lines)
