"""Routed experts in fp8 on fake CUDA tensors: torch's checks of each grouped product, their number, and copies."""

import pytest

from tests.cuda_path.reports import BLOCKS, by_file, report

pytestmark = pytest.mark.full
pytest.importorskip("torchao")
MIXTRAL = (
    *("--model_type", "mixtral", "--hidden_width", "1024", "--num_heads", "8", "--num_layers", str(BLOCKS)),
    *("--fp8", "1", "--fp8_experts", "1"),
    *("--max_context_width", "1024", "--train_batch_size", "1", "--vocab_size", "1024"),
)  # fmt: skip


@pytest.mark.parametrize("ep", [1, 2])
@pytest.mark.parametrize(("recipe", "in_fp8", "file"), [
    ("rowwise_with_gw_hp", 2, "smp/parallel/experts/compute.py"), ("rowwise", 3, "smp/parallel/fp8_experts.py"),
])  # fmt: skip
def test_grouped_products(recipe, in_fp8, file, ep):
    found = report(*MIXTRAL, "--fp8_recipe", recipe, "--expert_parallel_degree", str(ep))
    step, products = found["steps"][-1], 2 * BLOCKS
    assert f"{products} of {products} grouped products of routed experts." in found["log"]
    ran = {name: count for name, count in step["operations"].items() if "grouped" in name}
    kept = {"aten._grouped_mm.default": products} if in_fp8 == 2 else {}
    assert ran == {"aten._scaled_grouped_mm.default": in_fp8 * products, **kept}
    # The rows of each expert, once for a product and its gradients.
    copies = {where: count for where, count in by_file(step["copies"]).items() if "expert" in where}
    assert copies == {f"cpu to cuda, blocking @ {file}": products}
