"""Adapters of a checkpoint: in peft's format, or added to the weights of their base model."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from smp.checkpoint.base import NF4, is_base_of, weights_at
from smp.checkpoint.lora_merge import Read, merging, reader_of, stored
from smp.checkpoint.manifest import Manifest, TensorEntry
from smp.cli.find import refuse_links_out
from smp.cli.output import shown
from smp.errors import UserError
from smp.json_input import strict_json
from smp.models.added import AddedParameter, Apart
from smp.models.experts import is_experts
from smp.models.file_names import buffers_of
from smp.models.registry import build_model, family_of
from smp.models.text_part import require_whole
from smp.models.weight_files import ADAPTER_CONFIG, directory_of, weight_map
from smp.parallel.adapter_config import WEIGHTS, saved_settings
from smp.parallel.adapter_files import names_beside
from smp.parallel.expert_adapters import factor_names, in_files, is_factor, parameter_of
from smp.parallel.linear import is_transposed
from smp.parallel.lora import Adapter, Config, linear_layers
from smp.parallel.token_rows import ROWS

MODEL = "model."


@dataclasses.dataclass(frozen=True)
class SavedAdapter:
    """The low-rank adapters of a checkpoint.

    Attributes:
        config: as peft writes it, JSON.
        scale: of the factors' product.
        factors: their tensors by qualified name, with trained rows of the embedding and the head.
        modules: the model's own parameters that are trained beside them.
        tokens: of the trained rows, in order, by the path of the module.
        is_quantised: whether they were trained beside weights in 4 bits.
    """

    path: Path | str
    config: str
    scale: float
    factors: Mapping[str, TensorEntry]
    modules: Mapping[str, TensorEntry]
    tokens: Mapping[str, list[int]]
    is_quantised: bool

    @property
    def has_experts(self) -> bool:
        """Whether some are of experts, which servers leave out."""
        return any(map(is_factor, self.factors))

    @property
    def saved(self) -> set[str]:
        """Names of the factors and rows in the checkpoint."""
        return {MODEL + name for name in self.factors}

    @property
    def dtype(self) -> torch.dtype:
        """Dtype that the factors are trained in."""
        return next(iter(self.factors.values())).dtype

    def alone(self, hf_config: Any) -> tuple[dict[str, torch.Tensor], dict[str, AddedParameter]]:
        """Return the factors on the meta device, and where they are exported to, given the base model's config."""
        base = json.loads(self.config).get("base_model_name_or_path")
        if base is not None and not Path(base).is_dir():
            require_whole(hf_config, None, base)
        names = in_files(names_beside(base, family_of(hf_config)), filter(is_factor, self.factors))
        apart = Apart(WEIGHTS, {ADAPTER_CONFIG: self.config}, names)
        exported, added = {**self.factors, **self.modules}, {}
        for name, entry in exported.items():
            module, _, own = name.rpartition(".")
            added[name] = AddedParameter(module, own, entry.shape, apart=apart)
        return {n: torch.empty(e.shape, dtype=e.dtype, device="meta") for n, e in exported.items()}, added

    def merged(self, hf_config: Any, weights: Path | None, read: Read) -> tuple[dict[str, torch.Tensor], Read]:
        """Return the model's parameters on the meta device, and what makes one with its adapter added.

        Args:
            hf_config: of the base model.
            weights: of the base model; None: the checkpoint has them.
            read: returns a tensor of the checkpoint by name.

        Raises:
            UserError: the weights, or the adapters, are not those of the model.
        """
        with torch.device("meta"):
            model = build_model(hf_config, attn_implementation="eager")
        self._check(model)
        read_merged = read_stored = lambda name: stored(read(name), self.dtype)
        if weights is not None:
            layers = linear_layers(model, family_of(hf_config)) if self.is_quantised else {}
            quantised = {f"{path}.weight" for path in layers}
            read_merged = reader_of(model, weights, self.dtype, quantised, read_stored, trained=self.modules)
        tensors = {**dict(model.named_parameters()), **dict(buffers_of(model))}
        parameters = {name: stored(tensor, self.dtype) for name, tensor in tensors.items()}
        return parameters, merging(model, self.factors, self.scale, read_merged, self.tokens)

    def _check(self, model: torch.nn.Module) -> None:
        modules = dict(model.named_modules())
        for name, entry in self.factors.items():
            path, _, own = name.rpartition(".")
            if own == ROWS:
                weight = getattr(modules.get(path), "weight", None)
                if weight is None or entry.shape != (len(self.tokens.get(path, ())), *weight.shape[1:]):
                    raise self._misfit(name)
                continue
            layer: Any = modules.get(path)
            names, weight, dim = tuple(Adapter.own), getattr(layer, "weight", None), 2
            if is_factor(own):
                names, dim = factor_names(parameter_of(own)), 3
                weight = layer._parameters.get(parameter_of(own)) if is_experts(layer) else None
            a, b = (self.factors.get(f"{path}.{factor}") for factor in names)
            if a is None or b is None or weight is None or weight.dim() != dim:
                raise self._misfit(name)
            swapped = layer.is_transposed if dim == 3 else is_transposed(layer)
            *count, outputs, inputs = weight.mT.shape if swapped else weight.shape
            rank = a.shape[-2:][0]
            if a.shape != (*count, rank, inputs) or b.shape != (*count, outputs, rank):
                raise self._misfit(name)

    def _misfit(self, name: str) -> UserError:
        return UserError(
            f"checkpoint {self.path} does not contain the adapters of the model it describes: {shown(name)} fits no "
            f"layer of it"
        )


