"""Models in safetensors files, beside numpy and beside a stand-in for a device."""

import json
import math
import struct
import sys
import types

import numpy
import pytest

import spurline
from spurline import _safetensors


def write_model(path, tensors, metadata=None):
    """A safetensors file of numpy arrays; a pair is a name of a type and an array of its bits, or of its bytes with a shape."""
    header = {"__metadata__": metadata} if metadata else {}
    data = b""
    for name, tensor in tensors.items():
        kind, array, *shape = tensor if isinstance(tensor, tuple) else (KINDS[tensor.dtype.name], tensor)
        offsets = [len(data), len(data) + array.nbytes]
        header[name] = {"dtype": kind, "shape": list(shape[0] if shape else array.shape), "data_offsets": offsets}
        data += array.tobytes()
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


KINDS = {"complex64": "C64", "float32": "F32", "float16": "F16", "int64": "I64", "uint8": "U8", "bool": "BOOL", "float64": "F64"}


@pytest.fixture(scope="session")
def model(source):
    """Two files, and their tensors."""
    chance = numpy.random.default_rng(4)
    first = {
        "embed": chance.standard_normal((500, 1000), dtype=numpy.float32),
        "half": chance.standard_normal((3, 5, 7)).astype(numpy.float16),
        "scalar": numpy.array(3, numpy.int64),
        "none": numpy.zeros((0, 4), numpy.float32),
        "brain": ("BF16", chance.integers(0, 65536, (10, 3)).astype(numpy.uint16)),
    }
    second = {f"layer-{n}": chance.integers(0, 255, (700, 999)).astype(numpy.uint8) for n in range(4)}
    write_model(source / "models/model-1.safetensors", first, {"format": "pt"})
    write_model(source / "models/model-2.safetensors", second)
    return {**first, **second}


def test_all_tensors(client, model):
    loaded = spurline.load_safetensors(client, client.glob("models/model-*.safetensors"))
    assert set(loaded) == set(model)
    for name, tensor in model.items():
        bits = tensor[1] if isinstance(tensor, tuple) else tensor
        assert loaded[name].shape == bits.shape and loaded[name].tobytes() == bits.tobytes(), name
    assert loaded["embed"].dtype == numpy.float32 and loaded["brain"].dtype.itemsize == 2
    loaded["embed"][0] = 1
    del loaded["half"]
    assert loaded["scalar"] == 3


def test_chosen_tensors(client, model):
    before = client.stats()["blockcache"]
    chosen = spurline.load_safetensors(client, "models/model-2.safetensors", select={"layer-3"})
    assert list(chosen) == ["layer-3"] and chosen["layer-3"].tobytes() == model["layer-3"].tobytes()
    assert before is not None
    odd = spurline.load_safetensors(client, [client.stat("models/model-2.safetensors")], select=lambda name: name in ("layer-0", "layer-3"))
    assert sorted(odd) == ["layer-0", "layer-3"] and odd["layer-0"].tobytes() == model["layer-0"].tobytes()
    with pytest.raises(KeyError, match="absent"):
        spurline.load_safetensors(client, "models/model-1.safetensors", select=["absent"])


def framed(text):
    return struct.pack("<Q", len(text)) + text + bytes(20)


