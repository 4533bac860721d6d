import contextlib
import logging
import pathlib

import pytest
import safetensors
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

import tests.reference
from smp.delayed_init import build_on_meta, materialize_
from smp.errors import UserError
from smp.models.registry import build_model, family_of
from smp.models.weight_files import find_weights
from smp.pretrained import load_pretrained_
from tests.distributed import run_distributed

CASES = ["llama_gqa", "llama_tied", "mistral", "gpt_neox", "gpt_neox_tied"]


def tiny_config(case):
    config = tests.reference.tiny_config(case)
    config.vocab_size = 97  # odd, so that two ranks hold parts of different size
    return config


def reference_model(case, dtype=torch.float32):
    """A Hugging Face model whose norms and biases are not the initial ones."""
    torch.manual_seed(3)
    model = build_model(tiny_config(case), attn_implementation="sdpa")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.to(dtype).eval()


def empty_model(case):
    """The same architecture, every value NaN."""
    model = build_model(tiny_config(case), attn_implementation="sdpa")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    return model.eval()


def shard(model, family, shape=None, dim=0):
    mesh = init_device_mesh("cpu", shape or (2,), mesh_dim_names=("r", "s")[-len(shape or (2,)) :])
    placement = (lambda parameter: Shard(min(dim, parameter.ndim - 1))) if dim else None
    tied = model.get_submodule(family.head).weight is model.get_submodule(family.embedding).weight
    for block in model.get_submodule(family.blocks):
        fully_shard(block, mesh=mesh, shard_placement_fn=placement)
    if not tied:
        fully_shard(model.get_submodule(family.embedding), mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def tokens():
    return torch.arange(24).reshape(2, 12) * 4 % 97


def assert_same(model, reference):
    expected = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        assert torch.equal(whole, expected[name].to(whole.dtype)), name
    assert len(expected) == len(list(model.parameters()))
    with torch.no_grad():
        torch.testing.assert_close(model(tokens()).logits, reference.float()(tokens()).logits, rtol=1e-5, atol=1e-5)


def rewrite(directory, change):
    """Apply ``change`` to the tensors of a one-file checkpoint."""
    file = directory / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    save_file(change(tensors) or tensors, file, metadata={"format": "pt"})
    return directory


@pytest.mark.parametrize("case", CASES)
def test_one_process_loads_what_hugging_face_saved(tmp_path, case):
    reference, model = reference_model(case), empty_model(case)
    reference.save_pretrained(tmp_path)
    load_pretrained_(model, tmp_path, hf_config=model.config)
    assert_same(model, reference)


def _load_sharded(case, directory, shape, dim):
    config = tiny_config(case)
    model = build_on_meta(lambda: build_model(config, attn_implementation="sdpa"))
    shard(model, family_of(config), shape, dim)
    materialize_(model, torch.device("cpu"))
    load_pretrained_(model, pathlib.Path(directory), hf_config=config)
    assert_same(model.eval(), reference_model(case))


def _load_all(folder):
    for case in CASES:
        for shape in ((2,), (1, 2), (2, 1)):
            _load_sharded(case, f"{folder}/{case}", shape, 0)
    _load_sharded("llama_gqa", f"{folder}/llama_gqa", (2,), 1)


@pytest.mark.full
def test_two_ranks_load_their_slices_of_several_files(tmp_path):
    for case in CASES:
        reference_model(case).save_pretrained(tmp_path / case, max_shard_size="30KB")
        assert (tmp_path / case / "model.safetensors.index.json").is_file()
    run_distributed(_load_all, str(tmp_path), world_size=2)


class _CountingSlice:
    """A safetensors slice that counts the elements read through it."""

    elements = 0

    def __init__(self, inner):
        self.inner = inner

    def __getitem__(self, item):
        part = self.inner[item]
        _CountingSlice.elements += part.numel()
        return part

    def __getattr__(self, name):
        return getattr(self.inner, name)


class _CountingFile(contextlib.AbstractContextManager):
    def __init__(self, *args, **kwargs):
        self.inner = safe_open(*args, **kwargs)
        self.keys = self.inner.keys

    def __exit__(self, *args):
        return None

    def get_slice(self, key):
        return _CountingSlice(self.inner.get_slice(key))


def _load_counting(directory):
    safetensors.safe_open = _CountingFile  # in this process, which ends with the test
    config = tiny_config("llama_gqa")
    model = build_on_meta(lambda: build_model(config, attn_implementation="sdpa"))
    shard(model, family_of(config))
    materialize_(model, torch.device("cpu"))
    load_pretrained_(model, pathlib.Path(directory), hf_config=config)
    assert _CountingSlice.elements == sum(parameter.to_local().numel() for parameter in model.parameters())


def test_a_rank_reads_its_own_elements_only(tmp_path):
    reference_model("llama_gqa").save_pretrained(tmp_path)
    run_distributed(_load_counting, str(tmp_path), world_size=2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_converted_and_said(tmp_path, caplog, dtype):
    reference, model = reference_model("gpt_neox", dtype), empty_model("gpt_neox")
    reference.save_pretrained(tmp_path)
    with caplog.at_level(logging.INFO, logger="smp"):
        load_pretrained_(model, tmp_path, hf_config=model.config)
    assert_same(model, reference)
    assert "F16 to float32" in caplog.text


def test_old_buffers_are_skipped_and_module_names_accepted(tmp_path):
    reference, model = reference_model("gpt_neox"), empty_model("gpt_neox")
    reference.save_pretrained(tmp_path)

    def age(tensors):
        tensors["lm_head.weight"] = tensors.pop("embed_out.weight")
        for layer in range(2):
            prefix = f"gpt_neox.layers.{layer}.attention"
            tensors |= {f"{prefix}.bias": torch.ones(4), f"{prefix}.masked_bias": torch.ones(1)}
            tensors[f"{prefix}.rotary_emb.inv_freq"] = torch.ones(1)

    load_pretrained_(model, rewrite(tmp_path, age), hf_config=model.config)
    assert_same(model, reference)


def test_tied_weights_may_be_stored_under_either_name_or_both(tmp_path):
    reference = reference_model("llama_tied")
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    changes = [
        lambda tensors: tensors.update({head: tensors.pop(embedding)}),
        lambda tensors: tensors.update({head: tensors[embedding].clone()}),
    ]
    for change in changes:
        reference.save_pretrained(tmp_path)
        model = empty_model("llama_tied")
        load_pretrained_(model, rewrite(tmp_path, change), hf_config=model.config)
        assert_same(model, reference)
    rewrite(tmp_path, lambda tensors: tensors.update({head: tensors[embedding] + 1}))
    with pytest.raises(UserError, match="the model ties them"):
        load_pretrained_(empty_model("llama_tied"), tmp_path, hf_config=model.config)


MLP = [f"model.layers.{i}.mlp.{p}_proj.weight" for i in (0, 1) for p in ("up", "down", "gate")]


@pytest.mark.parametrize(
    ("removed", "added", "words"),
    [
        (MLP, {}, "and 1 more: they are of another model"),
        (["model.norm.weight"], {}, "lack model.norm.weight: they are of another model, or incomplete"),
        (["lm_head.weight"], {}, "lack lm_head.weight: .* --tie_word_embeddings 1"),
        (["model.embed_tokens.weight"], {}, "lack model.embed_tokens.weight: .* --tie_word_embeddings 1"),
        ([], {"model.extra.weight": torch.ones(1)}, "no parameter for model.extra.weight"),
        ([], {"lm_head.weight": torch.ones(5, 32)}, r"lm_head.weight \[5, 32\] instead of \[97, 32\]"),
        ([], {"model.norm.weight": torch.ones(32, dtype=torch.int8)}, r"model.norm.weight \(I8\)"),
    ],
)
def test_weights_that_do_not_fit_change_nothing(tmp_path, removed, added, words):
    reference_model("llama_gqa").save_pretrained(tmp_path)
    rewrite(tmp_path, lambda tensors: {key: t for key, t in tensors.items() if key not in removed} | added)
    model = empty_model("llama_gqa")
    with pytest.raises(UserError, match=words):
        load_pretrained_(model, tmp_path, hf_config=model.config)
    assert all(parameter.isnan().all() for parameter in model.parameters())


def test_a_file_is_read_and_not_an_index_beside_it(tmp_path, caplog):
    """transformers leaves the index where a sharded model is written over, and reads the file."""
    from transformers import LlamaForCausalLM

    older = reference_model("llama_gqa")
    older.save_pretrained(tmp_path, max_shard_size="30KB")
    with torch.no_grad():
        newer = reference_model("llama_gqa")
        newer.get_output_embeddings().weight.add_(1)
    newer.save_pretrained(tmp_path / "new")
    (tmp_path / "new" / "model.safetensors").rename(tmp_path / "model.safetensors")
    assert_same(LlamaForCausalLM.from_pretrained(tmp_path), newer)
    for shards in ("beside it", "deleted"):
        model = empty_model("llama_gqa")
        with caplog.at_level(logging.WARNING, logger="smp"):
            load_pretrained_(model, tmp_path, hf_config=model.config)
        assert_same(model, newer)
        assert "model.safetensors.index.json beside it" in caplog.messages[-1], shards
        for shard_file in tmp_path.glob("model-*.safetensors"):
            shard_file.unlink()


def test_weights_of_a_variant_and_adapters(tmp_path):
    reference = reference_model("llama_gqa")
    reference.save_pretrained(tmp_path, variant="fp16", max_shard_size="30KB")
    assert find_weights(tmp_path).name == "model.safetensors.index.fp16.json"
    (tmp_path / "other.safetensors").touch()
    with pytest.raises(UserError, match=r"2 sets of weights \(other.safetensors, model.safetensors.index.fp16.json\)"):
        find_weights(tmp_path)
    (tmp_path / "adapter_config.json").touch()
    with pytest.raises(UserError, match="contains an adapter"):
        find_weights(tmp_path)


def test_a_damaged_file_is_named(tmp_path):
    model = empty_model("llama_gqa")
    reference_model("llama_gqa").save_pretrained(tmp_path, max_shard_size="30KB")
    shard_file = sorted(tmp_path.glob("model-*.safetensors"))[0]
    shard_file.write_bytes(shard_file.read_bytes()[:-8])
    with pytest.raises(UserError, match=f"{shard_file.name} cannot be read"):
        load_pretrained_(model, tmp_path, hf_config=model.config)


def test_parameters_must_be_allocated(tmp_path):
    config = tiny_config("llama_gqa")
    with torch.device("meta"):
        model = build_model(config, attn_implementation="sdpa")
    with pytest.raises(UserError, match="allocate it"):
        load_pretrained_(model, tmp_path, hf_config=config)
