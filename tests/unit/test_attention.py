"""Attention: masks and lengths without a read from the device, and the kernels that go by them."""

import collections
import copy
import functools
import os
import traceback

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask
from torch.utils._python_dispatch import TorchDispatchMode

from smp.config import PrecisionConfig, Settings
from smp.data.packing import Collator, Row
from smp.models.model_config import ModelConfig
from smp.models.registry import family_of
from smp.parallel import attention, choices
from smp.parallel.technique import Setup
from smp.train import step as one_step
from tests.tensor_parallel import build, config_of

FAMILIES = ("llama_gqa", "mistral", "gpt_neox")
TORCH = os.path.dirname(torch.__file__)
END, LENGTH = 1, 12
CPU = torch.device("cpu")
# Documents of 3, 4, 5 tokens; of 9 and padding; and a row of one document.
ROWS = [[5, 6, END, 7, 8, 9, END, 4, 3, 2, 6, END], [9, 8, 7, 6, 5, 4, 3, 2, END], list(range(2, 14))]


def rows_of(tokens, *, documents):
    collate = Collator(sequence_length=LENGTH, pad_token_id=0, document_end=END if documents else None)
    return collate([Row(np.array(row)) for row in tokens])


BATCHES = {
    "plain": functools.partial(rows_of, [ROWS[2], ROWS[2]], documents=False),
    "padding on the right": functools.partial(rows_of, ROWS[:2], documents=False),
    "documents": functools.partial(rows_of, ROWS, documents=True),
    "one row of documents": functools.partial(rows_of, ROWS[:1], documents=True),
    "one document per sequence": functools.partial(rows_of, [ROWS[2]] * 2, documents=True),
}


def applied(model, *, chosen="sdpa", settings=()):
    model = copy.deepcopy(model)
    setup = Setup(
        family_of(model.config), None, Settings((ModelConfig(), *settings)).changed(attn_implementation=chosen)
    )
    attention.apply(model, setup)
    return model


@pytest.fixture
def fused(monkeypatch):
    """Fused attention as on a GPU, with a reference in place of the kernel."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen)


def varlen(q, k, v, bounds, _, longest, __, *, scale, window_size, enable_gqa=None):
    """torch.nn.attention.varlen.varlen_attn, document by document; q (tokens, heads, width)."""
    assert bounds.dtype == torch.int32 and longest >= bounds.diff().max() and window_size[1] == 0
    assert enable_gqa == ((q.shape[1] != k.shape[1]) if attention._ASKS_FOR_GROUPS else None)
    parts = []
    for begin, end in zip(bounds.tolist(), bounds.tolist()[1:], strict=False):
        place = torch.arange(end - begin)
        back = place[:, None] - place
        seen = (back >= 0) & ((back <= window_size[0]) | (window_size[0] < 0))
        each = (t[begin:end].transpose(0, 1)[None] for t in (q, k, v))
        found = torch.nn.functional.scaled_dot_product_attention(*each, attn_mask=seen, scale=scale, enable_gqa=True)
        parts.append(found[0].transpose(0, 1))
    return torch.cat(parts)


def step(model, batch, monkeypatch):
    """Logits and gradients of the job's forward pass."""
    with monkeypatch.context() as patch:
        patch.setattr(one_step, "model_loss_sum", lambda model, inputs, *_: model(**inputs, use_cache=False).logits)
        logits = one_step.forward(model, batch, CPU)
    (logits.double() ** 2).sum().backward()
    return logits, [parameter.grad for parameter in model.parameters()]


def expected(model, batch, monkeypatch):
    """The plain Hugging Face model's, which finds documents by their positions."""
    return step(copy.deepcopy(model), {k: v for k, v in batch.items() if k != "document_bounds"}, monkeypatch)


