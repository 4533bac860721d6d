"""The ways to write one training step that ``gpu_step.py`` measures, each in a process of its own: same values, tokens,
optimizer settings and attention."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import itertools
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpu_meter import Case, Meter

from smp import delayed_init
from smp.config import Settings
from smp.data.data_pipeline import StepBatch
from smp.delayed_init import build_on_meta, initialize_, materialize_
from smp.environment import read_launch
from smp.memory.plan import estimate_memory
from smp.memory.shape import model_shape, workload
from smp.mesh import Mesh, resolve_mesh
from smp.models import init_rules
from smp.models.model_config import ResolvedModel, resolve_model
from smp.models.registry import build_model
from smp.parallel.parallelize import compute_dtype, prepare_model
from smp.parallel.technique import model_blocks
from smp.runtime import choose_device, process_group
from smp.train.arguments import SECTIONS, TrainConfig
from smp.train.flops import model_flops_per_token, peak_flops
from smp.train.optimizer import build_optimizer
from smp.train.step import train_step

LR = 3e-4
Step = Callable[[int], Tensor]  # from the step's number to this process's mean loss, 0-d


def batch(case: Case, vocabulary: int, number: int, rank: int = 0) -> Tensor:
    """Return the token ids ``(1, sequence)`` of a step, in memory that a GPU reads by itself."""
    generator = torch.Generator().manual_seed(1000 * number + rank)
    ids = torch.randint(vocabulary, (1, case.sequence), generator=generator)
    return ids.pin_memory() if torch.cuda.is_available() else ids


def draw_quickly() -> None:
    """Let initial values repeat, the same in every variant: drawing 2.4e9 on the host takes longer than measuring."""
    generator = torch.Generator().manual_seed(0)
    blocks = [torch.randn(delayed_init.BLOCK, generator=generator) for _ in range(251)]

    def draw(values: torch.Tensor, mean: float = 0.0, std: float = 1.0, *, generator: torch.Generator) -> torch.Tensor:
        return blocks[generator.initial_seed() % len(blocks)] * std + mean

    init_rules._draw_normal = draw


def _fill(model: nn.Module, resolved: ResolvedModel, seed: int) -> nn.Module:
    """Give a model the values that the job gives it."""
    initialize_(model, init_rules.init_rules(resolved.hf_config, seed=seed), seed=seed)
    return model.train()


def _loop(step: Step, meter: Meter) -> None:
    for number in range(meter.all_steps):
        meter.losses.append(step(number))
        meter.done()


def _settings(config: TrainConfig) -> Settings:
    return Settings(tuple(getattr(config, name) for name in SECTIONS))


def _smp_parts(case: Case, config: TrainConfig, mesh: Mesh, device: torch.device) -> tuple[nn.Module, Any, Step]:
    resolved = resolve_model(config.model)
    model = prepare_model(
        resolved, mesh=mesh, settings=_settings(config), dtype=compute_dtype(config.precision, device), device=device,
        seed=config.run.seed, load_weights=False,
    )  # fmt: skip
    optimizer = build_optimizer(model, config.optim, lr=LR)
    group = mesh.loss.group

    def step(number: int) -> Tensor:
        ids = batch(case, resolved.hf_config.vocab_size, number, mesh.data.rank)
        rows = StepBatch([{"input_ids": ids, "labels": ids}], torch.arange(1))
        result = train_step(
            model, optimizer, rows, device=device, grad_clip=config.optim.grad_clip, loss_group=group
        )  # fmt: skip
        return result.loss_sum / (case.sequence - 1)

    return model, optimizer, step


def run_smp(case: Case, meter: Meter, device: torch.device, flags: str) -> dict[str, Any]:
    """Train with what the job runs under these flags."""
    if "--offload_activations" in flags and device.type == "cpu":
        flags += f" --offload_dir {tempfile.gettempdir()}"
    config, launch = case.config(flags), read_launch()
    with process_group(config.comm, launch, device):
        laid_out = resolve_mesh(
            config.parallel, world_size=launch.world_size, local_world_size=launch.local_world_size, rank=launch.rank
        )  # fmt: skip
        *_, step = _smp_parts(case, config, laid_out.join(device.type), device)
        _loop(step, meter)
    resolved, dtype = resolve_model(config.model), compute_dtype(config.precision, device)
    work = workload(resolved, _settings(config), batch=1, compute_bytes=dtype.itemsize, device_type=device.type)
    needed = estimate_memory(model_shape(resolved), laid_out, work)
    if device.type == "cuda":
        del needed["process"]  # host memory
    return {"predicted": sum(needed.values()), "data_ranks": laid_out.data.size}


def run_trainer(case: Case, meter: Meter, device: torch.device, *, compiled: bool) -> dict[str, Any]:
    """Train with Hugging Face's Trainer: its own loop, gradient checkpointing, fused AdamW, and clipping."""
    from torch.utils.data import SequentialSampler
    from transformers import Trainer, TrainerCallback, TrainingArguments

    config = case.config()
    resolved, optim = resolve_model(config.model), config.optim
    with device:
        model = build_model(resolved.hf_config, attn_implementation="sdpa")
    vocabulary = resolved.hf_config.vocab_size
    rows = [batch(case, vocabulary, number)[0] for number in range(meter.all_steps)]

    class Told(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            meter.done()

    class InOrder(Trainer):
        def _get_train_sampler(self, *args: Any) -> SequentialSampler:
            return SequentialSampler(data)

        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            loss = super().training_step(*args, **kwargs)
            meter.losses.append(loss.detach())
            return loss

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, per_device_train_batch_size=1, max_steps=meter.all_steps, learning_rate=LR,
            lr_scheduler_type="constant", weight_decay=optim.weight_decay, adam_beta1=optim.beta1,
            adam_beta2=optim.beta2, adam_epsilon=optim.adam_eps, max_grad_norm=optim.grad_clip,
            bf16=device.type == "cuda", use_cpu=device.type == "cpu", optim="adamw_torch_fused",
            gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False},
            torch_compile=compiled, save_strategy="no", logging_strategy="no", report_to="none", disable_tqdm=True,
        )  # fmt: skip
        data = [{"input_ids": row, "labels": row} for row in rows]
        trainer = InOrder(
            _fill(model, resolved, config.run.seed), arguments, train_dataset=data,  # type: ignore[arg-type]
            callbacks=[Told()],
        )  # fmt: skip
        trainer.train()
    return {}


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


