"""DistributedDataParallel over smddp: gradients are averaged in shared memory.

torchrun --nproc_per_node 2 examples/ddp.py --report
"""

from __future__ import annotations

import common
import torch
import torch.distributed as dist
import torch.nn.functional as F
import toy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import smp  # noqa: F401 # first of the two lines: registers the backend


def main() -> None:
    args = common.parser(__doc__, steps=40, batch=30, width=64).parse_args()
    device = common.local_device()
    dist.init_process_group(args.backend)  # second of the two lines: was "nccl" or "gloo"

    torch.manual_seed(0)
    # DDP sends rank 0's weights to all, and averages the gradients during backward.
    model = DistributedDataParallel(toy.Model(args.width).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    dataset = toy.RandomDataset(8 * args.batch)
    sampler: DistributedSampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=args.batch, sampler=sampler)

    log = common.Log(args, args.batch * dist.get_world_size(), "samples")
    epoch = 0
    while len(log.losses) < args.steps:
        sampler.set_epoch(epoch)  # another order in each epoch
        epoch += 1
        for inputs, targets in loader:
            loss = F.mse_loss(model(inputs.to(device)), targets.to(device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            log.step(loss)
            if len(log.losses) == args.steps:
                break
    log.finish()
    # DDP before its group: if DDP is the last to let go of gloo's, torch now and then hangs (pytorch#56297).
    del model
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
