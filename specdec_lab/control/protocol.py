"""What a controller is: past steps in, the next plan out. It keeps nothing, so no call leaks into another."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from specdec_lab.trace import Step

MAX_CANDIDATES = 8


@dataclass(frozen=True)
class Plan:
    """How a step drafts, and how strictly it accepts."""

    draft_length: int
    candidates: int
    threshold: float | None  # of the acceptance rule; None where it has none


class Controller(Protocol):
    """Plans each step of one text."""

    @property
    def most(self) -> int:
        """Most candidates it may ask for."""
        ...

    def plan(self, usual: Plan, steps: Sequence[Step]) -> Plan:
        """The next step's plan. usual: what the decoder was set to; steps: the text's so far, oldest first."""
        ...
