"""Puts the package into a folder as an installed wheel has it: assemble.py LIBRARY FOLDER. The wheel itself is made by maturin
(make wheel)."""

import pathlib
import shutil
import sys
import tomllib

library, site = map(pathlib.Path, sys.argv[1:])
here = pathlib.Path(__file__).resolve().parent.parent
project = tomllib.loads((here / "pyproject.toml").read_text())["project"]

package = site / "spurline"
shutil.copytree(here / "spurline", package, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
(package / "_native.abi3.so").symlink_to(library.resolve())
info = site / "spurline-0.dist-info"
info.mkdir()
(info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 0\n")
points = []
for group, entries in project["entry-points"].items():
    points.append(f"[{group}]")
    points += [f"{name} = {value}" for name, value in entries.items()]
(info / "entry_points.txt").write_text("\n".join(points) + "\n")
