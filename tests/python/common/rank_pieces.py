"""Writes one torch.save per rank, with real DTensors in a single process: each rank is one of torch's fake process
groups, which send nothing."""

import contextlib
import zipfile
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed._mesh_layout as mesh_layout
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from compare import bits

DTYPES = [
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.int64, torch.int32, torch.uint8, torch.bool,
]  # fmt: skip


@contextlib.contextmanager
def as_rank(rank, world):
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def piece(full, mesh, placements, transpose=False):
    """This rank's piece of a tensor. `transpose` stores it with the last two axes swapped."""
    cut = distribute_tensor(bits(full) if full.dim() else full, mesh, placements, src_data_rank=None).to_local()
    local = cut.view(full.dtype)
    if transpose and local.dim() > 1:
        local = local.transpose(-1, -2).contiguous().transpose(-1, -2)
    stride = torch.empty(full.shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=full.shape, stride=stride)


def file_name(rank, world):
    return f"model_world_size_{world}_rank_{rank}.pt"


def write_ranks(folder, mesh_shape, tensors, name=file_name, change=lambda state, mesh, rank: None):
    """Writes the file of each rank of a mesh, and returns the whole tensors. `tensors` has each by its name, with its
    placements, or `None` for a plain tensor. `change` may change what is saved."""
    folder.mkdir(parents=True, exist_ok=True)
    world = torch.Size(mesh_shape).numel()
    for rank in range(world):
        with as_rank(rank, world):
            mesh = init_device_mesh("cpu", tuple(mesh_shape))
            cut = lambda full, placements, **how: piece(full, mesh, placements, **how) if placements else full
            state = {key: cut(*value) if isinstance(value, tuple) else cut(**value) for key, value in tensors.items()}
            change(state, mesh, rank)
            torch.save(state, folder / name(rank, world))
    return {key: value[0] if isinstance(value, tuple) else value["full"] for key, value in tensors.items()}


def numbers(rng, shape, dtype):
    """A tensor of random bits."""
    count = torch.Size(shape).numel()
    if dtype is torch.bool:
        return torch.tensor([rng.random() < 0.5 for _ in range(count)]).reshape(shape)
    raw = torch.frombuffer(bytearray(rng.randbytes(count * dtype.itemsize) + bytes(8)), dtype=torch.uint8)
    return raw[: count * dtype.itemsize].clone().view(dtype).reshape(shape)


def random_placement(rng, axes, mesh_axes):
    # Where three axes of a mesh cut unevenly, torch's own ways to cut disagree.
    strided = ["strided"] if mesh_axes < 3 else []
    ways = ["replicate", "shard", "shard", *strided] if axes else ["replicate"]
    way = rng.choice(ways)
    axis = rng.randrange(max(axes, 1))
    if way == "replicate":
        return Replicate()
    return Shard(axis) if way == "shard" else _StridedShard(axis, split_factor=rng.randint(2, 4))


def random_tensors(rng, mesh_axes):
    """Some tensors and their placements on a mesh with that many axes."""
    tensors = {}
    for n in range(6):
        shape = [rng.choice([0, 1, 2, 3, 4, 5, 7, 8, 9]) for _ in range(rng.randint(0, 3))]
        full = numbers(rng, shape, rng.choice(DTYPES))
        placements = [random_placement(rng, len(shape), mesh_axes) for _ in range(mesh_axes)]
        tensors[f"layer.{n}"] = {"full": full, "placements": placements, "transpose": rng.random() < 0.3}
    tensors["buffer"] = (numbers(rng, [3], torch.int64), None)
    return tensors


def spell_mesh_as_2_4(mesh):
    """Gives a mesh the attributes that torch 2.4 saved: a tensor of ranks."""
    ranks, place = mesh.mesh.to(torch.int32), list(mesh.get_coordinate())
    names = mesh.mesh_dim_names
    mesh.__dict__.clear()
    mesh.__dict__.update(
        device_type="cpu", mesh=ranks, mesh_dim_names=names, _flatten_mesh_list=tuple(ranks.flatten().tolist()),
        _parent_mesh=None, _thread_id=None, _dim_group_infos=[("", [0, 1], "1")], _coordinate_on_dim=place,
    )  # fmt: skip


@dataclass
class ShapeAndStride:
    """A layout of a mesh as some versions of torch save it."""

    shape: object
    stride: object


@contextlib.contextmanager
def layouts_as_2_9():
    """Makes torch save layouts of meshes as objects with a shape and a stride."""
    own = mesh_layout._MeshLayout
    ShapeAndStride.__module__, ShapeAndStride.__qualname__ = own.__module__, own.__qualname__
    mesh_layout._MeshLayout = ShapeAndStride
    try:
        yield
    finally:
        mesh_layout._MeshLayout = own


def spell_mesh_as_2_9(mesh, shape=None):
    """Gives a mesh the layout that torch 2.9 saved, of another shape if one is given."""
    shape = shape or tuple(mesh.mesh.shape)
    mesh.__dict__["_layout"] = ShapeAndStride(shape if len(shape) > 1 else shape[0], tuple(mesh.mesh.stride()))


def rewrite_pickle(path, *changes):
    """Replaces bytes in the pickle of a torch file."""
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, raw in records.items():
            if name.endswith("/data.pkl"):
                for old, new in changes:
                    assert old in raw, old
                    raw = raw.replace(old, new)
            archive.writestr(name, raw)


# The modules of the classes in torch 2.4.
MODULES_OF_2_4 = [
    (b"ctorch.distributed.tensor\nDTensor\n", b"ctorch.distributed._tensor.api\nDTensor\n"),
    (b"ctorch.distributed.tensor._dtensor_spec\n", b"ctorch.distributed._tensor.placement_types\n"),
    (b"ctorch.distributed.tensor.placement_types\n", b"ctorch.distributed._tensor.placement_types\n"),
]
