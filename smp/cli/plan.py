"""Plan a training job before anything is rented: does it fit, how fast is it, which layout is best, what does it cost.

Takes the training job's flags beside its own. What is not given is searched: degrees, micro-batch, recomputation,
offloading. Ends with status 1 if nothing fits.

    smp plan --model llama3_70b --nodes 8 --gpus_per_node 8 --device h100 --max_context_width 8192
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import functools
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smp.cli.output import table
from smp.errors import ConfigError, UserError
from smp.launch.command_line import Checked, check_arguments
from smp.plan import document, ledger
from smp.plan.cost import Cost, cost_of, disk_bytes, host_bytes, parse_count, utilisation
from smp.plan.devices import DeviceRow, device_row, network_share, write_row
from smp.plan.records import GIB, NO, LayoutPlan
from smp.runtime import devices_folder

if TYPE_CHECKING:
    from smp.memory.shape import ModelShape
    from smp.models.model_config import ResolvedModel
    from smp.plan.search import Found, Layout

CPU = "cpu"
_MOST_DEVICES = 65536


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments; the others are the training job's."""
    parser.passes_on = True  # type: ignore[attr-defined]
    add = parser.add_argument
    add("--nodes", type=int, default=1, metavar="N", help="hosts; default 1")
    add("--gpus_per_node", type=int, default=8, metavar="N", help="of each host; with --device cpu: processes")
    add("--device", default="h100", metavar="NAME", help="default h100; cpu: this machine's")
    add("--gpu_memory_gib", type=float, metavar="GIB", help="of one device; default: what the driver reports of it")
    add("--network", metavar="NAME", help="efa400, efa3200, ib400, or GB/s of each device to other hosts")
    add("--search", type=int, choices=(0, 1), default=1, help="1 (default): choose what is not given; 0: as given")
    add("--global_tokens", metavar="N", help="of a step over all ranks, such as 4Mi; accumulation follows")
    add("--top", type=int, default=3, metavar="N", help="layouts to show; default 3")
    add("--tokens", metavar="N", help="to train on, such as 1T: hours, money")
    add("--price", type=float, metavar="X", help="of a device for an hour")
    add("--exact", type=int, choices=(0, 1), default=0, help="1: trace all blocks of the best, and all distinct ranks")
    add("--json", metavar="FILE", help="write the plan there as JSON; -: print it instead of the tables")
    add("--plot", metavar="FILE.png", help="draw the best layout's memory over the step")
    add("--calibrate", action="store_true", help="measure this machine, a minute, and keep its row")
    add("--ledger", nargs="+", metavar="DIR", help="tabulate the plan_error.json below, and refit the devices' factors")


@dataclasses.dataclass(frozen=True)
class _Request:
    """What is to be planned."""

    words: list[str]
    checked: Checked
    row: DeviceRow
    limit: int
    nodes: int
    local: int
    resolved: ResolvedModel
    shape: ModelShape

    @property
    def devices(self) -> int:
        return self.nodes * self.local

    @property
    def device_type(self) -> str:
        return "cuda" if self.row.is_gpu else "cpu"


def run(options: argparse.Namespace) -> int:
    """Print the plan, or do what --calibrate or --ledger asks for."""
    if options.ledger:
        return _ledger([Path(directory) for directory in options.ledger], options.more)
    if options.calibrate:
        return _calibrate(options)
    tokens = _require_options(options)
    request = _request(options)
    found, notes = _search(options, request)
    chosen = found.plans[: options.top]
    rates = [_rates(request, plan) for _, plan in chosen]
    price = options.price
    costs = [(tokens and plan.step and _cost(request, plan, tokens, price)) or None for _, plan in chosen]
    if options.json:
        content = _content(request, found, chosen, costs, rates)
        if options.json == "-":
            sys.stdout.write(document.as_text(content))
        else:
            document.write(content, Path(options.json))
            print(f"wrote {options.json}", file=sys.stderr)
    if options.json != "-":
        _print(request, found, notes, options.top, costs[0] if costs else None, rates[0] if rates else {})
    if options.plot and (best := chosen[0][1] if chosen else found.nearest):
        _plot(best, Path(options.plot))
    return 0 if chosen and chosen[0][1].memory.verdict != NO else 1


