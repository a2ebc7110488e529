"""Reads data sets and models through the Spurline cache, without a mount, FUSE or root.

>>> import spurline
>>> client = spurline.open("s3://datasets", registry="coordinator://head:7400", token_file="token")
>>> with client.open("train/shard-0001.tar") as file:
...     header = file.pread(512, 0)
>>> views = client.read_many([("a.bin", 0, 4096), ("b.bin", 1 << 20, 4096)])

All failures of a source are :class:`OSError` with an errno and a sentence; an absent file is ``FileNotFoundError``.
"""

from ._client import Client, FileStat, Load, open
from ._files import ReadFile, WriteFile
from ._native import Arena, __version__
from ._safetensors import load_safetensors

__all__ = [
    "Arena",
    "Client",
    "FileStat",
    "Load",
    "ReadFile",
    "WriteFile",
    "__version__",
    "load_safetensors",
    "open",
]
