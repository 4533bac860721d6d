"""What a job's adapters are warned of: another base model, and tokens of the data that adapters cannot teach."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from smp.config import AUTO, Settings
from smp.data.config import DataConfig
from smp.data.data_pipeline import DataPipeline
from smp.data.text import TextTokenizer
from smp.errors import UserError
from smp.log import get_logger
from smp.models.meta_model import meta_model
from smp.models.model_config import ResolvedModel
from smp.models.weight_files import directory_of
from smp.parallel import lora, trained_beside
from smp.parallel.choices import Choice
from smp.pretrained import read_rows

logger = get_logger("train")

# The largest value of a row that counts as zero: Llama 3's reserved tokens have some of 1e-23.
_ZERO = 1e-16


def untrained_tokens(settings: Settings, model: ResolvedModel, data: DataPipeline) -> dict[int, str]:
    """Return the added tokens of the tokenizer that the data has and the weights have not learned, by id.

    Such a token's row of the embedding or of the head is zero, or that of another added token too, as reserved ones
    have it. A row that was drawn at random when the vocabulary was resized cannot be told from a learned one.

    Args:
        data: of whose beginning the tokens are looked at.

    Raises:
        UserError: there is no tokenizer that can be loaded.
    """
    tokenizer = _tokenizer_of(settings, model)
    if model.weights is None or tokenizer is None:
        return {}
    names: dict[int, object] = tokenizer.added_tokens_decoder
    ids = sorted(number for number in names if number < model.hf_config.vocab_size)
    if not ids:
        return {}
    paths = (model.family.embedding, model.family.head)
    tables = [read_rows(model.weights, model.family, f"{path}.weight", ids) for path in paths]
    untrained = torch.stack([_untrained(rows) for rows in tables if rows is not None]).any(0).tolist()
    found = {number for number, is_so in zip(ids, untrained, strict=True) if is_so}
    return {number: str(names[number]) for number in data.tokens_used().tolist() if number in found}


def _tokenizer_of(settings: Settings, model: ResolvedModel) -> Any:
    """Return the tokenizer of the data, else that of the model, if there is one."""
    folder = settings[DataConfig].tokenizer_name_or_dir or model.tokenizer_dir
    return None if folder is None else TextTokenizer(str(folder)).hugging_face


def chosen_tokens(settings: Settings, model: ResolvedModel, data: DataPipeline) -> list[Choice]:
    """Return the ids of the tokens that ``--lora_train_tokens`` names, or means by auto.

    Raises:
        UserError: the tokenizer does not have one, or there is none.
    """
    config = settings[lora.Config]
    given = () if config.adapter_path is not None else config.lora_train_tokens
    if all(text.isdecimal() for text in given):
        return []
    is_auto, tokenizer = given == (AUTO,), _tokenizer_of(settings, model)
    if tokenizer is None or (is_auto and model.weights is None):
        raise UserError(
            f"--lora_train_tokens {' '.join(given)} needs a tokenizer, and auto pretrained weights: give "
            f"--tokenizer_name_or_dir and --hf_pretrained_model_name_or_dir, or ids"
        )
    untrained, vocabulary = untrained_tokens(settings, model, data) if is_auto else {}, tokenizer.get_vocab()
    if missing := [text for text in given if not (is_auto or text.isdecimal() or text in vocabulary)]:
        raise UserError(
            f"--lora_train_tokens {missing[0]} is no token of the tokenizer: give tokens that it has, or their ids"
        )
    ids = untrained or [int(text) if text.isdecimal() else vocabulary[text] for text in given if not is_auto]
    chosen = dataclasses.replace(config, lora_train_tokens=tuple(dict.fromkeys(map(str, ids))))
    if problems := trained_beside.problems_of(model.hf_config, chosen):
        raise UserError(problems[0])
    found = f"untrained: {', '.join(untrained.values())}" if untrained else "no added token of the data is untrained"
    why = found if is_auto else "their ids"
    return [Choice("lora_train_tokens", chosen.lora_train_tokens, why)]


def _untrained(rows: torch.Tensor) -> torch.Tensor:
    _, which, counts = rows.float().unique(dim=0, return_inverse=True, return_counts=True)
    return (rows.abs().amax(1) <= _ZERO) | (counts[which] > 1)


def warn_of_base(settings: Settings, model: ResolvedModel) -> None:
    """Warn of an adapter that says to be of another base model."""
    adapter, base = settings[lora.Config].adapter_path, directory_of(model.weights)
    if adapter is not None and base is not None:
        lora.warn_of_base(adapter, str(base))


def log_reach(settings: Settings, model: ResolvedModel) -> None:
    """Log which layers of a mixture get adapters."""
    lora.log_reach(meta_model(model.hf_config).model, model.family, settings[lora.Config].with_adapter())


def warn_of_untrained(settings: Settings, model: ResolvedModel, data: DataPipeline) -> None:
    """Warn of tokens that the adapters of a job cannot teach.

    Args:
        settings: with what was chosen for those that are auto.
    """
    adapters = settings[lora.Config].with_adapter()
    paths, saved = (model.family.embedding, model.family.head), adapters.lora_modules_to_save
    if not adapters.lora_rank or all(any(path.endswith(name) for name in saved) for path in paths):
        return
    try:
        found = untrained_tokens(settings, model, data)
    except UserError:  # data of ids needs no tokenizer
        return
    if found := {number: text for number, text in found.items() if number not in adapters.token_ids}:
        logger.warning(
            "The data has %s, untrained in %s: their rows of the embedding or the head are zero or those of another "
            "token, and adapters do not change them, so the model cannot learn to read or generate them: set "
            "--lora_train_tokens auto, or train all parameters (--lora_rank 0).",
            ", ".join(found.values()), model.weights,
        )  # fmt: skip
