"""Experiments: what is run, side by side with its own baseline; where results go; how a killed sweep resumes.

A Block is the unit of work and of storage: one main model, one task, some arms, and the plain baseline between
them, prompt by prompt in one process. Its results are one part file, named by the hash of all that decides them.
Rows hold raw counts and times; every ratio is defined in metrics. It knows no plots.
"""

import fcntl
import hashlib
import json
import os
import sys
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from specdec_lab.acceptance import Acceptance
from specdec_lab.constrain import Grammar
from specdec_lab.control import MAX_CANDIDATES, History
from specdec_lab.decoding import MAX_DRAFT, MAX_NODES, Decoder, Generation
from specdec_lab.drafting import Drafter
from specdec_lab.drafting.tree import BRANCHINGS, DRAWN, known_branching
from specdec_lab.errors import DataError, SettingError, SpecdecError, require
from specdec_lab.metrics import Totals, first_difference, position_counts, repeated_ngrams, totals, tried
from specdec_lab.models.feed import CHUNK, feed
from specdec_lab.models.protocol import Model
from specdec_lab.provenance import provenance
from specdec_lab.sampling import Sampling
from specdec_lab.statistics import TEXT, TOTALS, compare, quality_change, summary
from specdec_lab.tasks import Prompt, get_task, load_prompts, score
from specdec_lab.theory import measure_verify_curve

if TYPE_CHECKING:
    from specdec_lab.models.zoo import Main

__all__ = [
    "Arm",
    "Block",
    "Scorer",
    "compare",
    "grid",
    "load",
    "mean_nll",
    "quality_change",
    "read_part",
    "run_block",
    "summary",
    "sweep",
]

SCHEMA = 3  # version of the rows and of how they are measured; part of every key
WARM_UP = 16  # tokens
DRAWS_NOTHING = ("ngram", "grammar")  # drafts that come again where they are refused
FLAT = (*DRAWS_NOTHING, "parallel")  # drafts that cannot branch
POLL = 0.5  # seconds between looks at blocks that other workers hold


def _whole(field: str, value: Any, low: int, high: int | None = None) -> None:
    ok = isinstance(value, int) and not isinstance(value, bool) and value >= low and (high is None or value <= high)
    require(field, value, ok, f"an integer >= {low}" if high is None else f"an integer {low} … {high}")


