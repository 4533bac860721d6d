"""Settings that choose a model, and the model that they choose."""

from __future__ import annotations

import dataclasses
import difflib
import logging
import pathlib
from typing import Any, Literal

from smp.config import AUTO, Section, Settings, setting
from smp.errors import ConfigError, UserError, hub_advice
from smp.json_input import read_object
from smp.models.attention_support import attention_misfit, attention_problem, default_attention
from smp.models.checked_config import checked_config
from smp.models.derive import OTHER_SETTINGS
from smp.models.experts import expert_modules
from smp.models.families import TYPE_DEFAULTS, list_presets, load_preset
from smp.models.family import COMMON_DEFAULTS, Family
from smp.models.hf_values import apply_settings, differences, new_config, rebuilt, set_positions, value_problems
from smp.models.meta_model import meta_model
from smp.models.registry import FAMILIES, MODEL_TYPES, family_of
from smp.models.text_part import names_in
from smp.models.weight_files import directory_of, generation_dir_of, refuse_adapter, tokenizer_dir_of, weight_map

logger = logging.getLogger(__name__)

DEFAULT_SEQUENCE_LENGTH = 2048
_SHOWN = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig(Section):
    """Which model, of what shape, from which weights. Shape settings left out take the chosen model's value."""

    model: str | None = setting(
        None, "Preset name, or local Hugging Face directory (its config.json; weights only with the finetune settings)."
    )
    model_type: Literal["gpt_neox", "llama_v2", "llama_v3", "mistral", "mixtral", "gpt2"] | None = setting(
        None, "SMP v2's choice of architecture, shaped by the settings below. With these and no --model: gpt_neox."
    )
    max_context_width: int | None = setting(
        None, "Tokens per sample. Default: the preset's; 2048 with --model_type.", minimum=2
    )
    vocab_size: int | None = setting(None, "Vocabulary size. 50432 with --model_type.", minimum=1, maximum=1 << 24)
    hidden_width: int | None = setting(
        None, "Width of the hidden states. 768 with --model_type.", minimum=1, maximum=1 << 20
    )
    num_layers: int | None = setting(
        None, "Number of transformer blocks. 12 with --model_type.", minimum=1, maximum=10_000
    )
    num_heads: int | None = setting(
        None, "Number of attention heads. 12 with --model_type.", minimum=1, maximum=1 << 16
    )
    num_key_value_heads: int | None = setting(
        None, "Key/value heads, for grouped-query attention (Llama, Mistral). Default: as many as heads.", minimum=1
    )
    llama_intermediate_size: int | None = setting(
        None, "Llama's MLP width. 11008 with --model_type.", minimum=1, maximum=1 << 22
    )
    intermediate_size: int | None = setting(
        None,
        "MLP width. With --model_type: mistral 14336, gpt_neox 4 x hidden_width, Llama as above.",
        minimum=1,
        maximum=1 << 22,
    )
    resid_pdrop: float | None = setting(
        None, "GPT-NeoX, GPT-2: dropout of hidden states. Default: the model's; 0 for GPT-NeoX.", minimum=0, maximum=1
    )
    attn_pdrop: float | None = setting(None, "Dropout of attention weights. Default 0.", minimum=0, maximum=1)
    embd_pdrop: float | None = setting(
        None, "GPT-2 and its like: dropout of embeddings. Default: the model's.", minimum=0, maximum=1
    )
    initializer_range: float | None = setting(
        None, "Standard deviation of initial weights. 0.02 with --model_type.", above=0, maximum=1
    )
    tie_word_embeddings: bool | None = setting(None, "Share one weight between embedding and head. Default 0.")
    rotary_pct: float | None = setting(
        None, "GPT-NeoX: part of each head that is rotated. 0.25 with --model_type.", above=0, maximum=1
    )
    rotary_emb_base: float | None = setting(
        None, "Base of the rotary embedding. 10000 with --model_type.", minimum=1, maximum=1e15
    )
    rope_scaling_type: Literal["default", "llama3"] | None = setting(
        None, "Scaling of the rotary embedding to longer sequences; default: none."
    )
    rope_scaling_factor: float | None = setting(None, "Factor of llama3 scaling; 8 when not given.", minimum=1)
    rope_scaling_high_freq_factor: float | None = setting(None, "Of llama3 scaling; 4 when not given.", above=0)
    rope_scaling_low_freq_factor: float | None = setting(None, "Of llama3 scaling; 1 when not given.", above=0)
    rope_scaling_original_max_position_embeddings: int | None = setting(
        None, "Sequence length before llama3 scaling; 8192 when not given.", minimum=1
    )
    sliding_window: int | None = setting(None, "Mistral: tokens that attention looks back; 0: all.", minimum=0)
    moe: bool = setting(False, "SMP v2's word for a mixture of experts: refuses a model that is none.")
    num_local_experts: int | None = setting(
        None, "Experts of a layer of a mixture. 8 with --model_type mixtral.", minimum=1, maximum=1 << 16
    )
    num_experts_per_tok: int | None = setting(
        None, "Experts that a token is sent to. 2 with --model_type mixtral.", minimum=1
    )
    attn_implementation: Literal[
        "auto", "sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention", "fused"
    ] = setting(
        AUTO, "Hugging Face's attention function; fused: torch's kernels on a GPU, cuDNN's first, without masks for "
        "documents and windows. auto: on GPUs, flash_attention_3 or fused.", plain="sdpa",
    )  # fmt: skip
    delayed_param: bool = setting(True, "Build without memory and allocate after sharding, each rank its shard only.")
    finetune: bool = setting(False, "Start from pretrained weights; give the name or the file below.")
    pretrained_model_name: str | None = setting(
        None, "With --finetune 1: the model that --finetune_checkpoint_load_dir contains (preset, directory or name)."
    )
    finetune_checkpoint_load_dir: str | None = setting(
        None, "With --pretrained_model_name: the directory of its safetensors weights."
    )
    pretrained_checkpoint_file: str | None = setting(
        None, "With --finetune 1: a .safetensors file, an .index.json or their directory."
    )
    hf_pretrained_model_name_or_dir: str | None = setting(
        None, "Finetune from this local Hugging Face directory: config and weights."
    )

    def problems(self) -> list[str]:
        """Add the rules of finetuning."""
        found = super().problems()
        name, file = self.pretrained_model_name, self.pretrained_checkpoint_file
        directory, folder = self.hf_pretrained_model_name_or_dir, self.finetune_checkpoint_load_dir
        given = {
            "pretrained_model_name": name,
            "pretrained_checkpoint_file": file,
            "finetune_checkpoint_load_dir": folder,
        }
        used = [key for key, value in given.items() if value is not None]
        if directory is not None:
            if used:
                found.append(
                    f"--hf_pretrained_model_name_or_dir and --{used[0]} both name the weights: give one of them"
                )
            if self.model is not None and self.model not in list_presets():
                found.append(
                    "--hf_pretrained_model_name_or_dir and --model both name the model: give one of them, or a preset"
                )
            return found
        if self.finetune and name is None and file is None:
            found.append(
                "--finetune 1 needs --pretrained_model_name with --finetune_checkpoint_load_dir, or "
                "--pretrained_checkpoint_file (or --hf_pretrained_model_name_or_dir alone)"
            )
        if not self.finetune and used:
            found.append(f"--{used[0]} is for finetuning: add --finetune 1, or leave it out")
        if name is not None and file is not None:
            found.append(
                "--pretrained_model_name and --pretrained_checkpoint_file both name the weights: give one of them"
            )
        elif (name is None) != (folder is None):
            present, missing = ("name", "load_dir") if folder is None else ("load_dir", "name")
            flags = {"name": "pretrained_model_name", "load_dir": "finetune_checkpoint_load_dir"}
            found.append(f"--{flags[present]} needs --{flags[missing]}: give both")
        if name is not None and self.model is not None and self.model != name:
            found.append(f"--model {self.model} and --pretrained_model_name {name} differ: give one of them")
        return found

    @property
    def shape(self) -> dict[str, Any]:
        """Return the settings of the architecture that were given, by name, sorted."""
        known = {*OTHER_SETTINGS, *(name for member in FAMILIES.values() for name in member.settings)}
        return {name: value for name in sorted(known) if (value := getattr(self, name)) is not None}

    @property
    def weights_path(self) -> pathlib.Path | None:
        """Path of the pretrained weights; None: the model starts from initial values."""
        path = (
            self.hf_pretrained_model_name_or_dir or self.pretrained_checkpoint_file or self.finetune_checkpoint_load_dir
        )
        return pathlib.Path(path).expanduser() if path else None


