"""Checkpoints of DeepSpeed's ZeRO are shown as the model's whole 32-bit weights, and so are universal ones. Buffers and
frozen parameters keep their own types. Faults that the files show, and formats that are not joined, are refused by
name."""

import json
import shutil
import subprocess

import pytest
import torch
from ckptfs.torch import load_file

import zero
from compare import check_export, check_same, same
from doors import check_every_door
from mounts import Mounts, until
from program import DONE, REFUSED, find_binary
from zero import Run

needs_deepspeed = pytest.mark.skipif(zero.INTERPRETER is None, reason=zero.MISSING)

# The runs of zero_run.py by their number of ranks.
RUNS = {
    1: ["stage2", "stage3"],
    2: ["stage1", "stage2", "stage3", "round-robin", "gradients32"],
    4: ["aligned", "stage3"],
}
ALL_RUNS = [f"{world}/{run}" for world, runs in RUNS.items() for run in runs]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The runs of zero_run.py, which resume from the mount beside them."""
    folder = tmp_path_factory.mktemp("trained")
    mounts = Mounts(find_binary(), tmp_path_factory.mktemp("mounts"))
    try:
        zero.run_deepspeed(folder, mounts(folder).point, RUNS)
    finally:
        mounts.end()
    return folder


def expected_of(trained, run):
    """The tensors of the model itself. With round_robin_gradients DeepSpeed misreads its own weights. The expected ones
    are then those that it joins, which must round to the model's values."""
    if "round-robin" not in run:
        return zero.load(trained / run / "expected.pt")
    joined = zero.load(trained / run / "zero_to_fp32.pt")
    states = torch.load(trained / run / "global_step2/mp_rank_00_model_states.pt", weights_only=False)
    names = {name for group in states["param_shapes"] for name in group} | set(states["shared_params"])
    for name, value in states["module"].items():
        same(joined[name].to(value.dtype), value)
    return {name: joined[name] if name in names else value for name, value in states["module"].items()}


@needs_deepspeed
@pytest.mark.parametrize("run", ALL_RUNS)
def test_a_trained_model_is_joined(ckptfs, mounts, trained, tmp_path, run):
    folder = trained / run / "global_step2"
    report = check_every_door(ckptfs, mounts, folder, expected_of(trained, run), tmp_path / "out.safetensors")
    world = run[0]
    assert any(f"{world} rank" in note and "step 2" in note for note in report["notes"])


@needs_deepspeed
@pytest.mark.parametrize("run", [run for run in ALL_RUNS if "gradients32" not in run])
def test_weights_equal_those_that_deepspeed_joins(trained, run):
    """`zero_to_fp32` makes buffers 32 bits wide. At stage 1 it forgets tensors that no optimizer has."""
    ours, joined = load_file(trained / run / "global_step2"), zero.load(trained / run / "zero_to_fp32.pt")
    for name, value in joined.items():
        same(ours[name].to(value.dtype), value)
    forgotten = {"frozen.weight", "unused.none"} if "stage1" in run or "aligned" in run else set()
    assert set(ours) == set(joined) | forgotten


@needs_deepspeed
def test_runs_cover_the_layouts_that_they_are_for(trained):
    """Several sub-groups, padded parameters, an optimizer without a stage, and tensors of several types."""
    layout = lambda run: json.loads((trained / run / "layout.json").read_text())
    assert layout("4/aligned")["padding"] > 0
    assert layout("2/stage3")["groups"] > 2
    assert not layout("2/gradients32")["has_stage"]
    dtypes = {value.dtype for value in expected_of(trained, "2/stage3").values()}
    assert {torch.float32, torch.bfloat16, torch.int64, torch.bool} <= dtypes


@needs_deepspeed
@pytest.mark.parametrize("run", ALL_RUNS)
def test_training_resumes_from_a_mount(trained, run):
    for rank in range(int(run[0])):
        outcome = json.loads((trained / run / f"resumed{rank}.json").read_text())
        assert outcome["wrong"] == [] and outcome["steps"] == 2
        assert outcome["from"].startswith(str(trained.parent)) and "/mnt" in outcome["from"]


