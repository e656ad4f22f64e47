"""What every test shares: Triton's interpreter where there is no GPU, the `gpu` marker, no empty runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import pytest
import torch

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
if not GPUS:
    # Read when a kernel is decorated, so it must be set before `kernels` is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "gpu(devices=1): needs that many CUDA devices; skipped with the reason elsewhere"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        marker = item.get_closest_marker("gpu")
        needed = marker.kwargs.get("devices", 1) if marker else 0
        if needed > GPUS:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA device(s), found {GPUS}"))


def _forget_plans() -> None:
    """Makes every op check, choose and record anew."""
    for name, module in list(sys.modules.items()):
        if name.startswith("kernels."):
            for op in vars(module).values():
                if type(op).__name__ == "FusedOp":
                    op.forget()


@pytest.fixture
def forget_plans() -> Callable[[], None]:
    """For a test that changes a launch: makes every op check, choose and record anew."""
    return _forget_plans


@pytest.fixture(autouse=True)
def fresh_start() -> None:
    """A test starts with nothing compiled, which would count towards its recompile limit, and with no launch plans."""
    torch._dynamo.reset()
    _forget_plans()


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A run in which no test ran to its end (nothing collected, everything skipped) is a failed run."""
    if hasattr(session.config, "workerinput"):
        return  # a pytest-xdist worker sees only its share; the controller judges the whole
    if exitstatus == pytest.ExitCode.OK and not session.config.option.collectonly:
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None and not reporter.stats.get("passed"):
            reporter.write_line("no test ran: every one was skipped", red=True)
            session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED
