"""One forward and backward of a split model beside the plain Hugging Face model, for any configuration and inputs."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import os
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed import _symmetric_memory
from torch.distributed.tensor import DTensor

from smp.config import ActivationConfig
from smp.loss import causal_lm_loss_sum
from smp.models.registry import family_of
from smp.parallel.parallelize import parallelize
from smp.parallel.tensor import technique
from smp.parallel.tensor.split import split_model
from smp.parallel.tensor.technique import build_tp_group
from tests.fake_gpu import map_memory
from tests.reference import Layout, relative, tiny_config

ROWS = 4
_LIBRARIES: list[torch.library.Library] = []  # an operator's implementation lives as long as its library


def config_of(name: str, **changes: Any) -> Any:
    """A tiny configuration with other settings."""
    config = tiny_config(name)
    for key, value in changes.items():
        if not hasattr(config, key):
            raise ValueError(f"{name} has no {key}")
        setattr(config, key, value)
    return config


def build(config: Any, dtype: torch.dtype = torch.float64, attention: str = "sdpa") -> nn.Module:
    """The plain model, the same on every rank, biases and norms included."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation=attention).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # zeros and ones would hide what is left out
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.train()


def split(model: nn.Module, layout: Layout) -> nn.Module:
    """A copy, split and sharded."""
    return parallelize(
        copy.deepcopy(model),
        family_of(model.config),
        mesh=layout.mesh(),
        parallel=layout.parallel(),
        activation=ActivationConfig(activation_checkpointing=layout.checkpointing),
        dtype=layout.dtype,
    )


def split_only(model: nn.Module, layout: Layout) -> nn.Module:
    """A copy, split but not sharded: every exchange is tensor parallelism's."""
    return split_model(copy.deepcopy(model), family_of(model.config), build_tp_group(layout.mesh(), layout.parallel()))


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor; collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def batch_of(config: Any, length: int = 12) -> dict[str, torch.Tensor]:
    """Inputs and labels ``(ROWS, length)``, some of them ignored."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, config.vocab_size, (ROWS, length), generator=generator)
    labels = ids.clone()
    labels[0, :5] = labels[1, -2:] = -100
    return {"input_ids": ids, "labels": labels}


@dataclasses.dataclass(frozen=True)
class Case:
    """A configuration, how it is split, and its inputs (``labels`` among them)."""

    config: Any
    layout: Layout
    batch: dict[str, torch.Tensor]
    attention: str = "sdpa"


def assert_same_step(case: Case, tolerance: float = 1e-9) -> None:
    """Logits and gradients of every parameter equal the plain model's; collective."""
    reference = build(case.config, attention=case.attention)
    model, mesh = split(reference, case.layout), case.layout.mesh()
    batch = dict(case.batch)
    labels = batch.pop("labels")
    valid = labels != -100  # at padding, logits mean nothing
    expected = reference(**batch, use_cache=False).logits
    shifted = F.pad(labels[:, 1:], (0, 1), value=-100)
    F.cross_entropy(expected.flatten(0, 1), shifted.flatten(), reduction="sum").backward()

    rows = slice(mesh.data_rank * ROWS // mesh.data_size, (mesh.data_rank + 1) * ROWS // mesh.data_size)
    own = {key: value[rows] if len(value) == ROWS else value for key, value in batch.items()}
    logits = model(**own).logits
    assert isinstance(logits, DTensor) and logits.shape == expected[rows].shape
    error = relative((logits.full_tensor() - expected[rows])[valid[rows]], expected[rows][valid[rows]])
    assert error <= tolerance, (case.layout, "logits", error)
    causal_lm_loss_sum(logits, labels[rows]).backward()
    wanted = {name: p.grad for name, p in reference.named_parameters()}
    for name, parameter in model.named_parameters():
        gradient = whole(parameter.grad)
        error = relative(gradient - wanted[name], wanted[name])
        assert error <= tolerance, (case.config.model_type, case.layout, name, error)


def assert_same_steps(cases: list[Case], tolerance: float = 1e-9) -> None:
    """:func:`assert_same_step` of each."""
    for case in cases:
        assert_same_step(case, tolerance)


class HostWorkspace:
    """The workspace of a group in torch's symmetric memory, played by memory that processes share."""

    barriers = 0

    def __init__(self, group_name: str, nbytes: int):
        self.group = _resolve_process_group(group_name)
        self.rank, self.world_size = self.group.rank(), self.group.size()
        descriptor = os.memfd_create("workspace")
        os.ftruncate(descriptor, nbytes)
        places: list = [None] * self.world_size
        dist.all_gather_object(places, (os.getpid(), descriptor), group=self.group)
        opened = [os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR) for pid, number in places]
        self._memories = [map_memory(number, nbytes) for number in opened]
        self.barrier()

    def barrier(self, channel: int = 0) -> None:
        HostWorkspace.barriers += 1
        dist.barrier(self.group)

    def get_buffer(self, rank: int, shape: Any, dtype: torch.dtype, storage_offset: int = 0) -> torch.Tensor:
        return self._memories[rank].view(dtype)[storage_offset:][: math.prod(shape)].view(shape)


class HostStream:
    def wait_stream(self, other: HostStream) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exception: object) -> None:
        pass


def overlap_on_cpu(*, pipelined: bool = False) -> None:
    """Let torch's fused exchanges of symmetric memory run on CPU tensors, in this process, which is a rank's.

    Args:
        pipelined: run what runs on GPUs, rank by rank through shared memory, instead of torch's plain definition.
    """
    library = torch.library.Library("symm_mem", "IMPL")
    for name in ("fused_all_gather_matmul", "fused_matmul_reduce_scatter"):
        kernel = getattr(_symmetric_memory, f"_{name}" if pipelined else f"_{name}_fallback")
        library.impl(name, kernel, "CPU")
    _LIBRARIES.append(library)
    technique.overlap_obstacle = lambda degree, device_type: ""
    if pipelined:
        workspaces = functools.cache(lambda name: HostWorkspace(name, 2**20))
        _symmetric_memory.get_symm_mem_workspace = lambda name, min_size: workspaces(name)
        _symmetric_memory._get_backend_stream = lambda priority=0: HostStream()
        torch.cuda.current_stream = lambda device=None: HostStream()
        torch.cuda._sleep = lambda cycles: None
