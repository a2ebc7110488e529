"""Data sets for training: samples by number, a batch of them by one call, and tar shards. With torch they are data sets of torch;
without it they are plain objects with the same methods.

A data set carries no connection: each DataLoader worker, by fork or by spawn, opens the source at its first read."""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import re
import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from ._client import Client, FileStat, PathOrStat, ReadItem
from ._client import open as _open_client

try:
    from torch.utils.data import Dataset as _MapBase
    from torch.utils.data import IterableDataset as _IterableBase
    from torch.utils.data import get_worker_info as _get_worker_info
except ImportError:
    _MapBase = object
    _IterableBase = object

    def _get_worker_info():
        return None


#: Bytes read at a time for the headers of a tar shard.
_INDEX_BUFFER_BYTES = 64 << 10
#: Memory of the samples of a tar shard that are read ahead, in bytes.
_SHARD_MEMORY = 128 << 20
#: A file of a sample: key and ending, as WebDataset divides its name.
_SAMPLE_FILE = re.compile(r"((?:.*/|)[^.]+)[.]([^/]*)$")
#: Names that WebDataset has for its own use.
_META_FILE = re.compile(r"__[^/]*__($|/)")
#: Fields of a sample that are no files.
_OWN_FIELDS = ("__key__", "__shard__")


def _client_of(source, settings):
    """A client that opens the source later."""
    return source if isinstance(source, Client) else _open_client(source, connect=False, **settings)


class RangeDataset(_MapBase):
    """Samples that are files or ranges of files, by number.

    ``source``: a :class:`spurline.Client` or a source, with ``settings`` as for :func:`spurline.open`. ``samples``: a sequence of
    ``(path, offset, length)``, paths, or ``FileStat`` objects (best: they save a lookup for each read). ``transform``: a function
    of a sample's number and its ``memoryview``; without it a sample is ``bytes``.

    ``__getitems__`` reads a whole batch by one call; a DataLoader uses it. The memory of a batch lives as long as any view of it.
    """

    def __init__(
        self,
        source: Client | str | os.PathLike,
        samples: Sequence[ReadItem],
        transform: Callable[[int, memoryview], Any] | None = None,
        **settings: Any,
    ):
        self.client = _client_of(source, settings)
        self.samples = samples
        self.transform = transform

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, number: int) -> Any:
        return self.__getitems__([number])[0]

    def __getitems__(self, numbers: Sequence[int]) -> list[Any]:
        """The samples of a batch, in the order of ``numbers``."""
        views = self.client.read_many([self.samples[number] for number in numbers])
        if self.transform is None:
            return [bytes(view) for view in views]
        return [self.transform(number, view) for number, view in zip(numbers, views)]

    @classmethod
    def of_folder(cls, source, folder="", pattern=None, transform=None, **settings):
        """All files below a folder, with those that symbolic links lead to, or the files that match a pattern of :meth:`spurline.Client.glob`, in order of their paths. The
        source is listed by this call, and closed again: nothing is open when workers are forked."""
        client = _client_of(source, settings)
        if pattern is None:
            samples = [stat for _, _, names in client.walk(folder) for stat in _files_of(client, names)]
        else:
            samples = [stat for stat in map(client.stat, client.glob(pattern)) if stat.is_file]
        samples.sort()
        if not isinstance(source, Client):
            client.close()
            client = _client_of(source, settings)
        return cls(client, samples, transform)


def _files_of(client, names):
    """The files among names, and behind links; a link that leads nowhere is no file."""
    for stat in names:
        if stat.kind == "symlink":
            try:
                stat = client.stat(stat.path)
            except FileNotFoundError:
                continue
        if stat.is_file:
            yield stat


