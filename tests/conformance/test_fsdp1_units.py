"""What becomes a unit, how modules are wrapped, and what is said of arguments that cannot be kept."""

from __future__ import annotations

import datetime
import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    _or_policy,
    always_wrap_policy,
    enable_wrap,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
    wrap,
)

import smp
from smp import FSDP
from smp.errors import UserError
from tests import fsdp1
from tests.distributed import run_distributed
from tests.fsdp1 import Block, Tiny

SIZE = 1500


class Normed(nn.Module):
    """With what mixed precision leaves alone."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6))
        self.last = nn.Linear(6, 2)

    def forward(self, x):
        return self.last(self.inner(x))


def by_own_rule(module, recurse, nonwrapped_numel):
    return True if recurse else nonwrapped_numel > 300 and not isinstance(module, nn.ModuleList)


def _custom(module):
    if isinstance(module, Block):
        return {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP, "mixed_precision": None}
    return isinstance(module, nn.Embedding)


POLICIES = {
    "function": by_own_rule,
    "transformer": functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}),
    "size": functools.partial(size_based_auto_wrap_policy, min_num_params=SIZE),
    "size, forced": functools.partial(
        size_based_auto_wrap_policy, min_num_params=SIZE, force_leaf_modules={Block}, exclude_wrap_modules={nn.Linear}
    ),
    "lambda": functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda m: isinstance(m, (nn.Embedding, Block))),
    "always": always_wrap_policy,
    "classes": ModuleWrapPolicy({Block, nn.Linear}),
    "custom": CustomPolicy(_custom),
    "or": functools.partial(
        _or_policy,
        policies=[
            functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda m: isinstance(m, nn.Embedding)),
            functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}),
        ],
    ),
    "none": None,
}


def names(model, cls) -> set[str]:
    """The names of a model's units. FSDP1 counts containers too, which are never called, so never gather."""
    found = set()
    for name, module in model.named_modules():
        if isinstance(module, cls) and not isinstance(module.module, (nn.ModuleList, nn.ModuleDict)):
            found.add(name.replace("_fsdp_wrapped_module.", "").replace("_fsdp_wrapped_module", "").rstrip("."))
    return found


def _policies():
    for name, policy in POLICIES.items():
        for mixed in (None, MixedPrecision(torch.bfloat16)):
            ours = FSDP(fsdp1.build(), auto_wrap_policy=policy, mixed_precision=mixed)
            theirs = fsdp1.torch_fsdp(fsdp1.build(), auto_wrap_policy=policy, mixed_precision=mixed)
            assert names(ours, FSDP) == names(theirs, TorchFSDP), name
            assert len(FSDP.fsdp_modules(ours)) == len(names(ours, FSDP))
            assert FSDP.fsdp_modules(ours, root_only=True) == [ours]
            wanted = {n for n, _ in fsdp1.build().named_parameters()}
            assert {n for n, _ in ours.named_parameters()} == wanted
    sizes = {name: len(names(FSDP(fsdp1.build(), auto_wrap_policy=p), FSDP)) for name, p in POLICIES.items()}
    assert sizes["none"] == 1 and sizes["transformer"] == 1 + fsdp1.BLOCKS and sizes["always"] > 20, sizes
    for policy in (
        ModuleWrapPolicy({nn.Sequential}),
        functools.partial(size_based_auto_wrap_policy, min_num_params=30),
    ):
        mixed = MixedPrecision(torch.bfloat16, buffer_dtype=torch.bfloat16)
        ours = FSDP(fsdp1.build(Normed), auto_wrap_policy=policy, mixed_precision=mixed)
        theirs = fsdp1.torch_fsdp(fsdp1.build(Normed), auto_wrap_policy=policy, mixed_precision=mixed)
        assert names(ours, FSDP) == names(theirs, TorchFSDP)
        assert "inner.1" in names(ours, FSDP), "batch norm is apart"
        x = torch.randn(4, 6)
        found, wanted = ours(x), theirs(x)
        assert found.dtype == wanted.dtype == torch.bfloat16 and torch.equal(found, wanted)
        assert ours.inner[1].running_mean.dtype == torch.float32


def test_units_are_those_of_fsdp1():
    run_distributed(_policies, world_size=2)


