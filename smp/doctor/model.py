"""The model of the job: known, whole, and small enough for these machines."""

from __future__ import annotations

from smp.checkpoint.config import CheckpointConfig
from smp.config import ActivationConfig, LossConfig, ParallelConfig, PrecisionConfig, Settings
from smp.doctor.room import Room
from smp.memory.limits import available_memory
from smp.memory.plan import GIB, check_fits, estimate_memory, processes_that_fit
from smp.memory.shape import ModelShape, Workload, model_shape, workload
from smp.mesh import resolve_mesh
from smp.models.model_config import ModelConfig, ResolvedModel, resolve_model
from smp.parallel.parallelize import compute_dtype
from smp.train.arguments import parse_args
from smp.train.run_plan import make_plan, planned_launch

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
    mesh = resolve_mesh(
        room.request.section(ParallelConfig), world_size=launch.world_size, local_world_size=launch.local_world_size
    )
    needed, available = estimate_memory(shape, mesh, work), available_memory(room.device, launch.local_world_size)
    data = {
        "parameters": shape.parameters, "needed_bytes": sum(needed.values()), "available_bytes": available,
        "vocab_size": model.hf_config.vocab_size, "by_category": needed,
    }  # fmt: skip
    room.measure("model", data)
    enough = processes_that_fit(shape, work, available, tp=mesh.tp.size)
    smaller = "a smaller model, batch or sequence (--dry_run 1 shows what needs how much)"
    advice = f"use {enough} such processes with full sharding, or {smaller}" if enough else f"use {smaller}"
    check_fits(needed, available, model=model.name, processes=launch.world_size, advice=advice)
    room.ok(
        f"{model.name}: {shape.parameters:,} parameters; each process needs about {sum(needed.values()) / GIB:.1f} "
        f"GiB, and there are {available / GIB:.1f} GiB for each",
        **data,
    )


def _sizes(room: Room, model: ResolvedModel) -> tuple[ModelShape, Workload]:
    """What decides the memory of a rank."""
    request = room.request
    work = workload(
        model,
        Settings(tuple(request.section(kind) for kind in (ParallelConfig, ActivationConfig, LossConfig))),
        batch=int(request.settings.get("train_batch_size") or _BATCH),
        compute_bytes=compute_dtype(request.section(PrecisionConfig), room.device).itemsize,
        device_type=room.device.type,
        is_async=request.section(CheckpointConfig).is_async,
    )
    return model_shape(model), work


def check_plan(room: Room) -> None:
    """Plan the job as its ``--dry_run 1`` does."""
    words = room.request.training_words
    if not words:
        room.ok("no training flags were given after --, nor --config: no dry run was made")
        return
    config = parse_args([*words, "--dry_run", "1", "--dry_run_world_size", str(room.launch.world_size)])
    make_plan(config, planned_launch(config, room.launch)).close()
    room.ok("the training job accepts the settings and reads the data")
