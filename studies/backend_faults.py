"""Prints how the gate names the faults of planted backends.

python -m studies.backend_faults [--only NAME ...] [--whole]

Each row is one `equivtest run --profile gate -x` on a backend that is wrong in one way, or honest.  By default only the
searches of PART run. --whole runs all searches of the gate.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests.programs.planted import FAULT
from tests.programs.planted_cpp import LIBRARY, build

ROOT = Path(__file__).parents[1]
PART = "collectives or rowwise_linear"
"""pytest's -k for the searches that run: those on single collectives, and those on a subject that calls collectives."""


@dataclass(frozen=True)
class Planted:
    """A backend with a planted fault, or without one, and the verdict that the gate must give on the backend.

    Attributes:
        collective: The collective that has the fault, or '' for an honest backend.
        only: The one dtype, size or rank to which the fault is confined, or ''.
        code: Exit code that the run must have.
        declared: Further arguments of the run, which declare how the backend deviates.
    """

    name: str
    collective: str = ""
    only: str = ""
    code: int = 1
    declared: tuple[str, ...] = ()

    @property
    def is_cpp(self) -> bool:
        return self.name.startswith("cpp")


ROWS = (
    Planted("honest", code=0),
    Planted("cpp_honest", code=0),
    Planted("swapped_gather", "all_gather_into_tensor"),
    Planted("early_wait", "all_reduce"),
    Planted("raises_attribute", "reduce_scatter_tensor"),
    Planted("drops_rank", "all_reduce", "float16"),
    Planted("wrong_when_large", "all_reduce", "1,000 elements and more"),
    Planted("forgets_remainder", "all_gather_into_tensor", "sizes that 8 does not divide"),
    Planted("wrong_on_one_rank", "reduce_scatter_tensor", "rank 1"),
    Planted("other_root", "broadcast"),
    Planted("average_is_sum", "all_reduce_avg", "bfloat16"),
    Planted("forgets_factor", "all_reduce_premul"),
    Planted("other_order", "reduce_scatter_tensor"),
    Planted("nothing_exchanged", "all_to_all_single"),
    Planted("hangs", "all_to_all_single"),
    Planted("ends_a_rank", "scatter"),
    Planted("max_from_zero", "all_reduce_max", "negative values"),
    Planted("wrong_on_three", "all_gather_into_tensor", "3 ranks"),
    Planted("sends_fewer_bits", "broadcast", "float64"),
    Planted("refuses", "all_reduce", "bfloat16"),
    Planted("writes_beside", "all_gather_into_tensor"),
    Planted("bits_joined", "all_reduce_bxor"),
    Planted("loses_tails", "send_and_receive", "9 elements and more"),
    Planted("only_in_order", "broadcast", "waited for backwards"),
    Planted("opens_early", "barrier"),
    Planted("tires", "all_gather_into_tensor", "each 1,000th call"),
    Planted("wrong_above_one_mib", "scatter", "results above 1 MiB"),
    Planted("remembers_address", "all_gather_into_tensor", "an address of before"),
    Planted("remembers_freed_address", "reduce", "an address of before, freed"),
    Planted("needs_alignment", "all_to_all", "addresses that 16 does not divide"),
    Planted("takes_rows", "all_gather", "dense and not contiguous"),
    Planted("saturates", "all_reduce", "float16 sums beyond 65504"),
    Planted("counts_in_float32", "all_reduce", "int64 sums"),
    Planted("largest_is_finite", "all_reduce_max", "-inf alone"),
    Planted("ignores_tags", "send_and_receive", "several tags at once"),
    Planted("wrong_from_five", "all_to_all_single", "5 ranks and more"),
    Planted("all_to_all_hangs", "all_to_all"),
    Planted("gather_hangs", "gather"),
    Planted("cpp_swapped_gather", "all_gather_into_tensor"),
    Planted("cpp_remainder", "all_reduce", "sizes that 16 does not divide"),
    Planted("cpp_bfloat16_sum", "all_reduce", "bfloat16"),
    Planted("cpp_scatter_on_rank_2", "scatter", "rank 2"),
    Planted("last_rank_first", code=0),
    Planted("order_varies", code=0, declared=("--arithmetic=tests.programs.planted_arithmetic:VARYING",)),
    Planted("flushes", code=0, declared=("--arithmetic=tests.programs.planted_arithmetic:FLUSHING",)),
    Planted("averages_before", code=0),
    Planted("wide_sums", code=0),
    Planted("premultiplies", code=0),
    Planted("positive_zeros", code=0),
    Planted("in_pairs", code=0),
    Planted(
        "refuses",
        code=0,
        declared=(
            "--allow-unsupported=bfloat16:all_reduce,bfloat16:functional_all_reduce,bfloat16:coalesced_all_reduce",
        ),
    ),
)


