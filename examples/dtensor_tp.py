"""Tensor and sequence parallelism by torch's DTensor over smddp, of a model that is not from transformers.

torchrun --nproc_per_node 2 examples/dtensor_tp.py --report
"""

from __future__ import annotations

import os

import common
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tiny_llama import TinyLlama
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

import smp  # noqa: F401 # first of the two lines: registers the backend


def whole_sequence() -> PrepareModuleInput:
    """Gather the sequence, of which each rank has a part between the layers."""
    return PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))


def split(model: TinyLlama, mesh) -> None:
    """Split heads, the MLP's width and the vocabulary over the ranks, and the sequence between them."""
    block_plan = {
        "attention_norm": SequenceParallel(), "attention": whole_sequence(),
        "attention.q_proj": ColwiseParallel(), "attention.k_proj": ColwiseParallel(),
        "attention.v_proj": ColwiseParallel(), "attention.o_proj": RowwiseParallel(output_layouts=Shard(1)),
        "mlp_norm": SequenceParallel(), "mlp": whole_sequence(),
        "mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(output_layouts=Shard(1)),
    }  # fmt: skip
    for block in model.blocks:
        parallelize_module(block, mesh, block_plan)
    head = ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False)
    embed = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    parallelize_module(model, mesh, {"embed": embed, "norm": SequenceParallel(), "head": head})


def main() -> None:
    parser = common.parser(__doc__, steps=20, batch=4, width=64, layers=2, length=64)
    args = parser.parse_args()
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if args.length % size or args.width % (4 * size):
        parser.error(f"{size} processes cannot split --length and --width: give multiples of {size} and {4 * size}")
    device = common.local_device()
    dist.init_process_group(args.backend)  # second of the two lines: was "nccl" or "gloo"
    torch.manual_seed(0)
    model = TinyLlama(args.width, args.layers, heads=2 * size, kv_heads=size).to(device)
    split(model, init_device_mesh(device.type, (size,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    log = common.Log(args, args.batch * args.length)
    for step in range(args.steps):
        ids = common.token_batch(step, 0, args.batch, args.length).to(device)  # the same on every rank
        labels = F.pad(ids[:, 1:], (0, 1), value=-100)  # so that no rank's part of the logits is cut
        with loss_parallel():  # logits stay split by the vocabulary
            loss = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten())
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        log.step(loss.full_tensor())
    log.finish()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
