"""The command line and the YAML file, derived from the configuration sections; nothing else parses either.

Precedence: defaults < SageMaker's variables < ``--config FILE`` < flags. Every problem is collected and raised at once.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import functools
import math
import operator
import os
import re
import types
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml

from smp import __version__
from smp.checkpoint.config import CheckpointConfig
from smp.compat.command_line import add_estimator_settings, defaults_of_experts, drop_unapplied_defaults
from smp.compat.other_trainers import advice
from smp.config import ActivationConfig, CommConfig, LossConfig, ParallelConfig, PrecisionConfig, Section, flag_text
from smp.data.config import DataConfig
from smp.environment import read_launch
from smp.errors import ConfigError, UserError, a_type
from smp.faults.config import FaultConfig
from smp.log import redact
from smp.models.families import list_presets
from smp.models.model_config import ModelConfig
from smp.optim.config import OptimConfig
from smp.optim.optimizers import OPTIMIZERS
from smp.parallel.allocator import AllocatorConfig
from smp.parallel.experts.config import ExpertsConfig
from smp.parallel.fp8 import Config as Fp8Config
from smp.parallel.lora import Config as LoraConfig
from smp.runtime import data_channel, own_arguments
from smp.train.logging_config import LoggingConfig
from smp.train.lr_schedule import LRConfig
from smp.train.preference import Config as PreferenceConfig
from smp.train.run_config import RunConfig
from smp.yaml_input import strict_yaml

DEFAULT_MAX_STEPS = 5000
CHANNELS = {"training_dir": "train", "test_dir": "test"}  # SageMaker's, where nothing names these, as in SMP v2


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The whole configuration, one section per concern; first what most runs set. ``--help`` keeps the order."""

    model: ModelConfig
    data: DataConfig
    run: RunConfig
    optim: OptimConfig
    lr: LRConfig
    checkpoint: CheckpointConfig
    logging: LoggingConfig
    parallel: ParallelConfig
    experts: ExpertsConfig
    precision: PrecisionConfig
    fp8: Fp8Config
    activation: ActivationConfig
    loss: LossConfig
    lora: LoraConfig
    preference: PreferenceConfig
    comm: CommConfig
    faults: FaultConfig
    allocator: AllocatorConfig
    given: frozenset[str] = frozenset()  # settings named by a flag or the file
    unapplied: tuple[str, ...] = ()  # sentences about given ones that SMP v2 did not apply

    def flat(self) -> dict[str, Any]:
        """Return every setting by name, in types of JSON, for ``--config`` to read again."""
        values = {}
        for name in SECTIONS:
            for key, value in dataclasses.asdict(getattr(self, name)).items():
                # JSON, and so a checkpoint's manifest, has no infinity.
                values[key] = list(value) if isinstance(value, tuple) else "inf" if value == math.inf else value
        return values

    def without_effect(self) -> Iterator[str]:
        """Yield one sentence for each given setting without effect."""
        for flag in FLAGS.values():
            if flag.field.name in self.given and (reason := flag.field.metadata["no_effect"]):
                yield f"--{flag.field.name} has no effect: {reason}"
        yield from self.unapplied


SECTIONS: dict[str, type[Section]] = {
    name: hint
    for name, hint in typing.get_type_hints(TrainConfig).items()
    if isinstance(hint, type) and issubclass(hint, Section)
}


class ArgumentsError(ConfigError):
    """Flags that are refused.

    Args:
        problems: one sentence each.
        rest: the configuration without them.
    """

    def __init__(self, problems: list[str], rest: TrainConfig):
        super().__init__(problems)
        self.rest = rest


@dataclasses.dataclass(frozen=True)
class Flag:
    """One setting on the command line."""

    section: str
    field: dataclasses.Field
    kind: Any  # type of the value, or of each item of a list
    is_list: bool
    optional: bool

    @property
    def allowed(self) -> str:
        """Description of the accepted values."""
        listed = [each.NAME for each in OPTIMIZERS] if self.field.name == "optimizer" else self.field.metadata["only"]
        only = ", ".join(value for value in listed if isinstance(value, str))
        return only or (f"one or more of {_noun(self.kind)}" if self.is_list else _noun(self.kind))

    @property
    def is_missing(self) -> bool:
        """Whether this version has not what the setting is for: no value but the default is accepted."""
        return len(self.field.metadata["only"]) == 1


_NOUNS = {bool: "0 or 1", int: "an integer", float: "a number", str: "text"}


def _noun(kind: Any) -> str:
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        return " or ".join(_noun(arg) for arg in typing.get_args(kind))
    return ", ".join(typing.get_args(kind)) if typing.get_origin(kind) is Literal else _NOUNS[kind]


