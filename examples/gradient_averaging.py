"""One process per host, gradients averaged by hand, hosts named by SageMaker's environment.

SM_HOSTS='["localhost", "algo-2"]' SM_CURRENT_HOST=localhost python examples/gradient_averaging.py --report &
SM_HOSTS='["localhost", "algo-2"]' SM_CURRENT_HOST=algo-2 python examples/gradient_averaging.py; wait
"""

from __future__ import annotations

import json
import os

import common
import torch
import torch.distributed as dist
import torch.nn.functional as F
import toy
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

import smp  # noqa: F401 # registers the backend


def average_gradients(model: nn.Module) -> None:
    """Every rank gets the mean of all ranks' gradients: one exchange for all of them, not one each."""
    parameters = list(model.parameters())
    # A parameter that this rank did not use counts as zero: all ranks must exchange the same elements.
    flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters])
    dist.all_reduce(flat, op=dist.ReduceOp.SUM)
    flat /= dist.get_world_size()
    for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        parameter.grad = part.view_as(parameter)


def train(args) -> None:
    world_size, rank = len(args.hosts), args.hosts.index(args.current_host)
    print(f"world size {world_size} and host rank {rank}")
    address = f"tcp://{args.hosts[0]}:{args.port}"  # the first host's process brings all together
    dist.init_process_group(args.backend, init_method=address, rank=rank, world_size=world_size)

    device = common.local_device()
    model = toy.Model(args.width).to(device)
    for parameter in model.parameters():  # averaging keeps equal weights equal; they must be equal to begin with
        dist.broadcast(parameter.data, src=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    dataset = toy.RandomDataset(100)
    sampler: DistributedSampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=args.batch, sampler=sampler)
    print(f"train_loader_len {len(sampler)} data_set_len {len(dataset)}")

    log = common.Log(args, args.batch * world_size, "samples")
    for step in range(args.steps):
        if step % len(loader) == 0:
            sampler.set_epoch(step // len(loader))
            batches = iter(loader)
        inputs, targets = (tensor.to(device) for tensor in next(batches))
        loss = F.mse_loss(model(inputs), targets)
        loss.backward()
        average_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        log.step(loss)
    log.finish()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = common.parser(__doc__, steps=40, batch=30, width=64, port=29500)
    # A list is JSON here: argparse's type=list would cut the text into its letters.
    parser.add_argument("--hosts", type=json.loads, default=os.environ.get("SM_HOSTS", '["localhost"]'))
    parser.add_argument("--current-host", default=os.environ.get("SM_CURRENT_HOST", "localhost"))
    args = parser.parse_args()
    if args.current_host not in args.hosts:
        parser.error(f"--current-host {args.current_host} is not among --hosts {args.hosts}: name one of them")
    train(args)
