"""Divides a chain of layers into the stages of a pipeline, and trains it by a schedule of torch.

Source: PipelineStage and the schedules in torch/distributed/pipelining (2.13.0).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint_sequential

from equivtest.programs.examples.pipeline import Chain

NUM_MICRO_BATCHES = 8
"""The largest number of micro-batches. A batch with fewer rows has a micro-batch for each row."""
ONE_STAGE = ("GPipe", "1F1B")
"""Schedules in which each rank has one stage. In all other schedules each rank has two stages."""
BACK_AND_FORTH = ("ZBVZeroBubble", "DualPipeV")
"""Schedules in which the first rank has the first stage and the last stage."""
SPLIT = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
"""Schedules that compute gradients of weights after the gradients of inputs."""
IN_ORDER = ("LoopedBFS", "Interleaved1F1B")
"""Schedules in which ranks receive in the order of the sends, also with `defer_pp_recv`. With `defer_pp_recv` in other
schedules, a rank takes an activation for a gradient (finding 155)."""


class Stage(nn.Module):
    """Layers that run one after the other.

    The outputs and the gradients of the inputs are contiguous, because no rank sends a tensor that is not. If a stage
    takes the keyword `addend`, it adds this tensor to the input of each layer.

    Attributes:
        passes: What a stage passes to the next, see `PASSED`.
        is_last: True if the output is whole.
        num_segments: Number of segments that the backward recomputes, or 0. It need not divide the number of layers.
    """

    def __init__(self, layers: list[nn.Module], *, passes: str, is_last: bool) -> None:
        super().__init__()
        self.layers, self.num_segments = nn.ModuleList(layers), 0
        self.passes, self.is_last = passes, is_last

    def forward(self, *given: torch.Tensor, addend: torch.Tensor | None = None) -> Any:
        for each in given:
            if each.requires_grad:
                each.register_hook(torch.Tensor.contiguous)  # type: ignore[no-untyped-call]
        x = torch.cat(given[:2], dim=-1) if self.passes == "halves" and len(given) > 1 else given[0]
        if self.passes == "addend":
            addend = given[1]
        if self.num_segments:
            recomputed: Any = checkpoint_sequential
            x = recomputed(list(self.layers), self.num_segments, x, use_reentrant=False)
        else:
            for layer in self.layers:
                x = layer(x if addend is None else x + addend)
        return x.contiguous() if self.is_last else passed(self.passes, x, addend)


PASSED = ("", "halves", "addend")
"""A stage passes its output to the next stage, or two halves of the output, or the output and `addend`.

