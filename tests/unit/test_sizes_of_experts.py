"""FLOPs, memory and time of a mixture are those of the experts that a token is sent to."""

import dataclasses

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from smp.config import ActivationConfig, LossConfig, ParallelConfig, Settings
from smp.memory.estimate import memory_at, worst_case_bytes
from smp.memory.shape import Moment, Workload, model_shape
from smp.mesh import lay_out
from smp.models.experts import expert_layers
from smp.models.meta_model import meta_model
from smp.models.model_config import ModelConfig, resolve_model
from smp.optim.config import OptimConfig
from smp.parallel import activation_checkpoint
from smp.parallel.experts import traffic
from smp.parallel.experts.compute import multiply
from smp.parallel.parallelize import settings_of
from smp.plan.closed_time import step_time
from smp.plan.devices import DEVICES
from smp.train.arguments import parse_args
from smp.train.dry_run import sharded_parameters
from smp.train.flops import model_flops_per_token
from tests import experts


def test_flops_of_qwen3_30b_a3b_are_those_of_its_active_parameters():
    flops = model_flops_per_token(resolve_model(ModelConfig(model="qwen3_30b_a3b")).hf_config, 4096)
    assert flops.total == pytest.approx(27.91e9, rel=1e-3)  # 18.25 of weights, 9.66 of attention
    assert "matmul weights (of a token's experts, head included" in flops.formula


@pytest.mark.parametrize(
    ("name", "active"), [("mixtral_8x7b", 12_879_925_248), ("qwen3_30b_a3b", 3_353_032_704), ("llama3_8b", None)]
)
def test_active_parameters_are_those_of_a_tokens_experts(name, active):
    shape = model_shape(resolve_model(ModelConfig(model=name)))
    assert shape.active_parameters == (active or shape.parameters)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_of_experts_are_planned_in_each_dtype(dtype):
    with FakeTensorMode():
        found = multiply(torch.empty(6, 16, dtype=dtype), torch.empty(3, 32, 16, dtype=dtype), [1, 2, 3])
    assert found.shape == (6, 32) and found.dtype == dtype


@pytest.mark.parametrize("kind", experts.KINDS)
def test_a_layer_knows_its_experts_and_its_router(kind):
    model = meta_model(experts.config_of(kind)).model
    for layer in expert_layers(model):
        module = model.get_submodule(layer.path)
        assert (layer.experts, layer.top) == (experts.EXPERTS, 4 if kind == "qwen3_moe" else 2)
        matrices = sum(p.numel() for name, p in module.named_parameters() if "bias" not in name)
        assert layer.weights == matrices // experts.EXPERTS and layer.router == 32 * experts.EXPERTS, layer
        assert layer.parameters == sum(p.numel() for p in module.parameters()) // experts.EXPERTS


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


@pytest.mark.parametrize(
    "degrees", [{"shard": 4, "ep": 2}, {"tp": 2}, {"shard": 2, "tp": 2, "ep": 2}, {"tp": 4, "ep": 2}]
)
def test_the_closed_form_counts_what_ranks_store_and_gather(degrees):
    resolved = resolve_model(ModelConfig(model="mixtral_tiny"))
    shape, mesh = model_shape(resolved), lay_out(**degrees)
    settings = Settings((ParallelConfig(sequence_parallel=True), ActivationConfig(), LossConfig(), OptimConfig()))
    shapes = sharded_parameters(resolved, mesh, settings)
    units, shard, ep = shape.unit_sizes(mesh.tp.size, mesh.degree("ep")), mesh.shard.size, mesh.degree("ep")
    stored = sum(local.numel() for _, local in shapes.values())
    assert units.parameters / shard == pytest.approx(stored, rel=1e-3)  # norms count as split
    block = {name: sizes for name, sizes in shapes.items() if ".layers.0." in name}
    gathered = sum(
        full.numel() // ep if ".experts." in name else local.numel() * shard for name, (full, local) in block.items()
    )
    found = shape.gathered(units, mesh)
    assert found.block == pytest.approx(gathered, rel=1e-3)
    assert found.parameters - units.parameters == shape.layers * (found.block - units.block)


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_the_worst_case_is_all_tokens_at_one_ranks_experts(mode):
    shape = model_shape(resolve_model(ModelConfig(model="qwen3_30b_a3b")))
    assert [shape.most_imbalance(ep) for ep in (1, 2, 8, 32)] == [1, 2, 8, 16]  # 4 experts of the 8 that a token has
    activation = ActivationConfig(activation_checkpointing=mode != "none", activation_checkpointing_mode=(
        "selective" if mode == "selective" else "full"))  # fmt: skip
    settings = Settings((ParallelConfig(), activation, LossConfig(), OptimConfig()))
    work, mesh = Workload(4096, 1, 2, settings), lay_out(1, 8, ep=8)
    assert worst_case_bytes(shape, lay_out(1, 8), work) == 0
    rows = 7 * 4096 * 2  # those beyond balanced ones, of bf16
    blocks = {"none": 48 * shape.routed, "selective": 48 * shape.sent + shape.routed, "full": shape.routed}[mode]
    balanced, worst = (memory_at(shape, mesh, dataclasses.replace(work, imbalance=most)) for most in (1, 8))
    assert worst["activations"] - balanced["activations"] == rows * blocks
    assert 0 < worst_case_bytes(shape, mesh, work) <= 1.1 * rows * blocks  # balanced ones may need most at the loss


def test_the_closed_form_of_time_gathers_all_experts_and_multiplies_by_a_tokens():
    shape = model_shape(resolve_model(ModelConfig(model="mixtral_8x7b")))
    settings = parse_args(["--model", "mixtral_8x7b", "--use_synthetic_data", "1"]).flat()
    work = Workload(4096, 1, 2, settings_of(settings))
    one, split = (step_time(shape, lay_out(1, 8, ep=ep), work, DEVICES["h100"], local=8) for ep in (1, 8))
    assert one.parts["compute"] == split.parts["compute"]
    sent = 7 / 8 * 2 * shape.layers * (shape.experts * 7 / 8)  # bf16, each time that a block is gathered
    of_gradients = 7 / 8 * 4 * shape.layers * (shape.experts * 7 / 8)
    exchanged = 7 / 8 * traffic(shape, lay_out(1, 8, ep=8), work).sent[0].nbytes * 6 * shape.layers
    assert one.inside - split.inside == pytest.approx(2 * sent + of_gradients - exchanged, rel=0.01)
