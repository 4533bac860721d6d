"""A new technique touches its own file and one line of the list: refusal, prediction and order follow."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file
from torch.distributed.fsdp import FSDPModule

import train_lib
from smp import api
from smp.checkpoint.checkpointer import Checkpointer
from smp.checkpoint.hf_export import export_hf
from smp.checkpoint.manifest import read_manifest
from smp.cli.export import parameters_of
from smp.config import LossConfig, ParallelConfig, Settings, setting
from smp.errors import ConfigError, UserError
from smp.loss import shift_labels
from smp.memory.estimate import estimate_memory
from smp.memory.shape import Workload
from smp.mesh import lay_out
from smp.models.registry import FAMILIES, family_of
from smp.optim.config import OptimConfig
from smp.optim.optimizers import build_optimizer
from smp.parallel import parallelize
from smp.parallel.activation_checkpoint import checkpointed_blocks
from smp.parallel.technique import Sent, Setup, Traffic
from smp.plan.closed_time import estimate, step_time
from smp.plan.devices import device_row
from smp.plan.request import read_request
from smp.train.step import train_step
from smp.units import GIB
from tests import adapters, ballast
from tests.distributed import run_distributed
from tests.flags import SYNTHETIC, in_child, one_process, plan_of
from tests.job import LLAMA
from tests.reference import Layout, build_reference, global_batch, rank_batch, relative
from tests.tensor_parallel import whole

OFFLOAD = ["--offload_activations", 1]  # on a CPU, without a directory


@dataclasses.dataclass(frozen=True, kw_only=True)
class Heavy(ballast.Config):
    ballast_mib: int = setting(2**30, "1 PiB in each block.")


@pytest.fixture
def listed(monkeypatch):
    """The technique is on the list, before sharding."""
    monkeypatch.setattr(parallelize, "TECHNIQUES", [*parallelize.TECHNIQUES[:-1], ballast, parallelize.TECHNIQUES[-1]])


def test_its_problems_are_refused_with_the_others(listed, tmp_path):
    with pytest.raises(ConfigError) as refused:
        plan_of(["--num_layers", 3, *OFFLOAD, "--global_batch_size", 2**25], tmp_path)
    found = [re.split(" needs | is too large", problem)[0] for problem in refused.value.problems]
    assert found == ["--offload_activations 1 on a CPU", "--ballast_mib 64", "the global batch of 33554432 samples"]
    plan_of(["--num_layers", 2], tmp_path).close()


def test_each_technique_takes_its_part_of_a_micro_batch_in_order(monkeypatch):
    """Whatever runs a step: the context's ranks cut first, and the loss chooses among what they have."""

    made_up = type("MadeUp", (), {"own_part": staticmethod(lambda batch, setup: seen.append(batch) or batch)})
    monkeypatch.setattr(parallelize, "TECHNIQUES", [*parallelize.TECHNIQUES, made_up])
    ids = torch.arange(16)[None]
    batch = {"input_ids": ids, "targets": shift_labels(ids), "position_ids": ids % 8, "longest_document": 8,
             "document_bounds": torch.tensor([0, 8, 16], dtype=torch.int32), "sample_ids": torch.arange(1)}  # fmt: skip
    family, seen = FAMILIES["llama"], []
    for cp, chosen in ((1, None), (2, [[0] * 7, [*range(7)]])):
        own = parallelize.own_part(dict(batch), Setup(family, lay_out(shard=2, cp=cp)))
        assert seen.pop() is own
        assert (own["chosen"].tolist() if "chosen" in own else None) == chosen  # the row's last token predicts nothing
    assert own["targets"].tolist() == [[1, 2, 3, 4, 13, 14, 15, -100]] and "document_bounds" not in own
    assert own["position_ids"].tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]]
    assert batch["targets"].shape == (1, 16)
    masked = {"input_ids": ids, "targets": torch.where(ids < 4, -100, batch["targets"])}
    own = parallelize.own_part(masked, Setup(family, lay_out()))
    assert own["chosen"][1].tolist() == [*range(4, 15)] and set(own) == {*masked, "chosen"}


@in_child  # where torch has cached the places of a mesh's first rank, others must not be forked
def test_its_cost_is_predicted(listed, tmp_path, capsys):
    words = [*LLAMA, *SYNTHETIC, "--output_dir", tmp_path / "run", "--dry_run", 1, "--dry_run_world_size", 4]
    assert train_lib.main([str(word) for word in words]) == 0
    table = dict(re.findall(r"^ *(\S[\w ]*?) +(\d+\.\d+) GiB$", capsys.readouterr().out, re.MULTILINE))
    assert float(table["ballast"]) == 2 * 64 / 1024
    assert float(table["sum"]) == pytest.approx(sum(map(float, table.values())) - float(table["sum"]), abs=5e-3)


