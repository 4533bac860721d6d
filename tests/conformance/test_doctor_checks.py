"""Each check of ``smp doctor`` finds its problem when there is one, and says what to do."""

from __future__ import annotations

import errno
import json
import os
import pathlib
import re
import resource
import socket
import subprocess
import tomllib

import pytest
import torch
import torch.distributed as dist

from smp import cpu_bf16
from smp.checkpoint import disk_forecast
from smp.doctor import devices, disk, job, network, report, system
from smp.doctor.check import Check, CheckContext, Request
from smp.doctor.report import Report, diagnose
from smp.runtime import Launch
from tests.distributed import run_ranks

ROOT = pathlib.Path(__file__).parents[2]
TWO_HOSTS = Launch(0, 4, 0, 2)
GIB = 1 << 30


def look(check, *, launch=None, root="/", parameters=None, arguments=(), **settings):
    """(status, message) of everything that a check finds, run as a child process runs it."""
    flags = [word for name, value in settings.items() for word in (f"--{name}", *_words(value))]
    request = Request((*map(str, arguments), *flags), root=pathlib.Path(root))
    ctx = context(request, launch or Launch(0, 2, 0, 2))
    if parameters is not None:
        ctx.measure("model", {"checkpoint_bytes": 12 * parameters})
    Check("it", check).run(ctx)
    return [(finding.status, finding.message) for finding in ctx.report.findings]


def context(request, launch):
    return CheckContext(request, launch, Report(launch.rank))


def _words(value):
    return [
        str(int(each) if isinstance(each, bool) else each) for each in (value if isinstance(value, list) else [value])
    ]


def found(check, status, pattern, **options):
    """The one finding of a check."""
    [(got, message)] = look(check, **options)
    assert got == status and re.search(pattern, message), (got, message)
    return message


