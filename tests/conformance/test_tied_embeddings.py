"""Models that tie head and embedding by their config, built under accelerate's ``init_empty_weights``, which unties."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import smp
from smp.delayed_init import initialize_
from smp.errors import UserError
from smp.models.meta_model import init_rules
from tests.distributed import run_distributed
from tests.reference import global_batch, tiny_config

SEED = 5
CONFIG = tiny_config("llama_tied")


def real():
    model = LlamaForCausalLM(CONFIG)
    initialize_(model, init_rules(CONFIG, seed=SEED), seed=SEED)
    return model


def empty():
    from accelerate import init_empty_weights

    with init_empty_weights():
        model = LlamaForCausalLM(CONFIG)
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    return model


def losses(model):
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for step in range(4):
        ids, labels = global_batch(step)
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def fsdp(model, **kwargs):
    initer = smp.DelayedParamIniter(model)
    assert initer.count_num_params() == sum(p.numel() for p in real().parameters()), "a tied parameter counts once"
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={LlamaDecoderLayer})
    return smp.FSDP(model, auto_wrap_policy=policy, param_init_fn=initer.get_param_init_fn(), **kwargs)


def allocate(module):
    """Fill nothing, as a script does where the first rank's values are taken."""
    module.to_empty(device="cpu", recurse=False)


def from_rank0(build):
    return smp.FSDP(empty() if dist.get_rank() else build(), param_init_fn=allocate, sync_module_states=True)


def transformed(build):
    return smp.transform(empty() if dist.get_rank() else build(), load_state_dict_from_rank0=True)


WAYS = {
    "parallelize": lambda: smp.parallelize(empty(), gradient_reduction="mean"),
    "FSDP": lambda: fsdp(empty()),
    "rank 0, DelayedParamIniter": lambda: fsdp(empty() if dist.get_rank() else real(), sync_module_states=True),
    "rank 0, FSDP": lambda: from_rank0(real),
    "rank 0, transform": lambda: smp.parallelize(transformed(real), gradient_reduction="mean"),
}


def _train_each(expected, ways, degrees, folder):
    smp.init(random_seed=SEED, **degrees)
    for way in ways:
        _train(expected, way, f"{folder}/{way}")


def _train(expected, way, folder):
    model = WAYS[way]()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert losses(model) == pytest.approx(expected, rel=1e-5), way
    smp.export_hf(model, folder)
    ids, labels = global_batch(9)
    own = model(input_ids=ids, labels=labels).loss.item()
    if dist.get_rank() == 0:
        exported = LlamaForCausalLM.from_pretrained(folder)
        assert exported.config.tie_word_embeddings and exported.lm_head.weight is exported.model.embed_tokens.weight
        assert exported(input_ids=ids, labels=labels).loss.item() == pytest.approx(own, rel=1e-5)


@pytest.mark.parametrize(("ways", "degrees"), [(list(WAYS), {}), (["parallelize", "rank 0, transform"], {"tp": 2})])
def test_a_tie_that_accelerate_has_taken_apart_is_tied_again(tmp_path, ways, degrees):
    run_distributed(_train_each, losses(real()), ways, degrees, str(tmp_path), world_size=2)


def differing():
    model = real()
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() * 1.5)
    return model


def _differing(expected, folder):
    smp.init()
    model = smp.parallelize(differing(), gradient_reduction="mean")
    assert losses(model) == pytest.approx(expected, rel=1e-5)
    assert model.config.tie_word_embeddings, "the script's own config is left as it is"
    smp.export_hf(model, folder)
    if dist.get_rank() == 0:
        exported = LlamaForCausalLM.from_pretrained(folder)
        assert not exported.config.tie_word_embeddings
        assert not torch.equal(exported.lm_head.weight, exported.model.embed_tokens.weight)
    dist.barrier()

    for start in (from_rank0, transformed):
        with pytest.raises(UserError, match=r"ranks have from 31 to 32 .*tie_word_embeddings to False before"):
            start(differing)


def test_values_that_differ_stay_so_and_the_exported_config_does_not_say_that_they_are_tied(tmp_path):
    run_distributed(_differing, losses(differing()), str(tmp_path / "out"), world_size=2)
