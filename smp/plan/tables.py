"""A plan in words and tables, for a terminal of 80 columns and more."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from smp.axes import AXES
from smp.config import flag_text
from smp.memory.shape import NONE
from smp.plan.cost import Cost
from smp.plan.layouts import Layout, differences, parts
from smp.plan.records import FITS, FLUSH, LayoutPlan, RankMemory
from smp.plan.search import Found, instructive
from smp.units import GIB, MIB, gib, seconds, short

_NAME, _BAR = 34, 24
_SMALL = 0.0005  # shares that are not worth a line


def verdict(memory: RankMemory) -> str:
    """Return whether it fits, by how much, and if not because of what, in one sentence."""
    if memory.limit is None or memory.headroom is None:
        return f"needs {gib(memory.needed)} GiB of each device"
    limit = gib(memory.limit)
    if memory.verdict == FITS:
        share = 100 * memory.headroom / memory.limit
        if memory.tight:
            return f"fits, tight: {gib(memory.headroom)} GiB ({share:.1f} %) of {limit} to spare"
        return f"fits, with {gib(memory.headroom)} GiB of {limit} to spare"
    if memory.verdict == FLUSH:
        return (
            f"fits, but the allocator will flush and stall: it wants to reserve {gib(memory.reserved or 0)} GiB, "
            f"{gib(-memory.headroom)} more than available"
        )
    over = memory.allocated + memory.outside - memory.limit
    name = max(memory.peak.categories, key=lambda category: memory.peak.categories[category])
    return (
        f"does not fit: at least {gib(over)} GiB more than the {limit} of a device; the largest part is {name}, "
        f"{gib(memory.peak.categories[name])} GiB"
    )


def memory_table(memory: RankMemory, block: str = "#") -> Iterator[str]:
    """Yield the memory of a rank, a category a line; ``block`` draws the bars."""
    unit, word = (GIB, "GiB") if memory.needed >= 2 * GIB else (MIB, "MiB")
    yield f"{f'memory of rank {memory.rank}, {word}':<{_NAME}} {'at the peak':>11} {'own peak':>10}"
    largest = max([*memory.peak.categories.values(), 1])
    for name, size in memory.peak.categories.items():
        own = memory.own_peaks.get(name, size)
        if max(size, own) > _SMALL * largest:
            bar = block * round(_BAR * size / largest)
            yield f"  {name:<{_NAME - 2}} {size / unit:>11,.2f} {own / unit:>10,.2f}  {bar}".rstrip()
    sums = {"allocated": memory.allocated}
    if memory.reserved is not None:
        sums |= {"reserved by the allocator": memory.reserved, "outside the allocator": memory.outside}
    else:
        sums |= {"the process without a model": memory.outside - memory.heap}
        sums |= {"heap beyond the tensors, at most": memory.heap} if memory.heap else {}
    if memory.limit is not None and memory.headroom is not None:
        sums |= {"limit": memory.limit, "headroom" if memory.headroom >= 0 else "missing": abs(memory.headroom)}
    yield from (f"  {name:<{_NAME - 2}} {size / unit:>11,.2f}" for name, size in sums.items())
    if memory.shared:
        yield f"  {gib(memory.shared)} GiB of it are shared by the ranks of a host"
    yield f"  the peak is in: {memory.peak.where}"
    if memory.worst:
        most = memory.needed + memory.worst
        misfit = ", which does not fit" if memory.limit is not None and most > memory.limit else ""
        yield f"  with tokens balanced; at most {gib(most)} GiB if all go to the experts of one rank{misfit}"


def other_memory(plan: LayoutPlan) -> Iterator[str]:
    """Yield host memory and disk."""
    for title, sizes in (("host memory, GiB", plan.host), ("disk, GiB", plan.disk)):
        if any(sizes.values()):
            listed = ", ".join(f"{name} {gib(size)}" for name, size in sizes.items())
            yield f"{title}: {listed}" + (f"; total {gib(sum(sizes.values()))}" if title.startswith("host") else "")


def step_table(plan: LayoutPlan, rates: Mapping[str, float], block: str = "#") -> Iterator[str]:
    """Yield the step's seconds, by part, its bytes and rates."""
    step = plan.step
    yield f"step: {seconds(step.seconds)}, from {seconds(step.low)} to {seconds(step.high)}"
    yield f"  by {step.source}"
    for name, value in step.parts.items():
        share = value / step.seconds
        if share < _SMALL:
            continue
        label, bar = name.replace("exchanges", "communication"), block * round(_BAR * share)  # JSON keeps its key
        yield f"  {label:<{_NAME - 2}} {seconds(value):>11} {100 * share:>8.0f} %  {bar}".rstrip()
    between = f"{gib(step.between)} GiB" if step.between else "nothing"
    yield f"  a device sends {gib(step.inside)} GiB inside its host and {between} to other hosts"
    used = f"model FLOPs utilisation {100 * rates['mfu']:.1f} %"
    yield f"  {plan.tokens:,} tokens; {rates['tokens_per_second']:,.0f} tokens/s on each device, {used}"


