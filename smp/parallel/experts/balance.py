"""How tokens are spread over experts: losses, a bias of the selection or another selection, and the counts.

None depends on the layout: counts are integers, summed over the ranks with tokens of the same sequence or of the
batch, and the losses are linear in the probabilities of a rank's tokens, so that gradients sum up without a
collective of their own. A loss that is a mean over tokens is multiplied by them, as it joins their sum of losses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from smp.axes import AXES
from smp.config import ParallelConfig
from smp.mesh import Mesh, Role
from smp.models.experts import expert_modules
from smp.models.meta_model import meta_model
from smp.parallel.experts.config import ExpertsConfig
from smp.parallel.experts.dispatch import count
from smp.parallel.experts.selection import CHOOSE, replace
from smp.parallel.technique import Setup

_BALANCE, _LAYER = "_smp_balance", "_smp_layer"
_BIAS = "e_score_correction_bias"


class Noted(NamedTuple):
    """What a forward decided for a rank's tokens of ``(batch, sequence)``.

    Attributes:
        chosen: ``(batch, experts)``, int64: its tokens of each sequence that have chosen an expert.
        probabilities: ``(batch, experts)``, sums over its tokens of each sequence, differentiable.
        z: 0-d, sum over the tokens, differentiable.
    """

    chosen: torch.Tensor
    probabilities: torch.Tensor
    z: torch.Tensor


def router_of(block: nn.Module, experts: Any) -> nn.Module | None:
    """Return the router beside experts: the module with a row of its matrix for each expert, and ``top_k``."""
    size = experts.down_proj.shape[0]
    for module in block.children():
        rows = [parameter.shape[0] for parameter in module.parameters(recurse=False) if parameter.dim() == 2]
        if hasattr(module, "top_k") and rows == [size]:
            return module
    return None


def bias_of(router: nn.Module | None) -> torch.Tensor | None:
    """Return the buffer that is added to a router's scores for the selection alone."""
    return None if router is None else dict(router.named_buffers(recurse=False)).get(_BIAS)


def _runs_forward(module: nn.Module) -> bool:
    """Return whether a forward of training runs, and not its recomputation, which is part of backward."""
    return module.training and torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1


class Layer:
    """The router and experts of a layer, and what their last forward noted.

    Attributes:
        counts: ``(experts,)``, int64: this rank's tokens for each expert.
        noted: with a loss.
    """

    def __init__(self, block: nn.Module, experts: Any, config: ExpertsConfig, parts: Role):
        self._parts = parts  # of the tokens of a batch
        self.experts: int = experts.down_proj.shape[0]
        self.router = cast(Any, router_of(block, experts))
        self.top_k: int = getattr(self.router, "top_k", 0)
        self.counts: torch.Tensor | None = None
        self.noted: Noted | None = None
        self._batch = 1
        setattr(experts, _LAYER, self)
        if config.method in CHOOSE:
            replace(self.router, CHOOSE[config.method], self.experts, lambda: self._batch)
        if config.adds_loss or config.method in CHOOSE:
            block.register_forward_pre_hook(self._note_batch, with_kwargs=True)
        if config.adds_loss:
            # DeepSeek-V3's affinities are normalised sigmoids.
            self._is_sigmoid = "sigmoid" in type(self.router).forward.__code__.co_names
            self.router.register_forward_hook(self._note)

    def _note_batch(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = next(each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor))
        self._batch = len(hidden)

    def _note(self, router: nn.Module, _: Any, output: tuple[torch.Tensor, ...]) -> None:
        logits, _, index = output
        if not router.training:
            return
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        scores = logits.sigmoid() if self._is_sigmoid else logits.softmax(-1)
        probabilities, index = (scores / scores.sum(-1, keepdim=True)).flatten(0, -2), index.flatten(0, -2)
        tokens = len(probabilities)
        # Tensor parallelism splits the tokens of all sequences, one after another, whatever the shape.
        positions = torch.arange(tokens, device=index.device) + self._parts.rank * tokens
        sequences = positions // (tokens * self._parts.size // self._batch)
        # Recomputed with the block, and so computed there again.
        zeros = probabilities.new_zeros(self._batch, self.experts)
        z, probabilities = logits.logsumexp(-1).square().sum(), zeros.index_add(0, sequences, probabilities)
        if _runs_forward(router):
            flat = (index + sequences.unsqueeze(1) * self.experts).view(-1)
            chosen = count(flat, self._batch * self.experts).view(self._batch, -1)
            self.noted = Noted(chosen, probabilities, z)


