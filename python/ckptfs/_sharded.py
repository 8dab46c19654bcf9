"""Saving tensors as a set of shards with an index.

In: what each tensor is and how to have its bytes. Out: a directory with the shards and their index, in the
place of an earlier set of the same name. Each tensor's bytes are written from where they lie: there is no
second copy of the model at any time.
"""

import concurrent.futures
import json
import os
import re
import threading

from ckptfs._errors import error, of_system
from ckptfs._new_file import NewFile, mode_of, sync_folder
from ckptfs._write import parts_of


def split(specs, most):
    """Lists of names, in the order given: as many tensors as fit into a shard of so many bytes. One that
    is larger has a shard of its own."""
    shards, size = [[]], 0
    for name, spec in specs.items():
        if shards[-1] and size + spec.data_len > most:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += spec.data_len
    return shards


def write(specs, directory, most, metadata, whole, threads):
    """Writes them. Gives the names of the files."""
    stem, dot, extension = whole.rpartition(".")
    if not stem or extension not in ("safetensors", "sft") or os.path.basename(whole) != whole:
        raise error(f"{whole!r} is no name for a checkpoint", 'give one such as "model.safetensors"')
    directory = os.path.realpath(os.fsdecode(directory))
    shards = split(specs, most)
    names = [f"{stem}-{n:05}-of-{len(shards):05}{dot}{extension}" for n in range(1, len(shards) + 1)]
    if len(shards) == 1:
        names = [whole]
    try:
        os.makedirs(directory, exist_ok=True)
        files = _written(specs, shards, directory, metadata, threads)
    except OSError as fault:
        raise of_system(fault, directory) from None
    index = f"{whole}.index.json"
    try:
        if len(shards) > 1:
            files.append(_index(specs, shards, names, directory))
            names.append(index)
        # In this order no moment shows shards of two sets together: without an index a set of which some are
        # missing is refused, and the index comes last.
        of_set = re.compile(rf"{re.escape(stem)}-\d{{5}}-of-\d{{5}}{re.escape(dot + extension)}")
        old = [name for name in os.listdir(directory) if of_set.fullmatch(name) or name in (whole, index)]
        for name in sorted(old, key=lambda name: name != index):
            if name != names[0] or len(names) > 1:
                os.unlink(os.path.join(directory, name))
        for file, name in zip(files, names, strict=True):
            file.take(os.path.join(directory, name))
        sync_folder(directory)
    except OSError as fault:
        raise of_system(fault, directory) from None
    finally:
        for file in files:
            file.drop()
    return names


def _written(specs, shards, directory, metadata, threads):
    """The shards, whole and without names."""
    files, stop = [NewFile(directory) for _ in shards], threading.Event()
    mode = mode_of(os.path.join(directory, f".{os.getpid()}-is-not-there"))

    def write_one(file, names):
        for part in parts_of({name: specs[name] for name in names}, metadata):
            if stop.is_set():
                return
            file.write(part)
        file.finish(mode)

    try:
        with concurrent.futures.ThreadPoolExecutor(min(threads, len(shards))) as pool:
            try:
                for done in [pool.submit(write_one, *one) for one in zip(files, shards, strict=True)]:
                    done.result()
            except BaseException:
                stop.set()
                raise
    except BaseException:
        for file in files:
            file.drop()
        raise
    return files


def _index(specs, shards, names, directory):
    total = sum(spec.data_len for spec in specs.values())
    weight_map = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2)
    file = NewFile(directory)
    try:
        file.write(text.encode() + b"\n")
        file.finish(mode_of(os.path.join(directory, f".{os.getpid()}-is-not-there")))
    except BaseException:
        file.drop()
        raise
    return file
