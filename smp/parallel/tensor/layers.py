"""Tensor-parallel ``forward`` of Hugging Face's modules.

Modules and parameter names stay; the parameters become DTensors over the tensor-parallel mesh, and the new ``forward``
computes with their local tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from smp.errors import UserError
from smp.local_shards import local_tensor
from smp.loss import check_ids
from smp.parallel.linear import PLAIN, Linears, Product, by_rows, linear, product_of, product_of_call
from smp.parallel.tensor.functions import (
    GatherTokens,
    ReducePartial,
    SumGradients,
    gathered_linears,
    reduced_linear,
)
from smp.parallel.tensor.fused import RedistributeRows, RowRedistribution, SumOverRanks
from smp.parallel.tensor.group import TPGroup
from smp.parallel.token_rows import bias_at, rows_of, with_rows


class Replicated(NamedTuple):
    """A parameter that is replicated over the ranks."""

    module: nn.Module
    name: str
    summed: bool  # whether its gradient is the sum of the ranks'


def compute_with(
    module: nn.Module, tensors: Callable[[], dict[str, torch.Tensor | None]], caller: nn.Module | None = None
) -> None:
    """Let tensors replace a module's parameters, by name, during its ``forward``, or that of ``caller``."""
    caller = caller or module
    forward = caller.forward

    def with_local(*args: Any, **kwargs: Any) -> Any:
        local = tensors()
        own = {name: module._parameters[name] for name in local}
        module._parameters.update(local)  # type: ignore[arg-type]
        try:
            return forward(*args, **kwargs)
        finally:
            module._parameters.update(own)

    caller.forward = with_local  # type: ignore[method-assign]


class ReplicatedParams:
    """Replicated parameters of a block.

    A rank with some of the tokens or heads computes a partial gradient of such a parameter. One collective sums the
    partial gradients of the block: inside :meth:`open`, modules compute with tensors whose backward does.
    """

    def __init__(self, tp: TPGroup, params: Iterable[Replicated]):
        self.tp, self.params = tp, list(params)
        self._now: list[torch.Tensor | None] = []

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Make the tensors for one forward of the block."""
        tensors = [local_tensor(getattr(h.module, h.name)) for h in self.params]
        summed = [i for i, h in enumerate(self.params) if h.summed and tensors[i].requires_grad]  # type: ignore[union-attr]
        if summed and torch.is_grad_enabled():
            for i, tensor in zip(summed, SumGradients.apply(self.tp, *(tensors[i] for i in summed)), strict=True):
                tensors[i] = tensor
        self._now = tensors
        try:
            yield
        finally:
            self._now = []

    def index_of(self, module: nn.Module, name: str) -> int | None:
        """Return a parameter's index in ``params``, or None; ``torch.compile`` needs equal code in all blocks."""
        return next((i for i, h in enumerate(self.params) if h.module is module and h.name == name), None)

    def tensor(self, index: int) -> torch.Tensor | None:
        """Return the tensor to compute with; only inside :meth:`open`."""
        if not self._now:
            raise UserError(
                "tensor parallelism cannot recompute a block without what it has put around it: call "
                "apply_activation_checkpointing after smp.transform or smp.parallelize, for whole blocks"
            )
        return self._now[index]

    def compute_with(self, module: nn.Module, caller: nn.Module | None = None) -> None:
        """Let a module compute with them, or a caller that reads its parameters itself."""
        indices = {h.name: i for i, h in enumerate(self.params) if h.module is module}
        compute_with(module, lambda: {name: self.tensor(i) for name, i in indices.items()}, caller)

    def surround(self, module: nn.Module) -> None:
        """Wrap a module's forward in :meth:`open`."""
        forward = module.forward

        def opened(*args: Any, **kwargs: Any) -> Any:
            with self.open():
                return forward(*args, **kwargs)

        module.forward = opened  # type: ignore[method-assign]


