"""A hostile recipe is refused, or done, within bounds of time and memory, and leads to nothing outside the source."""

import json
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from program import DONE, REFUSED

FILE = '[[file]]\npath = "{}"\nfrom = ["{}"]\n'.format


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "models"
    (folder / "llama").mkdir(parents=True)
    save_file({f"model.layers.{n}.w": torch.full((2,), float(n)) for n in range(3)}, folder / "llama/model.safetensors")
    (folder / "llama/config.json").write_text('{"layers": 3}')
    return folder


@pytest.fixture
def check(ckptfs, source, tmp_path):
    """Checks a recipe within bounds: `code, text = check(text)`."""
    def run(text):
        (tmp_path / "views.toml").write_text(text)
        done = ckptfs("views", "check", tmp_path / "views.toml", source, bounded=True)
        return done.code, done.stdout + done.stderr

    return run


def write_header(path, tensors):
    """Writes a file of tensors without bytes: `tensors` has their shapes by name."""
    header = {name: {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]} for name, shape in tensors.items()}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)


NESTED = "(" * 300 + "a" + ")" * 300

EXPLODING = {
    "repeated-repeats": ("(a{1000}){1000}", REFUSED, "no regular expression"),
    "classes": (r"\\pL{1000}", REFUSED, "no regular expression"),
    "look-around": ("(?=a)b", REFUSED, "no regular expression"),
    "back-reference": (r"(a)\\1", REFUSED, "no regular expression"),
    "nested-groups": (NESTED, REFUSED, "no regular expression"),
    # Exponential for an engine that backtracks: here it takes time in proportion to the name.
    "nested-stars": ("^(a+)+$", DONE, "1 tensor"),
    "alternatives": ("^(a|a|aa)+$", DONE, "1 tensor"),
    "many-stars": ("a*" * 30 + "b$", DONE, "1 tensor"),
}


@pytest.mark.parametrize("name", EXPLODING)
def test_patterns_that_explode_are_bounded(check, source, name):
    pattern, code, text = EXPLODING[name]
    write_header(source / "long.safetensors", {"a" * 60_000 + "!": [0]})
    rule = f'rename = [{{ match = "{pattern}", to = "x", optional = true }}]\n'
    found = check(FILE("x.safetensors", "long.safetensors") + rule)
    assert found[0] == code and text in found[1], found


def test_as_many_rules_as_there_may_be_are_bounded(check, source):
    write_header(source / "many.safetensors", {f"model.layers.{n}.mlp.down_proj.weight": [0] for n in range(2000)})
    rules = "".join(f"{{ match = '^(.*)\\.{n}\\.([a-z_.]{{1,20}})$', to = '$1.$2.{n}', optional = true }}," for n in range(1024))
    code, text = check(FILE("x.safetensors", "many.safetensors") + f"rename = [{rules}]\n")
    assert code == DONE and "2000 tensors" in text.replace(",", ""), text


HUGE = {
    "a split of an axis without an end": ("split = [{ tensors = '*', dim = 0, to = 'x{}' }]", "makes more than"),
    "parts without an end": ("slice = [{ tensors = '*', dim = 0, part = '9223372036854775808/18446744073709551615' }]", "needs part"),
    "a part beyond 64 bits": ("slice = [{ tensors = '*', dim = 0, part = '1/18446744073709551616' }]", "no part"),
    "a range beyond the axis": ("slice = [{ tensors = '*', dim = 0, range = [9007199254740990, 9223372036854775807] }]", "steps"),
    "an axis beyond all": ("slice = [{ tensors = '*', dim = -9223372036854775808, part = '1/2' }]", "needs axis"),
    "a number beyond 64 bits": ("slice = [{ tensors = '*', dim = 0, range = [0, 99999999999999999999] }]", "line 4"),
    "a stack of the last number": ("stack = [{ tensors = 'n(\\d+)', to = 'x' }]", "no tensor of number 0"),
    "a stack of more digits": ("stack = [{ tensors = 'n(\\d+)', to = 'x' }]\nrename = [{ match = 'n', to = 'n9' }]", "no number"),
    "names that double": ("rename = [" + "{ match = '^.*$', to = '$0$0' }," * 60 + "]", "too long"),
}  # fmt: skip


@pytest.mark.parametrize("name", HUGE)
def test_huge_counts_are_refused(check, source, name):
    # The axes of a tensor without bytes may have any length.
    write_header(source / "huge.safetensors", {"n18446744073709551615": [1 << 53, 0]})
    rule, text = HUGE[name]
    found = check(FILE("x.safetensors", "huge.safetensors") + rule + "\n")
    assert found[0] == REFUSED and text in found[1], found


