"""A request for a plan: the job's flags, the hosts and their devices; and the search that answers it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from smp import __version__
from smp.checkpoint.config import CheckpointConfig
from smp.data.config import NO_DATA, DataConfig
from smp.data.data_pipeline import BatchShape, open_samples
from smp.data.source import with_type
from smp.errors import ConfigError, UserError
from smp.memory.estimate import estimate_memory, free_blocks, processes_that_fit, worst_case_bytes
from smp.memory.shape import ModelShape
from smp.mesh import lay_out
from smp.models.family import tensor_parallel_problems
from smp.models.model_config import ResolvedModel, resolve_model
from smp.optim import optimizers
from smp.parallel import fp8
from smp.parallel.parallelize import settings_of, shape_of
from smp.plan import document
from smp.plan.closed_time import estimate, step_time
from smp.plan.cost import Cost, cost_of, disk_bytes, host_bytes
from smp.plan.devices import DeviceRow
from smp.plan.layouts import Layout, layouts
from smp.plan.question import Question
from smp.plan.records import LayoutPlan, Moment, RankMemory, parse_count
from smp.plan.sdpa import PLANNED_AS_SDPA
from smp.plan.search import Found, instructive, search
from smp.plan.tables import argv_of, title_of
from smp.train.arguments import parse_args
from smp.train.checked_job import why_one_each
from smp.train.flops import model_flops_per_token
from smp.units import GIB

# Plans jobs: the argv of each, and by name nodes, local, row and exact.
Planner = Callable[..., list[LayoutPlan | UserError]]
CLOSED = "closed form"  # a plan's method


@dataclasses.dataclass(frozen=True)
class Request:
    """What is to be planned.

    Attributes:
        argv: the job's flags.
        settings, given: all of its settings by name, and the names of those that were given.
        nodes, local: hosts, and devices of each.
        flops: of the model, for a token.
    """

    argv: list[str]
    settings: dict[str, Any]
    given: frozenset[str]
    checkpoint: CheckpointConfig
    data: DataConfig
    row: DeviceRow
    nodes: int
    local: int
    model: ResolvedModel
    shape: ModelShape
    flops: float

    @property
    def devices(self) -> int:
        """Devices of the job."""
        return self.nodes * self.local

    @property
    def limit(self) -> int:
        """Bytes of a device."""
        return int(self.row.memory * GIB)

    def layouts(self, *, fixed: bool = False, **given: Any) -> Iterator[Layout]:
        """Yield the legal layouts, or the one that is given; ``given`` are further settings that are not varied."""
        yield from layouts(
            self.model, {**self.settings, **given}, self.given | given.keys(), nodes=self.nodes, local=self.local,
            device_type="cuda" if self.row.is_gpu else "cpu", fixed=fixed,
        )  # fmt: skip


def read_request(
    argv: list[str], row: DeviceRow, *, nodes: int, local: int, global_tokens: str | None = None
) -> Request:
    """Read the job's flags as the job does; no data is needed.

    Args:
        global_tokens: of a step over all ranks, such as ``4Mi``; None: as the flags say.

    Raises:
        ConfigError: with every problem of the flags.
        UserError: ``global_tokens`` contradicts them, or nothing is to be trained.
    """
    try:
        config = parse_args(argv)
        data = with_type(config.data, pairs=config.preference.dpo, look=config.data.training_dir is not None)
        if data.is_chat and not config.data.is_chat:
            argv = [*argv, "--dataset_type", "chat"]
            config = parse_args(argv)
        if config.data.evaluate_only:
            raise UserError("--evaluate_only 1 trains nothing, and a training step is what is planned: leave it out")
        misfits = config.preference.misfits_of_loss(config.loss, config.model, config.lora)
        if problems := misfits + fp8.too_old(config.fp8, row.capability):
            raise ConfigError(problems)
        model = resolve_model(config.model, here=not row.is_gpu)
        if why_one_each(config.data, model):
            argv = [*argv, "--pack", "0"]
            config = parse_args(argv)
        if global_tokens is not None:
            tokens, length = parse_count("--global_tokens", global_tokens), model.sequence_length
            if "global_batch_size" in config.given:
                raise UserError(
                    f"--global_tokens {global_tokens} and --global_batch_size both set the batch: leave one out"
                )
            length *= config.preference.rows_of_sample(config.data.pack)
            if tokens < length:
                raise UserError(f"--global_tokens {global_tokens} is less than a sample of {length} tokens: give more")
            argv = [*argv, "--global_batch_size", str(tokens // length)]
            config = parse_args(argv)
    except ConfigError as error:
        raise ConfigError([text for text in error.problems if text != NO_DATA]) from None
    settings = settings_of(config.flat())
    shape = shape_of(model, settings)
    if misfits := optimizers.find_problems(shape.specs, lay_out(), config.optim):
        raise ConfigError(misfits)
    flops = model_flops_per_token(model.hf_config, model.sequence_length, shape.specs).total
    return Request(
        argv, config.flat(), config.given, config.checkpoint, config.data, row, nodes, local, model,
        shape, flops,
    )  # fmt: skip


def find(
    question: Question, planner: Planner, *, together: int = 1, tell: Callable[[str], None] = lambda text: None
) -> tuple[Request, Found]:
    """Read a request, and search its layouts or plan the one that is given.

    Args:
        together: layouts that are planned at once.
        tell: called with each layout that is about to be traced.

    Raises:
        UserError: no layout is legal, or none can be planned.
    """
    request = read_request(
        question.argv, question.row, nodes=question.nodes, local=question.local, global_tokens=question.global_tokens
    )
    return request, _answer(request, question, planner, together=together, tell=tell)


def _answer(
    request: Request, question: Question, planner: Planner, *, together: int, tell: Callable[[str], None]
) -> Found:
    exact = question.exact
    candidates = [
        estimate(request.shape, layout, request.row, local=request.local)
        for layout in request.layouts(fixed=not question.searches)
    ]
    if not candidates:
        degree, family = request.settings["tensor_parallel_degree"], request.model.family
        if misfits := tensor_parallel_problems(family, request.model.hf_config, degree=degree, shard=1):
            raise ConfigError(misfits)
        raise UserError(
            f"{request.model.name} cannot be split over {request.nodes} node(s) of {request.local} as asked: the "
            f"sharding, context- and tensor-parallel degrees must divide them, and each data-parallel process needs a "
            f"sample; choose other degrees, or leave them out, or a larger batch"
        )

    def trace(chosen: list[Layout], *, exactly: bool) -> list[LayoutPlan | UserError]:
        for layout in chosen:
            tell(title_of(layout))
        jobs = [[*request.argv, *argv_of(layout.flags)] for layout in chosen]
        plans = planner(jobs, nodes=request.nodes, local=request.local, row=request.row, exact=exactly)
        return [
            _complete(request, layout, plan) if isinstance(plan, LayoutPlan) else plan
            for layout, plan in zip(chosen, plans, strict=True)
        ]

    first = functools.partial(trace, exactly=exact and len(candidates) == 1)
    found = search(candidates, request.limit, first, top=question.top, together=together)
    if not found.plans and found.nearest is None:
        raise UserError(found.refused[0].reason)
    if exact and len(candidates) > 1 and found.plans:
        layout, _ = found.plans[0]
        (best,) = trace([layout], exactly=True)
        if isinstance(best, LayoutPlan):
            found.plans[0] = (layout, best)
    found.plans[:] = [(_decided(layout, plan), plan) for layout, plan in found.plans]
    return found


def _decided(layout: Layout, plan: LayoutPlan) -> Layout:
    """Return the layout with what its plan has chosen, as far as it has such settings."""
    open_ = layout.work.settings.undecided()
    values = {name: value for name, value in plan.chosen.items() if name in open_}
    return dataclasses.replace(layout, work=layout.work.changed(**values))


def closed_plans(
    jobs: Sequence[list[str]], *, nodes: int, local: int, row: DeviceRow, exact: bool = False
) -> list[LayoutPlan | UserError]:
    """Plan jobs by the closed form alone, for machines that cannot trace; ``exact`` changes nothing."""
    return [_closed_plan(argv, nodes=nodes, local=local, row=row) for argv in jobs]


def _closed_plan(argv: list[str], *, nodes: int, local: int, row: DeviceRow) -> LayoutPlan:
    request = read_request(argv, row, nodes=nodes, local=local)
    (layout,) = request.layouts(fixed=True)
    mesh, work = layout.mesh, layout.work
    tensors = estimate_memory(request.shape, mesh, work)
    outside, unused = tensors.pop("process"), tensors.pop(free_blocks(work), 0)
    memory = RankMemory(
        rank=0,
        peak=Moment("a step", tensors),
        own_peaks=tensors,
        reserved=sum(tensors.values()) + unused if row.is_gpu else None,
        outside=outside + (0 if row.is_gpu else unused),
        limit=request.limit,
    )
    step = step_time(request.shape, mesh, work, row, local=local)
    return LayoutPlan(str(mesh), memory, step, layout.tokens, CLOSED)


def _complete(request: Request, layout: Layout, plan: LayoutPlan) -> LayoutPlan:
    """Add what the layout's sizes say of hosts and disks."""
    sizes = (request.shape, layout.mesh, layout.work, request.checkpoint)
    worst = worst_case_bytes(request.shape, layout.mesh, layout.work)
    return dataclasses.replace(
        plan,
        memory=dataclasses.replace(plan.memory, worst=worst),
        flags=layout.flags,
        tokens=layout.tokens,
        host=host_bytes(*sizes, local=request.local),
        disk=disk_bytes(*sizes, local=request.local),
    )


