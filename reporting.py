"""What a run says of itself, beside its metrics: the start, the settings, the curves and what can be done next."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import torch.distributed as dist
import yaml

from arguments import SECTIONS, TrainConfig
from job import Plan, batch_of_flags
from smp import comm
from smp.errors import UserError
from smp.log import get_logger
from smp.models.registry import count_parameters
from smp.plots import plot_metrics

logger = get_logger("train")

# Settings that say where and how long, not what is trained; a resumed run may change them without a word.
WHERE_AND_HOW_LONG = {
    "output_dir", "max_steps", "epochs", "dry_run", "dry_run_world_size", "profile_nsys", "data_cache_dir",
    "data_num_workers", "validation_freq", "validation_batches", "val_batch_size", "fast_validation",
    # What follows from these is said where the global batch is.
    "train_batch_size", "gradient_accumulation_steps", "global_batch_size",
}  # fmt: skip
TRAINED = ("run", "model", "precision", "optim", "lr", "data")


def announce(plan: Plan) -> None:
    """Log what is about to be trained, on what, and what a resumed run does otherwise than before."""
    degrees = plan.degrees
    parameters = count_parameters(plan.model.hf_config)
    logger.info("Created model %s with total parameters: %d (%.2f B)", plan.model.name, parameters, parameters / 1e9)
    logger.info(
        "World size = %d: dp_replicate %d x dp_shard %d x tp %d on %s over %s, computing in %s",
        plan.launch.world_size, degrees.dp_replicate, degrees.dp_shard, degrees.tp, plan.device.type,
        dist.get_backend(), str(plan.dtype).removeprefix("torch."),
    )  # fmt: skip
    tokens = plan.global_batch_size * plan.model.sequence_length
    logger.info(
        "Global batch: %d samples, %d tokens; %d samples per epoch; training to step %d",
        plan.global_batch_size, tokens, plan.train_data.samples_per_epoch, plan.max_steps,
    )  # fmt: skip
    for sentence in plan.config.without_effect():
        logger.info(sentence)
    if plan.resume is not None:
        logger.info("Resumed from %s at step %d, sample %d", plan.resume, plan.state.step, plan.state.samples)
        flags = batch_of_flags(plan.config, degrees)
        if plan.config.run.global_batch_size is None and flags != plan.global_batch_size:
            logger.warning(
                "The global batch stays at the checkpoint's %d samples; --global_batch_size %d would make it what the "
                "flags and the number of processes give.", plan.global_batch_size, flags,
            )  # fmt: skip
        for change in changes_since(plan.saved or {}, plan):
            logger.warning("Changed since the checkpoint: %s", change)


def say_how_ranks_exchanged() -> None:
    """Log what the ``smddp`` backend did and, where it left something to another backend, why."""
    if report := comm.report():
        logger.info("Collectives of this rank:\n%s", report)


def changes_since(saved: dict[str, Any], plan: Plan) -> list[str]:
    """What a resumed run does otherwise than the one that wrote the checkpoint's ``state.json``."""
    now, before = plan.config.flat(), saved.get("config", {})
    names = [f.name for section in TRAINED for f in dataclasses.fields(SECTIONS[section])]
    found = [
        f"{name} {before[name]} -> {now[name]}"
        for name in names
        if name not in WHERE_AND_HOW_LONG and name in before and before[name] != now[name]
    ]
    if saved.get("data") not in (None, plan.train_data.fingerprint):
        found.append("the data; the position in it is kept, so samples may be missed or repeated")
    horizon = saved.get("max_steps")
    if plan.config.lr.lr_decay_iters is None and horizon not in (None, plan.max_steps):
        found.append(
            f"the learning rate's horizon, {horizon} -> {plan.max_steps} steps (--lr_decay_iters {horizon} keeps it)"
        )
    return found


def write_config(plan: Plan, formula: str) -> None:
    """Write the resolved configuration where ``--config`` can read it again, the FLOP formula in its first line."""
    text = yaml.safe_dump(plan.config.flat(), sort_keys=True)
    (plan.run_dir / "config.yaml").write_text(f"# model FLOPs: {formula}\n{text}", encoding="utf-8")


def arguments_table(config: TrainConfig) -> str:
    """Every setting as a markdown table, for TensorBoard."""
    return "\n".join(["| setting | value |", "|---|---|", *(f"| {k} | {v} |" for k, v in config.flat().items())])


def draw_curves(plan: Plan) -> None:
    """Write ``curves.png``, or say why there is none."""
    try:
        plot_metrics(plan.run_dir / "metrics.jsonl", plan.run_dir / "curves.png")
    except UserError as error:  # no matplotlib, or a run that ended before its first logged step
        logger.info("No curves.png: %s", error)


def say_what_next(plan: Plan, step: int, final: Path | None) -> None:
    """The commands a user is likely to want now; ``final`` is the exported model, if there is one."""
    run_dir = _shown(plan.run_dir)
    logger.info("Done: step %d of %d. What next (with make train, flags go into ARGS='...'):", step, plan.max_steps)
    logger.info("  curves:    %s/curves.png, or tensorboard --logdir %s/tensorboard", run_dir, run_dir)
    logger.info("  train on:  the same command with --max_steps %d --resume_from_checkpoint latest", 2 * step)
    if final is not None:
        logger.info(
            "  finetune:  source .venv/bin/activate; torchrun --nproc_per_node %d train_lib.py "
            "--hf_pretrained_model_name_or_dir %s --training_dir DATA --output_dir runs/finetuned",
            plan.launch.local_world_size, _shown(final),
        )  # fmt: skip


def _shown(path: Path) -> str:
    """A path as the user would type it from here."""
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)