class Reads(TorchDispatchMode):
    """List the reads of values by the model, which the host would wait for on a GPU."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if str(func) in ("aten._local_scalar_dense.default", "aten.is_nonzero.default", "aten.nonzero.default"):
            stack = traceback.extract_stack()
            place = next(frame for frame in reversed(stack[:-1]) if not frame.filename.startswith(TORCH))
            if all(frame.name != "varlen" for frame in stack):  # a kernel's stand-in may read
                self.found.append(str(place))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("batch", BATCHES)
def test_the_same_bits_as_hugging_face_without_a_read(family, batch, monkeypatch):
    model = build(config_of(family))
    wanted = expected(model, BATCHES[batch](), monkeypatch)
    with Reads() as reads:
        found = step(applied(model), BATCHES[batch](), monkeypatch)
    assert reads.found == []
    assert torch.equal(found[0], wanted[0])
    assert all(torch.equal(a, b) for a, b in zip(found[1], wanted[1], strict=True))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("batch", BATCHES)
def test_fused_attention_is_hugging_face_s(family, batch, fused, monkeypatch):
    model = build(config_of(family))
    wanted = expected(model, BATCHES[batch](), monkeypatch)
    with Reads() as reads:
        found = step(applied(model, chosen="fused"), BATCHES[batch](), monkeypatch)
    assert reads.found == []
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-11)


def test_fused_attention_takes_lengths_only_where_a_mask_would_be(fused, monkeypatch):
    calls = []
    monkeypatch.setattr(
        "torch.nn.attention.varlen.varlen_attn", lambda *a, **k: calls.append(k["window_size"]) or varlen(*a, **k)
    )
    used = {}
    for family in FAMILIES:
        model = applied(build(config_of(family)), chosen="fused")
        for name, batch in BATCHES.items():
            calls.clear()
            step(model, batch(), monkeypatch)
            used[family, name] = set(calls)
    causal, window = {(-1, 0)}, {(5, 0)}
    for name in BATCHES:
        packed = name in ("documents", "one row of documents")
        assert used["llama_gqa", name] == used["gpt_neox", name] == (causal if packed else set())
        assert used["mistral", name] == window  # 6 of 12 tokens


@pytest.mark.parametrize("chosen", ["sdpa", "fused"])
def test_masks_of_padding_and_unannounced_documents_keep_their_meaning(chosen, fused):
    for family in FAMILIES:
        model = build(config_of(family))
        ids = torch.tensor(ROWS[::2])
        left = torch.ones_like(ids)
        left[0, :4] = 0
        positions = torch.cat([torch.arange(5), torch.arange(7)]).expand(2, -1)
        ours = applied(model, chosen=chosen)
        for inputs in ({"attention_mask": left}, {"attention_mask": left * 0 + 1}, {"position_ids": positions}):
            wanted = model(input_ids=ids, **inputs, use_cache=False).logits
            found = ours(ids, use_cache=False, **inputs).logits
            torch.testing.assert_close(
                found[inputs.get("attention_mask", ids) > 0],
                wanted[inputs.get("attention_mask", ids) > 0],
                rtol=1e-9,
                atol=1e-11,
            )


def test_the_model_s_own_config_still_names_hugging_face_s_function():
    model = build(config_of("llama_gqa"))
    ours = applied(model)
    assert ours.config._attn_implementation == "sdpa"
    assert ours.model.config._attn_implementation == attention.SDPA
    eager = applied(build(config_of("llama_gqa"), attention="eager"), chosen="fused")
    assert eager.model.config._attn_implementation == "eager"


@pytest.mark.parametrize("family", ["llama_gqa", "gpt_neox"])
@pytest.mark.parametrize("batch", ["plain", "documents"])
def test_a_window_that_the_model_does_not_read_is_none(family, batch, monkeypatch):
    config = config_of(family)
    config.sliding_window = 4  # as from_pretrained keeps any key of a config.json
    model = build(config)
    found, wanted = step(applied(model), BATCHES[batch](), monkeypatch), expected(model, BATCHES[batch](), monkeypatch)
    assert torch.equal(found[0], wanted[0])


def test_generation_with_a_cache():
    model = build(config_of("mistral")).eval()
    ids = torch.tensor(ROWS[::2])
    settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(applied(model).eval().generate(ids, **settings), model.generate(ids, **settings))


class Flash:
    """In place of the flash-attn package: its two functions, with sdpa inside."""

    def __init__(self):
        self.calls = []

    def dense(self, q, k, v, causal, softmax_scale, window_size=(-1, -1), **kwargs):
        self.calls.append("dense")
        whole = attention.whole_rows(q[..., 0, 0])["cu_seq_lens_q"]
        flat = (t.flatten(0, 1) for t in (q, k, v))
        return self._attend(*flat, whole, q.shape[1], softmax_scale, window_size).view(q.shape)

    def by_lengths(self, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, softmax_scale,
                   window_size=(-1, -1), **kwargs):  # fmt: skip
        self.calls.append(len(cu_seqlens_q) - 1)
        return self._attend(q, k, v, cu_seqlens_q, max_seqlen_q, softmax_scale, window_size)

    def _attend(self, q, k, v, bounds, longest, scale, window):
        gqa = (q.shape[1] != k.shape[1]) if attention._ASKS_FOR_GROUPS else None
        return varlen(
            q, k, v, bounds, bounds, longest, longest, scale=scale, window_size=(window[0], 0), enable_gqa=gqa
        )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("batch", [*BATCHES, "one row"])
def test_flash_attention_reads_nothing_and_keeps_documents_apart(family, batch, monkeypatch):
    """Transformers would read in every block whether a single row's positions restart, and never of more rows."""
    from transformers import modeling_flash_attention_utils as utils

    flash = Flash()
    known = dict.fromkeys(("dropout_p", "window_size", "max_seqlen_q", "max_seqlen_k"), True)
    known = collections.defaultdict(bool, known)
    process = functools.partial(utils._process_flash_attention_kwargs, supports_mapping=known)
    paged = (process, None) if hasattr(utils, "_process_with_kvcache_kwargs_fn") else process  # transformers 5.17: one
    functions = ((flash.dense, flash.by_lengths, None, None, None), paged)
    monkeypatch.setattr(utils, "lazy_import_flash_attention", lambda *args, **kwargs: functions)
    model = build(config_of(family))
    make = {**BATCHES, "one row": functools.partial(rows_of, ROWS[2:], documents=False)}[batch]
    wanted = expected(model, make(), monkeypatch)
    with Reads() as reads:
        found = step(applied(model, chosen="flash_attention_3"), make(), monkeypatch)
    assert reads.found == []
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-11)
    count = {"documents": 6, "one row of documents": 3, "one row": 1}.get(batch, "dense")
    assert flash.calls == [count] * model.config.num_hidden_layers