def packing(request: Request) -> Iterator[str]:
    """Yield the packing summary of the training conversations.

    They are read, and converted into the job's token cache.
    """
    data, model = request.data, request.model
    if not data.is_chat or (data.training_dir or data.dataset_name) is None:
        return
    shape = BatchShape(
        sequence_length=model.sequence_length, vocab_size=model.hf_config.vocab_size, global_batch_size=1,
        micro_batch_size=1, data_rank=0, data_size=1, seed=0, pairs=request.settings["dpo"],
        tokenizer_dir=str(model.tokenizer_dir) if model.tokenizer_dir else None,
    )  # fmt: skip
    try:
        yield f"{open_samples(data, split='train', batch=shape).summary}."
    except UserError as error:
        yield f"How much of a sequence is trained on is not known here: {error}."


def rates(request: Request, plan: LayoutPlan) -> dict[str, float]:
    """Return tokens per second of a device, and model FLOPs utilisation."""
    rate = plan.tokens / plan.step.seconds / request.devices
    bf16 = request.row.is_gpu if request.settings["bf16"] is None else request.settings["bf16"]
    return {"tokens_per_second": rate, "mfu": request.flops * rate / request.row.flops(2 if bf16 else 4)}


def cost(request: Request, plan: LayoutPlan, tokens: int | None, price: float | None) -> Cost | None:
    """Return what it costs to train on so many tokens; None where they are not known."""
    if tokens is None:
        return None
    seconds = plan.step.seconds
    return cost_of(tokens, step_tokens=plan.tokens, step_seconds=seconds, devices=request.devices, price=price)


