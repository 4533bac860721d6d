"""smp in a user's own script."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed as dist
import transformers
from torch.distributed import distributed_c10d

import smp
from smp.optimizer import OptimConfig, build_optimizer
from tests.distributed import run_distributed
from tests.parity import CLIP, LR, VOCABULARY, build_reference, global_batch, reference_trajectory


def _script(expected, config):
    """What README shows: a user's own loop."""
    assert not smp.is_initialized()
    mesh = smp.init(config)
    assert smp.is_initialized() and mesh.data_size == 2
    model = smp.parallelize(build_reference("llama_gqa", torch.float64), activation_checkpointing=True)
    optimizer = build_optimizer(model, OptimConfig(), lr=LR)
    for step, wanted in enumerate(expected.losses):
        inputs, labels = (part.chunk(mesh.data_size)[mesh.data_rank] for part in global_batch(step))
        tokens = torch.tensor(smp.count_valid_tokens(labels))
        dist.all_reduce(tokens)
        loss = smp.causal_lm_loss_sum(model(inputs, use_cache=False).logits, labels) / tokens
        loss.backward()
        norm = smp.clip_grad_norm_(model, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach()
        dist.all_reduce(loss)
        assert loss.item() == pytest.approx(wanted, rel=1e-9)
        assert norm.item() == pytest.approx(expected.norms[step], rel=1e-8)


@pytest.mark.parametrize("as_file", [False, True])
def test_a_users_loop(as_file, tmp_path):
    config: dict | str = {"hybrid_shard_degree": 2}
    if as_file:
        (tmp_path / "smp.json").write_text(json.dumps(config))
        config = str(tmp_path / "smp.json")
    expected = reference_trajectory(build_reference("llama_gqa", torch.float64), 3)
    run_distributed(_script, expected, config, world_size=2)


def _refusals():
    model = torch.nn.Linear(1, 1)
    model.config = transformers.GPT2Config(vocab_size=VOCABULARY)
    with pytest.raises(smp.UserError, match=r"call smp.init\(\{\.\.\.\}\) before"):
        smp.parallelize(model)
    with pytest.raises(smp.UserError, match="unknown key shard_degre: did you mean shard_degree"):
        smp.init({"shard_degre": 1})
    with pytest.raises(smp.UserError, match="JSON"):
        smp.init("/nowhere.json")
    with pytest.raises(smp.UserError, match="does not divide"):
        smp.init({"shard_degree": 5})
    smp.init({"shard_degree": 1})
    with pytest.raises(smp.UserError, match="'gpt2' is not supported"):
        smp.parallelize(model)


def test_refusals():
    run_distributed(_refusals, world_size=1)


def _mesh_device(backend, cuda, expected):
    """What ``smp.init`` lays the mesh over when a real group has the backends that torch resolves ``backend`` to."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: cuda)
        patch.setattr(torch._C, "_get_accelerator", lambda: torch.device("cuda" if cuda else "cpu"))
        resolved = str(distributed_c10d.BackendConfig(dist.Backend(backend)))
        patch.setitem(distributed_c10d._world.pg_backend_config, dist.group.WORLD, resolved)
        patch.setattr(smp.api, "build_mesh", lambda degrees, device_type: device_type)
        assert smp.init() == expected, resolved


# "undefined" is torch's name for the backend of init_process_group().
@pytest.mark.parametrize(
    ("backend", "cuda", "expected"),
    [
        ("undefined", True, "cuda"),
        ("undefined", False, "cpu"),
        ("nccl", True, "cuda"),
        ("cpu:gloo,cuda:nccl", True, "cuda"),
        ("cpu:gloo,cuda:nccl", False, "cpu"),
        ("gloo", True, "cpu"),
        ("smddp", True, "cuda"),
        ("cpu:smddp", True, "cpu"),
    ],
)
def test_the_mesh_is_where_the_backend_serves(backend, cuda, expected):
    run_distributed(_mesh_device, backend, cuda, expected, world_size=1)


def test_init_needs_a_process_group():
    with pytest.raises(smp.UserError, match="init_process_group"):
        smp.init()
