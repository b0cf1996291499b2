"""README is true: its code runs, its commands parse, what it names exists."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from specdec_lab import cli, inference
from specdec_lab.decoding import Decoder
from specdec_lab.metrics import METRICS, markdown
from specdec_lab.models import zoo

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", README, flags=re.M | re.S)
    return [text for name, text in found if name == language]


def test_the_example_drafter_decodes_losslessly(tiny_folder: str) -> None:
    names: dict[str, Any] = {}
    exec(next(block for block in blocks("python") if "class RepeatLast" in block), names)
    main = zoo.load_main(tiny_folder, device="cpu")
    plain = Decoder(main.model, tokenizer=main.tokenizer, eos=main.eos)
    drafting = Decoder(main.model, names["RepeatLast"](), 4, main.tokenizer, eos=main.eos)
    got, expected = (d.generate("Hello", max_new_tokens=24) for d in (drafting, plain))
    assert got.tokens == expected.tokens
    assert any(step.drafted for step in got.trace.steps)


def test_the_python_example_runs_on_the_bundled_pair(bundled: zoo.Main, monkeypatch: pytest.MonkeyPatch) -> None:
    code = next(block for block in blocks("python") if "load_main" in block)
    monkeypatch.setattr(zoo, "load_main", lambda name, dtype: bundled)
    exec(code, {})


def test_every_command_parses(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [line for block in blocks("") for line in block.splitlines() if line.startswith("specdec-lab ")]
    lines += re.findall(r"`(specdec-lab [^`]*--[^`]*)`", README)
    assert len(lines) >= 8
    for line in lines:
        words = [cli._underscored(word) for word in shlex.split(line)[1:]]
        cli._parser().parse_args(words)  # exits with 2 on a word it does not know


def test_every_inference_command_parses() -> None:
    start = "python -m specdec_lab.inference "
    lines = [line for block in blocks("") for line in block.splitlines() if line.startswith(start)]
    assert len(lines) >= 2
    for line in lines:
        inference._parser().parse_args([cli._underscored(word) for word in shlex.split(line.removeprefix(start))])


def test_every_file_it_names_exists() -> None:
    named = re.findall(r"`((?:docs|data|notebooks|specdec_lab)/[\w./-]+)`", README)
    named += re.findall(r"\]\(((?:figures|docs)/[\w./-]+)\)", README)
    named += [f"notebooks/{name}" for name in re.findall(r"`(\d\d_\w+\.ipynb)`", README)]
    assert named
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_metrics_page_is_the_table_in_the_code() -> None:
    assert (ROOT / "docs/METRICS.md").read_text(encoding="utf-8") == markdown()
    assert all(spec.better in ("higher", "lower", "neither") for spec in METRICS.values())
