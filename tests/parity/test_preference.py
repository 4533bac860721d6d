"""DPO: losses, metrics and gradients of TRL's formulas in one process, with peft's adapters or of all parameters."""

from __future__ import annotations

import itertools
import math
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from smp.config import LossConfig, Settings
from smp.data import packing
from smp.data.data_pipeline import BatchShape, DataPipeline, StepBatch
from smp.data.packing import Collator, Row
from smp.data.samples import Choice, PackedSamples
from smp.data.token_cache import Columns
from smp.models.registry import family_of
from smp.optim.config import OptimConfig
from smp.optim.optimizers import build_optimizer
from smp.parallel import lora
from smp.parallel.parallelize import apply_techniques
from smp.parallel.sharding import reshard
from smp.parallel.technique import Setup
from smp.train.preference import Config, loss_of
from smp.train.reference import compute_reference
from smp.train.step import train_step
from tests.distributed import run_distributed
from tests.model_checks import in_double
from tests.parity.test_lora import our_name, peft_of
from tests.reference import LR, VOCABULARY, Layout, build_reference, relative
from tests.tensor_parallel import whole

peft = pytest.importorskip("peft")
LENGTH, HYBRID = 16, "lfm2"
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
    4: [Layout("full_shard", **degrees) for degrees in ({"tp": 2}, {"cp": 2}, {"tp": 2, "cp": 2})],
}


def layouts(name: str) -> list[Layout]:
    """Those of the world; convolutions are not split by both degrees."""
    return [each for each in LAYOUTS[dist.get_world_size()] if name != HYBRID or 1 in (each.tp, each.cp)]


