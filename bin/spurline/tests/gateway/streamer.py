"""runai-model-streamer beside safetensors itself.

usage: streamer.py make FOLDER       writes a model of several files
       streamer.py read FOLDER URL   streams the model at URL, a folder or s3://…, and compares each tensor with its file in FOLDER
"""

import json
import pathlib
import sys
import tempfile

import torch
from safetensors.torch import load_file, save_file


def make(folder):
    chance = torch.Generator().manual_seed(5)
    first = {
        "large": torch.rand(3000, 1001, generator=chance),
        "halves": torch.rand(3, 5, 7, generator=chance).to(torch.float16),
        "brain": torch.rand(10, 3, generator=chance).to(torch.bfloat16),
        "eighths": torch.rand(64, 9, generator=chance).to(torch.float8_e4m3fn),
        "scalar": torch.tensor(3, dtype=torch.int64),
        "flags": torch.rand(1001, generator=chance) > 0.5,
        "none": torch.empty(0, 4),
        "odd": torch.arange(77, dtype=torch.uint8),
    }
    save_file(first, f"{folder}/model-1.safetensors", metadata={"format": "pt"})
    for number in [2, 3]:
        layers = {f"{number}.{n}": torch.randint(0, 256, (700, 9999), generator=chance, dtype=torch.uint8) for n in range(4)}
        save_file(layers, f"{folder}/model-{number}.safetensors")
    pathlib.Path(folder, "config.json").write_text(json.dumps({"layers": 2}))


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else tensor.reshape(-1)


def read(folder, url):
    from runai_model_streamer import SafetensorsStreamer, list_safetensors, pull_files

    files = list_safetensors(url)
    assert sorted(file.rsplit("/", 1)[-1] for file in files) == [f"model-{n}.safetensors" for n in [1, 2, 3]], files
    written = {}
    for file in pathlib.Path(folder).glob("*.safetensors"):
        written.update(load_file(file))
    with SafetensorsStreamer() as streamer:
        streamer.stream_files(files)
        for name, tensor in streamer.get_tensors():
            expected = written.pop(name)
            assert (tensor.dtype, tensor.shape) == (expected.dtype, expected.shape), name
            assert torch.equal(bits(tensor), bits(expected)), name
    assert not written, list(written)
    # vLLM copies the files that are no tensors.
    if url.startswith("s3://"):
        with tempfile.TemporaryDirectory() as copies:
            pull_files(url, copies, allow_pattern=["*.json"])
            (copy,) = pathlib.Path(copies).iterdir()
            assert (copy.name, json.loads(copy.read_text())) == ("config.json", {"layers": 2})


{"make": make, "read": read}[sys.argv[1]](*sys.argv[2:])
