"""Parallel training compared with the plain single-process Hugging Face model."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from smp.config import ActivationConfig, LossConfig, ParallelConfig, Section, Settings
from smp.data.data_pipeline import StepBatch
from smp.loss import shift_labels
from smp.mesh import Mesh, Role, lay_out, resolve_mesh
from smp.models.registry import family_of
from smp.optim.config import OptimConfig
from smp.optim.optimizers import build_optimizer
from smp.parallel import sharding
from smp.parallel.parallelize import apply_techniques
from smp.parallel.technique import Setup
from smp.train.step import train_step

VOCABULARY = 96
ROWS, LENGTH = 16, 12
LR, CLIP = 1e-2, 0.5
ADAMW = OptimConfig()
# .ci/run runs such tests, by their names, where the path has none.
INDUCTOR = pytest.mark.skipif(" " in torch.__file__, reason="torch's compiler takes no path with a space")


def tiny_config(name: str):
    """Small configurations that cover what the families do differently."""
    from transformers import GPTNeoXConfig, Lfm2Config, LlamaConfig, MiniCPM3Config, MistralConfig

    common: dict = dict(  # noqa: C408
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        max_position_embeddings=64,
    )  # fmt: skip
    match name:
        case "llama_gqa":
            return LlamaConfig(**common, num_key_value_heads=2, tie_word_embeddings=False)
        case "llama_tied":
            return LlamaConfig(**common, num_key_value_heads=2, tie_word_embeddings=True)
        case "mistral":
            return MistralConfig(**common, num_key_value_heads=2, sliding_window=6)
        case "gpt_neox":
            return GPTNeoXConfig(**common, use_parallel_residual=True, tie_word_embeddings=False)
        case "gpt_neox_tied":
            return GPTNeoXConfig(**common, use_parallel_residual=False, tie_word_embeddings=True)
        case "minicpm3":  # keys and values of all heads from a few values of a token
            latent = dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim"), 8)
            return MiniCPM3Config(**common, **latent, qk_rope_head_dim=4, num_key_value_heads=4)
        case "lfm2":  # short convolutions, which are not split
            return Lfm2Config(**common, num_key_value_heads=2, layer_types=["conv", "full_attention", "conv"])
        case _:
            raise ValueError(name)


def build_reference(name: str, dtype: torch.dtype) -> nn.Module:
    """The plain Hugging Face model."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(7)
    return AutoModelForCausalLM.from_config(tiny_config(name), attn_implementation="sdpa").to(dtype)


def global_batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and labels ``(ROWS, LENGTH)`` of one step; ranks get very different numbers of valid tokens."""
    generator = torch.Generator().manual_seed(100 + step)
    inputs = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator)
    labels = inputs.clone()
    labels[0] = -100
    labels[1, 3:] = -100
    labels[5, :7] = -100
    labels[8:12, 4:] = -100
    return inputs, labels


def rank_batch(step: int, rank: int, size: int, accumulation: int) -> StepBatch:
    """One rank's part of the global batch, cut into micro-batches."""
    inputs, labels = (t[rank * ROWS // size : (rank + 1) * ROWS // size] for t in global_batch(step))
    micro = min(accumulation, len(inputs))
    parts = zip(inputs.chunk(micro), labels.chunk(micro), strict=True)
    return StepBatch([{"input_ids": i, "targets": shift_labels(y)} for i, y in parts], torch.arange(len(inputs)))


@dataclasses.dataclass
class Trajectory:
    """What the reference did: each step's loss and norm, and the (clipped) gradients of the first."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, torch.Tensor]


def mean_loss(model: nn.Module, step: int) -> torch.Tensor:
    """The plain model's loss of a global batch."""
    inputs, labels = global_batch(step)
    logits = model(input_ids=inputs, use_cache=False).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)


def reference_trajectory(
    model: nn.Module, steps: int, loss_of: Callable[[nn.Module, int], torch.Tensor] = mean_loss
) -> Trajectory:
    """Train a copy of ``model`` with torch's own parts only."""
    model = copy.deepcopy(model).train()
    decay = [p for p in model.parameters() if p.ndim >= 2]
    rest = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decay, "weight_decay": 0.2}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95))
    result = Trajectory([], [], {})
    for step in range(steps):
        loss = loss_of(model, step)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        if step == 0:
            result.gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        result.losses.append(loss.item())
        result.norms.append(float(norm))
    return result


def relative(difference: torch.Tensor, of: torch.Tensor) -> float:
    """Norm of the difference over the norm."""
    return float(difference.norm() / of.norm().clamp(min=1e-30))


@functools.cache
def _joined(parallel: ParallelConfig, world: dist.ProcessGroup) -> Mesh:
    """The mesh of a configuration; its groups take longer to make than a tiny model."""
    return resolve_mesh(parallel, world_size=world.size(), local_world_size=world.size()).join("cpu")


