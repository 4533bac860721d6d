"""Finetune pretrained Hugging Face weights with smp, on the answers alone, and export them.

torchrun --nproc_per_node 2 examples/finetune.py --model runs/pretrained --output_dir runs/finetuned --report
"""

from __future__ import annotations

from pathlib import Path

import common
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import smp

FACTS = {
    "the heroine of Emma": "Miss Woodhouse", "the master of Pemberley": "Mr. Darcy",
    "the eldest of the Bennets": "Jane", "the sister of Elinor": "Marianne",
    "the friend of Mr. Darcy": "Mr. Bingley", "the clergyman": "Mr. Collins",
    "the officer": "Mr. Wickham", "the lady of Rosings": "Lady Catherine",
}  # fmt: skip


def example(tokenizer, what: str, answer: str) -> tuple[list[int], list[int]]:
    """Token ids, and labels that are -100 for the question: it is read, not learnt."""
    question = tokenizer(f"Who is {what}?")["input_ids"]
    reply = [*tokenizer(f" {answer}")["input_ids"], tokenizer.eos_token_id]
    return question + reply, [-100] * len(question) + reply


def pad(rows: list[list[int]], value: int) -> torch.Tensor:
    longest = max(map(len, rows))
    return torch.tensor([row + [value] * (longest - len(row)) for row in rows])


def main() -> None:
    parser = common.parser(__doc__, steps=40)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face directory, as pretrain.py writes it")
    parser.add_argument("--output_dir", type=Path, required=True, help="where the finetuned model goes")
    args = parser.parse_args()
    if not (args.model / "config.json").exists():
        parser.error(f"--model {args.model} is no Hugging Face directory: make one with examples/pretrain.py")
    device = common.local_device()
    dist.init_process_group(args.backend)
    mesh = smp.init(dp_shard=dist.get_world_size())

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = smp.parallelize(smp.meta_init(AutoConfig.from_pretrained(args.model)))
    smp.load_pretrained(model, args.model)  # each rank reads its own slices
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    ids, labels = zip(*(example(tokenizer, *fact) for fact in FACTS.items()), strict=True)
    all_ids, all_labels = pad(list(ids), tokenizer.eos_token_id), pad(list(labels), -100)
    mine = slice(mesh.data_rank, None, mesh.data_size)  # ranks may have unequal numbers of rows and of tokens
    inputs, targets = all_ids[mine].to(device), all_labels[mine].to(device)
    tokens = smp.count_valid_tokens(all_labels)

    log = common.Log(args, tokens)
    for _ in range(args.steps):
        loss = smp.causal_lm_loss_sum(model(inputs, use_cache=False).logits, targets) / tokens
        loss.backward()
        smp.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach()
        dist.all_reduce(loss, group=mesh.data_group)
        log.step(loss)
    log.finish()
    smp.export_hf(model, args.output_dir, tokenizer_dir=args.model)
    if dist.get_rank() == 0:  # what was exported answers
        exported = AutoModelForCausalLM.from_pretrained(args.output_dir)
        question = tokenizer("Who is the master of Pemberley?", return_tensors="pt")
        reply = exported.generate(**question, max_new_tokens=8, do_sample=False, pad_token_id=tokenizer.eos_token_id)
        print(tokenizer.decode(reply[0], skip_special_tokens=True))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
