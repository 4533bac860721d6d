"""Llama 4's experts, which transformers multiplies all with every token, and whose input is scaled."""

import copy
from unittest import mock

import pytest
import torch

from smp.config import Settings
from smp.mesh import lay_out
from smp.models.experts import expert_layers
from smp.models.registry import family_of
from smp.parallel.experts import technique
from smp.parallel.experts.config import ExpertsConfig
from smp.parallel.technique import Setup
from tests import experts
from tests.reference import setup_of


@pytest.mark.parametrize("top", [1, 2])
def test_a_token_is_multiplied_with_its_experts_alone(top):
    plain = experts.build("llama4_text", num_experts_per_tok=top)
    model = copy.deepcopy(plain)
    technique.apply(model, setup_of(model, lay_out()))
    model = copy.deepcopy(model)  # as a script may
    assert {layer.top for layer in expert_layers(model)} == {top}
    ids = torch.randint(0, plain.config.vocab_size, (2, 12))
    with mock.patch.object(technique, "compute", wraps=technique.compute) as computed:
        loss = model(input_ids=ids, labels=ids).loss
    assert {len(call.args[1]) for call in computed.mock_calls} == {ids.numel() * top}
    wanted = plain(input_ids=ids, labels=ids).loss
    torch.testing.assert_close(loss, wanted, rtol=1e-9, atol=0)
    loss.backward()
    wanted.backward()
    for (name, got), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got.grad, expected.grad, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize("asked", [{"moe_load_balancing": "sequence"}, {"moe_z_loss_coeff": 0.1}])
def test_its_router_says_no_choices_that_could_be_balanced(asked):
    config = experts.config_of("llama4_text")
    (text,) = technique.problems(config, Setup(family_of(config), lay_out(), Settings((ExpertsConfig(**asked),))))
    ((name, value),) = asked.items()
    assert text == f"--{name} {value}: a router of type 'llama4_text' does not say what it has chosen: leave it out"
