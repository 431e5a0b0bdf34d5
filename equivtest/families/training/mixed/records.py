"""Defects of mixed precision."""

from __future__ import annotations

from equivtest.families.training.mixed.case import MixedCase
from equivtest.kit.defect import Defect

_HERE = "equivtest.families.training.mixed.defects:"
_TWO_SUMS = MixedCase(
    world_size=1,
    reduce_dtype="float32",
    biases=("out_proj",),
    requires_grad=("out_proj.bias",),
    micro_batches=2,
    values=(("wide-g", 1),),
)

DEFECTS = (
    Defect(
        _HERE + "reduced_in_the_dtype_of_parameters",
        "fsdp2_mixed_mlp",
        "a reduction in fewer bits",
        "gradients_equal_unsharded",
        "value",
        _TWO_SUMS,
        "one sum is rounded nowhere; of two that each take eight bits one is in larger units",
    ),
    Defect(
        _HERE + "computed_in_the_dtype_of_masters",
        "fsdp2_mixed_mlp",
        "flags",
        "equals_unsharded",
        "shape",
        MixedCase(world_size=1, output_dtype="float32", requires_grad=("out_proj.weight",)),
        "the layer takes float32; nothing need be trained, no gradient be reduced",
    ),
    Defect(
        _HERE + "masters_kept_narrow",
        "fsdp2_mixed_mlp",
        "rounded on its way",
        "trains_like_unsharded",
        "value",
        MixedCase(world_size=1, requires_grad=("out_proj.weight",), optimizer="sgd", steps=2, lr=0.1),
        "one weight; with a power of two for a learning rate, what an update leaves would fit",
    ),
    Defect(
        _HERE + "gradients_kept_narrow",
        "fsdp2_mixed_mlp",
        "rounded on its way",
        "gradients_equal_unsharded",
        "value",
        _TWO_SUMS,
        "as of a reduction in fewer bits: the sum takes more than eight bits",
    ),
)