@dataclass(frozen=True)
class Arm:
    """One way to decode. draft: a name that zoo.load_drafter takes; draft_length 0 is plain decoding again.

    candidate_count and branching: see drafting.tree; None is chains for rules that keep or refuse a draft as a whole,
    else dynamic. acceptance_rule … draft_temperature: see acceptance.Acceptance, None being the rule's default;
    adaptive_threshold: of control.History, None for candidates that stay as they are.
    Raises SettingError, and UnknownNameError for a rule or branching that does not exist.
    """

    draft: str = "1:4"
    draft_length: int = 4
    candidate_count: int = 1
    branching: str | None = None
    acceptance_rule: str = "lossless"
    acceptance_threshold: float | None = None
    max_retries: int | None = None
    draft_temperature: float | None = None
    adaptive_threshold: float | None = None

    def __post_init__(self) -> None:
        ok = isinstance(self.draft, str) and self.draft.strip() not in ("", "none")
        require("draft", self.draft, ok, "a draft's name other than none, which is the baseline of every block")
        _whole("draft_length", self.draft_length, 0, MAX_DRAFT)
        _whole("candidate_count", self.candidate_count, 1, MAX_CANDIDATES)
        rule = self.acceptance  # these validate
        several = self.candidate_count > 1 or self.controller is not None
        branching = known_branching(self.branching or (DRAWN[0] if rule.retries else BRANCHINGS[0]))
        if several and self.draft.removeprefix("ngram+") in FLAT:
            name = "candidate_count" if self.candidate_count > 1 else "adaptive_threshold"
            allowed = f"{'1' if self.candidate_count > 1 else 'none'} for {self.draft}, which cannot branch"
            raise SettingError(name, getattr(self, name), allowed)
        retries = rule.max_retries
        if rule.retries and (self.draft in DRAWS_NOTHING or (several and branching not in DRAWN)):
            way = self.draft if self.draft in DRAWS_NOTHING else f"branching {branching}"
            require("max_retries", self.max_retries, not self.max_retries, f"0: {way} draws nothing anew")
            retries = 0
        if self.draft_length == 0:
            require("acceptance_rule", rule.rule, rule.lossless, "lossless, as draft_length 0 drafts nothing")
            require("draft_length", 0, not several, "1 or more with several candidates")
        whole_texts = rule.rule == "sequence" and several and branching == BRANCHINGS[0]
        require("branching", branching, not whole_texts, "chains, distinct or top_k with the rule sequence")
        # defaults and what they stand for have one key, and so has what makes no difference
        numbers = {
            "acceptance_threshold": rule.threshold,
            "draft_temperature": rule.draft_temperature,
            "adaptive_threshold": self.adaptive_threshold,
        }
        resolved = {name: None if value is None else float(value) for name, value in numbers.items()}
        for name, value in {
            **resolved,
            "branching": branching if several else BRANCHINGS[0],
            "max_retries": retries,
        }.items():
            object.__setattr__(self, name, value)

    @property
    def acceptance(self) -> Acceptance:
        """The rule with its settings."""
        return Acceptance(self.acceptance_rule, self.acceptance_threshold, self.max_retries, self.draft_temperature)

    @property
    def controller(self) -> History | None:
        """What plans each step, if not all are alike."""
        return None if self.adaptive_threshold is None else History(self.adaptive_threshold)

    @property
    def options(self) -> dict[str, Any]:
        """What zoo.load_drafter takes beside the name."""
        return {} if self.branching == BRANCHINGS[0] else {"branching": self.branching}

    def decoder(self, main: "Main", drafter: Drafter) -> Decoder:
        """A decoder that works so; raises SettingError for what the drafter does not do."""
        return Decoder(
            main.model,
            drafter,
            self.draft_length,
            main.tokenizer,
            eos=main.eos,
            candidate_count=self.candidate_count,
            acceptance=self.acceptance,
            controller=self.controller,
        )


