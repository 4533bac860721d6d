"""Head and cross entropy fused, by chunks of tokens: the full logits are never materialized.

Forward computes a chunk's logits, its loss and its gradients at once, so that nothing of the chunk is saved or
recomputed. Only the gradients of the hidden states and of the head's weights, which backward would compute anyway, are
kept until backward. The losses of several sequences have one gradient each: for these, backward computes the chunks
once more, and the hidden states are kept.

Source: the fused linear cross entropy of Liger Kernel, arXiv:2410.10989, without its kernels.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd import Function

from smp.errors import RunError, UserError, first_line
from smp.log import get_logger
from smp.loss import IGNORE_INDEX, check_ids, token_losses, token_losses_
from smp.models.family import LogitTransform
from smp.parallel.targets import Targets, targets_of

logger = get_logger("model")

CHUNK_TOKENS = 1024
HEAD_ROWS = 2048  # of the head, whose gradients are added to the sum at one time
Gradients = tuple[torch.Tensor | None, ...]  # of tokens, weight, bias and rows


@dataclasses.dataclass(frozen=True)
class SplitHead:
    """A head whose vocabulary is split over ranks.

    Attributes:
        first: this rank's first row of the vocabulary.
        gather: from this rank's tokens of the hidden states to all tokens.
        reduce: from partial gradients of all tokens to this rank's tokens of their sum.
    """

    first: int
    group: dist.ProcessGroup
    gather: Callable[[torch.Tensor], torch.Tensor]
    reduce: Callable[[torch.Tensor], torch.Tensor]


class _How(NamedTuple):
    """Tokens of a chunk, the split head or None, the factor of the z-loss, and what makes logits of the outputs."""

    chunk: int
    split: SplitHead | None
    z_loss: float
    transform: LogitTransform
    indices: torch.Tensor | None = None  # of rows that are multiplied with in place of the weight's, (rows,)
    compiled: bool = False


class _Sequences(NamedTuple):
    """The sequence of each token ``(tokens,)``, and their number."""

    of_token: torch.Tensor
    number: int


def _pass(
    tokens: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, rows: torch.Tensor | None,
    labels: torch.Tensor, how: _How, *,
    needs: Sequence[bool], sequences: _Sequences | None = None, factors: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Gradients]:  # fmt: skip
    """Return the sum of the losses, or that of each sequence, and the gradients that are needed, chunk by chunk.

    Args:
        tokens: hidden states ``(tokens, hidden)``.
        rows: ``(rows, hidden)``, at ``how.indices`` of the vocabulary, or None.
        labels: ``(tokens,)``.
        needs: of tokens, weight, bias and rows.
        factors: of each token's loss in the gradients, ``(tokens,)``; None: 1.
    """
    exact = torch.promote_types(tokens.dtype, torch.float32)
    first, group = (0, None) if how.split is None else (how.split.first, how.split.group)
    loss = torch.zeros(() if sequences is None else sequences.number, dtype=exact, device=tokens.device)
    # In at least fp32: bf16 would lose precision in the sum over chunks.
    into_weight = torch.zeros_like(weight, dtype=exact) if needs[1] else None
    into_bias = torch.zeros_like(bias, dtype=exact) if bias is not None and needs[2] else None
    into_rows = torch.zeros_like(rows, dtype=exact) if rows is not None and needs[3] else None
    into_tokens = torch.empty_like(tokens) if needs[0] else None
    for start in range(0, len(tokens), how.chunk):
        here = slice(start, start + how.chunk)
        logits = _logits(tokens[here], weight, bias, exact)
        if rows is not None:
            logits[:, how.indices] = _logits(tokens[here], rows, None if bias is None else bias[how.indices], exact)
        below_cap = _transform_(logits, how.transform, slope=any(needs))
        slopes, of_loss = None, None if factors is None else factors[here]
        if how.compiled and group is None:
            dtype = tokens.dtype if any(needs) else None
            losses, slopes = _compiled()(logits, labels[here], of_loss, how.z_loss, dtype)
        else:
            if any(needs):
                slopes = torch.empty_like(logits, dtype=tokens.dtype) if _converts(logits, tokens.dtype) else logits
            losses = token_losses_(
                logits, labels[here], first=first, group=group, z_loss=how.z_loss, slopes=slopes, factors=of_loss
            )
        if sequences is None:
            loss += losses.sum()
        else:
            loss.index_add_(0, sequences.of_token[here], losses)
        if slopes is not None:
            if below_cap is not None:
                slopes.mul_(below_cap)
            if into_bias is not None:
                into_bias += slopes.sum(0, dtype=exact)
            slopes = slopes.to(tokens.dtype)
            if rows is not None:
                of_rows = slopes[:, how.indices]
                slopes[:, how.indices] = 0
                if into_rows is not None:
                    into_rows += of_rows.T @ tokens[here]
            if into_tokens is not None:
                torch.mm(slopes, weight, out=into_tokens[here])
                if rows is not None:
                    into_tokens[here].addmm_(of_rows, rows)
            if into_weight is not None:
                _add_product(into_weight, slopes, tokens[here])
        del logits, slopes, below_cap, losses  # before the next chunk's are made
    return loss, (into_tokens, into_weight, into_bias, into_rows)


@functools.cache
def _compiled() -> Callable[..., Any]:
    """Return :func:`token_losses` compiled, once for all models: of any number of tokens."""
    from torch._dynamo import exc  # imported late: it takes seconds

    compiled = torch.compile(token_losses, fullgraph=True)

    @functools.wraps(token_losses)
    def called(logits: torch.Tensor, *args: Any) -> Any:
        torch._dynamo.maybe_mark_dynamic(logits, 0)
        try:
            return compiled(logits, *args)
        except exc.BackendCompilerFailed as error:
            cause = first_line(getattr(error, "inner_exception", error))
            raise RunError(f"torch.compile cannot compile the loss: {cause}; leave --compile_loss out") from error

    return called


class _LinearLoss(Function):
    """Args of ``apply``: hidden states ``(batch, sequence, hidden)``, weight ``(vocabulary, hidden)``, bias or None,
    rows or None, labels, chosen tokens and sequences of :class:`Targets`, their number, and how it is computed."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, rows: torch.Tensor | None,
        labels: torch.Tensor,
        chosen: torch.Tensor | None, of_token: torch.Tensor | None, number: int, how: _How,
    ) -> torch.Tensor:  # fmt: skip
        gathered = how.split.gather(hidden) if how.split is not None else hidden
        if chosen is None:
            tokens = gathered.reshape(-1, gathered.shape[-1])
            # Under tensor parallelism sequences may have been padded.
            extra = 0, gathered.shape[1] - labels.shape[1]
            labels = F.pad(labels, extra, value=IGNORE_INDEX).reshape(-1)
            of_token = None if of_token is None else F.pad(of_token, extra).reshape(-1)
        else:
            tokens = gathered[tuple(chosen)]
        ctx.how, ctx.shape, ctx.chosen, ctx.sequences = how, gathered.shape, chosen, None
        ctx.dtypes = (hidden.dtype, weight.dtype, weight.dtype, weight.dtype if rows is None else rows.dtype)
        if of_token is not None:
            ctx.sequences = sequences = _Sequences(of_token, number)
            ctx.save_for_backward(tokens, weight, bias, rows, labels)
            return _pass(tokens, weight, bias, rows, labels, how, needs=(False,) * 4, sequences=sequences)[0]
        loss, gradients = _pass(tokens, weight, bias, rows, labels, how, needs=ctx.needs_input_grad[:4])
        ctx.gradients = (_placed(gradients[0], ctx), *gradients[1:])
        return loss

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        scale, gradients = ctx.how.transform.scale, None
        if scale != 1:  # of all alike
            gradient = gradient * scale
        if ctx.sequences is not None:
            factors = gradient[ctx.sequences.of_token]
            tokens, weight, bias, rows, labels = ctx.saved_tensors
            needs = ctx.needs_input_grad[:4]
            _, gradients = _pass(tokens, weight, bias, rows, labels, ctx.how, needs=needs, factors=factors)
            gradients = (_placed(gradients[0], ctx), *gradients[1:])
            found = [g if g is None else g.to(dtype) for g, dtype in zip(gradients, ctx.dtypes, strict=True)]
        elif ctx.gradients is None:
            raise RuntimeError("the loss in chunks can be differentiated once: its gradients are made with it")
        else:
            gradients, ctx.gradients = ctx.gradients, None
            found = [
                g if g is None else _times(g, gradient, dtype) for g, dtype in zip(gradients, ctx.dtypes, strict=True)
            ]
        return *found, None, None, None, None, None