FAULTY = [
    b"",
    b"short",
    struct.pack("<Q", 1 << 60),
    framed(b"{]}"),
    framed(b"[]"),
    framed(b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}'),
    framed(b'{"a":{"dtype":"F32","shape":[9],"data_offsets":[0,36]}}'),
    framed(b'{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}'),
    framed(b'{"a":{"dtype":"Q9","shape":[1],"data_offsets":[0,4]}}'),
    framed(b'{"a":{"dtype":"F32","shape":["x"],"data_offsets":[0,4]}}'),
    framed(b'{"a":{"dtype":"F32","data_offsets":[0,4]}}'),
    framed(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[-4,0]}}'),
    framed(b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}'),
    framed(b'{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,12]},"b":{"dtype":"F32","shape":[3],"data_offsets":[8,20]}}'),
    framed(b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[2],"data_offsets":[12,20]}}'),
    framed(b'{"a":{"dtype":"F32","shape":[5],"data_offsets":[0,20]},"a":{"dtype":"F32","shape":[5],"data_offsets":[0,20]}}'),
    framed(b'\xef\xbb\xbf{"a":{"dtype":"F32","shape":[5],"data_offsets":[0,20]}}'),
    framed(b'{"a":{"dtype":"F32","shape":[5],"data_offsets":[0.0,20.0]}}'),
    framed(b'{"a":{"dtype":"F32","shape":[5,true],"data_offsets":[0,20]}}'),
    framed(b'{"a":{"dtype":["F32"],"shape":[5],"data_offsets":[0,20]}}'),
    framed(b'{"a":{"dtype":"F4","shape":[],"data_offsets":[0,1]},"b":{"dtype":"U8","shape":[19],"data_offsets":[1,20]}}'),
    framed(b'{"a":{"dtype":"F6_E2M3","shape":[26],"data_offsets":[0,20]}}'),
    framed(b'{"a":' + b"[" * 100_000),
]


def test_faulty_files(group, model, source):
    for number, data in enumerate(FAULTY):
        (source / f"faulty/{number}.safetensors").write_bytes(data)
    for number in range(len(FAULTY)):
        with pytest.raises(ValueError, match="faulty/"):
            spurline.load_safetensors(group, f"faulty/{number}.safetensors")
    with pytest.raises(ValueError, match="two of the files have a tensor"):
        spurline.load_safetensors(group, ["models/model-1.safetensors"] * 2)
    with pytest.raises(IsADirectoryError):
        spurline.load_safetensors(group, "models")
    with pytest.raises(ValueError, match="framework='tf'"):
        spurline.load_safetensors(group, "models/model-1.safetensors", framework="tf")
    with pytest.raises(TypeError, match="give .'embed'. for one tensor"):
        spurline.load_safetensors(group, ["models/model-1.safetensors"], select="embed")


def some_bytes(length):
    return numpy.arange(length, dtype=numpy.uint32).astype(numpy.uint8)


#: For a type and the shape in the header the shape that numpy has: packed types count bytes, in one dimension where rows are no bytes.
STORED_SHAPES = [
    ("F8_E4M3", (4, 3), (4, 3)),
    ("F8_E5M2", (4, 3), (4, 3)),
    ("F8_E8M0", (4, 3), (4, 3)),
    ("F8_E4M3FNUZ", (4, 3), (4, 3)),
    ("F8_E5M2FNUZ", (), ()),
    ("F4", (4, 8), (4, 4)),
    ("F4", (4, 3), (6,)),
    ("F4", (2, 0, 3), (0,)),
    ("F6_E2M3", (4, 8), (4, 6)),
    ("F6_E3M2", (4, 8), (4, 6)),
    ("F6_E3M2", (2, 2), (3,)),
]


@pytest.fixture(scope="session")
def typed_model(source):
    """The tensors of a file with types that numpy lacks, and of a file with an unknown type."""
    tensors = {"waves": numpy.arange(12, dtype=numpy.complex64).reshape(3, 4) * 1j}
    for number, (kind, shape, stored) in enumerate(STORED_SHAPES):
        tensors[f"{kind}-{number}"] = (kind, some_bytes(math.prod(stored)), shape)
    write_model(source / "types/all.safetensors", tensors)
    write_model(source / "types/unknown.safetensors", {"strange": ("Q9", some_bytes(5)), "weight": numpy.ones((2, 2), numpy.float32)})
    return tensors


def test_types_that_numpy_does_not_have(group, typed_model):
    loaded = spurline.load_safetensors(group, "types/all.safetensors")
    assert loaded["waves"].dtype == numpy.complex64 and numpy.array_equal(loaded["waves"], typed_model["waves"])
    for number, (kind, _, stored) in enumerate(STORED_SHAPES):
        tensor = loaded[f"{kind}-{number}"]
        assert tensor.shape == stored and tensor.dtype.itemsize == 1, kind
        assert tensor.tobytes() == typed_model[f"{kind}-{number}"][1].tobytes(), kind
        assert tensor.dtype == numpy.uint8 or kind.startswith("F8_"), kind


