"""What a script's checkpoints hold beside the parameters, and that it comes back as it was, on every rank."""

from __future__ import annotations

import json
import pathlib

import pytest
import torch
import torch.distributed as dist
import transformers  # noqa: F401  imported before the ranks are forked
from torch import nn
from torch.optim import lr_scheduler

import smp
from smp.checkpoint import reader
from smp.checkpoint.checkpointer import Checkpointer
from smp.checkpoint.tagged_json import decode, encode
from smp.errors import UserError
from tests.distributed import run_distributed
from tests.reference import build_reference


def small() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(2, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.norm, self.other = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4)

    def forward(self, x):
        return self.other(self.norm(self.inner(x)))


def _own_data(folder: str) -> None:
    def build():
        torch.manual_seed(0)
        model = nn.parallel.DistributedDataParallel(Normed())
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def train(model, optimizer, steps):
        for step in steps:
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
            model(x).pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    model, optimizer = build()
    train(model, optimizer, range(3))
    checkpoints = Checkpointer(folder, model, optimizer)
    checkpoints.save(3)
    train(model, optimizer, range(3, 6))
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    model, optimizer = build()
    Checkpointer(folder, model, optimizer).load()
    train(model, optimizer, range(3, 6))
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[name]), name


def test_ddp_with_buffers_that_differ_resumes_bit_for_bit(tmp_path):
    run_distributed(_own_data, str(tmp_path), world_size=2)


def _split(degree: int):
    mesh = smp.init({"tensor_parallel_degree": degree})
    model = smp.parallelize(build_reference("llama_gqa", torch.float32))
    return mesh, model, torch.optim.SGD(model.parameters(), lr=0.1)


def _saves_split(folder: str, degree: int) -> None:
    mesh, model, optimizer = _split(degree)
    torch.manual_seed(1 + mesh.data_rank)
    Checkpointer(folder, model, optimizer).save(1)
    torch.save(torch.rand(3), f"{folder}/draw{dist.get_rank()}")


def _draws(folder: str, degree: int, *, same: bool) -> None:
    mesh, model, optimizer = _split(degree)
    assert Checkpointer(folder, model, optimizer).load() is not None
    mine: list = [mesh.data_rank, torch.rand(3).tolist()]
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    draws = {data_rank: [draw for other, draw in everyone if other == data_rank] for data_rank, _ in everyone}
    assert len({str(found[0]) for found in draws.values()}) == mesh.data_size
    assert all(draw == found[0] for found in draws.values() for draw in found)
    if same:
        assert mine[1] == torch.load(f"{folder}/draw{dist.get_rank()}").tolist()


@pytest.mark.parametrize(("ranks", "degree"), [(2, 1), (1, 1), (2, 2)])
def test_ranks_of_a_tensor_parallel_group_draw_alike_after_loading(tmp_path, ranks, degree):
    run_distributed(_saves_split, str(tmp_path), degree, world_size=ranks)
    run_distributed(_draws_at_degree_2, str(tmp_path), ranks == degree == 2, world_size=2)


def _draws_at_degree_2(folder: str, same: bool) -> None:
    _draws(folder, 2, same=same)


def _dtypes(folder: str) -> None:
    def build(value: complex):
        model, optimizer = small()
        model.register_buffer("turns", torch.full((3,), value))
        model.register_buffer("cache", torch.zeros(2, dtype=torch.complex128), persistent=False)
        return model, optimizer

    checkpoints = Checkpointer(folder, *build(1 - 2j))
    checkpoints.save(1, wait=False)
    checkpoints.finish()
    model, optimizer = build(0j)
    assert Checkpointer(folder, model, optimizer).load() is not None
    assert model.turns.dtype == torch.complex64 and model.turns.tolist() == [1 - 2j] * 3

    model, optimizer = small()
    model.register_buffer("odd", torch.zeros(2, dtype=torch.float8_e4m3fn))
    with pytest.raises(
        UserError, match=r"model\.odd is of torch\.float8_e4m3fn, which cannot be saved: use one of F64"
    ):
        Checkpointer(folder, model, optimizer)
    with pytest.raises(UserError, match=r"takes a torch\.nn\.Module, got a list: put several into an nn\.ModuleList"):
        Checkpointer(folder, [model], optimizer)
    with pytest.raises(UserError, match=r"a list is no torch\.optim\.Optimizer"):
        Checkpointer(folder, small()[0], [optimizer])