@needs_deepspeed
def test_tied_weights_export_where_deepspeed_does_not_save_them(ckptfs, trained, tmp_path):
    for run in ("1/stage2", "2/stage3"):
        assert "share memory" in (trained / run / "safe_serialization.error").read_text()
        out = ckptfs.export(trained / run / "global_step2", tmp_path / f"{run[0]}.safetensors")
        weights = load_file(out)
        same(weights["head.weight"], weights["embed.weight"])


@needs_deepspeed
@pytest.mark.parametrize("run", [run for run in ALL_RUNS if "round-robin" not in run])
def test_a_universal_checkpoint_has_the_same_weights(ckptfs, mounts, trained, tmp_path, run):
    """Not of round_robin_gradients, whose weights DeepSpeed converts to wrong ones."""
    folder, expected = trained / run / "universal", expected_of(trained, run)
    report = check_every_door(ckptfs, mounts, folder, expected, tmp_path / "out.safetensors")
    assert any("universal checkpoint" in note for note in report["notes"])


# Laid out by hand


@pytest.mark.parametrize("seed", range(150), ids="seed-{}".format)
def test_random_runs_are_joined(tmp_path, seed):
    check_same(load_file(Run(seed).write(tmp_path / "run") and tmp_path / "run", backend="pread"), Run(seed).expected)


@pytest.mark.parametrize("seed", range(40), ids="seed-{}".format)
def test_random_universal_checkpoints_are_shown(tmp_path, seed):
    expected = Run(seed).write_universal(tmp_path / "run")
    check_same(load_file(tmp_path / "run", backend="pread"), expected)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_padding_is_never_shown(ckptfs, tmp_path, stage):
    run = Run(stage, stage, world=3)
    run.groups = [{"a": torch.ones(4), "b": torch.ones(5, 2)}, {"c": torch.ones(1)}]
    run.shared, run.paddings = {}, [[3, 1], [2]] if stage < 3 else None
    expected = run.write(tmp_path / "run")
    check_export(ckptfs, tmp_path / "run", expected, tmp_path / "out.safetensors")


def test_more_ranks_than_digits_are_sorted_by_number(tmp_path):
    expected = Run(1, stage=2, world=12).write(tmp_path / "run")
    check_same(load_file(tmp_path / "run"), expected)


def test_one_dictionary_of_shapes_is_all_groups(tmp_path):
    """Older versions write it at stage 3."""
    run = Run(2, stage=3, world=2)
    older = run.model_states
    join = lambda groups: {name: shape for group in groups for name, shape in group.items()}
    run.model_states = lambda rank: (states := older(rank)) | {"param_shapes": join(states["param_shapes"])}
    check_same(load_file(run.write(tmp_path / "run") and tmp_path / "run"), run.expected)


def test_a_universal_checkpoint_is_shown_without_the_model(ckptfs, tmp_path):
    run = Run(3, stage=2)
    run.write_universal(tmp_path / "run", states=False)
    expected = {name: value.float() for name, value in run.model_states(0)["module"].items()}
    expected |= {name: value for group in run.groups for name, value in group.items()}
    out = ckptfs.export(tmp_path / "run", tmp_path / "out.safetensors")
    check_same(load_file(out), expected)
    assert any("buffers may be missing" in note for note in ckptfs.inspect(tmp_path / "run")["notes"])


def test_a_new_parameter_of_a_universal_checkpoint_is_seen(mounts, tmp_path):
    run = Run(4, stage=2)
    expected = run.write_universal(tmp_path / "run", states=False) and load_file(tmp_path / "run")
    mount = mounts(tmp_path / "run")
    check_same(load_file(mount / "model.safetensors"), expected)
    run.write_weight(tmp_path / "run", "added", {"param": torch.ones(3)})
    until("the parameter is shown", lambda: "added" in load_file(mount / "model.safetensors"))


# Faults