def test_types_of_ml_dtypes(group, typed_model, monkeypatch):
    # A release that does not have all types yet.
    monkeypatch.setitem(sys.modules, "ml_dtypes", types.SimpleNamespace(float8_e8m0fnu=numpy.int8))
    _safetensors._numpy_dtype.cache_clear()
    loaded = spurline.load_safetensors(group, "types/all.safetensors")
    _safetensors._numpy_dtype.cache_clear()
    assert loaded["F8_E8M0-2"].dtype == numpy.int8 and loaded["F8_E5M2FNUZ-4"].dtype == numpy.uint8


def test_an_unknown_type_refuses_its_own_tensor(group, typed_model):
    loaded = spurline.load_safetensors(group, "types/unknown.safetensors", select=["weight"])
    assert numpy.array_equal(loaded["weight"], numpy.ones((2, 2)))
    for select in [None, ["strange"]]:
        with pytest.raises(ValueError, match="unknown.safetensors: tensor 'strange' has the type 'Q9'"):
            spurline.load_safetensors(group, "types/unknown.safetensors", select=select)


class FakeDevice:
    """A device in memory, whose copies happen at the wait."""

    def __init__(self, name):
        self.copies = 0

    def allocate(self, length):
        return bytearray(length)

    def staging(self, length):
        device = self

        class Staging:
            def __init__(self):
                self.view = memoryview(bytearray(length))
                self.pending = None

            def copy_to(self, target, at, length):
                assert self.pending is None
                self.pending = (target, at, length)

            def wait(self):
                if self.pending:
                    target, at, length = self.pending
                    target[at : at + length] = self.view[:length]
                    device.copies += 1
                self.pending = None

        return Staging()

    def view(self, target, tensor):
        flat = numpy.frombuffer(target, numpy.uint8, tensor.length, tensor.at if tensor.length else 0)
        assert math.prod(tensor.shape) * _safetensors._DTYPES[tensor.dtype][0] == tensor.length
        return flat


def test_a_device(group, model, monkeypatch):
    monkeypatch.setattr(_safetensors, "_TorchDevice", FakeDevice)
    monkeypatch.setattr(_safetensors, "_STAGING_BYTES", 300_000)
    loaded = spurline.load_safetensors(group, ["models/model-1.safetensors", "models/model-2.safetensors"], device="cuda")
    for name, tensor in model.items():
        bits = tensor[1] if isinstance(tensor, tuple) else tensor
        assert loaded[name].tobytes() == bits.tobytes(), name


def test_torch(group, model):
    torch = pytest.importorskip("torch")
    loaded = spurline.load_safetensors(group, ["models/model-1.safetensors", "models/model-2.safetensors"], framework="torch")
    assert loaded["brain"].dtype == torch.bfloat16 and tuple(loaded["none"].shape) == (0, 4)
    assert numpy.array_equal(loaded["embed"].numpy(), model["embed"])


#: Names in torch of the types that numpy does not have.
TORCH_NAMES = {
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F4": "float4_e2m1fn_x2",
    "F6_E2M3": "uint8",
    "F6_E3M2": "uint8",
}


def test_types_of_torch(group, typed_model):
    torch = pytest.importorskip("torch")
    loaded = spurline.load_safetensors(group, "types/all.safetensors", framework="torch")
    assert numpy.array_equal(loaded["waves"].numpy(), typed_model["waves"])
    for number, (kind, _, stored) in enumerate(STORED_SHAPES):
        tensor = loaded[f"{kind}-{number}"]
        assert tensor.dtype == getattr(torch, TORCH_NAMES[kind]) and tuple(tensor.shape) == stored, kind
        assert bytes(tensor.reshape(-1).view(torch.uint8).tolist()) == typed_model[f"{kind}-{number}"][1].tobytes(), kind
