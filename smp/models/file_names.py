"""Names of a model's parameters and buffers, and those in its files, both ways, as transformers renames them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from smp.errors import UserError
from smp.models.file_keys import Conversion, FileKey, one_tensor

# Buffers that older files hold and no model reads: frequencies and positions, and masks of causal attention.
_OLD_BUFFERS = (
    r"(^|\.)rotary_emb\.(original_)?inv_freq$",
    r"(^|\.)position_ids$",
    r"(^|\.)(self_)?(attn|attention)\.(bias|masked_bias|causal_mask)$",
)

# In transformers' patterns of keys that it skips: layers of multi-token prediction, by that name or by their number,
# which is that of a layer of a larger model, too.
_PREDICTS = r"mtp|layers\\\.\d+"

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
        passed: those of keys that are no parameters of the model, and that an export has as the files have them.
        conversions: parameters that are not one tensor of the files each; the first that knows a name counts.
        by_shape: those that only files have whose tensors are of another shape than the parameters.
        problem: why files cannot be read and written one parameter at a time; empty: they can.
    """

    to_module: tuple[Rename, ...] = ()
    to_file: tuple[Rename, ...] = ()
    unused: tuple[str, ...] = _OLD_BUFFERS
    passed: tuple[str, ...] = ()
    conversions: tuple[Conversion, ...] = ()
    by_shape: tuple[Conversion, ...] = ()
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

    def module_keys(self, name: str, shape: Sequence[int]) -> list[FileKey]:
        """Return the tensors of the files that a parameter is made of, under the names that their keys are read as."""
        rows = (conversion.keys(name, shape) for conversion in self.conversions)
        return next(filter(None, rows), None) or [one_tensor(name, shape)]

    def keys(self, name: str, shape: Sequence[int]) -> list[FileKey]:
        """Return the tensors of the files that a parameter is made of.

        Args:
            name: of the parameter.
            shape: of all of it.
        """
        return [row._replace(key=self.file_key(row.key)) for row in self.module_keys(name, shape)]

    def ignored(self, file_key: str) -> bool:
        """Return True for a key that is skipped where the model has no such parameter."""
        return any(re.search(pattern, file_key) for pattern in (*self.unused, *self.passed))

    @property
    def has_passed(self) -> bool:
        """Whether files may have keys that an export has as they are."""
        return bool(self.passed)

    def passes(self, file_key: str) -> bool:
        """Return True for a key that an export has as the files have it."""
        return any(re.search(pattern, file_key) for pattern in self.passed)

    def check(self, what: object, advice: str, *, names_alone: bool = False) -> None:
        """Check that files can be read and written one parameter at a time.

        Args:
            what: begins the sentence: the files, or the setting that asks for them.
            names_alone: whether each parameter must be one tensor, as it is.

        Raises:
            UserError: they cannot.
        """
        problem = self.problem
        if names_alone and self.conversions:
            problem = _otherwise_stored(self.conversions[0].files[0])
        if problem:
            raise UserError(f"{what}: {problem}: {advice}")


def _otherwise_stored(key: str) -> str:
    return f"the architecture's files store {key} joined or split, in another form than the model"


def _rename(transform: Any) -> Rename:
    """Return a renaming of transformers as data."""
    pattern, replacement = transform.compiled_sources.pattern, transform.target_patterns[0]
    if len(transform.source_patterns) == 1:  # several are named groups, and their replacement refers to none
        pattern = pattern.removeprefix("(?P<g0>").removesuffix(")")
    return Rename(pattern, replacement, _prefixes(transform))


def _prefixes(transform: Any) -> tuple[str, ...]:
    if transform.scope_prefix is None:
        return ("",)
    scope, base = (f"{part}." if part else "" for part in (transform.scope_prefix, transform.base_model_prefix))
    return base + scope, scope


def _conversion(transform: Any) -> Conversion | None:
    """Return a conversion of transformers as data; None: it does more.

    ``Concatenate`` alone is left out: it says nothing of the widths of what it joins, and those of OLMo Hybrid differ,
    while transformers writes equal ones. Experts' are equal, as they are multiplied with each other.
    """
    operations: list[Any] = list(getattr(transform, "operations", ()))
    steps = [type(step).__name__ for step in operations]
    files, parameters = (
        tuple(re.sub(r"^\^|\\(?=\.)", "", pattern) for pattern in patterns)
        for patterns in (transform._original_source_patterns, transform._original_target_patterns)
    )
    is_literal = all(re.fullmatch(r"[\w.*]+", pattern) for pattern in (*files, *parameters))
    by_config = any(getattr(step, "num_shards_attribute", None) for step in operations)
    if not steps or not is_literal or by_config:
        return None
    made, first, last = Conversion(files, parameters, prefixes=_prefixes(transform)), operations[0], operations[-1]
    if steps in (["MergeModulelist"], ["MergeModulelist", "Concatenate"]) and first.dim == 0:
        return dataclasses.replace(made, axis=last.dim)
    if steps == ["Chunk"]:
        return dataclasses.replace(made, axis=last.dim)
    if steps == ["Transpose"]:
        return dataclasses.replace(made, transposed=(last.dim0, last.dim1))
    return None


def _problem(parameters: dict[str, torch.Size], operations: list[Any], names: FileNames) -> str:
    """Return what is in the way of reading and writing the files one parameter at a time."""
    for operation in operations:
        if any(operation.rename_source_key(name)[1] is not None for name in parameters):
            part = operation.source_patterns[0].replace("\\", "").strip(".^")
            return _otherwise_stored(part)
    for name in (row.key for own, shape in parameters.items() for row in names.module_keys(own, shape)):
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
    parameters = {name: parameter.shape for name, parameter in model.named_parameters(remove_duplicate=False)}
    reading = get_model_conversion_mapping(model, add_legacy=False)
    # A prefix that only some files have is taken off, and never written.
    writing = [t for t in reversed(reading) if not isinstance(t, PrefixChange)]
    for old in get_checkpoint_conversion_mapping("legacy"):
        if any(old.reverse_transform().rename_source_key(name)[1] for name in parameters):
            reading.append(old)
    converters = {t: _conversion(t) for t in writing if type(t) not in plain}
    known = {t: each for t, each in converters.items() if each and any(each.keys(*item) for item in parameters.items())}
    by_shape = tuple(
        e for t, e in known.items() if any(getattr(o, "check_dims", 0) for o in getattr(t, "operations", ()))
    )
    ignored = sorted(model._keys_to_ignore_on_load_unexpected or ())
    passed = tuple(p for p in ignored if re.search(_PREDICTS, p) and not any(re.search(p, name) for name in parameters))
    names = FileNames(
        to_module=tuple(_rename(transform) for transform in reading if type(transform) in plain),
        to_file=tuple(_rename(transform.reverse_transform()) for transform in writing if type(transform) in plain),
        unused=(*_OLD_BUFFERS, *ignored),
        passed=passed,
        conversions=tuple(each for each in known.values() if each not in by_shape),
        by_shape=by_shape,
    )
    rest = [transform.reverse_transform() for transform, each in converters.items() if each is None]
    return dataclasses.replace(names, problem=_problem(parameters, rest, names))
