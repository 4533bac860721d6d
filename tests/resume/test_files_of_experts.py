"""Files of mixtures: written an expert's matrix at a time, and read by each rank for its experts alone."""

from __future__ import annotations

import copy
import pathlib

import pytest
import safetensors
import torch
import torch.distributed as dist
import transformers  # noqa: F401  imported before the ranks are forked
from safetensors.torch import load_file
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from smp.checkpoint.hf_export import export_hf
from smp.models.file_names import file_names_of
from smp.parallel.parallelize import apply_techniques
from smp.pretrained import load_pretrained_
from tests import experts
from tests.distributed import run_distributed
from tests.reference import Layout, setup_of
from tests.resume.test_hf_export import load_back
from tests.unit.test_file_keys import _OpenedFile
from tests.unit.test_pretrained import _CountingSlice

# More than any matrix of these models, and less than two experts' of a layer.
MOST = 3100
TWO = [Layout("full_shard", ep=2), Layout("full_shard"), Layout("no_shard")]
FOUR = [Layout("full_shard", ep=2), Layout("hybrid_shard", 2, ep=2)]


def laid_out(model: nn.Module, layout: Layout) -> nn.Module:
    model = copy.deepcopy(model)
    apply_techniques(model, setup_of(model, layout.mesh(), layout.parallel(), layout.activation()))
    return model


class Largest(TorchDispatchMode):
    """Collects the elements of each new tensor that has more than ``MOST``."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[int] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        known = {memory_of(each) for each in tree_leaves((args, kwargs))}
        new = [each.untyped_storage() for each in tree_leaves(result) if memory_of(each) not in {None, *known}]
        self.found += [storage.nbytes() // 4 for storage in new if storage.nbytes() > 4 * MOST]
        return result


def memory_of(value) -> int | None:
    """Where a plain tensor of fp32 has its values; None: it is another object."""
    is_plain = type(value) is torch.Tensor and value.dtype == torch.float32 and not value.is_meta
    return value.untyped_storage().data_ptr() if is_plain else None


def check_export(kind: str, changes: dict[str, int], layouts: list[Layout], folder: pathlib.Path) -> None:
    plain = experts.build(kind, torch.float32, **changes)
    expected = load_file(folder / "theirs" / "model.safetensors")
    fused = sorted(tensor.numel() for tensor in expected.values() if tensor.dim() == 3)
    for number, layout in enumerate(layouts):
        model, out = laid_out(plain, layout), folder / f"{number}"
        with Largest() as largest:
            export_hf(model, out, max_shard_bytes=40_000)
        # Rank 0 has a tensor of the files, on its CPU, of which it writes.
        assert sorted(largest.found) == ([] if dist.get_rank() else fused), (layout, largest.found)
        if dist.get_rank() == 0:
            found = {key: tensor for file in out.glob("*.safetensors") for key, tensor in load_file(file).items()}
            assert found.keys() == expected.keys()
            assert all(torch.equal(tensor, expected[key]) for key, tensor in found.items())
            load_back(out)
        dist.barrier()


@pytest.mark.parametrize(("kind", "layouts", "changes"), [
    ("mixtral", TWO, {}), ("gpt_oss", TWO, {}),
    *(pytest.param(kind, FOUR, {}, marks=pytest.mark.full) for kind in ("mixtral", "gpt_oss")),
    pytest.param("mixtral", FOUR, {"num_local_experts": 2}, marks=pytest.mark.full),  # sharded by the second axis
])  # fmt: skip
def test_no_rank_gathers_more_than_a_matrix_of_an_expert(kind, layouts, changes, tmp_path):
    experts.build(kind, torch.float32, **changes).save_pretrained(tmp_path / "theirs")
    run_distributed(check_export, kind, changes, layouts, tmp_path, world_size=2 if layouts is TWO else 4)


def check_reading(folder: pathlib.Path) -> None:
    reference = experts.build("qwen3_moe", torch.float32)
    safetensors.safe_open = _OpenedFile  # in this process, which ends with the test
    model = laid_out(reference, Layout("full_shard", ep=2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    _CountingSlice.elements = _OpenedFile.opened = 0
    load_pretrained_(model, folder, hf_config=model.config)
    local = {name: parameter.to_local() for name, parameter in model.named_parameters()}
    assert _CountingSlice.elements == sum(tensor.numel() for tensor in local.values())
    files = {key: file for file in folder.glob("*.safetensors") for key in load_file(file)}
    names, rank = file_names_of(reference), dist.get_rank()
    opened = 0
    for name, tensor in local.items():
        rows = names.keys(name, model.get_parameter(name).shape)
        mine = [row for row in rows if not row.is_piece or row.offsets[0] * 2 // experts.EXPERTS == rank]
        opened += len({files[row.key] for row in mine}) if tensor.numel() else 0
        assert torch.equal(model.get_parameter(name).full_tensor(), reference.get_parameter(name)), name
    # Twice for keys and shapes, and for a parameter once, not for each of its experts.
    assert len(set(files.values())) == 2
    assert _OpenedFile.opened == 2 * 2 + opened


def test_a_rank_reads_its_experts_alone_and_opens_a_file_once_for_them(tmp_path):
    experts.build("qwen3_moe", torch.float32).save_pretrained(tmp_path, max_shard_size="120KB")
    run_distributed(check_reading, tmp_path, world_size=2)
