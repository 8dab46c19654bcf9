"""Several ranks get by `ckptfs.fastsafetensors` what they get by fastsafetensors, and also what that cannot split.
When one ends or does not come, the others end with an error."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from compare import same
from ranks import PATIENCE, ended, part, run, start, waited
from samples import numbers, write_shards

OURS, THEIRS = "ckptfs.fastsafetensors", "fastsafetensors"

ODD = {"odd.seven": numbers(1, 7, 3), "odd.two": numbers(2, 2, 3), "odd.row": numbers(3, 1, 5),
       "none": torch.zeros(0, 3)}  # fmt: skip
TYPES = {
    "types.complex": torch.complex(numbers(4, 5, 4), numbers(5, 5, 4)),
    "types.words": torch.arange(9).to(torch.uint16), "types.flags": torch.arange(7) % 2 == 0,
    "types.small": numbers(6, 4, 5).to(torch.float8_e5m2), "types.short": torch.arange(8).short(),
    "types.turned": numbers(7, 5, 6).t(), "types.one": torch.tensor(7.0),
    "types.pairs": torch.arange(6, dtype=torch.uint8).reshape(2, 3).view(torch.float4_e2m1fn_x2),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    save_file({"q": numbers(11, 6, 4), "k": numbers(12, 6, 4), "h": numbers(13, 8, 2).half(),
               "b": numbers(14, 4, 6).bfloat16(), "w": torch.arange(32).reshape(4, 8)},
              folder / "b.safetensors")  # fmt: skip
    save_file({"o": numbers(15, 6, 4), "u": torch.arange(16, dtype=torch.uint8).reshape(2, 8)},
              folder / "a.safetensors")  # fmt: skip
    save_file({"p": numbers(16, 6, 4)}, folder / "c.safetensors")
    torch.save(ODD, folder / "odd.bin")
    torch.save(TYPES, folder / "types.pt")
    write_shards(folder / "sharded", 8, 2, 1, 5)
    return folder


def test_shared_features_give_the_same_on_every_rank(folder):
    mine, others = run(folder, 2, "fastsafetensors_ranks", OURS, "even"), run(folder, 2, "fastsafetensors_ranks", THEIRS, "even")
    for got, expected in zip(mine, others, strict=True):
        assert got.keys() == expected.keys() and len(got) > 40
        for key, value in expected.items():
            if isinstance(value, torch.Tensor):
                same(got[key], value)
            else:
                assert got[key] == value, key
    assert all(got["from the end", dim] == "refused" for got in mine for dim in (-1, -2))
    assert mine[0]["pushed", "o", 1] is None and mine[1]["pushed", "o", 1] is not None


def test_sizes_that_ranks_do_not_divide_are_split_all_the_same(folder):
    ranks = 3
    expected = ODD | TYPES | {f"layers.{n}.0.weight": numbers(8 + 1000 * n, 5, 5) for n in range(2)}
    for rank, got in enumerate(run(folder, ranks, "fastsafetensors_ranks", OURS, "uneven")):
        for name, tensor in expected.items():
            same(got[name, -1], tensor.contiguous())
            for dim in range(tensor.dim()):
                same(got[name, dim], part(tensor, dim, rank, ranks))
                assert got[name, dim].untyped_storage().nbytes() == got[name, dim].nbytes
        seven, two = (part(ODD[name], 0, rank, ranks) for name in ("odd.seven", "odd.two"))
        same(got["columns"], torch.cat([seven, two, seven]))
        for name in ("odd.seven", "types.complex", "none"):
            for target in range(ranks):
                pushed = got["pushed", name, target]
                assert (pushed is None) == (target != rank)
                if target == rank:
                    same(pushed, expected[name])


def test_a_tensor_can_be_requested_twice_until_it_is_given_up(folder):
    for rank, got in enumerate(run(folder, 2, "fastsafetensors_ranks", OURS, "again")):
        for tensor in (*got["independent"], got["cached"], *([got["alone"]] if rank == 0 else [])):
            same(tensor, ODD["odd.two"])
        same(got["part"], ODD["odd.two"][rank : rank + 1])
        same(got["after"], TYPES["types.complex"])
        same(got["outlives"], TYPES["types.complex"])
        words = got["refused"]
        assert len(words) == 10, words
        assert all("odd.two: all tensors of" in word and "odd.bin" in word for word in words[:4])
        assert "types.complex: cannot be cut along 2" in words[4]
        assert "types.complex: cannot be cut along -2" in words[5]
        assert "types.complex: cannot go to rank 2 of 2" in words[6]
        assert "types.pairs: cannot be cut along 1 into 2: two elements share a byte" in words[7]
        assert "several ranks" in words[8]
        assert "types.complex: columns cannot be cut along -1" in words[9]


def test_casting_while_copying_is_known_to_every_rank(folder):
    expected = ODD | load_file(folder / "a.safetensors")
    for rank, got in enumerate(run(folder, 2, "fastsafetensors_ranks", OURS, "cast")):
        assert got.keys() == expected.keys()
        for name, tensor in expected.items():
            same(got[name], part(tensor.bfloat16(), 0, rank, 2))


def test_a_rank_that_dies_ends_the_others_with_an_error(folder):
    (code, _, words), (died, _, _) = ended(start(folder, 2, "fastsafetensors_ranks", OURS, "loses_one"))
    assert died == 9 and code == 1
    assert "SafetensorError: odd.two: could not be copied from rank 1, by rank 0 of 2" in words
    assert "what to do: see why the other rank ended" in words


def test_a_rank_that_does_not_come_is_waited_for_as_long_as_the_group_says(folder):
    code, seconds, words = waited(start(folder, 2, "fastsafetensors_ranks", OURS, "waits_for_one"))
    assert code == 1
    assert "SafetensorError: odd.two: could not be copied from rank 1" in words
    assert PATIENCE - 1 < seconds < PATIENCE + 30
