"""Names of a model's parameters and buffers, and those in its files, both ways, as transformers renames them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from smp.errors import UserError

# Buffers that older files hold and no model reads: frequencies and positions, and masks of causal attention.
_OLD_BUFFERS = (
    r"(^|\.)rotary_emb\.(original_)?inv_freq$",
    r"(^|\.)position_ids$",
    r"(^|\.)(self_)?(attn|attention)\.(bias|masked_bias|causal_mask)$",
)

# Put into the names of modules by wrappers, whose own hooks take it out of the keys of a state dict.
_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.", "_fsdp_wrapped_module.")


def clean_name(name: str) -> str:
    """Return a name of the model itself, without those of wrappers."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def parameters_of(model: nn.Module, *, remove_duplicate: bool = True) -> dict[str, nn.Parameter]:
    """Return a model's parameters by its own names, also where ``torch.compile`` or recomputation wraps its blocks."""
    return {clean_name(name): p for name, p in model.named_parameters(remove_duplicate=remove_duplicate)}


def buffers_of(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield those that a state dict would hold, by name; complex ones as real numbers, of which a last axis has two."""
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                real = torch.view_as_real(buffer) if buffer.is_complex() else buffer
                yield clean_name(f"{prefix}.{name}" if prefix else name), real


@dataclasses.dataclass(frozen=True)
class Rename:
    """Replacement of the first match of a regular expression in a key.

    Attributes:
        pattern: what is searched for.
        replacement: what takes its place, as for ``re.sub``.
        prefixes: a key is renamed behind the first of these that it begins with; without any of them it stays.
    """

    pattern: str
    replacement: str
    prefixes: tuple[str, ...] = ("",)

    def __call__(self, key: str) -> str:
        """Return the new key."""
        for prefix in self.prefixes:
            if key.startswith(prefix):
                return prefix + re.sub(self.pattern, self.replacement, key.removeprefix(prefix), count=1)
        return key


@dataclasses.dataclass(frozen=True)
class FileNames:
    """How an architecture's files name its parameters.

    Attributes:
        to_module: applied to a key in a file, one after the other.
        to_file: applied to a parameter name.
        unused: regular expressions of keys that files may have and the model does not.
        problem: why files cannot be read and written one parameter at a time; empty: they can.
    """

    to_module: tuple[Rename, ...] = ()
    to_file: tuple[Rename, ...] = ()
    unused: tuple[str, ...] = _OLD_BUFFERS
    problem: str = ""

    def module_key(self, file_key: str) -> str:
        """Return the parameter name of a key in a file."""
        for rename in self.to_module:
            file_key = rename(file_key)
        return file_key

    def file_key(self, module_key: str) -> str:
        """Return the key in a file of a parameter name."""
        for rename in self.to_file:
            module_key = rename(module_key)
        return module_key

    def ignored(self, file_key: str) -> bool:
        """Return True for a key that is skipped where the model has no such parameter."""
        return any(re.search(pattern, file_key) for pattern in self.unused)

    def check(self, what: object, advice: str) -> None:
        """Check that names are all that differs between files and model.

        Args:
            what: begins the sentence: the files, or the setting that asks for them.

        Raises:
            UserError: they are not.
        """
        if self.problem:
            raise UserError(f"{what}: {self.problem}: {advice}")


def _rename(transform: Any) -> Rename:
    """Return a renaming of transformers as data."""
    pattern, replacement = transform.compiled_sources.pattern, transform.target_patterns[0]
    if len(transform.source_patterns) == 1:  # several are named groups, and their replacement refers to none
        pattern = pattern.removeprefix("(?P<g0>").removesuffix(")")
    prefixes = [""]
    if transform.scope_prefix is not None:
        scope, base = (f"{part}." if part else "" for part in (transform.scope_prefix, transform.base_model_prefix))
        prefixes = [base + scope, scope]
    return Rename(pattern, replacement, tuple(prefixes))


def _problem(parameters: list[str], operations: list[Any], names: FileNames) -> str:
    """Return what is in the way of names alone."""
    for operation in operations:
        if any(operation.rename_source_key(name)[1] is not None for name in parameters):
            part = operation.source_patterns[0].replace("\\", "").strip(".^")
            return f"the architecture's files store {part} joined or split, in another form than the model"
    for name in parameters:
        key = names.file_key(name)
        if names.module_key(key) != name:
            return f"the architecture's files name {name} {key}, which is read as {names.module_key(key)}"
    return ""


def file_names_of(model: Any) -> FileNames:
    """Return how the files of ``model``'s architecture name its parameters.

    Args:
        model: a ``PreTrainedModel``, on any device; its values are not read.
    """
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping, get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange, WeightRenaming

    plain = (WeightRenaming, PrefixChange)
    parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    reading = get_model_conversion_mapping(model, add_legacy=False)
    # A prefix that only some files have is taken off, and never written.
    writing = [t.reverse_transform() for t in reversed(reading) if not isinstance(t, PrefixChange)]
    for old in get_checkpoint_conversion_mapping("legacy"):
        if any(old.reverse_transform().rename_source_key(name)[1] for name in parameters):
            reading.append(old)
    names = FileNames(
        to_module=tuple(_rename(transform) for transform in reading if type(transform) in plain),
        to_file=tuple(_rename(transform) for transform in writing if type(transform) in plain),
        unused=(*_OLD_BUFFERS, *sorted(model._keys_to_ignore_on_load_unexpected or ())),
    )
    operations = [transform for transform in writing if type(transform) not in plain]
    return dataclasses.replace(names, problem=_problem(parameters, operations, names))
