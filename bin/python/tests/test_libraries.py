"""Libraries that read and write through fsspec, and safetensors' own."""

import json
import os
import struct
import tarfile

import numpy
import pandas
import pyarrow.dataset
import pyarrow.parquet
import safetensors
import safetensors.numpy
import zarr

import fsspec
import spurline
from conftest import REGISTRY
from spurline.data import TarDataset


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


def test_the_types_of_safetensors(source):
    import ml_dtypes

    bits = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F8_E4M3": 8, "F8_E5M2": 8, "C64": 64}
    header = {}
    end = 0
    for kind, size in bits.items():
        header[kind] = {"dtype": kind, "shape": [4, 8], "data_offsets": [end, end + 4 * size]}
        end += 4 * size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    whole = struct.pack("<Q", len(text)) + text + bytes(number % 251 for number in range(end))
    (source / "types/compared.safetensors").write_bytes(whole)
    with spurline.open(source, registry=REGISTRY) as client:
        loaded = spurline.load_safetensors(client, "types/compared.safetensors")
    by_safetensors = dict(safetensors.deserialize(whole))
    assert set(by_safetensors) == set(loaded)
    for kind, tensor in by_safetensors.items():
        assert loaded[kind].tobytes() == bytes(tensor["data"]), kind
        if bits[kind] >= 8:
            assert list(loaded[kind].shape) == tensor["shape"], kind
    assert loaded["F8_E8M0"].dtype == ml_dtypes.float8_e8m0fnu and loaded["F8_E5M2FNUZ"].dtype == ml_dtypes.float8_e5m2fnuz
    assert loaded["C64"].dtype == numpy.complex64


def test_names_in_shards_as_webdataset_has_them(source):
    import webdataset

    names = ["README", ".hidden.jpg", "a.JPG", "a.Seg.cls", "dir/.x.jpg", "d.ir/b", "22.0/1.1.png", "./c.txt", "__meta__/a.jpg", "e.", "..f.g"]
    names += ["__x__", "x/__y__.z", "ü.é", "new\nline.txt"]
    with tarfile.open(source / "shards/compared.tar", "w") as tar:
        for name in names:
            tar.addfile(tarfile.TarInfo(name))
    expected = [
        {name: data for name, data in sample.items() if name not in ("__url__", "__local_path__")}
        for sample in webdataset.WebDataset(os.fspath(source / "shards/compared.tar"), shardshuffle=False)
    ]
    dataset = TarDataset(source, ["shards/compared.tar"], registry=REGISTRY)
    read = [{name: data for name, data in sample.items() if name != "__shard__"} for sample in dataset]
    dataset.client.close()
    assert read == expected
