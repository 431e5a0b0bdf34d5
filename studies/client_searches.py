"""What a search makes of defects planted in other people's programs: `python -m studies.client_searches [NUMBER ...]`.

Prints a row per defect: the claim that rejects it first, seconds and cases until then, seconds until the search has
shrunk that failure to its smallest case, and how the message begins.  Rows of programs without a defect follow, every
case of which must hold.  Needs what `make clients` installs.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from equivtest import ids, module_property, targets
from equivtest.cases.case import from_code
from equivtest.check import judge
from equivtest.property import Property
from equivtest.ranks.backend import Backend
from equivtest.ranks.pool import Pool
from equivtest.search.chunks import Chunk, chunk_cases
from equivtest.search.known import KnownFailures
from equivtest.search.search import search
from equivtest.verdicts.verdict import Verdict
from tests.clients.test_trained import trained

DTYPES = ("float32", "float64")
WORLD_SIZES = (1, 2, 3, 4)
NUM_CASES = 8
"""For each world size, until one is rejected."""

MODELS, STEPS = "tests.programs.clients:", "tests.programs.client_steps:"
SHAPE = ("batch", "seq")
LAYER = "model.layers.0."


class Planted(NamedTuple):
    """One program.

    Attributes:
        named: What the first wrong tensor's name has in it; '' where the program is right.
    """

    what: str
    prop: Property
    named: str


def model(build: str, parallelize: str, *, rows: tuple[int, ...] = (1, 2), **fields: Any) -> Property:
    """A language model of one layer or two, each part judged by itself."""
    return module_property(
        MODELS + build if ":" not in build else build,
        MODELS + parallelize if ":" not in parallelize else parallelize,
        inputs={"input_ids": ids(24, SHAPE), "labels": targets(24, SHAPE)},
        sizes={"batch": rows, "seq": (2, 3, 5)},
        outputs=("loss", "logits"),
        by_parts=True,
        **{"batch": "whole", **fields},
    )


def divided(optimizer: str) -> Property:
    """torch's FSDP2 with an optimizer of one's own."""
    return module_property(
        "tests.clients.torch_modules:perceptron",
        "tests.clients.torch_modules:sharded",
        [(4, 3), (12, 3)],
        batch="mean of parts",
        optimizer=STEPS + optimizer,
    )


PLAN = "tests.clients.language_models:tensor_parallel"
PROGRAMS = (
    Planted("reduction missing in a backward", model("llama@1", f"not reduced backward@{LAYER}self_attn.q_proj"),
            "grad.boundary." + LAYER + "input_layernorm"),
    Planted("positions local to the rank", model("llama@1", "positions of one rank@model.rotary_emb"), "rotary_emb"),
    Planted("merged weights split wrongly",
            model("glm4_moe@2", "merged weights divided as one@model.layers.1.mlp.experts", rows=(1,)), "mlp.experts"),
    Planted("router's gradient not reduced",
            model("glm4_moe@2", "router's gradient not reduced@model.layers.1.mlp.experts", rows=(1,)),
            "grad.boundary.model.layers.1."),
    Planted("reduced twice under accumulation", trained("plain", STEPS + "reduced_twice_step"), "output.total_norm"),
    Planted("unfrozen", model("tests.clients.torch_modules:lora", STEPS + "thawed", rows=(12,), batch="mean of parts"),
            "q_proj.base_layer"),
    Planted("tied halves drifting", model("gemma@1", "tied halves apart@lm_head"), "embed_tokens"),
    Planted("bias added by every rank", model("phi@1", f"bias of every rank@{LAYER}mlp.fc2"), "mlp.fc2"),
    Planted("an optimizer that sees local shards only", divided("normed_by_shard"), "step1.param."),
    Planted("wrong group", model("llama@1", f"summed over another group@{LAYER}mlp.down_proj", world_sizes=(4,)),
            "boundary."),
    Planted("stale buffer", model("llama@1", "stale buffer@model.rotary_emb"), "rotary_emb"),
    Planted("average for sum", model("llama@1", f"average for sum@{LAYER}mlp.down_proj"), "boundary."),
    Planted("mean of the ranks' means", trained("plain", "own_tokens_trainer_step"), "output.loss"),
    Planted("none: llama", model("llama@1", PLAN), ""),
    Planted("none: glm4_moe", model("glm4_moe@2", PLAN, rows=(1,)), ""),
    Planted("none: phi", model("phi@1", PLAN), ""),
    Planted("none: gemma", model("gemma@1", PLAN), ""),
    Planted("none: an optimizer of one's own", divided("normed"), ""),
)  # fmt: skip


def first_rejected(prop: Property, pool: Pool) -> tuple[Verdict | None, int]:
    """The first verdict that fails, on as few ranks as can be, and the number of cases until then."""
    num = 0
    for world_size in prop.among(WORLD_SIZES):
        for case in chunk_cases(prop, Chunk(world_size, DTYPES, 1, NUM_CASES)):
            num += 1
            failed = [verdict for verdict in judge(prop.subject, case, pool, prop.claims) if verdict.failed]
            if failed:
                return failed[0], num
    return None, num


def shrunk(prop: Property, verdict: Verdict, pool: Pool) -> tuple[str, str]:
    """The smallest case on which the same claim fails in the same way, and how its message begins."""
    chunk = Chunk(verdict.case.world_size, DTYPES, 1, NUM_CASES, world_sizes=prop.among(WORLD_SIZES))
    with TemporaryDirectory() as folder:
        found = search(prop, chunk, pool, KnownFailures(), Path(folder), only=(verdict.claim, verdict.kind))
    failure = found.failures[0]
    case = from_code(failure.case)
    sizes = dict(getattr(case, "sizes", ())) or getattr(case, "x_shape", ())
    return f"{case.world_size} ranks, {case.dtype}, {sizes}", failure.message.splitlines()[0]


def row(planted: Planted, pool: Pool) -> tuple[str, bool]:
    """The row, and whether it is as it should be."""
    begun_s = time.monotonic()
    verdict, num = first_rejected(planted.prop, pool)
    red_s = time.monotonic() - begun_s
    if verdict is None:
        return f"| {planted.what} | none | {num} cases, {red_s:.0f} s | | | |", not planted.named
    case, line = shrunk(planted.prop, verdict, pool)
    took = f"{num} cases, {red_s:.0f} s | {time.monotonic() - begun_s - red_s:.0f} s"
    is_right = bool(planted.named) and planted.named in line
    return f"| {planted.what} | {verdict.claim} | {took} | {case} | `{line}` |", is_right


def main() -> None:
    """Prints the table; status 1 where a defect is not found or named otherwise, or a right program is rejected."""
    wanted = [PROGRAMS[int(number)] for number in sys.argv[1:]] or list(PROGRAMS)
    imports = ("tests.clients.language_models", "tests.clients.trained")
    wrong = 0
    with Pool(Backend("gloo", "cpu", imports)) as pool:
        print("| defect | rejected by | until rejected | shrinking | smallest case | its message |")
        print("|---|---|---|---|---|---|")
        for planted in wanted:
            text, is_right = row(planted, pool)
            wrong += not is_right
            print(text, flush=True)
    print(f"{len(wanted) - wrong} of {len(wanted)} are as they should be")
    sys.exit(int(bool(wrong)))


if __name__ == "__main__":
    main()
