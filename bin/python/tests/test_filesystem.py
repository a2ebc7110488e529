"""fsspec over a client."""

import gc
import pickle

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
