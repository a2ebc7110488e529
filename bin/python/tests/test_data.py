"""Data sets in this process, and in workers by fork and by spawn."""

import io
import multiprocessing
import os
import tarfile

import pytest

from conftest import REGISTRY, content
from spurline.data import RangeDataset, TarDataset, index_tar


def first_byte_and_length(number, view):
    return view[0], len(view)


def expected(number):
    return content(100 + number, 1)[0], 10_000 + number


def worker(dataset, numbers, answers):
    answers.put((os.getpid(), dataset.__getitems__(numbers)))


@pytest.mark.parametrize("way", ["fork", "spawn"])
def test_workers(way, source):
    dataset = RangeDataset.of_folder(source, pattern="deep/sample-*.bin", transform=first_byte_and_length, registry=REGISTRY)
    context = multiprocessing.get_context(way)
    # Also with a client that is open in the parent already.
    for is_open in [False, True]:
        if is_open:
            assert dataset[3] == expected(3)
        answers = context.Queue()
        workers = [
            context.Process(target=worker, args=(dataset, [number, 39 - number, number], answers)) for number in range(2)
        ]
        [process.start() for process in workers]
        read = [answers.get(timeout=60) for _ in workers]
        [process.join() for process in workers]
        assert len({pid for pid, _ in read} | {os.getpid()}) == 3 and all(process.exitcode == 0 for process in workers)
        wanted = sorted([expected(number), expected(39 - number), expected(number)] for number in range(2))
        assert sorted(samples for _, samples in read) == wanted
    dataset.client.close()


def test_samples_of_a_folder(source):
    dataset = RangeDataset.of_folder(source, "deep", registry=REGISTRY)
    # The link in the folder is a sample too.
    assert len(dataset) == 42 and [sample.path for sample in dataset.samples[:2]] == ["deep/er/mid.bin"] * 2
    assert dataset[1] == content(2, 300_001) and dataset[2] == content(100, 10_000)
    assert RangeDataset(dataset.client, [("big.bin", 3, 4)])[0] == content(1, 7)[3:]
    dataset.client.close()


