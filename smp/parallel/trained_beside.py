"""What is trained besides adapters: rows of the embedding and the head, and modules as they are; with peft's files."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from smp.config import Settings
from smp.errors import UserError
from smp.models.added import AddedParameter, Apart
from smp.models.family import Family
from smp.models.init_rules import InitRule
from smp.parallel.adapter_config import WEIGHTS, token_indices
from smp.parallel.adapter_files import GivenAdapter, base_of, names_beside
from smp.parallel.linear import is_transposed
from smp.parallel.lora_config import Config
from smp.parallel.technique import Parameters, Setup
from smp.parallel.token_rows import ROWS, train_rows_of_embedding, train_rows_of_head


def _is_tied(model: nn.Module, family: Family) -> bool:
    return model.get_submodule(family.head).weight is model.get_submodule(family.embedding).weight


def token_layers(model: nn.Module, family: Family, config: Config) -> dict[str, tuple[int, ...]]:
    """Return the tokens whose rows are trained, in order, by the path of the module that has the parameter.

    Of a module that is trained as it is, none.

    Raises:
        UserError: all rows are trained anyway; or an adapter has rows of another module, or others of a head than of
            the embedding that it is tied to.
    """
    if not config.lora_train_tokens:
        return {}
    found = _layers_of_file(family, config) if config.adapter_path is not None else _both_layers(family, config)
    if _is_tied(model, family):
        head = found.pop(family.head, ())
        if head and head != found.get(family.embedding):
            raise UserError(
                f"{config.adapter_path}: trainable_token_indices of {family.head} are not those of {family.embedding}, "
                f"to which it is tied: merge the adapter with peft's merge_and_unload"
            )
    return {path: ids for path, ids in found.items() if ids}


def _both_layers(family: Family, config: Config) -> dict[str, tuple[int, ...]]:
    saved = config.lora_modules_to_save
    paths = [p for p in (family.embedding, family.head) if not any(p.endswith(name) for name in saved)]
    if not paths:
        raise UserError(f"--lora_modules_to_save {' '.join(saved)} trains all rows: leave --lora_train_tokens out")
    return dict.fromkeys(paths, config.token_ids)


def _layers_of_file(family: Family, config: Config) -> dict[str, tuple[int, ...]]:
    folder, found = pathlib.Path(str(config.adapter_path)).expanduser(), {}
    for name, ids in token_indices(folder).items():
        path = next((p for p in (family.embedding, family.head) if name is None or p.endswith(name)), None)
        if path is None:
            raise UserError(
                f"{folder}: trainable_token_indices of {name}, and only {family.embedding} and {family.head} have rows "
                f"of tokens here: merge the adapter with peft's merge_and_unload"
            )
        found[path] = tuple(ids)
    return found


def saved_modules(model: nn.Module, family: Family, config: Config) -> dict[str, nn.Module]:
    """Return the modules that are trained as they are, by path, as peft finds ``modules_to_save``.

    Raises:
        UserError: a name is the end of none, or of one that is not trained so.
    """
    source = "--lora_modules_to_save" if config.adapter_path is None else f"{config.adapter_path}: modules_to_save"
    tied = {family.embedding, family.head} if _is_tied(model, family) else set()
    found: dict[str, nn.Module] = {}
    for name in config.lora_modules_to_save:
        own = {path: m for path, m in model.named_modules() if path.endswith(name) and list(m.parameters())}
        if not own or not name:
            raise UserError(f"{source} {name} is the end of no name of a module with parameters: give others")
        for path, module in own.items():
            inside = [f"{path}.{child}".rstrip(".") for child, m in module.named_modules() if _is_linear(m)]
            if path != family.head and any(each.startswith(f"{family.blocks}.") for each in inside):
                raise UserError(
                    f"{source} {name} has {path}, a linear layer of the blocks or a module with one, which gets an "
                    f"adapter instead: embedding, head and norms can be trained as they are"
                )
            if path in tied:
                raise UserError(
                    f"{source} {name} has {path}, and embedding and head are tied, of which peft would train a copy: "
                    f"use --lora_train_tokens for some tokens, or a base model that does not tie them"
                )
        found |= own
    return found


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or is_transposed(module)


def fields(model: nn.Module, family: Family, config: Config) -> dict[str, Any]:
    """Return what ``adapter_config.json`` says of it, as far as there is any."""
    found: dict[str, Any] = {}
    if tokens := token_layers(model, family, config):
        found["trainable_token_indices"] = {path: list(ids) for path, ids in tokens.items()}
        if _is_tied(model, family):  # a list is of the embedding and what is tied to it
            found["trainable_token_indices"] = list(tokens[family.embedding])
    if config.lora_modules_to_save:
        found["modules_to_save"] = list(config.lora_modules_to_save)
    return found


def problems_of(hf_config: Any, config: Config) -> list[str]:
    """Return tokens that the model does not have."""
    if not config.token_ids or config.token_ids[-1] < hf_config.vocab_size:
        return []
    return [
        f"--lora_train_tokens {config.token_ids[-1]} is not below the model's vocabulary of {hf_config.vocab_size}: "
        f"give tokens that it has"
    ]


def problems(hf_config: Any, setup: Setup) -> list[str]:
    """Return tokens that the model does not have."""
    try:
        return problems_of(hf_config, setup.settings[Config].with_adapter())
    except UserError:  # which the adapters say
        return []


def parameters(model: nn.Module, family: Family, settings: Settings) -> Parameters:
    """Return the rows, with the values of the matrix that they are of, and the modules' parameters; or as given."""
    config = settings[Config].with_adapter()
    rows, modules = token_layers(model, family, config), saved_modules(model, family, config)
    apart = Apart(WEIGHTS, names=names_beside(base_of(model, settings), family))
    found = Parameters(list(_rows(model, rows, apart)), trained=list(_of_modules(modules, apart)))
    if config.adapter_path is None:
        return found
    given = GivenAdapter(config)
    given.require({each.key for each in (*found.added, *found.trained)})
    added, trained = (
        [dataclasses.replace(each, initial=given.rule(each)) for each in own] for own in (found.added, found.trained)
    )
    return Parameters(added, trained=trained)


