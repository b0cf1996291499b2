"""The notebooks as a reader meets them: JupyterLab, driven in a real Chromium."""

import json
from pathlib import Path

import pytest
from driving import Lab, copy_notebook, drawn_figures, run_all, take_shot, tracebacks, write_notebook
from playwright.sync_api import Page

pytestmark = [pytest.mark.browser, pytest.mark.slow]


def test_a_figure_is_found(lab: Lab, page: Page) -> None:
    write_notebook(
        lab.folder / "figure.ipynb",
        "import matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.show()",
    )
    run_all(page, lab, "figure.ipynb")
    assert tracebacks(page).all_inner_texts() == []
    widths = drawn_figures(page)
    assert len(widths) == 1
    assert widths[0] > 100


def test_an_error_is_found(lab: Lab, page: Page) -> None:
    """The control of the other tests: a notebook that raises must not look like one that ran."""
    write_notebook(lab.folder / "broken.ipynb", "1 / 0")
    run_all(page, lab, "broken.ipynb")
    (traceback,) = tracebacks(page).all_inner_texts()
    assert "ZeroDivisionError" in traceback


def test_experiment_notebook(lab: Lab, page: Page, tmp_path: Path, tiny_folder: str, tiny_draft_folder: str) -> None:
    """02_experiment, as it stands in git but for its parameters, runs to its end and draws every figure."""
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"id": f"p{n}", "task": "prose", "prompt": f"Tell me {n} things."} for n in range(3)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    name = copy_notebook(
        "02_experiment.ipynb",
        lab.folder,
        main=tiny_folder,
        draft=tiny_draft_folder,
        task=str(prompts),
        prompts=3,
        max_new_tokens=8,
        results=str(tmp_path / "results"),
        figures=str(tmp_path / "figures"),
    )
    run_all(page, lab, name)
    take_shot(page, "02_experiment")
    assert tracebacks(page).all_inner_texts() == []
    widths = drawn_figures(page)
    assert len(widths) == len(list((tmp_path / "figures").glob("*.png"))) > 0
    assert min(widths) > 100