class ColumnParallel:
    """Linear layers of one input, split by their outputs; the first one called computes all of them.

    Args:
        slices: of a layer with a replicated weight or bias, the rows that this rank computes.
        redistributions: of a fused layer, how the rows of its weight come here.
        inner: layers that read something else, which layers that are not split make of the input.
        shared: whether other layers read the input, too.
    """

    def __init__(
        self, tp: TPGroup, linears: list[nn.Linear], slices: Mapping[int, Any],
        redistributions: Mapping[int, RowRedistribution], replicated: ReplicatedParams, *,
        inner: Collection[int] = (), shared: bool = False,
    ):  # fmt: skip
        self.tp, self.linears, self.slices, self.replicated = tp, linears, slices, replicated
        self.redistributions, self.shared = redistributions, shared
        self._outer = [index for index in range(len(linears)) if index not in inner]
        self._names = [("weight", "bias", *product_of(layer).own) for layer in linears]
        self._indices = [
            {name: replicated.index_of(layer, name) for name in names}
            for layer, names in zip(linears, self._names, strict=True)
        ]
        self._gathered: torch.Tensor | None = None
        self._part: torch.Tensor | None = None
        self._outputs: dict[int, torch.Tensor] = {}
        self._products: tuple[Product, ...] = ()
        for index, layer in enumerate(linears):
            of_input = index in self._outer
            layer.forward = self._forward_of(index) if of_input else self._inner_forward_of(index)  # type: ignore[method-assign,assignment]

    def _forward_of(self, index: int) -> Callable[[torch.Tensor], torch.Tensor]:
        # Not functools.partial, for which torch.compile would compile every block anew.
        return lambda x: self._output(index, x)

    def _inner_forward_of(self, index: int) -> Callable[[torch.Tensor], torch.Tensor]:
        # The gradient of x is partial: so are those of the layers before, and of the input.
        return lambda x: linear(self.linears[index], x, *self._of_layer(index))  # type: ignore[arg-type]

    @contextlib.contextmanager
    def input(self, part: torch.Tensor) -> Iterator[torch.Tensor]:
        """Gather the input of all tokens, for the layers and other readers."""
        tp = self.tp
        self._part = part
        # Before the part forks the generators: of their common input the ranks draw the same.
        self._products = tuple(product_of_call(self.linears[index]) for index in self._outer)
        if tp.overlap and self._outer:
            self._gathered, outputs = gathered_linears(tp, self._products, part, self._parameters())
            self._outputs = dict(zip(self._outer, outputs, strict=True))
        elif tp.sequence_parallel:
            self._gathered = GatherTokens.apply(part, tp)
        else:
            self._gathered = SumGradients.apply(tp, part)[0] if self.shared else part
        try:
            yield self._gathered  # type: ignore[misc]
        finally:
            self._gathered = self._part = None
            self._outputs, self._products = {}, ()

    def _parameter(self, index: int, name: str) -> torch.Tensor | None:
        replica, layer = self._indices[index][name], self.linears[index]
        own = local_tensor(getattr(layer, name)) if replica is None else self.replicated.tensor(replica)
        tensor = by_rows(layer, own) if name == "weight" else own
        if replica is not None and product_of(layer).own.get(name, "outputs") == "outputs":
            return tensor[self.slices[index]]  # type: ignore[index]
        redistributed = name == "weight" and index in self.redistributions
        return RedistributeRows.apply(tensor, self.redistributions[index]) if redistributed else tensor

    def _of_layer(self, index: int) -> list[torch.Tensor | None]:
        return [self._parameter(index, name) for name in self._names[index]]

    def _parameters(self) -> list[list[torch.Tensor | None]]:
        return [self._of_layer(index) for index in self._outer]

    def _output(self, index: int, x: torch.Tensor) -> torch.Tensor:
        if x is not self._gathered:
            name = type(self.linears[index]).__name__
            raise RuntimeError(f"a {name} split by columns was called with something else than its part's input")
        if index not in self._outputs:
            flat = [tensor for own in self._parameters() for tensor in own]
            outputs = Linears.apply(self.tp, self._products, x.detach(), self._part, *flat)
            self._outputs = dict(zip(self._outer, outputs, strict=True))
        return self._outputs.pop(index)


def split_part(
    tp: TPGroup,
    module: nn.Module,
    columns: ColumnParallel,
    row: nn.Linear,
    replicated: ReplicatedParams,
    *,
    random: bool,
) -> None:
    """Let a part of a block gather its input, compute its columns, and reduce its output.

    Args:
        random: whether the part draws random numbers, which must differ between ranks.
    """
    forward, bias = module.forward, replicated.index_of(row, "bias")
    own = {name: replicated.index_of(row, name) for name in product_of(row).own}
    fork = random and not tp.sequence_parallel
    forked = contextlib.ExitStack()

    def computed(*args: Any, **kwargs: Any) -> Any:
        named = "hidden_states" in kwargs
        part = kwargs["hidden_states"] if named else args[0]
        with columns.input(part) as gathered:
            args, kwargs = (args, {**kwargs, "hidden_states": gathered}) if named else ((gathered, *args[1:]), kwargs)
            if not (fork and module.training):
                return forward(*args, **kwargs)
            with forked:
                forked.enter_context(tp.fork_random(part.device))
                return forward(*args, **kwargs)

    def reduced(x: torch.Tensor) -> torch.Tensor:
        if fork:
            forked.close()  # what follows is the same on all ranks
        weight = by_rows(row, local_tensor(row.weight))
        others = [local_tensor(getattr(row, n)) if i is None else replicated.tensor(i) for n, i in own.items()]
        if tp.overlap:
            out = reduced_linear(tp, product_of_call(row, tp.rank), x, weight, *others)  # type: ignore[arg-type]
        else:
            out = ReducePartial.apply(linear(row, x, weight, None, *others, part=tp.rank), tp)  # type: ignore[arg-type]
        return out if bias is None else out + replicated.tensor(bias)  # type: ignore[operator]

    module.forward = computed  # type: ignore[method-assign]
    row.forward = reduced  # type: ignore[method-assign,assignment]