@dataclasses.dataclass(frozen=True)
class ResolvedModel:
    """The model of a :class:`ModelConfig`.

    Attributes:
        name: for directories and checkpoints: preset, base name of the directory, or model_type.
        sequence_length: tokens per sample.
        weights: pretrained weights, checked to be readable safetensors; None: start from initial values.
        tokenizer_dir: directory of the tokenizer that belongs to the weights or the config, if there is one.
        generation_dir: directory of the ``generation_config.json`` that does, if there is one.
        attn_implementation: Hugging Face's attention function to build with, checked to be usable here.
        delayed_param: whether to build on the meta device.
        eos_token_id: the id that ends a document, of the preset or config.json; None: it names none, or several.
    """

    name: str
    family: Family
    hf_config: Any
    sequence_length: int
    weights: pathlib.Path | None
    tokenizer_dir: pathlib.Path | None
    generation_dir: pathlib.Path | None
    attn_implementation: str
    delayed_param: bool
    eos_token_id: int | None = None


@dataclasses.dataclass(frozen=True)
class _Source:
    """Source of the config values, before settings change them."""

    name: str
    hf_config: Any
    sequence_length: int
    directory: pathlib.Path | None = None
    from_settings: bool = False  # the model has no config of its own


def _preset_source(name: str) -> _Source:
    preset = load_preset(name)
    config = new_config(preset["family"], preset["config"])
    return _Source(name, config, preset["sequence_length"])


