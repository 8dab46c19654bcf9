"""Several ranks load a checkpoint together. Each gets what it would load alone, all together read the disk once, and
where one fails or ends the others have an error."""

import json
import random

import ckptfs
import pytest
import torch
from ckptfs.bench import page_cache
from ckptfs.distributed import rank_plan
from ckptfs.torch import load_distributed, load_file
from safetensors.torch import save_file

from compare import same
from ranks import PATIENCE, ended, part, run, start, waited
from samples import numbers, write_shards

OURS = "ckptfs.torch"

ODD = {"odd.seven": numbers(1, 7, 3), "odd.two": numbers(2, 2, 3), "odd.row": numbers(3, 1, 500),
       "none": torch.zeros(0, 3)}  # fmt: skip
TYPES = {
    "types.complex": torch.complex(numbers(4, 50, 4), numbers(5, 50, 4)),
    "types.words": torch.arange(900).to(torch.uint16), "types.flags": torch.arange(7) % 2 == 0,
    "types.small": numbers(6, 40, 50).to(torch.float8_e5m2), "types.short": torch.arange(8).short(),
    "types.turned": numbers(7, 50, 60).t(), "types.one": torch.tensor(7.0), "types.long": torch.arange(300),
    "types.pairs": torch.arange(1200, dtype=torch.uint8).reshape(2, 600).view(torch.float4_e2m1fn_x2),
}  # fmt: skip
WIDE = {"wide.two": numbers(21, 9, 50), "wide.three": numbers(22, 5, 7, 30), "wide.row": numbers(23, 1, 700),
        "wide.five": numbers(24, 5, 5).bfloat16(), "wide.tall": numbers(25, 300, 2), "one": torch.tensor(3),
        "none": torch.zeros(0, 3)}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    torch.save(ODD, folder / "odd.bin")
    torch.save(TYPES, folder / "types.pt")
    save_file(WIDE, folder / "wide.safetensors")
    save_file({"rows": numbers(31, 2, 1 << 20)}, folder / "rows.safetensors")
    torch.save({of: {"w": torch.full((9,), place)} for place, of in enumerate(("first", "second"))}, folder / "two.pt")
    header = json.dumps({
        "whole": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
        "half": {"dtype": "F4", "shape": [2, 3], "data_offsets": [4, 7]},
        "six": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [7, 10]},
    }).encode()  # fmt: skip
    header += b" " * (-len(header) % 8)
    (folder / "half.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(10))
    write_shards(folder / "sharded", 8, 3, 4, 25)
    write_shards(folder / "large", 9, 2, 3, 2400)
    return folder


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_disk_is_read_once_and_every_rank_has_everything(folder, ranks):
    page_cache.clear(sorted((folder / "large").iterdir()))
    got = run(folder, ranks, "distributed_ranks", OURS, "whole")
    for name in ("large", "types.pt", "sharded", "odd.bin"):
        expected = load_file(folder / name, backend="pread")
        size = sum(tensor.nbytes for tensor in expected.values())
        reports = [of[name, "report"] for of in got]
        for of, report in zip(got, reports, strict=True):
            assert list(of[name]) == list(expected)
            for key, tensor in expected.items():
                same(of[name][key], tensor)
            assert (report["tensors"], report["bytes"]) == (len(expected), size)
        assert sum(report["received"] for report in reports) == (ranks - 1) * size
        reads = [sum(report[how] for how in ("cached", "direct", "buffered", "gathered")) for report in reports]
        if name == "large":
            # Each read at most its share, and all together the checkpoint.
            assert sum(reads) == size and max(reads) - min(reads) <= 32 << 20
            assert all(report["received"] == size - read for report, read in zip(reports, reads, strict=True))
            disk = sum(of[name, "disk"] for of in got)
            # The bytes that a starting process reads anyway are in it too.
            assert 0.95 * size < disk < 1.25 * size
    for of in got:
        for key, tensor in ODD.items():
            same(of["cast"][key], tensor.bfloat16())


@pytest.mark.parametrize("ranks", [2, 4])
def test_each_rank_gets_its_part(folder, ranks):
    large = load_file(folder / "large")
    for rank, got in enumerate(run(folder, ranks, "distributed_ranks", OURS, "cut")):
        for dim in (0, 1, 2, -1):
            for name, tensor in WIDE.items():
                cut = name == "wide.three" if dim == 2 else name.startswith("wide.")
                along = dim if cut else 0 if name == "none" else None
                same(got[dim][name], part(tensor, along, rank, ranks))
        dims = {"wide.two": 1, "wide.three": 0, "wide.tall": 0, "wide.five": -1}
        for name, tensor in WIDE.items():
            tensor = tensor.half() if tensor.is_floating_point() else tensor
            same(got["globs"][name], part(tensor, dims.get(name), rank, ranks))
        for name, tensor in large.items():
            same(got["memory"][name], part(tensor, 1, rank, ranks))


@pytest.mark.parametrize("ranks", [2, 4])
def test_each_rank_gets_what_it_asks_for(folder, ranks):
    wants = [["wide.two", "wide.three"], ["wide.two", "wide.three", "wide.tall"], ["one"], []]
    got = run(folder, ranks, "distributed_ranks", OURS, "subsets")
    for rank, of in enumerate(got):
        assert set(of["whole"]) == set(of["cut"]) == set(wants[rank])
        for name in wants[rank]:
            same(of["whole"][name], WIDE[name])
            same(of["cut"][name], part(WIDE[name], None if name in ("one", "wide.tall") else 1, rank, ranks))
    wanted = {name for names in wants[:ranks] for name in names}
    reads = [sum(of["whole", "report"][how] for how in ("cached", "direct", "buffered")) for of in got]
    # Tensors that no rank asks for are not read; those that two ask for are read once.
    assert sum(reads) == sum(WIDE[name].nbytes for name in wanted)


def test_an_error_of_one_rank_is_an_error_of_all(folder):
    first, second = run(folder, 2, "distributed_ranks", OURS, "refused")
    for got in (first, second):
        for name, tensor in WIDE.items():
            same(got["after"][name], tensor)
        # Tensors that no rank asks for may be of types that torch lacks.
        same(got["only"]["whole"], torch.zeros(1))
        same(got["rows"]["rows"], numbers(31, 2, 1 << 20))
    ours, theirs = first["refused"], second["refused"]
    assert len(ours) == len(theirs) == 16, (ours, theirs)
    assert "rank 1 of 2 could not load: No such file or directory" in ours[0]
    assert theirs[0].startswith("FileNotFoundError")
    assert "no tensor matches 'missing.*'" in ours[1] and "rank 0 of 2 could not load" in theirs[1]
    for words in (ours, theirs):
        assert "rank 1 of 2 has other tensors" in words[2] and "rank 1 of 2 has other tensors" in words[3]
        assert "wide.two: cannot be cut along 2: its shape is [9, 50]" in words[4]
        assert "memory= allows 8388608 bytes" in words[5]
        assert "this disk is broken" in words[6]
        assert "rank 1 of 2 has other tensors" in words[10]
        assert "F4 of shape [2, 3]" in words[11]
        assert "Dtype not understood: F6_E2M3" in words[12]
        assert "rows: memory=16777216 allows 2097152 bytes at once, and a row has 4194304" in words[13]
    assert "rank 1 of 2 could not load" in ours[6]
    assert "rank 1 of 2 could not load: MemoryError" in ours[7] and theirs[7].startswith("MemoryError")
    assert "rank 1 of 2 could not load: device nowhere is invalid" in ours[8]
    assert "rank 1 of 2 could not load: " in ours[9]
    for place in (14, 15):
        assert "rank 1 of 2 could not load: no room" in ours[place]
        assert theirs[place] == "MemoryError: no room"


def test_a_failed_load_holds_nothing(folder):
    for got in run(folder, 2, "distributed_ranks", OURS, "lets_go"):
        assert (got["open"], got["held"]) == (0, 0)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_that_dies_ends_the_others_with_an_error(folder, ranks):
    *others, (died, _, _) = ended(start(folder, ranks, "distributed_ranks", OURS, "loses_one"))
    assert died == 9
    for code, _, words in others:
        assert code == 1 and "SafetensorError: " in words, words
        assert "what to do: see why the other rank ended" in words


def test_a_rank_that_does_not_come_is_waited_for_as_long_as_the_group_says(folder):
    code, seconds, words = waited(start(folder, 2, "distributed_ranks", OURS, "waits_for_one"))
    assert code == 1 and "SafetensorError: could not learn whether every rank goes on" in words
    assert PATIENCE - 1 < seconds < PATIENCE + 30


def test_a_process_without_a_group_loads_by_itself(folder):
    got = load_distributed(folder / "wide.safetensors", shard={"wide.*": 0, "none": 1})
    for name, tensor in WIDE.items():
        same(got[name], tensor)
    with pytest.raises(ckptfs.SafetensorError, match="types.pairs: cannot be cut along 1"):
        load_distributed(folder / "types.pt", shard={"types.pairs": 1})
    with pytest.raises(ckptfs.SafetensorError, match="no tensor matches 'wide.t.'"):
        load_distributed(folder / "wide.safetensors", shard={"wide.t.": 1})
    with pytest.raises(FileNotFoundError):
        load_distributed(folder / "nothing")


def test_casts_of_a_rank_stay_within_memory(tmp_path):
    save_file({"row": torch.zeros(1, 3 << 20)}, tmp_path / "row.safetensors")
    with pytest.raises(ckptfs.SafetensorError, match="memory= allows 8388608 bytes of memory=16777216"):
        load_distributed(tmp_path / "row.safetensors", dtype="bfloat16", memory="16M")


def test_shared_bytes_are_read_by_one_rank():
    numbers = random.Random(7)
    for _ in range(300):
        ranks, at_once = numbers.randint(1, 5), numbers.choice([1, 50, 1000])
        plan = []
        for _ in range(numbers.randint(0, 12)):
            shape = tuple(numbers.choice([1, 1, 2, 3, 7]) for _ in range(numbers.randint(0, 4)))
            takers = tuple(rank for rank in range(ranks) if numbers.random() < 0.7)
            dim = numbers.randrange(len(shape)) if shape and numbers.random() < 0.5 else None
            size = 4 * torch.Size(shape).numel()
            plan.append(rank_plan.SharedTensor(size, shape, numbers.random() < 0.8, takers, dim))
        seen = [[] for _ in plan]
        for parcels in rank_plan.rounds(plan, ranks, at_once):
            assert len(parcels) == ranks
            for reader, parcel in enumerate(parcels):
                if parcel is None:
                    continue
                assert reader in parcel.takers
                assert len(parcel.pieces) == 1 or sum(piece.nbytes for piece in parcel.pieces) <= at_once
                for piece in parcel.pieces:
                    wanted = plan[piece.place]
                    assert wanted.takers == parcel.takers and (wanted.dim is not None) == parcel.is_cut
                    assert piece.axis is None or wanted.dim is None or piece.axis < wanted.dim
                    seen[piece.place].append(piece)
        for wanted, pieces in zip(plan, seen, strict=True):
            if rank_plan.is_read_alone(wanted) or not wanted.takers:
                assert not pieces
                continue
            assert sum(piece.nbytes for piece in pieces) == wanted.nbytes
            rows = [row for piece in pieces for row in range(piece.start, piece.start + piece.count)]
            assert sorted(rows) == list(range(len(rows)))
