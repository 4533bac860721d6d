"""The shape of the code: one-way imports, one reader of the environment, one place that parses, size budgets."""

from __future__ import annotations

import ast
import functools
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator

ROOT = pathlib.Path(__file__).parents[2]

# A file imports only from lower layers, or from its own package within one layer.
LAYERS = {
    "smp.errors": 0, "smp.compat.absent": 0,
    "smp.config": 1, "smp.log": 1, "smp.units": 1, "smp.json_input": 1, "smp.yaml_input": 1,
    "smp.axes": 1, "smp.processes": 1, "smp.process_groups": 1,
    "smp.environment": 1,
    "smp.starting": 2, "smp.runtime": 2, "smp.mesh": 2, "smp.local_shards": 1, "smp.models": 2, "smp.loss": 2,
    "smp.comm": 3, "smp.cpu_bf16": 3, "smp.delayed_init": 3, "smp.memory.shape": 3, "smp.memory.warnings": 3,
    "smp.optim": 3, "smp.pretrained": 4, "smp.parallel": 4,
    "smp.parallel.parallelize": 5, "smp.plots": 5,
    "smp.faults": 4, "smp.data": 5, "smp.compat": 5,
    "smp.checkpoint": 6, "smp.fsdp": 6, "smp.api": 6, "smp.memory": 6,
    "smp": 7, "smp.sagemaker": 8,
    "smp.plan.records": 7, "smp.plan.cost": 7, "smp.plan.document": 7, "smp.plan.ledger": 7,
    "smp.plan.devices": 7, "smp.launch.local": 3, "smp.launch.hosts": 3,
    "smp.train": 8, "smp.plan": 9, "smp.doctor": 10, "smp.launch": 10, "smp.report": 10,
    "smp.cli": 11, "smp.__main__": 12,
    "arguments": 13, "train_lib": 13, "data": 13,
}  # fmt: skip

# Files over 400 lines, each with its reason.
LONG_FILES: dict[str, str] = {}


@functools.cache
def sources() -> list[pathlib.Path]:
    return sorted([*ROOT.glob("*.py"), *ROOT.glob("smp/**/*.py"), *ROOT.glob("data/**/*.py")])


def module_name(path: pathlib.Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer(module: str) -> int:
    while module:
        if module in LAYERS:
            return LAYERS[module]
        module = module.rpartition(".")[0]
    raise AssertionError("no layer")


def package(module: str) -> str:
    """The room a module is in: each package or file of smp, and what is outside it."""
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] == "smp" else parts[0]


@functools.cache
def nodes(path: pathlib.Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text())))


@functools.cache
def imports(path: pathlib.Path) -> list[str]:
    found = []
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


@functools.cache
def modules() -> set[str]:
    return {module_name(path) for path in sources()}


def own(name: str) -> str | None:
    """The project's module that an imported name comes from."""
    while name and name not in modules():
        name = name.rpartition(".")[0]
    return name or None


def test_every_file_has_a_layer():
    top = {".".join(module_name(p).split(".")[:2]) for p in sources() if module_name(p) != "smp"}
    assert {m for m in top if m not in LAYERS and m.split(".")[0] != "data"} == set()


def test_imports_go_down_only():
    wrong = []
    for path in sources():
        name = module_name(path)
        for target in filter(None, map(own, imports(path))):
            same_package = package(target) == package(name)
            allowed = layer(target) <= layer(name) if same_package else layer(target) < layer(name)
            if not allowed and target != name:
                wrong.append(f"{name} (layer {layer(name)}) imports {target} (layer {layer(target)})")
    assert wrong == []


def test_no_import_cycle():
    graph = {module_name(p): {t for t in map(own, imports(p)) if t and t != module_name(p)} for p in sources()}

    def reachable(start: str) -> set[str]:
        seen: set[str] = set()
        todo = list(graph[start])
        while todo:
            node = todo.pop()
            if node not in seen:
                seen.add(node)
                todo += graph[node]
        return seen

    assert [name for name in graph if name in reachable(name)] == []


def test_only_runtime_reads_the_environment():
    readers = {module_name(p) for p in sources() if re.search(r"\bos\.(environ|getenv)\b", p.read_text())}
    # The doctor compares variables of others (NCCL, gloo, Slurm) with the machine; it decides nothing by them.
    environment = {"smp.environment", "smp.environment.malloc", "smp.environment.threads"}
    assert readers == {*environment, "smp.runtime", "smp.doctor.system"}


def test_only_known_places_parse_a_command_line():
    allowed = {"smp.train.arguments", "smp.data.prepare", "data.sample.build", "smp.launch.local", "smp.plots"}
    commands = ("verify", "inspect", "export", "diff", "report", "doctor", "launch", "plan")
    allowed |= {"smp.cli", *(f"smp.cli.{name}" for name in commands)}
    assert {module_name(p) for p in sources() if "argparse" in imports(p)} <= allowed
    assert {module_name(p) for p in sources() if "yaml" in imports(p)} <= {
        "smp.train.arguments",
        "smp.train.report",
        "smp.yaml_input",
        "smp.launch.kubernetes",
        "smp.optim.groups",
    }


