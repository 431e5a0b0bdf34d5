"""The pytest plugin that pytest loads in every environment with equivtest.

Until a module-level `Property` is collected, or a conftest.py adds equivtest's options, the plugin does nothing and
imports neither torch nor Hypothesis.  Each hook imports the slower modules that it needs when it is called.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from equivtest.pytest_plugin.fixture import Ranks
    from equivtest.pytest_plugin.session import Controller

RUNS_NOTHING = ("collectonly", "showfixtures", "show_fixtures_per_test", "setupplan", "cacheshow")
"""Options of pytest with which a session runs no test."""


@pytest.fixture(scope="session")
def ranks(pytestconfig: pytest.Config) -> Ranks:
    """Fixture that runs and checks cases on the ranks of this process: `ranks.check("rowwise_linear", case)`."""
    from equivtest.pytest_plugin.fixture import Ranks

    return Ranks(pytestconfig)


@pytest.hookimpl(tryfirst=True)  # before junitxml reads its path
def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        return
    config.pluginmanager.register(ControllerHooks(config), "equivtest-controller")
    if not _options_added(config):
        return
    from equivtest.errors import EquivtestError
    from equivtest.pytest_plugin import settings
    from equivtest.pytest_plugin.options import settings_of
    from equivtest.pytest_plugin.pools import end_orderly_on_sigterm, open_hub

    try:
        chosen = settings_of(config)
        settings.check(chosen)
        if _is_run(config):
            open_hub(config)
    except EquivtestError as error:
        raise pytest.UsageError(f"equivtest: {error}") from None
    if chosen.report_dir is not None and _is_run(config) and not config.getoption("xmlpath", None):
        config.option.xmlpath = str(chosen.report_dir / "junit.xml")
    end_orderly_on_sigterm(config)


def pytest_pycollect_makeitem(collector: Any, name: str, obj: object) -> list[pytest.Item] | None:
    module = sys.modules.get("equivtest.property")
    if module is None or not isinstance(obj, module.Property) or not isinstance(collector, pytest.Module):
        return None
    from equivtest.pytest_plugin.collection import collect_property

    return collect_property(collector, name, obj)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Shows a mistake in a property as one line with its file and line, instead of a traceback through equivtest."""
    report = yield
    errors, excinfo = sys.modules.get("equivtest.errors"), getattr(getattr(report, "call", None), "excinfo", None)
    if report.failed and errors is not None and excinfo is not None and isinstance(excinfo.value, errors.Misuse):
        own = [entry for entry in excinfo.traceback if str(entry.path) == str(collector.path)]
        place = f"{collector.nodeid}:{own[-1].lineno + 1}: " if own else ""
        report.longrepr = f"{place}{type(excinfo.value).__name__}: {excinfo.value}"
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)  # around -k and --lf, which choose among the items
def pytest_collection_modifyitems(session: pytest.Session, items: list[pytest.Item]) -> Generator[None, object, object]:
    if "equivtest.pytest_plugin.collection" in sys.modules:
        from equivtest.pytest_plugin.collection import arrange

        arrange(session, items)
    result = yield
    if getattr(session.config.option, "equivtest_shard", None):
        from equivtest.pytest_plugin.shards import keep_shard

        keep_shard(session, items)
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if call.when == "call" and "equivtest.pytest_plugin.items" in sys.modules:
        import msgspec

        from equivtest.pytest_plugin.items import EquivtestItem
        from equivtest.report.handover import Handover

        if isinstance(item, EquivtestItem) and item.handover != Handover():
            handover = msgspec.json.encode(item.handover).decode()  # xdist carries plain builtin types only
            report.equivtest = handover  # type: ignore[attr-defined]
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    if "equivtest.pytest_plugin.collection" in sys.modules and hasattr(session.config, "workeroutput"):
        import msgspec

        from equivtest.pytest_plugin.collection import manifest

        session.config.workeroutput["equivtest"] = msgspec.json.encode(manifest(session)).decode()
    _close_pool(session.config)


