"""Asserts that a checkpoint has the same bytes however it is reached."""

import random

from compare import check_export, check_tensors
from program import DONE


def check_every_door(ckptfs, mounts, folder, expected, out, name="model.safetensors"):
    """Asserts that a folder is shown as the expected tensors: exported, loaded, verified, and mounted, whole and in
    ranges. Returns the report of `inspect`."""
    check_export(ckptfs, folder, expected, out)
    same = ckptfs("verify", folder, "--against", out)
    assert same.code == DONE, same.stderr
    report = ckptfs.inspect(folder)
    assert report["virtual_file"]["size"] == out.stat().st_size
    before = sorted(path.name for path in folder.iterdir())
    mount = mounts(folder)
    assert set(before) | {name} == {path.name for path in mount.point.iterdir()}
    check_tensors(mount / name, expected)
    whole = out.read_bytes()
    assert (mount / name).read_bytes() == whole
    rng = random.Random(len(whole))
    with (mount / name).open("rb") as file:
        for _ in range(20):
            start = rng.randrange(len(whole))
            file.seek(start)
            length = rng.randint(1, 2000)
            assert file.read(length) == whole[start : start + length]
    mount.unmount()
    return report
