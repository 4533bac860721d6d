"""SMP v2's mixtures of experts: what ``transform`` is given about them, and the class of their layers."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from smp.errors import UserError, a_type
from smp.log import get_logger
from smp.mesh import Mesh
from smp.models.experts import expert_modules, is_experts
from smp.parallel import experts
from smp.parallel.experts.config import ExpertsConfig
from smp.parallel.sharding import averages_gradients, fsdp_modules
from smp.parallel.technique import Setup

_BALANCES = ("sinkhorn", "balanced", "aux_loss", "none")
_ADDS, _SETTINGS = "_smp_adds_losses", "_smp_moe_settings"  # attributes of a model
_logger = get_logger(__name__)


@dataclasses.dataclass(frozen=True)
class MoEConfig:
    """How SMP v2 trains a mixture of experts, with its defaults: the ``config`` of :func:`smp.transform`.

    Attributes:
        smp_moe: False: the router of transformers alone, whatever the rest says.
        random_seed: no effect: initial values are drawn by the ``random_seed`` of ``init``, at any layout alike.
        moe_load_balancing: ``sinkhorn``, ``balanced``, ``aux_loss`` or ``none``.
        global_token_shuffle: only False.
        moe_all_to_all_dispatcher: only True.
        moe_aux_loss_coeff: factor of the loss of ``aux_loss``.
        moe_z_loss_coeff: factor of the z-loss of routers.
        use_cpu_initialization: no effect: values do not depend on the device.
    """

    smp_moe: bool = True
    random_seed: int = 12345
    moe_load_balancing: str = "sinkhorn"
    global_token_shuffle: bool = False
    moe_all_to_all_dispatcher: bool = True
    moe_aux_loss_coeff: float = 0.001
    moe_z_loss_coeff: float = 0.001
    use_cpu_initialization: bool = False


def moe_settings(config: MoEConfig) -> dict[str, Any]:
    """Return the settings that a ``MoEConfig`` makes, by the names of flags.

    Raises:
        UserError: a value asks for what is not here.
    """
    found = []
    if config.moe_load_balancing not in _BALANCES:
        found.append(f"moe_load_balancing {config.moe_load_balancing!r} is not allowed: give {', '.join(_BALANCES)}")
    if config.global_token_shuffle:
        found.append(
            "global_token_shuffle True is not available: shuffled tokens would give a router other sequences at every "
            "layout; leave it at False"
        )
    if not config.moe_all_to_all_dispatcher:
        found.append(
            "moe_all_to_all_dispatcher False is not available: an all-to-all is how tokens reach their experts, and "
            "none is dropped; leave it at True"
        )
    for name in ("moe_aux_loss_coeff", "moe_z_loss_coeff"):
        value = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
            found.append(f"{name} {value!r} is not allowed: give a number of at least 0")
    if found:
        raise UserError(f"smp.MoEConfig: {'; '.join(found)}")
    if not config.smp_moe:
        return {}
    settings = {"moe_load_balancing": config.moe_load_balancing, "moe_z_loss_coeff": config.moe_z_loss_coeff}
    if config.moe_load_balancing == "aux_loss":
        settings["moe_aux_loss_coeff"] = config.moe_aux_loss_coeff
    return settings


def read_moe_config(model: nn.Module, config: object) -> dict[str, Any]:
    """Return the settings of the ``config`` of :func:`smp.transform`, and note them on the model.

    Raises:
        UserError: it is none, the model has no experts, or a value asks for what is not here.
    """
    if not isinstance(config, MoEConfig):
        raise UserError(f"smp.transform: config is {a_type(config)}: give smp.MoEConfig(...), or leave it out")
    if not expert_modules(model):
        raise UserError(
            f"smp.transform: config is for mixtures of experts, and the {type(model).__name__} is none: leave it out"
        )
    settings = moe_settings(config)
    if config.random_seed != MoEConfig.random_seed:
        _logger.info("MoEConfig: random_seed has no effect: initial values are drawn by the random_seed of smp.init")
    setattr(model, _SETTINGS, settings)
    return settings


def script_balance(model: nn.Module) -> ExpertsConfig:
    """Return how the experts of a script's model are balanced, by the ``MoEConfig`` that was given for it."""
    return ExpertsConfig(**{"moe_load_balancing": "none", **getattr(model, _SETTINGS, {})})


def add_losses(model: nn.Module, setup: Setup) -> None:
    """Let a model's forward add the losses of its balance to the loss that it returns, once."""
    if setup.settings[ExpertsConfig].adds_loss and not hasattr(model, _ADDS):
        setattr(model, _ADDS, True)
        model.register_forward_hook(functools.partial(_add_losses, setup), with_kwargs=True)


def _add_losses(setup: Setup, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    extra = experts.extra_loss(model, setup)
    if extra is None:  # no forward of training
        return
    if any(fsdp_modules(model)) and not averages_gradients(model):
        _warn_once("gradient_reduction sum, whose loss the script divides by all tokens: give smp.parallelize mean")
        return
    if getattr(output, "loss", None) is None:
        _warn_once("no loss in the model's output: give the model labels")
        return
    given = (*args, kwargs.get("input_ids"), kwargs.get("inputs_embeds"))
    inputs = next(each for each in given if isinstance(each, torch.Tensor))
    shown, tp = extra.detach().clone(), setup.mesh.tp
    if tp.size > 1:  # whose ranks have parts of the tokens, and the same loss
        dist.all_reduce(shown, group=tp.group)
    # A mean over this rank's tokens, as the loss is: its gradients are averaged over ranks.
    output["loss"] = output.loss + (extra + (shown - extra.detach())) / inputs.shape[:2].numel()


@functools.cache
def _warn_once(why: str) -> None:
    _logger.warning("MoEConfig: moe_load_balancing aux_loss and moe_z_loss_coeff have no effect with %s", why)


def sharding_advice(mesh: Mesh) -> str | None:
    """Return how to have SMP v2's memory for experts, which it shards over the expert-parallel ranks as well.

    None: experts are not split, or SMP v2 would take more ranks than there are.
    """
    degree, shard = mesh.degree("ep"), mesh.shard.size
    if degree == 1 or mesh.replicas.size % degree:
        return None
    return (
        f"expert_parallel_degree {degree} is folded over the {shard} ranks of a sharding group; SMP v2 shards experts "
        f"over {shard} x {degree}: hybrid_shard_degree {shard * degree} gives its memory"
    )


def tell_of_sharding(mesh: Mesh) -> None:
    """Log :func:`sharding_advice`, if there is any."""
    if advice := sharding_advice(mesh):
        _logger.info(advice)


class _Layers(type):
    def __instancecheck__(cls, module: object) -> bool:
        return isinstance(module, nn.Module) and any(map(is_experts, module.children()))


class MoELayer(nn.Module, metaclass=_Layers):
    """What a layer with a router and experts of transformers is an instance of, for wrapping and recomputation."""

    def __new__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse to be built.

        Raises:
            UserError: always.
        """
        raise UserError("MoELayer cannot be built: build the model of transformers, whose layers it stands for")