def note_counts(experts: nn.Module, counts: torch.Tensor) -> None:
    """Note this rank's tokens for each expert, ``(experts,)`` int64, of a forward of training."""
    layer: Layer | None = getattr(experts, _LAYER, None)
    if layer is not None and _runs_forward(experts):
        layer.counts = counts


def _sum(tensors: Sequence[torch.Tensor], roles: Sequence[Role]) -> list[torch.Tensor]:
    """Return the sums over ranks of tensors, by one collective for each role."""
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    for role in roles:
        if role.size > 1:
            dist.all_reduce(flat, group=role.group)
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]


class Balance:
    """The layers of a model, and the counts of its last step."""

    def __init__(self, layers: list[Layer], config: ExpertsConfig, mesh: Mesh, parts: Role):
        self._layers, self._config = layers, config
        # Ranks of other tokens: of the same sequences, and of the global batch.
        self._of_sequence, self._of_batch = (mesh.cp, parts), (mesh.loss, parts)
        self._counts: list[torch.Tensor] = []  # (experts,) of each layer, of this rank until they are summed
        self._is_summed, self._has_ended = True, True

    def follow_forward(self) -> torch.Tensor | None:
        """Add the counts of a forward to those of the step; returns what it adds to the sum of losses, 0-d."""
        counts = [layer.counts for layer in self._layers if layer.counts is not None]
        if len(counts) < len(self._layers):
            return None
        if self._has_ended:
            self._counts, self._is_summed, self._has_ended = counts, False, False
        else:
            self._counts = [old + new for old, new in zip(self._counts, counts, strict=True)]
        noted = [layer.noted for layer in self._layers if layer.noted is not None]
        for layer in self._layers:
            layer.counts = layer.noted = None
        return self._loss(noted) if noted else None

    def _loss(self, noted: list[Noted]) -> torch.Tensor:
        method, factor = self._config.method, self._config.moe_aux_loss_coeff
        found = self._config.moe_z_loss_coeff * torch.stack([each.z for each in noted]).sum()
        if method == "sequence":
            found = found + factor * self._sequence_loss(noted)
        elif method == "aux_loss":
            found = found + factor * self._batch_loss(noted)
        return found

    def _sequence_loss(self, noted: list[Noted]) -> torch.Tensor:
        """Return DeepSeek-V3's complementary loss, summed over layers and over sequences, each times its tokens.

        Source: DeepSeek-V3 Technical Report, arXiv:2412.19437, equations 17 to 20.
        """
        chosen = _sum([each.chosen for each in noted], self._of_sequence)
        shares = [each / each.sum(-1, keepdim=True) for each in chosen]
        terms = zip(self._layers, shares, noted, strict=True)
        return torch.stack([layer.experts * (share * each.probabilities).sum() for layer, share, each in terms]).sum()

    def _batch_loss(self, noted: list[Noted]) -> torch.Tensor:
        """Return this rank's part of the loss over the tokens of all layers and of the global batch, times its tokens.

        Source: transformers' ``load_balancing_loss_func``, which pools the layers, too.
        """
        (chosen,) = _sum([torch.stack([each.chosen.sum(0) for each in noted]).sum(0)], self._of_batch)
        probabilities = torch.stack([each.probabilities.sum(0) for each in noted]).sum(0)
        # Choices of a token in all layers, divided by their number once for each of the two means.
        factor = self._layers[0].experts * self._layers[0].top_k / len(noted)
        return factor * (chosen / chosen.sum() * probabilities).sum()

    def update_biases(self, skipped: torch.Tensor) -> None:
        """Raise the biases of experts with fewer tokens than the mean, and lower those of others; collective.

        Source: Wang et al., Auxiliary-Loss-Free Load Balancing, arXiv:2408.15664.
        """
        for layer, counts in zip(self._layers, self.counts(), strict=True):
            bias = cast(torch.Tensor, bias_of(layer.router))
            direction = (counts.sum() - len(counts) * counts).sign() * ~skipped  # of integers: exact
            bias.add_(direction.to(bias.dtype), alpha=self._config.moe_bias_update_rate)

    def counts(self) -> list[torch.Tensor]:
        """Return the global batch's tokens of the step for each expert, by layer; collective, once a step."""
        if not self._is_summed:
            self._counts, self._is_summed = _sum(self._counts, self._of_batch), True
        return self._counts

    def end_step(self, skipped: torch.Tensor) -> None:
        """Update the biases, if that is asked for; the next forward counts anew."""
        if self._config.method == "bias":
            self.update_biases(skipped)
        self._has_ended = True


