"""Code blocks of a guide in docs/, to run as they stand there.

A test names every block of its guide: one more or less is a failure.
"""

import itertools
import os
import re
import sys

from program import REPOSITORY


def blocks(guide, language="python", section=None):
    """The text of every ```language block of a guide, or of its section of this heading, in order."""
    text = (REPOSITORY / "docs" / guide).read_text()
    if section:
        text = re.split(r"^## ", text.split(f"\n## {section}\n")[1], flags=re.MULTILINE)[0]
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def ran(block, **given):
    """The names that a block leaves after it ran; `given` are the names that the guide assumes."""
    made = {"__name__": "a_guide", **given}
    exec(compile(block, "a block of a guide", "exec"), made)
    return made


def with_command(folder):
    """The environment of a shell with this package's command `ckptfs` and this Python."""
    program = folder / "bin" / "ckptfs"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -P -m ckptfs "$@"\n')
    program.chmod(0o755)
    path = os.pathsep.join([str(program.parent), os.path.dirname(sys.executable), os.environ["PATH"]])
    return {**os.environ, "PATH": path, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def rows(guide, first):
    """The cells of each row of the table with this first heading."""
    lines = (REPOSITORY / "docs" / guide).read_text().splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith(f"| {first} |"))
    table = itertools.takewhile(lambda line: line.startswith("|"), lines[start + 2 :])
    return [re.split(r" (?<!\\)\| ", line[2:-2]) for line in table]
