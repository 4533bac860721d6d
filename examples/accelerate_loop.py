"""A loop with Hugging Face Accelerate over smddp: the group is started first, and Accelerate takes it as it is.

accelerate launch --multi_gpu --num_processes 2 examples/accelerate_loop.py --report   # --multi_gpu on CPUs, too
torchrun --nproc_per_node 2 examples/accelerate_loop.py
"""

from __future__ import annotations

import common
import torch
import torch.distributed as dist
from accelerate import Accelerator
from tiny_llama import TinyLlama, next_token_loss
from torch.utils.data import DataLoader

import smp  # noqa: F401 # first of the two lines: registers the backend


def main() -> None:
    parser = common.parser(__doc__, steps=20, batch=4, width=64, layers=2, length=64, accumulate=2)
    args = parser.parse_args()
    common.local_device()
    dist.init_process_group(args.backend)  # second of the two lines, before there is an Accelerator
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=args.accumulate)

    torch.manual_seed(0)
    rows = args.steps * args.accumulate * args.batch * accelerator.num_processes
    loader = DataLoader(common.token_batch(0, 0, rows, args.length), batch_size=args.batch)  # type: ignore[arg-type]
    model = TinyLlama(args.width, args.layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    log = common.Log(args, rows // args.steps * args.length)
    losses = []
    for ids in loader:
        with accelerator.accumulate(model):  # exchanges gradients in the last pass of each step
            loss = next_token_loss(model(ids), ids)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
        if accelerator.sync_gradients:
            log.step(accelerator.gather(torch.stack(losses)).mean())
            losses.clear()
    log.finish()
    # DDP before its group: if DDP is the last to let go of gloo's, torch now and then hangs (pytorch#56297).
    model, optimizer, loader = accelerator.free_memory(model, optimizer, loader)
    accelerator.end_training()  # destroys the group, too


if __name__ == "__main__":
    main()
