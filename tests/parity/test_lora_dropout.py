"""Dropout of the adapters' input: peft's with the same masks, whose own each rank's tokens and features have."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import smp
from smp.loss import causal_lm_loss_sum
from smp.mesh import lay_out
from smp.models.registry import family_of
from smp.parallel import activation_checkpoint
from smp.parallel.adapter import Adapter
from smp.parallel.parallelize import apply_techniques
from smp.parallel.random_numbers import draw_seed, seeded
from smp.parallel.technique import Setup
from tests.distributed import run_distributed
from tests.parity.test_lora import LAYOUTS, check_layouts, our_name, peft_of, settings_with
from tests.reference import Layout, build_reference, global_batch, relative
from tests.tensor_parallel import overlap_on_cpu, whole

RATE, NAME = 0.5, "llama_gqa"
LAYERS = 7  # linear ones of a block


def mask_of(x, rate):
    with seeded(draw_seed(), x.device):
        return torch.empty(x.shape, dtype=torch.bool).bernoulli_(1 - rate)


def dropout_by(mask):
    """peft's module with another mask."""
    return mock.patch.object(
        nn.Dropout, "forward", lambda self, x: x * mask(x, self.p) / (1 - self.p) if self.training else x
    )


def step(model, seed=3):
    inputs, labels = global_batch(0)
    torch.manual_seed(seed)
    loss = causal_lm_loss_sum(model(input_ids=inputs, use_cache=False).logits, labels)
    loss.backward()
    found = {our_name(name): p.grad for name, p in model.named_parameters() if p.requires_grad}
    model.zero_grad()
    return loss.item(), found


@pytest.mark.parametrize("mode", [None, "full", "selective"])
def test_one_process_is_pefts_with_the_same_numbers(mode, tmp_path):
    theirs = peft_of(build_reference(NAME, torch.float64), lora_dropout=RATE).train()
    theirs.save_pretrained(tmp_path)
    model = smp.lora(build_reference(NAME, torch.float64), adapter_path=tmp_path).train()
    layout = Layout("no_shard", checkpointing=mode is not None, mode=mode or "full")
    activation_checkpoint.apply(model, Setup(family_of(model.config), lay_out(), settings_with(layout)))
    with dropout_by(mask_of):
        wanted, gradients = step(theirs)
    loss, found = step(model)
    assert abs(loss - wanted) <= 1e-9 * wanted and found.keys() == gradients.keys()
    for name, gradient in found.items():
        assert relative(gradient - gradients[name], gradients[name]) <= 1e-9, name
    assert step(model, seed=4)[0] != loss
    state = torch.get_rng_state()
    theirs.eval(), model.eval()
    inputs = global_batch(0)[0]
    wanted = theirs(input_ids=inputs).logits
    assert relative(model(input_ids=inputs).logits - wanted, wanted) <= 1e-9
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize(
    "world_size", [pytest.param(2, marks=pytest.mark.full), pytest.param(4, marks=pytest.mark.slow)]
)
def test_steps_at_any_layout_are_those_of_peft(world_size, tmp_path):
    """With a mask of features alone, which is the same at any layout."""
    peft_of(build_reference(NAME, torch.float64), lora_dropout=RATE).save_pretrained(tmp_path / "adapter")

    def kept(x, rate):
        return torch.arange(x.shape[-1]) % 4 != 1

    with mock.patch.object(Adapter, "_kept", lambda self, x: kept(x, self.dropout)), dropout_by(kept):
        run_distributed(check_layouts, NAME, LAYOUTS[world_size], tmp_path, False, world_size=world_size)


def built(layout, folder):
    model, mesh = build_reference(NAME, torch.float64), layout.mesh()
    setup = Setup(family_of(model.config), mesh, settings_with(layout, adapter_path=str(folder)))
    apply_techniques(model, setup)
    return model.train(), mesh


def check_masks(layouts, folder):
    """Of the same input ranks have the same mask, of others other ones; backward and recomputation have forward's."""
    overlap_on_cpu()
    call = Adapter._kept
    for layout in layouts:
        (model, mesh), masks = built(layout, folder), []

        def kept(self, x, masks=masks):
            found = call(self, x)
            masks.append((self._seed, found.flatten(0, -2).clone()))
            return found

        with mock.patch.object(Adapter, "_kept", kept):
            _, gradients = step(model, seed=3 + mesh.loss.rank)
        seeds = list(dict.fromkeys(seed for seed, _ in masks))
        blocks = model.config.num_hidden_layers
        assert len(seeds) == LAYERS * blocks
        equal = {seed: [mask for other, mask in masks if other == seed] for seed in seeds}
        assert all(len(of_one) >= 2 and all(torch.equal(of_one[0], m) for m in of_one) for of_one in equal.values())
        first = [equal[seed][0] for seed in seeds]
        assert 0.4 < torch.cat([mask.flatten() for mask in first]).double().mean() < 0.6
        alike = []
        for mask in first:
            both = [torch.empty_like(mask) for _ in range(2)]
            dist.all_gather(both, mask)
            alike.append(torch.equal(*both))
        of_all = [True, True, True, False, True, True, False]  # q, k, v, o, gate, up, down
        assert alike == (of_all if layout.tp == 2 else [False] * LAYERS) * blocks, layout
        if layout.tp == 2:
            check_slope(model, gradients)


def check_slope(model, gradients):
    """The loss of the same numbers changes along the gradient as that says; norms are computed in fp32."""
    length = float(sum(whole(gradient).square().sum() for gradient in gradients.values())) ** 0.5
    losses = []
    for way in (1e-4, -2e-4):  # there, and as far to the other side
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    parameter.add_(gradients[our_name(name)], alpha=way / length)
        losses.append(step(model)[0])
    assert abs((losses[0] - losses[1]) / 2e-4 - length) <= 1e-4 * length


@pytest.mark.full
def test_masks_of_two_ranks(tmp_path):
    peft_of(build_reference(NAME, torch.float64), lora_dropout=RATE).save_pretrained(tmp_path)
    layouts = [
        Layout("full_shard"),
        Layout("no_shard", tp=2),
        Layout("no_shard", tp=2, checkpointing=True, mode="selective"),
        Layout("no_shard", tp=2, sequence=False, checkpointing=True),
        Layout("no_shard", tp=2, overlap=True),
    ]
    run_distributed(check_masks, layouts, tmp_path, world_size=2)
