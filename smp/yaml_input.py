"""YAML without duplicate keys, of which PyYAML would take the last."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import yaml


class _Loader(yaml.SafeLoader):
    """Refuses a key that stands twice in one mapping; those of ``<<`` may be given again."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """Return the mapping.

        Raises:
            yaml.YAMLError: a key stands in it twice.
        """
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                mark, name = key.start_mark, (key.tag, key.value)
                if name in lines:
                    problem = f"{key.value} is given there and in line {lines[name]}: keep one of them"
                    raise yaml.MarkedYAMLError(problem=problem, problem_mark=mark)
                lines[name] = mark.line + 1
        return super().construct_mapping(node, deep)


def strict_yaml(text: str) -> Any:
    """Parse YAML without duplicate keys.

    Raises:
        yaml.YAMLError: it is no such YAML.
        ValueError: also for a date that cannot be.
        RecursionError: nested too deep.
    """
    loader = _Loader(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()