def follow(model: nn.Module, modules: list[tuple[str, Any]], setup: Setup) -> None:
    """Note what routers decide, for the balance that is asked for, and for the metrics."""
    config = setup.settings[ExpertsConfig]
    parts = setup.mesh.tp if setup.settings[ParallelConfig].sequence_parallel else Role(1)
    layers = [Layer(model.get_submodule(path.rpartition(".")[0]), experts, config, parts) for path, experts in modules]
    setattr(model, _BALANCE, Balance(layers, config, setup.mesh, parts))


def extra_loss(model: nn.Module, setup: Setup) -> torch.Tensor | None:
    """Return the losses of the balance, of this rank's tokens."""
    balance: Balance | None = getattr(model, _BALANCE, None)
    return None if balance is None else balance.follow_forward()


def after_update(model: nn.Module, setup: Setup, skipped: torch.Tensor) -> None:
    """Update the biases of the selection."""
    balance: Balance | None = getattr(model, _BALANCE, None)
    if balance is not None:
        balance.end_step(skipped)


def metrics(model: nn.Module, setup: Setup) -> dict[str, torch.Tensor]:
    """Return the tokens per layer and expert, ``(layers, experts)``, the entropy of their shares and the largest share.

    The entropy is the mean over layers, as a part of that of equal shares.
    """
    balance: Balance | None = getattr(model, _BALANCE, None)
    counts = balance.counts() if balance is not None else []
    if not counts:
        return {}
    shares = [each / each.sum().clamp(min=1) for each in counts]
    entropies = [-torch.special.xlogy(each, each).sum() / math.log(max(len(each), 2)) for each in shares]
    return {
        "experts/tokens": pad_sequence(counts, batch_first=True),
        "experts/entropy": torch.stack(entropies).mean(),
        "experts/busiest_share": torch.stack([each.max() for each in shares]).max(),
    }


def problems(hf_config: Any, setup: Setup) -> list[str]:
    """Return why the balance that is asked for does not fit a model."""
    config = setup.settings[ExpertsConfig]
    if config.method == "none" and not config.adds_loss:
        return []
    model = meta_model(hf_config).model
    modules = expert_modules(model)
    flag = config.adds_loss if config.method == "none" else f"--moe_load_balancing {config.method}"
    if not modules:
        return [f"{flag}: a model of type {hf_config.model_type!r} has no experts that are known here: leave it out"]
    routers = [router_of(model.get_submodule(path.rpartition(".")[0]), module) for path, module in modules]
    if None in routers:
        return [f"{flag}: the routers of {hf_config.model_type!r} are of a kind that is not known here: leave it out"]
    if config.method == "bias" and any(bias_of(router) is None for router in routers):
        return [
            f"{flag}: models of type {hf_config.model_type!r} have no {_BIAS}, so that the export would lose it: use "
            f"--moe_load_balancing sequence"
        ]
    degree = next((f"--{a.flag} {n}" for a in AXES if not a.over and (n := setup.mesh.degree(a.name)) > 1), None)
    if config.method in CHOOSE and degree:
        return [f"{flag} looks at a whole sequence, which {degree} splits: use --moe_load_balancing sequence"]
    return []
