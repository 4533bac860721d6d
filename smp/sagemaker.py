"""Make a script that was written for SMP v2 run unchanged: ``import smp.sagemaker`` before its own imports.

It makes ``import torch.sagemaker as tsm``, the modules below it, and
``import smdistributed.dataparallel.torch.torch_smddp`` work, by the table of :mod:`smp.compat.names`, and gives
torch's names the arguments that they have in SMP v2's torch. A name that nothing here can stand in for says what to use
instead when it is asked for: as an ``ImportError`` where it is imported, as an ``AttributeError`` elsewhere.
"""

from __future__ import annotations

import functools
import importlib
import importlib.machinery
import importlib.util
import itertools
import sys
import types
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint.state_dict  # before torch's FSDP is replaced: its own is what this looks for
from torch import nn

import smp
from smp.compat.forward_hooks import take_cut_batches, tell_of_fp8
from smp.compat.init_settings import read_config
from smp.compat.names import NAMES, Name
from smp.environment import sagemaker_parameters
from smp.errors import UserError
from smp.json_input import from_text
from smp.log import get_logger
from smp.mesh import Mesh

ROOTS = ("torch.sagemaker", "smdistributed")

_logger = get_logger(__name__)

# Names of torch that ours replaced, by the script's modules that had imported torch's before.
_imported_before: dict[str, list[str]] = {}


def init(config: dict[str, Any] | str | Path | None = None) -> Mesh:
    """Call :func:`smp.init` with ``config`` and the parameters of SageMaker's estimator, which go first, as in SMP v2.

    Degrees that the script has set on ``state`` go before both, as AWS's scripts expect.

    Raises:
        UserError: as of :func:`smp.init`, also about ``SM_HP_MP_PARAMETERS``; or the script's own command line asks for
            what would fail at the first checkpoint.
    """
    if ("--checkpoint_type", "local") in itertools.pairwise(" ".join(sys.argv).replace("=", " ").split()):
        raise UserError(
            "--checkpoint_type local of AWS's scripts saves FSDP1's flat parameters (LOCAL_STATE_DICT), which are not "
            "here, and would fail at the first checkpoint: use --checkpoint_type sharded"
        )
    estimator, values = sagemaker_parameters(), read_config(config)
    for name, value in smp.state.given.items():
        if (theirs := from_text(estimator.pop(name, value))) != value:
            _logger.warning("init: %s is %s, which was set on state, and not the estimator's %s", name, value, theirs)
    for name in values.keys() & estimator.keys():
        if from_text(values[name]) != from_text(estimator[name]):
            _logger.warning("init: %s is the estimator's %s, not %s", name, estimator[name], values[name])
    try:
        mesh = smp.init({**values, **estimator})
    except UserError as error:
        if not estimator:
            raise
        raise UserError(f"{error} (SM_HP_MP_PARAMETERS, the estimator's parameters, gives {estimator})") from None
    if estimator:
        _logger.info("init took from SM_HP_MP_PARAMETERS: %s", estimator)
    if "sm_activation_offloading" not in {**values, **estimator}:
        _logger.info("init: sm_activation_offloading is False unless it is given; in SMP v2 it was True")
    _logger.info("torch.distributed.fsdp.FullyShardedDataParallel is smp's, which takes post_param_init_fn")
    _tell_imported()
    return mesh


@functools.wraps(smp.transform)
def transform(model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    """Call :func:`smp.transform`; the model then takes batches as SMP v2's scripts cut them for context parallelism."""
    model, current = smp.transform(model, *args, **kwargs), smp.api.current()
    assert current is not None
    if current[0].cp.size > 1:
        take_cut_batches(model, current[0])
    tell_of_fp8(model)
    _tell_imported()
    return model


def _tell_imported() -> None:
    """Warn once of modules of the script that use torch's own objects in place of ours."""
    for module, names in _imported_before.items():
        _logger.warning(
            "%s has torch's own %s, which it imported before smp.sagemaker, and not smp's: make `import smp.sagemaker` "
            "the first line of the script",
            module,
            " and ".join(names),
        )
    _imported_before.clear()


class MissingNameError(UserError, AttributeError):
    """A name that is not here was asked for."""


class MissingImportError(UserError, ModuleNotFoundError):
    """A name that is not here was imported, or a module."""


def _ours(dotted: str) -> Any:
    """Return the object of a dotted name."""
    module, _, name = dotted.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError:
        return getattr(_ours(module), name)


class _Module(types.ModuleType):
    """A module of the originals: has the names that work as they are, and refuses the others with their replacement."""

    def __init__(self, name: str):
        super().__init__(name, "Stands in for SMP v2's module of this name; see smp.sagemaker.")
        self.__path__: list[str] = []  # a package, so that modules below it can be imported
        # Others ask whether there is a module of this name (importlib.util.find_spec), which fails without one.
        self.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        self._missing: dict[str, Name] = {}

    def refusal(self, name: str) -> str:
        """Say what takes the place of a name."""
        if (entry := self._missing.get(name)) is not None:
            return f"{entry.original} is not here: {entry.note}"
        return f"{self.__name__}.{name} is not here: docs/smp_v2_names.md lists what replaces it"

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name) if name.startswith("__") else MissingNameError(self.refusal(name))


class _Finder:
    """Refuses modules below ours: ``from module import name``, too, asks for the module ``module.name`` at last."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> None:
        """Raise for what is below one of our modules."""
        parent, _, last = name.rpartition(".")
        if isinstance(module := sys.modules.get(parent), _Module):
            raise MissingImportError(module.refusal(last))


def install() -> None:
    """Put the modules into ``sys.modules``, and ours in place of torch's names, once.

    Raises:
        UserError: the original is installed.
    """
    if isinstance(sys.modules.get("torch.sagemaker"), _Module):
        return
    for root in ROOTS:
        if root in sys.modules or importlib.util.find_spec(root) is not None:
            raise UserError(f"{root} itself is installed here: use it, or leave it out of the environment")
    for entry in NAMES:
        owner, _, name = entry.original.rpartition(".")
        if entry.original.startswith(ROOTS):
            module = _module(owner)
            if entry.same:
                value = _ours(entry.ours)
                setattr(module, name, value)
                if isinstance(value, types.ModuleType):
                    sys.modules[entry.original] = value
            else:
                module._missing[name] = entry
        elif entry.same:
            _note_imported(name, getattr(importlib.import_module(owner), name))
            setattr(importlib.import_module(owner), name, _ours(entry.ours))
    sys.meta_path.append(_Finder)


def _note_imported(name: str, original: object) -> None:
    """Note which modules of the script have torch's object of this name already; installed packages keep it."""
    for module, each in list(sys.modules.items()):
        file = getattr(each, "__file__", None) or ""
        installed = "site-packages" in file or "dist-packages" in file
        if installed or module.split(".")[0] in ("torch", "smp", "__mp_main__"):
            continue
        if isinstance(each, types.ModuleType) and any(value is original for value in list(vars(each).values())):
            _imported_before.setdefault(module, []).append(name)


def _module(name: str) -> _Module:
    """Return a module of the originals, made with those above it."""
    found = sys.modules.get(name)
    if isinstance(found, _Module):
        return found
    made = sys.modules[name] = _Module(name)
    parent, _, last = name.rpartition(".")
    if parent == "torch":
        torch.sagemaker = made  # type: ignore[attr-defined]
    elif parent:
        setattr(_module(parent), last, made)
    return made


install()
