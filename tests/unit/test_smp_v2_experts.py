"""SMP v2's words for mixtures in a script: ``MoEConfig``, ``MoELayer``, ``state``, and the advice on its memory."""

from __future__ import annotations

import dataclasses
import logging
from types import SimpleNamespace

import pytest
import torch

import smp
from smp import api
from smp.compat.moe import MoELayer, moe_settings, read_moe_config, script_balance, sharding_advice
from smp.compat.state import State
from smp.config import ParallelConfig
from smp.errors import UserError
from smp.mesh import lay_out
from smp.parallel.experts.config import ExpertsConfig
from tests.experts import build
from tests.reference import build_reference


@pytest.fixture(scope="module")
def mixtral():
    return build("mixtral", torch.float32)


def test_a_config_gives_the_settings_that_have_an_effect(mixtral, caplog):
    caplog.set_level(logging.INFO)
    z_loss = {"moe_z_loss_coeff": 0.001}
    assert read_moe_config(mixtral, smp.MoEConfig()) == {"moe_load_balancing": "sinkhorn", **z_loss}
    assert "random_seed" not in caplog.text
    aux = smp.MoEConfig(moe_load_balancing="aux_loss", moe_aux_loss_coeff=0.1, random_seed=7)
    assert read_moe_config(mixtral, aux) == {"moe_load_balancing": "aux_loss", "moe_aux_loss_coeff": 0.1, **z_loss}
    assert "random_seed has no effect" in caplog.text
    assert moe_settings(smp.MoEConfig(smp_moe=False)) == {}
    with pytest.raises(dataclasses.FrozenInstanceError):
        aux.smp_moe = False


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"moe_load_balancing": "top2"}, r"moe_load_balancing 'top2' is not allowed: give sinkhorn, balanced"),
        ({"global_token_shuffle": True}, "global_token_shuffle True is not available: .* leave it at False"),
        ({"moe_all_to_all_dispatcher": False}, "moe_all_to_all_dispatcher False is not available: .* leave it at True"),
        ({"moe_aux_loss_coeff": "x"}, "moe_aux_loss_coeff 'x' is not allowed: give a number of at least 0"),
        ({"moe_z_loss_coeff": float("nan")}, "moe_z_loss_coeff nan is not allowed"),
    ],
)
def test_what_is_not_here_is_refused(values, sentence):
    with pytest.raises(UserError, match=rf"^smp\.MoEConfig: {sentence}"):
        moe_settings(smp.MoEConfig(**values))


def test_transform_takes_the_config_of_a_mixture(mixtral, monkeypatch):
    current = SimpleNamespace(tp=None, mesh=lay_out(), done=set(), parallel=ParallelConfig())
    monkeypatch.setattr(api, "_current", current)
    assert smp.transform(mixtral, config=smp.MoEConfig(moe_load_balancing="none")) is mixtral
    assert script_balance(mixtral) == ExpertsConfig(moe_load_balancing="none", moe_z_loss_coeff=0.001)
    assert not script_balance(build("mixtral", torch.float32)).adds_loss
    with pytest.raises(UserError, match=r"config is a dict: give smp\.MoEConfig"):
        smp.transform(mixtral, config={"smp_moe": True})
    dense = build_reference("llama_gqa", torch.float32)
    with pytest.raises(UserError, match="for mixtures of experts, and the LlamaForCausalLM is none: leave it out"):
        smp.transform(dense, config=smp.MoEConfig())


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_layers_with_experts_are_moe_layers(kind):
    model = build(kind, torch.float32)
    found = [path for path, module in model.named_modules() if isinstance(module, MoELayer)]
    assert found == [f"model.layers.{index}.mlp" for index in range(3)]
    with pytest.raises(UserError, match="MoELayer cannot be built"):
        MoELayer()


def test_the_state_has_the_ranks_that_split_experts():
    meshes_of = [lay_out(2, 4, ep=2, rank=rank) for rank in range(8)]
    states = [State(lambda mesh=mesh: (mesh, None, False), lambda: None) for mesh in meshes_of]
    assert [state.ep_rank for state in states] == [0, 1] * 4
    assert {(state.ep_size, state.expert_parallel_degree) for state in states} == {(2, 2)}


@pytest.mark.parametrize(
    ("mesh", "degree"),
    [(lay_out(2, 4, ep=2), 8), (lay_out(8, 2, ep=2), 4), (lay_out(1, 8, ep=2), None), (lay_out(2, 4), None)],
)
def test_the_sharding_degree_with_smp_v2s_memory_is_named(mesh, degree):
    advice = sharding_advice(mesh)
    assert advice is None if degree is None else advice.endswith(f": hybrid_shard_degree {degree} gives its memory")


def test_the_losses_of_a_config_join_the_loss_that_the_model_returns(monkeypatch, caplog):
    model, ids = build("mixtral", torch.float32), torch.arange(12).view(1, 12)
    plain = model(ids, labels=ids).loss
    current = SimpleNamespace(tp=None, mesh=lay_out(), done=set(), parallel=ParallelConfig())
    monkeypatch.setattr(api, "_current", current)
    smp.transform(model, config=smp.MoEConfig(moe_load_balancing="none", moe_z_loss_coeff=10.0))
    with torch.no_grad():
        torch.testing.assert_close(model(ids, labels=ids).loss, plain)
    assert model(ids, labels=ids).loss > plain + 1
    assert not caplog.text
    model(ids)
    assert "no effect with no loss in the model's output: give the model labels" in caplog.text
