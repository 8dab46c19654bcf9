"""`prefetch` hands every tensor out once, in any order, and ends when it is closed."""

import gc
import os
import shutil
import signal
import subprocess
import threading

import ckptfs
import pytest
import torch

import preloaded
from ckptfs.load import prefetch
from compare import check_same
from samples import write_all

Refused = ckptfs.SafetensorError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("samples")
    write_all(folder, 8)
    return folder


@pytest.fixture(params=["sharded", "loose/strided.pt"])
def file(folder, request):
    with ckptfs.safe_open(folder / request.param, "pt") as file:
        yield file


def test_every_tensor_is_delivered_once_by_name_or_in_order(file):
    expected = file.get_tensors()
    with file.prefetch() as loader:
        assert loader.names() == file.offset_keys() and len(loader) == len(expected)
        last = loader.names()[-1]
        got = {last: loader.take(last)}
        rest = dict(loader)
        assert last not in rest and dict(loader) == {}
        check_same(got | rest, expected)
        with pytest.raises(Refused, match="already delivered"):
            loader.take(last)


def test_a_plan_chooses_tensors_and_rows(folder):
    with ckptfs.safe_open(folder / "loose/strided.pt", "pt", backend="pread") as file:
        rows = {"turned": slice(3, 9), "cube": None, "whole": slice(-2, None), "columns": slice(4, 4)}
        with file.prefetch(rows, device="cpu", threads=2) as loader:
            assert set(loader.names()) == set(rows)
            got = {name: loader.take(name) for name in reversed(loader.names())}
            with pytest.raises(Refused, match="not in the prefetch plan"):
                loader.take("stepped")
        expected = {name: file.get_tensor(name)[at or slice(None)] for name, at in rows.items()}
        check_same(got, expected)


@pytest.mark.parametrize(("plan", "words"), [
    ({"nope": None}, "does not contain"), ({}, "selects no tensors"), ({3: None}, "must be tensor names"),
    ({"turned": slice(0, 3, 2)}, "step 1"), ({"turned": 3}, "None or a slice"),
    ({"turned": slice(0, 10_000)}, "out of range"), ({"turned": slice(0, 3, 0)}, "invalid prefetch plan"),
])  # fmt: skip
def test_plans_that_mean_nothing_are_refused(folder, plan, words):
    with ckptfs.safe_open(folder / "loose/strided.pt", "pt") as file:
        with pytest.raises(Refused, match=words):
            file.prefetch(plan)


def test_prefetch_is_refused_for_numpy(folder):
    with ckptfs.safe_open(folder / "sharded", "np") as file:
        with pytest.raises(Refused, match='framework="pt"'):
            file.prefetch()


def test_it_outlives_its_handle_and_tensors_outlive_it(file):
    expected = file.get_tensors()
    loader = file.prefetch()
    file.close()
    got = dict(loader)
    loader.close()
    check_same(got, expected)


def test_a_closed_loader_delivers_no_more(file):
    loader = file.prefetch()
    stream = iter(loader)
    next(stream)
    loader.close()
    with pytest.raises(Refused, match="closed"):
        next(stream)
    with pytest.raises(Refused, match="closed"):
        loader.take(loader.names()[0])


def test_closing_wakes_waiting_readers(folder):
    with ckptfs.safe_open(folder / "sharded", "pt") as file:
        for _ in range(30):
            loader, told = file.prefetch(), []

            def drain():
                try:
                    told.append(len(list(loader)))
                except Refused as refused:
                    told.append(str(refused))

            waiting = threading.Thread(target=drain)
            waiting.start()
            loader.close()
            waiting.join()
            assert told[0] == len(loader) or "closed" in told[0]


