"""The ways to write one training step that ``train_step.py`` measures: same model, values, batches and optimizer."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import accelerate
import torch
import transformers
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from smp.loss import shift_labels
from smp.parallel.technique import Setup

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import smp.comm
from smp.config import ActivationConfig, LossConfig, ParallelConfig, Settings
from smp.data.data_pipeline import StepBatch
from smp.delayed_init import initialize_
from smp.environment import malloc
from smp.errors import UserError
from smp.mesh import resolve_mesh
from smp.models.meta_model import init_rules
from smp.models.model_config import ResolvedModel
from smp.models.registry import build_model, family_of
from smp.optim.config import OptimConfig
from smp.optim.optimizers import build_optimizer
from smp.parallel.parallelize import prepare_model
from smp.parallel.technique import model_blocks
from smp.train.step import train_step

SEED, LR = 0, 3e-4
OPTIM = OptimConfig()  # the job's own: AdamW, decay on matrices, clipping at 1
CPU = torch.device("cpu")
NOT_RECOMPUTED = ActivationConfig(activation_checkpointing=False)

# Hidden width, blocks, intermediate width, vocabulary, tokens per sample.
SIZES = {
    "llama70m": (640, 10, 1728, 16_384, 256),
    "neox70m": (640, 10, 2560, 16_384, 256),
    "llama108m": (768, 10, 2048, 24_000, 1024),
    "llama108m_2k": (768, 10, 2048, 24_000, 2048),
    "llama_tiny": (256, 2, 128, 512, 32),
    "neox_tiny": (64, 2, 256, 512, 32),
}

Step = Callable[[int], Tensor]  # from the step's number to this process's mean loss, 0-d


@dataclasses.dataclass(frozen=True)
class Case:
    """One measurement: a variant of the step on one model, in fresh processes."""

    model: str
    precision: str
    variant: str
    processes: int
    threads: int  # of each process
    steps: int
    rows: int  # samples of each data-parallel process and step
    data_parallel: bool = True  # whether the processes read different samples

    @property
    def bf16(self) -> bool:
        """Whether to compute in bfloat16."""
        return self.precision == "bf16"

    @property
    def length(self) -> int:
        """Tokens per sample."""
        return SIZES[self.model][-1]

    @property
    def tokens(self) -> int:
        """Tokens of the timed steps, over all processes."""
        return (self.processes if self.data_parallel else 1) * self.rows * self.length * self.steps


def resolved_model(name: str) -> ResolvedModel:
    """Return the benchmark's model in the form the job plans with."""
    hidden, blocks, intermediate, vocabulary, length = SIZES[name]
    config_class = transformers.LlamaConfig if name.startswith("llama") else transformers.GPTNeoXConfig
    hf_config = config_class(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=blocks,
        num_attention_heads=hidden // 64 or 1, max_position_embeddings=length, tie_word_embeddings=False,
        use_cache=False,
    )  # fmt: skip
    return ResolvedModel(
        name=name, family=family_of(hf_config), hf_config=hf_config, sequence_length=length, weights=None,
        tokenizer_dir=None, generation_dir=None, attn_implementation="sdpa", delayed_param=True,
    )  # fmt: skip


def batch(case: Case, rank: int, step: int) -> Tensor:
    """Return this process's token ids ``(rows, length)``: its part of one global batch, the same in every variant."""
    generator = torch.Generator().manual_seed(1000 + step)
    total = case.rows * case.processes
    ids = torch.randint(SIZES[case.model][3], (total, case.length), generator=generator)
    return ids[rank * case.rows : (rank + 1) * case.rows]


def smp_step(
    case: Case,
    rank: int,
    *,
    shared_buffers: bool = True,
    activation: ActivationConfig = NOT_RECOMPUTED,
    loss: LossConfig | None = None,
) -> Step:
    """Build a step of the job's own parts, as the run in ``smp/train/__main__.py`` does."""
    malloc.keep_freed_memory()
    parallel = ParallelConfig(sharding_strategy="full_shard", shared_buffers=shared_buffers)
    mesh = resolve_mesh(parallel, world_size=case.processes, local_world_size=case.processes)
    mesh, settings = mesh.join("cpu"), Settings((parallel, activation, loss))
    setup = Setup(resolved_model(case.model).family, mesh, settings)
    model = prepare_model(
        resolved_model(case.model),
        mesh=mesh,
        settings=settings,
        dtype=torch.bfloat16 if case.bf16 else torch.float32,
        device=CPU,
        seed=SEED,
        load_weights=False,
    )
    _require_fsdp2(model, case)
    optimizer = build_optimizer(model, OPTIM, lr=LR)

    def step(number: int) -> Tensor:
        ids = batch(case, rank, number)
        rows = StepBatch([{"input_ids": ids, "targets": shift_labels(ids)}], torch.arange(len(ids)))
        result = train_step(model, optimizer, rows, setup=setup, device=CPU, grad_clip=OPTIM.grad_clip)
        return result.sums[0] / (int(result.valid) / case.processes)

    return step


def fsdp2_step(case: Case, rank: int, *, fused: bool, shared_buffers: bool = False) -> Step:
    """Build the loop of torch's FSDP2 tutorial: each block and the root sharded, the defaults otherwise."""
    model, family = plain_model(case), resolved_model(case.model).family
    policy = _fsdp2_policy(case)
    for block in model_blocks(model, family):
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    _require_fsdp2(model, case)
    if shared_buffers:
        smp.comm.use_shared_buffers(model)
    return _plain_loop(case, rank, model, adamw(model.parameters(), fused=fused))


