"""The global norm over different meshes equals torch's on whole tensors."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from smp.errors import UserError
from smp.parallel import grad_norm
from smp.parallel.grad_norm import clip_grad_norm_
from smp.parallel.sharding import set_gradient_sync
from tests.distributed import run_distributed


def distributed(gradient, mesh, how):
    """A parameter with a gradient that is distributed so."""
    parameter = nn.Parameter(distribute_tensor(torch.zeros_like(gradient), mesh, how))
    parameter.grad = distribute_tensor(gradient.clone(), mesh, how)
    return parameter


def _check_mixed():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    torch.manual_seed(0)
    whole = [torch.randn(6, 5), torch.randn(3, 4), torch.randn(7)]
    placements = [(mesh, (Shard(0), Shard(1))), (mesh["b"], (Shard(0),)), (mesh, (Replicate(), Shard(0)))]
    parameters = [distributed(tensor, *where) for tensor, where in zip(whole, placements, strict=True)]
    plain = nn.Parameter(torch.zeros(2))
    plain.grad = torch.tensor([3.0, 4.0])
    reference = [nn.Parameter(torch.zeros_like(t)) for t in [*whole, plain.data]]
    for parameter, gradient in zip(reference, [*whole, plain.grad], strict=True):
        parameter.grad = gradient.clone()
    expected = torch.nn.utils.clip_grad_norm_(reference, 1.0)
    norm = clip_grad_norm_([*parameters, plain, nn.Parameter(torch.ones(1))], 1.0)
    torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)
    for mine, theirs in zip([*parameters, plain], reference, strict=True):
        gradient = mine.grad.full_tensor() if isinstance(mine.grad, DTensor) else mine.grad
        torch.testing.assert_close(gradient, theirs.grad, rtol=1e-6, atol=0)


def test_mixed_meshes():
    run_distributed(_check_mixed, world_size=4)


@pytest.mark.parametrize("bound", [0.0, float("inf")])
def test_no_bound_only_measures(bound):
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    assert clip_grad_norm_([parameter], bound) == 5
    assert parameter.grad.tolist() == [3.0, 4.0]


def test_gradients_in_bf16_are_scaled_in_fp32(monkeypatch):
    monkeypatch.setattr(grad_norm, "_SCALED", 7)
    gradients = [torch.randn(shape, dtype=torch.bfloat16) for shape in ((5, 3), (4,), (), (0, 3))]
    parameters = [nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    norm = torch.cat([gradient.float().flatten() for gradient in gradients]).norm()
    scale = 0.37 / (clip_grad_norm_(parameters, 0.37) + 1e-6)
    assert abs(scale - 0.37 / norm) < 1e-6
    for parameter, gradient in zip(parameters, gradients, strict=True):
        assert torch.equal(parameter.grad, (gradient.float() * scale).bfloat16())


def test_no_gradient_is_zero():
    assert clip_grad_norm_([nn.Parameter(torch.ones(3))], 1.0) == 0


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, float("inf")])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_norm_of_half_precision_gradients_is_not_rounded_to_it(dtype, norm_type):
    parameters = [nn.Parameter(torch.zeros(n, dtype=dtype)) for n in (1000, 10)]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 6e4)
    wanted = torch.linalg.vector_norm(torch.cat([p.grad.double() for p in parameters]), norm_type).item()
    norm = clip_grad_norm_(parameters, 1000.0, norm_type)
    assert norm.dtype == torch.float32
    assert norm.item() == pytest.approx(wanted, rel=1e-5)
    assert parameters[0].grad[0].item() == pytest.approx(6e4 * 1000 / wanted, rel=1e-2), "scaled by it"


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, float("inf")])
def test_gradients_of_several_dtypes_have_one_norm(norm_type):
    dtypes = (torch.float16, torch.complex64, torch.float32, torch.float64)
    parameters = [nn.Parameter(torch.zeros(3, dtype=dtype)) for dtype in dtypes]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 2)
    wanted = torch.linalg.vector_norm(torch.full((12,), 2.0, dtype=torch.float64), norm_type)
    assert clip_grad_norm_(parameters, 0.0, norm_type).item() == pytest.approx(wanted.item(), rel=1e-6)


def _check_any_order():
    """Of gradients whose groups overlap: each rank's own order would pair one power with another's."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    torch.manual_seed(0)
    whole = [torch.randn(6, 5), 100 * torch.randn(6, 4), 10 * torch.randn(8)]
    placements = [(Shard(0), Replicate()), (Shard(0), Shard(1)), (Replicate(), Shard(0))]
    parameters = [distributed(tensor, mesh, how) for tensor, how in zip(whole, placements, strict=True)]
    if mesh.get_local_rank("a"):
        parameters[:2] = parameters[1::-1]
    norm = clip_grad_norm_(parameters, 1.0)
    expected = torch.linalg.vector_norm(torch.cat([tensor.flatten() for tensor in whole]))
    torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)


def _check_names_of_any_length():
    """Of two meshes with the same axes: a name of one digit is above one of two, and only some ranks have it."""
    while dist.new_group().group_name != "8":
        pass
    meshes = [init_device_mesh("cpu", (2, 2)) for _ in range(2)]
    parameters = [
        distributed(torch.full((4, 4), 3.0 + each), mesh, (Shard(0), Shard(1))) for each, mesh in enumerate(meshes)
    ]
    assert clip_grad_norm_(parameters, 0.0).item() == pytest.approx(20)


@pytest.mark.parametrize("check", [_check_any_order, _check_names_of_any_length])
def test_ranks_come_to_the_collectives_in_one_order(check):
    run_distributed(check, world_size=4, timeout=60)


def _check_two_meshes():
    """Of the same ranks: group names give no order, as rank 0's 1 is before its 9, and rank 1's 10 before its 2."""
    meshes = [init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b")) for _ in range(3)]
    torch.manual_seed(0)
    whole = [torch.randn(6, 5), 100 * torch.randn(4, 4)]
    how = (Shard(0), Shard(1))
    parameters = [distributed(tensor, mesh, how) for tensor, mesh in zip(whole, meshes[::2], strict=True)]
    assert len({parameter.grad.device_mesh.get_group("a").group_name for parameter in parameters}) == 2
    norm = clip_grad_norm_(parameters, 1.0)
    expected = torch.linalg.vector_norm(torch.cat([tensor.flatten() for tensor in whole]))
    torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)


def test_two_meshes_of_the_same_ranks_are_one():
    run_distributed(_check_two_meshes, world_size=4, limit=120)


def _unreduced(defer):
    mesh = init_device_mesh("cpu", (1, 2) if defer else (2, 1), mesh_dim_names=("dp_replicate", "dp_shard"))
    model = fully_shard(nn.Linear(4, 4), mesh=mesh)
    for last in (False, True):
        set_gradient_sync(model, last=last, defer=defer)
        model(torch.ones(1, 4)).sum().backward()
        if not last:
            with pytest.raises(UserError, match="before the last micro-batch of each step"):
                clip_grad_norm_(model, 1.0)
    assert clip_grad_norm_(model, 0.0) > 0


@pytest.mark.parametrize("defer", [True, False])
def test_gradients_that_no_backward_has_reduced_are_refused(defer):
    run_distributed(_unreduced, defer, world_size=2)
