"""Load a checkpoint, of a job or of a script, into a model and its optimizer at any layout."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn

from smp.checkpoint.base import require_base
from smp.checkpoint.fetch import copies_of, fetch, gathered, verify_together
from smp.checkpoint.manifest import Manifest
from smp.checkpoint.reader import CheckpointReader
from smp.checkpoint.remote import RemoteCheckpoint
from smp.checkpoint.remote_reader import fill_from
from smp.checkpoint.safetensors_io import DTYPE_NAMES
from smp.checkpoint.same_model import check_adapters
from smp.checkpoint.state import (
    OF_DATA,
    alike,
    clean_name,
    model_tensors,
    parameter_names,
    plain,
    state_tensors,
)
from smp.checkpoint.storage import Storage
from smp.checkpoint.tagged_json import decode
from smp.errors import DamagedCheckpointError, UserError
from smp.faults.agreement import together
from smp.local_shards import local_part
from smp.log import get_logger
from smp.optim.entry import StateSpec
from smp.optim.optimizers import (
    MixedOptimizer,
    State,
    empty_state,
    kind_of_optimizer,
    kind_text,
    of_script,
    saved_kind,
)

logger = get_logger(__name__)


def is_script(run: dict[str, Any]) -> bool:
    """Tell whether this is what :meth:`smp.Checkpointer.save` writes, rather than a training job."""
    optimizer = run.get("optimizer")
    if run.get("script") is not True or "extra" not in run or not isinstance(optimizer, dict):
        return False
    groups, scalars = optimizer.get("groups"), optimizer.get("scalars")
    if not isinstance(groups, list) or not isinstance(scalars, dict):
        return False
    kinds = (("names", list), ("values", dict))
    complete = [isinstance(g, dict) and all(isinstance(g.get(key), kind) for key, kind in kinds) for g in groups]
    return all(complete) and all(isinstance(values, dict) for values in scalars.values())


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A checkpoint to start from, and its manifest; None for a fresh start."""

    checkpoint: Path | RemoteCheckpoint | None
    saved: Manifest | None


Found = TypeVar("Found", bound=Candidate)
Damaged = set[Path | RemoteCheckpoint]


class Search(Generic[Found]):
    """Search for a checkpoint whose files are as they were written; all is collective.

    Args:
        candidate: collective; given the checkpoints that were found damaged, returns another one, or a fresh start.
        latest: pass over a damaged one, with a warning; otherwise it is refused.
        content: read the files; otherwise their names and sizes are compared.
        cache: where one at a URL is copied to; None: it is read there, and verified as it comes.
    """

    def __init__(
        self, candidate: Callable[[Damaged], Found], *, latest: bool, content: bool, cache: Storage | None = None
    ):
        self._candidate, self._latest, self._content, self._cache = candidate, latest, content, cache
        self._damaged: Damaged = set()

    def first(self) -> Found:
        """Return the first candidate that is not found damaged; raises DamagedCheckpointError if it is refused."""
        while True:
            found = self._candidate(self._damaged)
            path, saved = found.checkpoint, found.saved
            if path is None or saved is None:
                return found
            if isinstance(path, Path):
                problems = verify_together(path, saved, content=self._content)
            elif self._cache is None:
                return found
            else:
                copies = copies_of(self._cache, path)
                problems = fetch(path, copies, content=self._content)
                copy = dataclasses.replace(path, copy=copies.directory / path.name)
                found = dataclasses.replace(found, checkpoint=copy)
            if not problems:
                return found
            self._pass_over(path, saved, problems)

    def fill(self, found: Found, fill: Callable[[Found], None]) -> Found:
        """Fill from what :meth:`first` returned, or from the first after it that is not found damaged as it comes.

        Args:
            fill: calls :func:`restore` or :func:`restore_model`.

        Returns:
            What it was filled from.

        Raises:
            DamagedCheckpointError: as :meth:`first`.
        """
        while (path := found.checkpoint) is not None and (saved := found.saved) is not None:
            try:
                fill(found)
                break
            except DamagedCheckpointError as error:
                problems = error.problems
            self._pass_over(path, saved, problems)
            found = self.first()
        return found

    def _pass_over(self, path: Path | RemoteCheckpoint, saved: Manifest, problems: list[str]) -> None:
        error = DamagedCheckpointError(path, problems)
        if not self._latest:
            raise error
        if dist.get_rank() == 0:
            logger.warning("Passed over: %s", error)
        # Another rank's local checkpoint of this step may be all that it has.
        if saved.kind == "sharded" or any(p.startswith(f"rank {dist.get_rank()}: ") for p in problems):
            self._damaged.add(path)