def test_a_job_is_refused_for_its_cost(listed, tmp_path, monkeypatch):
    monkeypatch.setattr(ballast, "Config", Heavy)
    with pytest.raises(UserError, match=r"needs about 3\d{6}\.\d GiB in each process"):  # and free blocks of the heap
        plan_of([], tmp_path)
    request = read_request([*LLAMA, *SYNTHETIC], device_row("h100"), nodes=1, local=8)
    layout = next(request.layouts())
    assert estimate(request.shape, layout, request.row, local=8).memory > 2 * 2**20 * GIB


def test_what_it_sends_and_moves_takes_time(monkeypatch):
    request = read_request([*LLAMA, *SYNTHETIC], device_row("h100"), nodes=1, local=8)
    layout = next(each for each in request.layouts() if each.mesh.tp.size == 2)

    def parts():
        return step_time(request.shape, layout.mesh, layout.work, request.row, local=8).parts

    before = parts()
    sends = Traffic([Sent("all_gather", 2**30, "tp", 2)], moved=2**30)
    made_up = type("MadeUp", (), {"traffic": staticmethod(lambda shape, mesh, work: sends)})
    monkeypatch.setattr(parallelize, "TECHNIQUES", [*parallelize.TECHNIQUES, made_up])
    after = parts()
    assert after["tensor-parallel exchanges"] > before["tensor-parallel exchanges"] + 0.001
    assert after["compute"] > before["compute"]


PLACES = [0, parallelize.TECHNIQUES.index(parallelize.sharding), len(parallelize.TECHNIQUES)]


@pytest.mark.parametrize(("place", "sharded"), zip(PLACES, (False, False, True), strict=True))
@in_child
def test_it_is_applied_in_its_place(monkeypatch, place, sharded):
    seen = []

    def apply(model, setup):
        seen.append((bool(checkpointed_blocks(model)), isinstance(model, FSDPModule)))
        ballast.apply(model, setup)

    made_up = type("MadeUp", (), {**vars(ballast), "apply": staticmethod(apply)})
    made_up.problems, made_up.cost = staticmethod(ballast.problems), staticmethod(ballast.cost)
    order = list(parallelize.TECHNIQUES)
    order.insert(place, made_up)
    monkeypatch.setattr(parallelize, "TECHNIQUES", order)
    with one_process([]) as built:
        assert seen == [(place > 0, sharded)]
        assert [block.ballast.numel() for block in built.model.model.layers] == [64, 64]


def test_a_script_splits_in_the_order_of_the_techniques(monkeypatch):
    applied = []
    monkeypatch.setattr(api.context, "apply", lambda model, setup: applied.append(api.context))
    monkeypatch.setattr(api, "split_model", lambda *args, **kwargs: applied.append(parallelize.tensor))
    monkeypatch.setattr(api, "compare_batches", lambda model, mesh: None)
    mesh = lay_out(shard=2, cp=2, tp=2)
    monkeypatch.setattr(type(mesh), "device_type", "cpu")
    current = api._Initialized(mesh, ParallelConfig(), object(), {}, None)
    api._split(build_reference("llama_gqa", torch.float32), current)
    assert len(applied) == 2 and applied == [each for each in parallelize.TECHNIQUES if each in applied]


def test_settings_that_are_not_given_have_their_defaults():
    assert Settings()[ballast.Config].ballast_mib == 64
    assert Settings((ballast.Config(),)).changed(ballast_mib=3)[ballast.Config].ballast_mib == 3
    with pytest.raises(ValueError, match="no section has a setting ballast"):
        Settings((ballast.Config(),)).changed(ballast=3)


LAYOUT = Layout("full_shard", tp=2, checkpointing=True)


def settings_with(**config):
    sections = (LAYOUT.parallel(), LAYOUT.activation(), LossConfig(loss_chunk_tokens=0))
    return Settings((*sections, adapters.Config(adapters=True, **config)))


def steps(model, mesh, *numbers, optimizer=None):
    """Train steps of the reference's batches; returns the optimizer."""
    optimizer = optimizer or build_optimizer(model, OptimConfig(), lr=1e-2)
    for number in numbers:
        batch = rank_batch(number, mesh.data_rank, mesh.data_size, 1)
        setup = Setup(family_of(model.config), mesh, settings_with())
        train_step(model, optimizer, batch, setup=setup, device=torch.device("cpu"), grad_clip=0.0)
    return optimizer


def states(model):
    """All parameters and buffers."""
    return {name: whole(tensor).clone() for name, tensor in model.state_dict().items()}


def assert_same(first, second):
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def plain_gradients(reference, setup):
    """Gradients of the first step of one process, by autograd."""
    parallelize.add_parameters(reference, setup.family, setup.settings)
    adapters.apply(reference, setup)
    for block in reference.model.layers:
        for layer in map(block.get_submodule, adapters.LAYERS):
            layer.forward = lambda x, layer=layer: adapters.Adapter.plain(layer, x)
    inputs, labels = global_batch(0)
    logits, targets = reference(input_ids=inputs, use_cache=False).logits[:, :-1], labels[:, 1:]
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    loss = loss + adapters.extra_loss(reference, setup)
    (loss / (targets != -100).sum()).backward()
    return {name: p.grad for name, p in reference.named_parameters()}


