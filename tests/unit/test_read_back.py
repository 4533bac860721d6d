"""Files are read back from the disk while they are written: what differs is noticed, wherever it lies."""

from __future__ import annotations

import errno
import os
import threading

import pytest
import torch

from smp.checkpoint import page_cache, read_back, safetensors_io, writer
from smp.checkpoint.safetensors_io import Piece, digest_of
from smp.errors import RunError

PIECE = 2 * os.sysconf("SC_PAGE_SIZE")
NUMEL = 11 * PIECE // 4 + 5  # eleven parts and a bit: the end of the file is in no full page


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    for module in (safetensors_io, read_back):
        monkeypatch.setattr(module, "PIECE", PIECE)


@pytest.fixture(params=["while it is written", "when it is whole", "a system that refuses"])
def way(request, monkeypatch):
    """How the system lets a file be read back."""
    if request.param == "when it is whole":
        monkeypatch.setattr(page_cache, "_sync_file_range", lambda: None)
    elif request.param == "a system that refuses":
        monkeypatch.setattr(page_cache, "_sync_file_range", lambda: lambda *range_: -1)
        monkeypatch.setattr(page_cache.ctypes, "get_errno", lambda: errno.ENOSYS)
    return request.param


def write(folder, pieces=None):
    pieces = pieces or [Piece("w", torch.randn(NUMEL), (0,)), Piece("b", torch.randn(3), (0,))]
    shapes = {piece.name: (piece.tensor.dtype, tuple(piece.tensor.shape)) for piece in pieces}
    writer.write_part(folder, pieces, shapes, rank=0, check=True)
    return folder / "rank00000-000.safetensors"


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "smp-read-back"]


def test_what_is_on_the_disk_is_what_was_written(way, tmp_path, monkeypatch):
    reads, preadv = [], os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, into, at: reads.append((at, len(into[0]))) or preadv(fd, into, at))
    path = write(tmp_path)
    end = 0
    for offset, count in reads:  # each byte once, in order
        assert offset == end
        end += count
    assert end == path.stat().st_size and len(reads) > 11
    assert way == "when it is whole" or all(at % os.sysconf("SC_PAGE_SIZE") == 0 for at, _ in reads)
    assert f'"{digest_of(path)}"' in (tmp_path / "rank00000.json").read_text()
    assert threads() == []


def test_small_files_are_read_too(tmp_path, monkeypatch):
    pwrite = os.pwrite
    pieces = [Piece("w", torch.zeros(8), (0,))]
    write(tmp_path, pieces)
    (tmp_path / "again").mkdir()
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, bytes(data).replace(b"F32", b"I32"), at))
    with pytest.raises(RunError, match="is not on the disk as it was written"):
        write(tmp_path / "again", pieces)


@pytest.mark.parametrize("part", range(14))  # the header, the parts of the first tensor, the second tensor
def test_one_wrong_bit_in_any_part_is_noticed(part, way, tmp_path, monkeypatch):
    writes, pwrite = [], os.pwrite

    def damaged(descriptor, data, offset):
        if len(writes) == part:
            data = bytearray(data)
            data[len(data) // 2] ^= 4
        writes.append(offset)
        return pwrite(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", damaged)
    with pytest.raises(RunError, match=r"rank00000-000\.safetensors is not on the disk as it was written"):
        write(tmp_path)
    assert len(writes) == 14 and threads() == [] and not (tmp_path / "rank00000.json").exists()


def test_a_disk_that_does_not_take_a_part_is_said(tmp_path, monkeypatch):
    """The system tells whoever waits for a part, here the reading thread."""
    calls = []

    def failing(descriptor, offset, count, flags):
        calls.append(flags)
        return -1 if flags != 2 and len(calls) > 6 else 0

    monkeypatch.setattr(page_cache, "_sync_file_range", lambda: failing)
    monkeypatch.setattr(page_cache.ctypes, "get_errno", lambda: errno.EIO)
    with pytest.raises(OSError, match="Input/output error"):
        write(tmp_path)
    assert threads() == []


def test_a_disk_that_cannot_be_read_is_said(way, tmp_path, monkeypatch):
    def broken(descriptor, into, offset):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", broken)
    monkeypatch.setattr(safetensors_io.time, "sleep", lambda seconds: None)
    with pytest.raises(OSError, match="Input/output error"):
        write(tmp_path)
    assert threads() == []


def test_the_thread_ends_with_a_writer_that_fails(tmp_path, monkeypatch):
    pwrite = os.pwrite

    def full(descriptor, data, offset):
        if offset > 4 * PIECE:
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path)
    assert threads() == []
