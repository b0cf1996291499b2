"""JupyterLab in a real Chromium: fixtures (a plugin of pytest), and what a reader does with a notebook.

The server runs on copies of the notebooks with settings, data and workspace of its own, so that nothing of the
user's Jupyter and nothing of an earlier run is seen. Screenshots stay under build/shots.
"""

import json
import os
import re
import secrets
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import nbformat
import pytest
from papermill.iorw import load_notebook_node
from papermill.parameterize import parameterize_notebook
from playwright.sync_api import Locator, Page, expect, sync_playwright

ROOT = Path(__file__).resolve().parents[2]
SHOTS = ROOT / "build" / "shots"
STARTED_WITHIN_S = 90
RUN_WITHIN_S = 300
QUIET = ["--disable-quic", "--disable-sync", "--disable-component-update", "--disable-background-networking"]
DONE = "every cell has run"
SETTINGS = {
    "apputils-extension/notification": {"checkForUpdates": False, "fetchNews": "false"},
    # Lab keeps only the visible part of a notebook on the page unless told otherwise.
    "notebook-extension/tracker": {"windowingMode": "none"},
}


@dataclass(frozen=True)
class Lab:
    """A running JupyterLab: its address, its token, and the folder it serves."""

    url: str
    token: str
    folder: Path


def wait_for(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    """Until the server answers there; fails with its log when it ends or takes too long."""
    deadline = time.monotonic() + STARTED_WITHIN_S
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5) as reply:
                if reply.status == 200:
                    return
        except OSError:
            pass
        if server.poll() is not None or time.monotonic() > deadline:
            pytest.fail(f"the server did not start:\n{log.read_text()}")
        time.sleep(0.25)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def isolated_environment(home: Path) -> dict[str, str]:
    """os.environ with every folder of Jupyter and IPython under `home`, and SETTINGS written there."""
    for name, values in SETTINGS.items():
        plugin, setting = name.split("/")
        file = home / "settings" / "@jupyterlab" / plugin / f"{setting}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(values))
    places = {
        "JUPYTER_CONFIG_DIR": "config",
        "JUPYTER_DATA_DIR": "data",
        "JUPYTER_RUNTIME_DIR": "runtime",
        "JUPYTERLAB_SETTINGS_DIR": "settings",
        "JUPYTERLAB_WORKSPACES_DIR": "workspaces",
        "IPYTHONDIR": "ipython",
    }
    # pytest's own back end for figures must not reach the kernel, which draws into the page.
    dropped = ("MPLBACKEND", "JUPYTER_PATH")
    inherited = {name: value for name, value in os.environ.items() if name not in dropped}
    return inherited | {name: str(home / place) for name, place in places.items()} | {"PYTHONPATH": str(ROOT)}


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    home = tmp_path_factory.mktemp("lab")
    folder = home / "checkout" / "notebooks"
    folder.mkdir(parents=True)
    port, token, log = free_port(), secrets.token_hex(8), home / "lab.log"
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1"]
    command += [f"--port={port}", "--ServerApp.port_retries=0", f"--IdentityProvider.token={token}"]
    command += [f"--ServerApp.root_dir={folder}", "--LabApp.extension_manager=readonly"]
    command += ["--LabApp.expose_app_in_browser=True"]
    running = Lab(f"http://127.0.0.1:{port}", token, folder)
    with log.open("w") as sink:
        server = subprocess.Popen(command, env=isolated_environment(home), stdout=sink, stderr=sink)
    try:
        wait_for(f"{running.url}/api/status?token={token}", server, log)
        yield running
    finally:
        server.terminate()
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()


@pytest.fixture(scope="module")
def chromium_page(chromium_path: str) -> Iterator[Page]:
    with sync_playwright() as playwright:
        # Chromium's own sandbox needs rights that root in a container lacks; only local pages are opened.
        browser = playwright.chromium.launch(
            executable_path=chromium_path, args=QUIET, chromium_sandbox=os.geteuid() != 0
        )
        page = browser.new_page(viewport={"width": 1400, "height": 1600})
        page.set_default_timeout(60_000)
        expect.set_options(timeout=60_000)
        yield page
        browser.close()


@pytest.fixture
def page(chromium_page: Page) -> Iterator[Page]:
    """The page, failing the test when a script on it raised."""
    raised: list[str] = []

    def note(error: Exception) -> None:
        raised.append(str(error))

    chromium_page.on("pageerror", note)
    yield chromium_page
    chromium_page.remove_listener("pageerror", note)
    assert raised == []


def write_notebook(path: Path, *sources: str) -> None:
    """A notebook of code cells for this environment's kernel; the last one, added here, prints DONE."""
    notebook = nbformat.v4.new_notebook()
    notebook.cells = [nbformat.v4.new_code_cell(source) for source in sources]
    save_with_marker(notebook, path)


def copy_notebook(name: str, folder: Path, **parameters: object) -> str:
    """Put notebooks/`name` into `folder` with other parameters, as papermill would set them."""
    notebook = load_notebook_node(str(ROOT / "notebooks" / name))
    assert any("parameters" in cell.metadata.tags for cell in notebook.cells)
    save_with_marker(parameterize_notebook(notebook, parameters), folder / name)
    return name


def save_with_marker(notebook: nbformat.NotebookNode, path: Path) -> None:
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3 (ipykernel)"}
    notebook.cells.append(nbformat.v4.new_code_cell(f"print({DONE!r})"))
    nbformat.write(notebook, path)


def tracebacks(page: Page) -> Locator:
    stderr = page.locator('.jp-Notebook [data-mime-type="application/vnd.jupyter.stderr"]')
    return stderr.filter(has_text="Traceback (most recent call last)")


def run_all(page: Page, lab: Lab, name: str) -> None:
    """Open the notebook, Run All Cells, wait until the last cell has printed DONE or one has raised."""
    page.goto(f"{lab.url}/lab/tree/{name}?token={lab.token}&reset")
    # Before the kernel is there, Run All opens a dialog that asks for one and waits for ever. The toolbar
    # says "idle" too early; the status bar names the kernel when it is ready.
    expect(page.get_by_role("button", name="Python 3 (ipykernel) | Idle")).to_be_visible()
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_role("menuitem", name=re.compile(r"^Run All Cells")).click()
    done = page.locator(".jp-Notebook .jp-OutputArea-output").get_by_text(DONE, exact=True)
    expect(done.or_(tracebacks(page)).first).to_be_attached(timeout=RUN_WITHIN_S * 1000)


def take_shot(page: Page, name: str) -> None:
    SHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SHOTS / f"{name}.png")


def drawn_figures(page: Page) -> list[int]:
    """Widths in pixels of the figures on the page, 0 for one the browser could not decode."""
    figures = page.locator(".jp-Notebook").locator(".jp-RenderedImage img, .jp-RenderedSVG img")
    return [figure.evaluate("image => image.naturalWidth") for figure in figures.all()]
