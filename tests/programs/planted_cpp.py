"""Registers the backend of planted_backend.cpp, which LIBRARY must have been built for; its fault is named by FAULT."""

from __future__ import annotations

import importlib.util
import os
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import distributed as dist

from tests.programs.planted import FAULT

LIBRARY = "EQUIVTEST_TEST_CPP_LIBRARY"
"""Environment variable: path of the library that `build` made."""
NAME = "equivtest_planted_backend"
FAULTS = ("cpp_swapped_gather", "cpp_remainder", "cpp_bfloat16_sum", "cpp_scatter_on_rank_2")


def build(folder: Path) -> Path:
    """The library, compiled into `folder` unless it is there; takes half a minute, g++ and ninja."""
    from torch.utils import cpp_extension

    folder.mkdir(parents=True, exist_ok=True)
    source = Path(__file__).with_name("planted_backend.cpp")
    module = cpp_extension.load(NAME, [str(source)], build_directory=str(folder), extra_cflags=["-O1"])
    return Path(module.__file__)


def load() -> ModuleType:
    """The compiled module."""
    spec = importlib.util.spec_from_file_location(NAME, os.environ[LIBRARY])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def create(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    gloo = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
    return load().wrap(gloo, os.environ.get(FAULT, ""))


if LIBRARY in os.environ:
    dist.Backend.register_backend("planted_cpp", create, devices=["cpu"])
