"""The blocks of the README run as they stand."""

import pathlib
import re


def test_the_readme_runs(capsys):
    text = (pathlib.Path(__file__).parent.parent / "README.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) >= 7
    program = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), program)
    shown = capsys.readouterr().out.splitlines()
    assert shown[1] == str([f"train/sample-{n}.bin" for n in range(4)])
    assert shown[3] == r"b'\x03\x03\x03\x03'" and shown[5] == "[4096, 4000, 100000, 100000]"
    assert shown[6] == "[4096, 4096]" and shown[7] == "None"
    assert "(8, [5, 2, 7])" in [f"({line.replace(' [', ', [')})" for line in shown]
    assert shown[-1] == str(["a.bin", "b.bin", "result.txt", "train"])
