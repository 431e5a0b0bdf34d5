"""Judges captured jobs of torchrun in another process: python -m studies.captured_runs [NAME ...].

The jobs run without the harness.  NAMEs choose tables: right, defects, overhead, two, memory, changed.  The tables show
the verdicts on right and wrong jobs beside the harness's verdicts, the cost of a capture, which of two runs is named,
how much memory judging takes, and the verdict on folders with some bytes changed.  The exit code is 1 if a row is
wrong.
"""

from __future__ import annotations

import os
import random
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from equivtest.captured.format.folder import CapturedRun
from equivtest.captured.judge.run import judge_run
from equivtest.errors import EquivtestError
from equivtest.programs.case import ModuleCase
from equivtest.ranks.pool import Pool
from equivtest.verdicts.judging import judge
from studies.captured_model import SPOILS
from tests.programs.captured import captured

NUM_RANKS = 8
MODEL = "studies.captured_model:"
NUM_CHANGED = 300
LIMIT_BYTES = 500 * 2**20
WRONG: list[str] = []


def expect(what: str, *, holds: bool) -> None:
    if not holds:
        WRONG.append(what)
        print(f"NOT AS IT MUST BE: {what}", flush=True)


def start(folder: Path, num_ranks: int, *options: str) -> str:
    command = [
        "torchrun",
        "--nproc-per-node",
        str(num_ranks),
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        "localhost:0",
    ]
    ended = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            *command[1:],
            "-m",
            "studies.captured_job",
            str(folder),
            *options,
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    expect(f"{folder.name} runs: {ended.stderr[-2000:]}", holds=ended.returncode == 0)
    return ended.stdout + ended.stderr


def said(*folders: Path, build: str = "decoder") -> tuple[int, str, float]:
    """Runs `equivtest judge` in a new process.  Returns its exit code, its output and its duration in seconds."""
    begun_s = time.monotonic()
    names = list(map(str, folders))
    ended = subprocess.run(
        [sys.executable, "-m", "equivtest.cli", "judge", *names, "--reference", MODEL + build],
        capture_output=True,
        text=True,
        check=False,
    )
    return ended.returncode, ended.stdout + ended.stderr, time.monotonic() - begun_s


def first_in(text: str) -> str:
    match = re.search(r"Mismatch: \S+: (\S+) ", text)
    return match[1] if match else ""


def coverage_in(text: str) -> str:
    return text.partition("; ")[2].splitlines()[0] if "  run " in text else ""


def show_right(scratch: Path) -> None:
    print(f"\nright jobs on {NUM_RANKS} ranks")
    for style in ("tensor_parallel", "fsdp2"):
        for build, dtype in (
            ("decoder", "float32"),
            ("decoder", "bfloat16"),
            ("deep", "bfloat16"),
            ("deep", "float16"),
        ):
            folder = scratch / f"{style}-{build}-{dtype}"
            wrote = start(folder, NUM_RANKS, "--style", style, "--dtype", dtype, "--build", build)
            code, text, seconds = said(folder, build=build)
            size = re.search(r"ranks write (.*), one", wrote)
            verdicts = text.count("inconclusive")
            lines = f"{'holds' if code == 0 else 'RED'}{', some inconclusive' * bool(verdicts)}"
            print(
                f"  {style:15} {build:8} {dtype:9} {lines:26} {seconds:5.1f} s  {size and size[1]}  {coverage_in(text)}"
            )
            expect(f"{folder.name} holds: {text[:500]}", holds=code == 0)


def show_defects(scratch: Path) -> None:
    print(f"\nplanted defects on {NUM_RANKS} ranks: first wrong tensor, captured | in the harness")
    inputs = (("ids", "ids(48)", ("batch", "seq")),)
    with Pool() as pool:
        for name, (part, _) in SPOILS.items():
            start(scratch / name, NUM_RANKS, "--defect", name)
            code, text, _ = said(scratch / name)
            case = ModuleCase(
                world_size=NUM_RANKS, build=f"{MODEL}decoder", parallelize=MODEL + name, by_parts=True,
                inputs=inputs, sizes=(("batch", 8), ("seq", 12)), values=(("real", 0),),
            )  # fmt: skip
            failed = [verdict for verdict in judge("module", case, pool) if verdict.failed]
            harness = failed[0].judgement.mismatches[0].tensor if failed else ""
            print(f"  {name:10} at {part:24} {first_in(text):36} | {harness}", flush=True)
            expect(
                f"{name} is red at {harness}: {text[:300]}",
                holds=code == 1 and bool(harness) and first_in(text) == harness,
            )


