"""Routed experts in fp8 on a GPU: what its kernels cast and multiply is what CPUs emulate."""

from __future__ import annotations

import pytest
import torch

from tests.parity import test_fp8_experts as emulated
from tests.reference import relative

pytest.importorskip("torchao")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("recipe", emulated.RECIPES)
def test_experts_are_what_is_emulated(recipe, transposed):
    if torch.cuda.get_device_capability()[0] != (10 if recipe == "mxfp8" else 9):
        pytest.skip("no grouped products in fp8 on this GPU")
    given = emulated.data(torch.bfloat16)
    wanted = emulated.results(emulated.product_of(recipe), *given, transposed=transposed)
    on_gpu = [each.cuda() for each in given]
    found = emulated.results(emulated.product_of(recipe, "cuda"), *on_gpu, transposed=transposed)
    # Sums differ in the order, and in Hopper's accumulators of 22 bits; fp8 itself by 4e-2.
    assert all(relative(a.cpu() - b, b) < 5e-3 for a, b in zip(found, wanted, strict=True))
