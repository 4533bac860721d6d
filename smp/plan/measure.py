"""Measure what operations, exchanges and the host cost, in each of the processes that ``smp.plan.calibrate`` starts.

All processes measure the same thing at once, as they share the memory's bandwidth in a job. The first operand stays, as
the operation before has just written it in a step; others, weights and what was saved, and results are rotated through
as much memory as the last cache has. Times are means of the wall's seconds, as a step is a sum, at the machine's usual
speed; each process writes its own, and their mean counts.
"""

from __future__ import annotations

import functools
import gc
import json
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from smp.comm.cuda import all_gather_single, reduce_scatter_single
from smp.comm.fsdp import SharedAllGather, SharedReduceScatter
from smp.comm.gloo import DirectAllGather, DirectReduceScatter
from smp.comm.group import SmddpGroup
from smp.config import ActivationConfig, CommConfig, LossConfig, ParallelConfig, Settings
from smp.data.data_pipeline import StepBatch
from smp.environment import read_launch
from smp.mesh import resolve_mesh
from smp.models.model_config import ModelConfig, resolve_model
from smp.parallel.parallelize import prepare_model
from smp.plan.bench import Bench
from smp.plan.devices import Tables
from smp.plan.kernels import VIEWS, attention, moved_bytes, operation_of, short_name
from smp.plan.measured import OF_ACTIVATIONS, Measured
from smp.plan.records import Exchange, Operation
from smp.runtime import choose_device, own_arguments, process_group
from smp.train.optimizer import OptimConfig, build_optimizer
from smp.train.step import train_step

TOUCHED = 512 * 2**20  # bytes of the heap
CALLS = (24, 12)  # of a collective: their seconds scatter, those of small ones by several times
LARGE = 2**22  # bytes of a rank
STEPS = 12  # of a small model, for the host's share
WAITS = 100  # for other ranks, after some milliseconds each
SIZES = tuple(2**n for n in (12, 17, 22))  # elements
MOVED = 256  # operands of what moves bytes, at most: more than of what computes
TURNS = 2  # of products, which are most of a step
# Tokens, input width, output width of linear layers; on a GPU of wider layers and more tokens.
LINEAR = (
    (128, 128, 128), (1024, 160, 432), (256, 512, 512), (512, 512, 1408), (1024, 768, 768), (1024, 768, 2048),
    (512, 512, 8192), (256, 768, 16384),
)  # fmt: skip
HEADS = ((4, 256, 40), (4, 512, 40), (8, 256, 64), (16, 512, 64), (12, 1024, 64))  # heads, tokens, width
ADAMW = (2**14, 2**18, 2**20, 2**22)
PARTS = tuple(2**n for n in (12, 16, 20, 22, 24))  # bytes of a rank in an exchange
RECOMPUTED = {
    "none": ActivationConfig(activation_checkpointing=False),
    "full": ActivationConfig(activation_checkpointing_mode="full"),
    "selective": ActivationConfig(activation_checkpointing_mode="selective"),
}


class Log(TorchDispatchMode):
    """Notes the operations that run: all but views."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and note it."""
        if any(hasattr(t, "__tensor_flatten__") for t in types):
            return NotImplemented  # a DTensor comes back as its local tensor
        result = func(*args, **(kwargs or {}))
        name = str(func)
        if short_name(Operation(name, (), ())) not in VIEWS and not name.startswith(("prim.", "c10d.", "profiler.")):
            self.operations.append(operation_of(name, (args, kwargs), result))
        return result


def products(bench: Bench) -> Iterator[tuple[str, str, int, int, int, float]]:
    """Measure products as a linear layer forms them: ``x w'`` forward, ``g w`` and ``g' x`` backward."""
    on_gpu = bench.device.type == "cuda"
    shapes = [(torch.bfloat16, 8 * tokens, 4 * inner, 4 * columns) for tokens, inner, columns in LINEAR]
    if not on_gpu:
        shapes = [(torch.float32, *s) for s in LINEAR] + [(torch.bfloat16, *s) for s in LINEAR[3:6:2]]
    for dtype, tokens, inner, columns in shapes:
        x, g = (bench.values(tokens, width, dtype=dtype) for width in (inner, columns))
        name, weights = str(dtype).removeprefix("torch."), bench.copies((columns, inner), dtype=dtype)
        yield name, "nt", tokens, inner, columns, bench.rotated(weights, lambda w, x=x: x @ w.t(), TURNS)
        yield name, "nn", tokens, columns, inner, bench.rotated(weights, lambda w, g=g: g @ w, TURNS)
        saved = bench.copies((tokens, inner), dtype=dtype)
        yield name, "tn", columns, tokens, inner, bench.rotated(saved, lambda x, g=g: g.t() @ x, TURNS)