class Shared(nn.Module):
    """One module in two places, as the embedding of encoder and decoder."""

    def __init__(self):
        super().__init__()
        one = nn.Embedding(12, 8)
        self.left = nn.ModuleDict({"embed": one, "out": nn.Linear(8, 8)})
        self.right = nn.ModuleDict({"embed": one, "out": nn.Linear(8, 8)})

    def forward(self, ids):
        return sum(part["out"](part["embed"](ids)) for part in (self.left, self.right))


def _ties():
    """A unit that would take one place of a tied parameter is none; what is around it holds both."""
    by_class = ModuleWrapPolicy({Block, nn.Embedding, nn.Linear})
    tied = FSDP(fsdp1.build(tied=True), auto_wrap_policy=by_class)
    found = names(tied, FSDP)
    assert "embed" not in found and "head" not in found and "layers.0" in found and "layers.0.up" in found
    assert tied.embed.weight is tied.head.weight
    free = names(FSDP(fsdp1.build(), auto_wrap_policy=by_class), FSDP)
    assert {"embed", "head"} <= free
    plain = fsdp1.build(tied=True)
    fsdp1.loss_of(tied, fsdp1.batch(0, 0)).backward()
    fsdp1.loss_of(plain, fsdp1.batch(0, 0)).backward()
    torch.testing.assert_close(tied.embed.weight.grad.full_tensor(), plain.embed.weight.grad)

    # By hand nobody can mend it.
    apart = fsdp1.build(tied=True)
    FSDP(apart.embed)
    with pytest.raises(UserError, match="weight of a Linear is tied to a parameter of a module that is sharded"):
        FSDP(apart.head)
    apart = fsdp1.build(Shared)
    FSDP(nn.Sequential(apart.left["embed"], apart.left["out"]))
    with pytest.raises(UserError, match="weight of a Embedding is tied to"):
        FSDP(nn.Sequential(apart.right["embed"], apart.right["out"]))

    shared = FSDP(fsdp1.build(Shared), auto_wrap_policy=always_wrap_policy)
    assert "left.embed" in names(shared, FSDP), "the module is one unit, and in two places"
    ids = torch.arange(12)[None]
    assert torch.equal(shared(ids), fsdp1.build(Shared)(ids))


def test_tied_parameters_stay_one():
    run_distributed(_ties, world_size=2)


class Named(nn.Module):
    """Its own submodule has the name of FSDP's property."""

    def __init__(self):
        super().__init__()
        self.module = nn.Linear(4, 4)

    def forward(self, x):
        return self.module(x)


def _wrapping():
    torch.manual_seed(0)
    a, b = nn.Linear(4, 5), nn.Linear(5, 3)
    plain = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    plain.load_state_dict({"0.weight": a.weight, "0.bias": a.bias, "1.weight": b.weight, "1.bias": b.bias})
    model = FSDP(nn.Sequential(FSDP(a), b))
    x = torch.randn(2, 4)
    assert torch.equal(model(x), plain(x))
    assert isinstance(model, FSDP) and isinstance(model, nn.Sequential) and isinstance(model[0], FSDP)
    assert not isinstance(model[1], FSDP)
    assert model.check_is_root() and not model[0].check_is_root()
    assert model.module is model and type(model).__name__ == "FSDPSequential"
    assert list(dict(model.named_parameters())) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert type(model[:1]) is nn.Sequential, "a slice is the plain class"

    with enable_wrap(wrapper_cls=FSDP, sharding_strategy="SHARD_GRAD_OP"):
        inner = wrap(nn.Linear(4, 4))
        model = FSDP(nn.Sequential(inner, nn.Linear(4, 4)))
    assert isinstance(inner, FSDP) and FSDP.fsdp_modules(model) == [model, inner]

    named = FSDP(Named())
    assert isinstance(named.module, nn.Linear) and named(x).shape == (2, 4)
    with pytest.raises(UserError, match="cannot be copied"):
        import copy

        copy.deepcopy(named)

    class Mine(FSDP):
        pass

    assert isinstance(Mine(nn.Linear(4, 4)), Mine)


def test_wrapping_by_hand():
    run_distributed(_wrapping, world_size=2)


