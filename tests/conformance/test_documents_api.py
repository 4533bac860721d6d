"""Packed documents of a hybrid in a user's own script, whatever splits or shards it: positions that restart."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

import smp
from smp.config import LossConfig
from tests.distributed import run_distributed
from tests.reference import VOCABULARY, relative
from tests.tensor_parallel import whole

LENGTHS = [5, 4, 3]
IDS = torch.randint(3, VOCABULARY, (2, sum(LENGTHS)), generator=torch.Generator().manual_seed(0))
POSITIONS = torch.cat([torch.arange(length) for length in LENGTHS]).expand(2, -1)


def build() -> nn.Module:
    config = CONFIG_MAPPING["lfm2"](
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, layer_types=["conv", "full_attention"], max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(7)
    return AutoModelForCausalLM.from_config(config).double()


def transform(model: nn.Module) -> nn.Module:
    model = smp.transform(model)
    model.gradient_checkpointing_enable()
    return model


def wrap(model: nn.Module) -> nn.Module:
    return smp.FullyShardedDataParallel(model, use_orig_params=True)


def parallelize(model: nn.Module) -> nn.Module:
    return smp.parallelize(smp.transform(model), loss=LossConfig(loss_chunk_tokens=5), activation_checkpointing=True)


def check(expected: torch.Tensor, gradients: dict[str, torch.Tensor]) -> None:
    smp.init({})
    labels = IDS.clone()
    labels[POSITIONS == 0] = -100
    for shard in (transform, wrap, parallelize):
        model = shard(copy.deepcopy(build())).train()
        loss = model(input_ids=IDS, labels=labels, position_ids=POSITIONS).loss
        assert relative(loss - expected, expected) <= 1e-6, shard  # Hugging Face's loss is in fp32
        loss.backward()
        for name, parameter in model.named_parameters():
            gradient = whole(parameter.grad) / (2 if shard is parallelize else 1)
            assert relative(gradient - gradients[name], gradients[name]) <= 1e-6, (shard, name)
    sums = smp.sequence_log_probs(model, {"input_ids": IDS, "labels": labels, "position_ids": POSITIONS})
    assert len(sums) == 6 and relative(-sums.sum() / (labels != -100).sum() - expected, expected) <= 1e-9


@pytest.mark.smoke
def test_documents_of_a_hybrid_are_kept_apart():
    model = build().train()
    logits, wanted = [], []
    for row in IDS:
        for part in row.split(LENGTHS):
            logits.append(model(input_ids=part[None], use_cache=False).logits[0, :-1])
            wanted.append(part[1:])
    loss = F.cross_entropy(torch.cat(logits), torch.cat(wanted))
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    run_distributed(check, loss.detach(), gradients, world_size=2)
