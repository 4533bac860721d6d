"""The text model in a directory of a larger one: its config, and its parameters' names in that directory's files."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from smp.errors import UserError, one_line
from smp.json_input import read_object
from smp.models.family import Family
from smp.models.file_keys import Conversion, FileKey
from smp.models.file_names import FileNames, Rename, file_names_of
from smp.models.registry import family_of
from smp.models.stored_weights import open_weights
from smp.models.weight_files import directory_of, weight_map

PART_OF = "smp_part_of"  # of a text model's config: the type of the larger model that it was found in
# Text models without a causal language model in transformers: the type of one that computes the same of text, and what
# the config lacks of its values. The three positions of M-RoPE (Qwen2-VL, arXiv 2409.12191) are equal there, as RoPE's.
_SAME_ON_TEXT: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2_vl_text": ("qwen2", {}),
    "qwen2_5_vl_text": ("qwen2", {}),
    "qwen3_vl_text": ("qwen3", {}),
    "qwen3_vl_moe_text": ("qwen3_moe", {"norm_topk_prob": True}),
}
_OF_IMAGES = ("mrope_section", "mrope_interleaved")  # of rope_parameters
_OLD_ROPE = ("rope_scaling", "rope_theta", "rope_local_base_freq")  # of older files, in the place of rope_parameters
# Of a config that is not written: of training, and of who has written it.
_NOT_WRITTEN = {
    PART_OF,
    "use_cache",
    "architectures",
    "dtype",
    "transformers_version",
    "_name_or_path",
    "tie_word_embeddings",
}


@dataclasses.dataclass(frozen=True)
class PartNames(FileNames):
    """How the files of a larger model name the parameters of its text model.

    Attributes:
        whole: of all parameters of the larger model.
        inside: the names there of the text model's begin with one of these.
        forward: from names of the text model to those of the larger one.
        back: the other way round.
        beside: last parts of the names of modules that are not of the text model.
    """

    whole: FileNames = dataclasses.field(default_factory=FileNames)
    inside: tuple[str, ...] = ()
    forward: tuple[Rename, ...] = ()
    back: tuple[Rename, ...] = ()
    beside: frozenset[str] = frozenset()

    @property
    def has_passed(self) -> bool:
        """True: what is not of the text model."""
        return True

    def passes(self, file_key: str) -> bool:
        """Return True for what is not of the text model; an export has it as the files have it."""
        return not self.whole.module_key(file_key).startswith(self.inside)

    def in_whole(self, name: str) -> str:
        """Return the name in the larger model of a module or parameter of the text model."""
        for rename in self.forward:
            name = rename(name)
        return name

    def ignored(self, file_key: str) -> bool:
        """Return True for a key that is skipped where the text model has no such parameter."""
        return self.passes(file_key) or super().ignored(file_key)


def is_whole(known: type, content: Mapping[str, Any]) -> bool:
    """Return whether a config.json, of the class ``known``, describes several parts, one of which is a text model."""
    return "text_config" in content or "text_config" in getattr(known, "sub_configs", {})


def text_config(where: object, whole: Any) -> Any:
    """Return the config of the text model, given the larger one's.

    Raises:
        UserError: transformers has no causal language model for it.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    found = _causal(copy.deepcopy(whole.get_text_config(decoder=True)))
    if found is whole or type(found) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UserError(
            f"{where} describes a model of several parts, and transformers has no causal language model for its text "
            f"part ({getattr(found, 'model_type', 'none')!r}), which is what is trained here: give another model"
        )
    # The larger model's word decides.
    found.tie_word_embeddings = getattr(whole, "tie_word_embeddings", getattr(found, "tie_word_embeddings", False))
    found._name_or_path = whole._name_or_path
    setattr(found, PART_OF, whole.model_type)
    if found.dtype is None:
        found.dtype = whole.dtype
    return found


