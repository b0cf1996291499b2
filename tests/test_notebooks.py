"""Notebooks: executed on tiny models from end to end, and refused when name, tag or parameters are wrong."""

import ast
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import nbformat
import pytest

from specdec_lab import cli
from specdec_lab.errors import DataError, SpecdecError, UnknownNameError
from specdec_lab.experiment import grid, sweep
from specdec_lab.notebooks import find_notebook, from_root, notebooks, parameters_of, project_root, run_notebook
from specdec_lab.tuning import Search

NAMES = ["02_experiment", "03_ratio_sweep", "04_threshold_grid", "08_distill_drafts", "09_report"]
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def write(path: Path, *sources: str, tag: str | None = "parameters") -> Path:
    """A notebook of code cells, the first of them tagged."""
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    cells[0].metadata["tags"] = [tag] if tag else []
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": KERNEL}), path)
    return path


def outputs(path: Path, kind: str) -> list[str]:
    """The outputs of that MIME type, or what was printed ("stdout", "stderr"), of an executed notebook."""
    cells = nbformat.read(path, as_version=4).cells
    all_of_them = [output for cell in cells for output in cell.get("outputs", [])]
    if kind.startswith("std"):
        return [output.text for output in all_of_them if output.get("name") == kind]
    return [output.data[kind] for output in all_of_them if kind in output.get("data", {})]


@pytest.fixture
def tiny(tmp_path: Path, tiny_folder: str, tiny_draft_folder: str) -> dict[str, Any]:
    """Parameters that every experiment on tiny models shares, and a file of prompts."""
    lines = [json.dumps({"prompt": f"Say {n} things about {n * 7}."}) for n in range(5)]
    (tmp_path / "own.jsonl").write_text("\n".join(lines))
    folders = {"results": str(tmp_path / "results"), "figures": str(tmp_path / "figures")}
    return {"main": tiny_folder, "prompts": 5, "max_new_tokens": 8, "threads": 1, **folders}


@pytest.mark.slow
def test_the_sweep_runs_to_its_end(tiny: dict[str, Any], tmp_path: Path, tiny_draft_folder: str) -> None:
    given = {**tiny, "drafts": [tiny_draft_folder, "ngram"], "tasks": [str(tmp_path / "own.jsonl")]}
    out = run_notebook("03_ratio_sweep", {**given, "draft_lengths": [2]}, tmp_path / "out" / "sweep.ipynb", quiet=True)
    assert out == tmp_path / "out" / "sweep.ipynb"
    assert [path.name for path in out.parent.iterdir()] == ["sweep.ipynb"], "no scratch file is left"
    printed = "".join(outputs(out, "stdout"))
    assert printed.endswith("03_ratio_sweep finished\n")
    assert "tiny_draft" in printed
    names = ["acceptance_by_position", "speedup_by_ratio", "throughput_acceptance", "time_split", "verify_cost"]
    assert sorted(path.name for path in (tmp_path / "figures").iterdir()) == [
        f"{name}.{kind}" for name in names for kind in ("png", "svg")
    ]
    assert len(outputs(out, "image/png")) == len(names)
    assert len(outputs(out, "text/markdown")) == len(names) + 1, "a sentence under each, and the verdict"
    assert len(list((tmp_path / "results").glob("*.parquet"))) == 2


@pytest.mark.slow
def test_one_experiment_runs_to_its_end(tiny: dict[str, Any], tmp_path: Path, tiny_draft_folder: str) -> None:
    given = {**tiny, "draft": tiny_draft_folder, "task": str(tmp_path / "own.jsonl"), "temperature": 0.8, "top_p": 0.9}
    out = run_notebook("02_experiment", given, tmp_path / "one.ipynb", quiet=True)
    assert "".join(outputs(out, "stdout")).endswith("02_experiment finished\n")
    assert len(outputs(out, "image/png")) == len(list((tmp_path / "figures").glob("*.svg"))) == 5
    table = next(text for text in outputs(out, "text/markdown") if text.startswith("| metric"))
    assert "| throughput |" in table
    assert "Σ emitted / Σ decode time" in table


@pytest.mark.slow
def test_the_grid_runs_to_its_end(tiny: dict[str, Any], tmp_path: Path, tiny_draft_folder: str) -> None:
    grid = {"draft_lengths": [2], "candidate_counts": [1, 2], "thresholds": [0.2], "prompts": [1, 5], "keep": [3]}
    given = {**tiny, **grid, "draft": tiny_draft_folder, "tasks": [str(tmp_path / "own.jsonl")]}
    out = run_notebook("04_threshold_grid", given, tmp_path / "grid.ipynb", quiet=True)
    printed = "".join(outputs(out, "stdout"))
    assert printed.endswith("04_threshold_grid finished\n")
    assert "lossless, γ = 2, K = " in printed, "the table of the last round"
    files = sorted(path.name for path in (tmp_path / "figures").iterdir())
    assert files == ["pareto.png", "pareto.svg", "threshold_heat.png", "threshold_heat.svg"]
    (heat, front) = outputs(out, "text/markdown")
    assert "of 8, on 1 prompt a task" in heat
    assert "* **own.jsonl**: best without loss is lossless, γ = 2, K = " in front
    assert len(list((tmp_path / "results").glob("*.parquet"))) == 2, "a part for each round"


