"""FLOPs of a mixture are those of the experts that a token is sent to."""

import pytest

from smp.models.experts import expert_layers
from smp.models.meta_model import meta_model
from smp.models.model_config import ModelConfig, resolve_model
from smp.train.flops import model_flops_per_token
from tests import experts


def test_flops_of_qwen3_30b_a3b_are_those_of_its_active_parameters():
    flops = model_flops_per_token(resolve_model(ModelConfig(model="qwen3_30b_a3b")).hf_config, 4096)
    assert flops.total == pytest.approx(27.91e9, rel=1e-3)  # 18.25 of weights, 9.66 of attention
    assert "matmul weights (of a token's experts, head included" in flops.formula


@pytest.mark.parametrize("kind", experts.KINDS)
def test_a_layer_knows_its_experts_and_its_router(kind):
    model = meta_model(experts.config_of(kind)).model
    for layer in expert_layers(model):
        module = model.get_submodule(layer.path)
        assert (layer.experts, layer.top) == (experts.EXPERTS, 4 if kind == "qwen3_moe" else 2)
        matrices = sum(p.numel() for name, p in module.named_parameters() if "bias" not in name)
        assert layer.weights == matrices // experts.EXPERTS and layer.router == 32 * experts.EXPERTS, layer