def _layer_norm_backward(a: Tensor, b: Tensor) -> Any:
    each, weight = b[:, :1], b[0]  # the value of a row's mean, or of a weight, costs nothing
    return torch.ops.aten.native_layer_norm_backward(a, b, (512,), each, each, weight, weight, [True] * 3)


def _elementwise() -> dict[str, Callable[[Tensor, Tensor], Any]]:
    aten = torch.ops.aten
    return {
        "add": lambda a, b: a + b, "mul": lambda a, b: a * b, "div": lambda a, b: a / b, "neg": lambda a, b: -a,
        "pow": lambda a, b: a.pow(2), "mean": lambda a, b: b.mean(-1, keepdim=True), "rsqrt": lambda a, b: a.rsqrt(),
        "sum": lambda a, b: b.sum(0, keepdim=True), "silu": lambda a, b: F.silu(a), "gelu": lambda a, b: F.gelu(a),
        "silu_backward": aten.silu_backward, "gelu_backward": aten.gelu_backward, "exp": lambda a, b: a.exp(),
        "cat": lambda a, b: torch.cat([a, b], -1), "copy_": lambda a, b: a.copy_(b), "clone": lambda a, b: a.clone(),
        "_to_copy": lambda a, b: a.to(torch.bfloat16), "zero_": lambda a, b: a.zero_(), "add_": lambda a, b: a.add_(b),
        "_log_softmax": lambda a, b: a.log_softmax(-1), "native_layer_norm": lambda a, b: F.layer_norm(a, (512,)),
        "mul_": lambda a, b: a.mul_(1.0), "mul broadcast": lambda a, b: a * b[:, :1],
        "native_layer_norm_backward": _layer_norm_backward,
        "slice_backward": lambda a, b: aten.slice_backward(b, (len(b), 1024), 1, 0, 512, 1),
        "_foreach_norm": lambda a, b: torch._foreach_norm([b]),
        "_foreach_mul_": lambda a, b: torch._foreach_mul_([a, b], 1.0),
    }  # fmt: skip


