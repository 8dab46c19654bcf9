"""Python environments for tests of `ckptfs enable`: cheap ones, which see the packages of the tests' own environment."""

import json
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import ckptfs

from mounts import PATIENCE

PACKAGES, HOME = sysconfig.get_path("purelib"), os.path.dirname(os.path.dirname(ckptfs.__file__))

# Lines that other packages leave: coverage, setuptools, and an editable installation with its finder. The last finder
# comes before all others, and finds modules by them.
OTHER_HOOKS = {
    "a1_coverage.pth": "import sys; exec('try:\\n import coverage; coverage.process_startup()\\nexcept Exception: pass')\n",
    "distutils-precedence.pth": (
        "import os; var = 'SETUPTOOLS_USE_DISTUTILS'; enabled = os.environ.get(var, 'local') == 'local'; "
        "enabled and __import__('_distutils_hack').add_shim(); \n"
    ),
    "__editable__.other-1.0.pth": "import __editable___other_finder; __editable___other_finder.install()\n",
    "__editable___other_finder.py": (
        "import sys\nfrom importlib.machinery import PathFinder\n\n\nclass EditableFinder:\n"
        "    @classmethod\n    def find_spec(cls, fullname, path=None, target=None):\n        return None\n\n\n"
        "def install():\n    sys.meta_path.append(EditableFinder)\n"
    ),
    "zz_watch.pth": "import zz_watch\n",
    "zz_watch.py": (
        "import sys\nfrom importlib.util import find_spec\n\nbusy = set()\n\n\nclass Watch:\n"
        "    @staticmethod\n    def find_spec(name, path=None, target=None):\n"
        "        if '.' in name or name in busy or name in sys.modules:\n            return None\n"
        "        busy.add(name)\n        try:\n            return find_spec(name)\n"
        "        finally:\n            busy.discard(name)\n\n\n"
        "sys.meta_path.insert(0, Watch)\n"
    ),
}


class Environment:
    """A virtual environment. `home` is the folder of the package ckptfs that it sees; `None` for none."""

    def __init__(self, folder, hooks=(), home=HOME):
        self.folder = Path(folder)
        venv.create(self.folder, symlinks=True)
        self.python = self.folder / "bin/python"
        [self.site] = self.folder.glob("lib/*/site-packages")
        self.see(home)
        for name in hooks:
            (self.site / name).write_text(OTHER_HOOKS[name])

    def see(self, home):
        """Sees the package of another folder from now on."""
        (self.site / "beside.pth").write_text("\n".join(map(str, filter(None, [home, PACKAGES]))) + "\n")

    def start(self, *words, cwd=None, **env):
        """Runs the interpreter to its end; nothing of the tests' own variables leads it to ckptfs."""
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        return subprocess.run(
            [self.python, *map(str, words)], env={**kept, "HF_HUB_OFFLINE": "1", **env}, cwd=cwd or self.folder,
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE,
        )  # fmt: skip

    def run(self, code, *words, flags=(), **how):
        """The JSON in the last line that a program prints. It prints no error."""
        done = self.start(*flags, "-c", code, *words, **how)
        assert done.returncode == 0, done.stderr
        assert not done.stderr, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    def command(self, *words, **how):
        """Runs the command of the package there."""
        return self.start("-m", "ckptfs", *words, **how)

    def enable(self):
        done = self.command("enable")
        assert (done.returncode, done.stderr) == (0, ""), done
        return self

    def tree(self):
        """Every file, with what it holds. Compiled modules are left out, unless they are of nothing that is there."""
        return {str(path.relative_to(self.folder)): path.read_bytes() for path in self.folder.rglob("*")
                if path.is_file() and "__pycache__" not in path.parts}  # fmt: skip


def this_interpreter():
    """The interpreter of the tests."""
    return Path(sys.executable)