def _directory_source(directory: pathlib.Path) -> _Source:
    path = directory / "config.json"
    try:
        content = read_object(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is no readable Hugging Face config ({error}): give another model directory") from error
    hf_config = checked_config(path, content)
    length = min(DEFAULT_SEQUENCE_LENGTH, getattr(hf_config, "max_position_embeddings", DEFAULT_SEQUENCE_LENGTH))
    return _Source(directory.resolve().name or "model", hf_config, length, directory)


def _type_source(model_type: str) -> _Source:
    kind = MODEL_TYPES[model_type]
    if defaults := FAMILIES[kind].defaults if kind in FAMILIES else TYPE_DEFAULTS.get(kind, {}):
        values = {**defaults, "max_position_embeddings": DEFAULT_SEQUENCE_LENGTH}
    else:  # transformers' own
        values = {"vocab_size": COMMON_DEFAULTS["vocab_size"]}
    return _Source(model_type, new_config(kind, values), DEFAULT_SEQUENCE_LENGTH, from_settings=True)


def _named_source(name: str, *, flag: str) -> _Source:
    """Return the source of a name: a preset, except where its weights are needed as well, or else a local directory."""
    needs_weights = flag == "hf_pretrained_model_name_or_dir"
    if name in list_presets() and not needs_weights:
        return _preset_source(name)
    if "://" in name:
        raise UserError(
            f"--{flag} {name} is a URL, and a model is read from a directory: copy it to one that all processes see "
            f"(`smp export URL DIR` does that for a checkpoint), and give that"
        )
    directory = pathlib.Path(name).expanduser()
    if (directory / "config.json").is_file():
        return _directory_source(directory)
    refuse_adapter(directory)
    if directory.is_dir():
        raise UserError(f"--{flag} {name} is a directory without config.json: give a Hugging Face model directory")
    if needs_weights:
        initial = f"; --model {name} trains the preset from initial values" if name in list_presets() else ""
        raise UserError(
            f"--{flag} {name} is no directory: give a local one with a model's config.json and safetensors "
            f"weights{initial or hub_advice(name)}"
        )
    near = difflib.get_close_matches(name, list_presets(), n=1, cutoff=0.4)
    hint = f"did you mean {near[0]}? " if near else ""
    raise UserError(
        f"unknown model --{flag} {name}: {hint}Give a local Hugging Face directory or one of "
        f"{', '.join(list_presets())}{hub_advice(name)}"
    )


def _find_source(config: ModelConfig, weights: pathlib.Path | None) -> _Source:
    if config.hf_pretrained_model_name_or_dir is not None:
        source = _named_source(config.hf_pretrained_model_name_or_dir, flag="hf_pretrained_model_name_or_dir")
        return source if config.model is None else _preset_source(config.model)
    if config.model is not None:
        return _named_source(config.model, flag="model")
    beside = directory_of(weights)
    has_config = beside is not None and (beside / "config.json").is_file()
    if config.pretrained_model_name is not None:
        try:
            return _named_source(config.pretrained_model_name, flag="pretrained_model_name")
        except UserError:
            # A hub name, as SMP v2's scripts give: the load directory has that model's config.
            if not has_config or beside is None:
                raise
            source = _directory_source(beside)
            return dataclasses.replace(source, name=config.pretrained_model_name.rstrip("/").rpartition("/")[2])
    if beside is not None and has_config:
        return _directory_source(beside)
    if beside is not None and config.model_type is None:
        raise UserError(f"no config.json beside the weights {weights}: say which model they are with --model")
    if config.model_type is None and not config.shape:
        raise UserError(
            f"no model: set --model to one of {', '.join(list_presets())}, or to a local Hugging Face directory; or "
            f"--model_type with sizes such as --num_layers"
        )
    return _type_source(config.model_type or "gpt_neox")


def _own_config(source: _Source, beside: pathlib.Path | None) -> Any:
    """Return the config that lies beside the weights, where another one was named."""
    if beside is None or not (beside / "config.json").is_file():
        return None
    if source.directory is not None and source.directory.resolve() == beside.resolve():
        return None
    return _directory_source(beside).hf_config


def _contradiction(config: ModelConfig, name: str, beside: pathlib.Path, differ: list[str]) -> str:
    shown = ", ".join(differ[:_SHOWN]) + (f" and {len(differ) - _SHOWN} more" if len(differ) > _SHOWN else "")
    if config.pretrained_checkpoint_file is not None:
        advice = "leave --model out"
    else:
        advice = f"give --hf_pretrained_model_name_or_dir {beside} alone"
    return (
        f"{name} is another model than the config.json beside the weights in {beside} says ({shown}): "
        f"{advice}, which takes that config"
    )


def _built_with(config: ModelConfig, hf_config: Any) -> str:
    """Return the function to build with: what is no function of Hugging Face's takes the place of its sdpa."""
    wanted = Settings((config,))[ModelConfig].attn_implementation
    if config.attn_implementation == AUTO and (why := attention_misfit(hf_config, wanted)):
        logger.info("attention: eager, and not %s: %s", wanted, why)
        return "eager"
    return "sdpa" if wanted == "fused" else wanted


def resolve_model(config: ModelConfig, *, here: bool = True) -> ResolvedModel:
    """Find the model, put the settings into its config, and check both.

    Nothing is fetched from a hub and no code of a checkpoint is run. With ``here`` False the model is another
    machine's, and what its attention needs is not looked for.

    Raises:
        UserError: the model or its weights cannot be found or read.
        ConfigError: settings that do not fit the model, all of them.
    """
    weights = config.weights_path
    beside = directory_of(weights)
    source = _find_source(config, weights)
    family = family_of(source.hf_config)
    own, found = _own_config(source, beside), []
    other_type = own is not None and own.model_type != family.hf_model_type
    if config.model_type is not None and MODEL_TYPES[config.model_type] != family.name:
        found.append(f"--model_type {config.model_type} contradicts {source.name}, a {family.name} model: leave it out")
    if weights is not None:
        try:
            if not other_type:
                names_in(weights, family).check(weights, "train from initial values, with --model")
            weight_map(weights)
        except UserError as error:
            found.append(str(error))
    given = config.shape
    # Without a config beside the weights, the settings give their shape.
    fixed = weights is not None and not source.from_settings
    values, problems = apply_settings(source.hf_config.to_dict(), family, given, pretrained=fixed)
    if own is not None and beside is not None:
        own_values = own.to_dict()
        if not other_type:
            own_values, _ = apply_settings(own_values, family, given, pretrained=True)
        differ = [f"model_type {family.hf_model_type} instead of {own.model_type}"] if other_type else []
        if differ := differ or differences(values, own_values):
            found.append(_contradiction(config, source.name, beside, differ))
        else:  # in what does not change the model's function, the weights' own counts, too
            source, values = dataclasses.replace(source, hf_config=own), own_values
    if config.moe and not expert_modules(meta_model(source.hf_config).model):
        found.append(
            f"--moe 1 is for mixtures of experts, and {source.name} is none: leave it out, or choose one with "
            f"--model_type mixtral or --model"
        )
    found += problems + value_problems(values, family)
    dropout = values.get(family.settings.get("attn_pdrop", "")) or 0.0
    if problem := attention_problem(source.hf_config, config.attn_implementation, dropout=dropout, here=here):
        found.append(problem)
    if found:
        raise ConfigError(found)
    length = config.max_context_width or source.sequence_length
    # Without a config of its own the model has transformers' default, which is no data's.
    end = None if source.from_settings else getattr(source.hf_config, "eos_token_id", None)
    set_positions(values, length, source.hf_config, fixed=fixed, exact=source.from_settings)
    values.update(use_cache=False, architectures=[family.architecture])
    hf_config = rebuilt(family, values, given)
    return ResolvedModel(
        name=source.name,
        family=family_of(hf_config),
        hf_config=hf_config,
        sequence_length=length,
        weights=weights,
        tokenizer_dir=tokenizer_dir_of(source.directory, beside),
        generation_dir=generation_dir_of(source.directory, beside),
        attn_implementation=_built_with(config, hf_config) if here else default_attention(hf_config),
        delayed_param=config.delayed_param,
        eos_token_id=end if isinstance(end, int) else None,
    )
