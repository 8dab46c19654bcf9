"""`prefetch` hands every tensor out once, in whatever order it is asked for, and ends when it is told to."""

import threading

import ckptfs
import pytest
import torch

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


def test_iterating_and_taking(file):
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


def test_a_plan(folder):
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
def test_plans_that_mean_nothing(folder, plan, words):
    with ckptfs.safe_open(folder / "loose/strided.pt", "pt") as file:
        with pytest.raises(Refused, match=words):
            file.prefetch(plan)


def test_only_for_torch(folder):
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


def test_closed_in_the_middle(file):
    loader = file.prefetch()
    stream = iter(loader)
    next(stream)
    loader.close()
    with pytest.raises(Refused, match="closed"):
        next(stream)
    with pytest.raises(Refused, match="closed"):
        loader.take(loader.names()[0])


def test_closing_wakes_those_who_wait(folder):
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


def test_a_failure_is_told_to_who_waits(tmp_path):
    torch.save({"a": torch.ones(9), "b": torch.ones(100_000)}, tmp_path / "x.pt")
    with ckptfs.safe_open(tmp_path / "x.pt", "pt") as file:
        data = (tmp_path / "x.pt").read_bytes()
        (tmp_path / "x.pt").write_bytes(data[: len(data) // 2])
        with pytest.raises(Refused, match="changed on disk|x.pt"):
            file.prefetch().take("b")
