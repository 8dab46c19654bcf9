"""`ckptfs enable`, `disable`, and what `status` and `doctor` say: one file in an environment, which leaves no trace."""

import errno
import json
import os
import subprocess

import pytest
from ckptfs import enable

from environments import Environment
from program import DONE, FAILED, USAGE

NAME = enable.FILE_NAME


@pytest.fixture
def environment(tmp_path):
    return Environment(tmp_path / "env")


def test_it_is_enabled_and_disabled_without_a_trace(environment):
    before = environment.tree()
    for said in ("enabled: ", "already enabled: "):
        done = environment.command("enable")
        assert (done.returncode, done.stdout, done.stderr) == (DONE, f"{said}{environment.site / NAME}\n", "")
    assert set(environment.tree()) - set(before) == {str((environment.site / NAME).relative_to(environment.folder))}
    assert environment.run("import json, sys; print(json.dumps(sys.meta_path[0].__name__))") == "CkptfsFinder"
    assert environment.command("disable").stdout == f"disabled: removed {environment.site / NAME}\n"
    assert environment.command("disable").stdout == f"not enabled: {environment.folder}\n"
    assert environment.tree() == before


def test_its_first_line_says_what_it_is_and_the_other_is_short(environment):
    environment.enable()
    about, line = (environment.site / NAME).read_text().splitlines()
    assert about.startswith("# `ckptfs enable`") and "ckptfs disable" in about
    assert line.startswith("import sys; ") and len(line) < 1000 and line.isascii()


def test_status_and_doctor_say_whether_it_is_enabled(environment):
    def said():
        checks = json.loads(environment.command("doctor", "--json").stdout)
        [check] = [check for check in checks if check["what"] == "python"]
        status = environment.command("status").stdout
        # Long paths are broken at the width of the terminal.
        assert "".join(check["says"].split()) in "".join(status.split()), status
        return check["verdict"], check["says"], check["remedy"]

    off = ("note", f"{environment.folder}: not enabled, so programs read through the mount", "ckptfs enable")
    assert said() == off
    environment.enable()
    assert said()[0] == "ok" and f"{environment.folder}: enabled" in said()[1]
    # What an older version wrote.
    (environment.site / NAME).write_text("import sys\n")
    assert said()[0] == "note" and "another version" in said()[1] and said()[2] == "ckptfs enable"
    assert environment.command("enable").stdout.startswith("enabled: ")
    assert said()[0] == "ok"
    (environment.site / NAME).write_text("import sys\n")
    assert environment.command("disable").returncode == DONE and said() == off
    assert isinstance(json.loads(environment.command("status", "--json").stdout), list)


@pytest.mark.parametrize("named", ["bin/python", ""])
def test_another_environment_is_enabled_from_here(environment, tmp_path, named):
    other = Environment(tmp_path / "other")
    done = environment.command("enable", "--python", other.folder / named)
    assert done.stdout == f"enabled: {other.site / NAME}\n" and not (environment.site / NAME).exists()
    done = environment.command("disable", "--python", other.folder / named)
    assert done.stdout == f"disabled: removed {other.site / NAME}\n"


def test_the_base_environment_is_named_and_left_alone(environment, tmp_path, capsys, monkeypatch):
    base = Environment(tmp_path / "base").enable()
    interpreter = {"python": "python", "prefix": "/env", "own": [str(environment.site)], "user": None,
                   "inherited": [str(base.site)]}  # fmt: skip
    monkeypatch.setattr(enable, "_probe", lambda python: interpreter)
    assert enable.run("disable", python=None, quiet=False) == DONE
    assert capsys.readouterr().out == f"still enabled by the base environment: rm {base.site / NAME}\n"
    assert (base.site / NAME).exists()


def script(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_what_cannot_be_enabled_is_refused_with_what_to_do(environment, tmp_path):
    without = Environment(tmp_path / "without", home=None)
    old = script(tmp_path / "old", 'echo \'{"version": [3, 9]}\'')
    for python, message, remedy in [
        (tmp_path / "nothing", "no such file or directory", "give the path of an interpreter"),
        (tmp_path, f"{tmp_path}/bin/python: no such file", "give the path of an interpreter"),
        (script(tmp_path / "silent", "exit 3"), "is not a Python interpreter: it printed nothing", "interpreter"),
        (old, "is Python 3.9", "give one of Python 3.11 or later"),
        (without.python, "ModuleNotFoundError: No module named 'ckptfs'", f"{without.python} -m pip install dist/ckptfs-"),
    ]:
        done = environment.command("enable", "--python", python)
        assert (done.returncode, done.stdout) == (FAILED, ""), done
        assert done.stderr.startswith("ckptfs: ") and message in done.stderr, done.stderr
        assert remedy in done.stderr.split("\n  what to do: ")[1], done.stderr
    assert not (without.site / NAME).exists()
    done = environment.command("enable", "--user")
    assert done.returncode == FAILED and f"leave out --user: {environment.python} -m ckptfs enable" in done.stderr
    assert environment.command("enable", "there").returncode == USAGE


def test_an_environment_that_cannot_be_written_is_refused_with_the_command_to_type(environment):
    site = environment.site
    read_only = f"mount --bind {site} {site} && mount -o remount,ro,bind {site} && exec {environment.python} -m ckptfs enable"
    done = subprocess.run(["unshare", "--mount", "sh", "-c", read_only], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (FAILED, "")
    assert f"{site / NAME}: cannot be written: Read-only file system" in done.stderr
    assert f"what to do: make another environment: {environment.python} -m venv" in done.stderr
    assert not (site / NAME).exists()


@pytest.mark.parametrize("user", [None, "/home/user/lib"])
def test_a_lack_of_permissions_is_refused_with_the_command_to_type(environment, monkeypatch, capsys, user):
    interpreter = {"python": "/usr/bin/python3", "prefix": "/usr", "own": [str(environment.site)], "user": user,
                   "inherited": [], "fault": None, "by_variable": False}  # fmt: skip

    def fails(path, user):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(enable, "_probe", lambda python: interpreter)
    monkeypatch.setattr(enable, "_write", fails)
    assert enable.run("enable", python=None, quiet=False) == FAILED
    said = capsys.readouterr().err
    assert "cannot be written: Permission denied\n  what to do: sudo /usr/bin/python3 -m ckptfs enable" in said
    assert ("/usr/bin/python3 -m ckptfs enable --user" in said) == bool(user)


def test_a_package_that_only_a_variable_finds_is_noted(tmp_path):
    from environments import HOME

    environment = Environment(tmp_path / "env", home=None)
    for quiet in ([], ["-q"]):
        done = environment.command(*quiet, "enable", PYTHONPATH=HOME)
        assert done.returncode == DONE and done.stderr.count("found by PYTHONPATH") == (not quiet), done
