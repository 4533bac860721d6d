"""Runs of tests/gpu: which tests come first, and when one fails that has executed nothing."""

from types import SimpleNamespace

import pytest

from tests import conftest


def end_of(*ends: tuple[str, str]) -> tuple[int, str]:
    """Status and last line of a run whose tests ended so: ``(how, file)``."""
    said = []
    stats = {how: [SimpleNamespace(nodeid=f"{file}::test") for other, file in ends if other == how] for how, _ in ends}
    reporter = SimpleNamespace(stats=stats, write_line=lambda text, **_: said.append(text))
    manager = SimpleNamespace(get_plugin=lambda name: reporter)
    session = SimpleNamespace(config=SimpleNamespace(pluginmanager=manager), exitstatus=0)
    conftest.pytest_sessionfinish(session)
    return session.exitstatus, "".join(said)


@pytest.mark.parametrize("ends", [
    [("skipped", "tests/gpu/test_a.py"), ("passed", "tests/gpu/test_b.py")],
    [("skipped", "tests/gpu/test_a.py"), ("skipped", "tests/unit/test_b.py")],
    [("skipped", "tests/unit/test_a.py")], [],
])  # fmt: skip
def test_a_run_of_other_tests_or_of_some_ends_as_it_did(ends):
    assert end_of(*ends) == (0, "")


def test_a_run_that_skips_all_tests_for_gpus_fails():
    status, said = end_of(("skipped", "tests/gpu/test_a.py"), ("skipped", "tests/gpu/test_b.py"))
    assert status == pytest.ExitCode.TESTS_FAILED and "SMP_TEST_GPU=1" in said


def test_files_for_gpus_that_start_processes_come_last():
    names = sorted(path.name for path in conftest.HERE.glob("gpu/test_*.py"))
    items = [SimpleNamespace(nodeid=f"tests/gpu/{name}::test", path=conftest.HERE / "gpu" / name) for name in names]
    conftest.pytest_collection_modifyitems(items)
    assert [item.path.name for item in items][-4:] == list(conftest.SEVERAL_PROCESSES)
