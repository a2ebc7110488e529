"""The example runs over the node."""

import pathlib
import subprocess
import sys

from conftest import REGISTRY


def test_the_tour(source):
    tour = pathlib.Path(__file__).parent.parent / "examples/tour.py"
    ran = subprocess.run([sys.executable, tour, source, REGISTRY], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    lines = dict(line.split(": ", 1) for line in ran.stdout.splitlines())
    assert lines["one file"] == r"100000 bytes, b'\x07\x07\x07'" and lines["read_many"].startswith("6400000 bytes of 64 files")
    assert lines["a batch"] == "[5, 3, 60]" and lines["a shard"] == "[b'000', b'001', b'002']" and lines["fsspec"] == "8"
