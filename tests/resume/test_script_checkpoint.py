"""Checkpoints of a user's own script: bit for bit, at any number of ranks, whole or not at all."""

from __future__ import annotations

import collections
import json
import math
import pathlib
import threading

import pytest
import torch
import torch.distributed as dist
import transformers  # noqa: F401  imported before the ranks are forked
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP1
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor

import smp
from smp.checkpoint import background
from smp.checkpoint.checkpointer import Checkpointer
from smp.checkpoint.tagged_json import decode, encode
from smp.cli import main as command
from smp.errors import DamagedCheckpointError, RunError, UserError
from tests.clock import HANG_SECONDS
from tests.distributed import run_distributed
from tests.reference import build_reference


class Net(nn.Module):
    """With a buffer that training changes, a scalar parameter, and axes that two and three ranks divide unevenly."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3, bias=False)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return self.last(self.norm(self.first(x)).relu()) * self.scale


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW([{"params": p[:2]}, {"params": p[2:], "weight_decay": 0.0}], lr=1e-2),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
}


def build(layout: str, optimizer: str):
    torch.manual_seed(5)
    model: nn.Module = Net()
    if layout == "fsdp2":
        fully_shard(model.first)
        fully_shard(model)
    elif layout == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    return model, OPTIMIZERS[optimizer](list(model.parameters()))


def train(model, optimizer, scheduler, steps) -> None:
    for step in steps:
        x = torch.randn(6, 5, generator=torch.Generator().manual_seed(step))
        (model(x).pow(2).mean() * (1 + torch.rand(()))).backward()  # each rank's generator has its part in the loss
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


def whole(model) -> list[torch.Tensor]:
    values = [*model.parameters(), *model.buffers()]
    return [(v.full_tensor() if isinstance(v, DTensor) else v).detach().clone() for v in values]


def _resumes(folder: str, layout: str, optimizer_name: str, wait: bool) -> None:
    def scheduler_of(optimizer):
        return torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=9)

    model, optimizer = build(layout, optimizer_name)
    scheduler = scheduler_of(optimizer)
    checkpoints = smp.Checkpoints(folder, model, optimizer)
    assert checkpoints.load() is None
    torch.manual_seed(dist.get_rank())
    train(model, optimizer, scheduler, range(3))
    path = checkpoints.save(3, {"scheduler": scheduler.state_dict(), "seen": [1, "two", None]}, wait=wait)
    train(model, optimizer, scheduler, range(3, 6))  # changes what a background write is copying
    checkpoints.finish()
    expected, expected_lr = whole(model), optimizer.param_groups[0]["lr"]

    model, optimizer = build(layout, optimizer_name)
    scheduler = scheduler_of(optimizer)
    with torch.no_grad():
        for value in (*model.parameters(), *model.buffers()):
            value.zero_()
    for group in optimizer.param_groups:
        group["lr"] = 123.0
    found = smp.Checkpoints(folder, model, optimizer).load()
    assert found is not None and (found.step, found.path.name, found.extra["seen"]) == (3, path.name, [1, "two", None])
    scheduler.load_state_dict(found.extra["scheduler"])
    train(model, optimizer, scheduler, range(3, 6))
    assert optimizer.param_groups[0]["lr"] == expected_lr != 123.0
    for value, other in zip(whole(model), expected, strict=True):
        assert torch.equal(value, other)


@pytest.mark.parametrize(("layout", "optimizer", "wait"), [
    ("fsdp2", "adamw", True), ("fsdp2", "adamw", False), ("fsdp2", "sgd", False), ("fsdp2", "adagrad", True),
    ("ddp", "adamw", False),
])  # fmt: skip
def test_a_script_resumes_bit_for_bit(tmp_path, layout, optimizer, wait):
    run_distributed(_resumes, str(tmp_path), layout, optimizer, wait, world_size=2)


def _writes(folder: str, optimizer_name: str) -> None:
    model, optimizer = build("fsdp2", optimizer_name)
    checkpoints = Checkpointer(folder, model, optimizer)
    train(model, optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer), range(2))
    model(torch.randn(6, 5, generator=torch.Generator().manual_seed(2)))  # without backward: parameters stay gathered
    checkpoints.save(2)
    values = whole(model)  # collective
    if dist.get_rank() == 0:
        torch.save(values, f"{folder}/expected.pt")


def _reads(folder: str, layout: str, optimizer_name: str) -> None:
    model, optimizer = build(layout, optimizer_name)
    assert Checkpointer(folder, model, optimizer).load(pathlib.Path(folder, "model-2steps")).step == 2
    for value, expected in zip(whole(model), torch.load(f"{folder}/expected.pt"), strict=True):
        assert torch.equal(value, expected)
    state = optimizer.state[model.scale if layout == "fsdp2" else model.module.scale]
    assert len(state) == len(optimizer.state[optimizer.param_groups[0]["params"][0]]) > 0
    train(model, optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer), range(1))


def test_any_number_of_ranks_and_layout(tmp_path):
    run_distributed(_writes, str(tmp_path), "adamw", world_size=2)
    run_distributed(_reads, str(tmp_path), "fsdp2", "adamw", world_size=3)
    run_distributed(_reads, str(tmp_path), "ddp", "adamw", world_size=1)


def _keeps_and_falls_back(folder: str) -> None:
    model, optimizer = build("fsdp2", "adamw")
    checkpoints = Checkpointer(folder, model, optimizer, keep=2, verify=True)
    for step in (1, 2, 3):
        checkpoints.save(step, step)
    names = sorted(path.name for path in pathlib.Path(folder).glob("*steps"))
    assert names == ["model-2steps", "model-3steps"]
    dist.barrier()
    newest = pathlib.Path(folder, "model-3steps")
    if dist.get_rank() == 0:
        file = max(newest.glob("*.safetensors"), key=lambda path: path.stat().st_size)
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    dist.barrier()
    with pytest.raises(DamagedCheckpointError, match="model-3steps is damaged"):
        checkpoints.load(newest)
    assert checkpoints.load().extra == 2
    assert checkpoints.save(3, "anew") == newest and checkpoints.load().extra == "anew"
    names = sorted(path.name for path in pathlib.Path(folder).glob("*steps*"))
    assert names == ["model-2steps", "model-3steps", "model-3steps.aside1"]


def test_a_damaged_checkpoint_is_passed_over_or_refused(tmp_path):
    run_distributed(_keeps_and_falls_back, str(tmp_path), world_size=2)


def _disk_fails(folder: str) -> None:
    model, optimizer = build("fsdp2", "sgd")
    checkpoints = Checkpointer(folder, model, optimizer)
    checkpoints.save(1)
    if dist.get_rank() == 1:

        def fail(*args, **options):
            raise OSError(28, "No space left on device")

        background.write_part = fail
    with pytest.raises(RunError, match=r"model-2steps could not be written: rank 1: .*No space left"):
        checkpoints.save(2)
    checkpoints.save(3, wait=False)
    train(model, optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer), range(1))
    with pytest.raises(RunError, match="model-3steps could not be written: rank 1"):
        checkpoints.finish()
    checkpoints.finish()
    dist.barrier()
    assert sorted(path.name for path in pathlib.Path(folder).glob("[!.]*")) == ["latest", "model-1steps"]


def test_a_failed_write_is_raised_on_every_rank_and_leaves_nothing(tmp_path):
    run_distributed(_disk_fails, str(tmp_path), world_size=2)


def _refusals(folder: str) -> None:
    model, optimizer = build("fsdp2", "adamw")
    checkpoints = Checkpointer(folder, model, optimizer)
    for extra, where in ({"x": torch.ones(2)}, r"extra\['x'\] is a Tensor"), ([{1, 2}], r"extra\[0\] is a set"):
        with pytest.raises(UserError, match=f"extra cannot be saved .{where}"):
            checkpoints.save(1, extra)
    with pytest.raises(UserError, match="rank 1 disagrees with rank 0 on the step: 1 there, 0 here"):
        checkpoints.save(dist.get_rank())
    elsewhere = Checkpointer(f"{folder}/{dist.get_rank()}", model, optimizer)
    with pytest.raises(UserError, match="rank 1 disagrees with rank 0 on the directory"):
        elsewhere.save(1)
    optimizer.state["note"] = {"a": 1}
    with pytest.raises(UserError, match="contains 'note' beside its parameters' state"):
        checkpoints.save(1)
    del optimizer.state["note"]
    optimizer.state[model.scale]["of.mine"] = model.scale.detach().clone()
    with pytest.raises(UserError, match=r"the key 'of.mine' of the optimizer's state has a dot"):
        checkpoints.save(1)
    optimizer.state.clear()
    parts = ZeroRedundancyOptimizer(Net().parameters(), torch.optim.AdamW)
    with pytest.raises(UserError, match="another part of its state on every rank"):
        Checkpointer(folder, Net(), parts)
    with pytest.raises(UserError, match=r"step -1 is not allowed"):
        checkpoints.save(-1)
    with pytest.raises(UserError, match="keep 0"):
        Checkpointer(folder, model, optimizer, keep=0)
    with pytest.raises(UserError, match=r"name '\.\./x' is not allowed"):
        Checkpointer(folder, model, optimizer, name="../x")
    other = torch.optim.AdamW(Net().parameters())
    with pytest.raises(UserError, match=r"the optimizer has a parameter of shape .* make the optimizer from"):
        Checkpointer(folder, model, other).save(1)


def _refusals_of_loading(folder: str) -> None:
    model, optimizer = build("fsdp2", "adamw")
    checkpoints = Checkpointer(folder, model, optimizer)
    flat = TorchFSDP1(Net(), device_id=torch.device("cpu"))
    with pytest.raises(UserError, match="does not know torch's FSDP1"):
        Checkpointer(folder, flat, torch.optim.AdamW(flat.parameters()))
    checkpoints.save(1)
    before = whole(model)
    with torch.no_grad():
        model.scale.fill_(9.0)
    changed = whole(model)
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises(UserError, match="made with the optimizer AdamW, got SGD"):
        Checkpointer(folder, model, sgd).load()
    one_group = torch.optim.AdamW(model.parameters())
    with pytest.raises(UserError, match=r"2 groups of .* this one 1 of"):
        Checkpointer(folder, model, one_group).load()
    assert all(map(torch.equal, whole(model), changed))  # refused before anything was changed
    assert checkpoints.load() is not None and all(map(torch.equal, whole(model), before))
    wider = Net()
    wider.last = nn.Linear(7, 4, bias=False)
    with pytest.raises(UserError, match=r"does not fit the model: .*last.weight"):
        Checkpointer(folder, wider, OPTIMIZERS["adamw"](list(wider.parameters()))).load()
    with pytest.raises(UserError, match="is not a complete checkpoint"):
        checkpoints.load(pathlib.Path(folder, "nowhere"))


@pytest.mark.parametrize("refuse", [_refusals, _refusals_of_loading])
def test_refusals(tmp_path, refuse):
    run_distributed(refuse, str(tmp_path), world_size=2)


def test_extra_comes_back_as_it_was():
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(torch.optim.SGD(Net().parameters(), lr=1.0))
    steps = torch.optim.lr_scheduler.MultiStepLR(torch.optim.SGD(Net().parameters(), lr=1.0), [3, 5])
    value = {
        1: "one", None: (1, (2.5, [])), "plateau": plateau.state_dict(), "steps": steps.state_dict(), "__smp__": "mine",
        "inf": float("inf"), "deep": [{"a": {True: -0.0}}],
    }  # fmt: skip
    back = decode(json.loads(json.dumps(encode(value), allow_nan=False)))
    assert back == value and repr(back) == repr(value)
    assert type(back["steps"]["milestones"]) is collections.Counter
    assert math.isnan(decode(json.loads(json.dumps(encode(float("nan"))))))


class Counting(nn.Module):
    """A module with a state of its own, and a second optimizer's parameter."""

    def __init__(self):
        super().__init__()
        self.net, self.other, self.seen = Net(), nn.Parameter(torch.zeros(3)), 0
        self.config = {"mine": True}  # none of Hugging Face's

    def get_extra_state(self):
        return {"seen": self.seen}

    def set_extra_state(self, state):
        self.seen = state["seen"]


