"""fp8: what is refused and planned, which needs no torchao."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from smp.config import ParallelConfig, Settings
from smp.errors import ConfigError
from smp.memory.shape import Moment, Workload
from smp.mesh import lay_out
from smp.models.model_config import resolve_model
from smp.models.registry import family_of
from smp.parallel import fp8, fp8_gather
from smp.parallel.choices import Situation
from smp.parallel.lora import Config as LoraConfig
from smp.parallel.parallelize import shape_of
from smp.parallel.technique import Setup
from smp.plan.closed_time import _block, step_time
from smp.plan.devices import DEVICES
from smp.plan.request import read_request
from tests import experts
from tests.flags import check, hf, one_process, parse, plan_of
from tests.job import LLAMA
from tests.reference import relative
from tests.tensor_parallel import whole
from tests.unit.test_smp_v2_command_lines import said

CUDA = torch.device("cuda", 0)


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setattr(fp8, "is_installed", lambda: True)


def test_what_is_refused_before_anything_is_loaded(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(fp8, "is_installed", lambda: False)
    job = [*map(str, LLAMA), "--use_synthetic_data", "1", "--output_dir", str(tmp_path / "run")]
    sentence = "--fp8 1 computes with torchao, which is not installed: pip install torchao, or leave it out"
    assert said([*job, "--fp8", "1"], capsys) == [sentence]
    assert not (tmp_path / "run").exists()
    assert plan_of(["--fp8", 1, "--dry_run", 1, "--dry_run_world_size", 8], tmp_path).settings[fp8.Config].fp8
    wanted = "--fp8_recipe rowwise is of --fp8 1: set it, or leave the recipe out"
    assert said([*job, "--fp8_recipe", "rowwise"], capsys) == [wanted]
    for words, got in (([], "--fp8 0"), (["--fp8", "1"], "--fp8 1 --fp8_recipe rowwise_with_gw_hp")):
        wanted = f"--fp8_all_gather 1 gathers weights with one scale for a tensor, got {got}: set --fp8 1 --fp8_recipe "
        assert said([*job, *words, "--fp8_all_gather", "1"], capsys) == [f"{wanted}tensorwise, or leave it out"]


@pytest.mark.parametrize(
    ("recipe", "capability", "sentence"),
    [
        ("tensorwise", (8, 6), "of compute capability 8.9 (Ada, Hopper) or higher, and this one has 8.6: use --bf16 1"),
        ("mxfp8", (9, 0), "of compute capability 10.0 (Blackwell) or higher, and this one has 9.0: use another recipe"),
    ],
)
def test_gpus_without_fp8_are_refused(recipe, capability, sentence, installed, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    (found,) = fp8.lacking(fp8.Config(fp8=True, fp8_recipe=recipe), CUDA)
    assert found.startswith(f"--fp8 1 --fp8_recipe {recipe} needs a GPU") and sentence in found
    assert fp8.lacking(fp8.Config(), CUDA) == []
    row = dataclasses.replace(DEVICES["h100"], capability=capability)
    words = [*LLAMA, "--fp8", 1, "--fp8_recipe", recipe]
    with pytest.raises(ConfigError) as refused:
        read_request(list(map(str, words)), row, nodes=1, local=8)
    assert refused.value.problems == [found]


def problems(words, *sections, tp=1, **changes):
    config = hf(words)
    sections = (fp8.Config(fp8=True, **changes), *sections)
    return fp8.problems(config, Setup(family_of(config), lay_out(1, 1, tp), Settings(sections)))


def test_layers_of_other_sizes():
    """Outputs and inputs are multiples of 16 on each rank, of 32 with MXFP8."""
    narrow = ["--hidden_width", 40, "--llama_intermediate_size", 48]
    assert problems(["--hidden_width", 48]) == []
    (found,) = problems(narrow)
    assert found.startswith(
        "--fp8 1: no linear layer of the blocks has outputs and inputs of multiples of 16 (2 q_proj"
    )
    (found,) = problems(["--hidden_width", 48], tp=2)
    assert "multiples of 32 (" in found
    (found,) = problems(["--hidden_width", 48], fp8_recipe="mxfp8")
    assert "multiples of 32 (" in found


@check("fp8_experts")
def test_experts_need_multiples_whatever_the_ranks():
    """Tensor parallelism does not split them."""
    with pytest.raises(ConfigError, match="--fp8_experts 1 is of --fp8 1: set it, or leave this out"):
        fp8.Config(fp8_experts=True)
    config, sections = (
        experts.config_of("mixtral", hidden_size=48, head_dim=24),
        [fp8.Config(fp8=True, fp8_experts=True)],
    )
    setup = Setup(family_of(config), lay_out(1, 1, 2), Settings((*sections, ParallelConfig())))
    assert fp8.problems(config, setup) == []
    config.hidden_size = 40
    (found,) = fp8.problems(config, setup)
    assert "the model has no routed experts with outputs and inputs of multiples of 16, " in found


def test_products_are_not_left_to_overlapped_collectives():
    overlapped = ParallelConfig(tp_overlap=True)
    (found,) = problems(["--hidden_width", 64], overlapped, tp=2)
    assert found == "--tp_overlap 1 computes products inside of collectives, not in fp8: leave it out, or --fp8 1"
    for changes, chosen in (({"fp8": True}, [("tp_overlap", False)]), ({}, [])):
        situation = Situation(None, Settings((fp8.Config(**changes),)), "cuda", 1, lambda **_: True, lay_out(1, 1, 2))
        assert [(choice.name, choice.value) for choice in fp8.choose(situation)] == chosen


def test_weights_in_4_bits_are_not_gathered_in_fp8():
    changes = {"fp8_recipe": "tensorwise", "fp8_all_gather": True}
    (found,) = problems(["--hidden_width", 64], LoraConfig(lora_rank=4, qlora=True), **changes)
    assert found == "--fp8_all_gather 1: weights of --qlora 1 are gathered in 4 bits: leave it out"
    assert problems(["--hidden_width", 64], LoraConfig(lora_rank=4), **changes) == []


def planned(words, **changes):
    model = resolve_model(parse([*LLAMA, "--use_synthetic_data", 1, *words]).model)
    lora = LoraConfig(lora_rank=4 if changes.pop("adapters", False) else 0)
    settings = Settings((fp8.Config(**changes), lora))
    work = Workload(1024, 8, 2, settings, moment=Moment.LAST_BLOCK, device_type="cuda")
    return shape_of(model, settings), work


def seconds(row, **changes):
    shape, work = planned(["--hidden_width", 4096, "--llama_intermediate_size", 14336, "--num_heads", 32], **changes)
    return step_time(shape, lay_out(), work, DEVICES[row], local=1).parts["compute"]


def test_products_are_planned_faster_where_the_gpu_has_fp8():
    plain, kept, every = seconds("h100"), seconds("h100", fp8=True), seconds(
        "h100", fp8=True, fp8_recipe="tensorwise"
    )  # fmt: skip
    assert every < kept < plain < 2 * every
    assert seconds("a100_80gb", fp8=True) > seconds("a100_80gb")  # its products are those of bf16, and casts are more


def test_experts_are_planned_in_fp8():
    words = "--model_type mixtral --hidden_width 4096 --num_heads 32 --num_layers 2 --vocab_size 512"
    model, mesh = resolve_model(parse([*words.split(), "--use_synthetic_data", 1]).model), lay_out()
    settings = Settings((fp8.Config(fp8=True, fp8_experts=True),))
    work = Workload(1024, 8, 2, settings, moment=Moment.LAST_BLOCK, device_type="cuda")
    shape = shape_of(model, work.settings)
    share = shape.active / (shape.block - shape.experts + shape.active)  # of the weights of a token

    def block(**changes):
        return _block(shape, mesh, work.changed(**changes), DEVICES["h100"], merged=0)

    plain = block(fp8=False, fp8_experts=False).products
    # Parts of the products, and of those for weights' gradients, that take half the time.
    for recipe, of_layers, part, of_gradients in (
        ("rowwise", 1, 1, 1), ("rowwise_with_gw_hp", 1, 1, 0), ("tensorwise", 1, 1, 1 - share),
        ("rowwise", 0, 1 - share, 1 - share), ("tensorwise", 0, 1 - share, 1 - share),
    ):  # fmt: skip
        found = block(fp8_recipe=recipe, fp8_experts=bool(of_layers))
        halves = [found.products, found.gradients - found.products]
        assert halves == pytest.approx([plain * (1 - part / 2), plain * (1 - of_gradients / 2)]), recipe
    # A step casts a layer's rows and matrices, and has the rows and two of three matrices of each expert at once.
    tokens, inner = 8 * 1024, shape.intermediate
    assert shape.experts == 8 * 3 * 4096 * inner
    cast = 2 * tokens * (4096 + inner) + 2 * shape.experts // 3
    assert fp8.cost(shape, mesh, work)["activations"] == cast
    split = lay_out(shard=2, ep=2)
    assert fp8.cost(shape, split, work)["activations"] == cast - shape.experts // 3
    assert fp8.traffic(shape, mesh, work).moved - fp8.traffic(shape, split, work).moved == 5 * shape.experts // 2


def test_frozen_weights_are_planned_with_their_casts():
    """One for forward and one for backward, where these differ and a rank has the weights gathered all the time."""
    shape, work = planned([], fp8=True, adapters=True)
    weights = shape.layers * shape.linear
    assert fp8.cost(shape, lay_out(), work)["parameters"] == 2 * weights
    shape, other = planned([], fp8=True, fp8_recipe="tensorwise", adapters=True)
    assert fp8.cost(shape, lay_out(), other)["parameters"] == weights
    assert "parameters" not in fp8.cost(shape, lay_out(shard=2), work)
    shape, trained = planned([], fp8=True)
    cast = (8 * 1024 + shape.hidden) * shape.intermediate
    assert fp8.cost(shape, lay_out(), trained) == {"activations": cast}
    assert fp8.cost(shape, lay_out(), dataclasses.replace(trained, moment=Moment.UPDATE)) == {}


def test_gathers_in_fp8_are_planned_with_a_byte_for_a_value():
    given = {"fp8": True, "fp8_recipe": "tensorwise", "fp8_all_gather": True}
    shape, work = planned([], **given)
    mesh, less = lay_out(shard=2), (work.compute_bytes - 1) * shape.linear
    cast = shape.hidden * shape.intermediate
    assert fp8_gather.cost(shape, mesh, work) == {"gathered parameters": -2 * less, "activations": -cast}
    assert fp8_gather.cost(shape, mesh, dataclasses.replace(work, moment=Moment.UPDATE)) == {}
    split = lay_out(shard=2, tp=2)
    assert fp8_gather.cost(shape, split, work) == {"gathered parameters": -less, "activations": -cast // 2}
    shape, adapters = planned([], adapters=True, **given)
    assert fp8_gather.cost(shape, mesh, adapters)["gathered parameters"] == -2 * less
    assert fp8_gather.cost(shape, lay_out(), adapters) == {}  # cast once
    # Where weights of the computation's dtype are used as they are, what is gathered in fp8 comes besides.
    kept = dataclasses.replace(work, compute_bytes=4)
    found = fp8_gather.cost(planned([], **given)[0], lay_out(reshard_after_forward=False), kept)
    assert found["gathered parameters"] == planned([], **given)[0].layers * shape.linear
    wide = ["--hidden_width", 4096, "--llama_intermediate_size", 14336, "--num_heads", 32]
    found = []
    for changes in (given, {**given, "fp8_all_gather": False}):
        shape, work = planned(wide, **changes)
        found.append(step_time(shape, lay_out(shard=16), work, DEVICES["h100"], local=8))
    assert found[0].between < found[1].between and found[0].seconds < found[1].seconds


@check("fp8_all_gather")
def test_weights_are_gathered_in_bytes():
    pytest.importorskip("torchao")  # make test-qlora
    for words, dtype in (([], torch.bfloat16), (["--fp8_all_gather", 1], torch.uint8)):
        words = ["--hidden_width", 64, "--bf16", 1, "--fp8", 1, "--fp8_recipe", "tensorwise", *words]
        with one_process(words) as built:
            ids = torch.arange(32).reshape(2, 16)
            built.model(input_ids=ids, labels=ids)
            block = built.model.model.layers[0]._get_fsdp_state()._fsdp_param_group
            found = {each.all_gather_outputs[0].dtype for each in block.fsdp_params}
            assert found == {torch.bfloat16, dtype}  # those of norms, too


@check("fp8", "fp8_recipe")
def test_gradients_are_others():
    pytest.importorskip("torchao")  # make test-qlora
    found = []
    for words in ([], ["--fp8", 1], ["--fp8", 1, "--fp8_recipe", "tensorwise"]):
        with one_process(["--hidden_width", 64, *words]) as built:
            ids = torch.arange(32).reshape(2, 16)
            built.model(input_ids=ids, labels=ids).loss.backward()
            found.append(whole(built.model.model.layers[0].mlp.down_proj.weight.grad))
    plain, rows, tensors = found
    assert 1e-3 < relative(rows - plain, plain) < relative(tensors - plain, plain) < 0.3
