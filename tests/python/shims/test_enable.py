"""`ckptfs enable`: programs that know nothing of ckptfs read files of mounts from their sources. All else is as without
it, also where ckptfs fails, and however the interpreter was started."""

import json
import shutil
import zipfile
from pathlib import Path

import ckptfs
import numpy
import pytest
import safetensors.numpy
import torch

from environments import HOME, Environment
from mounts import Mounts
from program import find_binary

# What programs print: whether the handle is the original's, how the load was done, and the sum of the tensors. None of
# them imports torch.
LOAD = """
import json, sys
def load(path):
    import safetensors
    from safetensors import numpy
    with safetensors.safe_open(path, "np") as handle:
        is_ours = type(handle).__module__.startswith("ckptfs")
        assert isinstance(handle, safetensors.safe_open)
        total = sum(float(handle.get_tensor(name).sum()) for name in handle.keys())
    assert total == sum(float(array.sum()) for array in numpy.load_file(path).values())
    return [is_ours, total]
"""
SHOW = LOAD + "print(json.dumps(load(sys.argv[1])))\n"


class Shelf:
    """A model on disk, and what a mount shows of it."""

    def __init__(self, folder, mounts):
        self.source = folder / "source"
        arrays = {f"layer.{n}": numpy.arange(n, n + 5000, dtype="float32") for n in range(4)}
        self.sum = sum(float(array.sum()) for array in arrays.values())
        for number, names in enumerate([list(arrays)[:2], list(arrays)[2:]], 1):
            (self.source / "model").mkdir(parents=True, exist_ok=True)
            part = {name: arrays[name] for name in names}
            safetensors.numpy.save_file(part, self.source / "model" / f"model-{number:05}-of-00002.safetensors")
        (self.source / "single").mkdir()
        safetensors.numpy.save_file(arrays, self.source / "single/model.safetensors")
        self.mount = mounts(self.source)
        self.plain = self.source / "single/model.safetensors"
        self.shown = self.mount / "model/model.safetensors"


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shelf")
    mounts = Mounts(find_binary(), folder)
    yield Shelf(folder, mounts)
    mounts.end()


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    return Environment(tmp_path_factory.mktemp("enabled") / "env").enable()


def test_a_file_of_a_mount_is_read_from_its_sources(environment, shelf):
    code = LOAD + """
loaded = load(sys.argv[1])
import ckptfs
print(json.dumps([*loaded, ckptfs.last_report().as_dict(), ckptfs.stats()["originals"]]))
"""
    is_ours, total, report, originals = environment.run(code, shelf.shown)
    assert (is_ours, total, originals) == (True, shelf.sum, 0)
    assert report["bytes"] == 80_000 and not report["fallbacks"]
    # A file that the mount shows as it is lies somewhere else, too.
    assert environment.run(SHOW, shelf.mount / "single/model.safetensors") == [True, shelf.sum]


def test_the_loader_is_imported_with_safetensors_where_a_mount_is(environment, shelf):
    code = "import json, sys, safetensors.torch; print(json.dumps('ckptfs.load.torch' in sys.modules))"
    assert environment.run(code) is True
    assert environment.run(code, CKPTFS_DISABLE="1") is False
    # Where no mount is seen.
    unmounted = """
import builtins, io
original = builtins.open
builtins.open = lambda path, *how, **more: io.BytesIO() if path == "/proc/self/mountinfo" else original(path, *how, **more)
"""
    assert environment.run(unmounted + code) is False


def test_torch_maps_the_sources_of_a_mounted_file(environment, shelf):
    code = """
import json, sys
from safetensors.torch import load_file
loaded = load_file(sys.argv[1])
maps = open("/proc/self/maps").read()
import ckptfs
print(json.dumps([len(loaded), maps.count(sys.argv[2]) > 0, maps.count(sys.argv[1]), ckptfs.last_report().mapped]))
"""
    source = shelf.source / "model/model-00001-of-00002.safetensors"
    assert environment.run(code, shelf.shown, source) == [4, True, 0, 80_000]


def test_any_other_file_takes_the_original_path(environment, shelf):
    code = LOAD + """
loaded = load(sys.argv[1])
print(json.dumps([*loaded, [name for name in sys.modules if "_ckptfs" in name]]))
"""
    # Nothing of ckptfs but the shims was imported.
    assert environment.run(code, shelf.plain) == [False, shelf.sum, []]
    missing = environment.start("-c", SHOW, "nothing.safetensors").stderr
    assert missing.endswith("FileNotFoundError: No such file or directory: nothing.safetensors\n")


def test_a_file_that_only_claims_to_be_of_a_mount_takes_the_original_path(environment, shelf, tmp_path):
    import os

    claims = tmp_path / "claims.safetensors"
    shutil.copy(shelf.plain, claims)
    os.setxattr(claims, "user.ckptfs.source", os.getxattr(shelf.shown, "user.ckptfs.source"))
    assert environment.run(SHOW, claims) == [False, shelf.sum]