def cost_line(cost: Cost, devices: str) -> str:
    """Format the cost of the tokens asked for."""
    span = f"{cost.hours / 24:,.1f} days" if cost.hours >= 48 else f"{cost.hours:,.1f} hours"
    money = "" if cost.money is None else f", {cost.money:,.0f} at that price"
    return f"{short(cost.tokens)} tokens: {cost.steps:,} steps, {span}, {cost.device_hours:,.0f} {devices} hours{money}"


def argv_of(flags: Mapping[str, object]) -> list[str]:
    """Return settings as the command line takes them."""
    return [word for name, value in flags.items() for word in (f"--{name}", flag_text(value))]


def title_of(layout: Layout) -> str:
    """Return the mesh, the batch and what is recomputed, in words."""
    found = parts(layout)
    replicas = layout.mesh.replicas.size
    copies = f" x {replicas} replicas" if replicas > 1 else ""
    split = [axis for axis in AXES if not axis.multiplies and layout.mesh.degree(axis.name) > 1]
    inside = ", ".join(found[axis.name] for axis in split if axis.inside)
    folded = ", ".join(found[axis.name] for axis in split if axis.over)
    inside, folded = f" ({inside} inside)" if inside else "", f" ({folded} folded)" if folded else ""
    multiplied = " x ".join(found[axis.name] for axis in AXES if axis.multiplies)
    offloaded = ", offloaded" if found["offloading"] == "offloaded" else ""
    return (
        f"{found['shard']}{inside}{copies} x {multiplied}{folded}, {found['batch']} x {layout.work.accumulation}, "
        f"{found['recomputation']}{offloaded}"
    )


def _kept(layout: Layout) -> str:
    recomputed = layout.work.recomputation
    return recomputed if recomputed == NONE or layout.work.every == 1 else f"{recomputed}/{layout.work.every}"


def ranking(found: Found, top: int, devices: int, width: int = 100) -> Iterator[str]:
    """Yield the fastest layouts that fit, with their flags, and why others do not.

    Args:
        devices: of the job.
        width: columns of the terminal.
    """
    shown = found.plans[:top]
    axes = [a for a in reversed(AXES) if a.multiplies or any(each.mesh.degree(a.name) > 1 for each, _ in shown)]
    if shown:
        yield "the fastest that fit"
        head = ("batch", "recompute", "step", "tok/s each", "alloc. GiB", "resv. GiB")
        yield _row("", ["shard", *(axis.name for axis in axes)], head)
    for number, (layout, plan) in enumerate(shown, 1):
        memory, step, words = plan.memory, plan.step, parts(layout)
        rate = f"{plan.tokens / step.seconds / devices:,.0f}"
        reserved = "-" if memory.reserved is None else gib(memory.reserved)
        offloaded = "+offload" if words["offloading"] == "offloaded" else ""
        degrees = [str(layout.mesh.degree(name)) for name in ("dp_shard", *(axis.name for axis in axes))]
        cells = (
            f"{layout.work.micro_batch_size} x {layout.work.accumulation}",
            _kept(layout) + offloaded, seconds(step.seconds), rate,
            gib(memory.allocated), reserved,
        )  # fmt: skip
        yield _row(str(number), degrees, cells)
        yield from wrapped(argv_of(layout.flags), width, indent=4)
    others = instructive(found)
    if others:
        yield "rejected: the first layout, but with" if found.plans else "nothing fits:"
    best = found.plans[0][0] if found.plans else None
    for refused in others:
        changes = [] if best is None else [text for _, text in differences(refused.layout, best)]
        yield f"  {', '.join(changes) or title_of(refused.layout)}: {refused.reason}"


def _row(number: str, degrees: Sequence[str], cells: Sequence[str]) -> str:
    batch, recompute, step, rate, allocated, reserved = cells
    split = " ".join(f"{text:>3}" for text in degrees[1:])
    left = f"{number:>2}  {degrees[0]:>5} {split} {batch:>7}  {recompute:<17}"
    return f"{left} {step:>7} {rate:>10} {allocated:>10} {reserved:>9}"


def wrapped(words: Sequence[str], width: int, *, indent: int) -> Iterator[str]:
    """Yield words as lines that may be copied; a flag stays with its value."""
    pairs, line = list[str](), ""
    for word in words:
        if word.startswith("--") or not pairs:
            pairs.append(word)
        else:
            pairs[-1] += f" {word}"
    for pair in pairs:
        if line and indent + len(line) + 1 + len(pair) + 2 > width:
            yield f"{' ' * indent}{line} \\"
            line = ""
        line = f"{line} {pair}".strip()
    if line:
        yield f"{' ' * indent}{line}"
