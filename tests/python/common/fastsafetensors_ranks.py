"""Programs that several ranks run with fastsafetensors or with ours; `ranks` starts them.

A program gets the package under test, the group, a directory and a dictionary for its results.
"""

import importlib
import os
import time

from ranks import SECONDS

# Programs that lose a rank.
IMPATIENT = ("loses_one", "waits_for_one")


def buffers_of(package, pg, files, **made):
    loader = package.SafeTensorsFileLoader(pg, "cpu", nogds=True, **made)
    loader.add_filenames(files)
    return loader, loader.copy_files_to_device()


def even(package, pg, folder, out):
    """Calls that both packages have, on sizes that divide evenly."""
    paths = [str(folder / f"{name}.safetensors") for name in "bac"]
    files = {0: paths[:1], 1: paths[1:]}

    def buffers():
        loader, made = buffers_of(package, pg, files)
        out["keys"], out["owners"] = loader.get_keys(), made.key_to_rank_lidx
        return made

    one = buffers()
    for name in out["keys"]:
        out["whole", name] = one.get_tensor(name)
    for dim in (0, 1, -1):
        one = buffers()
        for name in out["keys"]:
            out["part", name, dim] = one.get_sharded(name, dim)
    one = buffers()
    for names, dim in ((("q", "k"), 0), (("q", "k"), 1), (("q", "o"), 0), (("o", "q", "p"), 1), (("q",), 0)):
        out["columns", names, dim] = one.get_multi_cols(list(names), dim).get_raw()
    # Columns counted from the end are an error, on every rank.
    for dim in (-1, -2):
        try:
            one.get_multi_cols(["q", "k"], dim)
        except Exception:
            out["from the end", dim] = "refused"
    one = buffers()
    for target in (0, 1):
        for name in ("k", "o", "p"):
            out["pushed", name, target] = one.push_tensor(name, target)
    one = buffers()
    asked = {name: place % 3 - 1 for place, name in enumerate(out["keys"])}
    for name, tensor in one.as_dict(asked).items():
        out["dictionary", name] = tensor.get_raw()
    one = buffers()
    st_types = importlib.import_module("fastsafetensors.st_types")
    out["cast"] = one.get_sharded("q", 0, dtype=st_types.DType.F16)
    one.close()
    loader = package.SafeTensorsFileLoader(pg, "cpu", nogds=True)
    loader.set_tensor_filter(lambda name: name in "qop")
    loader.add_filenames(files)
    one = loader.copy_files_to_device()
    out["kept"] = loader.get_keys(), one.key_to_rank_lidx
    for name in loader.get_keys():
        out["kept", name] = one.get_tensor(name)
    with package.fastsafe_open(files, pg=pg, nogds=True) as opened:
        for name in opened.keys():
            out["opened", name] = opened.get_tensor(name)


def uneven(package, pg, folder, out):
    """Sizes that leave some ranks with less or nothing, every type, and files of other formats."""
    files = {0: [str(folder / "odd.bin")], 1: [str(folder / "types.pt")], 2: [str(folder / "sharded")]}
    loader, one = buffers_of(package, pg, files, disable_cache=False)
    shapes = {name: loader.get_shape(name) for name in loader.get_keys()}
    for name, shape in shapes.items():
        out[name, -1] = one.get_tensor(name)
        for dim in range(len(shape)):
            out[name, dim] = one.get_sharded(name, dim)
    out["columns"] = one.get_multi_cols(["odd.seven", "odd.two", "odd.seven"], 0).get_raw()
    for name in ("odd.seven", "types.complex", "none"):
        for target in range(pg.size()):
            out["pushed", name, target] = one.push_tensor(name, target)


def again(package, pg, folder, out):
    """Asks twice, before and after all of a file was handed out, with a cache and without."""
    files = {0: [str(folder / "odd.bin")], 1: [str(folder / "types.pt")]}
    _, one = buffers_of(package, pg, files)
    first, second = one.get_tensor("odd.two"), one.get_tensor("odd.two")
    first.zero_()
    out["independent"] = second, one.get_tensor("odd.two")
    # These leave the loader's tensors as they are.
    for name in ("odd.seven", "odd.row", "none"):
        one.push_tensor(name, 1)
        one.get_multi_cols([name], 0)
    for name in ("odd.seven", "odd.row", "none"):
        one.get_tensor(name)
    for ask in (
        lambda: one.get_tensor("odd.two"), lambda: one.get_sharded("odd.two", 0),
        lambda: one.get_multi_cols(["odd.two"], 0), lambda: one.push_tensor("odd.two", 1),
        lambda: one.get_sharded("types.complex", 2), lambda: one.get_sharded("types.complex", -2),
        lambda: one.push_tensor("types.complex", 2), lambda: one.get_sharded("types.pairs", 1),
        lambda: next(one.iter_local_tensors(["types.complex"])),
        lambda: one.get_multi_cols(["types.complex"], -1),
    ):  # fmt: skip
        try:
            ask()
        except Exception as fault:
            out.setdefault("refused", []).append(str(fault))
    # None of these has separated the ranks.
    out["after"] = one.get_tensor("types.complex")
    _, kept = buffers_of(package, pg, files, disable_cache=False)
    for name in ("odd.two", "odd.seven", "odd.row", "none"):
        kept.get_tensor(name).zero_()
    if pg.rank() == 0:
        out["alone"] = kept.get_tensor("odd.two")
    out["cached"] = kept.get_tensor("odd.two")
    out["part"] = kept.get_sharded("odd.two", 0)
    one.close()
    out["outlives"] = out["after"].clone()


def cast(package, pg, folder, out):
    loader = package.SafeTensorsFileLoader(pg)
    loader.add_filenames({0: [folder / "odd.bin"], 1: [folder / "a.safetensors"]})
    one, names = loader.copy_files_to_device(package.DType.BF16), loader.get_keys()
    # Buffers have all they need after their loader is gone.
    loader.close()
    assert loader.pg.real_pg is None and one.pg.real_pg is pg
    out |= {name: one.get_sharded(name, 0) for name in names}
    one.close()
    assert one.pg.real_pg is None and one.pg.size() == loader.pg.size() == pg.size()


def loses_one(package, pg, folder, out):
    """The last rank ends after copying, while the others wait for its part."""
    _, one = buffers_of(package, pg, {0: [str(folder / "a.safetensors")], 1: [str(folder / "odd.bin")]})
    one.get_tensor("odd.row")
    if pg.rank() == 1:
        os._exit(9)
    one.get_tensor("odd.two")


def waits_for_one(package, pg, folder, out):
    """The last rank does something else."""
    _, one = buffers_of(package, pg, {0: [str(folder / "a.safetensors")], 1: [str(folder / "odd.bin")]})
    one.get_tensor("odd.row")
    if pg.rank() == 1:
        time.sleep(SECONDS)
    begun = time.monotonic()
    try:
        one.get_sharded("odd.two", 0)
    finally:
        print("waited", time.monotonic() - begun, flush=True)
