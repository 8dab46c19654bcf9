"""A mount of a Python program ends with its block, its `close` or the interpreter, and leaves nothing behind however
that happens."""

import os
import signal
import subprocess
import sys
import tempfile

import ckptfs
import pytest
from ckptfs import child_process

from mounts import has_ended, is_mounted, python, until

Refused = ckptfs.SafetensorError


def unmount(path):
    """Unmounts as another program does. A test that lists all mounts may look at this one meanwhile."""
    until("it is unmounted", lambda: subprocess.run(["umount", path]).returncode == 0)


def test_an_exception_in_the_block_ends_the_mount_and_goes_on(source, left):
    class Own(Exception):
        pass

    with pytest.raises(Own), ckptfs.mount(source[0]):
        raise Own
    assert not left()


def test_closing_twice_is_closing_once(source, point):
    mount = ckptfs.mount(source[0], point)
    mount.close()
    with ckptfs.mount(source[0], point):
        # It is another program's by now.
        mount.close()
        assert is_mounted(point)
    assert "closed" in repr(mount)
    with pytest.raises(Refused, match="was closed"), mount:
        pass


def test_a_file_that_is_open_goes_on_being_read(source, left):
    folder, expected = source
    mount = ckptfs.mount(folder)
    with mount as path:
        virtual_file = (path / "llama/model.safetensors").read_bytes()
        file = (path / "llama/model.safetensors").open("rb", buffering=0)
    assert not path.exists() and not left()
    with file:
        assert file.read(len(virtual_file) + 1) == virtual_file
        assert not has_ended(mount.pid)
    until("its daemon has ended", lambda: has_ended(mount.pid))
    assert len(virtual_file) > 100 * 100 * 4 * len(expected)


def test_a_daemon_that_was_killed_leaves_nothing(source, left):
    mount = ckptfs.mount(source[0])
    with mount as path:
        os.kill(mount.pid, signal.SIGKILL)
        until("its daemon has ended", lambda: has_ended(mount.pid))
        [info] = [info for info in ckptfs.mounts() if info.mountpoint == str(path)]
        assert (info.state, info.pid, info.stats) == ("dead", None, None)
    assert not path.exists() and not left()


def test_a_daemon_that_is_stuck_is_not_waited_for(source, left):
    mount = ckptfs.mount(source[0])
    os.kill(mount.pid, signal.SIGSTOP)
    try:
        [info] = [info for info in ckptfs.mounts() if info.mountpoint == str(mount.path)]
        assert (info.state, info.pid) == ("not-answering", None)
        mount.close()
        assert not left()
    finally:
        os.kill(mount.pid, signal.SIGKILL)


def test_another_mount_with_the_number_of_a_closed_one_is_ignored(source, left, point):
    mount = ckptfs.mount(source[0])
    os.kill(mount.pid, signal.SIGSTOP)
    try:
        subprocess.run(["umount", "-l", mount.path], check=True)
        subprocess.run(["mount", "-t", "tmpfs", "none", point], check=True)
        mount.close()
        unmount(point)
        assert not left()
    finally:
        os.kill(mount.pid, signal.SIGKILL)


def test_a_mount_that_was_unmounted_closes(source, left):
    with ckptfs.mount(source[0]) as path:
        unmount(path)
        assert not is_mounted(path)
    assert not path.exists() and not left()


def test_files_in_the_directory_of_an_unmounted_one_stay(source, left):
    with pytest.raises(ValueError), ckptfs.mount(source[0]) as path:
        unmount(path)
        (path / "note").write_text("a")
        raise ValueError
    assert (path / "note").read_text() == "a"


def test_another_mount_in_its_place_stays(source, point):
    mount = ckptfs.mount(source[0], point)
    subprocess.run([sys.executable, "-m", "ckptfs", "unmount", point], check=True)
    until("its daemon has ended", lambda: has_ended(mount.pid))
    subprocess.run([sys.executable, "-m", "ckptfs", "mount", source[0], point], check=True)
    mount.close()
    assert is_mounted(point)


def test_a_mount_over_it_stays(source, point):
    mount = ckptfs.mount(source[0], point)
    subprocess.run(["mount", "-t", "tmpfs", "none", point], check=True)
    with pytest.raises(Refused, match="another mount lies over it"):
        mount.close()
    with pytest.raises(KeyError) as raised, mount:
        raise KeyError
    assert "another mount lies over it" in raised.value.__notes__[0]
    unmount(point)
    mount.close()
    assert not is_mounted(point)


def test_a_mount_of_a_mount_ends_with_the_program_too(source, left):
    script = "import ckptfs, sys\na = ckptfs.mount(sys.argv[1])\nb = ckptfs.mount(a.path / 'llama')\n" \
             "print(*b.path.iterdir())"
    done = python("-c", script, source[0])
    assert done.returncode == 0 and not done.stderr and "model.safetensors" in done.stdout
    assert not left()


