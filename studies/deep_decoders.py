"""Judges a decoder of twelve layers part by part: `python -m studies.deep_decoders [--seeds N] [--model M] [DTYPE
...]`.

The model is transformers' Llama, of tiny widths, under its own tensor parallelism on 2, 3 and 4 ranks and under FSDP2
on 2.  It takes three steps of AdamW, forward and backward, in bfloat16, float16 and float32.  Each row has, for one
combination: how many seeds were called wrong; how many boundaries and other tensors there were, and on what share of
each nothing was concluded; and three medians of CPU seconds: for the ranks, for judging, and for the ranks in float32
without capture of their parts.

`--rows FILE` appends each run to a file as a line of JSON, and continues from the runs in the file.  `--model
mixtral@4` takes another model of transformers and number of layers, and counts the tokens with equal scores at the edge
of the chosen experts.  The model `studies.deep_decoders:tied_experts` has such scores for every token.  Operands of
functions within a part count at the place of their judgement.

The exit code is 1 if a right run is called wrong, or more than one boundary in a hundred is inconclusive.  Needs what
`make clients` installs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import psutil
import torch
from torch import nn
from torch.nn.utils import parametrize

from equivtest.cases.case import in_one_step
from equivtest.module import CLAIMS
from equivtest.oracle import expect_held
from equivtest.programs.boundaries import CHOSEN, is_boundary, is_operand
from equivtest.programs.case import ModuleCase
from equivtest.ranks.backend import Backend
from equivtest.ranks.pool import Pool
from equivtest.ranks.reply import Reply
from equivtest.tensors import Placed
from equivtest.verdicts.claims import trains_like_unsharded
from equivtest.verdicts.compare import compare
from equivtest.verdicts.judging import one_thread
from studies.client_defects import INPUTS, LIMIT_S, first_of
from studies.json_lines import lines_of
from tests.clients.language_models import build

BUILD = "tests.programs.clients:"
MOST_OPEN = 0.01
VALUES = ("equals_unsharded", "gradients_equal_unsharded", "trains_like_unsharded")
HOW = (("tensor_parallel", 2), ("tensor_parallel", 3), ("tensor_parallel", 4), ("layers_sharded", 2))
DTYPES = ("bfloat16", "float16", "float32")
AT_ONCE = 5
"""Number of seeds that one combination runs in a row, so that an interrupted run has nearly equally many of each."""


def cpu_s() -> float:
    """Returns the CPU seconds of this process and all its children, including children that have ended."""
    total = 0.0
    me = psutil.Process()
    for process in (me, *me.children(recursive=True)):
        with suppress(psutil.Error):  # it ended after it was listed
            total += sum(process.cpu_times()[:4])
    return total


class Repeated(nn.Module):
    """Gives three of four experts the same score: the first row of a weight three times, then its second row."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight[[0, 0, 0, 1]]


def tied_experts() -> nn.Module:
    """Builds a Mixtral of four layers whose routers give three of four experts the same score and choose two."""
    model: Any = build("mixtral", num_hidden_layers=4)
    for layer in model.model.layers:
        parametrize.register_parametrization(layer.mlp.gate, "weight", Repeated(), unsafe=True)
    return cast("nn.Module", model)


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    """Returns an AdamW with a rate whose steps bfloat16 can represent.

    float16 can represent its eps. float16 rounds the default, 1e-8, to zero, and then divides by zero.
    """
    return torch.optim.AdamW(module.parameters(), lr=2.0**-5, eps=2.0**-10)


def case_of(model: str, parallelize: str, world_size: int, dtype: str, seed: int, steps: int = 3) -> ModuleCase:
    """Builds a case.  Under FSDP2 each rank has one row of the batch."""
    is_divided = parallelize == "layers_sharded"
    return ModuleCase(
        world_size=world_size,
        dtype=dtype,
        build=model if ":" in model else BUILD + model,
        parallelize=f"tests.clients.language_models:{parallelize}",
        inputs=INPUTS,
        sizes=(("batch", 2), ("seq", 5)),
        outputs=("loss", "logits"),
        values=(("real", seed),),
        batch="mean of parts" if is_divided else "whole",
        optimizer="studies.deep_decoders:adamw",
        steps=steps,
        by_parts=True,
    )


class Judged(NamedTuple):
    """The conclusions on one run.

    Attributes:
        wrong: The first wrong tensor, or ''.
        boundaries, others: Numbers of tensors. `open_boundaries` and `open_others` are inconclusive.
        ties: Number of tokens with equal scores at the edge of the chosen experts.
        ran_s, judged_s: CPU seconds that the ranks took, and that judging them took.
        alone_s: CPU seconds of the ranks without capture of their submodules, or 0 if not measured.
    """

    wrong: str
    boundaries: int = 0
    open_boundaries: int = 0
    others: int = 0
    open_others: int = 0
    ties: int = 0
    ran_s: float = 0.0
    judged_s: float = 0.0
    alone_s: float = 0.0


