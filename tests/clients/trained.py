"""Steps of training as transformers' Trainer and accelerate run them: one update from several micro-batches.

The contract is the mean over all tokens that count, of all micro-batches and ranks: TrainingArguments'
average_tokens_across_devices, and accelerate's guide to gradient accumulation with causal language models.

Source: transformers 5.23.0, trainer.py, _run_epoch, training_step, compute_loss and get_batch_samples;
accelerate 1.15.0, accelerator.py, accumulate and backward.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR
from transformers import Trainer, TrainerCallback, TrainingArguments

from equivtest import NotSupported

MAX_NORM = 0.5
SMOOTHING = 0.125
IGNORED = -100

Tensors = dict[str, torch.Tensor]


class NextToken(nn.Module):
    """Logits of a token from the token before; a loss that Trainer's smoother computes again."""

    def __init__(self, smoothing: float = 0.0, auxiliary: float = 0.0) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(8, 6), nn.Linear(6, 8)
        self.smoothing, self.config = smoothing, None  # Trainer reads the config if it smooths
        self.auxiliary = auxiliary

    def forward(
        self,
        input_ids: torch.Tensor,
        labels: torch.Tensor | None = None,
        num_items_in_batch: Any = None,
        **loss_kwargs: Any,
    ) -> Tensors:
        logits = self.head(torch.tanh(self.embedding(input_ids)))
        if labels is None:
            return {"logits": logits}
        reduction = "mean" if num_items_in_batch is None else "sum"
        loss = functional.cross_entropy(
            logits.flatten(0, -2), labels.flatten(), reduction=reduction, label_smoothing=self.smoothing
        )
        loss = loss / (1 if num_items_in_batch is None else num_items_in_batch)
        if self.auxiliary:  # over all tokens that it sees, as mixtures of experts balance their routers
            loss = loss + self.auxiliary * logits.square().mean()
        return {"loss": loss, "logits": logits}


def plain() -> nn.Module:
    return NextToken()


def balanced() -> nn.Module:
    return NextToken(auxiliary=0.125)


def smoothed() -> nn.Module:
    return NextToken(SMOOTHING)


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.05)


def handed_over(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Returns the module unchanged, because the trainer wraps it."""
    return module


def forget() -> None:
    """Objects of accelerate share one state in a process; the next begin anew."""
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


class OneStep(Trainer):
    """A rank's own micro-batches, as they are."""

    def __init__(self, micro_batches: list[Tensors], **arguments: Any) -> None:
        self.micro_batches = micro_batches
        self.losses: list[torch.Tensor] = []
        self.logged: list[dict[str, float]] = []
        super().__init__(**arguments)

    def get_train_dataloader(self) -> Any:
        return self.micro_batches

    def training_step(self, *given: Any, **named: Any) -> torch.Tensor:
        self.losses.append(super().training_step(*given, **named))
        return self.losses[-1]

    def log(self, logs: dict[str, float], *_: Any, **__: Any) -> None:
        self.logged.append(logs)


class Kept(TrainerCallback):
    """The gradients by which Trainer updates, which it forgets then."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.gradients: list[torch.Tensor] = []

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.gradients = [each.grad.clone() for each in self.model.parameters() if each.grad is not None]


def by_trainer(
    model: nn.Module,
    mesh: DeviceMesh,
    micro_batches: list[Tensors],
    optimizer: torch.optim.Optimizer,
    trainer_class: Any = None,
    **settings: Any,
) -> Tensors:
    """Runs one update of `Trainer.train`, under DistributedDataParallel if there is more than one rank.

    Args:
        trainer_class: A trainer that receives the optimizer by that name; by default `OneStep`, as Trainer takes it.
    """
    forget()
    kept = Kept(model)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            max_steps=1,
            gradient_accumulation_steps=len(micro_batches),
            max_grad_norm=MAX_NORM,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            **settings,
        )
        handed: dict[str, Any] = {"optimizer": optimizer}
        if trainer_class is None:
            handed = {"optimizers": (optimizer, LambdaLR(optimizer, lambda _: 1.0))}
        trainer = (trainer_class or OneStep)(
            micro_batches=micro_batches, model=model, args=arguments, callbacks=[kept], **handed
        )
        trainer.train()
    for parameter, gradient in zip(model.parameters(), kept.gradients, strict=True):
        parameter.grad = gradient
    loss = torch.stack(trainer.losses).sum()  # which the log has in float32, averaged over the ranks
    distributed.all_reduce(loss, group=mesh.get_group())
    return {"loss": loss / mesh.size(), "total_norm": torch.tensor(trainer.logged[0]["grad_norm"], dtype=loss.dtype)}


def trainer_step(model: nn.Module, mesh: DeviceMesh, micro_batches: Any, optimizer: Any) -> Tensors:
    return by_trainer(model, mesh, micro_batches, optimizer)


def smoothing_trainer_step(model: nn.Module, mesh: DeviceMesh, micro_batches: Any, optimizer: Any) -> Tensors:
    """Declines float64, because LabelSmoother in transformers/trainer_pt_utils.py adds in float32 (5.23.0)."""
    if next(model.parameters()).dtype == torch.float64:
        raise NotSupported("the smoother adds up in float32, which rounds more than float64")
    return by_trainer(model, mesh, micro_batches, optimizer, label_smoothing_factor=SMOOTHING)


def accelerated_step(model: nn.Module, mesh: DeviceMesh, micro_batches: Any, optimizer: Any) -> Tensors:
    """Accumulates the gradients of a causal language model as in accelerate's guide."""
    forget()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=len(micro_batches))
    wrapped, prepared = accelerator.prepare_model(model), accelerator.prepare_optimizer(optimizer)
    return accumulated(accelerator, wrapped, prepared, mesh, micro_batches)


def accumulated(accelerator: Any, wrapped: Any, optimizer: Any, mesh: DeviceMesh, micro_batches: Any) -> Tensors:
    """One update by what accelerate has prepared, and the mean over all tokens that count."""
    own = torch.stack([(each["labels"] != IGNORED).sum() for each in micro_batches]).sum()
    num_tokens = accelerator.gather(own[None]).sum()
    optimizer.zero_grad()
    total = torch.zeros(())
    for each in micro_batches:
        with accelerator.accumulate(wrapped):
            loss = wrapped(**each, num_items_in_batch=num_tokens)["loss"]
            accelerator.backward(loss * accelerator.num_processes * len(micro_batches))
            total = total.to(loss.dtype) + loss.detach()
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(wrapped.parameters(), MAX_NORM)
            optimizer.step()
    distributed.all_reduce(total, group=mesh.get_group())
    return {"loss": total, "total_norm": norm.full_tensor() if isinstance(norm, DTensor) else norm}
