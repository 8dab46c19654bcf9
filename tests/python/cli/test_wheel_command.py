"""The wheel alone brings the command. It mounts in the background, hears Ctrl-C, and imports neither torch nor numpy.
"""

import json
import logging
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from ckptfs.torch import load_file

from compare import check_same
from mounts import Mount, is_mounted, until
from program import DONE, FAILED, REFUSED, USAGE, Ckptfs
from samples import write_shards


@pytest.fixture(scope="session")
def command(tmp_path_factory):
    """The script that pip makes of the wheel's entry point."""
    script = tmp_path_factory.mktemp("bin") / "ckptfs"
    script.write_text(f"#!{sys.executable}\nimport sys\nfrom ckptfs.cli import main\nsys.exit(main())\n")
    script.chmod(0o755)
    return script


@pytest.fixture
def source(tmp_path):
    return tmp_path / "models", write_shards(tmp_path / "models" / "llama", 1, 2, 2, 100)


@pytest.fixture
def mount(command, tmp_path, source):
    mount = Mount.__new__(Mount)
    try:
        mount.__init__(command, source[0], tmp_path / "mnt", tmp_path / "log", [])
        yield mount
    finally:
        mount.remove()


def test_the_command_mounts_and_unmounts(mount, source):
    folder, expected = source
    check_same(load_file(mount / "llama/model.safetensors"), expected)
    about = Path(f"/proc/{mount.pid}")
    words = about.joinpath("cmdline").read_text().split("\0")
    assert " ".join(words).split(" -m ")[1].startswith(f"ckptfs mount {folder} {mount.point}")
    assert about.joinpath("comm").read_text() == "ckptfs\n"
    assert os.readlink(about / "cwd") == "/"
    loaded = about.joinpath("maps").read_text()
    assert "ckptfs.abi3" in loaded and "torch" not in loaded and "numpy" not in loaded
    mount.unmount()
    assert not is_mounted(mount.point)


@pytest.mark.parametrize("name", ["run", "bench", "enable", "disable", "mount"])
def test_help_fits_80_columns_without_a_terminal(command, name):
    shown = Ckptfs(command)(name, "--help")
    assert shown.code == DONE and max(map(len, shown.stdout.splitlines())) <= 80


def test_status_lists_the_mounts(command, mount):
    done = Ckptfs(command)("status")
    assert done.code == DONE and str(mount.point) in done.stdout
    assert "NOT" not in next(line for line in done.stdout.splitlines() if str(mount.point) in line)


def test_a_mount_whose_daemon_was_killed_is_taken_away(command, mount):
    os.kill(mount.pid, signal.SIGKILL)
    until("the daemon has gone", lambda: not is_alive(mount))
    assert Ckptfs(command)("unmount", mount.point).code == DONE
    assert not is_mounted(mount.point)


def is_alive(mount):
    try:
        os.stat(mount.point)
    except OSError:
        return False
    return True


def test_exit_codes_and_output(command, tmp_path, source):
    run = Ckptfs(command)
    assert run("--version").stdout.startswith("ckptfs ")
    (tmp_path / "broken.safetensors").write_bytes(b"no checkpoint")
    for arguments, code in [
        (["inspect", source[0] / "llama"], DONE), (["inspect", tmp_path / "nothing"], FAILED),
        (["nonsense"], USAGE), (["inspect", tmp_path / "broken.safetensors"], REFUSED),
        (["mount", tmp_path / "nothing", tmp_path], FAILED),
    ]:  # fmt: skip
        assert run(*arguments).code == code, arguments
    assert run("inspect", "--json", source[0] / "llama").json()["tensors"]
    module = subprocess.run([sys.executable, "-m", "ckptfs", "--version"], capture_output=True, text=True)
    assert module.stdout == run("--version").stdout


@pytest.mark.parametrize("words", [["--help"], ["-h"], ["help"], []])
def test_help_lists_the_wheels_own_commands(command, words):
    done = Ckptfs(command)(*words)
    assert done.code == (DONE if words else USAGE)
    listed = dict(re.findall(r"^  (\w+) +(.+)$", done.stdout + done.stderr, re.MULTILINE))
    assert listed["run"].startswith("Run a Python program") and listed["bench"].startswith("Measure how fast")
    assert "export" in listed


