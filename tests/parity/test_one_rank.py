"""A group of one rank: torch's bits, with fewer copies and one stream."""

import copy
import gc
import weakref

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import smp
from smp.config import ParallelConfig
from smp.mesh import resolve_mesh
from smp.parallel.sharding import fsdp_modules, set_gradient_sync, shard_model
from tests.distributed import run_distributed
from tests.reference import build_reference, global_batch, tiny_config
from tests.unit.test_activation_offload import blocks_of


class Copies(TorchDispatchMode):
    """Counts the bytes that copies and casts write, into another tensor than they read."""

    nbytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        if function is torch.ops.aten.copy_.default and args[0] is not args[1]:
            self.nbytes += args[0].nbytes
        elif function is torch.ops.aten._to_copy.default:
            self.nbytes += found.nbytes
        elif function is torch.ops.fsdp.chunk_cat.default:
            self.nbytes += kwargs["out"].nbytes
        elif function is torch.ops.aten.div.Tensor:
            self.nbytes += found.nbytes
        return found


def torchs(model, dtype, mesh=None):
    policy = MixedPrecisionPolicy(dtype, None if dtype is None else torch.float32)
    for module in (*blocks_of(model), model):
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        if mesh is not None:  # gloo does not average
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return model


def backward(model, number, *, last):
    set_gradient_sync(model, last=last, defer=False)
    model(input_ids=global_batch(number)[0]).logits.float().square().mean().backward()


def gradients(model):
    return {name: p.grad.full_tensor().clone() for name, p in model.named_parameters()}


def _compare(dtype, replicas):
    """Two micro-batches. What torch writes of a parameter in each, and what is written here, in bytes."""
    mesh = init_device_mesh("cpu", (replicas, 1), mesh_dim_names=("replicate", "shard")) if replicas > 1 else None
    smp.init({"sharding_strategy": "no_shard"})
    reference = build_reference("llama_gqa", torch.float32)
    theirs, ours = torchs(copy.deepcopy(reference), dtype, mesh), copy.deepcopy(reference)
    ours = smp.parallelize(ours, dtype=dtype)
    found, copied = [], []
    for model in (theirs, ours):
        with Copies() as copies:
            for number in range(2):
                backward(model, number, last=number == 1)
        found.append(gradients(model))
        copied.append(copies.nbytes)
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    gather = {None: (4, 0), torch.bfloat16: (2 + 2, 2)}[dtype]  # a cast, and a copy of it
    # To where they are reduced, from there, and divided; or a cast of the first, to which the second are added.
    reduction = (2 * (4 + 4 + 4), 2 * (4 + 4)) if replicas > 1 else (2 * (4 + 4), 0 if dtype is None else 4)
    saved = 2 * (gather[0] - gather[1]) + reduction[0] - reduction[1]
    assert copied[0] - copied[1] == saved * sum(p.numel() for p in reference.parameters())
    context = ours._get_fsdp_state()._comm_ctx
    streams = ("all_gather_copy_in_stream", "all_gather_stream", "reduce_scatter_stream", "all_reduce_stream")
    assert len({id(getattr(context, name)) for name in streams}) == (4 if replicas > 1 else 1)
    assert len({id(getattr(theirs._get_fsdp_state()._comm_ctx, name)) for name in streams}) == 4


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("replicas", [1, 2])
def test_what_is_not_sharded_takes_torchs_bits_and_fewer_copies(dtype, replicas):
    run_distributed(_compare, dtype, replicas, world_size=replicas)


def _script_freezes():
    smp.init({})
    model = build_reference("llama_gqa", torch.float32)
    blocks_of(model)[0].requires_grad_(False)
    model = smp.parallelize(model)
    assert all(isinstance(p, DTensor) for p in model.parameters())  # which it may train later
    blocks_of(model)[0].requires_grad_(True)
    backward(model, 0, last=True)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def test_what_a_script_has_frozen_is_sharded():
    run_distributed(_script_freezes, world_size=1)


def _split_meta_model(dtype):
    smp.init({"tensor_parallel_degree": 2})
    model = smp.meta_init(tiny_config("llama_gqa"))
    smp.lora(model, rank=4)
    model = smp.parallelize(smp.transform(model), dtype=dtype)
    assert torch.isfinite(model(input_ids=global_batch(0)[0]).logits.full_tensor()).all()


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_model_without_values_that_is_split_gets_its_adapters_and_frozen_values(dtype):
    run_distributed(_split_meta_model, dtype, world_size=2)