def test_other_files_of_a_mount_take_the_original_path(environment, shelf, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    torch.save({"a": torch.arange(5000)}, source / "kept.bin")
    (source / "config.json").write_text("{}")
    (source / "empty.safetensors").write_text("")
    code = """
import json, os, sys, safetensors
found = []
for name in ("kept.bin", "config.json", "empty.safetensors", ""):
    try: safetensors.safe_open(os.path.join(sys.argv[1], name), "np")
    except Exception as fault: found.append([type(fault).__name__, str(fault)])
descriptor = os.open(os.path.join(sys.argv[1], "config.json"), os.O_RDONLY)
try: safetensors.safe_open(descriptor, "np")
except TypeError: os.close(descriptor)
print(json.dumps([found, [name for name in sys.modules if "_ckptfs" in name]]))
"""
    mounts = Mounts(find_binary(), tmp_path)
    try:
        mount = mounts(source, "--keep", "kept.bin")
        found = environment.run(code, mount.point)
        assert len(found[0]) == 4 and found[1] == []
        assert found == environment.run(code, mount.point, CKPTFS_DISABLE="1")
    finally:
        mounts.end()


LAZY_MODULES = """
import importlib.util, sys, types
spec = importlib.util.find_spec("late")
spec.loader = importlib.util.LazyLoader(spec.loader)
late = sys.modules["late"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(late)
class Loads(types.ModuleType):
    @property
    def __dict__(self): raise RuntimeError("loaded")
class Proxy:
    def __getattribute__(self, name): raise RuntimeError(f"asked for {name}")
sys.modules["loads"], sys.modules["proxy"] = Loads("loads"), Proxy()
"""


def test_modules_that_load_later_are_not_loaded(environment, shelf, tmp_path):
    (tmp_path / "late.py").write_text("raise RuntimeError('loaded')")
    assert environment.run(LAZY_MODULES + SHOW, shelf.shown, cwd=tmp_path) == [True, shelf.sum]


def test_a_shim_that_cannot_be_made_fails_no_import(environment, shelf):
    code = """
from ckptfs.shims import install
def fails(original): raise RuntimeError("no shim")
for name, (call, shim_of, is_known) in install._CALLS.items(): install._CALLS[name] = call, fails, is_known
"""
    assert environment.run(code + SHOW, shelf.shown) == [False, shelf.sum]


def test_switched_off_everything_takes_the_original_path(environment, shelf):
    assert environment.run(SHOW, shelf.shown, CKPTFS_DISABLE="1") == [False, shelf.sum]


def test_nothing_is_imported_before_safetensors(environment, tmp_path):
    code = "import json, sys; print(json.dumps(sorted(sys.modules)))"
    without = Environment(tmp_path / "env")
    assert environment.run(code) == without.run(code)


def test_install_takes_every_file_and_uninstall_leaves_those_of_mounts(environment, shelf):
    code = LOAD + """
paths = sys.argv[1:]
both = lambda: [load(path)[0] for path in paths]
import ckptfs
found = [both()]
with ckptfs.installed():
    found.append(both())
found.append(both())
ckptfs.install()
found.append(both())
ckptfs.uninstall()
found.append(both())
print(json.dumps(found))
"""
    mounted, every = [False, True], [True, True]
    assert environment.run(code, shelf.plain, shelf.shown) == [mounted, every, mounted, every, mounted]
    first = code.replace("import ckptfs\n", "import ckptfs; ckptfs.install()\n", 1)
    assert environment.run(first, shelf.plain, shelf.shown)[0] == every


STARTS = {
    "again": "import importlib, safetensors; importlib.reload(safetensors); importlib.reload(safetensors)",
    "imported anew": "import safetensors; del sys.modules['safetensors']; import safetensors",
    "looked for first": (
        "import importlib.util as u; spec = u.find_spec('safetensors'); assert spec.loader.get_source('safetensors')"
    ),
    "threads": (
        "import threading\n"
        "wrong, go = [], threading.Barrier(8)\n"
        "def work():\n    go.wait()\n    wrong.append(not load(sys.argv[1])[0])\n"
        "threads = [threading.Thread(target=work) for _ in range(8)]\n"
        "[thread.start() for thread in threads]; [thread.join() for thread in threads]\n"
        "assert wrong == [False] * 8, wrong"
    ),
    # A thread whose import began before another one's call goes on with the finders behind, and misses that of `install`.
    "looked for meanwhile": (
        "finder = sys.meta_path[0]; assert finder.__name__ == 'CkptfsFinder'\n"
        "assert finder.find_spec('safetensors') and finder.find_spec('safetensors')"
    ),
    "fork": (
        "import os\nchild = os.fork()\n"
        "if not child: os._exit(not load(sys.argv[1])[0])\n"
        "assert os.waitpid(child, 0)[1] == 0"
    ),
    "fork after": (
        "import os\nload(sys.argv[1])\nchild = os.fork()\n"
        "if not child: os._exit(not load(sys.argv[1])[0])\n"
        "assert os.waitpid(child, 0)[1] == 0"
    ),
}


@pytest.mark.parametrize("start", STARTS)
def test_it_holds_however_safetensors_is_imported(environment, shelf, start):
    code = f"{LOAD}{STARTS[start]}\nprint(json.dumps(load(sys.argv[1])))"
    assert environment.run(code, shelf.shown) == [True, shelf.sum]


@pytest.mark.parametrize("flags", [["-I"], ["-E"], ["-P"], ["-s"], ["-X", "dev"], ["-OO"], ["-B"]], ids=" ".join)
def test_it_holds_with_the_flags_of_the_interpreter(environment, shelf, flags):
    assert environment.run(SHOW, shelf.shown, flags=flags) == [True, shelf.sum]


def test_without_the_module_site_nothing_is_enabled(environment, shelf):
    code = f"import sys; sys.path[:0] = [{str(environment.site)!r}, {safetensors_home()!r}]\n{SHOW}"
    assert environment.run(code, shelf.shown, flags=["-S"]) == [False, shelf.sum]


def safetensors_home():
    return str(Path(safetensors.__file__).parents[1])


def test_spawned_and_forked_workers_have_it(environment, shelf, tmp_path):
    (tmp_path / "work.py").write_text(LOAD + """
def main():
    import multiprocessing
    found = []
    for kind in ("spawn", "fork", "forkserver"):
        with multiprocessing.get_context(kind).Pool(1) as pool:
            found.append(pool.map(load, [sys.argv[1]])[0])
    print(json.dumps(found))
if __name__ == "__main__":
    main()
""")  # fmt: skip
    done = environment.start(tmp_path / "work.py", shelf.shown)
    assert json.loads(done.stdout) == [[True, shelf.sum]] * 3, done.stderr


def test_a_subinterpreter_starts_and_imports(environment, shelf):
    # safetensors itself refuses to be imported there.
    code = """
import json, _xxsubinterpreters as interpreters
number = interpreters.create()
interpreters.run_string(number, "import json, sys; assert sys.meta_path[0].__name__ == 'CkptfsFinder'")
text = '''
try: import safetensors
except ImportError as fault: assert 'ckptfs' not in str(fault), fault
'''
interpreters.run_string(number, text)
interpreters.destroy(number)
print("true")
"""
    assert environment.run(code) is True


def test_it_holds_where_another_line_imported_safetensors_before(tmp_path, shelf):
    environment = Environment(tmp_path / "env").enable()
    (environment.site / "c_early.pth").write_text("import safetensors\n")
    code = f"import sys; assert 'safetensors' in sys.modules\n{SHOW}"
    assert environment.run(code, shelf.shown) == [True, shelf.sum]


def test_it_holds_for_a_program_in_an_archive(environment, shelf, tmp_path):
    with zipfile.ZipFile(tmp_path / "program.zip", "w") as archive:
        archive.writestr("__main__.py", "from helper import *\nprint(json.dumps(load(sys.argv[1])))\n")
        archive.writestr("helper.py", LOAD)
    done = environment.start(tmp_path / "program.zip", shelf.shown)
    assert json.loads(done.stdout) == [True, shelf.sum], done.stderr


def test_a_script_that_is_named_ckptfs_is_not_run_by_it(environment, shelf, tmp_path):
    (tmp_path / "ckptfs.py").write_text("print('run')\n" + SHOW)
    done = environment.start(tmp_path / "ckptfs.py", shelf.shown)
    assert done.stdout.count("run") == 1 and json.loads(done.stdout.splitlines()[-1]) == [False, shelf.sum]
    (tmp_path / "folder/ckptfs").mkdir(parents=True)
    assert environment.run(SHOW, shelf.shown, cwd=tmp_path / "folder") == [True, shelf.sum]


def broken(folder, kind):
    """A home of a package ckptfs that cannot work; `None` for none."""
    home = folder / "broken"
    if kind == "uninstalled":
        return None
    if kind == "older":
        (home / "ckptfs/shims").mkdir(parents=True)
        (home / "ckptfs/__init__.py").write_text("")
        return home
    shutil.copytree(Path(HOME) / "ckptfs", home / "ckptfs", ignore=shutil.ignore_patterns("__pycache__"))
    if kind == "no loader":
        shutil.rmtree(home / "ckptfs/load")
        return home
    if kind == "fails":
        (home / "ckptfs/shims/environment.py").write_text("raise RuntimeError('broken')")
        return home
    [extension] = (home / "ckptfs").glob("_ckptfs*.so")
    extension.write_bytes(b"for another machine" if kind == "another machine" else b"")
    return home


@pytest.mark.parametrize("kind", ["uninstalled", "older", "fails", "another machine", "no loader"])
def test_a_package_that_cannot_work_is_silent_and_harmless(tmp_path, shelf, kind):
    environment = Environment(tmp_path / "env").enable()
    environment.see(broken(tmp_path, kind))
    for path in (shelf.shown, shelf.plain):
        assert environment.run(SHOW, path) == [False, shelf.sum]


@pytest.mark.parametrize("fault", ["RuntimeError('no luck')", "_ckptfs.PanicException('no luck')"])
def test_a_failing_loader_leaves_the_call_to_the_original(environment, shelf, fault):
    code = LOAD + f"""
import ckptfs, ckptfs.load.safe_open
from ckptfs import _ckptfs
def fails(*given, **how): raise {fault}
ckptfs.safe_open.__init__ = fails
loaded = load(sys.argv[1])
print(json.dumps([*loaded, ckptfs.stats()["originals"]]))
"""
    done = environment.start("-c", code, shelf.shown)
    # `numpy.load_file` opens the file once more.
    assert json.loads(done.stdout) == [False, shelf.sum, 2], done.stderr
    assert done.stderr.count("left to safetensors.safe_open") == 1


def test_a_daemon_that_was_killed_raises_what_the_original_raises(environment, shelf, tmp_path):
    mounts = Mounts(find_binary(), tmp_path)
    try:
        mount = mounts(shelf.source)
        mount.kill()
        shown = environment.start("-c", SHOW, mount / "model/model.safetensors").stderr.splitlines()
        switched_off = environment.start("-c", SHOW, mount / "model/model.safetensors", CKPTFS_DISABLE="1")
        assert shown[-1] == switched_off.stderr.splitlines()[-1]
    finally:
        mounts.end()


def test_a_user_site_can_have_it(tmp_path, shelf):
    environment = Environment(tmp_path / "env")
    # Environments look there only with the packages of the system.
    config = environment.folder / "pyvenv.cfg"
    config.write_text(config.read_text().replace("include-system-site-packages = false", "include-system-site-packages = true"))
    where = {"PYTHONUSERBASE": str(tmp_path / "user")}
    done = environment.command("enable", "--user", **where)
    assert done.returncode == 0 and str(tmp_path / "user") in done.stdout, done
    assert environment.run(SHOW, shelf.shown, **where) == [True, shelf.sum]
    assert environment.run(SHOW, shelf.shown) == [False, shelf.sum]
    assert environment.command("disable", **where).returncode == 0
    assert environment.run(SHOW, shelf.shown, **where) == [False, shelf.sum]


def test_torch_load_maps_sources_of_virtual_files_and_kept_pickles_as_shown(environment, tmp_path):
    (tmp_path / "source").mkdir()
    for name in ("kept.bin", "model.bin"):
        torch.save({"a": torch.arange(5000)}, tmp_path / "source" / name)
    code = """
import json, sys, torch
folder = sys.argv[1]
kept = torch.load(folder + "/kept.bin", mmap=True)["a"]
before = [name for name in sys.modules if name.startswith("ckptfs")]
shown = torch.load(folder + "/model.safetensors", mmap=True)["a"]
mapped = {line.split()[-1] for line in open("/proc/self/maps") if line.rstrip().endswith(".bin")}
print(json.dumps([int(kept.sum()), int(shown.sum()), sorted(mapped), before]))
"""
    mounts = Mounts(find_binary(), tmp_path)
    try:
        mount = mounts(tmp_path / "source", "--keep", "kept.bin")
        mapped = sorted([str(mount / "kept.bin"), str(tmp_path / "source/model.bin")])
        assert environment.run(code, mount.point) == [12497500, 12497500, mapped, []]
    finally:
        mounts.end()


def test_the_startup_file_of_interactive_sessions_has_it(environment, shelf, tmp_path):
    (tmp_path / "startup.py").write_text(f"import sys\nsys.argv[1:] = [{str(shelf.shown)!r}]\n{SHOW}")
    done = environment.start("-i", "-c", "", PYTHONSTARTUP=str(tmp_path / "startup.py"))
    assert done.returncode == 0
    # Python runs that file only where it reads commands itself.
    import subprocess

    done = subprocess.run([environment.python, "-i"], input="", text=True, capture_output=True,
                          env={"PYTHONSTARTUP": str(tmp_path / "startup.py")})  # fmt: skip
    assert json.loads(done.stdout.splitlines()[0]) == [True, shelf.sum], done.stderr


def test_the_package_of_the_tests_is_not_enabled():
    # Other tests compare originals with ours.
    from ckptfs import enable

    assert enable.describe()[1] == "ckptfs enable" and ckptfs.stats