def compute_all_tokens(tp: TPGroup, module: nn.Module) -> None:
    """Let a module that is not split compute the tokens of all ranks, and return this rank's of its hidden states."""
    forward = module.forward

    def computed(*args: Any, **kwargs: Any) -> Any:
        if "hidden_states" in kwargs:
            found = forward(*args, **{**kwargs, "hidden_states": GatherTokens.apply(kwargs["hidden_states"], tp)})
        else:
            found = forward(GatherTokens.apply(args[0], tp), *args[1:], **kwargs)
        return (own_tokens(tp, found[0]), *found[1:]) if isinstance(found, tuple) else own_tokens(tp, found)

    module.forward = computed  # type: ignore[method-assign]


def own_tokens(tp: TPGroup, hidden: torch.Tensor) -> torch.Tensor:
    """Return this rank's tokens of ``(batch, sequence, width)``."""
    batch, length, width = hidden.shape
    return hidden.reshape(tp.size, batch, length // tp.size, width)[tp.rank]


def split_embedding(tp: TPGroup, embedding: nn.Embedding, *, full_sequence: bool) -> None:
    """Let an embedding look up this rank's rows of the vocabulary.

    Args:
        full_sequence: return all tokens with sequence parallelism, too; then the ranks' gradients are partial.
    """
    first, last = tp.bounds(embedding.num_embeddings)
    padding = embedding.padding_idx
    forward = embedding.forward  # which may be a model's own, as one that scales
    own_padding = padding - first if padding is not None and first <= padding < last else None

    def look_up(ids: torch.Tensor) -> torch.Tensor:
        check_ids(ids, embedding.num_embeddings)  # which no rank would have, and all look up as zeros
        foreign = (ids < first) | (ids >= last)
        weight = embedding._parameters["weight"]
        embedding._parameters["weight"] = local_tensor(weight)  # type: ignore[type-var,assignment]
        embedding.padding_idx = own_padding
        try:
            found = forward((ids - first).masked_fill(foreign, 0)).masked_fill(foreign.unsqueeze(-1), 0)
        finally:
            embedding._parameters["weight"], embedding.padding_idx = weight, padding
        return (
            SumOverRanks.apply(found, tp) if full_sequence and tp.sequence_parallel else ReducePartial.apply(found, tp)
        )

    embedding.forward = look_up  # type: ignore[method-assign,assignment]


def split_head(tp: TPGroup, head: nn.Linear, *, full_sequence: bool) -> None:
    """Let the head compute this rank's columns of the logits, of all tokens.

    Args:
        full_sequence: its input is of all tokens with sequence parallelism, too; then each rank's gradient of it is
            partial.
    """

    def logits(part: torch.Tensor) -> torch.Tensor:
        own = local_tensor(head.weight), local_tensor(head.bias)
        if full_sequence and tp.sequence_parallel:
            return with_rows(head, part, linear(head, part, *own))
        gathered = GatherTokens.apply(part, tp) if tp.sequence_parallel else part
        if (rows := rows_of(head)) is None:
            return Linears.apply(tp, (product_of(head),), gathered.detach(), part, *own)[0]
        indices, values = rows.columns()
        both, trained = (product_of(head), PLAIN), (values, bias_at(head, indices))
        found, columns = Linears.apply(tp, both, gathered.detach(), part, *own, *trained)
        return found.index_copy(-1, indices, columns)

    head.forward = logits  # type: ignore[method-assign,assignment]


def enter_with_own_tokens(tp: TPGroup, block: nn.Module) -> None:
    """Let the first block take this rank's tokens of the hidden states of all."""
    forward = block.forward

    def entered(*args: Any, **kwargs: Any) -> Any:
        if "hidden_states" in kwargs:
            return forward(*args, **{**kwargs, "hidden_states": own_tokens(tp, kwargs["hidden_states"])})
        return forward(own_tokens(tp, args[0]), *args[1:], **kwargs)

    block.forward = entered  # type: ignore[method-assign]


def leave_with_all_tokens(tp: TPGroup, block: nn.Module, left: Callable[[], object]) -> None:
    """Let the last block return the hidden states of all tokens.

    Args:
        block: its output is hidden states, or a tuple that begins with them.
        left: called at its end.
    """
    forward = block.forward

    def gathered(*args: Any, **kwargs: Any) -> Any:
        found = forward(*args, **kwargs)
        left()
        if isinstance(found, tuple):
            return GatherTokens.apply(found[0], tp), *found[1:]
        return GatherTokens.apply(found, tp)

    block.forward = gathered  # type: ignore[method-assign]