def _ignored():
    for ignored in (
        lambda m: {"ignored_modules": [m.layers[0]]},
        lambda m: {"ignored_states": [m.layers[0]]},
        lambda m: {"ignored_states": list(m.layers[0].parameters())},
    ):
        model = fsdp1.build()
        model = FSDP(model, auto_wrap_policy=fsdp1.by_block, **ignored(model))
        assert not hasattr(model.layers[0].up.weight, "full_tensor") and hasattr(
            model.layers[1].up.weight, "full_tensor"
        )
        fsdp1.loss_of(model, fsdp1.batch(0, dist.get_rank())).backward()
        own = model.layers[0].up.weight.grad
        others = [torch.empty_like(own) for _ in range(2)]
        dist.all_gather(others, own)
        assert not torch.equal(*others), "gradients of what is ignored are not reduced"
        assert model.state_dict()["layers.0.up.weight"].shape == own.shape
        norm = model.clip_grad_norm_(float("inf"))
        assert norm > 0


def test_ignored_modules_are_left_alone():
    run_distributed(_ignored, world_size=2)


def _refusals():
    world = dist.group.WORLD
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("r", "s"))
    linear = functools.partial(nn.Linear, 4, 4)
    inside = linear()
    cases = [
        ({"sharding_strategy": "FULL"}, "sharding_strategy is 'FULL'.*FULL_SHARD, SHARD_GRAD_OP"),
        ({"backward_prefetch": 3}, "backward_prefetch is 3.*BACKWARD_PRE"),
        ({"mixed_precision": torch.bfloat16}, "mixed_precision is a dtype: give torch's MixedPrecision"),
        ({"mixed_precision": MixedPrecision(keep_low_precision_grads=True)}, "keep_low_precision_grads.*leave it out"),
        ({"cpu_offload": 1}, "cpu_offload is a int: give torch's CPUOffload"),
        ({"process_group": [world, world]}, r"process_group is a list.*\(group to shard over"),
        ({"process_group": (world, world)}, "pair of groups.*give one group, or HYBRID_SHARD"),
        ({"process_group": world, "device_mesh": mesh}, "both process_group and device_mesh"),
        ({"device_mesh": mesh}, "device_mesh has 2 dimensions.*takes 1"),
        ({"device_mesh": mesh["s"], "sharding_strategy": "HYBRID_SHARD"}, "has 1 dimensions.*takes 2"),
        ({"device_mesh": "cpu"}, "device_mesh is a str: give a DeviceMesh"),
        ({"device_id": 0}, "device_id cuda:0 is a GPU, and there is none"),
        ({"device_id": 1.5}, "device_id is a float"),
        ({"auto_wrap_policy": 3}, "auto_wrap_policy is a int: give a policy"),
        ({"auto_wrap_policy": CustomPolicy(lambda m: 3)}, "auto_wrap_policy does not work.*returned 3"),
        ({"param_init_fn": 3}, "param_init_fn is a int"),
        ({"ignored_modules": [inside], "ignored_states": [inside]}, "give ignored_states alone"),
        ({"ignored_modules": [torch.ones(1)]}, "ignored_modules contains Tensor: give modules"),
        ({"ignored_states": [inside, inside.weight]}, "ignored_states contains Linear, Parameter: give either"),
        ({"ignored_modules": 3}, "ignored_modules is a int: give a list"),
        ({"sync_module_states": "False"}, "sync_module_states is 'False': give True or False"),
        ({"forward_prefetch": 2}, "forward_prefetch is 2: give True or False"),
        ({"mixed_precision": MixedPrecision("bf16")}, "mixed_precision has the param_dtype 'bf16': give a floating"),
        ({"mixed_precision": MixedPrecision(buffer_dtype=torch.int8)}, "the buffer_dtype torch.int8"),
        ({"mixed_precision": MixedPrecision(None, torch.complex64)}, "the reduce_dtype torch.complex64"),
        *(
            ({"auto_wrap_policy": policy}, "auto_wrap_policy does not work: .*: give a policy")
            for policy in (
                transformer_auto_wrap_policy,
                functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={"Linear"}),
                nn.Linear,
                ModuleWrapPolicy,
                lambda module: True,
            )
        ),
    ]
    for arguments, text in cases:
        with pytest.raises(UserError, match=text):
            FSDP(nn.Sequential(linear()), **arguments)
    policy = CustomPolicy(lambda m: {"auto_wrap_policy": None} if isinstance(m, nn.Linear) else False)
    with pytest.raises(UserError, match="auto_wrap_policy cannot be given for a single module"):
        FSDP(nn.Sequential(linear()), auto_wrap_policy=policy)
    with pytest.raises(UserError, match="module is a list"):
        FSDP([linear()])
    with pytest.raises(UserError, match=r"a ModuleList is never called.*wrap its members"):
        FSDP(nn.ModuleList([linear()]))
    holder = nn.ModuleDict({"whole": FSDP(linear()), "bare": linear()})
    with pytest.raises(UserError, match=r"a ModuleDict is never called.*wrap its members"):
        FSDP(holder)
    with pytest.raises(UserError, match="is sharded already"):
        FSDP(smp.fully_shard(linear()))
    with pytest.raises(UserError, match="the module is wrapped already: wrap by hand"):
        FSDP(FSDP(linear()), auto_wrap_policy=always_wrap_policy)
    with pytest.raises(UserError, match="forward_prefetch is 2: give True or False"):
        FSDP(FSDP(linear()), forward_prefetch=2)
    with pytest.raises(UserError, match="0 is wrapped already: wrap by hand"):
        FSDP(nn.Sequential(FSDP(linear())), auto_wrap_policy=always_wrap_policy)
    scalar = linear()
    scalar.temperature = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(UserError, match=r"temperature of a Linear is a scalar.*\(1,\)"):
        FSDP(scalar)
    with pytest.raises(UserError, match=r"one dtype: weight of a Linear is torch.float32, .*torch.float64"):
        FSDP(nn.Sequential(linear(), linear(dtype=torch.float64)))
    model = FSDP(nn.Sequential(FSDP(linear()), linear()))
    with pytest.raises(UserError, match="no_sync: another FSDP module is around"), model[0].no_sync():
        pass
    with pytest.raises(UserError, match="clip_grad_norm_: another"):
        model[0].clip_grad_norm_(1.0)
    for arguments, text in (
        ((1.0, 0), r"norm_type is 0.0: give a number above 0"),
        ((1.0, -float("inf")), "norm_type is -inf"),
        ((-1.0,), r"max_norm is -1.0: give a number from 0"),
        ((float("nan"),), "max_norm is nan"),
    ):
        with pytest.raises(UserError, match=text):
            model.clip_grad_norm_(*arguments)


