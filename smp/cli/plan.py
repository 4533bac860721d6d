"""Plan a training job before anything is rented: does it fit, how fast is it, which layout is best, what does it cost.

Also takes the training job's flags. What is not given is searched: degrees, micro-batch, recomputation,
offloading. Ends with status 1 if no layout fits.

    smp plan --model llama3_70b --nodes 8 --gpus_per_node 8 --device h100 --max_context_width 8192
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from smp.checkpoint.outputs import refuse_replacing
from smp.cli.output import table
from smp.compat.other_trainers import plan_advice
from smp.environment import devices_folder
from smp.errors import ConfigError, UserError
from smp.log import is_terminal
from smp.plan import document, ledger
from smp.plan.devices import DeviceRow, device_row, network_share, write_row
from smp.plan.question import Question
from smp.plan.records import TOP, LayoutPlan, parse_count
from smp.units import GIB, parameters_text

if TYPE_CHECKING:
    from smp.plan.request import Request
    from smp.plan.search import Found

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
    add("--top", type=int, default=TOP, metavar="N", help=f"layouts to show; default {TOP}")
    add("--tokens", metavar="N", help="to train on, such as 1T: hours, money")
    add("--price", type=float, metavar="X", help="of a device for an hour")
    add("--exact", type=int, choices=(0, 1), default=0, help="1: trace all blocks of the best, and its last rank, too")
    add("--json", metavar="FILE", help="write the plan there as JSON; -: print it instead of the tables")
    add("--plot", metavar="FILE.png", help="draw the best layout's memory over the step")
    add("--calibrate", action="store_true", help="measure this machine, some seconds, and save its device spec")
    add("--ledger", nargs="+", metavar="DIR", help="tabulate the plan_error.json below, and refit the device specs")


def run(options: argparse.Namespace) -> int:
    """Print the plan, or do what --calibrate or --ledger asks for."""
    if options.ledger:
        return _ledger([Path(directory) for directory in options.ledger], options.more)
    if options.calibrate:
        return _calibrate(options)
    tokens = _require_options(options)
    row = device_of(
        options.device, options.gpus_per_node, memory_gib=options.gpu_memory_gib, network=options.network
    )  # fmt: skip
    question = Question(
        options.more, row, options.nodes, options.gpus_per_node, global_tokens=options.global_tokens,
        top=options.top, searches=bool(options.search), exact=bool(options.exact),
    )  # fmt: skip
    try:
        request, found = find(question)
    except ConfigError as error:
        raise ConfigError([_nearer(text) for text in error.problems]) from None
    from smp.plan import request as requests

    if options.json != "-":
        _print(request, found, options.top, tokens, options.price)
    if options.json:
        content = requests.as_document(request, found, top=options.top, tokens=tokens, price=options.price)
        if options.json == "-":
            sys.stdout.write(document.as_text(content))
        else:
            document.write(content, Path(options.json))
            print(f"wrote {options.json}", file=sys.stderr)
    best = found.plans[0][1] if found.plans else found.nearest
    if options.plot and best is not None:
        _plot(best, Path(options.plot))
    return 0 if found.plans else 1


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
        if value in (None, "-"):
            continue
        if Path(value).is_dir():
            raise UserError(f"--{name} {value} is a directory: give the name of a file")
        if not os.access(folder := Path(value).absolute().parent, os.W_OK):
            raise UserError(f"--{name} {value} cannot be written: {folder} is no directory that can be written to")
        refuse_replacing(Path(value), f"--{name}", document.START if name == "json" else b"Matplotlib")
    if options.plot and Path(options.plot).suffix != ".png":
        raise UserError(f"--plot {options.plot} is not allowed: give a file that ends in .png")
    return None if options.tokens is None else parse_count("--tokens", options.tokens)


def _nearer(problem: str) -> str:
    """Return a problem of the job's flags; of an unknown flag that is nearly one of this command's, with that."""
    flag = problem.removeprefix("unknown flag ").partition(":")[0]
    own = argparse.ArgumentParser(add_help=False)
    add_arguments(own)
    names = [action.option_strings[0].removeprefix("--") for action in own._actions]
    says = plan_advice(flag.removeprefix("--"), names) if problem.startswith("unknown flag") else None
    return f"unknown flag {flag}: {says}" if says else problem


def device_of(name: str, local: int, *, memory_gib: float | None, network: str | None = None) -> DeviceRow:
    """Return the device's row, with the memory and the network that were given.

    Args:
        local: devices of a host.
    """
    row = device_row(name).shared_by(local)
    if network is not None:
        row = dataclasses.replace(row, network=network_share(network))
    if memory_gib is not None:
        row = dataclasses.replace(row, memory=memory_gib)
    elif not row.is_gpu:
        from smp.memory.limits import installed_memory

        row = dataclasses.replace(row, memory=installed_memory() / local / GIB)
    return row


def find(question: Question) -> tuple[Request, Found]:
    """Answer a question in a process that plans; without a compiler for it by the closed form, in this one."""
    from smp.plan.shim import compiler

    if question.row.is_gpu and compiler() is None:
        from smp.plan.request import closed_plans
        from smp.plan.request import find as find_here

        return find_here(question, closed_plans)
    from smp.plan.worker import CLEAR, worker

    try:
        with worker(question.row) as ask:
            return ask("find", question)
    finally:
        if is_terminal(sys.stderr):
            print(CLEAR, end="", file=sys.stderr, flush=True)


def best(argv: list[str], row: DeviceRow, *, nodes: int, local: int) -> tuple[list[str], list[str]]:
    """Return the flags of the best layout, and what is to be said of it.

    Raises:
        UserError: none is legal, or none fits.
    """
    request, found = find(Question(argv, row, nodes, local))
    from smp.plan import tables
    from smp.plan.request import more_devices

    title = f"{request.model.name} on {nodes} x {local} {row.name}: "
    if not found.plans:
        assert found.nearest is not None
        says = tables.verdict(found.nearest.memory)
        raise UserError(f"{title}{says}. {more_devices(request, alone=found.legal == 1)}")
    layout, plan = found.plans[0]
    lines = [title + tables.verdict(plan.memory), tables.title_of(layout), *tables.ranking(found, TOP, request.devices)]
    return tables.argv_of(layout.flags), lines


def _print(request: Request, found: Found, top: int, tokens: int | None, price: float | None) -> None:
    """Print the plan for a person."""
    from smp.plan import request as requests
    from smp.plan import tables

    try:
        block = "█"
        block.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        block = "#"
    gpus, model = request.row.is_gpu, request.model
    hosts = f"{request.nodes} x {request.local}" if request.nodes > 1 else f"{request.local}"
    layout, plan = found.plans[0] if found.plans else (None, found.nearest)
    says = "" if plan is None else f": {tables.verdict(plan.memory)}"
    print(f"{model.name} on {hosts} {request.row.name if gpus else 'CPU processes'}{says}")
    size = parameters_text(request.shape.parameters, request.shape.active_parameters)
    print(f"{size}, {model.sequence_length} tokens a sample")
    if plan is not None:
        if layout is not None:
            print(f"{tables.title_of(layout)}: {plan.tokens:,} tokens a step")
        else:
            print("closest layout:", *(tables.argv_of(plan.flags) or [plan.mesh]))
        lines = ["", *tables.memory_table(plan.memory, block), *tables.other_memory(plan), ""]
        print("\n".join([*lines, *tables.step_table(plan, requests.rates(request, plan), block)]))
        if (spent := requests.cost(request, plan, tokens, price)) is not None:
            print(tables.cost_line(spent, "GPU" if gpus else "process"))
    # The plan's notes, of what auto is today, are for the JSON.
    said = [*requests.packing(request), *requests.notes(request, found)]
    if found.legal > 1 or not found.plans:
        width = min(100, shutil.get_terminal_size().columns)
        print("", *tables.ranking(found, top, request.devices, width), sep="\n")
        said.insert(0, f"{found.legal} legal layouts, {found.traced} of them traced on fake tensors.")
    print("", *said, sep="\n")


def _plot(plan: LayoutPlan, png: Path) -> None:
    """Draw the memory over the step."""
    from smp.plots import plot_memory

    moments = plan.memory.timeline
    names = dict.fromkeys(name for _, sizes in moments for name in sizes)
    phases = [where.split()[0] for where, _ in moments]
    ends = {phase: index for index, phase in enumerate(phases)}  # of the last micro-batch
    plot_memory(
        range(len(moments)),
        {name: [sizes.get(name, 0) for _, sizes in moments] for name in names},
        [(phase, ends[phase]) for phase in ("forward", "backward") if phase in ends],
        png,
        xlabel="allocations and frees, in order",
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
            print(f"{name}: no device spec: `smp plan --calibrate` measures one")
            continue
        known = {"name": row.name, "source": row.source, "date": row.date}
        ratios = ledger.ratios([line for _, line in lines], known)
        if not ratios:
            print(f"{name}: no run that was planned with this device spec ({row.described})")
            continue
        fitted = dataclasses.replace(row, factor=1.0).refitted(ratios)
        write_row(fitted, path := devices_folder() / f"{name}.json")
        print(f"{name}: speed x {fitted.factor:.3f} from {len(ratios)} run(s), the median; wrote {path}")
    return 0


def _calibrate(options: argparse.Namespace) -> int:
    """Measure this machine and write its row."""
    if options.more:
        raise UserError(f"--calibrate takes no flags of a job, got {options.more[0]}: leave them out")
    from smp.plan.calibrate import calibrate

    path = calibrate()
    print(f"wrote {path}: `--device {path.stem}` plans with it")
    return 0
