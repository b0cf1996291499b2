"""One prompt at a time, beside the plain loop: what an explorer runs, keeps and compares. It knows no widgets.

A Session holds the main model that was loaded last, the drafts that ran with it, the plain loop's reply to every
prompt it was asked for, and the verify-cost curve; so that changing one setting costs one run.
"""

import hashlib
import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pandas as pd
import torch

from specdec_lab import theory
from specdec_lab.acceptance import RULES
from specdec_lab.decoding import Decoder, Generation
from specdec_lab.errors import SettingError, require, require_writable, whole
from specdec_lab.experiment import DRAWS_NOTHING, FLAT, Arm
from specdec_lab.metrics import METRICS, first_difference, summarise
from specdec_lab.models import zoo
from specdec_lab.places import from_root
from specdec_lab.statistics import HOLDS_BACK
from specdec_lab.theory import VerifyCurve, measure_verify_curve
from specdec_lab.trace import Trace
from specdec_lab.whatif import BY_TOKEN, Lever, WhatIf

Decode = Callable[[Sequence[int]], str]
WARM_UP = 8  # tokens
KS = (1, 2, 3, 5, 9, 17, 33)
NOTEBOOK = "02_experiment"  # repeats a run in batch


@dataclass(frozen=True)
class Setting:
    """What is decoded, and how. draft: as zoo.load_drafter takes it; "none" is the plain loop.

    A setting that makes no difference (see `idle`) may have any value. acceptance_threshold: None is the rule's own.
    """

    prompt: str
    task: str = "prose"
    main: str = zoo.BUNDLED
    draft: str = "1:4"
    draft_length: int = 4
    candidate_count: int = 1
    acceptance_rule: str = "lossless"
    acceptance_threshold: float | None = None
    temperature: float = 0.0
    seed: int = 0
    max_new_tokens: int = 64

    @property
    def idle(self) -> dict[str, str]:
        """The settings that make no difference to this one, and why."""
        why = {}
        if self.draft.removeprefix(zoo.HYBRID) in FLAT:
            why["candidate_count"] = f"{self.draft} cannot branch"
        if self.acceptance_rule == "lossless":
            why["acceptance_threshold"] = "lossless decoding has none"
        if self.acceptance_rule == "sequence":
            why["draft_length"] = "the whole text is drafted at once"
        if self.draft == "none":
            names = ("draft_length", "candidate_count", "acceptance_rule", "acceptance_threshold")
            why = dict.fromkeys(names, "nothing is drafted")
        rule = RULES.get(self.acceptance_rule)
        warm = rule is not None and rule.retries is not None  # drafts are drawn even when decoding is greedy
        if self.temperature == 0 and (not warm or self.draft in ("none", *DRAWS_NOTHING)):
            why["seed"] = "nothing is drawn at temperature 0"
        return why

    @property
    def plain(self) -> "Setting":
        """The plain loop on the same prompt; equal for all settings that it answers alike, whatever their task."""
        return Setting(
            self.prompt,
            main=self.main,
            draft="none",
            temperature=self.temperature,
            seed=self.seed if self.temperature else 0,
            max_new_tokens=self.max_new_tokens,
        )

    @property
    def arm(self) -> Arm | None:
        """The way to decode, None for the plain loop; raises SettingError, and UnknownNameError for the rule."""
        if self.draft == "none":
            return None
        names = ("draft_length", "candidate_count", "acceptance_rule", "acceptance_threshold")
        arm = Arm(self.draft, **{name: getattr(self, name) for name in names if name not in self.idle})
        arm.acceptance.require_temperature(self.temperature)
        return arm


class Readable:
    """What holds a main model's `decode`: token ids → text."""

    decode: Decode

    def token(self, index: int) -> str:
        """The text of one token id, as it stands behind another one: some tokenizers drop the first one's space."""
        alone, twice = self.decode([index]), self.decode([index, index])
        return twice[len(alone) :] if twice.startswith(alone) and twice != alone else alone


@dataclass(frozen=True)
class Progress(Readable):
    """What a session is doing, and the text so far, where there is one."""

    doing: str
    made: Generation | None = None
    decode: Decode = str


