"""Breakages in, which tests notice them out.

A breakage replaces a text, which must be there exactly once, in a copy of what git tracks. It is noticed if the
broken copy builds and its test fails. Each file in scripts/breakages has a way to build and to test, and:

    [[breakage]]
    breaks = "what goes wrong"
    file = "where"
    find = "the text"
    with = "the text instead"
    test = "the test that must notice"
    hangs = true    # if that takes for ever: being killed is noticed too
"""

import fcntl
import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent
BROKEN = REPOSITORY / "target" / "broken"
TREE, PACKAGE, SAID = BROKEN / "tree", BROKEN / "python", BROKEN / "said"

# A test has so many seconds, and one that is to hang so many: all of them together take less when nothing is broken.
SECONDS, TO_HANG = 120, 40

# What pytest says where tests failed; anything else is no failed test.
FAILED = {"cargo": 101, "pytest": 1}


def same(files, source, target):
    """Makes files in one folder what they are in another. What is the same stays as it is, so that it is not
    built again."""
    for name in files:
        there, here = target / name, (source / name).read_bytes()
        if not there.is_file() or there.read_bytes() != here:
            there.parent.mkdir(parents=True, exist_ok=True)
            there.write_bytes(here)
            there.chmod((source / name).stat().st_mode)


def copied():
    """The copy, as whole and as clean as what git tracks."""
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, check=True, capture_output=True, text=True)
    names = [name for name in tracked.stdout.split("\0") if name and (REPOSITORY / name).is_file()]
    for old in TREE.rglob("*"):
        if old.is_file() and "__pycache__" not in old.parts and str(old.relative_to(TREE)) not in names:
            old.unlink()
    same(names, REPOSITORY, TREE)


def packaged():
    """The Python package beside the copy: what is built of it as it was installed, the rest from the copy."""
    installed = REPOSITORY / "target" / "python" / "ckptfs"
    files = [path.relative_to(installed) for path in installed.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    same(files, installed, PACKAGE / "ckptfs")
    same([path.relative_to(TREE / "python") for path in TREE.glob("python/**/*.py")], TREE / "python", PACKAGE)


def done(words, seconds, said):
    """The exit status of a program in the copy, or nothing if it had to be killed."""
    environment = os.environ | {"CARGO_TARGET_DIR": str(BROKEN / "cargo"), "PYTHONPATH": str(PACKAGE)}
    environment |= {"PYTHONDONTWRITEBYTECODE": "1", "RUSTFLAGS": "-Awarnings"}
    with open(said, "ab") as out:
        running = subprocess.Popen(words, cwd=TREE, env=environment, stdin=subprocess.DEVNULL, stdout=out,
                                   stderr=subprocess.STDOUT, start_new_session=True)  # fmt: skip
        try:
            return running.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            # Also what it started and left.
            try:
                os.killpg(running.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            running.wait()


class Part:
    """A file of breakages, with its way to build and to test."""

    def __init__(self, name):
        read = tomllib.loads((REPOSITORY / "scripts" / "breakages" / f"{name}.toml").read_text())
        self.name, self.build, self.test, self.breakages = name, read["build"], read["test"], read["breakage"]
        # Where the tests are, if their names alone do not say so.
        self.prefix = read.get("tests", "")
        self.failed = FAILED["cargo" if self.test[0] == "cargo" else "pytest"]

    def said(self, number):
        SAID.mkdir(parents=True, exist_ok=True)
        said = SAID / f"{self.name}-{number}"
        said.unlink(missing_ok=True)
        return said

    def filled(self, words):
        return [sys.executable if word == "python" else word for word in words]

    def tests(self, tests, seconds, said):
        return done([*self.filled(self.test), *(self.prefix + test for test in tests)], seconds, said)

    def begin(self):
        """Unbroken, every test is there and passes, and every breakage is one of what is there."""
        self.stale()
        said = self.said("unbroken")
        tests = list(dict.fromkeys(breakage["test"] for breakage in self.breakages))
        if done(self.filled(self.build), 1800, said) or self.tests(tests, TO_HANG * len(tests), said):
            sys.exit(f"{self.name}: what is not broken fails: see {said}")
        if f"{len(tests)} passed" not in said.read_text():
            sys.exit(f"{self.name}: not all of the tests that are named are there: see {said}")

    def stale(self):
        for breakage in self.breakages:
            count = (TREE / breakage["file"]).read_text().count(breakage["find"])
            if count != 1:
                sys.exit(f"{self.name}: {breakage['breaks']}: {count} times in {breakage['file']}, not once: "
                         f"{breakage['find']!r}")  # fmt: skip

    def run(self, number, breakage):
        """Whether a breakage is noticed, in words: nothing is wrong if it is."""
        said, hangs = self.said(number), breakage.get("hangs", False)
        file = TREE / breakage["file"]
        whole = file.read_text()
        try:
            file.write_text(whole.replace(breakage["find"], breakage["with"]))
            if self.name == "python":
                packaged()
            if done(self.filled(self.build), 1800, said):
                return "IT DOES NOT BUILD, which proves nothing"
            status = self.tests([breakage["test"]], TO_HANG if hangs else SECONDS, said)
        finally:
            file.write_text(whole)
        if status is None:
            return None if hangs else "IT HANGS"
        if status == 0:
            return "NOBODY NOTICES"
        return None if status == self.failed else f"THE TEST DID NOT RUN: {status}"


def main(names):
    if not names:
        sys.exit("usage: scripts/break ring|devices|python...")
    BROKEN.mkdir(parents=True, exist_ok=True)
    only_one = open(BROKEN / "lock", "w")
    fcntl.flock(only_one, fcntl.LOCK_EX)
    copied()
    wrong = 0
    for part in map(Part, names):
        if part.name == "python":
            packaged()
        part.begin()
        for number, breakage in enumerate(part.breakages, 1):
            why = part.run(number, breakage)
            wrong += why is not None
            print(f"{breakage['breaks']}: {why or 'noticed by ' + breakage['test']}", flush=True)
            if why:
                print(f"    see {SAID / f'{part.name}-{number}'}", flush=True)
    if wrong:
        sys.exit(f"{wrong} breakages are not noticed as they should be")


if __name__ == "__main__":
    main(sys.argv[1:])
