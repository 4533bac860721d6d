"""Large models on large meshes, without machines: where every parameter lies, and how much of it a rank holds.

What is expected is computed here from the models' configurations alone.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

import pytest
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import train_lib
from smp.config import ParallelConfig, Settings
from smp.errors import UserError
from smp.memory.estimate import estimate_memory
from smp.memory.shape import Workload, model_shape
from smp.mesh import Mesh, lay_out
from smp.models.model_config import ModelConfig, resolve_model
from smp.train.dry_run import sharded_model

WORK = Workload(sequence_length=4096, micro_batch_size=1, compute_bytes=2)


def preset(name: str, layers: int | None = None):
    resolved = resolve_model(ModelConfig(model=name))
    if layers is not None:
        resolved.hf_config.num_hidden_layers = layers
    return resolved


def part(total: int, parts: int, index: int) -> int:
    """Rows of ``torch.chunk(total, parts)[index]``."""
    step = math.ceil(total / parts)
    return max(0, min(step, total - index * step))


def llama_shapes(config) -> dict[str, tuple[tuple[int, ...], int | None, bool]]:
    """By the end of the name: shape, axis split by tensor parallelism, and whether heads of keys and values."""
    wide, hidden, width = config.vocab_size, config.hidden_size, config.intermediate_size
    key_value = config.num_key_value_heads * hidden // config.num_attention_heads
    return {
        "embed_tokens.weight": ((wide, hidden), 0, False), "lm_head.weight": ((wide, hidden), 0, False),
        "q_proj.weight": ((hidden, hidden), 0, False), "k_proj.weight": ((key_value, hidden), 0, True),
        "v_proj.weight": ((key_value, hidden), 0, True), "o_proj.weight": ((hidden, hidden), 1, False),
        "gate_proj.weight": ((width, hidden), 0, False), "up_proj.weight": ((width, hidden), 0, False),
        "down_proj.weight": ((hidden, width), 1, False), "norm.weight": ((hidden,), None, False),
    }  # fmt: skip


def neox_shapes(config) -> dict[str, tuple[tuple[int, ...], int | None, bool]]:
    wide, hidden, width = config.vocab_size, config.hidden_size, config.intermediate_size
    return {
        "embed_in.weight": ((wide, hidden), 0, False), "lm_head.weight": ((wide, hidden), 0, False),
        "query_key_value.weight": ((3 * hidden, hidden), 0, False),
        "query_key_value.bias": ((3 * hidden,), 0, False),
        "attention.dense.weight": ((hidden, hidden), 1, False), "attention.dense.bias": ((hidden,), None, False),
        "dense_h_to_4h.weight": ((width, hidden), 0, False), "dense_h_to_4h.bias": ((width,), 0, False),
        "dense_4h_to_h.weight": ((hidden, width), 1, False), "dense_4h_to_h.bias": ((hidden,), None, False),
        "norm.weight": ((hidden,), None, False), "norm.bias": ((hidden,), None, False),
    }  # fmt: skip


def expected_place(shape, axis, key_value, *, config, mesh: Mesh, rank: int):
    """Placements over (dp_shard, tp) and the local shape."""
    data, tp_rank = divmod(rank, mesh.tp.size)
    shard_rank = data % mesh.shard.size
    if key_value and mesh.tp.size > config.num_key_value_heads:
        axis = None
    local = list(shape)
    if axis is not None:
        assert shape[axis] % mesh.tp.size == 0
        local[axis] //= mesh.tp.size
    local[0] = part(local[0], mesh.shard.size, shard_rank)
    first = _StridedShard(0, split_factor=mesh.tp.size) if axis == 0 else Shard(0)
    return (first, Replicate() if axis is None else Shard(axis)), tuple(local), tp_rank


def check(resolved, mesh: Mesh, rank: int) -> int:
    """Compare every parameter; returns how many elements the rank holds."""
    config, held = resolved.hf_config, 0
    shapes = (neox_shapes if config.model_type == "gpt_neox" else llama_shapes)(config)
    settings = Settings((ParallelConfig(tensor_parallel_degree=mesh.tp.size),))
    with sharded_model(resolved, mesh, settings, rank=rank) as model:
        parameters = dict(model.named_parameters())
        per_block = len(shapes) - 2 - sum(name.startswith("norm") for name in shapes)
        norms = sum(name.startswith("norm") for name in shapes)
        assert len(parameters) == 2 + norms + config.num_hidden_layers * (per_block + 2 * norms)
        for name, parameter in parameters.items():
            (key,) = [key for key in shapes if name.endswith(key)]
            placements, local, tp_rank = expected_place(*shapes[key], config=config, mesh=mesh, rank=rank)
            assert tuple(parameter.shape) == shapes[key][0], name
            assert parameter.device_mesh.mesh_dim_names[-2:] == ("dp_shard", "tp"), name
            assert parameter.placements[-2:] == placements, (name, parameter.placements)
            assert all(p == Replicate() for p in parameter.placements[:-2]), name
            assert tuple(parameter.to_local().shape) == local and parameter.is_meta, name
            assert parameter.device_mesh["tp"].get_local_rank() == tp_rank
            held += parameter.to_local().numel()
    return held


def elsewhere(function: Callable[..., int], *args: object) -> int:
    """Call in a process of its own: torch keeps meshes, with this process's first rank in them."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as pool:
        return pool.submit(function, *args).result()


