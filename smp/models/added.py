"""Parameters that a technique adds to a model, and parameters that stay as pretrained weights have them.

Both are recorded on the model, so that filling, saving and exporting it need to know no technique.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from smp.models.experts import fp32_routers
from smp.models.file_keys import FileKey
from smp.models.file_names import FileNames
from smp.models.full_digest import FullDigest
from smp.models.init_rules import InitRule
from smp.models.weight_files import digest_of

_RECORD = "_smp_parameters"
LOADED = "smp.load_pretrained"  # names pretrained weights among the files that a model's values came from


@dataclasses.dataclass(frozen=True)
class Apart:
    """A file beside the model's weights.

    Attributes:
        file: its name, of safetensors.
        beside: other files that belong to it: their texts by name.
        names: of parameters in it.
    """

    file: str
    beside: Mapping[str, str] = dataclasses.field(default_factory=dict)
    names: FileNames = FileNames()


@dataclasses.dataclass(frozen=True)
class AddedParameter:
    """A parameter that a technique adds.

    Tensor parallelism splits it as :class:`smp.parallel.linear.Product` says, if it is of a layer's product; otherwise
    it is replicated.

    Attributes:
        module: path of the module that gets it.
        name: in the module.
        shape: of all of it.
        initial: its initial values; without steps, zeros.
        apart: the file that it is exported to; None: that of the model.
    """

    module: str
    name: str
    shape: tuple[int, ...]
    initial: InitRule = InitRule()
    apart: Apart | None = None

    @property
    def path(self) -> str:
        """Qualified name in the model."""
        return f"{self.module}.{self.name}" if self.module else self.name

    @property
    def rows(self) -> list[FileKey]:
        """What the file that it is exported to has of it, if that is not the model's: a single tensor."""
        return (FileNames() if self.apart is None else self.apart.names).keys(self.path, self.shape)

    @property
    def key(self) -> str:
        """Its name in the file that it is exported to, if that is not the model's."""
        return self.rows[0].key


class Encoded(NamedTuple):
    """A frozen parameter that stands for a weight in another form.

    Attributes:
        kind: of the form, which two runs with one base must share.
        shape: of the weight.
        encode: makes the parameter, all of it, of all of the weight; the same on every rank.
        decode: makes the weight, fp32, of all of the parameter.
    """

    kind: str
    shape: tuple[int, ...]
    encode: Callable[[torch.Tensor], torch.Tensor]
    decode: Callable[[torch.Tensor], torch.Tensor]


class Base(NamedTuple):
    """Parameters that checkpoints and exports leave out: they are as the pretrained weights have them."""

    names: frozenset[str]
    digest: str  # of samples of the weights' bytes
    weights: str  # path, for messages
    full: FullDigest


@dataclasses.dataclass(frozen=True)
class _Record:
    """What the functions below have been told of a model.

    Attributes:
        added: by qualified name.
        trained: of the model itself, by qualified name.
        frozen: names of the model's parameters that are not trained; None: no technique has frozen it.
        base: the pretrained weights that frozen parameters are left as.
        encoded: by qualified name.
        files: that values came from, by what names them in messages.
    """

    added: Mapping[str, AddedParameter] = dataclasses.field(default_factory=dict)
    trained: Mapping[str, AddedParameter] = dataclasses.field(default_factory=dict)
    frozen: frozenset[str] | None = None
    base: Base | None = None
    encoded: Mapping[str, Encoded] = dataclasses.field(default_factory=dict)
    files: Mapping[str, pathlib.Path | str] = dataclasses.field(default_factory=dict)


def _of(model: nn.Module) -> _Record:
    return getattr(model, _RECORD, _Record())


def _note(model: nn.Module, **values: Any) -> None:
    setattr(model, _RECORD, dataclasses.replace(_of(model), **values))