def answer(read: int, trained: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    ids = np.random.default_rng(seed).integers(1, VOCABULARY, read + trained)
    return ids, np.where(np.arange(len(ids)) >= read, ids, -100)


def answers() -> list[list[tuple[np.ndarray, np.ndarray]]]:
    """Of each row the answers' ids and labels: chosen, rejected, chosen, ..."""
    flat = ([*itertools.chain(*pairs)] for pairs in ROWS)
    return [[answer(*each, 100 * row + at) for at, each in enumerate(documents)] for row, documents in enumerate(flat)]


def batch_of(name: str, rank: int, size: int) -> StepBatch:
    """A rank's samples, the first with another, and a micro-batch of padding on ranks with fewer."""
    samples = []
    for documents in answers():
        if name == HYBRID:
            rows = [Row(ids, None, labels) for ids, labels in documents]
            samples += [[*pair] for pair in zip(rows[::2], rows[1::2], strict=True)]
        else:
            ids, labels = (np.concatenate(each) for each in zip(*documents, strict=True))
            samples.append([Row(ids, None, labels, np.array([len(each) for each, _ in documents]))])
    mine, most = samples[rank::size], -(-len(samples) // size)
    parts = [[*itertools.chain(*mine[:2])], *mine[2:]] + [[None]] * (most - len(mine))
    return StepBatch([collator(name)(part) for part in parts if part], torch.arange(len(mine)))


def collator(name: str) -> Collator:
    """Of packed pairs, and of a model that does not keep them apart, which has an answer a row."""
    if name == HYBRID:
        return Collator(sequence_length=LENGTH, pad_token_id=0, fitted=True)
    return Collator(sequence_length=LENGTH, pad_token_id=0, document_end=0)


def log_probs(model) -> torch.Tensor:
    """Of each pair's chosen and rejected answer, ``(pairs, 2)``, each alone in its forward; and their tokens."""
    found, tokens = [], []
    for ids, labels in itertools.chain(*answers()):
        ids, labels = torch.tensor(ids), torch.tensor(labels)
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1].log_softmax(-1)
        valid = labels[1:] != -100
        found.append(logits[valid].gather(-1, labels[1:][valid, None]).sum())
        tokens.append(int(valid.sum()))
    return torch.stack(found).view(-1, 2), torch.tensor(tokens).view(-1, 2)


def formula(model, config: Config, reference: torch.Tensor, name_of=str):
    """TRL's ``dpo_loss``, its metrics, and the gradients of the mean."""
    policy, tokens = log_probs(model)
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
    gradients = {name_of(name): p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}
    of_pairs = [*rewards, (rewards[0] > rewards[1]).double(), rewards[0] - rewards[1]]
    return [losses.mean().item(), *(float(each.mean()) for each in of_pairs)], gradients


def prepared(name: str, layout, config: Config, adapter: lora.Config):
    model, mesh = build_reference(name, torch.float64), layout.mesh()
    loss = LossConfig(loss_chunk_tokens=layout.chunk)
    settings = Settings((layout.parallel(), layout.activation(), loss, adapter, config))
    setup = Setup(family_of(model.config), mesh, settings)
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.5  # is to be left out, as TRL does
    apply_techniques(model, setup)
    return model, setup


@in_double()
def compare(model, setup, batch: StepBatch, expected, said):
    """One step beside the formula; returns how many all-reduces summed log-probabilities."""
    (numbers, gradients), found = expected, {}
    optimizer = build_optimizer(model, OptimConfig(), lr=LR)
    optimizer.register_step_pre_hook(
        lambda *_: found.update({n: whole(p.grad) for n, p in model.named_parameters() if p.requires_grad})
    )
    with mock.patch.object(dist, "all_reduce", side_effect=dist.all_reduce) as reduced:
        result = train_step(
            model, optimizer, batch, setup=setup, device=torch.device("cpu"), grad_clip=0.0, objective=loss_of(setup)
        )
    _, _, tokens, pairs, *sums = result.numbers(over_all_ranks=True).tolist()
    trained = sum(int((labels[1:] != -100).sum()) for row in answers() for _, labels in row)
    assert (pairs, tokens) == (PAIRS, trained), said
    for mine, theirs in zip(sums, numbers, strict=True):
        assert abs(mine / pairs - theirs) <= 1e-9 * max(abs(theirs), 1e-3), (said, sums, numbers)
    assert found.keys() == gradients.keys()
    for key, gradient in found.items():
        assert relative(gradient - gradients[key], gradients[key]) <= 1e-9, (said, key)
    if setup.mesh.tp.size == 1:  # counts, the norm and, of a split sequence, the sums of each micro-batch
        summed = sum(each.args[0].ndim == 2 for each in reduced.call_args_list)
        assert summed == (len(batch.microbatches) if setup.mesh.cp.size > 1 else 0), said


@mock.patch.object(packing, "FEWEST_COLUMNS", 4)
def check(name, expected, folder):
    for layout in layouts(name):
        for config, of_it in zip(CONFIGS, expected, strict=True):
            model, setup = prepared(name, layout, config, lora.Config(adapter_path=str(folder)))
            compare(model, setup, batch_of(name, setup.mesh.data_rank, setup.mesh.data_size), of_it, (layout, config))


@pytest.mark.parametrize("name", ["llama_gqa", HYBRID])
@pytest.mark.parametrize("world_size", [1, *(pytest.param(size, marks=pytest.mark.full) for size in (2, 4))])
def test_pairs_are_those_of_the_formula(name, world_size, tmp_path):
    peft_of(build_reference(name, torch.float64)).save_pretrained(tmp_path)
    theirs = peft.PeftModel.from_pretrained(build_reference(name, torch.float64), tmp_path, is_trainable=True)
    with in_double():
        with torch.no_grad(), theirs.disable_adapter():
            reference, _ = log_probs(theirs)
        expected = [formula(theirs, config, reference, our_name) for config in CONFIGS]
    run_distributed(check, name, expected, tmp_path, world_size=world_size)


def data_of(name: str, mesh) -> DataPipeline:
    """The pairs as the job has them, shuffled; more sequences than micro-batches of all ranks have, or fewer."""
    pack = name != HYBRID
    flat = [*itertools.chain(*answers())]
    ids, labels = (np.concatenate(each) for each in zip(*flat, strict=True))
    store = Columns(ids, np.cumsum([0, *(len(each) for each, _ in flat)]), None, labels)
    packed = PackedSamples([store], LENGTH, "f", Choice(), what="pairs", origins=["a.jsonl"], pairs=True, pack=pack)
    batch = BatchShape(
        sequence_length=LENGTH, vocab_size=VOCABULARY, global_batch_size=len(packed), micro_batch_size=2,
        data_rank=mesh.data_rank, data_size=mesh.data_size, seed=3,
    )  # fmt: skip
    return DataPipeline(packed, collator(name), batch, shuffle=True, workers=0, sort=not pack)


def scale_(model) -> None:
    """Train the model, so to say."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)


@mock.patch.object(packing, "FEWEST_COLUMNS", 4)
def check_all_parameters(name, expected):
    for layout in layouts(name):
        for config, of_it in zip(CONFIGS, expected, strict=True):
            model, setup = prepared(name, layout, config, lora.Config())
            data, device = data_of(name, setup.mesh), torch.device("cpu")
            objective = loss_of(setup)
            with torch.no_grad(), in_double():
                data.attach(compute_reference(data, model, setup, device, enter=lambda phase: None))
                batch = next(iter(data))
                sums = sum(objective.compute(model, objective.own_part(m), device)[1] for m in batch.microbatches)
            dist.all_reduce(sums, group=setup.mesh.loss.group)
            begins = {"sigmoid": math.log(2), "ipo": 1 / (2 * config.dpo_beta) ** 2}[config.dpo_loss]
            found = (sums / PAIRS).tolist()
            accuracy = found[3] if name == HYBRID else 0  # of rounding, as rows had other columns for the reference
            assert found == pytest.approx([begins, 0, 0, accuracy, 0], rel=1e-12, abs=1e-12), layout
            reshard(model)
            scale_(model)
            compare(model, setup, batch, of_it, (layout, config))


@pytest.mark.parametrize("name", ["llama_gqa", HYBRID])
@pytest.mark.parametrize(
    "world_size", [1, pytest.param(2, marks=pytest.mark.full), pytest.param(4, marks=pytest.mark.slow)]
)
def test_all_parameters_are_trained_beside_a_frozen_copy(name, world_size):
    theirs = build_reference(name, torch.float64)
    with in_double():
        with torch.no_grad():
            reference, _ = log_probs(theirs)
        scale_(theirs)
        expected = [formula(theirs, config, reference) for config in CONFIGS]
    run_distributed(check_all_parameters, name, expected, world_size=world_size)
