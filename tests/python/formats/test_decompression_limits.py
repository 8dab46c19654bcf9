"""A compressed record is unpacked only as far as the memory that was granted for it."""

import zipfile

from pickles import STORAGE, dict_of, program, storage, tensor
from refusals import check_refused

MIB = 1 << 20


def bytes_tensor(key, count):
    return tensor(of=storage(key, count, "ByteStorage"), shape=(count,))


def pack(path, pickled, storages):
    """An archive of compressed records; a storage is a block of bytes and its repetitions."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        archive.writestr("archive/data.pkl", pickled)
        for key, (block, times) in storages.items():
            with archive.open(f"archive/data/{key}", "w", force_zip64=True) as record:
                for _ in range(times):
                    record.write(block)
    return path


def test_a_storage_that_unpacks_to_gigabytes_is_refused(ckptfs, tmp_path):
    state = program(dict_of({"weight": bytes_tensor("0", 3072 * MIB)}))
    path = pack(tmp_path / "model.pt", state, {"0": (bytes(64 * MIB), 48)})
    check_refused(ckptfs, path, "compressed", tensor="weight")


def test_storages_that_together_unpack_to_too_much_are_refused(ckptfs, tmp_path):
    keys = [str(number) for number in range(9)]
    state = program(dict_of({f"layer{key}": bytes_tensor(key, 16 * MIB) for key in keys}))
    path = pack(tmp_path / "model.pt", state, {key: (bytes(16 * MIB), 1) for key in keys})
    check_refused(ckptfs, path, "compressed", tensor="layer8")


def test_a_pickle_that_unpacks_to_too_much_is_refused(ckptfs, tmp_path):
    state = program(b"N0" * (150 * MIB), dict_of({"weight": tensor()}))
    check_refused(ckptfs, pack(tmp_path / "model.pt", state, {"0": (STORAGE, 1)}), "data.pkl")


def test_a_storage_that_does_not_unpack_is_refused(ckptfs, tmp_path):
    path = pack(tmp_path / "model.pt", program(dict_of({"weight": tensor()})), {"0": (STORAGE, 1)})
    raw = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        record = archive.getinfo("archive/data/0")
    # Its deflated bytes end where the directory begins.
    end = raw.index(b"PK\x01\x02")
    path.write_bytes(raw[: end - record.compress_size] + b"\xff" * record.compress_size + raw[end:])
    check_refused(ckptfs, path, "compressed", tensor="weight")