def elementwise(bench: Bench) -> Iterator[tuple[str, int, float]]:
    """Measure operations that move bytes."""
    for numel in SIZES:
        pairs = bench.copies((numel // 512, 512), (numel // 512, 512), most=MOVED)
        first = pairs[0][0]
        for name, run in _elementwise().items():
            with Log() as log:
                run(*pairs[0])
            moved = sum(
                moved_bytes(operation) for operation in log.operations if short_name(operation) == name.split()[0]
            )
            if name.endswith("_"):  # into a parameter's or a buffer's memory
                yield name, moved, bench.rotated(pairs, run)
            else:
                yield name, moved, bench.rotated([(b,) for _, b in pairs], functools.partial(run, first))


def attentions(bench: Bench) -> Iterator[tuple[str, int, int, float, float]]:
    """Measure fused causal attention, forward, and backward through autograd."""
    on_gpu = bench.device.type == "cuda"
    shapes = [(torch.bfloat16 if on_gpu else torch.float32, *shape) for shape in HEADS]
    if not on_gpu:
        shapes += [(torch.bfloat16, *shape) for shape in HEADS[-2:]]
    for dtype, heads, length, width in shapes:
        tokens = length * (4 if on_gpu else 1)
        # As models hand them over: queries as a linear layer writes them, a token's heads side by side; keys and values
        # head by head.
        beside, apart = (1, tokens, heads, width), (1, heads, tokens, width)

        def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q.transpose(1, 2), k, v, is_causal=True)

        def backward(out: Tensor, gradient: Tensor, *inputs: Tensor) -> Any:
            return torch.autograd.grad(out, inputs, gradient.transpose(1, 2), retain_graph=True)

        rows = bench.copies(beside, apart, apart, dtype=dtype)
        with Log() as log:
            forward(*rows[0])
        scores = next(found.scores for operation in log.operations if (found := attention(operation)))
        ahead = bench.rotated(rows, forward)
        attended = []
        rows = bench.copies(beside, beside, apart, apart, dtype=dtype)
        for gradient, *inputs in rows[: -(-len(rows) // 2)]:  # backward reads and writes eight tensors of their size
            q, k, v = (each.detach().requires_grad_() for each in inputs)
            attended.append((forward(q, k, v), gradient, q, k, v))
        yield str(dtype)[6:], int(scores), width, ahead, bench.rotated(attended, backward)


def updates(bench: Bench) -> Iterator[tuple[int, float]]:
    """Measure the fused update."""
    for numel in ADAMW:
        parameters = [torch.nn.Parameter(torch.randn(numel, device=bench.device)) for _ in range(4)]
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        yield 4 * numel, bench.seconds(torch.optim.AdamW(parameters, fused=True).step)


def exchanges(bench: Bench, backend: str) -> Iterator[tuple[str, str, int, float]]:
    """Measure the exchanges of ``fully_shard`` as a backend makes them, and all-reduces."""
    size = dist.get_world_size()
    if size == 1:
        return
    group = cast(dist.ProcessGroup, dist.new_group(backend=backend))
    gather: Any = dist.all_gather_into_tensor
    scatter: Any = dist.reduce_scatter_tensor
    if backend == "smddp":
        gather, scatter = SharedAllGather(cast(SmddpGroup, group)), SharedReduceScatter(cast(SmddpGroup, group))
    elif backend == "gloo":
        gather, scatter = DirectAllGather(), DirectReduceScatter()
    kind: dict[str, Any] = {"dtype": torch.float32, "device": bench.device}
    for part in PARTS:
        numel = part // 4
        if backend == "nccl":
            gathered, whole, reduced = (torch.empty(n, **kind) for n in (numel * size, numel * size, numel))
        else:
            gathered = gather.allocate((numel * size,), **kind)
            whole, reduced = scatter.allocate((numel * size,), **kind), scatter.allocate((numel,), **kind)
        own = gathered[dist.get_rank() * numel :][:numel]
        for tensor in (own, whole):
            tensor.fill_(1.0)
        calls = {
            "all_gather": functools.partial(gather, gathered, own, group),
            "reduce_scatter": functools.partial(scatter, reduced, whole, group=group, op=dist.ReduceOp.SUM),
            "all_reduce": functools.partial(dist.all_reduce, whole, group=group),
            # As tensor and context parallelism call them: torch's own, which over gloo are rings.
            f"all_gather{OF_ACTIVATIONS}": functools.partial(all_gather_single, gathered, own, group=group),
            f"reduce_scatter{OF_ACTIVATIONS}": functools.partial(reduce_scatter_single, reduced, whole, group=group),
        }
        for name, call in calls.items():
            timed = functools.partial(_together, bench, call, CALLS[part >= LARGE])
            yield backend, name, part * size, bench.at_pace(timed)


def _together(bench: Bench, call: Callable[[], Any], calls: int) -> list[float]:
    """Return the seconds of a collective after products, as one that slept has to wake; every rank calls as often."""
    x = torch.ones(512, 512, device=bench.device)
    call()
    dist.barrier()
    found = []
    for _ in range(calls):
        x @ x.t()
        start = bench.now()
        call()
        found.append(bench.now() - start)
    return found


def _once(bench: Bench, step: Callable[[], None]) -> list[float]:
    """Return the seconds of one step, which begins on all ranks at once."""
    dist.barrier()
    start = bench.now()
    step()
    return [bench.now() - start]


def waiting(bench: Bench) -> float:
    """Return the share of its time on products that a process waits for the slowest one where all meet.

    On cores whose speed moves, or that others use, too, the slowest is another one each time; how often they meet
    matters little. GPUs are left out.
    """
    if dist.get_world_size() == 1 or bench.device.type == "cuda":
        return 0.0
    x, w, flag = torch.ones(512, 768), torch.ones(2048, 768), torch.ones(1)
    alone = statistics.fmean(_together(bench, lambda: dist.all_reduce(flag), WAITS))
    computed = waited = 0.0
    for _ in range(WAITS):
        start = bench.now()
        x @ w.t()
        done = bench.now()
        dist.all_reduce(flag)
        computed, waited = computed + done - start, waited + bench.now() - done - alone
    both = torch.tensor([computed, waited])
    dist.all_reduce(both)
    return max(0.0, (both[1] / both[0]).item())


def host(bench: Bench, found: Tables, backend: str) -> dict[str, float]:
    """Return the host's microseconds for an operation: what a small step takes beyond operations and exchanges.

    The step is large enough to push the host's own data out of the caches, as any real one does: one that leaves them
    there takes the host half as long for an operation.
    """
    launch, device = read_launch(), bench.device
    tables, result = Measured(found, backend, on_gpu=device.type == "cuda"), {}
    small = ModelConfig(
        model_type="mistral", max_context_width=256, hidden_width=256, num_layers=4, num_heads=8,
        intermediate_size=512, vocab_size=256,
    )  # fmt: skip
    model = resolve_model(small)
    mesh = resolve_mesh(
        ParallelConfig(), world_size=launch.world_size, local_world_size=launch.local_world_size, rank=launch.rank
    ).join(device.type)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    ids = torch.arange(256).reshape(1, 256)
    batch = StepBatch([{"input_ids": ids, "labels": ids.clone()}], torch.arange(1))
    for mode, activation in RECOMPUTED.items():
        settings = Settings((ParallelConfig(), activation, LossConfig()))
        prepared = prepare_model(
            model, mesh=mesh, settings=settings, dtype=dtype, device=device, seed=0, load_weights=False
        )
        optimizer = build_optimizer(prepared, OptimConfig(), lr=1e-4)

        def step(prepared: Any = prepared, optimizer: Any = optimizer) -> None:
            train_step(prepared, optimizer, batch, device=device, grad_clip=1.0, loss_group=mesh.loss.group)

        step()
        with Log() as log:
            step()
        known = 0.0  # a GPU computes and exchanges beside the host
        if device.type == "cpu":
            known = sum(tables.seconds(operation, "nt") for operation in log.operations) * (1 + found.waiting)
            # A gather forward, one backward and a reduction of each unit; the count of tokens, the norm, the flag.
            units = model.hf_config.num_hidden_layers + 2
            unit = sum(p.numel() for p in prepared.parameters()) * dtype.itemsize // units
            for kind, nbytes, calls in (
                ("all_gather", unit, 2 * units), ("reduce_scatter", unit, units), ("all_reduce", 1, 3)
            ) if launch.world_size > 1 else ():  # fmt: skip
                known += calls * tables.exchange(Exchange(kind, nbytes, launch.world_size, "shard", False))
        taken = bench.usual([bench.at_pace(functools.partial(_once, bench, step)) for _ in range(STEPS)])
        # On a busy machine what was measured before may exceed the step.
        result[mode] = max(0.0, 1e6 * (taken - known) / len(log.operations))
    return result


def _scaled(value: Any, factor: float) -> Any:
    """Multiply the floats of lines, or of values by name; the others are sizes."""
    if isinstance(value, dict):
        return {name: _scaled(each, factor) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_scaled(each, factor) for each in value]
    return value * factor if isinstance(value, float) else value


def measure(device: torch.device, budget: float) -> Tables:
    """Measure everything; the process group runs."""
    bench = Bench(device, budget)
    bench.values(TOUCHED // 4)  # and freed: what is measured then finds pages that were touched, as a second step does
    gc.disable()
    backends = ("smddp", "gloo") if device.type == "cpu" else ("nccl",)
    exchanged = [line for backend in backends for line in exchanges(bench, backend)]
    found = Tables(
        exchanges=exchanged, products=list(products(bench)), attention=list(attentions(bench)),
        adamw=list(updates(bench)), elementwise=list(elementwise(bench)),  # last: it writes into the operands
        host={}, probe={}, waiting=waiting(bench),
    )  # fmt: skip
    issued = host(bench, found, backends[0])
    pace, moved = 1.0, 0.0  # of a GPU
    if bench.paces:
        pace = bench.usual(bench.paces)
        tenths = statistics.quantiles(bench.paces, n=10)
        moved = tenths[-1] / tenths[0] - 1
    seconds: dict[str, Any] = {name: _scaled(getattr(found, name), pace) for name in found._fields[:5]}
    return found._replace(**seconds, host=_scaled(issued, pace), probe={"product": pace, "moved": moved})


def main() -> None:
    """Measure in this process, and write what it found: ``FOLDER SECONDS``."""
    folder, budget = own_arguments(None)
    launch = read_launch()
    device = choose_device(launch)
    torch.manual_seed(launch.rank)
    with process_group(CommConfig(), launch, device):
        found = measure(device, float(budget))
    (Path(folder) / f"{launch.rank}.json").write_text(json.dumps(found._asdict()))


if __name__ == "__main__":
    main()
