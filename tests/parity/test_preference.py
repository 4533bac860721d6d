"""DPO: losses, metrics and gradients of TRL's formulas with peft's adapters in one process, at any layout."""

from __future__ import annotations

import itertools
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from smp.config import LossConfig, Settings
from smp.data.data_pipeline import StepBatch
from smp.data.packing import Collator, Row
from smp.models.registry import family_of
from smp.parallel import lora
from smp.parallel.parallelize import apply_techniques
from smp.parallel.technique import Setup
from smp.train.optimizer import OptimConfig, build_optimizer
from smp.train.preference import Config, loss_of
from smp.train.step import train_step
from tests.distributed import run_distributed
from tests.parity.test_lora import our_name, peft_of
from tests.reference import LR, VOCABULARY, Layout, build_reference, relative
from tests.tensor_parallel import whole

peft = pytest.importorskip("peft")
LENGTH = 16
# Of each row, the pairs' answers: tokens that are read and tokens that are trained on.
ROWS = [
    [((2, 3), (2, 4))], [((3, 1), (3, 2)), ((1, 2), (1, 3))], [((4, 4), (4, 2))], [((1, 5), (1, 1))],
    [((2, 2), (2, 2)), ((2, 2), (2, 1))],
]  # fmt: skip
PAIRS = sum(map(len, ROWS))
CONFIGS = [Config(dpo=True), Config(dpo=True, dpo_beta=0.3, dpo_label_smoothing=0.2), Config(dpo=True, dpo_loss="ipo")]
LAYOUTS = {
    1: [Layout("no_shard", checkpointing=True)],
    2: [
        Layout("full_shard"),
        Layout("full_shard", tp=2, mode="selective", checkpointing=True),
        Layout("full_shard", tp=2, sequence=False),
        Layout("full_shard", cp=2),
    ],
    4: [Layout("full_shard", **degrees) for degrees in ({"tp": 2}, {"tp": 4}, {"cp": 2}, {"tp": 2, "cp": 2})],
}


def answer(read: int, trained: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    ids = np.random.default_rng(seed).integers(1, VOCABULARY, read + trained)
    return ids, np.where(np.arange(len(ids)) >= read, ids, -100)


def answers() -> list[list[tuple[np.ndarray, np.ndarray]]]:
    """Of each row the answers' ids and labels: chosen, rejected, chosen, ..."""
    flat = ([*itertools.chain(*pairs)] for pairs in ROWS)
    return [[answer(*each, 100 * row + at) for at, each in enumerate(documents)] for row, documents in enumerate(flat)]


def batch_of(rank: int, size: int) -> StepBatch:
    """A rank's rows, the first with another, and a micro-batch of padding on ranks with fewer."""
    rows = []
    for documents in answers():
        ids, labels = (np.concatenate(each) for each in zip(*documents, strict=True))
        rows.append(Row(ids, None, labels, np.array([len(each) for each, _ in documents])))
    mine, most = rows[rank::size], -(-len(rows) // size)
    parts = [mine[:2], *([row] for row in mine[2:])] + [[None]] * (most - len(mine))
    collate = Collator(sequence_length=LENGTH, pad_token_id=0, document_end=0)
    return StepBatch([collate(part) for part in parts if part], torch.arange(len(mine)))


def log_probs(model) -> torch.Tensor:
    """Of each pair's chosen and rejected answer, ``(pairs, 2)``, each alone in its forward; and their tokens."""
    found, tokens = [], []
    for ids, labels in itertools.chain(*answers()):
        ids, labels = torch.tensor(ids), torch.tensor(labels)
        logits = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
        valid = labels[1:] != -100
        found.append(logits[valid].gather(-1, labels[1:][valid, None]).sum())
        tokens.append(int(valid.sum()))
    return torch.stack(found).view(-1, 2), torch.tensor(tokens).view(-1, 2)


def formula(model, config: Config):
    """TRL's ``dpo_loss``, its metrics, and the gradients of the mean."""
    policy, tokens = log_probs(model)
    with torch.no_grad(), model.disable_adapter():
        reference, _ = log_probs(model)
    chosen, rejected = (policy - reference).unbind(1)
    rewards = config.dpo_beta * chosen.detach(), config.dpo_beta * rejected.detach()
    if config.dpo_loss == "ipo":
        losses = (chosen / tokens[:, 0] - rejected / tokens[:, 1] - 1 / (2 * config.dpo_beta)) ** 2
    else:
        logits = config.dpo_beta * (chosen - rejected)
        smoothing = config.dpo_label_smoothing
        losses = -F.logsigmoid(logits) * (1 - smoothing) - F.logsigmoid(-logits) * smoothing
    model.zero_grad()
    losses.mean().backward()
    gradients = {our_name(name): p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}
    of_pairs = [*rewards, (rewards[0] > rewards[1]).double(), rewards[0] - rewards[1]]
    return [losses.mean().item(), *(float(each.mean()) for each in of_pairs)], gradients


def check(expected, folder):
    for layout in LAYOUTS[dist.get_world_size()]:
        for config, (numbers, gradients) in zip(CONFIGS, expected, strict=True):
            model, mesh = build_reference("llama_gqa", torch.float64), layout.mesh()
            loss = LossConfig(loss_chunk_tokens=layout.chunk)
            adapter = lora.Config(adapter_path=str(folder))
            settings = Settings((layout.parallel(), layout.activation(), loss, adapter, config))
            setup = Setup(family_of(model.config), mesh, settings)
            for block in model.model.layers:
                block.self_attn.attention_dropout = 0.5  # is to be left out, as TRL does
            apply_techniques(model, setup)
            optimizer, found = build_optimizer(model, OptimConfig(), lr=LR), {}
            optimizer.register_step_pre_hook(
                lambda *_, m=model, f=found: f.update(
                    {n: whole(p.grad) for n, p in m.named_parameters() if p.requires_grad}
                )
            )
            batch = batch_of(mesh.data_rank, mesh.data_size)
            with mock.patch.object(dist, "all_reduce", side_effect=dist.all_reduce) as reduced:
                result = train_step(
                    model, optimizer, batch, setup=setup, device=torch.device("cpu"), grad_clip=0.0,
                    objective=loss_of(setup),
                )  # fmt: skip
            if mesh.tp.size == 1:  # counts, the norm and, of a split sequence, the sums of each micro-batch
                summed = sum(each.args[0].ndim == 2 for each in reduced.call_args_list)
                assert summed == (len(batch.microbatches) if mesh.cp.size > 1 else 0), layout
            _, _, tokens, pairs, *sums = result.numbers(over_all_ranks=True).tolist()
            trained = sum(int((labels[1:] != -100).sum()) for row in answers() for _, labels in row)
            assert (pairs, tokens) == (PAIRS, trained), layout
            for mine, theirs in zip(sums, numbers, strict=True):
                assert abs(mine / pairs - theirs) <= 1e-9 * max(abs(theirs), 1e-3), (layout, config, sums, numbers)
            assert found.keys() == gradients.keys()
            for key, gradient in found.items():
                assert relative(gradient - gradients[key], gradients[key]) <= 1e-9, (layout, config, key)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_pairs_are_those_of_the_formula(world_size, tmp_path):
    peft_of(build_reference("llama_gqa", torch.float64)).save_pretrained(tmp_path)
    theirs = peft.PeftModel.from_pretrained(build_reference("llama_gqa", torch.float64), tmp_path, is_trainable=True)
    run_distributed(check, [formula(theirs, config) for config in CONFIGS], tmp_path, world_size=world_size)