def _causal(found: Any) -> Any:
    """Return the config of a causal language model that computes the same of text, where there is another."""
    from transformers import CONFIG_MAPPING

    if found.model_type not in _SAME_ON_TEXT:
        return found
    kind, values = _SAME_ON_TEXT[found.model_type]
    known = CONFIG_MAPPING[kind]
    read = {field.name for field in dataclasses.fields(type(found))} | {"bos_token_id", "eos_token_id"}
    read &= {field.name for field in dataclasses.fields(known)}
    values = {name: getattr(found, name, None) for name in read} | values
    rope = values["rope_parameters"]
    return known(**values | {"rope_parameters": {key: rope[key] for key in rope if key not in _OF_IMAGES}})


def require_whole(hf_config: Any, content: dict[str, Any] | None, weights: object) -> None:
    """Refuse to write a text model whose larger model is not there, given :func:`content_of_whole` of its weights.

    Raises:
        UserError: saying what can be done.
    """
    kind = getattr(hf_config, PART_OF, None)
    if content is None and weights is not None and kind is not None:
        raise UserError(
            f"the model was found in a {kind} model, whose config.json is not at {weights}: bring that directory back, "
            f"or write the text model alone (export_hf's text_only, --export_text_only 1, smp export --text_only)"
        )


def language_config(where: object, config: Any) -> Any:
    """Return the config of a language model: itself, or that of its text model; raises as :func:`text_config`."""
    return text_config(where, config) if is_whole(type(config), config.to_dict()) else config


def content_of_whole(weights: Path | None) -> dict[str, Any] | None:
    """Return the config.json beside weights, if it is of a larger model than a language model."""
    from transformers import CONFIG_MAPPING

    directory = directory_of(weights)
    if directory is None or not (directory / "config.json").is_file():
        return None
    try:
        content = read_object(directory / "config.json")
    except (OSError, ValueError):  # which is said where it is read as a config
        return None
    name = content.get("model_type")
    known = CONFIG_MAPPING[name] if isinstance(name, str) and name in CONFIG_MAPPING else None
    return content if known is not None and is_whole(known, content) else None


def names_in(weights: Path | None, family: Family) -> FileNames:
    """Return how files name the parameters of a model of a family, which may be the text model of what they are of.

    Args:
        weights: a file of theirs or their directory; None: the family's own.

    Raises:
        UserError: they are of a larger model that transformers does not build, or whose text model is another.
    """
    return names_by(content_of_whole(weights), family, weights)


def names_by(content: dict[str, Any] | None, family: Family, where: object) -> FileNames:
    """Return :func:`names_in`, given :func:`content_of_whole` of the weights ``where``."""
    if content is None:
        return family.file_names
    names, kind, by_shape = _names(json.dumps(content, sort_keys=True))
    if kind != family.hf_model_type:
        raise UserError(
            f"{where} is of a {content['model_type']} model, whose text model is of type {kind!r}, and the model is of "
            f"type {family.hf_model_type!r}: leave out what names another model"
        )
    found = tuple(conversion for conversion, row in by_shape if _has(Path(str(where)), row))
    return dataclasses.replace(names, conversions=names.conversions + found) if found else names


def _has(weights: Path, row: FileKey) -> bool:
    """Return whether a tensor of the files has the shape that a conversion expects."""
    file = weight_map(weights).get(row.key)
    if file is None:
        return False
    with open_weights(file) as content:
        return tuple(content.get_slice(row.key).get_shape()) == row.shape


def _config_of(content: dict[str, Any]) -> Any:
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING[content["model_type"]].from_dict(content)


