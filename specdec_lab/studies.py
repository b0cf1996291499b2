"""Studies beside the benchmark: how well a draft agrees with the main model, and where in a text it pays.

What they share is the plain loop on the same prompts, decoded in turn. They know nothing of how results look.
"""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from specdec_lab.acceptance import Acceptance, Verdict
from specdec_lab.bench import decoder_of
from specdec_lab.control import Plan
from specdec_lab.decoding import Decoder, Strategy, decode, prefill
from specdec_lab.drafting import Drafter
from specdec_lab.errors import DataError, UnknownNameError, require, whole
from specdec_lab.experiment import alternate, encode_all
from specdec_lab.metrics import totals
from specdec_lab.models import zoo
from specdec_lab.models.protocol import Model
from specdec_lab.provenance import provenance
from specdec_lab.statistics import Interval, ratio_interval
from specdec_lab.tables import size_ratio
from specdec_lab.tasks import load_prompts
from specdec_lab.tasks.prompts import FOLDER
from specdec_lab.trace import Trace

# ---- agreement


@dataclass(frozen=True)
class Agreement:
    """How often a draft says what the main model says, on the main model's own greedy path, per token of it.

    match: its arg-max is the main model's; a place without a draft is a miss. overlap: Σ min(p, q) at temperature 1,
    p(token) for a drafter that draws nothing. alpha: accepted of tried tokens in greedy decoding at `draft_length`.
    coverage: share of places with a draft. Intervals are 95 % ones over prompts.
    """

    match: Interval
    overlap: Interval
    alpha: Interval
    coverage: float


def agreement(
    main: zoo.Main, drafter: Drafter, prompts: Sequence[Sequence[int]], max_new_tokens: int = 96, draft_length: int = 4
) -> Agreement:
    """Measure any drafter on the main model's greedy replies to these prompts (token ids), all in one batch.

    Raises SettingError for a value out of range.
    """
    greedy, sampled = (along_the_greedy_path(main, drafter, prompts, max_new_tokens, t) for t in (0.0, 1.0))
    decoder = Decoder(main.model, drafter, draft_length, main.tokenizer, eos=main.eos)
    tried = [totals([made.trace]) for made in decoder.generate_batch(prompts, max_new_tokens=max_new_tokens)]
    places = [t.planned for t in greedy]
    return Agreement(
        match=ratio_interval([t.overlap for t in greedy], places),
        overlap=ratio_interval([t.overlap for t in sampled], [t.planned for t in sampled]),
        alpha=ratio_interval([t.accepted for t in tried], [t.accepted + t.rejected for t in tried]),
        coverage=sum(t.drafted for t in greedy) / max(1, sum(places)),
    )


def along_the_greedy_path(
    main: zoo.Main, drafter: Drafter, prompts: Sequence[Sequence[int]], max_new_tokens: int, temperature: float
) -> list[Any]:
    """metrics.Totals per prompt of drafting one token at every place of the main model's greedy replies.

    Nothing is ever accepted, so that each place is drafted for; `overlap` is Σ min(p, q) at that temperature, and
    for 0 counts the places where the draft's token is the main model's.
    """
    decoder = Decoder(main.model, drafter, 1, main.tokenizer, eos=main.eos)
    rows = decoder._rows(prompts, max_new_tokens=max_new_tokens, temperature=temperature)
    everyone, longest = list(rows), max(len(row.tokens) + row.limit for row in rows) + 2
    cache = main.model.new_cache(len(rows), longest)
    with torch.inference_mode():
        prefill(main.model, drafter, rows, cache, longest)
        for _ in decode(main.model, drafter, rows, cache, Strategy(Plan(1, 1, None), _Follow()), decoder._cut):
            pass
    return [totals([row.trace]) for row in everyone]


class _Follow(Acceptance):
    """Goes on with the main model's arg-max, whatever was drafted."""

    def judge(
        self, tokens: Tensor, parents: Tensor, p: Tensor, q: Tensor | None, u: Tensor | None, threshold: Tensor
    ) -> Verdict:
        """Accept nothing."""
        none = torch.zeros_like(tokens, dtype=torch.bool)
        last = torch.full((len(tokens),), -1, device=tokens.device)
        return Verdict(none, parents >= -1, last, p[:, 0].argmax(-1))


