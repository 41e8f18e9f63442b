"""Runs in object storage: run directories behind addresses such as `s3://bucket/runs/a`, read where they are.

Any fsspec file system will do: `s3fs` for `s3://`, `gcsfs` for `gs://`, `adlfs` for `abfs://`. A run is listed once,
with one request per thousand objects. DuckDB then reads footers and the column chunks that a query needs, by range.
"""

from __future__ import annotations

import datetime
import fnmatch
import io
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs

from trainermon.core.errors import QueryError, StoreError, TrainermonError

if TYPE_CHECKING:
    import duckdb

THREADS = 16
"""So many requests of a query are under way at once: most of its time is waiting for them."""

_LONG_AGO = datetime.datetime(2000, 1, 1, tzinfo=datetime.timezone.utc)  # the epoch itself would mean: not known
_KEPT = ("/alerts.jsonl", "/alerts.handled.jsonl")  # read whenever a run is opened
_PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "az": "adlfs"}


class BucketPath:
    """A file or folder of a run in object storage, as it was when the run was listed.

    Says what `pathlib.Path` says, as far as reading the store needs it, and asks the storage for the contents of files
    only. Its text is the address by which DuckDB knows it, `s3://bucket/runs/a/run.json`.

    Args:
        objects: The objects of the run.
        key: Bucket and key, or the beginning of keys, without a protocol.
    """

    def __init__(self, objects: BucketObjects, key: str) -> None:
        self.objects = objects
        self._key = key

    def __str__(self) -> str:
        return f"{self.objects.protocol}://{self._key}"

    def __truediv__(self, name: str) -> BucketPath:
        return BucketPath(self.objects, f"{self._key}/{name}")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BucketPath) and str(self) == str(other)

    def __lt__(self, other: BucketPath) -> bool:
        return str(self) < str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    @property
    def name(self) -> str:
        """The last part."""
        return self._key.rpartition("/")[2]

    @property
    def parent(self) -> BucketPath:
        """The folder in which it lies."""
        return BucketPath(self.objects, self._key.rpartition("/")[0])

    def is_file(self) -> bool:
        """Whether there is an object of this name."""
        return self._key in self.objects.sizes

    def is_dir(self) -> bool:
        """Whether there are objects below it."""
        return self._key in self.objects.folders

    def exists(self) -> bool:
        """Whether it is a file or a folder."""
        return self.is_file() or self.is_dir()

    def iterdir(self) -> Iterator[BucketPath]:
        """Return what lies in the folder, in no order.

        Raises:
            FileNotFoundError: There is no such folder.
        """
        if not self.is_dir():
            raise FileNotFoundError(str(self))
        return (self / name for name in self.objects.folders[self._key])

    def glob(self, pattern: str) -> Iterator[BucketPath]:
        """Yield what lies below the folder and matches, part by part."""
        first, _, rest = pattern.partition("/")
        for name in fnmatch.filter(self.objects.folders.get(self._key, ()), first):
            found = self / name
            if rest:
                yield from found.glob(rest)
            else:
                yield found

    def attach(self, connection: duckdb.DuckDBPyConnection) -> None:
        """Let a database read what is in the run, many objects at once."""
        connection.register_filesystem(self.objects)
        connection.execute(f"SET threads = {THREADS}")
        # It knows some protocols as remote; what it does for these is right for all.
        connection.execute("SET cache_local_files = true")
        connection.execute("SET prefetch_all_parquet_files = true")

    def read_bytes(self) -> bytes:
        """Return the contents of the file.

        Raises:
            FileNotFoundError: There is none.
            StoreError: It cannot be read.
        """
        if not self.is_file():
            raise FileNotFoundError(str(self))
        return self.objects.read(self._key, 0, self.objects.sizes[self._key])


