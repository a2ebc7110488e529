"""Names, files and reads of many ranges."""

import errno
import gc
import io
import os
import pathlib
import pickle
import signal
import stat
import subprocess
import sys
import threading
import time
import traceback

import numpy
import pytest

import spurline
from conftest import REGISTRY, content, settings_of


def test_names(client, source):
    found = client.stat("big.bin")
    assert found == client.stat(b"/big.bin") and found.is_file and not found.is_dir
    assert found.size == (9 << 20) + 5 and found.version
    assert abs(found.mtime - (source / "big.bin").stat().st_mtime) < 1e-3
    assert stat.S_IMODE((source / "big.bin").stat().st_mode) == found.mode
    assert client.stat("deep").is_dir and client.stat("").is_dir
    assert client.exists("empty") and not client.exists("absent") and not client.exists("empty/below")
    assert sorted(client.listdir()) == sorted(os.listdir(source))
    assert sorted(client.listdir("deep/er")) == ["mid.bin"]
    walked = [(folder, sorted(folders), sorted(file.path for file in files)) for folder, folders, files in client.walk("deep")]
    assert walked[0][:2] == ("deep", ["er"]) and "deep/link" in walked[0][2] and len(walked[0][2]) == 41
    assert walked[1:] == [("deep/er", [], ["deep/er/mid.bin"])]
    assert client.glob("deep/sample-0?.bin") == [f"deep/sample-0{n}.bin" for n in range(10)]
    assert client.glob("**/*.bin") == sorted(str(path.relative_to(source)) for path in source.rglob("*.bin") if "folder-link" not in str(path))
    assert client.glob("de*/er") == ["deep/er"] and client.glob("absent/*") == [] and client.glob("deep/er/mid.bin") == ["deep/er/mid.bin"]
    assert client.source.endswith(str(source)) and client.block_size == 1 << 20


def test_symbolic_links(client):
    assert client.stat("deep/link").path == "deep/er/mid.bin"
    assert client.read_bytes("folder-link/mid.bin") == content(2, 300_001)
    assert client.readlink("deep/link") == "er/mid.bin"
    with pytest.raises(OSError) as out:
        client.stat("out")
    assert out.value.errno == errno.EINVAL and "outside of the source" in str(out.value)
    with pytest.raises(OSError) as loop:
        client.stat("loop")
    assert loop.value.errno == errno.ELOOP


def test_failures_are_oserrors(client, source):
    with pytest.raises(FileNotFoundError) as absent:
        client.stat("absent")
    assert str(absent.value) == "[Errno 2] No such file or directory: 'absent'" and absent.value.filename == "absent"
    with pytest.raises(NotADirectoryError):
        list(client.scandir("empty"))
    with pytest.raises(IsADirectoryError):
        client.open("deep")
    with pytest.raises(IsADirectoryError):
        client.read_many(["deep"])
    with pytest.raises(OSError) as readonly:
        client.put_many({"new": b""})
    assert readonly.value.errno == errno.EROFS
    for settings, words in [({"memory": "much"}, "memory"), ({"threads": "x"}, "threads"), ({"colour": 1}, "no setting")]:
        with pytest.raises(OSError, match=words) as wrong:
            spurline.open(source, **settings)
        assert wrong.value.errno == errno.EINVAL
    with pytest.raises(FileNotFoundError, match="the source directory '.*/absent/folder' can't be opened; create it .*: No such file or directory$"):
        spurline.open(source / "absent/folder")
    # A mount of the node's source may be missing there for a while.
    with pytest.raises(OSError, match="/absent/folder' can't be opened") as elsewhere:
        spurline.open(source / "absent/folder", registry=REGISTRY)
    assert elsewhere.value.errno == errno.EHOSTDOWN
    # Messages have the names of settings, and no flags of the command line.
    with pytest.raises(OSError, match="^.Errno 22. memory 1K is too small.* give memory .* block_size"):
        spurline.open(source, memory="1K")
    with pytest.raises(OSError, match="^.Errno 2. token_file /absent: "):
        spurline.open(source, registry="static:127.0.0.1:1", token_file="/absent")
    for read in [client.read_many, lambda path: list(client.iter_many(path))]:
        with pytest.raises(TypeError, match="give .'empty'. for one file"):
            read("empty")


