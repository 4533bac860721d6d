"""What surrounds each replacement of a model's parameters: ties before it, and optimizers, which continue with them."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from smp.models.registry import tie_on_meta


def local_part(full: torch.Tensor, like: DTensor) -> DTensor:
    """Return this rank's shard of a full tensor that every rank has, with ``like``'s placements; not collective.

    Args:
        full: of ``like``'s shape, on any device.
        like: a sharded parameter.
    """
    part = distribute_tensor(full.detach().contiguous(), like.device_mesh, like.placements, src_data_rank=None)
    return part.to(like.to_local().device)  # type: ignore[return-value]


def part_to_load(value: Any, parameter: nn.Parameter) -> Any:
    """Return what is to be copied into a parameter, or kept beside it: of a full tensor of its shape this rank's shard.

    What is no tensor or does not fit ``load_state_dict`` refuses itself; a DTensor it places.
    """
    full = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
    if full and isinstance(parameter, DTensor) and value.size() == parameter.shape:
        return local_part(value, parameter)
    return value


@contextlib.contextmanager
def following_optimizers(*models: nn.Module) -> Iterator[None]:
    """Give optimizers the parameters by which those of ``models`` are replaced inside, and their state the shards.

    Before, parameters on the meta device are tied as the models' configs say: all that shards a model comes by here.
    """
    for model in models:
        tie_on_meta(model)
    before = [
        (module, name, weakref.ref(parameter))  # it is freed with its replacement
        for model in models
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
    ]
    yield
    replace_parameters((old, module._parameters.get(name)) for module, name, old in before)


def replace_parameters(pairs: Iterable[tuple[weakref.ref[nn.Parameter], nn.Parameter | None]]) -> None:
    """Replace parameters in every optimizer of this process; pairs are (old, new)."""
    replaced = {old: new for ref, new in pairs if (old := ref()) is not None and new is not None and new is not old}
    if not replaced:  # the usual case, as the model alone references them: spare a look at all objects
        return
    for optimizer in gc.get_objects():
        if not issubclass(type(optimizer), torch.optim.Optimizer):  # isinstance may run a proxy's code
            continue
        for group in getattr(optimizer, "param_groups", None) or ():  # it may be about to be made
            group["params"][:] = [replaced.get(parameter, parameter) for parameter in group["params"]]
        for old in replaced.keys() & optimizer.state.keys():
            values, new = optimizer.state.pop(old), replaced[old]
            optimizer.state[new] = {key: part_to_load(value, new) for key, value in values.items()}