def pytest_unconfigure(config: pytest.Config) -> None:
    _close_pool(config)
    if "equivtest.pytest_plugin.pools" in sys.modules:
        from equivtest.pytest_plugin.pools import close_hub

        close_hub(config)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Sends the soak's seed and the hub's path to an xdist worker, and records the worker for SIGTERM."""
    if _options_added(node.config):
        from equivtest.pytest_plugin.options import soak_seed
        from equivtest.pytest_plugin.pools import hub_path, remember_worker

        remember_worker(node.config, node)
        node.workerinput["equivtest_seed"] = soak_seed(node.config)
        node.workerinput["equivtest_hub"] = hub_path(node.config)
        if "equivtest.pytest_plugin.session" in sys.modules:
            import msgspec

            from equivtest.pytest_plugin.resume import earlier_endings

            node.workerinput["equivtest_endings"] = msgspec.json.encode(earlier_endings(node.config)).decode()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """Returns the number of workers for `-n auto`: all cores if there are at most four, otherwise half of the cores.

    The other half is for the ranks that the workers start.  None lets xdist decide.
    """
    if not _options_added(config) or "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ:
        return None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores if cores <= 4 else cores // 2


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object | None:
    """Schedules properties instead of items if every search of the run is short, or if the run has a time budget.

    None lets xdist decide.
    """
    if not _options_added(config) or config.getvalue("dist") != "load":
        return None
    from equivtest.pytest_plugin.options import settings_of
    from equivtest.pytest_plugin.scheduling import PropertyScheduling

    settings = settings_of(config)
    has_budget = bool(settings.budget_s)
    if settings.profile.draws_many and not has_budget:
        return None
    return PropertyScheduling(config, log, has_budget=has_budget)


class ControllerHooks:
    """Hooks of the process that prints the results."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.started_s = time.time()
        self.found: Controller | None = None
        self.session: pytest.Session | None = None
        self.ended_by: BaseException | None = None
        self.concluded = 0  # tests that passed, failed or failed as expected, of any plugin

    @property
    def controller(self) -> Controller:
        if self.found is None:
            from equivtest.pytest_plugin.session import Controller

            self.found = Controller(self.config, self.started_s)
        return self.found

    def pytest_report_header(self) -> list[str]:
        if not _options_added(self.config):
            return []
        from equivtest.pytest_plugin.header import header

        return header(self.config)

    @pytest.hookimpl(tryfirst=True)  # before xdist starts its workers, and before anything is collected
    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self.session = session
        if not (_options_added(self.config) and _is_run(self.config)):
            return
        from equivtest.errors import EquivtestError
        from equivtest.pytest_plugin.options import settings_of
        from equivtest.pytest_plugin.pools import await_hosts

        try:
            await_hosts(self.config, self.config.get_terminal_writer().line)
            if settings_of(self.config).report_dir is not None:
                self.controller.begin()
        except EquivtestError as error:
            raise pytest.UsageError(f"equivtest: {error}") from None

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        self.ended_by = excinfo.value

    def pytest_unconfigure(self) -> None:
        if self.found is not None:
            self.found.leave()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> Generator[None, object, object]:
        handover = getattr(report, "equivtest", None)
        if handover is not None:
            self.controller.receive(handover)  # first: what is fatal is not shown as a failure
        result = yield
        if report.when == "call":
            self.concluded += not report.skipped or hasattr(report, "wasxfail")
        if report.when == "teardown" and self.found is not None and self.session is not None:
            self.found.report_claims(self.session)
        return result

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Reads which properties a worker collected, so that the report can name the properties that never began."""
        written = getattr(node, "workeroutput", {}).get("equivtest")
        if written:
            import msgspec

            from equivtest.report.handover import Manifest

            self.controller.add_manifest(msgspec.json.decode(written, type=Manifest))

    @pytest.hookimpl(tryfirst=True)  # before junitxml writes its file
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if not _is_run(self.config):
            return
        if "equivtest.pytest_plugin.collection" in sys.modules:
            from equivtest.pytest_plugin.collection import manifest

            listed = manifest(session) if hasattr(session, "items") else None
            if listed is not None and listed.properties:
                self.controller.add_manifest(listed)
        if self.found is not None:
            from equivtest.pytest_plugin.session import state_of

            self.found.finish(session, state_of(exitstatus, self.ended_by), self.concluded)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.found is None:
            return
        lines = self.found.summary()
        if lines or self.found.troubles:
            terminalreporter.section("equivtest")
        for trouble in self.found.troubles:
            terminalreporter.write_line(f"equivtest: {trouble}", red=True)
        for line in lines:
            terminalreporter.write_line(line)


def _options_added(config: pytest.Config) -> bool:
    return hasattr(config.option, "equivtest_profile")


def _is_run(config: pytest.Config) -> bool:
    return not any(getattr(config.option, name, False) for name in RUNS_NOTHING)


def _close_pool(config: pytest.Config) -> None:
    if "equivtest.pytest_plugin.pools" in sys.modules:
        from equivtest.pytest_plugin.pools import close_pool

        close_pool(config)
