"""The list of optimizers, which of them updates a parameter, and what its state takes."""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.tensor import DTensor, zeros

from smp.errors import UserError
from smp.local_shards import local_part
from smp.mesh import Mesh
from smp.models.file_names import parameters_of
from smp.models.parameters import ParameterSpec, ParameterTable, parameter_table
from smp.optim import adamw, adamw_8bit, muon
from smp.optim.config import OptimConfig, torch_dtype
from smp.optim.entry import Entry, StateSpec, member
from smp.optim.groups import group_of, read_groups
from smp.optim.rounding import parameter_key

# The values of --optimizer. A new optimizer is its own file and a line here.
OPTIMIZERS: list[Entry] = [adamw, adamw_8bit, muon]
State = dict[torch.Tensor, dict[str, Any]]

# What is left out of the kind of an optimizer: a checkpoint without an entry is of AdamW in fp32.
PLAIN = {"optimizer": adamw.NAME, "optimizer_state_dtype": "fp32", "param_dtype": "fp32"}


def entry_named(name: str) -> Entry:
    """Return an optimizer; raises a UserError for a name that none has."""
    for entry in OPTIMIZERS:
        if name == entry.NAME:
            return entry
    raise UserError(f"--optimizer must be one of {', '.join(each.NAME for each in OPTIMIZERS)}, got {name!r}")


def entry_of(spec: ParameterSpec, config: OptimConfig) -> Entry:
    """Return the optimizer that updates a parameter: the job's, or AdamW if that does not take it."""
    entry = entry_named(group_of(spec, config.param_groups).optimizer or config.optimizer)
    return entry if entry.takes(spec) else adamw


def _taken(table: ParameterTable, config: OptimConfig) -> list[tuple[Entry, ParameterTable]]:
    """Return each optimizer in use with the trained parameters that it updates."""
    found: dict[str, list[ParameterSpec]] = defaultdict(list)
    for spec in table.trained:
        found[entry_of(spec, config).NAME].append(spec)
    return [(entry_named(name), ParameterTable(tuple(specs))) for name, specs in found.items()]


def _problems_of_groups(table: ParameterTable, config: OptimConfig) -> list[str]:
    """Return one sentence for each parameter group without parameters, or whose optimizer is none or takes none."""
    found, names, groups = [], [entry.NAME for entry in OPTIMIZERS], read_groups(config.param_groups)
    specs: dict[int, list[ParameterSpec]] = defaultdict(list)
    for spec in table.trained:
        specs[next((number for number, group in enumerate(groups, 1) if group.has(spec)), 0)].append(spec)
    for number, group in enumerate(groups, 1):
        wrong, own, name = "", specs[number], group.optimizer
        if not own:
            shown = ", ".join(spec.name for spec in table.trained[:3])
            why = "an earlier group has all" if any(map(group.has, table.trained)) else f"they are named like {shown}"
            wrong = f"no trained parameter is left for pattern {group.pattern!r} ({why}): change it or leave it out"
        elif name is not None and name not in names:
            wrong = f"optimizer must be one of {', '.join(names)}, got {name!r}"
        elif name is not None and not any(map(entry_named(name).takes, own)):
            wrong = f"{name} takes none of its parameters, such as {own[0].name}: leave optimizer out"
        if wrong:
            found.append(f"--param_groups {config.param_groups}: group {number}: {wrong}")
    return found


def find_problems(table: ParameterTable, mesh: Mesh, config: OptimConfig, *, here: bool = False) -> list[str]:
    """Return one sentence for each reason why the optimizer cannot update such a model on such a mesh.

    Args:
        here: whether it is to do so in this environment: else packages may be missing.
    """
    if found := _problems_of_groups(table, config):
        return found
    taken = _taken(table, config)
    used = {config.optimizer, *(entry.NAME for entry, _ in taken)}
    for field in dataclasses.fields(config):
        if field.name.startswith("muon_") and muon.NAME not in used and getattr(config, field.name) != field.default:
            found.append(f"--{field.name} needs --optimizer {muon.NAME}: set it, or leave --{field.name} out")
    if taken and config.optimizer not in [entry.NAME for entry, _ in taken]:
        found.append(f"--optimizer {config.optimizer} takes none of the trained parameters: use {adamw.NAME}")
    for entry, own in taken:
        if config.param_dtype != "fp32" and entry is not adamw:  # nobody else rounds stochastically
            found.append(
                f"--param_dtype {config.param_dtype} is updated by {adamw.NAME} alone, and {entry.NAME} updates "
                f"{own.specs[0].name}: leave one of the two out"
            )
        found += [*member(entry, "problems")(own, mesh, config), *(member(entry, "missing")() if here else [])]
    return found


def described(config: OptimConfig) -> dict[str, str]:
    """Return the settings that say what a checkpoint's optimizer state is, for its manifest."""
    return {name: getattr(config, name) for name in PLAIN} | {"optimizer_state_dtype": config.moments}


