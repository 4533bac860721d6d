"""Attention of some queries to some keys, added up over several calls, against a dense softmax in fp64."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch

from smp.parallel.context import capped, kernels
from smp.parallel.context import layout as layouts
from smp.parallel.context.kernels import Attended, Gradients, Scores, Seen, empty_result, wide
from smp.parallel.context.layout import Range, SequenceLayout, find_spans, split_columns
from tests.unit.test_context_layout import columns_of

BATCH, HEADS, WIDTH, RANKS = 2, 4, 8, 4
SCORES = Scores(0.3)
CP_COMM_TYPES = ["all_gather", "p2p", "all_to_all"]


@dataclasses.dataclass(frozen=True)
class Case:
    """Rows, and what their tokens see."""

    length: int = 61
    balanced: bool = True
    starts: tuple[tuple[int, ...], ...] = ((0,),)
    window: int | None = None
    key_heads: int = 2
    scores: Scores = SCORES

    @property
    def layout(self) -> SequenceLayout:
        return split_columns(self.length, RANKS, balanced=self.balanced, starts=self.starts)


DOCUMENTS = ((0, 3, 4, 29, 51), (0, 17, 18))
CASES = {
    "causal": Case(),
    "consecutive": Case(balanced=False, key_heads=4),
    "one key head": Case(key_heads=1),
    "documents": Case(starts=DOCUMENTS),
    "window below a part": Case(window=5),
    "window of several parts": Case(window=22, balanced=False),
    "window and documents": Case(window=9, starts=DOCUMENTS),
    "window of one": Case(window=1),
}
CAP = Scores(0.3, cap=1.5)
CAPPED = {
    "capped": Case(scores=CAP, key_heads=1),
    "capped, consecutive": Case(scores=CAP, balanced=False),
    "capped, window and documents": Case(scores=CAP, window=9, starts=DOCUMENTS),
}


def inputs_of(case: Case, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys with values, and the output's gradient; views of the order of tokens, as those of a block."""
    generator, columns = torch.Generator().manual_seed(5), case.layout.columns

    def draw(*heads: int) -> torch.Tensor:
        made = torch.randn(*heads[:-1], BATCH, columns, heads[-1], WIDTH, generator=generator, dtype=torch.float64)
        return made.to(dtype).transpose(-3, -2)

    return draw(HEADS), draw(2, case.key_heads), draw(HEADS)