After two halves it passes the whole output, which the next stage does not use.
"""


def passed(passes: str, x: torch.Tensor, addend: Any) -> Any:
    if passes == "halves":
        # Copies, because a split backward raises if a stage returns a view (finding 165).
        parts = (*x.tensor_split(2, dim=-1), x)
        return tuple(part.clone(memory_format=torch.contiguous_format) for part in parts)
    return (x.contiguous(), addend.contiguous()) if passes else x.contiguous()


def require_masks_of_rows() -> None:
    """Raises an AssertionError if a micro-batch of one row does not have the attention mask of this row."""
    from torch.distributed.pipelining.microbatch import split_args_kwargs_into_chunks  # imports dynamo
    from torch.nn.attention.flex_attention import create_block_mask  # imports dynamo

    own = torch.tensor([3, 5])
    mask = create_block_mask(lambda row, head, query, key: key == own[row], 2, None, 1, 8, device="cpu")
    _, chunks = split_args_kwargs_into_chunks((), {"mask": mask}, chunks=2)
    zero, keys = torch.tensor(0), torch.arange(8)
    seen = [int(keys[each["mask"].mask_mod(zero, zero, zero, keys)]) for each in chunks]
    if seen != own.tolist():
        raise AssertionError(f"the rows of micro-batches see the keys {seen}, expected {own.tolist()}")


class Pipeline(nn.Module):
    """The layers of a chain that one rank has.

    Attributes:
        layers: The layers of this rank, by their number in the chain.
        stages: The stages of this rank, by the number of the stage.
        takes_mean: True if the loss of the batch is the mean of the losses of the micro-batches.
        infers: True if the stages infer the shapes of tensors that they receive, False if the shapes are given.
        counts: True if the loss function takes the number of rows of the batch, and divides by it. Then the losses of
            the micro-batches are added up.
        dim: The dim of the rows in tensors between stages, and in the keyword of the stages.
        evaluates: True if the schedule also evaluates the batch, without a backward, before each step. Then the step
            returns the output of the evaluation, and the schedule drops the output of the training
            (return_outputs=False). A schedule of `BACK_AND_FORTH` raises if it evaluates (finding 141).
        defers: True if ranks receive as late as they can (defer_pp_recv). Only a schedule of `IN_ORDER` defers.
        passes: What a stage passes to the next, see `PASSED`.
        adds_weights: True if each stage takes the weights as a keyword, on every rank. If stages pass them as 'addend',
            only the first stage takes them.
        losses: The losses of the micro-batches of the last step. Each step passes the same list, which the schedule
            clears.
        schedule: Made in the first step.
    """

    def __init__(
        self,
        chain: Chain,
        mesh: DeviceMesh,
        schedule: str,
        *,
        infers: bool,
        counts: bool = False,
        dim: int = 0,
        evaluates: bool = False,
        defers: bool = False,
        passes: str = "",
    ) -> None:
        super().__init__()
        self.mesh, self.name, self.infers, self.counts, self.dim = mesh, schedule, infers, counts, dim
        self.evaluates = evaluates and schedule not in BACK_AND_FORTH
        self.defers = defers and schedule in IN_ORDER
        self.whole_loss, self.takes_mean = chain.loss, chain.takes_mean and not counts
        self.adds_weights, self.passes = chain.adds_weights and passes != "addend", passes
        self.losses: list[torch.Tensor] = []
        self.layers = nn.ModuleDict()
        self.stages: dict[int, Any] = {}
        self.schedule: Any = None
        rank, num_ranks = mesh.get_local_rank(), mesh.size()
        numbers = stages_of(rank, num_ranks, schedule)
        self.num_stages = num_ranks * len(numbers)
        for number in numbers:
            own = torch.arange(len(chain.layers)).tensor_split(self.num_stages)[number].tolist()
            layers, is_last = [chain.layers[layer] for layer in own], number == self.num_stages - 1
            self.stages[number] = Stage(layers, passes=passes, is_last=is_last)
            self.layers.update({str(layer): chain.layers[layer] for layer in own})

    @property
    def is_first(self) -> bool:
        return 0 in self.stages

    @property
    def is_last(self) -> bool:
        return self.num_stages - 1 in self.stages

    @property
    def last(self) -> int:
        """The rank that has the last stage."""
        return 0 if self.name in BACK_AND_FORTH else self.mesh.size() - 1

    def loss(self, output: torch.Tensor, weights: torch.Tensor, **counts: int) -> torch.Tensor:
        return self.whole_loss(output.movedim(self.dim, 0), weights, **counts)

    def make_schedule(self, batch: torch.Tensor) -> Any:
        """Returns a schedule for batches of the same shape."""
        from torch.distributed.pipelining import microbatch, schedules  # imports dynamo, so only ranks import it

        require_masks_of_rows()
        num = min(NUM_MICRO_BATCHES, batch.size(self.dim))
        row = batch.detach().chunk(num, self.dim)[0]
        stages = [self.make_stage(number, stage, row) for number, stage in self.stages.items()]
        kind: Any = schedules.get_schedule_class(self.name)
        own = stages[0] if self.name in ONE_STAGE else stages
        rows = microbatch.TensorChunkSpec.from_tuple((self.dim,))
        inputs = rows * 2 if self.passes == "addend" else rows
        specs: dict[str, Any] = {"args_chunk_spec": inputs, "output_merge_spec": rows} if self.dim else {}
        if self.dim and self.adds_weights:
            specs["kwargs_chunk_spec"] = microbatch.TensorChunkSpec.from_dict({"addend": self.dim})
        if self.defers:
            specs["defer_pp_recv"] = True
        return kind(own, num, loss_fn=self.loss, scale_grads=self.takes_mean, **specs)

    def make_stage(self, number: int, stage: Any, row: torch.Tensor) -> Any:
        from torch.distributed.pipelining import PipelineStage

        given: dict[str, Any] = {"group": self.mesh.get_group()}
        if not self.infers:
            whole = row.clone(memory_format=torch.contiguous_format).requires_grad_()
            hidden, first = passed(self.passes, whole, row), (row, row) if self.passes == "addend" else row
            is_last = number == self.num_stages - 1
            given |= {"input_args": hidden if number else first, "output_args": whole if is_last else hidden}
        return PipelineStage(stage, number, self.num_stages, row.device, **given)


def stages_of(rank: int, num_ranks: int, schedule: str) -> tuple[int, ...]:
    """Returns the numbers of the rank's stages."""
    if schedule in ONE_STAGE:
        return (rank,)
    return (rank, 2 * num_ranks - 1 - rank) if schedule in BACK_AND_FORTH else (rank, num_ranks + rank)


def pipelined(chain: Chain, mesh: DeviceMesh, *, schedule: str, infers: bool, evaluates: bool = False) -> nn.Module:
    """Divides the chain. If exactly one of `infers` and `evaluates` is True, stages pass two tensors."""
    passes = "halves" if infers != evaluates else ""
    return Pipeline(chain, mesh, schedule, infers=infers, evaluates=evaluates, passes=passes)


def sharded_pipelined(
    chain: Chain, mesh: DeviceMesh, *, schedule: str, counts: bool, dim: int, data: str = "stages"
) -> nn.Module:
    """Divides the chain along the axis 'pp' of the mesh, and applies FSDP2 to each stage along 'dp'.

    Args:
        data: What the ranks along 'dp' have. If 'stages' or 'recomputed', they shard each stage as a whole. If
            'recomputed', the backward recomputes each stage in up to three segments. If 'layers', they shard the first
            layer of each stage alone, and then the rest of the stage. A layer is gathered until the end of the backward
            if the schedule splits the backward (finding 173). If 'replicas', each rank has whole stages.
    """
    pipeline = Pipeline(chain, mesh["pp"], schedule, infers=False, counts=counts, dim=dim)
    return with_sharded_stages(pipeline, mesh, data=data)