def _rows(model: nn.Module, layers: Mapping[str, tuple[int, ...]], apart: Apart) -> Iterator[AddedParameter]:
    for path, ids in layers.items():
        weight: Any = model.get_submodule(path).weight
        initial = InitRule(rows_of=(f"{path}.weight", ids))
        shape = (len(ids), weight.shape[1])
        yield AddedParameter(path, ROWS, shape, initial, apart)


def _of_modules(modules: Mapping[str, nn.Module], apart: Apart) -> Iterator[AddedParameter]:
    names = {f"{path}.{name}": tuple(p.shape) for path, m in modules.items() for name, p in m.named_parameters()}
    for path, shape in names.items():
        module, _, name = path.rpartition(".")
        yield AddedParameter(module, name, shape, apart=apart)


def apply(model: nn.Module, setup: Setup) -> None:
    """Let embedding and head compute with the rows; before they are split."""
    train_rows(model, setup.family, setup.settings)


def train_rows(model: nn.Module, family: Family, settings: Settings) -> None:
    """Let embedding and head compute with the rows that are trained."""
    layers = token_layers(model, family, settings[Config].with_adapter())
    embedding, head = (model.get_submodule(path) for path in (family.embedding, family.head))
    if family.embedding in layers:
        train_rows_of_embedding(embedding, layers[family.embedding])  # type: ignore[arg-type]
    if family.head in layers:
        train_rows_of_head(head, layers[family.head], head)  # type: ignore[arg-type]
    elif layers and _is_tied(model, family):
        train_rows_of_head(head, layers[family.embedding], embedding)  # type: ignore[arg-type]