@dataclass(frozen=True)
class Block:
    """The description of one block.

    task: a task's name or a .jsonl file; prompts: how many of it, evenly spread, None for all. dtype: None is the
    device's default. threads: None leaves torch's. Each repeat r samples with seed + r. No arms: baseline only.
    Raises SettingError for a value out of range, UnknownNameError for a task, DataError for a broken prompts file.
    """

    main: str = "bundled"
    task: str = "json"
    arms: tuple[Arm, ...] = (Arm(),)
    prompts: int | None = 12
    max_new_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    repeats: int = 1
    device: str | None = None
    dtype: str | None = None
    threads: int | None = None

    def __post_init__(self) -> None:
        from specdec_lab.models.zoo import placement

        device, dtype = placement(self.device, self.dtype)
        for name, value in {"arms": tuple(self.arms), "device": device, "dtype": dtype}.items():
            object.__setattr__(self, name, value)
        require("main", self.main, isinstance(self.main, str) and bool(self.main.strip()), "a model's name")
        ok = all(isinstance(arm, Arm) for arm in self.arms) and len(set(self.arms)) == len(self.arms)
        require("arms", self.arms, ok, "different Arm(draft, draft_length, …)")
        _whole("max_new_tokens", self.max_new_tokens, 1)
        _whole("seed", self.seed, 0, 2**62)
        _whole("repeats", self.repeats, 1)
        if self.threads is not None:
            _whole("threads", self.threads, 1, 1024)
        for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
            number = getattr(self, name)
            require(name, number, isinstance(number, int | float) and not isinstance(number, bool), "a number")
            object.__setattr__(self, name, float(number))  # 1 and 1.0 are one setting and have one key
        _whole("top_k", self.top_k, 0)
        if self.prompts is not None:
            _whole("prompts", self.prompts, 1)
        _ = self.sampling, [get_task(prompt.task) for prompt in self.chosen]  # these validate
        for arm in self.arms:
            arm.acceptance.require_temperature(self.temperature)
            if arm.acceptance_rule == "sequence":
                nodes = self.max_new_tokens * (MAX_CANDIDATES if arm.controller else arm.candidate_count)
                what = f"{nodes} nodes, from max_new_tokens and candidates"
                require("tree", what, nodes <= MAX_NODES, f"up to {MAX_NODES} with the rule sequence")

    @property
    def sampling(self) -> Sampling:
        """How tokens are drawn."""
        return Sampling(**{field.name: getattr(self, field.name) for field in fields(Sampling)})

    @cached_property
    def chosen(self) -> list[Prompt]:
        """The prompts."""
        return load_prompts(self.task, self.prompts)

    @property
    def settings(self) -> dict[str, Any]:
        """All fields but the arms; JSON-able."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "arms"}

    @property
    def runs(self) -> int:
        """Rows its part holds: prompts × (arms and the baseline) × repeats."""
        return len(self.chosen) * (len(self.arms) + 1) * self.repeats

    @cached_property
    def key(self) -> str:
        """16 hex digits of a SHA-256 over settings, arms, prompts, weights and SCHEMA.

        Raises ModelError where a model is missing.
        """
        from specdec_lab.models.zoo import drafter_fingerprint

        drafts = sorted({arm.draft for arm in self.arms})
        weights = {name: drafter_fingerprint(name) for name in drafts}
        main = drafter_fingerprint(self.main)
        prompts = [prompt_sha(prompt) for prompt in self.chosen]
        decides = [SCHEMA, self.settings, [asdict(arm) for arm in self.arms], prompts, main, weights]
        return _sha(decides)[:16]


def grid(
    mains: Sequence[str] = ("bundled",),
    drafts: Sequence[str] = ("1:2", "1:3", "1:4"),
    tasks: Sequence[str] = ("json", "code", "prose"),
    draft_lengths: Sequence[int] = (2, 4, 8),
    **common: Any,
) -> list[Block]:
    """One block per (main, task, draft): its draft lengths are arms beside one baseline; "none" has no arms.

    common: further fields of Block. Raises what Block raises.
    """
    named = {"mains": mains, "drafts": drafts, "tasks": tasks, "draft_lengths": draft_lengths}
    for name, values in named.items():
        require(name, values, isinstance(values, list | tuple) and len(values) > 0, "a list with one value at least")
    known = [field.name for field in fields(Block) if field.name not in ("main", "task", "arms")]
    for name in common:
        require("setting", name, name in known, ", ".join(known))
    lengths = {draft: () if draft == "none" else draft_lengths for draft in drafts}
    return [
        Block(main, task, tuple(Arm(draft, length) for length in lengths[draft]), **common)
        for main in mains
        for task in tasks
        for draft in lengths
    ]


def prompt_sha(prompt: Prompt) -> str:
    """16 hex digits over what of a prompt decides tokens and score."""
    decides = ("id", "task", "prompt", "schema", "tests", "entry_point", "raw_prompt")
    return _sha([getattr(prompt, name) for name in decides])[:16]


def _sha(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


# ---- running


class Models:
    """Loaded models, kept from block to block: one main model and the drafts of the last block."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Let go of everything."""
        self._what: tuple[Any, ...] | None = None
        self._main: Any = None
        self._drafters: dict[Arm, Drafter] = {}
        self.scorer: Any = None  # the main model's Scorer

    def load(self, block: Block) -> tuple[Any, dict[Arm, Drafter]]:
        """(zoo.Main, the drafter of each arm) of a block; those that draft alike share one. Raises ModelError."""
        from specdec_lab.models.zoo import load_drafter, load_main

        what = (block.main, block.device, block.dtype)
        if what != self._what:
            self.forget()  # before the new ones come
            self._main, self._what = load_main(*what), what
            self.scorer = Scorer(self._main.model)
        kept = {(arm.draft, str(arm.options)): drafter for arm, drafter in self._drafters.items()}
        self._drafters = {}
        for arm in block.arms:
            how = arm.draft, str(arm.options)
            kept[how] = kept.get(how) or load_drafter(arm.draft, self._main, **arm.options)
            self._drafters[arm] = kept[how]
        return self._main, self._drafters


