"""Hugging Face's modules, made to compute on their rank's part of the weights: their ``forward`` is replaced.

The modules stay what they are, with the parameters' names and places; only the parameters become DTensors over the
tensor-parallel mesh, whose local parts the new ``forward`` uses.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from smp.parallel.linear import has_product, linear
from smp.parallel.tensor.functions import ColumnLinears, GatherTokens, ReducePartial, SumGradients
from smp.parallel.tensor.group import TPGroup


def local(parameter: torch.Tensor | None) -> torch.Tensor | None:
    """This rank's part, with a way back for the gradient."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _columns(
    tp: TPGroup, linears: list[nn.Linear], parameters: list[Any], *, whole: torch.Tensor, part: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """The outputs of column-parallel layers of one input.

    Args:
        tp: the group.
        linears: the layers.
        parameters: of each, this rank's weight and bias.
        whole: the input of all tokens, gathered by :class:`GatherTokens` with sequence parallelism.
        part: the same of this rank's tokens.
    """
    if not any(has_product(layer) for layer in linears):
        weights, biases = zip(*parameters, strict=True)
        return ColumnLinears.apply(tp, len(linears), whole.detach(), part, *weights, *biases)
    # What another product needs for backward is its own affair, so autograd goes through it. The gathered input is kept
    # then, and one exchange adds up the layers' gradients of it.
    if not tp.sequence_parallel:
        (whole,) = SumGradients.apply(tp, part)
    return tuple(linear(layer, whole, *own) for layer, own in zip(linears, parameters, strict=True))


class Replicated(NamedTuple):
    """A parameter that every rank holds whole."""

    module: nn.Module
    name: str
    summed: bool  # whether its gradient on each rank is a part of the sum


class ReplicatedParams:
    """The parameters of a block that every rank holds whole.

    Where a rank has only some of the tokens or heads, it has a part of such a parameter's gradient. The parts are added
    up in one exchange for the whole block: inside :meth:`open`, modules compute with tensors that see to that.
    """

    def __init__(self, tp: TPGroup, params: Iterable[Replicated]):
        self.tp, self.params = tp, list(params)
        self._now: list[torch.Tensor | None] = []

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Around the forward of the block."""
        tensors = [local(getattr(h.module, h.name)) for h in self.params]
        summed = [i for i, h in enumerate(self.params) if h.summed and tensors[i].requires_grad]  # type: ignore[union-attr]
        if summed and torch.is_grad_enabled():
            for i, tensor in zip(summed, SumGradients.apply(self.tp, *(tensors[i] for i in summed)), strict=True):
                tensors[i] = tensor
        self._now = tensors
        try:
            yield
        finally:
            self._now = []

    def place(self, module: nn.Module, name: str) -> int | None:
        """Where a parameter is in ``params``, if it is: by place, blocks are alike to ``torch.compile``."""
        return next((i for i, h in enumerate(self.params) if h.module is module and h.name == name), None)

    def at(self, place: int) -> torch.Tensor | None:
        """What to compute with; only inside :meth:`open`."""
        return self._now[place]

    def compute_with(self, module: nn.Module) -> None:
        """Let a module compute with them: its ``forward`` finds them in the place of its parameters."""
        forward, places = module.forward, {h.name: i for i, h in enumerate(self.params) if h.module is module}

        def with_local(*args: Any, **kwargs: Any) -> Any:
            own = {name: module._parameters[name] for name in places}
            module._parameters.update({name: self.at(place) for name, place in places.items()})  # type: ignore[misc]
            try:
                return forward(*args, **kwargs)
            finally:
                module._parameters.update(own)

        module.forward = with_local  # type: ignore[method-assign]

    def surround(self, module: nn.Module) -> None:
        """Open around a module's forward."""
        forward = module.forward

        def opened(*args: Any, **kwargs: Any) -> Any:
            with self.open():
                return forward(*args, **kwargs)

        module.forward = opened  # type: ignore[method-assign]


