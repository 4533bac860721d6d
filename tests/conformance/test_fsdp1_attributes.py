"""What scripts read of FSDP1: its attributes, and two of its warnings, with torch's own values and words."""

from __future__ import annotations

import re
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp._common_utils import TrainingState
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from smp import FSDP
from tests import fsdp1
from tests.distributed import run_distributed

NAMES = (
    "sharding_strategy", "mixed_precision", "cpu_offload", "backward_prefetch", "forward_prefetch", "rank",
    "world_size", "compute_device", "training_state", "limit_all_gathers",
)  # fmt: skip


def both(model=fsdp1.build, **kwargs):
    return FSDP(model(), **kwargs), fsdp1.torch_fsdp(model(), **kwargs)


def _values():
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    single = [dist.new_group([rank]) for rank in range(4)][dist.get_rank()]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("r", "s"))
    half = halves[dist.get_rank() // 2]
    for arguments in (
        {},
        {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP, "process_group": half},
        {"sharding_strategy": ShardingStrategy.NO_SHARD},
        {"sharding_strategy": ShardingStrategy.NO_SHARD, "process_group": half},
        {"process_group": single},
        {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "device_mesh": mesh},
        {"sharding_strategy": ShardingStrategy._HYBRID_SHARD_ZERO2, "device_mesh": mesh},
        {"mixed_precision": MixedPrecision(torch.bfloat16, cast_forward_inputs=True)},
        {"cpu_offload": CPUOffload(offload_params=True), "limit_all_gathers": False},
        {"backward_prefetch": None, "forward_prefetch": True},
        {"backward_prefetch": BackwardPrefetch.BACKWARD_POST},
    ):
        ours, theirs = both(**arguments, auto_wrap_policy=fsdp1.by_block)
        for mine, other in zip(FSDP.fsdp_modules(ours), TorchFSDP.fsdp_modules(theirs), strict=True):
            for name in NAMES:
                found, wanted = getattr(mine, name), getattr(other, name)
                assert (type(found), found) == (type(wanted), wanted), (arguments, name)
            ranks = [dist.get_process_group_ranks(fsdp.process_group) for fsdp in (mine, other)]
            assert ranks[0] == ranks[1], arguments
    assert FSDP(nn.Linear(2, 2), half).process_group is half and FSDP(nn.Linear(2, 2)).process_group is dist.group.WORLD
    named = FSDP(nn.Linear(2, 2), sharding_strategy="shard_grad_op", cpu_offload=True)
    assert named.sharding_strategy is ShardingStrategy.SHARD_GRAD_OP and named.cpu_offload == CPUOffload(True)


def test_attributes_have_fsdp1s_values():
    run_distributed(_values, world_size=4)


def _states():
    """In the forward and the backward of one block, of all units; then in summon_full_params."""
    found = []
    for cls, model in zip((FSDP, TorchFSDP), both(auto_wrap_policy=fsdp1.by_block), strict=True):
        seen = []

        def note(*unused, cls=cls, model=model, seen=seen):
            seen.append([unit.training_state for unit in cls.fsdp_modules(model)])

        def note_both(module, args, output, note=note):
            note()
            output.register_hook(note)

        inner = next(m for m in model.modules() if isinstance(m, fsdp1.Attention))
        inner.register_forward_hook(note_both)
        note()
        loss = fsdp1.loss_of(model, fsdp1.batch(0, 0))
        note()
        loss.backward()
        note()
        with cls.summon_full_params(model):
            note()
        note()
        found.append(seen)
    assert found[0] == found[1]
    assert {state for states in found[0] for state in states} == set(TrainingState)


def test_the_training_state_is_fsdp1s():
    run_distributed(_states, world_size=2)


class Low(nn.Module):
    """With names of its own that FSDP1's attributes have, too; its forward needs them."""

    world_size = 3

    def __init__(self):
        super().__init__()
        self.rank, self.training_state = 8, {"seen": 0}
        self.compute_device = nn.Linear(4, 8)
        self.up = nn.Linear(8, 4)

    @property
    def cpu_offload(self):
        return "none"

    def forward(self, x):
        self.training_state["seen"] += 1
        return self.up(self.compute_device(x)[..., : self.rank]) / self.world_size


def _own():
    torch.manual_seed(0)
    plain = Low()
    torch.manual_seed(0)
    model = FSDP(Low())
    x = torch.randn(2, 4)
    torch.testing.assert_close(model(x), plain(x))
    assert (model.rank, model.world_size, model.cpu_offload, model.training_state) == (8, 3, "none", {"seen": 1})
    assert isinstance(model.compute_device, nn.Linear)
    assert model.sharding_strategy is ShardingStrategy.FULL_SHARD
    model.forward_prefetch = "own"
    assert model.forward_prefetch == "own"
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        model.nothing  # noqa: B018
    assert not hasattr(model.up, "sharding_strategy")


def test_the_models_own_attributes_go_first():
    run_distributed(_own, world_size=2)


def told(call, *args, **kwargs) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call(*args, **kwargs)
    return [str(warning.message) for warning in found]


def _batch_norm():
    def model():
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Sequential(nn.Linear(4, 4)))

    mixed = MixedPrecision(torch.bfloat16)
    text = "Both mixed precision and an auto_wrap_policy were specified"
    for policy in (ModuleWrapPolicy({nn.Linear}), fsdp1.by_block):
        ours = told(FSDP, model(), auto_wrap_policy=policy, mixed_precision=mixed)
        theirs = told(TorchFSDP, model(), auto_wrap_policy=policy, mixed_precision=mixed, device_id=torch.device("cpu"))
        wanted = [line for line in theirs if line.startswith(text)]
        assert len(wanted) == 1 and wanted[0] in ours, (ours, theirs)
    for arguments in (
        {"mixed_precision": mixed},
        {"auto_wrap_policy": fsdp1.by_block},
        {"auto_wrap_policy": fsdp1.by_block, "mixed_precision": MixedPrecision(_module_classes_to_ignore=())},
    ):
        assert not [line for line in told(FSDP, model(), **arguments) if line.startswith(text)], arguments


def test_batch_norm_in_full_precision_is_said():
    run_distributed(_batch_norm, world_size=2)


def _no_gradients():
    for model in both(auto_wrap_policy=fsdp1.by_block):
        text = (
            f"Called FSDP.clip_grad_norm_() on rank {dist.get_rank()} with no gradients -- returning the total norm in "
            f"the default dtype torch.float32"
        )
        assert text in told(model.clip_grad_norm_, 1.0)
        fsdp1.loss_of(model, fsdp1.batch(0, 0)).backward()
        assert not [line for line in told(model.clip_grad_norm_, 1.0) if re.search("with no gradients", line)]


def test_clipping_without_gradients_is_said():
    run_distributed(_no_gradients, world_size=2)
