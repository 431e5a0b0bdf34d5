"""Steps of training by DeepSpeed's engine, in each of its stages.

What DeepSpeed documents: gradients of `engine.backward(loss)` are averaged over the micro-batches of an update and over
the ranks, so that a mean over all tokens takes the sum of a micro-batch times both numbers, divided by the tokens.
What a rank holds is read as DeepSpeed says that one reads it: safe_get_full_fp32_param and safe_get_full_grad.

Source: DeepSpeed 0.19.8, runtime/engine.py, backward, step and get_global_grad_norm; utils/tensor_fragment.py.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from equivtest.families.training.deepspeed.subject import number_alike
from equivtest.families.training.deepspeed.subject.fetch import joined_deepspeed, restore_linear

IGNORED = -100
MAX_NORM = 1e6
"""None of these gradients is clipped, as what a rank holds is read before the engine clips; the norm is judged."""
STAGES = (0, 1, 2, 3)

Tensors = dict[str, torch.Tensor]


class TwiceNextToken(nn.Module):
    """Logits of a token from the token before, one layer used twice and one never."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.hidden, self.head = nn.Embedding(8, 6), nn.Linear(6, 6), nn.Linear(6, 8)
        self.unused = nn.Linear(3, 5)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, reduction: str = "mean") -> Tensors:
        hidden = torch.tanh(self.hidden(torch.tanh(self.hidden(self.embedding(input_ids)))))
        logits = self.head(hidden).flatten(0, -2)
        return {"loss": functional.cross_entropy(logits, labels.flatten(), reduction=reduction)}


def twice() -> nn.Module:
    return TwiceNextToken()


def handed_over(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return module


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.05)


def made_engine(stage: int, model: Any, mesh: DeviceMesh, optimizer: Any, num_micro_batches: int) -> Any:
    """The engine of a model, made once and kept with it."""
    if not hasattr(model, "engine_of_steps"):
        deepspeed = joined_deepspeed(mesh.device_type)
        number_alike(deepspeed.zero.Init, mesh)
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": num_micro_batches,
            "gradient_clipping": MAX_NORM,  # 1.0 unless it is told, so that nobody may leave it out
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": {
                "stage": stage,
                "reduce_bucket_size": 64,  # elements, so that there are several buckets
                "stage3_prefetch_bucket_size": 64,
                "stage3_param_persistence_threshold": 0,
                "sub_group_size": 64,
            },
        }
        made = [deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]]
        restore_linear(deepspeed)
        model.engine_of_steps = made  # in a list: the engine is a module, of which the model is a part
    return model.engine_of_steps[0]


def step_of(stage: int, model: Any, mesh: DeviceMesh, micro_batches: Any, optimizer: Any) -> Tensors:
    engine = made_engine(stage, model, mesh, optimizer, len(micro_batches))
    utils = joined_deepspeed(mesh.device_type).utils
    num_tokens = torch.stack([(each["labels"] != IGNORED).sum() for each in micro_batches]).sum()
    distributed.all_reduce(num_tokens, group=mesh.get_group())
    total = torch.zeros(())
    for number, each in enumerate(micro_batches):
        loss = engine(**each, reduction="sum")["loss"] / num_tokens
        engine.backward(loss * mesh.size() * len(micro_batches))
        total = total.to(loss.dtype) + loss.detach()
        if number == len(micro_batches) - 1:
            model.gradients = {name: utils.safe_get_full_grad(each) for name, each in model.named_parameters()}
        engine.step()
    distributed.all_reduce(total, group=mesh.get_group())
    found = {"loss": total}
    if (norm := engine.get_global_grad_norm()) is not None:  # of stage 0 the engine tells none
        found["total_norm"] = torch.as_tensor(norm, dtype=total.dtype)
    return found


def held(model: Any, name: str) -> tuple[torch.Tensor, torch.Tensor] | None:
    """A parameter and its gradient, whole on every rank."""
    if not hasattr(model, "engine_of_steps"):
        return None
    utils = joined_deepspeed("cpu").utils
    parameter, gradient = model.get_parameter(name), model.gradients[name]
    whole = utils.safe_get_full_fp32_param(parameter) if hasattr(parameter, "ds_id") else parameter
    found = whole.detach().clone().requires_grad_()
    found.grad = None if gradient is None else gradient.clone()
    return found, torch.arange(found.numel()).reshape(found.shape)


stage_0_step, stage_1_step, stage_2_step, stage_3_step = (partial(step_of, stage) for stage in STAGES)
