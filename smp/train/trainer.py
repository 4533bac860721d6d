"""The training loop: steps, validation, checkpoints, and the final model."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from smp.checkpoint.hf_export import export_hf
from smp.checkpoint.manifest import Manifest
from smp.checkpoint.saver import Saver
from smp.data.data_pipeline import StepBatch
from smp.faults.guard import Guard
from smp.faults.nonfinite import nonfinite_gradients, spread_nonfinite
from smp.log import get_logger
from smp.loss import IGNORE_INDEX, count_valid_tokens
from smp.memory.tracker import MemoryTracker, memory_stats
from smp.mesh import Mesh
from smp.parallel.attention import document_lengths
from smp.parallel.grad_norm import clip_grad_norm_
from smp.parallel.loss import model_loss_sum
from smp.parallel.sharding import reshard, set_gradient_sync
from smp.runtime import release_cache
from smp.train.lr_schedule import set_lr
from smp.train.metrics import MetricsLogger, NullMetricsLogger
from smp.train.report import (
    describe,
    draw_curves,
    log_collectives,
    log_next_commands,
    profile_step,
)
from smp.train.run_plan import RunPlan
from smp.train.start import Start
from smp.train.state import TrainState
from smp.train.stopwatch import Stopwatch

logger = get_logger("train")


@dataclasses.dataclass
class Trainer:
    """The built parts of a run, handed to the loop."""

    plan: RunPlan
    start: Start
    model: nn.Module
    optimizer: torch.optim.Optimizer
    state: TrainState
    metrics: MetricsLogger | NullMetricsLogger
    memory: MemoryTracker
    mesh: Mesh
    saver: Saver
    guard: Guard
    val_loss: float | None = None  # of the current step, if it was validated


def train(trainer: Trainer) -> int:
    """Run the training loop; returns the exit status: 0, or that of a request to stop."""
    plan, start, state, config = trainer.plan, trainer.start, trainer.state, trainer.plan.config
    if state.step >= start.max_steps:
        logger.info("Already at step %d of %d: raise --max_steps to train on.", state.step, start.max_steps)
        return 0
    batches = iter(plan.train_data)
    watch, guard = Stopwatch(state.step), trainer.guard
    while state.step < start.max_steps:
        if config.run.profile_nsys and state.step == start.progress.step + 2:
            torch.cuda.profiler.start()
        # As in SMP v2: later steps would repeat the first ones.
        early = state.step < start.progress.step + 5
        lr = set_lr(trainer.optimizer, config.lr, state.step, max_steps=start.max_steps)
        record = functools.partial(trainer.memory.record, step=state.step) if early else _nothing
        guard.enter("data", state.step + 1)
        batch = next(batches)
        with profile_step(plan, start, trainer.model, trainer.optimizer, step=state.step, record=record) as mark:
            result = train_step(
                trainer.model,
                trainer.optimizer,
                batch,
                device=plan.device,
                grad_clip=config.optim.grad_clip,
                loss_group=trainer.mesh.loss.group,
                defer_sync=config.parallel.defer_gradient_sync,
                record=mark,
                enter=guard.enter,
            )
        if config.activation.clean_cache:
            release_cache(plan.device)
        state.step += 1
        state.samples += start.global_batch_size
        state.tokens += result.tokens
        if not result.tokens:
            logger.warning("Step %d had no valid token in any sample: its update was skipped.", state.step)
        if result.nonfinite is not None:
            state.skipped += 1
            guard.nonfinite.handle(
                step=state.step,
                skipped=state.skipped,
                loss=float(result.loss_sum),
                grad_norm=float(result.grad_norm),
                lr=lr,
                sample_ids=batch.sample_ids.tolist(),
                parameters=result.nonfinite,
            )
        if config.logging.due(state.step, max_steps=start.max_steps):
            trainer.metrics.train_step(
                state.step,
                loss=result.loss(),
                lr=lr,
                grad_norm=float(result.grad_norm),
                tokens=state.tokens,
                samples=state.samples,
                step_time_s=watch.mean_seconds(state.step),
                memory=memory_stats(plan.device),
            )
        if config.data.validation_freq and state.step % config.data.validation_freq == 0:
            guard.enter("validation")
            with watch.paused():
                trainer.val_loss = validate(trainer)
                trainer.metrics.validation(state.step, loss=trainer.val_loss)
        with watch.paused():
            counts, status = guard.agree(state.step, **trainer.saver.flags())
            guard.enter("checkpoint")
            _save_if_due(trainer, counts=counts, stop=status != 0)
        if status and state.step < start.max_steps:
            logger.warning(
                "Stopped on request at step %d, with a checkpoint: run again with --resume_from_checkpoint latest.",
                state.step,
            )
            return status
        trainer.val_loss = None
    return 0


def _nothing(tag: str) -> None:
    pass


@dataclasses.dataclass(frozen=True)
class StepResult:
    """Results of one step for the log: device tensors, read only when logged."""

    loss_sum: torch.Tensor  # 0-d, this rank's sum of token losses
    tokens: int  # valid tokens of the whole global batch
    grad_norm: torch.Tensor  # 0-d
    loss_group: dist.ProcessGroup | None  # the ranks over which losses are summed
    nonfinite: list[str] | None = None  # parameters of this rank with such a gradient; None: none on any rank

    def loss(self) -> float:
        """Return the mean loss over the global batch's valid tokens; collective."""
        total = self.loss_sum.clone()
        dist.all_reduce(total, group=self.loss_group)
        return float(total) / max(self.tokens, 1)


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: StepBatch,
    *,
    device: torch.device,
    grad_clip: float,
    loss_group: dist.ProcessGroup | None = None,
    defer_sync: bool = False,
    record: Callable[[str], None] = _nothing,
    enter: Callable[[str], None] = lambda phase: None,
) -> StepResult:
    """Run one optimizer step: count tokens, accumulate gradients, clip, update; collective.

    Args:
        model: the prepared model.
        batch: this rank's micro-batches.
        grad_clip: bound of the global gradient norm; 0 only measures.
        loss_group: the ranks over which losses and token counts are summed; None: all.
        defer_sync: reduce gradients once, after the last micro-batch.
        record: called with the name of each phase, for the memory tracker.
        enter: called with the name of each phase, for the watchdog.
    """
    valid = torch.tensor(sum(count_valid_tokens(m["labels"]) for m in batch.microbatches), device=device)
    counted = dist.all_reduce(valid, group=loss_group, async_op=True)
    record("Before train step")
    loss_sum = torch.zeros((), device=device, dtype=torch.float64)
    for index, microbatch in enumerate(batch.microbatches):
        set_gradient_sync(model, last=index == len(batch.microbatches) - 1, defer=defer_sync)
        enter("forward")
        loss = forward(model, microbatch, device)
        record("After forward")
        if index == 0:
            counted.wait()  # overlaps with the first forward
        enter("backward")
        (spread_nonfinite(loss) / valid.clamp(min=1)).backward()
        loss_sum += loss.detach()
    record("After train step")
    enter("optimizer")
    grad_norm = clip_grad_norm_(model, grad_clip)
    tokens = int(valid)
    nonfinite = None if bool(grad_norm.isfinite()) else nonfinite_gradients(model)
    if tokens and nonfinite is None:
        optimizer.step()
    # Before the next forward, so that gradients are freed when activations grow.
    optimizer.zero_grad(set_to_none=True)
    record("After opt step")
    return StepResult(loss_sum, tokens, grad_norm, loss_group, nonfinite)


