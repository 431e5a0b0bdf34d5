"""Steps of training by DeepSpeed's engine, in each of its stages and with each of its options.

DeepSpeed documents that gradients of `engine.backward(loss)` are averaged over the micro-batches of an update and over
the ranks.  A mean over all tokens is therefore the sum of a micro-batch times both numbers, divided by the tokens.
A rank's values are read with DeepSpeed's own functions: safe_get_full_fp32_param and safe_get_full_grad.

Source: DeepSpeed 0.19.8, runtime/engine.py, backward, step, no_sync, coalesce_grad_reduction and get_global_grad_norm;
utils/tensor_fragment.py; runtime/zero/partition_parameters.py, Init and GatheredParameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from equivtest.families.training.deepspeed.subject import number_alike
from equivtest.families.training.deepspeed.subject.fetch import joined_deepspeed, restore_linear
from tests.clients.engine_models import Tensors, twice

IGNORED = -100
MAX_NORM = 1e6
"""Norm that clips no gradient, because gradients are read before the engine clips; the norm itself is judged."""


@dataclass(frozen=True)
class Setting:
    """Configuration of an engine.

    Attributes:
        zero: Entries of `zero_optimization` besides the stage and the sizes of buckets.
        more: Other entries of the configuration.
        context: 'no_sync', around all micro-batches but the last; 'coalesced', coalesce_grad_reduction around all;
            '' none.
        plain: True if backward is called on the loss, not by the engine.
        sits_out: True if rows that pass no layer form the first micro-batch, and all others the second.
        masters: True if parameters are set in float32 after the engine was made, which has them in bfloat16.
    """

    stage: int
    zero: Mapping[str, Any] = field(default_factory=dict)
    more: Mapping[str, Any] = field(default_factory=dict)
    context: str = ""
    plain: bool = False
    sits_out: bool = False
    masters: bool = False


OFFLOADED = {"offload_optimizer": {"device": "cpu", "pin_memory": False}}
NARROW = {"bf16": {"enabled": True}, "communication_data_type": "fp32"}
NARROW_IN_FLOAT32 = {**NARROW, "data_types": {"grad_accum_dtype": "fp32"}}

SETTINGS: Mapping[str, Setting] = {
    **{f"stage_{stage}": Setting(stage) for stage in (0, 1, 2, 3)},
    **{f"stage_{stage}_offloaded": Setting(stage, OFFLOADED) for stage in (1, 2, 3)},
    **{f"stage_{stage}_not_synchronized": Setting(stage, context="no_sync") for stage in (0, 1)},
    **{f"stage_{stage}_coalesced": Setting(stage, context="coalesced") for stage in (1, 2, 3)},
    **{f"stage_{stage}_of_the_loss": Setting(stage, plain=True) for stage in (1, 2, 3)},
    **{f"stage_{stage}_sitting_out": Setting(stage, sits_out=True) for stage in (0, 1, 2, 3)},
    "stage_1_in_turn": Setting(1, {"round_robin_gradients": True, "contiguous_gradients": False}),
    "stage_2_in_turn": Setting(2, {"round_robin_gradients": True, "reduce_scatter": False}),
    "stage_2_overlapped": Setting(2, {"overlap_comm": True, "allgather_partitions": False}),
    "stage_3_overlapped": Setting(3, {"overlap_comm": True, "reduce_scatter": False}),
    **{f"stage_{stage}_narrow": Setting(stage, more=NARROW, masters=True) for stage in (0, 1, 2, 3)},
    **{f"stage_{stage}_narrow_in_float32": Setting(stage, more=NARROW_IN_FLOAT32, masters=True) for stage in (1, 2, 3)},
}
"""Settings by the name of the step, without its end."""


def handed_over(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return module


def divided_when_made(config: Mapping[str, Any], module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Returns a model whose parameters zero.Init divides when they are made, with values from rank 0 alone.

    Without the configuration they have bfloat16 here, for any requested dtype (finding 100).
    """
    deepspeed = joined_deepspeed(mesh.device_type)
    number_alike(deepspeed.zero.Init, mesh)
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = twice()
    restore_linear(deepspeed)
    values = dict(module.named_parameters())
    for name, parameter in model.named_parameters():
        with deepspeed.zero.GatheredParameters(parameter, modifier_rank=0):
            if mesh.get_local_rank() == 0:
                parameter.data.copy_(values[name])
    return model


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.05)


def configuration(setting: Setting, num_micro_batches: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": num_micro_batches,
        "gradient_clipping": MAX_NORM,  # 1.0 by default, so every engine has to set it
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {
            "stage": setting.stage,
            "reduce_bucket_size": 64,  # elements, so that there are several buckets
            "stage3_prefetch_bucket_size": 64,
            "stage3_param_persistence_threshold": 0,
            "sub_group_size": 64,
            **setting.zero,
        },
        **setting.more,
    }


def made_engine(setting: Setting, model: Any, mesh: DeviceMesh, optimizer: Any, num_micro_batches: int) -> Any:
    """The engine of a model, made once and kept with it."""
    if not hasattr(model, "engine_of_steps"):
        deepspeed = joined_deepspeed(mesh.device_type)
        number_alike(deepspeed.zero.Init, mesh)
        values = {name: each.detach().clone() for name, each in model.named_parameters()} if setting.masters else {}
        config = configuration(setting, num_micro_batches)
        made = [deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]]
        restore_linear(deepspeed)
        model.engine_of_steps = made  # in a list: the engine is a module that contains the model
        for name, value in values.items():
            if setting.stage:
                deepspeed.utils.safe_set_full_fp32_param(model.get_parameter(name), value)
            else:
                master_of(model, name).data.copy_(value)
    return model.engine_of_steps[0]