class ColumnParallel:
    """Linear layers that read one input, split by their outputs; the first one called computes all of them.

    Args:
        tp: the group.
        linears: the layers.
        slices: for a layer whose weight every rank holds whole, the rows that this rank computes.
        replicated: where such weights are.
    """

    def __init__(self, tp: TPGroup, linears: list[nn.Linear], slices: dict[int, slice], replicated: ReplicatedParams):
        self.tp, self.linears, self.slices, self.replicated = tp, linears, slices, replicated
        self._places = {name: [replicated.place(layer, name) for layer in linears] for name in ("weight", "bias")}
        self._whole: torch.Tensor | None = None
        self._part: torch.Tensor | None = None
        self._outputs: dict[int, torch.Tensor] = {}
        for index, layer in enumerate(linears):
            layer.forward = self._forward_of(index)  # type: ignore[method-assign,assignment]

    def _forward_of(self, index: int) -> Callable[[torch.Tensor], torch.Tensor]:
        # Not functools.partial, which torch.compile takes for another in every block.
        return lambda x: self._output(index, x)

    @contextlib.contextmanager
    def input(self, part: torch.Tensor) -> Iterator[torch.Tensor]:
        """The input of all tokens, for the layers and whatever else reads it."""
        tp = self.tp
        self._part = part
        self._whole = GatherTokens.apply(part, tp) if tp.sequence_parallel else part
        try:
            yield self._whole  # type: ignore[misc]
        finally:
            self._whole = self._part = None
            self._outputs = {}

    def _parameter(self, index: int, name: str) -> torch.Tensor | None:
        place = self._places[name][index]
        if place is None:
            return local(getattr(self.linears[index], name))
        return self.replicated.at(place)[self.slices[index]]  # type: ignore[index]

    def _output(self, index: int, x: torch.Tensor) -> torch.Tensor:
        if x is not self._whole:
            name = type(self.linears[index]).__name__
            raise RuntimeError(f"a {name} split by columns was called with something else than its part's input")
        if index not in self._outputs:
            parameters = [(self._parameter(i, "weight"), self._parameter(i, "bias")) for i in range(len(self.linears))]
            outputs = _columns(self.tp, self.linears, parameters, whole=x, part=self._part)  # type: ignore[arg-type]
            self._outputs = dict(enumerate(outputs))
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
    """Let a part of a block gather its input, compute on its columns, and reduce its output.

    Args:
        tp: the group.
        module: the part.
        columns: of the part.
        row: its last layer.
        replicated: of the block.
        random: whether the ranks draw different random numbers inside, where they do not everywhere.
    """
    forward, bias = module.forward, replicated.place(row, "bias")
    fork = random and not tp.sequence_parallel

    def computed(*args: Any, **kwargs: Any) -> Any:
        named = "hidden_states" in kwargs
        part = kwargs["hidden_states"] if named else args[0]
        with contextlib.ExitStack() as stack:
            whole = stack.enter_context(columns.input(part))
            if fork and module.training:
                stack.enter_context(tp.fork_random(part.device))
            if named:
                return forward(*args, **{**kwargs, "hidden_states": whole})
            return forward(whole, *args[1:], **kwargs)

    def reduced(x: torch.Tensor) -> torch.Tensor:
        out = ReducePartial.apply(linear(row, x, local(row.weight), None), tp)  # type: ignore[arg-type]
        return out if bias is None else out + replicated.at(bias)  # type: ignore[return-value]

    module.forward = computed  # type: ignore[method-assign]
    row.forward = reduced  # type: ignore[method-assign,assignment]


def split_embedding(tp: TPGroup, embedding: nn.Embedding) -> None:
    """Let an embedding look up its rows of the vocabulary."""
    first, last = tp.bounds(embedding.num_embeddings)
    padding = embedding.padding_idx
    own_padding = padding - first if padding is not None and first <= padding < last else None

    def look_up(ids: torch.Tensor) -> torch.Tensor:
        foreign = (ids < first) | (ids >= last)
        rows = (ids - first).masked_fill(foreign, 0)
        found = F.embedding(rows, local(embedding.weight), padding_idx=own_padding)  # type: ignore[arg-type]
        return ReducePartial.apply(found.masked_fill(foreign.unsqueeze(-1), 0), tp)

    embedding.forward = look_up  # type: ignore[method-assign,assignment]


def split_head(tp: TPGroup, head: nn.Linear) -> None:
    """Let the head make its rank's columns of the logits, of all tokens."""

    def logits(part: torch.Tensor) -> torch.Tensor:
        whole = GatherTokens.apply(part, tp) if tp.sequence_parallel else part
        return _columns(tp, [head], [(local(head.weight), local(head.bias))], whole=whole, part=part)[0]

    head.forward = logits  # type: ignore[method-assign,assignment]
