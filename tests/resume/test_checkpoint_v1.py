"""Checkpoints of schema 1, written by version 0.1.0: verified, exported and resumed bit for bit.

``tests/data/make_checkpoints_v1.py`` wrote them, and noted what followed in ``expected.json``.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import shutil

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

import smp
from smp.cli import main as command
from smp.optim.config import OptimConfig
from smp.train import __main__ as train_main
from smp.train.arguments import parse_args
from smp.train.start import read_saved
from tests import manifests
from tests.data.make_checkpoints_v1 import FLAGS, JOBS, build, steps
from tests.distributed import run_distributed
from tests.job import read_metrics, run_job

DATA = pathlib.Path(__file__).parents[1] / "data" / "checkpoints_v1"
EXPECTED = json.loads((DATA / "expected.json").read_text())
SCRIPTS = ("script_fsdp", "script_ddp")


@pytest.fixture(params=[*JOBS, *SCRIPTS])
def saved(request, tmp_path):
    """A copy of one of them."""
    return pathlib.Path(shutil.copytree(DATA / request.param, tmp_path / request.param, symlinks=True))


def checkpoints(folder: pathlib.Path) -> list[pathlib.Path]:
    return sorted(path.parent for path in folder.rglob("*steps/manifest.json"))


def plain(folder: pathlib.Path) -> dict[str, torch.Tensor]:
    """Every tensor, whole, put together from the files by what the manifests say; without any code of smp."""
    found: dict[str, torch.Tensor] = {}
    for path in checkpoints(folder):
        manifest = json.loads((path / "manifest.json").read_text())
        files = [load_file(path / name) if name.endswith(".safetensors") else {} for name, *_ in manifest["files"]]
        for name, (_, shape, chunks) in manifest["tensors"].items():
            for number, offsets, sizes in chunks:
                part = files[number][name]
                assert list(part.shape) == sizes
                whole = found.setdefault(name, torch.zeros(shape, dtype=part.dtype))
                whole[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))] = part
    return found


def loaded(model, optimizer) -> dict[str, torch.Tensor]:
    """Every tensor of the state, whole, by the names of files; collective."""
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        model = model.module
    tensors = {f"model.{name}": value for name, value in [*model.named_parameters(), *model.named_buffers()]}
    tensors = {name: value for name, value in tensors.items() if not name.endswith("inv_freq")}  # not persistent
    for name, parameter in model.named_parameters():
        tensors |= {f"optim.{key}.{name}": value for key, value in optimizer.state[parameter].items()}
    return {n: (v.full_tensor() if isinstance(v, DTensor) else v).detach().clone() for n, v in tensors.items()}


def require_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    expected = {name: value for name, value in expected.items() if not name.startswith("rng.")}
    assert found.keys() == expected.keys() and len(found) > 10
    for name, value in found.items():
        assert value.dtype == expected[name].dtype and torch.equal(value, expected[name]), name


def test_it_is_whole(saved, capsys):
    assert command(["verify", str(saved)]) == 0
    assert capsys.readouterr().out.count(": valid (") == len(checkpoints(saved))
    for path in checkpoints(saved):
        assert command(["inspect", str(path)]) == 0


def test_it_is_exported_or_refused_with_a_sentence(saved, tmp_path, capsys):
    path, target = checkpoints(saved)[0], tmp_path / "model"
    status = command(["export", str(path), str(target)])
    if saved.name in SCRIPTS:  # a model of the script's own
        assert status == 2 and "model" in capsys.readouterr().err
        return
    if saved.name == "job_local":
        assert status == 2 and "is a local checkpoint, which has the state of one rank" in capsys.readouterr().err
        return
    assert status == 0
    found = load_file(target / "model.safetensors")
    expected = {n.removeprefix("model."): v for n, v in plain(saved).items() if n.startswith("model.")}
    assert found.keys() == expected.keys() and all(torch.equal(found[n], expected[n]) for n in found)


SPLIT = ["--context_parallel_degree", "2"]  # a degree that their manifests do not have


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("job_sharded", []),
        *(pytest.param(name, [], marks=pytest.mark.full) for name in JOBS if name != "job_sharded"),
        pytest.param("job_sharded", SPLIT, marks=pytest.mark.full),
    ],
)
def test_a_job_goes_on_from_it(name, more, tmp_path):
    world, words = JOBS[name]
    run = pathlib.Path(shutil.copytree(DATA / name, tmp_path / name))
    expected = plain(run)

    def prepare(rank: int) -> None:
        train = train_main.train

        def compared(trainer):
            assert torch.equal(torch.get_rng_state(), expected[f"rng.cpu.{rank:05d}"])
            require_equal(loaded(trainer.model, trainer.optimizer), expected)
            return train(trainer)

        train_main.train = compared

    words = [*FLAGS, *words, *more, "--output_dir", run, "--max_steps", 4, "--resume_from_checkpoint", "latest"]
    run_job(*words, world_size=world, prepare=prepare).succeeded()
    metrics = read_metrics(run)
    assert len(metrics) == len(EXPECTED[name]) == 2
    for line, then in zip(metrics, EXPECTED[name], strict=True):
        assert [line[key] for key in ("step", "lr", "tokens")] == [then[key] for key in ("step", "lr", "tokens")]
        for key in ("loss", "grad_norm"):
            assert line[key] == pytest.approx(then[key], rel=1e-5)


def _goes_on(folder: str, name: str) -> None:
    model, optimizer = build(name)
    found = smp.Checkpoints(folder, model, optimizer, name="net").load()
    assert found is not None and (found.step, found.path.name) == (2, "net-2steps")
    assert found.extra == {"note": name, "seen": [1, 2.5, None]}
    require_equal(loaded(model, optimizer), plain(pathlib.Path(folder)))
    then = EXPECTED[name][dist.get_rank()]
    assert steps(model, optimizer, 2, 4) == pytest.approx(then["losses"], rel=1e-5)
    assert torch.rand(1).item() == then["draw"]


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_goes_on_from_it(name, tmp_path):
    folder = shutil.copytree(DATA / name, tmp_path / name)
    run_distributed(_goes_on, str(folder), name, world_size=2)


def _takes_a_job(folder: str, name: str, target: str) -> None:
    manifest = json.loads(next(pathlib.Path(folder).rglob("manifest.json")).read_text())
    smp.init({"tensor_parallel_degree": 2} if name == "job_tp2_shard2" else {"hybrid_shard_degree": 2})
    model = smp.parallelize(LlamaForCausalLM(LlamaConfig.from_dict(manifest["model"]["config"])))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    found = smp.Checkpointer(f"{folder}/checkpoints", model, optimizer, name="llama_v2").load()
    assert found is not None and (found.path.name, found.step, found.extra) == ("llama_v2-2steps", 2, None)
    expected = plain(pathlib.Path(folder))
    require_equal(loaded(model, optimizer), expected)
    assert optimizer.param_groups[0]["lr"] == 0.5  # a job's settings are its flags
    same = manifest["world_size"] == dist.get_world_size()
    assert torch.equal(torch.get_rng_state(), expected[f"rng.cpu.{dist.get_rank():05d}"]) is same
    torch.manual_seed(77)
    smp.Checkpointer(target, model, optimizer, name="mine").save(7, {"note": "mine"})


@pytest.mark.parametrize("name", [pytest.param("job_sharded", marks=pytest.mark.slow), "job_tp2_shard2"])
@pytest.mark.full
def test_a_script_goes_on_from_a_job_and_a_job_begins_anew_from_the_script(name, tmp_path):
    folder, target = shutil.copytree(DATA / name, tmp_path / name), tmp_path / "script"
    run_distributed(_takes_a_job, str(folder), name, str(target), world_size=2)
    expected = plain(folder)

    def prepare(rank: int) -> None:
        train = train_main.train

        def compared(trainer):
            assert not torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(77).get_state())
            require_equal(loaded(trainer.model, trainer.optimizer), expected)
            return train(trainer)

        train_main.train = compared

    words = [*FLAGS, "--max_steps", 4, "--checkpoint_freq", 2, "--resume_from_checkpoint", target / "mine-7steps"]
    refused = run_job(*words, "--output_dir", tmp_path / "no", world_size=2)
    assert refused.statuses == [2, 2] and "--reset_progress 1 takes its parameters" in refused.output, refused.output
    assert not (tmp_path / "no").exists()
    run, fresh = tmp_path / "run", tmp_path / "fresh"
    run_job(*words, "--reset_progress", 1, "--output_dir", run, world_size=2, prepare=prepare).succeeded()
    run_job(*words[:-2], "--output_dir", fresh, world_size=2).succeeded()
    begun, anew = read_metrics(run), read_metrics(fresh)
    for key in ("step", "lr", "tokens"):
        assert [line[key] for line in begun] == [line[key] for line in anew]
    assert begun[0]["loss"] != anew[0]["loss"]
    assert sorted(path.name for path in (run / "checkpoints").glob("*steps")) == ["llama_v2-2steps", "llama_v2-4steps"]
    refused = run_job(*words, "--reset_progress", 1, "--output_dir", run, world_size=2)  # would write over it
    assert refused.statuses == [2, 2] and "choose another --output_dir" in refused.output, refused.output


def _takes_a_local_one(folder: str) -> None:
    model, optimizer = build("script_fsdp")
    with pytest.raises(smp.UserError, match="is a local one, which has the state of one rank: resume the job from it"):
        smp.Checkpointer(folder, model, optimizer, name="llama_v2").load()


def test_what_a_job_and_a_script_do_not_take_of_each_other(tmp_path):
    local = shutil.copytree(DATA / "job_local", tmp_path / "local") / "checkpoints" / "rank00000-of-00002"
    run_distributed(_takes_a_local_one, str(local), world_size=1)
    path = shutil.copytree(DATA / "script_ddp", tmp_path / "script") / "net-2steps"
    for reset, said in ((False, "--reset_progress 1 takes its parameters"), (True, None)):
        with pytest.raises(smp.UserError, match=said) if said else contextlib.nullcontext():
            assert read_saved(path, OptimConfig(), local=False, reset=reset).run["progress"]["step"] == 0
    manifests.change(path, lambda content: content["run"]["optimizer"].update({"class": "SGD"}))
    with pytest.raises(smp.UserError, match="the optimizer SGD and the job has AdamW"):
        read_saved(path, OptimConfig(), local=False, reset=True)
    for start in ([], ["--resume_from_checkpoint", "latest"]):
        with pytest.raises(smp.ConfigError, match="--reset_progress 1 needs a path in --resume_from_checkpoint"):
            parse_args([*FLAGS, "--reset_progress", "1", *start])
    run = shutil.copytree(DATA / "job_sharded", tmp_path / "run")
    words = [*FLAGS, "--reset_progress", 1, "--output_dir", run, "--resume_from_checkpoint", checkpoints(run)[0]]
    refused = run_job(*words, "--max_steps", 4)
    assert refused.statuses == [2] and "begins a run anew, and " in refused.output, refused.output
