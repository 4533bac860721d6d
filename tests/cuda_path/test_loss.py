"""Head and loss in chunks on fake CUDA tensors: which products run, and that the host never waits."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from smp.plan import fake_cuda
from smp.plan.shim import python_with
from tests.cuda_path.reports import ROOT, shim

HIDDEN, WORDS, ROWS, LENGTH, CHUNK = 64, 512, 2, 20, 16


def run() -> dict[str, Any]:
    """Compute the loss and its gradients; returns the audit by where the labels are."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    fake_cuda.install(devices=1)
    from smp.parallel.linear_loss import _has_fp32_products, linear_cross_entropy
    from tests.cuda_path.audit import Audit

    found = {}
    labels = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH)
    some = labels.clone()
    some[:, : LENGTH // 2] = -100
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode, Audit(mode) as audit:
        hidden = torch.empty(ROWS, LENGTH, HIDDEN, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        weight = torch.empty(WORDS, HIDDEN, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        assert _has_fp32_products(hidden.device)  # tried once
        for name, given in {"device": some.cuda(), "host": some, "host, all valid": labels}.items():
            audit.clear()
            loss = linear_cross_entropy(hidden, weight, given, chunk_tokens=CHUNK)
            assert loss.dtype == torch.float32
            for gradient in torch.autograd.grad(loss, (hidden, weight), torch.ones_like(loss)):
                assert gradient.dtype == torch.bfloat16 and gradient.device.type == "cuda"
            found[name] = audit.report()
    return found


@pytest.fixture(scope="module")
def audits() -> dict[str, Any]:
    done = subprocess.run(python_with(shim(), "tests.cuda_path.test_loss"), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-6000:]
    return json.loads(done.stdout)


@pytest.mark.full
@pytest.mark.parametrize(("labels", "tokens", "copies"), [
    ("device", ROWS * LENGTH, 0), ("host", ROWS * LENGTH // 2, 2), ("host, all valid", ROWS * LENGTH, 1),
])  # fmt: skip
def test_products_and_copies(audits, labels, tokens, copies):
    audit = audits[labels]
    assert not audit["syncs"] and sum(audit["copies"].values()) == copies
    ran, chunks = audit["operations"], -(-tokens // CHUNK)
    # Logits, and the gradients by the head and by the hidden states.
    products = {name: count for name, count in ran.items() if "mm" in name}
    assert products == {"aten.mm.dtype": chunks, "aten.addmm.dtype_out": chunks, "aten.mm.out": chunks}
    # Nothing of the size of logits is converted, nothing of the head's is added, by an operation of its own.
    assert ran["aten._to_copy.default"] - copies == 2 * chunks  # numbers of each token
    assert ran["aten.add_.Tensor"] == chunks  # the loss


if __name__ == "__main__":
    json.dump(run(), sys.stdout)