class TarDataset(_IterableBase):
    """Samples of tar shards: files with the same name up to the first dot are one sample, a dict of endings and bytes, with
    ``__key__`` and ``__shard__``. Names count as in WebDataset: endings are in small letters, and files without a dot (``README``), with
    nothing before it (``.hidden.jpg``), and below names such as ``__meta__`` are no part of a sample. Two files of a sample with the same
    ending are a ``ValueError``. The files of a sample may lie apart from each other.

    The index of a shard is read once for each version of it, and kept in ``index_dir`` if that is given. Shards are divided among
    ranks (``rank`` of ``world_size``) and among DataLoader workers. ``shuffle`` mixes shards and the samples of each shard by
    ``seed`` and the epoch (:meth:`set_epoch`)."""

    def __init__(
        self,
        source: Client | str | os.PathLike,
        shards: Iterable[PathOrStat],
        *,
        shuffle: bool = False,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        index_dir: str | os.PathLike | None = None,
        transform: Callable[[dict[str, Any]], Any] | None = None,
        memory: int = _SHARD_MEMORY,
        **settings: Any,
    ):
        self.client = _client_of(source, settings)
        self.shards = list(shards)
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.rank = rank
        self.world_size = world_size
        self.index_dir = index_dir
        self.transform = transform
        self.memory = memory
        self._indexes: dict[str, tuple[str, list[tuple[str, int, int]]]] = {}

    def set_epoch(self, epoch: int) -> None:
        """The number of the pass over the data, for another order."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        info = _get_worker_info()
        worker, workers = (info.id, info.num_workers) if info is not None else (0, 1)
        order = list(self.shards)
        chance = random.Random(f"{self.seed}-{self.epoch}")
        if self.shuffle:
            chance.shuffle(order)
        share = order[self.rank :: self.world_size][worker::workers]
        for shard in share:
            yield from self._samples_of(shard, chance)

    def _samples_of(self, shard, chance):
        stat = shard if isinstance(shard, FileStat) else self.client.stat(shard)
        samples = self._index(stat)
        if self.shuffle:
            chance.shuffle(samples)
        items = [(stat, *place) for _, parts in samples for _, place in parts]
        views = self.client.iter_many(items, ordered=True, memory=self.memory)
        for key, parts in samples:
            sample = {"__key__": key, "__shard__": stat.path}
            for ending, _ in parts:
                _, view = next(views)
                sample[ending] = bytes(view)
            yield sample if self.transform is None else self.transform(sample)

    def _index(self, stat):
        """Samples of a shard, as pairs of a key and a list of the endings and places of its files."""
        known = self._indexes.get(stat.path)
        if known is None or known[0] != stat.version:
            known = (stat.version, self._kept_index(stat) or self._keep_index(stat, index_tar(self.client, stat)))
            self._indexes[stat.path] = known
        samples = {}
        for name, offset, length in known[1]:
            match = _SAMPLE_FILE.match(name)
            if match is None or _META_FILE.match(name):
                continue
            key, ending = match.group(1), match.group(2).lower()
            parts = samples.setdefault(key, {})
            if ending in parts or ending in _OWN_FIELDS:
                raise ValueError(f"{stat.path}: the file {name!r} gives the sample {key!r} the field {ending!r} twice")
            parts[ending] = (offset, length)
        return [(key, list(parts.items())) for key, parts in samples.items()]

    def _index_path(self, stat):
        digest = hashlib.sha256(f"{stat.path}\0{stat.version}".encode(errors="surrogateescape")).hexdigest()
        return os.path.join(self.index_dir, f"{digest[:32]}.json")

    def _kept_index(self, stat):
        if self.index_dir is None:
            return None
        try:
            with io.open(self._index_path(stat)) as file:
                return json.load(file)
        except (FileNotFoundError, json.JSONDecodeError):
            return None

    def _keep_index(self, stat, index):
        if self.index_dir is not None:
            os.makedirs(self.index_dir, exist_ok=True)
            path = self._index_path(stat)
            with io.open(f"{path}.{os.getpid()}", "w") as file:
                json.dump(index, file)
            os.replace(f"{path}.{os.getpid()}", path)
        return index


def index_tar(client: Client, path: PathOrStat) -> list[tuple[str, int, int]]:
    """The files of a tar that is not compressed: ``(name, offset, length)`` in bytes, in their order. A sparse file, which has no such
    range, is a ``ValueError``."""
    index = []
    with client.open(path, buffering=_INDEX_BUFFER_BYTES) as file, tarfile.open(fileobj=file, mode="r:") as tar:
        for member in tar:
            if member.issparse():
                raise ValueError(f"{file.name}: the file {member.name!r} is sparse; make the tar without --sparse")
            if member.isfile():
                index.append((member.name, member.offset_data, member.size))
        # tarfile takes a header that is cut or damaged for the end.
        file.seek(tar.offset)
        if file.read(tarfile.BLOCKSIZE).strip(b"\0"):
            raise tarfile.ReadError(f"{file.name}: no header of a tar at byte {tar.offset}; the shard is cut or damaged")
    return index
