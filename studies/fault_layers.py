"""Plants faults in collectives, kernels and parallelizations; prints what is blamed: python -m studies.fault_layers.

Each row runs cases of one property until one fails, and asks for the cause, as a search does for a case that it has
shrunk.  Collectives are wrong in planted process groups, kernels on the device written in Python.  Parallelizations are
the families' own defects. [--only NAME ...] runs some rows.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from equivtest.base import limits
from equivtest.cases.case import Case
from equivtest.diagnose.blame import blame
from equivtest.pytest_plugin.suite import shipped
from equivtest.ranks.backend import Backend
from equivtest.ranks.pool import Pool
from equivtest.ranks.reply import Reply
from equivtest.search.chunks import Chunk, draw_cases
from equivtest.search.known import SHIPPED, KnownFailures
from equivtest.verdicts.judging import judge_replies
from equivtest.verdicts.verdict import Verdict
from tests.defects.defect import defects
from tests.programs.kernels import KERNEL
from tests.programs.planted import FAULT

MOST_CASES = 60


@dataclass(frozen=True)
class Plant:
    """A planted fault, and the property that must reveal it.

    Attributes:
        layer: What must be blamed: 'collective', 'kernel' or 'parallelization'.
        names: The collective or the operator that must be blamed by name, or '' for a parallelization.
    """

    layer: str
    name: str
    subject: str
    names: str = ""
    world_size: int = 2
    dtypes: tuple[str, ...] = ("float32",)


PLANTS = (
    Plant("collective", "swapped_gather", "zero3_fetch_all_gather", "all_gather"),
    Plant("collective", "early_wait", "zero3_fetch_all_reduce", "all_reduce"),
    Plant("collective", "raises_attribute", "fsdp2_mlp", "reduce_scatter"),
    Plant("collective", "drops_rank", "rowwise_linear", "all_reduce", dtypes=("float16",)),
    Plant("collective", "forgets_remainder", "zero3_fetch_all_gather", "all_gather"),
    Plant("collective", "wrong_on_one_rank", "fsdp2_mlp", "reduce_scatter"),
    Plant("collective", "average_is_sum", "hsdp_mlp", "all_reduce", world_size=4, dtypes=("bfloat16",)),
    Plant("collective", "other_order", "fsdp2_mlp", "reduce_scatter"),
    Plant("collective", "ends_a_rank", "rowwise_linear", "scatter"),
    Plant("collective", "wrong_on_three", "zero3_fetch_all_gather", "all_gather", world_size=3),
    Plant("kernel", "mm_fewer_bits", "rowwise_linear", "mm"),
    Plant("kernel", "mm_raises", "colwise_linear", "mm"),
    Plant("kernel", "addmm_last_is_zero", "colwise_linear", "addmm"),
    Plant("kernel", "sum_first_is_doubled", "colwise_linear", "sum"),
    Plant("kernel", "embedding_last_is_zero", "colwise_embedding", "embedding"),
    Plant("kernel", "embedding_backward_doubled", "colwise_embedding", "embedding_dense_backward"),
    Plant("kernel", "layer_norm_fewer_bits", "sequence_layer_norm", "native_layer_norm"),
    Plant("kernel", "layer_norm_backward_nan", "sequence_layer_norm", "native_layer_norm_backward"),
    Plant("kernel", "relu_last_is_zero", "ddp_mlp", "relu"),
    Plant("kernel", "cat_swapped", "redistribute", "cat"),
    *(
        Plant("parallelization", name, replaces)
        for name, replaces in (
            ("sum_of_own_classes", "parallel_cross_entropy"),
            ("mask_not_applied", "rowwise_embedding"),
            ("input_gradient_averaged", "colwise_linear"),
            ("partial_outputs_reduced_in_bfloat16", "rowwise_linear"),
            ("gradient_of_own_tokens", "sequence_layer_norm"),
            ("shards_swapped", "redistribute"),
            ("mean_counts_padding", "dtensor_operators"),
            ("gradients_of_the_last_micro_batch", "fsdp2_mlp"),
            ("overlapping_padding", "zero3_fetch_all_gather"),
            ("stale_whole_after_update", "zero3_lifecycle_all_gather"),
        )
    ),
)


@contextmanager
def pool_of(plant: Plant, beside: Pool) -> Iterator[Pool]:
    if plant.layer == "kernel":
        device = Backend("shadow", "shadow", ("tests.programs.kernels",))
        with Pool(device, environment={KERNEL: plant.name}) as pool:
            yield pool
    elif plant.layer == "collective":
        group = Backend("planted", imports=("tests.programs.planted",))
        with Pool(group, environment={FAULT: plant.name}, beside=beside) as pool:
            yield pool
    else:
        yield beside


def cases_of(plant: Plant) -> list[Case]:
    """Returns the smallest case of a planted defect, then drawn cases of the property."""
    chunk = Chunk(plant.world_size, plant.dtypes, 0, MOST_CASES, "fault_layers")
    drawn = [case for case in draw_cases(shipped()[plant.subject], chunk, MOST_CASES) if not case.refusal]
    return [*(each.smallest for each in defects() if each.name == plant.name), *drawn]


def subject_of(plant: Plant) -> str:
    return next((each.subject for each in defects() if each.name == plant.name), plant.subject)


def first_failure(plant: Plant, pool: Pool, known: KnownFailures) -> Verdict | None:
    claims, subject = shipped()[plant.subject].claims, subject_of(plant)
    for case in cases_of(plant):
        if known.forbids_run(plant.subject, case):
            continue
        for verdict in judge_replies(subject, case, pool.run(subject, case, limit_s=10.0), claims):
            if verdict.failed and known.match(plant.subject, verdict.claim, case, verdict.kind) is None:
                return replace(verdict, subject=subject)
    return None


def told(plant: Plant, failure: Verdict, pool: Pool) -> str:
    claims = shipped()[plant.subject].claims

    def is_shown_by(replies: list[Reply]) -> bool:
        return any(verdict.failed for verdict in judge_replies(failure.subject, failure.case, replies, claims))

    return blame(failure, pool, is_shown_by)  # type: ignore[arg-type]


def main() -> int:
    """Prints the table.  Returns 0 if at most two rows blame the wrong thing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=[], choices=[plant.name for plant in PLANTS])
    only = parser.parse_args().only
    chosen = [plant for plant in PLANTS if not only or plant.name in only]
    known, num_right = KnownFailures.load(SHIPPED), 0
    limits.PROBE_S = 5.0
    print("| layer | fault | shown by | right | seconds | told |\n|---|---|---|---|---|---|")
    with Pool() as beside:
        for plant in chosen:
            begun_s = time.monotonic()
            with pool_of(plant, beside) as pool:
                failure = first_failure(plant, pool, known)
                line = "no case failed" if failure is None else told(plant, failure, pool)
            is_right = line.startswith(f"{plant.layer}: ") and plant.names in line.partition(" of ")[0]
            num_right += is_right
            cells = (plant.layer, plant.name, plant.subject, "yes" if is_right else "NO")
            print(f"| {' | '.join(cells)} | {time.monotonic() - begun_s:.0f} | {line} |", flush=True)
    print(f"\n{num_right} of {len(chosen)} are named right")
    return int(num_right < len(chosen) - 2)


if __name__ == "__main__":
    sys.exit(main())
