"""Describes the hardware, versions and commits of a run, so that runs can be compared."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from equivtest.base import limits
from equivtest.pytest_plugin.suite import version_of


def machine_facts(device: str) -> dict[str, object]:
    return {
        "platform": platform.platform(),
        "cpu": cpu_name(),
        "cores": num_cores(),
        "accelerators": accelerator_names(device),
    }


def num_cores() -> int:
    """Returns the number of CPU cores on which this process may run."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_name() -> str:
    """Returns the name that the kernel gives the CPU, or the CPU's architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def accelerator_names(device: str) -> list[str]:
    """Returns the names of this machine's devices of a type, or [] for 'cpu'.  Any other type imports torch."""
    if device == "cpu":
        return []
    import torch

    try:
        module = torch.get_device_module(device)
        return [str(module.get_device_name(index)) for index in range(module.device_count())]
    except Exception as error:  # a vendor's module need not have names, and no report may be lost for one
        return [f"{device}, without a name: {error}"]


def versions_of(modules: Iterable[str]) -> list[str]:
    """Returns 'name version' of the distribution of each module, or 'name unknown' if it was not installed."""
    owners = metadata.packages_distributions()
    tops = dict.fromkeys(module.partition(".")[0] for module in modules)
    return [f"{name} {version_of(name)}" for top in tops for name in dict.fromkeys(owners.get(top, [top]))]


def commit_of(folder: Path) -> str:
    """Returns the git commit of a folder's checkout, with '-dirty' if files have changed, or '' without git."""
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=limits.GIT_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def own_commit() -> str:
    """Returns the commit of equivtest if it runs from its repository, or '' for an installed wheel."""
    repository = Path(__file__).resolve().parents[2]
    return commit_of(repository) if (repository / ".git").exists() else ""
