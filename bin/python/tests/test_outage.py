"""A group that loses a node while a program reads."""

import os
import signal
import threading

import spurline
from conftest import REGISTRY, content

#: The process that is killed.
NODE = int(os.environ["SPURLINE_TEST_NODE_PID"])


def test_a_killed_node_costs_a_pause(source):
    whole = content(1, (9 << 20) + 5)
    with spurline.open(source, registry=REGISTRY, threads=8) as client:
        stat = client.stat("big.bin")
        killer = threading.Timer(0.2, os.kill, (NODE, signal.SIGKILL))
        killer.start()
        turns = 0
        while killer.is_alive() or turns < 20:
            turns += not killer.is_alive()
            assert bytes(client.read_many([stat])[0]) == whole
            offsets = [turn * 99_991 for turn in range(80)]
            views = client.read_many([("big.bin", offset, 3000) for offset in offsets])
            assert [bytes(view) for view in views] == [whole[offset : offset + 3000] for offset in offsets]