def _collect_flags() -> dict[str, Flag]:
    flags: dict[str, Flag] = {}
    for section, cls in SECTIONS.items():
        hints = typing.get_type_hints(cls)
        for field in dataclasses.fields(cls):
            kind, optional = _unwrap(hints[field.name])
            is_list = typing.get_origin(kind) is tuple
            item = typing.get_args(kind)[0] if is_list else kind
            for name in (field.name, *field.metadata["aliases"]):
                if name in flags:
                    raise ValueError(f"setting {name} is declared twice: in {flags[name].section} and {section}")
                flags[name] = Flag(section, field, item, is_list, optional)
    return flags


def _unwrap(hint: Any) -> tuple[Any, bool]:
    """Return the type without ``None``, and whether the hint has it."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        inner = [arg for arg in typing.get_args(hint) if arg is not type(None)]
        return functools.reduce(operator.or_, inner), len(inner) < len(typing.get_args(hint))
    return hint, False


FLAGS = _collect_flags()


def _convert_one(kind: Any, text: str) -> Any:
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        for arg in typing.get_args(kind):
            with contextlib.suppress(ValueError):
                return _convert_one(arg, text)
        raise ValueError
    if typing.get_origin(kind) is Literal:
        if text not in typing.get_args(kind):
            raise ValueError
        return text
    if kind is bool:
        lowered = text.lower()
        if lowered not in ("0", "1", "true", "false"):
            raise ValueError
        return lowered in ("1", "true")
    if kind in (int, float):
        value = kind(text)
        if value != value:  # NaN
            raise ValueError
        return value
    # A directory: shells do so with `--name DIR`, and neither in `--name=DIR` nor in a file.
    return os.path.expanduser(text) if text.startswith("~/") else text


def _convert(name: str, values: list[Any]) -> Any:
    """Convert the arguments of a setting into its value.

    Raises:
        UserError: an argument does not fit the setting's type.
    """
    flag = FLAGS[name]
    if flag.optional and values in ([None], ["none"]):  # to leave out what --config gives
        return None
    if not values or (len(values) > 1 and not flag.is_list):
        got = " ".join(map(str, values)) or "nothing"
        raise UserError(f"--{name} takes {flag.allowed}, got {got}")
    converted = []
    for value in values:
        text = "null" if value is None else str(value)
        if (shown := redact(text)) != text:
            raise UserError(
                f"--{name} {shown} contains a secret, which config.yaml and the checkpoints would keep: give it by the "
                f"environment (such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or HF_TOKEN)"
            )
        try:
            if value is None or isinstance(value, (dict, list)):  # types that only YAML has
                raise ValueError
            converted.append(_convert_one(flag.kind, text))
        except ValueError:
            choices = [a for a in flag.field.metadata["only"] or typing.get_args(flag.kind) if isinstance(a, str)]
            hint = "".join(f"; did you mean {near}?" for near in difflib.get_close_matches(text, choices, n=1))
            raise UserError(f"--{name} takes {flag.allowed}, got {text!r}{hint}") from None
    return tuple(converted) if flag.is_list else converted[0]


def _unknown(name: str, where: str) -> str:
    if where.startswith("--"):
        return f"unknown flag {where}: {advice(name, [*FLAGS, 'config'])}"
    return f"unknown key {where}: {advice(name, FLAGS, dashes='')}"


def read_yaml(path: str) -> dict[str, Any]:
    """Read a flat mapping of settings.

    Raises:
        UserError: no such file, not YAML, or not a mapping.
    """
    try:
        content = strict_yaml(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"--config {path} cannot be read: {error.strerror}; give the path of a YAML file") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # a date of month 13 is a ValueError to PyYAML
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        raise UserError(f"--config {path}{line} is not valid YAML: {getattr(error, 'problem', error)}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UserError(f"--config {path} must contain settings as `name: value` lines, got {a_type(content)}")
    return {str(key): value for key, value in content.items()}


_USAGE = """python -m smp.train --model NAME --training_dir DIR [--flag VALUE ...]

  try it           python -m smp.train --model llama_tiny --use_synthetic_data 1 --max_steps 3
  on N processes   python -m smp.launch.local --nproc_per_node N -m smp.train --model llama_tiny --training_dir DIR
  finetune         python -m smp.train --hf_pretrained_model_name_or_dir DIR --training_dir DIR
  resume           the same command with --resume_from_checkpoint latest
  evaluate         python -m smp.train --hf_pretrained_model_name_or_dir DIR --test_dir DIR --evaluate_only 1"""


class _Formatter(argparse.HelpFormatter):
    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        return str(action.metavar or "")  # "X" for what argparse writes as "[X ...]"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> typing.NoReturn:
        raise UserError(message)

    def _print_message(self, message: str, file: typing.Any = None) -> None:
        if read_launch().rank == 0:  # --help and --version, once a job
            super()._print_message(message, file)


def _build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m smp.train",
        usage=_USAGE,
        description="Train, resume, finetune or evaluate decoders of transformers: Llama, Qwen, Gemma and others. "
        f"Presets for --model: {', '.join(list_presets())}.",
        epilog="docs/flags.md has the same as a table.",
        allow_abbrev=False,
        formatter_class=lambda prog: _Formatter(prog, max_help_position=36, width=110),
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file of settings; flags override it")
    parser.add_argument(
        "--mp_parameters", metavar="X", help="settings as SageMaker's estimator hands them on: a=1,b=2 or a JSON object"
    )
    parser.add_argument("--version", action="version", version=f"smp {__version__}")
    groups = {name: parser.add_argument_group(f"{name}: {title(cls).rstrip('.')}") for name, cls in SECTIONS.items()}
    for name, flag in FLAGS.items():
        if name == flag.field.name:
            names = [f"--{n}" for n in (name, *flag.field.metadata["aliases"])]
            default = "" if flag.field.default is None else f"; default {default_text(flag)}"
            kind = "not in this version" if flag.is_missing else f"{flag.allowed}{default}"
            text = f"{flag.field.metadata['help']} ({kind})"
            metavar = "X ..." if flag.is_list else "X"
            groups[flag.section].add_argument(
                *names, dest=name, nargs="*", metavar=metavar, default=argparse.SUPPRESS, help=text.replace("%", "%%")
            )
    return parser


def title(section: type[Section]) -> str:
    """Return what a section is about."""
    return (section.__doc__ or "").strip().splitlines()[0]


def default_text(flag: Flag) -> str:
    """Return a flag's default as help and tables show it."""
    default = flag.field.default
    if default is None:
        return "none"
    if isinstance(default, tuple):
        return " ".join(map(str, default)) or "none"
    return flag_text(default) or "empty"


