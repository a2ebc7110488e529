"""fsspec over a client."""

import contextlib
import errno
import gc
import gzip
import io
import os
import pickle
import tarfile
import warnings
import zipfile

import fsspec
import pytest

from conftest import REGISTRY, content


@pytest.fixture
def files(source):
    files = fsspec.filesystem("spurline", source=str(source), registry=REGISTRY, skip_instance_cache=True)
    yield files
    files.client.close()


def test_names(files, source):
    assert "deep/er" in files.ls("deep", detail=False) and files.ls("small.txt")[0]["size"] == 13
    assert files.info("spurline://big.bin")["size"] == (9 << 20) + 5 and files.isdir("deep") and files.exists("empty")
    assert files.find("deep/er") == ["deep/er/mid.bin"] and len(files.glob("deep/sample-*.bin")) == 40
    assert files.ukey("small.txt") == files.info("small.txt")["version"]
    assert abs(files.modified("big.bin").timestamp() - (source / "big.bin").stat().st_mtime) < 1e-3
    for call in [files.info, files.cat_file, files.cat]:
        with pytest.raises(FileNotFoundError):
            call("absent")


def test_reads(files):
    whole = content(1, (9 << 20) + 5)
    assert files.cat("small.txt") == b"a small file\n" and files.cat_file("big.bin", 5, 10) == whole[5:10]
    assert files.cat_file("big.bin", -4) == whole[-4:] and files.cat_file("small.txt", 2, -2) == b"small fil"
    many = files.cat(["small.txt", "empty"])
    assert many == {"small.txt": b"a small file\n", "empty": b""}
    assert set(files.cat("deep/er", recursive=True)) == {"deep/er/mid.bin"}
    ends = files.cat_ranges(["small.txt", "absent"], [-5, -3], [None, None])
    assert ends[0] == b"file\n" and isinstance(ends[1], FileNotFoundError)
    with pytest.raises(FileNotFoundError):
        files.cat_ranges(["small.txt", "absent"], [-5, -3], [None, None], on_error="raise")
    ranges = files.cat_ranges(["big.bin", "absent", "big.bin"], [0, 0, 9 << 20], [10, 1, None])
    assert ranges[0] == whole[:10] and isinstance(ranges[1], FileNotFoundError) and ranges[2] == whole[9 << 20 :]
    assert list(files.cat(["small.txt", "absent"], on_error="omit")) == ["small.txt"]
    with files.open("big.bin") as file:
        assert file.read(3) == whole[:3] and file.seek(-2, 2) and file.read() == whole[-2:]
    assert bytes(pickle.loads(pickle.dumps(files)).cat("small.txt")) == b"a small file\n"


def test_urls_and_variables(source, monkeypatch):
    monkeypatch.setenv("SPURLINE_SOURCE", str(source))
    monkeypatch.setenv("SPURLINE_REGISTRY", REGISTRY)
    with fsspec.open("spurline://small.txt", "rt") as file:
        assert file.read() == "a small file\n"
    monkeypatch.delenv("SPURLINE_SOURCE")
    with pytest.raises(ValueError, match="source"):
        fsspec.filesystem("spurline", skip_instance_cache=True)


@pytest.fixture
def writer(source):
    files = fsspec.filesystem("spurline", source=str(source), registry=REGISTRY, writable=True, skip_instance_cache=True)
    yield files
    files.client.close()


def test_an_open_file_has_what_programs_expect(files):
    whole = content(1, (9 << 20) + 5)
    with files.open("spurline://big.bin") as file:
        assert file.size == len(whole) and file.path == "big.bin" and file.name == "big.bin" and file.fs is files
        assert file.mode == "rb" and file.full_name == "spurline://big.bin" and file.version == files.ukey("big.bin")
        assert file.details == files.info("big.bin") and file.info() == file.details
        file.seek(5 << 20)
        same = pickle.loads(pickle.dumps(file))
        assert file.loc == same.loc == 5 << 20 and same.version == file.version
        assert same.read(4) == whole[5 << 20 : (5 << 20) + 4]
        same.close()
    assert files.read_block("big.bin", 1000, 10) == whole[1000:1010]
    assert files.read_block("small.txt", 1, 3, delimiter=b" ") == b"small "
    assert files.head("big.bin", 4) == whole[:4] and files.tail("big.bin", 4) == whole[-4:]


