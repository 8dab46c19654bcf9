"""Loads from many threads, in forked processes, closed or interrupted while they run: they are right or raise the
documented exception, and leave nothing behind."""

import os
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context

import ckptfs
import ckptfs.torch
import pytest
import torch
from safetensors.torch import save_file

from compare import check_same
from forks import in_a_fork
from samples import numbers, write_shards


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "model"
    return folder, write_shards(folder, 3, 3, 8, 500)


def test_threads_share_a_handle(model, backend):
    folder, expected = model
    with ckptfs.safe_open(folder, "pt", backend=backend) as file:
        def load(name):
            return {name: file.get_tensor(name), f"{name}[3:5]": file.get_slice(name)[3:5]}

        names = list(expected) * 4
        with ThreadPoolExecutor(8) as pool:
            for name, got in zip(names, pool.map(load, names), strict=True):
                check_same(got, {name: expected[name], f"{name}[3:5]": expected[name][3:5]})


def test_reports_are_those_of_the_thread(model):
    folder, expected = model
    names = list(expected)

    def load(count):
        ckptfs.torch.load_file(folder, names=names[:count])
        barrier.wait()
        return ckptfs.last_report().tensors

    barrier = threading.Barrier(6)
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(load, range(1, 7))) == [1, 2, 3, 4, 5, 6]


def test_closing_a_handle_while_threads_load_ends_them_with_an_error(model, backend):
    folder, expected = model
    for _ in range(20):
        file = ckptfs.safe_open(folder, "pt", backend=backend)
        begun, done = threading.Barrier(5), []

        def load():
            begun.wait()
            try:
                while True:
                    check_same(file.get_tensors(), expected)
            except ckptfs.SafetensorError as refused:
                done.append(str(refused))

        threads = [threading.Thread(target=load) for _ in range(4)]
        for thread in threads:
            thread.start()
        begun.wait()
        file.close()
        for thread in threads:
            thread.join()
        assert done == ["File is closed"] * 4


# Python warns of a fork with threads.
@pytest.mark.filterwarnings("ignore:.*fork")
def test_forks_load_whatever_other_threads_do(model, backend):
    folder, expected = model
    file = ckptfs.safe_open(folder, "pt", backend=backend)
    with ckptfs.safe_open(folder, "pt", backend=backend) as other:
        slices = [other.get_slice(name) for name in expected]
    stop = threading.Event()

    def load():
        while not stop.is_set():
            file.get_tensors()
            for part in slices:
                part[1:]

    threads = [threading.Thread(target=load) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(20):
            assert in_a_fork(lambda: [file.get_slice(name)[1] for name in expected])
            assert in_a_fork(lambda: [part[1] for part in slices])
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    check_same(file.get_tensors(), expected)


# A libc in which the registration of fork handlers takes long.
SLOW_REGISTRATION = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <unistd.h>
int __register_atfork(void (*a)(void), void (*b)(void), void (*c)(void), void *d)
{
    int (*real)(void (*)(void), void (*)(void), void (*)(void), void *) = dlsym(RTLD_NEXT, "__register_atfork");
    usleep(700 * 1000);
    return real(a, b, c, d);
}
"""

FORK_DURING_FIRST_LOAD = """
import os, signal, sys, threading, time
import ckptfs.numpy
thread = threading.Thread(target=ckptfs.numpy.load_file, args=[sys.argv[1]])
thread.start()
time.sleep(0.3)
child = os.fork()
if child == 0:
    signal.alarm(20)
    os._exit(len(ckptfs.numpy.load_file(sys.argv[1])))
thread.join()
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_child_forked_during_the_first_load_can_load(model, tmp_path):
    folder, expected = model
    (tmp_path / "slow.c").write_text(SLOW_REGISTRATION)
    library = tmp_path / "slow.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, tmp_path / "slow.c", "-ldl"], check=True)
    command = [sys.executable, "-W", "ignore", "-c", FORK_DURING_FIRST_LOAD, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "LD_PRELOAD": str(library)})
    assert done.stdout.strip() == str(len(expected)), done.stderr