@pytest.mark.full
def test_flex_attention_has_a_block_mask_of_documents(monkeypatch):
    made = []
    monkeypatch.setattr("torch.nn.attention.flex_attention.flex_attention", None)
    original = attention._documents_mask
    monkeypatch.setattr(attention, "_documents_mask", lambda *args: made.append(original(*args)) or made[-1])
    model = applied(build(config_of("mistral"), attention="flex_attention"))
    model.model.layers = torch.nn.ModuleList()  # the mask is what is looked at
    monkeypatch.setattr(one_step, "model_loss_sum", lambda model, inputs, *_: model(**inputs, use_cache=False))
    with Reads() as reads, torch.no_grad():
        one_step.forward(model, BATCHES["documents"](), CPU)
    assert isinstance(made[0], BlockMask) and reads.found == []
    config = config_of("mistral")
    config._attn_implementation = "sdpa"
    batch = BATCHES["documents"]()
    dense = original(config, batch["input_ids"], batch["document_bounds"])
    index = [torch.arange(n) for n in dense.shape]
    grid = torch.meshgrid(*index, indexing="ij")
    assert torch.equal(made[0].mask_mod(*grid), dense)


def chosen(monkeypatch, *, package, capability=9, bf16=None, **changes):
    monkeypatch.setattr("transformers.utils.is_flash_attn_3_available", lambda: package)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (capability, 0))
    config = config_of("llama_gqa", **changes)
    settings = Settings((ModelConfig(), PrecisionConfig(bf16=bf16)))
    situation = choices.Situation(config, settings, "cuda", 1, lambda **values: True)
    (choice,) = choices.choose(settings, situation, [attention.choose])
    assert choice.reason
    return choice.value


def test_choice(monkeypatch):
    wide = {"hidden_size": 32, "head_dim": 8}
    assert chosen(monkeypatch, package=True, **wide) == "flash_attention_3"
    assert chosen(monkeypatch, package=True, capability=10, **wide) == "fused"
    assert chosen(monkeypatch, package=False, **wide) == "fused"
    assert chosen(monkeypatch, package=True, attention_dropout=0.1, **wide) == "sdpa"
    assert chosen(monkeypatch, package=True, bf16=False, **wide) == "sdpa"
    assert chosen(monkeypatch, package=False, head_dim=12) == "sdpa"


@pytest.mark.parametrize("changes,dtype,word", [
    ({"attention_dropout": 0.1}, torch.bfloat16, "no attention dropout"),
    ({}, torch.float32, "--bf16"),
    ({"head_dim": 12}, torch.bfloat16, "width"),
])  # fmt: skip
def test_fused_attention_that_does_not_fit_is_refused(changes, dtype, word):
    config = config_of("llama_gqa", **changes)
    asked = Settings((ModelConfig(attn_implementation="fused"),))
    (problem,) = attention.problems(config, Setup(family_of(config), None, asked, dtype))
    assert word in problem and "use sdpa" in problem
    assert attention.problems(config_of("llama_gqa"), Setup(family_of(config), None, asked, torch.bfloat16)) == []
    assert attention.problems(config, Setup(family_of(config), None, Settings(), dtype)) == []