def test_a_pickle_keeps_the_version(files, source):
    path = source / "replaced/file"
    path.write_bytes(b"old")
    with files.open("replaced/file") as file:
        kept = pickle.dumps(file)
    path.with_name("new").write_bytes(b"new and longer")
    os.replace(path.with_name("new"), path)
    with pytest.raises(OSError) as gone, pickle.loads(kept) as file:
        assert file.size == 3
        file.read()
    assert gone.value.errno == errno.ESTALE


def test_writes(source):
    files = fsspec.filesystem("spurline", source=str(source), registry=REGISTRY, writable=True, skip_instance_cache=True)
    files.makedirs("by-fsspec/deep")
    files.pipe({"by-fsspec/a": b"1", "by-fsspec/deep/b": b"22"})
    with files.open("by-fsspec/c", "wb") as file:
        file.write(b"333")
    with pytest.raises(ZeroDivisionError), files.open("by-fsspec/c", "wb") as file:
        file.write(b"never")
        1 / 0
    assert (source / "by-fsspec/c").read_bytes() == b"333"
    with pytest.raises(ZeroDivisionError), files.open("by-fsspec/c", "wt") as text:
        text.write("never")
        1 / 0
    never_closed = files.open("by-fsspec/c", "wb")
    never_closed.write(b"never")
    del never_closed
    gc.collect()
    assert (source / "by-fsspec/c").read_bytes() == b"333"
    files.pipe("by-fsspec/new/folder/e", b"4444")
    with files.open("by-fsspec/new/other/f", "wt") as text:
        text.write("words")
    assert files.cat(["by-fsspec/new/folder/e", "by-fsspec/new/other/f"]) == {
        "by-fsspec/new/folder/e": b"4444", "by-fsspec/new/other/f": b"words"
    }
    files.rm("by-fsspec/new", recursive=True)
    files.mv("by-fsspec/c", "by-fsspec/d")
    files.rm("by-fsspec/deep", recursive=True)
    assert sorted(path.name for path in (source / "by-fsspec").iterdir()) == ["a", "d"]
    assert (source / "by-fsspec/d").read_bytes() == b"333"
    files.client.close()


def test_an_outage_is_no_absence(source):
    options = {"registry": "static:127.0.0.1:9", "peer_timeout": "1s", "skip_instance_cache": True}
    files = fsspec.filesystem("spurline", source=str(source), **options)
    for call in [files.exists, files.isfile, files.isdir, files.find, files.glob, lambda path: list(files.walk(path))]:
        with pytest.raises(OSError) as failed:
            call("deep")
        assert not isinstance(failed.value, FileNotFoundError)


def test_transactions(source):
    # As torch's writer of distributed checkpoints uses them.
    files = fsspec.filesystem("spurline", source=str(source), registry=REGISTRY, writable=True, skip_instance_cache=True)
    files.makedirs("whole")
    with files.transaction:
        for name in ["a", "b"]:
            with files.open(f"whole/{name}", "wb") as file:
                file.write(name.encode() * 100_000)
            assert not (source / f"whole/{name}").exists()
    assert (source / "whole/b").read_bytes() == b"b" * 100_000
    with pytest.raises(ZeroDivisionError), files.transaction:
        with files.open("whole/a", "wb") as file:
            file.write(b"never")
        1 / 0
    assert (source / "whole/a").read_bytes() == b"a" * 100_000 and len(list((source / "whole").iterdir())) == 2
    files.client.close()


