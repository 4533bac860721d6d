"""Pretrain a Llama from its config in a loop of your own: smp shards it, and exports it as a Hugging Face model.

torchrun --nproc_per_node 2 examples/pretrain.py --output_dir runs/pretrained --report
"""

from __future__ import annotations

from pathlib import Path

import common
import torch
import torch.distributed as dist
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import smp

SAMPLE = Path(__file__).parent.parent / "data" / "sample"


def packed(length: int) -> torch.Tensor:
    """Return the sample text's tokens in rows of ``length``, end to end."""
    text = (SAMPLE / "validation.txt").read_text(encoding="utf-8")
    tokens = torch.tensor(AutoTokenizer.from_pretrained(SAMPLE / "tokenizer")(text)["input_ids"])
    return tokens[: len(tokens) // length * length].view(-1, length)


def main() -> None:
    parser = common.parser(__doc__, steps=40, batch=4, width=64, layers=2, length=64, hybrid_shard_degree=1)
    parser.add_argument("--output_dir", type=Path, help="where the Hugging Face model goes")
    args = parser.parse_args()
    device = common.local_device()
    dist.init_process_group(args.backend)
    size = dist.get_world_size()
    mesh = smp.init({"hybrid_shard_degree": args.hybrid_shard_degree if args.hybrid_shard_degree > 1 else size})

    torch.manual_seed(0)  # the same initial weights on every rank
    config = LlamaConfig(
        vocab_size=2048, hidden_size=args.width, intermediate_size=3 * args.width, num_hidden_layers=args.layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=args.length,
        bos_token_id=None, eos_token_id=0,
    )  # fmt: skip
    model = smp.parallelize(LlamaForCausalLM(config).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)  # after sharding, so that its state is sharded too

    rows = packed(args.length)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(1))
    log = common.Log(args, mesh.data_size * args.batch * args.length)
    for step in range(args.steps):
        first = (step * mesh.data_size + mesh.data_rank) * args.batch  # rows of this step and of this rank
        ids = rows[order[torch.arange(first, first + args.batch) % len(rows)]].to(device)
        tokens = torch.tensor(smp.count_valid_tokens(ids), device=device)
        dist.all_reduce(tokens, group=mesh.data_group)  # valid tokens of the global batch
        loss = smp.causal_lm_loss_sum(model(ids, use_cache=False).logits, ids) / tokens
        loss.backward()
        smp.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach()
        dist.all_reduce(loss, group=mesh.data_group)  # each rank had its part of the mean
        log.step(loss)
    log.finish()
    if args.output_dir:
        smp.export_hf(model, args.output_dir, tokenizer_dir=SAMPLE / "tokenizer")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