def agreement_line(main: Model, drafter: Drafter, found: Agreement) -> dict[str, Any]:
    """An Agreement as flat JSON-able values, with the sizes main : draft in all and without embedding and head.

    None: a value or bound that is undefined.
    """
    # JSON has no NaN, which stands for what there is too little of
    line: dict[str, Any] = {"prompts": found.match.prompts, "coverage": found.coverage}
    for name in ("match", "overlap", "alpha"):
        got: Interval = getattr(found, name)
        bounds = {name: got.value, f"{name}_low": got.low, f"{name}_high": got.high}
        line |= {key: value if math.isfinite(value) else None for key, value in bounds.items()}
    model = getattr(drafter, "model", None)
    ours, mains = ((m.parameters, m.parameters - m.embedding_parameters) if m else (0, 0) for m in (model, main))
    line["ratio"], line["ratio_without_embedding"] = map(size_ratio, mains, ours)
    return line


# ---- speed-up over prompt length, and over the position in the output


LENGTHS, POSITIONS = "lengths", "positions"
FILES = {LENGTHS: "prompt_length", POSITIONS: "output_position"}
SUMS = ("emitted", "seconds", "accepted", "tried")


@dataclass(frozen=True)
class Study:
    """What a study runs. drafts: as in the benchmark, `fastest` among them; lengths: of prompts, in tokens.

    what: "lengths" or "positions"; width: tokens of output that one position stands for.
    Raises SettingError for a value out of range, UnknownNameError for another study or task.
    """

    what: str = LENGTHS
    drafts: tuple[str, ...] = ("1:4", "ngram", "fastest")
    tasks: tuple[str, ...] = ("json", "code", "prose")
    prompts: int = 6
    max_new_tokens: int = 64
    lengths: tuple[int, ...] = (64, 128, 256, 512, 1024, 2048)
    width: int = 16

    def __post_init__(self) -> None:
        if self.what not in FILES:
            raise UnknownNameError("study", self.what, FILES)
        for name in ("drafts", "tasks", "lengths"):
            values = getattr(self, name)
            require(name, values, 0 < len(set(values)) == len(values), "one or more, all different")
        for name in ("prompts", "max_new_tokens", "width"):
            require(
                name, getattr(self, name), whole(getattr(self, name)) and getattr(self, name) >= 1, "an integer >= 1"
            )
        require("lengths", self.lengths, all(whole(n) and n >= 2 for n in self.lengths), "integers >= 2")
        for task in self.tasks:
            load_prompts(task, 1)

    def run(self, main: zoo.Main, tick: Callable[[int], Any] = lambda count: None) -> pd.DataFrame:
        """Decode every prompt by the plain loop and every draft in turn, greedily; raw sums.

        A row per (task, draft, prompt, x); x: the prompt's length, or the first token of a span of the output. A step
        belongs to the span in which it begins. Raises ModelError for a draft that cannot be loaded, SettingError for
        lengths, or lengths and max_new_tokens, beyond the model's context.
        """
        if self.what == LENGTHS:
            longest, context = max(self.lengths), main.model.context_length
            require("lengths", self.lengths, longest < context, f"up to {context - 1}, for the model's context")
            room, where = context - longest, f"for prompts of {longest} tokens in a context of {context}"
            require("max_new_tokens", self.max_new_tokens, self.max_new_tokens <= room, f"1 … {room}, {where}")
        rows = []
        for task in self.tasks:
            names = ("plain", *self.drafts)
            kind, loaded = load_prompts(task, 1)[0].task, dict[str, Drafter]()
            decoders = [decoder_of(name, main, kind, loaded) for name in names]
            for x, prompts in self._prompts(decoders[0], task):
                runs = alternate(decoders, prompts, 0, tick, max_new_tokens=self.max_new_tokens)
                for index, sides in enumerate(runs):
                    spans = [by_span([made.trace], self.width if x is None else None) for _, made in sides]
                    for name, decoder, span in zip(names[1:], decoders[1:], spans[1:], strict=True):
                        about = {"task": task, "draft": name, "prompt_id": index, **_size(decoder.drafter)}
                        rows += [
                            {**about, "x": start if x is None else x, **sums} for start, sums in _beside(span, spans[0])
                        ]
        return pd.DataFrame(rows)

    def _prompts(self, decoder: Decoder, task: str) -> Iterator[tuple[int | None, list[list[int]]]]:
        """(length, prompts of that length), or (None, the task's prompts) for positions."""
        if self.what == POSITIONS:
            yield None, encode_all(decoder, load_prompts(task, self.prompts))
            return
        for length in self.lengths:
            yield length, prompts_of_length(decoder, task, length, self.prompts)


