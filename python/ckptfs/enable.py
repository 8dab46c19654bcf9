"""`ckptfs enable` and `ckptfs disable`: one file in the site-packages of a Python environment.

Its line puts a finder before the others, which acts on the import of safetensors alone. Whatever goes wrong there is
silent: the program then loads as without ckptfs.
"""

import errno
import os
import shlex
import subprocess
import sys
from importlib import resources

from ckptfs.errors import SafetensorError, error, print_error

FILE_NAME = "ckptfs-enable.pth"

_MIN_VERSION = (3, 11)
_PROBE_TIMEOUT_SECONDS = 60
_DONE, _FAILED = 0, 1

# A folder or a script of the same name must not be run: only a package with this file is imported.
_HOOK = """
import sys
class CkptfsFinder:
    def find_spec(name, path=None, target=None):
        if name != 'safetensors': return None
        try:
            import os
            from importlib.machinery import PathFinder
            found = PathFinder.find_spec('ckptfs')
            folders = list(found and found.submodule_search_locations or [])
            if not any(os.path.exists(os.path.join(folder, 'shims', 'environment.py')) for folder in folders): return None
            from ckptfs.shims import environment
            return environment.find_spec(name, path, target)
        except Exception: return None
sys.meta_path.insert(0, CkptfsFinder)
if 'safetensors' in sys.modules: CkptfsFinder.find_spec('safetensors')
"""

# The module `site` runs lines that begin with `import`, and prints what they raise.
_QUIET_HOOK = "try:" + _HOOK.rstrip().replace("\n", "\n ") + "\nexcept Exception: pass"
TEXT = f"""\
# `ckptfs enable` wrote this file. `ckptfs disable` removes it. You may also delete it.
import sys; exec({_QUIET_HOOK!r}, {{}})
"""


def run(command, *, python, quiet, user=False):
    """Runs the command, prints what it did, and returns the exit code."""
    try:
        interpreter = _probe(python)
        if command == "disable":
            return _disable(interpreter)
        return _enable(interpreter, user, quiet)
    except SafetensorError as refused:
        remedy = getattr(refused, "__notes__", [""])[0].removeprefix("what to do: ")
        return print_error(str(refused), remedy, _FAILED)


def describe():
    """Whether the environment of this process is enabled, in words, and what to do; empty for nothing."""
    from ckptfs.site_folders import find_folders

    folders = find_folders()
    texts = {path: _text_of(path) for path in _paths(folders, True)}
    written = [path for path, text in texts.items() if text is not None]
    if not written:
        return f"{folders['prefix']}: not enabled, so programs read through the mount", "ckptfs enable"
    if all(texts[path] != TEXT for path in written):
        return f"{written[0]}: written by another version of ckptfs", "ckptfs enable"
    return f"{folders['prefix']}: enabled, so programs that load files of a mount read their sources", ""


def _enable(interpreter, user, quiet):
    python, shown = interpreter["python"], shlex.quote(interpreter["python"])
    if interpreter["fault"]:
        raise error(f"{python}: cannot use ckptfs: {interpreter['fault']}", _install(shown))
    if user and not interpreter["user"]:
        raise error(f"{python}: does not read user site-packages", f"leave out --user: {_command(shown)}")
    if not user and not interpreter["own"]:
        raise error(f"{python}: has no site-packages", f"make an environment: {shown} -m venv ENVIRONMENT")
    path = os.path.join(interpreter["user"] if user else interpreter["own"][0], FILE_NAME)
    is_enabled = _text_of(path) == TEXT
    if not is_enabled:
        try:
            _write(path, user)
        except OSError as fault:
            raise _cannot_write(fault, path, interpreter) from None
    print(f"{'already enabled' if is_enabled else 'enabled'}: {path}")
    if interpreter["by_variable"] and not quiet:
        print("ckptfs: note: ckptfs is found by PYTHONPATH: programs without that load as before", file=sys.stderr)
    return _DONE


def _disable(interpreter):
    removed = []
    for path in _paths(interpreter, False):
        try:
            os.unlink(path)
        except FileNotFoundError:
            continue
        except OSError as fault:
            raise error(f"{path}: cannot be removed: {fault.strerror}", f"sudo rm {shlex.quote(path)}") from None
        removed.append(path)
    for path in removed:
        print(f"disabled: removed {path}")
    remaining = [path for path in _paths(interpreter, True) if _text_of(path) is not None]
    for path in remaining:
        print(f"still enabled by the base environment: rm {shlex.quote(path)}")
    if not removed and not remaining:
        print(f"not enabled: {interpreter['prefix']}")
    return _DONE


def _probe(python):
    """What another interpreter, or this one in a new process, says of itself."""
    python = sys.executable if python is None else os.path.abspath(python)
    if os.path.isdir(python):
        python = os.path.join(python, "bin", "python")
    remedy = "give the path of an interpreter, or of a virtual environment"
    if not os.path.exists(python):
        raise error(f"{python}: no such file or directory", remedy)
    source = resources.files("ckptfs").joinpath("site_folders.py").read_text()
    try:
        # Not from the current directory, whose modules the interpreter would import.
        done = subprocess.run([python, "-c", source], cwd="/", stdin=subprocess.DEVNULL, capture_output=True, text=True,
                              errors="replace", timeout=_PROBE_TIMEOUT_SECONDS)  # fmt: skip
        import json

        found = json.loads(done.stdout.splitlines()[-1])
        version = tuple(found["version"])
    except (OSError, subprocess.TimeoutExpired) as fault:
        raise error(f"{python}: cannot be run: {fault}", remedy) from None
    except (IndexError, ValueError, KeyError, TypeError):
        last = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        raise error(f"{python}: is not a Python interpreter: {last}", remedy) from None
    if version < _MIN_VERSION:
        needed = ".".join(map(str, _MIN_VERSION))
        raise error(f"{python}: is Python {version[0]}.{version[1]}", f"give one of Python {needed} or later")
    return {**found, "python": python}


def _paths(folders, with_inherited):
    """Where the file may be that enables an environment."""
    sites = [*folders["own"], *filter(None, [folders["user"]]), *(folders["inherited"] if with_inherited else [])]
    return [os.path.join(folder, FILE_NAME) for folder in sites]


def _text_of(path):
    """The text of the file; `None` if it is not there."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return None


def _write(path, user):
    from ckptfs.save.atomic_file import replacing

    if user:
        os.makedirs(os.path.dirname(path), exist_ok=True)
    with replacing(path) as file:
        file.write(TEXT.encode())


def _cannot_write(fault, path, interpreter):
    shown = shlex.quote(interpreter["python"])
    if fault.errno in (errno.EACCES, errno.EPERM):
        remedy = f"sudo {_command(shown)}"
        if interpreter["user"]:
            remedy += f"; or for this user alone: {_command(shown)} --user"
    else:
        remedy = f"make another environment: {shown} -m venv ENVIRONMENT"
    return error(f"{path}: cannot be written: {fault.strerror}", remedy)


def _command(shown):
    return f"{shown} -m ckptfs enable"


def _install(shown):
    from ckptfs import __version__

    return f"in the repository of ckptfs: scripts/dist && {shown} -m pip install dist/ckptfs-{__version__}-*.whl"