def command(planted: Planted, *, whole: bool) -> list[str]:
    """Returns the command of the run.  It starts in an empty folder, so that no settings of this folder count."""
    module = "tests.programs.planted_cpp" if planted.is_cpp else "tests.programs.unusual"
    backend = "planted_cpp" if planted.is_cpp else "planted"
    args = ["run", "--profile=gate", f"--backend={backend}", f"--import={module}", "-n0"]
    args += [*planted.declared, *([] if whole else ["-k", PART])]
    return [
        sys.executable,
        "-m",
        "equivtest.cli",
        *args,
        *(["-x"] if planted.code and planted.name != "refuses" else []),
    ]


def run(planted: Planted, library: Path | None, *, whole: bool) -> tuple[int, str, float]:
    """Runs the gate on a planted backend.  Returns (exit code, output, seconds)."""
    fault = "" if planted.name.endswith("honest") else planted.name
    environment = {**os.environ, "PYTHONPATH": str(ROOT), FAULT: fault}
    environment |= {LIBRARY: str(library)} if library else {}
    begun_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            command(planted, whole=whole), cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
    return done.returncode, done.stdout + done.stderr, time.monotonic() - begun_s


def first_line(output: str) -> str:
    """Returns the beginning of the summary, or the first failure and its cause."""
    lines = output.splitlines()
    said = [line for line in lines if line.startswith(("equivtest: ", "ValueMismatch", "BitsMismatch", "Rank"))]
    fault = next((f"; {line.strip()}" for line in lines if line.startswith("  fault ")), "")
    first = (sorted(said, key=lambda line: not line.startswith("equivtest: ")) or lines[-1:] or [""])[0]
    return first if first.startswith("equivtest: ") else first + fault


def is_named(planted: Planted, line: str) -> bool:
    names = {planted.collective, planted.collective.removesuffix("_avg").removesuffix("_max")}
    is_blamed = line.startswith("equivtest: ") or "; fault     collective: " in line
    return is_blamed and any(name in line for name in names)


def row(planted: Planted, code: int, line: str, seconds: float) -> list[str]:
    named = "-" if not planted.code else "yes" if is_named(planted, line) else "no"
    right = "" if code == planted.code else f" (not {planted.code}!)"
    return [planted.name, planted.only or "-", f"{code}{right}", named, f"{seconds:.0f}", line]


def main() -> int:
    """Prints the table.  Returns 0 if every exit code is as expected and every fault is named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=[], choices=[planted.name for planted in ROWS])
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "equivtest" / "planted_backend")
    given = parser.parse_args()
    chosen = [planted for planted in ROWS if not given.only or planted.name in given.only]
    library = build(given.cache) if any(planted.is_cpp for planted in chosen) else None
    wrong = 0
    print("| fault | only of | exit | named | seconds | first line |\n|---|---|---|---|---|---|")
    for planted in chosen:
        code, output, seconds = run(planted, library, whole=given.whole)
        line = first_line(output)
        wrong += code != planted.code or (planted.code != 0 and not is_named(planted, line))
        print("| " + " | ".join(row(planted, code, line, seconds)) + " |", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
