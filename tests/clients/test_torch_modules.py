"""torch's own modules under its wrappers, and adapters of peft."""

from __future__ import annotations

from dataclasses import replace

from equivtest import Judge, ids, program, targets
from tests.clients import torch_modules as models

ROWS = ((2, 3), (3, 3), (4, 3), (5, 3), (7, 3))
EVEN = ((12, 2, 3), (12, 3, 3))

encoder_layer = program(
    models.encoder_layer,
    models.feed_forward_divided,
    ((1, 3, 12), (2, 4, 12)),
    batch="whole",
    judge=Judge(by_parts=True),
)
encoder_layer_sharded = program(
    models.encoder_layer, models.sharded, ((12, 3, 12), (12, 2, 12)), judge=Judge(by_parts=True)
)
lstm_replicated = program(models.recurrent, models.replicated, EVEN)
lstm_sharded = program(models.recurrent, models.sharded, EVEN)
flat_sharded = program(models.perceptron, models.flat_sharded, ROWS)
flat_sharded_by_name = program(models.perceptron, models.flat_sharded_by_name, ROWS)
IMAGES = ((12, 2, 8, 8), (12, 2, 7, 9))
images_replicated = program(models.images, models.replicated, IMAGES)
images_sharded = program(models.images, models.sharded, IMAGES)
convolutions_sharded = program(models.convolutions, models.sharded, ((12, 2, 3, 3), (12, 2, 4, 2)))
compiled = program(models.perceptron, models.compiled, ROWS, batch="whole")
compiled_and_replicated = program(models.perceptron, models.compiled_and_replicated, ROWS)

SHAPE = ("batch", "seq")
INPUTS = {"input_ids": ids(24, SHAPE), "labels": targets(24, SHAPE)}

lora_layers_sharded = replace(
    program(
        models.lora,
        models.lora_layers_sharded,
        inputs=INPUTS,
        sizes={"batch": (12,), "seq": (3,)},
        judge=Judge(by_parts=True, outputs=("loss", "logits")),
        batch="mean of parts",
    ),
    requires="peft",
)
lora_divided = replace(
    program(
        models.lora,
        models.lora_divided,
        inputs=INPUTS,
        sizes={"batch": (2,), "seq": (5, 3)},
        judge=Judge(by_parts=True, outputs=("loss", "logits")),
        batch="whole",
    ),
    requires="peft",
)