@dataclasses.dataclass(frozen=True)
class Layout:
    """One way to lay a job over ranks."""

    strategy: str
    degree: int = 0
    accumulation: int = 1
    checkpointing: bool = False
    defer: bool = False
    keep: bool = False  # parameters gathered over the micro-batches of a step
    wrap: str = "transformer_auto_wrap_policy"
    min_unit: int = sharding.MIN_UNIT_PARAMETERS
    shared: bool = True
    tp: int = 1
    cp: int = 1
    ep: int = 1
    exchange: str = "auto"
    balanced: bool = True
    sequence: bool = True
    save_gathered: bool = False
    overlap: bool = False
    dtype: torch.dtype | None = None  # to compute in
    compile: bool = False
    chunk: int = 7  # tokens of the loss at a time; 0: the whole logits
    z_loss: float = 0.0
    mode: str = "full"  # of checkpointing
    offload: bool = False

    def activation(self) -> ActivationConfig:
        return ActivationConfig(
            activation_checkpointing=self.checkpointing,
            activation_checkpointing_mode=self.mode if self.checkpointing else "auto",  # type: ignore[arg-type]
            offload_activations=self.offload,
            activation_loading_horizon=1,
            compile=self.compile,
        )

    def parallel(self) -> ParallelConfig:
        return ParallelConfig(
            sharding_strategy=self.strategy,  # type: ignore[arg-type]
            hybrid_shard_degree=self.degree,
            defer_gradient_sync=self.defer,
            reshard_between_microbatches=not self.keep,
            shared_buffers=self.shared,
            auto_wrap_policy=self.wrap,  # type: ignore[arg-type]
            tensor_parallel_degree=self.tp,
            context_parallel_degree=self.cp,
            expert_parallel_degree=self.ep,
            cp_comm_type=self.exchange,  # type: ignore[arg-type]
            cp_load_balance=self.balanced,
            sequence_parallel=self.sequence,
            tp_save_gathered=self.save_gathered,
            tp_overlap=self.overlap,
        )

    def mesh(self) -> Mesh:
        parallel = ParallelConfig(
            sharding_strategy=self.strategy,  # type: ignore[arg-type]
            hybrid_shard_degree=self.degree,
            tensor_parallel_degree=self.tp,
            context_parallel_degree=self.cp,
            expert_parallel_degree=self.ep,
        )
        return _joined(parallel, dist.group.WORLD)


def setup_of(model: nn.Module, mesh: Mesh | None = None, *sections: Section) -> Setup:
    """Setup of a model's step; without a mesh, every rank has other samples and nothing is split."""
    if mesh is None:
        world = Role(dist.get_world_size(), dist.get_rank(), dist.group.WORLD)
        mesh = Mesh({**lay_out().roles, "data": world, "loss": world})
    return Setup(family_of(model.config), mesh, Settings(sections))


def train_parallel(
    reference: nn.Module,
    layout: Layout,
    steps: int,
    batch_of: Callable[[int, int, int, int], StepBatch] = rank_batch,
    optim: OptimConfig = ADAMW,
    seen: list[nn.Module] | None = None,
    more: tuple[Section, ...] = (),
) -> Iterator[tuple[float, float, dict]]:
    """Train a copy of ``reference`` under ``layout``; yields each step's loss, norm and whole gradients.

    ``seen`` receives the model; ``more`` are further sections of settings.
    """
    model = copy.deepcopy(reference).train()
    mesh, loss = layout.mesh(), LossConfig(loss_chunk_tokens=layout.chunk, z_loss=layout.z_loss)
    setup = setup_of(model, mesh, layout.parallel(), layout.activation(), loss, *more)
    setup = dataclasses.replace(setup, dtype=layout.dtype)
    with mock.patch.object(sharding, "MIN_UNIT_PARAMETERS", layout.min_unit):
        apply_techniques(model, setup)
    if seen is not None:
        seen.append(model)
    optimizer = build_optimizer(model, optim, lr=LR)
    gradients: dict[str, torch.Tensor] = {}

    def keep_gradients(*_) -> None:
        for name, parameter in model.named_parameters():
            grad = parameter.grad
            if grad is not None:
                gradients[name] = grad.full_tensor() if isinstance(grad, DTensor) else grad.clone()

    hook = optimizer.register_step_pre_hook(keep_gradients)
    for step in range(steps):
        batch = batch_of(step, mesh.data_rank, mesh.data_size, layout.accumulation)
        result = train_step(model, optimizer, batch, setup=setup, device=torch.device("cpu"), grad_clip=CLIP)
        yield result.loss(), float(result.grad_norm), gradients
        hook.remove()


def assert_parity(reference: nn.Module, expected: Trajectory, layout: Layout, tolerance: float) -> None:
    """Losses, norms and first gradients under ``layout`` agree with the reference's."""
    run = train_parallel(reference, layout, len(expected.losses))
    for step, (loss, norm, gradients) in enumerate(run):
        assert abs(loss - expected.losses[step]) <= tolerance * abs(expected.losses[step]), (layout, step, loss)
        if step == 0:
            assert abs(norm - expected.norms[0]) <= tolerance * expected.norms[0], (layout, norm)
            assert gradients.keys() == expected.gradients.keys()
            for name, gradient in gradients.items():
                error = relative(gradient - expected.gradients[name], expected.gradients[name])
                assert error <= tolerance, (layout, name, error)
