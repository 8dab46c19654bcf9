"""Defaults of a call: arguments above `configure` above the environment."""

import logging

import ckptfs
import ckptfs.numpy
import ckptfs.torch
import pytest
from ckptfs import settings

from samples import small_tensors

import safetensors.torch


@pytest.fixture(autouse=True)
def nothing_stays():
    yield
    ckptfs.configure(backend=None, threads=None, memory=None, log=None, disable=None)
    settings.logger()


@pytest.fixture
def path(tmp_path):
    safetensors.torch.save_file(small_tensors(1, 3), tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def mapped(path, **how):
    ckptfs.torch.load_file(path, **how)
    return bool(ckptfs.last_report().mapped)


def test_a_backend_comes_from_argument_then_configure_then_environment(path, monkeypatch):
    assert mapped(path)
    monkeypatch.setenv("CKPTFS_BACKEND", "pread")
    assert not mapped(path) and mapped(path, backend="mmap")
    ckptfs.configure(backend="mmap")
    assert mapped(path) and not mapped(path, backend="pread")
    ckptfs.configure(backend=None)
    assert not mapped(path)
    monkeypatch.setenv("CKPTFS_BACKEND", "")
    assert mapped(path)


def test_it_holds_for_numpy_too(path):
    ckptfs.numpy.load_file(path)
    assert not ckptfs.last_report().mapped
    ckptfs.configure(backend="mmap")
    ckptfs.numpy.load_file(path)
    assert ckptfs.last_report().mapped


def test_limits_come_from_the_same_places(monkeypatch):
    assert settings.limits(None, None) == (None, None)
    monkeypatch.setenv("CKPTFS_THREADS", "3")
    monkeypatch.setenv("CKPTFS_MEMORY", "64M")
    assert settings.limits(None, None) == (3, 64 << 20)
    ckptfs.configure(threads=2, memory="1GB")
    assert settings.limits(None, None) == (2, 10**9)
    assert settings.limits(5, 6 << 20) == (5, 6 << 20)


def test_a_budget_too_small_is_refused_from_every_source(path):
    ckptfs.configure(memory=1024)
    with pytest.raises(ckptfs.SafetensorError):
        ckptfs.torch.load_file(path, backend="pread")


@pytest.mark.parametrize("name, value", [
    ("backend", "fast"), ("threads", "0"), ("threads", "many"), ("memory", "12 apples"), ("memory", "0"),
    ("log", "loud"), ("disable", "perhaps"),
])  # fmt: skip
def test_a_meaningless_value_is_refused_by_its_name(monkeypatch, name, value):
    variable = f"CKPTFS_{name.upper()}"
    monkeypatch.setenv(variable, value)
    with pytest.raises(ckptfs.SafetensorError, match=variable):
        settings.setting(name)
    with pytest.raises(ckptfs.SafetensorError, match="configure"):
        ckptfs.configure(**{name: value})
    monkeypatch.delenv(variable)
    assert settings.setting(name) is None


def test_one_bad_value_changes_nothing():
    with pytest.raises(ckptfs.SafetensorError):
        ckptfs.configure(backend="pread", threads=-1)
    assert settings.setting("backend") is None


def test_the_log_goes_where_it_is_configured(monkeypatch, capsys):
    ckptfs.configure(log="info")
    settings.logger().info("here")
    assert capsys.readouterr().err == "ckptfs: INFO: here\n"
    ckptfs.configure(log="error")
    settings.logger().warning("not here")
    ckptfs.configure(log=None)
    assert not [h for h in settings.logger().handlers if h.name == "ckptfs"]
    assert logging.getLogger("ckptfs").level == logging.NOTSET and capsys.readouterr().err == ""
