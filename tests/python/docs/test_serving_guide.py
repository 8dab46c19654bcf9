"""The code of docs/serving.md runs as it stands there, and keeps what the guide promises."""

import logging
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import ckptfs
import pytest
import torch
from ckptfs.torch import load_file, save_file
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from transformers import AutoModelForCausalLM

import models
from compare import check_same
from guides import blocks, ran
from mounts import until
from samples import numbers
from versions import write_delta

SEVERAL, HOW_MUCH, IN_THE_BACKGROUND, AT_ONCE, RANKS, ADAPTERS, VERSIONS, WHAT_GOES_ON, WHEN_WRONG = blocks("serving.md")


@pytest.fixture
def shelf(tmp_path, monkeypatch, left):
    """A service's folder: a sharded model, one in a pickle, adapters as pickles. Nothing stays mounted."""
    models.save_shards(models.llama(), tmp_path / "models/llama")
    models.save_bin(models.gpt2(), tmp_path / "models/gpt2")
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    ckptfs.uninstall()
    ckptfs.configure(backend=None, threads=None, memory=None)
    assert not left()


def mapped(name):
    """The mapped files of this process with such a name."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[-1] for line in lines if name in line}


@pytest.mark.parametrize("installed", [True, False])
def test_several_models_load_with_and_without_install(shelf, installed):
    block = SEVERAL if installed else SEVERAL.replace("ckptfs.install()\n", "")
    assert installed == (block == SEVERAL)
    before = ckptfs.stats()["loads"]
    served = ran(block)["models"]
    assert (ckptfs.stats()["loads"] > before) == installed
    models.check_same(served["llama"], models.llama())
    models.check_same(served["gpt2"], models.gpt2())
    assert len(mapped(f"{shelf}/models/llama/model-")) == (4 if installed else 0)
    assert mapped("/llama/model.safetensors") == (set() if installed else {"/llama/model.safetensors"})


TENSOR_BYTES = 64 << 20

MEMORY = """
import sys, ckptfs.torch
tensors = ckptfs.torch.load_file(sys.argv[1], backend=sys.argv[2])
tensors["w"].sum()
print("ready", flush=True)
sys.stdin.readline()
lines = open("/proc/self/smaps").read().splitlines() if sys.argv[2] == "mmap" else []
at = [n for n, line in enumerate(lines) if line.endswith(sys.argv[1])]
print(sum(int(line.split()[1]) << 10 for n in at for line in lines[n:n + 8] if line.startswith("Pss:")))
print([int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("RssAnon")][0])
"""


def memory_of_two(path, backend):
    """Private memory of each of two processes with the same tensors: of the mapped file, and of all else."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", MEMORY, str(path), backend]
    both = [
        subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for one in both:
        assert one.stdout.readline() == "ready\n"
    found = []
    for one in both:
        one.stdin.write("\n")
        one.stdin.flush()
        found.append([int(one.stdout.readline()) for _ in range(2)])
    # Both live until both were measured: a single one would have all of it as its own.
    for one in both:
        one.communicate()
    return found


def test_processes_share_what_they_map(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"w": torch.ones(TENSOR_BYTES // 4)}, path)
    [(shared, own), _] = memory_of_two(path, "mmap")
    [(_, owned), _] = memory_of_two(path, "pread")
    assert TENSOR_BYTES / 3 < shared < TENSOR_BYTES * 2 / 3, "half of it each"
    assert owned - own > TENSOR_BYTES * 2 / 3


def test_mapped_tensors_change_with_a_file_that_is_written_over(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"w": numbers(1, 5000)}, tmp_path / "newer.safetensors")
    newer = (tmp_path / "newer.safetensors").read_bytes()
    for how, after in (("mmap", numbers(1, 5000)), ("pread", numbers(2, 5000))):
        save_file({"w": numbers(2, 5000)}, path)
        tensor = load_file(path, backend=how)["w"]
        save_file({"w": numbers(3, 5000)}, path)
        assert torch.equal(tensor, numbers(2, 5000)), "another file took its place"
        save_file({"w": numbers(2, 5000)}, path)
        tensor = load_file(path, backend=how)["w"]
        with path.open("r+b") as file:
            file.write(newer)
        assert torch.equal(tensor, after), "it was written over"


@pytest.mark.parametrize("backend", ["mmap", "pread"])
def test_a_truncated_file_ends_the_processes_that_map_it(tmp_path, backend):
    path = tmp_path / "model.safetensors"
    save_file({"w": torch.ones(1 << 20)}, path)
    program = (
        "import os, sys, ckptfs.torch; w = ckptfs.torch.load_file(sys.argv[1], backend=sys.argv[2])['w'];"
        "os.truncate(sys.argv[1], 0); print(w.sum().item())"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", program, path, backend]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if backend == "mmap":
        assert done.returncode == -signal.SIGBUS
    else:
        assert (done.returncode, done.stdout) == (0, f"{float(1 << 20)}\n")


def test_configured_defaults_hold_for_libraries_too(shelf):
    ran(HOW_MUCH)
    ran(SEVERAL)
    assert not mapped(f"{shelf}/models")
    load_file("models/llama")
    assert ckptfs.last_report().mapped == 0


def test_a_model_loads_in_the_background(shelf, capsys):
    made = ran(IN_THE_BACKGROUND)
    check_same(made["tensors"], models.llama().state_dict())
    assert not mapped(f"{shelf}/models/llama")
    assert made["upcoming"].report.tensors == len(made["tensors"])
    assert "tensors" in capsys.readouterr().out


def test_adapters_are_exchanged_and_the_base_is_kept(shelf):
    saved = {}
    for seed, name in enumerate(("first", "second", "newer")):
        torch.manual_seed(seed)
        config = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
        model = get_peft_model(models.llama(), config)
        model.save_pretrained(shelf / "models/adapters" / name, safe_serialization=False)
        saved[name] = get_peft_model_state_dict(model)
        assert (shelf / "models/adapters" / name / "adapter_model.bin").exists()
    model = ran(ADAPTERS)["model"]
    assert model.active_adapter == "second"
    for name, values in (("first", "first"), ("second", "newer")):
        check_same(get_peft_model_state_dict(model, adapter_name=name), saved[values])
    base, kept = models.llama().state_dict(), model.get_base_model().state_dict()
    kept = {name.replace(".base_layer", ""): tensor for name, tensor in kept.items()}
    check_same({name: kept[name] for name in base}, base)


def test_versions_of_a_trainer_are_whole_models(shelf):
    base = load_file("models/llama")
    first = {name: tensor + 1 if name.endswith("q_proj.weight") else tensor for name, tensor in base.items()}
    second = {name: tensor * 2 if "layers.1" in name else tensor for name, tensor in first.items()}
    write_delta("updates", 1, base, first)
    write_delta("updates", 2, first, second, encoding="overwrite")
    check_same(ran(VERSIONS)["weights"], second)
    with ckptfs.mount("updates", delta_base="models/llama") as path:
        model = AutoModelForCausalLM.from_pretrained(path / "weight_v000002", dtype="auto")
        assert torch.equal(model.model.layers[1].self_attn.q_proj.weight, second["model.layers.1.self_attn.q_proj.weight"])


def test_several_checkpoints_load_at_once(shelf):
    adapter = {"up": numbers(2, 4, 8), "steps": torch.arange(3)}
    (shelf / "models/adapters/first").mkdir(parents=True)
    save_file(adapter, shelf / "models/adapters/first/adapter_model.safetensors")
    parts = ran(AT_ONCE)["parts"]
    report = ckptfs.last_report()
    check_same(parts["adapter"], {"up": adapter["up"].bfloat16(), "steps": adapter["steps"]})
    for name, of in (("base", "llama"), ("other", "gpt2")):
        stored = load_file(f"models/{of}", dtype="bfloat16")
        check_same(parts[name], stored)
    assert report.tensors == sum(map(len, parts.values())) and not report.mapped


CHECKED = """
from ckptfs.torch import load_file
rank, alone = torch.distributed.get_rank(), load_file("models/llama")
dims = {"o_proj": 1, "q_proj": 0}
for name, tensor in alone.items():
    dim = next((dim for part, dim in dims.items() if part in name), None)
    tensor = tensor if dim is None else tensor.chunk(2, dim)[rank]
    assert torch.equal(weights[name], tensor), name
# In one write: both ranks write to one pipe.
print(f"same {len(weights)}\\n", end="", flush=True)
torch.distributed.destroy_process_group()
"""


def test_several_ranks_load_the_whole_model(shelf):
    (shelf / "serve.py").write_text(RANKS + CHECKED)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "serve.py"]
    # torchrun leaves its own directory behind.
    env = {**os.environ, "TMPDIR": str(shelf)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=shelf, env=env, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"same {len(load_file('models/llama'))}") == 2


def test_reports_totals_and_broken_mounts_are_shown(shelf, caplog):
    caplog.set_level(logging.INFO)
    before = ckptfs.stats()["loads"]
    made = ran(WHAT_GOES_ON)
    assert f"{len(made['tensors'])} tensors" in caplog.text
    assert made["totals"]["loads"] == before + 1
    assert not [mount for mount in made["broken"] if mount.mountpoint.startswith(str(shelf))]


def test_metrics_are_served_at_the_noted_address(shelf):
    mount = ckptfs.mount("models", metrics="127.0.0.1:0")
    with mount:
        (address,) = [word for note in mount.notes for word in note.split() if word.startswith("http://")]
        assert "ckptfs_" in urllib.request.urlopen(address, timeout=20).read().decode()


def test_errors_are_explained(shelf, caplog):
    load = ran(WHEN_WRONG)["load"]
    assert load("models/nowhere") is None
    assert caplog.messages == ["models/nowhere: is not there"]
    (shelf / "bad.safetensors").write_bytes(b"half of it, and no more")
    assert load("bad.safetensors") is None
    assert "bad.safetensors" in caplog.messages[1] and "; what to do: " in caplog.messages[1]
    head = {"lm_head.weight": models.llama().lm_head.weight}
    check_same(load("models/llama", names="lm_head.weight"), head)


def test_a_dead_mount_is_named_and_replaced(shelf):
    (shelf / "mnt").mkdir()
    mount = ckptfs.mount("models", "mnt")
    loaded = load_file("mnt/llama")
    os.kill(mount.pid, signal.SIGKILL)
    until("it is dead", lambda: [one for one in ckptfs.mounts() if one.state == "dead"])
    with pytest.raises(ckptfs.SafetensorError) as fault:
        load_file("mnt/llama")
    assert "ckptfs unmount" in " ".join(fault.value.__notes__)
    check_same(loaded, models.llama().state_dict())
    with ckptfs.mount("models", "mnt"):
        check_same(load_file("mnt/llama"), models.llama().state_dict())
