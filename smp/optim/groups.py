"""Parameter groups of ``--param_groups``: which parameters get another rate, decay or optimizer, by their names."""

from __future__ import annotations

import dataclasses
import functools
import re
from pathlib import Path
from typing import Any

import yaml

from smp.errors import UserError, a_type
from smp.json_input import read_bytes
from smp.models.parameters import ParameterSpec
from smp.yaml_input import strict_yaml

_MOST = 1 << 20  # bytes of a file


@dataclasses.dataclass(frozen=True)
class ParamGroup:
    """Settings of the parameters whose names a regular expression is found in, and that no earlier group has.

    Attributes:
        pattern: of ``re.search``, in the names of transformers' model.
        lr_factor: of the job's learning rate.
        weight_decay: None: ``--weight_decay`` for matrices, and 0 for vectors.
        optimizer: None: the job's.
    """

    pattern: str
    lr_factor: float = 1.0
    weight_decay: float | None = None
    optimizer: str | None = None

    def has(self, spec: ParameterSpec) -> bool:
        """Return whether its pattern is found in the parameter's name."""
        return re.search(self.pattern, spec.name) is not None


# What is there in place of a group, of parameters that none has.
NO_GROUP = ParamGroup("")


def _group(where: str, entry: Any) -> ParamGroup:
    """Check an entry of the file."""
    names = [field.name for field in dataclasses.fields(ParamGroup)]
    if not isinstance(entry, dict) or "pattern" not in entry or (set(entry) - set(names)):
        raise UserError(f"{where} must be a mapping of {', '.join(names)}, with a pattern, got {entry!r:.200}")
    if not isinstance(entry["pattern"], str):
        raise UserError(f"{where}: pattern must be a regular expression, got {a_type(entry['pattern'])}")
    try:
        re.compile(entry["pattern"])
    except re.error as error:
        raise UserError(f"{where}: pattern {entry['pattern']!r} is no regular expression ({error})") from None
    for name in ("lr_factor", "weight_decay"):
        value = entry.get(name, 0.0)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1000:
            raise UserError(f"{where}: {name} must be a number from 0 to 1000, got {value!r}")
    if not isinstance(entry.get("optimizer", ""), str):
        raise UserError(f"{where}: optimizer must be the name of one, got {entry['optimizer']!r}")
    return ParamGroup(**entry)


@functools.lru_cache(maxsize=8)
def read_groups(path: str | None) -> tuple[ParamGroup, ...]:
    """Read the groups of a YAML or JSON file, in order; none without one.

    Raises:
        UserError: it cannot be read, or an entry is no group.
    """
    if path is None:
        return ()
    flag = f"--param_groups {path}"
    try:
        content = strict_yaml(read_bytes(Path(path).expanduser(), limit=_MOST).decode())
    except OSError as error:
        raise UserError(f"{flag} cannot be read ({error.strerror}): give a YAML or JSON file") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{flag} is no YAML or JSON ({str(error).splitlines()[0]})") from None
    if not isinstance(content, list) or not content:
        raise UserError(f"{flag} must be a list of groups, each with a pattern, got {a_type(content)}")
    return tuple(_group(f"{flag}: group {number}", entry) for number, entry in enumerate(content, 1))


def groups_as_json(path: str | None) -> list[dict[str, Any]]:
    """Return :func:`read_groups` as a manifest has them."""
    return [dataclasses.asdict(group) for group in read_groups(path)]


def group_of(spec: ParameterSpec, path: str | None) -> ParamGroup:
    """Return the first group of a file that has a parameter."""
    return next((group for group in read_groups(path) if group.has(spec)), NO_GROUP)