def test_files(client):
    whole = content(1, (9 << 20) + 5)
    with client.open("big.bin") as file:
        assert isinstance(file, io.RawIOBase) and file.readable() and file.seekable() and not file.writable()
        assert file.size == len(whole) and file.name == "big.bin"
        assert file.pread(10, (1 << 20) - 5) == whole[(1 << 20) - 5 :][:10]
        assert file.pread(100, len(whole) - 3) == whole[-3:] and file.pread(5, len(whole)) == b""
        buffer = bytearray(3 << 20)
        assert file.readinto(buffer) == len(buffer) and buffer == whole[: len(buffer)]
        assert file.tell() == 3 << 20 and file.seek(-4, os.SEEK_END) == len(whole) - 4
        assert file.read() == whole[-4:] and file.read(1) == b""
        file.seek(0)
        assert file.read(7) == whole[:7] and file.readall() == whole[7:]
        array = numpy.zeros((4, 1000), numpy.uint16)
        assert file.pread_into(array, 11) == 8000 and array.tobytes() == whole[11:8011]
        with pytest.raises(BufferError):
            file.pread_into(array[:, ::2], 0)
        file.seek(0)
        with pytest.raises(BufferError):
            file.readinto(b"read-only")
        with pytest.raises(OSError):
            file.seek(-1)
    with pytest.raises(ValueError):
        file.read(1)
    with client.open("small.txt", "r") as text:
        assert text.read() == "a small file\n"
    with client.open("big.bin", buffering=1 << 16) as buffered:
        assert buffered.read(100) == whole[:100] and buffered.peek(1)[:1] == whole[100:101]
    assert client.read_bytes("empty") == b""


def test_many_ranges(client):
    whole = content(1, (9 << 20) + 5)
    items = [("big.bin", 0, None), ("big.bin", (2 << 20) - 3, 10), ("deep/er/mid.bin", 0, 5), ("empty", 0, 100), "small.txt"]
    views = client.read_many(items)
    assert [bytes(view) for view in views] == [whole, whole[(2 << 20) - 3 :][:10], content(2, 5), b"", b"a small file\n"]
    assert not views[1].readonly and len(client.read_many([])) == 0
    stats = [entry for entry in client.scandir("deep") if "sample" in entry.path]
    for sample, view in zip(stats, client.read_many(stats)):
        number = int(sample.path[-6:-4])
        assert bytes(view) == content(100 + number, 10_000 + number)
    assert bytes(client.read_many([("big.bin", len(whole) - 2, 1 << 21)])[0]) == whole[-2:]
    assert bytes(client.read_many([("small.txt", 2, 1 << 30)])[0]) == b"small file\n"


def test_views_are_arrays_of_any_type_without_a_copy(client):
    views = client.read_many([("big.bin", 1, 5), ("big.bin", 3, 4000), "small.txt", ("big.bin", 9, 800)])
    assert all(numpy.frombuffer(view, numpy.uint8).ctypes.data % 64 == 0 for view in views)
    numbers = numpy.frombuffer(views[1], numpy.float64)
    assert numbers.tobytes() == content(1, 4003)[3:] and numbers.flags.aligned
    shared = numpy.from_dlpack(numbers)
    numbers[7] = 1.5
    assert shared[7] == 1.5


def test_into_buffers_of_the_caller(client):
    whole = content(1, (9 << 20) + 5)
    target = numpy.zeros(5 << 20, numpy.uint8)
    assert client.read_many([("big.bin", 7, 4 << 20), ("deep/er/mid.bin", 3, 1000)], into=target) == [4 << 20, 1000]
    assert target.tobytes()[: (4 << 20) + 1000] == whole[7 : 7 + (4 << 20)] + content(2, 300_001)[3:1003]
    rows = numpy.zeros((3, 250), numpy.uint32)
    assert client.read_many([("big.bin", n * 1000, 1000) for n in range(3)], into=list(rows)) == [1000] * 3
    assert rows.tobytes() == whole[:3000]
    parts = [bytearray(10), bytearray(1 << 20), memoryview(bytearray(50))[5:45]]
    assert client.read_many(["small.txt", ("deep/er/mid.bin", 0, None), ("big.bin", 1, None)], into=parts) == [10, 300_001, 40]
    assert parts[0] == b"a small fi" and bytes(parts[2]) == whole[1:41]
    with pytest.raises(ValueError, match="the buffer"):
        client.read_many(["big.bin"], into=bytearray(5))
    with pytest.raises(ValueError, match="buffers for"):
        client.read_many(["big.bin"], into=[bytearray(5)] * 2)
    with pytest.raises(BufferError):
        client.read_many([("big.bin", 0, 3)], into=b"abc")
    with pytest.raises(ValueError, match="the same memory"):
        client.read_many([("big.bin", 0, 3)] * 2, into=[target[:3], target[2:5]])