def check_refused(ckptfs, folder, *words):
    """Asserts that a folder is refused in these words, within bounds of time and memory, with nothing written."""
    out = folder.with_name("out.safetensors")
    for outcome in (
        ckptfs("export", folder, out, bounded=True),
        ckptfs("inspect", "--json", folder, bounded=True),
    ):
        assert outcome.code == REFUSED, outcome
        for word in ["what to do: ", *words]:
            assert word in outcome.error
    assert not out.exists()


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "run"


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_missing_file_of_an_optimizer_is_named(ckptfs, folder, stage, rank):
    run = Run(5, stage, world=3)
    run.write(folder)
    (folder / run.optim_name(rank)).unlink()
    check_refused(ckptfs, folder, "missing", f"rank_{rank}_mp_rank_00_optim_states.pt")


def test_missing_files_of_the_model_are_named(ckptfs, folder):
    run = Run(5, 3, world=3)
    run.frozen = {"frozen": torch.ones(7, dtype=torch.bfloat16)}
    run.write(folder)
    (folder / run.model_name(2)).unlink()
    check_refused(ckptfs, folder, "missing", run.model_name(2))


@pytest.mark.parametrize("stage", [2, 3])
def test_a_missing_model_is_named(ckptfs, folder, stage):
    run = Run(5, stage, world=2)
    run.write(folder)
    for path in folder.glob("*model_states.pt"):
        path.unlink()
    check_refused(ckptfs, folder, "missing", "model_states.pt")


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("part", [0, 0.5, 0.99])
@pytest.mark.parametrize("kind", ["optim", "model"])
def test_a_truncated_file_is_named(ckptfs, folder, stage, part, kind):
    run = Run(5, stage, world=2)
    run.write(folder)
    path = folder / (run.optim_name(1) if kind == "optim" else run.model_name(0))
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * part)])
    check_refused(ckptfs, folder, path.name)


@pytest.mark.parametrize("stage", [2, 3])
def test_optimizers_of_runs_of_other_sizes_are_refused(ckptfs, folder, stage):
    Run(5, stage, world=2).write(folder)
    other = Run(5, stage, world=4)
    other.write(folder.with_name("other"))
    shutil.copy(folder.with_name("other") / other.optim_name(1), folder)
    check_refused(ckptfs, folder, "two saves", other.optim_name(1))


@pytest.mark.parametrize("stage", [2, 3])
def test_a_surplus_file_of_an_optimizer_is_refused(ckptfs, folder, stage):
    run = Run(5, stage, world=2)
    run.write(folder)
    shutil.copy(folder / run.optim_name(1), folder / run.optim_name(2))
    check_refused(ckptfs, folder, "two saves", run.optim_name(2))


@pytest.mark.parametrize("stage", [2, 3])
def test_a_file_of_a_rank_that_the_run_did_not_have_is_named(ckptfs, folder, stage):
    run = Run(5, stage, world=2)
    run.write(folder)
    shutil.copy(folder / run.optim_name(1), folder / run.optim_name(9))
    check_refused(ckptfs, folder, run.optim_name(9), "left over from another run", "had 2 ranks")


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_model_of_an_earlier_step_than_the_optimizer_is_refused(ckptfs, folder, stage):
    run = Run(5, stage, world=2)
    run.write(folder)
    run.step -= 2
    for rank in range(2 if stage == 3 else 1):
        torch.save(run.model_states(rank), folder / run.model_name(rank))
    check_refused(ckptfs, folder, "two saves", run.model_name(0), run.optim_name(0))


@pytest.mark.parametrize("stage", [1, 3])
def test_an_optimizer_that_left_steps_out_is_joined(ckptfs, folder, stage):
    """Steps with gradients that overflow are counted by the model alone."""
    run = Run(5, stage, world=2)
    expected = run.write(folder)
    run.step += 2
    for rank in range(2 if stage == 3 else 1):
        torch.save(run.model_states(rank), folder / run.model_name(rank))
    check_export(ckptfs, folder, expected, folder.with_name("out.safetensors"))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_optimizers_of_two_steps_are_refused(ckptfs, folder, stage):
    run = Run(5, stage, world=3)
    run.write(folder)
    run.step += 1
    torch.save(run.optim_states(run.optimizer_groups()[2]), folder / run.optim_name(2))
    check_refused(ckptfs, folder, "two saves", run.optim_name(2))


def test_models_of_two_steps_are_refused(ckptfs, folder):
    run = Run(5, 3, world=2)
    run.write(folder)
    run.step += 1
    torch.save(run.model_states(1), folder / run.model_name(1))
    check_refused(ckptfs, folder, "two saves", run.model_name(1))


