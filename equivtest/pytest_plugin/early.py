"""A plugin that `equivtest run` loads into each of its processes to shorten the time until the first verdict.

The server of the ranks starts before this process imports torch, so that both processes import at the same time.

Python's garbage collector is off until pytest has collected all items, because almost all objects are modules, which it
would not free.  After that the collector runs seldom: the judge makes many objects and few cycles, and a full
collection takes 60 ms.
"""

from __future__ import annotations

import gc

import pytest

from equivtest.pytest_plugin.pools import start_server

_THRESHOLDS = gc.get_threshold()


def pytest_configure(config: pytest.Config) -> None:
    controls_workers = config.getoption("dist", "no") != "no" and not hasattr(config, "workerinput")
    if not config.option.collectonly and not controls_workers:
        gc.disable()
        start_server(config)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.set_threshold(50_000, *_THRESHOLDS[1:])
    gc.enable()


def pytest_unconfigure() -> None:
    gc.set_threshold(*_THRESHOLDS)
    gc.enable()