def test_marks_of_missing_items(client):
    items = ["absent", ("absent/below", 0, 10), "small.txt", "deep"]
    with pytest.raises(FileNotFoundError):
        client.read_many(items)
    marked = client.read_many(items[:3], errors="mark")
    assert marked[:2] == [None, None] and bytes(marked[2]) == b"a small file\n"
    with pytest.raises(IsADirectoryError):
        client.read_many(items, errors="mark")
    returned = client.read_many(items, errors="return")
    assert [type(item) for item in returned] == [FileNotFoundError, FileNotFoundError, memoryview, IsADirectoryError]
    with pytest.raises(ValueError):
        client.read_many(items, errors="some")


def test_one_after_the_other(client):
    stats = [entry for entry in client.scandir("deep") if "sample" in entry.path]
    items = [(entry, 5, 100) for entry in stats] + ["absent", ("big.bin", 0, 2 << 20)]
    expected = [content(100 + int(entry.path[-6:-4]), 10_000)[5:105] for entry in stats]
    for memory in [1, 1000, 1 << 30]:
        ordered = list(client.iter_many(items, ordered=True, errors="mark", memory=memory))
        assert [number for number, _ in ordered] == list(range(42)) and ordered[40][1] is None
        assert [bytes(view) for _, view in ordered[:40]] == expected
        mixed = dict(client.iter_many(items, errors="mark", memory=memory))
        assert len(mixed) == 42 and [bytes(mixed[number]) for number in range(40)] == expected
    started = client.iter_many(items, memory=1)
    next(started)
    started.close()


def test_a_changed_file_is_stale(source, tmp_path):
    path = source / "changing.bin"
    path.write_bytes(content(7, 3 << 20))
    # Nothing is kept: the bytes of the old version are gone with the file.
    with spurline.open(source, memory="64M", block_size="1M") as client:
        old = client.stat("changing.bin")
        with client.open("changing.bin") as file:
            assert file.pread(10, 0) == content(7, 10)
            time.sleep(0.01)
            replaced = tmp_path / "new"
            replaced.write_bytes(content(8, 3 << 20))
            os.replace(replaced, path)
            with pytest.raises(OSError) as stale:
                file.pread(10, 2 << 20)
            assert stale.value.errno == errno.ESTALE and stale.value.strerror
            (failure,) = client.read_many([(old, 1 << 20, 10)], errors="return")
            assert failure.errno == errno.ESTALE and failure.filename == "changing.bin"


def test_information(client):
    client.read_many(["big.bin"])
    info = client.info("big.bin")
    assert info["length"] == (9 << 20) + 5 and info["blocks"]["total"] == 10 and info["version"]
    stats = client.stats()
    assert stats["blockcache"]["hit_bytes"] + stats["blockcache"]["miss_bytes"] > 0


def test_loads(client):
    shown = []
    load = client.load(["deep", "big.bin"], progress=shown.append)
    progress = load.progress()
    assert progress["files_done"] >= 42 and progress["bytes_done"] > 9 << 20 and shown
    assert client.info("big.bin")["blocks"]["cached"] >= 1
    assert client.prefetch(["small.txt"]).wait(timeout=60)
    with pytest.raises(OSError, match="absent"):
        client.load(["absent"])


def threads():
    """The names of this process's threads."""
    names = []
    for task in os.listdir("/proc/self/task"):
        try:
            names.append(pathlib.Path(f"/proc/self/task/{task}/comm").read_text().strip())
        except (FileNotFoundError, ProcessLookupError):
            pass
    return names


def await_threads(expected):
    """Threads of pools end by themselves once the client is closed."""
    for _ in range(600):
        if sorted(threads()) == expected:
            return
        time.sleep(0.01)
    raise AssertionError(threads())


def test_a_close_ends_reads_with_an_error(source, tmp_path):
    client = spurline.open(source, **settings_of("alone", tmp_path))
    reads = client.iter_many(["big.bin"] * 30, memory=64 << 20)
    next(reads)
    client.close()
    with pytest.raises(OSError) as closed:
        list(reads)
    assert closed.value.errno == errno.EBADF


def close_clients(source, tmp_path):
    """In a process of its own: opens and closes clients."""
    before = sorted(threads())
    for kind in ["alone", "group", "alone", "group"]:
        client = spurline.open(source, **settings_of(kind, tmp_path))
        client.read_many(["big.bin"])
        reads = client.iter_many(["big.bin"])
        next(reads)
        client.close()
        client.close()
        with pytest.raises(OSError) as closed:
            client.stat("big.bin")
        assert closed.value.errno == errno.EBADF
    # A client that is not closed ends with its last reference.
    client = spurline.open(source, **settings_of("alone", tmp_path))
    del client, reads
    gc.collect()
    await_threads(before)


