"""The pytest plugin: ``pytest --fastpatch`` runs somebody's own suite patched, and shows the report at its end.

pytest loads this wherever fastpatch is installed, so it does nothing, and imports nothing, unless it is asked to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from ._counts import Report

_KEY = "fastpatch"  # under which a worker of pytest-xdist hands over its report


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("fastpatch")
    group.addoption("--fastpatch", action="store_true", help="run the tests with fastpatch on, and report at the end")
    group.addoption(
        "--fastpatch-strict",
        action="store_true",
        help="the same; a call that fastpatch can't serve raises fastpatch.FallbackError",
    )


def pytest_configure(config: pytest.Config) -> None:
    strict = bool(config.getoption("--fastpatch-strict"))
    if strict or config.getoption("--fastpatch"):
        import fastpatch

        fastpatch.enable(strict=strict)
        config.pluginmanager.register(_Reporting(config), "fastpatch-reporting")


class _Reporting:
    """Collects the counts of this process, and of the workers of pytest-xdist."""

    def __init__(self, config: pytest.Config) -> None:
        from ._report import report

        self._config = config
        self._before = report()
        self._workers: list[Report] = []

    def _own(self) -> Report:
        from ._report import report

        return report().since(self._before)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        output = getattr(self._config, "workeroutput", None)
        if output is not None:
            output[_KEY] = self._own().to_json()

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object) -> None:
        from ._counts import Report

        text = getattr(node, "workeroutput", {}).get(_KEY)
        if text is not None:  # it crashed
            self._workers.append(Report.from_json(text))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        total = self._own()
        for worker in self._workers:
            total = total + worker
        terminalreporter.section("fastpatch")
        terminalreporter.write_line(str(total))
