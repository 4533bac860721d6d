"""What scripts call after the constructor."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.tensor import DTensor

import smp
from smp import FSDP
from smp.errors import UserError
from tests import fsdp1
from tests.distributed import run_distributed

BFLOAT = MixedPrecision(torch.bfloat16)


def wrapped(*, tied=False, **kwargs):
    return FSDP(fsdp1.build(tied=tied), auto_wrap_policy=fsdp1.by_block, **kwargs)


def _summon():
    rank = dist.get_rank()
    plain = dict(fsdp1.build(tied=True).named_parameters())
    for options in ({}, {"mixed_precision": BFLOAT}, {"sharding_strategy": "SHARD_GRAD_OP"}):
        model = wrapped(tied=True, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        fsdp1.loss_of(model, fsdp1.batch(0, 0))  # leaves some gathered, in mixed precision
        with FSDP.summon_full_params(model):
            shown = dict(model.named_parameters())
            assert shown.keys() == plain.keys() and all(torch.equal(shown[n], p) for n, p in plain.items())
            assert model.embed.weight is model.head.weight
            with torch.no_grad():
                model.embed.weight += 1
                model.layers[1].up.bias.fill_(rank)  # each rank's own part is kept
        assert all(isinstance(p, DTensor) for p in model.parameters())
        whole = fsdp1.whole(model)
        torch.testing.assert_close(whole["embed.weight"], plain["embed.weight"] + 1)
        assert whole["layers.1.up.bias"].tolist() == [0.0] * 25 + [1.0] * 24
        with torch.no_grad(), FSDP.summon_full_params(model, writeback=False):
            model.embed.weight.zero_()
        assert fsdp1.whole(model)["embed.weight"].any()
        model(fsdp1.batch(0, 0)).sum().backward()
        with FSDP.summon_full_params(model, with_grads=True, writeback=False, offload_to_cpu=True):
            assert model.head.weight.grad.shape == plain["embed.weight"].shape
        before = fsdp1.whole(model)["norm.weight"]
        optimizer.step()
        assert not torch.equal(fsdp1.whole(model)["norm.weight"], before), "the optimizer's are still the model's"
    with FSDP.summon_full_params(model, rank0_only=True, writeback=False):
        assert isinstance(model.head.weight, DTensor) == (rank != 0)
    with FSDP.summon_full_params(model, recurse=False):
        assert not isinstance(model.norm.weight, DTensor) and isinstance(model.layers[0].norm1.weight, DTensor)
    with FSDP.summon_full_params(model.layers[0]):
        assert isinstance(model.norm.weight, DTensor) and not isinstance(model.layers[0].norm1.weight, DTensor)
    holder = nn.ModuleList([FSDP(nn.Linear(3, 3))])
    with FSDP.summon_full_params(holder, recurse=False):
        assert not isinstance(holder[0].weight, DTensor)
    with (
        pytest.raises(UserError, match=r"rank0_only.*give writeback=False"),
        FSDP.summon_full_params(model, rank0_only=True),
    ):
        pass
    with (
        FSDP.summon_full_params(model),
        pytest.raises(UserError, match="unsharded already"),
        FSDP.summon_full_params(model),
    ):
        pass
    with pytest.raises(ZeroDivisionError), FSDP.summon_full_params(model):
        raise ZeroDivisionError
    assert all(isinstance(p, DTensor) for p in model.parameters()), "shards are back after an error"


def test_summon_full_params():
    run_distributed(_summon, world_size=2)


def _forward_inside():
    inner, outer = (nn.Linear(4, 4, bias=False) for _ in range(2))
    model = FSDP(nn.Sequential(FSDP(inner, mixed_precision=BFLOAT), outer), mixed_precision=BFLOAT)
    x = torch.eye(4)
    with FSDP.summon_full_params(model), torch.no_grad():
        for layer in (model[0], model[1]):
            layer.weight.copy_(2 * torch.eye(4))
        assert torch.equal(model(x).float(), 4 * x)
    assert torch.equal(model(x).float(), 4 * x)
    model(x).sum().backward()
    assert model[1].weight.grad is not None


def test_a_forward_inside_summon_full_params_sees_what_was_written():
    run_distributed(_forward_inside, world_size=2)


def _forward_of_one_rank():
    """It would gather alone, and its exchange would be paired with the others' next."""
    model = FSDP(nn.Sequential(FSDP(nn.Linear(4, 4)), nn.Linear(4, 4)))
    x = torch.ones(2, 4)
    for called in (model, model[0]):
        with FSDP.summon_full_params(model, rank0_only=True, writeback=False):
            if dist.get_rank() == 0:
                with pytest.raises(UserError, match=r"with rank0_only the model cannot be called inside.*every rank"):
                    called(x)
        model(x).sum().backward()
    whole = FSDP(nn.Linear(4, 4), sharding_strategy="NO_SHARD")
    wanted = whole(x).detach()
    with FSDP.summon_full_params(whole, rank0_only=True, writeback=False), torch.no_grad():
        if dist.get_rank() == 0:
            assert torch.equal(whole(x), wanted), "nothing is gathered"
    whole(x).sum().backward()