class Scorer:
    """Quality and likelihood of replies, remembered: lossless arms all give the same reply."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._quality: dict[tuple[str, tuple[int, ...]], float | None] = {}
        self._nll: dict[tuple[str, tuple[int, ...]], float | None] = {}

    def judge(self, prompt: Prompt, ids: Sequence[int], made: Generation) -> dict[str, Any]:
        """The columns that statistics.quality_change compares."""
        return {
            "quality": self.quality(prompt, ids, made),
            "quality_better": get_task(prompt.task).better,
            "nll": self.nll(prompt, ids, made),
            "repetition": repeated_ngrams(made.tokens),
        }

    def quality(self, prompt: Prompt, ids: Sequence[int], made: Generation) -> float | None:
        """The task's score of a reply; ids: of the prompt. None for JSON or code that a length limit cut short.

        Raises DataError for a schema that cannot be used.
        """
        key = prompt_sha(prompt), tuple(made.tokens)
        if key not in self._quality:
            likely = get_task(prompt.task).quality == "mean_nll"
            cut = not likely and made.trace.finish in ("length", "context")
            nll = self.nll(prompt, ids, made) if likely else None
            self._quality[key] = None if cut else score(prompt, made.text, nll).value
        return self._quality[key]

    def nll(self, prompt: Prompt, ids: Sequence[int], made: Generation) -> float | None:
        """mean_nll of a reply; ids: of the prompt."""
        key = prompt_sha(prompt), tuple(made.tokens)
        if key not in self._nll:
            self._nll[key] = mean_nll(self._model, ids, made.tokens)
        return self._nll[key]


@torch.inference_mode()
def mean_nll(model: Model, prompt: Sequence[int], reply: Sequence[int]) -> float | None:
    """Mean negative log-likelihood, nats per token, of a reply's token ids; None for an empty reply."""
    if not reply:
        return None
    cache, total = model.new_cache(1, len(prompt) + len(reply)), 0.0
    feed(model, cache, [prompt[:-1]])
    seen = [prompt[-1], *reply[:-1]]
    for start in range(0, len(reply), CHUNK):
        block = torch.tensor([seen[start : start + CHUNK]], device=model.device)  # [1, n]
        hidden = model.forward(block, cache)  # [1, n, hidden_size]
        cache.advance([block.shape[1]])
        targets = torch.tensor(reply[start : start + CHUNK], device=model.device)  # [n]
        total += torch.nn.functional.cross_entropy(model.logits(hidden)[0], targets, reduction="sum").item()
    return total / len(reply)


def run_block(
    block: Block,
    folder: str | Path,
    progress: Callable[[int], object] | None = None,
    models: Models | None = None,
) -> Path:
    """Run a block and write its part file. progress: called with 1 after every run.

    Raises SettingError for a prompt that does not fit the model, ModelError, SpecdecError where the folder cannot
    be written. Nothing is written before the block is complete.
    """
    folder, models = _made(folder), models or Models()
    threads = torch.get_num_threads()
    if block.threads is not None:
        torch.set_num_threads(block.threads)
    try:
        main, drafters = models.load(block)
        metadata = _metadata(block, main, drafters)
        rows = _measure(block, main, drafters, models, progress or (lambda _: None))
    finally:
        torch.set_num_threads(threads)
    return _store(rows, metadata, folder / f"{block.key}.parquet")


def _measure(
    block: Block, main: Any, drafters: Mapping[Arm, Drafter], models: Models, tick: Callable[[int], object]
) -> list[dict[str, Any]]:
    """The block's rows: every prompt and repeat, the baseline and every arm."""
    baseline = Decoder(main.model, tokenizer=main.tokenizer, eos=main.eos)
    arms: list[Arm | None] = [None, *block.arms]
    decoders = [baseline, *(arm.decoder(main, drafters[arm]) for arm in block.arms)]
    ids = encode_all(baseline, block.chosen)
    settings = {**asdict(block.sampling), "max_new_tokens": block.max_new_tokens}
    rows = []
    for repeat in range(block.repeats):
        sides = alternate(decoders, ids, repeat, tick, seed=block.seed + repeat, **settings)
        for prompt, tokens, runs in zip(block.chosen, ids, sides, strict=True):
            plain = runs[0][1]
            for of, (order, made) in zip(arms, runs, strict=True):
                about = {"prompt_id": prompt.id, "prompt_sha": prompt_sha(prompt), "kind": prompt.kind}
                run = {"repeat": repeat, "order": order, **models.scorer.judge(prompt, tokens, made)}
                same = _sameness(main.model, tokens, made.tokens, plain.tokens) if of and block.sampling.greedy else {}
                rows.append({**_arm_columns(of), **about, **run, **same, **_counts(made)})
    return rows


