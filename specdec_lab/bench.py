"""One run over every arm, ours and other systems', prompt by prompt in rotating order; ratios with intervals.

An arm is a way to decode, in one of three modes: greedy, sampled at the main model's recommended temperature, and
constrained by the prompt's own JSON schema. Its speed-up is over the own plain loop of its mode on the same prompts.
"""

import json
import math
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

from specdec_lab import metrics, peers
from specdec_lab.decoding import MAX_DRAFT, Decoder, Generation
from specdec_lab.drafting import Drafter
from specdec_lab.errors import SpecdecError, UnknownNameError, require, whole
from specdec_lab.experiment import encode_all
from specdec_lab.metrics import Totals, loops, repeated_ngrams, totals
from specdec_lab.models import zoo
from specdec_lab.profiles import Drafting, load_profile
from specdec_lab.provenance import provenance
from specdec_lab.sampling import Sampling
from specdec_lab.scoreboard import details, markdown, said_of
from specdec_lab.statistics import Interval, ratio_interval
from specdec_lab.tasks import Prompt, load_prompts, score
from specdec_lab.tasks.prompts import spread
from specdec_lab.theory import measure_verify_curve
from specdec_lab.trace import now

TASKS = ("json", "code", "prose")
OURS = (*zoo.RATIOS, "ngram", "feature", "feature-tree", "parallel", "ngram+feature", "grammar", "fastest")
SAMPLED = ("1:4", "ngram+feature", "fastest")  # also measured at the recommended sampling
SCHEMA = ("grammar", "ngram+feature", "fastest")  # also measured under the prompt's schema
LENGTHS = {"ngram": 8, "ngram+feature": 8, "parallel": 8, "feature-tree": 16, "grammar": MAX_DRAFT}  # 4 for others
TREE, BRANCHES = "-tree", 4  # the ending of an arm that drafts dynamic trees; nodes read on at each level
WARM_UP = 16  # tokens
QUIET = 0.15  # share of the cores that others may use
STEADY = 1.5  # how much longer than its median a probe may take, nine times in ten


@dataclass(frozen=True)
class Plan:
    """What a benchmark runs. arms: names of OURS, peers.NAMES and drafts' folders, all different; plain always runs.

    prompts: of each task, and of each category of Spec-Bench. temperature, top_p: of the sampled mode; 0 leaves that
    out. Raises SettingError for a value out of range, UnknownNameError for an arm or a task.
    """

    tasks: tuple[str, ...] = TASKS
    arms: tuple[str, ...] = (*peers.NAMES, *OURS)
    prompts: int = 10
    max_new_tokens: int = 64
    temperature: float = 0.2
    top_p: float = 0.9
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("tasks", "arms"):
            values = getattr(self, name)
            require(name, values, 0 < len(set(values)) == len(values), "one or more names, all different")
        for name in self.arms:
            self._check_arm(name)
        for name in ("prompts", "max_new_tokens"):
            value = getattr(self, name)
            require(name, value, whole(value) and value >= 1, "an integer >= 1")
        require("seed", self.seed, whole(self.seed) and 0 <= self.seed < 2**62, "an integer 0 … 2⁶² − 1")
        Sampling(temperature=self.temperature, top_p=self.top_p)
        for task in self.tasks:
            load_prompts(task, 1)

    @staticmethod
    def _check_arm(name: str) -> None:
        if name in OURS or _is_model(name):
            return
        require("arms", name, not Path(name).is_dir(), "a draft's folder, with its config.json")
        try:
            peers.check_name(name)
        except UnknownNameError:
            raise UnknownNameError("arm", name, (*OURS, *peers.NAMES, "a draft's folder")) from None

    @property
    def ours(self) -> list[str]:
        """The selected arms of this package, without the plain loop."""
        return [name for name in self.arms if name in OURS or _is_model(name)]

    @property
    def others(self) -> list[str]:
        """The selected other systems."""
        return [name for name in self.arms if name not in self.ours]


def _is_model(name: str) -> bool:
    """Whether that is the folder of a model."""
    return (Path(name) / "config.json").is_file()


