"""What a recipe must not do: hide a file, lead out, leave nothing, or cost much. Each is refused, with what to do."""

import os
import time

import pytest
import torch
from safetensors.torch import load_file, save_file

from mounts import until
from program import REFUSED

FILE = '[[file]]\npath = "{}"\nfrom = ["llama"]\n{}\n'


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "models"
    (folder / "llama").mkdir(parents=True)
    tensors = {"a.w": torch.arange(6).reshape(2, 3), "a.norm": torch.ones(3), "empty": torch.zeros(0, 3)}
    save_file(tensors, folder / "llama/model.safetensors")
    (folder / "llama/tokenizer.json").write_text("{}")
    (folder / "real").mkdir()
    (folder / "link").symlink_to("real")
    return folder


def check_refused(ckptfs, tmp_path, source, recipe, *words):
    """Checks that `views check` refuses the recipe at once and in these words. Returns what it prints."""
    path = tmp_path / "views.toml"
    path.write_text(recipe)
    start = time.monotonic()
    checked = ckptfs("views", "check", path, source, bounded=True)
    assert time.monotonic() - start < 20
    text = " ".join((checked.stdout + checked.stderr).split())
    assert checked.code == REFUSED and "what to do: " in text, checked
    for word in words:
        assert word in text, (word, text)
    return text


@pytest.mark.parametrize(
    ("path", "rule", "words"),
    [
        ("a/x.safetensors", 'drop = ["*"]', ["leave no tensor"]),
        ("a/x.safetensors", 'split = [{ tensors = "empty", dim = 0, to = "e.{}" }]', ["axis 0 of `empty`, which has none"]),
        ("a/x.safetensors", "rename = [{ match = 'a', to = \"\\u0000\" }]", ["a control character"]),
        ("a/x.safetensors", "split = [{ tensors = 'a.w', dim = 0, to = \"e\\n{}\" }]", ["a control character"]),
        ("a/x.safetensors", 'only = ["*.nrom", "a.norn"]', ["matches no tensor"]),
        ("a/x.safetensors", 'only = ["a.w", "a.norn"]', ["matches no tensor; the most similar name is `a.norm`"]),
        ("a/x.safetensors", 'beside = ["out*"]', ["`beside` matches outside.json", "leads out"]),
        ("a/x.safetensors", 'beside = ["gone*"]', ["`beside` matches gone.json"]),
        ("a/x.safetensors", "config = { n = 1 }", ["its configuration", "llama/config.json does not exist"]),
        ("link/x.safetensors", "", ["link is a symbolic link"]),
        ("link/deeper/x.safetensors", "", ["link is a symbolic link"]),
        ("llama/tokenizer.json/x.safetensors", "", ["llama/tokenizer.json is a file"]),
    ],
)
def test_a_file_that_cannot_be_what_its_recipe_says_is_refused(ckptfs, tmp_path, source, mounts, path, rule, words):
    (tmp_path / "outside.json").write_text("{}")
    (source / "llama/outside.json").symlink_to(tmp_path / "outside.json")
    (source / "llama/gone.json").symlink_to("nothing.json")
    check_refused(ckptfs, tmp_path, source, FILE.format(path, rule), *words)
    mount = mounts(source, "--views", tmp_path / "views.toml")
    for folder in ("", "a", "link", "llama"):
        if (mount / folder).is_dir():
            assert "x.safetensors" not in os.listdir(mount / folder)
    until("status says why", lambda: words[0] in " ".join(ckptfs("status").stdout.split()))
    listed = ckptfs("ls", "-r", "--views", tmp_path / "views.toml", source)
    assert words[0] in listed.stdout + listed.stderr, listed


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        (FILE.format("../x.safetensors", ""), ["without . or .."]),
        (FILE.format("/x.safetensors", ""), ["is absolute"]),
        (FILE.format("a//x.safetensors", ""), ["an empty name"]),
        (FILE.format("a\\u0007/x.safetensors", ""), ["a control character"]),
        (FILE.format("x.safetensors", "") * 2, ["two files have the path x.safetensors"]),
        (FILE.format("x.safetensors", "only = [" + "'a*'," * 1_000_000 + "]"), ["longer than"]),
        (FILE.format("x.safetensors", "only = [" + "'a'," * 200_000 + "]"), ["more than 1024 rules"]),
        (FILE.format("x.safetensors", "rename = [{ match = '(a{1000}){1000}', to = '' }]"), ["no regular expression"]),
        (FILE.format("x.safetensors", "config = { a = " + "[" * 100_000 + "]" * 100_000 + " }"), ["recursion"]),
        ("".join(FILE.format(f"{n}.safetensors", "") for n in range(1025)), ["more than 1024 files"]),
        (FILE.format("x.safetensors", "").replace('["llama"]', '["llama", "llama"]'), ["names `llama` twice"]),
    ],
    ids=range(11),
)
def test_a_recipe_that_leads_out_or_costs_much_is_refused_at_once(ckptfs, tmp_path, source, recipe, words):
    check_refused(ckptfs, tmp_path, source, recipe, *words)


