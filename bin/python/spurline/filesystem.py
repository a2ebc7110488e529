"""fsspec: ``spurline://PATH`` for pandas, pyarrow, zarr, datasets, DuckDB and others. Needs ``fsspec``.

The source comes with ``storage_options``: ``{"source": "s3://datasets", "registry": "coordinator://head:7400"}`` and all other
settings of :func:`spurline.open`; or from the variables ``SPURLINE_SOURCE``, ``SPURLINE_REGISTRY`` and
``SPURLINE_GROUP_TOKEN_FILE``, and for writing ``SPURLINE_WRITABLE=1``."""

import contextlib
import errno as _errno
import io
import os
import shutil
import sys

from fsspec.compression import compr
from fsspec.core import OpenFile, get_compression
from fsspec.spec import AbstractFileSystem

from ._client import open as _open_client
from ._files import TextWriteFile, finish_unclosed

#: Settings that a variable gives where the options do not.
_VARIABLES = {
    "source": "SPURLINE_SOURCE",
    "registry": "SPURLINE_REGISTRY",
    "token_file": "SPURLINE_GROUP_TOKEN_FILE",
}
#: Values of a variable for no.
_SWITCHED_OFF = {"", "0", "false", "no", "off"}
#: Bytes of the buffer of an open file: small reads of a parser come from there.
_BUFFER_BYTES = 1 << 20
#: Bytes of one read of a copy.
_COPY_BYTES = 16 << 20
#: Python calls between the end of fsspec's ``with`` and the close of a file.
_WITH_DEPTH = 4


