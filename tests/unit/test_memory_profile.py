"""Memory by category: the account against torch's own, known sizes, and the end of a job that has too little."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import importlib
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from smp.config import ActivationConfig, LossConfig, ParallelConfig, Settings
from smp.data.data_pipeline import StepBatch
from smp.loss import shift_labels
from smp.memory.advice import advice_text, changes_that_help
from smp.memory.categories import _SITES, LOGITS, asked_by
from smp.memory.estimate import estimate_memory
from smp.memory.profile import CATEGORIES, Snapshot, is_out_of_memory, profile_memory, rank_table
from smp.memory.shape import Moment, Workload, model_shape
from smp.memory.tracker import cpu_tensor_bytes, rss_bytes
from smp.mesh import lay_out
from smp.models.family import LogitTransform
from smp.models.registry import family_of
from smp.optim.config import OptimConfig
from smp.optim.optimizers import build_optimizer
from smp.parallel.loss import cost
from smp.parallel.parallelize import parallelize
from smp.parallel.tensor import group as tp_group
from smp.plan import world
from smp.plan.step_profile import StepTrace
from smp.runtime import release_cache
from smp.train import checked_job
from smp.train.logging_config import LoggingConfig
from smp.train.report import profile_step
from smp.train.state import TrainState
from smp.train.step import train_step
from tests.clock import wait_until
from tests.distributed import run_distributed
from tests.flags import ROOT
from tests.job import run_job
from tests.reference import Layout, setup_of, tiny_config
from tests.unit.test_logits import CONFIGS
from tests.unit.test_memory_plan import shape_of

CPU = torch.device("cpu")
ROWS, LENGTH, VOCABULARY, LAYERS = 4, 96, 1024, 3
SMALL = (
    "--model_type llama_v2 --hidden_width 64 --num_layers 2 --num_heads 4 --llama_intermediate_size 128 "
    "--vocab_size 4096 --max_context_width 512 --use_synthetic_data 1 --data_num_workers 0 --save_final_model 0"
).split()


def build(name, vocabulary=VOCABULARY):
    from transformers import AutoModelForCausalLM

    config = tiny_config(name)
    config.hidden_size, config.intermediate_size, config.vocab_size = 128, 256, vocabulary
    config.max_position_embeddings = LENGTH
    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()


def allocated(events) -> int:
    """The highest sum of what torch's own account of the CPU's allocator saw."""
    total = highest = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        total += event.nbytes()
        highest = max(highest, total)
    return highest


def profiled_steps(layout: Layout, name: str, *, vocabulary: int = VOCABULARY):
    """The profile of a second step, and what torch's profiler says was allocated at most."""
    model, mesh = build(name, vocabulary), layout.mesh()
    parallelize(
        model,
        family_of(model.config),
        mesh=mesh,
        parallel=layout.parallel(),
        activation=ActivationConfig(activation_checkpointing=layout.checkpointing),
        dtype=layout.dtype,
        loss=LossConfig(loss_chunk_tokens=layout.chunk),
    )
    optimizer = build_optimizer(model, OptimConfig(), lr=1e-3)
    ids = torch.randint(0, VOCABULARY, (ROWS, LENGTH))
    for _ in range(2):
        batch = StepBatch([{"input_ids": ids, "targets": shift_labels(ids)}] * layout.accumulation, torch.arange(ROWS))
        with profile_memory(model, optimizer) as account:
            base = account.latest().total
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as torchs:
                setup = setup_of(model, mesh)
                train_step(model, optimizer, batch, setup=setup, device=CPU, grad_clip=1.0, record=account.mark)
    return model, account, base + allocated(torchs.profiler.kineto_results.events())


def gloo_rests() -> bool:
    """Whether gloo's threads wait for work: a thread that has ended a collective holds it until then."""
    threads = Path("/proc/self/task").iterdir()
    gloos = [thread for thread in threads if (thread / "comm").read_text().startswith("pt_gloo")]
    assert gloos
    return all((thread / "stat").read_text().rpartition(")")[2].split()[0] == "S" for thread in gloos)


def settled(exchange):
    """An exchange that is over in gloo's threads, too: what they are the last to free, torch's account would miss."""

    def call(*args, async_op=False, **kwargs):
        work = exchange(*args, async_op=True, **kwargs)
        work.wait()
        wait_until(gloo_rests)
        return work if async_op else None

    return call