def restore(
    path: Path | RemoteCheckpoint,
    manifest: Manifest,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    seed: str | None,
) -> None:
    """Fill model, optimizer and this rank's generators; each rank reads its shards; collective.

    A job's manifest says of the optimizer's settings only its kind: those of ``optimizer`` stay as they are.

    Args:
        path: of a checkpoint whose files have been verified, or one below a URL, which are verified as they come.
        seed: the generators' states are restored at the saved number of ranks and tensor-parallel degree; at another
            they are seeded by this text. None leaves the generators as they are.

    Raises:
        DamagedCheckpointError: a file is not what the manifest says; one below a URL may have been read in part.
        UserError: it does not fit the model or the optimizer; nothing has been changed.
    """
    model = plain(model)
    run = manifest.run if is_script(manifest.run) else {"optimizer": None, "extra_states": {}}
    settings = run["optimizer"]  # of a script; a job's are its flags
    require_base(path, manifest, model)
    together(lambda: check_adapters(path, manifest, model))
    together(lambda: check_optimizer(model, optimizer, manifest.run))
    state = together(lambda: allocate(model, optimizer, manifest))
    tensors = together(lambda: state_tensors(model, optimizer, state))
    together(lambda: check_tensors(path, manifest, tensors))
    same_layout = (manifest.world_size, manifest.degrees.get("tp", 1)) == (dist.get_world_size(), len(alike(model)))
    generators = saved_generators(manifest) if seed is not None and same_layout else {}
    fill(path, manifest, tensors | generators)
    restore_optimizer(model, optimizer, state, settings)
    restore_extra_states(model, run.get("extra_states", {}))
    if seed is not None:
        restore_generators([*generators.values()], otherwise=seed)


def restore_model(path: Path | RemoteCheckpoint, manifest: Manifest, model: nn.Module) -> None:
    """Fill the model from a checkpoint, whose other tensors are not read; collective. See :func:`restore`."""
    require_base(path, manifest, model)
    together(lambda: check_adapters(path, manifest, model))
    tensors = model_tensors(model)
    saved = {name: entry for name, entry in manifest.tensors.items() if name in tensors or name.startswith("model.")}
    together(lambda: check_tensors(path, dataclasses.replace(manifest, tensors=saved), tensors))
    fill(path, manifest, tensors)
    restore_extra_states(model, manifest.run.get("extra_states", {}) if is_script(manifest.run) else {})


def check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, run: dict[str, Any]) -> None:
    """Refuse a checkpoint of another optimizer.

    Args:
        run: the manifest's.

    Raises:
        UserError: it is of another kind or class, or its groups have other parameters.
    """
    kind, mine = saved_kind(run), kind_of_optimizer(optimizer)
    if is_script(run) or not isinstance(optimizer, MixedOptimizer):
        kind, mine = of_script(kind), of_script(mine)
    if kind != mine:
        raise UserError(
            f"the checkpoint was made with the optimizer {kind_text(kind)}, got {kind_text(mine)}: use the same"
        )
    if not is_script(run):
        return
    saved = run["optimizer"]
    names = parameter_names(model, optimizer)
    groups = [sorted(names[p] for p in group["params"]) for group in optimizer.param_groups]
    theirs = [sorted(group["names"]) for group in saved["groups"]]
    if groups != theirs:
        raise UserError(
            f"the checkpoint's optimizer has {len(theirs)} groups of {[len(g) for g in theirs]} parameters, this one "
            f"{len(groups)} of {[len(g) for g in groups]}, or of others: make the groups as before"
        )


def allocate(model: nn.Module, optimizer: torch.optim.Optimizer, manifest: Manifest) -> State:
    """Return the optimizer's state as the checkpoint has it, without values, so that it can be read into.

    A job's optimizer knows its state, whatever else the checkpoint has.
    """
    groups = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
    by_name = {name: parameter for parameter, name in parameter_names(model, optimizer).items()}
    state: State = {}
    for name, entry in manifest.tensors.items():
        kind, _, rest = name.partition(".")
        key, _, parameter_name = rest.partition(".")
        if kind != "optim" or parameter_name not in by_name:  # which check_tensors refuses
            continue
        parameter = by_name[parameter_name]
        group = groups.get(parameter, {})
        if isinstance(optimizer, MixedOptimizer) and parameter in groups:
            if parameter not in state:
                state[parameter] = optimizer.initial_state(parameter, group)
            continue
        # A fused or capturable optimizer counts its steps on the device.
        on_device = bool(group.get("fused") or group.get("capturable"))
        spec = StateSpec(entry.dtype, entry.shape)
        state.setdefault(parameter, {})[key] = empty_state(parameter, spec, on_device=on_device)
    return state


