"""The client of a source: names, attributes, reads of many ranges, loads and writes. One object serves all threads of a process;
a child process, by fork or by spawn, opens the source anew at its first call. A fork closes idle clients of the parent before, which
also open the source anew then: memory of threads that a child does not have can't be used there."""

from __future__ import annotations

import atexit
import collections
import errno as _errno
import fnmatch
import io
import json
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, overload

from . import _native
from ._files import ReadFile, TextWriteFile, WriteEnd, WriteFile

#: A range of a path that was not looked up is read in one piece up to this many bytes, with the lookup, by one thread.
_ONE_PIECE = 1 << 20
#: Names of one request for a listing.
_PAGE_NAMES = 1000
#: Alignment of the items in an arena: that of the largest vectors of processors, which DLPack asks for.
_ITEM_ALIGN = 64
#: Memory of :meth:`Client.iter_many`, in bytes, if the caller names none.
_ITER_BYTES = 256 << 20
#: Ranges of one group of :meth:`Client.iter_many`.
_ITER_RANGES = 1024

#: How long a fork waits for the threads of closed clients, in seconds.
_THREAD_END_TIME = 2.0
#: The interval at which that is looked at, in seconds.
_THREAD_END_INTERVAL = 1e-3
#: Threads that wait for an answer of a registry, for seconds: in the kernel, and for no other thread.
_REGISTRY_THREADS = {"registry", "coordinator", "etcd", "dns"}

_clients: weakref.WeakSet[Client] = weakref.WeakSet()
#: Threads that are not of clients, by their numbers in the kernel; None before the first client.
_other_threads: set[int] | None = None
#: Whether this process was forked while a client was in use.
_forked_in_use = False


class FileStat(NamedTuple):
    """A name of the source. Given in place of a path, reads get exactly this version and need no lookup."""

    path: str
    """Path below the source, without a leading slash."""
    kind: str
    """``"file"``, ``"directory"`` or ``"symlink"``."""
    size: int
    """Length in bytes; 0 for a directory."""
    mtime_ns: int
    """Time of the last change, in nanoseconds since 1970; 0 where the source has none."""
    mode: int
    """Permission bits."""
    version: str
    """The version of the bytes; two reads of one version get the same bytes."""
    etag: str | None
    """The object store's etag, if any."""

    @property
    def mtime(self) -> float:
        """Time of the last change, in seconds since 1970."""
        return self.mtime_ns / 1e9

    @property
    def is_file(self) -> bool:
        """Whether this is a file."""
        return self.kind == "file"

    @property
    def is_dir(self) -> bool:
        """Whether this is a directory."""
        return self.kind == "directory"


