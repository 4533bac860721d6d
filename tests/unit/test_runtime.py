"""Ranks, backend and device from the launcher."""

import functools
import json
import multiprocessing
import os
import pathlib
import tempfile

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

import smp
from smp import runtime
from smp.config import CommConfig
from smp.environment.threads import set_default_threads, share_cores
from smp.errors import UserError
from smp.runtime import Launch, choose_backend, choose_device, data_channel, process_group, read_launch, release_cache
from tests.clock import HANG_SECONDS
from tests.distributed import GROUP_SECONDS, run_distributed

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def test_torchruns_variables(monkeypatch):
    for name, value in zip(NAMES, (5, 8, 1, 4), strict=True):
        monkeypatch.setenv(name, str(value))
    assert read_launch() == Launch(5, 8, 1, 4)


@pytest.mark.parametrize(("name", "value"), [("LOCAL_RANK", None), ("WORLD_SIZE", "two")])
def test_half_an_environment_is_refused(name, value, monkeypatch):
    for other in NAMES:
        monkeypatch.setenv(other, "1")
    monkeypatch.delenv(name) if value is None else monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=name):
        read_launch()


def test_backend_follows_the_device():
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 0)
    assert choose_backend(CommConfig(), cpu) == "smddp" and choose_backend(CommConfig(), cuda) == "nccl"
    with pytest.raises(UserError, match="gloo cannot shard a model on GPUs"):
        choose_backend(CommConfig(distributed_backend="gloo"), cuda)
    with pytest.raises(UserError, match="nccl needs GPUs and none is visible: use smddp or gloo"):
        choose_backend(CommConfig(distributed_backend="nccl"), cpu)
    for device in (cpu, cuda):
        assert choose_backend(CommConfig(distributed_backend="smddp"), device) == "smddp"


def test_device_of_each_local_rank(monkeypatch):
    assert choose_device(Launch()) == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device(Launch(3, 4, 1, 2)) == torch.device("cuda", 1)
    with pytest.raises(UserError, match=r"4 processes on a host with 2 GPU"):
        choose_device(Launch(3, 4, 3, 4))


def test_channels_and_threads(monkeypatch):
    monkeypatch.setenv("SM_CHANNEL_TRAIN", "/data")
    assert data_channel("train") == "/data" and data_channel("test") is None
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    set_default_threads(2)
    import os

    assert os.environ["OMP_NUM_THREADS"] == "3"
    monkeypatch.delenv("OMP_NUM_THREADS")
    set_default_threads(10_000)
    assert os.environ.pop("OMP_NUM_THREADS") == "1"
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)  # as on macOS
    for cores, expected in ((8, "4"), (None, "1")):
        monkeypatch.setattr(os, "cpu_count", lambda cores=cores: cores)
        set_default_threads(2)
        assert os.environ.pop("OMP_NUM_THREADS") == expected


def _check_shares(rank_0, rank_1, variable, expected):
    cores = (rank_0, rank_1)[dist.get_rank()]
    os.sched_getaffinity = lambda pid: cores
    os.environ.pop("OMP_NUM_THREADS", None)
    os.environ.update({"OMP_NUM_THREADS": variable} if variable else {})
    torch.set_num_threads(2)
    share_cores()
    assert torch.get_num_threads() == expected


@pytest.mark.parametrize(
    ("rank_0", "rank_1", "variable", "expected"),
    [
        (range(8), range(8), "1", 4),  # torchrun's
        (range(8), range(8), None, 4),
        (range(8), range(8), "3", 2),  # the user's: stays as it is
        (range(6), range(6, 12), "1", 6),  # srun's: cores of its own
        (range(1), range(1), "1", 1),
    ],
)
def test_processes_that_update_on_the_cpu_share_its_cores(rank_0, rank_1, variable, expected):
    run_distributed(_check_shares, rank_0, rank_1, variable, expected, world_size=2)


@pytest.mark.parametrize(("offload", "device", "expected"), [(True, "cuda", 1), (False, "cuda", 0), (True, "cpu", 0)])
def test_a_gpus_process_that_offloads_takes_its_share_of_the_cores(offload, device, expected, monkeypatch):
    calls = []
    monkeypatch.setattr(runtime, "_start_group", lambda *args: [])
    monkeypatch.setattr(runtime, "share_cores", lambda: calls.append(1))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    with process_group(CommConfig(), Launch(), torch.device(device), cpu_offload=offload):
        assert len(calls) == expected