def test_deep_texts_are_refused(check):
    for text in ("[" * 200_000, "{a=" * 200_000, "a." * 200_000 + "b = 1", '"' * 3 + "x" * 900_000):
        for key in ("config = { x = ", "cast = "):
            code, said = check(FILE("x.safetensors", "llama") + key + text + "\n")
            assert code == REFUSED and len(said) < 5000, said[:200]


OUTSIDE = ["../secret", "llama/../../secret", "/etc/passwd", "llama//x", "./llama", "llama/", "", "llama\\u0000x"]


@pytest.mark.parametrize("path", OUTSIDE)
def test_paths_that_lead_out_are_refused(check, source, tmp_path, path):
    save_file({"secret": torch.ones(1)}, tmp_path / "secret")
    shown = f"{path}.safetensors" if path and not path.endswith("/") else f"{path}/x.safetensors"
    for text in (FILE("x.safetensors", path), FILE(shown, "llama")):
        code, said = check(text)
        assert code == REFUSED and "the path `" in said, (text, said)


def test_links_that_lead_out_show_nothing(check, mounts, source, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    save_file({"secret": torch.ones(1)}, outside / "model.safetensors")
    (outside / "secret.json").write_text("secret")
    (source / "away").symlink_to(outside)
    (source / "file.safetensors").symlink_to(outside / "model.safetensors")
    (source / "llama/secret.json").symlink_to(outside / "secret.json")
    for taken in ("away", "away/model.safetensors", "file.safetensors"):
        code, said = check(FILE("x.safetensors", taken))
        assert code == REFUSED and "secret" not in said, said
    for beside in ("../*", "/*", "../../outside/*"):
        code, said = check(FILE("view/x.safetensors", "llama") + f'beside = ["{beside}"]\n')
        assert code == REFUSED and "matches no name" in said, said
    recipe = tmp_path / "views.toml"
    recipe.write_text(
        FILE("view/x.safetensors", "llama") + 'beside = ["*.json"]\n' + FILE("x.safetensors", "away")
        + FILE("other/x.safetensors", "llama") + 'beside = ["secret.json"]\nconfig = { a = 1 }\n'
        + FILE("fine/x.safetensors", "llama") + 'beside = ["config.json"]\n'
    )  # fmt: skip
    mount = mounts(source, "--views", recipe)
    assert sorted(load_file(mount / "fine/x.safetensors")) == [f"model.layers.{n}.w" for n in range(3)]
    for refused in ("x.safetensors", "view/x.safetensors", "other/x.safetensors"):
        assert not (mount / refused).exists()
    for folder in ("view", "other", "fine"):
        with pytest.raises(OSError):
            (mount / folder / "secret.json").read_text()


HIDING = {
    "a file": ("real.safetensors", ""),
    "a directory": ("folder.safetensors", ""),
    "a directory, by what is in it": ("real.safetensors/x.safetensors", ""),
    "a file in a directory": ("llama/model.safetensors", ""),
    "a shard that a set hides": ("set/model-00001-of-00002.safetensors", ""),
    "a configuration": ("llama/view.safetensors", "config = { layers = 4 }"),
}


@pytest.mark.parametrize("name", HIDING)
def test_no_real_file_is_hidden(check, mounts, source, tmp_path, name):
    save_file({"real": torch.ones(1)}, source / "real.safetensors")
    (source / "folder.safetensors").mkdir()
    (source / "folder.safetensors/kept.txt").write_text("kept")
    (source / "set").mkdir()
    for n in (1, 2):
        save_file({f"t{n}": torch.ones(n)}, source / f"set/model-0000{n}-of-00002.safetensors")
    path, more = HIDING[name]
    text = FILE(path, "llama") + more + "\n"
    code, said = check(text)
    assert code == REFUSED and "refused" in said, said
    mount = mounts(source, "--views", tmp_path / "views.toml")
    assert (mount / "real.safetensors").read_bytes() == (source / "real.safetensors").read_bytes()
    assert (mount / "folder.safetensors/kept.txt").read_text() == "kept"
    assert (mount / "llama/model.safetensors").read_bytes() == (source / "llama/model.safetensors").read_bytes()
    assert (mount / "llama/config.json").read_text() == '{"layers": 3}'
    assert sorted(load_file(mount / "set/model.safetensors")) == ["t1", "t2"]


def test_a_recipe_in_the_source_is_read_only_on_request(mounts, ckptfs, source, tmp_path):
    (source / ".ckptfs.toml").write_text(FILE("x.safetensors", "llama"))
    assert not (mounts(source) / "x.safetensors").exists()
    assert (mounts(source, "--views", "auto") / "x.safetensors").exists()
    # A link may lead to a recipe of another owner.
    (source / ".ckptfs.toml").rename(tmp_path / "elsewhere.toml")
    (source / ".ckptfs.toml").symlink_to(tmp_path / "elsewhere.toml")
    done = ckptfs("ls", "--views", "auto", source)
    assert "x.safetensors" not in done.stdout, done
