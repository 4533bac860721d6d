"""The memory prediction: exact where it can be, and on the right side of the refusal."""

from __future__ import annotations

import dataclasses
import os
import re
import resource
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from smp import runtime
from smp.config import ActivationConfig, CommConfig, LossConfig, ParallelConfig, Settings
from smp.errors import UserError
from smp.faults.guard import Guard
from smp.memory import limits
from smp.memory.advice import changes_that_help
from smp.memory.estimate import estimate_memory, memory_at, peak_bytes, processes_that_fit
from smp.memory.host import check_host_memory, estimate_host_memory
from smp.memory.limits import CONTEXT_BYTES, agree_on_memory, available_memory
from smp.memory.shape import Moment, Workload, model_shape
from smp.mesh import lay_out
from smp.models.model_config import ModelConfig, resolve_model
from smp.optim.config import OptimConfig
from smp.parallel import lora, parallelize
from smp.plan.cost import checkpoint_bytes
from smp.train import checked_job, dry_run
from smp.train.dry_run import report, sharded_parameters
from smp.units import GIB
from tests.distributed import run_distributed
from tests.job import run_job

WHOLE_LOGITS = Settings((ParallelConfig(), ActivationConfig(), LossConfig(loss_chunk_tokens=0)))
WORK = Workload(sequence_length=4096, micro_batch_size=2, compute_bytes=2, settings=WHOLE_LOGITS)


def shape_of(name):
    resolved = resolve_model(ModelConfig(model=name))
    return resolved, model_shape(resolved)


def at(moment, shape, mesh, work):
    return memory_at(shape, mesh, dataclasses.replace(work, moment=moment))


def test_states_follow_from_the_parameter_count():
    _, shape = shape_of("llama70b")
    assert (shape.parameters, shape.layers, shape.hidden) == (68_976_648_192, 80, 8192)
    needed = at(Moment.UPDATE, shape, lay_out(1, 64), WORK)
    share = 68_976_648_192 // 64 * 4
    assert needed["parameters"] == needed["gradients"] == share and needed["optimizer state"] == 2 * share
    assert at(Moment.LAST_BLOCK, shape, lay_out(1, 64), WORK)["gathered parameters"] == 2 * shape.block * 2
    assert at(Moment.LOSS, shape, lay_out(1, 64), WORK)["logits and loss"] == 3 * 2 * 4096 * 32000 * 4


def test_states_in_bf16_take_two_bytes_and_sums_of_gradients_four():
    _, shape = shape_of("llama3_8b")
    share, mesh = shape.parameters // 8, lay_out(1, 8)
    for optim, accumulation, expected in (
        (OptimConfig(optimizer_state_dtype="bf16"), 1, (4, 4, 4)),
        (OptimConfig(param_dtype="bf16"), 1, (2, 2, 4)),
        (OptimConfig(param_dtype="bf16"), 2, (2, 6, 4)),  # also the zeros that a reduction leaves
    ):
        work = dataclasses.replace(WORK, settings=Settings((*WHOLE_LOGITS.sections, optim)), accumulation=accumulation)
        needed = at(Moment.EMBEDDING, shape, mesh, work)
        found = tuple(needed[name] / share for name in ("parameters", "gradients", "optimizer state"))
        assert found == pytest.approx(expected, rel=1e-6)
        assert at(Moment.UPDATE, shape, mesh, work)["gradients"] / share == pytest.approx(optim.parameter_bytes)
        # A checkpoint has parameters and moments.
        assert checkpoint_bytes(shape, work) == shape.parameters * (expected[0] + expected[2])