def forward(model: nn.Module, microbatch: dict[str, torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return the sum of the token losses of one micro-batch, 0-d."""
    tensors = {key: value.to(device, non_blocking=True) for key, value in microbatch.items() if key != "sample_ids"}
    labels, inputs = tensors.pop("labels"), cast(dict[str, Any], tensors)
    if "document_bounds" in microbatch:
        longest = int(microbatch["document_bounds"].diff().max())  # on the host
        inputs |= document_lengths(inputs.pop("document_bounds"), longest)
    return model_loss_sum(model, inputs, labels)


@torch.no_grad()
def validate(trainer: Trainer) -> float:
    """Return the mean loss over the valid tokens of the first ``validation_batches``; collective."""
    plan = trainer.plan
    assert plan.validation_data is not None  # validation_freq is refused without validation data
    settings = plan.config.data
    # The stream is endless; rows past its end would count twice, and are masked.
    rows = settings.val_batch_size * plan.mesh.data.size
    samples = plan.validation_data.samples_per_epoch
    batches = min(settings.validation_batches, -(-samples // rows))
    trainer.model.eval()
    total = torch.zeros(2, dtype=torch.float64, device=plan.device)
    for _, batch in zip(range(batches), plan.validation_data, strict=False):
        for microbatch in batch.microbatches:
            microbatch["labels"][microbatch["sample_ids"] >= samples] = IGNORE_INDEX
            total[0] += forward(trainer.model, microbatch, plan.device)
            total[1] += count_valid_tokens(microbatch["labels"])
        trainer.guard.enter("validation")  # each batch has the time of a phase
    trainer.model.train()
    reshard(trainer.model)
    dist.all_reduce(total, group=trainer.mesh.loss.group)
    return float(total[0] / total[1])


def _save_if_due(trainer: Trainer, *, counts: dict[str, int], stop: bool) -> None:
    def manifest() -> Manifest:
        return describe(trainer.plan, trainer.start, trainer.state, trainer.val_loss)

    trainer.saver.after_step(counts, manifest, step=trainer.state.step, stop=stop)


def finish(trainer: Trainer, status: int) -> None:
    """Write the final model and the curves, and log the next commands; collective.

    A run that was asked to stop (``status``) only closes its files.
    """
    plan = trainer.plan
    settings = plan.config.checkpoint
    final = Path(settings.model_dir).absolute() if settings.model_dir else plan.run_dir / "final"
    if settings.save_final_model and not status:
        tokenizer = plan.config.data.tokenizer_name_or_dir
        export_hf(
            trainer.model,
            final,
            hf_config=plan.model.hf_config,
            tokenizer_dir=Path(tokenizer) if tokenizer else plan.model.tokenizer_dir,
            progress=functools.partial(trainer.guard.enter, "checkpoint"),
        )
        logger.info("Final model: %s (AutoModelForCausalLM.from_pretrained loads it).", final)
    trainer.metrics.finish()
    plan.train_data.close()
    if plan.validation_data is not None:
        plan.validation_data.close()
    trainer.guard.part(status)
    if plan.launch.is_main and not status:
        draw_curves(plan)
        log_collectives()
        log_next_commands(plan, trainer.start, trainer.state.step, final if settings.save_final_model else None)
