"""Choose the modules that become units: torch's own code runs its policies, so that the units are FSDP1's."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._wrap_utils import _auto_wrap
from torch.distributed.fsdp.wrap import _Policy

from smp.errors import UserError
from smp.log import get_logger

_logger = get_logger("smp.fsdp")

_EXAMPLE = (
    "a policy of torch.distributed.fsdp.wrap, such as functools.partial(transformer_auto_wrap_policy, "
    "transformer_layer_cls={Block})"
)

# A module that becomes a unit, and its arguments.
Chosen = dict[nn.Module, dict[str, Any]]


def choose_units(
    module: nn.Module,
    policy: Any,
    arguments: dict[str, Any],
    *,
    ignored_modules: set[nn.Module],
    ignored_parameters: set[nn.Parameter],
) -> Chosen:
    """Return the modules below ``module`` that the policy wraps, children before parents, each with its arguments.

    Args:
        module: the root, which is not among them.
        policy: of any kind that FSDP1 takes.
        arguments: what the root is given; a ``CustomPolicy`` may replace some for its modules.
        ignored_modules: are never wrapped.
        ignored_parameters: do not count as a module's size.

    Raises:
        UserError: the policy is none, fails, or the model has units already.
    """
    if policy is None:
        return {}
    if not callable(policy) and not isinstance(policy, _Policy):
        raise UserError(f"FSDP: auto_wrap_policy is a {type(policy).__name__}: give {_EXAMPLE}")
    for name, inner in module.named_modules():
        if isinstance(inner, FSDPModule):
            raise UserError(
                f"FSDP: auto_wrap_policy is given, and {name or 'the module'} is wrapped already: wrap by hand, or "
                f"leave it all to the policy"
            )
    chosen: Chosen = {}

    def note(inner: nn.Module, policy: None = None, use_orig_params: bool = True, **own: Any) -> nn.Module:
        if not is_container(inner):
            chosen.setdefault(inner, own)
        return inner

    with warnings.catch_warnings():
        # Frozen parameters in a unit with others cost nothing here; without use_orig_params torch refuses them.
        warnings.filterwarnings("ignore", message=".*has both parameters with requires_grad=True and False")
        root = {**arguments, "use_orig_params": True}
        try:
            _auto_wrap(module, policy, ignored_modules, ignored_parameters, root, note)
        except (TypeError, ValueError) as error:
            raise UserError(f"FSDP: auto_wrap_policy does not work: {error}: give {_EXAMPLE}") from error
    return _keep_ties_together(module, chosen, ignored_parameters)


def is_container(module: nn.Module) -> bool:
    """Return True for a module that is never called: its parameters would not be gathered."""
    return type(module).forward is nn.Module.forward and "forward" not in module.__dict__


def _owners(module: nn.Module, units: Chosen) -> Iterator[tuple[str, nn.Parameter, nn.Module]]:
    """Yield every name of every parameter, the parameter, and the innermost unit around it."""
    around: dict[str, nn.Module] = {}
    for path, inner in module.named_modules(remove_duplicate=False):
        around[path] = inner if inner in units or not path else around[path.rpartition(".")[0]]
        for name, parameter in inner.named_parameters(recurse=False, remove_duplicate=False):
            yield f"{path}.{name}" if path else name, parameter, around[path]


def _keep_ties_together(module: nn.Module, units: Chosen, ignored: set[nn.Parameter]) -> Chosen:
    """Leave out the units that hold a tied parameter under one of its names and not under the others.

    Two units would each train a copy of the parameter. The unit around them takes it instead.
    """
    holders: dict[nn.Parameter, dict[str, nn.Module]] = {}
    for name, parameter, owner in _owners(module, units):
        if parameter not in ignored:
            holders.setdefault(parameter, {})[name] = owner
    apart: dict[nn.Module, dict[str, nn.Module]] = {}
    for owners in (found for found in holders.values() if len(found) > 1):
        apart |= {owner: owners for owner in owners.values() if not {*owners.values()} <= {*owner.modules()}}
    if not apart:
        return units
    for owner, owners in apart.items():
        _logger.info("FSDP: %s is one parameter, so its %s is no unit", " = ".join(owners), type(owner).__name__)
    left = {unit: arguments for unit, arguments in units.items() if unit not in apart}
    return _keep_ties_together(module, left, ignored)
