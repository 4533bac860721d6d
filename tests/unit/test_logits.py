"""Models that scale or cap their logits: the loss in chunks is Hugging Face's, or refused."""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, CohereConfig, Gemma2Config, GPTJConfig, GraniteConfig, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaForCausalLM

import smp
from smp.config import LossConfig, ParallelConfig, Settings
from smp.errors import UserError
from smp.mesh import resolve_mesh
from smp.models import registry
from smp.models.family import LogitTransform
from smp.models.logits import find_logits
from smp.parallel import loss
from smp.parallel.loss import chunk_loss
from smp.parallel.technique import Setup
from tests.reference import VOCABULARY, global_batch, relative

TINY = dict(  # noqa: C408
    vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
# Large steps and a low cap, so that what is left out is seen.
CONFIGS = {
    "cap": Gemma2Config(**TINY, head_dim=8, final_logit_softcapping=2.5, initializer_range=0.3),
    "division": GraniteConfig(**TINY, logits_scaling=7.0, initializer_range=0.3),
    "product": CohereConfig(**TINY, logit_scale=0.3, initializer_range=0.3),
    "conversion": GPTJConfig(
        vocab_size=VOCABULARY, n_positions=64, n_embd=32, n_layer=2, n_head=4, rotary_dim=4, resid_pdrop=0,
        embd_pdrop=0, attn_pdrop=0, initializer_range=0.3,
    ),  # which has a head with a bias
}  # fmt: skip
FOUND = {
    "cap": LogitTransform(cap=2.5),
    "division": LogitTransform(scale=1 / 7),
    "product": LogitTransform(scale=0.3),
    "conversion": LogitTransform(),
}


def build(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[name])).to(dtype).train()


def loss_of(logits, labels):
    """Of Hugging Face's own logits, by torch."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_loss_of_a_script_is_of_the_models_logits(name):
    reference = build(name)
    model = smp.chunk_loss(copy.deepcopy(reference), chunk_tokens=5)
    ids, labels = global_batch(0)
    expected = loss_of(reference(input_ids=ids).logits, labels)
    found = model(input_ids=ids, labels=labels)
    # GPT-J makes its logits fp32; the chunks stay as fine as its hidden states.
    tolerance = 1e-6 if name == "conversion" else 1e-12
    assert found.logits is None and abs(found.loss - expected) <= tolerance * expected
    found.loss.backward()
    expected.backward()
    for (key, one), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert relative(one.grad - other.grad, other.grad) <= 100 * tolerance, key
    whole, own = (each(input_ids=ids).logits for each in (model, reference))
    assert torch.equal(whole, own)
    as_tuple = model(input_ids=ids, labels=labels, num_items_in_batch=3, return_dict=False)
    assert as_tuple[0].item() == pytest.approx(expected.item() * int((labels[:, 1:] != -100).sum()) / 3, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CONFIGS)
def test_found_on_the_meta_device(name, dtype):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIGS[name]).to(dtype)
    before = list(model.named_modules())
    assert find_logits(model) == FOUND[name]
    assert list(model.named_modules()) == before


@pytest.mark.full
@pytest.mark.parametrize(("model_type", "settings", "expected"), [
    ("cohere2", {}, LogitTransform(scale=0.0625)),
    ("falcon_h1", {"lm_head_multiplier": 0.0390625}, LogitTransform(scale=0.0390625)),
    ("gemma2", {"final_logit_softcapping": None}, LogitTransform()),
    ("gemma3_text", {"final_logit_softcapping": 7.5}, LogitTransform(cap=7.5)),
    ("gpt2", {}, LogitTransform()),
    ("granitemoehybrid", {"logits_scaling": 13.7}, LogitTransform(scale=1 / 13.7)),
    ("nanochat", {"final_logit_softcapping": 15.1}, LogitTransform(cap=15.1)),  # all of it in fp32
    ("opt", {}, LogitTransform()),
    ("recurrent_gemma", {"logits_soft_cap": 12.3}, LogitTransform(cap=12.3)),
    ("xlstm", {"output_logit_soft_cap": 20.1}, LogitTransform(cap=20.1)),
])  # fmt: skip
def test_found_in_other_models(model_type, settings, expected):
    config = transformers.AutoConfig.for_model(model_type, **settings)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    found = find_logits(model)
    assert found.cap == expected.cap and found.scale == pytest.approx(expected.scale, rel=1e-15)


def llama(after):
    """A model that does ``after`` with its head's outputs, in a forward of its class."""

    class Model(LlamaForCausalLM):
        def forward(self, *args, **kwargs):
            found = super().forward(*args, **kwargs)
            found.logits = after(self, found.logits)
            return found

    torch.manual_seed(0)
    return Model(LlamaConfig(**TINY)).double()


