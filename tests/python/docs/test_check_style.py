"""`scripts/check-style` finds what it is for, and passes what only looks like it."""

import json
import re
import subprocess

import pytest

from program import REPOSITORY


def check(folder, **files):
    """What it prints of these files, which lie in `src`, or in `python` if they are Python."""
    paths = []
    for name, text in files.items():
        language = "rs" if "//" in text or "fn " in text or "struct" in text or "const" in text else "py"
        path = folder / ("src" if language == "rs" else "python") / f"{name}.{language}"
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(text)
        paths.append(path.relative_to(folder))
    done = subprocess.run([REPOSITORY / "scripts/check-style", *paths], cwd=folder, capture_output=True, text=True)
    assert done.returncode == (1 if done.stdout else 0) and not done.stderr, done.stderr
    return done.stdout


BAD = [
    ("// A thread who reads waits.", "src/a.rs:1: a comment says 'who'"),
    ("fn a() {}\n\n/// Whoever reads waits.\nfn b() {}", "src/a.rs:3: a comment says 'Whoever'"),
    ("//! Reads blocks of 1 MiB at the\n//! most.", "src/a.rs:1: a comment says 'at the most'"),
    ("fn a() {} // At the least one.", "src/a.rs:1: a comment says 'At the least'"),
    ("x = 1  # the reader for whom it waits", "python/a.py:1: a comment says 'whom'"),
    ('def a():\n    """Blocks\n    who reads."""', "python/a.py:3: a comment says 'who'"),
    ("/// It.\nfn a() {}", "src/a.rs:1: a doc comment says only 'It.'"),
    ("struct A {\n    /// Its file.\n    b: u8,\n}", "src/a.rs:2: a doc comment says only 'Its file.'"),
    ("const GAP: usize = 64 << 10;", "src/a.rs:1: constant GAP does not end with what it counts"),
    ("pub const BLOCK: u64 = 4 * MIB;", "src/a.rs:1: constant BLOCK does not end"),
    ("const OFTEN: Duration =\n    Duration::from_secs(1);", "src/a.rs:1: constant OFTEN does not end"),
    ("_CHUNK = 4 << 20", "python/a.py:1: constant _CHUNK does not end"),
    ("fn a() {}\n// Short.\n// " + "word " * 25 + "\n// end.", "src/a.rs:2: a sentence of 26 words"),
    ('"""Short.\n\n    - First: ' + "word " * 25 + '\n    """', "python/a.py:3: a sentence of 27 words"),
]


@pytest.mark.parametrize(("text", "said"), BAD, ids=range(len(BAD)))
def test_what_is_not_our_style_fails(tmp_path, text, said):
    printed = check(tmp_path, a=text)
    assert printed.startswith(said) and printed.count("\n") == 1, printed


def test_a_type_that_is_defined_twice_fails(tmp_path):
    printed = check(tmp_path, a="pub struct Reply;\n", b="fn b() {}\npub(crate) enum Reply {}\n")
    assert printed == "src/b.rs:2: type Reply is also at src/a.rs:1\n"


def test_an_import_cycle_of_files_fails(tmp_path):
    files = {"room/a": "use super::b::B;\nfn a() {}", "room/b": "use super::c;\nfn b() {}",
             "room/c": "use crate::room::{d, a::A};\nfn c() {}", "room/d": "fn d() {}", "room/e": "use super::a::A;\nfn e() {}"}  # fmt: skip
    assert check(tmp_path, **files).startswith("import cycle of files: src/room/a.rs, src/room/b.rs, src/room/c.rs;")
    assert check(tmp_path, **files | {"room/c": "// Not crate::room::a.\nfn c() {}"}) == ""


def test_an_import_cycle_of_rooms_fails(tmp_path):
    files = {"one/a": "use crate::two::b;\nfn a() {}", "two/b": "fn b() {}",
             "two/c": "use crate::one::d;\nfn c() {}", "one/d": "fn d() {}"}  # fmt: skip
    assert check(tmp_path, **files).startswith("import cycle of rooms: one, two;")


@pytest.mark.parametrize(
    "text",
    [
        'const WHO: &str = "// who asks at the most"; // The words of a message.',
        "/// Maximum gap that one read\n/// crosses.\nconst MAX_GAP_BYTES: usize = 64 << 10;",
        "//! Blocks.\nconst IDLE_TIMEOUT: Duration = Duration::from_secs(1);",
        "impl A { type Item = u8; }\nimpl B { type Item = u8; }\nstruct A;",
        "const FOUR: usize = 4;\nfn a() -> usize { FOUR << 2 }",
        "// The file whose reader waits, at the most recent offset.",
        'x = "who"\ny = """who asks at the most"""',
        "_CHUNK_BYTES = 4 << 20\n_MEMORY_BYTES_PER_FILE = 1 << 10",
        "// " + "word " * 24 + "end.\n// " + "word " * 24 + "end.\nfn a() {}",
        "//! ```\n//! " + "word " * 30 + "\n//! ```\n//!\n//! - " + "word " * 20 + "\n//! - " + "word " * 20,
        '"""Usage:\n\n    ckptfs run    ' + "word " * 30 + '\n"""',
    ],
    ids=range(11),
)
def test_what_is_fine_passes(tmp_path, text):
    assert check(tmp_path, a=text) == ""


def test_every_folder_with_code_is_checked():
    listed = subprocess.run(["git", "-C", REPOSITORY, "ls-files"], check=True, capture_output=True, text=True).stdout
    code = {name.partition("/")[0] for name in listed.splitlines() if name.endswith((".rs", ".py", ".pyi", ".sh"))}
    [folders] = re.findall(r"^FOLDERS = (\[.*\])$", (REPOSITORY / "scripts/check-style").read_text(), re.MULTILINE)
    assert code == set(json.loads(folders))
