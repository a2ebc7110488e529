"""Files of a source as Python's own file objects."""

from __future__ import annotations

import errno as _errno
import io
import os
import sys
import threading
import warnings
import weakref
from types import FrameType
from typing import Any

from . import _native

#: Python calls from the close of a wrapper to the last write that it makes, at most: that many in archives that can't seek.
_CLOSE_DEPTH = 3


class ReadFile(io.RawIOBase):
    """A file at the version of its opening, for reading; made by :meth:`spurline.Client.open`.

    :meth:`pread` and :meth:`pread_into` may be called by many threads at once."""

    def __init__(self, client, stat):
        super().__init__()
        self._client = client
        self._path = os.fsencode(stat.path)
        self._position = 0
        self.stat = stat
        """The file's attributes at its opening."""

    @property
    def name(self) -> str:
        """Path below the source."""
        return self.stat.path

    @property
    def mode(self) -> str:
        """``"rb"``."""
        return "rb"

    @property
    def size(self) -> int:
        """Length in bytes."""
        return self.stat.size

    @property
    def version(self) -> str:
        """The version of the bytes."""
        return self.stat.version

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        self._check_open()
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._check_open()
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self.stat.size}.get(whence)
        if base is None:
            raise ValueError(f"whence {whence} is not 0, 1 or 2")
        if base + offset < 0:
            raise OSError(_errno.EINVAL, "a position before the start of the file", self.stat.path)
        self._position = base + offset
        return self._position

    def pread_into(self, buffer, offset: int) -> int:
        """Reads at ``offset`` into a contiguous writable buffer; returns the number of bytes, smaller only at the end.

        Raises ``OSError``: ``ESTALE`` when the version is gone, ``EHOSTDOWN`` and ``ETIMEDOUT`` when no server answers."""
        self._check_open()
        if offset < 0:
            raise OSError(_errno.EINVAL, "a position before the start of the file", self.stat.path)
        view = memoryview(buffer)
        length = max(0, min(view.nbytes, self.stat.size - offset))
        if length == 0:
            return 0
        wanted = (self._path, self.stat.version, self.stat.size, offset, length, 0, 0)
        read = self._client._opened().start_reads([wanted], [view]).results()[0]
        if isinstance(read, BaseException):
            raise read
        return read

    def pread(self, length: int, offset: int) -> bytes:
        """Up to ``length`` bytes at ``offset``, as ``os.pread`` has them."""
        length = max(0, min(length, self.stat.size - offset))
        arena = memoryview(_native.Arena(length))
        return bytes(arena[: self.pread_into(arena, offset)])

    def readinto(self, buffer) -> int:
        read = self.pread_into(buffer, self._position)
        self._position += read
        return read

    def readall(self) -> bytes:
        data = self.pread(max(0, self.stat.size - self._position), self._position)
        self._position += len(data)
        return data

    def _check_open(self):
        if self.closed:
            raise ValueError("the file is closed")


class WriteEnd:
    """How a new file ends that is not closed itself. Compressors and archives write their ends in their own close, and leave the file
    to the program (``gzip.GzipFile(fileobj=…)``): after that write the file is whole, unless an exception has ended the wrapper.

    A file of several layers has one, at the outermost: an inner layer lacks what the outer ones have buffered."""

    def __init__(self, file):
        self._file = weakref.ref(file)
        self._handled_before = _handled_exception()
        self._closing_before = _closing_frames()
        self._process = os.getpid()
        self._is_whole = False

    def move_to(self, outer) -> WriteEnd:
        """The same for a file with one more layer."""
        self._file()._end = None
        self._file = weakref.ref(outer)
        return self

    def note_write(self, frame) -> None:
        """Looks whether a write is the end of a wrapper; ``frame`` is that of its caller."""
        close = _close_of_wrapper(frame)
        self._is_whole = close is not None and id(close) not in self._closing_before and not self.has_failed()

    def has_failed(self) -> bool:
        """Whether this thread handles an exception that is younger than the file, as it does while one leaves a ``with``."""
        return _handled_exception() not in (None, self._handled_before)

    def open_file(self):
        """The outermost file; None once it is closed, or in a child that has a copy by a fork."""
        file = self._file()
        is_open = file is not None and not file.closed and self._process == os.getpid()
        return file if is_open else None

    def finish(self, file) -> None:
        """Ends a file that was not closed: it gets its name if its wrapper was closed, or else is dropped with a warning."""
        if file.closed or self._process != os.getpid():
            return
        if self._is_whole:
            file.close()
            return
        file.discard()
        _warn_of_drop(file, "was not closed")

    def fail(self, file) -> None:
        """Drops a file whose ``with`` an exception leaves. That exception goes on, also where warnings are errors."""
        if file.closed:
            return
        file.discard()
        try:
            _warn_of_drop(file, "was left by an exception")
        except ResourceWarning:
            pass


