"""Head and cross entropy fused, by chunks of tokens: the logits of a whole sequence never exist.

Forward computes a chunk's logits, its loss and its gradients at once, so that nothing of the chunk is saved or
recomputed. Only the gradients of the hidden states and of the head's weights, which backward would compute anyway, are
kept until backward.

Source: the fused linear cross entropy of Liger Kernel, arXiv:2410.10989, without its kernels.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd import Function

from smp.config import LossConfig
from smp.errors import UserError
from smp.host_copies import to_device
from smp.log import get_logger
from smp.loss import IGNORE_INDEX, causal_lm_loss_sum, check_labels, loss_sum_
from smp.memory.shape import ModelShape, Moment, Workload
from smp.mesh import Mesh
from smp.microbatch import Microbatch
from smp.models.family import LogitTransform
from smp.models.logits import find_logits
from smp.models.registry import build_model
from smp.parallel.choices import Choice, Situation
from smp.parallel.linear import PLAIN, local_tensor, product_of
from smp.parallel.targets import Targets, chosen_tokens, targets_of
from smp.parallel.technique import Setup

logger = get_logger("model")

Config = LossConfig

CHUNK_TOKENS = 1024
_ROWS = 2048  # of the head, whose gradients are added to the sum at one time
_MARK = "_smp_loss_in_chunks"
SPLIT_HEAD = "_smp_split_head"  # attribute of a split model: its SplitHead


@dataclasses.dataclass(frozen=True)
class SplitHead:
    """A head whose vocabulary is split over ranks.

    Attributes:
        first: this rank's first row of the vocabulary.
        group: the ranks.
        gather: from this rank's tokens of the hidden states to all tokens.
        reduce: from partial gradients of all tokens to this rank's tokens of their sum.
    """

    first: int
    group: dist.ProcessGroup
    gather: Callable[[torch.Tensor], torch.Tensor]
    reduce: Callable[[torch.Tensor], torch.Tensor]


class _LinearLoss(Function):
    """Args of ``apply``: hidden states ``(batch, sequence, hidden)``, weight ``(vocabulary, hidden)``, bias or None,
    labels and chosen tokens of :class:`Targets`, tokens of a chunk, the split head or None, the factor of the z-loss,
    and what makes logits of the head's outputs."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, labels: torch.Tensor,
        chosen: torch.Tensor | None, chunk: int, split: SplitHead | None, z_loss: float,
        transform: LogitTransform,
    ) -> torch.Tensor:  # fmt: skip
        needs = ctx.needs_input_grad
        whole = split.gather(hidden) if split is not None else hidden
        if chosen is None:
            tokens = whole.reshape(-1, whole.shape[-1])
            # Under tensor parallelism sequences may have been padded.
            labels = F.pad(labels, (0, whole.shape[1] - labels.shape[1]), value=IGNORE_INDEX).reshape(-1)
        else:
            tokens = whole[tuple(chosen)]
        exact = torch.promote_types(hidden.dtype, torch.float32)
        first, group = (0, None) if split is None else (split.first, split.group)
        loss = torch.zeros((), dtype=exact, device=hidden.device)
        # In at least fp32: bf16 would lose precision in the sum over chunks.
        into_weight = torch.zeros_like(weight, dtype=exact) if needs[1] else None
        into_bias = torch.zeros_like(bias, dtype=exact) if bias is not None and needs[2] else None
        into_tokens = torch.empty_like(tokens) if needs[0] else None
        for start in range(0, len(tokens), chunk):
            part = tokens[start : start + chunk]
            logits = _logits(part, weight, bias, exact)
            below_cap = _transform_(logits, transform, slope=any(needs[:3]))
            slopes = None
            if any(needs[:3]):
                slopes = torch.empty_like(logits, dtype=hidden.dtype) if _converts(logits, hidden.dtype) else logits
            loss += loss_sum_(
                logits, labels[start : start + chunk], first=first, group=group, z_loss=z_loss, slopes=slopes
            )
            if slopes is not None:
                if below_cap is not None:
                    slopes.mul_(below_cap)
                if into_bias is not None:
                    into_bias += slopes.sum(0, dtype=exact)
                slopes = slopes.to(hidden.dtype)
                if into_tokens is not None:
                    torch.mm(slopes, weight, out=into_tokens[start : start + chunk])
                if into_weight is not None:
                    _add_product(into_weight, slopes, part)
            del logits, slopes, below_cap  # before the next chunk's are made
        if into_tokens is not None:
            if chosen is None:
                into_tokens = into_tokens.view(whole.shape)
            else:
                into_tokens = torch.zeros_like(whole).index_put_(tuple(chosen), into_tokens)
            into_tokens = split.reduce(into_tokens) if split is not None else into_tokens
        ctx.gradients, ctx.dtypes = (into_tokens, into_weight, into_bias), (hidden.dtype, weight.dtype)
        ctx.scale = transform.scale
        return loss

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        if ctx.gradients is None:
            raise RuntimeError("the loss in chunks can be differentiated once: its gradients are made with it")
        gradients, ctx.gradients = ctx.gradients, None
        if ctx.scale != 1:  # of all three alike
            gradient = gradient * ctx.scale
        dtypes = (ctx.dtypes[0], ctx.dtypes[1], ctx.dtypes[1])
        return (
            *(g if g is None else _times(g, gradient, dtype) for g, dtype in zip(gradients, dtypes, strict=True)),
            None, None, None, None, None, None,
        )  # fmt: skip