def root_with(tmp_path, **files):
    """A root with files of the system; ``__`` stands for a slash and ``DOT`` for a dot."""
    for name, content in files.items():
        path = tmp_path / name.replace("__", "/").replace("DOT", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return tmp_path


# ------------------------------------------------------------------------------------------------------------- versions


def test_the_least_versions_are_those_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {"python": project["requires-python"].removeprefix(">=")}
    wanted |= dict(each.split(">=") for each in project["dependencies"])
    assert wanted == system.MINIMUM


def test_packages_that_are_old_or_missing(monkeypatch):
    real = system.installed()
    monkeypatch.setattr(system, "installed", lambda: real | {"torch": "2.10.1+cu128", "datasets": None})
    assert look(system.check_versions) == [
        ("problem", "torch 2.10.1+cu128 is older than 2.11, the least that smp works with: pip install 'torch>=2.11'"),
        ("problem", "datasets is not installed: pip install 'datasets>=4.0'"),
    ]
    monkeypatch.undo()
    found(system.check_versions, "ok", r"python 3\..*torch 2\.")


@pytest.mark.parametrize(("text", "value"), [("2.13.0+cpu", (2, 13, 0)), ("2.11.0a0", (2, 11, 0)), ("main", ())])
def test_numbers_of_a_version(text, value):
    assert system.numbers(text) == value


def test_the_backend_without_its_means(monkeypatch):
    monkeypatch.setattr(system, "load", lambda: None)
    found(system.check_backend_parts, "warning", "install a C compiler")
    monkeypatch.setattr(system, "refusal", lambda: "aarch64 does not keep the order of stores")
    found(system.check_backend_parts, "warning", "leaves everything to gloo: aarch64")


def reports(**measured):
    """Reports of two ranks with different measurements of one name."""
    [(name, values)] = measured.items()
    return [Report(rank, measurements={name: value}, host=f"host{rank}") for rank, value in enumerate(values)]


def test_what_differs_between_ranks_is_found():
    [torch_differs] = diagnose(reports(versions=[{"torch": "2.13.0"}, {"torch": "2.12.1"}]), []).findings
    assert torch_differs.status == "problem" and torch_differs.ranks == (0, 1)
    assert torch_differs.message.startswith("torch differs: 2.13.0 on rank(s) 0; 2.12.1 on rank(s) 1: install")
    [other] = diagnose(reports(versions=[{"xxhash": "3.1"}, {"xxhash": "3.2"}]), []).findings
    assert other.status == "warning"
    [gpus] = diagnose(reports(gpu=[{"name": "H100"}, {"name": "A100"}]), []).findings
    assert gpus.status == "warning" and "the slowest decides" in gpus.message
    [files] = diagnose(reports(data=[{"training": "9 samples (a)"}, {"training": "8 samples (b)"}]), []).findings
    assert files.status == "problem" and files.check == "dry run"
    assert "training data is not the same on all hosts: 9 samples (a) on rank(s) 0; 8 samples" in files.message
    assert not list(report.differences(reports(versions=[{"torch": "2.13.0"}] * 2)))


# -------------------------------------------------------------------------------------------------------------- devices


def test_processes_against_cores_and_threads(monkeypatch, tmp_path):
    monkeypatch.setattr(devices, "cores", lambda ctx: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    found(devices.check_devices, "warning", r"OMP_NUM_THREADS is not set.* set it to 4$")
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    found(devices.check_devices, "warning", r"OMP_NUM_THREADS is 8, in each of 2 processes on 8 core\(s\): set it to 4")
    found(devices.check_devices, "warning", "16 processes share 8 core", launch=Launch(0, 16, 0, 16))
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    found(devices.check_devices, "ok", "8 core")
    assert look(devices.check_devices, launch=Launch(1, 2, 1, 2)) == []  # one rank of a host says it
    driver = root_with(tmp_path, proc__driver__nvidia__version="NVRM version: 999")
    assert look(devices.check_devices, root=driver)[0][1].startswith("this host has NVIDIA's driver, but this torch is")


def test_a_quota_counts_as_cores(tmp_path, monkeypatch):
    group = "sys__fs__cgroup__pod__cpuDOTmax"
    root = root_with(tmp_path, **{group: "150000 100000", "proc__self__cgroup": "0::/pod"})
    assert devices.cores(context(Request(root=root), Launch())) in (1, 2)
    assert devices.cores(context(Request(root=root_with(tmp_path, **{group: "50000 100000"})), Launch())) == 1
    monkeypatch.setattr(devices, "available_cores", lambda: 8)
    assert devices.cores(context(Request(root=root_with(tmp_path, **{group: "150000 100000"})), Launch())) == 2
    assert devices.cores(context(Request(root=root_with(tmp_path, **{group: "max 100000"})), Launch())) == 8


def test_fewer_gpus_than_processes(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    found(devices.check_devices, "problem", r"2 processes on a host with 1 GPU\(s\): use --nproc_per_node 1")


@pytest.mark.parametrize(("free", "status"), [(79, "ok"), (30, "warning")])
def test_a_gpu_in_use(free, status, monkeypatch):
    about = type("Properties", (), {"name": "NVIDIA X"})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (free * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: about)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    found(devices.check_devices, status, rf"NVIDIA X.*{free}.0 GiB of 80.0 GiB free")


def test_a_processor_that_traps_bf16(monkeypatch):
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    outcomes = {None: 4, "AVX512_CORE_BF16": 4, "AVX512_CORE": 0}
    monkeypatch.setattr(cpu_bf16, "try_bf16_product", outcomes.get)
    monkeypatch.setattr(cpu_bf16, "set_onednn_ceiling", lambda ceiling: None)
    found(devices.check_bf16, "warning", r"set ONEDNN_MAX_CPU_ISA=AVX512_CORE \(the training job does so by itself\)")
    monkeypatch.setattr(cpu_bf16, "try_bf16_product", lambda ceiling: 4)
    found(devices.check_bf16, "warning", "with every instruction set: use --bf16 0")
    found(devices.check_bf16, "problem", "with every instruction set: use --bf16 0", bf16=True)


MEMINFO = "MemTotal: 67108864 kB\nMemAvailable: 33554432 kB\n"


def test_a_containers_memory_limit(tmp_path):
    root = root_with(tmp_path, proc__meminfo=MEMINFO)
    found(devices.check_memory, "ok", "32.0 GiB of 64.0 GiB available, no container's limit", root=root)
    group = {"sys__fs__cgroup__memoryDOTmax": str(8 * GIB), "sys__fs__cgroup__memoryDOTcurrent": str(2 * GIB)}
    root = root_with(tmp_path, **group)
    found(devices.check_memory, "ok", "may use 8.0 GiB of the host's 64.0 GiB, 6.0 GiB are left", root=root)
    root_with(tmp_path, sys__fs__cgroup__memoryDOTcurrent=str(7 * GIB))
    found(devices.check_memory, "warning", r"1.0 GiB are left for 2 process\(es\).*raise the container", root=root)
    root_with(tmp_path, sys__fs__cgroup__memoryDOTstat=f"anon 1\ninactive_file {3 * GIB}\nactive_file 5\n")
    found(devices.check_memory, "ok", "4.0 GiB are left", root=root)
    older = root_with(
        tmp_path / "older", proc__meminfo=MEMINFO, sys__fs__cgroup__memory__memoryDOTlimit_in_bytes=str(4 * GIB)
    )
    found(devices.check_memory, "ok", "may use 4.0 GiB", root=older)
    endless = root_with(
        tmp_path / "endless", proc__meminfo=MEMINFO, sys__fs__cgroup__memory__memoryDOTlimit_in_bytes=str(1 << 62)
    )
    found(devices.check_memory, "ok", "no container's limit", root=endless)


def limits(monkeypatch, **soft):
    real = resource.getrlimit
    values = {getattr(resource, name): value for name, value in soft.items()}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (values[kind], 4096) if kind in values else real(kind))


def test_limits_of_a_process(monkeypatch, tmp_path):
    limits(monkeypatch, RLIMIT_DATA=2 * GIB, RLIMIT_NOFILE=600, RLIMIT_MEMLOCK=65536)
    assert ("warning", "RLIMIT_DATA lets each process have 2.0 GiB at most: raise it with ulimit -d unlimited") in look(
        devices.check_memory
    )
    found(devices.check_limits, "ok", "600 files")
    found(
        devices.check_limits, "problem", "600 files, and 64 processes .* about 1024 .*ulimit -n", launch=Launch(0, 64)
    )
    (tmp_path / "dev/shm").mkdir(parents=True)
    assert len(look(devices.check_shared_memory, root=tmp_path)) == 1  # no adapter that needs locked memory
    (tmp_path / "sys/class/infiniband/efa0").mkdir(parents=True)
    assert "ulimit -l unlimited" in look(devices.check_shared_memory, root=tmp_path)[1][1]


def test_a_small_shared_memory(monkeypatch, tmp_path):
    found(devices.check_shared_memory, "warning", r"/dev/shm cannot be used \(No such file", root=tmp_path)

    class Status:
        f_blocks, f_frsize, f_bavail = 16384, 4096, 16000

    monkeypatch.setattr(devices.os, "statvfs", lambda path: Status)
    found(devices.check_shared_memory, "warning", "62.5 MiB of 64.0 MiB free.*--shm-size 8g")


# ---------------------------------------------------------------------------------------------------------- environment

PRESENT = ["lo", "eth0", "ib0"]


def no_address(name):
    raise OSError(-2, "Name or service not known")


@pytest.mark.parametrize(
    ("values", "launch", "status", "pattern"),
    [
        ({"GLOO_SOCKET_IFNAME": "eth1"}, TWO_HOSTS, "problem", "no interface eth1; it has lo, eth0, ib0"),
        ({"GLOO_SOCKET_IFNAME": "lo"}, TWO_HOSTS, "problem", "cannot reach other hosts"),
        ({"NCCL_SOCKET_IFNAME": "en"}, TWO_HOSTS, "problem", "NCCL_SOCKET_IFNAME=en names none"),
        ({"NCCL_SOCKET_IFNAME": "=eth"}, TWO_HOSTS, "problem", "NCCL_SOCKET_IFNAME==eth names none"),
        ({"MASTER_ADDR": "localhost"}, TWO_HOSTS, "problem", "MASTER_ADDR=localhost is each host's own address"),
        ({"MASTER_ADDR": "head"}, TWO_HOSTS, "problem", "MASTER_ADDR=head has no address here"),
        ({"NCCL_P2P_DISABLE": "1"}, TWO_HOSTS, "warning", "NCCL_P2P_DISABLE=1: GPUs of one host"),
        ({"TORCH_DISTRIBUTED_DEBUG": "detail"}, TWO_HOSTS, "warning", "compares every collective"),
        ({"NCCL_DEBUG": "INFO"}, TWO_HOSTS, "warning", "prints a lot"),
        ({"SLURM_NTASKS": "16"}, Launch(), "warning", "Slurm allocation of 16 tasks: `srun"),
    ],
)
def test_variables_that_do_not_fit(values, launch, status, pattern):
    [(got, message)] = system.contradictions(values, launch, PRESENT, no_address)
    assert got == status and re.search(pattern, message), (got, message)


@pytest.mark.parametrize(
    "values",
    [
        {"GLOO_SOCKET_IFNAME": "eth0,ib0"}, {"NCCL_SOCKET_IFNAME": "eth"}, {"NCCL_SOCKET_IFNAME": "^lo,docker"},
        {"NCCL_P2P_DISABLE": "0"}, {"NCCL_DEBUG": "WARN"}, {"SLURM_NTASKS": "4"},
    ],
)  # fmt: skip
def test_variables_that_fit(values):
    assert list(system.contradictions(values, TWO_HOSTS, PRESENT, no_address)) == []


def test_secrets_of_the_environment_are_never_said(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_verysecretverysecret")
    monkeypatch.setenv("HTTPS_PROXY", "http://me:verysecret@proxy:3128")
    monkeypatch.setenv("SMDDP_AG_SCRATCH_BUFFER_SIZE_BYTES", "12")
    ctx = context(Request(), Launch())
    system.check_environment(ctx)
    text = ctx.report.as_json()
    assert "verysecret" not in text and "HTTPS_PROXY" in text
    assert "SMDDP_AG_SCRATCH_BUFFER_SIZE_BYTES=12 is not allowed" in text


def test_a_host_name_that_others_cannot_reach(monkeypatch):
    def resolves(*addresses):
        answer = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, 0)) for each in addresses]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answer)

    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    resolves("127.0.1.1")
    found(system.check_hostname, "ok", "fine on one host")
    found(system.check_hostname, "problem", "127.0.1.1, which other.*GLOO_SOCKET_IFNAME", launch=TWO_HOSTS)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    found(system.check_hostname, "ok", "GLOO_SOCKET_IFNAME=eth0", launch=TWO_HOSTS)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    resolves("10.0.0.5", "127.0.0.1")
    found(system.check_hostname, "ok", "10.0.0.5", launch=TWO_HOSTS)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: no_address(""))
    found(system.check_hostname, "problem", "has no address", launch=TWO_HOSTS)