def loaded(file):
    # torch itself must not calculate in a fork: its threads are not there.
    tensors = file.get_tensors()
    return {name: zlib.crc32(tensor.numpy()) for name, tensor in tensors.items()}


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_handle_goes_to_other_processes(model, backend, method):
    folder, expected = model
    with ckptfs.safe_open(folder, "pt", backend=backend) as file:
        with get_context(method).Pool(2) as pool:
            [first, second] = pool.map(loaded, [file] * 2)
        assert first == second == loaded(file)


SLOW = """
import json, os, signal, sys, threading
import ckptfs
path, size = sys.argv[1], 3 << 30
header = json.dumps({"x": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
with open(path, "wb") as file:
    file.write(len(header).to_bytes(8, "little") + header)
    file.truncate(8 + len(header) + size)

def held():
    return int(open("/proc/self/statm").read().split()[0]) * os.sysconf("SC_PAGE_SIZE")

import ckptfs.numpy
heard = []
if sys.argv[2] == "note":
    signal.signal(signal.SIGINT, lambda *_: heard.append(1))
before = held()

def interrupt():
    # From here on it reads: the memory is allocated.
    while held() < before + size:
        pass
    os.kill(os.getpid(), signal.SIGINT)

threading.Thread(target=interrupt, daemon=True).start()
try:
    tensor = ckptfs.numpy.load_file(path, backend="pread")["x"]
except KeyboardInterrupt:
    assert sys.argv[2] == "raise"
    assert ckptfs.last_report() is None
    assert held() < before + (1 << 30), "its memory stays"
    assert ckptfs.safe_open(path, "np", backend="pread").get_slice("x")[7:9].tolist() == [0, 0]
else:
    assert sys.argv[2] == "note" and heard == [1] and tensor.nbytes == size
"""


@pytest.mark.parametrize("what", ["raise", "note"])
def test_ctrl_c_ends_a_load_unless_the_program_handles_it(tmp_path, what):
    command = [sys.executable, "-c", SLOW, str(tmp_path / "x.safetensors"), what]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_other_threads_go_on_while_one_loads(tmp_path):
    save_file({"x": numbers(1, 4000, 5000)}, tmp_path / "x.safetensors")
    file = ckptfs.safe_open(tmp_path / "x.safetensors", "pt", backend="pread")
    counted, stop = [0], threading.Event()

    def count():
        while not stop.is_set():
            counted[0] += 1
            # Releases the interpreter, and gets it back only when the other thread releases it.
            time.sleep(0)

    thread = threading.Thread(target=count)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        thread.start()
        before = counted[0]
        file.get_tensor("x")
        assert counted[0] > before + 1
    finally:
        stop.set()
        sys.setswitchinterval(interval)
        thread.join()


WITHOUT_THREADS = """
import os, resource, sys, threading
import ckptfs.numpy
resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
os.setuid(4002)
try:
    threading.Thread(target=print).start()
    sys.exit("the system starts threads all the same")
except RuntimeError:
    pass
loaded = ckptfs.numpy.load_file(sys.argv[1], num_threads=8)
print(sorted((name, array.sum().item()) for name, array in loaded.items()))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user, for whom threads are counted")
def test_where_the_system_starts_no_thread_it_loads_all_the_same():
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        for n in range(2):
            tensors = {f"{n}.{m}": torch.full((1 << 20,), float(n + m)) for m in range(3)}
            save_file(tensors, f"{folder}/model-{n + 1:05}-of-00002.safetensors")
            os.chmod(f"{folder}/model-{n + 1:05}-of-00002.safetensors", 0o644)
        command = [sys.executable, "-c", WITHOUT_THREADS, folder]
        done = subprocess.run(command, capture_output=True, text=True)
        expected = [(f"{n}.{m}", float(n + m) * (1 << 20)) for n in range(2) for m in range(3)]
        assert done.stdout.strip() == str(expected), done.stderr
