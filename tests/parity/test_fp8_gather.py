"""Weights that are gathered in fp8: the bits of those that are cast after the gather, in fewer bytes."""

from __future__ import annotations

import tempfile
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

from smp.config import Settings
from smp.local_shards import local_tensor
from smp.mesh import resolve_mesh
from smp.models.model_config import resolve_model
from smp.parallel.parallelize import compute_dtype, prepare_model
from smp.parallel.sharding import fsdp_modules, reshard, set_gradient_sync
from smp.parallel.technique import after_update
from tests.distributed import run_distributed
from tests.flags import SYNTHETIC, parse
from tests.job import LLAMA
from tests.reference import global_batch
from tests.unit.test_compile_blocks import graphs  # noqa: F401 # a fixture

pytest.importorskip("torchao")
CPU = torch.device("cpu")
FP8 = [*LLAMA, "--hidden_width", 64, "--llama_intermediate_size", 96, "--vocab_size", 96, *SYNTHETIC,
       "--fp8", 1, "--fp8_recipe", "tensorwise"]  # fmt: skip
LINEAR = 64 * (64 + 32 + 32 + 64) + 3 * 64 * 96  # values of a block's layers
UPDATES, MICRO_BATCHES = 2, 2
FULL, RECOMPUTED = ("--sharding_strategy", "full_shard"), ("--activation_checkpointing", 1)
LAYOUTS = (
    ((*FULL, *RECOMPUTED, "--bf16", 1), 1),
    ((*RECOMPUTED, "--hybrid_shard_degree", 2), 3),
    ((*FULL, *RECOMPUTED, "--tensor_parallel_degree", 2, "--bf16", 1), 1),
)
OTHERS = {  # processes, flags, and bytes that are not sent of a value, None: not counted
    "rows that do not divide": (3, (*FULL, "--bf16", 1), None),  # padded
    "columns, as rows do not divide": (6, (*FULL, "--tensor_parallel_degree", 2, "--hidden_width", 96,
                                           "--llama_intermediate_size", 64), None),
    "replicas alone": (2, ("--sharding_strategy", "no_shard", "--bf16", 1), 0),
    "one process": (1, ("--bf16", 1), 0),
    "adapters": (2, (*FULL, "--lora_rank", 4, "--bf16", 1), 1),
    "adapters of weights that are cast once": (2, ("--sharding_strategy", "no_shard", "--lora_rank", 4), 0),
    "offloaded parameters": (2, (*FULL, "--cpu_offload", 1), 3),
    "offloaded activations": (2, (*FULL, *RECOMPUTED, "--offload_activations", 1, "--activation_loading_horizon", 1,
                                  "--offload_dir", tempfile.gettempdir()), 3),
    "selective": (2, (*FULL, *RECOMPUTED, "--activation_checkpointing_mode", "selective"), 3),
    "narrow parameters": (2, (*FULL, "--bf16", 1, "--param_dtype", "bf16"), 1),
    "reduced once": (2, ("--sharding_strategy", "shard_grad_op", "--bf16", 1, "--defer_gradient_sync", 1), 1),
}  # fmt: skip


@pytest.fixture(autouse=True)
def torchaos():
    """torchao is imported before processes are forked, and not while tests are collected."""
    import smp.parallel.fp8_products  # noqa: F401


class Counted:
    """Counts the bytes of each gather of a unit, and the all-reduces over all ranks."""

    def __init__(self, model):
        self.gathered, self.reduced = [], 0
        for module in fsdp_modules(model):
            if (group := module._get_fsdp_state()._fsdp_param_group) is not None:
                group._all_gather_comm = self._gather(group._all_gather_comm)

    def _gather(self, gather):
        def call(output_tensor, **how):
            self.gathered.append(output_tensor.nbytes)
            return gather(output_tensor=output_tensor, **how)

        return mock.Mock(side_effect=call, allocate=gather.allocate)

    def all_reduce(self, *args, function=dist.all_reduce, **how):
        self.reduced += how.get("group") in (None, dist.group.WORLD)
        return function(*args, **how)


def build(words):
    config, world = parse([*FP8, *words]), dist.get_world_size()
    mesh = resolve_mesh(config.parallel, world_size=world, local_world_size=world).join("cpu")
    settings = Settings((config.parallel, config.activation, config.loss, config.lora, config.optim, config.fp8))
    return prepare_model(
        resolve_model(config.model), mesh=mesh, settings=settings, dtype=compute_dtype(config.precision, CPU),
        device=CPU, seed=0, load_weights=False,
    )  # fmt: skip


