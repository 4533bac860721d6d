"""Head and loss in chunks: Hugging Face's numbers, without the logits of a whole sequence."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

import smp
from smp.config import LossConfig, Settings
from smp.errors import UserError
from smp.loss import shift_labels
from smp.models.family import LogitTransform
from smp.parallel import choices
from smp.parallel.loss import Targets, chosen_tokens, chunk_loss, linear_cross_entropy, model_loss_sum
from tests.distributed import run_distributed
from tests.reference import VOCABULARY, build_reference, global_batch, tiny_config
from tests.unit.test_activation_checkpoint import Products

BATCH, LENGTH, HIDDEN, WORDS = 3, 7, 16, 31


def inputs(dtype, *, bias=False):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(BATCH, LENGTH, HIDDEN, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(WORDS, HIDDEN, generator=generator).to(dtype).requires_grad_()
    offset = torch.randn(WORDS, generator=generator).to(dtype).requires_grad_() if bias else None
    labels = torch.randint(0, WORDS, (BATCH, LENGTH), generator=generator)
    labels[0, 2:5] = -100
    return hidden, weight, offset, labels


PLAIN, SCALED, CAPPED = LogitTransform(), LogitTransform(scale=1 / 3), LogitTransform(scale=0.7, cap=2.5)


def plain(hidden, weight, bias, labels, z_loss, transform=PLAIN):
    """The same by torch's own functions."""
    logits = F.linear(hidden, weight, bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))[:, :-1].flatten(0, 1) * transform.scale
    if transform.cap:
        logits = transform.cap * torch.tanh(logits / transform.cap)
    targets = labels[:, 1:].flatten()
    loss = F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
    return loss + z_loss * (logits.logsumexp(-1).square() * (targets != -100)).sum()


@pytest.fixture(params=[False, True])
def traced(request, monkeypatch):
    """Whether the loss is that for torch.compile, whose graph is run without a compiler."""
    torch._dynamo.reset()
    made = functools.cache(lambda: torch.compile(smp.loss.token_losses, fullgraph=True, backend="aot_eager"))
    monkeypatch.setattr(smp.parallel.linear_loss, "_compiled", made)
    return request.param


@pytest.mark.parametrize("chunk", [1, 4, 5, 21, 1000])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 2e-2)]
)
@pytest.mark.parametrize(("bias", "z_loss", "transform"), [
    (False, 0.0, PLAIN), (True, 1e-2, PLAIN),
    (False, 0.0, SCALED), (True, 1e-2, SCALED), (False, 0.0, CAPPED), (True, 1e-2, CAPPED),
])  # fmt: skip
def test_value_and_gradients(chunk, dtype, tolerance, bias, z_loss, transform, traced):
    mine, theirs = inputs(dtype, bias=bias), inputs(dtype, bias=bias)
    found = linear_cross_entropy(
        *mine[:2], mine[3], bias=mine[2], chunk_tokens=chunk, z_loss=z_loss, logits=transform, compiled=traced
    )  # fmt: skip
    expected = plain(*theirs, z_loss, transform)
    assert found.item() == pytest.approx(expected.item(), rel=tolerance)
    (found / 9).backward()
    (expected / 9).backward()
    for one, other in zip(mine[: 2 + bias], theirs, strict=False):
        assert one.grad.dtype == dtype
        assert torch.linalg.norm(one.grad - other.grad) <= tolerance * torch.linalg.norm(other.grad)


def test_the_gradient_of_the_head_in_parts(monkeypatch):
    gradients = []
    for rows in (8, 2 * WORDS):
        monkeypatch.setattr("smp.parallel.linear_loss.HEAD_ROWS", rows)
        hidden, weight, _, labels = inputs(torch.bfloat16)
        linear_cross_entropy(hidden, weight, labels, chunk_tokens=5).backward()
        gradients.append(weight.grad)
    parts, whole = gradients
    assert whole.norm() > 1
    assert torch.linalg.norm(parts - whole) <= 1e-2 * torch.linalg.norm(whole)


