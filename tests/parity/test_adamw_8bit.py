"""Moments of 8 bits: torchao's update, and the same bits at every layout and through a checkpoint."""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
import zlib

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

from smp.checkpoint.manifest import read_manifest
from smp.checkpoint.restore import restore
from smp.config import ActivationConfig
from smp.local_shards import local_part
from smp.mesh import lay_out
from smp.models.parameters import parameter_table
from smp.models.registry import family_of
from smp.optim import adamw_8bit
from smp.optim.adamw_8bit import BLOCK
from smp.optim.config import OptimConfig
from smp.optim.optimizers import build_optimizer, kind_of, moved_bytes, working_bytes
from smp.parallel.parallelize import parallelize
from tests.distributed import run_distributed
from tests.job import LLAMA, assert_resumes, run_job
from tests.reference import Layout
from tests.resume.test_checkpoint import describe, save, whole

pytest.importorskip("torchao.optim")  # make test-qlora

CONFIG = OptimConfig(optimizer="adamw_8bit")
MOMENTS = {"exp_avg": True, "exp_avg_sq": False}


def test_an_update_in_8_bits_is_torchaos_and_one_that_is_left_out_is_none():
    """Blocks of several parameters in one batch, of one in several, and of rows that are none."""
    from torchao.optim.adam import single_param_adam
    from torchao.optim.subclass_8bit import OptimState8bit

    torch.manual_seed(0)
    shapes = [(2, BLOCK), (3, 4, BLOCK), (150, 2 * BLOCK), (7, 100), (BLOCK,)]
    model = nn.ParameterList(torch.randn(shape) for shape in shapes)
    optimizer = build_optimizer(model, CONFIG, lr=0.01)
    theirs = [parameter.detach().clone() for parameter in model[:3]]
    states = [{key: OptimState8bit.zeros(p.shape, signed) for key, signed in MOMENTS.items()} for p in theirs]
    done, lr = torch.tensor(0.0), torch.tensor(0.01)
    for step in range(4):
        skip = step == 2
        for parameter in model:
            parameter.grad = torch.randn_like(parameter)
            parameter.grad[0] = torch.inf if skip else 0.0
            parameter.grad[-1] *= torch.nan if skip else 1.0
        optimizer.step(skip=torch.tensor(skip))
        done += not skip
        for parameter, mine, state in zip(theirs, model, states, strict=False):
            if not skip:
                both = (state["exp_avg"], state["exp_avg_sq"], None)
                single_param_adam(parameter, mine.grad, done, *both, lr, 0.9, 0.95, 0.2, 1e-8, True, False)
            assert torch.equal(parameter, mine)
            own = optimizer.state[mine]
            assert own["step"] == done
            for key in MOMENTS:
                assert torch.equal(own[key], state[key].codes) and own[key].dtype == torch.uint8
                assert torch.equal(own[f"{key}_scale"].flatten(), state[key].scale)
    assert all(optimizer.state[parameter]["exp_avg"].dtype == torch.float32 for parameter in model[3:])


class Moved(TorchDispatchMode):
    """Counts bytes that operations read and write, and the most that what they have made takes at a time."""

    def __init__(self):
        super().__init__()
        self.moved, self.most, self._made = 0, 0, {}

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        read, written = ([t for t in tree_leaves(tree) if torch.is_tensor(t)] for tree in ((args, kwargs), result))
        known = {tensor.untyped_storage()._cdata for tensor in read}
        made = [tensor for tensor in written if tensor.untyped_storage()._cdata not in known]
        if made or operation._schema.is_mutable:  # else they are views
            self.moved += sum(tensor.nbytes for tensor in (*read, *written) if tensor.numel() > 1)
        for storage in (tensor.untyped_storage() for tensor in made):
            self._made[storage._cdata] = storage.nbytes()
            weakref.finalize(storage, self._made.pop, storage._cdata, None)
        self.most = max(self.most, sum(self._made.values()))
        return result


def test_what_an_update_in_8_bits_moves_in_memory_is_planned(monkeypatch):
    for name in ("_quantise", "_dequantise"):  # a mode does not see into an operator
        monkeypatch.setattr(adamw_8bit, name, getattr(adamw_8bit, name)._init_fn)
    model, counts = nn.ParameterList([torch.randn(64, BLOCK)]), Moved()
    optimizer, values = build_optimizer(model, CONFIG, lr=0.01), model[0].numel()
    for mode in (contextlib.nullcontext(), counts):
        model[0].grad = torch.randn(64, BLOCK)
        with mode:
            optimizer.step(skip=torch.tensor(False))
    table = parameter_table(model)
    # Without the norm of the gradient, clipping and zeroing.
    assert counts.moved / values == pytest.approx(moved_bytes(table, CONFIG) - 4 * 4, rel=0.03)
    assert counts.most == pytest.approx(working_bytes(table, lay_out(), CONFIG), rel=0.03)


