"""Train, resume or finetune: ``torchrun --nproc_per_node N train_lib.py --model NAME ...``.

Top to bottom: plan the job (``job.py``), build each part, train.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from arguments import parse_args
from data.pipelines.data_pipeline import StepBatch
from job import Plan, dry_run, make_plan, planned_launch, refuse_too_large, require_agreement
from reporting import (
    announce,
    arguments_table,
    draw_curves,
    memory_of_step,
    say_how_ranks_exchanged,
    say_out_of_memory,
    say_what_next,
    write_config,
)
from smp.checkpoint.checkpointer import architecture, load_checkpoint, save_checkpoint
from smp.checkpoint.hf_export import export_hf
from smp.chunked_loss import model_loss_sum
from smp.errors import ConfigError, PeerError, RankError, UserError
from smp.flops import model_flops_per_token, peak_flops
from smp.grad_norm import clip_grad_norm_
from smp.instruction_set import ensure_bf16_works
from smp.log import configure_logging, get_logger
from smp.loss import IGNORE_INDEX, count_valid_tokens
from smp.lr_schedule import LRSchedule
from smp.memory_profile import is_out_of_memory
from smp.memory_tracker import MemoryTracker, NullMemoryTracker, build_memory_tracker, memory_stats
from smp.mesh import build_mesh
from smp.metrics import MetricsLogger, NullMetricsLogger
from smp.optimizer import build_optimizer
from smp.prepare import prepare_model
from smp.runtime import Launch, process_group, read_launch, release_cache, seed_everything
from smp.sharding import reshard, set_gradient_sync
from smp.train_state import TrainState

logger = get_logger("train")


@dataclasses.dataclass
class Trainer:
    """The built parts of a run, handed to the loop."""

    plan: Plan
    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: LRSchedule
    state: TrainState
    metrics: MetricsLogger | NullMetricsLogger
    memory: MemoryTracker
    data_group: dist.ProcessGroup | None


def run(plan: Plan) -> None:
    """Build each part, train, and write what remains."""
    config, launch = plan.config, plan.launch
    configure_logging(
        rank=launch.rank, local_rank=launch.local_rank, world_size=launch.world_size, log_dir=plan.run_dir / "logs"
    )
    if plan.device.type == "cpu" and plan.dtype == torch.bfloat16:
        ensure_bf16_works()
    with process_group(config.comm, launch, plan.device, cpu_offload=config.activation.cpu_offload):
        require_agreement(plan)  # before anything of an earlier run is touched
        flops = model_flops_per_token(plan.model.hf_config, plan.model.sequence_length)
        if launch.is_main:
            write_config(plan, flops.formula)
        metrics = _build_metrics(plan, flops.total) if launch.is_main else NullMetricsLogger()
        memory = build_memory_tracker(
            plan.device, enabled=config.logging.enable_memory_profiling, rank=launch.rank, writers=metrics.writers
        )
        mesh = build_mesh(plan.degrees, plan.device.type)
        model = prepare_model(
            plan.model,
            mesh=mesh,
            parallel=config.parallel,
            activation=config.activation,
            dtype=plan.dtype,
            device=plan.device,
            seed=config.run.seed,
            load_weights=plan.resume is None,
            loss=config.loss,
            record=functools.partial(memory.record, step=plan.state.step),
        )
        optimizer = build_optimizer(model, config.optim, lr=config.lr.lr)
        seed_everything(config.run.seed, mesh.data_rank)
        state = dataclasses.replace(plan.state)  # the plan keeps where the run began
        if plan.resume is not None:
            state = load_checkpoint(plan.resume, model=model, optimizer=optimizer, seed=config.run.seed, mesh=mesh)
        schedule = LRSchedule(config.lr, optimizer, max_steps=plan.max_steps)
        trainer = Trainer(plan, model, optimizer, schedule, state, metrics, memory, mesh.data_group)
        announce(plan)
        metrics.text("Arguments", arguments_table(config))
        train(trainer)
        finish(trainer)


def train(trainer: Trainer) -> None:
    """The loop: only what happens when."""
    plan, state, config = trainer.plan, trainer.state, trainer.plan.config
    if state.step >= plan.max_steps:
        logger.info("Already at step %d of %d: raise --max_steps to train on.", state.step, plan.max_steps)
        return
    batches = iter(plan.train_data)
    watch = Stopwatch(state.step)
    while state.step < plan.max_steps:
        if config.run.profile_nsys and state.step == plan.state.step + 2:
            torch.cuda.profiler.start()
        # As SMP v2: the first steps show where memory goes, later ones would only repeat it.
        memory = trainer.memory if state.step < plan.state.step + 5 else NullMemoryTracker()
        lr = trainer.schedule.apply(state.step)
        record = functools.partial(memory.record, step=state.step)
        batch = next(batches)
        with memory_of_step(plan, trainer.model, trainer.optimizer, step=state.step, record=record) as mark:
            result = train_step(
                trainer.model,
                trainer.optimizer,
                batch,
                device=plan.device,
                grad_clip=config.optim.grad_clip,
                data_group=trainer.data_group,
                defer_sync=config.parallel.defer_gradient_sync,
                record=mark,
            )
        if config.activation.clean_cache:
            release_cache(plan.device)
        state.step += 1
        state.samples += plan.global_batch_size
        state.tokens += result.tokens
        if not result.tokens:
            logger.warning("Step %d had no valid token in any sample: its update was skipped.", state.step)
        if config.logging.due(state.step, max_steps=plan.max_steps):
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
            with watch.paused():
                trainer.metrics.validation(state.step, loss=validate(trainer))
        with watch.paused():
            _save_if_due(trainer)


class Stopwatch:
    """Seconds per training step, without validation and checkpoints."""

    def __init__(self, step: int):
        self._step, self._start = step, time.perf_counter()

    def mean_seconds(self, step: int) -> float:
        """Mean over the steps since the last call; starts anew."""
        now = time.perf_counter()
        mean = (now - self._start) / (step - self._step)
        self._step, self._start = step, now
        return mean

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave what happens inside out."""
        before = time.perf_counter()
        yield
        self._start += time.perf_counter() - before