def judged(case: ModuleCase, pool: Pool) -> Judged:
    replies, ran_s = run_on(pool, case)
    if not all(reply.answers for reply in replies):
        return Judged(next(reply.error_text for reply in replies if not reply.answers))
    begun_s = cpu_s()
    with one_thread():
        expected = expect_held(case, 0, {reply.rank: reply.answers[0].tensors for reply in replies})
        verdicts = compare("module", case, 0, [expected], replies, (*CLAIMS, trains_like_unsharded))
    judged_s = cpu_s() - begun_s
    judging = [verdict for verdict in verdicts if verdict.claim in VALUES]
    agreeing = {name for verdict in judging for name in verdict.judgement.agreeing}
    names = [name for name in case.answer_names() if name in expected.tensors or not is_operand(name)]
    boundaries = {name for name in names if is_boundary(in_one_step(name))}
    others = set(names) - boundaries
    return Judged(
        first_of(verdicts), len(boundaries), len(boundaries - agreeing), len(others), len(others - agreeing),
        ties_in(replies[0].answers[0].tensors), ran_s, judged_s,
    )  # fmt: skip


def ties_in(held: Mapping[str, Placed]) -> int:
    """Counts the rows of scores in which the last chosen score equals the next one."""
    found = 0
    for name, chosen in held.items():
        if name.endswith(CHOSEN) and name.removesuffix(CHOSEN) in held:  # else a part gave the scores
            scores = held[name.removesuffix(CHOSEN)].local.sort(-1, descending=True).values
            last = chosen.local.shape[-1]
            found += int((scores[..., last - 1] == scores[..., last]).sum()) if last < scores.shape[-1] else 0
    return found


def run_on(pool: Pool, case: ModuleCase) -> tuple[list[Reply], float]:
    """Runs the case.  Returns the replies of the ranks, and the CPU seconds that the ranks took."""
    begun_s = cpu_s()
    return pool.run("module", case, limit_s=LIMIT_S), cpu_s() - begun_s


def alone_s(case: ModuleCase, pool: Pool) -> float:
    return run_on(pool, replace(case, by_parts=False, dtype="float32"))[1]


def row(dtype: str, how: str, ranks: int, found: list[Judged]) -> str:
    wrong = [each.wrong for each in found if each.wrong]
    num, num_open, others, open_others, ties = (sum(column) for column in list(zip(*found, strict=True))[1:6])
    measured = [each.alone_s for each in found if each.alone_s] or [0.0]
    seconds = (
        statistics.median(column) for column in ([e.ran_s for e in found], [e.judged_s for e in found], measured)
    )
    cells = (
        dtype, how, ranks, len(found), f"{len(wrong)} {''.join(wrong[:1])[:60]}",
        num, f"{100 * num_open / max(num, 1):.2f}", others, f"{100 * open_others / max(others, 1):.2f}", ties,
        *(f"{each:.1f}" for each in seconds),
    )  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


def is_right(found: list[Judged]) -> bool:
    num, num_open = sum(each.boundaries for each in found), sum(each.open_boundaries for each in found)
    return not any(each.wrong for each in found) and num_open <= MOST_OPEN * num


Key = tuple[str, str, int, int]
"""(dtype, parallelization, world size, seed) of a run."""


def read(path: Path | None) -> dict[Key, Judged]:
    """Reads the runs that a file has."""
    rows = lines_of(path) if path and path.exists() else []
    return {(dtype, how, ranks, seed): Judged(*rest) for dtype, how, ranks, seed, *rest in rows}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dtypes", nargs="*", default=DTYPES)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--model", default="llama@12")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rows", type=Path)
    given = parser.parse_args()
    done = read(given.rows)
    cells = [(dtype, how, ranks) for dtype in given.dtypes for how, ranks in HOW]
    with Pool(Backend("gloo", "cpu", ("tests.clients.language_models",))) as pool:
        for begin in range(0, given.seeds, AT_ONCE):
            for cell in cells:
                for seed in range(begin, min(begin + AT_ONCE, given.seeds)):
                    if (*cell, seed) in done:
                        continue
                    dtype, how, ranks = cell
                    case = case_of(given.model, how, ranks, dtype, seed, given.steps)
                    run = judged(case, pool)
                    if seed == begin:
                        run = run._replace(alone_s=alone_s(case, pool))
                    done[*cell, seed] = run
                    if given.rows and run.boundaries:  # else its ranks did not answer, and it is tried again
                        with given.rows.open("a") as file:
                            print(json.dumps((*cell, seed, *run)), file=file)
    print("|dtype|how|ranks|seeds|wrong|boundaries|open, %|others|open, %|ties|ranks, s|judging, s|alone, s|")
    print("|---|---|---|---|---|---|---|---|---|---|---|---|---|")
    of_cell = {cell: [run for (*key, _), run in done.items() if tuple(key) == cell] for cell in cells}
    for cell, found in of_cell.items():
        print(row(*cell, found))
    return int(not all(map(is_right, of_cell.values())))


if __name__ == "__main__":
    sys.exit(main())
