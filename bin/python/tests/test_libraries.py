"""Libraries that read and write through fsspec, and safetensors' own."""

import os

import numpy
import pandas
import pyarrow.dataset
import pyarrow.parquet
import safetensors.numpy
import zarr

import fsspec
import spurline
from conftest import REGISTRY


def test_libraries(source):
    folder = source / "libraries"
    (folder / "parts").mkdir(parents=True)
    options = {"source": os.fspath(source), "registry": REGISTRY}
    frame = pandas.DataFrame({"a": numpy.arange(200_000), "b": numpy.random.default_rng(1).random(200_000)})
    for part in range(4):
        frame.iloc[part * 50_000 : (part + 1) * 50_000].to_parquet(folder / f"parts/{part}.parquet")
    frame.to_csv(folder / "table.csv", index=False)
    zarr.save(os.fspath(folder / "array.zarr"), numpy.arange(1_000_000).reshape(1000, 1000))
    model = {f"w{n}": numpy.full((100, 100), n, numpy.float32) for n in range(5)}
    safetensors.numpy.save_file(model, folder / "model.safetensors")

    one = pandas.read_parquet("spurline://libraries/parts/1.parquet", storage_options=options)
    assert len(one) == 50_000 and one.a.iloc[0] == 50_000
    table = pandas.read_csv("spurline://libraries/table.csv", storage_options=options)
    assert table.a.sum() == frame.a.sum()
    files = fsspec.filesystem("spurline", **options)
    dataset = pyarrow.dataset.dataset("libraries/parts", filesystem=files, format="parquet")
    assert dataset.to_table(filter=pyarrow.dataset.field("a") > 150_000).num_rows == 49_999
    assert pyarrow.parquet.read_table("libraries/parts", filesystem=files).num_rows == 200_000
    array = zarr.open("spurline://libraries/array.zarr", mode="r", storage_options=options)
    assert list(array[5:9, 3]) == [5003, 6003, 7003, 8003]
    with spurline.open(source, registry=REGISTRY) as client:
        loaded = spurline.load_safetensors(client, "libraries/model.safetensors")
    assert all(numpy.array_equal(loaded[name], tensor) for name, tensor in model.items())
    writing = {"writable": True, **options}
    frame.head(10).to_parquet("spurline://libraries/new.parquet", storage_options=writing)
    assert len(pandas.read_parquet(folder / "new.parquet")) == 10