_UNCOMPILED = "chosen: --compile 0"


def notes(request: Request, found: Found) -> Iterator[str]:
    """Yield what a person must know of the plan as a whole."""
    if any(plan.method == CLOSED for _, plan in found.plans) or (found.nearest and found.nearest.method == CLOSED):
        yield "Memory is by the closed form: a trace takes a C++ compiler (g++, c++ or clang++), and there is none."
    if request.row.is_gpu:
        if request.settings["bf16"] is None and not torch.cuda.is_available():
            yield "Planned in bf16, as a job on GPUs computes, though this machine has none; --bf16 0 plans fp32."
        if request.settings["compile"] is True or any(plan.chosen.get("compile") for _, plan in found.plans):
            yield "Blocks are planned as they run uncompiled; compiled ones take less memory between kernels."
        chosen = {note for _, plan in found.plans for note in plan.notes}
        for note in sorted(each for each in chosen if each.startswith(_UNCOMPILED)):
            yield f"Blocks run uncompiled{note.removeprefix(_UNCOMPILED)}."  # and why
        if (attention := request.settings["attn_implementation"]) in PLANNED_AS_SDPA:
            yield f"Attention is planned with torch's kernels, and not those of --attn_implementation {attention}."
        if request.settings["cpu_offload"]:
            yield "The update by the host of --cpu_offload is timed for a host with 16 cores a device."
        if request.settings["offload_dir"] is not None:
            yield "Activations in --offload_dir are timed as if they went to the host's memory; a disk is slower."
    if not found.plans:
        yield more_devices(request, alone=found.legal == 1)
    yield "Not supported, so not tried: pipeline parallelism. Experts are planned with balanced tokens."


