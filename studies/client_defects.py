"""Judges language models of transformers with planted defects: `python -m studies.client_defects [SEED]`.

The table has a row per defect: whether a claim fails, what is named first, and whether that is right.  For the same run
it shows how many logits and gradients torch.testing.assert_close rejects at its default tolerances, beside one process
in bfloat16.  The rows of clean runs show how many of these rejections are right.  Needs what `make clients` installs.

The right name is the spoiled boundary.  If a plain tensor looks like operands of a sum, the right name is the first
boundary after it that is not linear, which the table below names too.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from equivtest import ids, targets
from equivtest.cases.values import draw
from equivtest.errors import Misuse
from equivtest.module import CLAIMS
from equivtest.oracle.held import put_together
from equivtest.programs.case import ModuleCase, call_builder, with_parameters
from equivtest.programs.inputs import written
from equivtest.programs.oracle.unsharded import run_parts, split
from equivtest.ranks.backend import Backend
from equivtest.ranks.pool import Pool
from equivtest.ranks.reply import Reply
from equivtest.tensors import DTYPES
from equivtest.verdicts.judging import judge_replies
from equivtest.verdicts.verdict import Verdict

HERE = "tests.programs.clients:"
SHAPE = ("batch", "seq")
INPUTS = written({"input_ids": ids(24, SHAPE), "labels": targets(24, SHAPE)})
LAYER = "model.layers.{}."
LIMIT_S = 600
"""Seconds that one run of a case may take.  On a busy machine these models take longer than a case's own limit."""


class Planted(NamedTuple):
    """A defect planted in a language model.

    Attributes:
        build: A model type and its number of layers.
        place: Name of the spoiled submodule, {} for the layer.
        named: Beginnings of right names, {} for the layer, {next} for the next layer.
        layers: The layers from which one is drawn.
    """

    what: str
    build: str
    place: str
    named: tuple[str, ...]
    layers: tuple[int, ...] = (0, 3, 5)
    world_size: int = 2
    seed: int = 0


def forward(*parts: str) -> tuple[str, ...]:
    return tuple("boundary." + part for part in parts)


def backward(*parts: str) -> tuple[str, ...]:
    return tuple("grad.boundary." + part for part in parts)


