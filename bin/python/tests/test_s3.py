"""A bucket that this process reads itself."""

import os

import pytest

import spurline

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
