"""Low-rank adapters: gradients, losses and files of peft in one process, at any layout."""

from __future__ import annotations

import contextlib
import re
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import smp
from smp.checkpoint import lora_merge
from smp.checkpoint.hf_export import export_hf
from smp.comm.gloo import DirectReduceScatter
from smp.config import LossConfig, Settings
from smp.errors import UserError
from smp.models import added
from smp.models.registry import family_of
from smp.optim.config import OptimConfig
from smp.optim.optimizers import build_optimizer
from smp.parallel import lora
from smp.parallel.parallelize import apply_techniques
from smp.parallel.technique import Setup
from smp.train.step import train_step
from tests.distributed import run_distributed
from tests.model_checks import in_double
from tests.reference import (
    CLIP,
    LR,
    Layout,
    build_reference,
    global_batch,
    rank_batch,
    reference_trajectory,
    relative,
    tiny_config,
)
from tests.tensor_parallel import whole

peft = pytest.importorskip("peft")
RANK, STEPS = 3, 3
LAYOUTS = {
    1: [Layout("no_shard", checkpointing=True)],
    2: [
        Layout("full_shard"),
        Layout("full_shard", tp=2, mode="selective", checkpointing=True),
        Layout("full_shard", tp=2, sequence=False, save_gathered=True),
        Layout("full_shard", cp=2),
    ],
    4: [Layout("full_shard", tp=2, accumulation=2), Layout("full_shard", tp=4), Layout("full_shard", tp=2, cp=2)],
}


def peft_of(model, **changes):
    """The model with peft's adapters of every linear layer of its blocks, B not zero."""
    torch.manual_seed(5)
    settings = {"r": RANK, "lora_alpha": 8, "target_modules": "all-linear", "init_lora_weights": False}
    return peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **(settings | changes)))


def settings_with(layout, **config) -> Settings:
    loss = LossConfig(loss_chunk_tokens=layout.chunk)
    return Settings((layout.parallel(), layout.activation(), loss, lora.Config(**config)))


def our_name(name: str) -> str:
    name = re.sub(r"\.token_adapter\.trainable_tokens_delta\.default$", ".trained_tokens", name)
    return re.sub(r"^base_model\.model\.|\.default\.weight$|\.modules_to_save\.default(?=\.)", "", name)


@contextlib.contextmanager
def reduced_sizes():
    """Yield the sizes of what is reduced to shards."""
    call, sizes = DirectReduceScatter.__call__, []

    def reduce(self, output_tensor, input_tensor, *args, **kwargs):
        sizes.append(input_tensor.numel())
        return call(self, output_tensor, input_tensor, *args, **kwargs)

    with mock.patch.object(DirectReduceScatter, "__call__", reduce):
        yield sizes