def _torn(folder: str) -> None:
    model = Counting()
    optimizer = torch.optim.SGD(model.net.parameters(), lr=1.0, momentum=0.9)
    other = torch.optim.SGD([model.other], lr=1.0)
    go = threading.Event()

    class Late(background.HostCopies):
        def __call__(self, pieces):
            go.wait(HANG_SECONDS)
            return super().__call__(pieces)

    checkpoints = Checkpointer(folder, model, optimizer)
    checkpoints._copies = Late()
    model.seen = 7
    model.net(torch.randn(6, 5)).sum().backward()
    model.other.grad = torch.ones(3)
    before = whole(model)
    checkpoints.write(checkpoints._manifest(1, None), wait=False, verify=False)  # as the training job does
    other.step()  # waits for nobody
    model.net(torch.randn(6, 5))  # changes buffers
    model.seen = 8
    waits, wait_for_copy = threading.Event(), background.PendingWrite.wait_for_copy
    background.PendingWrite.wait_for_copy = lambda self: (waits.set(), wait_for_copy(self))[1]
    stepping = threading.Thread(target=optimizer.step)
    stepping.start()
    assert waits.wait(HANG_SECONDS) and stepping.is_alive()
    assert torch.equal(model.net.scale, before[0].new_ones(1))
    go.set()
    stepping.join()
    checkpoints.finish()
    assert not torch.equal(whole(model)[1], before[1])
    optimizer.zero_grad()
    checkpoints.load()  # into an optimizer that has a state by now
    for value, expected in zip(whole(model), before, strict=True):
        assert torch.equal(value, expected)
    assert model.seen == 7 and not optimizer.state[model.net.scale]


