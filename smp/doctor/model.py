"""The model of the job: known, whole, and small enough for these machines."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import torch

from smp.checkpoint.config import CheckpointConfig
from smp.config import ActivationConfig, LossConfig, ParallelConfig, PrecisionConfig
from smp.doctor.room import Room
from smp.environment.malloc import unused_heap
from smp.memory_plan import (
    GIB,
    ModelShape,
    Workload,
    available_memory,
    check_fits,
    estimate_memory,
    model_shape,
    processes_that_fit,
)
from smp.mesh import resolve_degrees
from smp.models.model_config import ModelConfig, ResolvedModel, resolve_model
from smp.models.registry import build_model
from smp.prepare import compute_dtype
from smp.runtime import environment_with

_BATCH = 2  # --train_batch_size where it is not known
PLAN_SHARE = 5.0  # of --timeout: data may have to be converted
_MODEL_WORDS = ("model", "model_type", "hf_pretrained_model_name_or_dir", "pretrained_model_name")


def asks_for_model(room: Room) -> bool:
    """Whether a model was named; nothing of transformers is imported where none was."""
    return any(room.request.settings.get(name) for name in _MODEL_WORDS)


def check_model(room: Room) -> None:
    """Resolve the model, and compare what a rank needs of memory with what it has."""
    if not asks_for_model(room):
        room.ok("no --model was given: nothing was predicted")
        return
    model = resolve_model(room.request.section(ModelConfig))
    shape, work = _sizes(room, model)
    room.state.update(parameters=shape.parameters, vocab_size=model.hf_config.vocab_size, length=model.sequence_length)
    launch = room.launch
    degrees = resolve_degrees(
        room.request.section(ParallelConfig), world_size=launch.world_size, local_world_size=launch.local_world_size
    )
    needed, available = estimate_memory(shape, degrees, work), available_memory(room.device, launch.local_world_size)
    data = {
        "parameters": shape.parameters, "needed_bytes": sum(needed.values()), "available_bytes": available,
        "vocab_size": model.hf_config.vocab_size, "by_category": needed,
    }  # fmt: skip
    room.measure("model", data)
    enough = processes_that_fit(shape, work, available, tp=degrees.tp)
    smaller = "a smaller model, batch or sequence (train_lib.py --dry_run 1 shows what needs how much)"
    advice = f"use {enough} such processes with full sharding, or {smaller}" if enough else f"use {smaller}"
    check_fits(needed, available, model=model.name, processes=launch.world_size, advice=advice)
    room.ok(
        f"{model.name}: {shape.parameters:,} parameters; each process needs about {sum(needed.values()) / GIB:.1f} "
        f"GiB, and there are {available / GIB:.1f} GiB for each",
        **data,
    )


def _sizes(room: Room, model: ResolvedModel) -> tuple[ModelShape, Workload]:
    """What decides the memory of a rank."""
    family, request = model.family, room.request
    with torch.device("meta"):
        built = build_model(model.hf_config, attn_implementation=model.attn_implementation)
    shape = model_shape(
        built, model.hf_config, embedding=family.embedding, blocks=family.blocks, gated_mlp=family.gated_mlp
    )
    activation, parallel = request.section(ActivationConfig), request.section(ParallelConfig)
    on_cpu = room.device.type == "cpu"
    return shape, Workload(
        sequence_length=model.sequence_length,
        micro_batch_size=int(request.settings.get("train_batch_size") or _BATCH),
        compute_bytes=compute_dtype(request.section(PrecisionConfig), room.device).itemsize,
        activation_checkpointing=activation.activation_checkpointing,
        sequence_parallel=parallel.sequence_parallel,
        save_gathered=parallel.tp_save_gathered,
        loss_chunk=request.section(LossConfig).loss_chunk_tokens,
        recomputed_every=activation.activation_checkpointing_every,
        selective=activation.activation_checkpointing_mode == "selective",
        offload_horizon=activation.activation_loading_horizon if activation.offload_activations else 0,
        cpu_offload=activation.cpu_offload and not on_cpu,
        checkpoint_copy=request.section(CheckpointConfig).is_async and on_cpu,
        attention_matrix=model.attn_implementation == "eager",
        unused_heap=unused_heap() if on_cpu else 0.0,
    )


# --- the training job's own check


def run_python(seconds: float, words: list[str]) -> subprocess.CompletedProcess[str] | None:
    """Run Python as a process of no job, offline; None where it takes longer than ``seconds``."""
    environment = {name: value for name, value in environment_with({}).items() if not _of_a_job(name)}
    try:
        return subprocess.run(
            [sys.executable, *words],
            env=environment, capture_output=True, text=True, timeout=seconds, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return None


def _of_a_job(name: str) -> bool:
    """Whether a variable says that its process is one of a job."""
    ranks = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK")
    return name in ranks or name.startswith(("TORCHELASTIC_", "OMPI_", "PMIX_", "PMI_", "MPI_", "MV2_", "SLURM_"))


def problems_of(done: subprocess.CompletedProcess[Any]) -> list[str]:
    """The sentences of a training process that has refused, or its last line where it failed otherwise."""
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    said = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return said or [f"it ended with status {done.returncode}: {lines[-1] if lines else 'it said nothing'}"]


def check_plan(room: Room) -> None:
    """Let the training job check its own settings: ``train_lib.py --dry_run 1``."""
    request = room.request
    if not request.training_words:
        room.ok("no training flags were given after --, nor --config: no dry run was made")
        return
    if request.checkout is None:
        room.warn("there is no train_lib.py beside the package smp: --config and the flags after -- were not looked at")
        return
    words = [str(request.checkout / "train_lib.py"), *request.training_words, "--dry_run", "1"]
    words += ["--dry_run_world_size", str(room.launch.world_size)]
    limit = room.request.timeout * PLAN_SHARE * 0.9
    done = run_python(limit, words)
    if done is None:
        room.warn(f"train_lib.py --dry_run 1 has not ended within {limit:.0f} s: give --timeout more, or run it alone")
        return
    if done.returncode == 0:
        room.ok("train_lib.py --dry_run 1 accepts the settings and reads the data")
        return
    for sentence in problems_of(done):
        room.problem(sentence)
