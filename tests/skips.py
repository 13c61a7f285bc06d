"""At the end of a run: what this machine lacks, and how many tests were skipped for it."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest

SKIPPED: dict[str, str] = {}  # test, or file that was skipped as a whole -> reason


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _note_if_skipped(report)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    _note_if_skipped(report)


def _note_if_skipped(report: pytest.TestReport | pytest.CollectReport) -> None:
    if report.skipped and isinstance(report.longrepr, tuple):
        reason = report.longrepr[2].removeprefix("Skipped: ")
        SKIPPED[report.nodeid] = re.sub("could not import '([^']*)'.*", r"needs \1", reason)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker tells the process that prints: xdist does not report files that were skipped as a whole."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["skipped"] = SKIPPED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    SKIPPED.update(getattr(node, "workeroutput", {}).get("skipped", {}))


@pytest.hookimpl(trylast=True)  # after the slowest tests
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line for each reason. A file that was skipped as a whole counts as one test."""
    for reason, count in Counter(SKIPPED.values()).most_common():
        terminalreporter.write_line(f"skipped {count:4}: {reason}")
