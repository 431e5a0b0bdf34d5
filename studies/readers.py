"""Gives mutated files to the readers of other people's files: `python -m studies.readers BUNDLE [NUMBER] [SEED]`.

A hub's port gets mutated messages.  If BUNDLE is -, both readers of bundles are left out.  A small BUNDLE comes from
`equivtest run --profile smoke --subjects scale --world-sizes 1,2 --bundle BUNDLE`.

Each reader must read a file or refuse it by one line.  The exit code is 1 if a reader raised any other exception,
executed something, or took longer than LIMIT_S for one file.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import random
import re
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from equivtest.bundle.bag import read_bag, write_bag
from equivtest.bundle.manifest import ALL_CLAIMS, Backend, read_manifest, write_text
from equivtest.bundle.verify import verify
from equivtest.captured.format.folder import CapturedRun, paths_of
from equivtest.captured.format.manifest import Manifest, Parameter, Tensor
from equivtest.captured.format.tensor_file import digest_of as tensor_digest
from equivtest.captured.format.tensor_file import write_tensors
from equivtest.cases.case import from_data
from equivtest.errors import EquivtestError
from equivtest.pytest_plugin.suite import shipped
from equivtest.ranks.hosts import hub_messages as messages
from equivtest.ranks.hosts.run_hub import RunHub
from equivtest.report.compare import compare
from equivtest.report.files import write_report
from equivtest.report.log import LOG, read_run
from equivtest.report.merge import merge
from equivtest.search.known import SHIPPED, KnownFailures
from equivtest.search.replay import backend_of, read_replay
from tests.runs import record, searched, write_run

RIGHT = ("read", "named", "refused")
"""Right outcomes of a reader: the file is read, its problems are named, or one line refuses it."""

LIMIT_S = 30.0
"""Seconds that a reader may take for one file, most of them to derive the cases of a bundle on a slow machine."""

EXECUTES = ("os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "pickle.find_class", "socket.connect")
"""Audit events of Python 3.11 that no reader may cause."""

TOKENS = (
    b"null", b"true", b"-1", b"1e999", b"NaN", b"9" * 400, b'""', b"[]", b"{}", b"[" * 3000, b'"\\ud800"', b"\x00",
    b"\xff\xfe", b"../../", b"__import__('os').system('true')", b"__class__", b"os:system", b"float('inf')", b"\r\n",
    b'"expires": "2000-01-01"', b"9999999999999999999999", b"cposix\nsystem\n(S'true'\ntR.",
)  # fmt: skip
WORD = re.compile(rb"[\w.+-]+|\"[^\"]*\"|'[^']*'")


def mutated(data: bytes, chance: random.Random) -> bytes:
    """Returns the data after one to four random changes of a byte, a block or a word."""
    for _ in range(chance.randint(1, 4)):
        data = chance.choice(MUTATIONS)(data, chance)
    return data


def _with_other_byte(data: bytes, chance: random.Random) -> bytes:
    place = chance.randrange(len(data) or 1)
    return data[:place] + bytes([chance.randrange(256)]) + data[place + 1 :]


def _without_block(data: bytes, chance: random.Random) -> bytes:
    begin = chance.randrange(len(data) or 1)
    return data[:begin] + data[begin + chance.choice((1, 2, 10, 100, 10_000)) :]


def _with_block_twice(data: bytes, chance: random.Random) -> bytes:
    begin, place = (chance.randrange(len(data) or 1) for _ in range(2))
    return data[:place] + data[begin : begin + chance.choice((1, 10, 100, 1000))] + data[place:]


def _with_token(data: bytes, chance: random.Random) -> bytes:
    place = chance.randrange(len(data) or 1)
    return data[:place] + chance.choice(TOKENS) + data[place:]


def _with_other_word(data: bytes, chance: random.Random) -> bytes:
    words = [match.span() for match in WORD.finditer(data)]
    if not words:
        return data
    begin, end = chance.choice(words)
    other = chance.choice(words)
    return data[:begin] + chance.choice((data[other[0] : other[1]], chance.choice(TOKENS))) + data[end:]


MUTATIONS = (_with_other_byte, _without_block, _with_block_twice, _with_token, _with_other_word, _with_other_word)


class Reader(NamedTuple):
    """A function that reads a kind of file, and a function that writes a mutated file of that kind."""

    write: Callable[[Path, random.Random], None]
    read: Callable[[Path], str]


def _read_replay(path: Path) -> str:
    data = read_replay(path)
    backend_of(data)
    from_data(data["case"])
    return "read"


def _read_known(path: Path) -> str:
    KnownFailures.load(path)
    return "read"


def _read_manifest(path: Path) -> str:
    read_manifest(path)
    KnownFailures.load(path)
    return "read"


def _verify(path: Path) -> str:
    return "named" if verify(path, shipped()).problems else "read"


def _mutating(original: bytes) -> Callable[[Path, random.Random], None]:
    def write(path: Path, chance: random.Random) -> None:
        path.write_bytes(mutated(original, chance))

    return write


def _forging(payload: Mapping[str, bytes]) -> Callable[[Path, random.Random], None]:
    """Returns a function that writes a bundle with one changed file and right checksums."""

    def write(path: Path, chance: random.Random) -> None:
        name = chance.choice(sorted(payload))
        write_bag(path, {**payload, name: mutated(payload[name], chance)}, {})

    return write


def _read_log(path: Path) -> str:
    run = read_run(path)
    compare(run, run)
    write_report(path.with_name("report"), run.environment, run.results)
    return "read"


def _mutating_log(original: bytes) -> Callable[[Path, random.Random], None]:
    """Changes the lines of a log below its compression, or the compressed file."""
    lines = gzip.decompress(original)

    def write(path: Path, chance: random.Random) -> None:
        whole = chance.random() < 0.8
        path.write_bytes(gzip.compress(mutated(lines, chance), 1) if whole else mutated(original, chance))

    return write


def _merge(path: Path) -> str:
    other, report = path.with_name(OTHER), path.with_name("report")
    code, _ = merge([path, other], report, ("equivtest", "merge"))
    return "named" if code else "read"


def _sharding(first: bytes, second: bytes) -> Callable[[Path, random.Random], None]:
    write = _mutating_log(first)

    def write_both(path: Path, chance: random.Random) -> None:
        path.with_name(OTHER).write_bytes(second)
        write(path, chance)

    return write_both


OTHER = "other.jsonl.gz"
"""Name of the second shard, beside the changed one."""


def sample_logs() -> tuple[bytes, bytes, bytes]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        whole = write_run(folder / "whole", searched(record(0), record(1, "value"), pairs=("dtype=float32 bias=True",)))
        first = write_run(folder / "first", searched(record(0), name="scale"), shard="1/2")
        second = write_run(folder / "second", searched(record(1)), shard="2/2")
        return tuple((each / LOG).read_bytes() for each in (whole, first, second))


def _read_captured(path: Path) -> str:
    for rank in CapturedRun(path.with_name("captured")).ranks.values():
        for name in rank:
            rank[name]
    return "read"


def _capturing(original: Mapping[str, bytes]) -> Callable[[Path, random.Random], None]:
    def write(path: Path, chance: random.Random) -> None:
        folder = path.with_name("captured")
        folder.mkdir(exist_ok=True)
        changed = chance.choice(sorted(original))
        for name, data in original.items():
            (folder / name).write_bytes(mutated(data, chance) if name == changed else data)

    return write


def sample_captured() -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for rank in range(2):
            path, tensors = paths_of(folder, rank)
            local = torch.full((2, 3), float(rank))
            tensor = Tensor(tensor_digest(local), layout=("shard(0)",), order=(0,), whole=(4, 3), requires_grad=True)
            given = torch.ones(2)
            manifest = Manifest(
                run="ab" * 16, rank=rank, world_size=2, mesh=(2,), axes=("tp",), batch="", batch_axis="", part="",
                inputs=("x",), positional=("x",), outputs=(), boundaries=(), autocast="", optimizer="", groups=(),
                parameters={"up.weight": Parameter((4, 3), "float32", requires_grad=True)},
                tensors={"param.up.weight": tensor, "given.x": Tensor(tensor_digest(given))},
                size_bytes=write_tensors(tensors, {"param.up.weight": local, "given.x": given}),
                torch="2", equivtest="1",
            )  # fmt: skip
            path.write_bytes(msgspec.json.encode(manifest))
        return {path.name: path.read_bytes() for path in folder.iterdir()}


def _sending(hello: bytes) -> Callable[[Path, random.Random], None]:
    def write(path: Path, chance: random.Random) -> None:
        path.write_bytes(mutated(hello, chance))

    return write


def _connecting(hub: RunHub) -> Callable[[Path], str]:
    """Connects to the hub's port, sends the file, and reads until the hub closes the connection."""

    def read(path: Path) -> str:
        with socket.socket() as peer:
            peer.settimeout(LIMIT_S)
            peer.connect(("127.0.0.1", hub.port))
            executed.clear()  # this connection is ours
            with contextlib.suppress(ConnectionError):
                peer.sendall(path.read_bytes())
                with contextlib.suppress(OSError):  # the hub has closed the connection
                    peer.shutdown(socket.SHUT_WR)
                while peer.recv(1000):
                    pass
        return "refused"

    return read


