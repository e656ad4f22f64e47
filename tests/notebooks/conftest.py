"""A real browser, a real JupyterLab and the exported reports, each started once for the tests that share it."""

from __future__ import annotations

import json
import os
import secrets
import shutil
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

from harness import report

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One worker holds the browser, the server and the reports, so each starts once."""
    for item in items:
        if "browser" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("browser"))


@pytest.fixture(scope="session")
def browser() -> Iterator:
    """Chromium from the system's packages; skips with a reason without one, unless REQUIRE_BROWSER is set."""
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        reason = f"no {' or '.join(BROWSERS)} on the path: `apt-get install chromium`, or your system's package of it"
        if os.environ.get("REQUIRE_BROWSER"):
            pytest.fail(reason)
        pytest.skip(reason)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=found, headless=True, args=FLAGS)
        yield chromium
        chromium.close()


@dataclass
class Lab:
    """A running JupyterLab: its address, and the folder that it serves."""

    url: str
    token: str
    folder: Path

    def open(self, notebook: str) -> str:
        return f"{self.url}/lab/tree/{notebook}?token={self.token}"

    def wait_for_kernel(self, seconds: float = 90) -> None:
        """Until a page is connected to an idle kernel: one that still starts would ask which kernel to run."""
        stop = time.monotonic() + seconds
        while time.monotonic() < stop:
            with urllib.request.urlopen(f"{self.url}/api/kernels?token={self.token}", timeout=10) as answer:
                if any(kernel["execution_state"] == "idle" and kernel["connections"] for kernel in json.load(answer)):
                    return
            time.sleep(0.5)
        pytest.fail("no kernel became idle")


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """JupyterLab on a free port, with settings, workspaces and runtime files of its own, over copied notebooks."""
    home = tmp_path_factory.mktemp("jupyter")
    folder = home / "notebooks"
    folder.mkdir()
    for path in report.sources():
        notebook = nbformat.read(path, as_version=4)
        for cell in notebook.cells:
            if cell.cell_type == "code":  # so that what a test sees was made by its own run
                cell.outputs, cell.execution_count = [], None
        nbformat.write(notebook, folder / path.name)
    settings = {
        # Else a cell outside the window has no element to look at.
        "notebook-extension/tracker": {"windowingMode": "none"},
        "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    }
    for name, chosen in settings.items():
        path = home / f"settings/@jupyterlab/{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(chosen))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    token = secrets.token_hex(16)
    environment = {
        **os.environ,
        "JUPYTER_CONFIG_DIR": str(home / "config"),
        "JUPYTER_RUNTIME_DIR": str(home / "runtime"),
        "JUPYTERLAB_SETTINGS_DIR": str(home / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(home / "workspaces"),
    }
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1", f"--port={port}"]
    command += ["--ServerApp.port_retries=0", f"--IdentityProvider.token={token}", f"--ServerApp.root_dir={folder}"]
    log = (home / "lab.log").open("w+")
    server = subprocess.Popen(command, cwd=home, env=environment, stdout=log, stderr=subprocess.STDOUT)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(240):
            try:
                urllib.request.urlopen(f"{url}/api?token={token}", timeout=5)
                break
            except OSError:
                if server.poll() is not None:
                    break
                time.sleep(0.5)
        else:
            server.kill()
        if server.poll() is not None:
            log.seek(0)
            pytest.fail(f"JupyterLab did not start:\n{log.read()[-4000:]}")
        yield Lab(url, token, folder)
    finally:
        server.terminate()
        server.wait(30)
        log.close()


@pytest.fixture(scope="session")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the exported reports, made as `make report` makes them."""
    out = tmp_path_factory.mktemp("reports")
    report.export(out)
    return out
