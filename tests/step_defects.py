"""Which wrong steps of training are found, where, and how soon: python -m tests.step_defects [NAME ...].

Each is run on 1 to 4 ranks, the fewest first, on batches that divide evenly and not, until a claim rejects it.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterator

from equivtest.check import judge
from equivtest.families.module.case import PARTS_OF_WHOLE, ModuleCase
from equivtest.ranks.pool import Pool
from tests.rank_programs_wrong_steps import WRONG

MODEL, SUBJECT = "equivtest.families.module.subject.token_mean:", "equivtest.families.module.subject:"


def cases(name: str, *, shards: bool) -> Iterator[ModuleCase]:
    """The smallest first."""
    for world_size, batch, seed in itertools.product((1, 2, 3, 4), (2, 3, 4, 5, 8), range(3)):
        if all(-(-batch // world_size) * rank < batch for rank in range(world_size)):  # as torch.chunk divides
            yield ModuleCase(
                world_size=world_size,
                build="equivtest.families.module.case_next_token:next_token",
                parallelize=f"{SUBJECT}{'fully_sharded' if shards else 'data_parallel'}",
                inputs=(("ids", "ids(7)", ("batch", "seq")), ("targets", "targets(7, -100)", ("batch", "seq"))),
                sizes=(("batch", batch), ("seq", 2)),
                batch=PARTS_OF_WHOLE,
                optimizer=f"{MODEL}adamw",
                step=f"tests.rank_programs_wrong_steps:run_{name}",
                steps=2,
                micro_batches=2,
                max_norm=0.5,
                values=(("real", seed),),
            )


def found(name: str, pool: Pool, *, shards: bool) -> str:
    """Where a step is rejected first."""
    begun_s, num = time.monotonic(), 0
    for case in cases(name, shards=shards):
        num += 1
        wrong = next((verdict for verdict in judge("module", case, pool) if verdict.failed), None)
        if wrong is not None:
            first = wrong.judgement.mismatches[0].tensor if wrong.judgement.mismatches else wrong.kind
            where = f"{case.world_size} ranks, {dict(case.sizes)['batch']} rows, case {num:2}"
            return f"red     {where}  {first:28} {time.monotonic() - begun_s:5.1f} s"
    return f"GREEN   in {num} cases                {'':28} {time.monotonic() - begun_s:5.1f} s"


def main() -> int:
    names = sys.argv[1:] or [*WRONG, "Step"]
    lines = []
    with Pool() as pool:
        for name in names:
            shards = getattr(WRONG.get(name), "shards", False)
            lines.append(found(name, pool, shards=shards))
            print(f"{name:24} {'FSDP2' if shards else 'DDP':5} {lines[-1]}", flush=True)
    num_red = sum(line.startswith("red") for line in lines)
    print(f"{num_red} of {len(lines)} are red")
    return 0


if __name__ == "__main__":
    sys.exit(main())
