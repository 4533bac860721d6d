"""SMP v2's ``DelayedParamIniter``: a model is built on the meta device, and filled unit by unit as FSDP wraps it."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from smp.delayed_init import first_ranks_seed, initialize_parameter_
from smp.errors import UserError
from smp.fsdp.materialize import own_tensors
from smp.fsdp.meshes import random_seed
from smp.local_shards import local_tensor
from smp.log import get_logger
from smp.mesh import served_device_type
from smp.models.init_rules import InitRule
from smp.models.meta_model import init_rules
from smp.models.registry import tie_on_meta
from smp.parallel.optimizers import local_part

_logger = get_logger("smp.fsdp")


def _device() -> torch.device:
    if dist.is_initialized() and served_device_type() == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _unwritten(tensor: torch.Tensor) -> float | int | bool | None:
    """Return a value that no initialisation leaves, or None for a dtype without one."""
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return float("nan")
    # The least unsigned number is 0, which many an initialisation leaves.
    return torch.iinfo(tensor.dtype).min if tensor.dtype.is_signed and tensor.dtype != torch.bool else None


class DelayedParamIniter:
    """Source of FSDP's ``param_init_fn`` and ``post_param_init_fn`` for a model on the meta device.

    Every module's values are a function of the seed and its name, so they are the same at any layout. The seed is the
    ``random_seed`` of :func:`smp.init`; without one it is that of ``torch.manual_seed``: smp's FSDP takes the first
    rank's on all ranks, and with torch's own a script calls it with the same number on every rank.
    Causal language models of Hugging Face start as in :mod:`smp.delayed_init`, other models by their own
    ``_init_weights(module)``, else by their modules' ``reset_parameters()``.

    Args:
        model: on the meta device, or in part.
        init_method_using_config: called with a module whose own parameters and buffers are allocated, to fill them;
            instead of the model's own way.
        verbose: log every module.
        seed: of the values; None: as above.
    """

    def __init__(
        self,
        model: nn.Module,
        init_method_using_config: Callable[[nn.Module], None] | None = None,
        verbose: bool = False,
        *,
        seed: int | None = None,
    ):
        tie_on_meta(model)  # which FSDP would do later: what is tied is drawn once, by its first name
        self._model, self._method, self._verbose = model, init_method_using_config, verbose
        self._given = random_seed() if seed is None else seed
        self._seed = torch.initial_seed() if self._given is None else self._given
        self._names = {module: name for name, module in model.named_modules()}
        self._count = sum(parameter.numel() for parameter in model.parameters())
        # A tied parameter is filled where it is found first; FSDP shares it with the others.
        self._filled_elsewhere: set[tuple[nn.Module, str]] = set()
        seen: set[nn.Parameter] = set()
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                if parameter in seen:
                    self._filled_elsewhere.add((module, name))
                seen.add(parameter)

    def share_seed(self, groups: Iterable[dist.ProcessGroup], device: torch.device) -> None:
        """Take the first rank's seed, unless one was given or taken before; collective.

        Args:
            groups: along every axis of the mesh that the model is on.
        """
        if self._given is None:
            self._given = self._seed = first_ranks_seed(groups, device)

    def count_num_params(self) -> int:
        """Return the number of elements of all parameters, tied ones once."""
        return self._count

    def get_param_init_fn(self) -> Callable[[nn.Module], None]:
        """Return FSDP's ``param_init_fn``: it allocates and fills a module's own parameters and buffers."""
        return self._initialize

    def get_post_param_init_fn(self) -> Callable[[nn.Module], None]:
        """Return FSDP's ``post_param_init_fn``. It does nothing: FSDP itself keeps ties."""
        return lambda module: None

    @contextlib.contextmanager
    def validate_params_and_buffers_inited(self, enabled: bool = True) -> Iterator[None]:
        """Check at the end that nothing of the model is on the meta device.

        Raises:
            UserError: a parameter or buffer is; the text names it.
        """
        yield
        left = [n for n, t in (*self._model.named_parameters(), *self._model.named_buffers()) if t.is_meta]
        if enabled and left:
            raise UserError(
                f"{left[0]} is still on the meta device, and {len(left) - 1} others: give FSDP this object's "
                f"get_param_init_fn() as param_init_fn"
            )

    @torch.no_grad()
    def _initialize(self, module: nn.Module) -> None:
        missing = {
            own: t for own, t in own_tensors(module) if t.is_meta and (module, own) not in self._filled_elsewhere
        }
        if not missing:
            return
        if module not in self._names:
            raise UserError(
                f"a {type(module).__name__} is not of the model that DelayedParamIniter was made for: make it of the "
                f"same model that FSDP wraps"
            )
        name, device = self._names[module], _device()
        for own, tensor in missing.items():
            real = torch.empty_like(tensor, device=device)
            if (mark := _unwritten(real)) is not None:
                real.fill_(mark)
            if isinstance(tensor, nn.Parameter):
                module._parameters[own] = nn.Parameter(real, requires_grad=tensor.requires_grad)
            else:
                module._buffers[own] = real
        self._fill(module, list(missing), name, device)
        for own in missing:
            self._check_written(f"{name}.{own}" if name else own, getattr(module, own))
        if self._verbose:
            _logger.info("initialised %s: %s", name or "the model", ", ".join(sorted(missing)))

    def _check_written(self, name: str, tensor: torch.Tensor) -> None:
        local = local_tensor(tensor)
        mark = _unwritten(local)
        if mark is not None and bool((local.isnan() if math.isnan(mark) else local == mark).any()):
            raise UserError(
                f"{name} was on the meta device, and the model's own initialisation does not fill it: give "
                f"DelayedParamIniter an init_method_using_config that does, or build the model with real buffers"
            )

    def _fill(self, module: nn.Module, missing: list[str], name: str, device: torch.device) -> None:
        names = {own: f"{name}.{own}" if name else own for own in missing}
        if self._method is None and (rules := self._rules_of(module, names)) is not None:
            for own, rule in rules.items():
                initialize_parameter_(getattr(module, own), rule, seed=self._seed, name=names[own])
            return
        # Each rank has the same generator: what is split is drawn in full, and a rank keeps its part.
        split = {own: tensor for own in missing if isinstance(tensor := getattr(module, own), DTensor)}
        for own, tensor in split.items():
            full = torch.full(tensor.shape, float("nan"), dtype=tensor.dtype, device=device)
            module._parameters[own] = nn.Parameter(full, requires_grad=tensor.requires_grad)
        self._draw(module, name, device)
        for own, tensor in split.items():
            tensor.copy_(local_part(getattr(module, own), tensor))
            module._parameters[own] = tensor  # type: ignore[assignment]

    def _draw(self, module: nn.Module, name: str, device: torch.device) -> None:
        """Fill a module by the function that was given, or by the model's or the module's own way."""
        digest = hashlib.blake2b(f"{self._seed}:{name}".encode(), digest_size=8).digest()
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(int.from_bytes(digest, "little") >> 1)
            if self._method is not None:
                self._method(module)
            elif callable(own_way := getattr(self._model, "_init_weights", None)):
                own_way(module)
            elif callable(reset := getattr(module, "reset_parameters", None)):
                reset()
            else:
                raise UserError(
                    f"a {type(module).__name__} has no reset_parameters(), and the model no _init_weights(module): "
                    f"give DelayedParamIniter an init_method_using_config"
                )

    @functools.cached_property
    def _rules(self) -> Callable[[str], InitRule] | None:
        config: Any = getattr(self._model, "config", None)
        try:
            return init_rules(config, seed=self._seed) if hasattr(config, "model_type") else None
        except UserError:  # no causal language model of transformers
            return None

    def _rules_of(self, module: nn.Module, names: dict[str, str]) -> dict[str, InitRule] | None:
        """Return the rules of a module's parameters, if there are; a module with buffers fills them by itself."""
        if next(module.buffers(recurse=False), None) is not None or self._rules is None:
            return None
        try:
            return {own: self._rules(name) for own, name in names.items()}
        except UserError:
            return None
