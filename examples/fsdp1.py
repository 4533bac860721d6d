"""torch's FullyShardedDataParallel over smddp; with --engine smp the same script over smp's, which is FSDP2 inside.

torchrun --nproc_per_node 2 examples/fsdp1.py --report
torchrun --nproc_per_node 2 examples/fsdp1.py --engine smp --save runs/model.pt
"""

from __future__ import annotations

import functools
from pathlib import Path

import common
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from tiny_llama import Block, TinyLlama, next_token_loss
from torch.distributed.fsdp import FullStateDictConfig, ShardingStrategy, StateDictType
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

import smp  # first of the two lines: registers the backend


def main() -> None:
    parser = common.parser(__doc__, steps=20, batch=4, width=64, layers=2, length=64)
    parser.add_argument("--engine", choices=("torch", "smp"), default="torch")
    parser.add_argument("--strategy", choices=("full_shard", "shard_grad_op", "no_shard"), default="full_shard")
    parser.add_argument("--save", type=Path, help="rank 0 writes the whole state dict here")
    args = parser.parse_args()
    engine = torch.distributed.fsdp if args.engine == "torch" else smp  # the same constructor
    FSDP = engine.FullyShardedDataParallel  # noqa: N806

    device = common.local_device()
    dist.init_process_group(args.backend)  # second of the two lines: was "nccl" or "gloo"
    torch.manual_seed(0)
    model = FSDP(
        TinyLlama(args.width, args.layers),
        auto_wrap_policy=functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}),
        sharding_strategy=ShardingStrategy[args.strategy.upper()],
        device_id=device,
        use_orig_params=True,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    rank, size = dist.get_rank(), dist.get_world_size()
    log = common.Log(args, size * args.batch * args.length)
    for step in range(args.steps):
        ids = common.token_batch(step, rank, args.batch, args.length).to(device)
        loss = next_token_loss(model(ids), ids)
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        log.step(loss)
    log.finish()

    if args.save:
        # On CPUs torch 2.13 dies of offload_to_cpu: it frees the memory that it is about to read.
        whole = FullStateDictConfig(offload_to_cpu=device.type == "cuda", rank0_only=True)
        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, whole):
            state = model.state_dict()
        if rank == 0:
            args.save.parent.mkdir(parents=True, exist_ok=True)
            torch.save(state, args.save)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
