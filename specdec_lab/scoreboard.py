"""The benchmark's result in words: tables for README and for the terminal. It knows numbers, not how they were got."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specdec_lab.errors import DataError, require_writable
from specdec_lab.metrics import LOOP
from specdec_lab.provenance import ROOT

RESULTS, README = ROOT / "data" / "results" / "bench.json", ROOT / "README.md"
MARKS = ("<!-- bench -->", "<!-- /bench -->")
COLUMNS = (
    "task", "arm", "tokens/s", "speed-up", "loop-free", "after prefill", "τ", "α", "c", "draft / verify / other",
    "MiB", "equal", "repeated",
)  # fmt: skip
MODES = {
    "greedy": "Greedy",
    "sampled": "Temperature {temperature:g}, top-p {top_p:g}",
    "schema": "Greedy, constrained by the prompt's own JSON schema; plain: the constrained plain loop",
}
LEGEND = (
    "Speed-up: tokens per second of whole calls, prefill included, over the own plain loop of the same mode on the "
    "same prompts, with its 95 % interval (bootstrap over prompts); after prefill: the same without prefills; "
    f"loop-free: without prompts whose greedy output loops ({LOOP:.0%} of its 4-grams or more stood in it "
    "before). γ: most tokens drafted a step. Draft / verify / other: shares of the time after prefill. MiB: weights "
    "and caches held; of other systems weights alone. Equal: outputs equal to the plain loop's, token for token. "
    "Repeated: share of repeated 4-grams."
)


def said_of(state: Mapping[str, Any]) -> str:
    """The verdict of `quiet`, in words."""
    verdict = "the machine is quiet" if state["quiet"] else "the machine is NOT quiet, times may be off"
    return f"{verdict}: {state['busy_share']:.0%} busy, probe {state['probe_spread']:.2f} × its median"


def markdown(result: Mapping[str, Any]) -> str:
    """The tables of a result, a mode each, with machine and versions; what README shows."""
    plan, machine, quiet_then = result["plan"], result["machine"], result["quiet"]
    alone = "quiet" if quiet_then["before"]["quiet"] and quiet_then["after"]["quiet"] else "not quiet"
    lines = [
        f"{machine['cpu']}{', ' + machine['gpu'] if machine['gpu'] else ''}, {machine['threads']} threads, torch "
        f"{machine['torch']}, transformers {machine['transformers']}, {machine['date'][:10]}; the machine was {alone}. "
        f"{plan['prompts']} prompts of each task, {plan['max_new_tokens']} new tokens.",
    ]
    for mode, about in MODES.items():
        rows = [row for row in result["rows"] if row["mode"] == mode]
        if rows:
            lines += ["", about.format(**plan) + ":", "", _table_row(COLUMNS), _table_row(["---"] * len(COLUMNS))]
            lines += [_table_row(_cells(row)) for row in rows]
            lines += _validity(rows)
    if result["missing"]:
        lines += ["", "Not run:", "", *(f"* {name}: {why}" for name, why in result["missing"].items())]
    return "\n".join([*lines, "", LEGEND])


def _table_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _cells(row: Mapping[str, Any]) -> list[str]:
    arm = row["arm"] + (f", γ = {row['draft_length']}" if row.get("draft_length") else "")
    arm += f" ({row['precision']})" if row["precision"] not in ("", "float32") else ""
    shares = [row.get(f"{part}_share") for part in ("draft", "verify", "other")]
    return [
        row["task"],
        arm,
        f"{row['throughput']:.1f}",
        _ratio_cell(row["speedup"]),
        f"{_ratio_cell(row['loop_free'])}, n = {row['loop_free']['prompts']}",
        _ratio_cell(row.get("decode_speedup")),
        _number(_value(row, "tau"), "{:.2f}"),
        _number(_value(row, "alpha"), "{:.2f}"),
        _number(row.get("c"), "{:.3f}"),
        "–" if None in shares else " / ".join(f"{share:.0%}" for share in shares),
        f"{row['memory_bytes'] / 2**20:,.0f}" if row["memory_bytes"] else "–",
        "–" if row["same"] is None else f"{row['same']} of {row['prompts']}",
        _number(row["repetition"], "{:.2f}"),
    ]


def _value(row: Mapping[str, Any], name: str) -> float | None:
    return row[name]["value"] if name in row else None


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)


def _ratio_cell(found: Mapping[str, Any] | None) -> str:
    """A ratio with its interval, where there is one."""
    if found is None or found["value"] is None:
        return "–"
    bounds = "" if found["low"] is None else f" ({found['low']:.2f} … {found['high']:.2f})"
    return f"{found['value']:.2f}×{bounds}"


def _validity(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """How many of the plain loop's whole JSON replies validate."""
    plain = [row for row in rows if row["arm"] == "plain" and row["complete"]]
    said = [f"{row['task']}: {row['validates']} of {row['complete']}" for row in plain]
    return (
        ["", f"Replies that ended by themselves and validate against their schema, {'; '.join(said)}."] if said else []
    )


def details(result: Mapping[str, Any]) -> str:
    """The plain loop against transformers, verify-cost curves and memory."""
    loop, curves, memory = result["plain_loop"], result["verify_curves"], result["memory_bytes"]
    lines = []
    if loop:
        lines += [
            f"plain loop over transformers.generate: {_ratio_cell(loop)}, {loop['prompts']} prompts, "
            f"{loop['tokens_per_s']:.1f} against {loop['reference_tokens_per_s']:.1f} tokens/s",
            f"time outside model forwards: {loop['overhead_share']:.1%} of the plain loop",
        ]
    lines.append("tokens in one forward " + "".join(f"{k:>8}" for k in curves["k"]))
    for name in ("lean", "transformers"):
        lines.append(f"{name + ', ms':22}" + "".join(f"{1e3 * s:8.1f}" for s in curves[name]))
    lines.append("lean T(k) / T(1)      " + "".join(f"{s / curves['lean'][0]:8.2f}" for s in curves["lean"]))
    for name, sizes in memory.items():
        growth = "" if name == "plain" else f"; held {sizes['held'] / memory['plain']['held'] - 1:+.1%} over main alone"
        parts = ", ".join(f"{kind} {size / 2**20:,.0f} MiB" for kind, size in sizes.items())
        lines.append(f"memory with {name}: {parts}{growth}")
    return "\n".join(lines)


def require_place(results: Path = RESULTS, readme: Path = README) -> str:
    """README's text. Raises DataError where it has no marks, or where a file that `publish` writes cannot be."""
    for file in (readme, results):
        require_writable(file)
    text = readme.read_text(encoding="utf-8") if readme.exists() else ""
    start, end = MARKS
    if text.count(start) != 1 or text.count(end) != 1:
        raise DataError(f"{readme} needs one line {start} and one {end}, for the table to stand between")
    return text


def publish(result: Mapping[str, Any], results: Path = RESULTS, readme: Path = README) -> None:
    """Write a result to data/results/bench.json, then its tables between the marks in README.md.

    Raises DataError as `require_place` does, before anything is written.
    """
    text = require_place(results, readme)
    results.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    start, end = MARKS
    section = f"{start}\n{markdown(result)}\n{end}"
    readme.write_text(re.sub(f"{start}.*?{end}", lambda _: section, text, flags=re.S), encoding="utf-8")