# ----------------------------------------------------------------------------------------------------------------- disk


def test_a_good_directory_is_left_as_it_was(tmp_path):
    found(
        disk.check_disk,
        "ok",
        "32.0 MiB, to be written in about .* s; .* are free",
        output_dir=str(tmp_path / "a" / "b"),
    )
    assert list(tmp_path.iterdir()) == []


def test_directories_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    found(disk.check_disk, "problem", "file is a file: choose", output_dir=str(tmp_path / "file" / "run"))
    found(disk.check_disk, "problem", "/proc/run has 0 B free", output_dir="/proc/run")

    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(disk_forecast.os, "fsync", refuse)
    found(disk.check_disk, "problem", r"cannot be written \(No locks available\)", output_dir=str(tmp_path))
    monkeypatch.undo()
    monkeypatch.setattr(disk.fcntl, "flock", refuse)
    first, _ = look(disk.check_disk, output_dir=str(tmp_path))
    assert first[0] == "problem" and "without flock" in first[1]
    monkeypatch.undo()
    monkeypatch.setattr(pathlib.Path, "symlink_to", refuse)
    first, _ = look(disk.check_disk, output_dir=str(tmp_path))
    assert first[0] == "warning" and "takes no symbolic links" in first[1]


def test_a_disk_that_is_full_or_none(tmp_path, monkeypatch):
    large = {"parameters": 10**9, "output_dir": str(tmp_path)}
    for module in (disk, disk_forecast):
        monkeypatch.setattr(module, "disk_free", lambda path: 8 * GIB)
    found(disk.check_disk, "problem", "has 8.0 GiB free and a checkpoint needs about 11.2 GiB: free some", **large)
    for module in (disk, disk_forecast):
        monkeypatch.setattr(module, "disk_free", lambda path: 30 * GIB)
    found(
        disk.check_disk, "warning", "3 kept ones and the one being written 44.7 GiB", **large, num_kept_checkpoints=[3]
    )
    message = "a checkpoint of 11.2 GiB, to be written in about .* s; 30.0 GiB are free"
    found(disk.check_disk, "ok", message, **large, num_kept_checkpoints=[1])
    mounts = f"proc / ext4 rw 0 0\nnone {tmp_path} tmpfs rw 0 0\n"
    root = root_with(tmp_path / "root", proc__self__mounts=mounts)
    assert "is on tmpfs, which is memory" in look(disk.check_disk, root=root, output_dir=str(tmp_path))[1][1]


