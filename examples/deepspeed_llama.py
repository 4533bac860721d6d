"""Llama with DeepSpeed's ZeRO over smddp, on synthetic data.

torchrun --nproc_per_node 2 examples/deepspeed_llama.py --stage 3 --report
deepspeed --num_gpus 2 examples/deepspeed_llama.py --stage 3

On CPUs set DS_ACCELERATOR=cpu before either.
"""

from __future__ import annotations

import warnings

import build_lock  # noqa: F401 # tells of a build that was killed
import common
import deepspeed
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import smp  # noqa: F401 # first of the two lines: registers the backend


def build_engine(args):
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=256, hidden_size=args.width, intermediate_size=3 * args.width, num_hidden_layers=args.layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=args.length, use_cache=False,
    )  # fmt: skip
    model = LlamaForCausalLM(shape)
    config = {
        "train_micro_batch_size_per_gpu": args.batch, "gradient_clipping": 1.0,
        "zero_optimization": {"stage": args.stage},
        "zero_allow_untested_optimizer": True,  # torch's AdamW: DeepSpeed's own is compiled at its first use
    }  # fmt: skip
    return deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=3e-3), config=config)[0]


def run_batches(engine, args, numbers: range, log: common.Log | None = None) -> torch.Tensor:
    """Train on the batches of these numbers, or only look at them if there is no log; the mean loss of all ranks."""
    engine.train(log is not None)
    losses = []
    for count, number in enumerate(numbers, start=1):
        common.say("Processing" if log else "Performing validation on", "training batch", count)
        ids = common.token_batch(number, dist.get_rank(), args.batch, args.length).to(engine.device)
        with torch.set_grad_enabled(log is not None):
            loss = engine(input_ids=ids, labels=ids).loss
        if log:
            engine.backward(loss)
            engine.step()
            log.step(loss)
        losses.append(loss.detach())
    mean = torch.stack(losses).mean()
    dist.all_reduce(mean)
    return mean / dist.get_world_size()


def main() -> None:
    parser = common.parser(__doc__, steps=20, batch=4, width=64, layers=2, length=64, epochs=1, eval_steps=1)
    parser.add_argument("--stage", type=int, choices=(0, 1, 2, 3), default=3, help="what ZeRO shards; default 3")
    parser.add_argument("--local_rank", type=int, help="given by DeepSpeed's launcher; LOCAL_RANK says the same")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")  # torch renamed what it calls
    common.local_device()
    deepspeed.init_distributed(dist_backend=args.backend)  # second of the two lines: was "nccl"
    engine = build_engine(args)
    log = common.Log(args, dist.get_world_size() * args.batch * args.length)
    for epoch in range(args.epochs):
        train_loss = run_batches(engine, args, range(epoch * args.steps, (epoch + 1) * args.steps), log)
        train_ppl = train_loss.exp()
        common.say(f"******{epoch=}: {train_ppl=} {train_loss=}******")
        eval_loss = run_batches(engine, args, range(-args.eval_steps, 0))  # numbers that training has not
        eval_ppl = eval_loss.exp()
        common.say(f"*******{epoch=}: {eval_ppl=} {eval_loss=}*******")
    log.finish()
    common.say("Training done!")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