def test_a_write_in_the_background_is_of_its_moment(tmp_path):
    run_distributed(_torn, str(tmp_path), world_size=1)


def _changed_at_once(folder: str) -> None:
    class Late(background.HostCopies):
        def __call__(self, pieces):
            changed.wait(1.0)  # as long as a script that need not wait takes to change them
            return super().__call__(pieces)

    model, changed = nn.Linear(2, 2), threading.Event()
    before = model.weight.detach().clone()
    checkpoints = Checkpointer(folder, model, torch.optim.SGD(model.parameters(), lr=1.0), copies=Late())
    checkpoints.save(1, wait=False)
    with torch.no_grad():
        model.weight.zero_()
    changed.set()
    checkpoints.finish()
    checkpoints.load()
    assert torch.equal(model.weight, before)


def test_what_a_script_changes_after_saving_is_not_in_the_checkpoint(tmp_path):
    run_distributed(_changed_at_once, str(tmp_path), world_size=1)


def _names_of_wrappers(folder: str) -> None:
    plain, wrapped = nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2))
    apply_activation_checkpointing(wrapped, check_fn=lambda module: isinstance(module, nn.Linear))
    assert [name for name, _ in wrapped.named_parameters()] != [name for name, _ in plain.named_parameters()]
    Checkpointer(folder, wrapped, torch.optim.SGD(wrapped.parameters(), lr=1.0)).save(1)
    Checkpointer(folder, plain, torch.optim.SGD(plain.parameters(), lr=1.0)).load()
    assert torch.equal(plain[0].weight, next(wrapped.parameters()))


def test_names_of_wrappers_are_not_saved(tmp_path):
    run_distributed(_names_of_wrappers, str(tmp_path), world_size=1)


def _saves_llama(folder: str) -> None:
    smp.init({"hybrid_shard_degree": 2})
    model = smp.parallelize(build_reference("llama_gqa", torch.float32))
    optimizer = torch.optim.AdamW(model.parameters())
    Checkpointer(folder, model, optimizer, name="llama").save(7, {"note": "mine"})


def test_the_commands_know_them(tmp_path, capsys):
    run_distributed(_saves_llama, str(tmp_path), world_size=2)
    path = tmp_path / "llama-7steps"
    assert command(["verify", str(path)]) == 0
    assert command(["inspect", str(path)]) == 0
    assert "llama" in capsys.readouterr().out
    assert command(["export", str(path), str(tmp_path / "model")]) == 0
    assert json.loads((tmp_path / "model" / "config.json").read_text())["model_type"] == "llama"
