"""The scripts in examples/ work with the models that they are made for. They leave no mount and no directory behind,
however they end."""

import os
import pty
import shutil
import signal
import subprocess
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from safetensors.torch import save_file
from transformers import GPT2Config, GPT2LMHeadModel

from layouts import as_older_releases_did, write_pickles
from mounts import until
from pipelines import stable_diffusion
from program import REPOSITORY, find_binary
from samples import numbers, write_shards

EXAMPLES = REPOSITORY / "examples"


def mounts_of(name):
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return [line for line in lines if "fuse.ckptfs" in line and name in line]


@pytest.fixture
def environment(tmp_path):
    """The environment of a user with `ckptfs` on the PATH. Temporary directories are in `tmp`."""
    for name in ("bin", "tmp"):
        (tmp_path / name).mkdir()
    (tmp_path / "bin/ckptfs").symlink_to(find_binary())
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    yield os.environ | {"PATH": path, "TMPDIR": str(tmp_path / "tmp")}
    # Left by a test that failed.
    for line in mounts_of(str(tmp_path)):
        subprocess.run(["umount", "-l", line.split(" ")[4]], check=True)


def check_nothing_is_left(tmp_path):
    until("what it mounted is gone", lambda: not mounts_of(str(tmp_path)))
    # Libraries keep compiled code for the next time.
    assert not [path for path in (tmp_path / "tmp").iterdir() if not path.name.startswith("torch")]