def test_a_really_full_disk(tmp_path):
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", tmp_path], capture_output=True)
    if mounted.returncode:
        pytest.skip("needs the right to mount a file system")
    try:
        (tmp_path / "rest").write_bytes(bytes(disk.disk_free(tmp_path) - (1 << 20)))
        found(disk.check_disk, "problem", "has 1.0 MiB free and a checkpoint needs", output_dir=str(tmp_path))
        assert [path.name for path in tmp_path.iterdir()] == ["rest"]
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_what_is_written_has_no_name(tmp_path, monkeypatch):
    """So that nothing is left where the process is killed."""
    seen = []
    real = os.fsync

    def flush(descriptor):
        seen.append(list(tmp_path.iterdir()))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", flush)
    found(disk.check_disk, "ok", "to be written in about", output_dir=str(tmp_path))
    assert seen and not any(seen) and list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------------------------- the job


def test_jobs_that_fit_and_that_do_not(tmp_path):
    found(job.check_plan, "ok", "no job was planned", output_dir=str(tmp_path))
    tiny = {"model": "llama_tiny", "output_dir": str(tmp_path / "run")}
    fits, data = look(job.check_plan, **tiny)
    assert re.search(r"llama_tiny: 2,077,920 parameters; each process needs about \d", fits[1]) and fits[0] == "ok"
    assert data == ("ok", "random tokens: no data was read")
    large = {"model": "llama3_405b", "output_dir": str(tmp_path / "run")}
    found(job.check_plan, "problem", r"llama3_405b on 2 process\(es\) needs about \d+", **large)
    found(job.check_plan, "problem", "did you mean llama_tiny", model="lama_tiny")
    found(job.check_plan, "problem", "does not divide", **tiny, tensor_parallel_degree=3)
    [(_, first), second] = look(job.check_plan, **tiny, validation_freq=5)
    assert first.startswith("no training data")
    assert second == ("problem", "--validation_freq 5 needs validation data: set --test_dir")
    found(job.check_plan, "problem", "--lr takes a number", **tiny, lr="x", use_synthetic_data=1)
    assert list(tmp_path.iterdir()) == []


