"""What sweeps, grids and the benchmark left in their folders, read whatever its state.

What is missing or broken is said, with the command that makes it; the rest is read all the same. It runs no model and
knows nothing of how results are shown.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from specdec_lab import experiment
from specdec_lab.claims import CLAIMS
from specdec_lab.errors import DataError
from specdec_lab.models.zoo import RATIOS
from specdec_lab.places import project_root
from specdec_lab.statistics import ARM, SETTINGS, summary
from specdec_lab.tuning import standings

FOLDERS = {"sweep": "data/results/ratio_sweep", "grid": "data/results/threshold_grid"}
BENCH = [
    "task",
    "arm",
    "draft_length",
    "prompts",
    "same",
    "alpha",
    "decode_speedup",
    "decode_throughput",
]  # read of a row
SAME = ["main", *SETTINGS, "dtype", "threads", "cpu", "gpu"]  # what the parts that are shown together have in common


@dataclass(frozen=True)
class Results:
    """Rows of the sweep and of the grid (with `round`), None where there are none; the benchmark; what to say of them.

    notes: sentences of Markdown on what is missing, broken or left out, and what to do.
    """

    sweep: pd.DataFrame | None = None
    grid: pd.DataFrame | None = None
    bench: Mapping[str, Any] | None = None
    notes: tuple[str, ...] = ()

    @cached_property
    def sweep_arms(self) -> pd.DataFrame | None:
        """experiment.summary of the sweep."""
        return None if self.sweep is None else summary(self.sweep)

    @cached_property
    def grid_arms(self) -> pd.DataFrame | None:
        """tuning.standings of the grid."""
        return None if self.grid is None else standings(self.grid)

    @cached_property
    def arms(self) -> pd.DataFrame | None:
        """Every setting of both once, the sweep's where both have it, else of the last round; and the plain loops."""
        found = []
        if self.sweep_arms is not None:
            found.append(self.sweep_arms)
        if self.grid_arms is not None:
            last = self.grid_arms["round"] == self.grid_arms.reached
            found.append(self.grid_arms[last | (self.grid_arms.draft == "none")])
        if not found:
            return None
        both = pd.concat(found, ignore_index=True)
        return both[(both.draft == "none") | ~both.duplicated(["task", *ARM])].reset_index(drop=True)

    @cached_property
    def parts(self) -> pd.DataFrame:
        """One row per part file with its settings and provenance, by the part's key."""
        found = [rows for rows in (self.sweep, self.grid) if rows is not None]
        return pd.concat(found).drop_duplicates("part").set_index("part")


def read(sweep: Path, grid: Path, bench: Path) -> Results:
    """What there is of the folders of `specdec-lab sweep` and `grid`, and of the benchmark's JSON file.

    Raises nothing for what is missing or broken: that stands in `notes`.
    """
    sweep_rows, notes = _rows("sweep", sweep)
    grid_rows, more = _rows("grid", grid)
    notes += more
    if sweep_rows is not None and grid_rows is not None and not _alike(sweep_rows, grid_rows):
        notes.append(
            f"The grid in {shown(grid)} is of another model, machine or way of sampling than the sweep: left out."
        )
        grid_rows = None
    for rows, name, folder in ((sweep_rows, "sweep", sweep), (grid_rows, "grid", grid)):
        wanted = [claim.task for claim in CLAIMS]
        lacking = [] if rows is None else [task for task in wanted if task not in set(rows.task)]
        lacking += [] if rows is None or name == "grid" else [r for r in RATIOS if r not in set(rows.draft)]
        if lacking:
            command = command_of(name, folder)
            notes.append(
                f"The {name} has no results of {', '.join(lacking)}: `{command}`, with the settings of the rest, makes "
                "them."
            )
    try:
        found = json.loads(bench.read_text(encoding="utf-8"))
        lines = [row for row in found["rows"] if row["mode"] == "greedy" and row["arm"] in ("plain", "fastest")]
        result = {
            "machine": {name: found["machine"][name] for name in ("cpu", "gpu", "threads", "date")},
            "plan": {name: found["plan"][name] for name in ("prompts", "max_new_tokens")},
            "rows": [{name: row[name] for name in BENCH} for row in lines],
        }
    except FileNotFoundError:
        result = None
        notes.append(f"There is no benchmark in {shown(bench)}: `specdec-lab bench --readme` makes it.")
    except (OSError, ValueError, KeyError, TypeError) as error:
        result = None
        reason = f"{type(error).__name__}: {error}"
        notes.append(f"{shown(bench)} cannot be read ({reason}): `specdec-lab bench --readme` makes it anew.")
    return Results(sweep_rows, grid_rows, result, tuple(notes))