@dataclass(frozen=True)
class Item:
    """One prompt in one mode. task: its task type, or its category of Spec-Bench."""

    mode: str
    task: str
    prompt: Prompt
    ids: list[int]
    settings: dict[str, Any] = field(default_factory=dict)  # of Decoder.generate


@dataclass(frozen=True)
class Run:
    """What one arm did with one item. seconds: of the whole call; made: None for other systems."""

    item: Item
    arm: str
    seconds: float
    tokens: list[int]
    made: Generation | None = None

    @property
    def sums(self) -> Totals:
        """Counts and times of the decoding, all zero for other systems."""
        return totals([self.made.trace] if self.made else [])


Arm = Callable[[Item, int], tuple[list[int], Generation | None]]  # (item, max_new_tokens)


def bench(main: zoo.Main, reference: Any, plan: Plan, report: Callable[[str], Any] = print) -> dict[str, Any]:
    """Run the plan. reference: the main model as transformers has it. Returns what `markdown` renders; JSON-able."""
    before = quiet()
    report(said_of(before))
    found = Arms(main, plan)
    items = found.items()
    report(f"{len(items)} prompts (in every mode) by every arm, {plan.max_new_tokens} new tokens each")
    with peers.load_peers(plan.others, main, reference, items[0].ids) as others:
        found.add_peers(others)
        runs = measure(found, items, plan.max_new_tokens)
    rows = summarise(runs, {peer.name: peer for peer in others})
    curves = verify_curves(main, reference)
    memory = {name: process_memory(main.name, name) for name in ("plain", *found.loaded)}
    after = quiet()
    result = {
        "plan": asdict(plan),
        "machine": provenance(str(main.model.device)),
        "quiet": {"before": before, "after": after},
        "rows": rows,
        "missing": found.missing,
        "plain_loop": plain_loop(runs),
        "verify_curves": curves,
        "memory_bytes": memory,
    }
    report(markdown(result))
    report(details(result))
    return result


def quiet() -> dict[str, Any]:
    """Whether the machine is left alone: others' share of the cores in a second, and how steady a probe runs."""
    busy = psutil.cpu_percent(interval=1.0) / 100
    x, times = torch.rand(384, 384), []
    for _ in range(60):
        start = time.perf_counter()
        x @ x
        times.append(time.perf_counter() - start)
    spread = statistics.quantiles(times[10:], n=10)[-1] / statistics.median(times[10:])
    return {"busy_share": busy, "probe_spread": spread, "quiet": busy <= QUIET and spread <= STEADY}


# ---- arms


