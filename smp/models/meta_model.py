"""The model of a config on the meta device, which is asked for facts about it: built once in a process."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from smp.models.attention_support import default_attention
from smp.models.family import Family
from smp.models.init_rules import InitRule, Recorded, record_rules
from smp.models.parameters import ParameterTable, parameter_table
from smp.models.registry import build_model, family_of, model_key
from smp.models.saved import saved_bytes

# Of those built last, so many are kept: of the config that flags describe, and of the one that they change.
_KEPT = 4


class MetaModel:
    """A model without values, for questions.

    Attributes:
        model: on the meta device; it is shared, and not to be changed.
        family: of its architecture.
        table: of its parameters.
    """

    def __init__(self, recorded: Recorded, family: Family):
        self.model, self.family, self.recorded = recorded.model, family, recorded
        self.table: ParameterTable = parameter_table(self.model, family)

    @property
    def blocks(self) -> list[nn.Module]:
        """The transformer blocks, in order."""
        return list(self.model.get_submodule(self.family.blocks).children())

    @property
    def largest_block(self) -> nn.Module:
        """The first block that has most parameters."""
        return max(self.blocks, key=lambda block: sum(p.numel() for p in block.parameters()))

    @functools.cached_property
    def saved(self) -> tuple[int | None, int | None]:
        """Bytes that the largest block saves of each token for backward, in bf16 and in fp32; None: not known."""
        bf16, fp32 = (saved_bytes(self.model, self.largest_block, d) for d in (torch.bfloat16, torch.float32))
        return bf16, fp32


_models: OrderedDict[tuple[str, str], MetaModel] = OrderedDict()


def meta_model(hf_config: Any, attn_implementation: str | None = None, *, seed: int | None = None) -> MetaModel:
    """Return the causal language model of a config on the meta device.

    Args:
        attn_implementation: as of :func:`smp.models.registry.build_model`.
        seed: of what the model's code draws outside of parameters; None: of no meaning.

    Raises:
        UserError: the architecture is not supported, or not with this attention.
    """
    family = family_of(hf_config)
    key = model_key(hf_config), attn_implementation or default_attention(hf_config)
    found = _models.get(key)
    if found is None or (seed is not None and found.recorded.seed not in (None, seed)):
        build = functools.partial(build_model, hf_config, attn_implementation=attn_implementation)
        # Whatever device the caller's context has: on its meta device, values that rules copy would be lost for all.
        with torch.device("cpu"), unset_fake_temporarily():
            recorded = record_rules(build, seed=seed or 0)
        for module in recorded.model.modules():  # whose values are known by now
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to("meta")
        _models[key] = found = MetaModel(recorded, family)
    _models.move_to_end(key)
    while len(_models) > _KEPT:
        _models.popitem(last=False)
    return found


def count_parameters(hf_config: Any) -> int:
    """Count the parameters of the model, a tied weight once; nothing is allocated."""
    return meta_model(hf_config).table.count()


def init_rules(hf_config: Any, *, seed: int) -> Callable[[str], InitRule]:
    """Return :meth:`smp.models.init_rules.Recorded.rule` of the causal language model of a config."""
    return meta_model(hf_config, seed=seed).recorded.rule