class SpurlineFileSystem(AbstractFileSystem):
    """A source as a file system of fsspec. Paths are those below the source. ``cat``, ``cat_ranges`` and ``pipe`` are one batch
    of parallel requests each."""

    protocol = "spurline"
    root_marker = ""
    cachable = True

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        settings = {name: value for name, value in options.items() if name not in _FSSPEC_OPTIONS}
        for name, variable in _VARIABLES.items():
            if name not in settings and os.environ.get(variable):
                settings[name] = os.environ[variable]
        if "writable" not in settings:
            settings["writable"] = os.environ.get("SPURLINE_WRITABLE", "") not in _SWITCHED_OFF
        if "source" not in settings:
            raise ValueError("spurline:// needs a source: storage_options={'source': 's3://BUCKET'}, or SPURLINE_SOURCE")
        source = settings.pop("source")
        #: The client.
        self.client = _open_client(source, connect=False, **settings)

    @classmethod
    def _strip_protocol(cls, path):
        if isinstance(path, list):
            return [cls._strip_protocol(part) for part in path]
        path = os.fspath(path)
        if path.startswith("spurline://"):
            path = path[len("spurline://") :]
        return path.strip("/")

    @property
    def fsid(self):
        """Names the source."""
        return f"spurline-{self.client.source}"

    def ls(self, path, detail=True, **kwargs):
        """Names of a directory, or the file itself."""
        path = self._strip_protocol(path)
        try:
            entries = [_details(entry) for entry in self.client.scandir(path)]
        except NotADirectoryError:
            entries = [self.info(path)]
        return entries if detail else [entry["name"] for entry in entries]

    def info(self, path, **kwargs):
        """Attributes: ``name``, ``size`` in bytes, ``type``, ``mtime`` in seconds, ``version``, ``ETag``."""
        path = self._strip_protocol(path)
        return {**_details(self.client.stat(path)), "name": path}

    def ukey(self, path):
        """The version."""
        return self.info(path)["version"]

    checksum = ukey

    def modified(self, path):
        """Time of the last change."""
        import datetime

        return datetime.datetime.fromtimestamp(self.info(path)["mtime"], tz=datetime.timezone.utc)

    def _open(self, path, mode="rb", block_size=None, autocommit=True, cache_options=None, **kwargs):
        buffer_bytes = block_size or _BUFFER_BYTES
        if mode == "rb":
            return _ReadFile(self, path, self.client.open(path), buffer_bytes)
        if mode in ("wb", "xb"):
            new = self._with_folders([path], lambda: self.client.open(path, mode))
            return _NewFile(self, new, buffer_bytes, autocommit)
        raise OSError(_errno.EOPNOTSUPP, f"mode {mode!r}: files are read, or written whole", path)

    def open(self, path, mode="rb", block_size=None, cache_options=None, compression=None, **kwargs):
        """As fsspec's; bytes are cached by the client, and not by fsspec. A new file gets its name when it is closed. An exception
        that leaves the ``with``, that of ``fsspec.open`` too, leaves the old file, and so does a file that is never closed: both
        warn (``ResourceWarning``)."""
        is_new = mode.startswith(("w", "x"))
        if is_new and "b" not in mode:
            text = {name: kwargs.pop(name) for name in ("encoding", "errors", "newline") if name in kwargs}
            new = self.open(path, mode[0] + "b", block_size, compression=compression, **kwargs)
            return TextWriteFile(new, **{"encoding": "utf-8", **text})
        if is_new and compression is not None:
            compression = get_compression(self._strip_protocol(path), compression)
            compressor_type = compr[compression]
            new = self.open(path, mode, block_size, **kwargs)
            return new if compression is None else _CompressedFile(new, compressor_type)
        return super().open(path, mode, block_size=block_size, cache_options=None, compression=compression, **kwargs)

    def cat_file(self, path, start=None, end=None, **kwargs):
        """The bytes of a file, from ``start`` to ``end``."""
        return self.cat_ranges([path], [start], [end], on_error="raise")[0]

    def cat(self, path, recursive=False, on_error="raise", **kwargs):
        """The bytes of one file, or a dict of those of many, read as one batch."""
        paths = self.expand_path(path, recursive=recursive)
        paths = [path for path in paths if not recursive or self.isfile(path)]
        single = not isinstance(path, list) and paths == [self._strip_protocol(path)]
        read = self.cat_ranges(paths, None, None, on_error=on_error)
        if single:
            return read[0]
        pairs = zip(paths, read)
        return {path: data for path, data in pairs if on_error != "omit" or not isinstance(data, BaseException)}

    def cat_ranges(self, paths, starts, ends, max_gap=None, on_error="return", **kwargs):
        """The bytes of many ranges as one batch; negative numbers count from the end of a file."""
        starts = [starts] * len(paths) if starts is None or isinstance(starts, int) else starts
        ends = [ends] * len(paths) if ends is None or isinstance(ends, int) else ends
        if len(starts) != len(paths) or len(ends) != len(paths):
            raise ValueError("as many starts and ends as paths")
        paths = [self._strip_protocol(path) for path in paths]
        items = [self._range_of(path, start, end, on_error) for path, start, end in zip(paths, starts, ends)]
        known = [item for item in items if not isinstance(item, OSError)]
        read = iter(self.client.read_many(known, errors="raise" if on_error == "raise" else "return"))
        results = [item if isinstance(item, OSError) else next(read) for item in items]
        return [data if isinstance(data, BaseException) else bytes(data) for data in results]

    def _range_of(self, path, start, end, on_error):
        """The item of a read; or the exception of a lookup, unless that is raised."""
        if (start or 0) < 0 or (end is not None and end < 0):
            try:
                stat = self.client.stat(path)
            except OSError as error:
                if on_error == "raise":
                    raise
                return error
            start = max(0, stat.size + start) if (start or 0) < 0 else start or 0
            end = stat.size + end if end is not None and end < 0 else end
            path = stat
        start = start or 0
        return (path, start, None if end is None else max(0, end - start))

    def pipe(self, path, value=None, **kwargs):
        """Writes whole files: a path and its bytes, or a dict."""
        pairs = {path: value} if isinstance(path, (str, os.PathLike)) else path
        pairs = [(self._strip_protocol(path), data) for path, data in pairs.items()]
        self._with_folders([path for path, _ in pairs], lambda: self.client.put_many(pairs))

    def _with_folders(self, paths, write):
        """Writes, and makes the folders of the paths before if one is missing: programs for object stores make none."""
        try:
            return write()
        except FileNotFoundError:
            for folder in {self._parent(path) for path in paths}:
                self.client.makedirs(folder)
            return write()

    def exists(self, path, **kwargs):
        """Whether there is such a name. An outage is an exception, and no absence."""
        return self.client.exists(self._strip_protocol(path))

    def isfile(self, path):
        """Whether the path leads to a file; as :meth:`exists`."""
        stat = self._stat_or_none(path)
        return stat is not None and stat.is_file

    def isdir(self, path):
        """Whether the path leads to a folder; as :meth:`exists`."""
        stat = self._stat_or_none(path)
        return stat is not None and stat.is_dir

    def _stat_or_none(self, path):
        try:
            return self.client.stat(self._strip_protocol(path))
        except (FileNotFoundError, NotADirectoryError):
            return None

    def walk(self, path, maxdepth=None, topdown=True, on_error="omit", **kwargs):
        """As fsspec's; by default folders that are gone are left out, and other failures raised."""
        on_error = _omit_absent if on_error == "omit" else on_error
        return super().walk(path, maxdepth=maxdepth, topdown=topdown, on_error=on_error, **kwargs)

    def pipe_file(self, path, value, mode="overwrite", **kwargs):
        """Writes a whole file, with ``mode="create"`` a new one."""
        if mode == "create":
            with self.open(path, "xb") as file:
                file.write(value)
            return
        self.pipe({path: value})

    def cp_file(self, path1, path2, **kwargs):
        """Copies a file, by way of the client; of a folder only the folder."""
        source = self.client.stat(self._strip_protocol(path1))
        target = self._strip_protocol(path2)
        if source.is_dir:
            self.client.makedirs(target)
            return
        with self.client.open(source) as file, self._with_folders([target], lambda: self.client.open(target, "wb")) as copy:
            shutil.copyfileobj(file, copy, _COPY_BYTES)

    def touch(self, path, truncate=True, **kwargs):
        """Makes an empty file; with ``truncate=False`` a file that is there stays as it is, its time too."""
        if truncate or not self.exists(path):
            with self.open(path, "wb", **kwargs):
                pass

    def mkdir(self, path, create_parents=True, **kwargs):
        """Makes a folder, by default with those above; ``FileExistsError`` if the name is taken."""
        if not create_parents and not self.isdir(self._parent(path)):
            raise FileNotFoundError(_errno.ENOENT, "there is no such folder", self._parent(path))
        self.makedirs(path)

    def makedirs(self, path, exist_ok=False):
        """Makes a folder, and those above."""
        if not exist_ok and self.exists(path):
            raise FileExistsError(_errno.EEXIST, "the name is taken", path)
        self.client.makedirs(self._strip_protocol(path))

    def rmdir(self, path):
        """Removes an empty folder."""
        self.client.rmdir(self._strip_protocol(path))

    def _rm(self, path):
        path = self._strip_protocol(path)
        if self.client.stat(path).is_dir:
            self.client.rmdir(path)
        else:
            self.client.remove(path)

    def mv(self, path1, path2, recursive=False, maxdepth=None, **kwargs):
        """Renames files and folders, folders with all that is in them. ``path1`` may be a pattern or a list. A folder that is there,
        a path that ends with a slash, and the target of several names take them in; lists of the same length are pairs."""
        if isinstance(path1, list) and isinstance(path2, list):
            pairs = list(zip(self._strip_protocol(path1), self._strip_protocol(path2), strict=True))
        else:
            sources = []
            for path in path1 if isinstance(path1, list) else [path1]:
                # A name with the signs of a pattern goes first.
                sources += [self._strip_protocol(path)] if self.exists(path) else self.expand_path(path)
            target = self._strip_protocol(path2)
            is_folder = len(sources) > 1 or isinstance(path1, list) or os.fspath(path2).endswith("/") or self.isdir(target)
            pairs = [(source, _below(target, source) if is_folder else target) for source in sources]
        for source, target in pairs:
            if source != target:
                # Absent sources make no folders.
                self.client.stat(source)
                self._with_folders([target], lambda: self.client.rename(source, target))


