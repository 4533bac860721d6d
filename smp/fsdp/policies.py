"""Which modules become units: torch's own policies, run by torch's own code, so that the units are FSDP1's."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.fsdp._common_utils import _override_module_mixed_precision
from torch.distributed.fsdp._wrap_utils import _warn_on_overridden_mixed_precision
from torch.distributed.fsdp.wrap import (
    _or_policy,
    _Policy,
    _post_order_apply,
    _recursive_wrap,
    _run_mixed_precision_override_policy,
    _wrap_module_cls_individually,
)

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
    nested: Callable[[nn.Module], bool],
) -> Chosen:
    """The modules below ``module`` that the policy wraps, children before parents, each with its arguments.

    Args:
        module: the root, which is not among them.
        policy: of any kind that FSDP1 takes.
        arguments: what the root is given; a ``CustomPolicy`` may replace some for its modules.
        ignored_modules: are never wrapped.
        ignored_parameters: do not count as a module's size.
        nested: whether a module is a unit already.

    Raises:
        UserError: the policy is none, fails, or the model has units already.
    """
    if policy is None:
        return {}
    if not callable(policy) and not isinstance(policy, _Policy):
        raise UserError(f"FSDP: auto_wrap_policy is a {type(policy).__name__}: give {_EXAMPLE}")
    for name, inner in module.named_modules():
        if nested(inner):
            raise UserError(
                f"FSDP: auto_wrap_policy is given, and {name or 'the module'} is wrapped already: wrap by hand, or "
                f"leave it all to the policy"
            )
    mixed = arguments.get("mixed_precision")
    if isinstance(policy, _Policy):
        chosen = _by_object(module, policy, arguments, ignored_modules)
    else:
        chosen = _by_function(module, policy, arguments, ignored_modules, ignored_parameters)
    if isinstance(mixed, MixedPrecision):
        _warn_on_overridden_mixed_precision(_override_module_mixed_precision(module, mixed._module_classes_to_ignore))
    callable_units = {unit: own for unit, own in chosen.items() if not is_container(unit)}
    return _keep_ties_together(module, callable_units, ignored_parameters)


def is_container(module: nn.Module) -> bool:
    """Whether a module is never called: nothing would gather its parameters, so what encloses it takes them."""
    return type(module).forward is nn.Module.forward and "forward" not in module.__dict__


def _does_not_work(error: Exception) -> UserError:
    return UserError(f"FSDP: auto_wrap_policy does not work: {error}: give {_EXAMPLE}")


def _by_object(module: nn.Module, policy: _Policy, arguments: dict[str, Any], ignored: set[nn.Module]) -> Chosen:
    try:
        found = policy._run_policy(module, ignored, dict(arguments))
    except (TypeError, ValueError) as error:
        raise _does_not_work(error) from error
    mixed = arguments.get("mixed_precision")
    if isinstance(mixed, MixedPrecision):
        classes = mixed._module_classes_to_ignore
        found = _run_mixed_precision_override_policy(module, classes, ignored, dict(arguments), found)
    ordered: Chosen = {}

    def note(inner: nn.Module) -> None:
        if inner in found and inner is not module:
            ordered[inner] = found[inner]

    _post_order_apply(module, note)
    return ordered


def _by_function(
    module: nn.Module,
    policy: Callable[..., bool],
    arguments: dict[str, Any],
    ignored_modules: set[nn.Module],
    ignored_parameters: set[nn.Parameter],
) -> Chosen:
    found: Chosen = {}
    mixed = arguments.get("mixed_precision")
    if isinstance(mixed, MixedPrecision):
        apart = functools.partial(_wrap_module_cls_individually, module_classes=mixed._module_classes_to_ignore)
        policy = functools.partial(_or_policy, policies=[policy, apart])

    def note(inner: nn.Module, **kwargs: Any) -> nn.Module:
        if mixed is not None and isinstance(inner, tuple(mixed._module_classes_to_ignore)):
            kwargs["mixed_precision"] = None
        found.setdefault(inner, kwargs)
        return inner

    try:
        _recursive_wrap(
            module,
            auto_wrap_policy=policy,
            wrapper_cls=note,
            ignored_modules=ignored_modules,
            ignored_params=ignored_parameters,
            only_wrap_children=True,
            **arguments,
        )
    except TypeError as error:
        raise _does_not_work(error) from error
    return found


def _owners(module: nn.Module, units: Chosen) -> Iterator[tuple[str, nn.Parameter, nn.Module]]:
    """Every place of every parameter: its name, the parameter, and the innermost unit around it."""
    around: dict[str, nn.Module] = {}
    for path, inner in module.named_modules(remove_duplicate=False):
        around[path] = inner if inner in units or not path else around[path.rpartition(".")[0]]
        for name, parameter in inner.named_parameters(recurse=False, remove_duplicate=False):
            yield f"{path}.{name}" if path else name, parameter, around[path]


def _keep_ties_together(module: nn.Module, units: Chosen, ignored: set[nn.Parameter]) -> Chosen:
    """Leave out the units that hold one place of a tied parameter and not the others.

    Two units would each take the parameter for their own, and train two. What encloses them takes it then.
    """
    while True:
        places: dict[nn.Parameter, list[tuple[str, nn.Module]]] = {}
        for name, parameter, owner in _owners(module, units):
            if parameter not in ignored:
                places.setdefault(parameter, []).append((name, owner))
        apart: dict[nn.Module, list[str]] = {}
        for found in places.values():
            owners = {owner for _, owner in found}
            for owner in owners if len(owners) > 1 else ():
                if not all(other in set(owner.modules()) for other in owners):
                    apart[owner] = [name for name, _ in found]
        if not apart:
            return units
        for owner, names in apart.items():
            _logger.info("FSDP: %s is one parameter, so its %s is no unit", " = ".join(names), type(owner).__name__)
        units = {unit: arguments for unit, arguments in units.items() if unit not in apart}