@dataclass(frozen=True, eq=False)
class Outcome(Readable):
    """A finished run beside the plain loop's reply to the same prompt and seed.

    metrics: metrics.summarise of the two. curve: None until it has been measured.
    """

    setting: Setting
    made: Generation
    plain: Generation
    metrics: dict[str, Any]
    decode: Decode
    curve: VerifyCurve | None = None

    @property
    def trace(self) -> Trace:
        """The run's records."""
        return self.made.trace

    @property
    def differs_at(self) -> int | None:
        """Index of the first token that is not the plain loop's; None where all are the same."""
        return first_difference(self.made.tokens, self.plain.tokens)

    @property
    def prediction(self) -> float | None:
        """theory.speedup of the measured α, c and curve alone; None where it says nothing.

        That is so for what is `unexplained`, and for drafts that hold back.
        """
        alpha, c, coverage = (self.metrics[n] for n in ("acceptance_probability", "draft_cost_ratio", "coverage"))
        if self.curve is None or self.unexplained or None in (alpha, c) or coverage < HOLDS_BACK:
            return None
        return theory.speedup(alpha, self.setting.draft_length, c, self.curve)

    @property
    def levers(self) -> list[Lever]:
        """What would help most, from the trace; empty where there is no what-if."""
        known, rule, threshold = self.whatif, self.setting.acceptance_rule, self.setting.acceptance_threshold
        if known is None:
            return []
        return known.levers(
            self.setting.draft_length, rule, (RULES[rule].threshold or 1.0) if threshold is None else threshold
        )

    @property
    def unexplained(self) -> str:
        """Why theory says nothing of this run; empty where it does."""
        if not any(step.drafted for step in self.trace.steps):
            return "nothing was drafted"
        if any(step.candidates > 1 for step in self.trace.steps):
            return "theory here is of chains, and this is a tree"
        if self.setting.acceptance_rule not in BY_TOKEN:
            return f"theory here is of rules that judge token by token, and {self.setting.acceptance_rule} does not"
        return ""

    @cached_property  # a slider asks for it again and again
    def whatif(self) -> WhatIf | None:
        """What other draft lengths and thresholds would do; None where `unexplained`, and without a curve."""
        if self.curve is None or self.unexplained:
            return None
        return WhatIf.of(self.trace, self.plain.trace, self.curve, self.setting.temperature == 0)