def test_data_is_read_as_the_job_reads_it(tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"input_ids": [1, 2, 63]}) + "\n")
    words = {
        "model": "llama_tiny", "training_dir": str(tmp_path), "output_dir": str(tmp_path / "run"),
        "data_cache_dir": str(tmp_path / "cache"), "max_context_width": 4,
    }  # fmt: skip
    [_, (status, message)] = look(job.check_plan, **words)
    assert status == "warning" and "1 sample(s) of at most 4 tokens, less than one step of 4" in message
    [_, (status, message)] = look(job.check_plan, **words, launch=Launch(), train_batch_size=1)
    assert status == "ok" and "1 sample(s) of at most 4 tokens" in message
    found(job.check_plan, "problem", "token id 63 is outside the model's vocabulary of 8", **words, vocab_size=8)
    found(job.check_plan, "problem", "no such|not exist|there are no", **words | {"training_dir": str(tmp_path / "no")})
    sample = ROOT / "data" / "sample"
    words |= {
        "training_dir": sample / "train.txt", "tokenizer_name_or_dir": sample / "tokenizer", "dataset_type": "text",
        "vocab_size": 64,
    }  # fmt: skip
    found(job.check_plan, "problem", "train.txt, line 1: .* outside the model's vocabulary of 64", **words)


