"""Files of a source as Python's own file objects."""

from __future__ import annotations

import errno as _errno
import io
import os
import threading

from . import _native


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


def drop_unclosed(file) -> None:
    """Discards a file that was never closed: it is not whole. An object that was not made completely has no file."""
    try:
        file.discard()
    except (AttributeError, OSError, ValueError):
        pass


class WriteFile(io.RawIOBase):
    """A new file that gets its name when it is closed; made by :meth:`spurline.Client.open`."""

    def __init__(self, writing, name, sync):
        super().__init__()
        self._writing = writing
        self._sync = sync
        self._written = 0
        self._write_lock = threading.Lock()
        self.name = name
        """Path below the source."""
        self.mode = "wb"
        """``"wb"``."""

    def writable(self) -> bool:
        return True

    def tell(self):
        return self._written

    def write(self, data) -> int:
        """Appends bytes or a contiguous buffer; returns the number of bytes, which is all of them."""
        if self.closed:
            raise ValueError("the file is closed")
        with self._write_lock:
            written = self._writing.write(data)
            self._written += written
        return written

    def close(self):
        """Gives the file its name. Raises ``OSError`` if the source refuses; the old file is there then."""
        if self.closed:
            return
        super().close()
        writing, self._writing = self._writing, None
        writing.commit(self._sync)

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
            self.discard()

    def __del__(self):
        drop_unclosed(self)


class TextWriteFile(io.TextIOWrapper):
    """A :class:`WriteFile` for text."""

    def __exit__(self, kind, *_):
        if kind is not None:
            self.discard()
            return
        self.close()

    def __del__(self):
        # The finalizer of io would close the file, which gives it its name.
        drop_unclosed(self)

    def discard(self) -> None:
        """Removes what was written; the old file stays."""
        self.buffer.discard()
