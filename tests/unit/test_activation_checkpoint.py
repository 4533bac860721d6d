"""Activation checkpointing: the same bits, and less kept."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext
from transformers import AutoModelForCausalLM

import smp
from smp.config import ActivationConfig, Settings
from smp.errors import UserError
from smp.memory.shape import Workload, model_shape
from smp.mesh import lay_out
from smp.models.registry import family_of
from smp.parallel import activation_checkpoint
from smp.parallel.activation_checkpoint import _policy, apply_activation_checkpointing, checkpointed_blocks
from smp.parallel.context.technique import split_sequences
from smp.parallel.experts import technique
from smp.parallel.technique import Setup
from tests import experts
from tests.distributed import run_distributed
from tests.reference import build_reference, global_batch
from tests.unit.test_activation_offload import blocks_of, dropout_model, gradients
from tests.zoo import tiny_config


@pytest.mark.parametrize("name", ["gpt_neox", "llama_gqa"])
@pytest.mark.parametrize(("mode", "every"), [("full", 1), ("full", 2), ("selective", 1), ("selective", 2)])
def test_same_bits(name, mode, every):
    reference = dropout_model(name)
    expected = gradients(copy.deepcopy(reference))
    apply_activation_checkpointing(blocks_of(reference), mode=mode, every=every)
    assert all(torch.equal(a, b) for a, b in zip(gradients(reference), expected, strict=True))


class Products(TorchDispatchMode):
    """Counts matrix products that are really computed."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func._opname in ("mm", "addmm", "addmm_")
        return func(*args, **(kwargs or {}))


def products(model) -> int:
    """Matrix products of one backward."""
    loss = model(input_ids=global_batch(0)[0], use_cache=False).logits.sum()
    with Products() as counter:
        loss.backward()
    return counter.count


def test_blocks_of_a_model():
    model = dropout_model("llama_gqa")
    apply_activation_checkpointing(model, check_fn=lambda module: type(module).__name__ == "LlamaDecoderLayer")
    assert checkpointed_blocks(model) == blocks_of(model)
    other = dropout_model("llama_gqa")
    apply_activation_checkpointing(other.model.layers)
    assert checkpointed_blocks(other) == blocks_of(other)
    with pytest.raises(UserError, match="finds no block: give check_fn"):
        apply_activation_checkpointing(model)


def test_bad_modes():
    for options in ({"mode": "some"}, {"every": 0}):
        with pytest.raises(UserError, match="takes mode full, selective, products and every >= 1"):
            apply_activation_checkpointing([], **options)


@pytest.mark.parametrize("dropout", [False, True])
def test_generators_are_copied_where_something_draws(dropout, monkeypatch):
    copies = []
    original = torch.get_rng_state
    monkeypatch.setattr(torch, "get_rng_state", lambda: copies.append("state") or original())
    model = dropout_model() if dropout else build_reference("gpt_neox", torch.float32)
    setup = Setup(family_of(model.config), lay_out(1, 1, 1), Settings((ActivationConfig(),)))
    activation_checkpoint.apply(model, setup)
    model(input_ids=global_batch(0)[0], use_cache=False).logits.sum().backward()
    assert len(copies) >= 3 if dropout else not copies


