"""A bucket that this process reads itself."""

import errno
import multiprocessing
import os
import time
import traceback

import pytest

import spurline
from spurline import _client

ENDPOINT = os.environ.get("SPURLINE_TEST_ENDPOINT")


@pytest.fixture
def bucket(tmp_path):
    settings = {"endpoint_url": ENDPOINT, "region": "us-east-1", "cache_dir": tmp_path / "cache", "memory": "64M"}
    with spurline.open("s3://bucket/data", **settings) as client:
        yield client


def test_a_bucket(bucket):
    assert sorted(bucket.listdir()) == ["big.bin", "folder"] and bucket.glob("**/*.txt") == sorted(f"folder/{n}.txt" for n in range(20))
    stat = bucket.stat("big.bin")
    assert stat.etag and stat.size == 6 << 20 and bucket.stat("folder").is_dir
    names = [f"folder/{n}.txt" for n in range(20)]
    assert [bytes(view) for view in bucket.read_many(names)] == [f"text {n}".encode() for n in range(20)]
    whole = bucket.read_bytes("big.bin")
    assert len(whole) == 6 << 20 and whole[::1 << 20] == bytes(range(6))
    assert bucket.read_many(["folder/absent"], errors="mark") == [None]
    read = bucket.stats()["object"]["get_bytes"]
    assert read >= len(whole) and bucket.read_bytes("big.bin") == whole and bucket.stats()["object"]["get_bytes"] == read
    with pytest.raises(OSError, match="the source is open for reading only"):
        bucket.put_many({"new": b""})


def test_a_bucket_that_is_missing(tmp_path):
    settings = {"endpoint_url": ENDPOINT, "region": "us-east-1", "cache_dir": tmp_path / "cache", "memory": "64M"}
    with pytest.raises(FileNotFoundError, match="there is no bucket 'absent'"):
        spurline.open("s3://absent/data", **settings)
    with spurline.open("s3://absent/data", connect=False, **settings) as client, pytest.raises(FileNotFoundError):
        client.listdir()


def in_child(call):
    """The exit status of a child made by fork that makes a call."""
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if call() else 2)
        except BaseException:
            traceback.print_exc()
            os._exit(3)
    return os.waitpid(child, 0)[1]


def test_children_by_fork_read_beside_the_parent(bucket):
    names = [f"folder/{n}.txt" for n in range(20)]
    texts = [f"text {n}".encode() for n in range(20)]

    def reads():
        return [bytes(view) for view in bucket.read_many(names)] == texts

    for _ in range(8):
        assert reads()
        assert in_child(reads) == 0
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map_async(bucket.read_bytes, names).get(60) == texts
    assert reads()


def test_no_thread_of_a_client_is_there_at_a_fork(bucket):
    for _ in range(20):
        bucket.read_many([f"folder/{n}.txt" for n in range(20)])
        assert "under-net" in _client._named_threads().values()
        _client._close_before_fork()
        assert "under-net" not in _client._named_threads().values() and "fill" not in _client._named_threads().values()


def test_a_fork_in_the_middle_of_a_read_is_refused_in_the_child(bucket):
    def is_refused():
        with pytest.raises(OSError, match="forked while a client was in use") as refused:
            bucket.read_bytes("folder/0.txt")
        return refused.value.errno == errno.EBUSY

    reads = bucket.iter_many(f"folder/{n}.txt" for n in range(20))
    next(reads)
    assert in_child(is_refused) == 0
    assert len(list(reads)) == 19


@pytest.fixture(params=["alone", "group", "staged"])
def written(request, tmp_path):
    if request.param == "group":
        settings = {"registry": os.environ["SPURLINE_TEST_REGISTRY"]}
    elif request.param == "staged":
        settings = {"registry": os.environ["SPURLINE_TEST_REGISTRY"], "stage": True}
    else:
        settings = {"endpoint_url": ENDPOINT, "region": "us-east-1", "cache_dir": tmp_path / "cache", "memory": "64M"}
    with spurline.open("s3://bucket/data", writable=True, **settings) as client:
        client.folder = f"written-{request.param}-{request.function.__name__}"
        client.makedirs(client.folder)
        client.is_staged = request.param == "staged"
        yield client


def await_object(bucket, name):
    """Waits for an upload by the nodes."""
    end = time.monotonic() + 60
    while not bucket.exists(name):
        assert time.monotonic() < end, f"{name} is not uploaded"
        time.sleep(0.1)


def test_an_object_is_written_whole(written, bucket):
    name = f"{written.folder}/file"
    data = bytes(range(256)) * (1 << 16)
    with written.open(name, "wb") as file:
        assert file.write(data[: 9 << 20]) == 9 << 20 and file.write(data[9 << 20 :]) == 7 << 20
    assert written.read_bytes(name) == data
    if written.is_staged:
        assert not bucket.exists(name), "the nodes upload later"
        await_object(bucket, name)
    assert bucket.read_bytes(name) == data
    written.put_many({name: b"small", f"{written.folder}/other": b"", f"{written.folder}/third": data[:1000]})
    assert written.read_bytes(name) == b"small" and sorted(written.listdir(written.folder)) == ["file", "other", "third"]
    with pytest.raises(FileExistsError):
        with written.open(name, "xb") as file:
            file.write(b"another")
    with written.open(f"{written.folder}/new", "xb") as file:
        file.write(b"new")
    assert written.read_bytes(name) == b"small" and written.read_bytes(f"{written.folder}/new") == b"new"
    written.remove(name)
    assert not written.exists(name)


def test_a_file_that_is_given_up_leaves_the_old_object(written):
    name = f"{written.folder}/file"
    written.put_many({name: b"old"})
    with pytest.raises(RuntimeError):
        with written.open(name, "wb") as file:
            file.write(b"new" * (4 << 20))
            raise RuntimeError
    assert written.read_bytes(name) == b"old"


def test_files_of_one_client_for_one_object_do_not_mix(written):
    name = f"{written.folder}/file"
    first = written.open(name, "wb")
    second = written.open(name, "wb")
    first.write(b"first" * (2 << 20))
    second.write(b"second")
    first.close()
    assert written.read_bytes(name) == b"first" * (2 << 20)
    with pytest.raises(OSError) as refused:
        second.close()
    assert refused.value.errno == errno.ESTALE
    file = written.open(name, "wb")
    file.write(b"third")
    written.put_many({name: b"fourth"})
    with pytest.raises(OSError) as refused:
        file.close()
    assert refused.value.errno == errno.ESTALE and written.read_bytes(name) == b"fourth"
