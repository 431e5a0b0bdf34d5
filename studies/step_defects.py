"""Finds wrong steps of training, and shows in which case and how soon: python -m studies.step_defects [NAME ...].

Each step is run on 1 to 4 ranks, the fewest first, until a claim rejects it.  Wrong counts and reductions run on
batches that divide evenly and on batches that do not.  Wrong norms and overflows run on meshes of two axes.
"""

from __future__ import annotations

import itertools
import math
import sys
import time
from collections.abc import Iterator

from equivtest.programs.case import PARTS_OF_WHOLE, ModuleCase
from equivtest.programs.examples.mixture import AXES, MAX_NORM, SIZES
from equivtest.ranks.pool import Pool
from equivtest.verdicts.judging import judge
from tests.programs.wrong_norms import RIGHT_NORMS, WRONG_NORMS
from tests.programs.wrong_steps import WRONG

MESHES = ((1, 1), (1, 2), (2, 1), (1, 3), (3, 1), (2, 2), (1, 4), (4, 1))
MODEL, SUBJECT = "equivtest.programs.examples.token_mean:", "equivtest.programs.examples.plans:"


def cases(name: str, *, shards: bool) -> Iterator[ModuleCase]:
    for world_size, batch, seed in itertools.product((1, 2, 3, 4), (2, 3, 4, 5, 8), range(3)):
        if all(-(-batch // world_size) * rank < batch for rank in range(world_size)):  # as torch.chunk divides
            yield ModuleCase(
                world_size=world_size,
                build="equivtest.programs.examples.next_token:next_token",
                parallelize=f"{SUBJECT}{'fully_sharded' if shards else 'data_parallel'}",
                inputs=(("ids", "ids(7)", ("batch", "seq")), ("targets", "targets(7, -100)", ("batch", "seq"))),
                sizes=(("batch", batch), ("seq", 2)),
                batch=PARTS_OF_WHOLE,
                optimizer=f"{MODEL}adamw",
                step=f"tests.programs.wrong_steps:run_{name}",
                steps=2,
                micro_batches=2,
                max_norm=0.5,
                values=(("real", seed),),
            )


def norm_cases(name: str) -> Iterator[ModuleCase]:
    for mesh, seed in itertools.product(MESHES, range(3)):
        yield norm_case(name, mesh, seed)


def norm_case(name: str, mesh: tuple[int, int], seed: int = 0) -> ModuleCase:
    """Returns a case of three steps that clip the norm of gradients as the class with this name does."""
    step = {**RIGHT_NORMS, **WRONG_NORMS}[name]
    return ModuleCase(
        world_size=math.prod(mesh),
        mesh=mesh,
        axes=AXES,
        build=f"equivtest.programs.examples.mixture:{step.build}",
        parallelize=f"equivtest.programs.examples.mixture_plan:{step.parallelize}",
        x_shape=(SIZES[step.build],),
        optimizer="equivtest.programs.examples.mixture:sgd",
        step=f"tests.programs.wrong_norms:run_{name}",
        steps=3,
        max_norm=MAX_NORM,
        norm_type=step.norm_type,
        values=(("real", seed),),
    )


def found(cases: Iterator[ModuleCase], pool: Pool) -> str:
    begun_s, num = time.monotonic(), 0
    for case in cases:
        num += 1
        wrong = next((verdict for verdict in judge("module", case, pool) if verdict.failed), None)
        if wrong is not None:
            first = wrong.judgement.mismatches[0].tensor if wrong.judgement.mismatches else wrong.kind
            of = f"{dict(case.arguments.sizes)['batch']} rows" if case.arguments.sizes else f"mesh {case.world.mesh}"
            where = f"{case.world_size} ranks, {of}, case {num:2}"
            return f"red     {where}  {first:28} {time.monotonic() - begun_s:5.1f} s"
    return f"GREEN   in {num} cases                {'':28} {time.monotonic() - begun_s:5.1f} s"


def main() -> int:
    names = sys.argv[1:] or [*WRONG, "Step", *WRONG_NORMS, *RIGHT_NORMS]
    lines = []
    with Pool() as pool:
        for name in names:
            shards = getattr(WRONG.get(name), "shards", False)
            is_norm = name in WRONG_NORMS or name in RIGHT_NORMS
            lines.append(found(norm_cases(name) if is_norm else cases(name, shards=shards), pool))
            print(f"{name:27} {'norm' if is_norm else 'FSDP2' if shards else 'DDP':5} {lines[-1]}", flush=True)
    num_red = sum(line.startswith("red") for line in lines)
    print(f"{num_red} of {len(lines)} are red")
    return 0


if __name__ == "__main__":
    sys.exit(main())