def encode_all(decoder: Decoder, prompts: Sequence[Prompt]) -> list[list[int]]:
    """Token ids of every prompt; raises DataError naming the prompt that does not fit."""
    ids = []
    for prompt in prompts:
        try:
            ids.append(decoder.encode(prompt.prompt))
        except SettingError as error:
            raise DataError(f"prompt {prompt.id}: {error}") from error
    return ids


def alternate(
    decoders: Sequence[Decoder],
    prompts: Sequence[Sequence[int]],
    shift: int = 0,
    tick: Callable[[int], object] = lambda count: None,
    constraints: Sequence[Grammar | None] = (),
    **settings: Any,
) -> Iterator[list[tuple[int, Generation]]]:
    """Decode each prompt by every decoder, back to back, in an order that rotates from prompt to prompt.

    Yields per prompt (place in the order, generation) for each decoder. A short warm-up of each comes first and is
    not part of it. shift: where the rotation starts. constraints: one for each prompt; the warm-up is free of them.
    settings: as Decoder.stream.
    """
    short = {**settings, "max_new_tokens": min(WARM_UP, settings.get("max_new_tokens", WARM_UP))}
    for decoder in decoders:
        decoder.generate(prompts[0], **short)
    for index, prompt in enumerate(prompts):
        made: dict[int, tuple[int, Generation]] = {}
        constraint = constraints[index] if constraints else None
        for order in range(len(decoders)):
            side = (index + shift + order) % len(decoders)
            made[side] = order, decoders[side].generate(prompt, constraint=constraint, **settings)
            tick(1)
        yield [made[side] for side in range(len(decoders))]


def _arm_columns(arm: Arm | None) -> dict[str, Any]:
    return asdict(arm or Arm()) | ({"draft": "none", "draft_length": 0} if arm is None else {})


def _sameness(model: Model, prompt: Sequence[int], tokens: Sequence[int], plain: Sequence[int]) -> dict[str, Any]:
    """Whether greedy tokens equal the baseline's, the first index that differs (−1: none), and the margin there.

    The margin is how far apart the two largest logits are, when the prefix is read in one pass: a small one is a
    tie that another order of summation turns, as lower precision makes many.
    """
    at = first_difference(tokens, plain)
    if at is None:
        return {"same_as_baseline": True, "first_divergence": -1}
    ids = [*prompt, *plain[:at]]
    hidden = feed(model, model.new_cache(1, len(ids)), [ids])
    assert hidden is not None
    top = model.logits(hidden)[0].topk(2).values
    return {"same_as_baseline": False, "first_divergence": at, "divergence_margin": float(top[0] - top[1])}


def _counts(made: Generation) -> dict[str, Any]:
    """The raw counts and times of a run, summed over its steps.

    Lists named _at run over draft positions 1, 2, …, those named tried_ over the drafted tokens put to the test.
    """
    sums = totals([made.trace])
    return {
        **asdict(sums),
        "decode_s": sums.decode_s,
        "draft_prefill_s": made.trace.draft_prefill_s,
        **{f"{name}_at": counts for name, counts in position_counts([made.trace]).items()},
        **{f"tried_{name}": values for name, values in tried([made.trace]).items()},
        "prompt_tokens": made.trace.prompt_tokens,
        "untried": sums.drafted - sums.accepted - sums.rejected,
        "memory_bytes": made.trace.memory_bytes,
        "finish": made.trace.finish,
        "tokens": made.tokens,
        "text": made.text,
    }