def test_a_frozen_model_takes_the_bytes_that_are_computed_with():
    resolved, plain = shape_of("llama3_8b")
    mesh = lay_out(1, 8)
    needed, sizes = {}, {}
    for qlora in (False, True):
        settings = Settings((*WHOLE_LOGITS.sections, lora.Config(lora_rank=16, qlora=qlora)))
        work, shape = dataclasses.replace(WORK, settings=settings), parallelize.shape_of(resolved, settings)
        needed[qlora] = {moment: at(moment, shape, mesh, work) for moment in (Moment.UPDATE, Moment.LAST_BLOCK)}
        sizes = shape
    factors = sizes.frozen_but.parameters
    assert sizes.parameters == plain.parameters + factors and factors < plain.parameters // 100
    update, packed = (needed[qlora][Moment.UPDATE] for qlora in (False, True))
    assert update["parameters"] == (2 * plain.parameters + 4 * factors) // 8
    assert update["gradients"] == factors * 4 // 8 and update["optimizer state"] == factors
    saved = sizes.layers * sizes.linear * (2 - 33 / 64)
    assert update["parameters"] - packed["parameters"] == pytest.approx(saved / 8, abs=1)
    gathered, of_packed = (needed[qlora][Moment.LAST_BLOCK]["gathered parameters"] for qlora in (False, True))
    assert gathered - of_packed == pytest.approx(2 * sizes.linear * (2 - 33 / 64), abs=1)
    assert sizes.block - sizes.linear - factors // sizes.layers < sizes.block // 1000
    dropout = Settings((*WHOLE_LOGITS.sections, lora.Config(lora_rank=16, lora_dropout=0.1)))
    masked = dataclasses.replace(WORK, settings=dropout)
    more = at(Moment.LAST_BLOCK, sizes, mesh, masked)["activations"] - needed[False][Moment.LAST_BLOCK]["activations"]
    assert more == WORK.tokens(mesh) * sizes.intermediate  # a byte a value


def test_trained_modules_are_split_and_factors_may_not_be():
    resolved, plain = shape_of("llama3_8b")
    trained = {}
    for saved in ((), ("lm_head",)):
        settings = Settings((*WHOLE_LOGITS.sections, lora.Config(lora_rank=16, lora_modules_to_save=saved)))
        shape = parallelize.shape_of(resolved, settings)
        trained[saved] = [shape.trained(tp) for tp in (1, 4)]
    for tp, of_factors, found in zip((1, 4), *trained.values(), strict=True):
        assert found.last - of_factors.last == found.parameters - of_factors.parameters == plain.table // tp
        assert found.block == of_factors.block == trained[()][0].block


def test_the_prediction_is_the_largest_sum_over_the_moments():
    _, shape = shape_of("llama3_8b")
    sums = [sum(at(moment, shape, lay_out(1, 8), WORK).values()) for moment in Moment]
    needed = estimate_memory(shape, lay_out(1, 8), WORK)
    assert sum(needed.values()) == max(sums) > min(sums)
    several = dataclasses.replace(WORK, accumulation=2)
    held = 4 * shape.parameters // 8
    for moment in Moment:  # from the second micro-batch on, gradients are there throughout
        assert at(moment, shape, lay_out(1, 8), several)["gradients"] == held
    deferred = at(Moment.LOSS, shape, lay_out(1, 8), several.changed(defer_gradient_sync=True))
    assert deferred["gradients"] == 0 and deferred["gradients before reduction"] == 4 * shape.parameters


def test_an_evaluation_needs_no_gradients_and_no_optimizer_state():
    _, shape = shape_of("llama70b")
    train, evaluate = (
        memory_at(shape, lay_out(1, 64), dataclasses.replace(WORK, forward_only=only)) for only in (False, True)
    )
    gone = ("gradients", "optimizer state", "gradients before reduction")
    assert all(train[name] and not evaluate[name] for name in gone)
    assert 0 < evaluate["activations"] < train["activations"] and evaluate["parameters"] == train["parameters"]


def test_buffers_of_smddp_on_gpus():
    _, shape = shape_of("llama70b")
    smddp = Settings((*WORK.settings.sections, CommConfig(distributed_backend="smddp")))

    def buffers(settings=smddp, degrees=(1, 64, 1), **change):
        work = dataclasses.replace(WORK, settings=settings, **change)
        return at(Moment.UPDATE, shape, lay_out(*degrees), work)["communication buffers"]

    kinds = shape.parameters - 79 * shape.block  # embedding, a block, and norm with head
    assert buffers() == 32 * 2**20 + 2 * kinds * 2
    assert buffers(compute_bytes=4, degrees=(1, 8, 2)) == 32 * 2**20 + kinds * 4
    assert buffers(compute_bytes=8) == 32 * 2**20 + 8 * GIB
    assert buffers(WORK.settings) == buffers(smddp.changed(shared_buffers=False)) == 0
    assert buffers(degrees=(64, 1, 1)) == 0 == buffers(WORK.settings, device_type="cpu")
    scratch = 4 * 2**20  # of a rank in each group: to shard, of the data, and of all
    assert 3 * 2 * scratch < buffers(device_type="cpu", degrees=(1, 2)) < 3 * 2 * scratch + 2**17