@functools.lru_cache(maxsize=4)
def _names(content: str) -> tuple[PartNames, str, list[tuple[Conversion, FileKey]]]:
    """Return the names in a larger model's files, the type of its text model, and :func:`_by_shape`.

    Args:
        content: of its config.json.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    config = _config_of(json.loads(content))
    text = text_config("the larger model", config)
    family = family_of(text)
    try:
        with torch.device("meta"):
            whole = AutoModelForImageTextToText.from_config(config)
            own = AutoModelForCausalLM.from_config(text)
    except Exception as error:  # of any type: code of any model
        raise UserError(f"transformers builds no model of this {config.model_type} ({one_line(error)})") from error
    forward, back, inside = _prefixes(whole, own, family)
    names = file_names_of(whole)
    # A type that takes the place of the larger model's own text model may have its files in another form.
    of_text = family.file_names if config.get_text_config(decoder=True).model_type == text.model_type else names
    made = PartNames(
        to_module=(*names.to_module, *back), to_file=(*forward, *names.to_file), unused=names.unused,
        conversions=of_text.conversions, problem=of_text.problem, whole=names, inside=inside,
        forward=tuple(forward), back=tuple(back),
        beside=frozenset(n.rpartition(".")[2] for n, _ in whole.named_modules() if not f"{n}.".startswith(inside)),
    )  # fmt: skip
    return made, text.model_type, _by_shape(whole, names)


def _by_shape(whole: nn.Module, names: FileNames) -> list[tuple[Conversion, FileKey]]:
    """Return the conversions of files whose tensors are of another shape than the parameters, and a tensor of each."""
    shapes = {name: parameter.shape for name, parameter in whole.named_parameters()}
    found = []
    for conversion in names.by_shape:
        name, row = next((name, rows[0]) for name, shape in shapes.items() if (rows := conversion.keys(name, shape)))
        if row.shape != shapes[name]:  # or else transformers takes them as they are
            found.append((conversion, row._replace(key=names.file_key(row.key))))
    return found


def _prefixes(whole: nn.Module, own: nn.Module, family: Family) -> tuple[list[Rename], list[Rename], tuple[str, ...]]:
    """Return the renames of parameters to those of the larger model, back, and what these begin with there."""
    same = next((path for path, module in whole.named_modules() if type(module) is type(own)), None)
    if same is not None:  # such as Llama 4's, with its head
        pairs = [("", f"{same}.")]
    else:
        inner, head = whole.get_decoder(), whole.get_output_embeddings()  # type: ignore[operator]
        paths = {id(module): path for path, module in whole.named_modules()}
        pairs = [(f"{family.base}.", f"{paths[id(inner)]}."), (f"{family.head}.", f"{paths[id(head)]}.")]
    forward = [Rename(f"^{_literal(text)}", there) for text, there in pairs if text != there]
    back = [Rename(f"^{_literal(there)}", text) for text, there in pairs if text != there]
    return forward, back, tuple(there for _, there in pairs)


def _literal(text: str) -> str:
    return text.replace(".", r"\.")


def as_whole(content: dict[str, Any], text: Any) -> dict[str, Any]:
    """Return the config.json of a larger model, given what it was and the config of its text model as it is written.

    What training has changed of the text model's config is changed in it.
    """
    left_out = ("torch_dtype", "quantization_config")
    found = {key: value for key, value in content.items() if key not in left_out}
    nested = isinstance(found.get("text_config"), dict)  # Qwen2.5-VL's files have its values among the larger model's
    inner = {key: value for key, value in (found["text_config"] if nested else found).items() if key not in left_out}
    config = _config_of(content)
    before, after = (each.to_dict() for each in (text_config("it", config), text))
    changed = {key: value for key, value in after.items() if key not in _NOT_WRITTEN and before.get(key) != value}
    if "rope_parameters" in changed:
        inner = {key: value for key, value in inner.items() if key not in _OLD_ROPE}  # some of which would count first
        rope = config.get_text_config(decoder=True).rope_parameters
        changed["rope_parameters"] |= {key: rope[key] for key in _OF_IMAGES if key in rope}
    dtype = str(text.dtype).removeprefix("torch.")
    tied = bool(text.tie_word_embeddings)
    if tied != bool(getattr(config, "tie_word_embeddings", tied)) or "tie_word_embeddings" in inner:
        inner["tie_word_embeddings"] = found["tie_word_embeddings"] = tied
    changed |= {"dtype": dtype}
    return found | {"dtype": dtype, "text_config": inner | changed} if nested else inner | changed


def passed_beside(weights: Path) -> dict[str, Path]:
    """Return the files of a larger model beside its weights, config and tokenizer, by name: its processors'."""
    directory = directory_of(weights)
    assert directory is not None
    return {file.name: file for file in sorted(directory.glob("*processor*.json")) if file.is_file()}