def _text_of(value):
    """A setting as text."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return str(value)


def open(source: str | os.PathLike, *, connect: bool = True, **settings: Any) -> Client:
    """Opens a source for reading, and with ``writable=True`` for writing.

    ``source`` is ``s3://BUCKET[/PREFIX]``, ``gs://…``, ``az://…``, or a directory. It is read from the nodes of a group if
    ``registry`` is given, and else by this process itself.

    Settings of a group: ``registry`` (``static:HOST:PORT``, ``coordinator://HOST:PORT``, ``etcd://…``, ``dns:…``), ``token_file``,
    ``cache_group``, ``zone``, ``replicas``, ``group_network``, ``rdma_network``, ``transport`` (``auto``, ``tcp``, ``rdma``),
    ``nconnect``, ``peer_timeout`` (``"75s"``), ``tls``, ``tls_cert``, ``tls_key``, ``tls_ca``.

    Settings of a source that is read alone: ``cache_dir`` (blocks are kept there; each process has a folder of its own below),
    ``cache_size`` (``"100G"``, per process), ``free_space_ratio`` (0.1, what stays free on the disk), ``block_size``,
    ``endpoint_url``, ``region``, ``anonymous``, ``request_payer``, ``expected_bucket_owner``, ``origin_timeout``,
    ``max_downloads``.

    Settings of both: ``memory`` (``"300M"``, the budget of blocks in memory and requests; the caller's own buffers come on top),
    ``threads`` (16, requests in flight), ``writable``.

    With ``writable`` of a bucket through nodes with ``--stage-size``: ``stage``. The close of a file then waits for the disks of two
    nodes, which upload the file soon after.

    With ``connect=False`` the source is opened at the first call, in the process that makes it: nothing has to survive a fork.

    Raises ``OSError``: ``EINVAL`` for a setting, ``ENOENT`` for a directory or a bucket that does not exist, ``EHOSTDOWN`` and
    ``ETIMEDOUT`` when the source or the group does not answer; a node whose directory is missing answers with ``EHOSTDOWN``.
    """
    client = Client(source, settings)
    if connect:
        client._opened()
    return client


class Load:
    """A load of files into the cache, under way or ended."""

    def __init__(self, job):
        self._job = job

    def progress(self) -> dict[str, Any]:
        """Counts of the load as a dict: ``state``, ``files_total``, ``files_done``, ``files_failed``, ``bytes_total``,
        ``bytes_done``, ``bytes_moved``, ``bytes_per_second``, ``failed`` (paths and reasons) and others."""
        return json.loads(self._job.progress())

    def wait(self, timeout: float | None = None) -> bool:
        """Waits for the end, at most for ``timeout`` seconds; returns whether the load has ended.

        Raises ``OSError`` (``EIO``) if files have failed, with the first of them."""
        if not self._job.wait(timeout):
            return False
        progress = self.progress()
        if progress["files_failed"] or progress["state"] == "FAILED":
            first = next(iter(progress.get("failed", [])), None)
            why = f"{first['path']}: {first['reason']}" if first else progress.get("why", "")
            raise OSError(_errno.EIO, f"{progress['files_failed']} files were not loaded; {why}")
        return True

    def stop(self) -> None:
        """Stops the load after the requests under way."""
        self._job.stop()


class Client:
    """A client of a source; made by :func:`spurline.open`. May be used by many threads, pickled, and taken along by a fork.

    A fork closes a client that is not in use, in the parent too: the next call opens the source anew. After a fork in the middle of a
    call, of a load or of a file that is written, the child can't open any source (``OSError``, ``EBUSY``)."""

    def __init__(self, source, settings):
        self._source = os.fspath(source)
        self._settings = dict(settings)
        self._native = None
        self._process = None
        self._closed = False
        self._lock = threading.Lock()
        self._writes: weakref.WeakSet[WriteEnd] = weakref.WeakSet()
        #: The failure of a close before a fork, which the next call raises.
        self._failure: OSError | None = None
        _clients.add(self)

    def __reduce__(self):
        return _reopen, (self._source, self._settings)

    def __repr__(self):
        return f"<spurline client of {self._source}>"

    def _opened(self):
        native = self._native
        if native is not None and self._process == os.getpid():
            return native
        with self._lock:
            if self._closed:
                raise OSError(_errno.EBADF, "the client is closed")
            if self._failure is not None:
                failure, self._failure = self._failure, None
                raise failure
            if _forked_in_use:
                raise OSError(
                    _errno.EBUSY,
                    "the process was forked while a client was in use by the parent; close it before, or start processes by spawn",
                )
            if self._native is None or self._process != os.getpid():
                _note_other_threads()
                texts = [(name, _text_of(value)) for name, value in self._settings.items() if value is not None]
                self._native = _native.NativeClient(self._source, texts)
                self._process = os.getpid()
            return self._native

    def close(self) -> None:
        """Ends all calls and threads of the client; waits until nodes have written bytes durably. A file that is written and was not
        closed is dropped, with a ``ResourceWarning``; the old file stays."""
        failure: Exception | None = None
        for end in list(self._writes):
            file = end.open_file()
            try:
                if file is not None:
                    end.finish(file)
            except (OSError, ResourceWarning) as error:
                failure = error
        with self._lock:
            native = self._native
            self._native = None
            self._closed = True
            own = self._process == os.getpid()
        if native is not None and own:
            native.close()
        if failure is not None:
            raise failure

    def _close_before_fork(self):
        """Ends the threads of a client that is not in use."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            native = self._native
            is_own = native is not None and self._process == os.getpid()
            if not is_own or any(end.open_file() is not None for end in self._writes) or not native.is_idle():
                return
            self._native = None
        finally:
            self._lock.release()
        try:
            native.close()
        except OSError as failure:
            self._failure = failure

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_):
        self.close()

    @property
    def source(self) -> str:
        """The source's URL."""
        return self._opened().source()

    @property
    def block_size(self) -> int:
        """The unit of caching, in bytes."""
        return self._opened().block_size()

    # Names.

    def stat(self, path: PathOrStat) -> FileStat:
        """The :class:`FileStat` of ``path``, behind symbolic links.

        Raises ``FileNotFoundError``, ``NotADirectoryError``, ``OSError``."""
        name, attr = self._opened().find(_path_bytes(path))
        return FileStat(os.fsdecode(name), *attr)

    def exists(self, path: PathOrStat) -> bool:
        """Whether there is such a name."""
        try:
            self.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def scandir(self, path: PathOrStat = "") -> Iterator[FileStat]:
        """A :class:`FileStat` for each name of a directory, in the source's order; symbolic links as themselves.

        Raises ``FileNotFoundError``, ``NotADirectoryError``, ``OSError``."""
        native = self._opened()
        folder = os.fsdecode(_path_bytes(path)).strip("/")
        prefix = folder + "/" if folder else ""
        cursor = None
        while True:
            entries, cursor = native.list_page(os.fsencode(folder), cursor, _PAGE_NAMES)
            for name, attr in entries:
                yield FileStat(prefix + os.fsdecode(name), *attr)
            if cursor is None:
                return

    def listdir(self, path: PathOrStat = "") -> list[str]:
        """The names of a directory."""
        return [entry.path.rpartition("/")[2] for entry in self.scandir(path)]

    def walk(self, top: PathOrStat = "") -> Iterator[tuple[str, list[str], list[FileStat]]]:
        """As ``os.walk``, from the top down: ``(folder, names of folders, FileStats of all else)``. Names that are removed
        from the second are not entered. Symbolic links are not followed."""
        folders = []
        files = []
        for entry in self.scandir(top):
            if entry.is_dir:
                folders.append(entry.path.rpartition("/")[2])
            else:
                files.append(entry)
        folder = os.fsdecode(_path_bytes(top)).strip("/")
        yield folder, folders, files
        for name in folders:
            yield from self.walk(f"{folder}/{name}" if folder else name)

    def glob(self, pattern: str) -> list[str]:
        """The paths that match: ``*``, ``?`` and ``[…]`` within a name, ``**`` for any number of folders. Sorted."""
        parts = [part for part in pattern.split("/") if part]
        return sorted(set(self._glob("", parts)))

    def _glob(self, folder, parts):
        if not parts:
            yield folder
            return
        part, rest = parts[0], parts[1:]
        prefix = folder + "/" if folder else ""
        if part == "**":
            yield from self._glob(folder, rest) if rest else ()
            for entry in self._folder_or_nothing(folder):
                if entry.is_dir:
                    yield from self._glob(entry.path, parts)
                elif not rest:
                    yield entry.path
        elif any(sign in part for sign in "*?["):
            for entry in self._folder_or_nothing(folder):
                if fnmatch.fnmatchcase(entry.path.rpartition("/")[2], part) and (entry.is_dir or not rest):
                    yield from self._glob(entry.path, rest)
        elif self.exists(prefix + part):
            yield from self._glob(prefix + part, rest)

    def _folder_or_nothing(self, folder):
        try:
            yield from self.scandir(folder)
        except (FileNotFoundError, NotADirectoryError):
            return

    def readlink(self, path: PathOrStat) -> str:
        """The target of a symbolic link. Raises ``OSError`` (``EINVAL``) for anything else."""
        return os.fsdecode(self._opened().read_link(_path_bytes(path)))

    def info(self, path: PathOrStat) -> dict[str, Any]:
        """What the cache has of a file, as a dict: ``version``, ``length``, ``block_size``, ``blocks`` (counts), ``held``
        (runs of blocks with their places) and others."""
        return json.loads(self._opened().info(_path_bytes(path)))

    def stats(self) -> dict[str, dict[str, int]]:
        """The counters of this client, by section, as a dict of dicts. Those of bytes are totals since the opening."""
        return json.loads(self._opened().stats())

    # Reads.

    @overload
    def open(self, path: PathOrStat, mode: Literal["rb"] = "rb", buffering: Literal[0] = 0) -> ReadFile: ...
    @overload
    def open(self, path: PathOrStat, mode: Literal["rb"] = "rb", buffering: int = 0) -> ReadFile | io.BufferedReader: ...
    @overload
    def open(self, path: PathOrStat, mode: Literal["wb", "xb"], *, sync: bool = False) -> WriteFile: ...
    @overload
    def open(
        self,
        path: PathOrStat,
        mode: Literal["r", "rt", "w", "wt", "x", "xt"],
        buffering: int = 0,
        encoding: str | None = None,
        sync: bool = False,
    ) -> io.TextIOWrapper: ...

    def open(self, path: Any, mode: str = "rb", buffering: int = 0, encoding: str | None = None, sync: bool = False) -> Any:
        """Opens a file: ``"rb"`` for reading, ``"r"`` for text, ``"wb"`` for writing a new one, ``"xb"`` for one whose name must be free.

        A file that is read has the version of the moment when it was opened; once those bytes are gone from the source and
        the cache, a read raises ``OSError`` (``ESTALE``). ``buffering`` above 1 adds a buffer of so many bytes.

        A file that is written gets its name when it is closed, whole. An exception inside of its ``with`` leaves the old file, and so
        does a file that is never closed: both warn (``ResourceWarning``). A wrapper that closes the file, as ``io.BufferedWriter``
        does, gives it its name also after an exception. For a wrapper that leaves the file open, as ``gzip.GzipFile(fileobj=…)`` does,
        a close without an exception counts as that of the file, once the program has no reference to the file. With ``sync`` the bytes
        are durable before the name is there. ``"xb"`` raises ``FileExistsError``, at the opening or at the close."""
        if mode in ("wb", "xb", "w", "wt", "x", "xt"):
            name = os.fsdecode(_path_bytes(path))
            is_exclusive = mode.startswith("x")
            if is_exclusive and self.exists(name):
                raise FileExistsError(_errno.EEXIST, "the file is there", name)
            new = WriteFile(self._opened().create(_path_bytes(path)), name, sync, is_exclusive)
            self._writes.add(new._end)
            return new if mode.endswith("b") else TextWriteFile(new, encoding=encoding or "utf-8", write_through=True)
        if mode not in ("rb", "r", "rt"):
            raise ValueError(f"mode {mode!r}: give 'rb', 'r', 'wb', 'w', 'xb' or 'x'")
        stat = path if isinstance(path, FileStat) and path.kind != "symlink" else self.stat(path)
        if stat.is_dir:
            raise IsADirectoryError(_errno.EISDIR, "is a directory", stat.path)
        file = ReadFile(self, stat)
        if mode == "rb":
            return io.BufferedReader(file, buffering) if buffering > 1 else file
        return io.TextIOWrapper(io.BufferedReader(file, max(buffering, 1 << 20)), encoding=encoding or "utf-8")

    def read_bytes(self, path: PathOrStat) -> bytes:
        """All bytes of a file."""
        return bytes(self.read_many([path])[0])

    def read_many(
        self, items: Iterable[ReadItem], into: Any = None, *, errors: str = "raise"
    ) -> list[Any]:
        """Reads many ranges of many files in parallel.

        ``items``: ``(path, offset, length)`` in bytes, or a path for a whole file; a length of None reads to the end. A path is
        text, bytes, ``os.PathLike``, or a :class:`FileStat`, which pins the version and saves the lookup.

        ``into``: None for one new arena, whose parts are returned as writable ``memoryview`` objects, which start at multiples of
        64 bytes: numpy, torch and jax take them without a copy, at any type of element; one buffer, which gets
        the ranges one behind the other, each at the place that follows from the lengths that the items name, also if a file is
        shorter or missing; or a sequence with a buffer for each item. A buffer is anything contiguous and
        writable with the buffer protocol, numpy arrays included, or a torch tensor in CPU memory.

        Returns, in order of the items, memoryviews; or with ``into`` the number of bytes read, which is smaller than the length
        only at the end of a file.

        ``errors``: ``"raise"`` raises the first failure; ``"mark"`` has None for files that are not there, and raises the others;
        ``"return"`` has the exception in place of a result.

        Ctrl-C ends the call; buffers stay in use until the reads under way have ended.
        """
        plan = _ReadPlan(self, _items_of(items), errors)
        return plan.read(into)

    def _start_read(self, stat, offset, length, view):
        """Starts to read a range of a version into a buffer; returns the reads under way."""
        wanted = (_path_bytes(stat), stat.version, stat.size, offset, length, 0, 0)
        return self._opened().start_reads([wanted], [view])

    def iter_many(
        self,
        items: Iterable[ReadItem],
        *,
        ordered: bool = False,
        errors: str = "raise",
        memory: int = _ITER_BYTES,
    ) -> Iterator[tuple[int, Any]]:
        """As :meth:`read_many`, one after the other: yields ``(number of the item, memoryview)`` as the ranges end, or in order
        of the items. Reads ahead, within ``memory`` bytes of arenas that are not handed out whole yet."""
        if errors not in _ERROR_MODES:
            raise ValueError(f"errors={errors!r}: give 'raise', 'mark' or 'return'")
        groups = self._iter_groups(items, errors, max(1, memory // 2))
        under_way: collections.deque[tuple[int, _ReadPlan]] = collections.deque()
        try:
            while True:
                while len(under_way) < 2 and (group := next(groups, None)) is not None:
                    under_way.append(group)
                if not under_way:
                    return
                first, plan = under_way[0]
                for number, result in plan.results_as_they_end(ordered):
                    yield first + number, result
                under_way.popleft()
        finally:
            for _, plan in under_way:
                plan.cancel()

    def _iter_groups(self, items, errors, group_bytes):
        """Started plans of consecutive items, with the number of the first."""
        first = 0
        batch = []
        for batch in _batches(_items_of(items), _ITER_RANGES):
            whole = _ReadPlan(self, batch, errors)
            start = 0
            for end in whole.ends_of_groups(group_bytes):
                plan = whole.part(start, end)
                plan.start_in_arena()
                yield first + start, plan
                start = end
            first += len(batch)

    # The cache.

    def load(
        self,
        paths: PathOrStat | Sequence[PathOrStat] = ("",),
        *,
        verify: bool = False,
        wait: bool = True,
        parallel: int = 32,
        progress: Callable[[dict[str, Any]], object] | bool | None = None,
    ) -> Load:
        """Fetches files and folders into the cache (of the group, or of this process), in parallel. Returns a :class:`Load`.

        ``verify`` reads each block back. ``progress``: a function that gets :meth:`Load.progress` about four times a second, or
        True for a bar, if ``tqdm`` is installed. Raises ``OSError`` (``EIO``) if files have failed, and waits for it."""
        paths = [paths] if isinstance(paths, (str, bytes, os.PathLike, FileStat)) else paths
        texts = [os.fsdecode(_path_bytes(path)).strip("/") for path in paths]
        job = Load(self._opened().start_load(texts, verify, parallel))
        if wait:
            try:
                _wait_with_progress(job, progress)
            except BaseException:
                job.stop()
                raise
        return job

    def prefetch(self, paths: PathOrStat | Sequence[PathOrStat], *, wait: bool = False) -> Load:
        """Starts to fetch files and folders into the cache; returns a :class:`Load` to wait for, or to stop."""
        return self.load(paths, wait=wait)

    # Writes.

    def put_many(
        self,
        items: Mapping[Any, Any] | Iterable[tuple[PathOrStat, Any]],
        *,
        sync: bool = False,
        errors: str = "raise",
    ) -> list[BaseException | None]:
        """Writes whole files in parallel: a mapping of paths to contents, or pairs. Contents are bytes or any contiguous buffer.

        Each file gets its name whole, or the old file stays. Returns a list with None for each file; with ``errors="return"``
        the exception in place of it. With ``sync`` bytes are durable before the name is there."""
        pairs = list(items.items() if hasattr(items, "items") else items)
        paths = [_path_bytes(path) for path, _ in pairs]
        results = self._opened().put_many(paths, [_buffer_of(data) for _, data in pairs], sync)
        if errors == "raise":
            for result in results:
                if result is not None:
                    raise result
        return results

    def makedirs(self, path: PathOrStat) -> None:
        """Makes a folder, and those above; one that is there is left alone."""
        self._opened().make_folders(_path_bytes(path))

    def remove(self, path: PathOrStat) -> None:
        """Removes a file."""
        self._opened().remove(_path_bytes(path), False)

    def rmdir(self, path: PathOrStat) -> None:
        """Removes an empty folder."""
        self._opened().remove(_path_bytes(path), True)

    def rename(self, source: PathOrStat, target: PathOrStat) -> None:
        """Renames a file or folder; a file at ``target`` is replaced."""
        self._opened().rename(_path_bytes(source), _path_bytes(target))


#: A path, or a name that was looked up.
PathOrStat = str | bytes | os.PathLike | FileStat
#: A whole file, or a range of one: path, offset and length in bytes.
ReadItem = PathOrStat | tuple[PathOrStat, int, int | None]


def _reopen(source, settings):
    return Client(source, settings)


def _path_bytes(path):
    if isinstance(path, FileStat):
        path = path.path
    return os.fsencode(path).strip(b"/")


def _buffer_of(data):
    """What has the buffer protocol: a torch tensor by its numpy array."""
    if hasattr(data, "numpy") and hasattr(data, "device"):
        if data.device.type != "cpu":
            raise ValueError(f"a tensor on {data.device}; give memory of the CPU")
        return data.detach().numpy()
    return data


def _items_of(items):
    """Items of a read; one path alone is a mistake, and no list of paths of one letter."""
    if isinstance(items, (str, bytes, os.PathLike, FileStat)):
        raise TypeError(f"items is a list of paths and ranges; give [{items!r}] for one file")
    return items


def _batches(items, most):
    batch = []
    for item in items:
        batch.append(item)
        if len(batch) == most:
            yield batch
            batch = []
    if batch:
        yield batch


def _wait_with_progress(job, progress):
    if progress is None:
        job.wait()
        return
    show = _ProgressBar() if progress is True else progress
    while not job.wait(0.25):
        show(job.progress())
    show(job.progress())


class _ProgressBar:
    """A bar by tqdm; nothing without it."""

    def __init__(self):
        try:
            from tqdm.auto import tqdm
        except ImportError:
            self._bar = None
            return
        self._bar = tqdm(unit="B", unit_scale=True, unit_divisor=1024)

    def __call__(self, progress):
        if self._bar is None:
            return
        self._bar.total = progress["bytes_total"]
        self._bar.n = progress["bytes_done"]
        self._bar.refresh()
        if progress["state"] not in ("WAITING", "RUNNING", "VERIFYING"):
            self._bar.close()


_ERROR_MODES = ("raise", "mark", "return")


class _ReadPlan:
    """Ranges with their places in buffers."""

    def __init__(self, client, items, errors):
        if errors not in _ERROR_MODES:
            raise ValueError(f"errors={errors!r}: give 'raise', 'mark' or 'return'")
        self._native = client._opened()
        self._errors = errors
        self._reads = None
        # For each range: path, version or None, size of the file, offset, length; or the exception of its lookup.
        self._ranges = []
        #: The lengths that the items name, if they do.
        self._lengths = []
        unknown = {}
        for item in items:
            path, offset, length = _split_item(item)
            if offset < 0 or (length is not None and length < 0):
                raise ValueError(f"{item!r}: offset and length are not negative")
            self._lengths.append(length)
            if isinstance(path, FileStat) and path.is_dir:
                self._ranges.append(_is_a_directory(path.path))
                continue
            if isinstance(path, FileStat) and path.kind != "symlink":
                self._ranges.append(_pinned_range(_path_bytes(path), path.version, path.size, offset, length))
                continue
            path = _path_bytes(path)
            if length is None or length > _ONE_PIECE:
                unknown.setdefault(path, []).append(len(self._ranges))
            self._ranges.append((path, None, 0, offset, length))
        if unknown:
            self._look_up(unknown)

    def _look_up(self, unknown):
        for path, found in zip(unknown, self._native.find_many(list(unknown))):
            for number in unknown[path]:
                if isinstance(found, BaseException):
                    self._ranges[number] = found
                    continue
                _, _, _, offset, length = self._ranges[number]
                name, (kind, size, _, _, version, _) = found
                if kind == "directory":
                    self._ranges[number] = _is_a_directory(os.fsdecode(path))
                else:
                    self._ranges[number] = _pinned_range(name, version, size, offset, length)

    def part(self, start, end):
        """The plan of some of the ranges."""
        plan = object.__new__(_ReadPlan)
        plan._native = self._native
        plan._errors = self._errors
        plan._reads = None
        plan._ranges = self._ranges[start:end]
        plan._lengths = self._lengths[start:end]
        return plan

    def ends_of_groups(self, group_bytes):
        """Cuts the ranges into groups of so many bytes; a longer range is a group alone."""
        total = 0
        for number, wanted in enumerate(self._ranges):
            length = 0 if isinstance(wanted, BaseException) else wanted[4]
            if total and total + length > group_bytes:
                yield number
                total = 0
            total += length
        if self._ranges:
            yield len(self._ranges)

    def _start(self, buffers, places):
        """Starts the reads; ``places`` has a buffer's number and an offset for each range."""
        self._numbers = []
        tuples = []
        for number, (wanted, place) in enumerate(zip(self._ranges, places)):
            if not isinstance(wanted, BaseException):
                self._numbers.append(number)
                tuples.append((*wanted, *place))
        self._reads = self._native.start_reads(tuples, buffers)

    def start_in_arena(self):
        """Starts the reads into a new arena."""
        places = []
        at = 0
        for wanted in self._ranges:
            places.append((0, at))
            length = 0 if isinstance(wanted, BaseException) else wanted[4]
            at += -(-length // _ITEM_ALIGN) * _ITEM_ALIGN
        self._arena = memoryview(_native.Arena(at))
        self._places = places
        self._start([self._arena], places)

    def read(self, into):
        """Reads all ranges; the results in order."""
        if into is None:
            self.start_in_arena()
        else:
            self._start_into(into)
        results = [wanted if isinstance(wanted, BaseException) else None for wanted in self._ranges]
        try:
            read = self._reads.results()
        finally:
            self.cancel()
        for number, result in zip(self._numbers, read):
            results[number] = result
        return [self._checked(number, result, into is None) for number, result in enumerate(results)]

    def _start_into(self, into):
        buffer = _buffer_of(into)
        try:
            single = memoryview(buffer)
        except TypeError:
            buffers = [_buffer_of(buffer) for buffer in into]
            if len(buffers) != len(self._ranges):
                raise ValueError(f"{len(buffers)} buffers for {len(self._ranges)} items") from None
            self._ranges = [_cut_range(wanted, memoryview(buffer).nbytes) for wanted, buffer in zip(self._ranges, buffers)]
            self._start(buffers, [(number, 0) for number in range(len(buffers))])
            return
        places = []
        at = 0
        for wanted, named in zip(self._ranges, self._lengths):
            places.append((0, at))
            found = 0 if isinstance(wanted, BaseException) else wanted[4]
            at += found if named is None else named
        if at > single.nbytes:
            raise ValueError(f"the ranges have {at} bytes, and the buffer {single.nbytes}")
        self._start([buffer], places)

    def results_as_they_end(self, ordered):
        """Pairs of a number and a view."""
        waiting = {}
        following = 0
        for number, result in self._results_by_end():
            if not ordered:
                yield number, self._checked(number, result, True)
                continue
            waiting[number] = result
            while following in waiting:
                yield following, self._checked(following, waiting.pop(following), True)
                following += 1
        self.cancel()

    def _results_by_end(self):
        for number, wanted in enumerate(self._ranges):
            if isinstance(wanted, BaseException):
                yield number, wanted
        while (ended := self._reads.next()) is not None:
            number, result = ended
            yield self._numbers[number], result

    def _checked(self, number, result, as_view):
        if isinstance(result, BaseException):
            if self._errors == "return":
                return result
            if self._errors == "mark" and isinstance(result, (FileNotFoundError, NotADirectoryError)):
                return None
            raise result
        if not as_view:
            return result
        at = self._places[number][1]
        return self._arena[at : at + result]

    def cancel(self):
        """Gives up what is not read yet."""
        if self._reads is not None:
            self._reads.cancel()


def _split_item(item):
    """Path, offset and length of an item."""
    if isinstance(item, (FileStat, str, bytes, os.PathLike)):
        return item, 0, None
    path, offset, length = item
    return path, int(offset), None if length is None else int(length)


def _is_a_directory(path):
    return IsADirectoryError(_errno.EISDIR, "is a directory", path)


def _pinned_range(path, version, size, offset, length):
    rest = max(0, size - offset)
    return (path, version, size, offset, rest if length is None else min(length, rest))


def _cut_range(wanted, most):
    """A range no longer than its own buffer."""
    if isinstance(wanted, BaseException):
        return wanted
    path, version, size, offset, length = wanted
    return (path, version, size, offset, min(length, most))


def _close_all():
    for client in list(_clients):
        client.close()


def _close_before_fork():
    for client in list(_clients):
        client._close_before_fork()
    if _other_threads is not None and not _has_open_client():
        _await_threads_end(_other_threads)


def _has_open_client():
    return any(client._native is not None for client in list(_clients))


def _note_other_threads():
    """Before the first client is open, all threads are others'."""
    global _other_threads
    if _other_threads is None:
        _other_threads = set(_named_threads())


def _await_threads_end(others):
    """The threads of a closed client end soon after the close. A child must not be forked before: threads that wait for each other are
    in lists of the process, and would lead the child to the memory of threads that it does not have."""
    until = time.monotonic() + _THREAD_END_TIME
    while left := _named_threads().keys() - others:
        if time.monotonic() > until:
            # They are of another library.
            others.update(left)
            return
        time.sleep(_THREAD_END_INTERVAL)


def _named_threads() -> dict[int, str]:
    """Names by numbers of all threads that are not Python's: those of clients have names, which differ from the program's."""
    named = {}
    with io.open("/proc/self/comm", errors="replace") as file:
        program = file.read()
    pythons = {thread.native_id for thread in threading.enumerate()}
    for number in map(int, os.listdir("/proc/self/task")):
        try:
            with io.open(f"/proc/self/task/{number}/comm", errors="replace") as file:
                name = file.read()
        except OSError:
            continue
        # The kernel has threads of its own for io_uring.
        is_other = number in pythons or name == program or name.startswith("iou-")
        if not is_other and name.rstrip() not in _REGISTRY_THREADS:
            named[number] = name.rstrip()
    return named


def _begin_child():
    """A lock may have been held by a thread that the child does not have."""
    global _forked_in_use, _other_threads
    _other_threads = None
    for client in list(_clients):
        client._lock = threading.Lock()
        if client._native is not None:
            _forked_in_use = True


atexit.register(_close_all)
os.register_at_fork(before=_close_before_fork, after_in_child=_begin_child)
