"""What a script does between steps: converts, clears, evaluates, accumulates, and leaves parameters out."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import MixedPrecision, StateDictType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor

from smp import FSDP
from smp.errors import UserError
from tests import fsdp1
from tests.distributed import run_distributed

X = torch.ones(2, 4)
BY_LINEAR = ModuleWrapPolicy({nn.Linear})
LARGE = 1e9


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))


def wrapped(**options):
    return FSDP(net(), auto_wrap_policy=BY_LINEAR, **options)


def train(model, x=X):
    model(x).sum().backward()


def norm_of_one_process(*inputs):
    plain = net()
    for x in inputs:
        train(plain, x)
    return torch.nn.utils.clip_grad_norm_(plain.parameters(), LARGE).item()


def _replaced():
    model = wrapped()
    model[0].weight = nn.Parameter(torch.zeros_like(model[0].weight))  # of the same sharding, before the first forward
    model[0].bias = nn.Parameter(torch.zeros_like(model[0].bias))
    plain = net()
    with torch.no_grad():
        assert torch.equal(model(X), plain[2].bias.expand(2, 4))
    for value in (torch.ones(1, 2), torch.ones(8, 4), model[0].weight.detach().clone()):
        model = wrapped()
        if isinstance(value, DTensor):
            train(model)
        model[0].weight = nn.Parameter(value)
        for use in (train, nn.Module.state_dict):
            with pytest.raises(
                UserError, match=r"weight( of a FSDPLinear)? was replaced.* of the shape \(8, 4\): write into it inside"
            ):
                use(model)
    model = wrapped()
    with FSDP.summon_full_params(model):
        assert model.state_dict()["0.weight"].shape == (8, 4)
        model[0].weight.data.zero_()
    assert not model.state_dict()["0.weight"].any()

    for module in (wrapped(), FSDP(nn.Linear(4, 4))):
        around = nn.Sequential(module)
        around(X)
        with pytest.raises(
            UserError, match=r"in the Sequential has run .*: wrap the module around it before its first"
        ):
            FSDP(around)
    if dist.get_world_size() > 1:
        with pytest.raises(UserError, match="through smp's own buffers, which it would replace: leave it out"):
            FSDP(nn.Linear(4, 4)).set_allocate_memory_from_process_group_for_comm(True)


def test_what_has_no_effect_is_refused():
    run_distributed(_replaced, world_size=2, backend="smddp", timeout=60)


def _conversions():
    wanted = norm_of_one_process(X)
    for trained, mixed in ((False, None), (True, None), (True, MixedPrecision(torch.bfloat16))):
        model = wrapped(mixed_precision=mixed).to(torch.device("cpu")).cpu()
        if trained:
            train(model)
            model.zero_grad()
        for dtype, convert in ((torch.float64, model.double), (torch.bfloat16, model.bfloat16)):
            assert convert() is model
            model(X.to(dtype)).sum().backward()
            assert {p.dtype for p in model.parameters()} == {p.grad.dtype for p in model.parameters()} == {dtype}
            assert model.clip_grad_norm_(LARGE).item() == pytest.approx(wanted, rel=2e-2)
            model.zero_grad()
    taken = FSDP(nn.Linear(4, 4)).double()
    other = nn.Linear(4, 4)
    other.weight = taken.weight
    with pytest.raises(UserError, match="tied to a parameter of a module that is sharded already"):
        FSDP(other)


def test_a_wrapped_model_is_converted_and_moved():
    run_distributed(_conversions, world_size=2)


class Towers(nn.Module):
    """Each rank may use another of its parts, of different sizes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.image, self.sound, self.out = nn.Linear(4, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, 1)

    def forward(self, x, used):
        return self.out(sum((getattr(self, name)(x) for name in used), x))


def _unused():
    rank = dist.get_rank()
    cases = (  # what each rank uses in the first and the second of two micro-batches
        ((["image"], ["image"]), (["sound"], ["sound"])),
        ((["image", "sound"], ["image"]), ([], ["image"])),
        ((["image"], []), (["sound"], ["sound", "image"])),
    )
    bfloat = MixedPrecision(torch.bfloat16, torch.float32)
    options = ({}, {"sharding_strategy": "NO_SHARD"}, {"sharding_strategy": "SHARD_GRAD_OP", "mixed_precision": bfloat})
    for used, given in itertools.product(cases, options):
        model, plain = FSDP(Towers(), **given), Towers()
        generator = torch.Generator().manual_seed(1)
        data = torch.randn(2, 2, 3, 4, generator=generator)
        with model.no_sync():
            model(data[rank, 0], used[rank][0]).float().pow(2).mean().backward()
        model(data[rank, 1], used[rank][1]).float().pow(2).mean().backward()
        for each, micro in itertools.product(range(2), range(2)):
            (plain(data[each, micro], used[each][micro]).pow(2).mean() / 2).backward()
        found = {n: p.grad.full_tensor() for n, p in model.named_parameters()}
        for name, parameter in plain.named_parameters():
            wanted = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            close = {"rtol": 5e-2, "atol": 5e-2} if "mixed_precision" in given else {}
            torch.testing.assert_close(found[name], wanted, msg=f"{name}, {used}, {given}", **close)


