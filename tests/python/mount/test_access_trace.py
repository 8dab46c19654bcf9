"""A cold load is prefetched in the order of the one before. The trace on the user's disk harms no load, whatever
becomes of it."""

import os
import stat

import pytest

from ordered_reads import MIB, read_in_order, shuffled
from samples import write_shards

VIRTUAL_FILE = "llama/model.safetensors"

# 128 MiB in tensors of 4 MiB.
SHARDS, TENSORS, SIDE = 2, 16, 1024


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    models = tmp_path_factory.mktemp("remembers") / "models"
    write_shards(models / "llama", 1, SHARDS, TENSORS, SIDE)
    os.sync()
    return models


@pytest.fixture
def orders(tmp_path):
    """The directory of a test's traces; see mounts.py."""
    return tmp_path / "cache/ckptfs/orders"


def load(mount, order, pause=0.01):
    """Reads all tensors cold, in an order of their names, and no byte around them. Gives them, and the mount's
    statistics of that."""
    for path in mount.source.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return read_in_order(mount / VIRTUAL_FILE, order, pause), mount.stats()


@pytest.fixture
def loads(mounts, models):
    """Loads through a mount of its own: `loads(order, "all")`; gives how many blocks were prefetched."""
    known = {}

    def loads(order, remember="all", source=models):
        mount = mounts(source, "--remember", remember)
        mount.source = source
        tensors, stats = load(mount, order)
        expected = known.setdefault(source, tensors)
        assert len(tensors) == SHARDS * TENSORS
        assert tensors == expected
        mount.unmount()
        assert "ERROR" not in mount.logged() and "WARN" not in mount.logged(), mount.logged()
        return stats["prefetch"] | {"misses": stats["cache"]["misses"]}

    return loads


def is_followed(done):
    return done["replayed"] > SHARDS * TENSORS * 2


def test_a_load_is_prefetched_in_the_order_of_the_one_before(loads, orders):
    first = loads(shuffled())
    assert first["replayed"] == 0
    (kept,) = orders.iterdir()
    assert len(kept.name) == 32 and kept.stat().st_size < 1000
    assert [stat.S_IMODE(path.stat().st_mode) for path in (orders, kept)] == [0o700, 0o600]
    again = loads(shuffled())
    assert is_followed(again) and again["misses"] < first["misses"] / 2, (first, again)
    assert again["wasted"] <= again["fetched"] / 10, again


def test_a_trace_serves_every_model_of_its_layout(loads, orders, mounts, tmp_path):
    write_shards(tmp_path / "others/llama", 2, SHARDS, TENSORS, SIDE)
    os.sync()
    loads(shuffled())
    assert is_followed(loads(shuffled(), source=tmp_path / "others"))
    (kept,) = orders.iterdir()
    mount = mounts(tmp_path / "others", "--remember", "all")
    assert os.getxattr(mount / VIRTUAL_FILE, "user.ckptfs.layout").decode() == kept.name


def test_a_deviating_load_drops_the_trace_and_replaces_it(loads, orders):
    loads(shuffled())
    (kept,) = orders.iterdir()
    before = kept.read_bytes()
    strayed = loads(shuffled(4))
    assert strayed["replayed"] < SHARDS * TENSORS * 2
    assert kept.read_bytes() != before
    assert is_followed(loads(shuffled(4)))


def garbage(orders, kept):
    kept.write_bytes(b"ckptfs order 1\n" + bytes(range(256)) * 16)


def cut(orders, kept):
    kept.write_bytes(kept.read_bytes()[:-1])


def one_bit(orders, kept):
    kept.write_bytes(bytes([kept.read_bytes()[0] ^ 1]) + kept.read_bytes()[1:])


def writable(orders, kept):
    kept.chmod(0o622)


def of_another(orders, kept):
    os.chown(kept, 1234, -1)


def link(orders, kept):
    kept.symlink_to(kept.rename(orders / "elsewhere"))


def pipe(orders, kept):
    kept.unlink()
    os.mkfifo(kept)


def deleted(orders, kept):
    kept.unlink()
    orders.rmdir()


@pytest.mark.parametrize("harm", [garbage, cut, one_bit, writable, of_another, link, pipe, deleted])
def test_a_damaged_trace_is_ignored_and_replaced(loads, orders, harm):
    loads(shuffled())
    (kept,) = orders.iterdir()
    harm(orders, kept)
    assert loads(shuffled())["replayed"] == 0
    assert is_followed(loads(shuffled()))


@pytest.mark.parametrize("harm", ["of another", "writable", "a file", "a link"])
def test_a_folder_that_is_not_the_users_own_is_left_alone(loads, orders, harm):
    loads(shuffled())
    (kept,) = orders.iterdir()
    before = kept.read_bytes()
    if harm == "of another":
        os.chown(orders, 1234, -1)
    elif harm == "writable":
        orders.chmod(0o770)
    else:
        elsewhere = orders.rename(orders.with_name("elsewhere"))
        orders.touch() if harm == "a file" else orders.symlink_to(elsewhere)
        kept = elsewhere / kept.name
    assert loads(shuffled(4))["replayed"] == 0
    assert kept.read_bytes() == before and len([*kept.parent.iterdir()]) == 1


def test_a_trace_that_is_deleted_in_use_is_followed_to_its_end(loads, orders, mounts, models):
    loads(shuffled())
    (kept,) = orders.iterdir()
    mount = mounts(models, "--remember", "all")
    mount.source = models

    def order(names):
        for n, name in enumerate(shuffled()(names)):
            if n == 8:
                deleted(orders, kept)
            yield name

    _, stats = load(mount, order)
    assert is_followed(stats["prefetch"])
    mount.unmount()
    assert kept.exists()


@pytest.mark.parametrize("remember", ["none", "stores"])
def test_loads_that_are_not_remembered_keep_and_follow_no_trace(loads, orders, remember):
    loads(shuffled(), remember)
    assert not orders.exists()
    loads(shuffled())
    (kept,) = orders.iterdir()
    before = kept.stat()
    assert loads(shuffled(4), remember)["replayed"] == 0
    assert kept.stat() == before


def test_a_daemon_without_a_home_keeps_nothing(mounts, models, tmp_path):
    env = ["env", "-u", "XDG_CACHE_HOME", "-u", "HOME"]
    relative = ["env", "-u", "HOME", "XDG_CACHE_HOME=cache"]
    for prefix in (env, relative):
        mount = mounts(models, "--remember", "all", prefix=prefix)
        mount.source = models
        load(mount, shuffled(), pause=0)
        mount.unmount()
    assert not [*tmp_path.rglob("ckptfs/orders")]


def test_a_look_at_a_model_is_no_load(mounts, models, orders):
    mount = mounts(models, "--remember", "all")
    with open(mount / VIRTUAL_FILE, "rb") as file:
        file.read(50 * MIB)
    mount.unmount()
    assert not orders.exists()
