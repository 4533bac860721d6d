"""Model FLOPs of one token, of which model FLOPs utilisation is the share of a device's peak.

Model FLOPs are those of forward and backward by the mathematics of the model: activations that are recomputed are not
counted twice, and the attention square is counted whole although a causal mask hides half of it, and a sliding window
more (as SMP v2 and Megatron-LM count).
"""

from __future__ import annotations

import dataclasses
from typing import Any

from smp.models.attention_support import number_of
from smp.models.experts import expert_layers
from smp.models.meta_model import meta_model
from smp.models.parameters import ParameterTable
from smp.models.projection import projection_size


@dataclasses.dataclass(frozen=True)
class Flops:
    """FLOPs (a multiply and an add are two) of one token of training, and the formula that gave them.

    Attributes:
        of_token: without attention.
        of_pair: for each token that it attends to.
        sequence_length: tokens that attend to each other.
    """

    of_token: int
    of_pair: int
    sequence_length: int
    formula: str

    @property
    def total(self) -> float:
        """Those of a token in a sequence of full length."""
        return float(self.of(1, self.sequence_length))

    def of(self, tokens: int, pairs: int) -> int:
        """Return the FLOPs of so many tokens, and of pairs of a token and one of its sequence."""
        return self.of_token * tokens + self.of_pair * pairs


def _attention_layers(hf_config: Any) -> int:
    """Count the layers that compute attention scores; recurrent layers and convolutions do not."""
    types = getattr(hf_config, "layer_types", None) or getattr(hf_config, "layers_block_type", None)
    if types is None:
        return hf_config.num_hidden_layers if getattr(hf_config, "num_attention_heads", None) else 0
    return sum(("attention" in kind and kind != "linear_attention") or kind == "hybrid" for kind in types)


def model_flops_per_token(hf_config: Any, sequence_length: int, table: ParameterTable | None = None) -> Flops:
    """Count the model FLOPs of one token of training (forward and backward).

    6 for each weight of a linear layer, which includes the output head (tied or not) and leaves out the embedding, a
    look-up, and of a mixture those of the experts that a token is sent to; and for attention 12 x layers x query heads
    x head width x sequence length. Of a frozen model 4 for each weight, which has no gradient, and 6 for each trained
    one.

    Args:
        sequence_length: tokens that attend to each other.
        table: with what techniques add and freeze; None: they do nothing.

    Raises:
        UserError: the architecture is not supported.

    Source: Chowdhery et al., PaLM, arXiv:2204.02311, appendix B.
    """
    meta = meta_model(hf_config)
    table = table or meta.table
    first = {id(parameter): name for name, parameter in meta.model.named_parameters()}  # the table has a tied one once
    sizes = ((module._parameters.get("weight"), projection_size(module)) for module in meta.model.modules())
    weights = [(first[id(weight)], size[0] * size[1]) for weight, size in sizes if size is not None]
    count, with_gradient = sum(size for _, size in weights), {spec.name for spec in table.trained}
    layers = expert_layers(meta.model)
    shares = {layer.path: (layer.top, layer.experts) for layer in layers}
    routed = sum(layer.top * layer.weights + layer.router for layer in layers)  # of the experts that a token is sent to
    own = sum(size for name, size in weights if name in with_gradient)
    which = "of a token's experts, head included, embedding not" if layers else "head included, embedding not"
    is_trained, count = own == count, count + routed
    if is_trained:
        products, counted = 6 * count, f"6 x {count} matmul weights ({which})"
    else:
        trained = 0  # of factors beside experts those of a token's
        for spec in table:
            top, every = shares.get(spec.name.rpartition(".")[0], (1, 1))
            trained += spec.added * spec.size * top // every
        products = 4 * count + 6 * trained + 2 * own  # a weight's gradient is a product
        counted = f"4 x {count} frozen matmul weights ({which}) + 6 x {trained} trained ones"
        counted += f" + 2 x {own} of the head" if own else ""
    attention, heads = _attention_layers(hf_config), number_of(hf_config, "num_attention_heads") or 1
    head_dim = number_of(hf_config, "head_dim") or hf_config.hidden_size // heads
    formula = (
        f"{counted} + 12 x {attention} layers x {heads} query heads x {head_dim} head width x {sequence_length} tokens "
        f"(full attention square), forward and backward, without recomputation (PaLM, appendix B)"
    )
    return Flops(products, 12 * attention * heads * head_dim, sequence_length, formula)