def with_sharded_stages(pipeline: Pipeline, mesh: DeviceMesh, *, data: str) -> Pipeline:
    shard: Any = replicate if data == "replicas" else fully_shard
    for stage in pipeline.stages.values():
        stage.num_segments = min(3, len(stage.layers)) if data == "recomputed" else 0
        if data == "layers":
            fully_shard(stage.layers[0], mesh=mesh["dp"], reshard_after_forward=pipeline.name not in SPLIT)
        shard(stage, mesh=mesh["dp"])
    return pipeline


def replicated_pipelined(chain: Chain, mesh: DeviceMesh, *, schedule: str, receives: str, dim: int) -> nn.Module:
    """Divides the chain along the axis 'pp' of the mesh, and wraps each stage in DistributedDataParallel along 'dp'.

    Args:
        receives: If 'late', ranks receive as late as they can. If 'inferred', stages infer the shapes that they
            receive, if `infers_beside_ddp` is True. Weights that the chain adds are then no keyword, but pass from
            stage to stage.
    """
    inferred = receives == "inferred"
    infers = inferred and infers_beside_ddp(schedule, mesh["pp"].size())
    passes = "addend" if inferred and chain.adds_weights else ""
    how: dict[str, Any] = {"infers": infers, "defers": receives == "late", "passes": passes}
    pipeline = Pipeline(chain, mesh["pp"], schedule, dim=dim, **how)
    for number, stage in pipeline.stages.items():
        pipeline.stages[number] = DistributedDataParallel(stage, process_group=mesh.get_group("dp"))
    return pipeline


def infers_beside_ddp(schedule: str, num_ranks: int) -> bool:
    """Returns True if each stage runs a backward before its last forward, in a batch of `NUM_MICRO_BATCHES`.

    Otherwise the second step raises if DistributedDataParallel replicates stages that infer shapes (finding 156).
    """
    least = {"1F1B": num_ranks + 1, "Interleaved1F1B": 3 * num_ranks}
    return schedule in least and least[schedule] <= NUM_MICRO_BATCHES


def scheduled(
    module: Any, mesh: DeviceMesh, micro_batches: Any, optimizer: torch.optim.Optimizer
) -> dict[str, torch.Tensor]:
    """Runs one step of training by the schedule, which cuts the batch into micro-batches.

    The schedule runs twice before the update, each time on half of the rows, unless it divides the gradients. If it
    did, the second run would divide the gradients of the first run again (finding 164).
    """
    (batch,) = micro_batches
    optimizer.zero_grad()
    calls = zip(*(each.chunk(1 if module.takes_mean else 2) for each in batch.values()), strict=True)
    ran = [called(module, dict(zip(batch, rows, strict=True)), len(batch["x"])) for rows in calls]
    optimizer.step()
    losses, outputs = zip(*ran, strict=True)
    results = {"loss": torch.stack(losses).sum(), "output": torch.cat(outputs)}
    for result in results.values():
        distributed.broadcast(result, group=module.mesh.get_group(), group_src=module.last)
    return results


def called(module: Any, batch: dict[str, torch.Tensor], num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs the schedule once on some of `num_rows` rows. Returns (loss, output), which only one rank has."""
    x = batch["x"].movedim(0, module.dim)
    module.schedule = module.schedule or module.make_schedule(x)
    addend = batch["weights"].movedim(0, module.dim)
    inputs = ((x, addend) if module.passes == "addend" else (x,)) if module.is_first else ()
    named: dict[str, Any] = {"target": batch["weights"], "losses": module.losses} if module.is_last else {}
    if module.counts:
        named["loss_kwargs"] = {"num_rows": num_rows}
    if module.adds_weights:
        named["addend"] = addend
    evaluated = module.schedule.eval(*inputs, **named) if module.evaluates else None
    trained = module.schedule.step(*inputs, **named, return_outputs=not module.evaluates)
    if not module.is_last:
        return x.new_zeros(()), torch.zeros_like(batch["x"])
    merged = evaluated if module.evaluates else trained
    (output,) = merged if isinstance(merged, tuple) else (merged,)
    loss = torch.stack(module.losses)
    total = loss.mean() if module.takes_mean else loss.sum()
    return total.detach(), output.detach().movedim(module.dim, 0).contiguous()


def sharded_scheduled(
    module: Any, mesh: DeviceMesh, micro_batches: Any, optimizer: torch.optim.Optimizer
) -> dict[str, torch.Tensor]:
    """Runs one step on this rank's rows, and averages the loss over the ranks of 'dp'."""
    results = scheduled(module, mesh, micro_batches, optimizer)
    distributed.all_reduce(results["loss"], group=mesh.get_group("dp"))
    return {**results, "loss": results["loss"] / mesh["dp"].size()}
