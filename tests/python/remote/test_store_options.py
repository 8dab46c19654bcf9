"""Options of stores: the command line and `ckptfs.configure` above the environment, for every command that takes a source."""

import ckptfs
import pytest
from ckptfs.torch import load_file
from safetensors.torch import load_file as load_plain

from ckptfs import _ckptfs
from ckptfs.settings import STORE_SETTINGS
from compare import check_same
from program import DONE, FAILED, USAGE


@pytest.fixture
def encrypted(store, monkeypatch):
    """An environment that does not allow plain HTTP."""
    monkeypatch.delenv("AWS_ALLOW_HTTP")
    return store


@pytest.fixture(autouse=True)
def nothing_stays():
    yield
    ckptfs.configure(allow_http=None, connections=None, outage_timeout=None, cache_dir=None)


def test_every_command_that_takes_a_source_takes_the_options(ckptfs, encrypted, models, tmp_path):
    _, url, _ = models
    for command in (["ls", url], ["inspect", f"{url}/sharded"], ["verify", f"{url}/pickled"],
                    ["export", f"{url}/pickled", tmp_path / "out.safetensors"]):  # fmt: skip
        refused = ckptfs(*command)
        assert refused.code == FAILED and "--allow-http" in refused.stderr, command
        assert ckptfs(*command, "--allow-http", "--connections", "2").code == DONE, command


def test_the_daemon_of_a_mount_has_the_options(mounts, encrypted, models):
    folder, url, _ = models
    for options in (["--allow-http", "--connections=2"], ["-o", "allow_http,connections=2"]):
        mount = mounts(f"{url}/pickled", *options)
        encrypted.fault()
        check_same(load_plain(mount / "model.safetensors"), load_file(folder / "pickled"))
        assert encrypted.stats["most_at_once"] <= 2


def test_a_value_that_means_nothing_is_refused_by_its_name(ckptfs, store, models, monkeypatch):
    folder, url, _ = models
    for option in ("--connections=0", "--stall-timeout=-1", "--outage-timeout=1h", "--poll-interval=86401"):
        refused = ckptfs("ls", url, option)
        assert refused.code == USAGE and option.split("=")[0] in refused.stderr
    monkeypatch.setenv("CKPTFS_OUTAGE_TIMEOUT", "soon")
    refused = ckptfs("ls", url)
    assert refused.code == FAILED and "CKPTFS_OUTAGE_TIMEOUT" in refused.stderr and "what to do: set the variable" in refused.stderr
    # What is on disk has no use for it, and the option comes first.
    assert ckptfs("ls", folder).code == DONE and ckptfs("ls", url, "--outage-timeout=5").code == DONE


def test_python_configures_loads_and_mounts(encrypted, models):
    folder, url, _ = models
    with pytest.raises(ckptfs.SafetensorError, match="not encrypted"):
        load_file(f"{url}/pickled")
    ckptfs.configure(allow_http=True)
    expected = load_file(folder / "pickled")
    check_same(load_file(f"{url}/pickled"), expected)
    with ckptfs.mount(f"{url}/pickled") as path:
        check_same(load_plain(path / "model.safetensors"), expected)
    ckptfs.configure(allow_http=None)
    with ckptfs.mount(f"{url}/pickled", allow_http=True) as path:
        check_same(load_plain(path / "model.safetensors"), expected)
    for wrong in ({"connections": 0}, {"connections": 1000}, {"outage_timeout": "soon"}, {"anonymous": "perhaps"}):
        with pytest.raises(ckptfs.SafetensorError, match=next(iter(wrong))):
            ckptfs.configure(**wrong)


def test_no_option_is_lost_between_python_and_rust():
    options = dict.fromkeys(STORE_SETTINGS)
    _ckptfs.set_remote_options(options)
    assert options == dict.fromkeys(STORE_SETTINGS)
    with pytest.raises(KeyError, match="speed"):
        _ckptfs.set_remote_options({**options, "speed": None})
    for name in STORE_SETTINGS:
        with pytest.raises(KeyError, match=name):
            _ckptfs.set_remote_options({other: None for other in STORE_SETTINGS if other != name})
