"""Casts equal `tensor.to(dtype)` of torch bit for bit, but for NaNs, which become the one of their type."""

import torch
from safetensors.torch import load_file, save_file

from casts import FLOAT8S, FLOATS, INTEGERS, NANS
from program import REFUSED

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def all_values(name):
    """All values of a type of at most 16 bits; many of a larger one, and those at which rounding changes."""
    dtype = getattr(torch, name)
    bits = 8 * dtype.itemsize
    if name == "bool":
        return torch.tensor([False, True] * 9)
    if bits <= 16:
        return torch.arange(1 << bits, dtype=torch.int32).to(BITS[dtype.itemsize]).view(dtype)
    random = torch.randint(-(1 << (bits - 1)), (1 << (bits - 1)) - 1, (1 << 18,), dtype=BITS[dtype.itemsize])
    if not dtype.is_floating_point:
        return random.view(dtype)
    # Values of smaller types and the ones half way between them, with their neighbours.
    halves = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    near = [(halves.to(torch.int32) << 16).view(torch.float32)]
    near += [((halves.to(torch.int32) << 16) + offset).view(torch.float32) for offset in (0x7FFF, 0x8000, 0x8001)]
    exact = halves.view(torch.float16).float()
    near += [exact, (exact[:-1] + exact[1:]) / 2]
    small = torch.cat([torch.arange(256, dtype=torch.uint8).view(getattr(torch, one)).float() for one in FLOAT8S])
    near += [small, torch.cat([small * (1 + sign * 2.0**-n) for sign in (1, -1) for n in range(2, 24)])]
    near += [torch.arange(0x1000, dtype=torch.int32).view(torch.float32)]
    near = torch.cat(near).to(dtype)
    ends = near[near.isfinite()]
    ends = torch.cat([torch.nextafter(ends, torch.tensor(end, dtype=dtype)) for end in (float("inf"), -float("inf"))])
    return torch.cat([random.view(dtype), near, ends])


def export_casts(ckptfs, folder, tensors, rules):
    save_file(tensors, folder / "x.safetensors")
    words = [word for rule in rules for word in ("--cast", rule)]
    return load_file(ckptfs.export(folder / "x.safetensors", folder / "cast.safetensors", *words))


def assert_same(cast, expected, names):
    bits = BITS[expected.dtype.itemsize]
    is_nan = expected.isnan() if expected.dtype.is_floating_point else torch.zeros_like(expected, dtype=torch.bool)
    assert torch.equal(cast.isnan() if cast.dtype.is_floating_point else is_nan, is_nan), names
    cast, expected = cast.view(bits), expected.view(bits)
    wrong = (cast != expected) & ~is_nan
    assert not wrong.any(), (names, wrong.sum(), cast[wrong][:5], expected[wrong][:5])
    return cast, is_nan


def test_all_casts_of_floats_equal_torchs(ckptfs, tmp_path):
    values = {name: all_values(name) for name in FLOATS + FLOAT8S}
    pairs = [(one, other) for one in values for other in values if one != other]
    tensors = {f"{one}.to.{other}": values[one].clone() for one, other in pairs}
    cast = export_casts(ckptfs, tmp_path, tensors, [f"*.to.{other}={other}" for other in values])
    for one, other in pairs:
        source = values[one]
        # torch has no cast of an infinity to what has none but its NaN: the sign is that of the bits.
        got, is_nan = assert_same(cast[f"{one}.to.{other}"], source.to(getattr(torch, other)), (one, other))
        nan = torch.tensor(NANS[other], dtype=torch.uint64).view(torch.int64).to(got.dtype)
        assert (got[is_nan & source.isnan()] == nan).all(), (one, other)


def test_all_casts_of_integers_equal_torchs_and_hold_every_value(ckptfs, tmp_path):
    pairs = [(one, other) for one, others in INTEGERS.items() for other in others.split()]
    tensors = {f"{one}.to.{other}": all_values(one) for one, other in pairs}
    targets = {other for _, other in pairs}
    cast = export_casts(ckptfs, tmp_path, tensors, [f"*.to.{other}={other}" for other in targets])
    for one, other in pairs:
        assert_same(cast[f"{one}.to.{other}"], tensors[f"{one}.to.{other}"].to(getattr(torch, other)), (one, other))


def test_any_other_cast_is_refused(ckptfs, tmp_path):
    names = [*FLOATS, *FLOAT8S, *INTEGERS, "int64", "uint64", "complex64"]
    for one in names:
        tensor = torch.zeros(2, dtype=torch.uint8).repeat(8)[: 2 * getattr(torch, one).itemsize].view(getattr(torch, one))
        save_file({"t": tensor}, tmp_path / f"{one}.safetensors")
    for one, other in [
        ("float32", "int64"), ("float16", "bool"), ("int64", "float64"), ("uint64", "float64"), ("int32", "float32"),
        ("int16", "bfloat16"), ("uint8", "int8"), ("uint8", "float8_e5m2"), ("int8", "uint8"), ("uint8", "bool"),
        ("bool", "float8_e8m0fnu"), ("complex64", "float32"), ("float32", "complex64"), ("int32", "uint64"),
    ]:  # fmt: skip
        words = ["--cast", f"t={other}", tmp_path / f"{one}.safetensors", tmp_path / "out.safetensors"]
        refused = ckptfs("export", *words)
        assert refused.code == REFUSED and "cannot cast `t`" in refused.error, (one, other)
        assert not (tmp_path / "out.safetensors").exists()