# ----------------------------------------------------------------------------------------- what only all see together


def together(check, size, hosts="aa", **settings):
    """What rank 0 says of a check that ``size`` ranks of a group run, and its measurements."""

    def run():
        flags = tuple(word for name, value in settings.items() for word in (f"--{name}", value))
        ctx = context(Request(flags), Launch(dist.get_rank(), size, dist.get_rank(), size))
        ctx.state.update(backend=dist.get_backend(), hosts=hosts, store=dist.distributed_c10d._get_default_store())
        assert Check("it", check, "job").run(ctx), ctx.report
        return ctx.report.as_json()

    first, *others = run_ranks(run, world_size=size)
    assert not any(each.error for each in (first, *others)), first.error
    found = Report.from_json(first.result)
    assert not any(Report.from_json(outcome.result).findings for outcome in others)
    [finding] = found.findings
    return finding.status, finding.message, found.measurements


def test_a_clock_that_is_ahead_is_named(monkeypatch):
    monkeypatch.setattr(network, "wall_clock", lambda: 1e9 + 5 * (dist.get_rank() == 1))
    status, message, measured = together(network.check_clocks, 3)
    assert status == "warning" and "clocks differ by 5.0 s (rank(s) 1 by +5.0 s)" in message
    assert measured["clock_offsets_seconds"] == [0, 5, 0]


def test_a_backend_that_falls_back_says_why(monkeypatch):
    monkeypatch.setattr("smp.comm.segment.refusal", lambda: "of the weather")
    status, message, measured = together(network.check_exchange, 2)
    assert status == "warning" and "by gloo (of the weather)" in message and "GiB/s" in message
    assert set(measured["paths"]) == {"gloo"}


@pytest.mark.parametrize("shared", [True, False])
def test_a_run_directory_that_is_not_shared_is_found(shared, monkeypatch, tmp_path):
    def apart(ctx):
        folder = tmp_path / ("one" if shared else str(ctx.launch.rank))
        folder.mkdir(exist_ok=True)
        os.chdir(folder)
        network.check_same_directory(ctx)

    monkeypatch.setattr(network, "_MARK_SECONDS", 0.3)
    status, message, _ = together(apart, 2, hosts="ab", output_dir="run")
    if shared:
        assert status == "ok" and "all hosts see" in message
    else:
        assert status == "problem" and "rank(s) 1 do not see what rank 0 writes" in message
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
