"""Folders of torch.distributed.checkpoint are shown as the tensors that were saved, bit for bit, through every door.

Training resumes from them through a mount.
"""

import io
import itertools
import os
import pickle
import random
import shutil
import subprocess
import sys
import time

import ckptfs as package
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from ckptfs import SafetensorError, safe_open
from ckptfs.torch import load_distributed, load_file
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorProperties
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

from compare import any_index, check_same, check_tensors
from dcp_tables import FULL, OPTIMIZER, W, change_place, numbered_tensors
from mounts import PATIENCE, python
from program import COMMON, FAILED
from refusals import check_refused
from training import (
    BY_RANKS,
    DTYPES,
    any_tensor,
    check_doors,
    check_mounted,
    consolidate,
    edit_table,
    one_rank,
    save_pieces,
    save_random_pieces,
    save_whole,
)


MODEL = {"a": FULL, "b.c": torch.arange(5), "d": torch.ones(2, dtype=torch.bfloat16)}


def model_tensors(tensors):
    """The tensors of the model among those of a whole state, without its key."""
    found = {name.partition(".")[2]: tensor for name, tensor in tensors.items() if name.startswith(("model.", "state_dict."))}
    return {name: tensor.contiguous() for name, tensor in found.items()}


@pytest.mark.parametrize("name", BY_RANKS)
def test_what_ranks_saved_is_the_same_through_every_door(ckptfs, saved_by_ranks, tmp_path, name):
    folder = saved_by_ranks / name
    expected = torch.load(f"{folder}.expected")
    out = tmp_path / "out.safetensors"
    check_doors(ckptfs, folder, expected, out)
    if not name.endswith("-tables"):
        # torch joins no tables of ranks.
        check_same(model_tensors(consolidate(folder)), expected)
    other = tmp_path / "other.pt"
    torch.save(expected | {"scalar": torch.tensor(4), "rows.rows": torch.zeros(1)}, other)
    assert ckptfs("verify", folder, "--against", other).code == FAILED


@pytest.fixture(scope="module")
def mounted(saved_by_ranks):
    """What ranks saved, through a mount."""
    with package.mount(saved_by_ranks) as path:
        yield path


@pytest.mark.parametrize("name", BY_RANKS)
def test_what_ranks_saved_is_the_same_through_a_mount(ckptfs, saved_by_ranks, mounted, tmp_path, name):
    out = ckptfs.export(saved_by_ranks / name, tmp_path / "out.safetensors")
    expected = torch.load(f"{saved_by_ranks / name}.expected")
    check_mounted(mounted / name / "model.safetensors", expected, out)
    check_same(load_file(mounted / name), expected)


@pytest.mark.parametrize("name", BY_RANKS)
def test_originals_stay_as_they_are_in_a_mount(saved_by_ranks, mounted, name):
    originals = sorted(os.listdir(saved_by_ranks / name))
    assert sorted(os.listdir(mounted / name)) == sorted([*originals, "model.safetensors"])
    for original in originals:
        assert (mounted / name / original).read_bytes() == (saved_by_ranks / name / original).read_bytes()


@pytest.mark.parametrize("name", ["dcp-4-plain", "dcp-4-files", "dcp-2-threads", "dcp-1-plain"])
def test_training_resumes_through_a_mount(saved_by_ranks, mounted, name):
    expected = torch.load(f"{saved_by_ranks / name}.expected")
    names = [name for name in expected if not name.startswith("layers.")]
    state = {"model": {name: torch.zeros_like(expected[name]) for name in names}, "step": 0}
    state["model"]["layers"] = [{"w": torch.zeros(7, 4), "b": torch.zeros(n)} for n in range(3)]
    state["optimizer"] = {"state": {"rows": {"exp_avg": torch.zeros(7, 4)}}}
    dcp.load(state, checkpoint_id=mounted / name, no_dist=True)
    check_same({name: state["model"][name] for name in names}, {name: expected[name] for name in names})
    for n, layer in enumerate(state["model"]["layers"]):
        check_same(layer, {key: expected[f"layers.{n}.{key}"] for key in "wb"})
    assert state["step"] == 5 and torch.equal(state["optimizer"]["state"]["rows"]["exp_avg"], expected["rows"])


