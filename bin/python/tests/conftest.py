"""A source of files in a directory, and clients of it: alone, and from a node that serves the directory."""

import os
import pathlib
import random

import pytest

import spurline

SOURCE = pathlib.Path(os.environ["SPURLINE_TEST_SOURCE"])
REGISTRY = os.environ.get("SPURLINE_TEST_REGISTRY")


def content(seed, length):
    """Bytes that differ from place to place."""
    return random.Random(seed).randbytes(length + 64 & ~63)[:length]


@pytest.fixture(scope="session")
def source():
    """The directory, with files."""
    # A node has looked at the top folder a moment before: it finds later names in folders that are there from the start.
    for folder in ["deep/er", "models", "types", "faulty", "shards", "odd-shards", "damaged-shards", "replaced"]:
        (SOURCE / folder).mkdir(parents=True)
    (SOURCE / "small.txt").write_bytes(b"a small file\n")
    (SOURCE / "empty").write_bytes(b"")
    (SOURCE / "big.bin").write_bytes(content(1, (9 << 20) + 5))
    (SOURCE / "deep/er/mid.bin").write_bytes(content(2, 300_001))
    (SOURCE / "deep/link").symlink_to("er/mid.bin")
    (SOURCE / "folder-link").symlink_to("deep/er")
    (SOURCE / "out").symlink_to("/etc/hostname")
    os.symlink("loop", SOURCE / "loop")
    for number in range(40):
        (SOURCE / f"deep/sample-{number:02}.bin").write_bytes(content(100 + number, 10_000 + number))
    return SOURCE


def settings_of(kind, tmp_path):
    """The settings of a client of this kind."""
    if kind == "group":
        return {"registry": REGISTRY}
    # A disk that is nearly full is not the subject of a test.
    sizes = {"cache_size": "1G", "free_space_ratio": 0, "memory": "64M", "block_size": "1M"}
    return {"cache_dir": tmp_path / "cache", **sizes}


@pytest.fixture(params=["alone", "group"])
def client(request, source, tmp_path):
    with spurline.open(source, **settings_of(request.param, tmp_path)) as client:
        yield client


@pytest.fixture
def group(source):
    """A client that reads from the node."""
    with spurline.open(source, registry=REGISTRY) as client:
        yield client
