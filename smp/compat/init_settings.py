"""Read what :func:`smp.init` is given: the settings of a mesh, by their own names or SMP v2's, and SMP v2's keys."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import re
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

from smp.axes import AXES
from smp.config import ParallelConfig
from smp.errors import ConfigError, UserError, a_type
from smp.json_input import from_text, read_json

# SMP v2's keys that are no settings of ParallelConfig: the values that are accepted, and what to do about others.
_SMP_KEYS: dict[str, tuple[tuple[Any, ...], str]] = {
    "sm_activation_offloading": ((False, True), "use True or False, and apply smp.offload_wrapper to the model"),
    "allow_empty_shards": ((True, False), "use True or False; fully_shard always allows empty shards"),
}


# Whole numbers among them: (default, least, greatest).
_SMP_NUMBERS = {"random_seed": (0, 0, 2**31 - 1), "activation_loading_horizon": (2, 1, 10_000)}


def _names_of_mesh() -> dict[str, str]:
    """Return the mesh's names of degrees, by setting."""
    return {axis.flag: axis.name for axis in AXES} | {"hybrid_shard_degree": "dp_shard"}


@contextlib.contextmanager
def in_names_of_init(given: Container[str]) -> Iterator[None]:
    """Let refusals of settings name them as ``init`` was given them, and not as the job's flags."""

    def name(flag: re.Match[str]) -> str:
        short = _names_of_mesh().get(flag[1], flag[1])
        return short if short in given else flag[1]

    try:
        yield
    except UserError as error:
        problems = error.problems if isinstance(error, ConfigError) else [str(error)]
        text = "; ".join(re.sub(r"--(\w+)", name, problem) for problem in problems)
        raise UserError(text if text.startswith("smp.init: ") else f"smp.init: {text}") from None


def read_smp_keys(values: dict[str, Any]) -> dict[str, Any]:
    """Take SMP v2's own keys out of ``values``.

    Raises:
        UserError: a value asks for what does not exist.
    """
    found = {}
    for key, (allowed, otherwise) in _SMP_KEYS.items():
        found[key] = value = values.pop(key, allowed[0])
        if value not in allowed:
            raise UserError(f"smp.init: {key} {value} is not available: {otherwise}")
    for key, (default, least, greatest) in _SMP_NUMBERS.items():
        found[key] = value = values.pop(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= greatest:
            raise UserError(f"smp.init: {key} {value} is not allowed: give an integer from {least} to {greatest}")
    return found


def read_config(config: dict[str, Any] | str | Path | None) -> dict[str, Any]:
    """Return what ``init`` was given as a dict.

    Raises:
        UserError: it is none of the three, or no readable JSON file.
    """
    if isinstance(config, (str, Path)):
        try:
            config = read_json(Path(config))
        except (OSError, ValueError) as error:
            raise UserError(f"smp.init: {config} is no readable JSON ({error}): give a dict or a JSON file") from None
    values = {} if config is None else config
    if not isinstance(values, dict):
        raise UserError(f"smp.init takes a dict, the path of a JSON file or None, got {a_type(values)}")
    return values


def read_settings(values: dict[str, Any], keywords: dict[str, Any], preset: dict[str, Any]) -> dict[str, Any]:
    """Return all settings of ``init`` by the names of the fields and of SMP v2's keys; texts as JSON's numbers.

    Args:
        preset: those that were set on ``smp.state`` before.

    Raises:
        UserError: a key is not known, or there are two values for one setting.
    """
    known = {key: key for key in (*_SMP_KEYS, *_SMP_NUMBERS, "dp_replicate")}
    known |= {name: field for field, name in _names_of_mesh().items()}
    for field in dataclasses.fields(ParallelConfig):
        known |= dict.fromkeys((field.name, *field.metadata["aliases"]), field.name)
    given: dict[str, str] = {}  # as it is called there, by the field's name
    for key in (*values, *keywords):
        if key not in known:
            near = difflib.get_close_matches(key, sorted(known), n=1)
            hint = f"did you mean {near[0]}?" if near else f"known keys: {', '.join(sorted(known))}"
            raise UserError(f"smp.init: unknown key {key}: {hint}")
        if known[key] in given:
            raise UserError(f"smp.init: {given[known[key]]} and {key} are given for the same setting: give one of them")
        given[known[key]] = key
    found = {name: from_text((keywords if key in keywords else values)[key]) for name, key in given.items()}
    for name, value in preset.items():
        if found.setdefault(name, value) != value:
            raise UserError(
                f"smp.init: {name} is {found[name]}, and smp.state.{name} was set to {value} before: leave one out"
            )
    return found
