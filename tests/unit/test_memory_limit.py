"""What a control group leaves: its own limit and those above it, both versions, and what the kernel gives back."""

import pytest

from smp.memory.limits import memory_limit

GIB = 1 << 30


def system(tmp_path, **files):
    """A root with files of the system; ``__`` stands for a slash and ``DOT`` for a dot."""
    for name, content in files.items():
        path = tmp_path / name.replace("__", "/").replace("DOT", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(content))
    return tmp_path


def group(folder, limit, used, cache, *, older=False):
    names = ("memoryDOTlimit_in_bytes", "memoryDOTusage_in_bytes") if older else ("memoryDOTmax", "memoryDOTcurrent")
    stat = f"anon 7\ninactive_file {0 if older else cache}\nactive_file 9\ntotal_inactive_file {cache}\n"
    values = zip((*names, "memoryDOTstat"), (limit, used, stat), strict=True)
    return {f"sys__fs__cgroup__{folder}{name}": value for name, value in values}


@pytest.mark.parametrize(("folder", "older"), [("", False), ("memory__", True)])
@pytest.mark.parametrize(
    ("used", "cache", "left"),
    [(15 * GIB, 14 * GIB, 15 * GIB), (2 * GIB, 0, 14 * GIB), (17 * GIB, 0, 0), (GIB, 3 * GIB, 16 * GIB)],
)
def test_the_cache_of_files_is_not_used_up(folder, older, used, cache, left, tmp_path):
    root = system(tmp_path, **group(folder, 16 * GIB, used, cache, older=older))
    assert memory_limit(root) == (16 * GIB, left)


def test_the_tightest_of_the_groups_counts(tmp_path):
    """Slurm limits a step, two levels above the task."""
    root = system(tmp_path, proc__self__cgroup="0::/job/step/task", **group("job__step__task__", "max", GIB, 0))
    assert memory_limit(root) is None
    system(root, **group("job__step__", 4 * GIB, GIB, 0), **group("job__", 3 * GIB, 2 * GIB, 0))
    assert memory_limit(root) == (3 * GIB, GIB)


def test_the_older_kind_of_a_controller(tmp_path):
    own = group("memory__job__", 4 * GIB, GIB, 0, older=True)
    root = system(tmp_path, proc__self__cgroup="9:name=systemd:/\n4:cpu,memory:/job\n0::/", **own)
    assert memory_limit(root) == (4 * GIB, 3 * GIB)
    assert memory_limit(system(tmp_path / "none")) is None
