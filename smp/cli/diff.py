"""Compare two checkpoints, or a checkpoint and a Hugging Face model, or two models.

Shown is what differs: step and progress, settings, the model's configuration, and tensors by name, shape and dtype;
with --values also their content, bit by bit. A checkpoint and a model are compared by their parameters only.
Where and when they were saved, and settings that name directories, are shown and do not count.

Exit status 0: equal; 1: different; 2: cannot be compared.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import torch

from smp.checkpoint.manifest import Manifest
from smp.checkpoint.object_store import is_url
from smp.checkpoint.reader import CheckpointReader
from smp.cli.checkpoints import one_checkpoint
from smp.cli.find import config_file_of, existing_directory, is_checkpoint, is_model
from smp.cli.output import dtype_name, progress, shown, table
from smp.cli.sources import ModelTensors
from smp.cli.verify import verified
from smp.errors import UserError
from smp.json_input import read_object
from smp.models.checked_config import config_from
from smp.models.hf_values import is_computed
from smp.models.weight_files import ADAPTER_CONFIG
from smp.units import readable

# Elements that are compared at a time.
BLOCK = 4 << 20
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MISSING = "(none)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("a", help="a checkpoint, its URL, or the directory of a Hugging Face model or of an adapter")
    parser.add_argument("b", help="another")
    parser.add_argument("--values", action="store_true", help="compare the tensors' content; reads all of both")
    parser.add_argument("--show", type=int, default=10, metavar="N", help="most tensors listed of each sort (10)")


Tensors = CheckpointReader | ModelTensors


@dataclasses.dataclass(frozen=True)
class Side:
    """One of the two."""

    facts: dict[str, Any]  # settings and the like, by dotted name
    tensors: Tensors
    is_model: bool


@dataclasses.dataclass(frozen=True)
class Gap:
    """The difference of two tensors of one name: the number of elements that differ, and the largest distance."""

    name: str
    count: int
    total: int
    largest: float


def flat(value: Any, prefix: str) -> dict[str, Any]:
    """Flatten nested objects into one with dotted names."""
    if not isinstance(value, dict) or not value:
        return {prefix: value}
    found: dict[str, Any] = {}
    for key, inner in value.items():
        found |= flat(inner, f"{prefix}.{key}")
    return found


def _facts(manifest: Manifest) -> dict[str, Any]:
    found: dict[str, Any] = {"kind": manifest.kind, "step": manifest.step, "world_size": manifest.world_size}
    found["saved_at"] = manifest.saved_at
    run = {key: value for key, value in manifest.run.items() if key != "config"}
    for prefix, value in (
        ("versions", manifest.versions),
        ("degrees", manifest.degrees),
        ("run", run),
        ("setting", manifest.run.get("config")),
        ("model", manifest.model.get("config")),
    ):
        found |= flat(value, prefix)
    return found


def _completed(path: Path) -> dict[str, Any]:
    """Return a config.json with what it leaves out as transformers has it, as a checkpoint's is."""
    content, known = read_object(path), dict[str, Any]()
    with contextlib.suppress(UserError):
        known = json.loads(config_from(path, content).to_json_string(use_diff=False))
    return known | {key: value for key, value in content.items() if value is not None or key not in known}


def _open(text: str, stack: contextlib.ExitStack, *, values: bool) -> Side:
    if not is_url(text):
        directory = existing_directory(text)
        if is_model(directory) and not is_checkpoint(directory):
            file = config_file_of(directory)
            if file.name == ADAPTER_CONFIG:
                return Side(flat(read_object(file), "adapter"), ModelTensors(directory), True)
            return Side(flat(_completed(file), "model"), ModelTensors(directory), True)
    checkpoint = one_checkpoint(text)
    manifest = verified(checkpoint, content=False)
    if values and manifest.kind != "sharded":
        raise UserError(
            f"{text} is a {manifest.kind} checkpoint, which has the state of one rank: --values needs sharded ones; "
            f"leave --values out, or resume from it and save a sharded one"
        )
    return Side(_facts(manifest), stack.enter_context(checkpoint.reader(manifest)), False)


def _counts(name: str) -> bool:
    """Tell whether a difference in it makes the two different."""
    directory = name.startswith("setting.") and name.endswith(("_dir", "resume_from_checkpoint"))
    return name != "saved_at" and not directory


def compare_facts(a: Side, b: Side) -> tuple[list[tuple[str, str, str]], bool]:
    """Return (name, here, there) of all that differs, and whether any of it counts."""
    names = list(a.facts | b.facts)
    if a.is_model != b.is_model:
        # A model has no record of a run, and its config.json more than what its architecture is.
        both = (name for name in names if name in a.facts and name in b.facts and name.startswith("model."))
        names = [name for name in both if is_computed(name.removeprefix("model."))]
    different = [name for name in names if a.facts.get(name, _MISSING) != b.facts.get(name, _MISSING)]
    rows = [(shown(n, 60), shown(a.facts.get(n, _MISSING), 60), shown(b.facts.get(n, _MISSING), 60)) for n in different]
    return rows, any(map(_counts, different))


