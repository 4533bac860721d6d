"""fully_shard (FSDP2) over smddp, with buffers that the ranks of a host share: AllGather without a copy.

torchrun --nproc_per_node 2 examples/fsdp2.py --report
"""

from __future__ import annotations

import common
import torch
import torch.distributed as dist
from tiny_llama import TinyLlama, next_token_loss
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import smp  # first of the two lines: registers the backend


def main() -> None:
    parser = common.parser(__doc__, steps=20, batch=4, width=64, layers=2, length=64)
    parser.add_argument("--private_buffers", action="store_true", help="leave fully_shard's own buffers as they are")
    args = parser.parse_args()
    device = common.local_device()
    dist.init_process_group(args.backend)  # second of the two lines: was "nccl" or "gloo"
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))

    torch.manual_seed(0)
    model = TinyLlama(args.width, args.layers).to(device)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if not args.private_buffers and device.type == "cpu":
        smp.comm.use_shared_buffers(model, mesh.get_group())  # one more line; nothing changes on another backend
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    rank, size = dist.get_rank(), dist.get_world_size()
    log = common.Log(args, size * args.batch * args.length)
    for step in range(args.steps):
        ids = common.token_batch(step, rank, args.batch, args.length).to(device)
        loss = next_token_loss(model(ids), ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        log.step(loss)
    log.finish()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
