"""Models in safetensors files: all tensors of all files by one batch of reads, as views of one arena."""

from __future__ import annotations

import collections
import errno
import functools
import json
import math
import struct
from collections.abc import Callable, Iterable
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NamedTuple

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

class _TensorType(NamedTuple):
    """A type of the format, and its names in libraries; None where a library has none, and gets raw bytes."""

    element_bytes: int | Fraction
    """Bytes of an element; packed types have less than one."""
    numpy: str | None
    ml_dtypes: str | None
    """None for packed types, too: the arrays of ml_dtypes have a byte for each element."""
    torch: str | None


def _plain(element_bytes, name):
    return _TensorType(element_bytes, name, None, name)


def _extended(element_bytes, name):
    """A type that numpy does not have."""
    return _TensorType(element_bytes, None, name, name)


#: The types of safetensors 0.8.
_DTYPES = {
    "BOOL": _plain(1, "bool"),
    "F4": _TensorType(Fraction(1, 2), None, None, "float4_e2m1fn_x2"),
    "F6_E2M3": _TensorType(Fraction(3, 4), None, None, None),
    "F6_E3M2": _TensorType(Fraction(3, 4), None, None, None),
    "U8": _plain(1, "uint8"),
    "I8": _plain(1, "int8"),
    "F8_E4M3": _extended(1, "float8_e4m3fn"),
    "F8_E5M2": _extended(1, "float8_e5m2"),
    "F8_E8M0": _extended(1, "float8_e8m0fnu"),
    "F8_E4M3FNUZ": _extended(1, "float8_e4m3fnuz"),
    "F8_E5M2FNUZ": _extended(1, "float8_e5m2fnuz"),
    "U16": _plain(2, "uint16"),
    "I16": _plain(2, "int16"),
    "F16": _plain(2, "float16"),
    "BF16": _extended(2, "bfloat16"),
    "U32": _plain(4, "uint32"),
    "I32": _plain(4, "int32"),
    "F32": _plain(4, "float32"),
    "C64": _plain(8, "complex64"),
    "U64": _plain(8, "uint64"),
    "I64": _plain(8, "int64"),
    "F64": _plain(8, "float64"),
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
    long as any of them. numpy has no ``BF16`` and no ``F8_…``: those are of ``ml_dtypes`` where that is installed, else raw
    ``uint16`` and ``uint8``. ``F4``, ``F6_E2M3`` and ``F6_E3M2`` stay packed: in torch ``F4`` is ``float4_e2m1fn_x2``, and all others are
    ``uint8``. Their last dimension counts bytes; a tensor whose rows are no whole bytes has one dimension.

    ``select``: a function of a name that is true for the tensors to read, or a collection of names. Ranges that are not needed
    are not read, as a rank of a tensor-parallel model wants it.

    ``device``: anything but ``"cpu"`` is a torch device (``"cuda"``, ``"cuda:1"``): tensors are views of one allocation on the
    device, filled by way of pinned host memory, with copies that overlap reads.

    Raises ``OSError`` of reads, and ``ValueError`` for a file that is not safetensors, or a tensor to read whose type is not known."""
    is_one = isinstance(paths, (str, bytes)) or hasattr(paths, "__fspath__") or hasattr(paths, "version")
    several: list[Any] = [paths] if is_one else list(paths)  # type: ignore[arg-type]
    if framework not in ("numpy", "torch"):
        raise ValueError(f"framework={framework!r}: give 'numpy' or 'torch'")
    stats = [path if hasattr(path, "version") else client.stat(path) for path in several]
    for stat in stats:
        if stat.is_dir:
            raise IsADirectoryError(errno.EISDIR, "is a directory", stat.path)
    tensors = _select(_read_headers(client, stats), select)
    for tensor in tensors:
        if tensor.dtype not in _DTYPES:
            why = f"tensor {tensor.name!r} has the type {tensor.dtype!r}, which is not known; select can leave it out"
            raise ValueError(f"{stats[tensor.file].path}: {why}")
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
        if not isinstance(dtype, str):
            raise TypeError(f"dtype is {dtype!r}")
        if any(type(length) is not int or length < 0 for length in shape):
            raise ValueError(f"{stat.path}: tensor {name!r} has the shape {shape}")
        # Only its own tensor is refused for an unknown type.
        length = _DTYPES[dtype].element_bytes * math.prod(shape) if dtype in _DTYPES else end - start
        if end - start != length or start < 0 or data_start + end > stat.size:
            raise ValueError(f"{stat.path}: tensor {name!r} has {end - start} bytes at {start} for the shape {shape}")
        tensors.append(_Tensor(name, dtype, shape, number, data_start + start, end - start))
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


def _stored_shape(tensor):
    """The shape of what is stored: the last dimension of a packed type counts bytes."""
    element_bytes = _DTYPES[tensor.dtype].element_bytes
    if element_bytes >= 1:
        return tensor.shape
    row_bytes = element_bytes * tensor.shape[-1]
    return (*tensor.shape[:-1], int(row_bytes)) if row_bytes.denominator == 1 else (tensor.length,)


def _view_of(arena, tensor, framework):
    shape = _stored_shape(tensor)
    if framework == "torch":
        import torch

        if tensor.length == 0:
            return torch.empty(shape, dtype=_torch_dtype(torch, tensor.dtype))
        return _torch_view(torch, torch.frombuffer(arena, dtype=torch.uint8, count=tensor.length, offset=tensor.at), tensor)
    import numpy

    count = math.prod(shape)
    return numpy.frombuffer(arena, _numpy_dtype(tensor.dtype), count, tensor.at if count else 0).reshape(shape)


def _torch_view(torch, flat, tensor):
    """A tensor of the bytes ``flat``."""
    dtype = _torch_dtype(torch, tensor.dtype)
    # A file may have a tensor at any place.
    flat = flat if tensor.at % dtype.itemsize == 0 else flat.clone()
    return flat.view(dtype).reshape(_stored_shape(tensor))


def _torch_dtype(torch, dtype):
    names = _DTYPES[dtype]
    if names.element_bytes > 1:
        return getattr(torch, names.torch)
    # Older releases lack some types.
    return getattr(torch, names.torch or "uint8", torch.uint8)


@functools.cache
def _numpy_dtype(dtype):
    import numpy

    names = _DTYPES[dtype]
    if names.numpy is not None:
        return numpy.dtype(names.numpy)
    try:
        import ml_dtypes
    except ImportError:
        ml_dtypes = None
    # Older releases lack some types.
    extended = getattr(ml_dtypes, names.ml_dtypes or "", None)
    if extended is not None:
        return numpy.dtype(extended)
    return numpy.dtype("uint16" if names.element_bytes == 2 else "uint8")


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
        return _torch_view(self._torch, target[tensor.at : tensor.at + tensor.length], tensor)


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