def _placed(into_tokens: torch.Tensor | None, ctx: Any) -> torch.Tensor | None:
    """Return the gradient of this rank's hidden states from that of the tokens."""
    if into_tokens is None:
        return None
    if ctx.chosen is None:
        into_tokens = into_tokens.view(ctx.shape)
    else:
        into_tokens = into_tokens.new_zeros(ctx.shape).index_put_(tuple(ctx.chosen), into_tokens)
    return ctx.how.split.reduce(into_tokens) if ctx.how.split is not None else into_tokens


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
        for part, columns in zip(into.split(HEAD_ROWS), slopes.T.split(HEAD_ROWS), strict=True):
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
    rows: tuple[torch.Tensor, torch.Tensor] | None = None,
    compiled: bool = False,
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
        vocabulary: number of rows of the unsplit head, under ``split``.
        logits: what makes them of the head's outputs, computed in at least fp32.
        rows: indices into ``weight`` ``(rows,)``, and what is multiplied with in place of its rows, ``(rows, hidden)``.
        compiled: compile what makes losses and gradients of logits, where the vocabulary is not split.

    Returns:
        0-d tensor in at least fp32; it can be differentiated once. Divide by the number of valid tokens. Of
        :class:`Targets` with sequences the sum of each.

    Raises:
        ValueError: a label is neither ignored nor in the vocabulary.
        UserError: ``chunk_tokens`` below 1.
    """
    check_chunk(chunk_tokens)
    targets = targets_of(labels).to(hidden.device)
    check_ids(targets.labels, vocabulary or weight.shape[0], labels=True)
    if not torch.is_grad_enabled():  # autograd asks a function for the gradients of parameters all the same
        hidden, weight, bias = hidden.detach(), weight.detach(), None if bias is None else bias.detach()
        rows = None if rows is None else (rows[0], rows[1].detach())
    indices, values = rows or (None, None)
    how = _How(chunk_tokens, split, z_loss, logits, indices, compiled)
    return _LinearLoss.apply(hidden, weight, bias, values, *targets, how)


def check_chunk(tokens: int) -> None:
    """Refuse chunks of no token."""
    if tokens < 1:
        raise UserError(f"chunk_tokens must be at least 1, got {tokens}: {CHUNK_TOKENS} is a good number")