def test_what_cannot_be_saved_is_refused_at_once_and_complex_buffers_can(tmp_path):
    run_distributed(_dtypes, str(tmp_path), world_size=1)


def _one_disk_fails(folder: str) -> None:
    checkpoints = Checkpointer(folder, *small())
    checkpoints.save(1)
    if dist.get_rank() == 1:

        def fail(*args):
            raise OSError(5, "Input/output error")

        reader.read_all = fail
    with pytest.raises(UserError, match=r"cannot be read \(Input/output error"):
        checkpoints.load()


def test_a_rank_that_cannot_read_is_an_error_on_every_rank(tmp_path):
    run_distributed(_one_disk_fails, str(tmp_path), world_size=2)


SCHEDULERS = {
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "step": lambda o: lr_scheduler.StepLR(o, 2),
    "linear": lambda o: lr_scheduler.LinearLR(o),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, 10),
    "sequence": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
}


@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS.keys())
def test_schedulers_of_a_learning_rate_that_is_a_tensor(make):
    def build(lr: float):
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=torch.tensor(lr), momentum=0.9)
        return optimizer, make(optimizer)

    optimizer, scheduler = build(0.1)
    for _ in range(3):
        optimizer.step()
        scheduler.step()
    saved = json.dumps(encode(scheduler.state_dict()), allow_nan=False)
    again, other = build(0.1)
    other.load_state_dict(decode(json.loads(saved)))
    again.param_groups[0]["lr"].copy_(optimizer.param_groups[0]["lr"])
    for _ in range(3):
        for o, s in ((optimizer, scheduler), (again, other)):
            o.step()
            s.step()
        assert torch.equal(
            torch.as_tensor(again.param_groups[0]["lr"]), torch.as_tensor(optimizer.param_groups[0]["lr"])
        )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_numbers_in_tensors_come_back_exactly(dtype):
    for value in (0, 1, 1 / 3, -0.0, 2**62 + 1) + ((float("nan"), float("inf")) if dtype.is_floating_point else ()):
        tensor = torch.tensor(value, dtype=dtype)
        back = decode(json.loads(json.dumps(encode(tensor), allow_nan=False)))
        assert back.dtype == dtype and torch.equal(back.view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8))


def _deep(folder: str) -> None:
    checkpoints = Checkpointer(folder, *small())
    for depth in (100, 101, 2000):
        extra: list = []
        for _ in range(depth):
            extra = [extra]
        if depth == 100:
            checkpoints.save(1, extra)
            assert Checkpointer(folder, *small()).load().extra == extra
        else:
            with pytest.raises(UserError, match=r"extra\[0\]\[0\].* is nested more than 100 deep"):
                checkpoints.save(2, extra)
    assert not pathlib.Path(folder, "model-2steps").exists()


def test_extra_that_is_nested_too_deep_is_refused(tmp_path):
    run_distributed(_deep, str(tmp_path), world_size=1)


def _own_orders(folder: str) -> None:
    """Ranks whose optimizers order parameters each in its own way, as from sets."""

    def build(turned: bool):
        torch.manual_seed(0)
        model = smp.FSDP(Normed())
        parameters = list(model.parameters())
        return model, torch.optim.AdamW(parameters[::-1] if turned else parameters, lr=1e-2)

    def train(model, optimizer, steps):
        for step in steps:
            model(torch.randn(8, 4, generator=torch.Generator().manual_seed(step))).pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    rank = dist.get_rank()
    model, optimizer = build(turned=rank == 1)
    train(model, optimizer, range(2))
    Checkpointer(folder, model, optimizer).save(2)
    train(model, optimizer, range(2, 4))
    again, optimizer = build(turned=rank == 0)
    assert Checkpointer(folder, again, optimizer).load() is not None
    train(again, optimizer, range(2, 4))
    for name, value in again.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name


def test_ranks_may_order_their_parameters_as_they_like(tmp_path):
    run_distributed(_own_orders, str(tmp_path), world_size=2, timeout=60)
