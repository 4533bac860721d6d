"""Dropout under tensor parallelism: other masks where ranks hold other data, the same where they hold the same."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers  # noqa: F401  imported before the ranks are forked

from smp.loss import causal_lm_loss_sum
from smp.models.registry import family_of
from smp.parallel.activation_checkpoint import apply_activation_checkpointing
from smp.parallel.technique import model_blocks
from tests.distributed import run_distributed
from tests.reference import Layout, relative
from tests.tensor_parallel import batch_of, build, config_of, split_only, whole

PARTS, WHOLE = Layout("no_shard", tp=2), Layout("no_shard", tp=2, sequence=False)


def dropping(**rates: float):
    return config_of("gpt_neox", **({"attention_dropout": 0.3, "hidden_dropout": 0.3} | rates))


def everyones(tensor: torch.Tensor) -> list[torch.Tensor]:
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.contiguous())
    return parts


def step(model, config, seed: int = 11) -> torch.Tensor:
    batch = batch_of(config)
    torch.manual_seed(seed)
    logits = model(input_ids=batch["input_ids"]).logits
    causal_lm_loss_sum(logits, batch["labels"]).backward()
    return logits.to_local()


def _check_masks(layout, hidden_agree):
    config, masks = dropping(), []
    model = split_only(build(config, attention="eager"), layout)
    dropout = F.dropout

    def recorded(x, p=0.5, training=True, inplace=False):
        mask = dropout(torch.ones_like(x), p, training)
        masks.append(mask.detach())
        return x * mask

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(F, "dropout", recorded)
        step(model, config)
    # Attention weights (batch, heads, sequence, sequence); hidden states (batch, tokens, hidden).
    assert sorted({m.ndim for m in masks}) == [3, 4] and len(masks) == 1 + 3 * config.num_hidden_layers
    for mask in masks:
        first, second = everyones(mask)
        assert torch.equal(first, second) == (hidden_agree and mask.ndim == 3), mask.shape
        assert 0.15 < (mask == 0).double().mean() < 0.45
    assert len({mask.flatten()[:64].numpy().tobytes() for mask in masks}) == len(masks)  # no two draws alike


@pytest.mark.parametrize(("layout", "hidden_agree"), [(PARTS, False), (WHOLE, True)])
def test_masks_differ_where_the_data_does(layout, hidden_agree):
    run_distributed(_check_masks, layout, hidden_agree, world_size=2)


def _check_blocks_agree():
    config, outputs = dropping(), []
    model = split_only(build(config), WHOLE)
    for block in model.gpt_neox.layers:
        block.register_forward_hook(lambda _, __, output: outputs.append(output.detach()))
    step(model, config)
    assert len(outputs) == config.num_hidden_layers
    for output in outputs:
        first, second = everyones(output)
        assert torch.equal(first, second)


def test_whole_hidden_states_agree_to_the_bit():
    run_distributed(_check_blocks_agree, world_size=2)


def _check_one_process():
    config = dropping(attention_dropout=0.0)
    reference = build(config)
    batch = batch_of(config)
    torch.manual_seed(11)
    logits = reference(input_ids=batch["input_ids"]).logits
    causal_lm_loss_sum(logits, batch["labels"]).backward()
    model = split_only(reference, WHOLE)
    model.zero_grad()
    step(model, config)
    for (name, mine), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert relative(whole(mine.grad) - theirs.grad, theirs.grad) < 1e-9, name


def test_hidden_dropout_of_whole_sequences_is_one_processs():
    run_distributed(_check_one_process, world_size=2)


def _check_recomputations():
    for name, layout in itertools.product(("gpt_neox", "llama_gqa"), (PARTS, WHOLE)):
        _check_recomputation(name, layout)


def _check_recomputation(name, layout):
    config = dropping() if name == "gpt_neox" else config_of(name, attention_dropout=0.3)
    gradients, outputs = [], []
    for checkpointing in (False, True):
        model = split_only(build(config), layout)
        if checkpointing:
            apply_activation_checkpointing(model_blocks(model, family_of(config)))
        outputs.append(step(model, config).detach())
        gradients.append([p.grad.to_local() for p in model.parameters()])
        states = everyones(torch.get_rng_state())
        assert all(torch.equal(states[0], state) for state in states), "the generators have come apart"
    assert torch.equal(*outputs)
    assert all(torch.equal(kept, again) for kept, again in zip(*gradients, strict=True))
    assert not torch.equal(step(model, config, seed=12), outputs[0])  # there is dropout at all


@pytest.mark.full
def test_recomputation_draws_the_same():
    run_distributed(_check_recomputations, world_size=2)


def _check_evaluation():
    config = dropping()
    reference = build(config).eval()
    batch = batch_of(config)
    expected = reference(input_ids=batch["input_ids"]).logits
    for layout in (PARTS, WHOLE):
        model, before = split_only(reference, layout).eval(), torch.get_rng_state()
        found = model(input_ids=batch["input_ids"]).logits.full_tensor()
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
        assert torch.equal(before, torch.get_rng_state())  # validation leaves training's numbers alone


def test_evaluation_draws_nothing():
    run_distributed(_check_evaluation, world_size=2)