class Arms:
    """The arms of a plan by mode and task, built when asked for; what cannot be built is missing, with its reason."""

    def __init__(self, main: zoo.Main, plan: Plan) -> None:
        self.main, self.plan, self.missing = main, plan, dict[str, str]()
        self._built: dict[tuple[str, str], Decoder | None] = {}
        self._drafters: dict[str, Drafter] = {}
        self._peers: dict[str, peers.Peer] = {}

    @property
    def loaded(self) -> list[str]:
        """Names of the arms of ours that decode without a constraint."""
        return [name for name in self.plan.ours if name != "grammar" and name not in self.missing]

    def items(self) -> list[Item]:
        """Every prompt in every mode, those of one mode and task together."""
        plain = self._decoder("plain", "")
        assert plain is not None
        sampled = {"temperature": self.plan.temperature, "top_p": self.plan.top_p, "seed": self.plan.seed}
        by_mode: dict[str, list[Item]] = {"greedy": [], "sampled": [], "schema": []}
        for name in self.plan.tasks:
            for task, prompts in self._grouped(name).items():
                for prompt, ids in zip(prompts, encode_all(plain, prompts), strict=True):
                    by_mode["greedy"].append(Item("greedy", task, prompt, ids))
                    by_mode["sampled"].append(Item("sampled", task, prompt, ids, sampled))
                    if prompt.schema is not None and (settings := self._constrained(prompt)):
                        by_mode["schema"].append(Item("schema", task, prompt, ids, settings))
        if self.plan.temperature == 0:
            del by_mode["sampled"]
        return [item for items in by_mode.values() for item in items]

    def _grouped(self, name: str) -> dict[str, list[Prompt]]:
        """The prompts of a task or file, by category where they have one, else by task type."""
        out: dict[str, list[Prompt]] = {}
        for prompt in load_prompts(name):
            out.setdefault(prompt.category or prompt.task, []).append(prompt)
        return {label: spread(prompts, self.plan.prompts) for label, prompts in out.items()}

    def add_peers(self, found: Sequence[peers.Peer]) -> None:
        """Take in other systems."""
        self._peers = {peer.name: peer for peer in found if peer.call}
        self.missing |= {peer.name: peer.missing for peer in found if not peer.call}

    def of(self, item: Item) -> dict[str, Arm]:
        """The arms that run an item, the plain loop first."""
        free = [name for name in self.plan.ours if name != "grammar"]
        chosen = {"sampled": SAMPLED, "schema": SCHEMA}.get(item.mode, free)
        arms: dict[str, Arm] = {}
        for name in ("plain", *(name for name in self.plan.ours if name in chosen)):
            decoder = self._decoder(name, item.prompt.task)
            if decoder is not None:
                arms[name] = _ours(decoder)
        if item.mode == "greedy":
            arms |= {name: _others(peer) for name, peer in self._peers.items()}
        return arms

    def drop(self, name: str, error: Exception) -> None:
        """A system that failed on the way."""
        self._peers.pop(name, None)
        self.missing[name] = peers.reason(error)

    def _decoder(self, name: str, task: str) -> Decoder | None:
        key = (name, task if name == "fastest" else "")
        if key not in self._built:
            try:
                self._built[key] = decoder_of(name, self.main, task, self._drafters)
            except (SpecdecError, ImportError) as error:
                self._built[key] = None
                self.missing[name] = str(error)
        return self._built[key]

    def _constrained(self, prompt: Prompt) -> dict[str, Any] | None:
        """The constraint of a prompt's schema; None where it cannot be one, which is said."""
        if not set(self.plan.ours).intersection(SCHEMA):
            return None
        from specdec_lab.constrain import Grammar, Source

        try:
            source = Source.json_schema(prompt.schema, f"the schema of {prompt.id}")
            grammar = Grammar(source, self.main.tokenizer)
            grammar.require_room(self.plan.max_new_tokens)
            return {"constraint": grammar}
        except SpecdecError as error:
            self.missing[f"schema of {prompt.id}"] = str(error)
            return None


def drafting_of(name: str, task: str) -> Drafting:
    """How an arm drafts: not at all, at the length of LENGTHS, or as the profile `fastest` says of a task type."""
    if name == "fastest":
        return load_profile(name).for_task(task)
    return Drafting("none", 0) if name == "plain" else Drafting(name.removesuffix(TREE), LENGTHS.get(name, 4))


def decoder_of(name: str, main: zoo.Main, task: str, loaded: dict[str, Drafter] | None = None) -> Decoder:
    """The decoder of an arm. loaded: drafters by name and options; decoders that share one take turns.

    Raises ModelError where it cannot be loaded.
    """
    drafting, loaded = drafting_of(name, task), {} if loaded is None else loaded
    key = f"{drafting.draft} {dict(drafting.options)}"
    if key not in loaded:
        loaded[key] = zoo.load_drafter(drafting.draft, main, **drafting.options)
    candidates = BRANCHES if name.endswith(TREE) else 1
    length = drafting.draft_length
    return Decoder(main.model, loaded[key], length, main.tokenizer, eos=main.eos, candidate_count=candidates)


def _ours(decoder: Decoder) -> Arm:
    def run(item: Item, max_new_tokens: int) -> tuple[list[int], Generation | None]:
        made = decoder.generate(item.ids, max_new_tokens=max_new_tokens, **item.settings)
        return made.tokens, made

    return run


def _others(peer: peers.Peer) -> Arm:
    assert peer.call is not None
    call = peer.call
    return lambda item, max_new_tokens: (call(item.ids, max_new_tokens), None)


