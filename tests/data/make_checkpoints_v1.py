"""Write tests/data/checkpoints_v1: how checkpoints of schema 1 look. Run once, with version 0.1.0 of smp.

    python -m tests.data.make_checkpoints_v1 DIRECTORY

``expected.json`` has what each job logged in the two steps after its checkpoint, and each script's output.
"""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import sys

import torch
import torch.distributed as dist
from torch import nn

import smp
from tests.distributed import run_distributed
from tests.job import LLAMA, read_metrics, run_job

JOBS = {
    "job_sharded": (2, []),
    "job_async": (2, ["--checkpoint_type", "async_sharded"]),
    "job_local": (2, ["--checkpoint_type", "local"]),
    "job_tp2_shard2": (4, ["--tensor_parallel_degree", "2", "--hybrid_shard_degree", "2"]),
}
FLAGS = [
    *LLAMA, "--num_layers", "1", "--hidden_width", "16", "--use_synthetic_data", "1", "--validation_freq", "2",
    "--validation_batches", "1", "--logging_freq", "1", "--lr", "1e-2", "--distributed_backend", "gloo",
]  # fmt: skip


class Net(nn.Module):
    """With a buffer that training changes, and axes that two ranks divide unevenly."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3, bias=False)

    def forward(self, x):
        return self.last(self.norm(self.first(x)).relu())


def build(kind: str):
    torch.manual_seed(5)
    model: nn.Module = Net()
    if kind == "script_fsdp":
        model = smp.FSDP(model, use_orig_params=True)
    else:
        model = nn.parallel.DistributedDataParallel(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def steps(model, optimizer, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        loss = model(torch.randn(4, 5, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def write_script(kind: str, folder: str) -> None:
    model, optimizer = build(kind)
    steps(model, optimizer, 0, 2)
    smp.Checkpoints(folder, model, optimizer, name="net").save(2, extra={"note": kind, "seen": [1, 2.5, None]})
    losses = steps(model, optimizer, 2, 4)
    pathlib.Path(f"{folder}.rank{dist.get_rank()}").write_text(
        json.dumps({"losses": losses, "draw": torch.rand(1).item()})
    )


def main(target: pathlib.Path) -> None:
    target.mkdir()
    os.chdir(target)
    expected = {}
    for name, (world, words) in JOBS.items():
        run_job(
            *FLAGS, *words, "--output_dir", name, "--max_steps", 4, "--checkpoint_freq", 2, world_size=world
        ).succeeded()
        metrics = [line for line in read_metrics(pathlib.Path(name)) if line["step"] > 2]
        expected[name] = [{key: line[key] for key in ("step", "loss", "lr", "grad_norm", "tokens")} for line in metrics]
        for found in sorted(pathlib.Path(name).rglob("*-2steps")):
            place = pathlib.Path("kept", found)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(found, place)
        shutil.rmtree(name)
        shutil.move(f"kept/{name}", name)
    os.rmdir("kept")
    for name in ("script_fsdp", "script_ddp"):
        run_distributed(write_script, name, name, world_size=2)
        ranks = [pathlib.Path(f"{name}.rank{rank}") for rank in range(2)]
        expected[name] = [json.loads(file.read_text()) for file in ranks]
        for file in ranks:
            file.unlink()
    pathlib.Path("expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]).absolute())