def test_a_failure_reaches_the_waiting_reader(tmp_path):
    torch.save({"a": torch.ones(9), "b": torch.ones(100_000)}, tmp_path / "x.pt")
    with ckptfs.safe_open(tmp_path / "x.pt", "pt") as file:
        data = (tmp_path / "x.pt").read_bytes()
        (tmp_path / "x.pt").write_bytes(data[: len(data) // 2])
        with pytest.raises(Refused, match="changed on disk|x.pt"):
            file.prefetch().take("b")


def test_the_report_belongs_to_the_thread_that_took_the_last_tensor(file):
    with file.prefetch() as loader:
        size = sum(tensor.nbytes for _, tensor in loader)
    assert ckptfs.last_report() is loader.report and loader.report.bytes == size


def test_a_replaced_file_is_read_through_the_open_handle(folder, tmp_path):
    shutil.copy(folder / "loose/strided.pt", tmp_path / "x.pt")
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "there")
    # Taken as text, the path leads to a file beside the link.
    path = f"{tmp_path}/link/../x.pt"
    with ckptfs.safe_open(path, "pt") as file:
        expected = file.get_tensors()
        os.chmod(path, 0o600)
        check_same(dict(file.prefetch()), expected)
        os.unlink(path)
        check_same(dict(file.prefetch()), expected)


def test_a_handle_can_be_closed_while_prefetches_begin(folder):
    faults = []

    def begin(file):
        try:
            while True:
                file.prefetch(threads=1).close()
        except Refused:
            pass
        except BaseException as fault:
            faults.append(fault)

    for _ in range(20):
        file = ckptfs.safe_open(folder / "loose/strided.pt", "pt")
        threads = [threading.Thread(target=begin, args=(file,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        file.close()
        for thread in threads:
            thread.join()
    assert not faults


def test_a_forked_process_is_not_blocked_by_a_loaders_lock(file):
    loader, held, done = file.prefetch(), threading.Event(), threading.Event()

    def hold():
        with loader._state.changed:
            held.set()
            done.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        try:
            with pytest.raises(Refused, match="in the process that made it"):
                loader.take(loader.names()[0])
            loader.close()
            os._exit(0)
        finally:
            os._exit(1)
    done.set()
    holder.join()
    loader.close()
    assert os.waitpid(child, 0)[1] == 0


def test_a_program_ends_while_it_loads(tmp_path):
    torch.save({str(n): torch.ones(1 << 22) for n in range(8)}, tmp_path / "x.pt")
    script = "import sys, ckptfs; loader = ckptfs.safe_open(sys.argv[1], 'pt').prefetch()"
    for _ in range(5):
        command = preloaded.command("-c", script, tmp_path / "x.pt")
        done = subprocess.run(command, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")


@pytest.fixture
def batches_that_wait(folder, monkeypatch):
    """Makes batches of one tensor, of which the second waits. Yields an event for its beginning, and a function that
    lets it go on and returns how many were read."""
    read, started, go, before = [], threading.Event(), threading.Event(), set(threading.enumerate())

    def load_batch(batch, *how):
        if read:
            started.set()
            go.wait(60)
        read.append(len(batch))
        return original(batch, *how)

    original = prefetch.load_batch
    monkeypatch.setattr(prefetch, "load_batch", load_batch)
    monkeypatch.setattr(prefetch, "_BATCH_BYTES", 1)

    def end():
        go.set()
        for thread in set(threading.enumerate()) - before:
            thread.join(60)
            assert not thread.is_alive()
        return len(read)

    yield started, end
    end()


def dropped(file):
    file.prefetch()


def dropped_by_a_generator(file):
    next(iter(file.prefetch()))


def dropped_by_a_loop(file):
    for _ in file.prefetch():
        break


def dropped_by_an_exception(file):
    with pytest.raises(ZeroDivisionError):
        for _ in file.prefetch():
            raise ZeroDivisionError


def dropped_in_a_cycle(file):
    loader = file.prefetch()
    loader.itself = loader
    del loader
    gc.collect()


@pytest.mark.parametrize("drop", [
    dropped, dropped_by_a_generator, dropped_by_a_loop, dropped_by_an_exception, dropped_in_a_cycle,
])  # fmt: skip
def test_a_dropped_loader_reads_no_more(folder, batches_that_wait, drop):
    _, end = batches_that_wait
    with ckptfs.safe_open(folder / "loose/strided.pt", "pt") as file:
        drop(file)
        gc.collect()
        assert end() <= 2 < len(file.keys())


def test_a_loader_with_a_live_generator_goes_on(file):
    stream = iter(file.prefetch())
    gc.collect()
    check_same(dict(stream), file.get_tensors())


@pytest.mark.parametrize("ends", ["closed", "dropped", "failed"])
def test_a_load_that_ends_early_holds_nothing(folder, batches_that_wait, monkeypatch, ends):
    started, end = batches_that_wait
    slow, count = prefetch.load_batch, iter(range(100))

    def load_batch(*how):
        if ends == "failed" and next(count):
            raise RuntimeError("no more")
        return slow(*how)

    monkeypatch.setattr(prefetch, "load_batch", load_batch)
    gc.collect()
    gc.disable()
    try:
        before = len(os.listdir("/proc/self/fd"))
        with ckptfs.safe_open(folder / "loose/strided.pt", "pt") as file:
            loader = file.prefetch()
            if ends == "failed":
                end()
                with pytest.raises(Refused, match="no more"):
                    loader.take(loader.names()[-1])
            else:
                assert started.wait(60)
            if ends == "closed":
                loader.close()
            del loader
        del file
        end()
        assert len(os.listdir("/proc/self/fd")) == before
    finally:
        gc.enable()


def test_a_thread_that_cannot_start_is_an_error(file, monkeypatch):
    def start(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        with pytest.raises(Refused, match="refuses a thread") as refused:
            file.prefetch()
    assert isinstance(refused.value, RuntimeError) and "ulimit -u" in refused.value.__notes__[0]
    check_same(dict(file.prefetch()), file.get_tensors())