def accelerate_step(case: Case, rank: int) -> Step:
    """Accelerate's prepare, backward and clipping, with its FSDP2 plug-in."""
    plugin = accelerate.FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", reshard_after_forward=True, cpu_offload=False,
        cpu_ram_efficient_loading=False, mixed_precision_policy=_fsdp2_policy(case),
    )  # fmt: skip
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16" if case.bf16 else "no", fsdp_plugin=plugin)
    # On GPUs Accelerate sets these two when it is given the plug-in; on CPUs it ignores the plug-in and makes the
    # model DDP.
    accelerator.state.distributed_type = accelerate.DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    model = plain_model(case)
    model, optimizer = accelerator.prepare(model, adamw(model.parameters(), fused=True))
    _require_fsdp2(model, case)
    return _plain_loop(case, rank, model, optimizer, backward=accelerator.backward, clip=accelerator.clip_grad_norm_)


def one_process_step(case: Case, rank: int) -> Step:
    """Build the plain Hugging Face model, all cores as threads of one process; bf16 is autocast's."""
    model = plain_model(case)
    return _plain_loop(case, rank, model, adamw(model.parameters(), fused=True))


def floor_step(case: Case, rank: int) -> Step:
    """No exchange: forward and backward of the whole model, AdamW on this process's part of it, without clipping."""
    model = plain_model(case)
    parameters = list(model.parameters())
    # The rows that FSDP2 would leave to this rank, in fp32. In fp32 they are views: no copy in either direction.
    parts = [p.detach().chunk(case.processes)[rank].float() for p in parameters]
    if case.bf16:
        model.to(torch.bfloat16)
    working = [p.detach().chunk(case.processes)[rank] for p in parameters]
    optimizer = adamw(parts, fused=True)

    def step(number: int) -> Tensor:
        ids = batch(case, rank, number)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        for parameter, part in zip(parameters, parts, strict=True):
            assert parameter.grad is not None
            part.grad = parameter.grad.chunk(case.processes)[rank].to(part.dtype)
        optimizer.step()
        optimizer.zero_grad()
        model.zero_grad()
        if case.bf16:
            torch._foreach_copy_(working, parts)
        return loss.detach()

    return step


def plain_model(case: Case) -> nn.Module:
    """Build the whole Hugging Face model, with the values that the job gives its shards."""
    resolved = resolved_model(case.model)
    model = build_model(resolved.hf_config, attn_implementation=resolved.attn_implementation)
    initialize_(model, init_rules(resolved.hf_config, seed=SEED), seed=SEED)
    return model.train()


def _plain_loop(
    case: Case,
    rank: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    backward: Callable[[Tensor], None] = Tensor.backward,
    clip: Callable[..., Tensor] = torch.nn.utils.clip_grad_norm_,
) -> Step:
    """Build the loop most people write, with Hugging Face's own loss."""
    autocast = case.bf16 and not isinstance(model, FSDPModule)

    def step(number: int) -> Tensor:
        ids = batch(case, rank, number)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        backward(loss)
        clip(model.parameters(), OPTIM.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def adamw(parameters: Iterable[Tensor], *, fused: bool) -> torch.optim.AdamW:
    """Build AdamW with the job's groups and settings: weight decay on matrices only."""
    parameters = list(parameters)
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": OPTIM.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    # None and not False: torch then chooses its default implementation.
    return torch.optim.AdamW(groups, lr=LR, betas=(OPTIM.beta1, OPTIM.beta2), eps=OPTIM.adam_eps, fused=fused or None)


def _fsdp2_policy(case: Case) -> MixedPrecisionPolicy:
    if case.bf16:
        return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return MixedPrecisionPolicy()


def _require_fsdp2(model: nn.Module, case: Case) -> None:
    blocks = model_blocks(model, resolved_model(case.model).family) if isinstance(model, FSDPModule) else [model]
    if not all(isinstance(module, FSDPModule) for module in blocks):
        raise UserError(
            f"{case.variant}: the model is {type(model).__name__}, not sharded by FSDP2: nothing to compare"
        )


class Variant(NamedTuple):
    """A way to write the step: its name in the tables, what builds it, and the backend of its process group, if any."""

    name: str
    build: Callable[[Case, int], Step]
    backend: str | None


_tutorial = functools.partial(fsdp2_step, fused=True)
_tutorial_shared = functools.partial(fsdp2_step, fused=True, shared_buffers=True)
VARIANTS: dict[str, Variant] = {
    "smp": Variant("smp", smp_step, "smddp"),
    "smp_unshared": Variant("smp without shared buffers", functools.partial(smp_step, shared_buffers=False), "smddp"),
    "smp_gloo": Variant("smp over gloo", smp_step, "gloo"),
    "smp_fake": Variant("smp over the fake backend: no exchange", smp_step, "fake"),
    "fsdp2": Variant("plain FSDP2 loop over gloo, unfused AdamW", functools.partial(fsdp2_step, fused=False), "gloo"),
    "fsdp2_fused": Variant("plain FSDP2 loop over gloo", _tutorial, "gloo"),
    "fsdp2_smddp": Variant("plain FSDP2 loop over smddp", _tutorial, "smddp"),
    "fsdp2_shared": Variant(
        "plain FSDP2 loop over smddp, shared buffers", functools.partial(_tutorial, shared_buffers=True), "smddp"
    ),
    "fsdp2_fake": Variant("plain FSDP2 loop over the fake backend: no exchange", _tutorial, "fake"),
    "accelerate": Variant("Accelerate, FSDP2, over gloo", accelerate_step, "gloo"),
    "one_process": Variant("one process, all cores as threads", one_process_step, None),
    "floor": Variant("floor: no exchange, no sharding", floor_step, None),
}