def test_release_cache_gives_memory_back():
    from smp.memory.tracker import rss_bytes

    blocks = [torch.ones(25_000) for _ in range(2000)]  # below the size that malloc maps by itself
    held = rss_bytes()
    del blocks
    release_cache(torch.device("cpu"))
    assert rss_bytes() < held - 100 * 2**20


# --- smp.init_process_group

TORCHRUNS = (*NAMES, "MASTER_ADDR", "MASTER_PORT")


def _in_environment(environment, folder, rank, fn, args):
    for name in [name for name in os.environ if name.startswith(("OMPI_", "PMI", "SLURM_", "SM_", "TORCHELASTIC"))]:
        del os.environ[name]
    for name in TORCHRUNS:
        os.environ.pop(name, None)
    os.environ.update(environment)
    torch.set_num_threads(1)
    pathlib.Path(folder, str(rank)).write_text(json.dumps(fn(*args)))


def in_environments(environments, fn, *args):
    """What ``fn`` returns in a process for each environment."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=_in_environment, args=(environment, folder, rank, fn, args))
            for rank, environment in enumerate(environments)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(HANG_SECONDS)
            process.kill()
        assert [process.exitcode for process in ranks] == [0] * len(ranks)
        return [json.loads(pathlib.Path(folder, str(rank)).read_text()) for rank in range(len(ranks))]


def started(backend=None):
    device = smp.init_process_group(backend, timeout=GROUP_SECONDS)
    total = torch.full((3,), float(dist.get_rank() + 1))
    dist.all_reduce(total)
    # Other libraries find what torchrun would have set, and torch itself the store that is there already.
    again = [] if dist.get_world_size() == 1 else next(dist.rendezvous("env://"))[1:]
    found = [str(device), dist.get_backend(), total.tolist(), [os.environ.get(name) for name in TORCHRUNS], again]
    dist.destroy_process_group()
    return found


def groups_on_gpu():
    """The device of objects in the groups of a job, and of a script, whose NCCL is torch's stand-in for it."""
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  which registers it

    found, original = [], dist.init_process_group

    def look():
        dist.all_gather_object(everyone := [None], "here")
        found.append([dist.get_backend_config(), distributed_c10d._get_object_coll_device(), *everyone])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "init_process_group", lambda name, **o: original(name.replace("nccl", "fake"), **o))
        patch.setattr(runtime, "_refuse_backend", lambda backend, device: None)  # NCCL is not built in everywhere
        for name, value in (("is_available", True), ("device_count", 1), ("set_device", None)):
            patch.setattr(torch.cuda, name, lambda *args, value=value: value)
        with process_group(CommConfig(), Launch(), torch.device("cuda", 0)):
            look()
        smp.init_process_group()
        look()
        assert os.environ["TORCH_FR_BUFFER_SIZE"] == "2000"  # NCCL's flight recorder, for the report of a hang
        dist.destroy_process_group()
    return found


def test_ranks_of_gpus_agree_on_the_host():
    """Over NCCL alone, every object would be copied to the device, and the host would wait for it."""
    assert in_environments([{}], groups_on_gpu) == [[["cpu:gloo,cuda:fake", "cpu", "here"]] * 2]


def openmpi(rank, **more):
    values = zip(("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"), (rank, 2, rank, 2), strict=True)
    return {f"OMPI_COMM_WORLD_{n}": str(v) for n, v in values} | {"PMIX_NAMESPACE": f"test-{os.getpid()}@1", **more}


@pytest.mark.parametrize(("backend", "used"), [(None, "smddp"), ("gloo", "gloo"), ("cpu:gloo", "cpu:gloo")])
def test_a_group_from_what_mpirun_sets(backend, used):
    found = in_environments([openmpi(0), openmpi(1)], started, backend)
    port = found[0][3][5]
    for rank, (device, name, total, variables, again) in enumerate(found):
        assert (device, total) == ("cpu", [3.0, 3.0, 3.0]) and name in (used, used.partition(":")[2])
        assert variables == [str(rank), "2", str(rank), "2", "127.0.0.1", port] and again == [rank, 2]


