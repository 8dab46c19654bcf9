"""Assembles pickles opcode by opcode, and wraps them in torch's two file forms.

Each function gives the bytes that leave one value on the stack, so that they nest as the values do.
"""

import pickle
import struct
import zipfile

NONE, TRUE, FALSE, MARK, POP, APPEND, BUILD, SET_ITEM = (
    b"N",
    b"\x88",
    b"\x89",
    b"(",
    b"0",
    b"a",
    b"b",
    b"s",
)


def program(*parts, protocol=2):
    return bytes([0x80, protocol]) + b"".join(parts) + b"."


def name(module, attribute):
    return f"c{module}\n{attribute}\n".encode()


def text(value):
    raw = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(raw)) + raw


def number(value):
    raw = pickle.encode_long(value)
    return b"\x8a" + bytes([len(raw)]) + raw


def tuple_of(*items):
    return MARK + b"".join(items) + b"t"


def list_of(*items):
    return b"](" + b"".join(items) + b"e"


def dict_of(entries):
    return b"}(" + b"".join(text(key) + value for key, value in entries.items()) + b"u"


def call(callable, *args):
    return callable + tuple_of(*args) + b"R"


def put(slot):
    return b"r" + struct.pack("<I", slot)


def get(slot):
    return b"j" + struct.pack("<I", slot)


def storage(key="0", count=4, kind="FloatStorage", location="cpu", module="torch", window=b""):
    """A persistent id. `window` ends it in the legacy form: the part of the storage, or none."""
    fields = text("storage"), name(module, kind), text(key), text(location), number(count)
    return tuple_of(*fields, window) + b"Q"


def numbers(*values):
    return tuple_of(*map(number, values))


def tensor(offset=0, shape=(4,), strides=(1,), of=None, shape_as=None):
    """A tensor as torch writes it; `shape_as` replaces the shape."""
    return call(
        name("torch._utils", "_rebuild_tensor_v2"),
        of or storage(),
        number(offset),
        shape_as or numbers(*shape),
        numbers(*strides),
        FALSE,
        call(name("collections", "OrderedDict")),
    )


STORAGE = struct.pack("<4f", 1, 2, 3, 4)


def write_zip(path, pickled, storages=None):
    """An archive as torch makes it, around any pickle."""
    records = {"data.pkl": pickled, "byteorder": b"little", "version": b"3\n"}
    storages = {"0": STORAGE} if storages is None else storages
    records |= {f"data/{key}": raw for key, raw in storages.items()}
    with zipfile.ZipFile(path, "w") as archive:
        for record, raw in records.items():
            archive.writestr(f"archive/{record}", raw)
    return path


MAGIC = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19."


SYSTEM = pickle.dumps({"protocol_version": 1001, "little_endian": True, "type_sizes": {}}, 2)


def write_legacy(path, pickled, storages=None, system=SYSTEM):
    """A legacy file around any pickle; storages are by key: count and bytes."""
    storages = {"0": (4, STORAGE)} if storages is None else storages
    parts = [MAGIC, pickle.dumps(1001, 2), system, pickled, pickle.dumps(list(storages), 2)]
    parts += [struct.pack("<q", count) + raw for count, raw in storages.values()]
    path.write_bytes(b"".join(parts))
    return path


def turned_round(source, path, unit, order=b"big"):
    """Copies an archive with every `unit` bytes of its storages reversed, and with the byte order record to match."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(path, "w") as new:
        for record in old.namelist():
            raw = old.read(record)
            if record.endswith("/byteorder"):
                raw = order
            elif "/data/" in record:
                raw = b"".join(raw[at : at + unit][::-1] for at in range(0, len(raw), unit))
            new.writestr(record, raw)