def test_a_parameter_that_only_some_ranks_use_has_the_average_gradient():
    run_distributed(_unused, world_size=2)


def _never_used():
    """As with FSDP1: zeros in a unit that ran, None in one that did not."""
    for wrap in (FSDP, fsdp1.torch_fsdp):
        model = wrap(Towers())
        model(X, ["image"]).sum().backward()
        summon = TorchFSDP if isinstance(model, TorchFSDP) else FSDP
        with summon.summon_full_params(model, with_grads=True):
            grads = {n.removeprefix("_fsdp_wrapped_module."): p.grad for n, p in model.named_parameters()}
            assert grads["sound.weight"] is not None and not grads["sound.weight"].any(), wrap
        model = wrap(Towers(), auto_wrap_policy=BY_LINEAR)
        model(X, ["image"]).sum().backward()
        assert all(p.grad is None for n, p in model.named_parameters() if "sound" in n), wrap


def test_a_parameter_that_no_rank_uses():
    run_distributed(_never_used, world_size=2)


def _set_to_none(model, optimizer):
    for parameter in model.parameters():
        parameter.grad = None


def _dropped():
    clear = {
        "optimizer": lambda model, optimizer: optimizer.zero_grad(),
        "zeros": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
        "model": lambda model, optimizer: model.zero_grad(),
        "by hand": _set_to_none,
    }
    once, twice = norm_of_one_process(X), norm_of_one_process(X, 2 * X)
    for strategy, synced in (("FULL_SHARD", False), ("FULL_SHARD", True), ("NO_SHARD", False)):
        for name, drop in clear.items():
            model = wrapped(sharding_strategy=strategy)
            optimizer = torch.optim.Adam(model.parameters(), foreach=True)
            if synced:
                train(model)
            with model.no_sync():
                (model(X).sum() * math.nan).backward()
            drop(model, optimizer)
            train(model)
            assert model.clip_grad_norm_(LARGE).item() == pytest.approx(once), (strategy, synced, name)
        model = wrapped(sharding_strategy=strategy)
        for x in (X, 2 * X):
            with model.no_sync():
                train(model, x)
            with torch.no_grad():
                model(X)
        with pytest.raises(
            UserError, match=r"accumulated under no_sync.*outside of no_sync, or drop them by zero_grad"
        ):
            model.clip_grad_norm_(1.0)
        train(model, 0 * X)
        wanted = norm_of_one_process(X, 2 * X, 0 * X)
        assert model.clip_grad_norm_(LARGE).item() == pytest.approx(wanted) and wanted > twice, "nothing was dropped"


def _cleared_without_elements():
    """A rank that holds nothing of a unit sees no zeros: the model's own method tells it."""
    model = FSDP(nn.Linear(4, 1))
    with model.no_sync():
        (model(X).sum() * math.nan).backward()
    model.zero_grad(set_to_none=False)
    train(model)
    assert model.clip_grad_norm_(LARGE).isfinite()


def test_clearing_gradients_where_a_rank_holds_no_element():
    run_distributed(_cleared_without_elements, world_size=2)