@pytest.mark.parametrize("kind", ["mixtral", "phimoe"])
def test_jitter_of_routers_is_the_same_in_recomputation(kind):
    config = tiny_config(kind)
    config.router_jitter_noise = config.input_jitter_noise = 0.2
    model = AutoModelForCausalLM.from_config(config).train()
    expected = gradients(copy.deepcopy(model))
    setup = Setup(family_of(config), lay_out(1, 1, 1), Settings((ActivationConfig(),)))
    activation_checkpoint.apply(model, setup)
    assert all(torch.equal(a, b) for a, b in zip(gradients(model), expected, strict=True))


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_equal_scores_are_routed_in_recomputation_as_in_forward(mode, monkeypatch):
    model = experts.build("mixtral")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate.weight.zero_()
    setup = Setup(family_of(model.config), lay_out(), Settings((ActivationConfig(activation_checkpointing_mode=mode),)))
    technique.apply(model, setup)
    names, again = ["loss", *(name for name, _ in model.named_parameters())], []

    def topk(scores, k, *args, **kwargs):
        """Choose the first of equal scores, in recomputation the last, by the same operations."""
        sign, first = 1, 0
        if torch._C._current_graph_task_id() != -1:
            again.append(scores)
            sign, first = -1, experts.EXPERTS - 1
        index = torch.arange(k).mul(sign).add(first).expand(*scores.shape[:-1], k)
        return scores.gather(-1, index), index

    monkeypatch.setattr(torch, "topk", topk)
    expected = gradients(copy.deepcopy(model), steps=1)
    activation_checkpoint.apply(model, setup)
    found = dict(zip(names, zip(gradients(model, steps=1), expected, strict=True), strict=True))
    # A router's weights are computed again, and have the gradients of what was chosen then, of equal scores.
    assert len(again) == 3
    assert all(torch.equal(*pair) for name, pair in found.items() if not name.endswith(".mlp.gate.weight"))


@pytest.mark.parametrize(
    "name", ["flash_attn::_flash_attn_forward", "flash_attn_3::_flash_attn_forward", "smp_made_up::_varlen_attn"]
)
def test_selective_keeps_attention_of_packages(name):
    ran = []

    def attention(x: torch.Tensor) -> torch.Tensor:
        ran.append(name)
        return x * 2

    operation = torch.library.custom_op(name, attention, mutates_args=())
    operation.register_autograd(lambda ctx, gradient: gradient * 2)
    block = torch.nn.Linear(4, 4)
    forward = block.forward
    block.forward = lambda x: operation(forward(x).sin()).cos().sin()
    apply_activation_checkpointing([block], mode="selective")
    for _ in range(2):
        block(torch.ones(2, 4)).sum().backward()
    assert len(ran) == 2


def test_selective_keeps_torchs_and_flex_attention():
    from torch._higher_order_ops import flex_attention
    from torch.nn.attention import varlen

    kept = (torch.ops.torch_attn._varlen_attn.default, torch.ops.aten._scaled_dot_product_cudnn_attention.default)
    assert varlen and all(_kept(operation) for operation in (*kept, flex_attention))
    functional = torch.ops._c10d_functional
    assert _kept(functional.reduce_scatter_tensor.default) and not _kept(functional.all_gather_into_tensor.default)
    assert not _kept(torch.ops.aten.silu.default)


def _kept(operation) -> bool:
    return _policy()(SelectiveCheckpointContext(is_recompute=False), operation) is CheckpointPolicy.MUST_SAVE


@pytest.mark.parametrize("mode", ["selective", "products"])
@pytest.mark.parametrize("name", ["llama_gqa", "llama_tied", "gpt_neox"])
def test_what_is_kept_is_predicted(name, mode, monkeypatch):
    contexts = []
    made = activation_checkpoint._selective_contexts
    noted = lambda *given: contexts.append(made(*given)) or contexts[-1]  # noqa: E731
    monkeypatch.setattr(activation_checkpoint, "_selective_contexts", noted)
    model = build_reference(name, torch.float32)
    apply_activation_checkpointing(blocks_of(model), mode=mode)
    ids, _ = global_batch(0)
    loss = model(input_ids=ids, use_cache=False).logits.sum()
    storage = contexts[0][0].storage
    leaves = tree_leaves(list(storage.values()))
    values = [leaf.val for leaf in leaves if isinstance(getattr(leaf, "val", None), torch.Tensor)]
    found = {value.untyped_storage().data_ptr(): value.untyped_storage().nbytes() for value in values}
    resolved = SimpleNamespace(family=family_of(model.config), hf_config=model.config, attn_implementation="sdpa")
    settings = Settings((ActivationConfig(activation_checkpointing_mode=mode),))
    predicted = activation_checkpoint._kept_bytes(
        model_shape(resolved), lay_out(1, 1, 1), Workload(ids.shape[1], len(ids), 4, settings)
    )
    assert predicted == sum(found.values())
    del loss