def _alike(a: pd.DataFrame, b: pd.DataFrame) -> bool:
    """Whether both were decoded by the same main model in the same way, on the same machine."""
    names = [name for name in SAME if name != "max_new_tokens"]
    ours, theirs = (rows.iloc[0][names].fillna("") for rows in (a, b))
    return bool((ours == theirs).all())


def _rows(name: str, folder: Path) -> tuple[pd.DataFrame | None, list[str]]:
    """The rows of the whole parts of one setting, and what is to be said of the others."""
    found, notes, command = [], [], command_of(name, folder)
    for path in sorted(folder.glob("[!.]*.parquet")):
        try:
            found.append(experiment.load(folder, [path.stem]))
        except DataError as error:
            said = str(error).replace(f"{folder}/", "")
            notes.append(
                f"**Left out:** {said}. `{command}`, with the settings of the rest, measures its block again; if the "
                "file stays as it is, it belongs to no block of these settings: delete it."
            )
    if not found:
        notes.append(f"There are no results of the {name} in {shown(folder)}: `{command}` makes them.")
        return None, notes
    rows = pd.concat(found, ignore_index=True)
    parts = rows[rows.draft != "none"].drop_duplicates("part", keep="first")
    # a sweep compares drafts, on the same prompts; a grid compares rules of one draft, on more prompts round by round
    same = [*SAME, "prompts" if name == "sweep" else "draft"]
    groups = parts.groupby(same, dropna=False).part.agg(list)
    if groups.empty:
        notes.append(f"The results in {shown(folder)} hold the plain loop alone: `{command}` measures drafts.")
        return None, notes
    largest = max(groups, key=lambda keys: int(rows.part.isin(keys).sum()))
    if len(groups) > 1:
        many = len(parts) - len(largest)
        notes.append(f"{many} of {len(parts)} parts in {shown(folder)} have other settings than most: left out.")
    rows = _latest(rows[rows.part.isin(largest)])
    if name == "grid":
        rows["round"] = rows.groupby("task").prompts.rank(method="dense", na_option="bottom").astype(int)
    return rows, notes


def _latest(rows: pd.DataFrame) -> pd.DataFrame:
    """Each arm once per task and number of prompts asked for, as measured last; and the plain loops beside them."""
    arm = ["task", "prompts", *ARM]
    drafted = rows[rows.draft != "none"]
    last = drafted.sort_values("date").drop_duplicates(arm, keep="last")[[*arm, "part"]]
    kept = drafted.merge(last, on=[*arm, "part"])
    plain = rows[(rows.draft == "none") & rows.part.isin(set(kept.part))]
    return pd.concat([plain, kept], ignore_index=True)


def command_of(name: str, folder: Path) -> str:
    """The command that fills a folder with results; name: sweep or grid."""
    where = shown(folder)
    return f"specdec-lab {name}" + ("" if where == FOLDERS[name] else f" --results {where}")


def shown(path: Path) -> str:
    """A path from the project's root, where it is inside."""
    return str(path.relative_to(project_root()) if path.is_relative_to(project_root()) else path)