def test_a_group_of_one_process():
    [[device, name, total, variables, _]] = in_environments([{}], started)
    assert (device, name, total) == ("cpu", "smddp", [1.0, 1.0, 1.0])
    assert variables == ["0", "1", "0", "1", None, None]


def problems_of_starting(built):
    dist.is_backend_available = lambda name: name in built
    found = []
    smp.init_process_group("gloo")
    for words in ({}, {"backend": "gloo"}):
        with pytest.raises(UserError) as caught:
            smp.init_process_group(**words)
        found.append(str(caught.value))
    dist.destroy_process_group()
    for words in (
        {"timeout": 0}, {"timeout": float("nan")}, {"timeout": 1e15}, {"backend": "glo"}, {"backend": "nccl"},
        {"backend": "mpi"}, {"backend": "ucc"}, {"backend": "gloo,gloo"}, {"backend": "cpu:gloo,cpu:smddp"},
        {"backend": "x:gloo"}, {"backend": "cpu:"}, {"backend": "cpu:gloo,cuda:nccl"},
    ):  # fmt: skip
        with pytest.raises(UserError) as caught:
            smp.init_process_group(**words)
        found.append(str(caught.value))
    return found


@pytest.mark.parametrize("built", [("gloo",), ("gloo", "nccl")])  # into torch: the builds for CPUs and for CUDA
def test_what_init_process_group_refuses(built):
    [found] = in_environments([{}], functools.partial(problems_of_starting, built))
    for text, expected in zip(
        found,
        ["runs already"] * 2
        + ["timeout 0 is", "timeout nan is", "timeout 1000000000000000.0 is", "backend glo is not known", "needs GPUs"]
        + ["mpi is not built into this torch: choose from gloo, smddp, or", "ucc is not built into this torch"]
        + [
            "gloo,gloo is not allowed: write one name",
            "cpu:gloo,cpu:smddp is not",
            "x:gloo is not",
            "cpu: is not known",
            "backend cpu:gloo,cuda:nccl needs GPUs, and none is visible: choose from gloo, smddp, or",
        ],
        strict=True,
    ):
        assert expected in text


def exported_inside_and_after():
    def names():
        return sorted(name for name in TORCHRUNS if name in os.environ)

    with process_group(CommConfig(), Launch(), torch.device("cpu")):
        inside = names()
    return inside, names()


def test_the_environment_of_a_job_is_as_before_afterwards():
    assert in_environments([{}], exported_inside_and_after) == [[sorted(NAMES), []]]


def test_one_gpu_for_each_task_of_srun(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UserError, match=r"4 processes on a host with 1 GPU"):
        choose_device(Launch(3, 4, 3, 4))
    for name, value in (("SLURM_GPUS_PER_TASK", "1"), ("SLURM_TRES_PER_TASK", "cpu=8,gres/gpu:1")):
        monkeypatch.setenv(name, value)
        assert choose_device(Launch(3, 4, 3, 4, launcher="srun")) == torch.device("cuda", 0)
        monkeypatch.delenv(name)


@pytest.mark.parametrize("launcher", ["srun", "Open MPI", "MPICH", "MVAPICH"])
def test_one_gpu_that_a_process_was_given_by_its_name(launcher, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    launch = Launch(3, 4, 3, 4, launcher=launcher)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(UserError, match=r"4 processes on a host with 1 GPU"):  # the host has no more
        choose_device(launch)
    for text in ("3", "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", text)
        assert choose_device(launch) == torch.device("cuda", 0)
    with pytest.raises(UserError, match=r"4 processes on a host with 1 GPU"):
        choose_device(Launch(3, 4, 3, 4, launcher="torchrun"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,9")  # of which one is there
    with pytest.raises(UserError, match=r"4 processes on a host with 1 GPU"):
        choose_device(launch)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setenv("SLURM_GPU_BIND", "verbose,per_task:1")
    if launcher == "srun":
        assert choose_device(launch) == torch.device("cuda", 0)
