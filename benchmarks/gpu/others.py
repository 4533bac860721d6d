"""What smp's step is compared with: torch's parts, as torchtitan puts them together."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from benchmarks.gpu.cases import Case
from benchmarks.gpu.timed import LR, Bench, Found, flops_per_token, layout
from smp.delayed_init import build_on_meta, materialize_
from smp.environment import read_launch
from smp.errors import Problems
from smp.models.model_config import resolve_model
from smp.models.registry import build_model
from smp.optim.optimizers import build_optimizer
from smp.parallel.technique import model_blocks
from smp.runtime import process_group
from smp.train.arguments import parse_args
from smp.train.checked_job import make_job

_aten = torch.ops.aten
_KEPT = {
    getattr(_aten, f"_scaled_dot_product_{name}").default
    for name in ("efficient_attention", "flash_attention", "flash_attention_for_cpu", "cudnn_attention")
} | {torch.ops._c10d_functional.reduce_scatter_tensor.default}  # fmt: skip


def _selective() -> Any:
    """Keep attention, reductions and every other product: torchtitan's per-operation policy."""
    products: Counter[bool] = Counter()

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operation == _aten.mm.default:
            products[context.is_recompute] += 1
            kept = products[context.is_recompute] % 2 == 1
        else:
            kept = operation in _KEPT
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1))


def parts(case: Case, bench: Bench) -> Found:
    """Time torch's own parts, put together as torchtitan does, over all ranks."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    config, launch, device = parse_args(case.words()), read_launch(), bench.device
    job = make_job(config, launch, device, resolve_model(config.model), Problems())
    resolved, dtype = job.model, job.dtype
    length, vocabulary = resolved.sequence_length, resolved.hf_config.vocab_size
    with process_group(config.comm, launch, device):
        model: Any = build_on_meta(functools.partial(build_model, resolved.hf_config, attn_implementation="sdpa"))
        mesh = dist.init_device_mesh(device.type, (launch.world_size,))
        shard = functools.partial(
            fully_shard, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        )
        for block in model_blocks(model, resolved.family):
            recomputed = functools.partial(checkpoint, block.forward, use_reentrant=False, context_fn=_selective)
            block.forward = torch.compile(recomputed, fullgraph=True)  # type: ignore[method-assign]
            shard(block)
        shard(model.model.embed_tokens)
        shard([model.model.norm, model.lm_head], reshard_after_forward=False)
        shard(model)
        materialize_(model, device)
        bench.fill(model, launch.rank)
        optimizer, loss_of = build_optimizer(model, config.optim, lr=LR), torch.compile(_cross_entropy)

        def step(number: int) -> Tensor:
            ids = bench.ids(vocabulary, (case.batch, length), number, launch.rank).to(device, non_blocking=True)
            logits = model(input_ids=ids, use_cache=False).logits
            loss = loss_of(logits[:, :-1], ids[:, 1:])
            del logits
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.optim.grad_clip)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return loss.detach()

        found = bench.timed(case, step, flops_per_token(job))
    return found | layout(case, length, launch.world_size, launch.world_size)
