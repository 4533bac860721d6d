"""A group of one rank: torch's bits, with fewer copies and one stream."""

import copy

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import smp
from smp.parallel.sharding import fsdp_modules, set_gradient_sync
from tests.distributed import run_distributed
from tests.reference import build_reference, global_batch, tiny_config
from tests.unit.test_activation_offload import blocks_of


class Copies(TorchDispatchMode):
    """Counts the bytes that ``copy_`` writes in fp32, into another tensor than it reads."""

    nbytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.copy_.default and args[0] is not args[1] and args[0].dtype == torch.float32:
            self.nbytes += args[0].nbytes
        return function(*args, **(kwargs or {}))


def torchs(model):
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for module in (*blocks_of(model), model):
        fully_shard(module, mp_policy=policy, reshard_after_forward=False)
    return model


def backward(model, number, *, last):
    set_gradient_sync(model, last=last, defer=False)
    model(input_ids=global_batch(number)[0]).logits.float().square().mean().backward()


def gradients(model):
    return {name: p.grad.full_tensor().clone() for name, p in model.named_parameters()}


def _one_rank():
    smp.init({})
    reference = build_reference("llama_gqa", torch.float32)
    theirs, ours = torchs(copy.deepcopy(reference)), copy.deepcopy(reference)
    ours = smp.parallelize(ours, dtype=torch.bfloat16)
    found, copied = [], []
    for model in (theirs, ours):
        with Copies() as copies:
            for number in range(2):
                backward(model, number, last=number == 1)
        found.append(gradients(model))
        copied.append(copies.nbytes)
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    parameters = sum(p.numel() for p in reference.parameters())
    assert copied == [copied[0], copied[0] - 2 * 4 * parameters]  # what is reduced, of each micro-batch
    context = ours._get_fsdp_state()._comm_ctx
    streams = ("all_gather_copy_in_stream", "all_gather_stream", "reduce_scatter_stream", "all_reduce_stream")
    assert len({id(getattr(context, name)) for name in streams}) == 1
    assert len({id(getattr(theirs._get_fsdp_state()._comm_ctx, name)) for name in streams}) == 4


def test_a_rank_alone_reduces_without_a_copy():
    run_distributed(_one_rank, world_size=1)


def _after_an_error():
    smp.init({})
    model = smp.parallelize(build_reference("llama_gqa", torch.float32), dtype=torch.bfloat16)
    backward(model, 0, last=True)
    expected = gradients(model)
    model.zero_grad()
    for module in fsdp_modules(model):
        if module._get_fsdp_state()._fsdp_param_group is not None:  # as a reduction leaves it that fails halfway
            module._get_fsdp_state()._fsdp_param_group._reduce_scatter_comm.allocate(
                (1,), dtype=torch.float32, device=torch.device("cpu")
            )
    for _ in range(2):  # of which the second would write into the first's
        backward(model, 0, last=True)
    assert all(torch.equal(2 * expected[name], found) for name, found in gradients(model).items())


def test_a_reduction_that_fails_leaves_no_buffer():
    run_distributed(_after_an_error, world_size=1)


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


def _adapters(world_size):
    smp.init({})
    model = smp.lora(build_reference("llama_gqa", torch.float32), rank=4)
    model = smp.parallelize(model)
    groups = [m._get_fsdp_state()._fsdp_param_group for m in fsdp_modules(model)]
    gathered = [p.sharded_param.requires_grad for group in groups if group is not None for p in group.fsdp_params]
    assert all(gathered) == (world_size == 1) and sum(gathered) == sum(p.requires_grad for p in model.parameters())
    backward(model, 0, last=True)
    assert all((p.grad is not None) == p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("world_size", [1, 2])
def test_frozen_parameters_are_gathered_from_others_alone(world_size):
    run_distributed(_adapters, world_size, world_size=world_size)
