"""A pickle made to break its reader is refused, in bounded time and memory, and with a reason."""

import pickletools
import struct

import pytest

from pickles import (
    APPEND,
    FALSE,
    MARK,
    NONE,
    POP,
    SET_ITEM,
    call,
    dict_of,
    get,
    list_of,
    name,
    program,
    put,
    tensor,
    text,
    tuple_of,
    write_legacy,
    write_zip,
)
from refusals import check_refused

KNOWN = {ord(opcode.code) for opcode in pickletools.opcodes}
UNKNOWN = sorted(set(range(256)) - KNOWN)

# Opcodes that pop the stack, with their arguments.
TAKERS = [opcode for opcode in pickletools.opcodes if opcode.stack_before and opcode.name != "STOP"]


def with_argument(opcode):
    code = opcode.code.encode("latin-1")
    match opcode.arg and opcode.arg.name:
        case None:
            return code
        case "stringnl_noescape_pair":
            return code + b"os\nsystem\n"
        case "decimalnl_short":
            return code + b"0\n"
        case _:
            return code + bytes(opcode.arg.n)


@pytest.fixture(params=[write_zip, write_legacy], ids=["zip", "legacy"])
def refuses(request, ckptfs, tmp_path):
    """Asserts that a checkpoint around this pickle is refused."""

    def check(*parts, words=(), tensor=None):
        path = request.param(tmp_path / "model.pt", program(*parts))
        check_refused(ckptfs, path, *words, tensor=tensor)

    return check


@pytest.mark.parametrize("code", UNKNOWN, ids="0x{:02x}".format)
def test_unknown_opcodes_are_refused(refuses, code):
    refuses(dict_of({"weight": tensor()}), bytes([code]), words=[f"0x{code:02x}"])


@pytest.mark.parametrize("opcode", TAKERS, ids=lambda opcode: opcode.name)
def test_opcodes_that_find_an_empty_stack_are_refused(refuses, opcode):
    refuses(with_argument(opcode), NONE)


@pytest.mark.parametrize("opcode", TAKERS, ids=lambda opcode: opcode.name)
def test_opcodes_that_would_reach_below_a_mark_are_refused(refuses, opcode):
    refuses(NONE * 8, MARK, with_argument(opcode), with_argument(opcode))


@pytest.mark.parametrize(
    "parts",
    [
        (),
        (MARK,),
        (NONE, MARK),
        (NONE, POP),
        (get(5),),
        (b"t",),
        (NONE, NONE, NONE, SET_ITEM),
        (NONE, NONE, APPEND),
        (b"}", MARK, NONE, b"u"),
        (text("os"), NONE, b"\x93"),
        (name("collections", "OrderedDict"), NONE, b"R"),
        (b"g-1\n",),
        (b"gx\n",),
        (b"Ix\n",),
        (b"c\n\n",),
    ],
)
def test_opcodes_out_of_order_are_refused(refuses, parts):
    refuses(*parts)


@pytest.mark.parametrize("protocol", [0, 1, 6, 255])
def test_unknown_protocols_are_refused(ckptfs, tmp_path, protocol):
    pickled = program(dict_of({"weight": tensor()}), protocol=protocol)
    check_refused(ckptfs, write_zip(tmp_path / "model.pt", pickled), f"protocol {protocol}")


U32, U64 = struct.Struct("<I"), struct.Struct("<Q")
HUGE = {
    "text": b"X" + U32.pack(2**32 - 1),
    "long-text": b"\x8d" + U64.pack(2**63),
    "longest-text": b"\x8d" + U64.pack(2**64 - 1),
    "bytes": b"B" + U32.pack(2**32 - 1),
    "long-bytes": b"\x8e" + U64.pack(2**64 - 1),
    "bytearray": b"\x96" + U64.pack(2**40),
    "string": b"T" + U32.pack(2**31 - 1),
    "number": b"\x8b" + U32.pack(2**31 - 1),
    "negative-number": b"\x8b" + U32.pack(2**32 - 1),
    "decimal": b"I" + b"9" * 2_000_000 + b"\n",
    "frame": b"\x95" + U64.pack(2**63),
    "longest-frame": b"\x95" + U64.pack(2**64 - 1),
}


@pytest.mark.parametrize("kind", HUGE)
def test_lengths_past_the_end_are_refused(refuses, kind):
    refuses(HUGE[kind] + b"abc", POP, dict_of({"weight": tensor()}))


def doubled(levels, make, bottom):
    """Each level holds the one below twice: 2**levels values by the name, `levels` in truth."""
    parts = [bottom, put(0)]
    for level in range(levels):
        parts += [make(get(level), get(level)), put(level + 1)]
    return b"".join(parts)


