"""Files are read back from the disk when they are written: what differs is noticed, wherever it lies."""

from __future__ import annotations

import errno
import os

import pytest
import torch

from smp.checkpoint import safetensors_io, writer
from smp.checkpoint.safetensors_io import Piece, digest_of
from smp.errors import RunError

PIECE = 8192
NUMEL = 11 * PIECE // 4 + 5  # eleven parts and a bit


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(safetensors_io, "PIECE", PIECE)


def write(folder, pieces=None):
    pieces = pieces or [Piece("w", torch.randn(NUMEL), (0,)), Piece("b", torch.randn(3), (0,))]
    shapes = {piece.name: (piece.tensor.dtype, tuple(piece.tensor.shape)) for piece in pieces}
    writer.write_part(folder, pieces, shapes, rank=0, check=True)
    return folder / "rank00000-000.safetensors"


def test_what_is_on_the_disk_is_what_was_written(tmp_path, monkeypatch):
    reads, preadv = [], os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, into, at: reads.append((at, len(into[0]))) or preadv(fd, into, at))
    dropped, fadvise = [], os.posix_fadvise
    monkeypatch.setattr(
        os, "posix_fadvise", lambda fd, *what: dropped.append((*what, len(reads))) or fadvise(fd, *what)
    )
    path = write(tmp_path)
    assert (0, 0, os.POSIX_FADV_DONTNEED, 0) in dropped  # else the page cache would tell what was meant to be written
    end = 0
    for offset, count in reads:  # each byte once, in order
        assert offset == end
        end += count
    assert end == path.stat().st_size and len(reads) > 11
    assert f'"{digest_of(path)}"' in (tmp_path / "rank00000.json").read_text()


def test_small_files_are_read_too(tmp_path, monkeypatch):
    pwrite = os.pwrite
    pieces = [Piece("w", torch.zeros(8), (0,))]
    write(tmp_path, pieces)
    (tmp_path / "again").mkdir()
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, bytes(data).replace(b"F32", b"I32"), at))
    with pytest.raises(RunError, match="is not on the disk as it was written"):
        write(tmp_path / "again", pieces)


@pytest.mark.parametrize("part", range(14))  # the header, the parts of the first tensor, the second tensor
def test_one_wrong_bit_in_any_part_is_noticed(part, tmp_path, monkeypatch):
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
    assert len(writes) == 14 and not (tmp_path / "rank00000.json").exists()


def test_a_disk_that_cannot_be_read_is_said(tmp_path, monkeypatch):
    def broken(descriptor, into, offset):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", broken)
    monkeypatch.setattr(safetensors_io.time, "sleep", lambda seconds: None)
    with pytest.raises(OSError, match="Input/output error"):
        write(tmp_path)