class Situated(NamedTuple):
    settings: Settings
    fits: Callable[..., bool]


def test_the_mode_is_chosen_by_memory():
    def chosen(fits, **values):
        """Return the choices where the ``fits``-th of what is tried is the first that fits."""
        tried = []
        situation = Situated(
            Settings((ActivationConfig(**values),)), lambda **each: bool(tried.append(each)) or len(tried) > fits
        )
        found = {name: value for name, value, _ in activation_checkpoint.choose(situation)}
        assert found == tried[-1]
        return found

    on, mode, every = (f"activation_checkpointing{word}" for word in ("", "_mode", "_every"))
    ladder = [(False,), (True, "products", 2), (True, "products", 1), (True, "selective", 1), (True, "full", 1)]
    for fits, values in enumerate([*ladder, ladder[-1]]):  # the last one whether it fits or not
        assert chosen(fits) == dict(zip((on, mode, every), values, strict=False))
    assert chosen(0, activation_checkpointing=False) == chosen(
        0, activation_checkpointing=False, activation_checkpointing_mode="full") == {}  # fmt: skip
    # What was given is kept; a mode, or which blocks, is given to recompute.
    assert chosen(0, activation_checkpointing=True) == {mode: "products", every: 2}
    assert chosen(0, activation_checkpointing_mode="selective") == {on: True, every: 1}
    assert chosen(0, offload_activations=True) == {mode: "products"}
    assert chosen(1, activation_checkpointing_every=3) == {on: True, mode: "selective"}
    assert Settings((ActivationConfig(),))[ActivationConfig].activation_checkpointing_mode == "full"


def _split_modes(sequence):
    """Recomputation of split layers: the same bits, and what is kept is not exchanged again."""
    smp.init({"tensor_parallel_degree": 2, "sequence_parallel": sequence})
    reference = dropout_model("llama_gqa")
    found, reductions = {}, {}
    operation = "reduce_scatter" if sequence else "all_reduce"
    for mode in ("none", "full", "selective", "products"):
        model = smp.transform(copy.deepcopy(reference))
        if mode != "none":
            apply_activation_checkpointing(blocks_of(model), mode=mode)
        torch.manual_seed(0)
        loss = model(input_ids=global_batch(0)[0]).logits.to_local().square().sum()
        dist.barrier()
        smp.comm.reset_report()
        loss.backward()
        reductions[mode] = smp.comm.report().calls(operation)
        found[mode] = [p.grad.to_local() for p in model.parameters()]
    for mode in ("full", "selective", "products"):
        assert all(torch.equal(a, b) for a, b in zip(found[mode], found["none"], strict=True)), mode
    # Of a block's two reductions the second is after all that backward needs.
    assert reductions["full"] == reductions["none"] + 3
    assert reductions["selective"] == reductions["products"] == reductions["none"]


@pytest.mark.parametrize("sequence", [True, False])
def test_selective_keeps_exchanges(sequence):
    run_distributed(_split_modes, sequence, world_size=2, backend="smddp")


def test_selective_recomputes_attention_that_is_a_sum_over_ranks():
    """Its pieces would be saved one by one, more of them the more ranks there are."""
    model = build_reference("llama_gqa", torch.float32)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    for split, kept in ((False, CheckpointPolicy.MUST_SAVE), (True, CheckpointPolicy.PREFER_RECOMPUTE)):
        if split:
            split_sequences(model, "p2p")
        block = copy.deepcopy(model.model.layers[0])
        with mock.patch.object(activation_checkpoint, "create_selective_checkpoint_contexts") as create:
            apply_activation_checkpointing([block], mode="selective")
            block.forward.keywords["context_fn"]()
        decide = create.call_args.args[0]
        assert decide(mock.Mock(is_recompute=False), kernel) is kept, split
        assert decide(mock.Mock(is_recompute=False), torch.ops.aten.mm.default) is CheckpointPolicy.MUST_SAVE
