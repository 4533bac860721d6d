import ctypes
import subprocess
import sys
from pathlib import Path

import pytest

from smp.plan.kernels import Product
from smp.plan.packed import _shortened, packed_bytes
from smp.plan.records import Operation, TensorShape

REPOSITORY = Path(__file__).parents[2]
MIB = 2**20


def product_of(rows, inner, columns, dtype="float32"):
    shapes = (rows, inner), (inner, columns), (rows, columns)
    left, right, result = (TensorShape(shape, dtype) for shape in shapes)
    return Operation("aten.mm.default", (left, right), (result,))


pytestmark = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="needs a glibc that tells")


# In a process of its own, as a plan is made: in this one a test may have run products.
KEPT = """
from tests.unit.test_plan_packed import packed_bytes, product_of
for dtype in ("float32", "bfloat16"):
    operations = [product_of(512, 256, 1024, dtype), product_of(512, 1024, 256, dtype)]
    print(packed_bytes(operations), packed_bytes(operations))
"""


@pytest.mark.full
def test_products_keep_some_megabytes_and_always_as_many():
    printed = subprocess.check_output([sys.executable, "-c", KEPT], cwd=REPOSITORY, text=True)
    kept = [tuple(map(int, line.split())) for line in printed.splitlines()]
    assert len(kept) == 2 and kept[0][0] > 0  # processors without instructions for bfloat16 keep nothing of it
    for found, again in kept:
        assert found == again <= 64 * MIB and found % MIB == 0


def test_what_computes_no_product_keeps_nothing():
    tokens = TensorShape((512, 256), "float32")
    assert packed_bytes([Operation("aten.add.Tensor", (tokens, tokens), (tokens,))]) == 0


def test_a_product_runs_once(monkeypatch):
    ran = []
    monkeypatch.setattr("smp.plan.packed.in_child", lambda call: call())
    monkeypatch.setattr("smp.plan.packed._kept", lambda products: ran.extend(products) or 0)
    gradients = [product_of(512, 1024, 256), product_of(1024, 512, 256)]
    packed_bytes([product_of(512, 256, 1024), *gradients, product_of(512, 256, 1024)])
    assert ran == [Product(512, 256, 1024, 1, "float32")]


def test_a_large_product_is_shortened():
    assert _shortened(Product(4096, 8192, 131072, 1, "bfloat16")) == Product(1024, 1024, 8192, 1, "bfloat16")
