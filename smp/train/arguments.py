"""The command line and the YAML file, derived from the configuration sections; nothing else parses either.

Precedence: the sections' defaults < ``--config FILE`` < flags. Every problem is collected and raised at once.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml

from smp.checkpoint.config import CheckpointConfig
from smp.compat.retired import RETIRED
from smp.config import ActivationConfig, CommConfig, LossConfig, ParallelConfig, PrecisionConfig, Section, setting
from smp.data.data_pipeline import DataConfig
from smp.errors import ConfigError, UserError
from smp.faults.config import FaultConfig
from smp.models.model_config import ModelConfig
from smp.runtime import data_channel, own_words
from smp.train.lr_schedule import LRConfig
from smp.train.metrics import LoggingConfig
from smp.train.optimizer import OptimConfig

DEFAULT_MAX_STEPS = 5000

# SageMaker's data channels stand in for these where nothing names them, as in SMP v2.
CHANNELS = {"training_dir": "train", "test_dir": "test"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig(Section):
    """How long, how much per step, and where to write."""

    output_dir: str | None = setting(
        None, "Run directory: configuration, metrics, logs, checkpoints. Default: runs/<model>."
    )
    max_steps: int | None = setting(
        None, "Optimizer steps to train. Default: 5000, or as many as --epochs needs.", minimum=1,
        aliases=("max_training_steps",),
    )  # fmt: skip
    epochs: int | None = setting(
        None, "Passes over the data; training ends at whichever of this and --max_steps is first.", minimum=1
    )
    train_batch_size: int = setting(2, "Samples per forward pass on each data-parallel rank.", minimum=1)
    gradient_accumulation_steps: int = setting(1, "Forward passes per optimizer step.", minimum=1)
    global_batch_size: int | None = setting(
        None,
        "Samples per optimizer step over all ranks; the number of forward passes follows. "
        "Default: train_batch_size x data ranks x gradient_accumulation_steps.",
        minimum=1,
    )
    seed: int = setting(12345, "Seed of initial values, data order and dropout.", minimum=0, maximum=2**63 - 1)
    dry_run: bool = setting(
        False, "Check everything, print the memory each rank needs and the legal degrees, and stop."
    )
    dry_run_world_size: int | None = setting(
        None, "Number of processes to plan for with --dry_run 1. Default: those started.", minimum=1, maximum=65536
    )
    profile_nsys: bool = setting(False, "Start the CUDA profiler (nsys) at the third step; needs a GPU.")

    def problems(self) -> list[str]:
        """Adds settings that need one another."""
        found = super().problems()
        if self.dry_run_world_size is not None and not self.dry_run:
            found.append("--dry_run_world_size has a meaning only with --dry_run 1: add it, or leave it out")
        if self.global_batch_size is not None and self.gradient_accumulation_steps > 1:
            found.append(
                f"--global_batch_size {self.global_batch_size} and --gradient_accumulation_steps "
                f"{self.gradient_accumulation_steps} set the same thing: give one of them"
            )
        return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The whole configuration, one section per concern."""

    run: RunConfig
    model: ModelConfig
    parallel: ParallelConfig
    precision: PrecisionConfig
    activation: ActivationConfig
    loss: LossConfig
    comm: CommConfig
    optim: OptimConfig
    lr: LRConfig
    data: DataConfig
    checkpoint: CheckpointConfig
    faults: FaultConfig
    logging: LoggingConfig
    given: frozenset[str] = frozenset()  # settings named by a flag or the file

    def flat(self) -> dict[str, Any]:
        """Every setting by name, as YAML can hold it; readable again by ``--config``."""
        values = {}
        for name in SECTIONS:
            for key, value in dataclasses.asdict(getattr(self, name)).items():
                values[key] = list(value) if isinstance(value, tuple) else value
        return values

    def without_effect(self) -> Iterator[str]:
        """One sentence for each given setting that changes nothing here by construction."""
        for flag in FLAGS.values():
            if flag.field.name in self.given and (reason := flag.field.metadata["no_effect"]):
                yield f"--{flag.field.name} has no effect: {reason}"


SECTIONS: dict[str, type[Section]] = {
    name: hint
    for name, hint in typing.get_type_hints(TrainConfig).items()
    if isinstance(hint, type) and issubclass(hint, Section)
}


@dataclasses.dataclass(frozen=True)
class Flag:
    """One setting as the command line sees it."""

    section: str
    field: dataclasses.Field
    hint: Any

    @property
    def allowed(self) -> str:
        """The accepted values, in words."""
        kind, _ = _unwrap(self.hint)
        if typing.get_origin(kind) is Literal:
            return ", ".join(typing.get_args(kind))
        if typing.get_origin(kind) is tuple:
            return f"one or more of {_noun(typing.get_args(kind)[0])}"
        return _noun(kind)