def dense(case: Case, query: torch.Tensor, key_value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and logarithm of the sum of exponentials of all columns."""
    columns = torch.arange(case.layout.columns)
    starts = case.starts if len(case.starts) == BATCH else case.starts * BATCH
    document = torch.stack([torch.searchsorted(torch.tensor(row), columns, right=True) for row in starts])
    seen = columns <= columns[:, None]
    if case.window is not None:
        seen = seen & (columns[:, None] - columns < case.window)
    seen = seen & (document[:, :, None] == document[:, None])
    key, value = key_value.repeat_interleave(HEADS // case.key_heads, 2)
    scores = query @ key.mT * case.scores.scale
    if case.scores.cap is not None:
        scores = torch.tanh(scores / case.scores.cap) * case.scores.cap
    scores = scores.masked_fill(~seen[:, None], -math.inf)
    return scores.softmax(-1) @ value, scores.logsumexp(-1)


def calls_of(case: Case, exchange: str) -> list[tuple[tuple[Range, ...], list[tuple[Range, ...]]]]:
    """For each rank its queries, and the keys of each call."""
    layout, whole = case.layout, ((0, case.layout.columns),)
    if exchange == "all_to_all":
        return [(whole, [whole])]
    if exchange == "all_gather":
        return [(own, [whole]) for own in layout.ranges]
    return [(own, [layout.ranges[rank - step] for step in range(RANKS)]) for rank, own in enumerate(layout.ranges)]


def run(
    case: Case, exchange: str, dtype: torch.dtype = torch.float64, where: str = "in_pieces"
) -> tuple[Attended, Gradients]:
    """Outputs of all ranks, and gradients added up over them, in the order of the columns."""
    attend, add_gradients = (getattr(kernels, f"_{name}_{where}") for name in ("attend", "add_gradients"))
    query, key_value, gradient = inputs_of(case, dtype)
    found = Attended(torch.full_like(query, math.nan, dtype=wide(dtype)), query[..., 0].to(wide(dtype)) * math.nan)
    total = Gradients(torch.zeros_like(query, dtype=wide(dtype)), torch.zeros_like(key_value, dtype=wide(dtype)))
    for own, calls in calls_of(case, exchange):
        places = columns_of(own)
        part = query[:, :, places]
        seen = [
            (columns_of(keys), Seen(find_spans(case.layout, own, keys, case.window), case.window)) for keys in calls
        ]
        result = empty_result(part)
        for columns, what in seen:
            attend(result, part, key_value[:, :, :, columns], what, case.scores)
        found.out[:, :, places], found.lse[:, :, places] = result.out, result.lse
        kept = Attended(result.out.to(dtype), result.lse)
        for columns, what in seen:
            keys = key_value[:, :, :, columns]
            sums = Gradients(torch.zeros_like(part, dtype=wide(dtype)), torch.zeros_like(keys, dtype=wide(dtype)))
            add_gradients(sums, gradient[:, :, places], part, keys, kept, what, case.scores)
            total.query[:, :, places] += sums.query
            total.key_value[:, :, :, columns] += sums.key_value
    return found, total


def size(of: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """The norm, by which an error is divided.

    A token that sees itself alone has no gradient by its query and key: what is computed is the rounding of a
    difference of two equal numbers of the output's gradient's size, and not of the same by every instruction set.
    """
    norm = of.norm()
    return norm if norm > 1e-12 * gradient.norm() else gradient.norm()


def errors(case: Case, found: Attended, gradients: Gradients) -> dict[str, float]:
    """Relative to the dense softmax of fp64."""
    query, key_value, gradient = inputs_of(case)
    query.requires_grad_(), key_value.requires_grad_()
    out, lse = dense(case, query, key_value)
    (out * gradient).sum().backward()
    pairs = {
        "out": (found.out, out),
        "lse": (found.lse, lse),
        "query": (gradients.query, query.grad),
        "key": (gradients.key_value[0], key_value.grad[0]),
        "value": (gradients.key_value[1], key_value.grad[1]),
    }
    with torch.no_grad():
        return {name: float((one - other).norm() / size(other, gradient)) for name, (one, other) in pairs.items()}


@pytest.fixture(params=[(256, 128), (4, 2)], ids=["one block", "several blocks"])
def block(request, monkeypatch):
    for name, size in zip(("_BLOCK", "_LEAF"), request.param, strict=True):
        monkeypatch.setattr(layouts, name, size)
    monkeypatch.setattr(capped, "_BLOCK", request.param[0] + 1)


@pytest.mark.parametrize("exchange", CP_COMM_TYPES)
@pytest.mark.parametrize("name", CASES | CAPPED)
def test_attention_is_the_dense_softmax(name, exchange, block):
    case = (CASES | CAPPED)[name]
    found = errors(case, *run(case, exchange))
    assert max(found.values()) <= 1e-14, found


@pytest.mark.parametrize("exchange", CP_COMM_TYPES)
@pytest.mark.parametrize("name", ["documents", "window of several parts", "one key head", "capped"])
def test_bf16_is_close(name, exchange):
    case = (CASES | CAPPED)[name]
    # A number of bf16 is off by at most 2^-8 of itself, a probability or an output by a few of those.
    assert max(errors(case, *run(case, exchange, torch.bfloat16)).values()) <= 4 * 2**-8
    assert max(errors(case, *run(case, exchange, torch.float32)).values()) <= 1e-6


def test_capped_scores_have_one_kernel_on_every_device():
    query = torch.empty(1, 1, 1, 8, device="meta")
    assert kernels._in_pieces(query, CAP) and not kernels._in_pieces(query, SCORES)


@pytest.mark.parametrize("name", ["documents", "capped"])
def test_a_sink_is_one_more_score(name):
    case = (CASES | CAPPED)[name]
    query, key_value, gradient = inputs_of(case)
    sinks = torch.linspace(-2, 2, HEADS, dtype=torch.float64, requires_grad=True)
    out, lse = dense(case, query, key_value)
    joined = torch.logaddexp(lse, sinks[:, None])
    expected = out * (lse - joined).exp().unsqueeze(-1)
    (expected * gradient).sum().backward()
    found = Attended(out.clone(), lse.clone())
    kernels.add_sinks(found, sinks.detach())
    torch.testing.assert_close(found.out, expected.detach(), rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(found.lse, joined.detach(), rtol=1e-14, atol=1e-14)
    own = kernels.gradient_of_sinks(gradient, found, sinks.detach())
    torch.testing.assert_close(own, sinks.grad, rtol=1e-13, atol=1e-13)


def test_queries_that_see_none_of_some_keys_stay_as_they_are():
    case = CASES["documents"]
    query, key_value, gradient = inputs_of(case)
    own, others = ((40, 48),), ((24, 40),)  # those of the second document of each row, from 29 and 18
    columns = columns_of(others)
    part = query[:, :, 40:48]
    with_first = Seen(find_spans(case.layout, own, ((0, 16),), None))
    assert with_first.spans == ()
    found = empty_result(part)
    kernels.attend(found, part, key_value[:, :, :, :16], with_first, SCORES)
    assert found.out.eq(0).all() and found.lse.eq(-math.inf).all()
    # A row of which some queries see a key and the others do not: a window that ends among them.
    near = Seen(find_spans(case.layout, own, others, 4), 4)
    kernels.attend(found, part, key_value[:, :, :, columns], near, SCORES)
    assert found.lse[:, :, :3].isfinite().all() and found.lse[:, :, 3:].eq(-math.inf).all()
    assert found.out.isfinite().all() and found.out[:, :, 3:].eq(0).all()
    sums = Gradients(torch.zeros_like(part), torch.zeros_like(key_value[:, :, :, columns]))
    kernels.add_gradients(sums, gradient[:, :, 40:48], part, key_value[:, :, :, columns], found, near, SCORES)
    assert sums.query[:, :, 3:].eq(0).all() and sums.key_value.isfinite().all()
    assert sums.key_value[:, :, :, :-3].eq(0).all() and sums.key_value[:, :, :, -3:].ne(0).any()


# The GPU's functions, with the kernels written out as flash-attn documents them.


def _packed_scores(
    query: torch.Tensor, key: torch.Tensor, causal: bool, scale: float, left: int, right: int, longest: int
) -> torch.Tensor:
    """Scores ``(heads, queries, keys)`` of one packed sequence, whose last query is aligned with its last key.

    flash-attn: the query at i attends the keys from i + keys - queries - left to i + keys - queries + right, both
    included; -1 is no bound; causal is a right of 0. Beside another bound, none is one of the longest keys, which is
    too few where a sequence has more queries.
    """
    i, j = torch.arange(len(query))[:, None] + len(key) - len(query), torch.arange(len(key))
    left, right = (-1 if side >= longest else side for side in (left, 0 if causal else right))
    if max(left, right) >= 0:
        left, right = (longest if side < 0 else side for side in (left, right))
    hidden = torch.zeros(len(query), len(key), dtype=torch.bool)
    if left >= 0:
        hidden |= j < i - left
    if right >= 0:
        hidden |= j > i + right
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    return (torch.einsum("qhd,khd->hqk", query, key) * scale).masked_fill(hidden, -math.inf)


class FlashAttention:
    """Torch's operators of flash-attn, for packed sequences ``(tokens, heads, width)``."""

    def __init__(self) -> None:
        self.masks: list[tuple[bool, int, int]] = []

    def _sequences(self, bounds: tuple[Any, Any], longest: tuple[int, int], lengths: tuple[int, int]):
        for each, most, tokens in zip(bounds, longest, lengths, strict=True):
            assert each.dtype == torch.int32 and each[0] == 0 and each[-1] == tokens and each.diff().max() <= most
        for ends in zip(*(itertools.pairwise(each.tolist()) for each in bounds), strict=True):
            yield tuple(slice(*pair) for pair in ends)

    def forward(
        self, query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *,
        scale=None, window_size_left=None, window_size_right=None, seqused_k=None, alibi_slopes=None,
        block_table=None, num_splits=None,
    ):  # fmt: skip
        assert seqused_k is alibi_slopes is block_table is num_splits is None  # of torch 2.12 and later
        assert not dropout_p and not return_debug_mask and query.is_contiguous()
        self.masks.append((is_causal, window_size_left, window_size_right))
        out, lse = torch.empty_like(query), query.new_empty(query.shape[1], len(query))
        for q, k in self._sequences((cum_seq_q, cum_seq_k), (max_q, max_k), (len(query), len(key))):
            scores = _packed_scores(query[q], key[k], is_causal, scale, window_size_left, window_size_right, max_k)
            lse[:, q] = scores.logsumexp(-1)
            values = value[k].repeat_interleave(query.shape[1] // key.shape[1], 1)
            out[q] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
        empty = query.new_zeros(0)
        return out, lse, empty, empty, empty

    def backward(
        self, grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal,
        rng_state, unused, *, scale=None, window_size_left=None, window_size_right=None,
    ):  # fmt: skip
        """By the output and logarithm that are given, which may be of more keys than these."""
        assert not dropout_p and out.dtype == query.dtype and logsumexp.shape == (query.shape[1], len(query))
        copies = query.shape[1] // key.shape[1]
        grads = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
        for q, k in self._sequences((cum_seq_q, cum_seq_k), (max_q, max_k), (len(query), len(key))):
            scores = _packed_scores(query[q], key[k], is_causal, scale, window_size_left, window_size_right, max_k)
            chances = (scores - logsumexp[:, q, None]).exp()
            keys, values = (each[k].repeat_interleave(copies, 1) for each in (key, value))
            slopes = torch.einsum("qhd,khd->hqk", grad_out[q], values)
            slopes = chances * (slopes - (grad_out[q] * out[q]).sum(-1).T[..., None]) * scale
            of_key = torch.einsum("hqk,qhd->khd", slopes, query[q])
            of_value = torch.einsum("hqk,qhd->khd", chances, grad_out[q])
            grads[0][q] = torch.einsum("hqk,khd->qhd", slopes, keys)
            for grad, part in zip(grads[1:], (of_key, of_value), strict=True):
                grad[k] = part.unflatten(1, (-1, copies)).sum(2)
        return grads


@pytest.fixture
def flash(monkeypatch):
    written = FlashAttention()
    for name in ("forward", "backward"):
        monkeypatch.setattr(torch.ops.aten, f"_flash_attention_{name}", getattr(written, name))
    return written


@pytest.mark.parametrize("exchange", CP_COMM_TYPES)
@pytest.mark.parametrize("name", CASES)
def test_the_gpus_functions_compute_the_same(name, exchange, flash):
    case = CASES[name]
    here, there = run(case, exchange), run(case, exchange, where="on_gpu")
    for one, other in zip((here[0].out, here[0].lse, *here[1]), (there[0].out, there[0].lse, *there[1]), strict=True):
        assert (one - other).norm() <= 1e-14 * size(one, inputs_of(case)[2])
    assert flash.masks


def test_the_kernels_of_gpus_are_called_once_for_all_spans_of_a_mask(flash):
    case = CASES["documents"]
    query, key_value, _ = inputs_of(case)
    seen = Seen(find_spans(case.layout, ((0, 64),), ((0, 64),), None))
    kernels._attend_on_gpu(empty_result(query), query, key_value, seen, SCORES)
    assert len(seen.spans) == 8 and flash.masks == [(True, -1, 0)]
    flash.masks.clear()
    run(Case(balanced=False), "p2p", where="on_gpu")
    # Of four ranks' ten pairs that see each other, all but the four with themselves see all.
    assert sorted(flash.masks) == [(False, -1, -1)] * 6 + [(True, -1, 0)] * 4


def test_the_written_kernels_take_the_operators_arguments():
    for name, written in (("forward", FlashAttention.forward), ("backward", FlashAttention.backward)):
        schema = getattr(torch.ops.aten, f"_flash_attention_{name}").default._schema
        names = [argument.name for argument in schema.arguments]
        taken = written.__code__.co_varnames[1 : written.__code__.co_argcount + written.__code__.co_kwonlyargcount]
        assert names[: len(taken)] == list(taken)[: len(names)]  # torch 2.11 has not the last ones