def test_nothing_counts():
    hidden, weight, _, labels = inputs(torch.float32)
    loss = linear_cross_entropy(hidden, weight, torch.full_like(labels, -100))
    loss.backward()
    assert loss.item() == 0 and not hidden.grad.any() and not weight.grad.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_validation_computes_no_gradient(dtype):
    """The weight is a parameter, and autograd's functions are told so without gradients, too."""
    hidden, weight, bias, labels = inputs(dtype, bias=True)
    expected = linear_cross_entropy(hidden, weight, labels, bias=bias, chunk_tokens=5)
    with torch.no_grad(), Products() as products:
        loss = linear_cross_entropy(hidden, weight, labels, bias=bias, chunk_tokens=5)
    assert torch.equal(loss, expected)
    assert products.count == -(-int((labels[:, 1:] != -100).sum()) // 5)  # the logits of each chunk


def gradients(labels, *, chunk=5):
    """Loss, and its gradients by hidden states and weight, in fp64."""
    hidden, weight, _, _ = inputs(torch.float64)
    loss = linear_cross_entropy(hidden, weight, labels, chunk_tokens=chunk)
    return loss.detach(), *torch.autograd.grad(loss, (hidden, weight))


def counted(monkeypatch):
    """The tokens of each chunk from now on."""
    rows, of_chunk = [], smp.parallel.linear_loss.token_losses_
    monkeypatch.setattr(
        smp.parallel.linear_loss,
        "token_losses_",
        lambda logits, *a, **k: rows.append(len(logits)) or of_chunk(logits, *a, **k),
    )
    return rows


def test_ignored_tokens_get_no_logits(monkeypatch):
    labels = inputs(torch.float64)[3]
    labels[1] = -100
    labels[2, 3:] = -100
    valid = labels[:, 1:] != -100
    rows = counted(monkeypatch)
    found = gradients(labels)
    assert rows == [5] and valid.sum() == 5
    rows.clear()
    expected = gradients(Targets(shift_labels(labels)))  # all tokens, as where the labels are on a GPU
    assert rows == [5, 5, 5, 5, 1]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    assert not found[1][:, :-1][~valid].any() and not found[1][:, -1].any() and found[1][:, :-1][valid].all()


def test_without_ignored_tokens_nothing_is_chosen(monkeypatch):
    labels = inputs(torch.float64)[3].clamp(min=0)
    rows = counted(monkeypatch)
    for one, other in zip(gradients(labels), gradients(Targets(shift_labels(labels))), strict=True):
        assert torch.equal(one, other)
    assert rows == 2 * [5, 5, 5, 5, 1]


@pytest.mark.parametrize(("bias", "z_loss", "transform"), [
    (False, 0.0, PLAIN), (True, 1e-2, PLAIN), (True, 1e-2, SCALED), (True, 1e-2, CAPPED),
])  # fmt: skip
def test_numbers_of_the_products_of_gpus(monkeypatch, bias, z_loss, transform):
    """In bf16 with sums in fp32, made here of products in fp32; only the gradients are rounded."""
    mm, addmm = torch.mm, torch.addmm

    def product(one, other, *, out_dtype=None, out=None):
        return mm(one, other, out=out) if out_dtype is None else mm(one.to(out_dtype), other.to(out_dtype))

    def added(into, one, other, *, out_dtype, out):
        assert out is into
        return out.copy_(addmm(into, one.to(out_dtype), other.to(out_dtype)))

    mine = inputs(torch.bfloat16, bias=bias)
    theirs = [None if each is None else each.detach().double().requires_grad_() for each in mine[:3]]
    options = {"chunk_tokens": 4, "z_loss": z_loss, "logits": transform}
    expected = linear_cross_entropy(*theirs[:2], mine[3], bias=theirs[2], **options)
    monkeypatch.setattr(smp.parallel.linear_loss, "_converts", lambda tensor, dtype: tensor.dtype != dtype)
    monkeypatch.setattr(torch, "mm", product)
    monkeypatch.setattr(torch, "addmm", added)
    found = linear_cross_entropy(*mine[:2], mine[3], bias=mine[2], **options)
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    of_found, of_expected = (
        torch.autograd.grad(x / 9, [each for each in given if each is not None])
        for x, given in ((found, mine[:3]), (expected, theirs))
    )
    for one, other in zip(of_found, of_expected, strict=True):
        assert one.dtype == torch.bfloat16
        assert torch.linalg.norm(one - other) <= 4e-3 * torch.linalg.norm(other)


def test_frozen_parts_get_no_gradient():
    hidden, weight, _, labels = inputs(torch.float32)
    linear_cross_entropy(hidden, weight.detach(), labels).backward()
    assert hidden.grad is not None
    whole = hidden.grad.clone()
    hidden, weight, _, labels = inputs(torch.float32)
    loss = linear_cross_entropy(hidden, weight, labels)
    loss.backward(retain_graph=True)
    assert torch.equal(hidden.grad, whole)
    with pytest.raises(RuntimeError, match="differentiated once"):
        loss.backward()


class Largest(TorchDispatchMode):
    """The largest number of elements of any tensor made inside whose last axis is the vocabulary."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        weight = (32, VOCABULARY)  # transposed
        if isinstance(result, torch.Tensor) and result.shape[-1:] == (VOCABULARY,) and result.shape != weight:
            self.elements = max(self.elements, result.numel())
        return result


@pytest.mark.parametrize("name", ["llama_gqa", "llama_tied", "gpt_neox"])
def test_on_a_hugging_face_model(name):
    reference = build_reference(name, torch.float32).train()
    model = chunk_loss(copy.deepcopy(reference), chunk_tokens=5)
    ids, labels = global_batch(0)
    expected = reference(input_ids=ids, labels=labels)
    with Largest() as largest:
        found = model(input_ids=ids, labels=labels)
        found.loss.backward()
    assert found.logits is None
    if name != "gpt_neox":  # whose queries, keys and values are as wide as this vocabulary
        assert largest.elements == 5 * VOCABULARY
    expected.loss.backward()
    assert found.loss.item() == pytest.approx(expected.loss.item(), rel=1e-6)
    for (key, one), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert torch.linalg.norm(one.grad - other.grad) <= 2e-6 * torch.linalg.norm(other.grad), key
    items = model(input_ids=ids, labels=labels, num_items_in_batch=10).loss
    assert items.item() == pytest.approx(reference(input_ids=ids, labels=labels, num_items_in_batch=10).loss.item())
    assert model(input_ids=ids, labels=labels, return_dict=False)[0].item() == pytest.approx(expected.loss.item())
    assert torch.equal(model(input_ids=ids).logits, reference(input_ids=ids).logits)
    with torch.no_grad():
        assert model(input_ids=ids, labels=labels).loss.item() == pytest.approx(expected.loss.item())


def test_a_deep_copy_computes_with_its_own_weights():
    model = chunk_loss(build_reference("llama_gqa", torch.float32))
    copied = copy.deepcopy(model)
    ids, labels = global_batch(0)
    copied(input_ids=ids, labels=labels).loss.backward()
    assert all(p.grad is None for p in model.parameters()) and all(p.grad is not None for p in copied.parameters())


def test_a_vocabulary_of_128k():
    """All gradients together: those that are small sums of much differ by more, and as much from fp64's."""
    config = tiny_config("llama_tied")
    config.vocab_size = 128_256
    torch.manual_seed(0)
    reference = AutoModelForCausalLM.from_config(config).train()
    model = chunk_loss(copy.deepcopy(reference), chunk_tokens=32)
    ids = torch.randint(0, config.vocab_size, (2, 48), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, :3] = -100
    found, expected = (each(input_ids=ids, labels=labels).loss for each in (model, reference))
    found.backward()
    expected.backward()
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    mine, theirs = (torch.cat([p.grad.flatten() for p in each.parameters()]) for each in (model, reference))
    assert torch.linalg.norm(mine - theirs) <= 1e-6 * torch.linalg.norm(theirs)


def test_chunks_of_nothing_are_refused():
    hidden, weight, _, labels = inputs(torch.float32)
    for call in (
        lambda: linear_cross_entropy(hidden, weight, labels, chunk_tokens=0),
        lambda: chunk_loss(build_reference("llama_gqa", torch.float32), chunk_tokens=0),
    ):
        with pytest.raises(UserError, match="chunk_tokens must be at least 1, got 0"):
            call()


@pytest.mark.parametrize(("device", "room", "expected"), [
    ("cuda", 4096, [4096, False]), ("cuda", 0, [1024, False]), ("cpu", 4096, []),
])  # fmt: skip
def test_larger_chunks_where_they_fit(monkeypatch, device, room, expected):
    for given, chosen in ((LossConfig(), expected), (LossConfig(loss_chunk_tokens=512), expected[1:])):
        settings = Settings((given,))
        situation = choices.Situation(None, settings, device, 1, lambda loss_chunk_tokens: loss_chunk_tokens <= room)
        found = choices.choose(settings, situation, [smp.parallel.loss.choose])
        assert [choice.value for choice in found] == chosen


def test_a_device_without_products_in_fp32_is_told_and_no_other_error_is_taken_for_that(monkeypatch, caplog):
    asked, cpu = smp.parallel.linear_loss._has_fp32_products.__wrapped__, torch.device("cpu")
    monkeypatch.setattr(torch, "mm", lambda *args, **kwargs: (_ for _ in ()).throw(RuntimeError("no such")))
    assert not asked(cpu) and "the loss takes copies in fp32: no such" in caplog.text
    for error in (torch.OutOfMemoryError, torch.AcceleratorError):
        monkeypatch.setattr(torch, "mm", lambda *args, error=error, **kwargs: (_ for _ in ()).throw(error("full")))
        with pytest.raises(error, match="full"):
            asked(cpu)


def test_z_loss_is_for_training_only():
    model = chunk_loss(build_reference("llama_gqa", torch.float32), z_loss=0.1)
    ids, labels = global_batch(0)
    training = model.train()(input_ids=ids, labels=labels).loss
    assert training > model.eval()(input_ids=ids, labels=labels).loss + 0.1


def _split_chunks(expected):
    """A user's script: split, then the loss in chunks."""
    smp.init({"tensor_parallel_degree": 2})
    model = smp.chunk_loss(smp.transform(build_reference("llama_gqa", torch.float64)), chunk_tokens=5)
    ids, labels = global_batch(0)
    found = model(input_ids=ids, labels=labels)
    assert found.loss.item() == pytest.approx(expected, rel=1e-6)
    with pytest.raises(ValueError, match=f"label {VOCABULARY} is outside the vocabulary of {VOCABULARY}"):
        model(input_ids=ids, labels=torch.full_like(labels, VOCABULARY))
    with pytest.MonkeyPatch.context() as patch:
        rows = counted(patch)
        # A length that the ranks do not divide is padded, and no label of it may be valid.
        for length, count in ((labels.shape[1], int((labels[:, 1:] != -100).sum())), (7, None), (6, 0)):
            mine = labels[:, :length].clone()
            if count == 0:
                mine[:] = -100
            rows.clear()
            model.zero_grad()
            targets = shift_labels(mine)
            chosen = chosen_tokens(targets, part=False)
            loss = model_loss_sum(model, {"input_ids": ids[:, :length]}, targets, chosen)
            loss.backward()
            assert sum(rows) == (mine[:, 1:] != -100).sum()
            reference = build_reference("llama_gqa", torch.float64)
            logits = reference(input_ids=ids[:, :length]).logits
            wanted = F.cross_entropy(
                logits[:, :-1].flatten(0, 1), mine[:, 1:].flatten(), ignore_index=-100, reduction="sum"
            )
            wanted.backward()
            assert loss.item() == pytest.approx(wanted.item(), rel=1e-9, abs=1e-12)
            name = "model.layers.0.input_layernorm.weight"
            one, other = (dict(m.named_parameters())[name].grad for m in (model, reference))
            one = one.full_tensor() if hasattr(one, "full_tensor") else one
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
            assert all(p.grad is not None for p in model.parameters())


def test_after_transform():
    ids, labels = global_batch(0)
    expected = build_reference("llama_gqa", torch.float64)(input_ids=ids, labels=labels).loss.item()
    run_distributed(_split_chunks, expected, world_size=2)