def test_parameters_that_stay_gathered():
    _, shape = shape_of("llama_tiny")
    freed, until_backward = (lay_out(1, 2, reshard_after_forward=frees) for frees in (True, False))
    assert peak_bytes(shape, until_backward, WORK) > peak_bytes(shape, freed, WORK)
    kept = WORK.changed(reshard_between_microbatches=False)
    assert at(Moment.LOSS, shape, freed, kept)["gathered parameters"] == 2 * shape.parameters
    low = dataclasses.replace(WORK, settings=Settings((*WHOLE_LOGITS.sections, OptimConfig(param_dtype="bf16"))))
    for mesh in (lay_out(1, 1, reshard_after_forward=False), lay_out(2, 1, reshard_after_forward=False)):
        fp32, bf16 = (at(Moment.LOSS, shape, mesh, work) for work in (WORK, low))
        assert fp32["gathered parameters"] > 0 == bf16["gathered parameters"]  # what is computed with is the parameter


def test_gradients_before_reduction():
    _, shape = shape_of("llama3_8b")
    head = shape.vocabulary * shape.hidden
    assert 1 <= shape.largest_unit / head < 1.001

    def needed(mesh, moment=Moment.EMBEDDING, **change):
        return at(moment, shape, mesh, dataclasses.replace(WORK, **change))

    name, buffers, table = "gradients before reduction", "communication buffers", 4 * head
    assert needed(lay_out(1, 8))[name] == needed(lay_out(8, 1))[name] == table
    assert needed(lay_out(1, 1))[name] == table // 2  # as backward makes it, in bf16, and then it is the parameter's
    assert needed(lay_out(1, 8))[buffers] == table  # the copy that is reduced
    assert needed(lay_out(8, 1))[buffers] == table
    assert needed(lay_out(1, 1))[buffers] == 0
    assert needed(lay_out(1, 8), device_type="cpu")[buffers] == 2 * table  # gloo's
    chunks = {"moment": Moment.LOSS, "settings": Settings()}
    assert needed(lay_out(1, 8), **chunks)[name] == table
    part = 6 * 2048 * shape.hidden  # of the product, in bf16 and in fp32
    assert needed(lay_out(1, 8), device_type="cpu", **chunks)[name] == table + part


@pytest.mark.parametrize(("tokens", "smaller"), [(0, True), (4096, True), (1024, False), (64, False)])
def test_smaller_chunks_of_the_loss_are_advised(tokens, smaller):
    work = WORK.changed(loss_chunk_tokens=tokens)
    advice = changes_that_help(shape_of("llama3_8b")[1], lay_out(1, 8), work, most=9)
    assert any(change.flags == "--loss_chunk_tokens 1024" for change in advice) == smaller


def test_tensor_parallelism_divides_what_it_splits():
    _, shape = shape_of("llama70b")
    for moment in reversed(Moment):
        one, eight = (at(moment, shape, lay_out(1, 32, tp), WORK) for tp in (1, 8))
        for what in ("parameters", "gradients", "optimizer state", "gathered parameters", "logits and loss"):
            assert eight[what] == pytest.approx(one[what] / 8, rel=1e-6), (what, moment)
    one, eight = (at(Moment.LAST_BLOCK, shape, lay_out(1, 32, tp), WORK) for tp in (1, 8))
    # Block inputs, and all that a block holds between its split layers; but one gathered hidden state on top.
    hidden_state = 2 * 4096 * 8192 * 2
    whole = 24 * 2 * 4096 + 8 * 4096 * 128  # tokens, labels, positions; rotary angles
    split = (one["activations"] - whole) / 8
    assert eight["activations"] == pytest.approx(split + whole + hidden_state, rel=1e-6)


