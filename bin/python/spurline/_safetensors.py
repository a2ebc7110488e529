"""Models in safetensors files: all tensors of all files by one batch of reads, as views of one arena."""

from __future__ import annotations

import collections
import errno
import json
import math
import struct
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from . import _native

if TYPE_CHECKING:
    from ._client import Client, PathOrStat

#: Bytes read of each file for its header; a longer header costs a second read.
_HEADER_BYTES = 1 << 20
#: The longest header of the format.
_MOST_HEADER_BYTES = 100_000_000
#: Alignment of each file's tensors in the arena.
_ARENA_ALIGN = 64
#: Tensors that are read in part: gaps up to this many bytes are read along.
_MOST_GAP_BYTES = 1 << 20
#: Bytes of each of the buffers in pinned host memory that a device is filled from.
_STAGING_BYTES = 64 << 20
#: Their number: one is filled while another is copied.
_STAGING_BUFFERS = 3

#: Bytes of an element, its name in numpy, its name in torch.
_DTYPES = {
    "BOOL": (1, "bool", "bool"),
    "U8": (1, "uint8", "uint8"),
    "I8": (1, "int8", "int8"),
    "F8_E4M3": (1, "float8_e4m3fn", "float8_e4m3fn"),
    "F8_E5M2": (1, "float8_e5m2", "float8_e5m2"),
    "U16": (2, "uint16", "uint16"),
    "I16": (2, "int16", "int16"),
    "F16": (2, "float16", "float16"),
    "BF16": (2, "bfloat16", "bfloat16"),
    "U32": (4, "uint32", "uint32"),
    "I32": (4, "int32", "int32"),
    "F32": (4, "float32", "float32"),
    "U64": (8, "uint64", "uint64"),
    "I64": (8, "int64", "int64"),
    "F64": (8, "float64", "float64"),
}


class _Tensor:
    """A tensor's place in its file and in the arena, in bytes."""

    __slots__ = ("name", "dtype", "shape", "file", "start", "length", "at")

    def __init__(self, name, dtype, shape, file, start, length):
        self.name = name
        self.dtype = dtype
        self.shape = shape
        self.file = file
        self.start = start
        self.length = length
        self.at = 0


def load_safetensors(
    client: Client,
    paths: PathOrStat | Iterable[PathOrStat],
    *,
    device: str = "cpu",
    framework: str = "numpy",
    select: Callable[[str], bool] | Iterable[str] | None = None,
) -> dict[str, Any]:
    """Reads the tensors of safetensors files; returns a dict of names and tensors.

    ``client``: a :class:`spurline.Client`. ``paths``: a path, or several, of files below its source, or ``FileStat`` objects.

    ``framework``: ``"numpy"`` gives ``numpy.ndarray`` and ``"torch"`` gives ``torch.Tensor`` views of one arena, which lives as
    long as any of them. numpy has no ``BF16`` and no ``F8``: those are of ``ml_dtypes`` where that is installed, else raw
    ``uint16`` and ``uint8``.

    ``select``: a function of a name that is true for the tensors to read, or a collection of names. Ranges that are not needed
    are not read, as a rank of a tensor-parallel model wants it.

    ``device``: anything but ``"cpu"`` is a torch device (``"cuda"``, ``"cuda:1"``): tensors are views of one allocation on the
    device, filled by way of pinned host memory, with copies that overlap reads.

    Raises ``OSError`` of reads, and ``ValueError`` for a file that is not safetensors."""
    is_one = isinstance(paths, (str, bytes)) or hasattr(paths, "__fspath__") or hasattr(paths, "version")
    several: list[Any] = [paths] if is_one else list(paths)  # type: ignore[arg-type]
    if framework not in ("numpy", "torch"):
        raise ValueError(f"framework={framework!r}: give 'numpy' or 'torch'")
    stats = [path if hasattr(path, "version") else client.stat(path) for path in several]
    for stat in stats:
        if stat.is_dir:
            raise IsADirectoryError(errno.EISDIR, "is a directory", stat.path)
    tensors = _select(_read_headers(client, stats), select)
    runs, total = _plan_runs(tensors)
    if device != "cpu":
        return _load_on(client, stats, tensors, runs, total, _TorchDevice(device))
    arena = _native.Arena(total)
    view = memoryview(arena)
    items = [(stats[run[0]], run[1], run[2]) for run in runs]
    read = client.read_many(items, into=[view[at : at + length] for _, _, length, at in runs])
    for (file, _, length, _), bytes_read in zip(runs, read):
        if bytes_read != length:
            raise ValueError(f"{stats[file].path} is shorter than its header says")
    return {tensor.name: _view_of(arena, tensor, framework) for tensor in tensors}


