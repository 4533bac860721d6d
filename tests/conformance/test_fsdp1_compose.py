"""What composes with FSDP: recomputation, offloading, gradient scalers, torch.compile; and ``smp.fully_shard``."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy, StateDictType
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

import smp
from smp import FSDP
from tests import fsdp1
from tests.distributed import run_distributed


def wrapped(**kwargs):
    return FSDP(fsdp1.build(), auto_wrap_policy=fsdp1.by_block, **kwargs)


def is_block(module):
    return isinstance(module, fsdp1.Block)


def _recomputation():
    rank = dist.get_rank()
    plain, wanted = fsdp1.build().double(), fsdp1.plain_gradients()

    def gradients(model):
        smp.comm.reset_report()
        fsdp1.loss_of(model, fsdp1.batch(0, rank)).backward()
        gathers = smp.comm.report().calls("all_gather")
        found = {n.replace("_checkpoint_wrapped_module.", ""): grad for n, grad in fsdp1.gradients(model).items()}
        assert fsdp1.worst(found, wanted) < 1e-12
        return gathers

    def fresh():
        return FSDP(fsdp1.build().double(), auto_wrap_policy=fsdp1.by_block)

    bare = gradients(fresh())
    after = fresh()
    apply_activation_checkpointing(after, checkpoint_wrapper_fn=checkpoint_wrapper, check_fn=is_block)
    before = fsdp1.build().double()
    apply_activation_checkpointing(before, checkpoint_wrapper_fn=checkpoint_wrapper, check_fn=is_block)
    before = FSDP(before, auto_wrap_policy=fsdp1.by_block)
    ours = fresh()
    smp.apply_activation_checkpointing(ours, check_fn=is_block)
    offloaded = fresh()
    smp.apply_activation_checkpointing(offloaded, check_fn=is_block)
    for model in (after, before, ours):
        assert gradients(model) == bare, "recomputation gathers nothing anew"
        assert model.state_dict().keys() == plain.state_dict().keys()
        model.load_state_dict(plain.state_dict())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        optimizer.step()
        state = FSDP.optim_state_dict(model, optimizer)
        assert state["state"].keys() == wanted.keys()
        optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, state))
        with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            model.load_state_dict(model.state_dict())


def test_activation_checkpointing_composes():
    run_distributed(_recomputation, world_size=2, backend="smddp")


def _offload(folder):
    model = FSDP(fsdp1.build().double(), auto_wrap_policy=fsdp1.by_block)
    smp.apply_activation_checkpointing(model, check_fn=is_block)
    smp.offload_wrapper(model, directory=str(folder))
    fsdp1.loss_of(model, fsdp1.batch(0, dist.get_rank())).backward()
    assert fsdp1.worst(fsdp1.gradients(model), fsdp1.plain_gradients()) < 1e-12
    assert smp.clip_grad_norm_(model, 0.5) > 0


@pytest.mark.slow
def test_activation_offloading_composes(tmp_path):
    run_distributed(_offload, tmp_path, world_size=2)


def _fully_shard():
    rank = dist.get_rank()
    wanted = fsdp1.plain_gradients(tied=True)
    for mesh in (None, init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (2, 1), mesh_dim_names=("r", "s"))):
        model = fsdp1.build(tied=True).double()
        for layer in model.layers:
            smp.fully_shard(layer, mesh=mesh, reshard_after_forward=True)
        assert smp.fully_shard([model.embed, model.norm, model.head], mesh=mesh)[0] is model.embed
        policy = MixedPrecisionPolicy(output_dtype=torch.float64)
        assert smp.fully_shard(model, mesh=mesh, mp_policy=policy) is model
        smp.comm.reset_report()
        fsdp1.loss_of(model, fsdp1.batch(0, rank)).backward()
        assert fsdp1.worst(fsdp1.gradients(model), wanted) < 1e-12, "averaged"
        if mesh is None and dist.get_backend() == "smddp":
            assert smp.comm.report().calls("reduce_scatter", "shared buffer") == fsdp1.BLOCKS + 1


@pytest.mark.parametrize("backend", [pytest.param("gloo", marks=pytest.mark.slow), "smddp"])
def test_fully_shard_is_torchs_with_our_collectives(backend):
    run_distributed(_fully_shard, world_size=2, backend=backend)


def _scaled():
    """fp16 with torch's ordinary gradient scaler and FSDP1's: an infinite gradient on one rank skips the step."""
    rank = dist.get_rank()
    for make in (lambda: torch.amp.GradScaler("cpu"), lambda: ShardedGradScaler(device="cpu")):
        model, scaler = wrapped(mixed_precision=MixedPrecision(torch.float16)), make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        moved = []
        for step in range(3):
            before = fsdp1.whole(model)
            loss = fsdp1.loss_of(model, fsdp1.batch(step, rank))
            scaler.scale(loss * (float("inf") if step == 1 and rank == 0 else 1.0)).backward()
            scaler.unscale_(optimizer)
            model.clip_grad_norm_(1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            moved.append(fsdp1.worst(fsdp1.whole(model), before) > 0)
        assert moved == [True, False, True] and scaler.get_scale() == 2.0**15


def test_gradient_scalers_compose():
    run_distributed(_scaled, world_size=2)


def _compiled():
    model = wrapped()
    compiled = torch.compile(model, backend="eager")
    fsdp1.loss_of(compiled, fsdp1.batch(0, dist.get_rank())).backward()
    assert fsdp1.worst(fsdp1.gradients(model), fsdp1.plain_gradients(double=False)) < 1e-5
    assert {k.removeprefix("_orig_mod.") for k in compiled.state_dict()} == fsdp1.build().state_dict().keys()


@pytest.mark.slow
def test_torch_compile_composes():
    run_distributed(_compiled, world_size=2)


class Renames(nn.Module):
    """Its state dict hooks save parts of a fused weight, and more of a tied one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.qkv = nn.Linear(4, 12, bias=False)
        self.square = nn.Linear(4, 4, bias=False)
        self.first = nn.Embedding(7, 4)
        self.last = nn.Linear(4, 7, bias=False)
        self.last.weight = self.first.weight
        self._register_state_dict_hook(Renames.split)

    @staticmethod
    def split(module, state, prefix, metadata):
        for name, part in zip("qkv", state.pop(prefix + "qkv.weight").chunk(3), strict=True):
            state[prefix + name] = part
        square = state[prefix + "square.weight"]
        state.update({prefix + "left": square[:, :2], prefix + "right": square[:, 2:], prefix + "turned": square.t()})
        state[prefix + "double"] = 2 * state[prefix + "first.weight"]
        state[prefix + "same"] = state[prefix + "first.weight"]

    def forward(self, x):
        return self.last(self.first(x)) + self.square(self.qkv(self.first(x))[..., :4]).sum()


def _views():
    wanted = Renames().state_dict()
    for strategy in ("FULL_SHARD", "NO_SHARD"):
        found = FSDP(Renames(), sharding_strategy=strategy).state_dict()
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            assert torch.equal(found[name], value), (strategy, name)
        assert found["first.weight"].data_ptr() == found["last.weight"].data_ptr(), "a tied one is written once"


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_state_dict_hooks_that_save_views(ranks):
    run_distributed(_views, world_size=ranks)