def _handled_exception() -> int | None:
    """Stands for the exception that this thread handles. A reference to it would keep the files of its frames open."""
    exception = sys.exception()
    return None if exception is None else id(exception)


def _closing_frames() -> set[int]:
    """Stands for the calls of a close that are under way: a file that one of them has opened is not what it closes."""
    frame: FrameType | None = sys._getframe(1)
    closing = set()
    while frame is not None:
        if frame.f_code.co_name == "close":
            closing.add(id(frame))
        frame = frame.f_back
    return closing


def _close_of_wrapper(frame):
    """The call of a wrapper's close that has led to ``frame``. That by a finalizer is none: the wrapper was left."""
    depth = 1
    while frame.f_code.co_name != "close":
        frame = frame.f_back
        if frame is None or depth == _CLOSE_DEPTH:
            return None
        depth += 1
    is_finalizer = frame.f_back is not None and frame.f_back.f_code.co_name == "__del__"
    # The finalizer of io sets the attribute before it closes.
    return None if is_finalizer or getattr(frame.f_locals.get("self"), "_finalizing", False) else frame


def _warn_of_drop(file, why) -> None:
    warnings.warn(f"{file.name!r} {why}: what was written is dropped", ResourceWarning, stacklevel=4, source=file)


def finish_unclosed(file) -> None:
    """The finalizer of a new file."""
    # An object that was not made completely has no file.
    end = getattr(file, "_end", None)
    if end is not None:
        end.finish(file)


class WriteFile(io.RawIOBase):
    """A new file that gets its name when it is closed; made by :meth:`spurline.Client.open`."""

    def __init__(self, writing, name, sync, exclusive=False):
        super().__init__()
        self._writing = writing
        self._sync = sync
        self._exclusive = exclusive
        self._written = 0
        self._write_failure: OSError | None = None
        self._write_lock = threading.Lock()
        # None once an outer layer has it.
        self._end: Any = WriteEnd(self)
        self.name = name
        """Path below the source."""
        self.mode = "xb" if exclusive else "wb"
        """``"wb"`` or ``"xb"``."""

    def writable(self) -> bool:
        return True

    def tell(self):
        return self._written

    def write(self, data) -> int:
        """Appends bytes or a contiguous buffer; returns the number of bytes, which is all of them."""
        if self.closed:
            raise ValueError("the file is closed")
        if self._end is not None:
            self._end.note_write(sys._getframe(1))
        with self._write_lock:
            try:
                written = self._writing.write(data)
            except (BufferError, TypeError):
                # No byte of it was taken.
                raise
            except BaseException as failure:
                # Wrappers close the file also after a write that failed.
                reason = (failure.errno, failure.strerror) if isinstance(failure, OSError) else (_errno.EIO, f"{failure!r}")
                self._write_failure = OSError(*reason, self.name)
                raise
            self._written += written
        return written

    def close(self):
        """Gives the file its name. Raises ``OSError`` if the source refuses, or a write has failed; the old file is there then."""
        if self.closed:
            return
        if self._write_failure is not None:
            self.discard()
            raise self._write_failure
        super().close()
        writing, self._writing = self._writing, None
        writing.commit(self._sync, self._exclusive)

    def discard(self) -> None:
        """Removes what was written; the old file stays."""
        if not self.closed:
            super().close()
            writing, self._writing = self._writing, None
            writing.abort()

    def __exit__(self, kind, *_):
        if kind is None:
            self.close()
        else:
            self._end.fail(self)

    def __del__(self):
        finish_unclosed(self)


class TextWriteFile(io.TextIOWrapper):
    """A :class:`WriteFile` for text."""

    def __init__(self, buffer, **text):
        super().__init__(buffer, **text)
        # Its writes are not noted: no wrapper ends text.
        self._end = buffer._end.move_to(self)

    def __exit__(self, kind, *_):
        if kind is not None:
            self._end.fail(self)
            return
        self.close()

    def __del__(self):
        # The finalizer of io would close the file, which gives it its name.
        finish_unclosed(self)

    def detach(self):
        inner = super().detach()
        inner._end = self._end.move_to(inner)
        return inner

    def discard(self) -> None:
        """Removes what was written; the old file stays."""
        buffer: Any = self.buffer
        buffer.discard()
