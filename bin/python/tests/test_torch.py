"""Distributed checkpoints of torch, by its own classes for fsspec."""

import os

import pytest

from conftest import REGISTRY, SOURCE

torch = pytest.importorskip("torch")
checkpoint = pytest.importorskip("torch.distributed.checkpoint")


def model(seed):
    """A state with tensors of several types, one of them large, and values that are no tensors."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "large": torch.rand(3_000_000, generator=generator),
        "halves": torch.rand(1000, 30, generator=generator).to(torch.bfloat16),
        "numbers": {"of": torch.arange(seed, seed + 17)},
        "empty": torch.empty(0),
        "step": seed,
    }


def assert_equal(read, written):
    assert read["step"] == written["step"] and torch.equal(read["numbers"]["of"], written["numbers"]["of"])
    for name in ["large", "halves", "empty"]:
        assert torch.equal(read[name], written[name]), name


@pytest.mark.parametrize("files", ["one for each rank", "one for each tensor"])
@pytest.mark.filterwarnings("ignore:.*torch.distributed.*:UserWarning", "ignore:.*existing checkpoint.*:UserWarning")
def test_checkpoints(files, source):
    folder = f"checkpoints-{files.replace(' ', '-')}"
    url = f"spurline://{folder}/step"
    # One client for writes and reads: another client would see the files within a second.
    group = {"source": os.fspath(source), "registry": REGISTRY, "writable": True}
    # The second checkpoint replaces the first.
    for seed in [1, 2]:
        writer = checkpoint.FsspecWriter(
            url, single_file_per_rank="rank" in files, sync_files=False, thread_count=4, **group
        )
        checkpoint.save(model(seed), storage_writer=writer)
        read = {**model(7), "step": 0}
        checkpoint.load(read, storage_reader=checkpoint.FsspecReader(url, **group))
        assert_equal(read, model(seed))
    # Others see the same checkpoint, and nothing beside it.
    read = {**model(7), "step": 0}
    checkpoint.load(read, storage_reader=checkpoint.FileSystemReader(SOURCE / folder / "step"))
    assert_equal(read, model(2))
    names = [path.name for path in (SOURCE / folder / "step").iterdir()]
    assert ".metadata" in names and all(name == ".metadata" or name.endswith(".distcp") for name in names), names


@pytest.mark.filterwarnings("ignore:.*torch.distributed.*:UserWarning", "ignore:.*fsync.*:UserWarning")
def test_checkpoints_by_their_names(source, monkeypatch):
    for name, value in [("SOURCE", os.fspath(source)), ("REGISTRY", REGISTRY), ("WRITABLE", "1")]:
        monkeypatch.setenv(f"SPURLINE_{name}", value)
    checkpoint.save(model(3), checkpoint_id="spurline://checkpoint-by-name")
    read = {**model(7), "step": 0}
    checkpoint.load(read, checkpoint_id="spurline://checkpoint-by-name")
    assert_equal(read, model(3))


@pytest.mark.filterwarnings("ignore:.*torch.distributed.*:UserWarning")
def test_an_absent_checkpoint_is_an_error(source):
    reader = checkpoint.FsspecReader("spurline://no/checkpoint", source=os.fspath(source), registry=REGISTRY)
    with pytest.raises(checkpoint.CheckpointException, match="'no/checkpoint/.metadata'"):
        checkpoint.load({"a": torch.zeros(1)}, storage_reader=reader)