def test_joined_checkpoints_with_a_tensor_in_common_are_refused_by_its_name(ckptfs, tmp_path, source):
    save_file({"a.w": torch.ones(1)}, source / "more.safetensors")
    recipe = FILE.format("x.safetensors", "").replace('["llama"]', '["llama", "more.safetensors"]')
    text = check_refused(ckptfs, tmp_path, source, recipe, "the rule `from` joins two tensors of the name `a.w`")
    assert "rename" not in text
    recipe += 'drop = ["a.w"]\n'
    (tmp_path / "views.toml").write_text(recipe)
    assert ckptfs("views", "check", tmp_path / "views.toml", source).code == 0


def test_each_refused_file_has_its_own_reason(ckptfs, tmp_path, source):
    recipe = "".join(
        FILE.format(f"{name}/x.safetensors", "").replace('["llama"]', f'["none{name}"]') for name in ("a", "b")
    )
    (tmp_path / "views.toml").write_text(recipe)
    lines = ckptfs("views", "check", tmp_path / "views.toml", source).stdout.splitlines()
    reasons = [line for line in lines if "x.safetensors: refused" in line]
    assert len(reasons) == 2 and "nonea" in reasons[0] and "noneb" in reasons[1], lines


def test_status_shows_some_refused_files_and_counts_the_rest(ckptfs, tmp_path, source, mounts):
    recipe = "".join(FILE.format(f"x/{n}.safetensors", "").replace('["llama"]', f'["none{n}"]') for n in range(11))
    (tmp_path / "views.toml").write_text(recipe)
    mount = mounts(source, "--views", tmp_path / "views.toml")
    assert os.listdir(mount.point)
    assert not (mount / "x").exists() or not os.listdir(mount / "x")
    lines = [line.strip() for line in ckptfs("status").stdout.splitlines() if "view refused" in line]
    assert len(lines) == 9 and "3 more; what to do: ckptfs ls -r --views" in lines[-1], lines


def test_what_is_refused_by_itself_is_not_hidden(ckptfs, tmp_path, source, mounts):
    (source / "torch").mkdir()
    bad = source / "torch/pytorch_model.bin"
    bad.write_bytes(b"PK\x03\x04 and no archive")
    recipe = FILE.format("torch/model.safetensors", "")
    check_refused(ckptfs, tmp_path, source, recipe, "would hide pytorch_model.bin, and that is refused by itself")
    mount = mounts(source, "--views", tmp_path / "views.toml")
    assert os.listdir(mount / "torch") == ["pytorch_model.bin"]
    # What is shown as a virtual file may be replaced.
    torch.save({"b": torch.ones(2)}, bad)
    until("it is shown", lambda: os.listdir(mount / "torch") == ["model.safetensors"])
    assert "a.w" in load_file(mount / "torch/model.safetensors")


def test_a_view_is_no_source_of_a_view_but_its_mount_is(ckptfs, tmp_path, source, mounts):
    first = FILE.format("one/x.safetensors", "rename = [{ match = '^a', to = 'b' }]\ndrop = ['empty']")
    second = '[[file]]\npath = "two/x.safetensors"\nfrom = ["one/x.safetensors"]\nonly = ["b.w"]\n'
    text = check_refused(ckptfs, tmp_path, source, first + second, "one/x.safetensors")
    assert text.startswith("one/x.safetensors: 2 tensors"), text
    (tmp_path / "first.toml").write_text(first)
    mount = mounts(source, "--views", tmp_path / "first.toml")
    (tmp_path / "second.toml").write_text(second)
    over = mounts(mount.point, "--views", tmp_path / "second.toml")
    assert torch.equal(load_file(over / "two/x.safetensors")["b.w"], torch.arange(6).reshape(2, 3))


def test_names_that_two_rules_show_are_listed_once(ckptfs, tmp_path, source, mounts):
    (source / "llama/sub").mkdir()
    recipe = FILE.format("out/model.safetensors", 'beside = ["*"]') + FILE.format("out/sub/x.safetensors", "")
    (tmp_path / "views.toml").write_text(recipe)
    mount = mounts(source, "--views", tmp_path / "views.toml")
    assert sorted(os.listdir(mount / "out")) == ["model.safetensors", "sub", "tokenizer.json"]
    assert os.listdir(mount / "out/sub") == ["x.safetensors"]
    assert "a.w" in load_file(mount / "out/sub/x.safetensors")
    listed = ckptfs("ls", "--json", "-r", "--views", tmp_path / "views.toml", source).stdout
    assert listed.count('"name": "sub"') <= 2, listed