def test_a_group_of_ranks_loads_a_folder(saved_by_ranks):
    with one_rank():
        check_same(load_distributed(saved_by_ranks / "mesh-4"), torch.load(saved_by_ranks / "mesh-4.expected"))


def test_optimizer_state_can_be_chosen(ckptfs, saved_by_ranks, tmp_path):
    out = ckptfs.export(saved_by_ranks / "dcp-4-plain", tmp_path / "out.safetensors", "--root", "optimizer")
    check_tensors(out, {"state.rows.exp_avg": torch.arange(28.0).reshape(7, 4)})


# Hundreds of cases of any boxes, in folders that a fixture writes at once.
SEEDS = range(300)


def random_case(folder, seed):
    rng = random.Random(seed)
    tensors = {}
    for n in range(rng.randint(1, 4)):
        shape = [rng.choice((0, 1, 1, 2, 3, 4, 5, 6, 7)) for _ in range(rng.randint(0, 4))]
        tensors[f"t{n}.{'x' * rng.randint(0, 30)}"] = any_tensor(rng, shape, rng.choice(DTYPES))
    save_random_pieces(rng, folder, tensors)
    return tensors


@pytest.fixture(scope="module")
def random_cases(tmp_path_factory):
    folder = tmp_path_factory.mktemp("random")
    cases = {seed: random_case(folder / str(seed), seed) for seed in SEEDS}
    with package.mount(folder) as path:
        yield folder, path, cases


@pytest.mark.parametrize("seed", SEEDS)
def test_any_boxes_are_joined(ckptfs, random_cases, tmp_path, seed):
    folder, mounted, cases = random_cases
    expected, path = cases[seed], folder / str(seed)
    rng = random.Random(seed)
    check_same(load_file(path, backend=rng.choice(("mmap", "pread"))), expected)
    with safe_open(path, "pt") as file:
        for name, tensor in expected.items():
            index = any_index(rng, tensor.shape)
            check_same({name: file.get_slice(name)[index].contiguous()}, {name: tensor[index].contiguous()})
    out = ckptfs.export(path, tmp_path / "out.safetensors")
    check_mounted(mounted / str(seed) / "model.safetensors", expected, out)
    joined = consolidate(path)
    check_same({name.removeprefix("model."): tensor for name, tensor in joined.items()}, expected)


# The states that programs save, and the tensors that are shown of each.
SELECTED = {
    "model": ({"model": W, "optimizer": OPTIMIZER, "step": 1}, W),
    "state-dict": ({"state_dict": W, "optimizer_0": OPTIMIZER}, W),
    "lightning": ({"state_dict": W, "optimizer_states": [OPTIMIZER], "loops": {"x": torch.ones(1)}}, W),
    "torchtitan": (
        {**W, "optimizer": OPTIMIZER, "dataloader": {"dp_rank_0": torch.ones(1)}, "train_state": {"step": torch.ones(1)},
         "lr_scheduler": {"last_epoch": torch.ones(1)}}, W,
    ),
    "flat-torchtitan": (
        {**W, "lr_scheduler.last": torch.ones(1), "train_state": torch.ones(1), "optimizer_0.state.a.exp_avg": torch.ones(1),
         "optimizer_0.param_groups.a.lr": 0.1}, W,
    ),
    "app": ({"app": {"model": W, "optim": OPTIMIZER}}, W),
    "network": ({"net": W, "optimizer": OPTIMIZER, "rng_state": {"cpu": torch.ones(3)}}, W),
    "model-alone": (W, W),
    "nested": ({"model": {"layers": [W, W], "head": W}}, {
        f"{prefix}.{name}": tensor for prefix in ("layers.0", "layers.1", "head") for name, tensor in W.items()
    }),
    "hugging-face": (numbered_tensors("model.a.weight", "lm_head.weight"), numbered_tensors("model.a.weight", "lm_head.weight")),
}  # fmt: skip


@pytest.mark.parametrize("kind", SELECTED)
def test_the_model_is_found_in_the_state_of_a_run(ckptfs, tmp_path, kind):
    state, expected = SELECTED[kind]
    save_whole(tmp_path / "step-1", state)
    check_doors(ckptfs, tmp_path / "step-1", expected, tmp_path / "out.safetensors")