@pytest.mark.slow
def test_the_report_runs_to_its_end_with_and_without_results(tiny: dict[str, Any], tmp_path: Path) -> None:
    tasks, folder = [str(tmp_path / "own.jsonl")], tmp_path / "results"
    sweep(grid([tiny["main"]], ["ngram"], tasks, [2], prompts=5, max_new_tokens=8, threads=1), folder, progress=False)
    (folder / "0.parquet").write_text("broken")
    page, nothing = tmp_path / "page.html", str(tmp_path / "nothing")
    given = {"grid": nothing, "bench": nothing, "figures": tiny["figures"], "html": str(page)}
    for sweep_folder, pictures in ((folder, 5), (nothing, 1)):
        out = run_notebook("09_report", {**given, "sweep": str(sweep_folder)}, tmp_path / "out.ipynb", quiet=True)
        assert "".join(outputs(out, "stdout")).endswith(f"the page is {page}\n09_report finished\n")
        text = page.read_text(encoding="utf-8")
        assert text.count("<img ") == len(outputs(out, "image/png")) == pictures
        assert "<script" not in text
        assert ("0.parquet is not a whole part file" in text) == (sweep_folder == folder)


def test_the_grids_defaults_are_those_of_the_search() -> None:
    defaults = {field.name: field.default for field in fields(Search)}
    for name, value in values_of("04_threshold_grid").items():
        if name not in ("results", "figures"):
            assert (tuple(value) if isinstance(value, list) else value or defaults[name]) == defaults[name], name


def values_of(name: str) -> dict[str, Any]:
    """The default of every parameter of a notebook."""
    cells = nbformat.read(notebooks()[name], as_version=4).cells
    source = next(cell.source for cell in cells if "parameters" in cell.metadata.get("tags", ()))
    return {line.target.id: ast.literal_eval(line.value) for line in ast.parse(source).body}


@pytest.mark.slow
@pytest.mark.usefixtures("bundled")
def test_the_shipped_draft_is_measured(tmp_path: Path) -> None:
    from specdec_lab.models.zoo import DRAFTS

    if not (DRAFTS / "1-4" / "model.safetensors").exists():
        pytest.skip("no drafts in data/models")
    few = {"train": False, "tasks": ["json"], "prompts": 1, "max_new_tokens": 8, "figures": str(tmp_path / "figures")}
    out = run_notebook("08_distill_drafts", few, tmp_path / "out.ipynb", quiet=True)
    assert "".join(outputs(out, "stdout")).endswith("08_distill_drafts finished\n")
    assert len(outputs(out, "image/png")) == 2


@pytest.mark.parametrize("name", NAMES)
def test_notebooks_are_thin_titled_and_annotated(name: str) -> None:
    book = nbformat.read(notebooks()[name], as_version=4)
    assert (book.nbformat, book.nbformat_minor) == (4, 5)
    assert book.cells[0].cell_type == "markdown"
    assert book.cells[0].source.startswith("# ")
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    assert all(len(cell.source.splitlines()) <= 15 for cell in code if "tags" not in cell.metadata)
    pairs = list(zip(book.cells[:-1], book.cells[1:], strict=True))[1:]
    assert all(before.cell_type == "markdown" for before, cell in pairs if cell.cell_type == "code")
    assert f'print("{name} finished")' in code[-1].source
    for line, statement in zip(code[0].source.splitlines(), ast.parse(code[0].source).body, strict=True):
        assert isinstance(statement, ast.AnnAssign), line
        assert "  # " in line, "a parameter says what it is"
    assert len(parameters_of(name)) == len(code[0].source.splitlines())


def test_the_command_line_and_the_sweep_agree_on_names() -> None:
    passed = {"main", "drafts", "tasks", "draft_lengths", "prompts", "max_new_tokens", "seed", "threads"}
    assert passed | {"temperature", "results", "figures"} <= set(parameters_of("03_ratio_sweep"))
    for command, name in (("grid", "04_threshold_grid"), ("report", "09_report")):
        args = cli._parser().parse_args([command])
        assert set(vars(args)) - {"command", "run", "json"} == set(parameters_of(name))


# ---- what is refused


