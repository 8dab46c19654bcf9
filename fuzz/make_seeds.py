"""Writes the seeds of the fuzz targets: small real files, by torch and safetensors themselves.

Run with a Python that has both: `python fuzz/make_seeds.py`.
"""

import collections
import io
import json
import pathlib
import pickle
import struct
import tempfile
import zipfile

import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore
import zstandard

SEEDS = pathlib.Path(__file__).parent / "seeds"

# The storages 0 to 3 of the archives of the pickle target, in this order and of these sizes.
FLOATS = torch.arange(6, dtype=torch.float32)
LONGS = torch.arange(8)
HALVES = torch.arange(4, dtype=torch.float16)
NONE = torch.empty(0)


def states():
    yield "plain", {"a": FLOATS, "b": LONGS, "c": HALVES, "d": NONE}
    yield "views", {
        "rows": FLOATS.view(2, 3),
        "transposed": FLOATS.view(2, 3).t(),
        "strided": FLOATS[1::2],
        "expanded": FLOATS[2].expand(3, 4),
        "scalar": FLOATS[5],
    }
    yield "shared", {"a": FLOATS, "b": FLOATS, "c": FLOATS[2:4]}
    module = torch.nn.Linear(3, 1, bias=False)
    module.weight = torch.nn.Parameter(FLOATS[:3].view(1, 3))
    yield "module", module.state_dict()
    yield "parameter", {"p": torch.nn.Parameter(FLOATS)}
    yield "training", {"state_dict": {"w": FLOATS}, "epoch": 3, "lr": 0.5, "optimizer": {"m": [LONGS]}}
    yield "nested", {"model": {"layers": [{"w": FLOATS}, {"w": LONGS}]}, "names": ("x", None, True)}
    yield "tensor", FLOATS
    yield "list", [FLOATS, (LONGS, {"k": HALVES})]
    yield "complex", {"c": torch.view_as_complex(FLOATS.view(3, 2)), "u": LONGS.to(torch.uint16)}
    yield "float8", {"f": HALVES.to(torch.float8_e4m3fn), "z": LONGS.bool()}
    yield "conjugate", {"c": torch.view_as_complex(FLOATS.view(3, 2)).conj()}
    yield "sparse", {"s": torch.eye(2).to_sparse(), "w": FLOATS}
    yield "ordered", collections.OrderedDict(a=FLOATS, size=torch.Size([2, 3]), dtype=torch.int8)


def write(target, name, content):
    folder = SEEDS / target
    folder.mkdir(parents=True, exist_ok=True)
    assert len(content) < 4096, (target, name, len(content))
    (folder / name).write_bytes(content)


def torch_files():
    for name, state in states():
        archive = io.BytesIO()
        torch.save(state, archive)
        write("zip", name, archive.getvalue())
        with zipfile.ZipFile(archive) as records:
            [record] = [r for r in records.namelist() if r.endswith("data.pkl")]
            write("pickle", name, records.read(record))
        legacy = io.BytesIO()
        try:
            torch.save(state, legacy, _use_new_zipfile_serialization=False)
        except (NotImplementedError, RuntimeError, AttributeError):
            continue  # That form cannot hold some kinds of tensors.
        write("zip", f"{name}-legacy", legacy.getvalue())
    for protocol in (3, 4, 5):
        archive = io.BytesIO()
        torch.save({"a": FLOATS, "b": {"c": LONGS}}, archive, pickle_protocol=protocol)
        with zipfile.ZipFile(archive) as records:
            [record] = [r for r in records.namelist() if r.endswith("data.pkl")]
            write("pickle", f"protocol-{protocol}", records.read(record))
    # The same archive, packed again by hand.
    packed = io.BytesIO()
    with zipfile.ZipFile(archive) as records, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as out:
        for record in records.namelist():
            out.writestr(record, records.read(record))
    write("zip", "deflated", packed.getvalue())


def safetensors_files():
    tensors = {"a": FLOATS, "b.c": LONGS, "d": HALVES, "e": torch.tensor(True), "f": NONE}
    write("safetensors_header", "plain", safetensors.torch.save(tensors))
    write("safetensors_header", "metadata", safetensors.torch.save(tensors, {"format": "pt", "k": "\u00e9\n"}))
    write("safetensors_header", "one", safetensors.torch.save({"w": FLOATS.view(2, 3)}))
    header = b'{"x":{"dtype":"F4","shape":[2,2],"data_offsets":[0,2]}}   '
    write("safetensors_header", "packed", len(header).to_bytes(8, "little") + header + b"\x12\x34")
    write("safetensors_header", "empty", (2).to_bytes(8, "little") + b"{}")


def indexes():
    shards = {f"layer.{n}.weight": f"model-{n % 2 + 1:05}-of-00002.safetensors" for n in range(4)}
    plain = {"metadata": {"total_size": 96}, "weight_map": shards}
    write("index", "plain", json.dumps(plain, indent=2).encode())
    write("index", "one", json.dumps({"metadata": {}, "weight_map": {"w": "model.safetensors"}}).encode())
    leaving = {"weight_map": {"a": "../x.safetensors", "b": "/x", "c": "sub/x.bin", "d": "./x"}}
    write("index", "leaving", json.dumps(leaving).encode())


