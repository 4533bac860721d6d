"""What is done about memory changes no bit, with dropout: alone and in pairs, sharded and tensor parallel."""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import itertools
from collections.abc import Iterator

import pytest
import torch
import transformers  # noqa: F401  imported before the ranks are forked
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import smp
from smp.config import ActivationConfig, LossConfig
from smp.models.registry import family_of
from smp.optim.config import OptimConfig
from smp.optim.optimizers import build_optimizer
from smp.parallel.offload import DiskStore, HostStore, offload
from smp.parallel.offload.stores import _OnDisk, _OnHost
from smp.parallel.parallelize import parallelize
from smp.parallel.technique import model_blocks
from smp.train.step import train_step
from tests.distributed import run_distributed
from tests.reference import LR, Layout, global_batch, rank_batch, setup_of
from tests.unit.test_activation_checkpoint import Products
from tests.unit.test_activation_offload import blocks_of, dropout_model, gradients

STEPS, MICROBATCHES, BLOCKS = 5, 2, 3
LAYOUTS = {"fsdp": Layout("full_shard"), "tp": Layout("full_shard", tp=2)}


@dataclasses.dataclass(frozen=True)
class Features:
    """What is done about memory."""

    mode: str = "none"  # or full, selective: activation checkpointing
    every: int = 1
    horizon: int = 0  # of offloading; 0: none
    disk: bool = False  # offload to disk, not to host memory
    cpu_offload: bool = False

    def activation(self, directory: str) -> ActivationConfig:
        return ActivationConfig(
            activation_checkpointing=self.mode != "none",
            activation_checkpointing_mode="selective" if self.mode == "selective" else "full",
            activation_checkpointing_every=self.every,
            offload_activations=self.horizon > 0,
            activation_loading_horizon=max(1, self.horizon),
            offload_dir=directory if self.disk else None,
            cpu_offload=self.cpu_offload,
        )