def measure(arms: Arms, items: Sequence[Item], max_new_tokens: int) -> list[Run]:
    """Every item by every arm of its mode, back to back, in an order that rotates from item to item.

    A system that fails on the way is dropped with all its runs, and told as missing.
    """
    from tqdm import tqdm

    runs: list[Run] = []
    keys = list(dict.fromkeys((item.mode, item.task) for item in items))
    with tqdm(total=len(items), unit="prompt", mininterval=5, file=sys.stderr) as bar:
        for mode, task in keys:
            for index, item in enumerate(item for item in items if (item.mode, item.task) == (mode, task)):
                names = list(arms.of(item))
                for name in names[index % len(names) :] + names[: index % len(names)]:
                    arm = arms.of(item).get(name)
                    try:
                        if arm and index == 0:
                            arm(item, min(WARM_UP, max_new_tokens))
                        if arm:
                            runs.append(_timed(arm, item, name, max_new_tokens, arms.main.model.device))
                    except Exception as error:
                        if name not in arms.plan.others:
                            raise
                        arms.drop(name, error)  # another system's fault is not the benchmark's end
                bar.update(1)
    return [run for run in runs if run.arm not in arms.missing]


def _timed(arm: Arm, item: Item, name: str, max_new_tokens: int, device: torch.device) -> Run:
    start = now(device)
    tokens, made = arm(item, max_new_tokens)
    return Run(item, name, now(device) - start, list(tokens), made)


# ---- results


def summarise(runs: Sequence[Run], others: Mapping[str, peers.Peer]) -> list[dict[str, Any]]:
    """A row per mode, task and arm. others: the other systems by name, for their precision and size."""
    looping = {(run.item.mode, run.item.prompt.id) for run in runs if run.arm == "plain" and loops(run.tokens)}
    rows = []
    for mode, task, arm in dict.fromkeys((run.item.mode, run.item.task, run.arm) for run in runs):
        mine, plain = (
            [run for run in runs if (run.item.mode, run.item.task, run.arm) == (mode, task, name)]
            for name in (arm, "plain")
        )
        judged = "greedy" if mode == "sampled" else mode  # the greedy text says whether a prompt makes the model loop
        steady = [i for i, run in enumerate(mine) if (judged, run.item.prompt.id) not in looping]
        peer = others.get(arm)
        row = {
            "mode": mode,
            "task": task,
            "arm": arm,
            "system": "other" if peer else "specdec_lab",
            "precision": peer.precision if peer else "",
            "prompts": len(mine),
            "tokens": sum(len(run.tokens) for run in mine),
            "speedup": _speedup(mine, plain),
            "loop_free": _speedup([mine[i] for i in steady], [plain[i] for i in steady]),
            **_whole_text(mine, plain),
            **(_decoding(mine, plain) if not peer else {"memory_bytes": peer.nbytes}),
        }
        rows.append(row)
    return rows


def _interval(found: Interval) -> dict[str, Any]:
    """JSON-able: None where there is no value."""
    values = {"value": found.value, "low": found.low, "high": found.high}
    return {name: value if math.isfinite(value) else None for name, value in values.items()} | {
        "prompts": found.prompts
    }


def _speedup(mine: Sequence[Run], plain: Sequence[Run]) -> dict[str, Any]:
    """Tokens per second of whole calls, prefill included, over the plain loop's on the same prompts."""
    if not mine:
        return _interval(Interval(math.nan, math.nan, math.nan, 0))
    ours, theirs = [len(run.tokens) for run in mine], [len(run.tokens) for run in plain]
    return _interval(ratio_interval(ours, [run.seconds for run in mine], theirs, [run.seconds for run in plain]))


def _whole_text(mine: Sequence[Run], plain: Sequence[Run]) -> dict[str, Any]:
    """What can be said of any system: speed, sameness, repetition, and how many complete JSON replies validate."""
    shares = [share for run in mine if (share := repeated_ngrams(run.tokens)) is not None]
    greedy = mine[0].item.mode != "sampled"
    same = [a.tokens == b.tokens for a, b in zip(mine, plain, strict=True)]
    whole_json = [
        score(run.item.prompt, run.made.text).detail.get("validates", False)
        for run in mine
        if run.item.prompt.schema is not None and run.made and run.made.trace.finish == "eos"
    ]
    return {
        "throughput": sum(len(run.tokens) for run in mine) / sum(run.seconds for run in mine),
        "same": sum(same) if greedy else None,
        "repetition": sum(shares) / len(shares) if shares else None,
        "complete": len(whole_json),
        "validates": sum(map(bool, whole_json)),
    }


