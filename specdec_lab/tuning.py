"""Search for the best setting: a grid of arms for one draft, and successive halving over it.

Every arm decodes a few prompts; those that could be on the front of speed against quality, and the fastest lossless
ones, go on to more prompts (1502.07943, with a front in place of one score). Rounds are experiment blocks with their
own part files, so that a search resumes like a sweep. It draws nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from specdec_lab.acceptance import Acceptance
from specdec_lab.errors import DataError, require, whole
from specdec_lab.experiment import DRAWS_NOTHING, Arm, Block, summary, sweep
from specdec_lab.statistics import RESAMPLES, fronts

ARTICLES: dict[str, tuple[Any, ...]] = {  # the whole grid of the articles
    "draft_lengths": (8, 16, 24, 32),
    "candidate_counts": (2, 4, 8),
    "thresholds": (0.5, 0.6, 0.7, 0.8, 0.9),
}
RUNS = 240  # of a block, about: what a search that is killed loses at most
LOSSLESS = 3  # one place in so many is kept for the fastest lossless arms
LISTS = ("tasks", "draft_lengths", "candidate_counts", "thresholds", "rules", "prompts", "keep")


@dataclass(frozen=True)
class Search:
    """A grid of one draft's settings on some tasks, and how it is narrowed down.

    thresholds: of every rule but lossless. max_retries: of the rules block and sequence. prompts: of each round, per
    task, more from round to round; three times as many hold the ones before. keep: arms of a task that go on after
    each round but the last. full: the articles' grid, every arm of it on the last round's prompts. The other fields
    are Block's. Raises SettingError, UnknownNameError, and DataError for a broken prompts file.
    """

    main: str = "bundled"
    draft: str = "1:4"
    tasks: tuple[str, ...] = ("json", "code", "prose")
    draft_lengths: tuple[int, ...] = (4, 8, 16)
    candidate_counts: tuple[int, ...] = (1, 4)
    thresholds: tuple[float, ...] = (0.3, 0.7)
    rules: tuple[str, ...] = ("lossless", "threshold", "typical", "block")
    max_retries: int = 1
    prompts: tuple[int, ...] = (2, 6, 18)
    keep: tuple[int, ...] = (10, 5)
    full: bool = False
    max_new_tokens: int = 48
    temperature: float = 0.0
    seed: int = 0
    device: str | None = None
    dtype: str | None = None
    threads: int | None = None

    def __post_init__(self) -> None:
        for name in LISTS:
            values = getattr(self, name)
            filled = isinstance(values, list | tuple) and (len(values) > 0 or name == "keep")
            require(name, values, filled and len(set(values)) == len(values), "a list of different values, not empty")
            object.__setattr__(self, name, tuple(values))
        require("full", self.full, isinstance(self.full, bool), "true or false")
        self._require_rounds()
        if self.full:
            usual = {field.name: field.default for field in fields(self)}
            for name, values in ARTICLES.items():
                free = getattr(self, name) in (usual[name], values)
                require(name, getattr(self, name), free, "none beside full, which is the articles' grid")
                object.__setattr__(self, name, values)
        self.blocks(0, dict.fromkeys(self.tasks, self.arms))  # these validate

    def _require_rounds(self) -> None:
        ok = all(whole(n) and n >= 1 for n in self.prompts) and list(self.prompts) == sorted(self.prompts)
        require("prompts", self.prompts, ok, "integers >= 1, more from round to round")
        ok = all(whole(n) and n >= 1 for n in self.keep) and list(self.keep) == sorted(self.keep, reverse=True)
        fits = ok and len(self.keep) == len(self.prompts) - 1
        require(
            "keep",
            self.keep,
            fits,
            f"a list of {len(self.prompts) - 1} integers >= 1, one fewer than prompts, ever smaller",
        )

    @property
    def rounds(self) -> tuple[int, ...]:
        """Prompts of each round."""
        return self.prompts[-1:] if self.full else self.prompts

    @cached_property
    def arms(self) -> tuple[Arm, ...]:
        """The cells of the grid, the same for each task."""
        named = (self.rules, self.draft_lengths, self.candidate_counts, self.thresholds)
        return grid_arms(self.draft, *named, max_retries=self.max_retries)

    def blocks(self, index: int, arms: Mapping[str, Sequence[Arm]]) -> list[Block]:
        """The blocks of a round, each with its own baseline: as many arms of a task as make about RUNS runs."""
        count = self.rounds[index]
        many = max(4, RUNS // count)
        common = {name: getattr(self, name) for name in ("max_new_tokens", "temperature", "seed", "device", "dtype")}
        return [
            Block(self.main, task, tuple(own[start : start + many]), prompts=count, threads=self.threads, **common)
            for task, own in arms.items()
            for start in range(0, len(own), many)
        ]

    def run(self, folder: str | Path, progress: bool = True) -> pd.DataFrame:
        """Run what has no part file in `folder` yet; the rows of experiment.load with `round`, which counts from 1.

        Raises what experiment.sweep raises; killed at any moment, the same call resumes.
        """
        left, found = dict.fromkeys(self.tasks, self.arms), []
        for index, keep in enumerate([*self.keep[: len(self.rounds) - 1], 0]):
            rows = sweep(self.blocks(index, left), folder, progress)
            found.append(rows.assign(round=index + 1))
            if keep:
                table = summary(rows, resamples=1)  # values, not their intervals
                left = {task: survivors(table[table.task == task], keep) for task in self.tasks}
        return pd.concat(found, ignore_index=True)


def grid_arms(
    draft: str,
    rules: Sequence[str],
    draft_lengths: Sequence[int],
    candidate_counts: Sequence[int],
    thresholds: Sequence[float],
    max_retries: int | None = None,
) -> tuple[Arm, ...]:
    """Every combination that is a setting of its own; candidates are dynamic trees, and chains where drafts are drawn.

    The lossless rule has no threshold, and gets candidate_count 1, what other rules are held against, in any case. The
    rule sequence drafts whole texts, so it takes one draft length. Raises what Arm raises.
    """
    arms = []
    for rule in rules:
        retries = Acceptance(rule).retries
        lossy = Acceptance(rule).threshold is not None
        counts = candidate_counts if lossy or 1 in candidate_counts else (1, *candidate_counts)
        lengths = draft_lengths[:1] if rule == "sequence" else draft_lengths
        for length, count, threshold in product(lengths, counts, thresholds if lossy else (None,)):
            how: dict[str, Any] = {"acceptance_rule": rule, "acceptance_threshold": threshold}
            how |= {"max_retries": max_retries} if retries and draft not in DRAWS_NOTHING else {}
            arms.append(Arm(draft, length, count, **how))
    return tuple(dict.fromkeys(arms))


# ---- narrowing down


def survivors(arms: pd.DataFrame, keep: int) -> tuple[Arm, ...]:
    """Which arms of a task go on to more prompts: at most `keep`, in the order of the table.

    arms: experiment.summary of one round. A third of the places (one at least) is for the fastest lossless arms; the
    others are filled front by front, the fastest of a front first. A front holds what no other arm beats in both
    speculative_speedup and loss; the loss is nll_delta, as a task score says too little on a few prompts, and a text
    that the main model finds likelier than its own (often one that repeats itself) counts as equal.
    """
    require("keep", keep, whole(keep) and keep >= 1, "an integer >= 1")
    table = arms[arms.draft != "none"].reset_index(drop=True)
    lossless = (table.acceptance_rule == "lossless").to_numpy()
    speed = table.speculative_speedup.fillna(0.0).to_numpy(float)
    loss = np.where(lossless, 0.0, table.nll_delta.clip(lower=0).fillna(np.inf).to_numpy(float))
    fastest = np.argsort(-speed, kind="stable")
    chosen = [at for at in fastest if lossless[at]][: min(keep, max(1, keep // LOSSLESS))]
    for front in fronts(speed, loss):
        chosen += [at for at in fastest if at in front and at not in chosen]
    return tuple(arm_of(table.iloc[at]) for at in sorted(chosen[:keep]))


def arm_of(row: Mapping[str, Any] | pd.Series) -> Arm:
    """The Arm of a row of experiment.load or summary."""
    values: dict[str, Any] = {}
    for field in fields(Arm):
        value = row[field.name]
        number = int if field.name in ("draft_length", "candidate_count", "max_retries") else float
        text = isinstance(value, str)
        values[field.name] = value if text else None if pd.isna(value) else number(value)
    return Arm(**values)


def standings(rows: pd.DataFrame, resamples: int = RESAMPLES) -> pd.DataFrame:
    """experiment.summary of a search's rows, with `round`, and `reached`, the last round of the arm on that task.

    Raises DataError for rows without rounds.
    """
    if "round" not in rows:
        raise DataError("the rows have no column round; those of Search.run have")
    arms = summary(rows, resamples)
    arms["round"] = arms.part.map(rows.drop_duplicates("part").set_index("part")["round"])
    same = ["task", *(field.name for field in fields(Arm))]
    arms["reached"] = arms.groupby(same, dropna=False)["round"].transform("max")
    return arms