LLAMA = "llama@6"
BEHIND_ATTENTION = forward(LAYER + "post_attention_layernorm:input", LAYER + "self_attn")
PLANTED = (
    Planted("off by an eighth", LLAMA, LAYER + "input_layernorm", forward(LAYER + "input_layernorm")),
    Planted("off by an eighth", LLAMA, "model.norm", forward("model.norm")),
    Planted("off by an eighth", "gemma2@6", LAYER + "post_feedforward_layernorm",
            forward(LAYER + "post_feedforward_layernorm")),
    Planted("average for sum", LLAMA, LAYER + "mlp.down_proj", forward(LAYER + "mlp.down_proj", "model.layers.{}")),
    Planted("average for sum", LLAMA, LAYER + "self_attn.o_proj",
            (*forward(LAYER + "self_attn.o_proj"), *BEHIND_ATTENTION)),
    Planted("added up again", LLAMA, LAYER + "self_attn.o_proj", forward(LAYER + "self_attn.o_proj")),
    Planted("zeros of one rank", LLAMA, LAYER + "self_attn.q_proj", forward(LAYER + "self_attn.q_proj")),
    Planted("zeros of one rank", LLAMA, LAYER + "input_layernorm",
            forward(LAYER + "input_layernorm", LAYER + "self_attn.q_proj")),
    Planted("zeros of one rank", LLAMA, "model.embed_tokens", forward("model.embed_tokens", LAYER + "input_layernorm"),
            (0,)),
    Planted("tokens of one rank swapped", LLAMA, LAYER + "mlp.gate_proj", forward(LAYER + "mlp.gate_proj")),
    Planted("features of one rank swapped", LLAMA, LAYER + "self_attn.v_proj",
            (*forward(LAYER + "self_attn.v_proj", LAYER + "self_attn.o_proj"), *BEHIND_ATTENTION)),
    Planted("parts in another order", LLAMA, "lm_head", ("boundary.lm_head", "output.logits"), (5,)),
    Planted("all_reduce dropped", LLAMA, LAYER + "self_attn.o_proj", BEHIND_ATTENTION),
    Planted("all_reduce dropped", LLAMA, LAYER + "mlp.down_proj",
            forward("model.layers.{next}", "model.norm", "model.layers.{}")),
    Planted("summed over another group", LLAMA, LAYER + "mlp.down_proj",
            forward(LAYER + "mlp.down_proj", "model.layers.{}"), world_size=4),
    Planted("mask of one rank", LLAMA, LAYER + "self_attn",
            (*forward(LAYER + "self_attn.o_proj"), *BEHIND_ATTENTION)),
    Planted("positions of one rank", LLAMA, "model.rotary_emb", forward("model.rotary_emb"), (0,)),
    Planted("scaled by other features", LLAMA, LAYER + "self_attn", forward(LAYER + "self_attn.o_proj")),
    Planted("stale buffer", LLAMA, "model.rotary_emb", forward("model.rotary_emb"), (0,)),
    Planted("bias of every rank", "phi@6", LAYER + "mlp.fc2", forward(LAYER + "mlp.fc2")),
    Planted("halves swapped", "phi3@6", LAYER + "mlp.gate_up_proj",
            forward(LAYER + "mlp.gate_up_proj", LAYER + "mlp.activation_fn", LAYER + "mlp.down_proj")),
    Planted("merged weights divided as one", "glm4_moe@3", LAYER + "mlp.experts", forward(LAYER + "mlp.experts"), (1,)),
    Planted("not reduced backward", LLAMA, LAYER + "self_attn.q_proj", backward(LAYER + "input_layernorm")),
    Planted("not reduced backward", LLAMA, LAYER + "mlp.gate_proj", backward(LAYER + "post_attention_layernorm")),
    Planted("gradient doubled", LLAMA, LAYER + "self_attn.k_proj", backward(LAYER + "self_attn.k_proj",
            LAYER + "input_layernorm")),
    Planted("gradient averaged", LLAMA, LAYER + "mlp.down_proj", backward(LAYER + "mlp.down_proj",
            LAYER + "mlp.act_fn", LAYER + "mlp.up_proj", LAYER + "mlp.gate_proj")),
    Planted("gradient off by an eighth", LLAMA, LAYER + "mlp.act_fn", backward(LAYER + "mlp.act_fn",
            LAYER + "mlp.gate_proj")),
    Planted("gradient of one rank lost", LLAMA, LAYER + "post_attention_layernorm",
            backward(LAYER + "post_attention_layernorm")),
    Planted("weight's gradient reduced twice", LLAMA, LAYER + "input_layernorm",
            ("grad." + LAYER + "input_layernorm.weight",)),
    Planted("weight's gradient of one rank lost", LLAMA, "model.norm", ("grad.model.norm.weight",), (5,)),
    Planted("style left out", "qwen3@6", "q_norm", ("grad." + LAYER + "self_attn.q_norm.weight",), (0,)),
    Planted("router's gradient not reduced", "glm4_moe@3", LAYER + "mlp.experts",
            ("grad.boundary." + LAYER + "mlp.gate", "grad." + LAYER + "mlp.gate.weight"), (2,)),
    Planted("tied halves apart", "gemma@6", "lm_head", ("grad.model.embed_tokens.weight",), (0,)),
    Planted("layer not reduced", LLAMA, "model.layers.{}", ("grad." + LAYER,)),
    Planted("layer summed", LLAMA, "model.layers.{}", ("grad." + LAYER,)),
)  # fmt: skip


def case_of(build: str, parallelize: str, world_size: int, seed: int) -> ModuleCase:
    """Builds a case in bfloat16.

    Under FSDP2 each rank has one row of the batch.  Experts get few tokens, so that their routers decide clearly.
    """
    divided = parallelize.rpartition(":")[2].startswith("layer")
    rows, length = (1, 4) if build.startswith("glm4_moe") else (2, 5)
    return ModuleCase(
        world_size=world_size,
        dtype="bfloat16",
        build=HERE + build,
        parallelize=parallelize if ":" in parallelize else HERE + parallelize,
        inputs=INPUTS,
        sizes=(("batch", world_size if divided else rows), ("seq", length)),
        outputs=("loss", "logits"),
        values=(("real", seed),),
        batch="mean of parts" if divided else "whole",
        by_parts=True,
    )