def build(layout: Layout):
    """A vocabulary that is split unevenly, so that its rows are sharded; two blocks in each."""
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=97, hidden_size=512, intermediate_size=512, num_hidden_layers=1, num_attention_heads=8,
        num_key_value_heads=2, tie_word_embeddings=False,
    )  # fmt: skip
    model, family, mesh = LlamaForCausalLM(config), family_of(config), layout.mesh()
    table = parameter_table(model, family)
    activation = ActivationConfig(activation_checkpointing=False)
    parallelize(model, family, mesh=mesh, parallel=layout.parallel(), activation=activation, dtype=None)
    if layout.tp > 1:
        parameters = dict(model.named_parameters())
        for spec in table:
            placement = parameters[spec.name].placements[-1]
            split = placement.dim if isinstance(placement, Shard) else None
            assert len(spec.shape) < 2 or split == spec.split, spec
    return model, build_optimizer(model, CONFIG, lr=0.01)


def update(model, optimizer, steps):
    """Updates with the same gradients at any layout."""
    for step in steps:
        for name, parameter in model.named_parameters():
            torch.manual_seed(zlib.crc32(f"{name} {step}".encode()))
            full = torch.randn(parameter.shape) * 10 ** torch.randint(-4, 1, parameter.shape)
            parameter.grad = torch.zeros_like(parameter)
            part, offsets = local_part(parameter.grad)
            part.copy_(full[tuple(slice(o, o + n) for o, n in zip(offsets, part.shape, strict=True))])
        optimizer.step(skip=torch.tensor(False))


def write(folder, model, optimizer):
    """A checkpoint of two steps, in a folder that is named like the number of ranks."""
    size = dist.get_world_size()
    manifest = describe(model, 2, size)
    manifest = dataclasses.replace(manifest, run=manifest.run | {"optimizer": kind_of(CONFIG)})
    save(folder / str(size), model, optimizer, manifest)


def train_alone(folder):
    model, optimizer = build(Layout("full_shard"))
    for steps in ((0, 1), (2, 3)):
        update(model, optimizer, steps)
        torch.save(whole(model, optimizer), folder / f"{steps[-1]}.pt")
        if steps[0] == 0:
            write(folder, model, optimizer)


def check(folder, layouts, start):
    """Two steps are those of one process; so are two more, after a start from a checkpoint of another layout."""
    for layout in layouts:
        for steps in ((0, 1), (2, 3)):
            model, optimizer = build(layout)
            if steps[0]:
                path = folder / start / "m-2steps"
                restore(path, read_manifest(path), model, optimizer, seed="0")
            update(model, optimizer, steps)
            found, expected = whole(model, optimizer), torch.load(folder / f"{steps[-1]}.pt")
            assert found.keys() == expected.keys()
            assert [key for key in found if not torch.equal(found[key], expected[key])] == [], (layout, steps)
            if not steps[0] and layout is layouts[0] and dist.get_world_size() > 1:
                write(folder, model, optimizer)


def test_moments_in_8_bits_are_the_same_at_any_layout_and_start_from_any(tmp_path):
    tp, cp, shard = (Layout("full_shard", **axes) for axes in ({"tp": 2}, {"cp": 2}, {}))
    run_distributed(train_alone, tmp_path, world_size=1)
    run_distributed(check, tmp_path, [tp, shard, cp], "1", world_size=2)
    run_distributed(check, tmp_path, [tp, shard, cp], "2", world_size=4)
    run_distributed(check, tmp_path, [shard], "4", world_size=1)


@pytest.mark.full
def test_a_job_with_moments_in_8_bits_resumes_and_by_its_own_kind_alone(tmp_path):
    flags = [
        *LLAMA,
        "--use_synthetic_data",
        1,
        "--hidden_width",
        256,
        "--llama_intermediate_size",
        256,
        "--lr_decay_iters",
        8,
    ]
    bits = ["--optimizer", "adamw_8bit"]
    parts = assert_resumes(tmp_path, *flags, *bits, at=2, steps=4)
    run_job(*flags, "--max_steps", 1, "--output_dir", tmp_path / "plain").succeeded()
    for saved, resumed, said in (
        (parts, [], "the optimizer --optimizer adamw_8bit and the job has AdamW: give --optimizer adamw_8bit, or"),
        (
            tmp_path / "plain",
            bits,
            "the optimizer AdamW and the job has --optimizer adamw_8bit: give --optimizer adamw,",
        ),
    ):
        words = ["--max_steps", 5, "--output_dir", saved, "--resume_from_checkpoint", "latest"]
        refused = run_job(*flags, *resumed, *words)
        assert refused.statuses == [2] and said in refused.output and "Traceback" not in refused.output