@pytest.fixture
def try_to_run(tmp_path, environment):
    """Runs an example as a user does."""

    def run(script, *arguments, before=()):
        started = [sys.executable] if script.endswith(".py") else []
        command = [*before, *started, EXAMPLES / script, *arguments]
        done = subprocess.run(
            list(map(str, command)), capture_output=True, text=True, timeout=300, env=environment,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        check_nothing_is_left(tmp_path)
        return done

    return run


@pytest.fixture
def run(try_to_run):
    def run(*arguments, **more):
        done = try_to_run(*arguments, **more)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def tiny_model(folder):
    """A language model in pickles of older releases."""
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=1, n_embd=32, n_head=2, vocab_size=50, n_positions=16, bos_token_id=1,
        eos_token_id=1,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    config.save_pretrained(folder)
    tensors = {key: tensor for key, tensor in model.state_dict().items() if key != "lm_head.weight"}
    write_pickles(folder, tensors, limit=10_000)
    return model


def test_the_transformers_example_loads_a_model(run, tmp_path):
    model = tiny_model(tmp_path / "gpt2")
    told = run("load_with_transformers.py", tmp_path / "gpt2")
    assert told.startswith(f"GPT2LMHeadModel with {model.num_parameters()} parameters\n")


def test_the_diffusers_example_loads_pipelines_and_variants(run, tmp_path):
    pipeline = stable_diffusion(tmp_path / "tokenizer")
    pipeline.save_pretrained(tmp_path / "sd", safe_serialization=False)
    as_older_releases_did(tmp_path / "sd")
    told = run("load_with_diffusers.py", tmp_path / "sd")
    assert told.startswith("StableDiffusionPipeline of ") and "unet" in told
    pipeline.to(torch.float16).save_pretrained(tmp_path / "half", variant="fp16")
    assert "unet" in run("load_with_diffusers.py", tmp_path / "half", "fp16")


def test_the_diffusers_example_loads_a_pickle_that_is_shown_as_it_is(run, tmp_path):
    """Beside a safetensors variant, the model itself in a pickle has no virtual file, and loads all the same."""
    pipeline = stable_diffusion(tmp_path / "tokenizer")
    pipeline.save_pretrained(tmp_path / "sd", safe_serialization=False)
    pipeline.to(torch.float16).save_pretrained(tmp_path / "half", variant="fp16")
    shutil.copy(tmp_path / "half/unet/diffusion_pytorch_model.fp16.safetensors", tmp_path / "sd/unet")
    assert "unet" in run("load_with_diffusers.py", tmp_path / "sd")


SCRIPTS = ["comfyui.sh", "hub_cache.sh"]


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("ending", ["Ctrl-C", signal.SIGTERM, signal.SIGHUP], ids=str)
def test_a_script_that_is_killed_leaves_nothing(environment, tmp_path, script, ending):
    """Ends a script as a terminal does: all of its processes get the signal at once."""
    (tmp_path / "models").mkdir()
    leader, terminal = pty.openpty()
    # Tests that run in the background ignore Ctrl-C, and their children would too.
    attached = ["env", "--default-signal", "setsid", "--ctty", EXAMPLES / script, tmp_path / "models"]
    command = [*attached, "sh", "-c", "echo runs && exec sleep 1000"]
    started = subprocess.Popen(
        list(map(str, command)), env=environment, stdin=terminal, stdout=terminal, stderr=terminal
    )
    os.close(terminal)
    try:
        told = b""
        # Notes of the mount may come first.
        while not told.endswith(b"runs\r\n"):
            told += os.read(leader, 1000)
        assert len(mounts_of(str(tmp_path))) == 1
        if ending == "Ctrl-C":
            os.write(leader, b"\x03")
        else:
            os.killpg(started.pid, ending)
        number = signal.SIGINT if ending == "Ctrl-C" else ending
        assert started.wait(60) == 128 + number
    finally:
        if started.poll() is None:
            os.killpg(started.pid, signal.SIGKILL)
            started.wait()
        os.close(leader)
    check_nothing_is_left(tmp_path)


def check_says_it_once(done):
    """The error message comes alone, without messages of the cleanup."""
    assert done.returncode != 0
    assert done.stderr.startswith("ckptfs: ") and done.stderr.count("ckptfs: ") == 1, done.stderr
    assert not any(line.startswith(("rm", "stat")) for line in done.stderr.splitlines()), done.stderr


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_source_that_cannot_be_mounted_gives_one_message(try_to_run, tmp_path, script):
    (tmp_path / "models").write_text("no checkpoint")
    check_says_it_once(try_to_run(script, tmp_path / "models", "true"))


def test_the_comfyui_example_mounts_over_all_models(run, tmp_path):
    models = tmp_path / "models"
    write_shards(models / "diffusion_models", 1, 3, 2, 20)
    (models / "diffusion_models/config.json").unlink()
    (models / "checkpoints").mkdir()
    torch.save({"state_dict": {"a": numbers(1, 9)}}, models / "checkpoints/v1-5.ckpt")
    expected = ["checkpoints/v1-5.safetensors", "diffusion_models/model.safetensors"]
    assert sorted(run("comfyui.sh", models).split()) == [str(models / name) for name in expected]
    listed = run("comfyui.sh", models, "ls", models / "checkpoints")
    assert listed == "v1-5.safetensors\n"
    assert (models / "checkpoints/v1-5.ckpt").exists(), "still covered"


def test_the_comfyui_example_follows_links_to_other_disks(run, tmp_path):
    """A link to the directory of all models, and in it links to a checkpoint and a directory elsewhere, whose files
    pass through."""
    (tmp_path / "disk/loras").mkdir(parents=True)
    save_file({"a": numbers(1, 9)}, tmp_path / "disk/loras/style.safetensors")
    torch.save({"state_dict": {"a": numbers(1, 9)}}, tmp_path / "disk/v1-5.ckpt")
    models = tmp_path / "models"
    (models / "checkpoints").mkdir(parents=True)
    (models / "checkpoints/v1-5.ckpt").symlink_to(tmp_path / "disk/v1-5.ckpt")
    (models / "loras").symlink_to(tmp_path / "disk/loras")
    (tmp_path / "link").symlink_to(models)
    expected = ["checkpoints/v1-5.safetensors", "loras/style.safetensors"]
    listed = run("comfyui.sh", tmp_path / "link").split()
    assert sorted(listed) == [str(models / name) for name in expected]
    program = "import sys; from safetensors import safe_open; print(safe_open(sys.argv[1], 'pt').keys())"
    for name in expected:
        assert run("comfyui.sh", tmp_path / "link", sys.executable, "-c", program, models / name) == "['a']\n"


def test_the_hub_cache_example_loads_by_name(run, tmp_path):
    repository = tmp_path / "hub/models--org--name"
    snapshot = repository / "snapshots" / ("0" * 40)
    for folder in (snapshot, repository / "blobs", repository / "refs"):
        folder.mkdir(parents=True)
    (repository / "refs/main").write_text(snapshot.name)
    model = tiny_model(tmp_path / "plain")
    for n, path in enumerate(sorted((tmp_path / "plain").iterdir())):
        shutil.move(path, repository / f"blobs/{n:040x}")
        (snapshot / path.name).symlink_to(f"../../blobs/{n:040x}")
    program = (
        "from transformers import AutoModelForCausalLM as M;"
        "print(M.from_pretrained('org/name', use_safetensors=True).num_parameters())"
    )
    told = run("hub_cache.sh", tmp_path / "hub", sys.executable, "-c", program)
    assert told.startswith(f"{model.num_parameters()}\n")


@pytest.fixture
def apart(tmp_path, environment):
    """A mount namespace in which the program is in /usr/bin, as after an installation."""
    (tmp_path / "bin/ckptfs").unlink()
    shutil.copy(find_binary(), tmp_path / "bin/ckptfs")
    installed = f"mount -t overlay overlay -o lowerdir={tmp_path / 'bin'}:/usr/bin /usr/bin"
    return ["unshare", "--mount", "sh", "-c", f'{installed} && exec "$0" "$@"']


@pytest.mark.parametrize("name", ["models", "my own models"])
def test_the_fstab_example_mounts_by_its_line(run, apart, tmp_path, name):
    write_shards(tmp_path / name / "llama", 1, 3, 2, 20)
    told = run("fstab.sh", tmp_path / name, before=apart)
    line = told.splitlines()[0]
    assert line.startswith(str(tmp_path / name).replace(" ", r"\040") + "  ")
    assert "fuse.ckptfs  ro,allow_other" in line
    assert told.split("llama:")[-1].split() == ["config.json", "model.safetensors"]


def test_the_fstab_example_explains_a_failed_mount_once(try_to_run, apart, tmp_path):
    (tmp_path / "models").write_text("no checkpoint")
    check_says_it_once(try_to_run("fstab.sh", tmp_path / "models", before=apart))
