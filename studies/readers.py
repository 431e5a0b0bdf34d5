"""Gives mutated files to the readers of other people's files: `python -m studies.readers BUNDLE [NUMBER] [SEED]`.

BUNDLE is a small one: equivtest run --profile smoke --subjects scale --world-sizes 1,2 --bundle BUNDLE.

Each reader has to read a file or refuse it by one line.  The exit code is 1 if a reader raised any other exception,
executed something, or took longer than LIMIT_S for one file.
"""

from __future__ import annotations

import json
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from equivtest.bundle.bag import read_bag, write_bag
from equivtest.bundle.manifest import ALL_CLAIMS, Backend, read_manifest, write_text
from equivtest.bundle.verify import verify
from equivtest.cases.case import from_data
from equivtest.errors import EquivtestError
from equivtest.pytest_plugin.suite import shipped
from equivtest.search.known import SHIPPED, KnownFailures
from equivtest.search.replay import backend_of, read_replay

RIGHT = ("read", "named", "refused")
"""Right outcomes of a reader: the file is read, its problems are named, or one line refuses it."""

LIMIT_S = 30.0
"""Seconds that a reader may take for one file; deriving the cases of a bundle takes most of them on a slow machine."""

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
    """A function that reads a kind of file, and a function that writes a mutated file of that kind.

    Attributes:
        write: Writes a mutated file to the path.
        read: Reads the file and returns a word for the outcome.
    """

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


def readers_of(bundle: bytes, payload: Mapping[str, bytes], replay: bytes, known: bytes) -> dict[str, Reader]:
    """Returns each reader by its name; they mutate the given files."""
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
    """Records from now on which of EXECUTES happen in this process; Python cannot undo that."""
    sys.addaudithook(lambda event, _: executed.append(event) if event in EXECUTES else None)


def sample_replay() -> bytes:
    """Returns the content of a small replay file."""
    case = {"schema": 1, "type": "ScaleCase", "fields": {"world_size": 2, "shape": [3, 2], "factor": -3}}
    backend = {"name": "gloo", "device": "cpu", "imports": [], "start": "auto", "arithmetic": ""}
    data = {"schema": 1, "subject": "scale", "claim": "equals_unsharded", "kind": "value", "limit_s": 20.0}
    return json.dumps(data | {"case": case, "backend": backend, "message": "scale: output differs"}, indent=2).encode()


def sample_known() -> bytes:
    """Returns the content of a file with the first entries of the shipped known failures."""
    entries = SHIPPED.read_bytes().split(b"[[known_failure]]")
    return b"[[known_failure]]".join(entries[:6])


def main(bundle: str, number: str = "10000", seed: str = "readers") -> int:
    path = Path(bundle)
    payload = read_bag(path).payload
    shipped()
    listen()
    wrong = 0
    print(f"{int(number):,} files for each reader, seed {seed}\n")
    print("| reader | read | named | refused | others | seconds |\n|---|---|---|---|---|---|")
    for name, reader in readers_of(path.read_bytes(), payload, sample_replay(), sample_known()).items():
        started_s, counts = time.monotonic(), Counter[str]()
        with tempfile.TemporaryDirectory() as folder:
            for index, outcome in attack(reader, Path(folder), int(number), f"{seed} {name}"):
                counts[outcome] += 1
                if outcome not in RIGHT:
                    print(f"{name}, file {index}: {outcome}", file=sys.stderr)
        others = sum(count for outcome, count in counts.items() if outcome not in RIGHT)
        wrong += others
        cells = (*(counts[outcome] for outcome in RIGHT), others, round(time.monotonic() - started_s))
        print(f"| {name} | {' | '.join(f'{cell:,}' for cell in cells)} |", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