class BucketObjects(AbstractFileSystem):  # type: ignore[misc]  # fsspec has no types
    """The objects of a run as DuckDB reads them: sizes from the listing, contents by range, and nothing to write.

    Args:
        source: The file system that holds them.
        protocol: Under which DuckDB is to know them, `s3`.
        found: What was listed, by key: fsspec's details of each.

    Attributes:
        sizes: By key, bytes.
        folders: By beginning of keys, the names in it.
        num_requests: How many ranges were asked for.
        num_bytes: How many bytes they had.
    """

    cachable = False  # two listings of one bucket are two

    def __init__(self, source: Any, protocol: str, found: Mapping[str, Mapping[str, Any]]) -> None:
        super().__init__()
        self.protocol = protocol
        self._source = source
        self.sizes = {key: int(details["size"]) for key, details in found.items()}
        self.folders: dict[str, set[str]] = {}
        for key in found:
            while "/" in key:
                key, _, name = key.rpartition("/")
                self.folders.setdefault(key, set()).add(name)
        self._kept: dict[str, bytes] = {}
        self._fault: TrainermonError | None = None
        self._lock = threading.Lock()
        self.num_requests = self.num_bytes = 0

    def open(self, path: str, mode: str = "rb", **_: Any) -> _Ranges:
        """Return the object for reading.

        Raises:
            FileNotFoundError: It was not listed.
            QueryError: Something is to be written.
        """
        if mode != "rb":
            self._fault = QueryError(f"{path} cannot be written: runs in object storage are only read")
            raise self._fault
        key = self._known(path)
        return _Ranges(self, key)

    def read(self, key: str, begin: int, end: int) -> bytes:
        """Return the bytes from `begin` to `end` of an object.

        Raises:
            StoreError: That is not possible, or something was not before: then the storage is not asked again.
        """
        if key in self._kept:
            return self._kept[key][begin:end]
        self.check()
        try:
            content: bytes = self._source.cat_file(key, start=begin, end=end)
        except Exception as error:  # each client of a storage has errors of its own
            self._fault = StoreError(f"{self.protocol}://{key} cannot be read: {str(error) or type(error).__name__}")
            raise self._fault from error
        with self._lock:
            self.num_requests += 1
            self.num_bytes += len(content)
        return content

    def keep(self, keys: Sequence[str]) -> None:
        """Read small objects together, and keep what they hold."""
        # `cat` would take brackets in a key for a pattern
        contents = self._source.cat_ranges(list(keys), None, None) if keys else []
        for key, content in zip(keys, contents, strict=True):
            if isinstance(content, Exception):
                raise content
            self._kept[key] = content

    def check(self) -> None:
        """Raise what DuckDB hides in an error of its own.

        Raises:
            StoreError: An object could not be read.
            QueryError: One was to be written.
        """
        if self._fault is not None:
            raise self._fault

    def size(self, path: str) -> int:
        """Return the bytes of an object."""
        return self.sizes[self._known(path)]

    def modified(self, path: str) -> datetime.datetime:  # noqa: ARG002 - fsspec's signature
        """Return always the same time: what was listed stays as it is, so that DuckDB keeps what it has read."""
        return _LONG_AGO

    def exists(self, path: str, **_: Any) -> bool:
        """Whether the object was listed."""
        return _key_of(path) in self.sizes

    isfile = exists

    def isdir(self, path: str) -> bool:
        """Whether objects below it were listed."""
        return _key_of(path) in self.folders

    def glob(self, path: str, **_: Any) -> list[str]:
        """Return the object of this very name, or nothing."""
        return [path] if self.exists(path) else []

    def _known(self, path: str) -> str:
        key = _key_of(path)
        if key not in self.sizes:
            raise FileNotFoundError(path)
        return key


def _key_of(path: str) -> str:
    return path.partition("://")[2] or path


class _Ranges:
    """An object as a file that is open for reading. Several threads of DuckDB share one: each has its own place."""

    def __init__(self, objects: BucketObjects, key: str) -> None:
        self._objects = objects
        self._key = key
        self._of_thread = threading.local()

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        begin = {io.SEEK_SET: 0, io.SEEK_CUR: self.tell(), io.SEEK_END: self._objects.sizes[self._key]}[whence]
        self._of_thread.place = begin + offset
        return begin + offset

    def tell(self) -> int:
        place: int = getattr(self._of_thread, "place", 0)
        return place

    def read(self, size: int = -1) -> bytes:
        begin, whole = self.tell(), self._objects.sizes[self._key]
        end = whole if size < 0 else min(whole, begin + size)
        content = self._objects.read(self._key, begin, end) if begin < end else b""
        self._of_thread.place = begin + len(content)
        return content

    def close(self) -> None:
        pass


def find_bucket_run(address: str) -> BucketPath:
    """Return the run directory at an address, listed now.

    Credentials, endpoint and region are those that the file system of the protocol finds by itself; fsspec's
    configuration can set all its options.

    Raises:
        QueryError: There is no file system for the protocol, it cannot be asked, or no run is at the address.
    """
    protocol = address.partition("://")[0]
    try:
        source, key = url_to_fs(address.rstrip("/"))
    except ImportError as error:
        package = _PACKAGES.get(protocol, "fsspec")
        raise QueryError(f"{address} is read by another package: `pip install {package}` ({error})") from error
    except ValueError as error:
        raise QueryError(f"{address}: {error}; expected an address of fsspec such as s3://bucket/run") from error
    except Exception as error:  # clients that connect when they are made, each with errors of its own
        raise _refused(address, error) from error
    try:
        source.invalidate_cache()
        objects = BucketObjects(source, protocol, source.find(key, detail=True))
        objects.keep([name for name in objects.sizes if name.endswith(_KEPT)])
    except Exception as error:  # each client of a storage has errors of its own
        raise _refused(address, error) from error
    run = BucketPath(objects, key)
    if not run.is_dir():
        raise QueryError(f"{address}: found no object below it; expected those of a run directory, run.json or nodes/")
    if not ((run / "run.json").is_file() or (run / "nodes").is_dir()):
        names = ", ".join(sorted(run.objects.folders[key])[:5])
        raise QueryError(f"{address}: found {names}; expected those of a run directory, run.json or nodes/")
    return run


def _refused(address: str, error: Exception) -> QueryError:
    said = str(error) or type(error).__name__
    return QueryError(
        f"{address} cannot be listed: {said}; see docs/scale.md for where credentials and endpoint are set"
    )