def compare(cases) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if torch.distributed.get_backend() == "gloo":
            for owner, name in (
                (tp_group, "all_gather_single"), (tp_group, "reduce_scatter_single"), (torch.distributed, "all_reduce"),
            ):  # fmt: skip
                patch.setattr(owner, name, settled(getattr(owner, name)))
        for name, layout in cases:
            compare_one(name, layout)  # a function of its own, so that no model outlives its case


def compare_one(name, layout) -> None:
    before = cpu_tensor_bytes()  # what other tests have left in the process that was forked
    model, account, measured = profiled_steps(layout, name)
    peak = account.peak()
    text = f"{name} {layout}\n{account.table()}\nmeasured {measured}"
    # What the ranks share is not the allocator's.
    shared = peak.categories["communication buffers"] if torch.distributed.get_backend() == "smddp" else 0
    assert -0.02 * measured <= peak.total - measured <= 0.02 * measured + shared, text
    assert peak.categories["other"] - before <= 0.05 * peak.total, text
    assert sum(account.peak().categories.values()) == peak.total
    local = sum(p.to_local().numel() if hasattr(p, "to_local") else p.numel() for p in model.parameters()) * 4
    tensors = sum(1 for _ in model.parameters())
    assert account.latest().categories["parameters"] == peak.categories["parameters"] == local, text
    assert account.latest().categories["optimizer state"] == 2 * local + 4 * tensors, text
    assert account.at("backward").categories["gradients"] == local, text
    assert account.latest().categories["gradients"] == 0, text


