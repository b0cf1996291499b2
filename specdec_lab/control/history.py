"""More candidates while verification succeeds, fewer while it fails."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from specdec_lab.control.protocol import MAX_CANDIDATES, Plan
from specdec_lab.errors import require, share, whole
from specdec_lab.trace import Step


@dataclass(frozen=True)
class History:
    """One candidate more a step while the last `window` verifications succeeded often enough, else one less.

    A verification succeeds when one drafted token at least stays; often enough is a share of `threshold`, the
    articles' adaptive_threshold, or more. Candidates start from the decoder's candidate_count and stay within 1 … most.
    """

    threshold: float = 0.7
    window: int = 8
    most: int = MAX_CANDIDATES

    def __post_init__(self) -> None:
        require("adaptive_threshold", self.threshold, share(self.threshold), "0 … 1")
        require("window", self.window, whole(self.window) and self.window >= 1, "an integer >= 1")
        fits = whole(self.most) and 1 <= self.most <= MAX_CANDIDATES
        require("most", self.most, fits, f"an integer 1 … {MAX_CANDIDATES}")

    def plan(self, usual: Plan, steps: Sequence[Step]) -> Plan:
        """The usual plan with as many candidates as the verifications so far have earned."""
        past = [step for step in steps if step.drafted]
        if not past:
            return replace(usual, candidates=min(usual.candidates, self.most))
        last = past[-self.window :]
        success = sum("accepted" in step.fate for step in last) / len(last)
        change = 1 if success >= self.threshold else -1
        return replace(usual, candidates=min(self.most, max(1, past[-1].candidates + change)))