def gap_of(a: torch.Tensor, b: torch.Tensor) -> tuple[int, float]:
    """Return how many elements differ, and the largest absolute difference: infinite where only one is a number.

    Tensors of one dtype are compared bit by bit, others by value.
    """
    if a.dtype == b.dtype:
        bits = _BITS[a.element_size()]
        differ = a.contiguous().view(bits) != b.contiguous().view(bits)
    else:
        differ = a.double() != b.double()
    count = int(differ.sum())
    if not count:
        return 0, 0.0
    distance = (a[differ].double() - b[differ].double()).abs()
    return count, float(distance.nan_to_num(nan=math.inf, posinf=math.inf).max())


def compare_tensor(a: Tensors, b: Tensors, name: str) -> Gap:
    """Compare two tensors of equal shape; both are in memory meanwhile."""
    one, other = a.read(name).flatten(), b.read(name).flatten()
    gaps = [gap_of(*blocks) for blocks in zip(one.split(BLOCK), other.split(BLOCK), strict=True)]
    return Gap(name, sum(count for count, _ in gaps), one.numel(), max(largest for _, largest in gaps))


def _names(side: Side, other: Side) -> list[str]:
    """Return the tensors to compare: a model has parameters only."""
    names = list(side.tensors.entries)
    return [name for name in names if name.startswith("model.")] if side.is_model or other.is_model else names


def _print_list(title: str, lines: list[str], limit: int) -> None:
    if lines:
        print(f"{title}: {len(lines)}")
        print("\n".join(f"  {shown(line)}" for line in lines[:limit]))
        if len(lines) > limit:
            print(f"  ... and {len(lines) - limit} more")


def _compare_names(a: Side, b: Side, limit: int) -> tuple[list[str], bool]:
    """Print differences of names, shapes and dtypes; return the names of equal shape, and whether any differ."""
    mine, theirs = _names(a, b), _names(b, a)
    there, here = set(theirs), set(mine)
    only_a, only_b = [name for name in mine if name not in there], [name for name in theirs if name not in here]
    odd, comparable = [], []
    for name in mine:
        if name not in there:
            continue
        one, other = a.tensors.entries[name], b.tensors.entries[name]
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            odd.append(f"{name}: {dtype_name(one.dtype)} {one.shape}, {dtype_name(other.dtype)} {other.shape}")
        if one.shape == other.shape:
            comparable.append(name)
    _print_list("tensors only in A", only_a, limit)
    _print_list("tensors only in B", only_b, limit)
    _print_list("tensors of another shape or dtype", odd, limit)
    return comparable, bool(only_a or only_b or odd)


def _compare_values(a: Side, b: Side, names: list[str], limit: int) -> bool:
    """Print the tensors that differ most; return whether any do."""
    sizes = {name: math.prod(a.tensors.entries[name].shape) * a.tensors.entries[name].dtype.itemsize for name in names}
    gaps = []
    with progress("comparing", sum(sizes.values())) as bar:
        for name in names:
            gap = compare_tensor(a.tensors, b.tensors, name)
            bar.update(sizes[name])
            if gap.count:
                gaps.append(gap)
    print(
        f"values: {len(names) - len(gaps)} of {len(names)} tensors ({readable(sum(sizes.values()))}) equal bit by bit"
        if gaps
        else f"values: all {len(names)} tensors ({readable(sum(sizes.values()))}) equal"
    )
    gaps.sort(key=lambda gap: (-gap.largest, gap.name))
    rows = [(shown(gap.name), f"{gap.largest:.3g}", f"{gap.count} of {gap.total}") for gap in gaps[:limit]]
    if rows:
        print(table([("tensor", "largest difference", "elements that differ"), *rows]))
    if len(gaps) > limit:
        print(f"  ... and {len(gaps) - limit} more")
    return bool(gaps)


def run(options: argparse.Namespace) -> int:
    """Compare ``options.a`` with ``options.b``."""
    if options.show < 1:
        raise UserError(f"--show must be at least 1, got {options.show}")
    with contextlib.ExitStack() as stack:
        a, b = (_open(text, stack, values=options.values) for text in (options.a, options.b))
        print(f"A: {shown(options.a)}\nB: {shown(options.b)}")
        rows, different = compare_facts(a, b)
        if rows:
            print(table([("", "A", "B"), *rows]))
        names, odd = _compare_names(a, b, options.show)
        different |= odd
        if options.values:
            different |= _compare_values(a, b, names, options.show)
        if not different:
            print("equal" if options.values else "no differences in names and settings; values not compared (--values)")
    return 1 if different else 0