def _read_given(argv: Sequence[str] | None, problems: list[str]) -> dict[str, list[Any]]:
    """Read the settings of the file and the flags, unconverted; unknown ones are added to ``problems``."""
    namespace, extra = _build_parser().parse_known_args(own_arguments(argv))
    flags, given = vars(namespace), dict[str, list[Any]]()
    path, parameters = flags.pop("config"), flags.pop("mp_parameters")
    if path is not None:
        try:
            for key, value in read_yaml(path).items():
                if key in FLAGS and value == [] and FLAGS[key].field.default == ():
                    continue  # an empty list, as written by flat()
                if key in FLAGS and (name := FLAGS[key].field.name) in given:
                    problems.append(f"{path}: {key} is another name of a setting that is given, {name}: keep one")
                elif key in FLAGS:
                    given[name] = value if isinstance(value, list) else [value]
                else:
                    problems.append(f"{path}: {_unknown(key, key)}")
        except UserError as error:
            problems.append(str(error))
    after_unknown = False
    for argument in extra:
        if argument.startswith("--") and argument != "--":
            name = argument[2:].split("=")[0]
            problems.append(_unknown(name, f"--{name}"))
            after_unknown = True
        elif not after_unknown:  # else it is a value of the unknown flag
            problems.append(f"{argument!r} belongs to no flag: flags are written --name value")
    add_estimator_settings(flags, given, parameters, problems)
    given.update(flags)
    for name, channel in CHANNELS.items():
        by_name = name == "training_dir" and "dataset_name" in given
        if name not in given and not by_name and (path := data_channel(channel)):
            given[name] = [path]
    return given


def parse_args(argv: Sequence[str] | None = None) -> TrainConfig:
    """Build the configuration from the command line.

    Args:
        argv: arguments after the program's name; None reads ``sys.argv``.

    Raises:
        ConfigError: with every problem found: unknown names, wrong types, values out of bounds, contradictions.
    """
    problems: list[str] = []
    given = _read_given(argv, problems)
    values: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
    for name, arguments in given.items():
        try:
            values[FLAGS[name].section][name] = _convert(name, arguments)
        except UserError as error:
            problems.append(str(error))
    unapplied, named = tuple(drop_unapplied_defaults(values["model"])), frozenset[str]().union(*values.values())
    values["experts"] = defaults_of_experts(values["model"]) | values["experts"]
    sections, unread = dict[str, Any](), [*problems]
    for name, cls in SECTIONS.items():
        try:
            sections[name] = cls(**values[name])
        except ConfigError as error:
            problems.extend(cls.independent(error.problems, unread))
            sections[name] = _usable(cls, values[name])
    config = TrainConfig(**sections, given=named, unapplied=unapplied)
    if problems:
        raise ArgumentsError(problems, config)
    return config


def _usable(cls: type[Section], values: dict[str, Any]) -> Section:
    """Return a section without the settings that its problems name."""
    while True:
        try:
            return cls(**values)
        except ConfigError as error:
            if not values:
                raise
            named = {name for text in error.problems for name in re.findall(r"--(\w+)", text)}
            kept = {name: value for name, value in values.items() if name not in named}
            values = kept if len(kept) < len(values) else {}