def _adapters():
    smp.init({})
    model = smp.lora(build_reference("llama_gqa", torch.float32), rank=4)
    model = smp.parallelize(model)
    every = list(model.parameters())
    with Copies() as copies:
        backward(model, 0, last=True)
    assert copies.nbytes < sum(p.numel() for p in every if p.requires_grad)
    assert all((p.grad is not None) == p.requires_grad for p in every)


def test_what_is_frozen_is_used_as_it_is():
    run_distributed(_adapters, world_size=1)


def _replace_values():
    smp.init({})
    model = smp.parallelize(build_reference("llama_gqa", torch.float32))
    backward(model, 0, last=True)
    model.load_state_dict({name: 2 * value for name, value in model.state_dict().items()}, assign=True)
    found = model(input_ids=global_batch(0)[0]).logits
    other = smp.parallelize(build_reference("llama_gqa", torch.float32))
    other.load_state_dict(model.state_dict())
    assert torch.equal(found, other(input_ids=global_batch(0)[0]).logits)


def test_values_that_a_script_replaces_are_computed_with():
    run_distributed(_replace_values, world_size=1)


def _scripts():
    smp.init({})
    reference = build_reference("llama_gqa", torch.float32)

    def begun():
        return smp.parallelize(copy.deepcopy(reference), dtype=torch.bfloat16)

    # The collector finds a model whose weights autograd's hooks know.
    for recorded in (True, False):
        model = begun()
        with torch.set_grad_enabled(recorded):
            loss = model(input_ids=global_batch(0)[0]).logits.float().square().mean()
        if recorded:
            loss.backward()
        known = weakref.ref(model)
        del model, loss
        gc.collect()
        assert known() is None
    plain = begun()
    backward(plain, 0, last=True)
    expected = gradients(plain)

    def check(model, times=1.0):
        backward(model, 0, last=True)
        assert all(torch.equal(found, expected[name] * times) for name, found in gradients(model).items())

    # What a script asks of torch is torch's: it divides by the factor twice where there is one rank.
    model = begun()
    for module in fsdp_modules(model):
        module.set_gradient_divide_factor(4.0)
    check(model, 1 / 16)
    model, seen = begun(), []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(seen.append)
    for module in fsdp_modules(model):
        if hasattr(module, "set_reduce_scatter_unused_params"):
            module.set_reduce_scatter_unused_params(True)
    check(model)
    assert len(seen) == len(expected) == len({id(each) for each in seen})
    model, gathered = begun(), []
    norm = blocks_of(model)[0].input_layernorm

    def watch(module, _):
        module.weight.register_post_accumulate_grad_hook(lambda leaf: gathered.append(leaf.grad is not None))

    norm.register_forward_pre_hook(watch)
    check(model)
    assert gathered == [True]


def test_what_a_script_asks_of_gradients_holds():
    run_distributed(_scripts, world_size=1)


class Two(torch.nn.Module):
    """Two layers, of which a forward may leave one out."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = (torch.nn.Linear(8, 8, bias=False) for _ in range(2))

    def forward(self, x, uses):
        found = self.first(x)
        return self.second(found) if uses else found


def _leaves_one_out():
    mesh = resolve_mesh(ParallelConfig(), world_size=1, local_world_size=1).join("cpu")
    x, found = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)).bfloat16(), []
    for rounds_once in (False, True):
        model = shard_model(
            Two().bfloat16(), [], mesh=mesh, parallel=ParallelConfig(), param_dtype=torch.bfloat16,
            rounds_once=rounds_once,
        )  # fmt: skip
        for _ in range(2):
            for last in (False, True):
                set_gradient_sync(model, last=last, defer=False)
                model(x, uses=not last).float().square().mean().backward()
            found.append(model.second.weight.grad.full_tensor())
            model.zero_grad()
    assert all(torch.equal(each, found[0]) for each in found)


def test_a_gradient_of_an_earlier_microbatch_alone_is_of_its_step():
    run_distributed(_leaves_one_out, world_size=1)