def check_trained_beside_the_model(reference, folder):
    mesh = LAYOUT.mesh()
    setup = Setup(family_of(reference.config), mesh, settings_with())
    wanted = plain_gradients(build_reference("llama_gqa", torch.float64), setup)
    found = {}

    def build():
        model = build_reference("llama_gqa", torch.float64)
        return parallelize.apply_techniques(model, setup)

    model = build()
    optimizer = build_optimizer(model, OptimConfig(), lr=1e-2)
    hook = optimizer.register_step_pre_hook(
        lambda *_: found.update({name: whole(p.grad).clone() for name, p in model.named_parameters()})
    )
    steps(model, mesh, 0, optimizer=optimizer)
    hook.remove()
    assert found.keys() == wanted.keys()
    for name, gradient in found.items():
        assert relative(gradient - wanted[name], wanted[name]) <= 1e-9, name
    steps(model, mesh, 1, optimizer=optimizer)
    saved = Checkpointer(folder / "beside", model, optimizer)
    saved.save(2)
    steps(model, mesh, 2, optimizer=optimizer)
    resumed = build()
    optimizer = build_optimizer(resumed, OptimConfig(), lr=1e-2)
    Checkpointer(folder / "beside", resumed, optimizer).load()
    steps(resumed, mesh, 2, optimizer=optimizer)
    trained = states(model)
    assert_same(states(resumed), trained)
    assert trained["model.layers.0.shift"] == pytest.approx(0.03)
    export_hf(model, folder / "final")
    own = {f"model.layers.{i}.{layer}.{key}" for i in range(3) for layer in adapters.LAYERS for key in "AB"}
    apart, rest = load_file(folder / "final" / "adapter.safetensors"), load_file(folder / "final" / "model.safetensors")
    assert apart.keys() == own and json.loads((folder / "final" / "adapter.json").read_text()) == {"r": 3}
    for key, tensor in apart.items():
        assert torch.equal(tensor, trained[key[:-1] + {"A": "down", "B": "up"}[key[-1]]])
    assert_same(rest, {name: t for name, t in trained.items() if not name.endswith((".down", ".up"))})


def check_frozen_model(reference, folder):
    mesh = LAYOUT.mesh()
    config, family = reference.config, family_of(reference.config)

    def build():
        resolved = SimpleNamespace(
            hf_config=config, family=family, weights=folder / "weights", attn_implementation="sdpa", delayed_param=True
        )
        return parallelize.prepare_model(
            resolved, mesh=mesh, settings=settings_with(freeze=True), dtype=torch.float32, device=torch.device("cpu"),
            seed=3, load_weights=False,
        )  # fmt: skip

    model = build()
    before = states(model)
    optimizer = steps(model, mesh, 0)
    saved = Checkpointer(folder / "frozen", model, optimizer)
    path = saved.save(1)
    steps(model, mesh, 1, optimizer=optimizer)
    trained = states(model)
    own = {name for name in trained if name.endswith((".down", ".up"))}
    assert {name for name in trained if not torch.equal(trained[name], before[name])} == own
    assert len(optimizer.state) == len(own) == 12
    held = {name for name in read_manifest(path).tensors if name.startswith("model.")}
    assert held == {f"model.{name}" for name in own}
    with pytest.raises(UserError, match="does not contain the pretrained weights that its run has frozen: resume it"):
        parameters_of(path, read_manifest(path), config)
    resumed = build()
    optimizer = build_optimizer(resumed, OptimConfig(), lr=1e-2)
    Checkpointer(folder / "frozen", resumed, optimizer).load()
    steps(resumed, mesh, 1, optimizer=optimizer)
    assert_same(states(resumed), trained)


def with_parameters(folder):
    folder = pathlib.Path(folder)
    reference = build_reference("llama_gqa", torch.float32)
    if dist.get_rank() == 0:
        reference.save_pretrained(folder / "weights")
    dist.barrier()
    check_trained_beside_the_model(reference, folder)
    check_frozen_model(reference, folder)


@pytest.fixture
def with_adapters(monkeypatch):
    """Adapters are on the list, first."""
    monkeypatch.setattr(parallelize, "TECHNIQUES", [adapters, *parallelize.TECHNIQUES])


@pytest.mark.full
def test_its_parameters_are_trained_saved_and_exported(with_adapters, tmp_path):
    run_distributed(with_parameters, str(tmp_path), world_size=4)


def test_its_parameters_are_counted(with_adapters):
    config = build_reference("llama_gqa", torch.float32).config
    resolved = SimpleNamespace(hf_config=config, family=family_of(config), attn_implementation="sdpa")
    plain, shape = (parallelize.shape_of(resolved, s) for s in (Settings(), settings_with(freeze=True)))
    own = 3 * adapters.RANK * (32 + 32 + 48 + 32)
    assert shape.parameters == plain.parameters + own
    assert shape.frozen_but == (own, 0, 0, own // 3) and plain.frozen_but is None
    needed = estimate_memory(shape, lay_out(1, 1), Workload(12, 1, 4, device_type="cpu"))
    assert needed["optimizer state"] == 8 * own and needed["parameters"] == 4 * shape.parameters