def test_a_forked_child_that_ends_leaves_the_mount(source, left):
    script = "import ckptfs, os, sys\n" \
             "with ckptfs.mount(sys.argv[1]) as path:\n" \
             "    child = os.fork()\n" \
             "    if not child: sys.exit(3)\n" \
             "    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3\n" \
             "    assert path.is_mount() and (path / 'llama/model.safetensors').is_file()\n" \
             "    print('there')\n"
    done = python("-c", script, source[0])
    assert (done.stdout, done.stderr, done.returncode) == ("there\n", "", 0)
    assert not left()


@pytest.mark.parametrize("ending", ["", "1 / 0", "sys.exit(4)", "os.kill(os.getpid(), signal.SIGINT)"])
def test_an_open_mount_ends_with_the_interpreter(ending, source, left):
    script = "import ckptfs, os, signal, sys\n" \
             "mount = ckptfs.mount(sys.argv[1])\n" \
             "file = open(mount.path / 'llama/model.safetensors', 'rb')\n" \
             f"assert mount.path.is_mount(); print(mount.pid, flush=True)\n{ending}"
    done = python("-c", script, source[0])
    assert done.stdout and not left()
    until("its daemon has ended", lambda: has_ended(int(done.stdout)))


@pytest.mark.parametrize("place", ["mnt", None])
def test_ctrl_c_when_it_is_mounted_already_leaves_no_mount(place, source, point, left, monkeypatch):
    run = child_process.run

    def interrupted(*words, **how):
        done = run(*words, **how)
        if words[0] == "mount":
            assert left()
            raise KeyboardInterrupt
        return done

    monkeypatch.setattr(child_process, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ckptfs.mount(source[0], point if place else None)
    assert not left()


@pytest.mark.parametrize("place", ["mnt", None])
def test_ctrl_c_when_its_daemon_unmounts_by_itself_leaves_no_mount(place, source, point, left, monkeypatch):
    run = child_process.run

    def interrupted(*words, **how):
        if words[0] == "unmount":
            unmount(words[-1])
        done = run(*words, **how)
        assert words[0] == "mount"
        raise KeyboardInterrupt

    monkeypatch.setattr(child_process, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ckptfs.mount(source[0], point if place else None)
    assert not left()


def test_ctrl_c_when_its_daemon_mounts_later_leaves_no_mount(source, left, monkeypatch):
    run, rmdir, late = child_process.run, os.rmdir, []

    def interrupted(*words, **how):
        if words[0] == "mount":
            late.append(words)
            raise KeyboardInterrupt
        return run(*words, **how)

    def mount_first(path):
        if late:
            run(*late.pop())
            assert is_mounted(path)
        rmdir(path)

    monkeypatch.setattr(child_process, "run", interrupted)
    monkeypatch.setattr(os, "rmdir", mount_first)
    with pytest.raises(KeyboardInterrupt):
        ckptfs.mount(source[0])
    assert not late and not left()


def test_ctrl_c_when_its_directory_is_made_leaves_none(source, left, monkeypatch):
    make = tempfile.mkdtemp

    def interrupted(**how):
        path = make(**how)
        signal.raise_signal(signal.SIGINT)
        return path

    monkeypatch.setattr(tempfile, "mkdtemp", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ckptfs.mount(source[0])
    assert not left()


@pytest.mark.parametrize("place", ["mnt", None])
def test_signals_while_the_command_is_started_leave_no_mount(place, source, point, left, monkeypatch):
    fork, children, handled = subprocess._fork_exec, [], []

    def interrupted(*words):
        children.append(fork(*words))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
            signal.raise_signal(number)
        return children[-1]

    def expire(*_):
        raise TimeoutError

    monkeypatch.setattr(subprocess, "_fork_exec", interrupted)
    handlers = {signal.SIGTERM: lambda number, _: handled.append(number), signal.SIGALRM: expire}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        with pytest.raises((KeyboardInterrupt, TimeoutError)):
            ckptfs.mount(source[0], point if place else None)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert {number: signal.getsignal(number) for number in handlers} == handlers
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert handled == [signal.SIGTERM]
    assert all(map(has_ended, children)) and not left()


@pytest.mark.parametrize("place", ["mnt", None])
def test_ctrl_c_while_it_is_mounted_leaves_no_mount(place, source, point, left):
    script = "import ckptfs, signal, sys, threading\n" \
             "timer = threading.Timer(float(sys.argv[3]), signal.raise_signal, [signal.SIGINT])\n" \
             "timer.start()\n" \
             "try:\n    ckptfs.mount(sys.argv[1], sys.argv[2] or None).close()\n    timer.join()\n" \
             "except KeyboardInterrupt: print('interrupted')\n"
    for delay in (0.05, 0.1, 0.15):
        done = python("-c", script, source[0], point if place else "", delay)
        assert (done.returncode, done.stdout, done.stderr) == (0, "interrupted\n", "")
        # A daemon without a caller to report to unmounts itself.
        until("nothing is left", lambda: not left(), seen=left)
