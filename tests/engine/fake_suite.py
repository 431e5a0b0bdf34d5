"""A suite of properties whose searches, ranks and backends are made up, for tests of the plugin."""

from __future__ import annotations

from importlib import metadata

import pytest
import torch._dynamo  # noqa: F401  (an in-process run would import it twice, and torch crashes at the second import)

from equivtest.pytest_plugin.suite import shipped

shipped()  # pytester drops each module that a run in this process is the first to import

CONFTEST = """
import sys, time, types
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from equivtest.base import limits
from equivtest.base.users_code import digest_of
from equivtest.errors import BrokenSetup, Misuse
from equivtest.report.handover import Audited, Failure, Record
from equivtest.options import pytest_addoption

LOG = Path(__file__).with_name("log")
MESSAGE = "ValueMismatch: {}: output differs from the oracle\\n  where     rank 2 of 3"


def log(line):
    with LOG.open("a") as file:
        file.write(line + "\\n")


@dataclass(frozen=True)
class Chunk:
    world_size: int
    dtypes: tuple
    index: int
    num_cases: int
    seed: str = "gate"
    per_cell: int = 0
    world_sizes: tuple = ()
    strength: int = 0
    mixes_worlds: bool = True


def chunk_of(part, dtypes, seed, world_sizes, *, is_limited):
    if is_limited:
        log("limited processes")
    return Chunk(part.world_size, dtypes, part.index, part.num_cases, seed, part.per_cell, world_sizes)


@dataclass(frozen=True)
class Findings:
    records: list
    failures: list
    seconds: float
    misuse: str = ""
    left_out: dict = field(default_factory=dict)
    coverage: object = None
    cut: int = 0


@dataclass(frozen=True)
class Backend:
    name: str = "gloo"
    device: str = "cpu"
    imports: tuple = ()
    start: str = "auto"
    arithmetic: str = ""
    environment = {}

    @property
    def is_gloo_on_cpu(self):
        return (self.name, self.device) == ("gloo", "cpu")

    def validate(self):
        if self.name != "gloo":
            raise Misuse(f"torch has no backend {self.name!r} here")


class Pool:
    def __init__(self, backend=Backend(), hub="", server=None):
        log("pool opened")
        self.code = {}
        self.start = backend.start if backend.start == "forkserver" else "spawn (a fork runs no backward: threads)"

    def run(self, subject, case, *, limit_s, **kwargs):
        return ["reply"] if limit_s == limits.CASE_S else [f"reply within {limit_s} s"]

    def serve(self, owner):
        log(f"pool serves {Path(owner).name}")

    def take_faults(self):
        return []

    def take_deaths(self):
        return []

    def close(self):
        log("pool closed")


class Server:
    def __init__(self, *args):
        log("server started")

    def close(self):
        log("server closed")


def record(subject, chunk, dtype, kind, verdicts):
    case = {"schema": 1, "type": "FakeCase", "fields": {"world_size": chunk.world_size, "dtype": dtype, "kind": kind}}
    lacking = {"lacking": "no", "refused": (f"{dtype}:all_reduce",)} if "not_supported" in verdicts.values() else {}
    return Record(schema=1, subject=subject, case=case, draw=0, mode="dense", seed=0, world_size=chunk.world_size,
                  dtype=dtype, shard_kind=kind, refusal="", verdicts=verdicts, margins={}, tensor_margins={},
                  known={}, busy_s=0.01, **lacking)


def search(prop, chunk, pool, known, failures_dir, *, until_s, gloo):
    log(f"search {prop.subject} w{chunk.world_size} {chunk.seed}")
    log(f"shrinks to {chunk.world_sizes}")
    subject, _, trait = prop.subject.partition("_")
    misuse = "the subject answers an unknown name" if chunk.world_size == 1 and "misused" in trait else ""
    if trait == "misused" and misuse:
        return Findings([], [], 0.0, misuse)
    if trait == "broken":
        raise BrokenSetup("no rank started")
    if trait == "crashes" and chunk.world_size == 2:
        raise RuntimeError("a bug of the harness")
    if trait == "hangs" and not LOG.with_name("go").exists():
        log("hanging")
        time.sleep(60)
    if trait == "edits":
        LOG.with_name("test_fake.py").write_text(LOG.with_name("test_fake.py").read_text() + "# edited" + chr(10))
    if trait == "imports":
        helper = str(LOG.with_name("helper.py"))
        pool.code[helper] = digest_of(helper)
    if trait == "slow":
        time.sleep(0.05)
    if trait == "leftout":
        return Findings([], [], 0.0, left_out=dict.fromkeys(chunk.dtypes, ""))
    if trait == "silent":
        return Findings([], [], 0.0)
    fails = (trait, chunk.world_size) in {("wrong", 3), ("wrong_and_misused", 1)}
    kind_of = {claim.name: "holds" for claim in prop.claims}
    if fails:
        kind_of["equals_unsharded"] = "value"
    if trait in ("inconclusive", "not_supported", "known"):
        kind_of = dict.fromkeys(kind_of, trait)
    kinds = ("even", "uneven", "empty") if chunk.world_size > 1 and trait != "even" else ("even",)
    records = [record(prop.subject, chunk, dtype, kind, kind_of) for dtype in chunk.dtypes for kind in kinds]
    failure = Failure(subject=prop.subject, claim="equals_unsharded", kind="value", case="FakeCase()",
                      replay=str(failures_dir / "f.json"), message=MESSAGE.format(prop.subject))
    if fails:
        failures_dir.mkdir(parents=True, exist_ok=True)
        (failures_dir / "f.json").write_text("{}")
    return Findings(records, [failure] if fails else [], 0.1, misuse)


def judge(subject, case, pool, claims, limit_s, may_raise):
    log(f"judge {subject} {claims[0].name}")
    kind = "inconclusive" if case.in_features > 1 else "holds" if case.bias else "layout"
    return [types.SimpleNamespace(subject=subject, claim=claims[0].name, kind=kind)]


def compare_with_gloo(verdicts, claims, gloo):
    if "unable" in verdicts[0].subject:
        raise Misuse("no such operator")
    return [types.SimpleNamespace(failed="elsewhere" in verdict.subject) for verdict in verdicts]


def audit(prop, pool, known, world_sizes, dtypes, is_first_look, is_thorough):
    log(f"audit {prop.subject}")
    data = Audited(property=prop.subject, cases=1, rows=(), unseen=(), reason="", problem="", seconds=0.0)
    return types.SimpleNamespace(cases=1, problem="", waits="", as_data=lambda name: data)


def fake(name, **members):
    module = types.ModuleType(name)
    vars(module).update(members)
    sys.modules[name] = module


fake("equivtest.search.chunks", chunk_of=chunk_of)
fake("equivtest.search.differential", compare_with_gloo=compare_with_gloo)
fake("equivtest.search.search", Findings=Findings, search=search)
fake("equivtest.ranks.pool", Pool=Pool)
fake("equivtest.ranks.launch", Server=Server, preloads=tuple)
fake("equivtest.ranks.backend", Backend=Backend, STARTS=("auto", "forkserver", "spawn"))
fake("equivtest.verdicts.judging", judge=judge, one_thread=nullcontext)
fake("equivtest.search.audit", audit=audit)
"""

