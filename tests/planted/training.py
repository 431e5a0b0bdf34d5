# ruff: noqa: E501  (a row of a table is a line)
"""Wrong rules of training, planted in torch's own source: one line of one function is another, in every module that uses it.

`tests.planted.training:NAME__SUBJECT` is the shipped subject SUBJECT with the rule NAME planted during the visit.
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
        part: Of torch: 'optimizer', 'clipping', 'ddp', 'functional' for functional collectives, 'fsdp2', 'parallel' for
            styles of tensor parallelism, or 'training' if all properties of training are tried.
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

FIRST: dict[str, WrongRule] = {
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

LATER: dict[str, WrongRule] = {
    # optimizers
    "mean_without_decay": WrongRule("RMSprop's mean has no weight decay", "training", "torch.optim.rmsprop:_single_tensor_rmsprop", "grad_avg.lerp_(grad, 1 - alpha)", "grad_avg.lerp_(-grads[i] if maximize else grads[i], 1 - alpha)", "torch/optim 102"),
    "eps_left_out": WrongRule("RAdam has no eps, foreach", "training", "torch.optim.radam:_multi_tensor_radam", "torch._foreach_add_(buffer, eps)", "pass", "pytorch 70230"),
    "momentum_of_this_step": WrongRule("NAdam's next momentum is of this step, foreach", "training", "torch.optim.nadam:_multi_tensor_nadam", "(_get_value(step) + 1) * momentum_decay", "_get_value(step) * momentum_decay", "pytorch 59009"),
    "power_of_the_step": WrongRule("ASGD's power is of the step alone, foreach", "training", "torch.optim.asgd:_multi_tensor_asgd", "lr / ((1 + lambd * lr * step) ** alpha)", "lr / (1 + lambd * lr * step**alpha)", "pytorch 125440"),
    "decay_by_adjusted_rate": WrongRule("Muon decays by the adjusted rate", "training", "torch.optim._muon:_single_tensor_muon", "param.mul_(1 - lr * weight_decay)", "param.mul_(1 - adjusted_lr * weight_decay)", "tinygrad 17709"),
    "skipped_step_counted": WrongRule("fused Adam counts steps that the scaler skips", "training", f"{ADAM}_fused_adam", "[device_found_inf] * len", "[0 * device_found_inf] * len", "OLMo-core 309"),
    # clipping and the scaler
    "clipped_from_above": WrongRule("clip_grad_value_ clips from above only, foreach", "training", f"{CLIP}clip_grad_value_", "torch._foreach_clamp_min_(cast(list[Tensor], grads), -clip_value)", "pass", "oneflow 6758"),
    "root_of_largest": WrongRule("the norms are joined by the 2-norm", "training", f"{CLIP}_get_total_norm", "for norm in norms]), norm_type", "for norm in norms]), 2.0", "torchrec 3199"),
    "infinity_of_one_rank": WrongRule("only the rank with an infinite shard skips the step", "training", "torch.distributed.tensor._dispatch:found_inf_reduce_handler", "target_tensor.copy_(found_inf)", "pass", "pytorch 132816"),
    # schedules and averages
    "milestone_steps": WrongRule("the next schedule goes on from the last rate", "training", "torch.optim.lr_scheduler:SequentialLR.step", "scheduler._update_lr(0)", "scheduler.step()", "pytorch 185872"),
    "warm_up_ends_early": WrongRule("LinearLR leaves out its last step", "training", "torch.optim.lr_scheduler:LinearLR.get_lr", "self.last_epoch > self.total_iters", "self.last_epoch >= self.total_iters", "torchtitan 1261"),
    "newest_counts_twice": WrongRule("the average gives the newest model too much weight", "training", "torch.optim.swa_utils:get_swa_avg_fn", "(num_averaged + 1)", "num_averaged", "pytorch 94820"),
    "averaged_per_group": WrongRule("post-local SGD counts a step per parameter group", "training", "torch.distributed.optim.post_localSGD_optimizer:PostLocalSGDOptimizer.step", "self.averager.average_parameters(params=self.param_groups)", "[self.averager.average_parameters(params=[group]) for group in self.param_groups]", "pytorch 74737"),
    # DistributedDataParallel
    "reassigned_buffers": WrongRule("buffers that forward reassigns are not broadcast", "training", f"{DDP}DistributedDataParallel._sync_buffers", "self._assign_modules_buffers()", "pass", "pytorch 63916"),
    # FSDP2
    "padded_again": WrongRule("the first forward copies an uneven shard", "training", f"{FSDP2}_fsdp_param:FSDPParam.reset_sharded_param", "!= padded_sharded_size and not same_local_tensor", "!= padded_sharded_size", "pytorch 176076"),
    "factor_rounded_down": WrongRule("the factor after the reduction is rounded down", "training", f"{FSDP2}_fsdp_collectives:_get_gradient_divide_factors", "post_factor = factor / pre_factor", "post_factor = factor // pre_factor", "pytorch 80456"),
    "partial_stays_partial": WrongRule("gradients that are partial over tensor parallel ranks stay so", "training", f"{FSDP2}_fsdp_param:FSDPParam._get_grad_inner_tensor", "grad = grad.redistribute(placements=placements)", "pass", "Megatron-LM 7452"),
    # recomputation and state
    "new_random_numbers": WrongRule("recomputation draws new random numbers", "training", "torch.utils.checkpoint:_checkpoint_without_reentrant_generator", "torch.set_rng_state(fwd_cpu_state)", "pass", "pytorch 14253"),
    "decayed_by_initialization": WrongRule("making an optimizer's state decays the parameters", "training", "torch.distributed.checkpoint.state_dict:_init_optim_state", "else 0.0", 'else param_group["lr"]', "pytorch 164929"),
}  # fmt: skip
"""Planted when the cases already existed, by a person who had not read the cases.

