"""README.md is short, its quickstart works as typed, and what it says of versions and files is so."""

import re
import subprocess
import sys
from pathlib import Path

from guides import blocks, ran, with_command
from program import REPOSITORY

TEXT = (REPOSITORY / "README.md").read_text()

MAX_WORDS = 900


def section(heading):
    """The text below a heading, up to the next one."""
    return TEXT.split(f"\n## {heading}\n")[1].split("\n## ")[0]


def commands(text):
    """The lines of the first indented block."""
    block = re.search(r"(?:^    .*\n)+", text, re.MULTILINE)[0]
    return [line[4:] for line in block.splitlines()]


def mountpoints():
    return [line.split(" ")[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]


def test_it_is_short():
    assert len(TEXT.split()) <= MAX_WORDS


def test_the_quickstart_works_as_typed(tmp_path):
    typed = commands(section("Quickstart"))
    assert len(typed) == 5 and typed[0].startswith("mkdir ") and typed[-1] == "ckptfs unmount mnt"
    folder = tmp_path / "home"
    folder.mkdir()
    (folder / "examples").symlink_to(REPOSITORY / "examples")
    try:
        done = subprocess.run(
            ["bash", "-e"], input="\n".join(typed), cwd=folder, env=with_command(tmp_path),
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        assert "layers.1.weight': array([[1., 1." in done.stdout and "layers.2.weight': array([[2.," in done.stdout
        assert str(folder / "mnt") not in mountpoints()
    finally:
        subprocess.run(["umount", "-l", folder / "mnt"], capture_output=True)


def test_the_library_loads_as_shown(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    subprocess.run([sys.executable, REPOSITORY / "examples/make_shards.py", "models/tiny"], check=True)
    [block] = blocks("../README.md")
    assert ran(block)["tensors"]["layers.2.weight"].tolist() == [[2] * 4] * 4


def test_the_versions_are_those_of_the_tests():
    required = (REPOSITORY / "tests/python/requirements.txt").read_text().split()
    said = re.search(r"\*\*Run in our tests\*\*.*?\n\n", TEXT, re.DOTALL)[0]
    pairs = re.findall(r"([a-z][\w-]+)\s+(\d[\d.]*\d)", said)
    assert len(pairs) > 8
    for name, version in pairs:
        assert f"{name}=={version}" in required, name


def test_what_was_never_run_is_not_among_what_the_tests_install():
    required = (REPOSITORY / "tests/python/requirements.txt").read_text().lower()
    said = re.search(r"\*\*Imitated by their rules only\*\*, never run: (.*?)\.", TEXT, re.DOTALL)[1]
    for name in said.replace("\n", " ").split(", "):
        assert name.split("'")[0].lower() not in required, name


def test_the_scripts_that_it_names_exist():
    named = set(re.findall(r"\bscripts/[\w/-]+", TEXT))
    assert {"scripts/dist", "scripts/demo"} <= named
    missing = [name for name in named if not (REPOSITORY / name).is_file()]
    assert not missing