def test_a_forward_of_one_rank_inside_summon_full_params_is_refused():
    run_distributed(_forward_of_one_rank, world_size=2)


def _load_inside():
    values = {name: torch.full_like(p, 0.5) for name, p in fsdp1.build(tied=True).state_dict().items()}
    for trained in (False, True):
        model = wrapped(tied=True)
        if trained:
            fsdp1.loss_of(model, fsdp1.batch(0, 0)).backward()
        with FSDP.summon_full_params(model):
            model.load_state_dict(values)
            assert isinstance(model.head.weight, DTensor), "it ends"
        assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
        with FSDP.summon_full_params(model):
            model.layers[0].up.load_state_dict({"weight": torch.ones(49, 24), "bias": torch.ones(49)})
        assert (fsdp1.whole(model)["layers.0.up.weight"] == 1).all()
        fsdp1.loss_of(model, fsdp1.batch(0, 0)).backward()
    for into in (model, model.layers[0].up):
        with (
            FSDP.summon_full_params(model, rank0_only=True, writeback=False),
            pytest.raises(UserError, match=r"rank0_only.*cannot be called inside, or loaded into.*every rank"),
        ):
            into.load_state_dict({"weight": torch.zeros(49, 24)} if into is not model else values)
        assert fsdp1.whole(model)["layers.0.up.weight"].all()


def test_load_state_dict_inside_summon_full_params():
    run_distributed(_load_inside, world_size=2)


def _apply():
    shapes = []

    def ones(module):
        if isinstance(module, nn.Linear):
            shapes.append(tuple(module.weight.shape))
            nn.init.ones_(module.weight)

    model = wrapped()
    assert model.apply(ones) is model
    assert sorted(shapes) == sorted(tuple(m.weight.shape) for m in fsdp1.build().modules() if isinstance(m, nn.Linear))
    assert all((v == 1).all() for n, v in fsdp1.whole(model).items() if "up.weight" in n or "head" in n)
    model.eval().train()
    model.requires_grad_(False)
    assert not any(p.requires_grad for p in model.parameters())


def test_apply_sees_whole_parameters():
    run_distributed(_apply, world_size=2)


def _optimizer_after_a_forward():
    """An evaluation leaves parameters gathered; an optimizer made then must still get the shards."""
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP"):
        model, plain = wrapped(sharding_strategy=strategy), fsdp1.build()
        with torch.no_grad():
            model(fsdp1.batch(0, 0))
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
        for optimizer, trained in zip(optimizers, (model, plain), strict=True):
            fsdp1.loss_of(trained, fsdp1.batch(0, 0)).backward()
            optimizer.step()
        assert fsdp1.worst(fsdp1.whole(model), dict(plain.named_parameters())) < 1e-6


def test_an_optimizer_made_after_an_evaluation_trains_all():
    run_distributed(_optimizer_after_a_forward, world_size=2)


def _hooks():
    model = FSDP(nn.Linear(4, 4))
    replacement = r"reduce_dtype=.*set_custom_reduce_scatter of torch's fully_shard.*DistributedDataParallel"
    with pytest.raises(UserError, match=f"register_comm_hook is not available: .*{replacement}"):
        model.register_comm_hook(None, lambda state, gradients, output: None)
    assert callable(model.set_custom_reduce_scatter), "what the sentence names is there"


def test_communication_hooks_are_refused():
    run_distributed(_hooks, world_size=1)


def _clipped():
    """Each kind of norm, infinity where a rank holds nothing of a parameter, and the bound 0 of FSDP1."""
    model, plain = FSDP(nn.Linear(3, 1)), nn.Linear(3, 1)
    plain.load_state_dict(model.state_dict())
    x = torch.tensor([[1.0, -2.0, 3.0]])
    for norm_type in (1.0, 2.0, 3.0, float("inf")):
        for trained in (model, plain):
            trained.zero_grad()
            trained(x).sum().backward()
        norm = model.clip_grad_norm_(1.5, norm_type)
        wanted = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.5, norm_type)
        torch.testing.assert_close(norm, wanted)
        torch.testing.assert_close(model.weight.grad.full_tensor(), plain.weight.grad)
    assert smp.clip_grad_norm_(model, 0.0) > 0 and model.weight.grad.full_tensor().any(), "only measured"
    assert model.clip_grad_norm_(0) > 0 and not model.weight.grad.full_tensor().any()
    smp.FSDP.clip_grad_norm_(model, 1.0)
    model.zero_grad()
    assert model.clip_grad_norm_(1.0) == 0, "no gradients at all"