BOMBS = {
    "tuples": tuple_of,
    "lists": list_of,
    "dicts": lambda a, b: dict_of({"a": a, "b": b}),
    "calls": lambda a, b: call(
        name("collections", "OrderedDict"), list_of(tuple_of(text("a"), a), tuple_of(text("b"), b))
    ),
}


@pytest.mark.parametrize("levels", [24, 60, 5000])
@pytest.mark.parametrize("kind", BOMBS)
def test_bombs_of_memoized_values_are_refused(refuses, kind, levels):
    refuses(doubled(levels, BOMBS[kind], tensor()))


@pytest.mark.parametrize("levels", [60, 5000])
@pytest.mark.parametrize("kind", BOMBS)
def test_bombs_without_a_tensor_are_refused(refuses, kind, levels):
    refuses(doubled(levels, BOMBS[kind], NONE))


def test_a_bomb_of_long_names_is_refused(refuses):
    long = text("x" * 60_000) + put(0)
    inner = b"}" + long + tensor() + SET_ITEM + put(1)
    entries = b"".join(text(str(number)) + get(1) for number in range(100_000))
    refuses(inner, POP, b"}(" + entries + b"u")


def test_a_bomb_of_copied_pairs_is_refused(refuses):
    pairs = list_of(*(tuple_of(text(str(n)), NONE) for n in range(10_000))) + put(0)
    copies = (name("collections", "OrderedDict") + get(0) + b"\x85R" + POP) * 10_000
    refuses(pairs, POP, copies, dict_of({"weight": tensor()}))


DEEP = {
    "marks": lambda n: MARK * n + b"t" * n,
    "tuples": lambda n: NONE + b"\x85" * n,
    "lists": lambda n: b"]" * n + APPEND * (n - 1),
    "dicts": lambda n: (b"}" + text("a")) * n + NONE + SET_ITEM * n,
    "calls": lambda n: name("a", "b") + b")R" * n,
    "persistent": lambda n: NONE + b"Q" * n,
    "builds": lambda n: call(name("a", "b")) + (b"}b") * n,
}


@pytest.mark.parametrize("depth", [1_000, 1_000_000])
@pytest.mark.parametrize("kind", DEEP)
def test_deep_nesting_is_refused(refuses, kind, depth):
    refuses(DEEP[kind](depth))


@pytest.mark.parametrize("kind", ["tuples", "lists", "dicts"])
def test_deep_nesting_around_a_tensor_is_refused(refuses, kind):
    deep = {
        "tuples": tensor() + b"\x85" * 100_000,
        "lists": b"]" * 100_000 + tensor() + APPEND * 100_000,
        "dicts": (b"}" + text("a")) * 100_000 + tensor() + SET_ITEM * 100_000,
    }
    refuses(deep[kind])


def test_a_deeply_wrapped_tensor_is_refused_by_name(refuses):
    wrapped = tensor()
    for _ in range(1000):
        wrapped = call(name("torch._utils", "_rebuild_parameter"), wrapped, FALSE, NONE)
    refuses(dict_of({"weight": wrapped}), tensor="weight")


@pytest.mark.parametrize(
    "parts",
    [
        (b"]", put(0), get(0), APPEND),
        (b"}", put(0), text("a"), get(0), SET_ITEM),
        (b"]", put(0), b"}", text("a"), get(0), SET_ITEM, APPEND),
    ],
    ids=["list", "dict", "list-and-dict"],
)
def test_containers_inside_themselves_are_refused(refuses, parts):
    refuses(*parts)


@pytest.mark.parametrize(
    "parts",
    [
        (b"]", put(0), get(0), APPEND, tensor(), APPEND),
        (b"}", put(0), text("a"), get(0), SET_ITEM, text("weight"), tensor(), SET_ITEM),
    ],
    ids=["list", "dict"],
)
def test_containers_of_a_tensor_inside_themselves_are_refused(refuses, parts):
    refuses(*parts)


def test_the_same_key_twice_is_refused(refuses):
    entry = text("weight") + tensor()
    refuses(b"}(", entry, entry, b"u", words=["`weight`"])


@pytest.mark.parametrize("write", [write_zip, write_legacy], ids=["zip", "legacy"])
def test_a_pickle_that_is_cut_off_at_any_byte_is_refused(ckptfs, tmp_path, write):
    whole = program(dict_of({"weight": tensor()}))
    for length in range(len(whole)):
        check_refused(ckptfs, write(tmp_path / "model.pt", whole[:length]))


def test_bytes_after_the_pickle_are_refused(ckptfs, tmp_path):
    pickled = program(dict_of({"weight": tensor()})) + b"more"
    check_refused(ckptfs, write_zip(tmp_path / "model.pt", pickled), "4 bytes")
