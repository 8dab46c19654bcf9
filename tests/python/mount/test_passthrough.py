"""Passthrough: the kernel reads files shown unchanged, and virtual files that are identical to their source."""

import json
import os
import platform
import re
import struct
import subprocess

import pytest
import torch
from safetensors.torch import load_file, save, save_file

import ckptfs as package
from ckptfs.torch import load_file as load
from mounts import PATIENCE, until
from page_cache import cached_bytes, evict
from samples import numbers, write_shards

MIB = 1 << 20

NAME = "model.safetensors"

KERNEL = tuple(map(int, re.match(r"(\d+)\.(\d+)", platform.release()).groups()))
pytestmark = pytest.mark.skipif(KERNEL < (6, 9), reason="passthrough needs Linux 6.9")

UNCHANGED_VIEW = f"""
[[file]]
path = "view/{NAME}"
from = ["lone"]
beside = ["config.json"]
"""

VIEW_OF_A_FILE = f'[[file]]\npath = "again/{NAME}"\nfrom = ["plain"]\n'

RENAMED_VIEW = UNCHANGED_VIEW + "rename = [{ match = '^layers', to = 'blocks' }]\n"


@pytest.fixture
def models(tmp_path):
    """A model in one shard with an index, and one in a file that is shown unchanged."""
    folder = tmp_path / "models"
    write_shards(folder / "lone", 1, 1, 4, 512)
    (folder / "plain").mkdir()
    save_file({"w": numbers(2, 1024, 1024)}, folder / "plain" / NAME, metadata={"format": "pt"})
    return folder


def shard(models):
    return models / "lone/model-00001-of-00001.safetensors"


def read_by_daemon(mount, path):
    """The bytes of a mounted file, and how many of them the daemon served."""
    before = mount.stats()["bytes_served"]
    content = (mount / path).read_bytes()
    return content, mount.stats()["bytes_served"] - before


def share_pages(shown, source):
    shown.read_bytes()
    return cached_bytes([source]) == cached_bytes([shown]) >= source.stat().st_size


def test_the_kernel_reads_virtual_files_identical_to_their_source(mounts, models, tmp_path):
    recipe = tmp_path / "views.toml"
    recipe.write_text(UNCHANGED_VIEW + VIEW_OF_A_FILE)
    mount = mounts(models, "--views", recipe)
    assert mount.stats()["passthrough"] is True
    sources = {f"{folder}/{NAME}": shard(models) for folder in ("lone", "view")}
    sources |= {f"{folder}/{NAME}": models / "plain" / NAME for folder in ("plain", "again")}
    for path, source in sources.items():
        evict([source])
        content, served = read_by_daemon(mount, path)
        assert (content, served) == (source.read_bytes(), 0), path
        # There is no second copy. The system may evict pages between two looks.
        until("the mounted file shares the source's pages", lambda: share_pages(mount / path, source))
        assert load_file(mount / path).keys() == load_file(source).keys() == load(mount / path).keys(), path
        assert not package.last_report().fallbacks, path
    assert mount.stats()["bytes_served"] == 0


def test_a_passed_through_source_that_changes_in_place_is_read_as_it_is(mounts, models):
    mount = mounts(models)
    with open(mount / f"lone/{NAME}", "rb") as file:
        file.read(MIB)
        change_in_place(shard(models))
        assert file.read().endswith(b"changed!")


def change_in_place(path):
    with open(path, "r+b") as source:
        source.seek(-8, os.SEEK_END)
        source.write(b"changed!")


def test_without_passthrough_the_daemon_serves_the_same_bytes(mounts, models):
    mount = mounts(models, "--no-passthrough")
    content, served = read_by_daemon(mount, f"lone/{NAME}")
    assert content == shard(models).read_bytes() and served >= len(content)
    with open(mount / f"lone/{NAME}", "rb") as file:
        change_in_place(shard(models))
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        with pytest.raises(OSError):
            file.read()