CHECKPOINTING = [("none", 1), ("full", 1), ("full", 2), ("selective", 1)]
OFFLOADING = [(0, False), (1, True), (2, True), (1, False)]
# Every pair of settings of two of checkpointing, offloading, parameters in host memory and the model.
COVER = {
    name: [
        Features(*CHECKPOINTING[i], *OFFLOADING[j], cpu_offload=bool((i + j) % 2))
        for i, j in itertools.product(range(4), range(4))
        if (i // 2 + j) % 2 == parity
    ]
    for parity, name in enumerate(("gpt_neox", "llama_gqa"))
}


@dataclasses.dataclass
class Run:
    """What a rank saw: each step's loss, norm and gradients; then how often things happened in all steps."""

    losses: list[float]
    norms: list[float]
    gradients: list[dict[str, torch.Tensor]]
    counts: collections.Counter

    def same_bits(self, other: Run) -> bool:
        steps = zip(self.gradients, other.gradients, strict=True)
        same = all(torch.equal(one[name], two[name]) for one, two in steps for name in one)
        return same and (self.losses, self.norms) == (other.losses, other.norms)


@contextlib.contextmanager
def counting() -> Iterator[collections.Counter]:
    """Counts tensors that go to a store and come back; every size goes."""
    counts: collections.Counter = collections.Counter()
    with pytest.MonkeyPatch.context() as patches:

        def count(cls, name, key):
            call = getattr(cls, name)
            patches.setattr(cls, name, lambda *args: (counts.update([key]), call(*args))[1])

        count(DiskStore, "put", "to disk")
        count(HostStore, "put", "to host")
        count(_OnDisk, "load", "from disk")
        count(_OnHost, "load", "from host")
        patches.setitem(offload.apply_activation_offload.__kwdefaults__, "minimum_bytes", 1)
        yield counts


def train(reference: nn.Module, layout: Layout, features: Features, directory: str) -> Run:
    """Some steps with dropout; and one more that counts matrix products."""
    model, mesh, device = copy.deepcopy(reference), layout.mesh(), torch.device("cpu")
    parallel, loss = layout.parallel(), LossConfig(loss_chunk_tokens=7)
    setup = setup_of(model, mesh, parallel, loss)
    losses, norms, run = [], [], []
    with counting() as counts:
        for block in model_blocks(model, family_of(model.config)):
            block.input_layernorm.register_forward_pre_hook(lambda *_: counts.update(["forward of a block"]))
        parallelize(
            model, setup.family, mesh=mesh, parallel=parallel, dtype=None,
            activation=features.activation(directory), loss=loss,
        )  # fmt: skip
        assert held_on_host(model) == {features.cpu_offload}
        optimizer = build_optimizer(model, OptimConfig(), lr=LR)
        optimizer.register_step_pre_hook(lambda *_: run.append({n: local(p.grad) for n, p in model.named_parameters()}))
        torch.manual_seed(5 + mesh.data_rank)
        for step in range(STEPS):
            batch = rank_batch(step, mesh.data_rank, mesh.data_size, MICROBATCHES)
            result = train_step(model, optimizer, batch, setup=setup, device=device, grad_clip=0.5)
            losses.append(result.loss())
            norms.append(float(result.grad_norm))
        found = collections.Counter(counts)
    with Products() as products:
        train_step(model, optimizer, batch, setup=setup, device=device, grad_clip=0.5)
    return Run(losses, norms, run, found + collections.Counter(products=products.count))


def held_on_host(model: nn.Module) -> set[bool]:
    """Whether shards are in host memory by the policy, over all units."""
    states = [unit._get_fsdp_state() for unit in model.modules() if isinstance(unit, FSDPModule)]
    groups = [state._fsdp_param_group for state in states if state._fsdp_param_group is not None]
    return {parameter.offload_to_cpu for group in groups for parameter in group.fsdp_params}


def local(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).clone()


def check_activity(features: Features, counts: collections.Counter) -> None:
    """The features did what they are for."""
    forwards = STEPS * MICROBATCHES
    again = 0 if features.mode == "none" else -(-BLOCKS // features.every)
    assert counts["forward of a block"] == forwards * (BLOCKS + again), features
    used, other = ("disk", "host") if features.disk else ("host", "disk")
    moved = counts[f"to {used}"]
    assert counts[f"from {used}"] == moved and not counts[f"to {other}"] and not counts[f"from {other}"], features
    blocks = forwards * (BLOCKS - features.horizon) if features.horizon else 0
    # A block that is recomputed has its input alone to move (what selective keeps stays), and the first one always is.
    inputs_only = features.mode != "none" and (features.every == 1 or features.horizon == BLOCKS - 1)
    assert moved == blocks if inputs_only or not features.horizon else moved > blocks, (features, counts)


def _check_bits(layout, directory):
    for name, combinations in COVER.items():
        reference = dropout_model(name)
        plain = train(reference, layout, Features(), directory)
        assert len(plain.gradients) == STEPS + 1 and plain.losses[0] != plain.losses[-1]
        assert not train(copy.deepcopy(reference).eval(), layout, Features(), directory).same_bits(plain)
        products = collections.defaultdict(set)
        for features in combinations:
            run = train(reference, layout, features, directory)
            assert run.same_bits(plain), (name, features, run.losses, plain.losses)
            check_activity(features, run.counts)
            products[features.mode, features.every].add(run.counts["products"])
        assert all(len(each) == 1 for each in products.values()), products
        of = {key: value.pop() for key, value in products.items()}
        assert of["none", 1] < of["selective", 1] < of["full", 1] > of["full", 2] > of["none", 1]


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=pytest.mark.slow if name == "tp" else ()) for name in LAYOUTS]
)
@pytest.mark.full
def test_the_same_bits(layout, tmp_path):
    run_distributed(_check_bits, LAYOUTS[layout], str(tmp_path), world_size=2, backend="smddp")
    assert list(tmp_path.iterdir()) == []