def check_layouts(name, layouts, folder, files=True):
    """Three steps from peft's file, compared with peft's own; then files that peft reads, and merged weights."""
    theirs = peft.PeftModel.from_pretrained(build_reference(name, torch.float64), folder / "adapter", is_trainable=True)
    expected = reference_trajectory(theirs, STEPS)
    gradients = {our_name(key): gradient for key, gradient in expected.gradients.items()}
    for number, layout in enumerate(layouts):
        model, mesh = build_reference(name, torch.float64), layout.mesh()
        settings = settings_with(layout, adapter_path=str(folder / "adapter"))
        setup = Setup(family_of(model.config), mesh, settings)
        apply_techniques(model, setup)
        assert {key for key, p in model.named_parameters() if p.requires_grad} == gradients.keys()
        optimizer = build_optimizer(model, OptimConfig(), lr=LR)
        for step in range(STEPS):
            found = {}
            hook = optimizer.register_step_pre_hook(
                lambda *_, m=model, f=found: f.update(
                    {n: whole(p.grad) for n, p in m.named_parameters() if p.requires_grad}
                )
            )
            batch = rank_batch(step, mesh.data_rank, mesh.data_size, layout.accumulation)
            with reduced_sizes() as sizes:
                result = train_step(model, optimizer, batch, setup=setup, device=torch.device("cpu"), grad_clip=CLIP)
            adapters_alone = all(".lora_" in key for key in gradients)
            if (
                layout == Layout("full_shard") and adapters_alone
            ):  # the factors alone are reduced, once, and padded to the ranks
                rows = sum(-(-p.shape[0] // 2) * 2 * p.shape[1] for p in model.parameters() if p.requires_grad)
                assert sum(sizes) == rows and len(sizes) == 3  # blocks
            hook.remove()
            assert abs(result.loss() - expected.losses[step]) <= 1e-9 * expected.losses[step], (layout, step)
            for key, gradient in found.items() if step == 0 else ():
                assert relative(gradient - gradients[key], gradients[key]) <= 1e-9, (layout, key)
        assert len(optimizer.state) == len(gradients)
        if files:
            check_files(model, settings, name, folder / f"{number}")


def check_files(model, settings, name, folder):
    """What is exported gives peft the values here; merged weights are peft's bit for bit."""
    export_hf(model, folder / "adapter")
    parameters, of = lora_merge.merged(model, settings)
    export_hf(parameters, folder / "merged", hf_config=model.config, read=of)
    ours = {key: whole(p).detach() for key, p in model.named_parameters() if p.requires_grad}
    if dist.get_rank() == 0:
        theirs = peft.PeftModel.from_pretrained(build_reference(name, torch.float64), folder / "adapter")
        loaded = {our_name(key): p for key, p in theirs.named_parameters() if our_name(key) in ours}
        assert loaded.keys() == ours.keys() and all(torch.equal(ours[key], p) for key, p in loaded.items())
        plain = theirs.merge_and_unload().state_dict()
        merged = AutoModelForCausalLM.from_pretrained(folder / "merged", dtype=torch.float64).state_dict()
        assert merged.keys() == plain.keys()
        assert all(torch.equal(tensor, plain[key]) for key, tensor in merged.items())
    dist.barrier()


@pytest.mark.parametrize(("name", "world_size"), [
    ("llama_gqa", 1), ("gpt_neox", 1), ("llama_gqa", 2),
    *(pytest.param(*case, marks=pytest.mark.full) for case in (("gpt_neox", 2), ("llama_gqa", 4))),
    pytest.param("gpt_neox", 4, marks=pytest.mark.slow),
])  # fmt: skip
def test_steps_and_files_are_those_of_peft(name, world_size, tmp_path):
    peft_of(build_reference(name, torch.float64)).save_pretrained(tmp_path / "adapter")
    run_distributed(check_layouts, name, LAYOUTS[world_size], tmp_path, world_size=world_size)


def check_in_double(name, layouts, folder):
    with in_double():
        check_layouts(name, layouts, folder)


@pytest.mark.parametrize("name", ["minicpm3", "lfm2"])
@pytest.mark.full
def test_adapters_of_layers_that_tensor_parallelism_does_not_split(name, tmp_path):
    model = build_reference(name, torch.float64)
    peft_of(model).save_pretrained(tmp_path / "adapter")
    family_of(model.config)  # derived in fp32, as always
    layouts = [layout for layout in LAYOUTS[2] if layout.tp == 2]
    run_distributed(check_in_double, name, layouts, tmp_path, world_size=2)


def check_script(folder):
    """Compare a script with peft, what it computes and what it exports; return its model."""
    smp.init(tensor_parallel_degree=2)
    model = smp.parallelize(smp.lora(build_reference("llama_gqa", torch.float64), adapter_path=folder / "adapter"))
    theirs = peft.PeftModel.from_pretrained(build_reference("llama_gqa", torch.float64), folder / "adapter")
    inputs, _ = global_batch(0)
    wanted = theirs(input_ids=inputs).logits
    assert relative(whole(model(input_ids=inputs).logits) - wanted, wanted) <= 1e-9
    smp.export_hf(model, folder / "again")
    again, first = (load_file(folder / name / "adapter_model.safetensors") for name in ("again", "adapter"))
    assert again.keys() == first.keys() and all(torch.equal(again[key], first[key]) for key in first)
    return model


def script(folder):
    trained = [parameter for parameter in check_script(folder).parameters() if parameter.requires_grad]
    assert len(trained) == 2 * 7 * 3


def test_a_script_adds_adapters(tmp_path):
    peft_of(build_reference("llama_gqa", torch.float64)).save_pretrained(tmp_path / "adapter")
    run_distributed(script, tmp_path, world_size=2)


def adapters_of_a_script():
    """The seed of smp.lora, and what a script has written into its adapters, are what is trained."""
    smp.init()
    model = smp.lora(build_reference("llama_gqa", torch.float32), 2, seed=5)
    adapters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    with torch.no_grad():
        for name, parameter in adapters.items():
            if name.endswith("lora_B"):
                parameter.fill_(0.5)
    wanted = {name: parameter.detach().clone() for name, parameter in adapters.items()}
    found = dict(smp.parallelize(model).named_parameters())
    assert len(wanted) == 2 * 7 * 3 and all(torch.equal(whole(found[name]), values) for name, values in wanted.items())


def test_adapters_keep_the_values_that_a_script_gave_them():
    run_distributed(adapters_of_a_script, world_size=2)


def test_a_script_is_refused_what_cannot_be_done():
    model = build_reference("llama_gqa", torch.float32)
    with pytest.raises(UserError, match="give a rank"):
        smp.lora(model)
    with pytest.raises(
        UserError, match=r"q_prj is the end of no linear layer's name in the blocks; there are down_proj"
    ):
        smp.lora(model, 2, target_modules=["q_prj"])
    smp.lora(model, 2, target_modules=["q_proj"])
    assert sum(p.requires_grad for p in model.parameters()) == 2 * 3
    with pytest.raises(UserError, match="has adapters already"):
        smp.lora(model, 2)


def inject_after_sharding(sharded):
    smp.init()
    model = sharded(build_reference("llama_gqa", torch.float64))
    peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["q_proj"]), model)
    with pytest.raises(UserError, match=r"lora_A.default.weight was added to the model after (smp|FSDP)"):
        model(input_ids=global_batch(0)[0])


@pytest.mark.parametrize("sharded", [smp.parallelize, smp.FSDP])
def test_adapters_that_are_injected_too_late_are_refused(sharded):
    run_distributed(inject_after_sharding, sharded, world_size=2)


def frozen_in_bf16():
    """The frozen parameters are those that ranks gathered before, in half the bytes."""
    smp.init(random_seed=3)
    losses = []
    for narrow in (True, False):
        with mock.patch.object(added, "narrow_frozen_", added.narrow_frozen_ if narrow else lambda *_: None):
            model = smp.parallelize(smp.lora(smp.meta_init(tiny_config("llama_gqa")), 2), dtype=torch.bfloat16)
        dtypes = {p.dtype for p in model.parameters() if not p.requires_grad}
        assert dtypes == {torch.bfloat16 if narrow else torch.float32}
        assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
        for step in range(2):
            inputs, labels = global_batch(step)
            loss = model(input_ids=inputs, labels=labels).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses[:2] == losses[2:] and losses[0] != losses[1]


def test_frozen_parameters_take_the_bytes_that_are_computed_with():
    run_distributed(frozen_in_bf16, world_size=2)