def run(case: ModuleCase, pool: Pool) -> tuple[list[Verdict], Sequence[Reply]]:
    replies = pool.run("module", case, limit_s=LIMIT_S)
    return judge_replies("module", case, replies, CLAIMS), replies


def rejected(case: ModuleCase, replies: Sequence[Reply]) -> str:
    """Counts the logits and gradients that assert_close rejects against one process: '3 of 57, logits among them'."""
    held = {reply.rank: reply.answers[0].tensors for reply in replies if reply.answers}
    if len(held) < case.world_size:
        return "no answer"
    right = one_process(case)
    wrong = []
    for name, expected in right.items():
        found = put_together(held, name, tuple(expected.shape), case.mesh_shape)
        try:
            torch.testing.assert_close(found, expected)
        except (AssertionError, TypeError, ValueError):
            wrong.append(name)
    return f"{len(wrong)} of {len(right)}" + ", logits among them" * ("output.logits" in wrong)


def one_process(case: ModuleCase) -> dict[str, torch.Tensor]:
    parts = split(case, draw(case, 0))

    def made(part: dict[str, torch.Tensor]) -> nn.Module:
        model = call_builder(case.build).to(DTYPES[case.dtype])
        return with_parameters(model, {name: part[name].clone() for name in case.parameter_names()})

    rows, stacks = run_parts(case, [made(part) for part in parts], parts)
    found = {"output.logits": rows["output.logits"], **{name: each.mean(0) for name, each in stacks.items()}}
    return {name: tensor.detach() for name, tensor in found.items()}


def first_of(verdicts: Sequence[Verdict]) -> str:
    failed = next((verdict for verdict in verdicts if verdict.failed), None)
    if failed is None:
        return ""
    mismatches = failed.judgement.mismatches
    return mismatches[0].tensor if mismatches else str(failed.kind)


def main() -> None:
    """Prints the table.  Returns 1 if a defect is not found, or a run without defect is not right."""
    source = random.Random(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
    missed = alarms = 0
    with Pool(Backend("gloo", "cpu", ("tests.clients.language_models",))) as pool:
        print("| defect | at | found | named first | right | assert_close rejects | s |\n|---|---|---|---|---|---|---|")
        for each in PLANTED:
            started_s, layer = time.monotonic(), source.choice(each.layers)
            place = each.place.format(layer)
            case = case_of(each.build, f"{each.what}@{place}", each.world_size, each.seed)
            try:
                verdicts, replies = run(case, pool)
                name, says = first_of(verdicts), rejected(case, replies)
            except Misuse as error:
                name, says = f"misuse: {error}"[:120], "no answer"
            wanted = [beginning.format(layer, next=layer + 1) for beginning in each.named]
            is_right = any(name == one or name.startswith((one + ".", one + "[", one + ":")) for one in wanted)
            is_right |= any(one.endswith(".") and name.startswith(one) for one in wanted)
            missed += not name
            seconds = time.monotonic() - started_s
            what = f"{each.what}, {each.build.partition('@')[0]}"
            print(
                f"| {what} | `{place}` | {'yes' if name else 'no'} | `{name}` | {'yes' if is_right else 'no'} "
                f"| {says} | {seconds:.0f} |",
                flush=True,
            )
        alarms = _print_clean(pool)
    sys.exit(int(bool(missed or alarms)))


def _print_clean(pool: Pool) -> int:
    """Prints the rows of runs without defect.  Returns how many of them fail."""
    alarms = 0
    ways = [(build, "tensor_parallel") for build in dict.fromkeys(each.build for each in PLANTED)]
    ways.append((LLAMA, "layers_sharded"))
    for build, parallelize in ways:
        for world_size in (2, 4):
            case = case_of(build, f"tests.clients.language_models:{parallelize}", world_size, 0)
            verdicts, replies = run(case, pool)
            alarms += bool(first_of(verdicts))
            print(
                f"| none, {build} on {world_size} ranks | | | `{first_of(verdicts)}` | | {rejected(case, replies)} | |"
            )
    return alarms


if __name__ == "__main__":
    main()
