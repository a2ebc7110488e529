"""Writes: whole files by name, alone in a directory and through a node."""

import errno
import gc
import io
import os

import numpy
import pytest

import spurline
from conftest import REGISTRY, content


@pytest.fixture(params=["alone", "group"])
def writer(request, source):
    settings = {"registry": REGISTRY} if request.param == "group" else {"memory": "64M"}
    folder = f"written-{request.param}-{request.function.__name__}"
    (source / folder).mkdir()
    with spurline.open(source, writable=True, **settings) as client:
        client.folder = folder
        yield client


def names(source, writer):
    return sorted(os.listdir(source / writer.folder))


def test_a_file_appears_whole(writer, source):
    path = source / writer.folder / "file"
    path.write_bytes(b"old")
    data = content(3, (5 << 20) + 1)
    with writer.open(f"{writer.folder}/file", "wb") as file:
        assert file.writable() and not file.readable()
        assert file.write(data[:1000]) == 1000 and file.write(memoryview(data)[1000:]) == len(data) - 1000
        assert file.tell() == len(data) and path.read_bytes() == b"old"
    assert path.read_bytes() == data and names(source, writer) == ["file"]
    assert path.stat().st_mode & 0o777 == 0o644
    assert bytes(writer.read_many([f"{writer.folder}/file"])[0]) == data
    with writer.open(f"{writer.folder}/text", "w", sync=True) as file:
        print("words", file=file)
    assert (source / writer.folder / "text").read_text() == "words\n"


def test_an_exception_leaves_the_old_file(writer, source):
    path = source / writer.folder / "file"
    path.write_bytes(b"old")
    for mode, data in [("wb", b"new"), ("w", "new")]:
        with pytest.raises(RuntimeError):
            with writer.open(f"{writer.folder}/file", mode) as file:
                file.write(data)
                raise RuntimeError
        assert path.read_bytes() == b"old" and names(source, writer) == ["file"]
    for mode, data in [("wb", b"new"), ("w", "new")]:
        file = writer.open(f"{writer.folder}/file", mode)
        file.write(data)
        del file
        gc.collect()
        assert path.read_bytes() == b"old" and names(source, writer) == ["file"]
    file = writer.open(f"{writer.folder}/file", "wb")
    file.write(b"new")
    writer.close()
    assert path.read_bytes() == b"old" and names(source, writer) == ["file"]


class FullDisk:
    """What a file is written by, on a disk that gets full and has room again."""

    def __init__(self, writing):
        self.writing = writing
        self.left = 1

    def write(self, data):
        if self.left == 0:
            self.left = 1
            raise OSError(errno.ENOSPC, "no space")
        self.left -= 1
        return self.writing.write(data)

    def commit(self, sync, exclusive):
        self.writing.commit(sync, exclusive)

    def abort(self):
        self.writing.abort()


def test_a_file_that_lacks_bytes_gets_no_name(writer, source):
    path = source / writer.folder / "file"
    path.write_bytes(b"old")
    file = writer.open(f"{writer.folder}/file", "wb")
    file._writing = FullDisk(file._writing)
    file.write(b"first")
    with pytest.raises(OSError):
        file.write(b"second")
    file.write(b"third")
    with pytest.raises(OSError) as failed:
        file.close()
    assert failed.value.errno == errno.ENOSPC and failed.value.filename == f"{writer.folder}/file"
    assert path.read_bytes() == b"old" and names(source, writer) == ["file"]
    # The buffer of a wrapper is written by its close, which closes the file in any case.
    file = writer.open(f"{writer.folder}/file", "wb")
    file._writing = FullDisk(file._writing)
    file.write(b"first")
    buffered = io.BufferedWriter(file)
    buffered.write(b"second")
    with pytest.raises(OSError) as failed:
        buffered.close()
    assert failed.value.errno == errno.ENOSPC
    assert path.read_bytes() == b"old" and names(source, writer) == ["file"]


def test_new_names_only(writer, source):
    for mode, data in [("xb", b"1"), ("x", "1")]:
        name = f"{writer.folder}/{mode}"
        with writer.open(name, mode) as file:
            file.write(data)
        with pytest.raises(FileExistsError):
            writer.open(name, mode)
        with pytest.raises(FileExistsError), writer.open(f"{name}-late", mode) as file:
            (source / f"{name}-late").write_bytes(b"first")
        assert (source / f"{name}-late").read_bytes() == b"first" and (source / name).read_bytes() == b"1"
    assert names(source, writer) == ["x", "x-late", "xb", "xb-late"]


def test_many_files_by_one_call(writer, source):
    array = numpy.arange(100_000, dtype=numpy.float32)
    files = {f"{writer.folder}/{n}": content(n, n * 1000) for n in range(50)}
    assert writer.put_many({**files, f"{writer.folder}/array": array}) == [None] * 51
    for name, data in files.items():
        assert (source / name).read_bytes() == data
    assert (source / writer.folder / "array").read_bytes() == array.tobytes()
    failed = writer.put_many([(f"{writer.folder}/absent/x", b"1"), (f"{writer.folder}/0", b"2")], errors="return")
    assert isinstance(failed[0], FileNotFoundError) and failed[1] is None
    with pytest.raises(FileNotFoundError):
        writer.put_many({f"{writer.folder}/absent/x": b"1"})


def test_folders_and_names(writer, source):
    writer.makedirs(f"{writer.folder}/a/b/c")
    writer.makedirs(f"{writer.folder}/a/b")
    writer.put_many({f"{writer.folder}/a/b/file": b"1"})
    writer.rename(f"{writer.folder}/a/b/file", f"{writer.folder}/a/file")
    assert os.listdir(source / writer.folder / "a/b") == ["c"]
    with pytest.raises(OSError) as full:
        writer.rmdir(f"{writer.folder}/a")
    assert full.value.errno == errno.ENOTEMPTY
    writer.remove(f"{writer.folder}/a/file")
    writer.rmdir(f"{writer.folder}/a/b/c")
    assert os.listdir(source / writer.folder / "a") == ["b"] and not writer.exists(f"{writer.folder}/a/file")


def test_a_reader_does_not_write(source):
    with spurline.open(source, memory="64M") as client:
        with pytest.raises(OSError) as refused:
            client.open("new", "wb")
        assert refused.value.errno == errno.EROFS and "writable=True" in str(refused.value)
        with pytest.raises(ValueError):
            client.open("new", "r+b")


def test_many_writes_with_little_memory(source):
    (source / "written-little").mkdir()
    with spurline.open(source, writable=True, registry=REGISTRY, memory="64M") as client:
        for round in range(6):
            files = {f"written-little/{round}-{n}": content(n, 3_000_000) for n in range(8)}
            assert client.put_many(files, errors="return") == [None] * 8
            for name, data in files.items():
                assert (source / name).read_bytes() == data
                client.remove(name)


def test_references_to_objects_are_no_bytes(writer):
    objects = numpy.array([None, 1])
    with pytest.raises(BufferError, match="references to objects"):
        writer.put_many({f"{writer.folder}/objects": objects})
    with pytest.raises(BufferError, match="references to objects"):
        writer.read_many([("small.txt", 0, 4)], into=objects)