def test_copies_and_moves(writer, source):
    top = source / "moves"
    writer.pipe({"moves/a/one": b"1", "moves/a/two": b"22", "moves/a/deep/three": b"333", "moves/x[1]": b"br"})
    writer.copy("moves/a/one", "moves/new/folder/one")
    writer.cp_file("moves/a/two", "moves/new/folder/one")
    assert (top / "new/folder/one").read_bytes() == b"22"
    writer.cp("moves/a", "moves/copy", recursive=True)
    assert (top / "copy/deep/three").read_bytes() == b"333" and (top / "a/one").exists()
    # Into a folder that is there, one that the slash means, and folders that are made.
    writer.mv("moves/copy/one", "moves/new")
    writer.mv("moves/copy/two", "moves/slash/")
    writer.mv("moves/copy/deep/three", "moves/m/n/3")
    assert (top / "new/one").exists() and (top / "slash/two").exists() and (top / "m/n/3").read_bytes() == b"333"
    writer.mv("moves/m", "moves/new")
    writer.mv(["moves/new/one", "moves/slash/two"], "moves/listed")
    writer.mv(["moves/listed/one", "moves/x[1]"], ["moves/pairs/1", "moves/pairs/2"])
    writer.mv("moves/a/t*", "moves/pattern")
    writer.mv("moves/pattern", "moves/pattern")
    left = sorted(os.fspath(path.relative_to(top)) for path in top.rglob("*") if path.is_file())
    assert left == ["a/deep/three", "a/one", "listed/two", "new/folder/one", "new/m/n/3", "pairs/1", "pairs/2", "pattern"]
    with pytest.raises(FileNotFoundError, match="moves/absent"):
        writer.mv("moves/absent", "moves/unmade/absent")
    assert not (top / "unmade").exists()


def test_names_that_are_taken(writer, source):
    writer.makedirs("taken/folder")
    with writer.open("taken/new", "xb") as file:
        file.write(b"1")
    for call in [lambda: writer.open("taken/new", "xb"), lambda: writer.open("taken/new", "x"), lambda: writer.mkdir("taken/folder")]:
        with pytest.raises(FileExistsError):
            call()
    with pytest.raises(FileExistsError):
        writer.pipe_file("taken/new", b"2", mode="create")
    # Another is first between the opening and the close.
    with pytest.raises(FileExistsError), writer.open("taken/late", "xb") as file:
        (source / "taken/late").write_bytes(b"first")
    assert (source / "taken/late").read_bytes() == b"first" and (source / "taken/new").read_bytes() == b"1"
    with pytest.raises(FileNotFoundError):
        writer.mkdir("taken/absent/folder", create_parents=False)
    writer.touch("taken/new", truncate=False)
    assert (source / "taken/new").read_bytes() == b"1"
    writer.touch("taken/new")
    assert (source / "taken/new").read_bytes() == b""


