"""The files of dist/, and an ordinary user with empty folders to install them in."""

import os
import platform
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]

VERSION = tomllib.loads((REPOSITORY / "Cargo.toml").read_text())["package"]["version"]
ARCH = platform.machine()

WHEEL = f"ckptfs-{VERSION}-cp311-abi3-manylinux_2_28_{ARCH}.whl"
PROGRAM = f"ckptfs-{VERSION}-linux-{ARCH}"
SOURCE_PACKAGE = f"ckptfs-{VERSION}.tar.gz"

# The ordinary user of every system, where root runs the tests.
NOBODY = 65534

# Longer than an installation takes on the slowest machine.
TIMEOUT_SECONDS = 300


def pythons():
    """Every Python on the PATH, or of pyenv, that the wheel is for: the oldest first."""
    folders = [Path(folder) for folder in os.environ["PATH"].split(os.pathsep) if folder]
    # Those on the PATH are scripts that look for one of these.
    folders += Path.home().glob(".pyenv/versions/*/bin")
    found = {}
    for path in (path for folder in folders for path in folder.glob("python3.*")):
        version = re.fullmatch(r"python3\.(\d+)", path.name)
        if version and int(version[1]) >= 11 and "shims" not in path.parts and os.access(path, os.X_OK):
            found.setdefault(int(version[1]), path)
    assert found, "no python3.11 or later is on the PATH: apt-get install python3.11 python3.11-venv"
    return [path for _, path in sorted(found.items())]


@pytest.fixture(scope="session")
def dist():
    folder = REPOSITORY / "dist"
    assert folder.is_dir(), "there is no dist/: run scripts/dist"
    return folder


class User:
    """Runs commands as an ordinary user, with a home of its own and nothing of this environment."""

    def __init__(self, home):
        self.home = home
        home.mkdir()
        self.mounts = []
        if os.geteuid() == 0:
            os.chown(home, NOBODY, NOBODY)
            self.prefix = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
        else:
            self.prefix = []

    def take(self, path):
        """Copies a file into the home."""
        copy = self.home / path.name
        shutil.copy(path, copy)
        copy.chmod(0o644)
        return copy

    def __call__(self, *words, fails=False):
        """Runs a command to the end, and returns its output."""
        kept = {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "SSL_", "LANG"))}
        env = kept | {"PATH": os.environ["PATH"], "HOME": str(self.home)}
        done = subprocess.run(
            [*self.prefix, *map(str, words)], cwd=self.home, env=env, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=TIMEOUT_SECONDS,
        )  # fmt: skip
        assert (done.returncode != 0) == fails, f"{words}: exit code {done.returncode}\n{done.stdout}"
        return done.stdout

    def mount(self, command, source, point):
        self("mkdir", point)
        self(command, "mount", source, point)
        self.mounts.append((command, point))

    def unmount(self):
        command, point = self.mounts.pop()
        self(command, "unmount", point)


@pytest.fixture
def user(tmp_path_factory):
    folder = tmp_path_factory.mktemp("user")
    for above in [folder, *folder.parents[:-2]]:
        above.chmod(above.stat().st_mode | 0o011)
    user = User(folder / "home")
    yield user
    while user.mounts:
        user.unmount()
