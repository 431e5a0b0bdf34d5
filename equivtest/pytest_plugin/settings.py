"""Reads the settings of a run from its options, and checks all settings before any process starts."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import re
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from equivtest.base import limits
from equivtest.base.importing import load_named, suggestion
from equivtest.base.lacking import excused_by, parse_allowed
from equivtest.base.profiles import DEFAULT_PROFILE, PROFILES, SOAK_S, Profile
from equivtest.errors import Misuse, reason_of, shorten

if TYPE_CHECKING:
    from equivtest.property import Property
    from equivtest.ranks.backend import Backend
    from equivtest.search.known import KnownFailure, KnownFailures

SHIPPED_LIST = "shipped"
"""Value of --known-failures for the list that comes with the package."""
NO_LIST = "none"


@dataclass(frozen=True)
class Settings:
    """The options of a run, checked and converted to values.

    Attributes:
        subjects: (name, subject) of each property to judge. `name` is the name of the property or of its own subject,
            and `subject` is judged in place of its own subject. If both are equal, the property's own subject is
            judged. If empty, all properties are judged.
        known_failures: Files with known failures. SHIPPED_LIST stands for the file that comes with the package.
        start: How ranks start: 'forkserver', 'spawn' or 'auto'. See `Backend`.
        arithmetic: 'package.module:NAME' of the backend's own arithmetic. If '', this is the arithmetic of torch on the
            CPU.
        manifest: File in which a vendor declares what the backend can do. The settings already include these
            declarations.
        bundle: File to write for `equivtest verify`, or None.
        listen: Host and port to listen at for ranks on other hosts. If None, ranks run on this machine.
        audits: True if each property is audited (`equivtest.search.audit`).
        max_time_s: Seconds that a soak lasts.
        budget_s: Seconds after which no further case begins. If 0, there is no limit.
        allowed: Names from --allow-unsupported, of dtypes and collectives that the backend may lack.
        resumed_dir: Folder with the report of an interrupted run. This run copies the verdicts of the interrupted run.
        shard: (number from 1, number of shards) of the part to run. If None, everything runs.
    """

    profile_name: str = DEFAULT_PROFILE
    backend: str = "gloo"
    device: str = "cpu"
    imports: tuple[str, ...] = ()
    start: str = "auto"
    arithmetic: str = ""
    listen: tuple[str, int] | None = None
    world_sizes: tuple[int, ...] = limits.WORLD_SIZES
    dtypes: tuple[str, ...] = limits.DTYPES
    subjects: tuple[tuple[str, str], ...] = ()
    known_failures: tuple[str, ...] = (SHIPPED_LIST,)
    report_dir: Path | None = None
    bundle: Path | None = None
    manifest: Path | None = None
    audits: bool = True
    max_time_s: float = SOAK_S
    budget_s: float = 0.0
    allowed: frozenset[str] = frozenset()
    resumed_dir: Path | None = None
    shard: tuple[int, int] | None = None

    @property
    def profile(self) -> Profile:
        return PROFILES[self.profile_name]

    @cached_property
    def known(self) -> KnownFailures:
        """Known failures from all files of `known_failures`.  Raises Misuse if a file is unreadable or wrong."""
        from equivtest.search.known import SHIPPED, KnownFailures

        return KnownFailures.load(*(SHIPPED if name == SHIPPED_LIST else Path(name) for name in self.known_failures))

    @property
    def declared(self) -> dict[str, Any]:
        """Returns dtype -> field -> value of the arithmetic that the backend declares."""
        from equivtest.oracle.declared import load_arithmetics

        return {dtype: dataclasses.asdict(record) for dtype, record in load_arithmetics(self.arithmetic).items()}

    @property
    def excused(self) -> frozenset[str]:
        """Names of everything that the backend may lack in this run."""
        return excused_by(self.allowed, self.backend)

    @property
    def is_gloo_on_cpu(self) -> bool:
        return self.make_backend().is_gloo_on_cpu

    def expects(self, known: KnownFailure) -> bool:
        """True if the case of a known failure must still fail in this run.

        A case from the shipped list must fail only on gloo and the CPU. A case from your own lists must fail on every
        backend.
        """
        return not known.is_shipped or self.is_gloo_on_cpu

    def make_backend(self) -> Backend:
        """Returns the backend that the options describe.  Raises Misuse or BrokenSetup if it cannot work."""
        from equivtest.ranks.backend import Backend

        return Backend(self.backend, self.device, self.imports, self.start, self.arithmetic)

    def pinned_sizes(self, prop: Property) -> tuple[int, ...]:
        from equivtest.search.planned import pinned_sizes

        return pinned_sizes(prop, self.profile, self.world_sizes, is_limited=self.is_limited)

    @property
    def is_limited(self) -> bool:
        """True if devices or slots limit the number of processes."""
        return self.device != "cpu" or self.listen is not None

    def audits_property(self, prop: Property) -> bool:
        """True if this run audits the property: an audit needs several ranks, and refusals have no collective."""
        return self.audits and not prop.refuses_only and max(prop.among(self.world_sizes), default=1) > 1

    def judged_subject(self, name: str, prop: Property) -> str | None:
        """Returns the subject to judge for `name`: its own, the one that --subjects names, or None if left out."""
        if not self.subjects:
            return prop.subject
        for wanted, implementation in self.subjects:
            if wanted in (name, prop.subject):
                return prop.subject if implementation == wanted else implementation
        return None


def parse(raw: Mapping[str, Any]) -> Settings:
    """Converts the texts of the options to settings.

    Args:
        raw: Option name with underscores -> text, list of texts or number, or None if the option is absent.

    Raises:
        Misuse: an option has an invalid value. The message names the option, the value and the allowed values.
    """
    given = {name: value for name, value in raw.items() if value not in (None, [], ())}
    if "manifest" in given:
        from equivtest.bundle.manifest import read_manifest

        given = read_manifest(Path(given["manifest"])).merged(given, str(given["manifest"]))
    profile_name = str(given.get("profile", DEFAULT_PROFILE))
    if profile_name not in PROFILES:
        raise Misuse(f"--profile: unknown profile {profile_name!r}; use one of {', '.join(PROFILES)}")
    world_sizes = _world_sizes(given.get("world_sizes"), PROFILES[profile_name].world_sizes)
    if PROFILES[profile_name].audits_alone and max(world_sizes) == 1:
        raise Misuse("--world-sizes: an audit needs at least two ranks, got only 1: add 2")
    max_time_s = _seconds("--max-time", given["max_time"]) if "max_time" in given else SOAK_S
    if "max_time" in given and not PROFILES[profile_name].repeats:
        raise Misuse(f"--max-time needs --profile soak, got --profile {profile_name}")
    if "budget" in given and (PROFILES[profile_name].repeats or PROFILES[profile_name].audits_alone):
        raise Misuse(f"--budget needs --profile smoke, gate or conformance, got --profile {profile_name}")
    resumed_dir = Path(given["resume"]).absolute() if "resume" in given else None
    if resumed_dir and ("budget" in given or PROFILES[profile_name].repeats or PROFILES[profile_name].audits_alone):
        budget = " with --budget" * ("budget" in given)
        raise Misuse(
            "--resume needs --profile smoke, gate or conformance without --budget, got --profile "
            f"{profile_name}{budget}"
        )
    if "bundle" in given and "shard" in given:
        raise Misuse("--bundle cannot be used with --shard, because a bundle has every search of its run")
    if "bundle" in given and ("budget" in given or not PROFILES[profile_name].strength):
        raise Misuse(
            "--bundle needs --profile smoke, gate or conformance without --budget, because verify must derive the "
            "cases again"
        )
    subjects = tuple(_subject(text) for text in _split(given.get("subjects"), "--subjects"))
    if "bundle" in given and (others := [name for name, implementation in subjects if name != implementation]):
        raise Misuse(f"--bundle judges the shipped subjects, got another implementation of {', '.join(others)}")
    return Settings(
        profile_name=profile_name,
        backend=str(given.get("backend", "gloo")),
        device=str(given.get("device", "cpu")),
        imports=tuple(given.get("import", ())),
        start=_start(str(given.get("start", "auto"))),
        arithmetic=str(given.get("arithmetic", "")),
        listen=_listen(given.get("listen")),
        world_sizes=world_sizes,
        dtypes=_dtypes(given.get("dtypes")),
        subjects=subjects,
        known_failures=_known_failures(given.get("known_failures")),
        report_dir=Path(given["report"]).absolute() if "report" in given else resumed_dir,
        resumed_dir=resumed_dir,
        bundle=Path(given["bundle"]).absolute() if "bundle" in given else None,
        manifest=Path(given["manifest"]) if "manifest" in given else None,
        audits=_audits(given.get("audit", "on"), PROFILES[profile_name]),
        max_time_s=max_time_s,
        budget_s=_seconds("--budget", given["budget"]) if "budget" in given else 0.0,
        shard=_shard(given["shard"], PROFILES[profile_name]) if "shard" in given else None,
        allowed=parse_allowed(_split(given.get("allow_unsupported"), "--allow-unsupported")),
    )


def check(settings: Settings) -> None:
    """Tries everything that could fail later: imports, backend, device, lists of known failures, folder of the report.

    Raises:
        Misuse, BrokenSetup: something does not work. The message is one line.
    """
    _check_starter(settings)
    if settings.listen is not None:
        from equivtest.ranks.hosts.secret import read_secret

        read_secret()
    elif (settings.backend, settings.device, settings.imports) != ("gloo", "cpu", ()):
        settings.make_backend().validate()  # imports torch, which takes seconds; every torch has gloo
    if settings.arithmetic:
        from equivtest.oracle.declared import require_declared

        require_declared(settings.arithmetic, settings.dtypes)
    if set(settings.known_failures) - {SHIPPED_LIST}:  # the shipped list has a test, and reading it imports torch
        _ = settings.known
    if settings.report_dir is not None:
        _check_writable(settings.report_dir)
    if settings.bundle is not None:
        check_file(settings.bundle, "--bundle")
        if settings.bundle.exists():
            raise Misuse(f"--bundle: {shorten(str(settings.bundle))} exists: move it, or name another file")


def check_subjects(settings: Settings, properties: Iterable[tuple[str, str]]) -> None:
    """Raises Misuse if --subjects names no collected property or subject, or a function that cannot be imported.

    Args:
        properties: (name, subject) of every property that was collected.
    """
    known = sorted({name for pair in properties for name in pair})
    for wanted, implementation in settings.subjects:
        if wanted not in known:
            raise Misuse(f"--subjects: no property judges {wanted!r}; {suggestion(wanted, known)}")
        if implementation != wanted and not callable(found := load_named(implementation, "--subjects:")):
            raise Misuse(f"--subjects: {implementation!r} is not a function: {found!r}")


def _split(text: str | None, option: str) -> list[str]:
    if text is None:
        return []
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise Misuse(f"{option}: expected values separated by commas, got {text!r}")
    return list(dict.fromkeys(parts))


def _world_sizes(text: str | None, default: tuple[int, ...]) -> tuple[int, ...]:
    sizes = []
    for part in _split(text, "--world-sizes"):
        if not (re.fullmatch(r"\d{1,4}", part) and 1 <= int(part) <= limits.MAX_WORLD_SIZE):
            raise Misuse(f"--world-sizes: a world size must be in 1..{limits.MAX_WORLD_SIZE}, got {part!r}")
        sizes.append(int(part))
    return tuple(sorted(set(sizes))) or default


def _shard(text: str, profile: Profile) -> tuple[int, int]:
    match = re.fullmatch(r"(\d{1,4})/(\d{1,4})", text)
    number, of = (int(part) for part in match.groups()) if match else (0, 0)
    if not 1 <= number <= of:
        raise Misuse(f"--shard: expected I/N with I from 1 to N, such as 2/4, got {text!r}")
    if profile.repeats:
        raise Misuse("--shard cannot be used with --profile soak: each shard would draw with another seed")
    return number, of


def _dtypes(text: str | None) -> tuple[str, ...]:
    names = _split(text, "--dtypes")
    for name in names:
        if name not in limits.DTYPES:
            raise Misuse(f"--dtypes: unknown dtype {name!r}; use some of {', '.join(limits.DTYPES)}")
    return tuple(names) or limits.DTYPES


def _start(text: str) -> str:
    from equivtest.ranks.backend import STARTS

    if text not in STARTS:
        raise Misuse(f"--start: unknown start {text!r}; use one of {', '.join(STARTS)}")
    return text


def _listen(text: object) -> tuple[str, int] | None:
    if text is None:
        return None
    from equivtest.ranks.hosts.hub_messages import parse_address

    return parse_address(str(text), "--listen")


def _check_starter(settings: Settings) -> None:
    """Raises Misuse under torchrun or a similar launcher, because each of its processes would run everything."""
    rank, size = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    is_of_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    if is_of_torchrun or (rank and size and settings.listen is None):
        if os.environ.get("LOCAL_RANK", "0") != "0":
            time.sleep(limits.STOP_S)  # rank 0 prints the message; then torchrun ends this process
        starter = "torchrun" if is_of_torchrun else "RANK and WORLD_SIZE"
        raise Misuse(
            f"{starter} makes this process rank {rank} of {size}, and each rank would start a whole run: start "
            "equivtest run --listen :29600 once, without it, and on each host torchrun ... -m equivtest.rank --connect "
            "HOST:29600; docs/how-to/hosts.md"
        )


def _subject(text: str) -> tuple[str, str]:
    name, equals, implementation = (part.strip() for part in text.partition("="))
    if not name or (equals and ":" not in implementation):
        raise Misuse(f"--subjects: expected NAME or NAME=package.module:function, got {text!r}")
    return name, implementation or name


def _known_failures(text: str | None) -> tuple[str, ...]:
    names = _split(text, "--known-failures")
    if names == [NO_LIST]:
        return ()
    for name in names:
        if name != SHIPPED_LIST and not os.path.isfile(name):
            raise Misuse(
                f"--known-failures: no such file: {shorten(name)} ({SHIPPED_LIST!r} stands for the list that comes "
                f"with equivtest; {NO_LIST!r}, alone, for none)"
            )
    return tuple(names) or (SHIPPED_LIST,)


def _audits(text: str, profile: Profile) -> bool:
    if text not in ("on", "off"):
        raise Misuse(f"--audit: expected on or off, got {text!r}")
    if text == "off" and profile.audits_alone:
        raise Misuse("--audit off leaves nothing to run: the profile audit runs nothing else")
    return text == "on"


def _seconds(option: str, text: object) -> float:
    try:
        seconds = float(str(text))
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        raise Misuse(f"{option}: expected seconds greater than 0, got {text!r}")
    return seconds


def check_file(path: Path, option: str) -> None:
    """Raises Misuse if no file can be written to `path`, before the run instead of at its end."""
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        with tempfile.TemporaryFile(dir=path.parent), contextlib.suppress(FileNotFoundError):
            path.lstat()
    except (OSError, ValueError) as error:
        raise Misuse(
            f"{option}: {shorten(str(path))} cannot be written: {reason_of(error)}; name another file"
        ) from error


def _check_writable(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except (OSError, ValueError) as error:
        raise Misuse(f"--report: cannot write to {shorten(str(directory))}: {reason_of(error)}") from error