def kind_of(config: OptimConfig) -> dict[str, str]:
    """Return :func:`described`, which a resume needs the same, without what is as of AdamW in fp32."""
    return saved_kind({"optimizer": described(config)})


def kind_of_optimizer(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Return :func:`kind_of` a job's optimizer; of a script's, its class, where that is not torch's AdamW."""
    if isinstance(optimizer, MixedOptimizer):
        return kind_of(optimizer.config)
    name = type(optimizer).__name__
    return {} if name == "AdamW" else {"class": name}


def saved_kind(run: Mapping[str, Any]) -> dict[str, str]:
    """Return the kind of optimizer in a manifest's ``run``, of a job or of a script."""
    found = run.get("optimizer") or {}
    plain = {"class": "AdamW", **PLAIN}
    return {name: found[name] for name in plain if found.get(name, plain[name]) != plain[name]}


def of_script(kind: Mapping[str, str]) -> dict[str, str]:
    """Return what a script's optimizer says of a kind: not its dtype, which tensors say where moments have no other."""
    dtypes = {name: kind.get(name, PLAIN[name]) for name in ("optimizer_state_dtype", "param_dtype")}
    return {name: value for name, value in kind.items() if name not in dtypes or len({*dtypes.values()}) > 1}


def kind_text(kind: Mapping[str, str]) -> str:
    """Describe a kind in messages: by flags, or by its class."""
    return kind.get("class") or " ".join(f"--{name} {value}" for name, value in kind.items()) or "AdamW"


@functools.lru_cache(maxsize=64)
def state_bytes(table: ParameterTable, config: OptimConfig) -> float:
    """Return the bytes of optimizer state of a trained parameter's element, on average; without scalars.

    Args:
        table: without trained parameters, as if AdamW updated them.
    """
    dtype = torch_dtype(config.param_dtype)
    sizes = [
        (sum(each.nbytes for each in entry.state(spec.shape, dtype, config).values() if each.shape), spec.size)
        for entry, own in _taken(table, config) or [(adamw, ParameterTable((ParameterSpec("", (1,), 0, "vector"),)))]
        for spec in own
    ]
    return sum(size for size, _ in sizes) / sum(count for _, count in sizes)


def moved_bytes(table: ParameterTable, config: OptimConfig) -> float:
    """Return the bytes that an update reads and writes in memory for an element of a trained parameter, on average.

    The update reads parameter, gradient and state, and writes parameter and state; the norm reads the gradient,
    clipping reads and writes it, and zeroing writes it. Stochastic rounding takes many operations.
    """
    taken = _taken(table, config)
    besides = sum(member(entry, "MOVED_BESIDES") * own.count() for entry, own in taken)
    each = besides / max(1, sum(own.count() for _, own in taken))
    plain = adamw.PLAIN_MOVED if config.rounds_stochastically else 0
    return config.parameter_bytes * (2 + 1 + 3 + 1) + 2 * state_bytes(table, config) + each + plain


def _summed(name: str, table: ParameterTable, mesh: Mesh, config: OptimConfig) -> dict[Any, float]:
    """Return the sums of what the optimizers' members of this name return."""
    found: dict[Any, float] = defaultdict(float)
    for entry, own in _taken(table, config):
        for key, size in member(entry, name)(own, mesh, config).items():
            found[key] += size
    return dict(found)


def gathered_bytes(table: ParameterTable, mesh: Mesh, config: OptimConfig) -> dict[str, float]:
    """Return the bytes that a rank gathers in one update, by axis of the mesh."""
    return _summed("gathered", table, mesh, config)


def product_flops(table: ParameterTable, mesh: Mesh, config: OptimConfig) -> dict[int, float]:
    """Return the FLOPs of the matrix products of an update on a rank, by bytes of an element."""
    return _summed("flops", table, mesh, config)


def working_bytes(table: ParameterTable, mesh: Mesh, config: OptimConfig) -> int:
    """Return the most bytes that an update allocates on a rank besides the state, and frees."""
    found = (member(entry, "working_bytes")(own, mesh, config) for entry, own in _taken(table, config))
    return max(found, default=0)


class MixedOptimizer(torch.optim.Optimizer):
    """An optimizer whose parameter groups are each updated by an entry of :data:`OPTIMIZERS`.

    Args:
        groups: each with ``params``, ``optimizer`` (the name of its entry), ``weight_decay`` and the entry's settings.
        config: what the entries read besides.
        lr: the rate of groups that name none.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], config: OptimConfig, *, lr: float):
        self.config = config
        super().__init__(groups, {"lr": lr})

    def state_specs(self, parameter: torch.Tensor, group: Mapping[str, Any]) -> Mapping[str, StateSpec]:
        """Return the state of a parameter of ``group``, by key."""
        return entry_named(group["optimizer"]).state(tuple(parameter.shape), parameter.dtype, self.config)

    def initial_state(self, parameter: torch.Tensor, group: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Return the state of a parameter of ``group`` before the first update."""
        specs = self.state_specs(parameter, group)
        return {key: empty_state(parameter, spec, on_device=True) for key, spec in specs.items()}

    def load_state_dict(self, state_dict: Any) -> None:
        """Load a state as torch's optimizers do, which give it the parameters' dtype, and give it its own again."""
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            for parameter in group["params"]:
                specs, state = self.state_specs(parameter, group), self.state.get(parameter, {})
                state.update({key: value.to(specs[key].dtype) for key, value in state.items()})

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], Any] | None = None, *, skip: torch.Tensor | None = None
    ) -> Any:
        """Update the parameters that have gradients.

        Args:
            closure: computes the loss, which is returned.
            skip: 0-d bool: change nothing where it is true, without asking the device which; None: false.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            entry = entry_named(group["optimizer"])
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameter in parameters:
                if not self.state[parameter]:
                    self.state[parameter].update(self.initial_state(parameter, group))
            if parameters:
                entry.update(parameters, [self.state[parameter] for parameter in parameters], group, skip)
        return loss


def expected_specs(optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, Mapping[str, StateSpec]]:
    """Return the state of each parameter after its first update, where that is known: a job's, and torch's AdamW's."""
    found: dict[torch.Tensor, Mapping[str, StateSpec]] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if isinstance(optimizer, MixedOptimizer):
                found[parameter] = optimizer.state_specs(parameter, group)
            elif isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)):
                found[parameter] = adamw.state(tuple(parameter.shape), parameter.dtype, OptimConfig())
    return found


