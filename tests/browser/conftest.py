"""One JupyterLab and one page of Chromium for the tests of a module.

The server runs on copies of the notebooks with settings, data and workspace of its own, so that nothing of the
user's Jupyter and nothing of an earlier run is seen. Screenshots stay under build/shots.
"""

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from driving import QUIET, STARTED_WITHIN_S, Lab, free_port, isolated_environment
from playwright.sync_api import Page, expect, sync_playwright


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    home = tmp_path_factory.mktemp("lab")
    folder = home / "checkout" / "notebooks"
    folder.mkdir(parents=True)
    port, token, log = free_port(), secrets.token_hex(8), home / "lab.log"
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1"]
    command += [f"--port={port}", "--ServerApp.port_retries=0", f"--IdentityProvider.token={token}"]
    command += [f"--ServerApp.root_dir={folder}", "--LabApp.extension_manager=readonly"]
    running = Lab(f"http://127.0.0.1:{port}", token, folder)
    with log.open("w") as sink:
        server = subprocess.Popen(command, env=isolated_environment(home), stdout=sink, stderr=sink)
    try:
        deadline = time.monotonic() + STARTED_WITHIN_S
        while not running.answers():
            if server.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"JupyterLab did not start:\n{log.read_text()}")
            time.sleep(0.25)
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
