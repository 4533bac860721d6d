"""A job with an optimizer of one list entry: trained, planned, saved, resumed by its kind alone."""

from __future__ import annotations

import json

import torch

from smp.local_shards import local_tensor
from smp.memory.estimate import estimate_memory
from smp.memory.shape import Workload
from smp.mesh import lay_out
from smp.optim import optimizers
from smp.optim.config import OptimConfig
from smp.optim.entry import StateSpec
from smp.parallel.parallelize import settings_of, shape_of
from tests.flags import SYNTHETIC, plan_of
from tests.job import LLAMA, run_job


class Lion:
    """Chen et al., Symbolic Discovery of Optimization Algorithms, arXiv:2302.06675."""

    NAME = "lion"

    def takes(self, spec):
        return True

    def settings(self, config):
        return {"betas": (config.beta1, config.beta2)}

    def state(self, shape, dtype, config):
        return {"exp_avg": StateSpec(dtype, shape)}

    def update(self, parameters, states, group, skip):
        first, second = group["betas"]
        for parameter, state in zip(parameters, states, strict=True):
            value, gradient, mean = map(local_tensor, (parameter, parameter.grad, state["exp_avg"]))
            keep = 1.0 if skip is None else (~skip).to(value.dtype)
            value.mul_(1 - keep * group["lr"] * group["weight_decay"])
            value.sub_(keep * group["lr"] * torch.sign(mean * first + gradient * (1 - first)))
            mean.lerp_(gradient, keep * (1 - second))


def listed(rank: int = 0) -> None:
    optimizers.OPTIMIZERS.append(Lion())


WORDS = [*LLAMA, *SYNTHETIC, "--sharding_strategy", "full_shard", "--lr", "1e-3", "--lr_decay_iters", 9]


def test_it_is_trained_and_resumed_by_its_kind_alone(tmp_path):
    words = [*WORDS, "--optimizer", "lion", "--checkpoint_freq", 2, "--output_dir"]
    run_job(*words, tmp_path / "once", "--max_steps", 4, world_size=2, prepare=listed).succeeded()
    resume = ["--resume_from_checkpoint", "latest"]
    for steps in (2, 4):
        run_job(*words, tmp_path / "run", "--max_steps", steps, *resume, world_size=2, prepare=listed).succeeded()
    once, twice = (next(tmp_path.glob(f"{run}/checkpoints/*-4steps")) for run in ("once", "run"))
    for file in once.glob("*.safetensors"):
        assert file.read_bytes() == (twice / file.name).read_bytes()
    manifest = json.loads((twice / "manifest.json").read_text())
    assert manifest["run"]["optimizer"] == {"optimizer": "lion", "optimizer_state_dtype": "fp32", "param_dtype": "fp32"}
    assert {name.split(".")[1] for name in manifest["tensors"] if name.startswith("optim.")} == {"exp_avg"}
    refused = run_job(*WORDS, "--output_dir", tmp_path / "run", "--max_steps", 6, *resume, world_size=2)
    assert refused.statuses == [2, 2]
    assert "was made with the optimizer --optimizer lion and the job has AdamW: give --optimizer lion" in refused.output


def test_its_bytes_are_planned(tmp_path, monkeypatch):
    monkeypatch.setattr(optimizers, "OPTIMIZERS", [*optimizers.OPTIMIZERS, Lion()])
    job = plan_of([*LLAMA], tmp_path)
    states = []
    for name in ("adamw", "lion"):
        settings = settings_of({**job.config.flat(), "optimizer": name})
        shape, work = shape_of(job.model, settings), Workload(32, 1, 4, settings, device_type="cpu")
        states.append(estimate_memory(shape, lay_out(1, 2), work)["optimizer state"])
        assert optimizers.moved_bytes(shape.specs, OptimConfig(optimizer=name)) == {"adamw": 44, "lion": 36}[name]
    assert states[0] == 2 * states[1] > 0


class Sign(Lion):
    """Without state."""

    NAME = "sign"

    def state(self, shape, dtype, config):
        return {}


def test_a_checkpoint_of_one_without_state_is_its_parameters(tmp_path, monkeypatch):
    monkeypatch.setattr(optimizers, "OPTIMIZERS", [*optimizers.OPTIMIZERS, Sign()])
    job = plan_of([*LLAMA], tmp_path)
    settings = settings_of({**job.config.flat(), "optimizer": "sign"})
    work = Workload(32, 1, 4, settings, device_type="cpu", checkpoint_copy=True)
    needed = estimate_memory(shape_of(job.model, settings), lay_out(1, 2), work)
    assert needed["checkpoint copy"] == needed["parameters"] and not needed["optimizer state"]
