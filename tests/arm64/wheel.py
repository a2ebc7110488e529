"""Runs in a Python for arm64 with the wheel's files: reads and writes a folder, alone, in memory and with a cache folder.
usage: wheel.py FOLDER, with an empty folder."""

import pathlib
import platform
import sys

import spurline

assert platform.machine() == "aarch64", platform.machine()
folder = pathlib.Path(sys.argv[1])
source = folder / "source"
(source / "deep").mkdir(parents=True)
content = {f"deep/file-{number}": bytes([number]) * (700_000 * number) for number in range(5)}
for name, data in content.items():
    (source / name).write_bytes(data)

for settings in [{}, {"cache_dir": folder / "cache", "cache_size": "1G", "free_space_ratio": 0}]:
    # The second client reads what the first has left in the cache folder.
    for _ in range(2):
        with spurline.open(source, memory="64M", **settings) as client:
            assert client.glob("deep/*") == sorted(content)
            assert [bytes(view) for view in client.read_many(sorted(content))] == [content[name] for name in sorted(content)]
            with client.open("deep/file-4") as file:
                assert file.pread(5, 2_000_000) == content["deep/file-4"][2_000_000:2_000_005]
            try:
                client.stat("absent")
            except FileNotFoundError:
                pass
            else:
                raise AssertionError("an absent file has a stat")

with spurline.open(source, writable=True, memory="64M") as client:
    client.put_many({"written": b"by arm64"})
assert (source / "written").read_bytes() == b"by arm64"
print(f"spurline {spurline.__version__}, Python {platform.python_version()}, {platform.machine()}")
