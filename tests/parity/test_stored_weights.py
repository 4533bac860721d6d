"""Weights in fp8 and mxfp4 are read as transformers dequantises them, bit for bit."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import smp.cli
from smp.checkpoint.hf_export import export_hf
from smp.errors import UserError
from smp.models.model_config import ModelConfig, resolve_model
from smp.models.registry import build_model
from smp.models.stored_weights import open_weights, tensor_names
from smp.pretrained import load_pretrained_
from tests.experts import build

FP8 = {"quant_method": "fp8", "weight_block_size": [16, 16]}


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def _to_fp8(weight: torch.Tensor, blocks: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values in fp8, and the scale of each block, which do not divide the matrix."""
    rows, columns = (-(-size // block) for size, block in zip(weight.shape, blocks, strict=True))
    scales = _random(rows, columns) + 0.5
    grid = scales.repeat_interleave(blocks[0], 0).repeat_interleave(blocks[1], 1)[: weight.shape[0], : weight.shape[1]]
    return (weight / grid).to(torch.float8_e4m3fn), scales


def _quantise(directory, *, method, change) -> None:
    """Store the projections of a saved model otherwise, in two files so that scales are in another one than values."""
    tensors = load_file(directory / "model.safetensors")
    first: dict[str, torch.Tensor] = {}
    second: dict[str, torch.Tensor] = {}
    for key, tensor in tensors.items():
        values, others = change(key, tensor)
        first |= values
        second |= others
    (directory / "model.safetensors").unlink()
    weight_map = {}
    for number, part in enumerate((first, second), 1):
        name = f"model-0000{number}-of-00002.safetensors"
        save_file(part, directory / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, name)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    config = json.loads((directory / "config.json").read_text()) | {"quantization_config": method}
    (directory / "config.json").write_text(json.dumps(config))


def _fp8(key, tensor):
    if not key.endswith("_proj.weight"):
        return {key: tensor}, {}
    values, scales = _to_fp8(tensor, (16, 16))
    return {key: values}, {f"{key}_scale_inv": scales}


def _read(directory):
    model = resolve_model(ModelConfig(hf_pretrained_model_name_or_dir=str(directory)))
    found = build_model(model.hf_config, attn_implementation=None)
    load_pretrained_(found, directory, hf_config=model.hf_config)
    return found


def test_fp8_is_read_by_blocks_that_may_not_divide_a_matrix(tmp_path):
    plain = build("deepseek_v3", torch.float32)
    plain.save_pretrained(tmp_path / "d")
    _quantise(tmp_path / "d", method=FP8, change=_fp8)
    stored = {}
    for file in sorted((tmp_path / "d").glob("*.safetensors")):
        stored |= load_file(file)
    found = dict(_read(tmp_path / "d").named_parameters())
    wrong = []
    for key in (key for key in stored if key.endswith("_proj.weight") and ".experts." not in key):
        grid = stored[f"{key}_scale_inv"].repeat_interleave(16, 0).repeat_interleave(16, 1)
        rows, columns = stored[key].shape
        wrong += [key] * (not torch.equal(found[key], stored[key].float() * grid[:rows, :columns]))
    assert not wrong and sum(key.endswith("_scale_inv") for key in stored) > 50
    name = "model.layers.1.mlp.experts.down_proj"  # of which the files have an expert each
    expert = stored["model.layers.1.mlp.experts.5.down_proj.weight"].float()
    scale = stored["model.layers.1.mlp.experts.5.down_proj.weight_scale_inv"].repeat_interleave(16, 0)
    assert torch.equal(found[name][5], expert * scale)


def test_mxfp4_is_read_as_transformers_reads_it(tmp_path):
    build("gpt_oss", torch.float32, intermediate_size=64).save_pretrained(tmp_path / "d")
    stored = {}

    def packed(key, tensor):
        if not key.endswith(("gate_up_proj", "down_proj")):
            return {key: tensor}, {}
        experts, columns, rows = tensor.shape
        blocks = (_random(experts, rows, columns // 32, 16) * 256).to(torch.uint8)
        scales = (_random(experts, rows, columns // 32, seed=1) * 4 + 124).to(torch.uint8)
        stored[key] = blocks, scales
        return {f"{key}_blocks": blocks}, {f"{key}_scales": scales}

    _quantise(tmp_path / "d", method={"quant_method": "mxfp4"}, change=packed)
    found = _read(tmp_path / "d")
    for name, both in stored.items():
        assert torch.equal(found.get_parameter(name), convert_moe_packed_tensors(*both, dtype=torch.float32))
        want = convert_moe_packed_tensors(*both, dtype=torch.bfloat16)
        assert torch.equal(found.get_parameter(name).bfloat16(), want)
        with open_weights(tmp_path / "d/model-00001-of-00002.safetensors") as content:
            part = (slice(2, 3), slice(5, 31), slice(1, 4))
            assert torch.equal(content.get_slice(name)[part].bfloat16(), want[part])
    assert len(stored) == 6


@pytest.mark.parametrize(
    ("shape", "scales"), [((64, 48), (2, 3)), ((3, 32, 16), (3, 2, 1)), ((6, 8), (6, 1)), ((6, 8), (1,)), ((6, 8), ())]
)
def test_scales_of_blocks_channels_and_tensors(tmp_path, shape, scales):
    values, factors = (_random(*shape) - 0.5).to(torch.float8_e4m3fn), _random(*scales, seed=1)
    end = "_scale_inv" if len(scales) > 1 else "_scale"
    save_file({"a.weight": values, f"a.weight{end}": factors}, tmp_path / "model.safetensors")
    with open_weights(tmp_path / "model.safetensors") as content:
        for dtype in (torch.float32, torch.bfloat16):
            want = Fp8Dequantize(None)._dequantize_one(
                values, factors.reshape(1, 1) if len(scales) < 2 else factors, dtype
            )
            assert content.keys() == ["a.weight"] and torch.equal(content.get_tensor("a.weight").to(dtype), want)
        part = tuple(slice(size // 3, size - 1) for size in shape)
        assert torch.equal(content.get_slice("a.weight")[part].bfloat16(), want[part])


@pytest.mark.parametrize(
    "method",
    [
        {"quant_method": "fp8", "weight_block_size": [128, 128]}, {"quant_method": "fp8"},
        {"config_groups": {"group_0": {"weights": {"block_structure": [128, 128]}}}}, None,
    ],
)  # fmt: skip
def test_the_size_of_blocks_is_the_configs_or_follows_from_the_matrix(tmp_path, method):
    rows = 192 if method not in (None, {"quant_method": "fp8"}) else 320  # whose last block is a part of one
    values, scales = _to_fp8(_random(rows, 128), (128, 128))
    save_file({"a.weight": values, "a.weight_scale_inv": scales}, tmp_path / "model.safetensors")
    if method is not None:
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": method}))
    with open_weights(tmp_path / "model.safetensors") as content:
        grid = scales.repeat_interleave(128, 0)[:rows]
        assert torch.equal(content.get_tensor("a.weight"), values.float() * grid)


def test_a_vector_in_fp8_has_one_scale(tmp_path):
    values = _random(8).to(torch.float8_e4m3fn)
    save_file({"a.bias": values, "a.bias_scale": torch.tensor(0.5)}, tmp_path / "model.safetensors")
    with open_weights(tmp_path / "model.safetensors") as content:
        assert torch.equal(content.get_tensor("a.bias"), values.float() * 0.5)


def test_an_export_is_in_the_training_dtype_and_names_no_quantisation(tmp_path):
    build("mixtral", torch.float32).save_pretrained(tmp_path / "d")
    _quantise(tmp_path / "d", method=FP8, change=_fp8)
    model = _read(tmp_path / "d")
    export_hf(model, tmp_path / "out", weights=tmp_path / "d", dtype=torch.bfloat16)
    assert not hasattr(AutoConfig.from_pretrained(tmp_path / "out"), "quantization_config")
    again, report = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report.values())
    for name, parameter in again.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name).bfloat16()), name


def _mxfp4(key, tensor):
    if not key.endswith(("gate_up_proj", "down_proj")):
        return {key: tensor}, {}
    experts, columns, rows = tensor.shape
    blocks = (_random(experts, rows, columns // 32, 16) * 256).to(torch.uint8)
    return {f"{key}_blocks": blocks}, {f"{key}_scales": torch.full(blocks.shape[:-1], 126, dtype=torch.uint8)}


@pytest.mark.parametrize(
    ("kind", "method", "change", "dtype", "changes"),
    [
        ("gpt_oss", {"quant_method": "mxfp4"}, _mxfp4, "float4_e2m1fn_x2", {"intermediate_size": 64}),
        ("llama4_text", FP8, _fp8, "float8_e4m3fn", {}),
    ],
)
def test_commands_take_quantised_directories(tmp_path, capsys, kind, method, change, dtype, changes):
    build(kind, torch.float32, **changes).save_pretrained(tmp_path / "d")
    parameters = {name: p.shape for name, p in build(kind, torch.float32, **changes).named_parameters()}
    _quantise(tmp_path / "d", method=method, change=change)
    assert smp.cli.main(["inspect", str(tmp_path / "d"), "--json", "--tensors"]) == 0
    out = capsys.readouterr().out
    found = json.loads(out[out.index("{") :])  # libraries may print when they are imported
    assert {name: tuple(each["shape"]) for name, each in found["tensors"].items()} == parameters
    assert found["model"]["dtypes"] == ["float32", dtype]
    shutil.copytree(tmp_path / "d", tmp_path / "same")
    assert smp.cli.main(["diff", str(tmp_path / "d"), str(tmp_path / "same"), "--values"]) == 0
    file = next(file for file in (tmp_path / "same").glob("*-00002-of*.safetensors"))
    save_file({key: value * 2 for key, value in load_file(file).items()}, file)  # scales
    capsys.readouterr()
    assert smp.cli.main(["diff", str(tmp_path / "d"), str(tmp_path / "same"), "--values"]) == 1
    assert "elements that differ" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("method", "named"),
    [
        ({"quant_method": "awq"}, "'awq'"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "pack-q"),
    ],
)
def test_other_forms_are_refused_by_name(tmp_path, method, named):
    build("mixtral", torch.float32).save_pretrained(tmp_path / "d")
    _quantise(tmp_path / "d", method=method, change=_fp8)
    with pytest.raises(UserError, match=f"{named}.*only fp8 and mxfp4 are read: use the model's full weights"):
        _read(tmp_path / "d")


def test_values_without_their_scales_are_refused(tmp_path):
    build("mixtral", torch.float32).save_pretrained(tmp_path / "d")
    _quantise(tmp_path / "d", method=FP8, change=lambda key, tensor: (_fp8(key, tensor)[0], {"x": torch.ones(1)}))
    with pytest.raises(UserError, match=r"weights of a dtype that cannot be trained: .*F8_E4M3"):
        _read(tmp_path / "d")
    assert tensor_names(["a_blocks", "b_scales"]) == {"a_blocks": "a_blocks", "b_scales": "b_scales"}
