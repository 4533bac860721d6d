"""smp in a user's own script."""

from __future__ import annotations

import copy
import dataclasses
import json
import tempfile

import pytest
import torch
import torch.distributed as dist
import transformers
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor

import smp
from smp.models import registry
from smp.optim.config import OptimConfig
from smp.optim.optimizers import build_optimizer
from smp.parallel import parallelize
from tests.distributed import run_distributed
from tests.reference import CLIP, LR, VOCABULARY, build_reference, global_batch, reference_trajectory, relative


def _script(expected, config):
    """Train in a user's own loop, as docs/library.md shows it."""
    assert not smp.is_initialized()
    mesh = smp.init(config)
    assert smp.is_initialized() and mesh.data_size == 2
    model = smp.parallelize(build_reference("llama_gqa", torch.float64), activation_checkpointing=True)
    optimizer = build_optimizer(model, OptimConfig(), lr=LR)
    for step, wanted in enumerate(expected.losses):
        inputs, labels = (part.chunk(mesh.data_size)[mesh.data_rank] for part in global_batch(step))
        tokens = torch.tensor(smp.count_valid_tokens(labels))
        dist.all_reduce(tokens)
        loss = smp.causal_lm_loss_sum(model(inputs, use_cache=False).logits, labels) / tokens
        loss.backward()
        norm = smp.clip_grad_norm_(model, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach()
        dist.all_reduce(loss)
        assert loss.item() == pytest.approx(wanted, rel=1e-9)
        assert norm.item() == pytest.approx(expected.norms[step], rel=1e-8)


@pytest.mark.smoke
def test_a_users_loop(tmp_path):
    (tmp_path / "smp.json").write_text(json.dumps({"hybrid_shard_degree": 2}))
    expected = reference_trajectory(build_reference("llama_gqa", torch.float64), 3)
    run_distributed(_script, expected, str(tmp_path / "smp.json"), world_size=2)


def _gradients(expected, layout):
    mesh = smp.init(**layout)
    for reduction, gradients in expected.items():
        _check_gradients(gradients, mesh, reduction)


def _check_gradients(expected, mesh, reduction):
    model = smp.parallelize(build_reference("llama_gqa", torch.float64), gradient_reduction=reduction)
    inputs, labels = (part.chunk(mesh.data_size)[mesh.data_rank] for part in global_batch(0))
    tokens = torch.tensor(smp.count_valid_tokens(labels))
    if reduction == "sum":
        dist.all_reduce(tokens, group=mesh.data_group)
    (smp.causal_lm_loss_sum(model(inputs, use_cache=False).logits, labels) / tokens).backward()
    for name, parameter in model.named_parameters():
        assert relative(parameter.grad.full_tensor() - expected[name], expected[name]) < 1e-9, (reduction, name)


@pytest.mark.parametrize(
    "layout", [{"dp_shard": 2}, {"dp_shard": 1}, {"dp_shard": 2, "dp_replicate": 2}, {"tp": 2}], ids=str
)
def test_gradients_are_summed_or_averaged_over_data_ranks(layout):
    """The mean over all tokens, or the mean of the ranks' means: they have unequal numbers of tokens."""
    world = 2 * layout.get("dp_replicate", 1)
    size, expected = world // layout.get("tp", 1), {}
    inputs, labels = global_batch(0)
    total = smp.count_valid_tokens(labels)
    for reduction in ("sum", "mean"):
        model = build_reference("llama_gqa", torch.float64)
        for rows, wanted in zip(inputs.chunk(size), labels.chunk(size), strict=True):
            loss = smp.causal_lm_loss_sum(model(rows, use_cache=False).logits, wanted)
            (loss / (total if reduction == "sum" else size * smp.count_valid_tokens(wanted))).backward()
        expected[reduction] = {name: parameter.grad for name, parameter in model.named_parameters()}
    run_distributed(_gradients, expected, layout, world_size=world)


def _keywords():
    mesh = smp.init(dp_shard=2, tp=2, dp_replicate=1)
    assert (mesh.shard.size, mesh.tp.size, mesh.replicas.size) == (2, 2, 1)
    assert smp.init({"dp_shard": 1}, tensor_parallel_degree=4).tp.size == 4
    assert smp.init({"shard_degree": 2}, sharding_strategy="_hybrid_shard_zero2").replicas.size == 2
    for config, settings, sentence in (
        ({}, {"dp_shrad": 2}, "unknown key dp_shrad: did you mean dp_shard"),
        (
            {"hybrid_shard_degree": 2},
            {"dp_shard": 4},
            "hybrid_shard_degree and dp_shard are given for the same setting",
        ),
        ({"tp": 2}, {"tp": 4}, "tp and tp are given for the same setting: give one"),
        ({}, {"dp_shard": 2, "dp_replicate": 4}, "dp_replicate 4, but 4 processes make dp_replicate 2 x dp_shard 2"),
        ({}, {"tp": 3}, "does not divide the 4 processes"),
    ):
        with pytest.raises(smp.UserError, match=sentence):
            smp.init(config, **settings)
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        file.write('{"tp": 2, "tp": 4}')
        file.flush()
        with pytest.raises(smp.UserError, match="a key appears twice"):
            smp.init(file.name)


def test_init_takes_settings_by_keyword():
    run_distributed(_keywords, world_size=4)


def _pretrained(layout, folder):
    smp.init(**layout, random_seed=5)
    reference = build_reference("llama_tied", torch.float32)
    if dist.get_rank() == 0:
        reference.save_pretrained(folder / "given")
    dist.barrier()
    meta = smp.meta_init(reference.config)
    assert all(parameter.is_meta for parameter in meta.parameters())
    model = smp.parallelize(meta, gradient_reduction="mean")
    values = {name: parameter.full_tensor() for name, parameter in model.named_parameters()}
    same = _drawn(reference.config)
    assert values.keys() == same.keys() and all(torch.equal(values[name], same[name]) for name in same)
    inputs, _ = global_batch(0)
    model(inputs)  # leaves parameters gathered
    assert smp.load_pretrained(model, str(folder / "given")) is model
    assert torch.allclose(_logits(model, inputs), reference(inputs).logits, atol=1e-5)
    smp.export_hf(model, str(folder / "exported"))
    exported = transformers.AutoModelForCausalLM.from_pretrained(folder / "exported")
    for name, parameter in reference.named_parameters():
        assert torch.equal(exported.get_parameter(name), parameter), name
    with pytest.raises(smp.UserError, match="no weights at /nowhere"):
        smp.load_pretrained(model, "/nowhere")


def _logits(model, inputs):
    logits = model(inputs).logits
    return logits.full_tensor() if isinstance(logits, DTensor) else logits


def _drawn(config):
    """The initial values of seed 5 as one process draws them."""
    model = smp.meta_init(config)
    parallelize.fill_model(model, config, device=torch.device("cpu"), cpu_offload=False, seed=5)
    return dict(model.named_parameters())


@pytest.mark.parametrize("layout", [{"dp_shard": 2}, pytest.param({"tp": 2}, marks=pytest.mark.smoke)], ids=str)
def test_a_model_is_built_on_meta_and_loaded_and_exported(layout, tmp_path):
    run_distributed(_pretrained, layout, tmp_path, world_size=2)


def _meta_on_some_ranks():
    smp.init(dp_shard=2)
    reference = build_reference("llama_gqa", torch.float32)
    with pytest.raises(smp.UserError, match="on the meta device on 1 of 2 ranks"):
        smp.parallelize(reference if dist.get_rank() == 0 else smp.meta_init(reference.config))
    with pytest.raises(smp.UserError, match="gradient_reduction 'max' is not allowed: give sum or mean"):
        smp.parallelize(reference, gradient_reduction="max")


def test_a_meta_model_on_some_ranks_is_refused():
    run_distributed(_meta_on_some_ranks, world_size=2)


def _own_weights(config):
    """Each rank makes its own model: of another seed, then with other values of one added token alone."""
    smp.init(**config)
    reference = build_reference("llama_gqa", torch.float32)
    for call in (smp.parallelize, smp.transform) if "tp" in config else (smp.parallelize,):
        sentence = f"^smp.{call.__name__}: rank 1 disagrees with rank 0 on the values of {{}}: checksum .*manual_seed"
        torch.manual_seed(dist.get_rank())
        with pytest.raises(smp.UserError, match=sentence.format("model.embed_tokens.weight")):
            call(type(reference)(reference.config))
        one = copy.deepcopy(reference)
        one.lm_head.weight.data[-1] = dist.get_rank()
        with pytest.raises(smp.UserError, match=sentence.format("lm_head.weight")):
            call(one)
    torch.manual_seed(dist.get_rank())
    model = smp.transform(type(reference)(reference.config), load_state_dict_from_rank0=True)
    smp.parallelize(model)  # of rank 0's values on both
    smp.parallelize(smp.transform(reference))


@pytest.mark.parametrize("config", [{}, {"tp": 2}], ids=str)
def test_weights_that_each_rank_made_for_itself_are_refused(config):
    run_distributed(_own_weights, config, world_size=2)


def _refusals():
    model = torch.nn.Linear(1, 1)
    model.config = transformers.GPT2Config(vocab_size=VOCABULARY)
    with pytest.raises(smp.UserError, match=r"call smp.init\(\{\.\.\.\}\) before"):
        smp.parallelize(model)
    with pytest.raises(smp.UserError, match="unknown key shard_degre: did you mean shard_degree"):
        smp.init({"shard_degre": 1})
    with pytest.raises(smp.UserError, match="JSON"):
        smp.init("/nowhere.json")
    with pytest.raises(smp.UserError, match="does not divide"):
        smp.init({"shard_degree": 5})
    smp.init({"shard_degree": 1})
    with pytest.raises(smp.UserError, match=r"\(Linear\) has no transformer.h, as gpt2 models of transformers have"):
        smp.parallelize(model)
    model.config = transformers.CLIPConfig()
    with pytest.raises(smp.UserError, match="transformers has no causal language model of this type"):
        smp.parallelize(model)


def test_refusals():
    run_distributed(_refusals, world_size=1)


def _transformed_script(expected, config):
    """SMP v2's way: transform, then shard; the model's own loss."""
    smp.init(config)
    model = smp.parallelize(smp.transform(_weights_on_rank_0("llama_tied"), load_state_dict_from_rank0=True))
    optimizer = build_optimizer(model, OptimConfig(), lr=LR)
    for step, wanted in enumerate(expected.losses):
        inputs, labels = global_batch(step)
        loss = model(input_ids=inputs, labels=labels).loss
        loss.backward()
        norm = smp.clip_grad_norm_(model, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        assert loss.item() == pytest.approx(wanted, rel=1e-9)
        assert norm.item() == pytest.approx(expected.norms[step], rel=1e-8)


def _weights_on_rank_0(name):
    """The model, without values on other ranks: rank 1 has it on the meta device."""
    model = build_reference(name, torch.float64)
    if dist.get_rank() != 1:
        return model
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            module._parameters[name] = torch.nn.Parameter(parameter.detach().to("meta"))
        for name, buffer in list(module.named_buffers(recurse=False)):
            module._buffers[name] = buffer.to("meta")
    if model.config.tie_word_embeddings:
        model.lm_head._parameters["weight"] = model.get_input_embeddings()._parameters["weight"]
    return model


def _unsplit():
    smp.init({"tensor_parallel_degree": 1})
    model = smp.transform(_weights_on_rank_0("llama_tied"), load_state_dict_from_rank0=True)
    assert model.lm_head.weight is model.get_input_embeddings().weight
    inputs, _ = global_batch(0)
    assert torch.equal(model(inputs).logits, build_reference("llama_tied", torch.float64)(inputs).logits)


def test_an_unsplit_model_takes_weights_from_rank_0():
    run_distributed(_unsplit, world_size=2)


def test_transform_takes_weights_from_rank_0():
    expected = reference_trajectory(build_reference("llama_tied", torch.float64), 3)
    config = {"tensor_parallel_degree": 2, "sm_activation_offloading": False, "random_seed": 3}
    run_distributed(_transformed_script, expected, config, world_size=2)


def _state_of_eight():
    with pytest.raises(smp.UserError, match=r"smp.state needs a mesh: call smp.init"):
        _ = smp.state.tp_process_group
    smp.init({"tensor_parallel_degree": 2, "hybrid_shard_degree": 2})
    state, rank = smp.state, dist.get_rank()
    assert (state.rank, state.world_size) == (rank, 8)
    assert (state.tensor_parallel_degree, state.tp_size, state.hybrid_shard_degree) == (2, 2, 2)
    assert state.tp_rank == rank % 2
    assert dist.get_process_group_ranks(state.tp_process_group) == [rank // 2 * 2, rank // 2 * 2 + 1]
    assert state.world_process_group is dist.group.WORLD
    assert dist.get_process_group_ranks(state.rep_rank_process_group) == [rank % 4, rank % 4 + 4]
    assert [state.ranker.get_rep_rank(r) for r in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert state.ranker.get_rep_groups() == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert (state.cp_size, state.cp_rank, state.ep_size, state.ep_rank) == (1, 0, 1, 0)
    assert not state.sm_activation_offloading
    assert str(state).startswith(f"State(rank={rank}, world_size=8, hybrid_shard_degree=2, tensor_parallel_degree=2, ")
    torch.manual_seed(0)
    before = torch.get_rng_state()
    with state.get_rng_state_tracker().fork():
        mine = torch.rand(4)
    drawn: list = [None] * 8
    dist.all_gather_object(drawn, mine.tolist())
    assert drawn[0] != drawn[1] and drawn[0] == drawn[2]  # differs in a tensor-parallel group, and only there
    torch.set_rng_state(before)
    with state.get_rng_state_tracker().fork():
        assert torch.equal(torch.rand(4), mine)


def test_state_shows_its_fields_even_before_init():
    assert str(smp.state) == "State(smp.init has not been called)"


def test_state_tells_what_smp_v2_told():
    run_distributed(_state_of_eight, world_size=8)


def _new_family():
    """A user's own architecture: Llama's layers under other names."""
    model = build_reference("llama_gqa", torch.float64)
    model.config.model_type = "my_llama"
    known = dataclasses.asdict(registry.FAMILIES["llama"])
    family = smp.Family(**{**known, "name": "mine", "hf_model_type": "my_llama", "tensor_plan": None})
    smp.init({"tensor_parallel_degree": 2})
    with pytest.raises(smp.UserError, match="'my_llama' is not supported"):
        smp.transform(model)
    smp.register_family(family)
    with pytest.raises(smp.UserError, match="exists: choose another name"):
        smp.register_family(family)
    with pytest.raises(smp.UserError, match="'my_llama' has no tensor-parallel plan"):
        smp.transform(model)
    parts = (
        smp.Part("self_attn", ("q_proj", "k_proj", "v_proj"), "o_proj", heads=True, key_value=("k_proj", "v_proj")),
    )
    for plan, sentence in (
        (smp.TensorPlan((*parts, smp.Part("mlp", ("gate",), "down_proj"))), "names gate, which .*mlp does not have"),
        (smp.TensorPlan((*parts, smp.Part("mlp", ("act_fn",), "down_proj"))), "splits act_fn .* only nn.Linear"),
    ):
        registry.FAMILIES["mine"] = dataclasses.replace(family, tensor_plan=plan)
        with pytest.raises(smp.UserError, match=sentence):
            smp.transform(build_as(model.config))
    # Attention alone is split; the MLP then runs on a rank's tokens.
    registry.FAMILIES["mine"] = dataclasses.replace(family, tensor_plan=smp.TensorPlan(parts))
    inputs, labels = global_batch(0)
    expected = model(input_ids=inputs).logits
    split = smp.transform(copy.deepcopy(model))
    found = split(input_ids=inputs, labels=labels)
    assert torch.allclose(found.logits.full_tensor(), expected, rtol=1e-12, atol=1e-12)


def build_as(config):
    model = build_reference("llama_gqa", torch.float64)
    model.config = config
    return model


def test_a_users_own_family():
    run_distributed(_new_family, world_size=2)


def _bad_transforms():
    model = build_reference("llama_gqa", torch.float64)
    with pytest.raises(smp.UserError, match=r"smp.transform needs a mesh: call smp.init"):
        smp.transform(model)
    smp.init({"tensor_parallel_degree": 1})
    with pytest.raises(smp.UserError, match=r"config is an object: give smp\.MoEConfig"):
        smp.transform(model, config=object())
    with pytest.raises(smp.UserError, match="cp_comm_type"):
        smp.transform(model, cp_comm_type="ring")
    assert smp.transform(model, dtype=torch.float32) is model
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    for key, value in (("sm_activation_offloading", 3), ("activation_loading_horizon", 0), ("random_seed", -1)):
        with pytest.raises(smp.UserError, match=f"smp.init: {key}"):
            smp.init({key: value})
    with pytest.raises(smp.UserError, match="does not divide the 1 processes"):
        smp.init({"tensor_parallel_degree": 2})


def test_bad_transforms():
    run_distributed(_bad_transforms, world_size=1)


def _mesh_device(backend, cuda, expected):
    """Check the device type of the mesh when a real group has the backends that torch resolves ``backend`` to."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: cuda)
        patch.setattr(torch._C, "_get_accelerator", lambda: torch.device("cuda" if cuda else "cpu"))
        resolved = str(distributed_c10d.BackendConfig(dist.Backend(backend)))
        patch.setitem(distributed_c10d._world.pg_backend_config, dist.group.WORLD, resolved)
        patch.setattr(smp.mesh.Mesh, "join", lambda laid_out, device_type: device_type)
        assert smp.init() == expected, resolved


# "undefined" is torch's name for the backend of init_process_group().
@pytest.mark.parametrize(
    ("backend", "cuda", "expected"),
    [
        ("undefined", True, "cuda"),
        ("undefined", False, "cpu"),
        ("nccl", True, "cuda"),
        ("cpu:gloo,cuda:nccl", True, "cuda"),
        ("cpu:gloo,cuda:nccl", False, "cpu"),
        ("gloo", True, "cpu"),
        ("smddp", True, "cuda"),
        ("cpu:smddp", True, "cpu"),
    ],
)
def test_the_mesh_is_where_the_backend_serves(backend, cuda, expected):
    run_distributed(_mesh_device, backend, cuda, expected, world_size=1)


def test_init_needs_a_process_group():
    with pytest.raises(smp.UserError, match="init_process_group"):
        smp.init()