def expected_state(optimizer: torch.optim.Optimizer) -> State:
    """Return the state with that of the first update to come, where it is known; values are of no meaning.

    A tensor like the parameter is the parameter: nothing is allocated for it.
    """
    state = dict(optimizer.state)
    for parameter, specs in expected_specs(optimizer).items():
        like = StateSpec(parameter.dtype, tuple(parameter.shape))
        if parameter not in state:
            state[parameter] = {
                key: parameter if spec == like else empty_state(parameter, spec, on_device=True)
                for key, spec in specs.items()
            }
    return state


def empty_state(parameter: torch.Tensor, spec: StateSpec, *, on_device: bool) -> torch.Tensor:
    """Return zeros of a tensor of the state of a parameter, laid out as torch's optimizers do.

    Args:
        on_device: whether scalars are on the parameter's device; else on the CPU.
    """
    shape, dtype = spec.shape, spec.dtype
    if shape == tuple(parameter.shape):
        return torch.zeros_like(parameter.detach(), dtype=dtype)
    if shape and isinstance(parameter, DTensor) and len(shape) == parameter.dim():
        made = zeros(shape, dtype=dtype, device_mesh=parameter.device_mesh, placements=parameter.placements)
        return made.to(parameter.device)  # which is not the mesh's where the parameter is offloaded
    return torch.zeros(shape, dtype=dtype, device=parameter.device if shape or on_device else "cpu")


def build_optimizer(
    model: nn.Module, config: OptimConfig, *, lr: float, table: ParameterTable | None = None, seed: int = 0
) -> MixedOptimizer:
    """Build the optimizer of a sharded model; its state is sharded like the parameters.

    Norm weights and biases are the one-dimensional parameters of these models; they get no weight decay (the
    originals matched norm classes by name and missed some).

    Args:
        table: of the model's parameters, by which they are grouped; None: it is read from the model.
        seed: of stochastic rounding.
    """
    parameters, groups = parameters_of(model), defaultdict[tuple[Any, ...], list[nn.Parameter]](list)
    names = {parameter: name for name, parameter in parameters.items()}
    for spec in (table or parameter_table(model)).trained:
        group, is_vector, entry = group_of(spec, config.param_groups), len(spec.shape) < 2, entry_of(spec, config)
        decay = (0.0 if is_vector else config.weight_decay) if group.weight_decay is None else group.weight_decay
        more = tuple(member(entry, "group_settings")(spec).items())
        groups[is_vector, entry.NAME, group.lr_factor, decay, more].append(parameters[spec.name])
    found = []
    for key in sorted(groups):
        _, name, factor, decay, more = key
        own: dict[str, Any] = {"params": groups[key], "lr": lr * factor, "lr_factor": factor, "weight_decay": decay}
        own |= {"optimizer": name, **entry_named(name).settings(config), **dict(more)}
        if config.rounds_stochastically:
            with unset_fake_temporarily():  # a plan's mode: offsets of shards are values of tensors
                offsets = {parameter: local_part(parameter)[1] for parameter in groups[key]}
            own["rounding"] = {each: (parameter_key(seed, names[each]), offsets[each]) for each in groups[key]}
        found.append(own)
    return MixedOptimizer(found, config, lr=lr)