CASES = {
    "gloo": [
        ("llama_gqa", Layout("full_shard", chunk=64)),
        ("gpt_neox", Layout("full_shard", chunk=0, checkpointing=True)),
        ("llama_tied", Layout("shard_grad_op", chunk=64)),
        ("llama_gqa", Layout("no_shard", chunk=64)),
        ("llama_gqa", Layout("full_shard", chunk=64, tp=2)),
        ("gpt_neox", Layout("full_shard", chunk=64, tp=2, sequence=False)),
        ("gpt_neox", Layout("full_shard", chunk=64, tp=2, checkpointing=True)),
        ("llama_gqa", Layout("full_shard", chunk=0, tp=2, checkpointing=True)),
    ],
    "smddp": [
        ("llama_gqa", Layout("full_shard", chunk=64, tp=2)),
        ("llama_gqa", Layout("full_shard", chunk=0, tp=2, sequence=False)),
        ("llama_gqa", Layout("full_shard", chunk=64, checkpointing=True)),
        ("gpt_neox", Layout("full_shard", chunk=0)),
        ("gpt_neox", Layout("full_shard", chunk=64, tp=2)),
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("backend", CASES)
def test_the_categories_sum_to_what_is_allocated(backend):
    run_distributed(compare, CASES[backend], world_size=2, backend=backend)


def compare_with_plan(layouts) -> None:
    for name, layout in layouts:
        compare_one_with_plan(name, layout)


def compare_one_with_plan(name, layout, vocabulary=16_384) -> None:
    config = build(name, vocabulary).config
    shape = model_shape(SimpleNamespace(family=family_of(config), hf_config=config, attn_implementation="sdpa"))
    before = cpu_tensor_bytes()
    _, account, measured = profiled_steps(layout, name, vocabulary=vocabulary)
    measured -= before
    work = Workload(
        LENGTH, ROWS, (layout.dtype or torch.float32).itemsize, device_type="cpu",
        settings=Settings((
            layout.parallel(), ActivationConfig(activation_checkpointing=layout.checkpointing),
            LossConfig(loss_chunk_tokens=layout.chunk),
        )),
        accumulation=layout.accumulation,
    )  # fmt: skip
    needed = estimate_memory(shape, layout.mesh(), work)
    total = sum(needed.values()) - needed["process"]
    text = f"{name} {layout}\n{account.table(predicted=needed)}\n{measured}"
    assert measured <= total <= 1.45 * measured, text
    if layout.mesh().world_size == 1:  # what is reduced, and the result: no copy of it to divide
        assert highest(account, "communication buffers") < 2.1 * 4 * shape.largest_unit, text


PLANNED = [
    ("llama_tied", Layout("full_shard", chunk=64, checkpointing=True, dtype=torch.bfloat16, accumulation=2)),
    ("llama_tied", Layout("no_shard", chunk=64, checkpointing=True, dtype=torch.bfloat16, accumulation=2)),
    ("llama_gqa", Layout("full_shard", chunk=64, checkpointing=True, accumulation=2)),
]


@pytest.mark.full
@pytest.mark.parametrize(("world_size", "cases"), [(1, PLANNED[:1]), pytest.param(2, PLANNED, marks=pytest.mark.slow)])
def test_the_gradient_of_a_large_head_is_in_the_prediction(world_size, cases):
    run_distributed(compare_with_plan, cases, world_size=world_size)


def copies() -> None:
    """What an exchange over gloo takes while it runs."""
    whole, part = torch.ones(2, 2, 2**18), torch.ones(2, 1, 2**18)
    group = torch.distributed.group.WORLD.group_name
    for exchange, made in (
        (lambda: tp_group.reduce_scatter_single(part.view(-1), whole.view(-1)), 0),
        (lambda: tp_group.all_gather_single(whole.view(-1), part.view(-1)), 0),
        (lambda: torch.ops.smp.reduce_tokens(whole, group, 2), part.nbytes),
    ):
        with profile_memory(torch.nn.Linear(2, 2)) as account:
            before = account.latest().total
            result = exchange()
            wait_until(gloo_rests)
            del result
        peak = account.peak()
        assert peak.total - before == made + whole.nbytes, (account.table(), before)
        assert peak.categories["communication buffers"] == whole.nbytes, account.table()


@pytest.mark.parametrize("path", ["/x/smp/loss.py", "/x/smp/.venv/torch/optim/adam.py", "/transformers/x.py"])
def test_allocation_sites_are_known_by_their_module_and_not_by_parts_of_its_path(path):
    """Of the innermost one on the stack, whatever the folders are called."""
    code = compile("def called(ask): return ask()", path, "exec")
    found = {}
    for module in ("elsewhere", "smp.faults.agreement", "smp.loss"):
        exec(code, namespace := {"__name__": module})
        found[module] = namespace["called"](asked_by)
    assert found == {"elsewhere": None, "smp.faults.agreement": None, "smp.loss": LOGITS}


@pytest.mark.parametrize("module", ["elsewhere", "smp.train.step", "smp.faults.agreement", "transformers.generation"])
def test_what_a_plan_reads_of_fake_tensors_does_not_depend_on_who_reads(module):
    exec("def read(tensor): return tensor.item()", namespace := {"__name__": module})
    with (mode := world.fake_mode()):
        tensors = [torch.zeros((), dtype=dtype) for dtype in (torch.int64, torch.bool, torch.float32)]
        with StepTrace(torch.nn.Linear(1, 1), None, torch.device("meta"), mode):
            assert [namespace["read"](each) for each in tensors] == [1, True, 1.0]


@pytest.mark.parametrize("module", _SITES)
def test_allocation_sites_are_there(module):
    newer = {"FSDPParam.unsharded_zero_grad_data"} if torch.__version__ < (2, 12) else set()
    functions = [name.split(".") for name in _SITES[module].keys() - newer if name]
    assert all(functools.reduce(getattr, parts, importlib.import_module(module)) for parts in functions)


@pytest.mark.full
def test_what_gloo_copies_is_seen():
    run_distributed(copies, world_size=2)


def one_step(*, checkpointing: bool, chunk: int, logits: LogitTransform | None = None):
    from smp.parallel.activation_checkpoint import apply_activation_checkpointing
    from smp.parallel.loss import chunk_loss, model_loss_sum

    model = build("llama_gqa")
    if checkpointing:
        apply_activation_checkpointing(list(model.model.layers))
    if chunk:
        chunk_loss(model, chunk_tokens=chunk, logits=logits)
    ids = torch.randint(0, VOCABULARY, (ROWS, LENGTH))
    with profile_memory(model) as account:
        loss = model_loss_sum(model, {"input_ids": ids}, shift_labels(ids))
        account.mark("forward")
        loss.backward()
    return account


def highest(account, category):
    return max(account.timeline(10**6).categories[category])


@pytest.mark.full
def test_logits_shrink_with_chunks_and_activations_with_checkpointing():
    whole, chunks, recomputed = (one_step(checkpointing=c, chunk=n) for c, n in ((False, 0), (False, 32), (True, 32)))
    logits = ROWS * LENGTH * VOCABULARY * 4
    assert logits <= highest(whole, "logits and loss") <= 4 * logits
    chunk = 32 * VOCABULARY * 4
    assert chunk <= highest(chunks, "logits and loss") <= 1.1 * chunk
    hidden_state = ROWS * LENGTH * 128 * 4
    kept, kept_less = (a.at("forward").categories["activations"] for a in (chunks, recomputed))
    assert LAYERS * hidden_state <= kept_less < kept / 3
    head = VOCABULARY * 128 * 4  # its gradient is made in forward
    assert chunks.at("forward").categories["gradients"] == head


@pytest.mark.full
@pytest.mark.parametrize(("name", "transform", "copies"), [
    ("division", LogitTransform(scale=0.5), 1), ("cap", LogitTransform(cap=5.0), 2),
])  # fmt: skip
def test_a_cap_keeps_its_slope_beside_the_logits(name, transform, copies):
    held = highest(one_step(checkpointing=False, chunk=32, logits=transform), "logits and loss")
    chunk = 32 * VOCABULARY * 4
    assert copies * chunk <= held <= (copies + 0.1) * chunk
    config = CONFIGS[name]
    shape = model_shape(SimpleNamespace(family=family_of(config), hf_config=config, attn_implementation="eager"))
    settings = Settings((LossConfig(loss_chunk_tokens=32),))
    work = Workload(LENGTH, ROWS, 4, settings, device_type="cpu", moment=Moment.LOSS)
    assert cost(shape, lay_out(1), work)["logits and loss"] == copies * 32 * shape.vocabulary * 4


class Waves(torch.nn.Module):
    """Tensors of 32 MiB, which the process gets from the system and gives back one by one."""

    def __init__(self, size=2**23):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(size))

    def forward(self, values):
        for _ in range(6):
            values = (values * self.weight).sin()
        return values


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc")
def test_the_sum_is_what_the_process_grows_by():
    """In a process of its own: a child of this one may use what other tests have freed."""
    command = [sys.executable, "-c", "from tests.unit import test_memory_profile as here; here.grow()"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def grow() -> None:
    """Compare the sum of what is tracked with what the system gave to the process."""
    ctypes.CDLL(None).mallopt(-3, 2**20)  # M_MMAP_THRESHOLD: what is freed goes back at once
    with profile_memory(Waves(1)) as account:  # what is imported and kept at the first step
        Waves(1)(torch.ones(1)).sum().backward()
    waves, values = Waves(), torch.ones(2**23)
    before = rss_bytes()
    with profile_memory(waves) as account:
        tracked = account.latest().total
        waves(values).sum().backward()
    grown = account.peak().total - tracked
    assert grown >= 13 * 2**25  # what is saved: an input and a product each time
    assert account.resident - before == pytest.approx(grown, rel=0.05), account.table()


def test_a_timeline_keeps_the_peak_and_is_drawn(tmp_path):
    account = one_step(checkpointing=False, chunk=32)
    thin = account.timeline(50)
    assert len(thin.seconds) <= 50 and thin.seconds == sorted(thin.seconds)
    assert max(map(sum, zip(*thin.categories.values(), strict=True))) == account.peak().total
    assert [name for name, _ in thin.marks] == ["forward"]
    account.plot(tmp_path / "memory.png")
    assert (tmp_path / "memory.png").stat().st_size > 10_000


def test_tables():
    account = one_step(checkpointing=False, chunk=0)
    lines = account.table(predicted={"parameters": 3 * 2**20}).splitlines()
    assert [line.split("  ")[0] for line in lines[:1]] == [f"Memory by category at the peak ({account.peak().phase}):"]
    assert [line[:28].strip() for line in lines[1:10]] == list(CATEGORIES)
    assert lines[1].endswith("predicted       3.00 MiB") and "predicted" not in lines[2]
    ranks = rank_table([Snapshot(dict.fromkeys(CATEGORIES, 2**20), "forward")] * 2).splitlines()
    assert len(ranks) == 3 and ranks[2].split()[0] == "1" and ranks[2].split()[-1] == "9.00"


def test_nothing_is_tracked_unless_asked_for():
    resize = torch.UntypedStorage.resize_

    def plan(**settings):
        return SimpleNamespace(
            config=SimpleNamespace(logging=LoggingConfig(**settings)),
            launch=SimpleNamespace(is_main=False), device=CPU,
        )  # fmt: skip

    model, record, start = torch.nn.Linear(2, 2), print, SimpleNamespace(progress=TrainState())
    optimizer = torch.optim.SGD(model.parameters())
    for settings, step in (({}, 0), ({"enable_memory_profiling": True}, 0)):  # off; and not the main rank
        with profile_step(plan(**settings), start, model, optimizer, step=step, record=record) as mark:
            assert mark is record
            assert _get_current_dispatch_mode_stack() == [] and torch.UntypedStorage.resize_ is resize
    with profile_memory(model):
        assert len(_get_current_dispatch_mode_stack()) == 1 and torch.UntypedStorage.resize_ is not resize
    assert _get_current_dispatch_mode_stack() == [] and torch.UntypedStorage.resize_ is resize


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."), True),
        (MemoryError(), True),
        (OSError(12, "Cannot allocate memory"), True),
        (RuntimeError("shapes cannot be multiplied"), False),
        (OSError(28, "No space left on device"), False),
    ],
)
def test_out_of_memory_is_known(error, expected):
    assert is_out_of_memory(error) is expected