@pytest.mark.parametrize("name", ["run", "bench", "enable", "disable"])
def test_the_wheels_own_commands_have_help(command, name):
    asked, told = Ckptfs(command)("help", name), Ckptfs(command)(name, "--help")
    assert (asked.code, asked.stdout) == (DONE, told.stdout) and f"ckptfs {name}" in told.stdout
    assert Ckptfs(command)("-q", name, "--help").stdout == told.stdout
    # An argument of another command is not taken for a command.
    assert Ckptfs(command)("inspect", name).code == FAILED


def test_a_modules_arguments_are_its_own(command, tmp_path):
    (tmp_path / "shows.py").write_text("import sys\nprint(sys.argv[1:])\n")
    words = ["sh", "-c", 'cd "$0" && exec "$@"', tmp_path, command, "run", "-m", "shows", "-m", "--help", "-q", "--", "x"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.stdout == "['-m', '--help', '-q', '--', 'x']\n", done.stderr
    for words in (["run"], ["run", "-m"]):
        done = Ckptfs(command)(*words)
        assert done.code == USAGE and "ckptfs run --help explains all options" in done.stderr


def test_every_command_takes_quiet(command, tmp_path):
    run = Ckptfs(command)
    script = tmp_path / "x.py"
    script.write_text(
        "import sys, ckptfs.settings\nprint(sys.argv[1:], ckptfs.settings.logger().level)\n"
    )
    for words in (["-q", "run"], ["--quiet", "run"], ["run", "-q"]):
        done = run(*words, script, "-q", "--help", "--", "-m")
        assert done.stdout == f"['-q', '--help', '--', '-m'] {logging.ERROR}\n", done
    for words in (["-q", "bench"], ["bench", "-q"]):
        done = run(*words, tmp_path / "nothing")
        assert (done.code, done.stderr.split("\n")[0]) == (FAILED, f"ckptfs: {tmp_path}/nothing: no such file or directory")


def test_completions_and_man_pages_have_the_wheels_own_commands(command, tmp_path):
    run = Ckptfs(command)
    listed = {
        "bash": r"ckptfs,{name}\)", "zsh": r"^'{name}:", "fish": r'-f -a "{name}"',
    }  # fmt: skip
    for shell, pattern in listed.items():
        script = run("completions", shell).stdout
        for name in ("run", "bench", "export"):
            assert re.search(pattern.format(name=name), script, re.MULTILINE), (shell, name)
        assert "against" in script and "instanttensor" in script, shell
    assert run("man", "--dir", tmp_path).code == DONE
    for name in ("run", "bench"):
        assert f"ckptfs\\-{name}(1)" in (tmp_path / "ckptfs.1").read_text()
    assert "\\-\\-against" in (tmp_path / "ckptfs-bench.1").read_text()
    assert "ckptfs run \\-m my_package.serve" in (tmp_path / "ckptfs-run.1").read_text()


def test_ctrl_c_ends_a_mount(command, tmp_path, source):
    point = tmp_path / "mnt"
    point.mkdir()
    running = subprocess.Popen([command, "mount", "--foreground", source[0], point], stderr=subprocess.PIPE)
    until("it is mounted", lambda: is_mounted(point) or running.poll() is not None)
    running.send_signal(signal.SIGINT)
    _, said = running.communicate()
    assert "Traceback" not in said.decode()
    assert running.returncode == DONE and not is_mounted(point)


def test_ctrl_c_ends_a_command_that_reads(command, tmp_path):
    size = 1 << 40
    header = json.dumps({"x": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    with (tmp_path / "x.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size)
    words = [command, "verify", tmp_path / "x.safetensors"]
    running = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    # All of it would take minutes.
    until("it reads", lambda: io_of(running.pid)["rchar"] > 1 << 27)
    running.send_signal(signal.SIGINT)
    _, said = running.communicate()
    assert running.returncode == FAILED and "stopped before" in said.decode()


def io_of(pid):
    lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    return {name: int(value) for name, value in (line.split(": ") for line in lines)}