def _decoding(mine: Sequence[Run], plain: Sequence[Run]) -> dict[str, Any]:
    """What traces say."""
    ours, base = [run.sums for run in mine], [run.sums for run in plain]
    t, p = sum(ours, Totals()), sum(base, Totals())
    emitted, steps = [t.emitted for t in ours], [t.steps for t in ours]
    before = [t.emitted for t in base], [t.decode_s for t in base]
    tried = [t.accepted + t.rejected for t in ours]
    shares = {
        f"{part}_share": metrics.ratio(getattr(t, f"{part}_s"), t.decode_s) for part in ("draft", "verify", "other")
    }
    return {
        "draft_length": max(step.planned for run in mine if run.made for step in run.made.trace.steps),
        "decode_throughput": metrics.throughput(t),
        "decode_speedup": _interval(ratio_interval(emitted, [t.decode_s for t in ours], *before)),
        "tau": _interval(ratio_interval(emitted, steps)),
        "alpha": _interval(ratio_interval([t.accepted for t in ours], tried)),
        "c": metrics.draft_cost_ratio(t, p),
        **shares,
        "memory_bytes": max(run.made.trace.memory_bytes for run in mine if run.made),
    }


def plain_loop(runs: Sequence[Run]) -> dict[str, Any] | None:
    """The own plain loop against transformers' generate, whole calls; None where that did not run."""
    greedy = [run for run in runs if run.item.mode == "greedy"]
    ours, theirs = ([run for run in greedy if run.arm == name] for name in ("plain", "generate"))
    if not theirs:
        return None
    tokens, seconds = sum(len(run.tokens) for run in theirs), sum(run.seconds for run in theirs)
    return {
        **_speedup(ours, theirs),
        "tokens_per_s": sum(len(run.tokens) for run in ours) / sum(run.seconds for run in ours),
        "reference_tokens_per_s": tokens / seconds,
        "overhead_share": metrics.overhead_share(sum((run.sums for run in ours), Totals())),
    }


def verify_curves(main: zoo.Main, reference: Any, context: int = 128, repeats: int = 9) -> dict[str, Any]:
    """Median seconds of a forward over k tokens behind `context` cached ones, of both implementations."""
    from transformers import DynamicCache

    lean = measure_verify_curve(main.model, context=context, repeats=repeats)
    ids = torch.arange(context, device=reference.device)[None]
    seconds: dict[int, list[float]] = {k: [] for k in lean.ks}
    with torch.inference_mode():
        cache = DynamicCache(config=reference.config)
        reference(ids, past_key_values=cache)
        for _ in range(repeats):
            for k in lean.ks:
                tokens = torch.arange(k, device=reference.device)[None]
                start = now(main.model.device)
                reference(tokens, past_key_values=cache)
                seconds[k].append(now(main.model.device) - start)
                cache.crop(-k)
    return {
        "k": list(lean.ks),
        "lean": list(lean.seconds),
        "transformers": [statistics.median(seconds[k]) for k in lean.ks],
    }


def process_memory(main: str, arm: str) -> dict[str, int]:
    """Bytes of a fresh process that decodes 64 tokens with that main model and arm.

    held: weights and KV caches of both models. resident: of the process after decoding, libraries included; on CUDA
    the allocator's. peak: the same at its highest, which is while the main model's file is read.
    """
    code = f"from specdec_lab.bench import _decode_once; _decode_once({main!r}, {arm!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if done.returncode:
        raise SpecdecError(f"the memory of {arm} could not be measured: {done.stderr.strip().splitlines()[-1]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def _decode_once(main_name: str, arm: str) -> None:
    main = zoo.load_main(main_name)
    held = (
        decoder_of(arm, main, "code").generate(load_prompts("code", 1)[0].prompt, max_new_tokens=64).trace.memory_bytes
    )
    if main.model.device.type == "cuda":
        resident, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
    else:
        resident = psutil.Process().memory_info().rss
        peak = max(resident, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)  # counted less exactly
    print(json.dumps({"held": held, "resident": resident, "peak": peak}))