def run_recipe(case: Case, meter: Meter, device: torch.device) -> dict[str, Any]:
    """Train with torch's own parts, put together as torchtitan does."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    config, launch = case.config(), read_launch()
    resolved, optim = resolve_model(config.model), config.optim
    with process_group(config.comm, launch, device):
        build = functools.partial(build_model, resolved.hf_config, attn_implementation="sdpa")
        model: Any = build_on_meta(build)
        mesh = dist.init_device_mesh(device.type, (launch.world_size,))
        dtype = compute_dtype(config.precision, device)
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        for block in model_blocks(model, resolved.family):
            recomputed = functools.partial(checkpoint, block.forward, use_reentrant=False, context_fn=_selective)
            block.forward = torch.compile(recomputed, fullgraph=True)  # type: ignore[method-assign]
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model.model.embed_tokens, mesh=mesh, mp_policy=policy)
        fully_shard([model.model.norm, model.lm_head], mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        materialize_(model, device)
        _fill(model, resolved, config.run.seed)
        optimizer = build_optimizer(model, optim, lr=LR)
        loss_of = torch.compile(_cross_entropy)

        def step(number: int) -> Tensor:
            ids = batch(case, resolved.hf_config.vocab_size, number, launch.rank).to(device, non_blocking=True)
            logits = model(input_ids=ids, use_cache=False).logits
            loss = loss_of(logits[:, :-1], ids[:, 1:])
            del logits
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), optim.grad_clip)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return loss.detach()

        _loop(step, meter)
    return {"data_ranks": launch.world_size}


class Variant(NamedTuple):
    """A way to write the step, and what its row does."""

    run: Callable[..., dict[str, Any]]
    what: str
    several: bool = False  # whether it is measured on several GPUs too


def _smp(words: str, flags: str, *, several: bool = False) -> tuple[str, Variant]:
    run = functools.partial(run_smp, flags=flags)
    return f"smp, {words}", Variant(run, f"the job's step with `{flags}`, the rest default", several)


_NONE = "--activation_checkpointing 0"
_SELECTIVE = "--activation_checkpointing_mode selective"
VARIANTS: dict[str, Variant] = dict([
    _smp("eager, full", "--compile 0", several=True),
    _smp("eager, selective", f"--compile 0 {_SELECTIVE}"),
    _smp("eager, none", f"--compile 0 {_NONE}"),
    _smp("compiled, full", "--compile 1"),
    _smp("compiled, selective", f"--compile 1 {_SELECTIVE}", several=True),
    _smp("compiled, none", f"--compile 1 {_NONE}"),
    _smp("eager, full, offloaded", "--compile 0 --offload_activations 1"),
    ("Trainer", Variant(
        functools.partial(run_trainer, compiled=False),
        "Hugging Face's Trainer: fp32 parameters under bf16 autocast, each block recomputed whole, fused AdamW",
    )),
    ("Trainer, torch_compile", Variant(
        functools.partial(run_trainer, compiled=True), "the same with `torch_compile=True`, which compiles the model"
    )),
    ("torch's parts", Variant(
        run_recipe,
        "`fully_shard` in bf16 with fp32 reduction, selective recomputation (attention and every other product are "
        "kept), each block and the cross entropy of the whole logits compiled, fused AdamW: torchtitan's recipe",
        True,
    )),
])  # fmt: skip
REFERENCE = "smp, eager, full"
TENSOR_PARALLEL = {"smp, eager, full, tp": "--compile 0", "smp, compiled, selective, tp": f"--compile 1 {_SELECTIVE}"}


def run_save(case: Case, device: torch.device) -> dict[str, Any]:
    """Time two asynchronous saves: how long training stands still."""
    from smp.checkpoint.checkpointer import Checkpointer

    config, meter = case.config(), Meter(case, device)
    with process_group(config.comm, read_launch(), device), tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        mesh = resolve_mesh(config.parallel, world_size=1, local_world_size=1).join(device.type)
        model, optimizer, step = _smp_parts(case, config, mesh, device)
        for number in range(case.warmup):
            step(number)
        start = meter.synchronize()
        for number in range(case.steps):
            step(number)
        alone = (meter.synchronize() - start) / case.steps
        saver, stalls = Checkpointer(folder, model, optimizer, keep=1), []
        for number in (1, 2):
            start = meter.synchronize()
            saver.save(number, wait=False)
            step(number)  # its update waits for the copy
            stalls.append(meter.synchronize() - start - alone)
            saver.finish()
        size = sum(p.numel() for p in model.parameters()) * 12
    return {**dataclasses.asdict(case), "alone": alone, "stalls": stalls, "bytes": size}


def _attention_calls(case: Case, device: torch.device, *, grouped: bool) -> list[Callable[[], Any]]:
    """Return forward, and forward with backward."""
    heads, groups, width = (4, 2, 16) if case.tiny else (32, 8, 128)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def made(count: int) -> Tensor:
        return torch.randn(1, count, case.sequence, width, device=device, dtype=dtype, requires_grad=True)

    q, k, v = made(heads), made(groups), made(groups)
    gradient = torch.randn_like(q)

    def forward() -> Tensor:
        if grouped:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        key, value = (t.repeat_interleave(heads // groups, 1) for t in (k, v))
        return F.scaled_dot_product_attention(q, key, value, is_causal=True)

    return [forward, lambda: torch.autograd.grad(forward(), (q, k, v), gradient)]


def run_attention(case: Case, device: torch.device) -> dict[str, Any]:
    """Time causal attention, forward and backward, by each backend; K and V grouped, and repeated."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    meter, found = Meter(case, device), {}
    backends = {"cuDNN": "CUDNN_ATTENTION", "flash": "FLASH_ATTENTION", "efficient": "EFFICIENT_ATTENTION"}
    for (name, backend), grouped in itertools.product({"torch's choice": "", **backends}.items(), (True, False)):
        only = sdpa_kernel(getattr(SDPBackend, backend)) if backend else contextlib.nullcontext()
        times: list[Any] = []
        try:
            with only, warnings.catch_warnings():
                warnings.simplefilter("ignore")  # why a backend is not taken
                for call in _attention_calls(case, device, grouped=grouped):
                    call()
                    start = meter.synchronize()
                    for _ in range(case.steps):
                        call()
                    times.append((meter.synchronize() - start) / case.steps)
        except RuntimeError as error:
            times = [reason(error)]
        found[f"{name}, K and V {'grouped' if grouped else 'repeated'}"] = times
    return {**dataclasses.asdict(case), "times": found}


