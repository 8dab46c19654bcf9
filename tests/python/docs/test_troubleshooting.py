"""Each symptom of docs/troubleshooting.md is caused here: the messages are those of the page, and its remedies work.

The page's /srv is a directory of each test's own, which every user may enter.
"""

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from mounts import PATIENCE, Mounts, python
from program import DONE, FAILED, REFUSED, REPOSITORY, USAGE, Ckptfs, find_binary
from training import save_whole

PAGE = (REPOSITORY / "docs/troubleshooting.md").read_text()

TENSORS = {f"layer{n}.weight": torch.full((256, 1024), float(n)) for n in range(8)}

AS_NOBODY = "setpriv --reuid 65534 --regid 65534 --clear-groups"


@pytest.fixture
def srv():
    """A folder with `models/llama`, a pickle, and the program."""
    folder = Path(tempfile.mkdtemp(prefix="ckptfs-troubleshooting-"))
    folder.chmod(0o755)
    (folder / "models/llama").mkdir(parents=True)
    (folder / "models/llama/config.json").write_text("{}")
    torch.save(TENSORS, folder / "models/llama/pytorch_model.bin")
    shutil.copy(find_binary(), folder / "ckptfs")
    mounts = Mounts(find_binary(), folder)
    yield Srv(folder, mounts)
    mounts.end()
    subprocess.run(["umount", "-lq", folder / "mnt"], check=False)
    shutil.rmtree(folder)


class Srv:
    def __init__(self, folder, mounts):
        self.folder, self.mounts, self.ckptfs = folder, mounts, Ckptfs(find_binary())
        self.models, self.point = folder / "models", folder / "mnt"
        self.pickle = self.models / "llama/pytorch_model.bin"
        self.point.mkdir()

    def mount(self, *options):
        return self.mounts(self.models, *options, at=self.point)

    def is_on_page(self, text):
        """Whether the page has every line of an output, with this folder as /srv and any number for a process's."""
        text = text.replace(str(self.folder), "/srv")
        lines = {re.sub(r"\d{3,}", "PID", line.strip()) for line in PAGE.splitlines()}
        missing = [line for line in text.splitlines() if re.sub(r"\d{3,}", "PID", line.strip()) not in lines]
        assert text and not missing, missing
        return True

    def last_error(self):
        (mount,) = [each for each in self.ckptfs("status", "--json").json() if each["mountpoint"] == str(self.point)]
        return mount["stats"]["last_errors"][0]

    def in_namespace(self, script):
        """Runs a script of root with mounts of its own. `$1` is the folder, `ckptfs` and `nobody` are commands."""
        prelude = f"""
            cd "$1"; PATH=$1:$PATH; nobody() {{ {AS_NOBODY} "$@"; }}
            device() {{ rm -f fuse; mknod fuse c 10 229; chmod "$1" fuse; mount --bind fuse /dev/fuse; }}
        """
        command = ["unshare", "-m", "bash", "-c", prelude + script, "bash", self.folder]
        return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)


def errno_line(error):
    """As Python prints it, without the path."""
    return f"OSError: [Errno {error.errno}] {error.strerror}"


def test_a_changed_source_is_eio_until_the_next_open(srv):
    mount = srv.mount()
    shown = mount / "llama/model.safetensors"
    with open(shown, "rb", buffering=0) as file:
        os.truncate(srv.pickle, 4_000_000)
        with pytest.raises(OSError) as caught:
            os.pread(file.fileno(), 100, 7 << 20)
        assert errno_line(caught.value) in PAGE
        error = srv.last_error()
        assert error["errno"] == "EIO" and error["path"] == str(shown)
        assert srv.is_on_page(f"{error['message']}\nwhat to do: {error['remedy']}")
        torch.save(TENSORS, srv.pickle)
        with pytest.raises(OSError):
            os.pread(file.fileno(), 100, 7 << 20)
    assert np.array_equal(load_file(shown)["layer7.weight"], TENSORS["layer7.weight"].numpy())


def test_a_stale_mount_is_removed_by_unmount_or_mount(srv):
    mount = srv.mount()
    for remedy in (["unmount", srv.point], ["mount", srv.models, srv.point]):
        mount.kill()
        done = subprocess.run(["ls", srv.point], capture_output=True, text=True, env={"LC_ALL": "C", **os.environ})
        assert srv.is_on_page(done.stderr)
        assert srv.ckptfs(*remedy).code == DONE
        mount = srv.mount() if remedy[0] == "unmount" else mount
    assert os.listdir(srv.point) == ["llama"]