PROPERTIES = """
from types import SimpleNamespace

from equivtest.property import Property

CLAIMS = tuple(SimpleNamespace(name=name, by_dtype=True) for name in ("equals_unsharded", "agrees_on_all_ranks"))

def make(subject):
    return Property(subject=subject, statement="It is.", source="here", cases=None, claims=CLAIMS)

"""


def make_suite(pytester: pytest.Pytester, *subjects: str) -> None:
    """Writes a suite with one property per subject; what is behind the first '_' says how it behaves."""
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(test_fake=PROPERTIES + "".join(f"{name} = make({name!r})\n" for name in subjects))


def plugin_args() -> list[str]:
    """Returns options that load the plugin if the package is not installed, without Hypothesis' plugin.

    That plugin imports Hypothesis, which takes two thirds of the time of a suite that draws nothing.
    """
    installed = any(point.value == "equivtest.plugin" for point in metadata.entry_points(group="pytest11"))
    return ["-p", "no:hypothesispytest"] + ([] if installed else ["-p", "equivtest.plugin"])


def run_suite(pytester: pytest.Pytester, *args: str, subprocess: bool = False) -> pytest.RunResult:
    """Runs pytest on the suite, by default without audits; in its own process if requested."""
    conftest = pytester.path / "conftest.py"
    if conftest.exists() and "import pytest_addoption" in conftest.read_text():
        args = ("--audit=off", *args)
    run = pytester.runpytest_subprocess if subprocess else pytester.runpytest_inprocess
    return run(*plugin_args(), "-p", "no:cacheprovider", "--import-mode=importlib", *args)


def log_of(pytester: pytest.Pytester) -> list[str]:
    """Returns the log of the fake searches and pools."""
    path = pytester.path / "log"
    return path.read_text().splitlines() if path.exists() else []
