"""The layout on disk: what counts as a checkpoint, which one is chosen, what is refused."""

from __future__ import annotations

import json
import os

import pytest
import torch
import torch.distributed as dist
import transformers  # noqa: F401  imported before the ranks are forked
from safetensors import safe_open
from torch.distributed.tensor import DTensor

from smp.checkpoint import checkpointer
from smp.checkpoint.checkpointer import architecture, check_architecture, load_checkpoint, save_checkpoint
from smp.checkpoint.layout import (
    choose_checkpoint,
    find_checkpoints,
    prune,
    publish,
    read_state,
    refuse_foreign,
    refuse_older_branch,
    write_json,
)
from smp.config import ActivationConfig
from smp.errors import UserError
from smp.models.registry import family_of
from smp.optimizer import OptimConfig, build_optimizer
from smp.prepare import parallelize
from smp.train_state import TrainState
from tests.distributed import run_distributed
from tests.parity import Layout, build_reference, rank_batch, tiny_config
from train_lib import train_step


def make(directory, step, name="m"):
    path = directory / f"{name}-{step}steps"
    path.mkdir(parents=True)
    (path / "a.safetensors").write_bytes(b"1234")
    write_json(path / "state.json", {"format": 1, "files": {"a.safetensors": 4}})
    return path


def test_finds_complete_checkpoints_of_this_model_only(tmp_path):
    for step in (100, 20, 3):
        make(tmp_path, step)
    make(tmp_path, 500, name="m2")
    (tmp_path / "m-200steps").mkdir()
    (tmp_path / "m-300steps.tmp").mkdir()
    assert [c.step for c in find_checkpoints(tmp_path, "m")] == [3, 20, 100]


def test_choice(tmp_path):
    assert choose_checkpoint("latest", [tmp_path], "m") is None
    assert choose_checkpoint(None, [tmp_path], "m") is None
    make(tmp_path / "a", 10)
    newest = make(tmp_path / "b", 12)
    assert choose_checkpoint("latest", [tmp_path / "a", tmp_path / "b"], "m") == newest
    assert choose_checkpoint(str(tmp_path / "a" / "m-10steps"), [], "m").name == "m-10steps"
    with pytest.raises(UserError, match=r"already holds checkpoints up to step 12.*resume_from_checkpoint latest"):
        choose_checkpoint(None, [tmp_path / "a", tmp_path / "b"], "m")
    with pytest.raises(UserError, match=r"not a complete checkpoint.*it contains m-10steps"):
        choose_checkpoint(str(tmp_path / "a"), [], "m")


@pytest.mark.parametrize("damage", ["truncated", "missing", "extra", "json", "format"])
def test_damage_is_named(damage, tmp_path):
    path = make(tmp_path, 1)
    read_state(path)
    match damage:
        case "truncated":
            (path / "a.safetensors").write_bytes(b"12")
        case "missing":
            (path / "a.safetensors").unlink()
        case "extra":
            (path / "b.safetensors").write_bytes(b"")
        case "json":
            (path / "state.json").write_text("{")
        case "format":
            write_json(path / "state.json", {"format": 2, "files": {}})
    with pytest.raises(UserError, match=r"has 2 bytes instead of 4|is missing|does not belong|cannot be read|format 2"):
        read_state(path)


def test_publish_replaces_the_link_and_prune_keeps_the_newest(tmp_path):
    for step in (1, 2, 3):
        make(tmp_path, step)
    fresh = make(tmp_path / "elsewhere", 4)
    fresh.rename(tmp_path / "m-4steps.tmp")
    publish(tmp_path / "m-4steps.tmp", tmp_path / "m-4steps")
    assert os.readlink(tmp_path / "latest") == "m-4steps"
    (tmp_path / "m-9steps.tmp").mkdir()
    prune(tmp_path, "m", 2)
    assert sorted(p.name for p in tmp_path.glob("m-*")) == ["m-3steps", "m-4steps"]


def test_another_model_is_refused_with_every_difference(tmp_path):
    saved = architecture(tiny_config("llama_gqa"))
    check_architecture(tmp_path, saved, tiny_config("llama_gqa"))
    saved |= {"hidden_size": 64, "num_hidden_layers": 9}
    with pytest.raises(UserError, match=r"hidden_size 64 there, 32 here; num_hidden_layers 9 there, 3 here"):
        check_architecture(tmp_path, saved, tiny_config("llama_gqa"))