def test_a_stuck_mount_is_detached(srv):
    mount = srv.mount()
    mount.stop()
    outcome = srv.ckptfs("ls", srv.point)
    assert outcome.code == FAILED and srv.is_on_page(outcome.stderr)
    assert "NOT ANSWERING" in srv.ckptfs("status").stdout and "NOT ANSWERING" in PAGE
    outcome = srv.ckptfs("unmount", "--lazy", srv.point)
    # Where the kernel has dropped the filesystem already, killing the daemon is advised, too.
    assert outcome.code == DONE and srv.is_on_page(outcome.stdout.partition(", kill -KILL")[0])


def test_users_without_rights_get_the_messages(srv):
    for device, command, prepare in [
        ("600", 'nobody ckptfs mount models mnt', "chown 65534 mnt"),
        ("666", 'nobody ckptfs mount models mnt', "true"),
        ("666", 'nobody ckptfs mount --allow-other models mnt', "chown 65534 mnt; mount --bind /dev/null /etc/fuse.conf"),
        ("666", f'{AS_NOBODY} --no-new-privs ckptfs mount models mnt', "chown 65534 mnt"),
    ]:
        os.chown(srv.point, 0, 0)
        done = srv.in_namespace(f"{prepare}; device {device}; {command}")
        assert done.returncode == FAILED and srv.is_on_page(done.stderr), done
    script = 'chown 65534 mnt; device 666; nobody ckptfs mount -q models mnt; LC_ALL=C ls "$1/mnt"; umount mnt'
    assert srv.is_on_page(srv.in_namespace(script).stderr)


def test_a_user_cannot_unmount_without_the_table_of_mounts(srv):
    os.chown(srv.point, 65534, 65534)
    script = """
        mkdir etc; mount -t tmpfs none etc; cp -a /etc/. etc; mount --bind etc /etc; rm /etc/mtab
        device 666; nobody ckptfs mount -q models mnt; nobody ckptfs unmount mnt; code=$?; ckptfs unmount mnt; exit $code
    """
    done = srv.in_namespace(script)
    assert done.returncode == FAILED and srv.is_on_page(done.stderr), done


def test_a_link_out_of_the_source_is_denied_without_the_option(srv):
    srv.pickle.rename(srv.folder / "elsewhere.bin")
    (srv.models / "pytorch_model.bin").symlink_to("../elsewhere.bin")
    mount = srv.mount()
    done = subprocess.run(["cat", mount / "pytorch_model.bin"], capture_output=True, text=True)
    assert srv.is_on_page(done.stderr) and srv.last_error()["errno"] == "EACCES"
    mount.unmount()
    assert "model.safetensors" in os.listdir(srv.mount("--follow-symlinks").point)


def test_a_mount_is_read_only_and_busy(srv):
    mount = srv.mount()
    done = subprocess.run(["touch", srv.point / "new"], capture_output=True, text=True)
    assert srv.is_on_page(done.stderr)
    with open(mount / "llama/model.safetensors", "rb"):
        for command in (["umount"], ["fusermount3", "-u"]):
            done = subprocess.run([*command, srv.point], capture_output=True, text=True)
            assert srv.is_on_page(done.stderr)
        outcome = srv.ckptfs("unmount", srv.point)
        assert outcome.code == FAILED and srv.is_on_page(outcome.stderr)
        assert srv.ckptfs("unmount", "--lazy", srv.point).code == DONE


def test_what_is_not_shown_has_the_reasons_of_the_page(srv):
    os.truncate(srv.pickle, 4_000_000)
    listed = srv.ckptfs("ls", "-r", srv.models).stdout
    assert srv.is_on_page(listed[listed.index(f"{srv.models}/llama:") :])
    torch.save(torch.nn.Linear(2, 2), srv.pickle)
    shutil.copy(srv.pickle, srv.models / "llama/optimizer.pt")
    assert "holds a Python object of class" in srv.ckptfs("ls", srv.models / "llama").stdout
    torch.save(TENSORS, srv.pickle)
    save_file({"a": np.ones(3)}, srv.models / "llama/model.safetensors")
    listed = srv.ckptfs("ls", srv.models / "llama").stdout
    (srv.models / "llama/model.safetensors").rename(srv.models / "llama/model-00001-of-00002.safetensors")
    srv.pickle.unlink()
    listed += srv.ckptfs("ls", srv.models / "llama").stdout
    for words in [
        "a real model.safetensors lies beside it",
        "kept as it is: matches optimizer* (training state)",
        "incomplete: 1 of 2 shards is missing",
    ]:
        assert words in listed and f"`{words}`" in PAGE, listed
    assert "`holds a Python object of class`" in PAGE


def test_what_is_no_checkpoint_has_the_messages_of_the_page(srv):
    outcome = srv.ckptfs("inspect", "meta-llama/Llama-3")
    assert outcome.code == FAILED and srv.is_on_page(outcome.stderr)
    for content in [
        "<!DOCTYPE html><html></html>",
        "version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 3\n",
    ]:
        srv.pickle.write_text(content)
        outcome = srv.ckptfs("inspect", srv.pickle)
        assert outcome.code == REFUSED and srv.is_on_page(outcome.stderr)
    gguf = srv.models / "net.gguf"
    gguf.write_bytes(b"GGUF\x03\0\0\0{")
    outcome = srv.ckptfs("inspect", gguf)
    assert outcome.code == REFUSED and srv.is_on_page(outcome.stderr)


