"""torch's own modules under its wrappers, and adapters of peft."""

from __future__ import annotations

from dataclasses import replace

from equivtest import ids, module_property, targets

HERE = "tests.clients.torch_modules:"
ROWS = ((2, 3), (3, 3), (4, 3), (5, 3), (7, 3))
EVEN = ((12, 2, 3), (12, 3, 3))

encoder_layer = module_property(
    HERE + "encoder_layer", HERE + "feed_forward_divided", ((1, 3, 12), (2, 4, 12)), batch="whole", by_parts=True
)
encoder_layer_sharded = module_property(
    HERE + "encoder_layer", HERE + "sharded", ((12, 3, 12), (12, 2, 12)), by_parts=True
)
lstm_replicated = module_property(HERE + "recurrent", HERE + "replicated", EVEN)
lstm_sharded = module_property(HERE + "recurrent", HERE + "sharded", EVEN)
flat_sharded = module_property(HERE + "perceptron", HERE + "flat_sharded", ROWS)
flat_sharded_by_name = module_property(HERE + "perceptron", HERE + "flat_sharded_by_name", ROWS)
IMAGES = ((12, 2, 8, 8), (12, 2, 7, 9))
images_replicated = module_property(HERE + "images", HERE + "replicated", IMAGES)
images_sharded = module_property(HERE + "images", HERE + "sharded", IMAGES)
convolutions_sharded = module_property(HERE + "convolutions", HERE + "sharded", ((12, 2, 3, 3), (12, 2, 4, 2)))
compiled = module_property(HERE + "perceptron", HERE + "compiled", ROWS, batch="whole")
compiled_and_replicated = module_property(HERE + "perceptron", HERE + "compiled_and_replicated", ROWS)

SHAPE = ("batch", "seq")
INPUTS = {"input_ids": ids(24, SHAPE), "labels": targets(24, SHAPE)}

lora_layers_sharded = replace(
    module_property(
        HERE + "lora",
        HERE + "lora_layers_sharded",
        inputs=INPUTS,
        sizes={"batch": (12,), "seq": (3,)},
        outputs=("loss", "logits"),
        by_parts=True,
        batch="mean of parts",
    ),
    requires="peft",
)
lora_divided = replace(
    module_property(
        HERE + "lora",
        HERE + "lora_divided",
        inputs=INPUTS,
        sizes={"batch": (2,), "seq": (5, 3)},
        outputs=("loss", "logits"),
        by_parts=True,
        batch="whole",
    ),
    requires="peft",
)