_NOUNS = {bool: "0 or 1", int: "a whole number", float: "a number", str: "text"}


def _noun(kind: Any) -> str:
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        return " or ".join(_noun(arg) for arg in typing.get_args(kind))
    return ", ".join(typing.get_args(kind)) if typing.get_origin(kind) is Literal else _NOUNS[kind]


def _collect_flags() -> dict[str, Flag]:
    flags: dict[str, Flag] = {}
    for section, cls in SECTIONS.items():
        hints = typing.get_type_hints(cls)
        for field in dataclasses.fields(cls):
            for name in (field.name, *field.metadata["aliases"]):
                if name in flags:
                    raise ValueError(f"setting {name} is declared twice: in {flags[name].section} and {section}")
                flags[name] = Flag(section, field, hints[field.name])
    return flags


def _unwrap(hint: Any) -> tuple[Any, bool]:
    """``X | None`` -> (X, True); anything else -> (itself, False)."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        inner = [arg for arg in typing.get_args(hint) if arg is not type(None)]
        return inner[0], True
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
    if kind is int:
        return int(text)
    if kind is float:
        value = float(text)
        if math.isnan(value):
            raise ValueError
        return value
    return text


def _convert(name: str, values: list[Any]) -> Any:
    """Turn the words given for a setting into its value.

    Raises:
        UserError: a word does not fit the setting's type.
    """
    flag = FLAGS[name]
    kind, optional = _unwrap(flag.hint)
    if optional and values == [None]:
        return None
    is_list = typing.get_origin(kind) is tuple
    item = typing.get_args(kind)[0] if is_list else kind
    if not values or (len(values) > 1 and not is_list):
        got = " ".join(map(str, values)) or "nothing"
        raise UserError(f"--{name} takes {flag.allowed}, got {got}")
    converted = []
    for value in values:
        text = "null" if value is None else str(value)
        try:
            if value is None or isinstance(value, (dict, list)):  # YAML knows more than words
                raise ValueError
            converted.append(_convert_one(item, text))
        except ValueError:
            near = difflib.get_close_matches(text, [a for a in typing.get_args(item) if isinstance(a, str)], n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise UserError(f"--{name} takes {flag.allowed}, got {text!r}{hint}") from None
    return tuple(converted) if is_list else converted[0]


def _unknown(name: str, where: str) -> str:
    if name in RETIRED:
        return f"{where} is not used any more: {RETIRED[name]}"
    is_flag = where.startswith("--")
    known = [*FLAGS, "config"] if is_flag else [*FLAGS]
    near = difflib.get_close_matches(name.replace("-", "_"), known, n=1, cutoff=0.6)
    hint = f"did you mean {near[0]}?" if near else "docs/flags.md lists all of them"
    return f"unknown {'flag' if is_flag else 'key'} {where}: {hint}"


def _read_yaml(path: str) -> dict[str, Any]:
    """Read a flat mapping of settings.

    Raises:
        UserError: no such file, not YAML, or not a mapping.
    """
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"--config {path} cannot be read: {error.strerror}; give the path of a YAML file") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # a date of month 13 is a ValueError to PyYAML
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        raise UserError(f"--config {path}{line} is not valid YAML: {getattr(error, 'problem', error)}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UserError(f"--config {path} must hold settings as `name: value` lines, got a {type(content).__name__}")
    return {str(key): value for key, value in content.items()}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> typing.NoReturn:
        raise UserError(message)


def _build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m smp.train",
        description="Train, resume or finetune Llama, Mistral and GPT-NeoX models.",
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=36, width=110),
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file of settings; flags stand above it")
    groups = {name: parser.add_argument_group(name) for name in SECTIONS}
    for name, flag in FLAGS.items():
        if name == flag.field.name:
            names = [f"--{n}" for n in (name, *flag.field.metadata["aliases"])]
            text = f"{flag.field.metadata['help']} ({flag.allowed}; default {_default_text(flag)})"
            groups[flag.section].add_argument(
                *names, dest=name, nargs="*", metavar="X", default=argparse.SUPPRESS, help=text.replace("%", "%%")
            )
    return parser


def _default_text(flag: Flag) -> str:
    default = flag.field.default
    if default is None:
        return "none"
    if isinstance(default, bool):
        return str(int(default))
    if isinstance(default, tuple):
        return " ".join(map(str, default)) or "none"
    return str(default) if default != "" else "empty"


def _read_words(argv: Sequence[str] | None, problems: list[str]) -> dict[str, list[Any]]:
    """Settings given by the file and the flags, unconverted; what is unknown goes to ``problems``."""
    namespace, extra = _build_parser().parse_known_args(own_words(argv))
    flags = vars(namespace)
    words: dict[str, list[Any]] = {}
    path = flags.pop("config")
    if path is not None:
        try:
            for key, value in _read_yaml(path).items():
                if key in FLAGS and value == [] and FLAGS[key].field.default == ():
                    continue  # how an empty list is written by flat()
                if key in FLAGS:
                    words[FLAGS[key].field.name] = value if isinstance(value, list) else [value]
                else:
                    problems.append(f"{path}: {_unknown(key, key)}")
        except UserError as error:
            problems.append(str(error))
    after_unknown = False
    for word in extra:
        if word.startswith("--") and word != "--":
            name = word[2:].split("=")[0]
            problems.append(_unknown(name, f"--{name}"))
            after_unknown = True
        elif not after_unknown:  # else it is a value of the unknown flag
            problems.append(f"{word!r} belongs to no flag: flags are written --name value")
    words.update(flags)
    for name, channel in CHANNELS.items():
        if name not in words and (path := data_channel(channel)):
            words[name] = [path]
    return words


def parse_args(argv: Sequence[str] | None = None) -> TrainConfig:
    """Build the configuration from the command line.

    Args:
        argv: words after the program's name; None reads ``sys.argv``.

    Raises:
        ConfigError: with every problem found: unknown names, wrong types, values out of bounds, contradictions.
    """
    problems: list[str] = []
    words = _read_words(argv, problems)
    values: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
    for name, given in words.items():
        try:
            values[FLAGS[name].section][name] = _convert(name, given)
        except UserError as error:
            problems.append(str(error))
    sections, unread = dict[str, Any](), [*problems]
    for name, cls in SECTIONS.items():
        try:
            sections[name] = cls(**values[name])
        except ConfigError as error:
            problems.extend(cls.independent(error.problems, unread))
    if problems:
        raise ConfigError([*problems, *(sections["data"].missing() if "data" in sections else [])])
    return TrainConfig(**sections, given=frozenset(words))


def flags_markdown() -> str:
    """``docs/flags.md``: every flag with its type, default and meaning, generated from the sections."""
    lines = [
        "# Flags",
        "",
        "Generated by `make docs`; do not edit. Each flag is also a key of the `--config` YAML file.",
        "Booleans take `1`/`0` or `true`/`false`. Names and meanings are those of SMP v2's `train_lib.py`;",
        "[docs/smp_v2.md](smp_v2.md) lists what differs. *Class* says what a flag does today: **live** changes the",
        "run; **no effect** is accepted and logged, because what it asks for holds by construction; **limited**",
        "accepts only the listed value and refuses others with a sentence.",
    ]
    for section, cls in SECTIONS.items():
        lines += ["", f"## {section}", "", (cls.__doc__ or "").strip().splitlines()[0], ""]
        lines += ["| flag | value | default | class | meaning |", "|---|---|---|---|---|"]
        for name, flag in FLAGS.items():
            if flag.section == section and name == flag.field.name:
                lines.append(_flag_row(name, flag))
    lines += [
        "", "## What the prefetch flags do", "",
        "| flag | FSDP1 | here, with `fully_shard` |", "|---|---|---|",
        "| `--forward_prefetch 1` | gathers one unit ahead | `set_modules_to_forward_prefetch`, one unit ahead |",
        "| `--forward_prefetch 0` | gathers when needed | the same |",
        "| `--backward_fetch_policy backward_pre` | gathers the next unit before the current backward | the same |",
        "| `--backward_fetch_policy backward_post` | gathers it after | no prefetch: gathered when used |",
        "| `--limit_all_gathers` | holds back gathers | no effect: bounded by construction |",
    ]  # fmt: skip
    lines += ["", "## Retired", "", "Refused with the sentence shown.", "", "| flag | |", "|---|---|"]
    lines += [f"| `--{name}` | {text} |" for name, text in sorted(RETIRED.items())]
    return "\n".join(lines) + "\n"


def _flag_row(name: str, flag: Flag) -> str:
    metadata = flag.field.metadata
    meaning = metadata["help"]
    kind = "live"
    if metadata["only"]:
        kind, meaning = "limited", f"{meaning} Otherwise: {metadata['otherwise']}."
    elif metadata["no_effect"]:
        kind, meaning = "no effect", f"{meaning} {metadata['no_effect']}."
    names = ", ".join(f"`--{n}`" for n in (name, *metadata["aliases"]))
    cells = (names, flag.allowed, f"`{_default_text(flag)}`", kind, meaning)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
