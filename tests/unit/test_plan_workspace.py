"""The table of bytes that GPU kernels allocate inside, on shapes worked out by hand."""

import pytest
import torch

from smp.plan.workspace import cublas_bytes, inside, is_product

MIB = 2**20


def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize(("capability", "nbytes"), [
    ((8, 0), 8_519_680), ((8, 9), 8_519_680), ((9, 0), 33_554_432), ((10, 0), 33_554_432),
])  # fmt: skip
def test_cublas(capability, nbytes):
    assert cublas_bytes(capability) == nbytes


def test_products():
    assert all(is_product(f"aten::{name}") for name in ("mm", "addmm", "bmm", "baddbmm"))
    assert not any(is_product(f"aten::{name}") for name in ("mul", "_scaled_dot_product_flash_attention"))


FLASH = "aten::_scaled_dot_product_flash_attention_backward"


def attention(heads, key_heads, length, width):
    """Gradient of the output, query, key, value."""
    query, key = empty(2, heads, length, width), empty(2, key_heads, length, width)
    return [query, query, key, key]


@pytest.mark.parametrize(("shape", "nbytes"), [
    # 2 x 4 heads x 256 rows, each with 64 sums of dQ and one of the softmax in fp32.
    ((4, 4, 256, 64), 2 * 4 * 256 * 65 * 4),
    # Rows are rounded to 128, widths to 32.
    ((4, 4, 200, 80), 2 * 4 * 256 * 97 * 4),
    # Grouped queries: dK and dV of 2 x 4 heads x 256 rows x 64 in bf16, too.
    ((4, 2, 256, 64), 532_480 + 2 * (2 * 4 * 256 * 64 * 2)),
])  # fmt: skip
@pytest.mark.parametrize("name", [FLASH, FLASH.replace("flash", "cudnn")])
def test_backward_of_attention(name, shape, nbytes):
    assert inside(name, attention(*shape)) == nbytes


def test_forward_of_attention_has_none():
    assert inside(FLASH.removesuffix("_backward"), attention(4, 2, 256, 64)[1:]) == 0


@pytest.mark.parametrize(("key_heads", "nbytes"), [(8, 1000 * 8 * 129 * 4), (2, 1000 * 8 * 129 * 4 + 2 * 2_048_000)])
def test_backward_of_attention_by_lengths(key_heads, nbytes):
    query, key = empty(1000, 8, 128), empty(1000, key_heads, 128)
    assert inside("torch_attn::_varlen_attn_backward", [query, query, key, key]) == nbytes


def test_backward_of_the_embedding_sorts_its_indices():
    gradient, indices = empty(2, 512, 64), empty(2, 512, dtype=torch.int64)
    assert inside("aten::embedding_dense_backward", [gradient, indices]) == 6 * 1024 * 8


def test_norms_of_a_list():
    """A partial norm for each 65,536 elements of the largest tensor, for each tensor."""
    tensors = [empty(65_536), empty(65_537), empty(3)]
    assert inside("aten::_foreach_norm", tensors) == 3 * 2 * 4


@pytest.mark.parametrize("name", ["aten::add", "aten::mm", "aten::embedding"])
def test_others_have_none(name):
    assert inside(name, [empty(64, 64), empty(64, 64)]) == 0