@pytest.mark.smoke
def test_clipping_by_any_norm():
    run_distributed(_clipped, world_size=2)


def _nested_dtypes():
    """Inputs are cast at the outermost unit, or where a unit asks for it: torch's own example is among them."""

    def nest(wrap, first, second):
        torch.manual_seed(0)
        inner = nn.Sequential(nn.Linear(4, 4), wrap(nn.Linear(4, 4), mixed_precision=first))
        return wrap(inner, mixed_precision=second)

    half = MixedPrecision(torch.float16, cast_forward_inputs=True)
    bfloat = MixedPrecision(torch.bfloat16, cast_forward_inputs=True)
    kept = MixedPrecision(torch.bfloat16, cast_root_forward_inputs=False)
    x = torch.randn(2, 4)
    for first, second in ((half, bfloat), (BFLOAT, BFLOAT), (bfloat, None), (bfloat, BFLOAT)):
        models = [nest(wrap, first, second) for wrap in (FSDP, fsdp1.torch_fsdp)]
        found, wanted = (model(x) for model in models)
        assert found.dtype == wanted.dtype and torch.equal(found, wanted), (first, second)
    for dtypes in ((kept, kept), (BFLOAT, None)):  # the outermost is told not to cast; the inner is not outermost
        for model in (nest(wrap, *dtypes) for wrap in (FSDP, fsdp1.torch_fsdp)):
            with pytest.raises(RuntimeError, match="same dtype"):
                model(x)


def test_nested_mixed_precision_casts_where_fsdp1_casts():
    run_distributed(_nested_dtypes, world_size=2)


def _prefetched():
    rank = dist.get_rank()
    model = wrapped(forward_prefetch=True, backward_prefetch=None)
    plain = wrapped()
    counts = []
    for trained in (plain, model):
        smp.comm.reset_report()
        for step in range(2):
            fsdp1.loss_of(trained, fsdp1.batch(step, rank)).backward()
        counts.append(smp.comm.report().calls("all_gather"))
    assert counts[0] == counts[1]
    units = [model, *model.layers]
    for unit, following in itertools.pairwise(units):
        assert unit._get_fsdp_state()._states_to_forward_prefetch == [following._get_fsdp_state()]
        assert unit._get_fsdp_state()._states_to_backward_prefetch == [unit._get_fsdp_state()]
    assert not plain._get_fsdp_state()._states_to_forward_prefetch


def test_prefetching_follows_the_first_forward():
    run_distributed(_prefetched, world_size=2, backend="smddp")


def _channels_last():
    torch.manual_seed(0)
    convolution = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    weight = convolution.weight.detach().clone()
    assert not weight.is_contiguous()
    model = FSDP(convolution)
    assert torch.equal(model.state_dict()["weight"], weight)
    assert model(torch.randn(1, 3, 5, 5)).shape == (1, 4, 3, 3)


def test_parameters_of_another_memory_order():
    run_distributed(_channels_last, world_size=2)


class Transposed(nn.Module):
    """Memory of another order on the first rank than on the others."""

    def __init__(self):
        super().__init__()
        rank = dist.get_rank()
        torch.manual_seed(rank)
        self.convolution = nn.Conv2d(3, 4, 3)
        self.linear = nn.Linear(5, 3)
        self.register_buffer("table", torch.randn(5, 3))
        if rank == 0:
            self.to(memory_format=torch.channels_last)
            self.linear.weight = nn.Parameter(torch.randn(5, 3).t())
            self.table = torch.randn(3, 5).t()

    def forward(self, x):
        return self.linear(x) + self.table.sum()


def _transposed():
    model = Transposed()
    wanted = [{name: value.contiguous() for name, value in model.state_dict().items()}]
    dist.broadcast_object_list(wanted, src=0)
    model = FSDP(model, sync_module_states=True)
    for name, value in model.state_dict().items():
        assert torch.equal(value, wanted[0][name]), name


@pytest.mark.parametrize("backend", ["gloo", "smddp"])
def test_values_come_from_rank_0_whatever_their_order_in_memory(backend):
    run_distributed(_transposed, world_size=2, backend=backend)