def deltas():
    """The kind, the length of the tensor, and its changes."""
    old = bytes(n * 7 % 256 for n in range(300))
    new = bytearray(old)
    for place in (0, 5, 6, 299):
        new[place] ^= 9
    changed = [n for n in range(300) if old[n] != new[n]]
    xor = bytes(a ^ b for a, b in zip(old, new, strict=True))
    overwrite = struct.pack(f"<{len(changed) + 1}I", len(changed), *changed) + bytes(new[n] for n in changed)
    compress = zstandard.ZstdCompressor(level=1).compress
    for kind, name, changes in ((0, "xor", xor), (1, "overwrite", overwrite), (1, "nothing", bytes(4))):
        write("delta", name, struct.pack("<BH", kind, len(old)) + compress(changes))
    metadata = {"version": "000001", "base_version": "000000", "delta_encoding": "xor",
                "compression_format": "zstd", "checksum_format": "adler32"}  # fmt: skip
    index = json.dumps({"metadata": metadata, "weight_map": {"t": "model.safetensors"}}).encode()
    write("delta", "index", struct.pack("<BH", 2, len(old)) + index)


def dcp_tables():
    """Tables of one file of pieces, which the fuzz target has beside each."""
    rows = FLOATS.view(2, 3)
    model = {"a": rows, "b": rows + 6, "turned": rows.t(), "scalar": torch.tensor(1), "f8": HALVES.to(torch.float8_e4m3fn)}
    state = {"model": model, "optimizer": {"state": {"a": {"step": FLOATS}}}, "step": 5, "list": [NONE, LONGS]}

    def change(name, edit):
        table = pickle.loads(saved)
        table.storage_meta.checkpoint_id, table.storage_meta.save_id = pathlib.PosixPath("runs/step-5"), "0"
        edit(table)
        write("dcp_table", name, pickle.dumps(table))

    def join(second):
        """The pieces of `a` and `b` become one tensor."""

        def edit(table):
            joined = table.state_dict_metadata["model.a"]
            joined.size = torch.Size(first + size for first, size in zip(second, (2, 3)))
            joined.chunks.append(ChunkStorageMetadata(torch.Size(second), torch.Size((2, 3))))
            place = table.storage_data.pop(MetadataIndex("model.b", (0, 0)))
            del table.state_dict_metadata["model.b"]
            table.storage_data[MetadataIndex("model.a", second)] = place

        return edit

    def age(table):
        for field in ("planner_data", "storage_meta", "version"):
            del table.__dict__[field]

    def transform(table):
        table.storage_data[MetadataIndex("model.a", (0, 0))].transform_descriptors = ["stream.zstd/1"]

    with tempfile.TemporaryDirectory() as folder:
        dcp.save(state, checkpoint_id=folder, no_dist=True)
        saved = (pathlib.Path(folder) / ".metadata").read_bytes()
        pieces = SEEDS.parent / "dcp_pieces"
        pieces.mkdir(exist_ok=True)
        (pieces / "__0_0.distcp").write_bytes((pathlib.Path(folder) / "__0_0.distcp").read_bytes())
    change("plain", lambda table: None)
    change("rows", join((2, 0)))
    change("columns", join((0, 3)))
    change("old", age)
    change("transformed", transform)


def rank_states(change):
    """What each of two ranks saves of a state that `change` makes for a mesh and a rank."""
    for rank in range(2):
        dist.init_process_group("fake", rank=rank, world_size=2, store=FakeStore())
        yield change(init_device_mesh("cpu", (2,)), rank)
        dist.destroy_process_group()


def cut(placement):
    shape = {Replicate(): (2, 3), Shard(1): (3, 4)}.get(placement, (4, 3))
    full = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)

    def change(mesh, rank):
        return {"w": distribute_tensor(full, mesh, [placement], src_data_rank=None)}

    return change


def older_mesh(mesh, rank):
    state = cut(Shard(0))(mesh, rank)
    mesh.__dict__.clear()
    mesh.__dict__.update(device_type="cpu", mesh=torch.arange(2, dtype=torch.int32), _coordinate_on_dim=[rank])
    return state


def shards(mesh, rank):
    parts = [ShardMetadata([n * 2, 0], [2, 3], f"rank:{n}/cpu") for n in range(2)]
    properties = TensorProperties(dtype=torch.float32)
    metadata = ShardedTensorMetadata(parts, torch.Size([4, 3]), properties)
    local = [sharded_tensor.Shard(FLOATS.clone().view(2, 3), parts[rank])]
    init = sharded_tensor.ShardedTensor._init_from_local_shards_and_global_metadata
    return {"w": init(local, metadata)}


def rank_pieces():
    for name, change in {
        "rows": cut(Shard(0)),
        "columns": cut(Shard(1)),
        "strided": cut(_StridedShard(0, split_factor=2)),
        "replicas": cut(Replicate()),
        "older-mesh": older_mesh,
        "shards": shards,
    }.items():
        pickles = []
        for state in rank_states(change):
            archive = io.BytesIO()
            torch.save(state, archive)
            with zipfile.ZipFile(archive) as records:
                [record] = [r for r in records.namelist() if r.endswith("data.pkl")]
                pickles.append(records.read(record))
        write("rank_pieces", name, len(pickles[0]).to_bytes(2, "little") + b"".join(pickles))


torch_files()
rank_pieces()
safetensors_files()
indexes()
deltas()
dcp_tables()