@dataclasses.dataclass(frozen=True)
class StepResult:
    """What one step leaves for the log: device tensors, read only when logged."""

    loss_sum: torch.Tensor  # 0-d, this rank's sum of token losses
    tokens: int  # valid tokens of the whole global batch
    grad_norm: torch.Tensor  # 0-d

    data_group: dist.ProcessGroup | None  # the ranks that read different data

    def loss(self) -> float:
        """Mean loss over the global batch's valid tokens; collective."""
        total = self.loss_sum.clone()
        dist.all_reduce(total, group=self.data_group)
        return float(total) / max(self.tokens, 1)


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: StepBatch,
    *,
    device: torch.device,
    grad_clip: float,
    data_group: dist.ProcessGroup | None = None,
    defer_sync: bool = False,
    record: Callable[[str], None] = lambda tag: None,
) -> StepResult:
    """One optimizer step: count tokens, accumulate gradients, clip, update; collective.

    Args:
        model: from :func:`smp.prepare.parallelize`.
        batch: this rank's micro-batches.
        grad_clip: bound of the global gradient norm; 0 only measures.
        data_group: the ranks that read different data; None: all.
        defer_sync: reduce gradients once, after the last micro-batch.
        record: called with the name of each phase, for the memory tracker.
    """
    valid = torch.tensor(sum(count_valid_tokens(m["labels"]) for m in batch.microbatches), device=device)
    counted = dist.all_reduce(valid, group=data_group, async_op=True)
    record("Before train step")
    loss_sum = torch.zeros((), device=device, dtype=torch.float64)
    for index, microbatch in enumerate(batch.microbatches):
        set_gradient_sync(model, last=index == len(batch.microbatches) - 1, defer=defer_sync)
        loss = forward(model, microbatch, device)
        record("After forward")
        if index == 0:
            counted.wait()  # overlaps with the first forward
        (loss / valid.clamp(min=1)).backward()
        loss_sum += loss.detach()
    record("After train step")
    grad_norm = clip_grad_norm_(model, grad_clip)
    tokens = int(valid)
    if tokens:
        optimizer.step()
    # Before the next forward, so that gradients and activations are never held together.
    optimizer.zero_grad(set_to_none=True)
    record("After opt step")
    return StepResult(loss_sum, tokens, grad_norm, data_group)


def forward(model: nn.Module, microbatch: dict[str, torch.Tensor], device: torch.device) -> torch.Tensor:
    """Sum of the token losses of one micro-batch, 0-d."""
    tensors = {key: value.to(device, non_blocking=True) for key, value in microbatch.items() if key != "sample_ids"}
    labels = tensors.pop("labels")
    return model_loss_sum(model, tensors, labels)