def test_ranks_that_split_a_sequence_hold_their_tokens():
    _, shape = shape_of("llama70b")
    ranks, uneven = lay_out(1, 32, cp=4), WORK.changed(cp_load_balance=False)
    assert (WORK.columns(ranks), WORK.tokens(ranks)) == (1024, 2 * 1024)
    assert dataclasses.replace(WORK, sequence_length=4090).columns(ranks) == 1024
    assert dataclasses.replace(uneven, sequence_length=4090).columns(lay_out(1, 32, 2, 4)) == 1024
    assert dataclasses.replace(uneven, sequence_length=4081).columns(ranks) == 1021
    for moment in Moment:
        one, four = at(moment, shape, lay_out(1, 32), WORK), at(moment, shape, ranks, WORK)
        assert four["parameters"] == one["parameters"] and four["logits and loss"] == one["logits and loss"] / 4
        if moment not in (Moment.LAST_BLOCK, Moment.FIRST_BLOCK):
            assert four["activations"] == one["activations"] / 4
    # Of eight heads keys and values of the whole sequence, more than the MLP of a part, and their gradients in fp32.
    extra = 16 * 2 * 1024 * (2 + 4) - 2 * 28672 * 2
    whole, part = at(Moment.LAST_BLOCK, shape, lay_out(1, 32), WORK), lay_out(1, 32, cp=16)
    gathered = at(Moment.LAST_BLOCK, shape, part, WORK)["activations"]
    assert gathered == whole["activations"] / 16 + 2 * 256 * extra
    ring = at(Moment.LAST_BLOCK, shape, part, WORK.changed(cp_comm_type="p2p"))["activations"]
    assert ring == whole["activations"] / 16


def test_a_longer_context_parallel_group_is_advised():
    _, shape = shape_of("llama3_8b")
    work = dataclasses.replace(WORK, sequence_length=65536, micro_batch_size=1)

    def flags(mesh):
        return [change.flags for change in changes_that_help(shape, mesh, work, most=9)]

    assert "--context_parallel_degree 2" in flags(lay_out(1, 8))
    assert "--context_parallel_degree 4" in flags(lay_out(1, 8, cp=2))
    whole = flags(lay_out(1, 8, cp=8))
    assert whole and not any("context_parallel" in each for each in whole)


def test_key_value_heads_that_are_fewer_than_ranks_are_held_whole():
    _, shape = shape_of("llama70b")
    assert shape.key_value_heads == 8 and shape.key_value == 2 * 1024 * 8192
    sixteen = memory_at(shape, lay_out(1, 16, 16), WORK)
    whole = 80 * 2 * 1024 * 8192
    assert sixteen["parameters"] == pytest.approx(4 * (whole + (68_976_648_192 - whole) / 16) / 16, rel=1e-6)
    unit = shape.block - shape.key_value
    assert sixteen["gathered parameters"] == pytest.approx(2 * 2 * (unit / 16 + shape.key_value), rel=1e-6)
    _, neox = shape_of("gpt_neox_20b")  # as many heads of each kind
    assert estimate_memory(neox, lay_out(1, 1, 64), WORK)["parameters"] == pytest.approx(
        4 * neox.parameters / 64, rel=1e-6
    )


