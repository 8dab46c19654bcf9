"""What a mount, the command and the package say of views that they do not show, from the first call on."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptfs as package
from ckptfs.torch import load_file as load

from mounts import until
from program import DONE, FAILED, REFUSED

FILE = '[[file]]\npath = "{}/model.safetensors"\nfrom = ["llama"]\n{}\n'
TYPO = 'cast = [{ tensors = "modell.*", to = "bfloat16" }]'
CAST = 'cast = [{ tensors = "*", to = "bfloat16" }]'


@pytest.fixture
def source(tmp_path):
    """A model in shards and its files, and one as a pickle."""
    folder = tmp_path / "models"
    (folder / "llama").mkdir(parents=True)
    weight_map = {}
    for n in range(2):
        save_file({f"model.{n}.w": torch.randn(4, 3)}, folder / f"llama/model-0000{n + 1}-of-00002.safetensors")
        weight_map[f"model.{n}.w"] = f"model-0000{n + 1}-of-00002.safetensors"
    (folder / "llama/model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "llama/config.json").write_text('{"torch_dtype": "float32", "rope": {"a": 1, "b": 2}, "limits": [0.0, Infinity]}')
    (folder / "llama/tokenizer.json").write_text("{}")
    (folder / "torch").mkdir()
    torch.save({"b": torch.ones(2)}, folder / "torch/pytorch_model.bin")
    return folder


def write_recipe(tmp_path, text):
    (tmp_path / "views.toml").write_text(text)
    return tmp_path / "views.toml"


@pytest.fixture
def mount_by_command(ckptfs, tmp_path):
    """Mounts by the command as a user does. Returns its outcome."""
    point = tmp_path / "point"
    point.mkdir()

    def mount(*words, notes=0):
        # What is not known in half a second is left out, which happens on a busy machine.
        for _ in range(20):
            done = ckptfs("mount", *words, point)
            if len(done.stderr.splitlines()) >= notes:
                break
            ckptfs("unmount", point)
        return done

    yield mount
    ckptfs("unmount", point)


def refused_views(ckptfs, point):
    """What `status` says of the views of one mount."""
    [stats] = [each["stats"] for each in ckptfs("status", "--json").json() if each["mountpoint"] == str(point)]
    return stats["refused_views"]


def test_a_mount_says_which_files_of_its_recipe_it_does_not_show(ckptfs, source, tmp_path, mount_by_command):
    text = FILE.format("good", CAST) + FILE.format("bad", TYPO) + FILE.format("none", "").replace('"llama"', '"nothing"')
    done = mount_by_command("--views", write_recipe(tmp_path, text), source, notes=2)
    assert done.code == DONE
    bad, none = done.stderr.splitlines()
    for words in ("ckptfs: note: not shown: ", "bad/model.safetensors: the rule cast", "what to do: correct the rule"):
        assert words in bad, bad
    # The reason is about the source, so the note names the file.
    assert none.startswith(f"ckptfs: note: not shown: none/model.safetensors: {source}/nothing: "), none
    # No program has looked up the files.
    assert "bad/model.safetensors: the rule cast" in " ".join(refused_views(ckptfs, tmp_path / "point"))


def test_a_mount_explains_few_of_many_files_and_names_the_command_for_the_rest(ckptfs, source, tmp_path, mount_by_command):
    files = [FILE.format(f"bad{n}", TYPO) for n in range(5)]
    for count, rest in ((3, []), (4, ["1 more file is not shown"]), (5, ["2 more files are not shown"])):
        recipe = write_recipe(tmp_path, "".join(files[:count]))
        notes = mount_by_command("--views", recipe, source, notes=3 + len(rest)).stderr.splitlines()
        assert ckptfs("unmount", tmp_path / "point").code == DONE
        assert len(notes) == 3 + len(rest) and all("bad" in note for note in notes[:3])
        for words, note in zip(rest, notes[3:], strict=True):
            assert f"{words}; ckptfs ls -r --views {recipe} {source} says why" in note


def test_a_mount_of_nothing_but_a_refused_view_names_the_command_with_its_recipe(tmp_path, mount_by_command):
    (tmp_path / "models/llama").mkdir(parents=True)
    recipe = write_recipe(tmp_path, FILE.format("bad", ""))
    done = mount_by_command("--views", recipe, tmp_path / "models", notes=2)
    assert f"becomes a virtual file: 1 checkpoint is refused; ckptfs ls -r --views {recipe} " in done.stderr, done


def test_reasons_of_any_length_are_told_in_few_words(ckptfs, source, tmp_path, mount_by_command):
    name = "n" * 70_000
    save_file({name: torch.ones(2, dtype=torch.int64)}, source / "long.safetensors")
    files = [f'[[file]]\npath = "long{n}/x.safetensors"\nfrom = ["long.safetensors"]\n{CAST}\n' for n in range(8)]
    done = mount_by_command("--views", write_recipe(tmp_path, "".join(files)), source, notes=4)
    assert done.code == DONE and len(done.stderr) < 5_000 and "cannot cast `nnn" in done.stderr
    views = refused_views(ckptfs, tmp_path / "point")
    assert len(views) == 8 and all(len(view) < 1_100 and view.endswith("this tensor's own type") for view in views), views
    assert (tmp_path / "point/llama/model.safetensors").exists()


def test_a_recipe_in_the_directory_that_is_mounted_over_is_read(mounts, source):
    recipe = source / "views.toml"
    dtypes = lambda: {tensor.dtype for tensor in load_file(source / "good/model.safetensors").values()}
    for threads in (2, 1):
        recipe.write_text(FILE.format("good", CAST))
        covered = os.open(source, os.O_RDONLY)
        mount = mounts(source, "--views", recipe, "--threads", threads, at=source)
        assert dtypes() == {torch.bfloat16}
        Path(f"/proc/self/fd/{covered}/new.toml").write_text(FILE.format("good", CAST.replace("bfloat16", "float16")))
        os.rename("new.toml", "views.toml", src_dir_fd=covered, dst_dir_fd=covered)
        until("the change shows", lambda: dtypes() == {torch.float16})
        os.close(covered)
        mount.unmount()


def test_an_invalid_recipe_fails_the_mount(source, tmp_path, mount_by_command):
    done = mount_by_command("--views", write_recipe(tmp_path, "[[file]]\n"), source)
    assert done.code == REFUSED and "correct it, then: ckptfs views check" in done.stderr
    done = mount_by_command("--views", tmp_path / "none.toml", source)
    assert done.code == FAILED and "give the path of a recipe" in done.stderr


def test_a_refused_file_hides_the_virtual_file_whose_place_it_takes(mounts, source, tmp_path):
    recipe = write_recipe(tmp_path, FILE.format("llama", TYPO))
    mount = mounts(source, "--views", recipe)
    assert not (mount / "llama/model.safetensors").exists()
    assert "llama/model.safetensors: the rule cast" in " ".join(mount.stats()["refused_views"])
    recipe.write_text(FILE.format("llama", CAST))
    until("it is shown", (mount / "llama/model.safetensors").exists)
    assert {tensor.dtype for tensor in load_file(mount / "llama/model.safetensors").values()} == {torch.bfloat16}


def test_a_recipe_that_is_gone_shows_nothing_more(mounts, ckptfs, source, tmp_path):
    recipe = write_recipe(tmp_path, FILE.format("good", CAST))
    mount = mounts(source, "--views", recipe)
    with open(mount / "good/model.safetensors", "rb") as kept:
        recipe.unlink()
        until("it is gone", lambda: not (mount / "good/model.safetensors").exists())
        assert len(kept.read()) > 0
    assert "what to do: " in " ".join(mount.stats()["refused_views"])
    assert load_file(mount / "llama/model.safetensors")


CONFIG = 'config = { dtype = "bfloat16", rope = { c = 3 } }'


def test_fields_of_the_configuration_are_set_and_the_rest_stays(mounts, source, tmp_path):
    mount = mounts(source, "--views", write_recipe(tmp_path, FILE.format("good", CONFIG)))
    read = lambda: json.loads((mount / "good/config.json").read_text())
    new = source / "new.json"
    # A nested table is replaced whole.
    assert read() == {"torch_dtype": "float32", "dtype": "bfloat16", "rope": {"c": 3}, "limits": [0.0, float("inf")]}
    new.write_text('{"n": 0.30000000000000004}')
    new.rename(source / "llama/config.json")
    until("the new configuration shows", lambda: read() == {"n": 0.1 + 0.2, "dtype": "bfloat16", "rope": {"c": 3}})


@pytest.mark.parametrize(("text", "words"), [
    ("{", "is not valid JSON: "), ("[1]", "is no JSON object"), ('{"a": NaNa}', "is not valid JSON: "),
])  # fmt: skip
def test_an_invalid_configuration_is_refused(ckptfs, source, tmp_path, text, words):
    (source / "llama/config.json").write_text(text)
    checked = ckptfs("views", "check", write_recipe(tmp_path, FILE.format("good", CONFIG)), source)
    assert checked.code == REFUSED and words in checked.stdout, checked
    assert "what to do: correct the configuration, or leave `config` out" in checked.stdout


def test_all_files_beside_a_checkpoint_are_shown_but_its_originals(mounts, source, tmp_path):
    text = FILE.format("one", 'beside = ["*"]') + FILE.format("two", 'beside = ["*"]').replace('"llama"', '"torch"')
    mount = mounts(source, "--views", write_recipe(tmp_path, text))
    assert sorted(os.listdir(mount / "one")) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert os.listdir(mount / "two") == ["model.safetensors"]


@pytest.mark.parametrize("rule", ['"config*"', '{ names = "config*", optional = true }'])
def test_a_directory_that_cannot_be_listed_refuses_beside(ckptfs, source, tmp_path, rule):
    (tmp_path / "elsewhere").mkdir()
    save_file({"a": torch.ones(1)}, tmp_path / "elsewhere/model.safetensors")
    (source / "out").symlink_to(tmp_path / "elsewhere")
    text = FILE.format("good", f"beside = [{rule}]").replace('"llama"', '"out/model.safetensors"')
    checked = ckptfs("views", "check", write_recipe(tmp_path, text), source)
    assert checked.code == REFUSED, checked
    assert "out, which cannot be listed: " in checked.stdout and "or leave `beside` out" in checked.stdout


def test_a_recipe_is_checked_against_its_own_directory_by_default(ckptfs, source, monkeypatch):
    (source / "views.toml").write_text(FILE.format("good", CAST))
    monkeypatch.chdir(source)
    for name in ("views.toml", source / "views.toml"):
        checked = ckptfs("views", "check", name)
        assert checked.code == DONE and "good/model.safetensors: 2 tensors (2 BF16)" in checked.stdout, checked


def test_a_path_that_a_recipe_does_not_show_is_explained(ckptfs, source, tmp_path):
    recipe = write_recipe(tmp_path, FILE.format("good", CAST))
    done = ckptfs("export", "--views", recipe, source / "other.safetensors", tmp_path / "out.safetensors")
    assert done.code == REFUSED and "the recipe shows no such file; it shows: good/model.safetensors" in done.stderr
    with pytest.raises(package.SafetensorError, match="shows no such file; it shows: good/model.safetensors"):
        load(source / "other.safetensors", views=recipe)


def test_auto_is_for_directories(ckptfs, source, tmp_path):
    (source / ".ckptfs.toml").write_text(FILE.format("good", CAST))
    assert "good/" in ckptfs("ls", "--views", "auto", source).stdout
    shown = source / "good/model.safetensors"
    for words in (("export", shown, tmp_path / "out.safetensors"), ("inspect", shown), ("verify", shown, "--against", shown)):
        done = ckptfs(*words, "--views", "auto")
        assert done.code == FAILED and "`auto` is for mount, ls and fetch" in done.stderr, done
    with pytest.raises(package.SafetensorError, match="`auto` is for mount, ls and fetch"):
        load(shown, views="auto")


def test_the_whole_command_of_a_view_works(ckptfs, source, tmp_path):
    steps = ("--cast", "*=bfloat16", "--rename", r"^model\.=", "--only", "model.*", "--drop", "*.1.*")
    out = ckptfs.export(source / "llama", tmp_path / "out.safetensors", *steps)
    assert {name: tensor.dtype for name, tensor in load_file(out).items()} == {"0.w": torch.bfloat16}
    done = ckptfs("export", source / "llama", tmp_path / "other.safetensors", "--drop", "*.inv_freq")
    assert done.code == REFUSED and "in a recipe, `optional = true` lets it match nothing" in done.stderr
    for option, words in (("*=bf16", "`bf16` is no type; name it as torch does: bfloat16"), ("*", "`*` has no `=`: write GLOB=DTYPE")):
        done = ckptfs("export", source / "llama", tmp_path / "other.safetensors", "--cast", option)
        assert done.code == 2 and words in done.stderr, done


def test_views_of_a_wrong_type_or_key_are_refused_before_anything_is_read(source):
    path = source / "llama"
    for views in (3, ["cast"], b"views.toml"):
        with pytest.raises(TypeError, match="views must be the path of a recipe, or a dictionary"):
            load(path, views=views)
    with pytest.raises(TypeError, match="a dictionary of text, numbers and lists"):
        load(path, views={"cast": [{"tensors": "*", "to": object()}]})
    with pytest.raises(package.SafetensorError, match="unknown field `casts`"):
        load(path, views={"casts": []})
    loaded = load(path, views={"cast": [{"tensors": "*", "to": torch.float16}]})
    assert {tensor.dtype for tensor in loaded.values()} == {torch.float16}


@pytest.mark.parametrize(("steps", "words"), [
    ({"split": [{"dim": 0, "to": "x.{}"}]}, "a split needs either `tensors`, a glob, or `match`"),
    ({"split": [{"tensors": "*.w", "dim": 0, "to": "x.{}"}]}, "gives two tensors the name `x.0`"),
    ({"stack": [{"tensors": r"model\.(\d)\..*", "to": "s"}, {"tensors": r"(\w+)", "to": "t"}]}, "finds no number in `s`"),
    ({"cast": [{"tensors": "*", "to": "int32"}]}, "floats are cast only to floats"),
    ({"rename": [{"match": r"^model\.1", "to": "n.0"}], "stack": [{"tensors": r"\w+\.(\d)\.w", "to": "s"}]},
     "finds two tensors of number 0 for `s`: `model.0.w` and `n.0.w`"),
])  # fmt: skip
def test_steps_that_cannot_be_done_are_refused(source, steps, words):
    with pytest.raises(package.SafetensorError, match=words.replace("(", r"\(")):
        load(source / "llama", views=steps)


def test_casts_are_read_within_a_small_memory(mounts, tmp_path):
    (tmp_path / "models").mkdir()
    state = {f"t{n}": torch.randn(1 << 20) for n in range(24)}
    save_file(state, tmp_path / "models/model.safetensors")
    recipe = write_recipe(tmp_path, '[[file]]\npath = "view/x.safetensors"\nfrom = ["model.safetensors"]\n' + CAST)
    mount = mounts(tmp_path / "models", "--views", recipe, "--memory", "16M")
    expected = {name: tensor.bfloat16() for name, tensor in state.items()}
    before, _ = mount.resident()
    for name, tensor in load_file(mount / "view/x.safetensors").items():
        assert torch.equal(tensor, expected[name]), name
    _, peak = mount.resident()
    assert peak < before + (16 + 32 << 20), (before, peak)
    loaded = load(tmp_path / "models/model.safetensors", views={"cast": [{"tensors": "*", "to": "bfloat16"}]}, memory="16M")
    assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.items())