def show_overhead(scratch: Path) -> None:
    print(f"\nseconds of a step, captured over alone, {NUM_RANKS} ranks (the first of 8 left out)")
    for what in ("*", "layers.*.mlp", "head"):
        text = start(scratch / f"time-{len(what)}", NUM_RANKS, "--time", "8", "--build", "deep", "--boundaries", what)
        found = {
            kind: [float(each) for each in re.findall(rf"^{kind} (\S+)$", text, flags=re.M)][1:]
            for kind in ("alone", "captured")
        }
        alone, whole = (statistics.median(found[kind]) for kind in ("alone", "captured"))
        print(f"  boundaries {what:14} {alone:.3f} {whole:.3f}  ratio {whole / alone:.2f}", flush=True)


def show_two(scratch: Path) -> None:
    print("\ntwo runs in bfloat16")
    for num_ranks, defect in ((2, ""), (4, ""), (4, "slightly")):
        start(
            scratch / f"two-{num_ranks}{defect}",
            num_ranks,
            "--dtype",
            "bfloat16",
            *["--defect", defect][: 2 * bool(defect)],
        )
    for right in ("two-2", "two-4"):
        for other in ("two-4", "two-4slightly"):
            if right != other:
                code, text, _ = said(scratch / right, scratch / other)
                last = text.strip().splitlines()[-1].replace(f"{scratch}/", "")
                print(f"  {right} {other:14} exit code {code}  {last}", flush=True)
                expect(f"{right} {other}: {last}", holds=code == int("slightly" in other))


def show_memory(scratch: Path) -> None:
    """Shows that with LIMIT_BYTES of data each captured submodule can be judged, but not the whole model."""
    print(f"\n48 layers on 2 ranks, judged with at most {LIMIT_BYTES // 2**20} MiB of data (RLIMIT_DATA)")
    for name, options in (("whole", ()), ("parts", ("--alone", "layers.?,layers.??,head,norm,tokens"))):
        folder = scratch / f"memory-{name}"
        start(folder, 2, "--build", "far", "--rows", "16", *options)
        for is_limited in (False, True):
            process = subprocess.Popen(
                [sys.executable, "-m", "equivtest.cli", "judge", str(folder), "--reference", f"{MODEL}far"],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                preexec_fn=_limit if is_limited else None,
            )
            assert process.stdout
            last = process.stdout.read().strip().splitlines()[-1][:120].replace(f"{scratch}/", "")
            _, status, used = os.wait4(process.pid, 0)
            code = os.waitstatus_to_exitcode(status)
            peak = f"peak {used.ru_maxrss / 1024:5.0f} MiB"
            print(f"  {name}  {'limited' if is_limited else 'free':8} exit code {code:3}  {peak}  {last}", flush=True)
            fits = name == "parts" or not is_limited
            expect(f"{name} {'fits' if fits else 'does not fit'}", holds=(code == 0) == fits)


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (LIMIT_BYTES, LIMIT_BYTES))


def show_changed(scratch: Path) -> None:
    """Changes, removes or doubles some bytes of a run.  The run must be refused by a message, or judged as before."""
    captured(scratch / "small")
    source, counts = random.Random(0), {"refused": 0, "judged the same": 0, "wrong": 0}
    for number in range(NUM_CHANGED):
        folder = Path(shutil.copytree(scratch / "small", scratch / f"changed-{number}"))
        path = source.choice(sorted(folder.iterdir()))
        data = bytearray(path.read_bytes())
        place, length = source.randrange(len(data)), source.choice((1, 1, 1, 8, 64))
        kind = source.choice(("change", "leave out", "double"))
        piece = (
            bytes(source.randrange(256) for _ in range(length))
            if kind == "change"
            else data[place : place + length] * 2
        )
        data[place : place + length] = b"" if kind == "leave out" else piece
        path.write_bytes(data)
        try:
            outcome = (
                "wrong"
                if judge_run(CapturedRun(folder), "tests.programs.captured:blocks").failed
                else "judged the same"
            )
        except EquivtestError:
            outcome = "refused"
        counts[outcome] += 1
        shutil.rmtree(folder)
    print(f"\n{NUM_CHANGED} folders with some bytes changed: {counts}")
    expect("no change of bytes makes a right run wrong", holds=not counts["wrong"])


SHOWS = {
    "right": show_right, "defects": show_defects, "overhead": show_overhead, "two": show_two, "memory": show_memory,
    "changed": show_changed,
}  # fmt: skip


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="equivtest-captured-") as folder:
        for name in sys.argv[1:] or SHOWS:
            SHOWS[name](Path(folder))
    print(f"\n{len(WRONG)} not as they must be")
    return bool(WRONG)


if __name__ == "__main__":
    sys.exit(main())