def dropped_names(call):
    """The names of which a call warns that what was written is dropped."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with contextlib.suppress(ZeroDivisionError):
            call()
        gc.collect()
    texts = [str(warning.message) for warning in caught if warning.category is ResourceWarning]
    return [text.split("'")[1] for text in texts if text.endswith("what was written is dropped")]


@pytest.mark.parametrize("compression, mode", [("gzip", "wb"), ("zip", "wb"), ("xz", "wt"), ("infer", "wt")])
def test_compressed_files(writer, source, compression, mode):
    data = b"some words " * 1000 if mode == "wb" else "some words " * 1000
    name = f"compressed-{mode}-{compression}/file.gz"
    new = source / name

    def write(then_fail):
        with writer.open(name, mode, compression=compression) as file:
            file.write(data)
            1 / then_fail

    def write_by_url(then_fail):
        options = {"source": str(source), "registry": REGISTRY, "writable": True}
        with fsspec.open(f"spurline://{name}", mode, compression=compression, **options) as file:
            file.write(data)
            1 / then_fail

    def never_close():
        writer.open(name, mode, compression=compression).write(data)

    for kind in [write, write_by_url]:
        writer.pipe(name, b"old")
        for failing in [lambda: kind(0), never_close]:
            assert dropped_names(failing) == [name] and new.read_bytes() == b"old"
        assert dropped_names(lambda: kind(1)) == [] and new.read_bytes() != b"old"
        writer.invalidate_cache()
        with writer.open(name, mode.replace("w", "r"), compression=compression) as file:
            assert file.read() == data
    with writer.transaction:
        write(1)
        new.write_bytes(b"not yet")
    assert new.read_bytes() != b"not yet" and os.listdir(new.parent) == [new.name]


def by_gzip(file, then_fail):
    with gzip.GzipFile(fileobj=file, mode="wb") as wrapper:
        wrapper.write(b"1" * 1000)
        1 / then_fail


def by_gzip_in_text(file, then_fail):
    with io.TextIOWrapper(gzip.GzipFile(fileobj=file, mode="wb")) as wrapper:
        wrapper.write("1" * 1000)
        1 / then_fail


def by_zip(file, then_fail):
    with zipfile.ZipFile(file, "w") as wrapper:
        wrapper.writestr("name", b"1" * 1000)
        1 / then_fail


def by_tar(file, then_fail):
    with tarfile.open(fileobj=file, mode="w") as wrapper:
        wrapper.addfile(tarfile.TarInfo("name"))
        1 / then_fail


def by_tar_stream(file, then_fail):
    with tarfile.open(fileobj=file, mode="w|bz2") as wrapper:
        wrapper.addfile(tarfile.TarInfo("name"))
        1 / then_fail


def by_close(file, then_fail):
    wrapper = gzip.GzipFile(fileobj=file, mode="wb")
    wrapper.write(b"1" * 1000)
    1 / then_fail
    wrapper.close()


@pytest.mark.parametrize(
    "layer, wrap",
    [
        ("client", by_gzip),
        ("client", by_zip),
        ("fsspec", by_gzip_in_text),
        ("fsspec", by_close),
        ("fsspec", by_zip),
        ("fsspec", by_tar),
        ("fsspec", by_tar_stream),
    ],
)
def test_a_wrapper_that_leaves_the_file_open(writer, source, layer, wrap):
    name = f"wrapped/{wrap.__name__}-{layer}"
    new = source / name
    writer.pipe(name, b"old")
    start = writer.open if layer == "fsspec" else writer.client.open

    def in_handler():
        try:
            1 / 0
        except ZeroDivisionError:
            wrap(start(name, "wb"), 1)

    assert dropped_names(lambda: wrap(start(name, "wb"), 0)) == [name]
    assert new.read_bytes() == b"old" and not list(new.parent.glob(".spurline*"))
    for whole in [lambda: wrap(start(name, "wb"), 1), in_handler]:
        new.write_bytes(b"old")
        assert dropped_names(whole) == [] and new.read_bytes() != b"old"
    # As long as the program may go on to write, there is no name.
    new.write_bytes(b"old")
    file = start(name, "wb")
    wrap(file, 1)
    assert new.read_bytes() == b"old"
    writer.client.close()
    assert new.read_bytes() != b"old" and file.closed and not list(new.parent.glob(".spurline*"))


def test_what_is_dropped_warns(writer, source):
    writer.pipe({"dropped/a": b"old"})

    def leave_by_exception(mode):
        with writer.open("dropped/a", mode) as file:
            file.write(b"never" if "b" in mode else "never")
            1 / 0

    def never_close(mode):
        writer.open("dropped/a", mode).write(b"never" if "b" in mode else "never")

    for mode in ["wb", "w"]:
        assert dropped_names(lambda: leave_by_exception(mode)) == ["dropped/a"]
        assert dropped_names(lambda: never_close(mode)) == ["dropped/a"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ZeroDivisionError):
            leave_by_exception("wb")
    assert (source / "dropped/a").read_bytes() == b"old"
    with pytest.warns(ResourceWarning, match="'dropped/a' was not closed"):
        file = writer.open("dropped/a", "wb")
        writer.client.close()
    assert file.closed and (source / "dropped/a").read_bytes() == b"old"
