"""Names of torch and transformers that smp uses, read from its source, and which of them the installed versions have.

``python -m tests.names`` writes those that are there to :data:`FLOOR`: run it where the oldest supported versions are.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pathlib
import re
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).parents[1]
FLOOR = ROOT / "tests" / "data" / "names_at_the_floor.txt"
LIBRARIES = ("torch", "transformers")


def _imported(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield what a file calls a module or name of the libraries, and its full name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield (alias.asname, alias.name) if alias.asname else (alias.name.split(".")[0],) * 2
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def _dotted(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Attribute) and (before := _dotted(node.value)):
        return [*before, node.attr]
    return [node.id] if isinstance(node, ast.Name) else []


def used(source: str) -> set[str]:
    """Return the full names of the libraries' modules, classes, functions and values that a file names."""
    tree = ast.parse(source)
    full = {short: name for short, name in _imported(tree) if name.split(".")[0] in LIBRARIES}
    chains = (_dotted(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    return {*full.values(), *(".".join([full[first], *rest]) for first, *rest in filter(None, chains) if first in full)}


def used_by_smp() -> set[str]:
    """Return the names that all files of smp use; without operators and modules that smp itself adds."""
    files = [*ROOT.glob("smp/**/*.py"), *ROOT.glob("*.py"), *ROOT.glob("data/*.py")]
    found = set().union(*(used(path.read_text()) for path in files))
    return {name for name in found if not re.match(r"torch\.(sagemaker|ops\.(?!aten\.))", name)}


def missing(name: str) -> bool:
    """Return True if the installed versions do not have a name; what instances have is not looked at."""
    library, *rest = name.split(".")
    found, path = importlib.import_module(library), library
    for part in rest:
        path += f".{part}"
        if not (inspect.ismodule(found) or inspect.isclass(found)):
            return False
        try:
            found = getattr(found, part)
        except AttributeError:
            try:
                found = importlib.import_module(path)
            except ImportError:
                return not (inspect.isclass(found) and part in getattr(found, "__annotations__", {}))
    return False


if __name__ == "__main__":
    FLOOR.write_text("".join(f"{name}\n" for name in sorted(used_by_smp()) if not missing(name)))