def test_sequence_parallelism_and_kept_inputs_show():
    shape = dataclasses.replace(shape_of("llama70b")[1], saved=None)  # by the formula
    hidden_state = 2 * 4096 * 8192 * 2

    def activations(tp=8, attention_matrix=False, **change):
        work = dataclasses.replace(WORK.changed(**change), attention_matrix=attention_matrix)
        return at(Moment.LAST_BLOCK, shape, lay_out(1, 4, tp), work)["activations"]

    assert activations(tp=1) == activations(tp=1, sequence_parallel=False) == activations(tp=1, tp_save_gathered=True)
    whole = activations(sequence_parallel=False)
    # Whole block inputs, and a block's hidden states between split layers: four, and the norms' in fp32.
    inputs = 24 * 2 * 4096 + 8 * 4096 * 128  # tokens, labels, positions; rotary angles
    assert whole == pytest.approx((80 + 6 + (6 + 6 * 28672 / 8192) / 8) * hidden_state + inputs, rel=1e-6)
    assert activations(tp_save_gathered=True) == activations() + 2 * hidden_state  # of the block that is recomputed
    kept = activations(tp_save_gathered=True, activation_checkpointing=False)
    assert kept == activations(activation_checkpointing=False) + 80 * 2 * hidden_state
    overlapped = at(Moment.FIRST_BLOCK, shape, lay_out(1, 4, 8), WORK.changed(tp_overlap=True))
    alone = at(Moment.FIRST_BLOCK, shape, lay_out(1, 4, 8), WORK)
    assert overlapped["communication buffers"] - alone["communication buffers"] == 2 * hidden_state // 8
    matrix = activations(attention_matrix=True) - activations()
    assert matrix == 3 * 2 * 64 * 4096**2 * 2 // 8


def test_advice_keeps_the_tensor_parallel_degree():
    _, shape = shape_of("llama70b")
    available = sum(estimate_memory(shape, lay_out(1, 8, 8), WORK).values())
    assert processes_that_fit(shape, lay_out(tp=8), WORK, available) == 64
    assert processes_that_fit(shape, lay_out(), WORK, available) is None  # gathered units and logits are whole then


def test_a_gpu_needs_what_its_allocator_and_its_communicators_take():
    _, shape = shape_of("llama_tiny")
    one, full, both = (estimate_memory(shape, lay_out(*degrees), WORK) for degrees in ((1, 1), (1, 8), (2, 4, 2)))
    for needed in (one, full, both):
        tensors = sum(needed.values()) - needed["process"]
        assert needed["free blocks of the allocator"] == pytest.approx(0.08 * tensors, rel=1e-3)
    # The context; of all ranks and to shard; of all, the loss, tensor parallelism, replicas and to shard.
    assert [round((each["process"] - CONTEXT_BYTES) / (0.3 * GIB)) for each in (one, full, both)] == [0, 2, 5]


def test_the_fewest_processes_that_fit():
    _, shape = shape_of("llama7b")
    assert processes_that_fit(shape, lay_out(), WORK, peak_bytes(shape, lay_out(1, 8), WORK)) == 8
    assert processes_that_fit(shape, lay_out(), WORK, GIB) is None


def test_available_memory_is_shared_by_the_host():
    one, four = (available_memory(torch.device("cpu"), n) for n in (1, 4))
    assert 0 < four < one


def test_a_gpus_process_asks_for_the_memory_of_its_own_device_alone(monkeypatch):
    """Also where srun shows each of eight processes one GPU; each question to another GPU takes some of its memory."""
    calls = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append(("set", device)))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: calls.append(("ask", device)) or (5 * GIB, 80 * GIB))
    device = torch.device("cuda", 0)
    assert available_memory(device, 8) == 5 * GIB + CONTEXT_BYTES  # which is among what the process needs
    assert calls == [("set", device), ("ask", device)]  # in this order: asking makes a context on the current device


def _check_agreed_memory():
    limits.available_memory = lambda device, processes: (dist.get_rank() + 1) * GIB
    assert agree_on_memory(torch.device("cpu"), 2) == GIB


def test_ranks_agree_on_the_least_memory():
    run_distributed(_check_agreed_memory, world_size=2)


def a_gpu_each(rank):
    """A rank's fake GPU, of which rank 1's is nearly full."""
    torch.cuda.set_device = lambda device: None
    torch.cuda.mem_get_info = lambda device: ((80 - 79 * rank) * GIB, 80 * GIB)
    dry_run.choose_device = lambda launch: torch.device("cuda", launch.local_rank)
    Guard.refuse_crash_loop = lambda guard, step: None  # counts on the GPU
    runtime.choose_backend = checked_job.choose_backend = lambda comm, device: "gloo"


