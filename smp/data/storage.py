"""Files to read data from: local paths, ``s3://`` and every other file system fsspec knows."""

from __future__ import annotations

import dataclasses
import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from smp.errors import UserError, hub_advice

JSONL, TEXT, PARQUET, ARROW = (".json", ".jsonl"), (".txt",), (".parquet",), (".arrow",)
GLOB_CHARACTERS = "*?["


@dataclasses.dataclass(frozen=True)
class DataFile:
    """One readable file.

    Attributes:
        url: what to open; for a local file its absolute path.
        size: bytes, compressed.
        stamp: time of its last change or its tag, from the file system.
    """

    url: str
    size: int
    stamp: str

    @property
    def name(self) -> str:
        """Last component of the path."""
        return PurePosixPath(self.url).name

    @property
    def identity(self) -> tuple[str, int]:
        """Name and size: equal where two runs read the same file, in whatever folder."""
        return self.name, self.size

    @property
    def zipped(self) -> bool:
        """True for a ``.gz`` file, which is decompressed when it is read."""
        return self.name.endswith(".gz")


def filesystem_of(url: str, **options: Any) -> tuple[Any, str]:
    """Return the fsspec file system of a path or URL, and the path inside it.

    Args:
        options: of the file system.

    Raises:
        UserError: the URL's scheme is unknown, or its package is not installed.
    """
    import fsspec

    try:
        return fsspec.core.url_to_fs(str(Path(url).expanduser()) if "://" not in url else url, **options)
    except ImportError as error:
        scheme = url.split("://")[0]
        hint = "run `pip install s3fs`" if scheme in ("s3", "s3a") else str(error)
        raise UserError(f"cannot read {url}: the package for {scheme}:// is not installed; {hint}") from error
    except ValueError as error:
        raise UserError(f"cannot read {url}: {error}; give a local path or a URL that fsspec knows") from error


@contextmanager
def reading(path: str) -> Iterator[None]:
    """Turn errors of a file system into a UserError that names ``path``."""
    try:
        yield
    except Exception as error:
        # The S3 client's errors, such as missing credentials, are no OSError.
        if not isinstance(error, OSError) and not type(error).__module__.startswith("botocore"):
            raise
        raise UserError(f"cannot read {path}: {error}") from error


def list_files(path: str, *, extensions: tuple[str, ...], zipped: bool | None = None) -> list[DataFile]:
    """List the data files of a file, a folder (its direct children), a glob or a URL of any of them, sorted by path.

    Args:
        path: as the user gave it.
        extensions: those of data files in a folder, such as ``(".json", ".jsonl")``; ``.gz`` may follow each.
        zipped: True keeps only ``.gz`` files, False only the others, None both.

    Raises:
        UserError: nothing is there, or nothing of it is data, or a file is empty.
    """
    fs, inner = filesystem_of(path)
    with reading(path):
        found, chosen_by_name = _candidates(fs, inner)
        if not found:
            raise UserError(f"no such file or folder: {path}{hub_advice(path, ' --repo-type dataset')}")
        endings = extensions if chosen_by_name else (*extensions, *(f"{extension}.gz" for extension in extensions))
        kept = found if chosen_by_name else [each for each in found if each.endswith(endings)]
        kept = [each for each in kept if not PurePosixPath(each).name.startswith(".")]
        wanted = [each for each in kept if zipped is None or each.endswith(".gz") == zipped]
        if not wanted:
            raise UserError(_nothing_found(path, endings, filtered=len(kept), zipped=zipped))
        files = [_describe(fs, each) for each in sorted(wanted)]
    _refuse_twins(path, files)
    for file in files:
        if file.size == 0:
            raise UserError(f"{file.url} is empty: remove it, or write it again")
    return files


def _candidates(fs: Any, inner: str) -> tuple[list[str], bool]:
    """Return the files that a path may mean, and whether the user named them rather than their folder."""
    if fs.isfile(inner):
        return [inner], True
    if fs.isdir(inner):
        # An empty folder exists: an entry that no extension matches stands for it.
        children = [entry["name"] for entry in fs.ls(inner, detail=True) if entry["type"] == "file"]
        return children or [inner.rstrip("/") + "/"], False
    if any(character in inner for character in GLOB_CHARACTERS):
        return [each for each in fs.glob(inner) if fs.isfile(each)], True
    return [], True


def _nothing_found(path: str, endings: tuple[str, ...], *, filtered: int, zipped: bool | None) -> str:
    if filtered:
        kind, other = (".gz", "0") if zipped else ("uncompressed", "1")
        return (
            f"{path} holds {filtered} data file(s), but none is {kind} and --zipped_data is {int(bool(zipped))}: "
            f"set --zipped_data {other}, or leave it out to read both"
        )
    return f"no data files in {path}: looked for *{', *'.join(endings)}"


def _refuse_twins(path: str, files: list[DataFile]) -> None:
    """Refuse a file beside its own compressed copy: it would be trained on twice."""
    urls = {file.url for file in files}
    for url in urls:
        if f"{url}.gz" in urls:
            raise UserError(
                f"{path} holds both {PurePosixPath(url).name} and {PurePosixPath(url).name}.gz, which would be read "
                f"twice: remove one, or set --zipped_data 1 or 0"
            )


def _describe(fs: Any, inner: str) -> DataFile:
    info = fs.info(inner)
    stamp = next((info[key] for key in ("mtime", "LastModified", "ETag", "created", "updated") if key in info), None)
    protocol = fs.protocol if isinstance(fs.protocol, str) else fs.protocol[0]
    url = inner if protocol in ("file", "local") else fs.unstrip_protocol(inner)
    return DataFile(url=url, size=int(info["size"] or 0), stamp=str(stamp))


@contextmanager
def open_file(file: DataFile) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """Open a file for reading.

    Yields:
        (content, raw): content is decompressed and buffered; ``raw.tell()`` is the position in the file, for progress.

    Raises:
        UserError: it is missing or unreadable, or is a ``.gz`` that is no gzip file or is truncated.
    """
    fs, inner = filesystem_of(file.url)
    with reading(file.url), fs.open(inner, "rb") as raw:
        if not file.zipped:
            # fsspec's own readline() takes no size.
            with io.BufferedReader(raw, 1 << 20) as content:
                yield content, raw
            return
        try:
            with gzip.GzipFile(fileobj=raw) as unzipped, io.BufferedReader(unzipped, 1 << 20) as content:
                yield content, raw  # type: ignore[misc]
        except EOFError as error:
            raise UserError(f"{file.url} is truncated: its gzip stream ends too early; copy it again") from error
        except (gzip.BadGzipFile, zlib.error) as error:
            raise UserError(
                f"{file.url} is not a valid gzip file ({error}); compress it again, or drop the .gz"
            ) from error
