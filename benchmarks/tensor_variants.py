"""The ways to train over tensor-parallel ranks that ``tensor_parallel.py`` measures: same model, values and batches.

Every variant is the loop of a user's script: the model's own loss, backward, AdamW, without clipping.
"""

from __future__ import annotations

import dataclasses
import functools
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from step_variants import Case, Step, Variant, adamw, batch, plain_model
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

import smp


def _loop(case: Case, model: nn.Module, loss_of: Callable[[Tensor], Tensor]) -> Step:
    optimizer = adamw(model.parameters(), fused=True)
    whole = dataclasses.replace(case, processes=1)  # all ranks read the same samples

    def step(number: int) -> Tensor:
        loss = loss_of(batch(whole, 0, number))
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def _own_loss(model: nn.Module) -> Callable[[Tensor], Tensor]:
    def loss_of(ids: Tensor) -> Tensor:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        return loss.detach()

    return loss_of


def smp_step(case: Case, rank: int, **settings: bool) -> Step:
    """``smp.transform`` in a script."""
    smp.init({"tensor_parallel_degree": case.processes, **settings})
    model = smp.transform(plain_model(case)).train()
    return _loop(case, model, _own_loss(model))


def transformers_step(case: Case, rank: int) -> Step:
    """Build transformers' own tensor parallelism: ``from_pretrained`` with a ``DistributedConfig``."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    folder: list[str | None] = [None]
    if rank == 0:
        folder[0] = tempfile.mkdtemp()
        plain_model(case).save_pretrained(folder[0])
    dist.broadcast_object_list(folder)
    path = Path(folder[0] or "")
    config = DistributedConfig(tp_size=case.processes)
    model = AutoModelForCausalLM.from_pretrained(path, distributed_config=config, dtype=torch.float32).train()
    dist.barrier()
    if rank == 0:
        shutil.rmtree(path)
    return _loop(case, model, _own_loss(model))


def dtensor_step(case: Case, rank: int) -> Step:
    """torch's tutorial: ``parallelize_module`` with sequence parallelism and ``loss_parallel``."""
    mesh = init_device_mesh("cpu", (case.processes,), mesh_dim_names=("tp",))
    model = _dtensor_model(plain_model(case), mesh)
    positions = torch.arange(case.length).unsqueeze(0)

    def loss_of(ids: Tensor) -> Tensor:
        with loss_parallel():
            logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
            labels = nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
            loss.backward()
        return loss.detach().full_tensor()  # type: ignore[attr-defined]

    return _loop(case, model, loss_of)


def _dtensor_model(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    block = {
        "input_layernorm": SequenceParallel(),
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": Shard(1)}, desired_input_kwarg_layouts={"hidden_states": Replicate()}
        ),
        "self_attn.q_proj": ColwiseParallel(),
        "self_attn.k_proj": ColwiseParallel(),
        "self_attn.v_proj": ColwiseParallel(),
        "self_attn.o_proj": RowwiseParallel(output_layouts=Shard(1)),
        "post_attention_layernorm": SequenceParallel(),
        "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(output_layouts=Shard(1)),
    }
    for layer in model.model.layers:  # type: ignore[union-attr]
        parallelize_module(layer, mesh, block)
    return parallelize_module(
        model,
        mesh,
        {
            "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "model.norm": SequenceParallel(),
            "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
        },
    )


_whole = functools.partial(smp_step, sequence_parallel=False)
_kept = functools.partial(smp_step, tp_save_gathered=True)
VARIANTS: dict[str, Variant] = {
    "smp": Variant("smp", smp_step, "smddp"),
    "smp_kept": Variant("smp, gathered inputs kept", _kept, "smddp"),
    "smp_whole": Variant("smp without sequence parallelism", _whole, "smddp"),
    "smp_gloo": Variant("smp over gloo", smp_step, "gloo"),
    "transformers": Variant("transformers' DistributedConfig over gloo", transformers_step, "gloo"),
    "transformers_smddp": Variant("the same over smddp", transformers_step, "smddp"),
    "dtensor": Variant("parallelize_module over gloo", dtensor_step, "gloo"),
    "dtensor_smddp": Variant("parallelize_module over smddp", dtensor_step, "smddp"),
}