def _converts(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether operations on a tensor write ``dtype`` without a copy: GPUs do, and sum products in fp32."""
    return tensor.is_cuda and tensor.dtype != dtype and _has_fp32_products(tensor.device)


@functools.cache
def _has_fp32_products(device: torch.device) -> bool:
    """Return whether this torch has products of bf16 on ``device`` that are summed and returned in fp32."""
    one, wide = (torch.zeros(16, 16, dtype=dtype, device=device) for dtype in (torch.bfloat16, torch.float32))
    try:
        torch.addmm(wide, one, torch.mm(one, one, out_dtype=wide.dtype).to(one), out_dtype=wide.dtype, out=wide)
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise  # which says nothing of products
    except (RuntimeError, TypeError) as error:
        logger.warning("%s sums no products of bf16 in fp32, so the loss takes copies in fp32: %s", device, error)
        return False
    return True


def _logits(tokens: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    if not _converts(tokens, dtype):
        return F.linear(tokens, weight, bias).to(dtype)
    logits = torch.mm(tokens, weight.T, out_dtype=dtype)
    return logits if bias is None else logits.add_(bias)


def _transform_(outputs: torch.Tensor, transform: LogitTransform, *, slope: bool) -> torch.Tensor | None:
    """Make logits of a chunk of the head's outputs, in place.

    Returns:
        Under a cap and with ``slope``, the derivative of the logits by the scaled outputs.
    """
    if transform.cap is None:
        if transform.scale != 1:
            outputs.mul_(transform.scale)
        return None
    outputs.mul_(transform.scale / transform.cap).tanh_()
    below_cap = outputs.square().neg_().add_(1) if slope else None
    outputs.mul_(transform.cap)
    return below_cap


def _add_product(into: torch.Tensor, slopes: torch.Tensor, tokens: torch.Tensor) -> None:
    if into.dtype == slopes.dtype:
        into.addmm_(slopes.T, tokens)
    elif _converts(slopes, into.dtype):
        torch.addmm(into, slopes.T, tokens, out_dtype=into.dtype, out=into)
    else:  # in parts: torch copies what it adds into the dtype of the sum
        for part, columns in zip(into.split(_ROWS), slopes.T.split(_ROWS), strict=True):
            part += columns @ tokens


def _times(tensor: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if _converts(tensor, dtype):
        return torch.mul(tensor, factor, out=torch.empty_like(tensor, dtype=dtype))
    return tensor.mul_(factor).to(dtype)


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor | Targets,
    *,
    bias: torch.Tensor | None = None,
    chunk_tokens: int = CHUNK_TOKENS,
    z_loss: float = 0.0,
    split: SplitHead | None = None,
    vocabulary: int | None = None,
    logits: LogitTransform = LogitTransform(),  # noqa: B008 # frozen
) -> torch.Tensor:
    """Return the sum of the token losses of a causal language model, from its last hidden states; see the module.

    Args:
        hidden: ``(batch, sequence, hidden)``, after the final norm.
        weight: of the head, ``(vocabulary, hidden)``; under ``split`` this rank's rows.
        labels: ``(batch, sequence)`` int64 in Hugging Face's convention: equal to the inputs, -100 ignored. They are
            shifted here. If they are on the host, ignored tokens cost nothing: the head is applied to the others.
        bias: of the head, ``(vocabulary,)``.
        chunk_tokens: tokens whose logits exist at one time.
        z_loss: factor of the squared log-partition, added to each valid token's loss (PaLM, arXiv:2204.02311).
        split: the vocabulary is split over ranks; then ``hidden`` is this rank's tokens.
        vocabulary: number of rows of the whole head, under ``split``.
        logits: what makes them of the head's outputs, computed in at least fp32.

    Returns:
        0-d tensor in at least fp32; it can be differentiated once. Divide by the number of valid tokens.

    Raises:
        ValueError: a label is neither ignored nor in the vocabulary.
        UserError: ``chunk_tokens`` below 1.
    """
    _check_chunk(chunk_tokens)
    targets = targets_of(labels).to(hidden.device)
    check_labels(targets.labels, vocabulary or weight.shape[0])
    if not torch.is_grad_enabled():  # autograd asks a function for the gradients of parameters all the same
        hidden, weight, bias = hidden.detach(), weight.detach(), None if bias is None else bias.detach()
    return _LinearLoss.apply(hidden, weight, bias, *targets, chunk_tokens, split, z_loss, logits)


def _check_chunk(tokens: int) -> None:
    if tokens < 1:
        raise UserError(f"chunk_tokens must be at least 1, got {tokens}: {CHUNK_TOKENS} is a good number")


def chunk_loss(
    model: nn.Module,
    *,
    head: str = "lm_head",
    chunk_tokens: int = CHUNK_TOKENS,
    z_loss: float = 0.0,
    logits: LogitTransform | None = None,
) -> nn.Module:
    """Let a Hugging Face causal language model compute its loss in chunks whenever it is given labels, in place.

    ``model(..., labels=labels)`` then returns Hugging Face's mean loss (or the sum over ``num_items_in_batch``) and no
    logits. Without labels nothing changes. The z-loss is added in training mode only.

    Args:
        model: its forward calls the head once, on hidden states ``(batch, sequence, hidden)``; after
            :func:`smp.transform`, if that is used.
        head: path of the output projection, an ``nn.Linear``.
        chunk_tokens, z_loss: as for :func:`linear_cross_entropy`.
        logits: what the model makes of its head's outputs; None: it is found (:func:`smp.models.logits.find_logits`).

    Raises:
        UserError: ``chunk_tokens`` below 1, or a model that does with its logits what is not known here.
    """
    _check_chunk(chunk_tokens)
    split: SplitHead | None = getattr(model, SPLIT_HEAD, None)
    projection = model.get_submodule(head)
    transform = find_logits(model.get_submodule(head.rpartition(".")[0]), projection) if logits is None else logits
    forward, project = model.forward, projection.forward
    asked: list[Targets] = []  # while a forward with labels runs

    def project_or_lose(hidden: torch.Tensor) -> torch.Tensor:
        if not asked:
            return project(hidden)
        if product_of(projection) is not PLAIN or type(projection).forward is not nn.Linear.forward:
            raise UserError(
                f"{head} multiplies by a product of its own, which the loss in chunks does not know: use "
                f"--loss_chunk_tokens 0, or leave {head} out of the layers whose product is replaced"
            )
        return linear_cross_entropy(
            hidden, local_tensor(projection.weight), asked[-1], bias=local_tensor(projection.bias),  # type: ignore[arg-type,type-var]
            chunk_tokens=chunk_tokens, z_loss=z_loss if model.training else 0.0, split=split,
            vocabulary=projection.weight.shape[0], logits=transform,  # type: ignore[index,arg-type]
        )  # fmt: skip

    def forward_with_loss(
        *args: Any,
        labels: torch.Tensor | Targets | None = None,
        shift_labels: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        if labels is None and shift_labels is None:
            return forward(*args, **kwargs)
        targets = targets_of(labels, shift_labels)
        items = kwargs.pop("num_items_in_batch", None)
        as_tuple = kwargs.pop("return_dict", True) is False
        taken: list[torch.Tensor] = []

        def set_aside(_: nn.Module, inputs: tuple[torch.Tensor], loss: torch.Tensor) -> torch.Tensor:
            taken.append(loss)
            return inputs[0].new_empty(1, 0, 1)  # logits of no token, with which the model may do what it does

        asked.append(targets)
        # The last of the head's hooks: those of fully_shard are to see the loss, which is what backward starts from.
        hook = projection.register_forward_hook(set_aside)
        try:
            found = forward(*args, **kwargs)
        finally:
            hook.remove()
            asked.pop()
        if len(taken) != 1:
            raise UserError(
                f"{head} was called {len(taken)} times in a forward, where the loss in chunks needs one call: use "
                f"--loss_chunk_tokens 0"
            )
        if items is None:
            items = (targets.labels != IGNORE_INDEX).sum()
        # A new object: an attribute that is set later would come last in a tuple.
        found = type(found)(**{**found, "loss": taken[0] / items, "logits": None})
        return found.to_tuple() if as_tuple else found

    projection.forward = project_or_lose  # type: ignore[method-assign,assignment]
    model.forward = forward_with_loss  # type: ignore[method-assign]
    setattr(model, _MARK, True)
    return model


def model_loss_sum(
    model: nn.Module, inputs: Mapping[str, Any], targets: torch.Tensor, chosen: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the sum of the token losses of a micro-batch, in chunks if :func:`chunk_loss` was applied.

    Args:
        model: a causal language model of Hugging Face.
        inputs: its inputs by name, without labels.
        targets: ``(batch, sequence)``, what each token predicts, on the host or the device.
        chosen: the tokens that get logits, as :func:`chosen_tokens`'s, where the loss is in chunks; None: all.
    """
    device = inputs["input_ids"].device
    if hasattr(model, _MARK):
        # Made before the call: fully_shard copies all tensors that the model is given to the GPU, and waits for them.
        labels = Targets.at(targets, chosen).to(device)
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


def problems(hf_config: Any, setup: Setup) -> list[str]:
    """Say that it is not known what the model makes of its head's outputs."""
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
        chunk_loss(model, head=setup.family.head, chunk_tokens=chunk, z_loss=config.z_loss, logits=setup.family.logits)


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
    gradient = columns * shape.hidden if shape.trained(mesh.tp.size).last else 0
    if work.moment is Moment.HEAD:  # without chunks, the gradient of the logits; with them, as yet that of the head
        slopes = {"logits and loss": work.tokens(mesh) * columns * (fp32 + low)}
        return {"gradients before reduction": gradient * low} if chunk else slopes
    if work.moment is not Moment.LOSS:
        return {}
    needed = {"logits and loss": min(work.tokens(mesh), chunk or work.tokens(mesh)) * columns * of_logit}
    if chunk:  # in fp32, and on a CPU a part of the product in bf16, and what is added of it in fp32
        part = min(columns, _ROWS) * shape.hidden * (low + fp32) if low and work.device_type == "cpu" else 0
        needed["gradients before reduction"] = gradient * fp32 + part
    return needed