def test_a_job_that_does_not_fit_one_gpu_is_refused_by_all_ranks_alike(tmp_path):
    words = ["--model", "llama7b", "--use_synthetic_data", 1, "--output_dir", tmp_path / "run"]
    outcome = run_job(*words, world_size=2, prepare=a_gpu_each)
    assert outcome.statuses == [2, 2] and "Traceback" not in outcome.output, outcome.output
    (line,) = [line for line in outcome.output.splitlines() if line.startswith("error: ")]
    assert re.match(r"error: llama7b on 2 process\(es\) needs about .* and there are 1\.6 GiB for each: use ", line)
    assert not (tmp_path / "run").exists()


def test_available_memory_without_linux(monkeypatch):
    def absent(path):
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "read_text", absent)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    # What macOS knows: a key of os.sysconf that a system lacks is a ValueError.
    sizes = {"SC_PHYS_PAGES": 1000, "SC_PAGE_SIZE": 4096}

    def sysconf(name):
        if name not in sizes:
            raise ValueError("unrecognized configuration name")
        return sizes[name]

    monkeypatch.setattr(os, "sysconf", sysconf)
    assert available_memory(torch.device("cpu"), 4) == 1000 * 4096 // 4
    sizes["SC_PHYS_PAGES"] = -1  # known by name only
    assert available_memory(torch.device("cpu"), 1) == sys.maxsize
    sizes.clear()
    assert available_memory(torch.device("cpu"), 1) == sys.maxsize


@pytest.mark.parametrize(("name", "world"), [("llama70b", 64), ("llama70b", 256), ("gpt_neox_20b", 64)])
@pytest.mark.full
def test_large_meshes_are_built_without_machines(name, world):
    resolved, shape = shape_of(name)
    work = WORK.changed(sharding_strategy="full_shard")
    degrees = lay_out(1, world)
    shapes = sharded_parameters(resolved, degrees, work.settings)
    assert sum(whole.numel() for whole, _ in shapes.values()) == shape.parameters
    for key, (whole, local) in shapes.items():
        assert local[0] == -(-whole[0] // world) and local[1:] == whole[1:], key
    text = report(resolved, degrees, shape=shape, work=work, available=None)
    assert f"dp_shard {world} x tp 1 = {world} processes" in text
    assert f"{shape.parameters:,}" in text


def test_host_memory_of_ranks_on_gpus():
    resolved, shape = shape_of("llama3_8b")
    share = shape.parameters // 8 * 4

    def host(mesh, work=WORK, **kinds):
        return estimate_host_memory(shape, mesh, work, **{"is_async": True, "is_local": False, **kinds})

    assert host(lay_out(1, 8)) == {"checkpoint copy": 3 * share, "process": host(lay_out(1, 8))["process"]}
    assert host(lay_out(4, 8))["checkpoint copy"] == 3 * share // 4
    assert host(lay_out(4, 8), is_local=True)["checkpoint copy"] == 3 * share
    assert list(host(lay_out(1, 8), is_async=False)) == ["process"]
    offloading = WORK.changed(cpu_offload=True, offload_activations=True, activation_loading_horizon=2)
    needed = host(lay_out(1, 8), offloading)
    # Of 8 ranks: 65 norms; of each block, products of two sizes, twice each, and three of the MLP, rounded up; tables.
    pinned = 65 * 2**11 + 32 * (2 * 2**23 + 2 * 2**21 + 3 * 2**25) + 2 * 2**28
    assert pinned > 1.1 * share and needed["parameters"] == needed["gradients"] == pinned
    assert needed["optimizer state"] == 2 * share
    assert needed["offloaded activations"] == (shape.layers - 2) * 2 * 4096 * 4096 * 2  # inputs of the blocks, bf16
    assert "offloaded activations" not in host(lay_out(1, 8), offloading.changed(offload_dir="/fast"))
    check_host_memory(needed, 10**12)
    with pytest.raises(
        UserError, match=r"11\.\d GiB of host memory .*checkpoint copy 11\.\d.*use --checkpoint_type sharded"
    ):
        check_host_memory(host(lay_out(1, 8)), 8 * GIB)
    check_host_memory(host(lay_out(1, 8), is_async=False), 1)  # nothing could be changed
    text = report(resolved, lay_out(1, 8), shape=shape, work=WORK, available=None, host=host(lay_out(1, 8)))
    assert "predicted host memory of each rank:\n             checkpoint copy     11." in text
