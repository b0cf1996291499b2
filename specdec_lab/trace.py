"""Raw records of decoding: what was drafted, what became of it, how long each part took. Nothing derived."""

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

FATES = ("rejected", "accepted", "untried")
KINDS = ("plain", "recovered", "bonus", "refused")  # refused: nothing is emitted, the draft is drawn anew


@dataclass(slots=True)
class Step:
    """One draft/verify step of one row. Lists run over the drafted nodes, in topological order.

    p, largest_p and entropy speak of the main model's distribution at the node's place (after processors; at
    temperature 1 when decoding is greedy). q and overlap speak of the distributions that decide: for greedy
    decoding both are one-hot, so q is 1 and overlap is 0 or 1.
    """

    drafted: list[int]  # token ids
    parents: list[int]  # index of the parent node in this step, -1 = the last committed token
    p: list[float]  # main model's probability of the drafted token
    q: list[float]  # probability with which the drafter drew it
    overlap: list[float]  # Σ min(p, q) over the vocabulary
    largest_p: list[float]
    entropy: list[float]  # nats
    fate: list[str]  # one of FATES
    next_token: int
    next_kind: str  # one of KINDS
    next_p: float
    next_largest_p: float
    next_entropy: float
    planned: int  # nodes asked for, after length limits
    active: int  # rows decoded together in this step
    emitted: int = 0  # tokens the user gets of this step, after EOS, stop strings and length limits cut it
    draft_s: float = 0.0  # seconds; the whole step's, shared by `active` rows
    verify_s: float = 0.0  # the main model's forward and head
    other_s: float = 0.0  # acceptance, commit, records
    candidates: int = 1  # asked for

    @property
    def accepted(self) -> list[int]:
        """The drafted tokens that stay, in order."""
        return [token for token, fate in zip(self.drafted, self.fate, strict=True) if fate == "accepted"]


@dataclass(slots=True)
class Trace:
    """One decoded sequence."""

    prompt_tokens: int
    prefill_s: float = 0.0  # the main model's, shared by the batch
    draft_prefill_s: float = 0.0
    steps: list[Step] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)  # as emitted, the EOS token included
    finish: str = ""  # "eos", "stop", "length" or "context"
    memory_bytes: int = 0  # CUDA: the allocator's peak; CPU: weights in all layouts and KV caches, of both models

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; `from_dict` reads it back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> "Trace":
        """The trace that `to_dict` wrote."""
        steps = [Step(**step) for step in record["steps"]]
        return cls(**{**record, "steps": steps})


def now(device: torch.device) -> float:
    """Seconds on a monotonic clock, after the device has finished what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
