"""Notebooks as tests: each takes under a minute, or the run fails and says which one did not."""

from __future__ import annotations

from collections import defaultdict

import pytest

# On two CPU cores without a GPU; with one, a notebook may measure.
LIMIT_S = 60.0
_seconds: dict[str, float] = defaultdict(float)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _seconds[report.nodeid.partition("::")[0]] += report.duration


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workerinput"):
        return  # a pytest-xdist worker sees only its share
    slow = {name: seconds for name, seconds in _seconds.items() if seconds > LIMIT_S}
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    for name, seconds in sorted(_seconds.items()):
        if reporter is not None:
            reporter.write_line(f"{name}: {seconds:.0f} s{f', over {LIMIT_S:.0f}' if name in slow else ''}")
    if slow and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
