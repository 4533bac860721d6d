"""FLOPs, memory and time of a mixture are those of the experts that a token is sent to."""

import dataclasses

import pytest

from smp.config import ActivationConfig, ParallelConfig, Settings
from smp.memory.shape import Moment, Workload, model_shape
from smp.mesh import lay_out
from smp.models.experts import expert_layers
from smp.models.meta_model import meta_model
from smp.models.model_config import ModelConfig, resolve_model
from smp.parallel import activation_checkpoint
from smp.parallel.experts import traffic
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


def test_the_closed_form_of_memory_and_time_knows_experts():
    resolved = resolve_model(ModelConfig(model="qwen3_30b_a3b"))
    shape = model_shape(resolved)
    assert (shape.experts, shape.sent) == (128 * 3 * 768 * 2048, 8 * 2048)
    settings = Settings((ParallelConfig(), ActivationConfig(activation_checkpointing_mode="selective")))
    work = Workload(4096, 1, 2, settings)
    split, plain = lay_out(1, 8, ep=8), lay_out(1, 8)
    units = shape.unit_sizes(1)
    assert units.block - shape.gathered(units, split).block == shape.experts * 7 // 8
    assert shape.gathered(units, plain) == units
    moment = dataclasses.replace(work, moment=Moment.LOSS)
    more = activation_checkpoint.cost(shape, split, moment)["activations"]
    more -= activation_checkpoint.cost(shape, plain, moment)["activations"]
    assert more == 48 * 4096 * 2 * shape.sent * 2  # what selective keeps of the experts' rows, both ways
    (sent,) = traffic(shape, split, work).sent
    assert (sent.axis, sent.nbytes, sent.times) == ("ep", 4096 * shape.sent * 2, 4)
    assert not traffic(shape, plain, work).sent and traffic(shape, split, work.changed(
        activation_checkpointing_mode="full")).sent[0].times == 6  # fmt: skip