class Session:
    """Runs settings on one machine.

    device, dtype: as zoo.load_main takes them; threads: of torch, None for its default. Raises SettingError.
    machine: the three, as far as they were given.
    """

    def __init__(self, device: str | None = None, dtype: str | None = None, threads: int | None = None) -> None:
        require("threads", threads, threads is None or (whole(threads) and 1 <= threads <= 1024), "an integer 1 … 1024")
        given = {"device": device, "dtype": dtype, "threads": threads}
        self.machine = {name: value for name, value in given.items() if value is not None}
        self._where, self._threads = zoo.placement(device, dtype), threads
        self._main: zoo.Main | None = None
        self._decoders: dict[Arm | None, Decoder] = {}
        self._plain: dict[Setting, Generation] = {}
        self._curves: dict[str, VerifyCurve] = {}

    def run(self, setting: Setting) -> Iterator[Progress | Outcome]:
        """Load what is needed, decode, decode by the plain loop unless that was done; yields what there is on the way.

        The outcome comes as soon as both replies are there, and again once the main model's verify curve is known.
        Closing the iterator stops decoding. Raises SettingError, UnknownNameError, ModelError.
        """
        arm = setting.arm  # validates
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        if self._main is None or self._main.name != setting.main:
            yield Progress(f"loading the main model {setting.main}")
        main = self._load(setting.main)
        if arm is not None and arm not in self._decoders:
            yield Progress(f"loading the draft {setting.draft}")
        decoder, plain_decoder = self._decoder(arm, setting), self._decoder(None, setting)
        made = plain = None
        decode: Decode = main.tokenizer.decode
        yield Progress("reading the prompt")
        for made in self._stream(decoder, setting):
            yield Progress(f"decoding: {len(made.tokens)} tokens", made, decode)
        assert made is not None
        if arm is None:
            self._plain[setting.plain] = made
        elif setting.plain not in self._plain:
            for plain in self._stream(plain_decoder, setting):  # shown as the other was, so that neither waits longer
                yield Progress(f"decoding without a draft, to compare: {len(plain.tokens)} tokens", plain, decode)
            assert plain is not None
            self._plain[setting.plain] = plain
        plain = self._plain[setting.plain]
        found = summarise([made.trace], [plain.trace])
        outcome = Outcome(setting, made, plain, found, decode, self._curves.get(setting.main))
        yield outcome
        if outcome.curve is None:
            yield Progress("measuring what verification costs", made, decode)
            context = min(128, main.model.context_length // 2)
            self._curves[setting.main] = measure_verify_curve(main.model, KS, context, repeats=5)
            yield replace(outcome, curve=self._curves[setting.main])

    def _load(self, name: str) -> zoo.Main:
        if self._main is None or self._main.name != name:
            self._main, self._decoders = None, {}  # before the new ones come
            self._main = zoo.load_main(name, *self._where)
            self._plain = {}
        return self._main

    def _decoder(self, arm: Arm | None, setting: Setting) -> Decoder:
        """The decoder of an arm, warmed up on the prompt; those that draft alike share their draft."""
        assert self._main is not None
        main = self._main
        if arm not in self._decoders:
            alike = (d.drafter for a, d in self._decoders.items() if a and arm and _drafts(a) == _drafts(arm))
            if arm is None:
                made = Decoder(main.model, tokenizer=main.tokenizer, eos=main.eos)
            else:
                drafter = next(alike, None) or zoo.load_drafter(arm.draft, main, **arm.options)
                made = arm.decoder(main, drafter)
            made.generate(
                made.encode(setting.prompt)[-WARM_UP:], max_new_tokens=WARM_UP, temperature=setting.temperature
            )
            self._decoders[arm] = made
        return self._decoders[arm]

    def _stream(self, decoder: Decoder, setting: Setting) -> Iterator[Generation]:
        names = ("temperature", "seed", "max_new_tokens")
        return decoder.stream(setting.prompt, **{name: getattr(setting, name) for name in names})


def _drafts(arm: Arm) -> tuple[Any, ...]:
    return arm.draft, arm.draft_length > 0, tuple(arm.options.items())


# ---- of runs that were kept


def table(outcomes: Sequence[Outcome]) -> pd.DataFrame:
    """One row per run: its settings, every metric that is a number, and whether its tokens are the plain loop's."""
    numbers = [name for name in METRICS if not name.startswith("acceptance_by_position")]
    return pd.DataFrame(
        [
            {
                "run": number,
                **asdict(each.setting),
                **dict.fromkeys(each.setting.idle),
                **{name: each.metrics[name] for name in numbers},
                "predicted_speedup": each.prediction,
                "same_as_plain": each.differs_at is None,
                "text": each.made.text,
            }
            for number, each in enumerate(outcomes, 1)
        ]
    )


def repeat(setting: Setting, folder: Path, machine: Mapping[str, Any] = MappingProxyType({})) -> str:
    """The papermill command that runs a setting again in batch; its prompt goes to a file in the folder.

    machine: as Session.machine. Raises SettingError for the plain loop, which is every run's baseline, and DataError
    where the folder is not writable.
    """
    arm = setting.arm
    if arm is None:
        raise SettingError("draft", "none", "a draft: the plain loop runs beside every one of them")
    line = {"id": "explorer", "task": setting.task, "prompt": setting.prompt}
    text = json.dumps(line, ensure_ascii=False) + "\n"
    file = folder / f"prompt-{hashlib.sha256(text.encode()).hexdigest()[:8]}.jsonl"
    require_writable(file)
    file.write_text(text, encoding="utf-8")
    values: dict[str, Any] = {"task": file.resolve(), "prompts": 1}
    names = ("main", "draft", "draft_length", "max_new_tokens", "temperature", "seed")
    values |= {name: getattr(setting, name) for name in names}
    for name in ("main", "draft"):
        place = Path(values[name]).expanduser()
        values[name] = place.resolve() if place.exists() else values[name]  # papermill runs elsewhere
    lossy = {"acceptance_rule": arm.acceptance_rule, "acceptance_threshold": arm.acceptance_threshold}
    values |= {"candidate_count": arm.candidate_count, **({} if arm.acceptance.lossless else lossy), **machine}
    # -r takes a value as text: a folder that is called 7 stays one
    texts = ("task", "main", "draft", "acceptance_rule", "device", "dtype")
    given = [f"{'-r' if name in texts else '-p'} {name} {shlex.quote(str(value))}" for name, value in values.items()]
    files = (shlex.quote(str(from_root(f"{where}/{NOTEBOOK}.ipynb"))) for where in ("notebooks", "build"))
    return " ".join(["papermill", *files, "-k python3", *given])