IN_A_USER_NAMESPACE = """
set -e
"$0" mount "$1" "$2"
trap 'exec 3<&-; "$0" unmount "$2"' EXIT
exec 3<"$2/lone/model.safetensors"
head -c 65536 <&3 >/dev/null
sleep 0.1
printf changed! | dd of="$3" bs=1 seek=$(($(stat -c %s "$3") - 8)) conv=notrunc status=none
if cat <&3 >/dev/null 2>&1; then echo "read to the end"; else echo "refused"; fi
"$0" status --json
"""


def test_where_the_kernel_refuses_to_pass_through_a_changed_source_is_an_error(mounts, models, tmp_path):
    point = tmp_path / "point"
    point.mkdir()
    words = ["unshare", "-Urm", "bash", "-c", IN_A_USER_NAMESPACE, mounts.binary, models, point, shard(models)]
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, timeout=PATIENCE)
    # The kernel offers it, and the first open shows that it is refused.
    assert done.returncode == 0 and done.stdout.startswith("refused\n"), done
    [stats] = [each["stats"] for each in json.loads(done.stdout[8:]) if each["mountpoint"] == str(point)]
    assert stats["passthrough"] is False


def with_header_bytes(state, more):
    """A safetensors file whose header is padded by so many bytes."""
    content = save(state, metadata={"format": "pt"})
    [length] = struct.unpack("<Q", content[:8])
    return struct.pack("<Q", length + more) + content[8 : 8 + length] + b" " * more + content[8 + length :]


def in_reverse_order():
    """A safetensors file whose tensors of one byte come first."""
    parts = {"small": (b"\1" * 16, "U8", [16]), "large": (b"\2" * 16, "F32", [4])}
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, (content, dtype, shape) in parts.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + len(content)]}
        end += len(content)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(content for content, _, _ in parts.values())


def test_a_file_that_differs_from_its_source_is_served_by_the_daemon(mounts, models, tmp_path):
    recipe = tmp_path / "views.toml"
    recipe.write_text(RENAMED_VIEW)
    state = load_file(shard(models))
    contents = {
        "without-format": save(state, metadata={"other": "metadata"}), "odd-header": with_header_bytes(state, 3),
        "other-order": in_reverse_order(),
    }  # fmt: skip
    for name, content in contents.items():
        (models / name).mkdir()
        path = models / name / shard(models).name
        path.write_bytes(content)
        index = {"metadata": {}, "weight_map": dict.fromkeys(load_file(path), path.name)}
        (models / name / "model.safetensors.index.json").write_text(json.dumps(index))
    mount = mounts(models, "--views", recipe)
    for name in ("view", *contents):
        content, served = read_by_daemon(mount, f"{name}/{NAME}")
        # Its header is ours, and ends at a page.
        assert served >= len(content) and struct.unpack("<Q", content[:8])[0] % 4096 == 4088, name
        assert content != contents.get(name)
    assert load_file(mount / f"view/{NAME}").keys() == {name.replace("layers", "blocks") for name in state}


def test_a_replaced_source_shows_at_the_next_open_and_open_files_keep_their_bytes(mounts, models, tmp_path):
    mount = mounts(models)
    before = shard(models).read_bytes()
    state = {name: tensor + 1 for name, tensor in load_file(shard(models)).items()}
    new = tmp_path / "new.safetensors"
    save_file(state, new, metadata={"format": "pt"})
    with open(mount / f"lone/{NAME}", "rb") as file:
        assert file.read(MIB) == before[:MIB]
        os.rename(new, shard(models))
        until("the new file shows", lambda: (mount / f"lone/{NAME}").read_bytes() == shard(models).read_bytes())
        assert file.read() == before[MIB:]
    for name, tensor in load_file(mount / f"lone/{NAME}").items():
        assert torch.equal(tensor, state[name])
    assert mount.stats()["bytes_served"] == 0


def test_a_shard_that_lacks_a_tensor_of_its_index_is_refused(mounts, models):
    index = models / "lone/model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"absent": "model-00001-of-00001.safetensors"}}))
    mount = mounts(models)
    assert not (mount / f"lone/{NAME}").exists()
    assert (mount / "lone/model-00001-of-00001.safetensors").exists()