def more_devices(request: Request, *, alone: bool) -> str:
    """Return how many devices would suffice for the job, by the closed form.

    Args:
        alone: no other layout was looked at.
    """
    smallest: dict[str, Any] = {"train_batch_size": 1} if "train_batch_size" not in request.given else {}
    asked = next(request.layouts(**smallest))
    work = dataclasses.replace(
        asked.work.changed(activation_checkpointing=True, activation_checkpointing_mode="full"),
        micro_batch_size=smallest.get("train_batch_size", asked.work.micro_batch_size),
    )
    enough = processes_that_fit(request.shape, asked.mesh, work, request.limit)
    if enough is not None and enough <= request.devices and alone and asked.mesh.replicas.size > 1:
        return (
            f"By the closed form, full sharding over {enough} of these devices would suffice: give "
            f"--sharding_strategy full_shard, or leave the degrees and --search 0 out."
        )
    if enough is None:
        return "More memory on each device, or a shorter --max_context_width, would help; more devices would not."
    if enough <= request.devices:  # which the traced peaks deny
        return "More devices, more memory on each, or a shorter --max_context_width may help."
    return (
        f"By the closed form, full sharding over {enough} devices would suffice: --nodes {-(-enough // request.local)}."
    )


def as_document(request: Request, found: Found, *, top: int, tokens: int | None, price: float | None) -> dict[str, Any]:
    """Return the plan as JSON has it; where nothing fits, with the layout that lacks least."""
    row, plans = request.row, [plan for _, plan in found.plans[:top]]
    if not plans and found.nearest is not None:
        plans = [found.nearest]
    costs = [(plan, cost(request, plan, tokens, price), rates(request, plan)) for plan in plans]
    return {
        "schema": document.SCHEMA, "smp": __version__, "torch": torch.__version__,
        "flags": request.argv, "parameters": request.shape.parameters,
        "active_parameters": request.shape.active_parameters,
        "cluster": {
            "nodes": request.nodes, "gpus_per_node": request.local, "device": row.name, "memory_gib": row.memory,
            "network": row.network,
        },
        "device_row": {name: getattr(row, name) for name in ("name", "source", "date", "on", "factor", "runs")},
        "notes": [*notes(request, found)],
        "layouts": [document.layout_entry(*each) for each in costs],
        "refused": [
            {"mesh": str(each.layout.mesh), "flags": dict(each.layout.flags), "reason": each.reason,
             "bytes_over": each.over}
            for each in instructive(found)
        ],
    }  # fmt: skip
