"""The directories of small models with the structure of published ones, and transformers' models of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.families import BEGIN, END, IMAGE, Family

_KEYS_AND_VALUES = ("k_proj", "v_proj", "k_norm")


def _class(family: Family) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if family.sees else AutoModelForCausalLM


@torch.no_grad()
def build(family: Family) -> Any:
    """Return transformers' model in fp32; its experts differ, are all reached, and an image changes much."""
    from transformers import CONFIG_MAPPING

    torch.manual_seed(7)
    values = {key: value for key, value in family.values.items() if value is not None or key == "audio_config"}
    model = _class(family).from_config(CONFIG_MAPPING[family.model_type](**values), dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if "A_log" in name or "dt_bias" in name:
            continue
        if parameter.dim() == 1:
            parameter.add_(0.1 * torch.randn_like(parameter))
        else:
            routes = name.endswith((".gate.weight", ".router.weight", ".router.proj.weight"))
            parameter.normal_(std=0.5 if routes else 0.1)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.uniform_(0, 0.3)
    return model


def _mtp_tensors(prefix: str) -> dict[str, torch.Tensor]:
    """Return tensors as of multi-token prediction."""
    wide = torch.rand(32, 64, generator=torch.Generator().manual_seed(3))
    names = ("fc", "pre_fc_norm_hidden", "norm") if prefix == "mtp." else ("eh_proj", "hnorm", "shared_head.norm")
    return {f"{prefix}{name}.weight": wide[:, index].clone() if index else wide for index, name in enumerate(names)}


def _unread_tensors(tensors: dict[str, torch.Tensor], family: Family) -> dict[str, torch.Tensor]:
    """Return the keys and values of Gemma 4's layers that take those of others, which its files have all the same."""
    text = family.values.get("text_config", {})
    layers, shared = text.get("num_hidden_layers", 0), text.get("num_kv_shared_layers", 0)
    return {
        key.replace(f".layers.{layer - shared}.", f".layers.{layer}."): tensor.clone()
        for layer in range(layers - shared, layers)
        for key, tensor in tensors.items()
        if f".language_model.layers.{layer - shared}.self_attn." in key and key.split(".")[-2] in _KEYS_AND_VALUES
    }


def _to_fp8(key: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return a matrix in blocks of 16 x 16, of which the last may be a part of one."""
    if not key.endswith(("_proj.weight", "_proj_with_mqa.weight", ".w1.weight", ".w2.weight", ".w3.weight")):
        return {key: tensor}
    rows, columns = (-(-size // 16) * 16 for size in tensor.shape)
    full = tensor.new_zeros(rows, columns)
    full[: tensor.shape[0], : tensor.shape[1]] = tensor
    scales = full.unflatten(0, (-1, 16)).unflatten(2, (-1, 16)).abs().amax((1, 3)).clamp(min=1e-4) / 448
    grid = scales.repeat_interleave(16, 0).repeat_interleave(16, 1)[: tensor.shape[0], : tensor.shape[1]]
    return {key: (tensor / grid).to(torch.float8_e4m3fn), f"{key}_scale_inv": scales}


def _to_mxfp4(key: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return blocks and scales of the shape of gpt-oss's experts, with values of their spread."""
    if not key.endswith(("gate_up_proj", "down_proj")):
        return {key: tensor}
    experts, columns, rows = tensor.shape
    generator = torch.Generator().manual_seed(columns + rows)
    blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(121, 124, (experts, rows, columns // 32), generator=generator, dtype=torch.uint8)
    return {f"{key}_blocks": blocks, f"{key}_scales": scales}


_STORED = {
    "fp8": (_to_fp8, {"quant_method": "fp8", "weight_block_size": [16, 16], "activation_scheme": "dynamic"}),
    "mxfp4": (
        _to_mxfp4,
        {
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
            ],
        },
    ),
}  # fmt: skip


def save(family: Family, directory: Path) -> Path:
    """Write the directory as it is published, with a processor's file and the tensors that transformers has not."""
    build(family).save_pretrained(directory)
    file, config = directory / "model.safetensors", directory / "config.json"
    tensors = load_file(file)
    tensors |= _unread_tensors(tensors, family)
    if family.mtp:
        tensors |= _mtp_tensors(family.mtp)
    if family.stored:
        change, method = _STORED[family.stored]
        tensors = {new: value for key, tensor in tensors.items() for new, value in change(key, tensor).items()}
        config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": method}))
    save_file(tensors, file, metadata={"format": "pt"})
    if family.sees:
        (directory / "preprocessor_config.json").write_text('{"image_processor_type": "none"}\n')
    return directory


def load(family: Family, directory: Path, **more: Any) -> Any:
    """Return transformers' own model of a directory in fp32, of values that it dequantises."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(directory)
    quantised = getattr(config, "quantization_config", None)
    if quantised is not None:
        config.quantization_config = quantised | {"dequantize": True}
    return _class(family).from_pretrained(
        directory, config=config, dtype=torch.float32, experts_implementation="eager", **more
    )


def text_inputs(family: Family, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the arguments of transformers' model for tokens without an image."""
    kinds = {"gemma3": "token_type_ids", "gemma4": "mm_token_type_ids"}
    more = {kinds[family.model_type]: torch.zeros_like(ids)} if family.model_type in kinds else {}
    return {"input_ids": ids, **more}


def image_inputs(family: Family) -> dict[str, torch.Tensor]:
    """Return the arguments of transformers' model for text around an image of four tokens."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(3, 2048, (1, 14), generator=generator)
    ids[0, 4], ids[0, 5:9], ids[0, 9] = BEGIN, IMAGE, END
    seen = (ids == IMAGE).long()
    inputs = {"input_ids": ids}
    match family.model_type:
        case "qwen3_5" | "qwen3_5_moe" | "qwen3_vl":
            inputs |= {"mm_token_type_ids": seen.int(), "image_grid_thw": torch.tensor([[1, 4, 4]])}
            shape = (16, 3 * 2 * 4 * 4)
        case "gemma3":
            inputs |= {"token_type_ids": seen}
            shape = (1, 3, 28, 28)
        case "gemma4":
            grid = torch.stack(torch.meshgrid(torch.arange(6), torch.arange(6), indexing="xy"), -1)
            inputs |= {"mm_token_type_ids": seen, "image_position_ids": grid.reshape(1, 36, 2)}
            shape = (1, 36, 3 * 4 * 4)
        case "mistral3":
            inputs |= {"image_sizes": torch.tensor([[56, 56]])}
            shape = (1, 3, 56, 56)
        case _:
            shape = (1, 3, 56, 56)
    return inputs | {"pixel_values": torch.rand(shape, generator=generator)}
