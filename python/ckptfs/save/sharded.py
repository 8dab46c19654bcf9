"""Saving tensors as a set of shards with an index, in the place of an earlier set of the same name.

The bytes of each tensor are written from where they are: there is never a second copy of the model.
"""

import concurrent.futures
import json
import os
import re
import threading

from ckptfs import _ckptfs
from ckptfs.errors import error, of_system
from ckptfs.rlimit import max_open_files
from ckptfs.save.atomic_file import AtomicFile, new_file_mode
from ckptfs.save.serialize import file_parts
from ckptfs.settings import parse_path

# A variant of a name that loaders look for.
_VARIANT = re.compile(
    r"(model|pytorch_model|diffusion_pytorch_model|adapter_model|pytorch_lora_weights)\.(.+)\.(safetensors|sft)"
)


def split(specs, max_bytes):
    """Lists of names in their order: a shard has as many tensors as fit. A larger tensor has a shard of its own."""
    shards, size = [[]], 0
    for name, spec in specs.items():
        if shards[-1] and size + spec.data_len > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += spec.data_len
    return shards


def write(specs, directory, max_bytes, metadata, whole, threads, sync):
    """Writes tensors as shards, or as one file called `whole` where all fit. Returns the names of the files."""
    stem, dot, extension = whole.rpartition(".") if isinstance(whole, str) else ("", "", "")
    if not stem or extension not in ("safetensors", "sft") or os.path.basename(whole) != whole:
        raise error(f"{whole!r} is no name for a checkpoint", 'give one such as "model.safetensors"')
    given = parse_path(directory)
    _ckptfs.check_output_path(given, any_suffix=True)
    directory = os.path.realpath(given)
    shards, files, index = split(specs, max_bytes), [], _index_name(whole)
    indexes = {index, f"{whole}.index.json"}
    try:
        os.makedirs(directory, exist_ok=True)
        shard_pattern = re.compile(rf"{re.escape(stem)}-\d{{5,8}}-of-\d{{5,8}}{re.escape(dot + extension)}")
        # Removes what a process left that was killed while it replaced one of them.
        for name in _set_files(directory, shard_pattern, indexes, whole) | indexes | {whole}:
            _ckptfs.remove_stale_file(directory, name)
        # The name of a single file is known before.
        name = whole if len(shards) == 1 else None
        files = _write_shards(specs, shards, directory, name, metadata, threads, sync)
        old = _set_files(directory, shard_pattern, indexes, whole)
        if len(shards) == 1:
            names = [whole]
        else:
            names = _names(stem, dot + extension, len(shards), _used(directory, indexes, old))
            files.append(_write_index(specs, shards, names, directory, index, sync))
            names.append(index)
        # The last rename makes it the set that loaders see. Until then they see the old set, which is untouched.
        for file, name in zip(files, names, strict=True):
            file.take(os.path.join(directory, name))
        if sync:
            _ckptfs.sync_directory(directory)
        for name in sorted(old.difference(names), key=lambda name: name not in indexes):
            os.unlink(os.path.join(directory, name))
    except OSError as fault:
        raise of_system(fault, given) from None
    finally:
        for file in files:
            file.drop()
    return names


def _set_files(directory, shard_pattern, indexes, whole):
    """The files in a directory that belong to the set to be replaced."""
    return {name for name in os.listdir(directory) if shard_pattern.fullmatch(name) or name == whole or name in indexes}


def _names(stem, extension, count, used):
    """Names of shards that the present set does not use: with one digit more, if need be."""
    for digits in range(5, 9):
        names = [f"{stem}-{n:0{digits}}-of-{count:0{digits}}{extension}" for n in range(1, count + 1)]
        if used.isdisjoint(names):
            break
    return names


def _index_name(whole):
    """The name of a set's index. For a variant it is the one that transformers and diffusers look for."""
    variant = _VARIANT.fullmatch(whole)
    return "{0}.{2}.index.{1}.json".format(*variant.groups()) if variant else f"{whole}.index.json"


def _used(directory, indexes, there):
    """The files of the present set: those of its index, or all if no index can be read."""
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


def _write_shards(specs, shards, directory, name, metadata, threads, sync):
    """The shards, whole. Those that can be open at once have no names, the others hidden ones."""
    max_files, mode, stop = max_open_files(), new_file_mode(), threading.Event()
    files, threads = [None] * len(shards), min(threads, len(shards), max_files)
    # Each thread has one file open beside those that stay open.
    kept = len(shards) if len(shards) <= max_files else max_files - threads

    def write_one(number, names):
        if stop.is_set():
            return
        try:
            file = files[number] = AtomicFile(directory, name)
            for part in file_parts({name: specs[name] for name in names}, metadata):
                if stop.is_set():
                    return
                file.write(part)
            file.finish(mode, sync)
            if number >= kept:
                file.set_aside()
        except BaseException:
            # No thread begins another shard: what failed is open until all threads have ended.
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


def _write_index(specs, shards, names, directory, index, sync):
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