STUDIES = {LENGTHS: Study(), POSITIONS: Study(POSITIONS, prompts=12, max_new_tokens=256)}  # as README shows them


def _size(drafter: Drafter) -> dict[str, int]:
    return {"draft_parameters": getattr(getattr(drafter, "model", None), "parameters", 0)}


def by_span(traces: Sequence[Trace], width: int | None) -> dict[int, dict[str, float]]:
    """SUMS over the steps that begin in each `width` tokens of the output, by its first; None: all of it is one."""
    spans: dict[int, dict[str, float]] = {}
    for trace in traces:
        at = 0
        for step in trace.steps:
            sums = spans.setdefault(at // width * width if width else 0, dict.fromkeys(SUMS, 0.0))
            sums["emitted"] += step.emitted
            sums["seconds"] += (step.draft_s + step.verify_s + step.other_s) / step.active
            sums["accepted"] += step.fate.count("accepted")
            sums["tried"] += len(step.fate) - step.fate.count("untried")
            at += step.emitted
    return spans


def _beside(
    mine: dict[int, dict[str, float]], plain: dict[int, dict[str, float]]
) -> Iterator[tuple[int, dict[str, float]]]:
    """(start, sums with the plain loop's as plain_*) of every span that both have."""
    for start in sorted(mine.keys() & plain.keys()):
        yield start, mine[start] | {f"plain_{name}": plain[start][name] for name in ("emitted", "seconds")}


def prompts_of_length(decoder: Decoder, task: str, length: int, count: int) -> list[list[int]]:
    """`count` prompts of exactly `length` tokens, which end alike at every length.

    Before a task's prompt stands more text of its kind: other prompts with their reference answers, and for tasks
    without those a book. All is cut from the left. Raises SettingError where there is not enough text.
    """
    rows = load_prompts(task, count)
    before = _texts_before(task, {row.id for row in rows}, len(rows))
    out = []
    for ids, text in zip(encode_all(decoder, rows), before, strict=True):
        whole_text = [*decoder.tokenizer(text, add_special_tokens=False)["input_ids"], *ids]
        require("lengths", length, len(whole_text) >= length, f"up to {len(whole_text)}, all the text that {task} has")
        out.append(whole_text[-length:])
    return out


def _texts_before(task: str, used: set[str], count: int) -> list[str]:
    """Text to put before each of `count` prompts, a different one each."""
    answered = [
        f"{row.prompt}\n\n{row.reference if isinstance(row.reference, str) else json.dumps(row.reference)}"
        for row in load_prompts(task)
        if row.reference is not None and row.id not in used
    ]
    if answered:
        return ["\n\n".join(answered[i::count]) for i in range(count)]
    books = sorted((FOLDER / "texts").glob("*.txt"))
    if not books:
        raise DataError(f"no books in {FOLDER / 'texts'} to put before the prompts of {task}")
    texts = [book.read_text(encoding="utf-8") for book in books]
    places = [(i % len(texts), 20_000 * (1 + i // len(texts))) for i in range(count)]
    return [texts[book][start : start + 20_000] for book, start in places]


def table(rows: pd.DataFrame) -> pd.DataFrame:
    """Speed-up after prefill and α with intervals, a row per (task, draft, x)."""
    out = []
    for (task, draft, x), group in rows.groupby(["task", "draft", "x"], sort=False):
        speedup = ratio_interval(group.emitted, group.seconds, group.plain_emitted, group.plain_seconds)
        alpha = ratio_interval(group.accepted, group.tried)
        line = {"task": task, "draft": draft, "x": x, "prompts": len(group)}
        line["draft_parameters"] = group.draft_parameters.iloc[0]
        for name, found in {"speedup": speedup, "alpha": alpha}.items():
            line |= {name: found.value, f"{name}_low": found.low, f"{name}_high": found.high}
        out.append(line)
    return pd.DataFrame(out)


def store(study: Study, rows: pd.DataFrame, folder: Path) -> list[Path]:
    """Write the rows as parquet, and settings, machine and table as JSON; returns both paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{FILES[study.what]}.{ending}" for ending in ("parquet", "json")]
    rows.to_parquet(paths[0])
    lines = json.loads(table(rows).to_json(orient="records"))
    about = {"settings": asdict(study), "machine": provenance(), "table": lines}
    paths[1].write_text(json.dumps(about, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return paths