def _require_options(options: argparse.Namespace) -> int | None:
    """Refuse numbers that cannot be, and files that cannot be written; return the tokens to train on."""
    for name in ("nodes", "gpus_per_node", "top"):
        if (value := getattr(options, name)) < 1:
            raise UserError(f"--{name} must be at least 1, got {value}")
    if (devices := options.nodes * options.gpus_per_node) > _MOST_DEVICES:
        raise UserError(
            f"--nodes {options.nodes} of --gpus_per_node {options.gpus_per_node} are {devices} devices: plan for at "
            f"most {_MOST_DEVICES}"
        )
    for name in ("gpu_memory_gib", "price"):
        value = getattr(options, name)
        if value is not None and not 0 < value < float("inf"):
            raise UserError(f"--{name} must be above 0, got {value}")
    if options.price is not None and options.tokens is None:
        raise UserError("--price has a meaning only with --tokens: say how many tokens are to be trained on")
    for name in ("json", "plot"):
        value = getattr(options, name)
        if value not in (None, "-") and not os.access(folder := Path(value).absolute().parent, os.W_OK):
            raise UserError(f"--{name} {value} cannot be written: {folder} is no directory that can be written to")
    if options.plot and Path(options.plot).suffix != ".png":
        raise UserError(f"--plot {options.plot} is not allowed: give a file that ends in .png")
    return None if options.tokens is None else parse_count("--tokens", options.tokens)


