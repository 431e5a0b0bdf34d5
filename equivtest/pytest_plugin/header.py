"""Describes a run above its first result.  This module does not import torch, so that workers start at once."""

from __future__ import annotations

import pytest

from equivtest.pytest_plugin.machine import num_cores
from equivtest.pytest_plugin.options import settings_of, soak_seed
from equivtest.pytest_plugin.suite import properties_dir, version_of


def header(config: pytest.Config) -> list[str]:
    settings = settings_of(config)
    seeds = "fixed seeds"
    if settings.profile.repeats:
        seeds = f"fresh seed {soak_seed(config)}, {settings.max_time_s:.0f} s"
    on = f", imports {', '.join(settings.imports)}" if settings.imports else ""
    on += f", start {settings.start}" if settings.start != "auto" else ""
    audited = "" if settings.audits and max(settings.world_sizes) > 1 else "; not audited"
    return [
        f"equivtest {version_of('equivtest')}: torch {version_of('torch')}, "
        f"backend {settings.backend} on {settings.device}{on}, "
        f"known failures: {', '.join(settings.known_failures) or 'none'}",
        f"equivtest profile {settings.profile_name}: {seeds}; world sizes {_join(settings.world_sizes)}; "
        f"dtypes {_join(settings.dtypes)}{audited}",
        *_duration(config),
    ]


def _duration(config: pytest.Config) -> list[str]:
    minutes = settings_of(config).profile.minutes
    if not minutes or str(properties_dir()) not in config.args:
        return []
    return [
        f"equivtest duration: about {minutes} minutes for all shipped properties on two quiet cores, as measured; "
        f"{num_cores()} cores here"
    ]


def _join(values: tuple[object, ...]) -> str:
    return " ".join(str(value) for value in values)