def adapter_of(path: Path | str, manifest: Manifest) -> SavedAdapter | None:
    """Return the adapters that a checkpoint has.

    Raises:
        UserError: it does not say what they are.
    """
    saved = {name.removeprefix(MODEL): entry for name, entry in manifest.tensors.items() if name.startswith(MODEL)}
    factors = {
        name: entry
        for name, entry in saved.items()
        if name.rpartition(".")[2] in {*Adapter.own, ROWS} or (is_factor(name) and len(entry.shape) == 3)
    }
    if not factors:
        return None
    try:
        text = manifest.model["apart"][WEIGHTS][ADAPTER_CONFIG]
        settings = Config(**(saved_settings(manifest.model) or {}))
        if not math.isfinite(scale := settings.scale):
            raise ValueError(f"a scale of {scale}")
        modules, tokens = _beside(strict_json(text.encode()), saved, factors)
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise UserError(
            f"checkpoint {path} does not say how its adapters are scaled ({error}): resume it, and the run exports "
            f"them when it ends"
        ) from error
    is_quantised = str(manifest.model.get("base")).startswith(NF4)
    return SavedAdapter(path, text, scale, factors, modules, tokens, is_quantised)


def _beside(
    config: Mapping[str, Any], saved: Mapping[str, TensorEntry], factors: Mapping[str, TensorEntry]
) -> tuple[dict[str, TensorEntry], dict[str, list[int]]]:
    """Return the modules that are trained beside the factors, and the tokens of rows by the path of their module."""
    names = tuple(f"{name}." for name in config.get("modules_to_save") or ())
    modules = {n: entry for n, entry in saved.items() if n not in factors and any(name in n for name in names)}
    indices = config.get("trainable_token_indices") or {}
    if isinstance(indices, list):  # of the embedding, and of the head that is tied to it
        indices = {name.rpartition(".")[0]: indices for name in factors if name.endswith(f".{ROWS}")}
    return modules, {path: list(map(int, ids)) for path, ids in indices.items()}


def base_of(path: Path | str, manifest: Manifest, given: str | None) -> Path | None:
    """Return the weights of the base model; None: the checkpoint has them.

    Args:
        given: by ``--base``; None: where the run had them.

    Raises:
        UserError: they are not there, or others than the checkpoint was made with.
    """
    digest, base = manifest.model.get("base"), given or manifest.model.get("weights")
    if digest is None:
        if "frozen" in manifest.model:
            raise UserError(
                f"checkpoint {path} does not contain the weights in 4 bits that its adapters were trained with, and "
                f"does not say where they are: leave out --merge, which exports the adapters alone"
            )
        if given is not None:
            raise UserError(f"--base {given}: checkpoint {path} contains all weights itself: leave it out")
        return None
    if (weights := weights_at(base)) is None:
        where = "" if base is None else f" at {shown(base)}"
        raise UserError(
            f"the base model of checkpoint {path} is not there{where}: give its directory by --base DIR, or "
            f"leave it out with --no-merge"
        )
    if given is None:
        refuse_links_out(directory_of(weights) or weights, set(weight_map(weights).values()), path)
    if not is_base_of(manifest, weights):
        raise UserError(
            f"checkpoint {path} was made with other pretrained weights than {base} contains: give those by --base DIR"
        )
    return weights