def _request(options: argparse.Namespace) -> _Request:
    """Read the training flags as the job does, and the device."""
    row, limit = _device(options)
    words = list(options.more)
    checked = _checked(words)
    # These bring transformers.
    from smp.memory.shape import model_shape
    from smp.models.model_config import ModelConfig, resolve_model

    fields = {field.name for field in dataclasses.fields(ModelConfig)}
    resolved = resolve_model(ModelConfig(**{k: v for k, v in checked.settings.items() if k in fields}))
    if options.global_tokens is not None:
        tokens, length = parse_count("--global_tokens", options.global_tokens), resolved.sequence_length
        if "global_batch_size" in checked.given or tokens < length:
            raise UserError(
                f"--global_tokens {options.global_tokens} and --global_batch_size both set the batch: leave one out"
                if "global_batch_size" in checked.given
                else f"--global_tokens {options.global_tokens} is less than a sample of {length} tokens: give more"
            )
        words += ["--global_batch_size", str(tokens // length)]
        checked = _checked(words)
    return _Request(
        words, checked, row, limit, options.nodes, options.gpus_per_node, resolved, model_shape(resolved)
    )  # fmt: skip


def _checked(words: list[str]) -> Checked:
    """Read the training flags; a plan needs no data.

    Raises:
        ConfigError: with every problem found; a misspelt flag of this command is told as one.
    """
    from smp.data.data_pipeline import NO_DATA

    try:
        return check_arguments(words, Path.cwd())
    except ConfigError as error:
        problems = [text for text in error.problems if text != NO_DATA]
    own = argparse.ArgumentParser(add_help=False)
    add_arguments(own)
    names = [action.option_strings[0] for action in own._actions]
    for index, text in enumerate(problems):
        flag = text.removeprefix("unknown flag ").partition(":")[0]
        if text.startswith("unknown flag") and (near := difflib.get_close_matches(flag, names, n=1)):
            problems[index] = f"unknown flag {flag}: did you mean {near[0]}?"
    raise ConfigError(problems)


def _device(options: argparse.Namespace) -> tuple[DeviceRow, int]:
    """Return the device's row and the bytes of its memory."""
    try:
        row = device_row(options.device)
    except UserError:
        if options.device != CPU:
            raise
        row = DeviceRow(CPU, source="", date="")
    if options.network is not None:
        row = dataclasses.replace(row, network=network_share(options.network))
    if options.gpu_memory_gib is not None:
        row = dataclasses.replace(row, memory=options.gpu_memory_gib)
    elif not row.is_gpu:
        from smp.memory.limits import installed_memory

        row = dataclasses.replace(row, memory=installed_memory() / options.gpus_per_node / GIB)
    return row, int(row.memory * GIB)


@contextlib.contextmanager
def open_worker() -> Iterator[Callable[..., LayoutPlan]]:
    """Start the process that plans layouts; yields its ``plan``."""
    from smp.plan.worker import Worker

    with Worker() as worker:
        yield worker.plan


def _search(options: argparse.Namespace, request: _Request) -> tuple[Found, list[str]]:
    """Search, or plan the one layout that is given."""
    from smp.plan.estimate import estimate
    from smp.plan.search import layouts, search

    settings, given = request.checked.settings, request.checked.given
    candidates = [
        estimate(request.shape, layout, request.row, local=request.local)
        for layout in layouts(
            request.resolved, settings, given, nodes=request.nodes, local=request.local,
            device_type=request.device_type, fixed=not options.search,
        )
    ]  # fmt: skip
    if not candidates:
        raise UserError(
            f"{request.resolved.name} cannot be split over {request.nodes} node(s) of {request.local} as asked: the "
            f"sharding and tensor-parallel degrees must divide them, and each data-parallel process needs a sample; "
            f"choose other degrees, or leave them out, or a larger batch"
        )
    with open_worker() as plan, _progress() as tell:

        def trace(layout: Layout, *, exact: bool = False) -> LayoutPlan:
            from smp.plan.tables import title_of, words_of

            tell(title_of(layout))
            words = [*request.words, *words_of(layout.flags)]
            made = plan(words, nodes=request.nodes, local=request.local, device=request.row, exact=exact)
            return _complete(request, layout, made)

        one = functools.partial(trace, exact=bool(options.exact)) if len(candidates) == 1 else trace
        found = search(candidates, request.limit, one, top=options.top)
        if options.exact and found.plans and one is trace:
            layout, _ = found.plans[0]
            found.plans[0] = (layout, trace(layout, exact=True))
    return found, list(_notes(request, bool(found.plans)))


def _complete(request: _Request, layout: Layout, plan: LayoutPlan) -> LayoutPlan:
    """Add what the layout's sizes say of hosts and disks."""
    from smp.checkpoint.config import CheckpointConfig

    names = {field.name for field in dataclasses.fields(CheckpointConfig)}
    settings = request.checked.settings
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in settings.items() if k in names}
    sizes = (request.shape, layout.mesh, layout.work, CheckpointConfig(**values))
    return dataclasses.replace(
        plan,
        flags=layout.flags,
        mesh=str(layout.mesh),
        tokens=layout.tokens,
        host=plan.host or host_bytes(*sizes, local=request.local),
        disk=plan.disk or disk_bytes(*sizes, local=request.local),
    )


def _more_devices(request: _Request) -> str:
    """Return how many devices would hold the job, by the closed form."""
    from smp.memory.plan import USABLE, processes_that_fit
    from smp.plan.search import layouts

    asked = next(
        layouts(
            request.resolved, request.checked.settings, request.checked.given | {"train_batch_size"},
            nodes=request.nodes, local=request.local, device_type=request.device_type,
        )
    )  # fmt: skip
    work = asked.work.changed(activation_checkpointing=True, activation_checkpointing_mode="full")
    enough = processes_that_fit(request.shape, work, int(request.limit * USABLE), tp=asked.mesh.tp.size)
    if enough is None or enough <= request.devices:
        return "More memory on each device, or a shorter --max_context_width, would help; more devices would not."
    return (
        f"By the closed form, full sharding over {enough} devices would hold it: --nodes {-(-enough // request.local)}."
    )


def _notes(request: _Request, fits: bool) -> Iterator[str]:
    """Yield what a person must know of the plan as a whole."""
    settings = request.checked.settings
    if request.row.is_gpu:
        import torch

        if settings["bf16"] is None and not torch.cuda.is_available():
            yield "Planned in bf16, as a job on GPUs computes, though this machine has none; --bf16 0 plans fp32."
        if settings["compile"] is True:
            yield "Blocks are planned as they run uncompiled; compiled ones take less memory between kernels."
    if not fits:
        yield _more_devices(request)
    yield "Not tried, as smp does not have them: context, expert and pipeline degrees."


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Yield a function that says on a terminal which layout is being planned; elsewhere it does nothing."""
    count, shown = 0, sys.stderr.isatty()

    def tell(text: str) -> None:
        nonlocal count
        count += 1
        if shown:
            width = shutil.get_terminal_size().columns - 1
            print(f"\r\x1b[K{f'planning layout {count}: {text}'[:width]}", end="", file=sys.stderr, flush=True)

    try:
        yield tell
    finally:
        if shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _rates(request: _Request, plan: LayoutPlan) -> dict[str, float | None]:
    """Return tokens per second of a device, and model FLOPs utilisation."""
    from smp.train.flops import model_flops_per_token

    if plan.step is None:
        return {"tokens_per_second": None, "mfu": None}
    rate = plan.tokens / plan.step.seconds / request.devices
    flops = model_flops_per_token(request.resolved.hf_config, request.resolved.sequence_length).total
    return {"tokens_per_second": rate, "mfu": utilisation(flops, rate, request.row.peak * 1e12)}


def _cost(request: _Request, plan: LayoutPlan, tokens: int, price: float | None) -> Cost:
    assert plan.step is not None
    return cost_of(
        tokens, step_tokens=plan.tokens, step_seconds=plan.step.seconds, devices=request.devices, price=price
    )


def _content(request: _Request, found: Found, chosen: Any, costs: Any, rates: Any) -> dict[str, Any]:
    """Return the plan as JSON."""
    import torch

    from smp import __version__
    from smp.plan.search import instructive

    row = request.row
    shown = [plan for _, plan in chosen] or [plan for plan in [found.nearest] if plan is not None]
    pairs = zip(shown, [*costs, None], [*rates, None], strict=False)
    return document.document(
        versions={"smp": __version__, "torch": torch.__version__},
        flags=request.words,
        cluster={
            "nodes": request.nodes, "gpus_per_node": request.local, "device": row.name, "memory_gib": row.memory,
            "network": row.network,
        },
        device_row={
            "name": row.name, "source": row.source, "date": row.date, "on": row.on, "factor": row.factor,
            "runs": row.runs,
        },
        layouts=[document.layout_entry(plan, cost, rate) for plan, cost, rate in pairs],
        refused=[
            {"mesh": str(each.layout.mesh), "flags": dict(each.layout.flags), "reason": each.reason,
             "bytes_over": each.over}
            for each in instructive(found)
        ],
    )  # fmt: skip


def _print(
    request: _Request, found: Found, notes: list[str], top: int, cost: Cost | None, rates: dict[str, float | None]
) -> None:
    """Print the plan for a person."""
    from smp.plan import tables

    try:
        block = "█"
        block.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        block = "#"
    resolved, kind = request.resolved, "CPU processes" if not request.row.is_gpu else request.row.name
    hosts = f"{request.nodes} x {request.local}" if request.nodes > 1 else f"{request.local}"
    layout, plan = found.plans[0] if found.plans else (None, found.nearest)
    says = "" if plan is None else f": {tables.verdict(plan.memory)}"
    print(f"{resolved.name} on {hosts} {kind}{says}")
    print(f"{request.shape.parameters:,} parameters, {resolved.sequence_length} tokens a sample")
    if plan is not None:
        if layout is not None:
            print(f"{tables.title_of(layout)}: {plan.tokens:,} tokens a step")
        else:
            print(f"nearest of all: {' '.join(tables.words_of(plan.flags)) or plan.mesh}")
        lines = [*tables.memory_table(plan.memory, block), *tables.other_memory(plan), ""]
        print("\n".join([*lines, *tables.step_table(plan, rates or {"tokens_per_second": None, "mfu": None}, block)]))
        if cost is not None:
            print(tables.cost_line(cost, "GPU" if request.row.is_gpu else "process"))
    width = min(100, shutil.get_terminal_size().columns)
    if found.legal > 1 or not found.plans:
        print("", *tables.ranking(found, top, request.devices, width), sep="\n")
        notes = [f"{found.legal} legal layouts, {found.traced} of them traced on fake tensors.", *notes]
    print("", *dict.fromkeys([*(plan.notes if plan else ()), *notes]), sep="\n")


def _plot(plan: LayoutPlan, png: Path) -> None:
    """Draw the memory over the step."""
    from smp.plots import plot_memory

    moments = plan.memory.timeline
    if not moments:
        raise UserError(f"--plot {png}: the plan has no timeline; leave it out")
    names = dict.fromkeys(name for _, sizes in moments for name in sizes)
    phases = [where.split()[0] if where else "" for where, _ in moments]
    ends = [i for i in range(len(phases)) if i + 1 == len(phases) or phases[i + 1] != phases[i]]
    plot_memory(
        range(len(moments)),
        {name: [sizes.get(name, 0) for _, sizes in moments] for name in names},
        [(phases[end], end) for end in ends] if len(ends) <= 12 else [],
        png,
        xlabel="allocations, in order",
    )
    print(f"wrote {png}", file=sys.stderr)


def _ledger(directories: list[Path], others: list[str]) -> int:
    """Tabulate what plans were wrong by, and refit the factor of each device's row."""
    if others:
        raise UserError(f"--ledger takes no flags of a job, got {others[0]}: leave them out")
    lines = ledger.read(directories)
    if not lines:
        raise UserError(
            f"no {ledger.ERROR} under {', '.join(map(str, directories))}: `--plan 1` of a training job writes it after "
            f"step 20"
        )
    print(table(ledger.rows(lines), indent=""))
    for name in sorted({str(line["device_row"]["name"]) for _, line in lines}):
        try:
            row = device_row(name)
        except UserError:
            print(f"{name}: it has no row: `smp plan --calibrate` measures one")
            continue
        known = {"name": row.name, "source": row.source, "date": row.date}
        ratios = ledger.ratios([line for _, line in lines], known)
        if not ratios:
            print(f"{name}: no run that was planned with this row ({row.described})")
            continue
        fitted = dataclasses.replace(row, factor=1.0).refitted(ratios)
        write_row(fitted, path := devices_folder() / f"{name}.json")
        print(f"{name}: speed x {fitted.factor:.3f} from {len(ratios)} run(s), the median; wrote {path}")
    return 0


def _calibrate(options: argparse.Namespace) -> int:
    """Measure this machine and write its row."""
    from smp.plan.calibrate import calibrate

    row = calibrate(processes=options.gpus_per_node)
    write_row(row, path := devices_folder() / f"{row.name}.json")
    print(f"wrote {path}; `--device {row.name}` plans with it")
    return 0