@torch.no_grad()
def validate(trainer: Trainer) -> float:
    """Mean loss over the valid tokens of the first ``validation_batches``, the same ones every time; collective."""
    plan = trainer.plan
    assert plan.validation_data is not None  # validation_freq is refused without validation data
    settings = plan.config.data
    # The stream is endless; rows past its end would count twice, and are masked.
    rows = settings.val_batch_size * plan.degrees.data_size
    samples = plan.validation_data.samples_per_epoch
    batches = min(settings.validation_batches, -(-samples // rows))
    trainer.model.eval()
    total = torch.zeros(2, dtype=torch.float64, device=plan.device)
    for _, batch in zip(range(batches), plan.validation_data, strict=False):
        for microbatch in batch.microbatches:
            microbatch["labels"][microbatch["sample_ids"] >= samples] = IGNORE_INDEX
            total[0] += forward(trainer.model, microbatch, plan.device)
            total[1] += count_valid_tokens(microbatch["labels"])
    trainer.model.train()
    reshard(trainer.model)
    dist.all_reduce(total, group=trainer.data_group)
    return float(total[0] / total[1])


def _save_if_due(trainer: Trainer) -> None:
    plan, step = trainer.plan, trainer.state.step
    settings = plan.config.checkpoint
    for directory, every, keep in zip(
        plan.checkpoint_dirs, settings.checkpoint_freq, settings.num_kept_checkpoints, strict=True
    ):
        if step % every and step != plan.max_steps:
            continue
        started = time.perf_counter()
        trainer.memory.record("Before ckpt (StateDictType.SHARDED_STATE_DICT)", step)
        path = save_checkpoint(
            directory,
            model=trainer.model,
            optimizer=trainer.optimizer,
            state=trainer.state,
            model_name=plan.model.name,
            keep=keep,
            extra={
                "architecture": architecture(plan.model.hf_config),
                "config": plan.config.flat(),
                "data": plan.train_data.fingerprint,
                "degrees": dataclasses.asdict(plan.degrees),
                "global_batch_size": plan.global_batch_size,
                "max_steps": plan.max_steps,
            },
        )
        trainer.memory.record("After ckpt (StateDictType.SHARDED_STATE_DICT)", step)
        logger.info("Saved %s (%.1f s).", path, time.perf_counter() - started)


def finish(trainer: Trainer) -> None:
    """Write the final model and the curves, and say what can be done next."""
    plan = trainer.plan
    settings = plan.config.checkpoint
    final = Path(settings.model_dir).absolute() if settings.model_dir else plan.run_dir / "final"
    if settings.save_final_model:
        tokenizer = plan.config.data.tokenizer_name_or_dir
        export_hf(
            trainer.model,
            final,
            hf_config=plan.model.hf_config,
            tokenizer_dir=Path(tokenizer) if tokenizer else plan.model.tokenizer_dir,
        )
        logger.info("Final model: %s (AutoModelForCausalLM.from_pretrained loads it).", final)
    trainer.metrics.finish()
    plan.train_data.close()
    if plan.validation_data is not None:
        plan.validation_data.close()
    if plan.launch.is_main:
        draw_curves(plan)
        say_how_ranks_exchanged()
        say_what_next(plan, trainer.state.step, final if settings.save_final_model else None)


def _build_metrics(plan: Plan, flops_per_token: float) -> MetricsLogger:
    device_name = torch.cuda.get_device_name(plan.device) if plan.device.type == "cuda" else "cpu"
    continues = plan.config.checkpoint.resume_from_checkpoint is not None
    return MetricsLogger(
        plan.config.logging,
        run_dir=plan.run_dir,
        flops_per_token=flops_per_token,
        peak_flops=peak_flops(device_name, plan.dtype, tf32=torch.get_float32_matmul_precision() != "highest"),
        world_size=plan.launch.world_size,
        max_steps=plan.max_steps,
        # "latest" without a checkpoint starts afresh, over what a run left that died before its first one.
        resume_from=plan.state if continues else None,
    )


def main(argv: list[str] | None = None) -> int:
    """Run the job; returns the exit status: 0 done, 1 out of memory, 2 bad input."""
    launch = Launch()
    try:
        launch = read_launch()
        config = parse_args(argv)
        plan = make_plan(config, planned_launch(config, launch))
        if config.run.dry_run:
            dry_run(plan)
            return 0
        refuse_too_large(plan)
    except UserError as error:
        # Every rank finds the same problems; one of each host says so.
        if launch.local_rank == 0:
            _print_problems(error)
        return 2
    try:
        run(plan)
    except PeerError:
        return 2
    except UserError as error:
        if launch.local_rank == 0 or isinstance(error, RankError):
            _print_problems(error)
        return 2
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        failure, tables = (str(error).splitlines() or [type(error).__name__])[0], getattr(error, "__notes__", [])
    else:
        return 0
    say_out_of_memory(plan, failure, tables)  # not before the error is gone, with the frames that hold the memory
    return 1


def _log_to_console() -> None:
    """Show what planning has to say, such as the progress of a conversion; the log files come with the run."""
    with contextlib.suppress(UserError):  # said again, as an error, by main
        launch = read_launch()
        configure_logging(rank=launch.rank, local_rank=launch.local_rank, world_size=launch.world_size, log_dir=None)


def _print_problems(error: UserError) -> None:
    problems = error.problems if isinstance(error, ConfigError) else [str(error)]
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)


if __name__ == "__main__":
    _log_to_console()
    sys.exit(main())