class Outlier(nn.Module):
    """The second unit is so small that the last rank holds nothing of it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.value = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x):
        return self.value(self.body(x))


def _cleared_by_the_optimizer_without_elements():
    """What holds of the units that a rank has elements of holds of the others."""
    plain = Outlier()
    train(plain)
    wanted = torch.nn.utils.clip_grad_norm_(plain.parameters(), LARGE)
    for foreach in (True, False):
        model = FSDP(Outlier(), auto_wrap_policy=BY_LINEAR)
        optimizer = torch.optim.SGD(model.parameters(), foreach=foreach)
        with model.no_sync():
            (model(X).sum() * math.nan).backward()
        optimizer.zero_grad(set_to_none=False)
        train(model)
        torch.testing.assert_close(model.clip_grad_norm_(LARGE), wanted)


def test_an_optimizer_clears_where_a_rank_holds_no_element_of_a_unit():
    run_distributed(_cleared_by_the_optimizer_without_elements, world_size=2)


def test_clearing_gradients_drops_what_accumulated_without_reduction():
    run_distributed(_dropped, world_size=2)


def _fresh():
    plain = net()
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.mul_(0.5)
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"):
        for evaluating in (True, False) if strategy == "NO_SHARD" else (True,):
            model = wrapped(sharding_strategy=strategy)
            with torch.set_grad_enabled(not evaluating):
                model(X)
            for parameter in model.parameters():
                parameter.data.mul_(0.5)
            torch.testing.assert_close(model(X), plain(X), msg=f"{strategy} {evaluating}")
    skips = FSDP(Skips(), auto_wrap_policy=BY_LINEAR, forward_prefetch=True)
    train(skips)
    skips.skip = True
    for training in (False, True):
        with torch.set_grad_enabled(training):
            skips(X)
        for parameter in skips.parameters():
            parameter.data.mul_(0.5)
    skips.skip = False
    plain = Skips()
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.mul_(0.25)
    torch.testing.assert_close(skips(X), plain(X))


class Skips(nn.Module):
    skip = False

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        x = self.a(x)
        return self.c(x if self.skip else self.b(x))


def test_a_forward_sees_parameters_as_they_are_now():
    run_distributed(_fresh, world_size=2)


def _assigned():
    """FSDP1 takes such values over at the next forward; here nothing could find them."""

    def replace(model):
        for parameter in model.parameters():
            parameter.data = 2 * parameter.data

    uses = {
        "forward": lambda model: model(X),
        "state_dict": lambda model: model.state_dict(),
        "summon": lambda model: FSDP.summon_full_params(model).__enter__(),
    }
    changes = {
        "assigned": replace,
        "vector": lambda model: nn.utils.vector_to_parameters(
            2 * nn.utils.parameters_to_vector(model.parameters()), model.parameters()
        ),
    }
    for strategy, trained, (use, run) in itertools.product(("FULL_SHARD", "NO_SHARD"), (False, True), uses.items()):
        for change, apply in changes.items():
            model = wrapped(sharding_strategy=strategy)
            if trained:
                train(model)
            apply(model)
            with pytest.raises(UserError, match=r"\.data of .*(weight|bias).* was assigned.*param\.data\.copy_"):
                run(model)
                pytest.fail(f"{strategy} {trained} {use} {change}")


@pytest.mark.smoke
def test_assigning_to_data_is_refused():
    run_distributed(_assigned, world_size=2)


def _exchanged():
    """What the sentence advises works, and what else gives a parameter other memory is no assignment."""
    model, plain = wrapped(), net()
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.mul_(2)
    wanted, before = plain(X), wrapped()(X).detach()
    backup = {name: parameter.data.clone() for name, parameter in model.named_parameters()}
    twice = {name: 2 * value for name, value in backup.items()}
    for values, expected in ((twice, wanted), (backup, before)):
        for name, parameter in model.named_parameters():
            parameter.data.copy_(values[name])
        torch.testing.assert_close(model(X), expected)
    with FSDP.summon_full_params(model):
        for parameter in model.parameters():
            parameter.data = 2 * parameter.data
    torch.testing.assert_close(model(X), wanted)
    for parameter in model.parameters():
        parameter.data = parameter.data
    model.load_state_dict(plain.state_dict(), assign=True)
    torch.testing.assert_close(model.double()(X.double()).float(), wanted)
    train(model, X.double())
    assert model.state_dict()["0.weight"].dtype == torch.float64


def test_other_ways_to_change_parameters():
    run_distributed(_exchanged, world_size=2)


def _unfrozen():
    for mixed in (MixedPrecision(torch.bfloat16), MixedPrecision(torch.bfloat16, torch.float32)):
        model = net()
        model[0].requires_grad_(False)
        model = FSDP(model, auto_wrap_policy=BY_LINEAR, mixed_precision=mixed)
        train(model)
        assert model[0].weight.grad is None
        model.zero_grad()
        model.requires_grad_(True)
        train(model)
        assert model[0].weight.grad.dtype == torch.float32
        assert model.clip_grad_norm_(LARGE).item() == pytest.approx(norm_of_one_process(X), rel=2e-2)


def test_a_frozen_unit_is_unfrozen_under_mixed_precision():
    run_distributed(_unfrozen, world_size=2)


def _no_sync():
    model = wrapped()
    with model.no_sync():
        with model.no_sync():
            pass
        train(model)
        assert not any(p.grad.full_tensor().any() for p in model.parameters()), "still the outer one"
    model.zero_grad()
    with pytest.raises(ZeroDivisionError), model.no_sync():
        raise ZeroDivisionError
    train(model)
    assert model.clip_grad_norm_(LARGE).item() == pytest.approx(norm_of_one_process(X)), "reduced again after an error"


def test_no_sync_leaves_as_it_found():
    run_distributed(_no_sync, world_size=2)


def _settings():
    model = wrapped()
    before = FSDP.get_state_dict_type(model)
    with pytest.raises(ZeroDivisionError), FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        inside = FSDP.get_state_dict_type(model)
        raise ZeroDivisionError
    after = FSDP.get_state_dict_type(model)
    for name in ("state_dict_type", "state_dict_config", "optim_state_dict_config"):
        assert getattr(after, name) is getattr(before, name) and getattr(inside, name) != getattr(before, name), name


def test_state_dict_type_restores_all_that_it_set():
    run_distributed(_settings, world_size=1)


def _sentences():
    for given in ("gpu", -1, "meta", torch.device("meta")):
        with pytest.raises(UserError, match=r"device_id is .*: give a GPU's number from 0"):
            FSDP(net(), device_id=given)
    model = net()
    model.empty = nn.Parameter(torch.zeros(0, 4))
    with pytest.raises(UserError, match=r"empty of a Sequential has the shape \(0, 4\), so there is nothing to shard"):
        FSDP(model)


def test_what_cannot_be_sharded_is_a_sentence():
    run_distributed(_sentences, world_size=1)