def _below(folder, path):
    """The path of the same name in a folder."""
    name = path.rpartition("/")[2]
    return f"{folder}/{name}" if folder else name


class _FsspecFile:
    """What programs expect of the files of fsspec."""

    def _describe(self, fs, path, mode):
        #: The file system.
        self.fs = fs
        #: The path below the source.
        self.path = path
        self._mode = mode

    @property
    def mode(self):
        """``"rb"``, ``"wb"`` or ``"xb"``."""
        return self._mode

    @property
    def full_name(self):
        """The path with the protocol."""
        return self.fs.unstrip_protocol(self.path)

    @property
    def loc(self):
        """The position."""
        return self.tell()


class _ReadFile(_FsspecFile, io.BufferedReader):
    """A file for reading, at the version of its opening. A pickle has path, version and position."""

    def __init__(self, fs, path, raw, buffer_bytes):
        super().__init__(raw, buffer_bytes)
        self._describe(fs, path, "rb")
        self.blocksize = buffer_bytes

    @property
    def size(self):
        """Length in bytes."""
        return self.raw.size

    @property
    def version(self):
        """The version of the bytes."""
        return self.raw.version

    @property
    def details(self):
        """Attributes, as :meth:`SpurlineFileSystem.info` has them."""
        return {**_details(self.raw.stat), "name": self.path}

    def info(self):
        """As ``details``."""
        return self.details

    def __reduce__(self):
        return _reopen, (self.fs, self.path, self.raw.stat, self.blocksize, self.tell())