def test_no_thread_is_left(source, tmp_path):
    program = "import pathlib, test_reads; test_reads.close_clients(*map(pathlib.Path, __import__('sys').argv[1:]))"
    folder = os.path.dirname(__file__)
    subprocess.run([sys.executable, "-c", program, source, tmp_path], cwd=folder, check=True, timeout=60)


def test_many_threads_share_a_client(client):
    whole = content(1, (9 << 20) + 5)
    failures = []

    def read(seed):
        for turn in range(20):
            at = (seed * 7919 + turn * 104729) % (9 << 20)
            if bytes(client.read_many([("big.bin", at, 1000)])[0]) != whole[at : at + 1000]:
                failures.append(at)

    readers = [threading.Thread(target=read, args=(seed,)) for seed in range(8)]
    [reader.start() for reader in readers]
    [reader.join() for reader in readers]
    assert not failures


def test_a_client_is_pickled_and_forked(client):
    whole = content(1, (9 << 20) + 5)
    assert client.read_bytes("small.txt") == b"a small file\n"
    other = pickle.loads(pickle.dumps(client))
    assert bytes(other.read_many([("big.bin", 5, 10)])[0]) == whole[5:15]
    other.close()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = 0 if bytes(client.read_many([("big.bin", 5, 10)])[0]) == whole[5:15] else 2
            client.close()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert bytes(client.read_many([("big.bin", 5, 10)])[0]) == whole[5:15]


def test_a_fork_in_the_middle_of_a_read(client):
    whole = content(1, (9 << 20) + 5)
    reads = client.iter_many(["big.bin"] * 3)
    next(reads)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            # The parent's reads are given up without a wait.
            del reads
            gc.collect()
            client.read_many([("big.bin", 5, 10)])
        except OSError as refused:
            status = 0 if refused.errno == errno.EBUSY and "forked while a client was in use" in str(refused) else 2
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert [bytes(view) for _, view in reads] == [whole] * 2


def test_places_in_one_buffer_follow_from_the_named_lengths(client):
    whole = content(1, (9 << 20) + 5)
    stat = client.stat("small.txt")
    for first in ["small.txt", stat]:
        target = bytearray(60)
        assert client.read_many([(first, 0, 40), ("big.bin", 0, 10)], into=target) == [13, 10]
        assert target[:13] == b"a small file\n" and target[40:50] == whole[:10]
    target = bytearray(60)
    read = client.read_many([("absent", 0, 40), ("big.bin", 0, 10)], into=target, errors="mark")
    assert read == [None, 10] and target[40:50] == whole[:10]


def test_names_of_folders_and_links_are_read_as_their_paths(client):
    folder, link = client.stat("deep"), next(entry for entry in client.scandir("deep") if entry.kind == "symlink")
    for call in [lambda: client.read_many([folder]), lambda: client.read_bytes("deep"), lambda: client.open(folder)]:
        with pytest.raises(IsADirectoryError):
            call()
    assert client.read_bytes(link) == content(2, 300_001) and client.open(link).read(5) == content(2, 300_001)[:5]


INTERRUPTED = """
import os, signal, sys, threading, spurline
# A server that never answers.
import socket
server = socket.create_server(("127.0.0.1", 0))
address = "static:127.0.0.1:%d" % server.getsockname()[1]
threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
try:
    spurline.open(sys.argv[1], registry=address)
except KeyboardInterrupt:
    os._exit(42)
"""


def test_ctrl_c_ends_a_call(source):
    # Without the interrupt the call lasts past the limit.
    ended = subprocess.run([sys.executable, "-c", INTERRUPTED, str(source)], timeout=60)
    assert ended.returncode == 42


def test_ctrl_c_ends_a_read(source, tmp_path):
    client = spurline.open(source, **settings_of("alone", tmp_path))
    # A pipe in place of a file would block; a handler that raises stands in for Ctrl-C at a moment of the test's choice.
    signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
    try:
        target = numpy.zeros(9 << 20, numpy.uint8)
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(KeyboardInterrupt):
            while True:
                client.read_many(["big.bin"] * 1, into=[target])
        # The memory is in use until the reads have ended; then the client goes on.
        assert bytes(client.read_many([("big.bin", 0, 10)])[0]) == content(1, 10)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        client.close()
