"""Exports in fp8, where the pretrained files are."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.integrations.finegrained_fp8 import Fp8Quantize

import smp.cli
from smp.checkpoint.hf_export import export_hf
from smp.checkpoint.quantised import Fp8Form, in_fp8, quantised
from smp.errors import UserError
from smp.models.file_names import FileNames
from tests import wholes
from tests.experts import build
from tests.job import run_job
from tests.parity.test_stored_weights import FP8, _fp8, _quantise, _read, _to_fp8

BLOCKS = (16, 16)


@pytest.mark.parametrize("scale_fmt", ["float", "ue8m0"])
@pytest.mark.parametrize("shape", [(32, 48), (3, 16, 32)])
def test_the_bits_are_transformers_own(shape, scale_fmt):
    value = torch.randn(shape, generator=torch.Generator().manual_seed(3)) * 0.02
    value[..., :16, :16] = 0.0
    config = SimpleNamespace(weight_block_size=BLOCKS, scale_fmt=scale_fmt)
    want = Fp8Quantize(SimpleNamespace(quantization_config=config))._quantize_one("a.weight", value)
    values, scales = quantised(value, blocks=BLOCKS, by_powers=scale_fmt == "ue8m0")
    assert torch.equal(values.view(torch.uint8), want["a.weight"].view(torch.uint8))
    assert torch.equal(scales, want["a.weight_scale_inv"].float())


def test_a_block_of_values_next_to_zero_stays_finite():
    value = torch.zeros(4, 4)
    value[0, 0] = 1e-38
    for by_powers in (False, True):
        found, factors = quantised(value, blocks=(4, 4), by_powers=by_powers)
        assert (found.float() * factors - value).abs().max() <= 1e-38 and found.float().isfinite().all()


def test_the_last_blocks_may_be_smaller():
    value = torch.randn(40, 50, generator=torch.Generator().manual_seed(3))
    values, scales = quantised(value, blocks=BLOCKS, by_powers=False)
    alone, scale = quantised(value[32:, 48:], blocks=BLOCKS, by_powers=False)
    assert values.shape == value.shape and scales.shape == (3, 4)
    assert torch.equal(values[32:, 48:].float(), alone.float()) and torch.equal(scales[2:, 3:], scale)


def _stored(directory):
    return {key: value for file in sorted(directory.glob("*.safetensors")) for key, value in load_file(file).items()}


def _changed(directory):
    model = _read(directory)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5)) * 0.01)
    return model


def _check(directory, out, model):
    """Check that an export has the form of the pretrained directory, and the model's values up to fp8's rounding."""
    before, after = _stored(directory), _stored(out)
    assert {key: (value.dtype, value.shape) for key, value in before.items()} == {
        key: (value.dtype, value.shape) for key, value in after.items()
    }
    assert sum(value.dtype == torch.float8_e4m3fn for value in after.values()) > 10
    configs = [json.loads((each / "config.json").read_text()) for each in (directory, out)]
    assert configs[0]["quantization_config"] == configs[1]["quantization_config"]
    for name, parameter in _read(out).named_parameters():
        wanted = model.get_parameter(name)
        torch.testing.assert_close(parameter, wanted, rtol=2**-4, atol=2**-9 / 448 * wanted.abs().max().item())
    return before, after


@pytest.mark.parametrize("kind", ["mixtral", "deepseek_v3"])
def test_an_export_has_what_is_in_fp8_so_again(tmp_path, kind):
    build(kind, torch.float32).save_pretrained(tmp_path / "d")
    _quantise(tmp_path / "d", method=FP8, change=_fp8)
    model = _changed(tmp_path / "d")
    export_hf(model, tmp_path / "out", weights=tmp_path / "d", quantize="fp8", max_shard_bytes=50_000)
    _check(tmp_path / "d", tmp_path / "out", model)
    if kind == "deepseek_v3":
        return  # transformers reads no blocks that are smaller
    theirs, report = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report.values()), report
    mine = _read(tmp_path / "out")
    assert all(torch.equal(p, mine.get_parameter(n).to(p.dtype)) for n, p in theirs.named_parameters())


def test_a_larger_model_has_all_else_as_it_was(tmp_path):
    wholes.save_whole("qwen3_vl", tmp_path / "d")

    def change(key, tensor):
        if not key.endswith("linear_fc1.weight"):  # of the vision part, which is not trained
            return _fp8(key, tensor)
        values, scales = _to_fp8(tensor, BLOCKS)
        return {key: values}, {f"{key}_scale_inv": scales}

    _quantise(tmp_path / "d", method=FP8, change=change)
    model = _changed(tmp_path / "d")
    export_hf(model, tmp_path / "out", weights=tmp_path / "d", quantize="fp8")
    before, after = _check(tmp_path / "d", tmp_path / "out", model)
    passed = [key for key in before if "visual" in key]
    assert torch.float8_e4m3fn in {before[key].dtype for key in passed}
    assert all(torch.equal(before[key], after[key]) for key in passed)
    _, report = AutoModelForImageTextToText.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report.values()), report


@pytest.mark.parametrize(
    ("method", "word", "sentence"),
    [
        (FP8, "int4", "'int4' is not written: give fp8"),
        ({"quant_method": "compressed-tensors"}, "fp8", "is compressed-tensors, and fp8 is written in blocks"),
        ({"quant_method": "fp8"}, "fp8", "is fp8, and fp8 is written in blocks"),
        (FP8 | {"weight_block_size": [4, 4]}, "fp8", "is not in blocks of 4 x 4"),
        ({}, "fp8", "is not quantized, and fp8 is written in blocks"),
    ],
)
def test_other_forms_are_refused(tmp_path, method, word, sentence):
    build("mixtral", torch.float32).save_pretrained(tmp_path / "d")
    _quantise(tmp_path / "d", method=FP8, change=_fp8)
    model = _read(tmp_path / "d")
    config = json.loads((tmp_path / "d/config.json").read_text()) | {"quantization_config": method}
    (tmp_path / "d/config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=sentence):
        export_hf(model, tmp_path / "out", weights=tmp_path / "d", quantize=word)
    assert not (tmp_path / "out").exists()


def test_a_tensor_that_the_files_have_in_another_form_is_named(tmp_path):
    form = Fp8Form(FP8, BLOCKS, {"model.experts.up_proj": tmp_path})
    with pytest.raises(
        UserError, match=r"files have model.experts.up_proj in another form than an export: leave it out"
    ):
        in_fp8([], form, FileNames())


@pytest.mark.full
def test_the_command_writes_a_job_s_checkpoint_so(tmp_path, capsys):
    build("mixtral", torch.float32).save_pretrained(tmp_path / "d")
    plain = [
        "--use_synthetic_data",
        1,
        "--max_context_width",
        12,
        "--max_steps",
        1,
        "--train_batch_size",
        2,
        "--lr",
        0.01,
    ]
    _quantise(tmp_path / "d", method=FP8, change=_fp8)
    run_job(
        "--hf_pretrained_model_name_or_dir", tmp_path / "d", "--checkpoint_freq", 1, "--output_dir", tmp_path / "run",
        *plain,
    ).succeeded()  # fmt: skip
    latest = str(tmp_path / "run/checkpoints/latest")
    assert smp.cli.main(["export", latest, str(tmp_path / "plain")]) == 0
    assert smp.cli.main(["export", latest, str(tmp_path / "out"), "--quantize", "fp8"]) == 0
    _check(tmp_path / "d", tmp_path / "out", _read(tmp_path / "plain"))
    run_job("--model", "llama_tiny", "--checkpoint_freq", 1, "--output_dir", tmp_path / "new", *plain).succeeded()
    words = ["export", str(tmp_path / "new/checkpoints/latest"), str(tmp_path / "no"), "--quantize", "fp8"]
    assert smp.cli.main(words) == 2 and "pretrained files in fp8, and this one has none" in capsys.readouterr().err
