"""Which layout of a weight is fastest here: measured once per machine and shape, kept in a file.

Layouts differ in the order of their sums, so that logits differ by about 1e-5 between them and an exact tie may fall
either way. A choice is therefore made once per process, before the first token: plain and speculative decoding by one
model always read the same weights. SPECDEC_KERNELS=fixed leaves out the measurement, for the same layouts on every
machine; deleting kernels.json in the cache folder has it made anew.
"""

import json
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from specdec_lab.errors import ModelError, require
from specdec_lab.models.folders import cache_folder
from specdec_lab.models.linear import Linear, Switched, packing_works
from specdec_lab.provenance import cpu_name

COUNTS = (1, 4, 8, 16)  # tokens of a step that plain decoding, short and long drafts ask for
CLEAR = 1.1  # a layout that is slower by less is as good
NOISE = 2.0  # upper over lower quartile of one product's times; more, and the machine is too busy to measure on
REPEATS = 5
SMALL = 2**20  # bytes of a weight that fits the processor's cache, where a layout matters little
SAMPLE = 2**24  # most bytes of a weight that is measured; of a larger one, its first rows
STREAM = 2**26  # bytes to go through before a weight is read again, as in a model, where it would not be cached

Times = dict[str, dict[int, float]]  # layout -> tokens -> median seconds


@dataclass(frozen=True)
class Plan:
    """The layout for steps of fewer than `switch` tokens, and that for `switch` and more; often the same."""

    few: str
    many: str
    switch: int = 1


def arrange(weight: Tensor, bias: Tensor | None, usual: str) -> Linear | Switched:
    """y = x Wᵀ + b in the layouts that are fastest here; `usual` where none is clearly faster, or none is measured.

    weight: [out_features, in_features]. Raises SettingError for an unknown SPECDEC_KERNELS.
    """
    mode = os.environ.get("SPECDEC_KERNELS", "measured")
    require("SPECDEC_KERNELS", mode, mode in ("measured", "fixed"), "measured or fixed")
    small = weight.nbytes < SMALL or weight.device.type != "cpu" or weight.dtype != torch.float32
    if mode == "fixed" or small:
        return Linear(weight, bias, usual)
    rows, columns = weight.shape
    times = _known_times(rows, columns, machine())
    plan = choose(times, usual) if times else Plan(usual, usual)
    few = Linear(weight, bias, plan.few)
    return few if plan.many == plan.few else Switched(few, Linear(weight, bias, plan.many), plan.switch)


def choose(times: Times, usual: str) -> Plan:
    """One layout where one is nearly the fastest at every count, else a pair that is, else the least bad one.

    usual: the layout to stay with wherever that is as good.
    """
    usual = usual if usual in times else next(iter(times))
    fastest = {k: min(counts[k] for counts in times.values()) for k in COUNTS}

    def worst(layout: str, counts: Sequence[int]) -> float:
        return max(times[layout][k] / fastest[k] for k in counts)

    def best(counts: Sequence[int]) -> str:
        return min(times, key=lambda layout: worst(layout, counts))

    one = best(COUNTS)
    for layout in (usual, one):
        if worst(layout, COUNTS) <= CLEAR:
            return Plan(layout, layout)
    for at in range(1, len(COUNTS)):
        below, above = COUNTS[:at], COUNTS[at:]
        few, many = best(below), best(above)
        if max(worst(few, below), worst(many, above)) <= CLEAR:
            return Plan(few, many, above[0])
    return Plan(usual, usual) if worst(usual, COUNTS) <= CLEAR * worst(one, COUNTS) else Plan(one, one)


def machine() -> str:
    """What a measurement holds for."""
    return f"{cpu_name()}, {torch.get_num_threads()} threads, torch {torch.__version__}, float32"


def candidates() -> tuple[str, ...]:
    """The layouts that give the same numbers but for rounding, as far as this build of torch has them."""
    return ("plain", "transposed", "packed") if packing_works() else ("plain", "transposed")


@cache
def _known_times(rows: int, columns: int, where: str) -> Times | None:
    """Times of a shape, from the file or measured now; None where the machine was too busy. Once per process."""
    shape = f"{rows}x{columns}"
    times = _times(_read().get(where, {}).get(shape))
    if times is None:
        times = measure(rows, columns)
        if times is not None:
            _remember(where, shape, times)
    return times


def measure(rows: int, columns: int) -> Times | None:
    """Median seconds of a product with a weight [rows, columns] in each layout, for each of COUNTS tokens.

    Layouts and counts alternate, over so many copies that none is in the processor's cache when its turn comes.
    None where times of one product differ so much that medians say little.
    """
    names, rows = candidates(), max(1, min(rows, SAMPLE // (4 * columns)))
    copies = max(1, math.ceil(STREAM / (4 * rows * columns * len(names))))
    weights = [torch.full((rows, columns), 0.5) for _ in range(copies)]
    products = {name: [Linear(weight, None, name) for weight in weights] for name in names}
    tokens = {k: torch.ones(k, columns) for k in COUNTS}
    taken: dict[str, dict[int, list[float]]] = {name: {k: [] for k in COUNTS} for name in names}
    turn = 0
    for repeat in range(1 + REPEATS):
        for k, x in tokens.items():
            for name, each in products.items():
                start = perf_counter()
                each[turn % copies](x)
                if repeat:  # the first round warms up
                    taken[name][k].append(perf_counter() - start)
            turn += 1
    if any(_noisy(seconds) for counts in taken.values() for seconds in counts.values()):
        return None
    times = {name: {k: statistics.median(seconds) for k, seconds in counts.items()} for name, counts in taken.items()}
    return times if all(map(_plausible, times.values())) else None


def _plausible(counts: Mapping[int, float]) -> bool:
    """Whether time grows with the tokens, but not faster than they do, as far as noise lets it."""
    return all(counts[a] / NOISE < counts[b] < counts[a] * NOISE * b / a for a, b in pairwise(COUNTS))


def _noisy(seconds: list[float]) -> bool:
    low, _, high = statistics.quantiles(seconds, method="inclusive")
    return high > NOISE * low


def _times(stored: Any) -> Times | None:
    """Times as the file holds them; None where it does not hold them all."""
    try:
        times = {name: {k: float(stored[name][str(k)]) for k in COUNTS} for name in candidates()}
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
    sound = all(math.isfinite(t) and t > 0 for counts in times.values() for t in counts.values())
    return times if sound else None


def _file() -> Path:
    return cache_folder() / "kernels.json"


def _read() -> dict[str, Any]:
    """What the file holds; nothing where it is missing or broken, as it can be measured anew."""
    try:
        stored = json.loads(_file().read_text(encoding="utf-8"))
    except (OSError, ValueError, ModelError):
        return {}
    sound = isinstance(stored, dict) and all(isinstance(shapes, dict) for shapes in stored.values())
    return stored if sound else {}


def _remember(where: str, shape: str, times: Mapping[str, Mapping[int, float]]) -> None:
    """Add to the file; where it cannot be written, the next process measures again."""
    stored = _read()
    stored.setdefault(where, {})[shape] = times
    try:
        file = _file()
        scratch = file.with_suffix(f".{os.getpid()}")
        file.parent.mkdir(parents=True, exist_ok=True)
    except (OSError, ModelError):
        return
    try:
        scratch.write_text(json.dumps(stored, indent=1), encoding="utf-8")
        os.replace(scratch, file)
    except OSError:
        scratch.unlink(missing_ok=True)
