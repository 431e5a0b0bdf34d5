# ruff: noqa: E501  (a row of a table is a line)
"""Wrong rules of training, planted in torch's own source: one line of one function is another, in every module that uses it.

`tests.programs.wrong_training:NAME__SUBJECT` is the shipped subject SUBJECT with the rule NAME planted during the visit.
"""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from equivtest.cases.case import Case
from equivtest.cases.names import Subject, resolve
from equivtest.cases.subject import Given


@dataclass(frozen=True)
class WrongRule:
    """One defect.

    Attributes:
        kind: What is wrong, in a few words.
        part: Of torch: 'optimizer', 'clipping', 'ddp' or 'fsdp2'.
        function: 'module:function' of torch.
        right, wrong: Text of its source, and the text instead.
        near: A report or a change about that place, in torch or in a library with the same code.
    """

    kind: str
    part: str
    function: str
    right: str
    wrong: str
    near: str


ADAM, SGD, CLIP = "torch.optim.adam:", "torch.optim.sgd:", "torch.nn.utils.clip_grad:"
DDP, HOOKS = "torch.nn.parallel.distributed:", "torch.distributed.algorithms.ddp_comm_hooks."
FSDP2 = "torch.distributed.fsdp._fully_shard."

WRONG: dict[str, WrongRule] = {
    # optimizers
    "nesterov_without_gradient": WrongRule("the momentum replaces the gradient", "optimizer", f"{SGD}_single_tensor_sgd", "grad = grad.add(buf, alpha=momentum)", "grad = buf.mul(momentum)", "torch/optim 27"),
    "first_step_dampened": WrongRule("dampening of the first step", "optimizer", f"{SGD}_single_tensor_sgd", "buf = grad.detach().clone()", "buf = grad.detach().mul(1 - dampening)", "mlx 473"),
    "maximized_decay": WrongRule("decay with the sign of the gradient, foreach", "optimizer", f"{SGD}_multi_tensor_sgd", "torch._foreach_add_(device_grads, device_params, alpha=weight_decay)", "torch._foreach_add_(device_grads, device_params, alpha=-weight_decay)", "pytorch 70484"),
    "maximum_not_kept": WrongRule("amsgrad's maximum is of this step, foreach", "optimizer", f"{ADAM}_multi_tensor_adam", "torch._foreach_maximum_(device_max_exp_avg_sqs, device_exp_avg_sqs)", "device_max_exp_avg_sqs = torch._foreach_maximum(device_max_exp_avg_sqs, device_exp_avg_sqs)", "pytorch 78807"),
    "decay_coupled": WrongRule("AdamW decays as Adam does, foreach", "optimizer", f"{ADAM}_multi_tensor_adam", "if decoupled_weight_decay:", "if not decoupled_weight_decay:", "FlagGems 4988"),
    "steps_of_another": WrongRule("bias correction of the parameter with most steps", "optimizer", f"{ADAM}_single_tensor_adam", "step = _get_value(step_t)", "step = max(map(_get_value, state_steps))", "DeepSpeed 8471"),
    # clipping
    "norm_of_one_dtype": WrongRule("norm of the first dtype's gradients", "clipping", f"{CLIP}_get_total_norm", "norms.extend(torch._foreach_norm(device_tensors, norm_type))", "norms = norms or list(torch._foreach_norm(device_tensors, norm_type))", "pytorch 180346"),
    "norm_of_own_shards": WrongRule("norm of the rank's own shards", "clipping", f"{CLIP}_get_total_norm", "norms.extend(torch._foreach_norm(device_tensors, norm_type))", "norms.extend(torch._foreach_norm([getattr(t, '_local_tensor', t) for t in device_tensors], norm_type))", "pytorch 170862"),
    # DistributedDataParallel
    "first_step_not_reduced": WrongRule("static graph: nothing is reduced in the first step", "ddp", f"{DDP}_DDPSink.backward", "if static_graph and not delay_ar_enqueued:", "if False:", "pytorch 187732"),
    "first_output_searched": WrongRule("unused parameters are those of the first output", "ddp", f"{DDP}DistributedDataParallel._post_forward", "list(_find_tensors(output))", "list(_find_tensors(output))[:1]", "pytorch 128949"),
    "joined_divided_by_all": WrongRule("join ignores divide_by_initial_world_size", "ddp", f"{DDP}DistributedDataParallel.join_hook", 'kwargs.get("divide_by_initial_world_size", True)', "True", "pytorch 42577"),
    "divided_by_the_world": WrongRule("compression divides by the default group's size", "ddp", f"{HOOKS}default_hooks:_compress_hook", "world_size = group_to_use.size()", "world_size = dist.group.WORLD.size()", "pytorch 49715"),
    "compressed_to_another": WrongRule("bfloat16 compression goes by float16", "ddp", f"{HOOKS}default_hooks:bf16_compress_hook", "torch.bfloat16, process_group", "torch.float16, process_group", "pytorch 53325"),
    "error_of_other_sign": WrongRule("PowerSGD's error feedback has the other sign", "ddp", f"{HOOKS}powerSGD_hook:powerSGD_hook", "input_tensor_cp - input_tensor", "input_tensor - input_tensor_cp", "pytorch 48670"),
    # FSDP2
    "stale_parameters": WrongRule("parameters kept after forward stay after backward", "fsdp2", f"{FSDP2}_fsdp_param_group:FSDPParamGroup.post_backward", "if self.reshard_after_backward:", "if self.reshard_after_backward and self._reshard_after_forward:", "pytorch 118017"),
    "accumulated_in_few_bits": WrongRule("micro-batches are added up in param_dtype", "fsdp2", f"{FSDP2}_fsdp_param:FSDPParam.to_accumulated_grad_if_needed", "self.reduce_dtype is None", "True", "pytorch 190626"),
    "factor_of_one_shard": WrongRule("the divide factor is ignored on one shard", "fsdp2", f"{FSDP2}_fsdp_collectives:foreach_reduce", "reduce_output.copy_(reduce_scatter_input / gradient_divide_factor)", "reduce_output.copy_(reduce_scatter_input)", "pytorch 167178"),
    "replicas_lose_partial": WrongRule("HSDP loses what it has not yet all-reduced", "fsdp2", f"{FSDP2}_fsdp_collectives:foreach_reduce", "reduce_output += partial_reduce_output", "pass", "pytorch 125484"),
    # state and schedule
    "rate_not_loaded": WrongRule("load_state_dict keeps the optimizer's own rate", "optimizer", "torch.optim.optimizer:Optimizer.load_state_dict", "return new_group", "return {**new_group, 'lr': group['lr']}", "pytorch 29697"),
    "schedule_begins_late": WrongRule("a schedule begins with its second rate", "optimizer", "torch.optim.lr_scheduler:LRScheduler._initial_step", "self.step()", "self.step(); self.step()", "pytorch 60265"),
}  # fmt: skip