@pytest.mark.parametrize("stage", [2, 3])
def test_an_optimizer_that_is_too_short_is_refused(ckptfs, folder, stage):
    run = Run(5, stage, world=2)
    run.write(folder)
    parts = [[part[:0] for part in parts] for parts in run.optimizer_groups()]
    torch.save(run.optim_states(parts[1]), folder / run.optim_name(1))
    check_refused(ckptfs, folder, "pieces are missing")


def test_an_optimizer_of_another_number_of_groups_is_refused(ckptfs, folder):
    run = Run(5, 2, world=2)
    run.write(folder)
    torch.save(run.optim_states([torch.ones(3)] * 9), folder / run.optim_name(1))
    check_refused(ckptfs, folder, "number of groups")


PARALLEL = {
    "tensor": ("mp_rank_01_model_states.pt", {}, "tensor parallelism"),
    "tensor-of-an-optimizer": ("zero_pp_rank_0_mp_rank_01_optim_states.pt", {}, "tensor parallelism"),
    "pipeline": ("layer_00-model_00-model_states.pt", {}, "parallelism"),
    "experts": ("layer_0_expert_0_mp_rank_00_model_states.pt", {}, "parallelism"),
    "experts-of-an-optimizer": ("expert_0_mp_rank_00_optim_states.pt", {}, "parallelism"),
    "tensor-by-its-size": (None, {"mp_world_size": 2}, "tensor parallelism"),
    "layers-of-experts": (None, {"ds_autoep_layers": [{"checkpoint_format": "zero3_partitioned"}]}, "AutoEP"),
    "layers-of-experts-by-the-older-key": (None, {"autoep_layers": [{"num_experts": 4}]}, "AutoEP"),
}  # fmt: skip


@pytest.mark.parametrize("case", PARALLEL)
def test_parallelism_that_is_not_joined_is_refused_by_name(ckptfs, folder, case):
    name, more, word = PARALLEL[case]
    run = Run(5, 2, world=2)
    run.write(folder)
    if name:
        torch.save({"module": {}}, folder / name)
    else:
        torch.save(run.model_states(0) | more, folder / run.model_name(0))
    check_refused(ckptfs, folder, word)


UNIVERSAL_FAULTS = ["missing", "truncated", "another-shape", "no-model"]


@pytest.mark.parametrize("fault", UNIVERSAL_FAULTS)
def test_a_damaged_universal_checkpoint_is_refused_by_name(ckptfs, folder, fault):
    run = Run(5, 3, world=2)
    run.write_universal(folder)
    name = next(iter(run.groups[0]))
    path = folder / "zero" / name / "fp32.pt"
    if fault == "missing":
        path.unlink()
    elif fault == "truncated":
        path.write_bytes(path.read_bytes()[:-100])
    elif fault == "another-shape":
        torch.save(torch.ones(1000), path)
    else:
        for states in folder.glob("*.pt"):
            states.unlink()
    check_refused(ckptfs, folder, "model_states.pt" if fault == "no-model" else f"zero/{name}/fp32.pt")


def test_another_folder_called_zero_is_no_checkpoint(ckptfs, tmp_path):
    folder = tmp_path / "model"
    (folder / "zero/notes").mkdir(parents=True)
    torch.save({"a": torch.ones(2)}, folder / "pytorch_model.bin")
    check_export(ckptfs, folder, {"a": torch.ones(2)}, tmp_path / "out.safetensors")


def test_a_universal_checkpoint_of_more_parameters_than_open_files(ckptfs, tmp_path):
    """The command raises the limit of open files as far as it may."""
    run = Run(6, stage=2)
    run.groups = [{f"p{n}": torch.full((2,), float(n)) for n in range(600)}]
    run.shared = {}
    expected = run.write_universal(tmp_path / "run")
    command = 'ulimit -S -n 256 && exec "$@"'
    words = ["sh", "-c", command, "sh", ckptfs.binary, "export", tmp_path / "run", tmp_path / "out.safetensors"]
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True)
    assert done.returncode == DONE, done.stderr
    check_same(load_file(tmp_path / "out.safetensors"), expected)
