"""Adds the options of a run to pytest.

A conftest.py adds the options (`from equivtest.options import pytest_addoption`), or the argument `-p
equivtest.options` adds them. The plugin that every pytest of the environment loads does not add the options. Conftest
files of other projects add names such as --device and --backend (Triton's adds --device), and a second plugin that adds
the same name stops pytest.
"""

from __future__ import annotations

import secrets
from weakref import WeakSet

import pytest

from equivtest.base.profiles import DEFAULT_PROFILE, PROFILES, SOAK_S
from equivtest.pytest_plugin.settings import Settings, parse

HELP: dict[str, str] = {
    "profile": f"How much to run: {', '.join(PROFILES)} (default {DEFAULT_PROFILE}).",
    "backend": "Backend of torch.distributed that is judged (default gloo).",
    "device": "Device type that the tensors live on (default cpu).",
    "import": "Module that every process imports first, such as a vendor's backend; may be repeated.",
    "start": "How ranks start: forkserver forks them, spawn starts a new interpreter for each, auto (the "
    "default) forks if that works.",
    "arithmetic": "package.module:NAME of the declaration of how the backend rounds (default: that of torch's CPU "
    "and gloo).",
    "listen": "[HOST]:PORT to listen at for ranks on other hosts, which torchrun -m equivtest.rank --connect starts; "
    "EQUIVTEST_SECRET or EQUIVTEST_SECRET_FILE holds a secret that both know (default: ranks live on this machine).",
    "world-sizes": "Numbers of ranks (default 1,2,3,4, in a soak to 8); failures are shrunk to as few of them as fail, "
    "failures on several ranks to two at least.",
    "dtypes": "Dtypes to draw from (default float32,float64,bfloat16,float16).",
    "subjects": "Judge only these subjects, separated by commas; NAME=package.module:function judges another "
    "implementation as NAME.",
    "known-failures": "Files of known failures (default shipped, the list that comes with equivtest), or none.",
    "allow-unsupported": "Refusals of the backend that do not make the run red: dtypes, dtype:collective such as "
    "float16:all_reduce, or float16:all_reduce_avg for one reduction, release for all that this torch lacks, or all.",
    "report": "Directory for report.html, junit.xml, verdicts.jsonl, run.jsonl.gz, cells.csv, audit.csv, summary.txt, "
    "environment.json; those that an earlier run left there are removed. "
    "Under pytest write --report=DIR, because pytest takes DIR after a space for a folder of tests.",
    "resume": "Report of an interrupted run: takes what that run judged with the same code, settings and releases, and "
    "judges the rest. The report is written there, unless --report names another folder.",
    "manifest": "equivtest.toml of a backend: backend, device, import, arithmetic, dtypes, world sizes, collectives, "
    "reductions and waivers, in place of the options; equivtest init --kind backend writes one.",
    "bundle": "File to hand in: every verdict with its case, checksums, and what equivtest verify needs to check them.",
    "audit": "on (default) or off: whether a few cases of each property run again with a collective that gives each "
    "rank its own operand instead of the other ranks'. The claims must reject that; with off, a green run may show "
    "nothing.",
    "budget": "Seconds that a run may take: each search runs first the cases that cover most, and the summary says how "
    "many were left out.",
    "shard": "Run only this part of the properties, such as 2/4: equivtest merge joins the reports of all parts.",
    "max-time": f"Seconds that --profile soak lasts (default {SOAK_S:.0f}).",
}

_METAVARS = {
    "import": "MODULE",
    "arithmetic": "NAME",
    "listen": "[HOST]:PORT",
    "report": "DIR",
    "resume": "DIR",
    "known-failures": "FILES",
    "bundle": "FILE",
    "manifest": "FILE",
    "audit": "on|off",
    "allow-unsupported": "NAMES",
    "budget": "SECONDS",
    "shard": "I/N",
    "max-time": "SECONDS",
}
_done: WeakSet[pytest.Parser] = WeakSet()
_settings_key = pytest.StashKey[Settings]()
_seed_key = pytest.StashKey[str]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the options to pytest's parser. A second call does nothing."""
    if parser in _done:
        return
    _done.add(parser)
    group = parser.getgroup("equivtest", "equivtest: parallel computations against the unsharded one")
    for name, text in HELP.items():
        group.addoption(
            f"--{name}",
            dest=_dest(name),
            action="append" if name == "import" else "store",
            default=[] if name == "import" else None,
            metavar=_METAVARS.get(name, name.upper().replace("-", "_")),
            help=text,
        )


def _dest(name: str) -> str:
    return "equivtest_" + name.replace("-", "_")


def settings_of(config: pytest.Config) -> Settings:
    """Returns the settings of this run, or the default settings if pytest does not have the options.

    Raises:
        Misuse: a value is not allowed.
    """
    if _settings_key not in config.stash:
        raw = {name.replace("-", "_"): getattr(config.option, _dest(name), None) for name in HELP}
        config.stash[_settings_key] = parse(raw)
    return config.stash[_settings_key]


def soak_seed(config: pytest.Config) -> str:
    """Returns the random seed of this run's soak.  The controller chooses the seed and sends it to xdist workers."""
    if _seed_key not in config.stash:
        given = getattr(config, "workerinput", {}).get("equivtest_seed")
        config.stash[_seed_key] = str(given or secrets.token_hex(4))
    return config.stash[_seed_key]