def _metadata(block: Block, main: Any, drafters: Mapping[Arm, Drafter]) -> dict[str, Any]:
    """What is true of all rows of a part: settings, models, machine, the measured verify-cost curve; JSON-able."""
    from specdec_lab.models.zoo import drafter_fingerprint

    about = provenance(str(main.model.device))
    curve = measure_verify_curve(main.model, context=min(128, main.model.context_length // 2))
    return {
        "schema": SCHEMA,
        "key": block.key,
        "rows": block.runs,
        "arms": [asdict(arm) for arm in block.arms],
        "settings": block.settings,
        "provenance": about,
        "main": _sizes(main.model) | {"fingerprint": main.fingerprint},
        "drafts": {
            arm.draft: _sizes(getattr(drafter, "model", None)) | {"fingerprint": drafter_fingerprint(arm.draft)}
            for arm, drafter in drafters.items()
        },
        "verify_curve": {"k": list(curve.ks), "ratio": list(curve.ratio), "seconds": list(curve.seconds)},
    }


def _sizes(model: Model | None) -> dict[str, int]:
    """Total parameters, and those outside embedding and head; 0 for a drafter without a model."""
    if model is None:
        return {"parameters": 0, "body_parameters": 0}
    return {"parameters": model.parameters, "body_parameters": model.parameters - model.embedding_parameters}


def sweep(blocks: Sequence[Block], folder: str | Path, progress: bool = True) -> pd.DataFrame:
    """Run the blocks that have no whole part in `folder` yet, in order; returns the rows of all of them.

    Any number of workers may share the folder: a block that another worker runs is left to it, and taken over
    when that worker dies. Killed at any moment, the same call resumes and ends with the same rows. A broken part
    is warned about and run again. progress: a bar with the time left on standard error.
    Raises what run_block raises; what is complete by then stays. So it does after KeyboardInterrupt.
    """
    from tqdm import tqdm

    folder = _made(folder)
    pending = {block.key: block for block in blocks}
    total, wanted = sum(block.runs for block in pending.values()), list(pending)
    for key in [key for key in pending if _is_whole(folder / f"{key}.parquet")]:
        del pending[key]
    done, models = total - sum(block.runs for block in pending.values()), Models()
    every = 0.5 if sys.stderr.isatty() else 5.0
    with tqdm(total=total, initial=done, unit="run", mininterval=every, disable=not progress, file=sys.stderr) as bar:
        while pending:
            left = len(pending)
            for key, block in list(pending.items()):
                with _claim(folder, key) as mine:
                    if not mine:
                        continue
                    bar.set_description(f"{block.task} {block.arms[0].draft if block.arms else 'none'}", refresh=False)
                    if _is_whole(folder / f"{key}.parquet"):  # another worker's
                        bar.update(block.runs)
                    else:
                        run_block(block, folder, bar.update, models)
                    del pending[key]
            if len(pending) == left:
                time.sleep(POLL)
    return load(folder, wanted)


# ---- part files


TYPES = {
    **{"draft": pa.string(), "draft_length": pa.int32(), "candidate_count": pa.int32(), "branching": pa.string()},
    **{"acceptance_rule": pa.string(), "acceptance_threshold": pa.float64(), "max_retries": pa.int32()},
    **{"draft_temperature": pa.float64(), "adaptive_threshold": pa.float64()},
    **{"prompt_id": pa.string(), "prompt_sha": pa.string()},
    **{"kind": pa.string(), "repeat": pa.int32(), "order": pa.int32()},
    **{
        "quality": pa.float64(),
        "quality_better": pa.string(),
        "nll": pa.float64(),
        "same_as_baseline": pa.bool_(),
        "first_divergence": pa.int32(),
        "divergence_margin": pa.float64(),
    },
    **{field.name: pa.float64() if field.type is float else pa.int32() for field in fields(Totals)},
    **{"decode_s": pa.float64(), "draft_prefill_s": pa.float64(), "untried": pa.int32()},
    **dict.fromkeys(("drafted_at", "tried_at", "accepted_at"), pa.list_(pa.int32())),
    **{"tried_entropy": pa.list_(pa.float32()), "tried_stays": pa.list_(pa.bool_())},
    **{"tried_depth": pa.list_(pa.int16())},
    **{"prompt_tokens": pa.int32(), "memory_bytes": pa.int64(), "finish": pa.string()},
    **{"repetition": pa.float64(), "tokens": pa.list_(pa.int32()), "text": pa.string()},
}
METADATA = b"specdec_lab"


def _made(folder: str | Path) -> Path:
    """The folder, made if need be; raises SpecdecError where it cannot be."""
    folder = Path(folder).expanduser()
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise SpecdecError(
            f"cannot write to the results folder {folder}: {reason}; the parts that are complete stay, and the same "
            "call resumes"
        ) from error


@contextmanager
def _claim(folder: Path, key: str) -> Iterator[bool]:
    """Whether this worker may run the block now. The kernel frees a lock whose holder dies: no claim goes stale.

    On a file system without locks everyone may: work is done twice then, but a part has one name and replaces
    itself whole, so no row is lost or doubled.
    """
    path, locked = folder / f".{key}.lock", True
    with _writing(folder):
        file = open(path, "w")  # noqa: SIM115
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        except OSError:
            locked = False
        if locked and (not path.exists() or path.stat().st_ino != os.fstat(file.fileno()).st_ino):
            yield False  # another worker finished meanwhile and removed the file that this lock is on
            return
        for left_over in folder.glob(f".{key}.*.tmp") if locked else ():  # of a worker killed while it wrote
            left_over.unlink(missing_ok=True)
        try:
            yield True
        finally:
            path.unlink(missing_ok=True)


def _store(rows: Sequence[Mapping[str, Any]], metadata: Mapping[str, Any], path: Path) -> Path:
    """Write a part so that the name only ever stands for the whole, durably: temp file, fsync, rename, fsync."""
    schema = pa.schema(list(TYPES.items()), metadata={METADATA: json.dumps(metadata).encode()})
    buffer = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(list(rows), schema=schema), buffer, write_page_checksum=True)
    temporary = path.with_name(f".{path.stem}.{uuid.uuid4().hex}.tmp")
    with _writing(path.parent):
        try:
            with open(temporary, "wb") as file:
                file.write(buffer.getvalue())
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
    return path


def read_part(path: Path) -> tuple[pd.DataFrame, dict[str, Any]]:
    """Rows and metadata of a part file, checksums verified; raises DataError naming the file."""
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            table = file.read()
        metadata = json.loads(table.schema.metadata[METADATA])
    except FileNotFoundError as error:
        raise DataError(f"no part file {path}") from error
    except (OSError, pa.ArrowException, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is not a whole part file ({str(error).splitlines()[0]})") from error
    if metadata.get("schema") != SCHEMA:
        raise DataError(f"{path} has rows of version {metadata.get('schema')}, this package reads {SCHEMA}")
    if (metadata["key"], metadata["rows"]) != (path.stem, table.num_rows):
        raise DataError(f"{path} holds {table.num_rows} rows of {metadata['key']}, not {metadata['rows']} of its name")
    return table.to_pandas(), metadata


def _is_whole(path: Path) -> bool:
    try:
        read_part(path)
    except DataError as error:
        if path.exists():
            warnings.warn(f"{error}; it is run again", stacklevel=3)
        return False
    return True


def load(folder: str | Path, blocks: Sequence[Block | str] | None = None) -> pd.DataFrame:
    """All rows of a folder's parts, or of these blocks (or keys); one per (part, arm, prompt, repeat).

    Beside a row's own columns stand its part's key, settings, provenance and models, and as `baseline_*` the sums
    and scores of the baseline on the same prompt and repeat. Raises DataError for a broken part, and where there is
    none.
    """
    folder = Path(folder).expanduser()
    if blocks is None:
        paths = sorted(folder.glob("[!.]*.parquet"))
    else:
        paths = [folder / f"{block.key if isinstance(block, Block) else block}.parquet" for block in blocks]
    if not paths:
        raise DataError(f"no results in {folder}")
    return pd.concat([_with_context(*read_part(path)) for path in dict.fromkeys(paths)], ignore_index=True)


def _with_context(rows: pd.DataFrame, metadata: Mapping[str, Any]) -> pd.DataFrame:
    names = [*TOTALS, *TEXT, "decode_s", "memory_bytes"]
    plain = rows[rows.draft == "none"].set_index(["prompt_id", "repeat"])[names]
    rows = rows.join(plain.add_prefix("baseline_"), on=["prompt_id", "repeat"])
    drafts = {"none": _sizes(None), **metadata["drafts"]}
    for name in _sizes(None):
        rows[f"main_{name}"] = metadata["main"][name]
        rows[f"draft_{name}"] = [drafts[draft][name] for draft in rows.draft]
    context = {"part": metadata["key"], **metadata["settings"], **metadata["provenance"]}
    rows = rows.assign(**context)
    curve = metadata["verify_curve"]
    return rows.assign(**{f"verify_{name}": [values] * len(rows) for name, values in curve.items()})
