"""A model's loss, in chunks (``smp/parallel/linear_loss.py``) or of its logits."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import nn

from smp.config import LossConfig
from smp.errors import UserError
from smp.local_shards import local_tensor
from smp.loss import IGNORE_INDEX, causal_lm_loss_sum
from smp.memory.shape import ModelShape, Moment, Workload
from smp.mesh import Mesh
from smp.models.family import LogitTransform
from smp.models.logits import find_logits
from smp.models.registry import build_model
from smp.parallel.choices import Choice, Situation, missing_tools
from smp.parallel.linear import PLAIN, product_of
from smp.parallel.linear_loss import CHUNK_TOKENS, HEAD_ROWS, SplitHead, check_chunk, linear_cross_entropy
from smp.parallel.microbatch import Microbatch, to_device
from smp.parallel.refusals import require_uncompiled
from smp.parallel.targets import Targets, chosen_tokens, targets_of
from smp.parallel.technique import Setup
from smp.parallel.token_rows import rows_of

Config = LossConfig

_MARK = "_smp_loss_in_chunks"
SPLIT_HEAD = "_smp_split_head"  # attribute of a split model: its SplitHead


class ChunkedHead:
    """The head of a model, which in a forward with labels returns the sum of the losses in place of logits.

    Args:
        model: of Hugging Face; :meth:`forward` replaces its forward.
        path: of the head, whose forward :meth:`project` replaces.
        chunk_tokens, z_loss, compiled: as for :func:`linear_cross_entropy`.
        logits: what the model makes of its head's outputs.
    """

    def __init__(
        self, model: nn.Module, path: str, *, chunk_tokens: int, z_loss: float, logits: LogitTransform, compiled: bool
    ):
        self._model, self._path, self._layer = model, path, model.get_submodule(path)
        self._chunk_tokens, self._z_loss, self._logits, self._compiled = chunk_tokens, z_loss, logits, compiled
        self._split: SplitHead | None = getattr(model, SPLIT_HEAD, None)
        self._model_forward, self._layer_forward = model.forward, self._layer.forward
        self._targets: Targets | None = None  # of a forward with labels, while it runs

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the outputs, or the loss, of hidden states ``(batch, sequence, hidden)``.

        Raises:
            UserError: the head's product is replaced.
        """
        layer, targets = cast(nn.Linear, self._layer), self._targets
        if targets is None:
            return self._layer_forward(hidden)
        if product_of(layer) is not PLAIN or type(layer).forward is not nn.Linear.forward:
            raise UserError(
                f"{self._path} multiplies by a product of its own, which the loss in chunks does not know: use "
                f"--loss_chunk_tokens 0, or leave {self._path} out of the layers whose product is replaced"
            )
        rows = rows_of(layer)
        return linear_cross_entropy(
            hidden, local_tensor(layer.weight), targets, bias=local_tensor(layer.bias),  # type: ignore[type-var]
            chunk_tokens=self._chunk_tokens, split=self._split,
            z_loss=self._z_loss if self._model.training and targets.of_token is None else 0.0,
            vocabulary=layer.weight.shape[0], logits=self._logits, rows=None if rows is None else rows.columns(),
            compiled=self._compiled,
        )  # fmt: skip

    def forward(
        self,
        *args: Any,
        labels: torch.Tensor | Targets | None = None,
        shift_labels: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Return what the model does, with labels its loss and no logits.

        Raises:
            UserError: the model does not call its head once.
        """
        if labels is None and shift_labels is None:
            return self._model_forward(*args, **kwargs)
        targets = targets_of(labels, shift_labels)
        items = kwargs.pop("num_items_in_batch", None)
        as_tuple = kwargs.pop("return_dict", True) is False
        with self._losses_of(targets) as losses:
            found = self._model_forward(*args, **kwargs)
        if len(losses) != 1:
            raise UserError(
                f"{self._path} was called {len(losses)} times in a forward, where the loss in chunks needs one call: "
                f"use --loss_chunk_tokens 0"
            )
        if items is None:
            items = (targets.labels != IGNORE_INDEX).sum()
        # A new object: an attribute that is set later would come last in a tuple.
        found = type(found)(**{**found, "loss": losses[0] / items, "logits": None})
        return found.to_tuple() if as_tuple else found

    @contextlib.contextmanager
    def _losses_of(self, targets: Targets) -> Iterator[list[torch.Tensor]]:
        """Let the head return losses inside, which are in the list; the model gets logits of no token."""
        losses: list[torch.Tensor] = []

        def set_aside(_: nn.Module, inputs: tuple[torch.Tensor], loss: torch.Tensor) -> torch.Tensor:
            losses.append(loss)
            return inputs[0].new_empty(1, 0, 1)  # with which the model may do what it does

        # The last of the head's hooks, so registered anew in each forward: fully_shard's post-forward hook must see the
        # loss, from which backward starts, and not these logits, on which it could register no pre-backward hook.
        hook = self._layer.register_forward_hook(set_aside)
        self._targets = targets
        try:
            yield losses
        finally:
            self._targets = None
            hook.remove()


def chunk_loss(
    model: nn.Module,
    *,
    head: str = "lm_head",
    chunk_tokens: int = CHUNK_TOKENS,
    z_loss: float = 0.0,
    logits: LogitTransform | None = None,
    compiled: bool = False,
) -> nn.Module:
    """Let a Hugging Face causal language model compute its loss in chunks whenever it is given labels, in place.

    ``model(..., labels=labels)`` then returns Hugging Face's mean loss (or the sum over ``num_items_in_batch``) and no
    logits. Without labels nothing changes. The z-loss is added in training mode only.

    Args:
        model: its forward calls the head once, on hidden states ``(batch, sequence, hidden)``; after
            :func:`smp.transform`, if that is used.
        head: path of the output projection, an ``nn.Linear``.
        chunk_tokens, z_loss, compiled: as for :func:`linear_cross_entropy`.
        logits: what the model makes of its head's outputs; None: it is found (:func:`smp.models.logits.find_logits`).

    Raises:
        UserError: ``chunk_tokens`` below 1, or a model that does with its logits what is not known here.
    """
    check_chunk(chunk_tokens)
    require_uncompiled("smp.chunk_loss", model)
    projection = model.get_submodule(head)
    if logits is None:
        logits = find_logits(model.get_submodule(head.rpartition(".")[0]), projection)
    chunked = ChunkedHead(model, head, chunk_tokens=chunk_tokens, z_loss=z_loss, logits=logits, compiled=compiled)
    projection.forward = chunked.project  # type: ignore[method-assign,assignment]
    model.forward = chunked.forward  # type: ignore[method-assign]
    setattr(model, _MARK, True)
    return model


def is_in_chunks(model: nn.Module) -> bool:
    """Return whether :func:`chunk_loss` was applied."""
    return hasattr(model, _MARK)


def model_loss_sum(
    model: nn.Module,
    inputs: Mapping[str, Any],
    targets: torch.Tensor,
    chosen: torch.Tensor | None = None,
    sequences: tuple[torch.Tensor, int] | None = None,
) -> torch.Tensor:
    """Return the sum of the token losses of a micro-batch, in chunks if :func:`chunk_loss` was applied.

    Args:
        inputs: its inputs by name, without labels.
        targets: ``(batch, sequence)``, what each token predicts, on the host or the device.
        chosen: the tokens that get logits, as :func:`chosen_tokens`'s, where the loss is in chunks; None: all.
        sequences: the sequence of each token, ``(batch, sequence)`` int64, and their number, for the sum of each,
            without a z-loss; where the loss is in chunks.
    """
    device = inputs["input_ids"].device
    if is_in_chunks(model):
        # Made before the call: fully_shard copies all tensors that the model is given to the GPU, and waits for them.
        labels = Targets.at(targets, chosen, sequences).to(device)
        return model(**inputs, labels=labels, num_items_in_batch=1, use_cache=False).loss
    targets = to_device(targets, device)
    return causal_lm_loss_sum(model(**inputs, use_cache=False).logits, targets, shifted=True)


def choose(situation: Situation) -> Iterator[Choice]:
    """Take larger chunks on a GPU where they fit: fewer passes over the gradient of the head."""
    large = 4 * CHUNK_TOKENS
    if situation.fits(loss_chunk_tokens=large):
        yield Choice("loss_chunk_tokens", large, "fewer passes over the gradient of the head, and it fits")
    else:
        yield Choice("loss_chunk_tokens", CHUNK_TOKENS, f"{large} do not fit")
    why = missing_tools()
    if situation.mesh.tp.size > 1:
        why = "the vocabulary is split"
    elif torch.are_deterministic_algorithms_enabled():  # what a compiler makes may differ between two machines
        why = "--deterministic 1"
    yield Choice("compile_loss", not why, why or "one pass over the logits")


def problems(hf_config: Any, setup: Setup) -> list[str]:
    """Say that a split vocabulary is not compiled, or what the model makes of its head's outputs is not known."""
    if setup.settings[Config].compile_loss is True and setup.mesh.tp.size > 1:
        return ["--compile_loss 1 compiles no collectives, which the loss of a vocabulary split over "
                "--tensor_parallel_degree ranks has: leave it out"]  # fmt: skip
    if not setup.settings[Config].loss_chunk_tokens or setup.family.logits is not None:
        return []
    with torch.device("meta"):
        twin = build_model(hf_config, attn_implementation="eager")
    try:
        find_logits(twin, twin.get_submodule(setup.family.head))
    except UserError as error:
        return [str(error)]
    return []


def apply(model: nn.Module, setup: Setup) -> None:
    """Let the model compute its loss in chunks."""
    config = setup.settings[Config]
    if chunk := cast(int, config.loss_chunk_tokens):
        chunk_loss(
            model, head=setup.family.head, chunk_tokens=chunk, z_loss=config.z_loss, logits=setup.family.logits,
            compiled=config.compile_loss is True,
        )  # fmt: skip


def own_part(microbatch: Microbatch, setup: Setup) -> Microbatch:
    """Choose the tokens that get logits."""
    if not setup.settings[Config].loss_chunk_tokens:
        return microbatch
    chosen = chosen_tokens(microbatch["targets"], part=setup.mesh.cp.size > 1)
    return microbatch if chosen is None else {**microbatch, "chosen": chosen}


def cost(shape: ModelShape, mesh: Mesh, work: Workload) -> dict[str, int]:
    """Count logits, their log-softmax and gradient, in fp32; a chunk's gradient overwrites its logits."""
    fp32, chunk = 4, cast(int, work.settings[Config].loss_chunk_tokens)
    low = work.compute_bytes if work.compute_bytes < fp32 else 0
    of_logit = (fp32 + low if chunk else 3 * fp32) + (fp32 if shape.capped_logits else 0)
    columns = -(-shape.vocabulary // mesh.tp.size)
    gradient = columns * shape.hidden if shape.trained(1).last >= shape.table else 0  # not of a norm, or rows, alone
    if work.moment is Moment.HEAD:  # without chunks, the gradient of the logits; with them, as yet that of the head
        slopes = {"logits and loss": work.tokens(mesh) * columns * (fp32 + low)}
        return {"gradients before reduction": gradient * low} if chunk else slopes
    if work.moment is not Moment.LOSS:
        return {}
    needed = {"logits and loss": min(work.tokens(mesh), chunk or work.tokens(mesh)) * columns * of_logit}
    if chunk:  # in fp32, and on a CPU a part of the product in bf16, and what is added of it in fp32
        part = min(columns, HEAD_ROWS) * shape.hidden * (low + fp32) if low and work.device_type == "cpu" else 0
        needed["gradients before reduction"] = gradient * fp32 + part
    return needed
