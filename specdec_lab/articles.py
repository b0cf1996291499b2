"""Settings as the two articles behind this project write them down, read as this package's own.

`decoding_params` becomes an experiment.Arm, `batch_config` decodes prompts in groups. How words are read that other
systems do not have is said here, once: the command line of the articles (inference.py) reads its flags the same way.

* A candidate is a sequence of its own, `draft_length` tokens long, drawn at random: branching `chains`.
* Retries, a temperature of drafts and the articles' threshold belong to the rule `block`, so that they stand for it
  where no rule is named; without any of them decoding is lossless.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Real
from typing import Any, Self

from specdec_lab.acceptance import Acceptance
from specdec_lab.control import MAX_CANDIDATES, History
from specdec_lab.decoding import Decoder, Generation
from specdec_lab.errors import UnknownNameError, require, whole
from specdec_lab.experiment import Arm

BRANCHING = "chains"
MAX_BATCH = 1024
FILL_STRATEGIES = ("sequential",)


def rule_of(rule: str | None, *settings_of_block: Any) -> str:
    """The rule that is meant: the one named, else `block` if any of its settings is given, else lossless."""
    if rule is not None:
        return rule
    return "lossless" if all(setting is None for setting in settings_of_block) else "block"


class _Loads:
    """Dataclasses that are read from a dictionary as it stands."""

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> Self:
        """Read the dictionary; what it leaves out keeps its default.

        Raises UnknownNameError listing the known keys, SettingError for what is no dictionary and as the class does.
        """
        require(cls.__name__, settings, isinstance(settings, Mapping), "a dictionary")
        known = [field.name for field in fields(cls)]  # type: ignore[arg-type]
        for key in settings:
            if key not in known:
                raise UnknownNameError(f"key of {cls.__name__}", key, known)
        return cls(**settings)


@dataclass(frozen=True)
class DecodingParams(_Loads):
    """The second article's `decoding_params`.

    enable_speculative: False is plain decoding, whatever the rest says. draft_model_path: any draft that
    zoo.load_drafter takes. initial_candidates: those of the first step; adaptive_threshold: of control.History, which
    adds one after success, up to 8, and takes one away after failure, down to 1; None leaves them as they are.
    max_retries: of the rule `block`, at its usual threshold; None is lossless decoding. Raises SettingError.
    """

    enable_speculative: bool = True
    draft_model_path: str = "1:4"
    initial_candidates: int = 1
    max_retries: int | None = None
    adaptive_threshold: float | None = None

    def __post_init__(self) -> None:
        require("enable_speculative", self.enable_speculative, isinstance(self.enable_speculative, bool), "true, false")
        path, count = self.draft_model_path, self.initial_candidates
        named = isinstance(path, str) and path.strip() not in ("", "none")
        require("draft_model_path", path, named, "a draft's name, a folder, a GGUF file or a hub id")
        fits = whole(count) and 1 <= count <= MAX_CANDIDATES
        require("initial_candidates", count, fits, f"an integer 1 … {MAX_CANDIDATES}")
        if self.max_retries is not None:
            Acceptance("block", max_retries=self.max_retries)  # validates it
        if self.adaptive_threshold is not None:
            History(self.adaptive_threshold)  # validates it

    def arm(self, draft_length: int = 4) -> Arm:
        """The same as an Arm. draft_length: tokens of each candidate, of which the dictionary says nothing."""
        if not self.enable_speculative:
            return Arm("ngram", 0)  # a draft for which no model is loaded
        return Arm(
            self.draft_model_path,
            draft_length,
            self.initial_candidates,
            BRANCHING,
            acceptance_rule=rule_of(None, self.max_retries),
            max_retries=self.max_retries,
            adaptive_threshold=self.adaptive_threshold,
        )


@dataclass(frozen=True)
class BatchConfig(_Loads):
    """The second article's `batch_config`.

    max_batch_size: prompts decoded together. fill_strategy: which come next; sequential is the order they came in.
    timeout_ms: how long an open batch may wait for more prompts, in milliseconds; a list of prompts is there at once,
    so that nothing ever waits in `generate`. Raises SettingError, and UnknownNameError for another strategy.
    """

    max_batch_size: int = 8
    timeout_ms: float = 50
    fill_strategy: str = "sequential"

    def __post_init__(self) -> None:
        size, wait = self.max_batch_size, self.timeout_ms
        require("max_batch_size", size, whole(size) and 1 <= size <= MAX_BATCH, f"an integer 1 … {MAX_BATCH}")
        number = isinstance(wait, Real) and not isinstance(wait, bool)
        require("timeout_ms", wait, number and 0 <= wait < float("inf"), "a number of milliseconds, >= 0")
        if self.fill_strategy not in FILL_STRATEGIES:
            raise UnknownNameError("fill_strategy", self.fill_strategy, FILL_STRATEGIES)

    def batches(self, prompts: Sequence[Any]) -> Iterator[Sequence[Any]]:
        """The prompts in groups of up to max_batch_size."""
        for start in range(0, len(prompts), self.max_batch_size):
            yield prompts[start : start + self.max_batch_size]

    def generate(
        self, decoder: Decoder, prompts: Sequence[str | Sequence[int]], *, seed: int = 0, **settings: Any
    ) -> list[Generation]:
        """Decode all prompts, group by group; prompt i is seeded with seed + i, as in one batch.

        settings: as in Decoder.stream. Raises SettingError.
        """
        made: list[Generation] = []
        constraint = settings.pop("constraint", None)  # one for all, or a list of one for each
        if isinstance(constraint, Sequence):  # told before the first group is decoded
            allowed = f"one, or one for each of {len(prompts)}"
            require("constraint", f"{len(constraint)} grammars", len(constraint) == len(prompts), allowed)
        for group in self.batches(prompts):
            part = constraint[len(made) : len(made) + len(group)] if isinstance(constraint, Sequence) else constraint
            made += decoder.generate_batch(group, seed=seed + len(made), constraint=part, **settings)
        return made