SECTIONS_BESIDE = {"attention": run_attention, "save": run_save}


def reason(error: BaseException) -> str:
    """Return the first line of an error, with its type."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}".replace("|", "/")


def measure(case: Case) -> dict[str, Any]:
    """Measure in this process; what fails is a result too."""
    device = torch.device("cpu")
    draw_quickly()
    try:
        device = choose_device(read_launch())
        found = _measure(case, device)
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        found = {**dataclasses.asdict(case), "failed": reason(error)}
    gc.collect()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
    return {**found, "device": name, "memory": memory}


def _measure(case: Case, device: torch.device) -> dict[str, Any]:
    if case.variant in SECTIONS_BESIDE:
        return SECTIONS_BESIDE[case.variant](case, device)
    meter = Meter(case, device)
    if case.variant in VARIANTS:
        more = VARIANTS[case.variant].run(case, meter, device)
    else:
        tensor = TENSOR_PARALLEL.get(case.variant)
        flags = case.variant if tensor is None else f"--tensor_parallel_degree {case.processes} {tensor}"
        more = run_smp(case, meter, device, flags)
    config = case.config()
    flops = model_flops_per_token(resolve_model(config.model).hf_config, case.sequence).total
    cuda = device.type == "cuda"
    peak = peak_flops(torch.cuda.get_device_name(device), torch.bfloat16) if cuda else None
    return meter.result(flops_per_token=flops, peak_flops=peak, **more)