A twentieth rule changes no result: if the end of an inner `no_sync` ends the outer too, gradients are averaged after an
earlier micro-batch, and the average of averages is the average.
"""

TP, ZERO = "torch.distributed.tensor.parallel.", "torch.distributed.optim.zero_redundancy_optimizer:"

BLIND: dict[str, WrongRule] = {
    # optimizers
    "eps_corrected_too": WrongRule("Adam's bias correction divides eps too, single tensor", "training", f"{ADAM}_single_tensor_adam", "(exp_avg_sq.sqrt() / bias_correction2_sqrt).add_(eps)", "exp_avg_sq.sqrt().add_(eps) / bias_correction2_sqrt", "pytorch 41477"),
    "late_parameter_restarts_all": WrongRule("a parameter's first gradient restarts the momentum of all, foreach", "training", f"{SGD}_multi_tensor_sgd", "if device_momentum_buffer_list[i] is None:\n                        buf =", "if not all_states_with_momentum_buffer:\n                        buf =", "pytorch 122131"),
    "step_back_not_zeroed": WrongRule("Rprop steps where the gradient's sign changes", "training", "torch.optim.rprop:_single_tensor_rprop", "grad[sign.eq(etaminus)] = 0", "pass", "pytorch 70418"),
    "gradients_overwritten": WrongRule("Adamax overwrites the gradients, foreach", "training", "torch.optim.adamax:_multi_tensor_adamax", "if not maximize and weight_decay == 0:", "if False:", "pytorch 97712"),
    # clipping
    "generator_used_up": WrongRule("a generator of parameters is used up by the norm", "training", f"{CLIP}clip_grad_norm_", "parameters = list(parameters)\n        if is_generator and len(parameters) == 0:", "if False:", "pytorch 148259"),
    "small_norm_scaled_up": WrongRule("gradients of a small norm are scaled up", "training", f"{CLIP}_clip_grads_with_norm_", "torch.clamp(clip_coef, max=1.0)", "clip_coef", "tinygrad 11761"),
    # DistributedDataParallel
    "final_model_of_last_rank": WrongRule("join ends with the last rank's model, not the last joiner's", "training", f"{DDP}DistributedDataParallel._sync_final_model", "self._distributed_rank, is_last_joiner", "self._distributed_rank, True", "pytorch 42577"),
    "frozen_of_each_rank": WrongRule("frozen parameters are not broadcast at construction", "training", "torch.distributed.utils:_sync_module_states", "module_states.append(param.detach())", "module_states.extend([param.detach()] * param.requires_grad)", "pytorch 2464"),
    "uncompressed_not_averaged": WrongRule("PowerSGD adds up what it does not compress", "training", f"{HOOKS}powerSGD_hook:powerSGD_hook", "fut.value()[0].div_(world_size)", "fut.value()[0]", "pytorch 49417"),
    # FSDP2
    "gradient_cut_along_rows": WrongRule("gradients of parameters sharded on columns are cut along rows", "training", f"{FSDP2}_fsdp_collectives:foreach_reduce", "torch.chunk(unsharded_grad, world_size, dim=shard_dim)", "torch.chunk(unsharded_grad, world_size, dim=0)", "pytorch 137496"),
    "reduced_in_few_bits": WrongRule("a reduce_dtype that is the parameters' own dtype is ignored", "training", f"{FSDP2}_fsdp_param:FSDPParam.init_dtype_attrs", "if reduce_dtype == param_dtype:", "if reduce_dtype in (param_dtype, self.orig_dtype):", "pytorch 118223"),
    "shards_joined_in_order": WrongRule("rows of both meshes are joined without interleaving", "training", f"{FSDP2}_fsdp_param:FSDPParam._init_sharding_spec_tp", "_StridedShard(shard_dim, split_factor=split_factor)", "fsdp_placement", "pytorch 129229"),
    "unfrozen_stays_frozen": WrongRule("a parameter that is unfrozen later gets no gradient", "training", f"{FSDP2}_fsdp_param:FSDPParam.to_unsharded", "set_requires_grad_if_needed(self.sharded_param, self._unsharded_param)", "pass", "pytorch 104186"),
    "divided_by_shards_only": WrongRule("HSDP divides by the ranks of one shard group", "training", f"{FSDP2}_fsdp_collectives:_get_gradient_divide_factors", "data_parallel_size *= all_reduce_group.size()", "pass", "pytorch 155903"),
    # tensor parallel
    "frozen_trains": WrongRule("a frozen layer that is sharded trains", "parallel", f"{TP}style:ColwiseParallel._partition_linear_fn", "requires_grad=param.requires_grad,", "", "pytorch 171709"),
    "ignored_targets_counted": WrongRule("the gradient's mean counts ignored targets", "parallel", f"{TP}loss:_nll_loss_and_log_softmax_backward", "grad_output = grad_output / total_weight", "grad_output = grad_output / target.numel()", "pytorch 118950"),
    # ZeroRedundancyOptimizer
    "scheduled_rate_lost": WrongRule("a scheduled rate does not reach the local optimizer", "training", f"{ZERO}ZeroRedundancyOptimizer._local_step", "self._sync_param_groups(self.param_groups, self.optim.param_groups)", "pass", "fairscale 66"),
    # state, schedules and averages
    "patience_one_short": WrongRule("ReduceLROnPlateau waits one epoch too few", "training", "torch.optim.lr_scheduler:ReduceLROnPlateau.step", "self.num_bad_epochs > self.patience", "self.num_bad_epochs >= self.patience", "pytorch 2545"),
    "step_loaded_in_few_bits": WrongRule("load_state_dict casts the step to the parameter's dtype", "training", "torch.optim.optimizer:Optimizer._process_value_according_to_param_policy", 'if key == "step":', 'if key == "step" and (capturable or fused):', "pytorch 74424"),
    "buffers_of_first_model": WrongRule("the averaged model keeps its first buffers", "training", "torch.optim.swa_utils:AveragedModel.update_parameters", "b_swa.detach().copy_(b_model.detach().to(b_swa.device))", "pass", "pytorch 84053"),
}  # fmt: skip
"""Planted when all cases existed. The author had read no case and no property."""

AMP, SCHEDULES, PIPELINES = "torch.amp.", "torch.optim.lr_scheduler:", "torch.distributed.pipelining."

BLIND_AGAIN: dict[str, WrongRule] = {
    # optimizers
    "history_out_of_step": WrongRule("LBFGS does not shift one of its three histories when they are full", "training", "torch.optim.lbfgs:LBFGS.step", "ro.pop(0)", "pass", "pytorch 8824"),
    "repeated_rows_apart": WrongRule("Adagrad squares each of the sparse gradients of a row, not their sum", "training", "torch.optim.adagrad:_single_tensor_adagrad", "grad = grad.coalesce()  #", "grad = grad  #", "pytorch 1545"),
    "columns_divided_by_rows": WrongRule("Adafactor's mean of a column is divided by the length of a row, foreach", "training", "torch.optim._adafactor:_multi_tensor_adafactor", "[grad.size(-2) for grad in device_grads]", "[grad.size(-1) for grad in device_grads]", "pytorch 132336"),
    "last_dtype_zeroed": WrongRule("zero_grad(set_to_none=False) zeroes the gradients of one dtype, foreach", "training", "torch.optim.optimizer:Optimizer.zero_grad", "in per_dtype_grads.values():", "in list(per_dtype_grads.values())[-1:]:", "pytorch 69936"),
    # scaler and autocast
    "unscaled_again": WrongRule("a fused optimizer divides by the scale what unscale_ has divided", "training", f"{AMP}grad_scaler:GradScaler.step", 'if optimizer_state["stage"] == OptState.UNSCALED', "if False", "pytorch 94060"),
    "first_optimizer_decides": WrongRule("the scale backs off only for infinities of the first optimizer", "training", f"{AMP}grad_scaler:GradScaler.update", "for i in range(1, len(found_infs)):", "for i in range(1, 1):", "pytorch 26512"),
    "inner_autocast_remains": WrongRule("the dtype of an inner autocast remains in the outer", "training", f"{AMP}autocast_mode:autocast.__exit__", "torch.set_autocast_dtype(self.device, self.prev_fastdtype)", "self.prev or torch.set_autocast_dtype(self.device, self.prev_fastdtype)", "pytorch 61002"),
    # recomputation
    "recomputed_in_default_dtype": WrongRule("reentrant recomputation casts to autocast's default dtype", "training", "torch.utils.checkpoint:CheckpointFunction.backward", '"cpu", **ctx.cpu_autocast_kwargs', '"cpu", enabled=ctx.cpu_autocast_kwargs["enabled"], dtype=torch.bfloat16', "pytorch 71169"),
    "last_functions_left_out": WrongRule("checkpoint_sequential leaves out what does not divide into segments", "training", "torch.utils.checkpoint:checkpoint_sequential", "end + 1, len(functions) - 1, functions", "end + 1, segment_size * segments - 1, functions", "pytorch 68423"),
    # schedules and averages
    "initial_rate_changes": WrongRule("a rate that is a tensor changes the initial rate too", "training", f"{SCHEDULES}LRScheduler.__init__", "initial_lr = initial_lr.clone()", "pass", "pytorch 126854"),
    "third_cycle_as_second": WrongRule("warm restarts grow once only", "training", f"{SCHEDULES}CosineAnnealingWarmRestarts.step", "self.T_i = self.T_i * self.T_mult", "self.T_i = self.T_0 * self.T_mult", "pytorch 88791"),
    "momentum_of_layer_kept": WrongRule("update_bn takes a running mean, not the mean of all batches", "training", "torch.optim.swa_utils:update_bn", "module.momentum = None", "pass", "pytorch-lightning 14866"),
    "smallest_period_wins": WrongRule("models are averaged over the group of the smallest period that divides the step", "training", "torch.distributed.algorithms.model_averaging.hierarchical_model_averager:HierarchicalModelAverager._find_process_group", "reversed(self._periods)", "self._periods", "pytorch 73285"),
    # DistributedDataParallel
    "buffers_of_joined_rank": WrongRule("buffers come from a rank that has joined", "training", f"{DDP}DistributedDataParallel._check_and_sync_module_buffers", "self._distributed_rank, False", "self._distributed_rank, True", "pytorch 42577"),
    "ignored_buffers_broadcast": WrongRule("buffers to ignore are broadcast", "training", f"{DDP}DistributedDataParallel._assign_modules_buffers", "if buffer_name not in self.parameters_to_ignore", "", "pytorch 81136"),
    # FSDP2
    "keywords_not_cast": WrongRule("keyword arguments are not cast to param_dtype", "training", f"{FSDP2}_fsdp_state:FSDPState._cast_forward_inputs", "_apply_to_tensors(cast_fn, kwargs)", "kwargs", "pytorch 153077"),
    "hooks_of_first_gradient": WrongRule("hooks after accumulation do not run if a parameter already has a gradient", "training", f"{FSDP2}_fsdp_collectives:foreach_reduce", "for hook in (", "for hook in () if to_accumulate_grad else (", "pytorch 129450"),
    "assigned_after_forward": WrongRule("parameters that load_state_dict assigns are not gathered", "training", f"{FSDP2}_fsdp_param:FSDPParam.__init__", "lambda *args, **kwargs: self.reset_sharded_param()", "lambda *args, **kwargs: None", "pytorch 124651"),
    "wrong_piece_after_forward": WrongRule("resharding to fewer ranks keeps another rank's piece", "training", f"{FSDP2}_fsdp_param:FSDPParam.to_sharded_post_forward", "self.post_forward_mesh_info.shard_mesh_rank", "self.post_forward_mesh_info.replicate_mesh_rank", "pytorch 118017"),
    "counted_in_next_step": WrongRule("gradients that were added up before the reduction count in the next step too", "training", f"{FSDP2}_fsdp_param_group:FSDPParamGroup.post_backward", "fsdp_param.unsharded_accumulated_grad = None", "pass", "pytorch 118298"),
    # tensor, sequence and context parallel
    "keyword_stays_local": WrongRule("PrepareModuleInput does not redistribute keyword arguments", "parallel", f"{TP}style:PrepareModuleInput._prepare_input_kwarg_fn", "self.desired_input_kwarg_layouts.get(kwarg_key)", "self.desired_input_kwarg_layouts.get(input_layout)", "pytorch 124114"),
    "weight_of_ignored_targets": WrongRule("the mean of a weighted loss counts the weight of ignored targets", "training", f"{TP}loss:_nll_loss_forward", "wsum = torch.where(target != ignore_index, wsum, 0)", "pass", "pytorch 185167"),
    "replicated_input_stays_so": WrongRule("SequenceParallel does not shard an input that is replicated", "parallel", f"{TP}style:SequenceParallel._prepare_input_fn", "if input_tensor.placements != sequence_sharding:", "if False:", "pytorch 129355"),
    "first_row_restored": WrongRule("the order of the sequence is restored in the first row of the batch", "training", "torch.distributed.tensor.experimental._context_parallel._attention:context_parallel_unshard", "for i in range(data_batch_size):", "for i in range(idx_batch_size):", "pytorch 161062"),
    # distributed checkpoint
    "options_by_position": WrongRule("options of parameter groups are loaded in the order of the groups", "training", "torch.distributed.checkpoint.state_dict:_split_optim_state_dict", "pg_idx = pg_mapping.get(id(param_group), -1)", "pg_idx = cast(ListDictValueType, optim_state_dict[_PG]).index(param_group)", "pytorch 143828"),
    "read_from_the_beginning": WrongRule("a shard within a saved shard is read from its beginning", "training", "torch.distributed.checkpoint.resharding:_shards_get_overlap_region_wrt_saved_tensor", "offset_for_saved_tensor = current_shard_offset - saved_shard_offset", "offset_for_saved_tensor = 0", "Megatron-LM 5077"),
    # ZeroRedundancyOptimizer
    "new_group_in_no_bucket": WrongRule("parameters of a later group are in no bucket that is broadcast", "training", f"{ZERO}ZeroRedundancyOptimizer._clear_cache", "self._device_to_params_per_rank_cache.clear()", "pass", "pytorch 46750"),
    # pipeline schedules
    "sum_divided_anyway": WrongRule("1F1B ignores scale_grads=False", "training", f"{PIPELINES}schedules:Schedule1F1B._step_microbatches", "self._n_microbatches if self.scale_grads else 1", "self._n_microbatches", "pytorch 144352"),
    "shared_weight_counted_twice": WrongRule("a weight that a stage uses twice counts too often when backward is split", "training", f"{PIPELINES}_backward:stage_backward_weight", 'if len(param_group["intermediates"]) > 1:', "if False:", "pytorch 180952"),
    "outputs_joined_along_rows": WrongRule("outputs of micro-batches are joined along dim 0", "training", f"{PIPELINES}microbatch:merge_chunks", "torch.cat(values_to_cat, dim=arg.split_dim)", "torch.cat(values_to_cat, dim=DEFAULT_CHUNK_DIM)", "PiPPy 1043"),
}  # fmt: skip
"""Planted later by another author, who had read no case either. `bare.blind_training_2` shows each rule."""

OPTIM, STATE = "torch.distributed.optim.", "torch.distributed.checkpoint."

BLIND_THIRD: dict[str, WrongRule] = {
    # DistributedDataParallel, its hooks, and averaging of models
    "buffers_left_apart": WrongRule("after a step without synchronization buffers are never broadcast again", "ddp", f"{DDP}DistributedDataParallel._post_forward", "self.require_forward_param_sync = True", "pass", "pytorch 21736"),
    "compressed_too_early": WrongRule("PowerSGD counts buckets, not steps, until it begins", "ddp", f"{HOOKS}powerSGD_hook:PowerSGDState.maybe_increase_iter", "if bucket.is_last():", "if True:", "pytorch 50973"),
    "averager_starts_again": WrongRule("a resumed post-local SGD counts its steps from 0", "training", f"{OPTIM}post_localSGD_optimizer:PostLocalSGDOptimizer.load_state_dict", 'self.averager.step = state_dict["step"]', "self.averager.step = 0", "pytorch 74556"),
    # FSDP2
    "next_gradient_misplaced": WrongRule("the gradient after one with an uneven shard is read from its padding", "fsdp2", f"{FSDP2}_fsdp_collectives:foreach_reduce", "flat_grad_offset += padded_sharded_numel", "flat_grad_offset += new_sharded_grad.numel()", "pytorch 117975"),
    "replicas_of_whole_models": WrongRule("HSDP does not reduce if a shard is the whole parameter", "fsdp2", f"{FSDP2}_fsdp_collectives:foreach_reduce", "if all_reduce_group is not None:  #", "if all_reduce_group is not None and world_size > 1:  #", "verl 7493"),
    "ignored_beside_others": WrongRule("a parameter to ignore is sharded if its module has others", "fsdp2", f"{FSDP2}_fsdp_init:_get_managed_states", "if param in ignored_params:", "if False:", "pytorch 148242"),
    "inputs_cast_anyway": WrongRule("cast_forward_inputs=False is ignored", "fsdp2", f"{FSDP2}_fsdp_state:FSDPState._cast_forward_inputs", "self._mp_policy.cast_forward_inputs and", "", "torchtitan 2881"),
    "state_after_evaluation": WrongRule("a state dict after an evaluation has the parameters of the computation", "fsdp2", f"{FSDP2}_fsdp_param_group:FSDPParamGroup._register_state_dict_hooks", "self._to_sharded()", "pass", "pytorch 144289"),
    # tensor parallel
    "replicas_in_the_norm": WrongRule("replicated gradients count with a wrong weight in a norm that is not the 2-norm", "clipping", "torch.distributed.tensor._ops._math_ops:_NormPartial._partition_value", "1 / self.norm_type", "1 / 2", "pytorch 126484"),
    "bias_of_each_rank": WrongRule("the bias of a row-wise layer is each rank's own", "parallel", f"{TP}style:RowwiseParallel._partition_linear_fn", "[Replicate()],\n                    src_data_rank=self.src_data_rank", "[Replicate()],\n                    src_data_rank=None", "text-generation-inference 1036"),
    "first_output_decides": WrongRule("outputs are redistributed if the first one is", "parallel", f"{TP}style:PrepareModuleOutput._prepare_out_fn", "if out_layout != desired_out_layout:", "if self.output_layouts[0] != self.desired_output_layouts[0]:", "pytorch 111160"),
    "fan_of_the_shard": WrongRule("the range of initial weights is by the shard's width", "training", "torch.nn.init:_calculate_fan_in_and_fan_out", "tensor.size(1)", "getattr(tensor, '_local_tensor', tensor).size(1)", "Megatron-Bridge 5840"),
    # optimizers of sharded parameters
    "rate_of_the_shard": WrongRule("Muon adjusts the rate by the shard's shape", "optimizer", "torch.optim._muon:_single_tensor_muon", "adjust_lr_fn, param.shape", "adjust_lr_fn, getattr(param, '_local_tensor', param).shape", "Moonlight 27"),
    # state
    "unfrozen_in_no_bucket": WrongRule("ZeRO does not broadcast parameters that train only later", "training", f"{OPTIM}zero_redundancy_optimizer:ZeroRedundancyOptimizer._local_step", "if is_trainable_mask != self._is_trainable_mask:", "if False:", "pytorch 52764"),
    "rates_reversed": WrongRule("making an optimizer's state gives the groups each other's rates", "training", f"{STATE}state_dict:_init_optim_state", "lrs.pop(0)", "lrs.pop()", "pytorch 139575"),
    "numbers_not_loaded": WrongRule("values that are no tensors are loaded into a copy of the state", "training", f"{STATE}default_planner:DefaultLoadPlanner.load_bytes", "if self.flatten_state_dict:", "if False:", "pytorch 125528"),
    "gathered_along_one_dim": WrongRule("a full state dict is gathered along the first dim of the mesh", "training", "torch.distributed._state_dict_utils:_gather_state_dict", "[Replicate() for _ in value.placements]", "[Replicate(), *value.placements[1:]]", "pytorch 120722"),
    # collectives and pipelines
    "own_part_of_gradient": WrongRule("the gradient of a gathered tensor comes from the own loss alone", "training", "torch.distributed.nn.functional:_AllGather.backward", "gx = torch.sum(torch.stack(gxs), dim=0)", "gx = grad_outputs[dist.get_rank(group=ctx.group)]", "pytorch 120386"),
    "shards_not_scaled": WrongRule("gradients of a stage that is sharded are not divided by the number of micro-batches", "training", f"{PIPELINES}stage:_PipelineStageBase.perform_reduce_grad", "if grad_scale_factor != 1:", "if grad_scale_factor != 1 and not isinstance(self.submod, FSDPModule):", "torchtitan 1732"),
    "loss_without_keywords": WrongRule("schedules of several stages forget loss_kwargs", "training", f"{PIPELINES}schedules:_PipelineScheduleRuntime._step_microbatches", "stage, output, target_mbs, mb_index, loss_kwargs", "stage, output, target_mbs, mb_index", "pytorch 181057"),
}  # fmt: skip
"""Planted by a third author, who had read no case. `bare.blind_training_3` shows each rule."""

COLLECTIVES, GROUP, PARAM = (
    f"{FSDP2}_fsdp_collectives:",
    f"{FSDP2}_fsdp_param_group:FSDPParamGroup.",
    f"{FSDP2}_fsdp_param:FSDPParam.",
)
METHODS = f"{FSDP2}_fully_shard:FSDPModule."
REPLICATE, TP_DDP = "torch.distributed._composable.replicate:", f"{TP}ddp:"
FUNCTIONAL = "torch.distributed._functional_collectives:"

OF_OPTIONS: dict[str, WrongRule] = {
    # state and pipelines
    "options_of_the_first_group": WrongRule("each group of a flat state gets the options of the first group", "training", f"{STATE}state_dict:_unflatten_optim_state_dict", "pg_state[-1][_PARAMS])[0]", "pg_state[0][_PARAMS])[0]", "pytorch 139575"),
    "state_of_rank_0_not_sent": WrongRule("a state that rank 0 alone has is loaded there alone", "training", "torch.distributed._state_dict_utils:_broadcast_tensors", "dist.broadcast(tensors[0], src=0, group=pg)", "pass", "pytorch 125177"),
    "whole_state_not_distributed": WrongRule("a whole state that each rank has is left out", "training", "torch.distributed._state_dict_utils:_distribute_state_dict", "elif isinstance(local_state, DTensor):", "elif True:\n                continue\n            elif isinstance(local_state, DTensor):", "pytorch 126950"),
    "parameters_left_behind": WrongRule("set_state_dict loads the state of the optimizer alone", "training", f"{STATE}state_dict:set_state_dict", "optim_only=not model_state_dict", "optim_only=True", "pytorch 157781"),
    "evaluated_with_a_backward": WrongRule("a schedule runs the backward when it evaluates", "training", f"{PIPELINES}schedules:_PipelineSchedule.eval", "self._has_backward = False", "pass", "pytorch 127946"),
    "overlapped_without_weights": WrongRule("DualPipeV leaves out weights' gradients of overlapped micro-batches", "training", f"{PIPELINES}schedules:ScheduleDualPipeV._calculate_single_rank_operations", "_Action(backward_stage, FULL_BACKWARD, backward_mb)", "_Action(backward_stage, BACKWARD_INPUT, backward_mb)", "pytorch 159591"),
    # collectives
    "memory_of_no_collective": WrongRule("a custom reduction gets a buffer that it has not allocated", "fsdp2", f"{COLLECTIVES}foreach_reduce", "reduce_output = reduce_scatter_comm.allocate(", "reduce_output = torch.empty(", "pytorch 155189"),
    "allocated_in_default_dtype": WrongRule("the process group's buffers have the default dtype", "fsdp2", f"{COLLECTIVES}ProcessGroupAllocMixin.allocate", "torch.empty(*size, dtype=dtype,", "torch.empty(*size,", "pytorch 157487"),
    "reduced_over_the_world": WrongRule("the separate group of reductions has all ranks of the world", "fsdp2", f"{GROUP}_set_separate_reduce_scatter_group", "dist.get_process_group_ranks(mesh_info.shard_process_group)", "range(dist.get_world_size())", "pytorch 186335"),
    "released_by_one_module": WrongRule("set_reshard_after_forward ignores recurse", "fsdp2", f"{METHODS}set_reshard_after_forward", "list(self_module.modules()) if recurse else [self_module]", "[self_module]", "pytorch 149103"),
    "zeros_of_one_module": WrongRule("set_reduce_scatter_unused_params ignores recurse", "fsdp2", f"{METHODS}set_reduce_scatter_unused_params", "list(self_module.modules()) if recurse else [self_module]", "[self_module]", "pytorch 170667"),
    # parameters
    "gathered_too_late": WrongRule("unshard returns before the parameters are gathered", "fsdp2", f"{METHODS}unshard", "handle.wait()", "pass", "pytorch 132978"),
    "shards_before_conversion": WrongRule("after a conversion the earlier shards are gathered", "fsdp2", f"{PARAM}reset_sharded_param", "self._sharded_param_data = local_tensor.view(-1)", "pass", "pytorch 132978"),
    "dim_stays_negative": WrongRule("a negative dim of shard_placement_fn stays negative", "fsdp2", f"{PARAM}_init_sharded_param", "elif fsdp_placement.dim < 0:", "elif False:", "pytorch 137496"),
    "gathered_once": WrongRule("an extension makes the parameter of the first gather only", "fsdp2", f"{PARAM}init_unsharded_param", 'if not hasattr(inner_tensor, "fsdp_post_all_gather"):', "if True:", "pytorch 137005"),
    "dtype_of_first_part": WrongRule("parts of different dtypes are gathered in the dtype of the first", "fsdp2", f"{COLLECTIVES}_get_all_gather_input_metadatas", "all_gather_dtype = torch.uint8", "pass", "pytorch 137005"),
    "incomplete_group_released": WrongRule("a group whose forward ran in part is not gathered in the backward", "fsdp2", f"{FSDP2}_fsdp_state:FSDPState._force_complete_incomplete_states", "output = state._register_pre_backward_hook(output)", "pass", "pytorch 180428"),
    # beside tensor parallelism
    "replicas_after_shards": WrongRule("HSDP beside tensor parallelism exchanges the axes of replicas and shards", "fsdp2", f"{PARAM}_init_sharding_spec_tp", "(Replicate(),) + dp_shard_tp_placement", "dp_shard_tp_placement[:1] + (Replicate(),) + dp_shard_tp_placement[1:]", "pytorch 133335"),
    "replicas_called_shards": WrongRule("replicas beside tensor parallelism are declared as shards", "fsdp2", f"{PARAM}_init_sharding_spec_tp", "Replicate(),\n", "fsdp_placement,\n", "pytorch 133335"),
    "replicas_not_reduced": WrongRule("replicas without shards are not reduced", "fsdp2", f"{COLLECTIVES}foreach_reduce", "if all_reduce_group is not None:  #", "if all_reduce_group is not None and reduce_scatter_group is not None:  #", "pytorch 160135"),
    "partial_on_named_axes": WrongRule("on named axes, gradients that are partial over tensor parallel ranks stay so", "fsdp2", f"{PARAM}_get_grad_inner_tensor", "grad = grad.redistribute(placements=target_placements)", "pass", "pytorch 176334"),
    "reduced_twice_on_named_axes": WrongRule("on named axes, gradients are added up before they are averaged", "fsdp2", f"{PARAM}_get_grad_inner_tensor", "grad.placements[i] if i in self._dp_dim_indices else placements[i]", "placements[i]", "pytorch 176334"),
    "named_axes_in_order": WrongRule("on named axes, rows of both axes are joined without interleaving", "fsdp2", f"{PARAM}_init_sharding_spec_spmd", "_StridedShard(shard_dim, split_factor=sf) if sf > 1 else fsdp_placement", "fsdp_placement", "pytorch 176334"),
    # outputs of DistributedDataParallel, and its hooks
    "dataclass_not_searched": WrongRule("unused parameters are not searched in a dataclass", "ddp", f"{DDP}_find_tensors", "if is_dataclass(obj):", "if False:", "pytorch 93125"),
    "dict_searched_once": WrongRule("unused parameters are searched in the tensors of a dict alone", "ddp", f"{DDP}_find_tensors", "map(_find_tensors, obj.values())", "([each] for each in obj.values() if torch.is_tensor(each))", "pytorch 55876"),
    "builtin_compresses": WrongRule("the builtin all_reduce compresses to float16", "ddp", f"{DDP}DistributedDataParallel._register_builtin_comm_hook", "(self.reducer, comm_hook_type)", "(self.reducer, dist.BuiltinCommHookType.FP16_COMPRESS)", "pytorch 53325"),
    # parameters and buffers of DistributedDataParallel
    "init_sync_ignored": WrongRule("init_sync=False broadcasts", "ddp", f"{DDP}DistributedDataParallel.__init__", "if init_sync:", "if True:", "pytorch 89669"),
    "buffers_not_begun": WrongRule("forward_sync_buffers=False does not broadcast at construction", "ddp", f"{DDP}DistributedDataParallel.__init__", "init_sync_buffers = True", "init_sync_buffers = forward_sync_buffers", "pytorch 63916"),
    "buffers_always_broadcast": WrongRule("forward_sync_buffers=False is ignored", "ddp", f"{DDP}DistributedDataParallel.will_sync_module_buffers", "and self.forward_sync_buffers", "", "pytorch 63916"),
    "ignored_parameters_broadcast": WrongRule("parameters to ignore are broadcast at construction", "ddp", "torch.distributed.utils:_sync_module_states", "if name not in params_and_buffers_to_ignore:\n            module_states.append(param.detach())", "if True:\n            module_states.append(param.detach())", "pytorch 81136"),
    "prepared_in_evaluation": WrongRule("a forward without gradients prepares for a backward", "ddp", f"{DDP}DistributedDataParallel._post_forward", "if torch.is_grad_enabled() and self.require_backward_grad_sync:", "if self.require_backward_grad_sync:", "pytorch 60733"),
    # delayed gradients
    "delayed_by_the_world": WrongRule("delayed gradients are divided by the default group's size", "ddp", f"{DDP}DistributedDataParallel._delayed_all_reduce_hook", "dist.get_world_size(self.process_group)", "dist.get_world_size()", "pytorch 95669"),
    "delayed_overlap": WrongRule("all delayed gradients have the same memory", "ddp", f"{DDP}DistributedDataParallel._register_delay_all_reduce_hook", "offset = offset + param.numel()", "pass", "pytorch 95669"),
    "delayed_not_broadcast": WrongRule("delayed parameters are not broadcast at construction", "ddp", f"{DDP}DistributedDataParallel._register_delay_all_reduce_hook", "dist._broadcast_coalesced(self.process_group, detached_params, bucket_cap_mb, 0)", "pass", "pytorch 95669"),
    # meshes
    "group_of_the_world": WrongRule("a mesh stands for the default group", "ddp", f"{DDP}DistributedDataParallel.__init__", "self.process_group = device_mesh.get_group(mesh_dim=0)", "self.process_group = _get_default_group()", "pytorch 106583"),
    "shards_taken_for_even": WrongRule("DDP assumes that tensor parallel shards are equal in size", "ddp", f"{TP}_data_parallel_utils:_unflatten_tensor", "shape=spec.shape,\n        stride=spec.stride,", "", "pytorch 106583"),
    "first_layer_local": WrongRule("parameters of the first layer alone become DTensors again", "ddp", f"{TP_DDP}_reconstruct_dtensor", "module.named_parameters():", "list(module.named_parameters())[:1]:", "pytorch 106583"),
    # replicate
    "never_synchronized_again": WrongRule("replicate never reduces again after a backward without reduction", "ddp", f"{REPLICATE}_ReplicateState.forward_pre_hook", "= not self._no_sync", "&= not self._no_sync", "pytorch 152712"),
    "layers_behind_ignored": WrongRule("replicate leaves out all layers behind an ignored one", "ddp", f"{REPLICATE}_ReplicateState._collect_params", "in module.named_children():", "in list(module.named_children())[: [each in ignored_modules for each in (*module.children(), *ignored_modules)].index(True) if ignored_modules else None]:", "pytorch 152712"),
    "group_left_out": WrongRule("replicate ignores its options", "ddp", f"{REPLICATE}_ReplicateState.init", "DistributedDataParallel(self._param_list, **kwargs)", "DistributedDataParallel(self._param_list)", "pytorch 152712"),
    # functional collectives
    "axis_is_the_first": WrongRule("a mesh with an axis stands for its first axis", "functional", f"{FUNCTIONAL}_resolve_group", "return dmesh._dim_group_names[dim]", "return dmesh._dim_group_names[0]", "pytorch 93173"),
    "mesh_is_the_world": WrongRule("a mesh stands for the default group", "functional", f"{FUNCTIONAL}_resolve_group", "return group._dim_group_names[0]", "return c10d._get_default_group().group_name", "pytorch 93173"),
    "permuted_backwards": WrongRule("permute_tensor sends to the source", "functional", f"{FUNCTIONAL}permute_tensor", "for src, dst in enumerate(src_dst):", "for dst, src in enumerate(src_dst):", "pytorch 100845"),
    "first_part_everywhere": WrongRule("all_gather_inplace copies the first part to all tensors", "functional", f"{FUNCTIONAL}all_gather_inplace", "offset += t_offset", "pass", "pytorch 106668"),
    "always_summed": WrongRule("reduce_scatter_tensor_inplace ignores its reduction", "functional", f"{FUNCTIONAL}reduce_scatter_tensor_inplace", "input, op, scatter_dim", 'input, "sum", scatter_dim', "pytorch 106668"),
    "largest_summed": WrongRule("all_reduce_inplace ignores its reduction", "functional", f"{FUNCTIONAL}all_reduce_inplace", "all_reduce(tensor, op,", 'all_reduce(tensor, "sum",', "pytorch 106668"),
    "gathered_in_the_world": WrongRule("all_gather_tensor_inplace ignores its group", "functional", f"{FUNCTIONAL}all_gather_tensor_inplace", "group = group or dist.group.WORLD", "group = dist.group.WORLD", "pytorch 106668"),
    "splits_exchanged": WrongRule("all_to_all_inplace exchanges the splits", "functional", f"{FUNCTIONAL}all_to_all_inplace", "output_split_sizes,\n            input_split_sizes,", "input_split_sizes,\n            output_split_sizes,", "pytorch 106668"),
    "coalesced_takes_largest": WrongRule("reduce_scatter_single_coalesced ignores its reduction", "functional", f"{FUNCTIONAL}reduce_scatter_single_coalesced", "reduceOp.lower()", '"max"', "pytorch 93173"),
    "messages_in_the_world": WrongRule("batch_p2p_ops_inplace ignores its group", "functional", f"{FUNCTIONAL}batch_p2p_ops_inplace", 'if group_name is None or group_name == "":', "if True:", "pytorch 106668"),
}  # fmt: skip
"""Rules of options that no shipped property used before the lines of torch that a gate runs were counted."""

COMPOSABLE = "torch.distributed._composable."

BLIND_FOURTH: dict[str, WrongRule] = {
    # FSDP2 and replicate
    "output_as_it_comes": WrongRule("output_dtype without param_dtype is ignored", "fsdp2", f"{FSDP2}_fsdp_state:FSDPState._cast_output_dtype", "if self._mp_policy.output_dtype is None:", "if self._mp_policy.output_dtype is None or self._mp_policy.param_dtype is None:", "pytorch 118223"),
    "hook_of_replicas_not_run": WrongRule("HSDP does not run the hook of set_all_reduce_hook", "fsdp2", f"{COLLECTIVES}foreach_reduce", "if all_reduce_hook is not None:", "if all_reduce_hook is not None and all_reduce_group is None:", "pytorch 147114"),
    "ignored_parameters_averaged": WrongRule("replicate averages gradients of parameters to ignore", "fsdp2", f"{COMPOSABLE}replicate_with_fsdp:replicate", "ignored_params,\n        is_composable_fn", "None,\n        is_composable_fn", "pytorch 148242"),
    "recomputed_without_keywords": WrongRule("composable checkpoint recomputes without keyword arguments", "training", f"{COMPOSABLE}checkpoint_activation:checkpoint", "*args,\n                **kwargs,\n", "*args,\n", "pytorch 128516"),
    # clipping
    "replicas_not_clipped": WrongRule("clipping scales sharded gradients alone", "clipping", f"{CLIP}_clip_grads_with_norm_", "torch._foreach_mul_(device_grads, clip", "torch._foreach_mul_([g for g in device_grads if all(p.is_shard() for p in getattr(g, 'placements', ()))], clip", "pytorch 126484"),
    # hooks of DistributedDataParallel
    "local_steps_begin_late": WrongRule("post-local SGD reduces over all ranks for one step more", "ddp", f"{HOOKS}post_localSGD_hook:post_localSGD_hook", "state.iter < state.start_localSGD_iter", "state.iter <= state.start_localSGD_iter", "pytorch 74157"),
    # pipelines
    "reduced_after_the_first": WrongRule("GPipe reduces gradients of a DDP stage after its first micro-batch", "training", f"{PIPELINES}schedules:ScheduleGPipe._step_microbatches", "last_backward=i == self._n_microbatches - 1", "last_backward=i == 0", "PiPPy 828"),
    "keywords_cut_along_rows": WrongRule("a schedule ignores kwargs_chunk_spec", "training", f"{PIPELINES}schedules:_PipelineSchedule._split_inputs", "self._kwargs_chunk_spec,", "None,", "PiPPy 1043"),
    "losses_of_all_steps": WrongRule("the list of losses keeps the losses of earlier steps", "training", f"{PIPELINES}schedules:_PipelineSchedule._update_losses", "losses.clear()\n        # Copy", "pass\n        # Copy", "pytorch 127946"),
    # ZeroRedundancyOptimizer and state
    "numbered_by_each_rank": WrongRule("the consolidated state numbers parameters as each rank does", "training", f"{ZERO}ZeroRedundancyOptimizer.state_dict", "global_param_index = self._param_to_index[global_param]", "global_param_index = local_param_index", "pytorch 54736"),
    "rows_by_own_size": WrongRule("a whole state is cut as if all shards were as long as the rank's own", "training", "torch.distributed._state_dict_utils:_distribute_tensors", "slice(cur_offset, cur_offset + cur_shape)", "slice(start := cur_offset and cur_shape * dist.get_rank(), start + cur_shape)", "pytorch 136228"),
    "last_row_not_read": WrongRule("a saved shard that begins in the last row is not read", "training", f"{STATE}planner_helpers:create_read_items_for_chunk_list", "if saved_start >= local_end:", "if saved_start >= local_end - 1:", "pytorch 169115"),
    # differentiable collectives
    "gradient_of_the_source": WrongRule("the gradient of a broadcast is the source's own", "training", "torch.distributed.nn.functional:_Broadcast.backward", "_Reduce.apply(ctx.src, ReduceOp.SUM, ctx.group, grad_output)", "grad_output.clone()", "pytorch 40762"),
    "gathered_gradients_averaged": WrongRule("the gradient of all_gather_single is averaged over ranks", "functional", f"{FUNCTIONAL}all_gather_into_tensor_backward", '"sum",', '"avg",', "pytorch 123599"),
}  # fmt: skip
"""Planted by a fourth author, who had read no case and no property. `bare.blind_training_4` shows each rule."""

BLIND_FIFTH: dict[str, WrongRule] = {
    # FSDP2 and accumulation of gradients
    "frozen_weights_train": WrongRule("a frozen parameter that fully_shard shards trains", "fsdp2", f"{PARAM}_init_sharded_param", "requires_grad=param.requires_grad,", "", "pytorch 104186, pytorch 171709"),
    "last_of_waiting_gradients": WrongRule("a micro-batch without reduction replaces the sum of earlier ones", "fsdp2", f"{PARAM}accumulate_unsharded_grad_if_needed", "self.unsharded_accumulated_grad += self.unsharded_param.grad", "self.unsharded_accumulated_grad = self.unsharded_param.grad.to(self.unsharded_accumulated_grad.dtype)", "pytorch 118298"),
    "reduced_gradient_replaces": WrongRule("a reduced gradient replaces the gradient of an earlier backward", "fsdp2", f"{COLLECTIVES}foreach_reduce", "fsdp_param.sharded_param.grad._local_tensor += new_sharded_grad", "fsdp_param.sharded_param.grad._local_tensor.copy_(new_sharded_grad)", "pytorch 73535, instructlab 414"),
    # DistributedDataParallel and its hooks
    "never_reduced_again": WrongRule("the end of no_sync does not turn the reduction on again", "ddp", f"{DDP}DistributedDataParallel.no_sync", "self.require_backward_grad_sync = old_require_backward_grad_sync", "pass", "pytorch 21736, speechbrain 2010"),
    "hook_over_the_world": WrongRule("allreduce_hook ignores its group", "ddp", f"{HOOKS}default_hooks:_allreduce_fut", "group_to_use = process_group if process_group is not None else dist.group.WORLD", "group_to_use = dist.group.WORLD", "pytorch 49715, pytorch 73285"),
    # tensor parallel
    "columns_for_rows": WrongRule("ColwiseParallel returns its own shards although the plan names shards of another dim", "parallel", f"{TP}style:ColwiseParallel._prepare_output_fn", "if outputs.placements != output_layouts:", "if [p.is_shard() for p in outputs.placements] != [p.is_shard() for p in output_layouts]:", "pytorch 144359, pytorch 129355"),
    "columns_of_each_rank": WrongRule("the weights of a column-wise layer are each rank's own", "parallel", f"{TP}style:ColwiseParallel._partition_linear_fn", "src_data_rank=self.src_data_rank", "src_data_rank=None", "pytorch 143883, pytorch 144005"),
    # optimizers and averages
    "decayed_once_for_each_dtype": WrongRule("AdamW decays all parameters once for each dtype, foreach", "optimizer", f"{ADAM}_multi_tensor_adam", "torch._foreach_mul_(device_params, 1 - lr * weight_decay)", "[param.mul_(1 - lr * weight_decay) for param in params]", "pytorch-image-models 2750"),
    "newest_model_decays": WrongRule("the exponential average exchanges the weights of the average and of the model", "training", "torch.optim.swa_utils:get_ema_multi_avg_fn", "current_param_list, 1 - decay)", "current_param_list, decay)", "pytorch 94820, pytorch 155551"),
    # clipping and the scaler
    "clipped_copies": WrongRule("without foreach, clipping scales copies of the gradients", "clipping", f"{CLIP}_clip_grads_with_norm_", "g.mul_(clip_coef_clamped_device)", "g.mul(clip_coef_clamped_device)", "pytorch 120238"),
    "unscaled_in_one_dtype": WrongRule("the scaler unscales gradients of the first dtype alone", "training", f"{AMP}grad_scaler:GradScaler._unscale_grads_", "in per_dtype_grads.values():", "in list(per_dtype_grads.values())[:1]:", "pytorch 69936, pytorch 180346"),
    # pipelines
    "last_micro_batch_weighs": WrongRule("with a split backward the last micro-batch replaces the gradient of a weight", "training", f"{PIPELINES}_backward:stage_backward_weight", "weight.grad += dw", "weight.grad = dw", "pytorch 164777"),
    # checkpoints
    "staged_without_a_copy": WrongRule("async_save writes what the parameters are when it writes them", "training", f"{STATE}staging:DefaultStager._stage", "state_dict = self._state_dict_stager.stage(state_dict, non_blocking=False)", "pass", "torchtitan 930, pytorch 122965"),
    "states_read_but_not_loaded": WrongRule("load reads the state of an object but does not load it into the object", "training", f"{STATE}state_dict_loader:load", "elem.load_state_dict(stateful_sd[key])", "pass", "pytorch 118081"),
    # differentiable collectives
    "own_gradient_of_a_sum": WrongRule("the gradient of all_reduce is each rank's own", "training", "torch.distributed.nn.functional:_AllReduce.backward", "(_AllReduce.apply(ctx.op, ctx.group, grad_output),)", "(grad_output,)", "pytorch 58005, flash-attention 1244"),
}  # fmt: skip
"""Planted by a fifth author, who had read no case and no property. `bare.blind_training_5` shows each rule."""

BLIND_SIXTH: dict[str, WrongRule] = {
    # FSDP2
    "tied_weights_part": WrongRule("the gradient of a weight that two layers share is of its first use alone", "fsdp2", f"{PARAM}_setattr_on_modules", "unsafe_setattr_param(shared_module, shared_param_name, param)", "unsafe_setattr_param(shared_module, shared_param_name, param if isinstance(param, DTensor) else nn.Parameter(param.detach()))", "verl 7834, pytorch 176076"),
    "first_layer_on_its_own": WrongRule("a layer whose input needs no gradient is not reduced", "fsdp2", f"{FSDP2}_fsdp_state:FSDPState._root_post_backward_final_callback", "if fsdp_param_group._training_state != TrainingState.POST_BACKWARD:", "if False:", "pytorch 98484, pytorch 83129"),
    # DistributedDataParallel's hooks
    "reduced_copy_unused": WrongRule("PowerSGD goes on with each rank's own P, not with their sum", "ddp", f"{HOOKS}powerSGD_hook:powerSGD_hook", "state.p_memory_dict[bucket_index], group=group_to_use", "state.p_memory_dict[bucket_index].clone(), group=group_to_use", "pytorch 49417, pytorch 49451"),
    # tensor parallel
    "placements_of_gradient_ignored": WrongRule("to_local ignores grad_placements", "parallel", "torch.distributed.tensor._api:_ToTorchTensor.backward", "if grad_placements is None:", "if True:", "torchtitan 2532, pytorch 172932"),
    "input_gradient_of_one_rank": WrongRule("the gradient of a replicated input is each rank's own part", "parallel", "torch.distributed.tensor._api:_FromTorchTensor.backward", "if grad_output.placements != normalized_placements:", "if grad_output.placements != normalized_placements and not any(p.is_partial() for p in grad_output.placements):", "torchtitan 1373, pytorch 173153"),
    "largest_of_own_columns": WrongRule("loss_parallel subtracts the largest logit of each rank, not of the row", "parallel", f"{TP}loss:_log_softmax", "x_max = funcol.all_reduce(\n            x_max, reduceOp=c10d.ReduceOp.MAX.name, group=(mesh, mesh_dim)\n        )", "pass", "Megatron-LM 7452, pytorch 190746"),
    # optimizers
    "decay_of_the_defaults": WrongRule("AdamW ignores the weight decay of a parameter group", "optimizer", f"{ADAM}Adam.step", 'weight_decay=group["weight_decay"]', 'weight_decay=self.defaults["weight_decay"]', "Fast-LLM 542"),
    "frozen_state_not_saved": WrongRule("state_dict leaves out the state of parameters that are frozen now", "training", "torch.optim.optimizer:Optimizer.state_dict", "for k, v in self.state.items()", "for k, v in self.state.items() if not isinstance(k, torch.Tensor) or k.requires_grad", "pytorch 192202"),
    # clipping
    "always_the_two_norm": WrongRule("without foreach, the norm of a gradient is the 2-norm", "clipping", f"{CLIP}_get_total_norm", "torch.linalg.vector_norm(g, norm_type) for g", "torch.linalg.vector_norm(g) for g", "torchrec 3199, NeMo-RL 151"),
    # mixed precision
    "casts_of_last_step": WrongRule("autocast keeps the casts of weights for the next step", "training", f"{AMP}autocast_mode:autocast.__exit__", "torch.clear_autocast_cache()", "pass", "pytorch 65766, apex 132"),
    "growth_counted_anew": WrongRule("a resumed scaler counts its good steps from 0", "training", f"{AMP}grad_scaler:GradScaler.load_state_dict", 'self._init_growth_tracker = cast(int, state_dict["_growth_tracker"])', "pass", "composer 1376, tango 154"),
    # schedules
    "second_schedule_begins_again": WrongRule("a resumed SequentialLR loads its first schedule alone", "training", f"{SCHEDULES}SequentialLR.load_state_dict", "enumerate(_schedulers)", "enumerate(_schedulers[:1])", "pytorch 162591, pytorch 171515"),
    # pipelines
    "earlier_batches_forgotten": WrongRule("a step of a pipeline drops the gradients of earlier steps", "training", f"{PIPELINES}stage:_PipelineStageBase.clear_runtime_states", "self.output_chunks.clear()", "self.output_chunks.clear(); self.submod.zero_grad()", "Automodel 3530, torchtitan 1733"),
    "first_keywords_for_all": WrongRule("1F1B gives all micro-batches the keyword arguments of the first", "training", f"{PIPELINES}schedules:Schedule1F1B._step_microbatches", "kwarg_mbs[fwd_mb_index]", "kwarg_mbs[0]", "torchtitan 1723, torchtitan 4098"),
    # checkpoints
    "step_of_rank_0_not_sent": WrongRule("a state of rank 0 is loaded without its numbers of steps", "training", "torch.distributed._state_dict_utils:_broadcast_state_dict", "if key in local_state_dict:", "if key in local_state_dict and not torch.is_tensor(value):", "DeepSpeed 4396, speculators 411"),
    # differentiable collectives
    "gradient_stays_with_receiver": WrongRule("the gradient of all_to_all_single is not sent back", "functional", f"{FUNCTIONAL}all_to_all_single_backward", "return wait_tensor(output), None, None, None", "wait_tensor(output)\n    return grad_output, None, None, None", "pytorch 160285, torchtitan 1013"),
}  # fmt: skip
"""Planted by a sixth author, who had read no case and no property."""

BLIND_SEVENTH: dict[str, WrongRule] = {
    # FSDP2
    "registered_output_not_cast": WrongRule("a method that is registered as a forward returns what it computes, not what FSDP returns", "fsdp2", f"{FSDP2}_fully_shard:register_fsdp_forward_method", "return fsdp_state._post_forward(self, args, out)", "fsdp_state._post_forward(self, args, out)\n        return out", "pytorch 125394, pytorch 162851"),
    "loss_of_second_output": WrongRule("a backward from an output that is not the first is not noticed", "fsdp2", f"{FSDP2}_fsdp_state:FSDPState._register_pre_backward_hook", "for t in tensors:", "for t in tensors[:1]:", "pytorch 80245, fairscale 967"),
    "factor_lost_in_sums": WrongRule("set_force_sum_reduction_for_comms ignores the divide factor", "fsdp2", f"{COLLECTIVES}_get_gradient_divide_factors", "if factor is None:\n        factor = float", "if factor is None or not overflow_risk:\n        factor = float", "pytorch 155915, torchtitan 1793"),
    "columns_gathered_as_rows": WrongRule("columns of a parameter that is sharded along dim 1 are gathered as rows", "fsdp2", f"{COLLECTIVES}foreach_all_gather_copy_out", "if fsdp_param.fsdp_placement.dim != 0:", "if fsdp_param.fsdp_placement.dim > 1:", "pytorch 136221, pytorch 157396"),
    # DistributedDataParallel's hooks
    "compressed_below_the_rate": WrongRule("PowerSGD takes min_compression_rate for a rate of the other direction", "ddp", f"{HOOKS}powerSGD_hook:_should_compress", "compressed_size * min_compression_rate < uncompressed_size", "compressed_size < uncompressed_size * min_compression_rate", "pytorch 52979, pytorch 52541"),
    "local_steps_reduce_anyway": WrongRule("post-local SGD ignores post_local_gradient_allreduce=False", "ddp", f"{HOOKS}post_localSGD_hook:post_localSGD_hook", "if not state.post_local_gradient_allreduce:", "if False:", "pytorch 76723"),
    # tensor parallel
    "local_inputs_as_outputs": WrongRule("PrepareModuleInputOutput gives its module local inputs if it returns local outputs", "parallel", f"{TP}style:PrepareModuleInputOutput.__init__", "use_local_output=use_local_input", "use_local_output=use_local_output", "pytorch 150372"),
    "whole_gradient_taken_for_sum": WrongRule("full_tensor ignores grad_placements", "parallel", "torch.distributed.tensor._api:DTensor.full_tensor", "_ToTorchTensor.apply(redist_res, grad_placements)", "_ToTorchTensor.apply(redist_res, None)", "pytorch 113925, pytorch 170527"),
    "class_weights_in_loss_alone": WrongRule("loss_parallel's gradient of a mean ignores the weights of classes", "parallel", f"{TP}loss:_nll_loss_and_log_softmax_backward", "if weight is not None:", "if weight is not None and reduction == Reduction.SUM.value:", "pytorch 119877, Automodel 3853"),
    # optimizers, schedules and averages
    "rate_decays_early": WrongRule("Adagrad's rate decays in the first step already, foreach", "optimizer", "torch.optim.adagrad:_multi_tensor_adagrad", "(_get_value(step) - 1) * lr_decay", "_get_value(step) * lr_decay", "pytorch 59155, pytorch 69981"),
    "beta_not_cycled": WrongRule("CyclicLR sets a momentum that Adam does not have", "training", f"{SCHEDULES}CyclicLR.get_lr", "if self.use_beta1:", "if False:", "pytorch 73910, pytorch 113548"),
    "annealed_at_the_end": WrongRule("SWALR takes the present rate for an annealed one of this step", "training", "torch.optim.swa_utils:SWALR.get_lr", "(step - 1) / max(1, self.anneal_epochs)", "step / max(1, self.anneal_epochs)", "pytorch 47578, pytorch 47579"),
    "period_from_step_0": WrongRule("the period of averaging begins with the first step, not after the warm-up", "training", "torch.distributed.algorithms.model_averaging.averagers:PeriodicModelAverager.average_parameters", "(self.step - self.warmup_steps) % self.period", "self.step % self.period", "pytorch 61207, pytorch 74894"),
    # mixed precision
    "backward_in_default_dtype": WrongRule("custom_bwd runs in autocast's default dtype", "training", f"{AMP}autocast_mode:custom_bwd", "dtype=args[0]._dtype,", "", "pytorch 87979, pytorch 88029"),
    "used_scaler_keeps_its_scale": WrongRule("a scaler that has scaled does not load the scale", "training", f"{AMP}grad_scaler:GradScaler.load_state_dict", 'self._scale.fill_(state_dict["scale"])', "pass", "accelerate 4289, composer 1376"),
    # recomputation and pipelines
    "saved_in_reverse": WrongRule("selective recomputation takes the last saved output of an operator first", "training", "torch.utils.checkpoint:_CachedTorchDispatchMode.__torch_dispatch__", "idx = self.func_counter[key]", "idx = len(self.storage.get(key, ())) - 1 - self.func_counter[key]", "pytorch 125795, Paddle 20108"),
    "gradient_of_first_output": WrongRule("a stage of several outputs has the gradient of its first output alone", "training", f"{PIPELINES}_backward:stage_backward", "for ov, gv in zip(output_val, grad_val):", "for ov, gv in zip(output_val[:1], grad_val):", "PiPPy 145, pytorch 170277"),
    # distributed checkpoint
    "first_values_saved_again": WrongRule("a stager that is used again writes the values of its first save", "training", f"{STATE}_state_dict_stager:StateDictStager._stage_untyped_storage", "cached_storage.copy_(storage, non_blocking=non_blocking)", "pass", "pytorch 155192, pytorch 183413"),
    "behind_a_missing_key": WrongRule("a partial load ends with the first key that the checkpoint lacks", "training", f"{STATE}default_planner:create_default_local_load_plan", "else:\n                continue", "else:\n                break", "pytorch 148252, pytorch-lightning 20274"),
    "states_in_order_of_the_model": WrongRule("get_optimizer_state_dict names states in the order of the model's parameters", "training", f"{STATE}state_dict:_get_optim_state_dict", "params = list(chain.from_iterable(g[_PARAMS] for g in optim.param_groups))", "params = list(model.parameters())", "pytorch 113673, torchtitan 3356"),
    # differentiable collectives
    "gathered_at_rank_0": WrongRule("the gradient of gather comes from rank 0, not from the rank that gathers", "training", "torch.distributed.nn.functional:_Gather.backward", "_Scatter.apply(ctx.dst,", "_Scatter.apply(0,", "pytorch 40762, pytorch 40702"),
    "scattered_gradients_averaged": WrongRule("the gradient of a sum by reduce_scatter_single is a mean", "functional", f"{FUNCTIONAL}reduce_scatter_tensor_backward", "return wait_tensor(output), None", "return wait_tensor(output) / group_size, None", "pytorch 190007, pytorch 123989"),
}  # fmt: skip
"""Planted by a seventh author, who had read no case and no property."""

BLIND_EIGHTH: dict[str, WrongRule] = {
    # FSDP2 and replicate
    "waiting_gradient_counted_twice": WrongRule("a gradient that waits for its reduction in reduce_dtype waits in param_dtype too", "fsdp2", f"{PARAM}to_accumulated_grad_if_needed", "self._unsharded_param.grad = None", "pass", "pytorch 125191, pytorch 118298"),
    "middle_micro_batch_lost": WrongRule("each gradient that waits for its all-reduce replaces the one before", "fsdp2", f"{COLLECTIVES}foreach_reduce", "partial_reduce_output += reduce_output", "partial_reduce_output = reduce_output", "pytorch 126166, torchtitan 1929"),
    "first_of_group_not_cast": WrongRule("of modules that share a group, only the last to run returns output_dtype", "fsdp2", f"{FSDP2}_fsdp_state:_register_group_forward_hooks", "return cast_output_dtype(output)", "return output", "pytorch 180425, pytorch 180426"),
    "aborted_step_counts": WrongRule("reset_iter_state keeps what a given up step has not yet all-reduced", "fsdp2", f"{GROUP}_reset_iter_state", "self._partial_reduce_output = None", "pass", "composer 3866, torchtitan 3724"),
    # hooks of DistributedDataParallel
    "first_of_batch_for_all": WrongRule("PowerSGD gives all gradients of a shape the first one's approximation, in batches", "ddp", f"{HOOKS}powerSGD_hook:powerSGD_hook", "original_tensor.copy_(tensor[i])", "original_tensor.copy_(tensor[0])", "pytorch 75157, pytorch 74907"),
    "subgroup_not_used": WrongRule("post-local SGD averages over all ranks, not over its subgroup", "ddp", f"{HOOKS}post_localSGD_hook:post_localSGD_hook", "default._allreduce_fut(state.subgroup, input_tensor)", "default._allreduce_fut(global_group_to_use, input_tensor)", "pytorch 63277, pytorch 61206"),
    # tensor parallel
    "nested_source_is_rank_0": WrongRule("a plan for a layer of a layer ignores src_data_rank", "parallel", f"{TP}api:parallelize_module", "{leaf_path: parallelize_style},\n                        src_data_rank=src_data_rank,", "{leaf_path: parallelize_style},", "VeOmni 637, pytorch 143883"),
    "local_gradient_as_its_input": WrongRule("local_map ignores in_grad_placements", "parallel", "torch.distributed.tensor.experimental._func_map:_local_map_wrapped", "arg.to_local(grad_placements=spec)", "arg.to_local()", "pytorch 155181, pytorch 110629"),
    "custom_index_not_ignored": WrongRule("loss_parallel's gradient ignores the default ignore_index, not the one that is given", "parallel", f"{TP}loss:_nll_loss_and_log_softmax_backward", "torch.where(target != ignore_index, grad_output, 0)", "torch.where(target != -100, grad_output, 0)", "Paddle 28622, xla 896"),
    # optimizers and schedules
    "resumed_rate_decays_again": WrongRule("ExponentialLR decays the rate when it is made with a last_epoch", "training", f"{SCHEDULES}ExponentialLR.get_lr", "if self._is_initial:", "if self.last_epoch == 0:", "pytorch 102261, pytorch 149312"),
    "cooldown_counts_bad_epochs": WrongRule("ReduceLROnPlateau counts bad epochs in its cooldown", "training", f"{SCHEDULES}ReduceLROnPlateau.step", "self.num_bad_epochs = 0  # ignore any bad epochs in cooldown", "pass", "pytorch 7151, keras 3991"),
    "complex_gradient_squared": WrongRule("Adam squares a complex gradient as one number, foreach", "optimizer", f"{ADAM}_multi_tensor_adam", "if has_complex:", "if False:", "pytorch 59998, pytorch 69570"),
    "first_group_broadcast": WrongRule("ZeRO broadcasts parameters of the first group alone", "training", f"{ZERO}ZeroRedundancyOptimizer._broadcast_params_from_rank", "for param_group in param_groups:", "for param_group in param_groups[:1]:", "pytorch 72578, pytorch 71347"),
    # clipping and the scaler
    "whole_gradients_of_all_ranks": WrongRule("FSDP1's norm counts gradients that are not sharded once for each rank", "clipping", "torch.distributed.fsdp.fully_sharded_data_parallel:FullyShardedDataParallel.clip_grad_norm_", "dist.all_reduce(total_norm, group=self.process_group)\n        # All-reducing the local non-sharded norm would count it an extra\n        # world-size-many times\n        if local_nonsharded_norm is not None:\n            total_norm += local_nonsharded_norm**norm_type", "if local_nonsharded_norm is not None:\n            total_norm += local_nonsharded_norm**norm_type\n        dist.all_reduce(total_norm, group=self.process_group)", "pytorch 88955, hyper-parallel 526"),
    "good_steps_not_saved": WrongRule("a scaler saves the number of good steps that it began with", "training", f"{AMP}grad_scaler:GradScaler.state_dict", "self._get_growth_tracker()", "self._init_growth_tracker", "transformers 11663, ultralytics 22189"),
    # recomputation and pipelines
    "gradient_of_output_before": WrongRule("behind an output without gradient, reentrant recomputation takes the gradient of another output", "training", "torch.utils.checkpoint:CheckpointFunction.backward", "args_with_grad.append(args[i])", "args_with_grad.append(args[len(args_with_grad)])", "pytorch 45934, fairscale 787"),
    "inner_shards_not_reduced": WrongRule("a pipeline reduces gradients of a stage's own parameters, not of sharded modules in it", "training", f"{PIPELINES}stage:_PipelineStageBase.perform_reduce_grad", "fsdp_module.set_requires_gradient_sync(True)", "fsdp_module.set_requires_gradient_sync(True, recurse=False)", "PiPPy 1045, pytorch 124318"),
    # distributed checkpoint and state
    "gradients_lost_by_saving": WrongRule("making an optimizer's state replaces gradients that are there", "training", f"{STATE}state_dict:_init_optim_state", "if param.grad is not None:", "if False:", "pytorch 140898, composer 3226"),
    "shards_read_to_the_beginning": WrongRule("each saved shard is read to its place in its own file", "training", f"{STATE}default_planner:DefaultLoadPlanner.transform_tensor", "read_item.dest_offsets", "read_item.storage_offsets", "xla 7155, pytorch 76123"),
    "views_staged_as_their_base": WrongRule("a stager takes a view from the beginning of its storage", "training", f"{STATE}_state_dict_stager:StateDictStager._offload_tensor", "x.storage_offset()", "0", "pytorch 166025, pytorch 125635"),
    # differentiable collectives
    "gradient_stays_at_destination": WrongRule("the gradient of reduce is each rank's own, not the destination's", "training", "torch.distributed.nn.functional:_Reduce.backward", "_Broadcast.apply(ctx.src, ctx.group, grad_output)", "grad_output", "pytorch 40762, xla 2989"),
    "functional_sum_passes_its_own": WrongRule("the gradient of a functional all_reduce is each rank's own", "functional", f"{FUNCTIONAL}all_reduce_backward", "return wait_tensor(output), None, None", "wait_tensor(output)\n    return grad_output, None, None", "pytorch 168140, pytorch 150942"),
}  # fmt: skip
"""Planted by an eighth author, who had read no case and no property."""

FSDP1, DTENSOR = "torch.distributed.fsdp.", "torch.distributed.tensor."

BLIND_NINTH: dict[str, WrongRule] = {
    # FSDP2 and FSDP1
    "whole_numbers_cast": WrongRule("inputs of whole numbers are cast to param_dtype", "fsdp2", f"{FSDP2}_fsdp_common:_cast_fp_tensor", "or not torch.is_floating_point(x)", "", "DeepSpeed 5701, pytorch 153077"),
    "first_rank_written_back": WrongRule("summon_full_params writes rank 0's shard back on all ranks", "training", f"{FSDP1}_unshard_param_utils:_writeback_to_local_shard", "handle.rank,", "0,", "pytorch 83111, pytorch 93938"),
    "states_from_the_beginning": WrongRule("the state of a parameter that several ranks share is loaded from its beginning", "training", f"{FSDP1}_optim_utils:_shard_orig_param_state", "intra_param_start_idx : intra_param_end_idx  # type: ignore[operator]\n                + 1", ": intra_param_end_idx - intra_param_start_idx + 1", "transformers 25849, accelerate 1462"),
    # clipping, the scaler and autocast
    "largest_added_up": WrongRule("FSDP1's infinity norm is the sum of the ranks' largest gradients", "clipping", f"{FSDP1}fully_sharded_data_parallel:FullyShardedDataParallel.clip_grad_norm_", "total_norm, op=torch.distributed.ReduceOp.MAX, group=self.process_group", "total_norm, group=self.process_group", "pytorch 73405, torchrec 3199"),
    "good_steps_before_infinity": WrongRule("the sharded scaler goes on counting good steps after an infinity", "training", f"{FSDP1}sharded_grad_scaler:ShardedGradScaler._amp_update_scale_cpu_", "self._scale *= self._backoff_factor\n        self._growth_tracker.fill_(0)", "self._scale *= self._backoff_factor", "fairscale 831, pytorch 33366"),
    "autocast_in_custom_forward": WrongRule("custom_fwd casts the inputs but leaves autocast on", "training", f"{AMP}autocast_mode:custom_fwd", "enabled=False", "enabled=True", "pytorch 36171, pytorch 38487"),
    # DistributedDataParallel
    "statistics_not_converted": WrongRule("convert_sync_batchnorm forgets the running mean", "ddp", "torch.nn.modules.batchnorm:SyncBatchNorm.convert_sync_batchnorm.__func__", "module_output.running_mean = module.running_mean", "pass", "apex 380, pytorch-image-models 1317"),
    "columns_not_orthogonal": WrongRule("PowerSGD does not remove the first column from the others", "ddp", f"{HOOKS}powerSGD_hook:_orthogonalize_gram_schmidt", "rest -= torch.sum(col * rest, dim=1, keepdim=True) * col", "pass", "pytorch 72043, pytorch 48060"),
    # tensor parallel and DTensor
    "rows_of_others_not_masked": WrongRule("an embedding that is sharded by rows counts rows of other ranks if its output is sharded", "parallel", f"{DTENSOR}placement_types:_MaskPartial._reduce_shard_value", "self.mask_buffer.apply_mask(tensor)", "pass", "torchtitan 785, torchtitan 314"),
    "reduced_in_forward_dtype": WrongRule("the gradient of redistribute is reduced in forward_dtype", "parallel", f"{DTENSOR}_api:DTensor.redistribute", '"op_dtype": backward_dtype or input_dtype', '"op_dtype": backward_dtype or forward_dtype', "pytorch 182032, pytorch 179495"),
    "redistributed_and_dropped": WrongRule("local_map redistributes its inputs and goes on with the old ones", "parallel", f"{DTENSOR}experimental._func_map:_local_map_wrapped", "arg = arg.redistribute(placements=spec)", "arg.redistribute(placements=spec)", "pytorch 123676, Paddle 71804"),
    # optimizers
    "answer_of_hook_dropped": WrongRule("load_state_dict ignores what its pre-hooks return", "optimizer", "torch.optim.optimizer:Optimizer.load_state_dict", "state_dict = hook_result", "pass", "pytorch 105953, pytorch 75287"),
    "squares_lose_the_mean": WrongRule("centered RMSprop subtracts the mean from the stored squares, foreach", "optimizer", "torch.optim.rmsprop:_multi_tensor_rmsprop", "avg = torch._foreach_addcmul(\n                grouped_square_avgs, grouped_grad_avgs, grouped_grad_avgs, value=-1\n            )", "torch._foreach_addcmul_(\n                grouped_square_avgs, grouped_grad_avgs, grouped_grad_avgs, value=-1\n            )\n            avg = [each.clone() for each in grouped_square_avgs]", "pytorch 24170, pytorch 23807"),
    # recomputation and pipelines
    "random_numbers_again": WrongRule("recomputation sets the random numbers back for what follows", "training", "torch.utils.checkpoint:_checkpoint_without_reentrant_generator", "enabled=preserve_rng_state", "enabled=False", "pytorch 14253, xla 4690"),
    "never_trains_after_evaluation": WrongRule("a schedule runs no backward after eval", "training", f"{PIPELINES}schedules:_PipelineSchedule.eval", "self._has_backward = original_has_backward", "pass", "pytorch 162822, pytorch 157795"),
    "masks_of_first_rows": WrongRule("each micro-batch has the attention masks of the first rows", "training", f"{PIPELINES}microbatch:_split_block_mask", "batch_offset += kv_num_blocks_chunks[chunk_idx].size(0)", "pass", "torchtitan 1723, pytorch 188727"),
    # distributed checkpoint
    "files_of_one_name": WrongRule("a writer gives all files of a rank the same name", "training", f"{STATE}filesystem:_FileSystemWriter.write_data", "file_count += 1", "pass", "pytorch 155566, pytorch 94501"),
    "columns_joined_as_rows": WrongRule("shards of columns are consolidated as if they were rows", "training", f"{STATE}_consolidate_hf_safetensors:_calculate_max_contiguous_elements", "if sub_tensor_shape[-1] == tensor_shape[-1]:  # Full width", "if True:", "pytorch 159394, pytorch 156705"),
    # averages
    "average_starts_again": WrongRule("a resumed average begins with the present model", "training", "torch.optim.swa_utils:AveragedModel.__init__", '"n_averaged", torch.tensor(0, dtype=torch.long, device=device)', '"n_averaged", torch.tensor(0, dtype=torch.long, device=device), persistent=False', "anemoi-core 1373, pytorch-lightning 20545"),
    # collectives and context parallel
    "gradient_beside_the_source": WrongRule("a broadcast gives tensors that it replaces a gradient", "training", "torch.distributed.nn.functional:_Broadcast.backward", "gx.zero_()", "pass", "pytorch 190583, pytorch 130515"),
    "gathered_rows_in_order": WrongRule("tensors that are gathered along a later dim are viewed as if they were gathered along the first", "functional", "torch._utils:_maybe_view_chunk_cat", "math.prod(shape[1:gather_dim]) if gather_dim > 1 else 1", "1", "pytorch 169404, pytorch 194856"),
    "restored_as_rearranged": WrongRule("a sequence is restored by the indices that rearranged it", "training", f"{DTENSOR}experimental._context_parallel._load_balancer:_HeadTailLoadBalancer._generate_indices", "if restore:", "if False:", "pytorch 155442, pytorch 152261"),
}  # fmt: skip
"""Planted by a ninth author, who had read no case and no property."""

BLIND_TENTH: dict[str, WrongRule] = {
    # FSDP2
    "replicas_never_meet": WrongRule("HSDP all-reduces over the group of shards, not of replicas", "fsdp2", f"{GROUP}_all_reduce_process_group.fget", "return self.mesh_info.replicate_process_group", 'return getattr(self.mesh_info, "shard_process_group", self.mesh_info.replicate_process_group)', "pytorch 121569, VeOmni 862"),
    "never_all_reduced_again": WrongRule("after a backward without synchronization HSDP never all-reduces again", "fsdp2", f"{FSDP2}_fully_shard:FSDPModule.set_requires_gradient_sync", "fsdp_param_group.all_reduce_grads = requires_gradient_sync", "fsdp_param_group.all_reduce_grads &= requires_gradient_sync", "pytorch 126166, torchtitan 1929"),
    "own_factor_and_the_mean": WrongRule("replicas are averaged although a divide factor is set", "fsdp2", f"{FSDP2}_fsdp_collectives:_get_gradient_divide_factors", "return None, None, reduce_scatter_op, ReduceOp.SUM", "return None, None, reduce_scatter_op, ReduceOp.AVG", "pytorch 129286, pytorch 155903"),
    "outputs_in_a_dict": WrongRule("outputs in a dict are not cast to output_dtype", "fsdp2", "torch.distributed.utils:_apply_to_tensors", "return {key: apply(value) for key, value in x.items()}", "return x", "pytorch 153077, pytorch 90523"),
    # FSDP1
    "last_backward_replaces": WrongRule("a reduced gradient of FSDP1 replaces the gradient of an earlier backward", "training", f"{FSDP1}_runtime_utils:_accumulate_sharded_grad", "flat_param._saved_grad_shard += sharded_grad", "flat_param._saved_grad_shard = sharded_grad", "pytorch 73535, fairscale 752"),
    # DistributedDataParallel
    "errors_forgotten_by_resuming": WrongRule("a resumed PowerSGD has lost its errors and low-rank matrices", "ddp", f"{HOOKS}powerSGD_hook:PowerSGDState.__setstate__", "setattr(self, slot, value)", 'setattr(self, slot, {} if slot.endswith("_dict") else value)', "pytorch 75666, pytorch 79334"),
    "buffers_of_the_world": WrongRule("buffers are broadcast in the default group", "ddp", f"{DDP}DistributedDataParallel._distributed_broadcast_coalesced", "self.process_group, tensors", "dist.group.WORLD, tensors", "pytorch 53866, pytorch 53793"),
    "hook_of_replicate": WrongRule("replicate forgets its communication hooks", "ddp", "torch.distributed._composable.replicate:_ReplicateState.register_comm_hook", "self._ddp.register_comm_hook(*comm_args, **comm_kwargs)", "pass", "pytorch 96660, pytorch 109647"),
    # tensor parallel and DTensor
    "bias_once_for_each_rank": WrongRule("a replicated value becomes partial without being divided, so that a row-wise layer adds its bias once for each rank", "parallel", f"{DTENSOR}placement_types:Partial._partition_value", "return tensor / num_chunks", "return tensor", "nano-vllm 99, Paddle 35186"),
    "gradient_of_partial_divided": WrongRule("the gradient of a local tensor that is partial is partial too", "parallel", f"{DTENSOR}_api:_normalize_placements_for_grad", "normalized.append(Replicate())", "normalized.append(p)", "pytorch 115967, pytorch 173153"),
    "piece_by_first_axis": WrongRule("a tensor whose sharded dim changes is cut by the rank on the first axis of the mesh", "parallel", f"{DTENSOR}_collective_utils:shard_dim_alltoall", "mesh.get_local_rank(mesh_dim)", "mesh.get_local_rank(0)", "pytorch 124872, pytorch 131210"),
    "second_output_as_first": WrongRule("local_map gives all outputs the placements of the first", "parallel", f"{DTENSOR}experimental._func_map:_local_map_wrapped", "DTensor.from_local(out, device_mesh, spec, run_check=False)", "DTensor.from_local(out, device_mesh, out_placements_tuple[0], run_check=False)", "pytorch 123676, autoparallel 290"),
    # optimizers and schedules
    "states_in_order_of_ranks": WrongRule("ZeRO loads states in the order of the partition, rank by rank", "optimizer", f"{ZERO}ZeroRedundancyOptimizer._index_to_param.fget", 'chain.from_iterable(g["params"] for g in self.param_groups)', "self._param_to_rank", "xla 9224, pytorch 51601"),
    "epochs_from_zero": WrongRule("a schedule does not save the epoch", "training", f"{SCHEDULES}LRScheduler.state_dict", 'if key != "optimizer"', 'if key not in ("optimizer", "last_epoch")', "pytorch 3026, torchtune 2730"),
    # clipping and the scaler
    "norms_of_shards_added": WrongRule("norms of shards are added up without being squared", "clipping", f"{DTENSOR}_ops._math_ops:_NormPartial._reduce_value", "tensor = self._pre_reduce_transform(tensor)", "pass", "pytorch 126457, pytorch 149768"),
    "infinity_stays_at_its_rank": WrongRule("the sharded scaler reduces a copy of what it has found", "training", f"{FSDP1}sharded_grad_scaler:ShardedGradScaler.unscale_", "dist.all_reduce(found_inf, async_op=True", "dist.all_reduce(found_inf.clone(), async_op=True", "pytorch 115710, pytorch 76918"),
    # recomputation and pipelines
    "other_elements_dropped": WrongRule("reentrant recomputation draws new random numbers", "training", "torch.utils.checkpoint:CheckpointFunction.backward", "torch.set_rng_state(ctx.fwd_cpu_state)", "pass", "OLMo-core 828, PIDM 66"),
    "target_of_batch_before": WrongRule("a micro-batch is compared with the target of the one before", "training", f"{PIPELINES}schedules:_PipelineSchedule._maybe_compute_loss", "target_mbs[mb_index]", "target_mbs[len(self._internal_losses) - 1]", "PiPPy 1079, pytorch 126600"),
    "split_backward_from_ones": WrongRule("with a split backward each stage begins with a gradient of ones", "training", f"{PIPELINES}_backward:stage_backward_input", "torch.ones_like(stage_output) if output_grads is None else output_grads[i]", "torch.ones_like(stage_output)", "pytorch 132691, ColossalAI 6034"),
    # distributed checkpoint
    "first_shard_for_all": WrongRule("a sharded tensor is loaded from the beginning of the saved one on each rank", "training", f"{STATE}planner_helpers:_create_chunk_from_dtensor", "offsets=offsets", "offsets=torch.Size([0] * len(offsets))", "pytorch 161368, candle 143"),
    "slices_without_offset": WrongRule("shards of a safetensors file are read from its beginning", "training", f"{STATE}hf_storage:HuggingFaceStorageReader._process_read_request", "slice(offset, offset + length)", "slice(length)", "pytorch 154519, transformers 46717"),
    # averages
    "average_ends_at_frozen": WrongRule("models are averaged up to the first parameter without gradient of a group", "training", "torch.distributed.algorithms.model_averaging.utils:get_params_to_average", "if param_data.grad is not None:\n                    filtered_params.append(param_data)", "if param_data.grad is None:\n                    break\n                filtered_params.append(param_data)", "pytorch 74894, pytorch 60320"),
    # collectives
    "columns_scattered_as_viewed": WrongRule("reduce_scatter_single along a later dim cuts a view of the rows", "functional", f"{FUNCTIONAL}reduce_scatter_single", "self = _chunk_or_narrow_cat(self, group_size, narrow_dim=scatter_dim, cat_dim=0)", "self = self.reshape(_chunk_or_narrow_cat(self, group_size, narrow_dim=scatter_dim, cat_dim=0).shape)", "pytorch 178766, pytorch 169404"),
    "gradients_not_sent_back": WrongRule("the gradient of all_to_all is not sent back", "functional", "torch.distributed.nn.functional:_AlltoAll.backward", "_AlltoAll.apply(ctx.group, tensor_list, *grad_outputs)", "grad_outputs", "pytorch 68786, pytorch 68096"),
}  # fmt: skip
"""Planted by a tenth author, who had read no case and no property."""

BLIND_ELEVENTH: dict[str, WrongRule] = {
    # FSDP2
    "half_of_the_division": WrongRule("FSDP2 divides what it has reduced only if it has all-reduced it", "fsdp2", f"{COLLECTIVES}foreach_reduce", "_div_if_needed(reduce_output, postdivide_factor)", "if all_reduce_group is not None:\n            _div_if_needed(reduce_output, postdivide_factor)", "pytorch 125484, pytorch 80456"),
    "shard_by_rank_in_world": WrongRule("a rank takes the shard of its rank in the world, not in the group of shards", "fsdp2", f"{FSDP2}_fsdp_common:FSDPMeshInfo.__post_init__", "self.shard_process_group.rank()", "dist.get_rank() % self.shard_mesh_size", "pytorch 129229, pytorch 121569"),
    "dict_of_outputs_unseen": WrongRule("a backward from outputs in a dict is not noticed", "fsdp2", "torch.distributed.fsdp._common_utils:_collect_grad_tensors", "elif isinstance(output, dict):", "elif False:", "pytorch 153077, pytorch 80245"),
    # FSDP1
    "hybrid_over_shards": WrongRule("FSDP1's HYBRID_SHARD all-reduces over the ranks of the shards, not over the replicas", "training", "torch.distributed.fsdp._runtime_utils:_reduce_grad", "group=state._inter_node_pg", "group=state.process_group", "pytorch 89915, pytorch 102904"),
    "computed_and_reduced_in_one_dtype": WrongRule("FSDP1 reduces gradients in the dtype of the computation", "training", "torch.distributed.fsdp._runtime_utils:_post_backward_hook", "flat_param.grad.data = flat_param.grad.to(handle._reduce_dtype)", "pass", "pytorch 75024, pytorch 86512"),
    # DistributedDataParallel and averages
    "error_not_fed_back": WrongRule("PowerSGD keeps its error but does not add it to the next gradient", "ddp", f"{HOOKS}powerSGD_hook:powerSGD_hook", "input_tensor.add_(state.error_dict[bucket_index])", "pass", "pytorch 48670, pytorch 52541"),
    "mean_by_all_ranks": WrongRule("an average of models over a group is divided by the number of all ranks", "training", "torch.distributed.algorithms.model_averaging.utils:average_parameters", "dist.get_world_size(group_to_use)", "dist.get_world_size()", "pytorch 61207, pytorch 73285"),
    # tensor parallel and DTensor
    "softmax_of_own_columns": WrongRule("loss_parallel normalizes by each rank's own columns", "parallel", f"{TP}loss:_log_softmax", "shifted_sumexp = funcol.all_reduce(\n        shifted_sumexp, reduceOp=c10d.ReduceOp.SUM.name, group=(mesh, mesh_dim)\n    )", "pass", "pytorch 119877, Megatron-LM 7452"),
    "reduced_by_sum": WrongRule("a value that is partial by another reduction is summed", "clipping", "torch.distributed.tensor.placement_types:Partial._reduce_value", "reduceOp=self.reduce_op", 'reduceOp="sum"', "pytorch 126457, pytorch 149768"),
    "replicated_from_rank_0": WrongRule("replicas come from rank 0 although src_data_rank names another", "parallel", "torch.distributed.tensor.placement_types:Replicate._make_replicate_tensor.__func__", "mesh_dim=mesh_dim, group_src=src_data_rank", "mesh_dim=mesh_dim", "pytorch 143883, pytorch 144005"),
    # optimizers and schedules
    "fused_decay_coupled": WrongRule("AdamW decays as Adam does, fused", "optimizer", f"{ADAM}_fused_adam", "torch._fused_adam_ if not decoupled_weight_decay else torch._fused_adamw_", "torch._fused_adam_", "pytorch 88015, pytorch 145851"),
    "nesterov_until_resumed": WrongRule("SGD forgets nesterov when it loads a state", "optimizer", f"{SGD}SGD.__setstate__", 'group.setdefault("nesterov", False)', 'group["nesterov"] = False', "pytorch 2830, pytorch 80809"),
    "gradients_for_steps": WrongRule("Adadelta accumulates gradients in place of its steps, foreach", "optimizer", "torch.optim.adadelta:_multi_tensor_adadelta", "device_acc_deltas, deltas, deltas, value=1 - rho", "device_acc_deltas, device_grads, device_grads, value=1 - rho", "pytorch 69980, pytorch 48223"),
    "decayed_without_rate": WrongRule("NAdam's decoupled decay does not depend on the rate, foreach", "optimizer", "torch.optim.nadam:_multi_tensor_nadam", "torch._foreach_mul_(grouped_params, 1 - lr * weight_decay)", "torch._foreach_mul_(grouped_params, 1 - weight_decay)", "pytorch 103881, pytorch 107706"),
    "callable_begins_again": WrongRule("LambdaLR does not load the state of a callable object", "training", f"{SCHEDULES}LambdaLR.load_state_dict", "self.lr_lambdas[idx].__dict__.update(fn)", "pass", "pytorch 9927, pytorch 32756"),
    # recomputation
    "gradients_end_at_checkpoint": WrongRule("reentrant recomputation returns the gradients of its inputs, not of their copies", "training", "torch.utils.checkpoint:CheckpointFunction.backward", "for inp in detached_inputs", "for inp in inputs", "pytorch 45934, fairscale 787"),
    "keywords_from_the_front": WrongRule("checkpoint_wrapper gives the first arguments for the keyword arguments", "training", "torch.distributed.utils:_unpack_kwargs", "flat_args[-len(kwarg_keys) :]", "flat_args[: len(kwarg_keys)]", "pytorch 84907, fairscale 426"),
    # pipelines
    "second_step_not_reduced": WrongRule("a schedule of several stages reduces gradients of DDP stages in its first step alone", "training", f"{PIPELINES}schedules:_PipelineScheduleRuntime._step_microbatches", "self.backward_counter.clear()", "pass", "pytorch 144352, PiPPy 828"),
    "sum_of_micro_batches": WrongRule("GPipe ignores scale_grads=True", "training", f"{PIPELINES}schedules:ScheduleGPipe._step_microbatches", "self._n_microbatches if self.scale_grads else 1", "1", "pytorch 144352, torchtitan 1732"),
    # distributed checkpoint
    "converted_to_float32": WrongRule("a checkpoint that is converted to torch.save is read in the default dtype", "training", f"{STATE}default_planner:_EmptyStateDictLoadPlanner.set_up_planner", "torch.empty(v.size, dtype=v.properties.dtype)", "torch.empty(v.size)", "pytorch 119814, pytorch 122385"),
    "loaded_into_a_copy": WrongRule("values that are no tensors are not loaded at the top of the state", "training", f"{STATE}state_dict_loader:load", "state_dict[key] = stateful_sd[key]", "pass", "pytorch 125528, pytorch 118081"),
    "own_options_kept": WrongRule("options of groups are not loaded from a whole state that each rank has", "training", "torch.distributed._state_dict_utils:_distribute_state_dict", "local_state_dict[key] = value\n", "pass\n", "pytorch 126950, pytorch 143828"),
    # context parallel and collectives
    "all_along_first_dim": WrongRule("context_parallel shards all buffers along the first one's dim of the sequence", "training", "torch.distributed.tensor.experimental._context_parallel._attention:_context_parallel_buffers", "buffer, mesh, [Shard(seq_dim)]", "buffer, mesh, [Shard(buffer_seq_dims[0])]", "pytorch 131351, torchtitan 592"),
    "own_gradient_for_all_parts": WrongRule("the gradient of reduce_scatter is each rank's own", "functional", "torch.distributed.nn.functional:_Reduce_Scatter.backward", "_AllGather.apply(ctx.group, grad_output)", "(grad_output,) * dist.get_world_size(ctx.group)", "pytorch 40762, pytorch 58005"),
}  # fmt: skip
"""Planted by an eleventh author, who had read no case."""

WRONG = (
    FIRST
    | LATER
    | BLIND
    | BLIND_AGAIN
    | BLIND_THIRD
    | OF_OPTIONS
    | BLIND_FOURTH
    | BLIND_FIFTH
    | BLIND_SIXTH
    | BLIND_SEVENTH
    | BLIND_EIGHTH
    | BLIND_NINTH
    | BLIND_TENTH
    | BLIND_ELEVENTH
)

OF_OPTIMIZERS = ("ddp_mlp", "fsdp2_mlp", "sequence_parallel_mlp_trains", "token_mean_step", "every_optimizer")
PROPERTIES: dict[str, tuple[str, ...]] = {
    "optimizer": OF_OPTIMIZERS,
    "clipping": (*OF_OPTIMIZERS, "hsdp_mlp", "norm_of_one_mesh_by_largest", "norm_of_one_mesh_by_sum", "norm_of_groups_by_root", "scaled_step", "flat_sharded_step_by_largest"),
    "ddp": (
        "ddp_mlp", "data_parallel_block", "data_parallel_block_by_hook", "joined_step", "unsynchronized_step", "ddp_tp_mlp",
        "data_parallel_block_by_own_copies", "data_parallel_block_of_outputs", "composable_data_parallel_block",
    ),
    "functional": ("collectives", "differentiable_collectives", "prepared_module"),
    "fsdp2": (
        "fsdp2_mlp", "fsdp2_mixed_mlp", "fsdp2_tp_mlp", "hsdp_mlp", "fully_sharded_block", "fully_sharded_block_by_layers",
        "fully_sharded_sequence_parallel_block", "token_mean_step", "resumed_step", "fully_sharded_block_by_switches", "fully_sharded_block_with_casts", "fully_sharded_sequence_parallel_block_from_state",
        "fully_sharded_block_by_calls", "fully_sharded_block_with_unused_layer", "fully_sharded_blocks_in_one_context", "fully_sharded_block_on_named_axes", "replicated_block_by_layers",
    ),
    "parallel": (
        "colwise_linear", "colwise_embedding", "sequence_parallel_mlp", "sequence_parallel_mlp_trains", "fsdp2_tp_mlp",
        "dtensor_cross_entropy", "parallel_cross_entropy", "gated_block", "attention_block", "sequence_parallel_block", "prepared_pair",
        "rowwise_embedding", "rows_by_local_functions", "redistribute",
    ),
    "training": (
        "averaged_block", "differentiable_collectives", "local_sgd_block", "flat_sharded_block", "flat_sharded_step", "attention_block_by_tokens",
        "ddp_mlp", "fsdp2_mlp", "fsdp2_mixed_mlp", "fsdp2_tp_mlp", "hsdp_mlp", "sequence_parallel_mlp_trains",
        "data_parallel_block", "data_parallel_block_by_hook", "fully_sharded_block", "fully_sharded_block_by_layers",
        "fully_sharded_block_from_rank_0", "token_mean_step", "joined_step", "resumed_step",
        "norm_of_one_mesh_by_largest", "norm_of_groups_by_root", "scaled_step", "every_optimizer", "zero_redundancy", "pipelined_step", "checkpoint", "parallel_dropout", "fully_sharded_sequence_parallel_block", "fully_sharded_block_with_casts", "sharded_pipelined_step", "replicated_pipelined_step", "fully_sharded_sequence_parallel_block_from_state",
    ),
}  # fmt: skip
"""Shipped properties whose subjects call that part of torch."""


@contextmanager
def planted(rule: WrongRule) -> Iterator[None]:
    """Changes the code of torch's function, which every module has by reference."""
    with edited_source(_found(rule.function), rule.right, rule.wrong):
        yield


@contextmanager
def edited_source(function: Any, right: str, wrong: str) -> Iterator[None]:
    """Replaces a text in the source of a function."""
    function = inspect.unwrap(function)
    assert isinstance(function, FunctionType)
    before, function.__code__ = function.__code__, _code_with(function, right, wrong)
    try:
        yield
    finally:
        function.__code__ = before


def _code_with(function: FunctionType, right: str, wrong: str) -> CodeType:
    source = textwrap.dedent(inspect.getsource(function))
    source = source[source.index("def ") :]  # a decorator might register the function once more
    assert right in source, f"{function.__qualname__} of this release of torch has no {right!r}"
    names: dict[str, Any] = {}
    source, outer = source.replace(right, wrong), function.__code__.co_freevars
    if outer:  # such as __class__, for super()
        source = f"def make({', '.join(outer)}):\n{textwrap.indent(source, ' ')}\n return {function.__name__}"
    exec(compile(source, function.__qualname__, "exec"), function.__globals__, names)
    made = names["make"](*outer) if outer else names[function.__name__]
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