SETTINGS = Settings(
    (ParallelConfig(), ActivationConfig(activation_checkpointing=False), LossConfig(loss_chunk_tokens=0))
)
WORK = Workload(sequence_length=4096, micro_batch_size=2, compute_bytes=2, settings=SETTINGS)


def test_advice_is_what_the_prediction_says():
    _, shape = shape_of("llama70b")
    degrees = lay_out(2, 8)
    changes = changes_that_help(shape, degrees, WORK, accumulation=3)
    assert len(changes) == 3 and changes == sorted(changes, key=lambda change: -change.saving)
    now = sum(estimate_memory(shape, degrees, WORK).values())
    every = changes_that_help(shape, degrees, WORK, accumulation=3, most=99)
    savings = dict(every)
    checkpointed = WORK.changed(activation_checkpointing=True)
    assert savings["--activation_checkpointing 1"] == now - sum(estimate_memory(shape, degrees, checkpointed).values())
    assert "--train_batch_size 1 --gradient_accumulation_steps 6" in savings
    assert savings["--tensor_parallel_degree 2"] > 0 and savings["--cpu_offload 1"] > 0
    assert "MiB  " + changes[0].flags in advice_text(changes)
    on_cpu = dataclasses.replace(WORK, device_type="cpu")
    split = changes_that_help(shape, degrees, on_cpu, legal=lambda mesh: mesh.tp.size == 1, most=99)
    assert not [c for c in split if "tensor_parallel" in c.flags or "cpu_offload" in c.flags]
    assert [c for c in split if "--offload_dir" in c.flags]


