"""What smp's step is compared with: a loop of Hugging Face's parts, torch's parts, kernels, the device's limits."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from benchmarks.gpu.cases import Case
from benchmarks.gpu.timed import LR, Bench, Found, flops_per_token, layout
from smp.delayed_init import build_on_meta, materialize_
from smp.environment import read_launch
from smp.models.model_config import resolve_model
from smp.models.registry import build_model
from smp.optim.optimizers import build_optimizer
from smp.parallel.parallelize import compute_dtype
from smp.parallel.technique import model_blocks
from smp.runtime import process_group
from smp.train.arguments import parse_args


def plain(case: Case, bench: Bench) -> Found:
    """Time a loop as one writes it with Hugging Face: fp32 parameters, autocast, blocks recomputed, fused AdamW.

    With adapters: peft's, in fp32, beside a frozen base in bf16.
    """
    config = parse_args(case.words())
    resolved, device = resolve_model(config.model), bench.device
    length, vocabulary = resolved.sequence_length, resolved.hf_config.vocab_size
    with device:
        model: Any = build_model(resolved.hf_config, attn_implementation="sdpa")
    if rank := config.lora.lora_rank:
        import peft

        adapters = peft.LoraConfig(r=rank, lora_alpha=config.lora.lora_alpha, target_modules="all-linear")
        model = peft.get_peft_model(model.to(compute_dtype(config.precision, device)), adapters)
        model.enable_input_require_grads()  # without it recomputation finds nothing to train
    bench.fill(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = build_optimizer(model, config.optim, lr=LR)

    def step(number: int) -> Tensor:
        ids = bench.ids(vocabulary, length, number).to(device, non_blocking=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=bench.gpu):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optim.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return layout(length, 1, 1) | bench.timed(case, step, flops_per_token(config, resolved))


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
    resolved, dtype = resolve_model(config.model), compute_dtype(config.precision, device)
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
            ids = bench.ids(vocabulary, length, number, launch.rank).to(device, non_blocking=True)
            logits = model(input_ids=ids, use_cache=False).logits
            loss = loss_of(logits[:, :-1], ids[:, 1:])
            del logits
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.optim.grad_clip)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return loss.detach()

        found = bench.timed(case, step, flops_per_token(config, resolved))
    return found | layout(length, launch.world_size, launch.world_size)


def ceilings(case: Case, bench: Bench) -> Found:
    """Time products and copies: what the device does at best."""
    device, n, size = bench.device, 256 if case.tiny else 8192, 2**20 if case.tiny else 2**30
    dtype = torch.bfloat16 if bench.gpu else torch.float32
    one, other = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    bytes_, copy = (
        torch.empty(size, dtype=torch.uint8, device=device),
        torch.empty(size, dtype=torch.uint8, device=device),
    )
    host = torch.empty(size, dtype=torch.uint8, pin_memory=bench.gpu)
    calls: dict[str, tuple[float, str, Callable[[], Any]]] = {
        f"product of {n} x {n}": (2 * n**3 / 1e12, "TFLOP/s", lambda: one @ other),
        "copy on the device, read and written": (2 * size / 1e9, "GB/s", lambda: copy.copy_(bytes_)),
        "copy to the host": (size / 1e9, "GB/s", lambda: host.copy_(bytes_, non_blocking=True)),
        "copy from the host": (size / 1e9, "GB/s", lambda: copy.copy_(host, non_blocking=True)),
    }
    found = {name: f"{amount / bench.seconds(call):.1f} {unit}" for name, (amount, unit, call) in calls.items()}
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "x").open("wb") as file:
        data = os.urandom(2**20) * (1 if case.tiny else 512)
        start = time.perf_counter()
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
        found["written to disk and flushed"] = f"{len(data) / (time.perf_counter() - start) / 1e9:.2f} GB/s"
    return {"found": found}


def attention(case: Case, bench: Bench) -> Found:
    """Time causal attention of one sample, by kernel: forward, and with backward."""
    heads, groups, width, length = (4, 2, 16, 64) if case.tiny else (32, 8, 128, 8192)
    q, k, v = (
        torch.randn(1, h, length, width, device=bench.device, dtype=torch.bfloat16, requires_grad=True)
        for h in (heads, groups, groups)
    )  # fmt: skip

    def sdpa(backend: SDPBackend | None, *, grouped: bool) -> Tensor:
        key, value = (k, v) if grouped else (t.repeat_interleave(heads // groups, 1) for t in (k, v))
        with sdpa_kernel(backend) if backend else contextlib.nullcontext():
            return F.scaled_dot_product_attention(q, key, value, is_causal=True, enable_gqa=grouped)

    def varlen(bounds: list[int]) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        asks = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
        cut, longest = (
            torch.tensor(bounds, dtype=torch.int32, device=bench.device),
            max(map(int.__sub__, bounds[1:], bounds)),
        )
        flat = [t.transpose(1, 2).flatten(0, 1) for t in (q, k, v)]
        return varlen_attn(*flat, cut, cut, longest, longest, window_size=(-1, 0), **asks)  # type: ignore[call-arg]

    backends = {
        "torch's choice": None, "cuDNN": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
    }  # fmt: skip
    calls: dict[str, Callable[[], Tensor]] = {}
    for (name, backend), grouped in itertools.product(backends.items(), (True, False)):
        calls[f"{name}, K and V {'grouped' if grouped else 'repeated'}"] = functools.partial(
            sdpa, backend, grouped=grouped
        )
    calls["varlen, one document"] = functools.partial(varlen, [0, length])
    calls["varlen, three documents"] = functools.partial(varlen, [0, length // 4, length // 2, length])
    found = {}
    for name, call in calls.items():
        try:
            forward = bench.seconds(call)
            both = bench.seconds(lambda call=call: call().sum().backward())
            found[name] = f"{forward * 1e3:.2f} ms forward, {both * 1e3:.2f} ms with backward"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
    return {"found": found}