def _read_headers(client, stats):
    """The tensors of all files, in order of their places."""
    heads = client.read_many([(stat, 0, _HEADER_BYTES) for stat in stats])
    tensors = []
    for number, (stat, head) in enumerate(zip(stats, heads)):
        if len(head) < 8:
            raise ValueError(f"{stat.path} is not a safetensors file: {len(head)} bytes")
        (length,) = struct.unpack("<Q", head[:8])
        if length > min(_MOST_HEADER_BYTES, stat.size - 8):
            raise ValueError(f"{stat.path} is not a safetensors file: a header of {length} bytes")
        if len(head) < 8 + length:
            head = client.read_many([(stat, 0, 8 + length)])[0]
        try:
            header = json.loads(str(head[8 : 8 + length], "utf-8"), object_pairs_hook=_without_repeats)
            tensors += _tensors_of(header, number, stat, 8 + length)
        except (KeyError, TypeError, AttributeError, RecursionError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ValueError(f"{stat.path} is not a safetensors file: its header has a fault: {error!r}") from error
    return tensors


def _tensors_of(header, number, stat, data_start):
    tensors = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        dtype = entry["dtype"]
        shape = tuple(entry["shape"])
        start, end = _offsets_of(entry)
        if dtype not in _DTYPES:
            raise ValueError(f"{stat.path}: tensor {name!r} has the type {dtype!r}, which is not known")
        if any(type(length) is not int or length < 0 for length in shape):
            raise ValueError(f"{stat.path}: tensor {name!r} has the shape {shape}")
        length = _DTYPES[dtype][0] * math.prod(shape)
        if end - start != length or start < 0 or data_start + end > stat.size:
            raise ValueError(f"{stat.path}: tensor {name!r} has {end - start} bytes at {start} for the shape {shape}")
        tensors.append(_Tensor(name, dtype, shape, number, data_start + start, length))
    tensors.sort(key=lambda tensor: (tensor.start, tensor.length))
    end = data_start
    for tensor in tensors:
        if tensor.start != end:
            raise ValueError(f"{stat.path}: tensor {tensor.name!r} does not begin where the tensor before ends")
        end = tensor.start + tensor.length
    if end != stat.size:
        raise ValueError(f"{stat.path} has {stat.size} bytes, and its tensors end at {end}")
    return tensors


def _offsets_of(entry):
    offsets = entry["data_offsets"]
    if len(offsets) != 2 or any(type(offset) is not int for offset in offsets):
        raise TypeError(f"data_offsets are {offsets}")
    return offsets


def _without_repeats(pairs):
    entries = dict(pairs)
    if len(entries) != len(pairs):
        raise KeyError("a name that comes twice")
    return entries


def _select(tensors, select):
    files = {}
    for tensor in tensors:
        if files.setdefault(tensor.name, tensor.file) != tensor.file:
            raise ValueError(f"two of the files have a tensor {tensor.name!r}")
    if isinstance(select, str):
        raise TypeError(f"select is a collection of names, or a function; give [{select!r}] for one tensor")
    if select is None:
        return tensors
    if callable(select):
        return [tensor for tensor in tensors if select(tensor.name)]
    names = set(select)
    chosen = [tensor for tensor in tensors if tensor.name in names]
    missing = names - {tensor.name for tensor in chosen}
    if missing:
        raise KeyError(f"no file has the tensors {sorted(missing)}")
    return chosen


def _plan_runs(tensors):
    """Ranges to read as ``(file, start, length, place in the arena)``, and the length of the arena."""
    runs = []
    at = 0
    for tensor in tensors:
        run = runs[-1] if runs else None
        if run and run[0] == tensor.file and tensor.start <= run[1] + run[2] + _MOST_GAP_BYTES:
            run[2] = max(run[2], tensor.start + tensor.length - run[1])
        else:
            at = -(-at // _ARENA_ALIGN) * _ARENA_ALIGN
            # The same alignment as in the file.
            run = [tensor.file, tensor.start, tensor.length, at]
            runs.append(run)
        tensor.at = run[3] + tensor.start - run[1]
        at = run[3] + run[2]
    return runs, at


def _view_of(arena, tensor, framework):
    _, numpy_name, torch_name = _DTYPES[tensor.dtype]
    if framework == "torch":
        import torch

        dtype = getattr(torch, torch_name)
        if tensor.length == 0:
            return torch.empty(tensor.shape, dtype=dtype)
        flat = torch.frombuffer(arena, dtype=torch.uint8, count=tensor.length, offset=tensor.at)
        # A file may have a tensor at any place.
        flat = flat if tensor.at % dtype.itemsize == 0 else flat.clone()
        return flat.view(dtype).reshape(tensor.shape)
    import numpy

    dtype = _numpy_dtype(numpy, numpy_name, tensor.dtype)
    count = math.prod(tensor.shape)
    return numpy.frombuffer(arena, dtype=dtype, count=count, offset=tensor.at if count else 0).reshape(tensor.shape)


def _numpy_dtype(numpy, name, safetensors_name):
    if safetensors_name not in ("BF16", "F8_E4M3", "F8_E5M2"):
        return numpy.dtype(name)
    try:
        import ml_dtypes

        return numpy.dtype(getattr(ml_dtypes, name))
    except ImportError:
        return numpy.dtype("uint16" if safetensors_name == "BF16" else "uint8")


def _load_on(client, stats, tensors, runs, total, device):
    """Fills an allocation on a device from pinned buffers: one is copied while all others are being filled."""
    target = device.allocate(total)
    staging = [device.staging(_STAGING_BYTES) for _ in range(_STAGING_BUFFERS)]
    pieces = []
    for file, start, length, at in runs:
        for done in range(0, length, _STAGING_BYTES):
            pieces.append((file, start + done, min(_STAGING_BYTES, length - done), at + done))
    filling = collections.deque()
    try:
        for number, (file, start, length, at) in enumerate(pieces):
            if len(filling) == len(staging):
                _copy_filled(filling.popleft(), target)
            buffer = staging[number % len(staging)]
            # Until the copy from this buffer has ended.
            buffer.wait()
            reads = client._start_read(stats[file], start, length, buffer.view[:length])
            filling.append((reads, buffer, stats[file], at, length))
        while filling:
            _copy_filled(filling.popleft(), target)
    finally:
        for reads, *_ in filling:
            reads.cancel()
        for buffer in staging:
            buffer.wait()
    return {tensor.name: device.view(target, tensor) for tensor in tensors}


def _copy_filled(piece, target):
    """Waits for the bytes of a piece, and starts their copy to the device."""
    reads, buffer, stat, at, length = piece
    (read,) = reads.results()
    if isinstance(read, BaseException):
        raise read
    if read != length:
        raise ValueError(f"{stat.path} is shorter than its header says")
    buffer.copy_to(target, at, length)


class _TorchDevice:
    """A device of torch."""

    def __init__(self, name):
        import torch

        self._torch = torch
        self._device = torch.device(name)
        self._stream = torch.cuda.Stream(self._device)

    def allocate(self, length):
        return self._torch.empty(length, dtype=self._torch.uint8, device=self._device)

    def staging(self, length):
        return _TorchStaging(self._torch, self._stream, length)

    def view(self, target, tensor):
        dtype = getattr(self._torch, _DTYPES[tensor.dtype][2])
        flat = target[tensor.at : tensor.at + tensor.length]
        flat = flat if tensor.at % dtype.itemsize == 0 else flat.clone()
        return flat.view(dtype).reshape(tensor.shape)


class _TorchStaging:
    """A buffer in pinned host memory."""

    def __init__(self, torch, stream, length):
        self._torch = torch
        self._stream = stream
        self._pinned = torch.empty(length, dtype=torch.uint8, pin_memory=True)
        self._copied = None
        self.view = memoryview(self._pinned.numpy())

    def copy_to(self, target, at, length):
        with self._torch.cuda.stream(self._stream):
            target[at : at + length].copy_(self._pinned[:length], non_blocking=True)
            self._copied = self._torch.cuda.Event()
            self._copied.record(self._stream)

    def wait(self):
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None