def build(layout: Layout, name: str):
    model = build_reference(name, torch.float32).train()
    activation = ActivationConfig(activation_checkpointing=False)
    mesh, family = layout.mesh(), family_of(model.config)
    parallelize(model, family, mesh=mesh, parallel=layout.parallel(), activation=activation, dtype=None)
    return model, build_optimizer(model, OptimConfig(), lr=1e-2)


def whole(model, optimizer) -> dict[str, torch.Tensor]:
    tensors = {}
    for name, parameter in model.named_parameters():
        for key, value in {"": parameter, **optimizer.state[parameter]}.items():
            tensors[f"{name} {key}"] = (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
    return tensors


def _save(folder, name, layout):
    model, optimizer = build(layout, name)
    rank, size = dist.get_rank(), dist.get_world_size()
    for step in range(2):
        train_step(model, optimizer, rank_batch(step, rank, size, 1), device=torch.device("cpu"), grad_clip=1.0)
    extra = {"architecture": architecture(model.config)}
    state = TrainState(step=2, samples=16, tokens=99)
    save_checkpoint(folder, model=model, optimizer=optimizer, state=state, model_name="m", extra=extra, keep=1)
    tensors = whole(model, optimizer)
    if rank == 0:
        torch.save(tensors, folder / "whole.pt")


def _load(folder, name, layouts):
    expected = torch.load(folder / "whole.pt")
    for layout in layouts:
        model, optimizer = build(layout, name)
        path = folder / "m-2steps"
        state = load_checkpoint(path, model=model, optimizer=optimizer, seed=0, mesh=layout.mesh())
        assert state == TrainState(step=2, samples=16, tokens=99)
        got = whole(model, optimizer)
        assert got.keys() == expected.keys()
        assert all(torch.equal(got[key], expected[key]) for key in got), layout


@pytest.mark.parametrize("name", ["llama_tied", "gpt_neox"])
def test_any_layout_loads_bit_for_bit_at_any_other(name, tmp_path):
    run_distributed(_save, tmp_path, name, Layout("hybrid_shard", 2), world_size=4)
    run_distributed(_load, tmp_path, name, [Layout("full_shard"), Layout("no_shard")], world_size=3)
    run_distributed(_load, tmp_path, name, [Layout("full_shard")], world_size=1)


def test_a_branch_is_not_mixed_with_newer_checkpoints(tmp_path):
    old, new = make(tmp_path / "a", 100), make(tmp_path / "b", 300)
    refuse_older_branch(new, [tmp_path / "a", tmp_path / "b"])
    with pytest.raises(UserError, match=r"m-300steps is newer than .* step 100: move"):
        refuse_older_branch(old, [tmp_path / "a", tmp_path / "b"])
    with pytest.raises(UserError, match=r"does not continue \(m-100steps\)"):
        refuse_foreign([tmp_path / "none", tmp_path / "a"])


def test_large_states_are_cut_into_files_and_read_back(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpointer, "FILE_BYTES", 10_000)
    run_distributed(_save, tmp_path, "gpt_neox", Layout("full_shard"), world_size=2)
    assert len(list((tmp_path / "m-2steps").glob("shard-00002-*.safetensors"))) > 3
    run_distributed(_load, tmp_path, "gpt_neox", [Layout("full_shard")], world_size=3)


def test_no_pickle_in_a_checkpoint(tmp_path):
    run_distributed(_save, tmp_path, "llama_gqa", Layout("full_shard"), world_size=2)
    files = sorted((tmp_path / "m-2steps").iterdir())
    assert {f.suffix for f in files} == {".safetensors", ".json"} and len(files) == 3
    json.loads((tmp_path / "m-2steps" / "state.json").read_text())
    keys = [key for f in files[:2] for key in safe_open(f, "pt").keys()]  # noqa: SIM118
    assert {"rng.cpu.00000", "rng.cpu.00001"} <= set(keys)


def _load_wrong(folder, name, sentence):
    layout = Layout("full_shard")
    model, optimizer = build(layout, name)
    with pytest.raises(UserError, match=sentence):
        path = folder / "m-2steps"
        load_checkpoint(path, model=model, optimizer=optimizer, seed=0, mesh=layout.mesh())


def test_tensors_that_do_not_fit_are_refused(tmp_path):
    run_distributed(_save, tmp_path, "llama_tied", Layout("full_shard"), world_size=1)
    run_distributed(_load_wrong, tmp_path, "llama_gqa", "model.lm_head.weight is missing", world_size=1)
    run_distributed(_load_wrong, tmp_path, "gpt_neox", "does not fit the model: .* and .* more", world_size=1)