def train(words):
    """Return all bits of a few updates, the parameters then, and what was counted."""
    model = build(words)
    # Of a rate that changes the scales.
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1, foreach=True)
    found, counted = [], Counted(model)
    with mock.patch("torch.distributed.all_reduce", counted.all_reduce):
        for step in range(UPDATES):
            for part in range(MICRO_BATCHES):
                ids, labels = global_batch(MICRO_BATCHES * step + part)
                set_gradient_sync(model, last=part == MICRO_BATCHES - 1, defer="--defer_gradient_sync" in words)
                loss = model(input_ids=ids, labels=labels).loss
                loss.backward()
                found.append(loss.detach())
            found += [p.grad.to_local().clone() for p in model.parameters() if p.grad is not None]
            optimizer.step()
            optimizer.zero_grad()
            after_update(model, torch.tensor(False))
        with torch.no_grad():  # as an evaluation
            found.append(model(input_ids=ids, labels=labels).loss)
    reshard(model)
    return found, dict(model.named_parameters()), counted


def check(words, less):
    wanted, before, plain = train(words)
    found, after, counted = train([*words, "--fp8_all_gather", 1])
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)), words
    assert after.keys() == before.keys()
    for name, parameter in after.items():
        mine, theirs = local_tensor(parameter), local_tensor(before[name])
        assert type(mine) is type(theirs) and mine.dtype == theirs.dtype and torch.equal(mine, theirs)
    updated = any("lora" not in name and parameter.requires_grad for name, parameter in after.items())
    collectives = UPDATES + 1 if less or updated else 0  # also of the first weights; not of those that are cast once
    assert counted.reduced == plain.reduced + collectives, words
    tp = 2 if "--tensor_parallel_degree" in words else 1
    saved = {a - b for a, b in zip(plain.gathered, counted.gathered, strict=True)}
    assert less is None or saved == ({0, less * LINEAR // tp} if plain.gathered else set()), (words, saved)


def _check_all(layouts):
    for words, less in layouts:
        check(words, less)


@pytest.mark.parametrize("backend", ["gloo", pytest.param("smddp", marks=pytest.mark.full)])
def test_bits_bytes_and_collectives(backend):
    run_distributed(_check_all, LAYOUTS, world_size=4, backend=backend)


@pytest.mark.full
@pytest.mark.parametrize("name", OTHERS)
def test_what_else_there_is(name):
    world, words, less = OTHERS[name]
    run_distributed(check, words, less, world_size=world)


def _compiled(graphs, words):  # noqa: F811
    losses = []
    for more in ((), ("--compile", 1)):
        model = build([*words, *more, "--fp8_all_gather", 1])
        ids, labels = global_batch(0)
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        losses.append(loss.detach())
    assert torch.equal(*losses)
    assert len(graphs.forward) == 1 and not counters["graph_break"], counters


def test_compiled_blocks_are_one_graph(graphs):  # noqa: F811
    run_distributed(_compiled, graphs, [], world_size=1)


@pytest.mark.full
def test_compiled_blocks_that_are_split_are_one_graph(graphs):  # noqa: F811
    run_distributed(_compiled, graphs, [*FULL, "--tensor_parallel_degree", 2], world_size=4)


def _load():
    losses = []
    ids, labels = global_batch(0)
    for gather in (0, 1):
        model = build(["--fp8_all_gather", gather])
        with torch.no_grad():
            model(input_ids=ids, labels=labels)
            reshard(model)
            model.load_state_dict({name: 5 * value for name, value in model.state_dict().items()})
            losses.append(model(input_ids=ids, labels=labels).loss)
    assert torch.equal(*losses)


def test_values_that_are_loaded_get_scales():
    run_distributed(_load, world_size=1)


def test_scales_are_those_of_casts():
    from smp.parallel.fp8_products import Scaled

    casts = Scaled("tensorwise", "cpu", sizes=(16, 16))
    largest = torch.cat([448 * 2.0 ** torch.arange(-40, 40), torch.rand(200), torch.zeros(1)]).bfloat16()
    one_by_one = [casts.weight(torch.full((16, 16), float(each), dtype=torch.bfloat16))._scale for each in largest]
    assert torch.equal(casts.scale(largest), torch.stack(one_by_one))