@pytest.mark.parametrize(
    ("name", "layers", "mesh", "ranks"),
    [
        pytest.param("llama70b", None, lay_out(1, 32, 8), (77,), marks=pytest.mark.full),
        ("llama70b", 2, lay_out(1, 16, 16), (0, 18, 255)),  # 8 key/value heads for 16 ranks
        pytest.param("llama70b", 2, lay_out(4, 8, 8), (9, 255), marks=pytest.mark.full),
        pytest.param("gpt_neox_20b", None, lay_out(1, 8, 4), (31,), marks=pytest.mark.full),
        ("gpt_neox_20b", 2, lay_out(2, 8, 4), (40,)),
    ],
)
def test_every_parameter_s_place(name, layers, mesh, ranks):
    resolved = preset(name, layers)
    predicted = estimate_memory(model_shape(resolved), mesh, WORK)["parameters"] / 4
    for rank in ranks:
        # What the memory plan says differs by the norms, which every rank holds.
        assert elsewhere(check, resolved, mesh, rank) == pytest.approx(predicted, rel=1e-3), rank


@pytest.mark.full
def test_the_job_plans_a_large_mesh(tmp_path):
    words = "--model llama70b --dry_run 1 --dry_run_world_size 256 --tensor_parallel_degree 8 --use_synthetic_data 1"
    words += f" --sharding_strategy full_shard --output_dir {tmp_path / 'run'}"
    assert elsewhere(dry_run_into, words.split(), str(tmp_path / "out")) == 0
    out = (tmp_path / "out").read_text()
    assert "mesh: dp_replicate 1 x dp_shard 32 x tp 8 = 256 processes" in out
    needed = {
        line.strip().rsplit(None, 2)[0]: float(line.split()[-2]) for line in out.splitlines() if "GiB" in line[-4:]
    }
    assert needed["parameters"] == pytest.approx(68_976_648_192 / 256 * 4 / 2**30, abs=2e-3)
    assert needed["optimizer state"] == pytest.approx(2 * needed["parameters"], abs=2e-3)


def dry_run_into(words: list[str], path: str) -> int:
    with open(path, "w") as file, contextlib.redirect_stdout(file):
        return train_lib.main(words)


def split_unevenly(rank: int) -> int:
    resolved = preset("llama_tiny", 1)
    resolved.hf_config.vocab_size = 65
    sentence = "degree 2 does not divide the vocabulary's 65 rows, and --hybrid_shard_degree 3 does not divide .* of 1$"
    with pytest.raises(UserError, match=sentence), sharded_model(resolved, lay_out(1, 3, 2), Settings(), rank=rank):
        pass
    with sharded_model(resolved, lay_out(1, 2, 2), Settings(), rank=rank) as model:
        weight = model.get_input_embeddings().weight
    assert weight.placements == (Shard(1), Shard(0))
    return weight.to_local().shape[0]


def test_what_splits_unevenly_is_sharded_along_its_width_or_refused():
    assert [elsewhere(split_unevenly, rank) for rank in (0, 1)] == [33, 32]