def test_what_cannot_be_kept_is_said():
    run_distributed(_refusals, world_size=2)


def test_a_process_group_is_asked_for():
    with pytest.raises(UserError, match="needs a process group"):
        smp.FSDP(Tiny())


def test_what_has_no_effect_is_said_once(caplog):
    from smp.fsdp import options

    options._told.clear()
    with caplog.at_level("INFO", logger="smp.fsdp"):
        for _ in range(2):
            options.read_options({"use_orig_params": True, "limit_all_gathers": False})
        options.read_options({"use_orig_params": False, "limit_all_gathers": True})
    assert [record.getMessage().split(":")[1].strip() for record in caplog.records] == [
        "limit_all_gathers=False has no effect",
        "use_orig_params=True has no effect",
    ]


def _waits_as_asked() -> None:
    for strategy in ("NO_SHARD", "HYBRID_SHARD"):
        model = smp.FSDP(torch.nn.Linear(4, 4), sharding_strategy=strategy)
        for group in model.weight.device_mesh.get_all_groups():
            assert group._get_backend(torch.device("cpu")).options._timeout == datetime.timedelta(seconds=77)


@pytest.mark.parametrize("backend", ["gloo", "smddp"])
def test_groups_made_here_wait_as_long_as_the_default_group(backend):
    run_distributed(_waits_as_asked, world_size=2, backend=backend, timeout=77)