def check_tensors(path: Path | RemoteCheckpoint, manifest: Manifest, wanted: dict[str, torch.Tensor]) -> None:
    """Refuse missing, extra and misshapen tensors, and other dtypes: nothing is converted silently.

    Raises:
        UserError: naming the first few.
    """
    theirs = {n: entry for n, entry in manifest.tensors.items() if n in wanted or not n.startswith(("rng.", OF_DATA))}
    problems = [f"{name} is missing" for name in wanted.keys() - theirs.keys()]
    problems += [f"{name} is unknown here" for name in theirs.keys() - wanted.keys()]
    for name in wanted.keys() & theirs.keys():
        entry, tensor = theirs[name], wanted[name]
        if entry.shape != tuple(tensor.shape) or entry.dtype != tensor.dtype:
            problems.append(
                f"{name} is {DTYPE_NAMES[entry.dtype]} {entry.shape}, wanted {tensor.dtype} {tuple(tensor.shape)}"
            )
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise UserError(
            f"checkpoint {path} does not fit the model: {'; '.join(sorted(problems)[:3])}{more}; resume with the model"
            f", the adapters, the optimizer and the groups of a job's --param_groups that it was saved with"
        )


def fill(path: Path | RemoteCheckpoint, manifest: Manifest, tensors: dict[str, torch.Tensor]) -> None:
    """Read this rank's shard of each tensor into it; collective.

    Raises:
        DamagedCheckpointError: on every rank; a file below a URL is not what the manifest says.
        UserError: on every rank; another one is not.
    """
    if problems := gathered(together(lambda: _fill(path, manifest, tensors))):
        raise DamagedCheckpointError(path, problems)


@torch.no_grad()
def _fill(path: Path | RemoteCheckpoint, manifest: Manifest, tensors: dict[str, torch.Tensor]) -> list[str]:
    parts = {name: local_part(tensor) for name, tensor in tensors.items()}
    wanted = {name: part for name, part in parts.items() if part[0].numel()}
    here = path if isinstance(path, Path) else path.copy
    if here is None:
        return fill_from(cast(RemoteCheckpoint, path), manifest, wanted)
    with CheckpointReader(here, manifest) as reader:
        for name, (local, offsets) in wanted.items():
            local.copy_(reader.read(name, offsets, local.shape))
    return []


def restore_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, state: State, saved: dict[str, Any] | None
) -> None:
    """Give the optimizer its state and, where the manifest has them, the settings of each group."""
    optimizer.state.clear()
    optimizer.state.update(state)
    if saved is None:
        return
    by_name = {name: parameter for parameter, name in parameter_names(model, optimizer).items()}
    for name, values in saved["scalars"].items():
        optimizer.state[by_name[name]].update(decode(values))
    for group, entry in zip(optimizer.param_groups, saved["groups"], strict=True):
        for key, value in decode(entry["values"]).items():
            if isinstance(group.get(key), torch.Tensor):
                group[key].fill_(value)
            else:
                group[key] = value


def restore_extra_states(model: nn.Module, saved: dict[str, Any]) -> None:
    """Give modules what :func:`smp.checkpoint.state.extra_states` found."""
    for name, module in model.named_modules():
        if clean_name(name) in saved:
            module.set_extra_state(decode(saved[clean_name(name)]))


def saved_generators(manifest: Manifest) -> dict[str, torch.Tensor]:
    """Return the saved states of this rank's generators, without values; the CPU's is the first."""
    kinds = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    names = [f"rng.{kind}.{dist.get_rank():05d}" for kind in kinds]
    found = {name: manifest.tensors[name] for name in names if name in manifest.tensors}
    return {name: torch.empty(e.shape, dtype=e.dtype) for name, e in found.items()} if names[0] in found else {}


def restore_generators(states: list[torch.Tensor], *, otherwise: str) -> None:
    """Give this rank's generators their states, the CPU's first; without any seed them by a text."""
    if states:
        torch.set_rng_state(states[0])
        for state in states[1:]:
            torch.cuda.set_rng_state(state)
    else:
        digest = hashlib.blake2b(otherwise.encode(), digest_size=8).digest()
        torch.manual_seed(int.from_bytes(digest, "little") >> 1)
