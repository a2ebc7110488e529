#!/usr/bin/env python3
"""A tour of the package over a folder of its own, in cells as notebooks have them. Give a source and a registry to run it over a
group: tour.py [FOLDER [static:NODE:PORT]]. Parts whose libraries are not installed are left out."""

# %% A folder with samples, a shard and a model.
import io
import json
import pathlib
import struct
import sys
import tarfile
import tempfile
import time

import spurline

try:
    import numpy
except ImportError:
    numpy = None
try:
    import pandas
except ImportError:
    pandas = None
try:
    import zarr
except ImportError:
    zarr = None

folder = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
settings = {"registry": sys.argv[2]} if len(sys.argv) > 2 else {"memory": "128M"}
data = folder / "tour"
data.mkdir(parents=True, exist_ok=True)
for number in range(64):
    (data / f"sample-{number:02}.bin").write_bytes(bytes([number]) * 100_000)
with tarfile.open(data / "shard.tar", "w") as tar:
    for number in range(16):
        member = tarfile.TarInfo(f"{number}.txt")
        member.size = 3
        tar.addfile(member, io.BytesIO(b"%03d" % number))
header = json.dumps({"weights": {"dtype": "F32", "shape": [64, 1024], "data_offsets": [0, 64 * 4096]}}).encode()
(data / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(64 * 4096))
(data / "table.csv").write_text("a,b\n1,2\n3,4\n")
if zarr is not None:
    zarr.save(str(data / "array.zarr"), numpy.arange(100_000).reshape(100, 1000))

# %% Names, one file, many ranges.
client = spurline.open(folder, **settings)
while not client.exists("tour"):  # A node that has listed the source before shows new names after a moment.
    time.sleep(0.1)
samples = sorted(entry for entry in client.scandir("tour") if entry.path.endswith(".bin"))
with client.open("tour/sample-07.bin") as file:
    print("one file:", file.size, "bytes,", file.pread(3, 1000))
began = time.perf_counter()
views = client.read_many(samples)
print(f"read_many: {sum(map(len, views))} bytes of {len(views)} files in {time.perf_counter() - began:.3f} s")

# %% numpy: ranges into rows of an array.
if numpy is not None:
    rows = numpy.empty((len(samples), 4096), numpy.uint8)
    client.read_many([(sample, 0, 4096) for sample in samples], into=list(rows))
    print("numpy:", rows.mean(axis=1)[:4])
    model = spurline.load_safetensors(client, "tour/model.safetensors")
    print("safetensors:", {name: tensor.shape for name, tensor in model.items()})

# %% Training: a batch by one call, and tar shards.
from spurline.data import RangeDataset, TarDataset


def first_byte(number, view):
    return view[0]


dataset = RangeDataset(client, samples, transform=first_byte)
print("a batch:", dataset.__getitems__([5, 3, 60]))
print("a shard:", [sample["txt"] for sample in TarDataset(client, ["tour/shard.tar"])][:3])
try:
    import torch
except ImportError:
    torch = None
if torch is not None:
    loader = torch.utils.data.DataLoader(dataset, batch_size=16, shuffle=True, num_workers=2)
    print("torch:", sum(int(batch.sum()) for batch in loader))

# %% fsspec, and the libraries above it.
try:
    import fsspec
except ImportError:
    fsspec = None
if fsspec is not None:
    files = fsspec.filesystem("spurline", source=str(folder), **settings)
    print("fsspec:", len(files.cat_ranges(["tour/sample-01.bin"] * 8, range(0, 80, 10), range(10, 90, 10))))
    options = {"source": str(folder), **settings}
    if pandas is not None:
        print("pandas:", pandas.read_csv("spurline://tour/table.csv", storage_options=options).sum().to_dict())
    if zarr is not None:
        print("zarr:", zarr.open("spurline://tour/array.zarr", mode="r", storage_options=options)[7, 5])
    files.client.close()

# %% The end.
client.close()