def test_models_import_nothing_distributed():
    for path in ROOT.glob("smp/models/*.py"):
        assert not [name for name in imports(path) if name.startswith("torch.distributed")], path


def test_the_whole_configuration_stays_at_the_top():
    users = {module_name(p) for p in sources() if any(i.endswith(".TrainConfig") for i in imports(p))}
    assert users <= {
        "arguments",
        "smp.train.dry_run",
        "smp.train.start",
        "smp.train.checked_job",
        "smp.train.job",
        "smp.train.output_paths",
        "smp.train.report",
        "smp.doctor.check",
    }


ROLES = {"replicas", "shard", "tp", "data", "loss"}


NAMES = {"rank": {"rank"}, "size": {"world_size", "tensor_parallel_degree", "hybrid_shard_degree"}}


def of_a_role(expression: ast.AST, kind: str) -> bool:
    """Whether an expression holds ``mesh.ROLE.size``, ``mesh.ROLE.rank`` or a name that says the same."""
    for node in ast.walk(expression):
        if isinstance(node, ast.Name) and node.id in NAMES[kind]:
            return True
        if isinstance(node, ast.Attribute):
            role = node.attr == kind and isinstance(node.value, ast.Attribute) and node.value.attr in ROLES
            if role or (node.attr in NAMES[kind] and isinstance(node.value, ast.Name)):
                return True
    return False


def ranks_from_degrees(syntax: Iterable[ast.AST]) -> Iterator[ast.BinOp]:
    """Where a rank or the world is divided by a degree, or degrees are multiplied."""
    for node in syntax:
        if isinstance(node, ast.BinOp):
            divides = isinstance(node.op, (ast.FloorDiv, ast.Mod, ast.Div)) and of_a_role(node.right, "size")
            of_ranks = of_a_role(node.left, "rank") or of_a_role(node.left, "size")
            both = of_a_role(node.left, "size") and of_a_role(node.right, "size")
            if (divides and of_ranks) or (isinstance(node.op, ast.Mult) and both):
                yield node


def test_only_the_mesh_computes_ranks_from_degrees():
    """Nobody else divides a rank or the world by a degree, or multiplies degrees."""
    wrong = []
    for path in sources():
        # The environment's readers have the launcher's numbers, and the backend its own group's.
        if module_name(path).split(".")[1:2] not in (["mesh"], ["environment"], ["comm"]):
            wrong += [f"{path}:{node.lineno}" for node in ranks_from_degrees(nodes(path))]
    assert wrong == []
    for text in ("launch.rank // mesh.tp.size", "world_size % plan.mesh.tp.size", "m.shard.size * m.replicas.size"):
        assert list(ranks_from_degrees(ast.walk(ast.parse(text)))), text
    other = ast.parse("batch * mesh.data.size + tokens // mesh.loss.size")
    assert not list(ranks_from_degrees(ast.walk(other)))


def test_sizes_stay_readable():
    for path in sources():
        lines = path.read_text().count("\n")
        assert lines <= 400 or str(path.relative_to(ROOT)) in LONG_FILES, f"{path} has {lines} lines"
        for node in nodes(path):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                length = (node.end_lineno or 0) - node.lineno + 1
                assert length <= 100, f"{path}:{node.lineno} {node.name} has {length} lines"


def test_importing_smp_is_light():
    """Heavy packages are imported where they are used, ``smp.plots`` can be run by ``-m``, and no handler is added."""
    code = (
        "import logging, sys, smp\n"
        "smp.log.get_logger('a')\n"
        "print('smp.plots' in sys.modules, logging.root.handlers, logging.getLogger('smp').handlers)\n"
        "import smp.plots\n"
        "print([name for name in ('transformers', 'datasets', 'matplotlib') if name in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert out.stdout.splitlines() == ["False [] []", "[]"]


def test_no_unnumbered_todo():
    for path in sources():
        assert not re.search(r"\b(TODO|FIXME|XXX)\b(?!\(#\d+\))", path.read_text()), path


def test_what_needs_torchao_is_run_where_it_is():
    """Elsewhere it is skipped: torchao is in no environment but that of `make test-qlora`."""
    makefile = (ROOT / "Makefile").read_text()
    own = pathlib.Path(__file__)
    needing = [path for path in (ROOT / "tests").rglob("test_*.py") if 'importorskip("torchao")' in path.read_text()]
    names = {path.relative_to(ROOT).as_posix() for path in needing if path != own and path.parent.name != "gpu"}
    assert len(names) > 5 and {name for name in names if f" {name}" not in makefile.replace("\t", " ")} == set()