def test_scale_and_cap_in_place():
    """The loss does not go where the logits would be changed."""
    model = llama(lambda _, logits: logits.mul_(3).div_(2).tanh_().mul_(2))
    reference = copy.deepcopy(model)
    assert find_logits(model) == LogitTransform(scale=3, cap=2)
    ids, labels = global_batch(0)
    expected = loss_of(reference(input_ids=ids).logits, labels)
    assert chunk_loss(model)(input_ids=ids, labels=labels).loss.item() == pytest.approx(expected.item(), rel=1e-12)


@pytest.mark.parametrize(("after", "reason"), [
    (lambda _, logits: logits + 1e-3, "neither a scale nor a cap"),
    (lambda _, logits: logits.clamp(-30, 30), "neither a scale nor a cap"),
    (lambda _, logits: 30 * torch.sigmoid(logits / 30), "neither a scale nor a cap"),
    (lambda _, logits: logits.abs(), "neither a scale nor a cap"),
    (lambda _, logits: logits * torch.linspace(1, 2, VOCABULARY), "neither a scale nor a cap"),
    (lambda _, logits: logits.log_softmax(-1), "neither a scale nor a cap"),
    (lambda _, logits: logits * 0, "neither a scale nor a cap"),
    (lambda _, logits: logits[..., :-3], r"it makes \(1, \d+, 93\)"),
    (lambda model, logits: logits + model.lm_head(model.model.norm.weight), "its head is called 2 times"),
    (lambda _, logits: logits.no_such_method(), "its forward fails without its base model: AttributeError"),
])  # fmt: skip
def test_what_is_not_known_is_refused(after, reason):
    model = llama(after)
    before = list(model.named_modules())
    with pytest.raises(UserError, match=f"what Model does with its logits .*{reason}.*--loss_chunk_tokens 0"):
        smp.chunk_loss(model)
    assert list(model.named_modules()) == before and "forward" not in vars(model)


def test_a_model_without_an_embedding_is_refused():
    with pytest.raises(UserError, match="does not know what Sequential does with its logits"):
        smp.chunk_loss(nn.Sequential(OrderedDict(lm_head=nn.Linear(4, 4))))


@pytest.mark.parametrize("after", [lambda logits: logits / 3, lambda logits: logits + 1])
def test_a_family_that_does_not_tell(monkeypatch, after):
    """What its models do is found, or the job is refused with one more sentence."""
    forward = LlamaForCausalLM.forward

    def other(*args, **kwargs):
        found = forward(*args, **kwargs)
        found.logits = after(found.logits)
        return found

    monkeypatch.setattr(LlamaForCausalLM, "forward", other)
    family = dataclasses.replace(registry.FAMILIES["llama"], logits=None)
    monkeypatch.setitem(registry.FAMILIES, "llama", family)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**TINY)).double()
    mesh = resolve_mesh(ParallelConfig(), world_size=1, local_world_size=1)
    setup = Setup(family, mesh, Settings((LossConfig(loss_chunk_tokens=5),)))
    if after(1) == 2:
        (problem,) = loss.problems(model.config, setup)
        assert "does not know what LlamaForCausalLM does with its logits" in problem
        assert not loss.problems(model.config, Setup(family, mesh, Settings((LossConfig(loss_chunk_tokens=0),))))
        return
    assert not loss.problems(model.config, setup)
    ids, labels = global_batch(0)
    expected = loss_of(model(input_ids=ids).logits, labels)
    loss.apply(model, setup)
    assert model(input_ids=ids, labels=labels).loss.item() == pytest.approx(expected.item(), rel=1e-12)


def test_a_head_that_is_called_twice_is_refused():
    model = chunk_loss(llama(lambda _, logits: logits), logits=LogitTransform())
    ids, labels = global_batch(0)
    hook = model.model.register_forward_hook(lambda module, inputs, outputs: print(model.lm_head(outputs[0])))
    with pytest.raises(UserError, match="lm_head was called 2 times in a forward"):
        model(input_ids=ids, labels=labels)
    hook.remove()
    assert model(input_ids=ids, labels=labels).loss > 0  # nothing of it is left