OF_OPTIMIZERS = ("ddp_mlp", "fsdp2_mlp", "sequence_parallel_mlp_trains", "token_mean_step")
PROPERTIES: dict[str, tuple[str, ...]] = {
    "optimizer": OF_OPTIMIZERS,
    "clipping": (*OF_OPTIMIZERS, "hsdp_mlp", "norm_of_one_mesh_by_largest", "norm_of_groups_by_root", "scaled_step"),
    "ddp": ("ddp_mlp", "data_parallel_block", "data_parallel_block_by_hook", "joined_step"),
    "fsdp2": (
        "fsdp2_mlp", "fsdp2_mixed_mlp", "fsdp2_tp_mlp", "hsdp_mlp", "fully_sharded_block", "fully_sharded_block_by_layers",
        "token_mean_step",
    ),
}  # fmt: skip
"""Shipped properties whose subjects call that part of torch."""


@contextmanager
def planted(rule: WrongRule) -> Iterator[None]:
    """Changes the code of torch's function, which every module has by reference."""
    function = inspect.unwrap(_found(rule.function))
    assert isinstance(function, FunctionType)
    right, function.__code__ = function.__code__, wrong_code(rule, function)
    try:
        yield
    finally:
        function.__code__ = right


def wrong_code(rule: WrongRule, function: FunctionType) -> CodeType:
    """Returns the code of the function with the wrong text."""
    source = textwrap.dedent(inspect.getsource(function))
    assert rule.right in source, f"{rule.function} of this release of torch has no {rule.right!r}"
    names: dict[str, Any] = {}
    exec(compile(source.replace(rule.right, rule.wrong), rule.function, "exec"), function.__globals__, names)
    made = names[function.__name__]
    made = inspect.unwrap(made.__func__ if isinstance(made, staticmethod) else made)
    assert isinstance(made, FunctionType)
    return made.__code__


def _found(path: str) -> Any:
    module, _, names = path.partition(":")
    __import__(module)
    found: Any = sys.modules[module]
    for name in names.split("."):
        found = getattr(found, name)
    return found


def __getattr__(name: str) -> Subject:
    rule, _, shipped = name.partition("__")
    if rule not in WRONG or not shipped:
        raise AttributeError(name)

    def subject(case: Case, mesh: DeviceMesh, given: Given) -> Any:
        with planted(WRONG[rule]):
            return resolve(shipped)(case, mesh, given)

    return subject