def test_an_incomplete_training_folder_has_the_messages_of_the_page(srv):
    folder = srv.models / "dcp"
    tensors = {"a": torch.ones(2), "b": torch.ones(3)}
    save_whole(folder, {"model": tensors}, thread_count=2)
    (folder / "__0_1.distcp").unlink()
    outcome = srv.ckptfs("inspect", folder)
    assert outcome.code == REFUSED and srv.is_on_page(outcome.stderr)
    (folder / ".metadata").unlink()
    outcome = srv.ckptfs("inspect", folder)
    assert outcome.code == REFUSED and srv.is_on_page(outcome.stderr)


@pytest.mark.parametrize("state", ["a file", "no file", "pointers"])
def test_a_mount_without_virtual_files_says_so(srv, state):
    srv.pickle.unlink()
    if state == "a file":
        save_file({"a": np.ones(3)}, srv.models / "llama/model.safetensors")
    if state == "pointers":
        for name in ("model.safetensors", "pytorch_model.bin"):
            (srv.models / "llama" / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    note = srv.ckptfs("mount", srv.models, srv.point).stderr
    words = note.partition("note: ")[2].partition(";")[0].strip().replace(str(srv.models), "…")
    assert f"`{words}`" in PAGE, note


def test_originals_are_hidden_unless_asked_for(srv):
    mount = srv.mount()
    done = subprocess.run(["cat", srv.point / "llama/pytorch_model.bin"], capture_output=True, text=True)
    assert srv.is_on_page(done.stderr)
    assert "hidden  pytorch_model.bin" in srv.ckptfs("ls", srv.models / "llama").stdout
    mount.unmount()
    for options in (["--show-originals"], ["--keep", "*.bin"]):
        mount = srv.mount(*options)
        assert "pytorch_model.bin" in os.listdir(srv.point / "llama")
        mount.unmount()


def test_a_removed_source_is_reported(srv):
    srv.mount()
    shutil.rmtree(srv.models)
    assert os.listdir(srv.point) == []
    assert "REMOVED" in srv.ckptfs("status").stdout and "`REMOVED`" in PAGE


def test_a_missing_device_is_named(srv):
    done = srv.in_namespace("mkdir dev; touch dev/null; mount --bind dev /dev; ckptfs mount models mnt")
    assert done.returncode == FAILED and srv.is_on_page(done.stderr)


def test_fstab_fails_as_the_page_says(srv):
    line = f"{srv.models} {srv.point}"
    hidden = "mkdir empty; mount --bind empty /usr/local/bin; PATH=/usr/sbin:/usr/bin:/sbin:/bin"
    for prepare, words, message in [
        (hidden, "fuse.ckptfs ro,allow_other", "/bin/sh: 1: ckptfs: not found"),
        (f"{hidden}; mount --bind empty /usr/sbin", "fuse.ckptfs ro", "wrong fs type, bad option, bad superblock"),
        ("true", "ckptfs ro", "unknown filesystem type 'ckptfs'"),
        ("mkdir bin; cp ckptfs bin; mount --bind bin /usr/local/bin", "fuse.ckptfs ro,memry=1G", "unknown mount option"),
    ]:
        done = srv.in_namespace(f"echo '{line} {words} 0 0' > fstab; {prepare}; /usr/bin/mount -T fstab '{srv.point}'")
        assert done.returncode != DONE and message in done.stderr, done
        assert f"`{message}`" in PAGE
        for folder in ("empty", "bin"):
            shutil.rmtree(srv.folder / folder, ignore_errors=True)


def test_limits_and_wrong_programs_have_their_messages(srv):
    done = srv.in_namespace('ulimit -n 20; ckptfs mount models mnt')
    assert "a mount needs 32 free file descriptors, and this process has fewer" in PAGE
    assert "a mount needs 32 free file descriptors, and this process has fewer" in done.stderr, done
    outcome = srv.ckptfs("run", "x.py")
    assert outcome.code == USAGE and "run: only the Python package has this command" in outcome.stderr
    assert "`run: only the Python package has this command`" in PAGE
    assert srv.ckptfs("inspect", srv.models / "llama/config.json").code == REFUSED


def test_the_repositorys_folder_is_no_package():
    env = {**os.environ, "PYTHONPATH": ""}
    done = python("-c", "import ckptfs.torch", cwd=REPOSITORY / "python", env=env)
    assert "ImportError: cannot import name '_ckptfs'" in done.stderr
    assert "`ImportError: cannot import name '_ckptfs'`" in PAGE