def _twice():
    """The second call finds nothing left to shard."""
    rank = dist.get_rank()
    for arguments in ({}, {"mixed_precision": MixedPrecision(torch.bfloat16, cast_forward_inputs=True)}):
        found = []
        for cls in (FSDP, fsdp1.torch_fsdp):
            model = cls(cls(fsdp1.build(), auto_wrap_policy=fsdp1.by_block, **arguments), **arguments)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            losses = []
            for step in range(3):
                with model.no_sync():
                    fsdp1.loss_of(model, fsdp1.batch(step, rank)).backward()
                loss = fsdp1.loss_of(model, fsdp1.batch(step, rank, 1))
                loss.backward()
                losses += [loss.item(), model.clip_grad_norm_(1.0).item()]
                optimizer.step()
                optimizer.zero_grad()
            found.append((losses, fsdp1.whole(model)))
        tolerance = 1e-2 if arguments else 1e-6
        assert found[0][0] == pytest.approx(found[1][0], rel=tolerance)
        assert fsdp1.worst(found[0][1], found[1][1]) < tolerance
    inner = FSDP(nn.Linear(4, 4))
    assert FSDP(inner) is inner and inner.check_is_root() and isinstance(inner, FSDP)
    around = FSDP(nn.Sequential(FSDP(FSDP(nn.Linear(4, 4)))))
    around(torch.ones(1, 4)).sum().backward()
    assert around[0].weight.grad is not None and not around[0].check_is_root()


def test_wrapping_twice():
    run_distributed(_twice, world_size=2)


class Holder(nn.Module):
    """Nobody calls it, only its members."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 4)


def _containers():
    rank, policy = dist.get_rank(), ModuleWrapPolicy({nn.Linear})

    def by_list(cls, **arguments):
        return cls(nn.ModuleList([cls(nn.Linear(4, 6), **arguments), cls(nn.Linear(6, 4), **arguments)]), **arguments)

    def by_dict(cls, **arguments):
        return cls(nn.ModuleDict({"a": nn.Linear(4, 6), "b": nn.Linear(6, 4)}), auto_wrap_policy=policy, **arguments)

    def by_class(cls, **arguments):
        return cls(Holder(), auto_wrap_policy=policy, **arguments)

    def members(model):
        if hasattr(model, "append"):
            return model[0], model[1]
        return (model["a"], model["b"]) if hasattr(model, "keys") else (model.a, model.b)

    def run(model, x):
        a, b = members(model)
        return b(a(x).relu())

    for make in (by_list, by_dict, by_class):
        for arguments in ({}, {"mixed_precision": MixedPrecision(torch.bfloat16)}):
            found = []
            for cls in (FSDP, fsdp1.torch_fsdp):
                torch.manual_seed(0)
                model = make(cls, **arguments)
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                losses = []
                for step in range(3):
                    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank))
                    loss = run(model, x).float().pow(2).mean()
                    loss.backward()
                    losses.append(loss.item())
                    optimizer.step()
                    optimizer.zero_grad()
                # Of the units: torch's container shows nothing once its members have been called.
                found.append((losses, [fsdp1.whole(unit) for unit in members(model)]))
            assert found[0][0] == pytest.approx(found[1][0], rel=1e-2 if arguments else 1e-6), make
            for mine, theirs in zip(found[0][1], found[1][1], strict=True):
                assert fsdp1.worst(mine, theirs) < (1e-2 if arguments else 1e-6), make

    model, plain = by_list(FSDP), nn.ModuleList([nn.Linear(4, 6), nn.Linear(6, 4)])
    assert isinstance(model, FSDP) and isinstance(model, nn.ModuleList) and type(model[:1]) is nn.ModuleList
    plain.load_state_dict(model.state_dict())
    assert FSDP.fsdp_modules(model) == [model, model[0], model[1]] and model.check_is_root()
    x = torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(0))
    with model.no_sync():
        run(model, x[0] + rank).sum().backward()
        assert not any(p.grad.full_tensor().any() for p in model.parameters())
    run(model, x[1] + rank).sum().backward()
    sum(run(plain, x[micro] + other).sum() for micro in range(2) for other in range(2)).div(2).backward()
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    torch.testing.assert_close(model.clip_grad_norm_(1.0), norm)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad)
    with FSDP.summon_full_params(model):
        assert model[0].weight.shape == (6, 4)
    whole = FSDP(Calls(by_list(FSDP)))
    whole(x[0]).sum().backward()
    assert whole.check_is_root() and not any(unit.check_is_root() for unit in FSDP.fsdp_modules(whole)[1:])
    assert all(p.grad is not None for p in whole.parameters())


class Calls(nn.Module):
    def __init__(self, members):
        super().__init__()
        self.members = members

    def forward(self, x):
        return self.members[1](self.members[0](x))


def test_a_root_that_nobody_calls_holds_units():
    run_distributed(_containers, world_size=2)
