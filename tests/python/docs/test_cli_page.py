"""docs/cli.md has a section for each command, and in it each of the command's options, and no other."""

import re
import subprocess
import sys

import pytest

from program import REPOSITORY

TEXT = (REPOSITORY / "docs/cli.md").read_text()

# Options of every command, which the page's introduction has.
OF_EVERY_COMMAND = {"--help", "--quiet", "--version"}


def printed(*words):
    done = subprocess.run(
        [sys.executable, "-P", "-m", "ckptfs", *words], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout


def commands():
    """Every command of the package, by its help."""
    listed = printed("--help").split("Commands:\n")[1].split("\n\n")[0]
    return [name for name in re.findall(r"^  (\w+)", listed, re.MULTILINE) if name != "help"]


def section(command):
    title = "Completions and man pages" if command in ("completions", "man") else command
    return TEXT.split(f"\n## {title}\n")[1].split("\n## ")[0]


def long_options(text):
    return set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", text))


def test_the_introduction_lists_every_command():
    introduction = TEXT.split("\n## ")[0]
    assert set(commands()) == set(re.findall(r"`(\w+)`", introduction)) - {"ckptfs", "umount"}
    assert "--quiet" in introduction and "--version" in introduction


# The options of stores, which several commands have, are those of another page.
OF_STORES = long_options((REPOSITORY / "docs/remote.md").read_text().split("\n## Settings\n")[1].split("\n## ")[0])


def test_the_page_of_stores_has_their_options():
    printed_options = printed("ls", "--help").split("Object stores:\n")[1].split("\n\n")[0]
    assert set(re.findall(r"^ +(--[a-z-]+)", printed_options, re.MULTILINE)) - OF_EVERY_COMMAND == OF_STORES


@pytest.mark.parametrize("command", commands())
def test_a_section_has_the_options_of_its_command(command):
    options = set(re.findall(r"^ +(?:-\w, )?(--[a-z][a-z-]*)", printed(command, "--help"), re.MULTILINE))
    text = section(command)
    assert options - OF_EVERY_COMMAND - OF_STORES <= long_options(text)
    if command != "completions":  # It shares the section of `man`.
        in_table = re.findall(r"^\| (`-[^|]*) \|", text, re.MULTILINE)
        assert set().union(*map(long_options, in_table)) <= options