def test_several_dictionaries_are_refused_with_their_keys(ckptfs, tmp_path):
    path = tmp_path / "step-1"
    save_whole(path, {"actor": W, "critic": numbered_tensors("v.weight"), "optimizer": OPTIMIZER})
    check_refused(ckptfs, path, "it is unclear which of its dictionaries is the model", "`actor`", "`critic`", "--root actor")
    with package.mount(tmp_path) as mount:
        assert "model.safetensors" not in os.listdir(mount / "step-1")
    with package.mount(path, root="critic") as mount:
        check_same(load_file(mount / "model.safetensors"), numbered_tensors("v.weight"))
    out = ckptfs.export(path, tmp_path / "out.safetensors", "--root", "actor")
    check_tensors(out, W)
    check_same(load_file(path, root="critic"), numbered_tensors("v.weight"))
    check_refused(ckptfs, path, "no tensors under `nothing`", "`actor`", options=("--root", "nothing"))


def test_a_folder_of_training_state_alone_shows_no_virtual_file(ckptfs, tmp_path):
    path = tmp_path / "optimizer_0"
    save_whole(path, {"optimizer": OPTIMIZER})
    check_refused(ckptfs, path, "it holds training state (`optimizer`) and no model", "--root optimizer")
    model = torch.nn.Linear(2, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    for n, state in enumerate(
        [
            get_optimizer_state_dict(model, optimizer),
            get_optimizer_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True)),
            optimizer.state_dict(),
        ]
    ):
        other = tmp_path / f"optimizer-{n}"
        save_whole(other, state)
        check_refused(ckptfs, other, "it holds training state (`state`) and no model", "--root state")
        shutil.rmtree(other)
    (listing,) = ckptfs("ls", "--json", path).json()
    assert {entry["kind"] for entry in listing["entries"]} == {"file"}
    assert "it holds training state" in str(listing)
    with package.mount(tmp_path) as mount:
        assert sorted(os.listdir(mount / "optimizer_0")) == [".metadata", "__0_0.distcp"]


def test_a_real_file_wins(tmp_path):
    save_whole(tmp_path / "step-1", {"model": W})
    (tmp_path / "step-1/model.safetensors").write_bytes(b"real")
    with package.mount(tmp_path) as mount:
        assert (mount / "step-1/model.safetensors").read_bytes() == b"real"


def test_ls_says_what_a_virtual_file_is_joined_from(ckptfs, saved_by_ranks):
    listed = ckptfs("ls", saved_by_ranks / "dcp-4-plain").stdout
    assert "joined from torch.distributed.checkpoint: 4 ranks" in listed
    assert "shown: `model`; not shown, choose with --root: `list`, `optimizer`" in listed


def test_tables_of_older_versions_are_read(ckptfs, tmp_path, saved_by_rows):
    """Without the newer fields, and with the properties of tensors in their older module and form."""

    def change(table):
        for field in ("storage_meta", "version", "planner_data"):
            del table.__dict__[field]
        for info in table.storage_data.values():
            info.__dict__.pop("transform_descriptors", None)

    edit_table(saved_by_rows, change)
    table = (saved_by_rows / ".metadata").read_bytes()
    check_same(load_file(saved_by_rows), {"a": FULL, "b": torch.arange(5)})
    new, old = b"torch.distributed.checkpoint.metadata", b"torch.distributed._shard.sharded_tensor.metadata"
    older = pickle.loads(table)
    (saved_by_rows / ".metadata").write_bytes(dump_renamed(older, {"TensorProperties": old.decode(), "_MEM_FORMAT_ENCODING": old.decode()}))
    assert old in (saved_by_rows / ".metadata").read_bytes() and new in (saved_by_rows / ".metadata").read_bytes()
    check_doors(ckptfs, saved_by_rows, {"a": FULL, "b": torch.arange(5)}, tmp_path / "out.safetensors")