def make_shards(source):
    for shard in range(4):
        if (source / f"shards/{shard}.tar").exists():
            return
        with tarfile.open(source / f"shards/{shard}.tar", "w") as tar:
            for number in range(10):
                for ending in ["jpg", "cls"]:
                    data = content(shard * 100 + number, 2000) if ending == "jpg" else str(number).encode()
                    # A long name has headers of its own.
                    member = tarfile.TarInfo(f"{'long-' * 30}folder/{shard}-{number}.{ending}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))


def test_tar_shards(source, tmp_path):
    make_shards(source)
    shards = [f"shards/{shard}.tar" for shard in range(4)]
    dataset = TarDataset(source, shards, registry=REGISTRY, index_dir=tmp_path / "index")
    samples = list(dataset)
    assert len(samples) == 40 and [sample["cls"] for sample in samples[:10]] == [str(n).encode() for n in range(10)]
    assert samples[13]["jpg"] == content(103, 2000) and samples[13]["__key__"].endswith("folder/1-3")
    assert samples[13]["__shard__"] == "shards/1.tar" and len(list((tmp_path / "index").iterdir())) == 4
    assert len(index_tar(dataset.client, shards[0])) == 20
    # The kept index is used, and shards are divided.
    for rank in range(2):
        half = TarDataset(dataset.client, shards, rank=rank, world_size=2, index_dir=tmp_path / "index")
        assert {sample["__shard__"] for sample in half} == {f"shards/{rank}.tar", f"shards/{rank + 2}.tar"}
    mixed = TarDataset(dataset.client, shards, shuffle=True, seed=5, transform=lambda sample: sample["__key__"])
    first, again = list(mixed), list(mixed)
    mixed.set_epoch(1)
    assert first == again and sorted(first) == sorted(mixed) and first != list(mixed)
    dataset.client.close()


def write_shard(path, members):
    """A tar of pairs of a name and bytes, or a type and a target instead of bytes."""
    with tarfile.open(path, "w") as tar:
        for name, data in members:
            member = tarfile.TarInfo(name)
            if isinstance(data, bytes):
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
            else:
                member.type, member.linkname = data
                tar.addfile(member)


def test_names_in_tar_shards(source):
    members = [
        ("README", b"no sample"),
        ("folder", (tarfile.DIRTYPE, "")),
        (".hidden.jpg", b"no sample"),
        ("__meta__/a.jpg", b"no sample"),
        ("a.JPG", b"1"),
        ("link.jpg", (tarfile.SYMTYPE, "a.JPG")),
        ("some/path/22.0/1.1.Png", b"2"),
        ("a.Seg.cls", b"3"),
        ("some/path/22.0/1.txt", b"4"),
        ("./b c.ü", b"5"),
    ]
    write_shard(source / "odd-shards/names.tar", members)
    twice = [("a.jpg", "a.jpg"), ("a.jpg", "b.jpg", "a.JPG"), ("a.__key__",)]
    for number, names in enumerate(twice):
        write_shard(source / f"odd-shards/twice-{number}.tar", [(name, b"x") for name in names])
    dataset = TarDataset(source, ["odd-shards/names.tar"], registry=REGISTRY)
    own = {"__shard__": "odd-shards/names.tar"}
    assert list(dataset) == [
        {"__key__": "a", **own, "jpg": b"1", "seg.cls": b"3"},
        {"__key__": "some/path/22.0/1", **own, "1.png": b"2", "txt": b"4"},
        {"__key__": "./b c", **own, "ü": b"5"},
    ]
    for number, names in enumerate(twice):
        with pytest.raises(ValueError, match=f"odd-shards/twice-{number}.tar: .*'{names[-1]}'.* twice"):
            list(TarDataset(dataset.client, [f"odd-shards/twice-{number}.tar"]))
    dataset.client.close()


def test_a_damaged_shard_is_no_shorter_one(source):
    folder = source / "damaged-shards"
    write_shard(folder / "whole.tar", [("a.jpg", b"1"), ("b.jpg", b"2")])
    whole = (folder / "whole.tar").read_bytes()
    # In the middle of a header, and of the bytes of a file; a header of other bytes.
    damaged = [whole[:1100], whole[:1600], whole[:1024] + b"x" * 512 + whole[1536:]]
    for number, data in enumerate(damaged):
        (folder / f"{number}.tar").write_bytes(data)
    sparse = tarfile.TarInfo("s.bin")
    sparse.type = tarfile.GNUTYPE_SPARSE
    with tarfile.open(folder / "sparse.tar", "w", format=tarfile.GNU_FORMAT) as tar:
        tar.addfile(sparse)
    dataset = TarDataset(source, ["damaged-shards/whole.tar"], registry=REGISTRY)
    assert [sample["__key__"] for sample in dataset] == ["a", "b"]
    for number in range(len(damaged)):
        with pytest.raises(tarfile.ReadError):
            index_tar(dataset.client, f"damaged-shards/{number}.tar")
    with pytest.raises(ValueError, match="damaged-shards/sparse.tar: the file 's.bin' is sparse"):
        index_tar(dataset.client, "damaged-shards/sparse.tar")
    dataset.client.close()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("way", ["fork", "spawn"])
def test_torch_loader(workers, way, source):
    torch = pytest.importorskip("torch")
    dataset = RangeDataset.of_folder(source, pattern="deep/sample-*.bin", transform=first_byte_and_length, registry=REGISTRY)
    context = way if workers else None
    loader = torch.utils.data.DataLoader(dataset, batch_size=7, num_workers=workers, multiprocessing_context=context)
    read = [pair for first, length in loader for pair in zip(first.tolist(), length.tolist())]
    assert read == [expected(number) for number in range(40)]
    make_shards(source)
    shards = TarDataset(dataset.client, [f"shards/{shard}.tar" for shard in range(4)], transform=str)
    loader = torch.utils.data.DataLoader(shards, batch_size=None, num_workers=workers, multiprocessing_context=context)
    assert len(set(loader)) == 40
    dataset.client.close()