def sample_hello() -> bytes:
    hello = messages.encode(messages.SlotHello(0, 1, 0, "host", 17, "127.0.0.1", "", 0))
    return len(hello).to_bytes(8, "little") + hello


def readers_of(bundle: bytes, payload: Mapping[str, bytes], replay: bytes, known: bytes) -> dict[str, Reader]:
    return {
        "replay file": Reader(_mutating(replay), _read_replay),
        "known failures": Reader(_mutating(known), _read_known),
        "manifest": Reader(_mutating(write_text(Backend("gloo"), ALL_CLAIMS).encode()), _read_manifest),
        "bundle": Reader(_mutating(bundle), _verify),
        "bundle with right checksums": Reader(_forging(payload), _verify),
    }


def attack(reader: Reader, folder: Path, number: int, seed: str) -> Iterator[tuple[int, str]]:
    """Yields (number of the file, outcome) for mutated files: 'read', 'named', 'refused', or what no reader may do."""
    path = folder / "file.zip"
    for index in range(number):
        reader.write(path, random.Random(f"{seed} {index}"))
        started_s, before = time.monotonic(), len(executed)
        outcome = _outcome(reader, path)
        if len(executed) > before:
            outcome = f"executed {executed[-1]}"
        elif time.monotonic() - started_s > LIMIT_S:
            outcome = "took too long"
        yield index, outcome


