"""The training loop: steps, validation, checkpoints, and the final model."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch import nn

from smp.checkpoint import lora_merge
from smp.checkpoint.hf_export import DTYPES, Dtype, export_hf
from smp.checkpoint.manifest import Manifest
from smp.checkpoint.model_store import upload_model_together
from smp.checkpoint.object_store import is_url
from smp.checkpoint.saver import Saver
from smp.data.data_pipeline import StepBatch
from smp.faults.agreement import Readback
from smp.faults.guard import Guard
from smp.faults.nonfinite import nonfinite_gradients, nonfinite_values
from smp.log import get_logger
from smp.memory.tracker import MemoryTracker, memory_stats
from smp.models.added import is_frozen
from smp.models.file_names import buffers_of, parameters_of
from smp.models.text_part import content_of_whole
from smp.models.weight_files import ADAPTER_CONFIG
from smp.optim.optimizers import MixedOptimizer
from smp.parallel import lora
from smp.parallel.technique import Setup, metrics
from smp.pretrained import base_dtypes
from smp.runtime import release_cache
from smp.train.checked_job import CheckedJob
from smp.train.garbage import collect_if_due, collected_together
from smp.train.lr_schedule import set_lr
from smp.train.metrics import MetricsLogger, NullMetricsLogger
from smp.train.planned import Planned
from smp.train.preference import loss_of
from smp.train.reference import give_references
from smp.train.report import (
    describe,
    log_collectives,
    log_next_commands,
    profile_step,
)
from smp.train.run_config import RunConfig
from smp.train.state import Start, TrainState
from smp.train.step import StepResult, nothing, train_step
from smp.train.stopwatch import Stopwatch
from smp.train.validation import validate

logger = get_logger("train")


@dataclasses.dataclass
class Trainer:
    """The built parts of a run, handed to the loop."""

    job: CheckedJob
    start: Start
    model: nn.Module
    optimizer: MixedOptimizer
    state: TrainState
    metrics: MetricsLogger | NullMetricsLogger
    memory: MemoryTracker
    setup: Setup
    saver: Saver
    guard: Guard
    planned: Planned
    val_loss: float | None = None  # of the current step, if it was validated
    computed: tuple[int, int] = (0, 0)  # of the steps since the last one that was logged


# Steps whose results the host leaves on their way while it goes on: on a GPU it runs ahead of the device.
LAG = {"cpu": 0, "cuda": 1}


def train(trainer: Trainer) -> int:
    """Run the training loop; returns the exit status: 0, or that of a request to stop.

    Results of a step and the ranks' flags are read :data:`LAG` steps late, but at once where a validation, a checkpoint
    or the end follows: these never see a step that has not been looked at.
    """
    job, start, state = trainer.job, trainer.start, trainer.state
    if state.step >= start.max_steps:
        logger.info("Already at step %d of %d: raise --max_steps to train on.", state.step, start.max_steps)
        return 0
    collect_every = cast(int, job.settings[RunConfig].gc_freq)
    with collected_together() if collect_every else contextlib.nullcontext(), trainer.metrics.bar:
        return _steps(trainer, collect_every)


def _steps(trainer: Trainer, collect_every: int) -> int:
    """Run the steps; returns the exit status."""
    job, start, state, config = trainer.job, trainer.start, trainer.state, trainer.job.config
    guard = trainer.guard
    give_references(job, start, trainer.model, trainer.setup, enter=guard.enter)
    batches, lag = iter(job.train_data), LAG[job.device.type]
    guard.enter("data", state.step + 1)
    guard.watchdog.spent()  # what came before was no step
    if config.data.validation_freq is not None and state.step == 0:  # what training begins from
        _validate(trainer)
        guard.enter("data", state.step + 1)
    watch = Stopwatch(state.step)
    trainer.saver.start_clock()
    pending: collections.deque[_Done] = collections.deque()
    asked: collections.deque[Callable[[], dict[str, int]]] = collections.deque()
    while state.step < start.max_steps:
        if config.run.profile_nsys and state.step == start.progress.step + 2:
            torch.cuda.profiler.start()
        pending.append(_run_step(trainer, batches))
        step = state.step
        every = config.data.validation_freq
        validates = every is not None and step % every == 0
        keep = 0 if validates or step == start.max_steps or trainer.saver.due(step) else lag
        while len(pending) > keep:
            _settle(trainer, pending.popleft(), watch)
        if validates:
            with watch.paused():
                trainer.val_loss = _validate(trainer)
        with watch.paused():
            asked.append(guard.ask(**trainer.saver.flags()))
            counts = dict.fromkeys(("stop", *trainer.saver.flags()), 0)
            while len(asked) > keep:  # the latest that is read has all that earlier ones had
                counts = asked.popleft()()
            trainer.saver.require_base(counts)
            status = guard.verdict(counts, step)
            # What failed is saved anew, as the state is now.
            while pending and (status or trainer.saver.ended(counts)):
                _settle(trainer, pending.popleft(), watch)
            guard.enter("checkpoint")
            _save_if_due(trainer, counts=counts, stop=status != 0)
            trainer.metrics.redraw()
        if status and step < start.max_steps:
            logger.warning(
                "Stopped on request at step %d, with a checkpoint: run again with --resume_from_checkpoint latest.",
                step,
            )
            return status
        trainer.val_loss = None
        collect_if_due(step, collect_every)
    return 0


def _validate(trainer: Trainer) -> float:
    trainer.guard.enter("validation")
    found = validate(trainer.job, trainer.model, trainer.setup, enter=trainer.guard.enter)
    trainer.metrics.validation(trainer.state.step, loss=found.loss, more=found.metrics)
    return found.loss


@dataclasses.dataclass(frozen=True)
class _Done:
    """A step whose numbers are on their way to the host."""

    step: int
    samples: int  # since the start of training, all ranks
    lr: float
    sample_ids: torch.Tensor
    result: StepResult
    logged: bool
    numbers: Readback  # those of the result, over all ranks if the step is logged; and what was computed
    measured: dict[str, Readback]  # of the techniques, if the step is logged


def _run_step(trainer: Trainer, batches: Iterator[StepBatch]) -> _Done:
    """Enqueue one step; the host does not wait for it."""
    job, start, state, config = trainer.job, trainer.start, trainer.state, trainer.job.config
    # As in SMP v2: later steps would repeat the first ones.
    early = state.step < start.progress.step + 5
    lr = set_lr(trainer.optimizer, config.lr, state.step, max_steps=start.max_steps)
    record = functools.partial(trainer.memory.record, step=state.step) if early else nothing
    trainer.guard.enter("data", state.step + 1)
    batch = next(batches)
    model, optimizer = trainer.model, trainer.optimizer
    with (
        profile_step(job, start, model, optimizer, step=state.step, record=record) as noted,
        trainer.planned.profiled(model, optimizer, state.step, noted) as mark,
    ):
        result = train_step(
            model,
            optimizer,
            batch,
            setup=trainer.setup,
            device=job.device,
            grad_clip=config.optim.grad_clip,
            objective=loss_of(trainer.setup),
            record=mark,
            enter=trainer.guard.enter,
        )
    if config.activation.clean_cache:
        release_cache(job.device)
    state.step += 1
    state.samples += start.global_batch_size
    logged = config.logging.due(state.step, max_steps=start.max_steps)
    numbers = result.numbers(over_all_ranks=logged)
    read = Readback(torch.cat([numbers, result.computed.to(numbers)]))
    measured = {name: Readback(value) for name, value in metrics(model).items()} if logged else {}
    return _Done(state.step, state.samples, lr, batch.sample_ids, result, logged, read, measured)


def _settle(trainer: Trainer, done: _Done, watch: Stopwatch) -> None:
    """Read the numbers of a step, and do what follows from them.

    Raises:
        RunError: on every rank, if its update was left out and the run is to stop.
    """
    trainer.guard.enter("optimizer", done.step)  # whose end is waited for
    own_loss, grad_norm, tokens, divisor, loss, *others, processed, pairs = done.numbers.read()
    state = trainer.state
    trainer.computed = trainer.computed[0] + int(processed), trainer.computed[1] + int(pairs)
    state.tokens += int(tokens)
    if not tokens:
        logger.warning("Step %d had no valid token in any sample: its update was skipped.", done.step)
    if not math.isfinite(grad_norm):
        state.skipped += 1
        trainer.guard.nonfinite.handle(
            step=done.step,
            skipped=state.skipped,
            loss=own_loss,
            grad_norm=grad_norm,
            lr=done.lr,
            sample_ids=done.sample_ids.tolist(),
            parameters=nonfinite_gradients(trainer.model, done.result.norms),
            values=nonfinite_values(trainer.model),
        )
    if done.logged:
        trainer.guard.enter("logging")
        trainer.metrics.train_step(
            done.step,
            loss=loss / max(divisor, 1),
            lr=done.lr,
            grad_norm=grad_norm,
            tokens=state.tokens,
            samples=done.samples,
            computed=trainer.computed,
            step_time_s=watch.mean_seconds(done.step),
            memory=memory_stats(trainer.job.device),
            phase_s=trainer.guard.watchdog.spent(),
            more={
                name: each / max(divisor, 1) for name, each in zip(loss_of(trainer.setup).metrics, others, strict=True)
            },
            measured={name: value.read() for name, value in done.measured.items()},
        )
        trainer.computed = 0, 0
    trainer.metrics.bar.reach(done.step)
    trainer.planned.settled(done.step)


def _save_if_due(trainer: Trainer, *, counts: dict[str, int], stop: bool) -> None:
    def manifest() -> Manifest:
        return describe(trainer.job, trainer.start, trainer.state, trainer.val_loss)

    trainer.saver.after_step(counts, manifest, step=trainer.state.step, stop=stop)


def _dtype_of_files(job: CheckedJob, model: nn.Module | Mapping[str, torch.Tensor]) -> Dtype:
    """Return the dtype of the final model's files: asked for, or the base's, but of adapters."""
    if job.config.checkpoint.dtype is not None:
        return DTYPES[job.config.checkpoint.dtype]
    if job.model.weights is None or (isinstance(model, nn.Module) and is_frozen(model)):
        return None
    tensors = {**parameters_of(model), **dict(buffers_of(model))} if isinstance(model, nn.Module) else model
    # Files that one rank alone no longer sees must not let ranks gather differently.
    said = [base_dtypes(tensors, job.model.hf_config, job.model.weights) if job.launch.is_main else {}]
    dist.broadcast_object_list(said)
    trained = job.config.optim.param_dtype
    if others := {str(dtype).removeprefix("torch.") for dtype in said[0].values() if dtype != DTYPES[trained]}:
        names = ", ".join(sorted(others))
        logger.info("The final model is in %s, as its base; --dtype %s would write it as trained.", names, trained)
    return said[0]


def finish(trainer: Trainer, status: int) -> None:
    """Write the final model and the curves, and log the next commands; collective.

    A run that was asked to stop (``status``) only closes its files.
    """
    job = trainer.job
    settings = job.config.checkpoint
    url = settings.model_dir if settings.model_dir and is_url(settings.model_dir) else None
    final = Path(settings.model_dir).absolute() if settings.model_dir and not url else job.run_dir / "final"
    if settings.save_final_model and not status:
        tokenizer = job.config.data.tokenizer_name_or_dir
        merged = lora_merge.merged(trainer.model, job.settings) if job.settings[lora.Config].merges else None
        model, read = merged or (trainer.model, None)
        export_hf(
            model,
            final,
            read=read,
            dtype=_dtype_of_files(job, model),
            hf_config=job.model.hf_config,
            tokenizer_dir=Path(tokenizer).expanduser() if tokenizer else job.model.tokenizer_dir,
            generation_dir=job.model.generation_dir,
            chat_template=job.chat_template,
            weights=job.model.weights,
            text_only=settings.export_text_only,
            progress=functools.partial(trainer.guard.enter, "checkpoint"),
        )
        is_adapter = (final / ADAPTER_CONFIG).exists()
        loads = "peft's PeftModel" if is_adapter else "AutoModelForCausalLM"
        if not is_adapter and not settings.export_text_only and content_of_whole(job.model.weights) is not None:
            loads = "AutoModelForImageTextToText"
        logger.info("Final %s: %s (%s.from_pretrained loads it).", "adapter" if is_adapter else "model", final, loads)
        if merged and job.settings[lora.Config].save_merged_model is None:
            logger.info(
                "It has its adapters merged, as servers drop those of experts; --save_merged_model 0 writes them."
            )
        if url is not None:
            upload_model_together(final, url, functools.partial(trainer.guard.enter, "checkpoint"))
            logger.info("It was uploaded to %s.", url)
    trainer.metrics.finish()
    trainer.planned.finish()
    job.train_data.close()
    if job.validation_data is not None:
        job.validation_data.close()
    trainer.guard.part(status)
    if not status:
        log_collectives(on_console=job.config.logging.comm_report)
    if job.launch.is_main and not status:
        log_next_commands(job, trainer.start, trainer.state.step, final if settings.save_final_model else None)