def master_of(model: Any, name: str) -> torch.Tensor:
    """The parameter in float32 of an engine of stage 0 in bfloat16, which DeepSpeed has no function for.

    Source: DeepSpeed 0.19.8, runtime/fp16/unfused_optimizer.py, FP16_UnfusedOptimizer.
    """
    parameter, optimizer = model.get_parameter(name), model.engine_of_steps[0].optimizer
    groups = zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True)
    pairs = [pair for narrow, wide in groups for pair in zip(narrow, wide, strict=True)]
    found: torch.Tensor = next(wide for narrow, wide in pairs if narrow is parameter)
    return found


@contextmanager
def linear_of(setting: Setting, deepspeed: Any) -> Iterator[None]:
    """The linear layer that stage 3 puts in the place of torch's for the rest of the process, here for a step.

    Its backward computes with what is fetched once more, torch's with what the forward fetched.
    """
    torchs = functional.linear
    if setting.stage == 3:
        functional.linear = deepspeed.runtime.zero.linear.zero3_linear_wrap
    try:
        yield
    finally:
        functional.linear = torchs


def around(setting: Setting, engine: Any, *, is_last: bool) -> AbstractContextManager[Any]:
    """Returns the context of a micro-batch."""
    if setting.context == "no_sync" and not is_last:
        found: AbstractContextManager[Any] = engine.no_sync()
        return found
    return nullcontext()


def by_layer(micro_batches: Any) -> list[dict[str, Any]]:
    """Splits a rank's rows into two micro-batches: those that pass no layer, and those that pass it."""
    rows = {name: torch.cat([each[name] for each in micro_batches]) for name in micro_batches[0]}
    chosen = [{name: each[rows["passes"] == number] for name, each in rows.items()} for number in (0, 1)]
    return [chosen[0] | {"passes": None}, chosen[1]]


def step_of(setting: Setting, model: Any, mesh: DeviceMesh, micro_batches: Any, optimizer: Any) -> Tensors:
    """One update from the mean over all tokens that count, or from the sum over the batch of a model without labels."""
    if setting.sits_out:
        micro_batches = by_layer(micro_batches)
    counted = 1 if setting.context else len(micro_batches)  # the engine counts none in either context
    engine = made_engine(setting, model, mesh, optimizer, counted)
    deepspeed = joined_deepspeed(mesh.device_type)
    utils = deepspeed.utils
    num_tokens = torch.ones(())
    if "labels" in micro_batches[0]:
        num_tokens = torch.stack([(each["labels"] != IGNORED).sum() for each in micro_batches]).sum()
        distributed.all_reduce(num_tokens, group=mesh.get_group())
    total = torch.zeros(())
    coalesced = engine.coalesce_grad_reduction() if setting.context == "coalesced" else nullcontext()
    with coalesced, linear_of(setting, deepspeed):
        for number, each in enumerate(micro_batches):
            is_last = number == len(micro_batches) - 1
            with around(setting, engine, is_last=is_last):
                loss = engine(**each, reduction="sum")["loss"] / num_tokens
                scaled = loss * mesh.size() * counted
                if setting.plain:
                    scaled.backward()
                else:
                    engine.backward(scaled)
            total = total.to(loss.dtype) + loss.detach()
            if not is_last and not setting.context:
                engine.step()
    model.gradients = {name: utils.safe_get_full_grad(each) for name, each in model.named_parameters()}
    engine.step()
    distributed.all_reduce(total, group=mesh.get_group())
    found = {"loss": total}
    if (norm := engine.get_global_grad_norm()) is not None:  # the engine has none in stage 0
        found["total_norm"] = torch.as_tensor(norm, dtype=total.dtype)
    return found


def held(model: Any, name: str) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Returns a parameter, in float32 if the engine computes in fewer bits, and its gradient, whole on every rank."""
    whole = whole_of(model, name)
    if whole is None:
        return None
    found = whole.detach().clone().requires_grad_()
    if hasattr(model, "engine_of_steps") and (gradient := model.gradients[name]) is not None:
        found.grad = gradient.to(found.dtype, copy=True)
    return found, torch.arange(found.numel()).reshape(found.shape)


def whole_of(model: Any, name: str) -> torch.Tensor | None:
    """Returns the parameter; None if it is not divided yet."""
    deepspeed, parameter = joined_deepspeed("cpu"), model.get_parameter(name)
    if not hasattr(model, "engine_of_steps"):
        if not hasattr(parameter, "ds_id"):
            return None
        with deepspeed.zero.GatheredParameters(parameter):
            return parameter.detach().clone()
    is_narrow = parameter.dtype is not torch.float32
    if is_narrow and not hasattr(parameter, "_hp_mapping") and not hasattr(parameter, "ds_id"):
        return master_of(model, name)
    if is_narrow or hasattr(parameter, "ds_id"):
        found: torch.Tensor = deepspeed.utils.safe_get_full_fp32_param(parameter)
        return found
    return parameter.detach()


def __getattr__(name: str) -> Any:
    """`stage_1_offloaded_step` is the step of the setting 'stage_1_offloaded'."""
    setting = SETTINGS.get(name.removesuffix("_step")) if name.endswith("_step") else None
    if setting is None:
        raise AttributeError(name)
    return partial(step_of, setting)


with_config = partial(divided_when_made, configuration(SETTINGS["stage_3"], 1))
