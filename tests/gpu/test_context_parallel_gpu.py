"""Attention under context parallelism on one GPU: flash-attn's kernels against those of the CPU."""

import pytest
import torch

from tests.unit import test_context_kernels as on_cpu

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("exchange", on_cpu.CP_COMM_TYPES)
@pytest.mark.parametrize("name", on_cpu.CASES)
def test_the_kernels_compute_what_a_cpu_does(name, exchange, monkeypatch):
    case, inputs_of = on_cpu.CASES[name], on_cpu.inputs_of
    wanted = on_cpu.run(case, exchange)
    monkeypatch.setattr(on_cpu, "inputs_of", lambda *given: [tensor.cuda() for tensor in inputs_of(*given)])
    found = on_cpu.run(case, exchange, torch.bfloat16, device="gpu")
    pairs = zip((found[0].out, found[0].lse, *found[1]), (wanted[0].out, wanted[0].lse, *wanted[1]), strict=True)
    for one, other in pairs:
        assert one.is_cuda
        # A number of bf16 is off by at most 2^-8 of itself, a probability or an output by a few of those.
        assert (one.cpu().double() - other).norm() <= 4 * 2**-8 * other.norm().clamp(min=1)
