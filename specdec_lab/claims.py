"""What the two articles behind this project claim, and what each meaning of "acceptance rate" allows.

Neither says what its rate is a share of. Every meaning has a ceiling for the speed-up that holds whatever drafts and
verification cost, as a step is never cheaper than a plain one; of several candidates, for independent draws. It knows
no results; costs are handed in.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from specdec_lab import theory
from specdec_lab.errors import require, share, whole
from specdec_lab.theory import VerifyCurve

TEXT = 64  # tokens of a text, where costs count


@dataclass(frozen=True)
class Claim:
    """A line of the articles' tables: both have the scenario, speed-up and rate, the second the tokens/s, too."""

    task: str
    speedup: float
    acceptance: float
    plain: float  # tokens/s
    drafting: float

    @property
    def least(self) -> float:
        """The smallest speed-up that rounds to the claimed one."""
        return self.speedup - 0.05


CLAIMS = (
    Claim("json", 3.8, 0.891, 1200, 4560),
    Claim("code", 3.0, 0.623, 850, 2550),
    Claim("prose", 1.8, 0.176, 1500, 2700),
)
HARDWARE = {"article 1": "4 GPUs", "article 2": "4 × A100"}
BEST_RATIO = "1:3"
RANGES = {"draft_length": (8, 32), "candidate_count": (2, 8), "acceptance_threshold": (0.5, 0.9)}  # said to be optimal
MEMORY = (0.30, 0.50)  # growth
UNMEASURED = (  # by any sweep of this package
    "run-to-run spread of 5–15 %, below 5 % with fixed seeds and isolated resources",
    "batches of 8 raise GPU utilisation from 65 % to 92 % without noticeable latency",
    "3× at a quality loss below 0.5 % (cloud providers)",
    "more than 95 % of candidates verified (a goal)",
)


@dataclass(frozen=True)
class Example:
    """The articles' example setting. tries: of a draft of the whole text, their max_retries. Raises SettingError."""

    draft_length: int = 16
    candidate_count: int = 4
    threshold: float = 0.7
    tries: int = 3

    def __post_init__(self) -> None:
        for name in ("draft_length", "candidate_count", "tries"):
            value = getattr(self, name)
            require(name, value, whole(value) and 1 <= value <= 64, "an integer 1 … 64")
        require("threshold", self.threshold, share(self.threshold), "0 … 1")


@dataclass(frozen=True)
class Meaning:
    """One reading of "acceptance rate", and the speed-up that a rate allows at most.

    alone: with one candidate (one try) whatever it costs; several: with the example's candidates (tries);
    costing: alone, at a draft's c and a curve of what verification costs, positions being alike (2211.17192).
    """

    name: str
    why: str
    alone: Callable[[float, Example], float]
    several: Callable[[float, Example], float]
    costing: Callable[[float, Example, float, VerifyCurve], float]


def _best(rate: float, how: Example, c: float, curve: VerifyCurve) -> float:
    return theory.speedup(rate, theory.best_draft_length(rate, c, curve), c, curve)


def _of_length(rate: float, how: Example) -> float:
    return 1 + rate * how.draft_length


def _of_candidates(rate: float, how: Example) -> float:
    return 1 + min(1.0, how.candidate_count * rate) * how.draft_length


def _length_costing(rate: float, how: Example, c: float, curve: VerifyCurve) -> float:
    return _of_length(rate, how) / (how.draft_length * c + curve(how.draft_length + 1))


def _of_texts(rate: float, how: Example) -> float:
    return theory.most_tokens(rate)


def _of_tries(rate: float, how: Example) -> float:
    return theory.most_tokens(1 - (1 - rate) ** how.tries)


def _text_costing(rate: float, how: Example, c: float, curve: VerifyCurve) -> float:
    return 1 / (1 - rate + c + curve(TEXT + 1) / TEXT)


MEANINGS = (
    Meaning(
        "α (accepted / tried)",
        "a token behind a rejection is no trial (arXiv 2211.17192). A step has one rejection per candidate at most, so "
        "K candidates bring at most 1 + K α/(1 − α) tokens a main forward, one 1/(1 − α)",
        lambda rate, how: theory.most_tokens(rate),
        lambda rate, how: theory.most_tokens(rate, how.candidate_count),
        _best,
    ),
    Meaning(
        "Σ min(p, q)",
        "the mean overlap of both distributions over drafted tokens, of which no more stay; where positions are alike "
        "it is α (arXiv 2211.17192, corollary 3.6). K independent draws keep at most K times as much, as they hold a "
        "token with at most K q (arXiv 2310.15141)",
        _of_length,
        _of_candidates,
        _best,
    ),
    Meaning(
        "accepted / drafted",
        "tokens behind a rejection count as drafted (arXiv 2302.01318): of γ drafted, rate · γ stay, and one more "
        "token comes of each main forward",
        _of_length,
        _of_candidates,
        _length_costing,
    ),
    Meaning(
        "drafts kept whole",
        "the articles' rule on drafts of γ tokens: kept, one brings γ + 1 tokens, else one token; a draft that is "
        "drawn anew costs a main forward of its own, so retries add nothing",
        _of_length,
        _of_candidates,
        _length_costing,
    ),
    Meaning(
        "texts kept whole",
        "the articles' listing drafts the whole text; what is refused is decoded in full, so of texts of one length at "
        "least 1 − rate of the time stays. Several: of single tries, n of which keep 1 − (1 − rate)ⁿ of the texts",
        _of_texts,
        _of_tries,
        _text_costing,
    ),
)


@dataclass(frozen=True)
class Ceiling:
    """What one meaning allows a claim; costing is None without measured costs."""

    claim: Claim
    meaning: Meaning
    alone: float
    several: float
    costing: float | None

    @property
    def verdict(self) -> str:
        """Whether the claimed speed-up can be, under that meaning."""
        if self.several < self.claim.least:
            return "impossible"
        if self.alone < self.claim.least:
            return "impossible for one candidate or try"
        dear = self.costing is not None and self.costing < self.claim.least
        return "not at our costs with one candidate" if dear else "possible"


def ceilings(how: Example, costs: dict[str, tuple[float, VerifyCurve]] | None = None) -> Iterator[Ceiling]:
    """Every claim under every meaning. costs: c and the verify-cost curve by task, where they were measured."""
    for claim in CLAIMS:
        known = (costs or {}).get(claim.task)
        for meaning in MEANINGS:
            costing = meaning.costing(claim.acceptance, how, *known) if known else None
            alone, several = meaning.alone(claim.acceptance, how), meaning.several(claim.acceptance, how)
            yield Ceiling(claim, meaning, alone, several, costing)
