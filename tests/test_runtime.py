"""Ranks, backend and device from the launcher."""

import pytest
import torch

from smp.config import CommConfig
from smp.errors import UserError
from smp.runtime import (
    Launch,
    choose_backend,
    choose_device,
    data_channel,
    read_launch,
    release_cache,
    set_default_threads,
)

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def test_no_launcher_is_one_process(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    assert read_launch() == Launch(0, 1, 0, 1) and read_launch().is_main


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
    with pytest.raises(UserError, match="nccl needs GPUs"):
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


def test_release_cache_gives_memory_back():
    from smp.memory_tracker import rss_bytes

    blocks = [torch.ones(25_000) for _ in range(2000)]  # below the size that malloc maps by itself
    held = rss_bytes()
    del blocks
    release_cache(torch.device("cpu"))
    assert rss_bytes() < held - 100 * 2**20
