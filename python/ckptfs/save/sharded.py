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

from ckptfs import _ckptfs
from ckptfs.errors import error, of_system
from ckptfs.rlimit import max_open_files
from ckptfs.save.atomic_file import AtomicFile, sync_folder, new_file_mode
from ckptfs.save.serialize import parts_of
from ckptfs.settings import parse_path


# A variant of a name that loaders look for.
_VARIANT = re.compile(
    r"(model|pytorch_model|diffusion_pytorch_model|adapter_model|pytorch_lora_weights)\.(.+)\.(safetensors|sft)"
)


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


def write(specs, directory, most, metadata, whole, threads, sync):
    """Writes them. Gives the names of the files."""
    stem, dot, extension = whole.rpartition(".")
    if not stem or extension not in ("safetensors", "sft") or os.path.basename(whole) != whole:
        raise error(f"{whole!r} is no name for a checkpoint", 'give one such as "model.safetensors"')
    directory = os.path.realpath(parse_path(directory))
    shards, files, index = split(specs, most), [], _index_name(whole)
    indexes = {index, f"{whole}.index.json"}
    try:
        os.makedirs(directory, exist_ok=True)
        of_set = re.compile(rf"{re.escape(stem)}-\d{{5,8}}-of-\d{{5,8}}{re.escape(dot + extension)}")
        # What a process left that was killed while it replaced one of them.
        for name in _of_it(directory, of_set, indexes, whole) | indexes | {whole}:
            _ckptfs.remove_stale_file(directory, name)
        # Of one file the name is known before.
        named = whole if len(shards) == 1 else None
        files = _written(specs, shards, directory, named, metadata, threads, sync)
        old = _of_it(directory, of_set, indexes, whole)
        if len(shards) == 1:
            names = [whole]
        else:
            names = _names(stem, dot + extension, len(shards), _used(directory, indexes, old))
            files.append(_index(specs, shards, names, directory, index, sync))
            names.append(index)
        # The last of them makes it the set that loaders see, in one step. Until then they see the old one,
        # none of whose files has been touched.
        for file, name in zip(files, names, strict=True):
            file.take(os.path.join(directory, name))
        if sync:
            sync_folder(directory)
        for name in sorted(old.difference(names), key=lambda name: name not in indexes):
            os.unlink(os.path.join(directory, name))
    except OSError as fault:
        raise of_system(fault, directory) from None
    finally:
        for file in files:
            file.drop()
    return names


def _of_it(directory, of_set, indexes, whole):
    """The files that are there of what is to be replaced."""
    return {name for name in os.listdir(directory) if of_set.fullmatch(name) or name == whole or name in indexes}


def _names(stem, extension, count, used):
    """Names of shards that the set which is there does not use: with a digit more, if need be."""
    for digits in range(5, 9):
        names = [f"{stem}-{n:0{digits}}-of-{count:0{digits}}{extension}" for n in range(1, count + 1)]
        if used.isdisjoint(names):
            break
    return names


def _index_name(whole):
    """That of the set of a name. Of a variant it is what transformers and diffusers look for."""
    variant = _VARIANT.fullmatch(whole)
    return "{0}.{2}.index.{1}.json".format(*variant.groups()) if variant else f"{whole}.index.json"


def _used(directory, indexes, there):
    """The files of the set that is there: those of its index, or all if it has none that can be read."""
    used = set()
    for index in indexes:
        try:
            with open(os.path.join(directory, index), "rb") as file:
                used |= set(json.load(file)["weight_map"].values())
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return there
    return used or there


def _written(specs, shards, directory, named, metadata, threads, sync):
    """The shards, whole, and without names as far as they can all be open at once."""
    most, mode, stop = max_open_files(), new_file_mode(), threading.Event()
    files, threads = [None] * len(shards), min(threads, len(shards), most)
    # Beside those that stay open each thread has one.
    kept = len(shards) if len(shards) <= most else most - threads

    def write_one(number, names):
        if stop.is_set():
            return
        try:
            file = files[number] = AtomicFile(directory, named)
            for part in parts_of({name: specs[name] for name in names}, metadata):
                if stop.is_set():
                    return
                file.write(part)
            file.finish(mode, sync)
            if number >= kept:
                file.set_aside()
        except BaseException:
            # Before another begins one more: what failed is open until all of them have ended.
            stop.set()
            raise

    try:
        with concurrent.futures.ThreadPoolExecutor(threads) as pool:
            try:
                for done in [pool.submit(write_one, *one) for one in enumerate(shards)]:
                    done.result()
            except BaseException:
                stop.set()
                raise
    except BaseException:
        for file in filter(None, files):
            file.drop()
        raise
    return files


def _index(specs, shards, names, directory, index, sync):
    total = sum(spec.data_len for spec in specs.values())
    weight_map = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2)
    file = AtomicFile(directory, index)
    try:
        file.write(text.encode() + b"\n")
        file.finish(new_file_mode(), sync)
    except BaseException:
        file.drop()
        raise
    return file