def _outcome(reader: Reader, path: Path) -> str:
    try:
        return reader.read(path)
    except EquivtestError as error:
        return "refused" if str(error).strip() else "refused without a reason"
    except Exception as error:
        return f"raised {type(error).__name__}: {str(error)[:100]}"


executed: list[str] = []
"""Events of EXECUTES since `listen` was called."""


def listen() -> None:
    """Records from now on which of EXECUTES happen in this process.  Python cannot undo that."""
    sys.addaudithook(lambda event, _: executed.append(event) if event in EXECUTES else None)


def sample_replay() -> bytes:
    case = {"schema": 1, "type": "ScaleCase", "fields": {"world_size": 2, "shape": [3, 2], "factor": -3}}
    backend = {"name": "gloo", "device": "cpu", "imports": [], "start": "auto", "arithmetic": ""}
    data = {"schema": 1, "subject": "scale", "claim": "equals_unsharded", "kind": "value", "limit_s": 20.0}
    return json.dumps(data | {"case": case, "backend": backend, "message": "scale: output differs"}, indent=2).encode()


def sample_known() -> bytes:
    entries = SHIPPED.read_bytes().split(b"[[known_failure]]")
    return b"[[known_failure]]".join(entries[:6])


def readers_of_runs(hub: RunHub) -> dict[str, Reader]:
    whole, first, second = sample_logs()
    return {
        "run log": Reader(_mutating_log(whole), _read_log),
        "shards": Reader(_sharding(first, second), _merge),
        "captured folder": Reader(_capturing(sample_captured()), _read_captured),
        "hub's port": Reader(_sending(sample_hello()), _connecting(hub)),
    }


def main(bundle: str, number: str = "10000", seed: str = "readers") -> int:
    path = Path(bundle)
    shipped()
    with RunHub(("127.0.0.1", 0), b"a secret that no mutated message has") as hub:
        readers = readers_of_runs(hub)
        if bundle != "-":
            files = (path.read_bytes(), read_bag(path).payload)
            readers = readers_of(*files, sample_replay(), sample_known()) | readers
        listen()
        wrong = attack_all(readers, int(number), seed)
        if ended := [event for event in hub.events() if "has ended" in event]:
            print(*ended, file=sys.stderr)
    return int(wrong > 0 or bool(ended))


def attack_all(readers: Mapping[str, Reader], number: int, seed: str) -> int:
    """Prints a row for each reader.  Returns how many files had an outcome that no reader may have."""
    wrong = 0
    print(f"{number:,} files for each reader, seed {seed}\n")
    print("| reader | read | named | refused | others | seconds |\n|---|---|---|---|---|---|")
    for name, reader in readers.items():
        started_s, counts = time.monotonic(), Counter[str]()
        with tempfile.TemporaryDirectory() as folder:
            for index, outcome in attack(reader, Path(folder), number, f"{seed} {name}"):
                counts[outcome] += 1
                if outcome not in RIGHT:
                    print(f"{name}, file {index}: {outcome}", file=sys.stderr)
        others = sum(count for outcome, count in counts.items() if outcome not in RIGHT)
        wrong += others
        cells = (*(counts[outcome] for outcome in RIGHT), others, round(time.monotonic() - started_s))
        print(f"| {name} | {' | '.join(f'{cell:,}' for cell in cells)} |", flush=True)
    return wrong


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
