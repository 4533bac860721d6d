"""What expert parallelism sends, any routing, and checkpoints from one degree to another."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers  # noqa: F401  imported before the ranks are forked
from torch.distributed.tensor import DTensor

from smp.checkpoint.manifest import read_manifest
from smp.checkpoint.restore import restore
from smp.config import ParallelConfig, Section
from smp.fsdp.param_group import groups_of
from smp.local_shards import local_part
from smp.mesh import lay_out
from smp.models.experts import expert_modules
from smp.models.registry import family_of
from smp.optim.config import OptimConfig
from smp.optim.optimizers import build_optimizer
from smp.parallel.experts.compute import compute
from smp.parallel.experts.config import ExpertsConfig
from smp.parallel.experts.technique import problems
from smp.parallel.parallelize import apply_techniques, own_part
from smp.parallel.sharding import fsdp_modules
from smp.parallel.technique import Setup
from smp.train.step import forward, train_step
from tests import experts
from tests.distributed import run_distributed
from tests.model_checks import in_double
from tests.parity.test_experts import _check as check
from tests.reference import CLIP, LR, Layout, rank_batch, setup_of
from tests.resume.test_checkpoint import describe, save, whole

CPU = torch.device("cpu")


def parallel(kind: str, layout: Layout, dtype: torch.dtype = torch.float64, more: tuple[Section, ...] = ()):
    """A model under a layout, its setup and its optimizer."""
    model = experts.build(kind, dtype).train()
    setup = setup_of(model, layout.mesh(), layout.parallel(), layout.activation(), *more)
    apply_techniques(model, setup)
    return model, setup, build_optimizer(model, OptimConfig(), lr=LR)


def _count(checkpointing: bool, mode: str, per_layer: dict[str, int]) -> None:
    model, setup, _ = parallel("mixtral", Layout("full_shard", ep=2, checkpointing=checkpointing, mode=mode))
    batch = rank_batch(0, setup.mesh.data_rank, setup.mesh.data_size, 1).microbatches[0]
    forward(model, batch, CPU).backward()
    layers = len(expert_modules(model))
    with mock.patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single) as sent:
        forward(model, batch, CPU).backward()
    assert sent.call_count == layers * sum(per_layer.values()), (sent.call_count, per_layer)


def test_each_layer_sends_counts_once_and_rows_there_and_back():
    """Counts are never sent again; rows are in recomputation, but where reductions are kept."""
    for checkpointing, mode, rows in ((False, "full", 4), (True, "full", 6), (True, "selective", 4)):
        run_distributed(_count, checkpointing, mode, {"counts": 1, "rows": rows}, world_size=2)


def _count_sums(checkpointing: bool, mode: str) -> None:
    layout = Layout("full_shard", cp=2, checkpointing=checkpointing, mode=mode)
    model, setup, _ = parallel("mixtral", layout, more=(ExpertsConfig(moe_load_balancing="sinkhorn"),))
    batch = own_part(rank_batch(0, 0, 1, 1).microbatches[0], setup)
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as summed:
        forward(model, batch, CPU).backward()
    shape = (len(batch["input_ids"]), experts.EXPERTS)
    sums = [call for call in summed.mock_calls if call.args[0].shape == shape]
    assert len(sums) == 32 * len(expert_modules(model)) and {call.kwargs["group"] for call in sums} == {
        setup.mesh.cp.group
    }


def test_each_layer_sums_its_columns_32_times_and_never_again_in_recomputation():
    for checkpointing, mode in ((False, "full"), (True, "full"), (True, "selective")):
        run_distributed(_count_sums, checkpointing, mode, world_size=2)


def _send_all_to(chosen: list[int]) -> None:
    """Routers of zeros but for a bias that no model has: the chosen experts, on one rank, get every token."""
    model = experts.build("mixtral")
    family_of(model.config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".mlp.gate.weight"):
                parameter.zero_()
    topk = torch.topk

    def always(scores, k, *args, **kwargs):
        if scores.shape[-1] != experts.EXPERTS:
            return topk(scores, k, *args, **kwargs)
        index = torch.tensor(chosen).expand(*scores.shape[:-1], k)
        return scores.gather(-1, index), index

    with in_double(), mock.patch("torch.topk", always):
        check(model, "mixtral", [Layout("full_shard", ep=2, checkpointing=True), Layout("full_shard", ep=2)])


@pytest.mark.parametrize("chosen", [[5, 6], [3, 4]], ids=["one rank has none", "one expert of each rank"])
def test_any_routing_trains_like_one_process(chosen):
    run_distributed(_send_all_to, chosen, world_size=2)


def _save(folder, kind, layouts):
    for index, layout in enumerate(layouts):
        model, setup, optimizer = parallel(kind, layout)
        batch = rank_batch(0, setup.mesh.data_rank, setup.mesh.data_size, 1)
        train_step(model, optimizer, batch, setup=setup, device=CPU, grad_clip=CLIP)
        save(folder / str(index), model, optimizer, describe(model, 2, 4))
        tensors = whole(model, optimizer)
        if dist.get_rank() == 0:
            torch.save(tensors, folder / f"{index}.pt")


def _load(folder, kind, pairs):
    for index, layout in pairs:
        expected, path = torch.load(folder / f"{index}.pt"), folder / str(index) / "m-2steps"
        model, _, optimizer = parallel(kind, layout)
        restore(path, read_manifest(path), model, optimizer, seed="0")
        got = whole(model, optimizer)
        assert got.keys() == expected.keys() and all(torch.equal(got[key], expected[key]) for key in got), layout


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_a_checkpoint_of_any_degree_loads_at_any_other(kind, tmp_path):
    layouts = [Layout("full_shard", ep=2), Layout("full_shard", ep=4), Layout("hybrid_shard", 2, ep=2)]
    run_distributed(_save, tmp_path, kind, layouts, world_size=4)
    run_distributed(_load, tmp_path, kind, [*enumerate([*layouts[1:], layouts[0]])], world_size=4)
    run_distributed(_load, tmp_path, kind, [(index, Layout("no_shard")) for index in range(3)], world_size=1)


def _own_experts_alone():
    model, setup, _ = parallel("qwen3_moe", Layout("full_shard", ep=2, checkpointing=True))
    batch = rank_batch(0, setup.mesh.data_rank, setup.mesh.data_size, 1).microbatches[0]
    seen: list[tuple[int, ...]] = []
    original = compute.__globals__["_multiply"]

    def noted(module, name, rows, counts):
        weight = getattr(module, name)
        seen.append(tuple((weight.to_local() if isinstance(weight, DTensor) else weight).shape))
        return original(module, name, rows, counts)

    with mock.patch.dict(compute.__globals__, {"_multiply": noted}):
        forward(model, batch, CPU).backward()
    assert seen and {shape[0] for shape in seen} == {experts.EXPERTS // 2}
    for _, module in expert_modules(model):
        for parameter in module.parameters():
            part, offsets = local_part(parameter)
            assert part.shape[0] <= experts.EXPERTS // 2
            assert offsets[0] // (experts.EXPERTS // 2) == setup.mesh.roles["ep"].rank
    assert all(group.is_sharded for module in fsdp_modules(model) for group in groups_of(module))


def test_no_rank_has_an_expert_of_another_also_while_it_is_gathered():
    run_distributed(_own_experts_alone, world_size=2)


def _poisoned(kind: str) -> None:
    """Two backwards in fp32, with memory that is not initialised full of NaN."""
    empty, new_empty = torch.empty, torch.Tensor.new_empty
    nan = lambda tensor: tensor.fill_(float("nan")) if tensor.is_floating_point() and not tensor.is_meta else tensor  # noqa: E731
    model, setup, _ = parallel(kind, Layout("full_shard", ep=2, checkpointing=True), torch.float32)
    batch = rank_batch(0, setup.mesh.data_rank, setup.mesh.data_size, 1).microbatches[0]
    with (
        mock.patch("torch.empty", lambda *a, **k: nan(empty(*a, **k))),
        mock.patch.object(torch.Tensor, "new_empty", lambda *a, **k: nan(new_empty(*a, **k))),
    ):
        for _ in range(2):
            loss = forward(model, batch, CPU)
            loss.backward()
    assert loss.isfinite()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.to_local().isfinite().all(), name


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_nothing_is_computed_of_memory_that_is_not_initialised(kind):
    run_distributed(_poisoned, kind, world_size=2)


def _refused(kind: str, degree: int, world: int = 8, tp: int = 1, **settings) -> list[str]:
    from smp.config import Settings

    config = experts.config_of(kind, **settings)
    parallel_config = ParallelConfig(expert_parallel_degree=degree, sequence_parallel=tp == 1)
    mesh = lay_out(1, world // tp, tp=tp, ep=degree)
    return problems(config, Setup(family_of(config), mesh, Settings((parallel_config,))))


def test_what_cannot_be_split_is_refused_in_a_sentence():
    assert _refused("mixtral", 3, world=6) == [
        "--expert_parallel_degree 3 does not divide the 8 experts of a layer: choose one of 1, 2, 4, 8"
    ]
    (text,) = _refused("mixtral", 2, tp=2)
    assert text.startswith("--expert_parallel_degree 2 with tensor parallelism needs --sequence_parallel 1")
    config = experts.config_of("mixtral")
    config._experts_implementation = "batched_mm"
    setup = Setup(family_of(config), lay_out(), setup_of(experts.build("mixtral"), lay_out()).settings)
    assert problems(config, setup) == ["experts_implementation batched_mm is not for training: leave it out"]