def add_parameters(
    model: nn.Module, parameters: Iterable[AddedParameter], *, freezes: bool, trained: Iterable[AddedParameter] = ()
) -> None:
    """Register parameters, without values, in the dtype and on the device of the model's.

    Args:
        freezes: none of the model's others is trained.
        trained: of the model itself, that are trained though the others are frozen; with steps, they get initial values
            that are not the weights' own.
    """
    like, added = next(model.parameters()), dict(added_parameters(model))
    if freezes:
        own = {name: parameter for name, parameter in model.named_parameters() if name not in added}
        _note(model, frozen=frozenset(own))
        for parameter in own.values():
            parameter.requires_grad_(False)
    for each in parameters:
        values = torch.empty(each.shape, dtype=like.dtype, device=like.device)
        model.get_submodule(each.module).register_parameter(each.name, nn.Parameter(values))
        added[each.path] = each
    _note(model, added=added)
    if kept := {each.path: each for each in trained}:
        _note(model, trained=kept, frozen=(_of(model).frozen or frozenset()) - kept.keys())
        for name in kept:
            model.get_parameter(name).requires_grad_(True)


def added_parameters(model: nn.Module) -> Mapping[str, AddedParameter]:
    """Return the added parameters by qualified name."""
    return _of(model).added


def files_apart(parameters: Iterable[AddedParameter]) -> dict[str, dict[str, str]]:
    """Return the texts of the files beside each file that parameters are exported to, by names."""
    found: dict[str, dict[str, str]] = {}
    for each in parameters:
        if each.apart is not None:
            found.setdefault(each.apart.file, {}).update(each.apart.beside)
    return found


def trained_parameters(model: nn.Module) -> Mapping[str, AddedParameter]:
    """Return by qualified name the model's own parameters that are trained though the others are frozen."""
    return _of(model).trained


def is_frozen(model: nn.Module) -> bool:
    """Return whether a technique has frozen the model's own parameters."""
    return _of(model).frozen is not None


def narrow_frozen_(model: nn.Module, dtype: torch.dtype) -> None:
    """Keep what a technique has frozen, without values, in the dtype of the computation: no more is read of it."""
    wide = {id(parameter) for router in fp32_routers(model) for parameter in router.parameters()}
    frozen = [name for name in _of(model).frozen or () if id(model.get_parameter(name)) not in wide]
    narrow_(model, frozen, dtype)


def narrow_(model: nn.Module, names: Iterable[str], dtype: torch.dtype) -> None:
    """Replace parameters by ones of another dtype, without values."""
    narrow: dict[int, nn.Parameter] = {}  # a tied one once
    for name in names:
        parameter = model.get_parameter(name)
        values = torch.empty_like(parameter.detach(), dtype=dtype)  # a script may have split it
        narrow[id(parameter)] = nn.Parameter(values, requires_grad=parameter.requires_grad)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            module._parameters[name] = narrow.get(id(parameter), parameter)


def leave_out_frozen(model: nn.Module, weights: pathlib.Path) -> None:
    """Let checkpoints and exports leave out what is frozen, as it was loaded from ``weights``."""
    if is_frozen(model):
        kinds = sorted({f"{each.kind}-" for each in encoded_parameters(model).values()})
        digest = "".join([*kinds, digest_of(weights)])
        _note(model, base=Base(_of(model).frozen or frozenset(), digest, str(weights), FullDigest(weights)))


def left_out(model: nn.Module) -> frozenset[str]:
    """Return the names of the parameters that checkpoints and exports leave out: of pretrained weights, or encoded."""
    record = _of(model)
    if record.base is not None:
        return record.base.names
    return record.frozen if record.encoded and record.frozen else frozenset()


def remember_files(model: nn.Module, what: str, path: pathlib.Path | str) -> None:
    """Mark files that a model's values came from, which no export of it replaces; ``what`` names them in messages."""
    _note(model, files={**files_of(model), what: path})


def files_of(model: nn.Module) -> Mapping[str, pathlib.Path | str]:
    """Return what :func:`remember_files` was given."""
    return _of(model).files


def encode_parameter(model: nn.Module, name: str, how: Encoded) -> None:
    """Mark a frozen parameter that stands for a weight in another form."""
    _note(model, encoded={**encoded_parameters(model), name: how})


def encoded_parameters(model: nn.Module) -> Mapping[str, Encoded]:
    """Return by qualified name the parameters that stand for weights in another form."""
    return _of(model).encoded


def base_of(model: nn.Module) -> Base | None:
    """Return what checkpoints and exports leave out, if there is any."""
    return _of(model).base