def _reopen(fs, path, stat, buffer_bytes, position):
    file = _ReadFile(fs, path, fs.client.open(stat), buffer_bytes)
    file.seek(position)
    return file


class _NewFile(_FsspecFile, io.BufferedWriter):
    """A new file that gets its name when it is closed, or in a transaction at the transaction's end."""

    def __init__(self, fs, raw, buffer_bytes, autocommit):
        super().__init__(raw, buffer_bytes)
        self._describe(fs, raw.name, raw.mode)
        self.blocksize = buffer_bytes
        self.autocommit = autocommit
        self._end = raw._end.move_to(self)

    def write(self, data):
        """Appends bytes."""
        if self._end is not None:
            self._end.note_write(sys._getframe(1))
        return io.BufferedWriter.write(self, data)

    def close(self):
        """Gives the file its name, unless a transaction does, or an exception leaves the ``with`` of ``fsspec.open``."""
        if self.raw.closed:
            return
        if not self.autocommit:
            self.flush()
        elif self._end is not None and self._end.has_failed() and _closes_open_file(sys._getframe(1)):
            self._end.fail(self)
        else:
            super().close()

    def commit(self):
        """Gives the file its name: the end of a transaction."""
        self.autocommit = True
        self.close()

    def detach(self):
        raw = super().detach()
        raw._end = self._end.move_to(raw)
        return raw

    def discard(self):
        """Removes what was written; the old file stays."""
        self.raw.discard()

    def __exit__(self, kind, *_):
        if kind is None:
            self.close()
        else:
            self._end.fail(self)

    def __del__(self):
        finish_unclosed(self)


def _closes_open_file(frame):
    """Whether the calls down to ``frame`` are those of the end of fsspec's own ``with``, which closes its files whatever happened."""
    for _ in range(_WITH_DEPTH):
        if frame is None:
            return False
        if frame.f_code is OpenFile.__exit__.__code__:
            return True
        frame = frame.f_back
    return False


class _CompressedFile(_FsspecFile, io.BufferedIOBase):
    """A compressor over a new file, which it closes with itself: compressors leave that to the program, and with it the exception of a
    failed close."""

    #: The close of io would flush, and compressed files get longer by that.
    closed = False

    def __init__(self, new, compressor_type):
        super().__init__()
        self._describe(new.fs, new.path, new.mode)
        #: Of path and mode.
        self.name = new.name
        self._new = new
        self._compressor = compressor_type(new, mode="w")
        self._end = new._end.move_to(self)

    def writable(self):
        return True

    def tell(self):
        return self._compressor.tell()

    def write(self, data):
        """Appends bytes."""
        if self._end is not None:
            self._end.note_write(sys._getframe(1))
        return self._compressor.write(data)

    def flush(self):
        """Hands on what is compressed."""
        if not self.closed:
            self._compressor.flush()

    def close(self):
        """Ends the compressor, and gives the file its name, unless a transaction does."""
        if self.closed:
            return
        self.closed = True
        try:
            self._compressor.close()
        except BaseException:
            self._new.discard()
            raise
        self._new.close()

    def discard(self):
        """Removes what was written; the old file stays."""
        if self.closed:
            return
        self.closed = True
        # A compressor that closes the file gives it no name.
        self._new.autocommit = False
        with contextlib.suppress(OSError, ValueError):
            self._compressor.close()
        self._new.discard()

    def __exit__(self, kind, *_):
        if kind is None:
            self.close()
        else:
            self._end.fail(self)

    def __del__(self):
        finish_unclosed(self)


def _omit_absent(error):
    if not isinstance(error, (FileNotFoundError, NotADirectoryError)):
        raise error


#: Options of fsspec's own.
_FSSPEC_OPTIONS = {
    "skip_instance_cache",
    "use_listings_cache",
    "listings_expiry_time",
    "max_paths",
    "asynchronous",
    "loop",
    "auto_mkdir",
}


def _details(stat):
    details = {
        "name": stat.path,
        "size": stat.size,
        "type": "directory" if stat.is_dir else "file",
        "mtime": stat.mtime,
        "version": stat.version,
    }
    if stat.etag is not None:
        details["ETag"] = stat.etag
    if stat.kind == "symlink":
        details["islink"] = True
    return details