def give_back_freed_memory() -> None:
    """Return what other tests have freed, which would be used again and not show."""
    release_cache(CPU)


@pytest.fixture
def little_memory(monkeypatch):
    """Jobs forked from here get little more memory than they have after planning."""

    def limit(plan, available) -> None:
        give_back_freed_memory()
        held = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData"))
        room = int(held.split()[1]) * 1024 + 200 * 2**20
        resource.setrlimit(resource.RLIMIT_DATA, (room, resource.getrlimit(resource.RLIMIT_DATA)[1]))

    monkeypatch.setattr(checked_job, "refuse_too_large", limit)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="sets a limit from what Linux says is held")
@pytest.mark.parametrize("profiled", [0, 1])
@pytest.mark.full
def test_out_of_memory_ends_with_a_table_and_advice(tmp_path, little_memory, profiled):
    # Far more than the free blocks that earlier tests may have left in this process' heap.
    outcome = run_job(
        *SMALL, "--output_dir", tmp_path / "run", "--max_steps", 1, "--train_batch_size", 512, "--loss_chunk_tokens", 0,
        "--activation_checkpointing", 0, "--enable_memory_profiling", profiled,
    )  # fmt: skip
    assert outcome.statuses == [1] and "Traceback" not in outcome.output, outcome.output
    assert "error: rank 0 ran out of memory on cpu: " in outcome.output, outcome.output
    assert ("Memory by category at the peak" in outcome.output) == bool(profiled), outcome.output
    assert ("Predicted memory of each process" in outcome.output) != bool(profiled), outcome.output
    advice = outcome.output.partition("What would help most, and the predicted saving of each process:\n")[2]
    lines = [line for line in advice.splitlines() if "MiB  --" in line]
    assert len(lines) == 3 and "--loss_chunk_tokens 1024" in lines[0], outcome.output


@pytest.mark.full
def test_a_job_shows_what_holds_the_memory_of_each_rank(tmp_path):
    words = ["--max_steps", 3, "--train_batch_size", 2, "--enable_memory_profiling", 1]
    outcome = run_job(
        *SMALL, *words, "--memory_profiling_all_ranks", 1, "--output_dir", tmp_path / "run", world_size=2
    ).succeeded()
    tables = outcome.output.split("Memory by category of rank 0 at the peak of step ")[1:]
    assert [table[0] for table in tables] == ["1", "2"]
    assert "predicted" in tables[1] and outcome.output.count("\n     1 ") == 2  # the second rank's lines
    assert (tmp_path / "run" / "memory_timeline.png").exists()
