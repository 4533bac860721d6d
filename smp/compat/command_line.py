"""SMP v2's command lines: the estimator's parameters, and explicit defaults that its script did not apply."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from typing import Any

from smp.compat.other_trainers import OURS, nearest
from smp.config import flag_text
from smp.environment import sagemaker_parameters
from smp.errors import UserError

logger = logging.getLogger(__name__)

VARIABLE = "SM_HP_MP_PARAMETERS"

_LLAMA = ("llama_v2", "llama_v3")
# Settings that SMP v2's script used for some values of --model_type only: its default, and these values.
APPLIED_TO: dict[str, tuple[object, tuple[str, ...]]] = {
    "resid_pdrop": (0.1, ("gpt2",)),
    "embd_pdrop": (0.1, ("gpt2",)),
    "attn_pdrop": (0.1, ("gpt2",)),
    "rotary_pct": (0.25, ("gpt_neox",)),
    "rotary_emb_base": (10000, ("gpt_neox", *_LLAMA)),
    "llama_intermediate_size": (11008, _LLAMA),
    "intermediate_size": (14336, ("mistral", "mixtral")),
    "num_local_experts": (8, ("mixtral",)),
    "num_experts_per_tok": (2, ("mixtral",)),
    "initializer_range": (0.02, ("gpt2", "gpt_neox", "mistral", "mixtral", *_LLAMA)),
    # With --rope_scaling_type llama3, whatever the model.
    "rope_scaling_factor": (8.0, ()),
    "rope_scaling_high_freq_factor": (4.0, ()),
    "rope_scaling_low_freq_factor": (1.0, ()),
    "rope_scaling_original_max_position_embeddings": (8192, ()),
}
_KEYS = (
    "hybrid_shard_degree", "tensor_parallel_degree", "context_parallel_degree", "expert_parallel_degree",
    "sm_activation_offloading", "activation_loading_horizon", "fsdp_cache_flush_warnings", "allow_empty_shards",
    "random_seed",
)  # fmt: skip


def add_estimator_settings(
    flags: dict[str, Any], in_file: Mapping[str, Any], parameters: str | None, problems: list[str]
) -> None:
    """Add the settings of SageMaker's estimator: of ``--mp_parameters``, without it of ``SM_HP_MP_PARAMETERS``.

    Args:
        flags: arguments by setting; changed. A flag goes before the variable, and contradicts ``--mp_parameters``.
        in_file: settings of ``--config``, which go before the variable, too.
        parameters: what ``--mp_parameters`` was given.
        problems: one sentence is added for each parameter that cannot be given.
    """
    if parameters:
        for name, value in _read_parameters("--mp_parameters", parameters, problems).items():
            if _plain(flags.setdefault(name, [value])) != _plain([value]):
                problems.append(f"--mp_parameters says --{name} {value}, and that flag is given as well: leave one out")
        return
    try:
        text = json.dumps(sagemaker_parameters())
    except UserError as error:
        problems.append(str(error))
        return
    for name, value in _read_parameters(VARIABLE, text, problems).items():
        given = flags.get(name, in_file.get(name))
        if given is None:
            flags[name] = [value]
            logger.info("%s, the estimator's parameters, gives --%s %s", VARIABLE, name, value)
        elif _plain(given) != _plain([value]):
            logger.warning("--%s is %s, as given, and not %s's %s", name, " ".join(map(str, given)), VARIABLE, value)


def _plain(words: Iterable[Any]) -> list[str]:
    """Return the words of a flag, with 1 and 0 for true and false."""
    return [{"true": "1", "false": "0"}.get(str(word).lower(), str(word)) for word in words]


def _read_parameters(source: str, text: str, problems: list[str]) -> dict[str, str]:
    """Read the estimator's parameters: ``a=1,b=2``, as SageMaker hands them to a script, or a JSON object.

    Args:
        source: where they are given, for messages.
        problems: one sentence is added for each parameter that a flag does not give.

    Returns:
        The values of flags, by name.
    """
    try:
        pairs = json.loads(text) if text.lstrip().startswith("{") else dict(p.split("=", 1) for p in text.split(","))
    except (ValueError, RecursionError):
        problems.append(f"{source} takes key=value,key=value or a JSON object, got {text[:80]!r}")
        return {}
    found = {}
    for key, value in ((str(key).strip(), str(value).strip()) for key, value in pairs.items()):
        if key not in _KEYS:
            near = nearest(key, _KEYS)
            hint = f"did you mean {near}?" if near else f"give {', '.join(_KEYS)}, and anything else as a flag"
            problems.append(f"{source}: unknown key {key}: {hint}")
        elif key == "allow_empty_shards":
            logger.info("%s: %s has no effect: empty shards are always allowed", source, key)
        elif key != "random_seed":
            found[OURS.get(key, key)] = value
        elif value != "0":
            problems.append(f"{source}: random_seed {value} is not available: --seed is the job's one seed")
    return found


def drop_unapplied_defaults(given: dict[str, Any]) -> list[str]:
    """Take out what SMP v2's script did not use, where it has the value that is its default.

    A command line that spells out all defaults then gives the model that SMP v2 made of it. Only with
    ``--model_type``, by which that script chose a model.

    Args:
        given: settings of the model by name; changed.

    Returns:
        One sentence for each that was taken out.
    """
    kind, finetunes = given.get("model_type"), given.get("hf_pretrained_model_name_or_dir") is not None
    if kind is None:
        return []
    found = []
    for name, (default, kinds) in APPLIED_TO.items():
        if name not in given or given[name] != default:
            continue
        if finetunes:
            why = "which it did not use when finetuning: the model's own value stays"
        elif not kinds:
            why = "which needs --rope_scaling_type llama3" if given.get("rope_scaling_type") != "llama3" else ""
        elif kind in kinds or (
            # Which is Llama 3 8B's width, too: it counts for Llama unless SMP v2's own flag gives one.
            name == "intermediate_size" and kind in _LLAMA and "llama_intermediate_size" not in given
        ):
            why = ""
        else:
            why = f"which it used for {' and '.join(kinds)} only"
        if why:
            found.append(f"--{name} {flag_text(given.pop(name))} has no effect: it is SMP v2's default, {why}")
    return found


def defaults_of_experts(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return SMP v2's defaults of a mixture's experts, with its ``--model_type``; pretrained ones keep their router.

    Args:
        model: given settings of the model by name.
    """
    smp_v2 = model.get("model_type") == "mixtral" and model.get("hf_pretrained_model_name_or_dir") is None
    return {"moe_load_balancing": "sinkhorn"} if smp_v2 else {}