def test_two_lines_on_a_plain_model(tmp_path):
    reference = dropout_model()
    expected = gradients(copy.deepcopy(reference))
    block = type(blocks_of(reference)[0])
    for directory in (None, str(tmp_path)):
        model = copy.deepcopy(reference)
        with counting() as counts:
            smp.apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, block))
            assert smp.offload_wrapper(model, horizon=1, directory=directory) is model
            found = gradients(model, steps=3)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        assert counts["to host" if directory is None else "to disk"] == 3 * (BLOCKS - 1)
        names = [name for name, _ in reference.named_parameters()]
        assert [name for name, _ in model.named_parameters()] == names == [*reference.state_dict()][: len(names)]
    assert list(tmp_path.iterdir()) == []


def test_two_lines_on_a_model_that_is_not_hugging_faces(tmp_path):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
    reference = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False).train()

    def trained(model: nn.Module) -> list[torch.Tensor]:
        torch.manual_seed(1)
        model(torch.randn(3, 8, 32), mask=nn.Transformer.generate_square_subsequent_mask(8)).square().mean().backward()
        return [parameter.grad for parameter in model.parameters()]

    model = copy.deepcopy(reference)
    with counting() as counts:
        check = lambda module: isinstance(module, nn.TransformerEncoderLayer)  # noqa: E731
        smp.apply_activation_checkpointing(model, check_fn=check)
        smp.offload_wrapper(model, horizon=1, directory=str(tmp_path))
        found = trained(model)
    assert counts["to disk"] == counts["from disk"] == 3
    assert all(torch.equal(a, b) for a, b in zip(found, trained(reference), strict=True))


def _check_compiled_blocks(directory):
    """Dropout of compiled blocks draws other numbers, so these are compared among themselves."""
    compiled, runs = torch.compile, {}
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(torch, "compile", lambda forward, **options: compiled(forward, backend="aot_eager", **options))
        for mode in ("none", "full", "selective"):
            for horizon in (0, 1):
                model = copy.deepcopy(dropout_model("llama_gqa"))
                features = Features(mode, horizon=horizon, disk=horizon > 0)
                activation = dataclasses.replace(features.activation(directory), compile=True)
                with counting() as counts:
                    layout = Layout("full_shard")
                    parallelize(
                        model, family_of(model.config), mesh=layout.mesh(), parallel=layout.parallel(), dtype=None,
                        activation=activation, loss=LossConfig(),
                    )  # fmt: skip
                    torch.manual_seed(0)
                    ids, labels = global_batch(0)
                    model(input_ids=ids, labels=labels).loss.backward()
                runs[mode, horizon] = [local(parameter.grad) for parameter in model.parameters()]
                assert bool(counts["to disk"]) == bool(horizon) and counts["from disk"] == counts["to disk"]
    for run in runs.values():
        assert all(torch.equal(a, b) for a, b in zip(run, runs["none", 0], strict=True))


@pytest.mark.full
def test_compiled_blocks(tmp_path):
    run_distributed(_check_compiled_blocks, str(tmp_path), world_size=1)


def test_what_the_two_lines_refuse(tmp_path):
    model = dropout_model()
    with pytest.raises(smp.UserError, match="offload_wrapper finds no checkpointed block: call apply_activation"):
        smp.offload_wrapper(model)
    with pytest.raises(smp.UserError, match="finds no block: give check_fn, such as"):
        smp.apply_activation_checkpointing(model)
    with pytest.raises(smp.UserError, match="finds no block: give check_fn, such as"):
        smp.apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, nn.Conv2d))
    smp.apply_activation_checkpointing(model, check_fn=lambda module: module in blocks_of(model))
    with pytest.raises(smp.UserError, match=r"--offload_dir .*absent cannot be written"):
        smp.offload_wrapper(model, directory=str(tmp_path / "absent"))