def dump_renamed(table, modules):
    """Pickles a table with some classes in other modules, and with properties of five fields."""
    class Old(pickle._Pickler):
        def save_global(self, obj, name=None):
            module = modules.get(getattr(obj, "__name__", ""))
            if module is None:
                return super().save_global(obj, name)
            self.save(module)
            self.save(obj.__name__)
            self.write(pickle.STACK_GLOBAL)
            self.memoize(obj)

        dispatch = {**pickle._Pickler.dispatch, type: save_global}

        def reducer_override(self, obj):
            if isinstance(obj, TensorProperties):
                made = obj.__reduce_ex__(4)
                return (*made[:2], made[2][:5], *made[3:])
            return NotImplemented

    out = io.BytesIO()
    Old(out, 4).dump(table)
    return out.getvalue()


def test_files_of_other_names_are_found_by_the_table(tmp_path, saved_by_rows):
    """Megatron puts the name of a group in front."""
    (saved_by_rows / "__1_0.distcp").rename(saved_by_rows / "default__1_0.distcp")
    edit_table(saved_by_rows, change_place(relative_path="default__1_0.distcp"))
    check_same(load_file(saved_by_rows), {"a": FULL, "b": torch.arange(5)})
    (saved_by_rows / "deeper").mkdir()
    (saved_by_rows / "default__1_0.distcp").rename(saved_by_rows / "deeper/1.distcp")
    edit_table(saved_by_rows, change_place(relative_path="deeper/1.distcp"))
    check_same(load_file(saved_by_rows), {"a": FULL, "b": torch.arange(5)})


OPENS = """
import resource, sys
import ckptfs.torch
soft, hard = int(sys.argv[2]), int(sys.argv[3])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
try:
    print(ckptfs.torch.load_file(sys.argv[1])["a"].sum().item())
except OSError as fault:
    print(fault, *fault.__notes__)
"""


def test_a_thousand_ranks_need_as_many_open_files(ckptfs, tmp_path):
    """The command and Python raise the soft limit. Where the hard one does not suffice, the error says what does."""
    path = tmp_path / "step-1"
    rows = torch.arange(3000.0).reshape(1500, 2)
    ranks = [[("a", ((n, 0), (1, 2)))] for n in range(1500)]
    save_pieces(FileSystemWriter(path, sync_files=False), {"a": rows}, ranks)
    out = tmp_path / "out.safetensors"
    words = ["sh", "-c", 'ulimit -S -n 300 && exec "$@"', "sh", ckptfs.binary, "export", path, out]
    subprocess.run(list(map(str, words)), check=True, capture_output=True)
    check_tensors(out, {"a": rows})
    assert python("-c", OPENS, path, 300, 4000).stdout == f"{rows.sum().item()}\n"
    done = python("-c", OPENS, path, 300, 300)
    assert "Too many open files" in done.stdout and "ulimit -n" in done.stdout, done


def read_whole(path):
    return safetensors.torch.load((path / "model.safetensors").read_bytes())


def test_steps_that_come_and_go_are_whole_or_not_there(tmp_path):
    runs = tmp_path / "runs"
    runs.mkdir()
    saver = subprocess.Popen([sys.executable, COMMON / "saving_loop.py", runs], stdin=subprocess.PIPE)
    new = {"mount": 0, "folder": 0}
    replaced = dict(new)
    ways = {"mount": read_whole, "folder": lambda path: load_file(path, backend="pread")}
    try:
        with package.mount(runs) as mount:
            roots = {"mount": mount, "folder": runs}
            end = time.monotonic() + PATIENCE
            while min(new.values()) < 10 or min(replaced.values()) < 5:
                assert time.monotonic() < end and saver.poll() is None, (new, replaced)
                for way, step in itertools.product(ways, os.listdir(mount)):
                    try:
                        state = ways[way](roots[way] / step)
                    except (SafetensorError, OSError):
                        continue
                    numbers = {float(value) for tensor in state.values() for value in tensor.unique()}
                    assert len(numbers) == 1, f"{way} {step} is a mixture: {numbers}"
                    assert sorted(state) == ["columns", "rows", "scalar"]
                    if step == "same":
                        replaced[way] += 1
                    else:
                        assert {step} == {f"step-{number:.0f}" for number in numbers}
                        new[way] += 1
    finally:
        saver.kill()
        saver.wait()