def test_an_unknown_notebook_is_refused_with_those_there_are() -> None:
    for name in ("04_nothing", "nowhere/03_ratio_sweep.ipynb", ""):
        with pytest.raises(UnknownNameError, match="02_experiment, 03_ratio_sweep"):
            run_notebook(name)


def test_a_notebook_is_found_by_name_file_or_path(tmp_path: Path) -> None:
    own = write(tmp_path / "own.ipynb", "x: int = 1")
    assert find_notebook("03_ratio_sweep") == find_notebook("03_ratio_sweep.ipynb") == notebooks()["03_ratio_sweep"]
    assert find_notebook(own) == own


def test_an_unknown_parameter_is_refused_with_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match=r"03_ratio_sweep 'draft_length'; there is: .*draft_lengths.*seed"):
        run_notebook("03_ratio_sweep", {"seed": 1, "draft_length": 4}, tmp_path / "out.ipynb")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("tag", "says"), [(None, "no cells have the tag 'parameters'"), ("parameter", "no cells")])
def test_a_notebook_without_the_tag_is_refused(tmp_path: Path, tag: str | None, says: str) -> None:
    with pytest.raises(DataError, match=says):
        run_notebook(write(tmp_path / "own.ipynb", "x: int = 1", tag=tag), {}, tmp_path / "out.ipynb")


@pytest.mark.parametrize("content", ["", "{}", "not json", '{"cells": 3, "nbformat": 4, "nbformat_minor": 5}'])
def test_a_broken_notebook_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "broken.ipynb").write_text(content)
    with pytest.raises(DataError, match="broken.ipynb"):
        run_notebook(tmp_path / "broken.ipynb")


# ---- how it runs


@pytest.mark.slow
def test_parameters_and_interpreter_are_the_callers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel of the same name that is registered on the machine does not take over."""
    other = tmp_path / "share" / "kernels" / "python3"
    other.mkdir(parents=True)
    (other / "kernel.json").write_text(json.dumps({"argv": ["/bin/false"], "display_name": "x", "language": "python"}))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "share"))
    monkeypatch.chdir(tmp_path)
    values = {"a": {"k": [1, None, True]}, "b": 'it\'s\n"quoted"', "c": 0.5}
    show = "import os, sys\nprint(sys.executable)\nprint(os.getcwd())\nprint([a, b, c])"
    own = write(tmp_path / "own.ipynb", "a: dict = {}\nb: str = ''\nc: float = 1.0", show)
    (printed,) = outputs(run_notebook(own, values, "out.ipynb", quiet=True), "stdout")
    assert printed.splitlines() == [sys.executable, str(project_root()), repr(list(values.values()))]
    assert (tmp_path / "out.ipynb").exists()


@pytest.mark.slow
def test_a_failing_cell_is_an_error_and_what_ran_is_kept(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    own = write(tmp_path / "own.ipynb", "x: int = 1", "print('so far')", "raise ValueError('no such thing')")
    out = tmp_path / "out.ipynb"
    out.write_text("an older run")
    with pytest.raises(SpecdecError, match="own failed: ValueError: no such thing; what ran is in .*out.ipynb"):
        run_notebook(own, {"x": 2}, out)
    assert outputs(out, "stdout") == ["so far\n"]
    assert capfd.readouterr().out == "so far\n", "what cells print goes on"


@pytest.mark.slow
def test_ctrl_c_arrives_and_leaves_no_kernel(tmp_path: Path) -> None:
    pid, out = tmp_path / "pid", tmp_path / "out.ipynb"
    wait = f"import os, time\nopen({str(pid)!r}, 'w').write(str(os.getpid()))\ntime.sleep(300)"
    own = write(tmp_path / "own.ipynb", "x: int = 1", wait)
    call = f"from specdec_lab.notebooks import run_notebook\nrun_notebook({str(own)!r}, {{}}, {str(out)!r})"
    command = f"import sys\ntry:\n    exec({call!r})\nexcept KeyboardInterrupt:\n    sys.exit(130)"
    running = subprocess.Popen([sys.executable, "-c", command], cwd=project_root(), stderr=subprocess.PIPE)
    deadline = time.monotonic() + 120
    while not (pid.exists() and pid.read_text()):
        assert running.poll() is None, "it ended before the cell began"
        assert time.monotonic() < deadline
        time.sleep(0.1)
    running.send_signal(signal.SIGINT)
    assert running.wait(timeout=60) == 130
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)
    assert out.exists(), "what ran is kept"
    assert [path.name for path in tmp_path.glob(".*.ipynb")] == []


def test_paths_start_at_the_root_wherever_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert (project_root() / "notebooks" / "03_ratio_sweep.ipynb").is_file()
    assert from_root("data/results") == project_root() / "data" / "results"
    assert from_root(tmp_path / "x") == tmp_path / "x"
