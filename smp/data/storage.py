"""Files to read data from: local paths, ``s3://`` and every other file system fsspec knows."""

from __future__ import annotations

import dataclasses
import glob
import gzip
import io
import itertools
import logging
import os
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NamedTuple

from smp.errors import UserError, hub_advice

JSONL, TEXT, PARQUET, ARROW, CSV = (".json", ".jsonl", ".ndjson"), (".txt",), (".parquet",), (".arrow",), (".csv",)
GLOB_CHARACTERS = "*?["
COMPRESSED = (".zst", ".zstd", ".bz2", ".xz", ".lz4")
INDEXED = (".bin", ".idx")
OTHER_FORMATS = (".csv", ".tsv", ".zip", ".tar", ".tgz", ".npy", ".npz", ".h5", ".hdf5", ".feather")
# Of no data, by their endings, and by the beginnings of names.
NO_DATA = (
    ".md", ".rst", ".html", ".pdf", ".py", ".ipynb", ".sh", ".yaml", ".yml", ".toml", ".cfg", ".jinja", ".model",
    ".log", ".lock", ".md5", ".sha1", ".sha256", ".sha512", ".crc", ".sig", ".asc", ".png", ".jpg", ".jpeg", ".svg",
)  # fmt: skip
NO_DATA_NAMES = (
    "readme", "licen", "copying", "notice", "changelog", "makefile", "dockerfile", "sha1sum", "sha256sum", "sha512sum",
    "md5sum", "checksum", "_",
)  # fmt: skip
# Files that describe a dataset; `datasets` leaves them out too.
DESCRIPTIONS = ("config.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
# What file systems of fsspec call times and tags of an object's content.
STAMPS = (
    "mtime", "modified", "lastmodified", "modificationtime", "created", "updated", "generation", "etag", "blobid",
    "contentmd5",
)  # fmt: skip
MOST_NAMED = 5
MOST_FOLDERS_SEARCHED = 50
log = logging.getLogger("smp.data")


@dataclasses.dataclass(frozen=True)
class DataFile:
    """One readable file.

    Attributes:
        url: what to open; for a local file its absolute path.
        size: bytes, compressed.
        stamp: changes with the content: of a local file the times of its last change, of which the user cannot set
            ``ctime``; of others the times and tags that their file system gives.
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
        return self.name.lower().endswith(".gz")

    def ends_with(self, extensions: tuple[str, ...]) -> bool:
        """Return whether the name has one of the extensions, in whatever case and before a ``.gz``."""
        return self.name.lower().removesuffix(".gz").endswith(extensions)


def filesystem_of(url: str, **options: Any) -> tuple[Any, str]:
    """Return the fsspec file system of a path or URL, and the path inside it.

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


def list_files(
    path: str, *, extensions: tuple[str, ...], zipped: bool | None = None, tell: bool = True
) -> list[DataFile]:
    """List the data files of a file, a folder (its direct children), a glob or a URL of any of them, sorted by path.

    A link is read as what it points to.

    Args:
        extensions: those of data files in a folder, such as ``(".json", ".jsonl")``, in any case; ``.gz`` may follow
            each.
        zipped: True keeps only ``.gz`` files, False only the others, None both.
        tell: log what looks like data and is not read as a warning.

    Raises:
        UserError: the path does not exist, or has no data, or a file is empty or in a format that is not read.
    """
    fs, inner = filesystem_of(path)
    with reading(path):
        found = _entries(fs, path, inner)
        endings = extensions if found.by_name else (*extensions, *(f"{extension}.gz" for extension in extensions))
        kept = [each for each in found.files if found.by_name or each.lower().endswith(endings)]
        wanted = [each for each in kept if zipped is None or each.lower().endswith(".gz") == zipped]
        left_out = _left_out(fs, path, found, kept, extensions)
        if not wanted:
            raise UserError(_nothing_found(path, endings, filtered=len(kept), zipped=zipped, left_out=left_out))
        if left_out and tell:
            log.warning("%s: %s", path, left_out)
        files = [_describe(fs, each) for each in sorted(wanted)]
    _refuse_twins(path, files)
    for file in files:
        if file.size == 0:
            raise UserError(f"{file.url} is empty: remove it, or write it again")
        if file.ends_with((*COMPRESSED, *OTHER_FORMATS)) and not file.ends_with(extensions):
            raise UserError(f"{file.url} is not read: {_CONVERT}")
        if file.ends_with(INDEXED):
            raise UserError(f"{file.url} is not read: {_INDEXED}")
    return files


_CONVERT = (
    "decompress what is compressed (.gz is read as it is), and write another format as JSON lines, for example with "
    "datasets.load_dataset('csv', data_files='F.tsv', sep='\\t')['train'].to_json('F.jsonl')"
)
_INDEXED = "token files of Megatron-LM and NeMo, .bin with .idx, are written as JSON lines by the lines in docs/data.md"


class _Entries(NamedTuple):
    """What a path may mean; ``by_name``: the user named the files rather than their folder."""

    files: list[str]
    folders: list[str]
    by_name: bool


def _entries(fs: Any, path: str, inner: str) -> _Entries:
    """Return what is at a path, for links what they point to, without hidden ones; raises UserError if nothing is."""
    if fs.isfile(inner):
        return _Entries([inner], [], by_name=True)
    by_name, local = not fs.isdir(inner), _is_local(fs)
    if not by_name:
        entries = {each["name"]: each["type"] for each in fs.ls(inner, detail=True)}
    elif any(character in inner for character in GLOB_CHARACTERS):
        # Python's goes through links to folders, as a shell does.
        entries = dict.fromkeys(glob.glob(inner, recursive=True) if local else fs.glob(inner), "any")
    else:
        _refuse_broken_link(inner)
        entries = {}
    if by_name and not entries and fs.exists(f"{inner}.idx"):
        raise UserError(f"{path}.idx is not read: {_INDEXED}")
    if by_name and not entries:
        raise UserError(f"no such file or folder: {path}{hub_advice(path, ' --repo-type dataset')}")
    found = _Entries([], [], by_name)
    wants_hidden = by_name and PurePosixPath(inner).name.startswith(".")
    for name, kind in entries.items():
        last = PurePosixPath(name).name
        if last in DESCRIPTIONS or (last.startswith(".") and not wants_hidden) or name.strip("/") == inner.strip("/"):
            continue
        is_file = kind == "file" or (kind != "directory" and not fs.isdir(name))
        (found.files if is_file else found.folders).append(name)
    return found


def _is_local(fs: Any) -> bool:
    return "file" in ((fs.protocol,) if isinstance(fs.protocol, str) else fs.protocol)


def _refuse_broken_link(path: str) -> None:
    if os.path.islink(path) and not os.path.exists(path):
        raise UserError(f"{path} is a link to {os.readlink(path)}, which is not there: mend the link, or remove it")


def _left_out(fs: Any, path: str, found: _Entries, kept: list[str], extensions: tuple[str, ...]) -> str:
    """Return a sentence about files that look like data and folders with such files, if any, that are not read."""
    read = {each.lower() for each in kept}

    def is_data(name: str) -> bool:
        plain = os.path.splitext(name)[0] if name.endswith((".gz", *COMPRESSED)) else name
        return plain.endswith(OTHER_FORMATS) or (plain.endswith(extensions) and plain not in read)

    files = [each for each in found.files if each.lower() not in read and is_data(each.lower())]
    known = (*JSONL, *TEXT, *PARQUET, *ARROW, *INDEXED)  # --dataset_type has left these out, or another sentence tells

    def may_be(name: str) -> bool:
        plain = name.removesuffix(".gz")
        described = PurePosixPath(name).name.startswith(NO_DATA_NAMES) or plain.endswith((*NO_DATA, *known))
        return plain not in read and name not in read and not is_data(name) and not described

    others = [each for each in found.files if may_be(each.lower())]
    folders = {}
    for folder in found.folders:
        if not any(each.startswith(f"{folder.rstrip('/')}/") for each in kept):
            below = itertools.islice(fs.walk(folder), MOST_FOLDERS_SEARCHED)
            names = (name for _, _, inside in below for name in sorted(inside) if not name.startswith("."))
            if (first := next((name for name in names if is_data(name.lower())), None)) is not None:
                folders[folder] = os.path.splitext(first)[1]
    parts = []
    if files:
        parts.append(f"{len(files)} file(s) not read ({_names(files)}): {_CONVERT}")
    if others:
        parts.append(
            f"{len(others)} file(s) of other names not read ({_names(others)}): rename those that are data to end in "
            f"one of {', '.join(extensions)}"
        )
    if indexed := [each for each in found.files if each.lower().endswith(".idx")]:
        parts.append(f"{len(indexed)} .idx file(s) not read ({_names(indexed)}): {_INDEXED}")
    if folders:
        fixed = re.split(r"/[^/]*[*?[]", path, maxsplit=1)[0] if found.by_name else path.rstrip("/")
        pattern = f"'{fixed}/**/*{next(iter(folders.values()))}'"
        parts.append(
            f"{len(folders)} folder(s) with data not read ({_names([*folders])}): a glob in quotes reads folders too, "
            f"such as {pattern}"
        )
    return "; ".join(parts)


def _names(paths: list[str]) -> str:
    names = sorted(PurePosixPath(each).name for each in paths)
    return ", ".join([*names[:MOST_NAMED], *(["..."] if len(names) > MOST_NAMED else [])])


def _nothing_found(path: str, endings: tuple[str, ...], *, filtered: int, zipped: bool | None, left_out: str) -> str:
    if filtered:
        kind, other = (".gz", "0") if zipped else ("uncompressed", "1")
        return (
            f"{path} contains {filtered} data file(s), but none is {kind} and --zipped_data is {int(bool(zipped))}: "
            f"set --zipped_data {other}, or leave it out to read both"
        )
    return f"no data files in {path}: looked for *{', *'.join(endings)}{f'; {left_out}' if left_out else ''}"


def _refuse_twins(path: str, files: list[DataFile]) -> None:
    """Refuse a file next to its compressed copy: it would be trained on twice."""
    urls = {file.url for file in files}
    for url in urls:
        if f"{url}.gz" in urls:
            raise UserError(
                f"{path} contains both {PurePosixPath(url).name} and {PurePosixPath(url).name}.gz, which would be read "
                f"twice: remove one, or set --zipped_data 1 or 0"
            )


def _describe(fs: Any, inner: str) -> DataFile:
    if _is_local(fs):
        _refuse_broken_link(inner)
        status = os.stat(inner)
        return DataFile(url=inner, size=status.st_size, stamp=f"{status.st_mtime_ns} {status.st_ctime_ns}")
    info = fs.info(inner)
    stamp = " ".join(str(info[key]) for key in sorted(info) if re.sub("[-_]", "", key).lower() in STAMPS)
    return DataFile(url=fs.unstrip_protocol(inner), size=int(info["size"] or 0), stamp=stamp)


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
