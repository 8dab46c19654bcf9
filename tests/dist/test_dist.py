"""What scripts/dist makes is whole, needs nothing but glibc 2.28 and FUSE, and works for an ordinary user.

`scripts/dist --test` runs this; the release workflow does so before it attaches anything. Making dist/ takes minutes, so
it is no part of scripts/test. numpy and safetensors come from the package index.
"""

import hashlib
import re
import subprocess
import tarfile
import zipfile

import pytest
from conftest import PROGRAM, REPOSITORY, SOURCE_PACKAGE, VERSION, WHEEL, pythons

DEMO = REPOSITORY / "scripts/demo.py"

GLIBC = (2, 28)

# Parts of glibc 2.28, and the loader.
LIBRARIES = re.compile(r"lib(c|m|dl|rt|pthread|util)\.so\.\d+|ld-linux[\w-]*\.so\.\d+")

PAGES = {
    "share/bash-completion/completions/ckptfs", "share/zsh/site-functions/_ckptfs",
    "share/fish/vendor_completions.d/ckptfs.fish", "share/man/man1/ckptfs.1", "share/man/man1/ckptfs-mount.1",
}  # fmt: skip

PYTHON_PAGES = {"share/man/man1/ckptfs-run.1", "share/man/man1/ckptfs-bench.1"}


def test_dist_has_these_files_and_their_sums(dist):
    assert {path.name for path in dist.iterdir()} == {WHEEL, f"{PROGRAM}.tar.gz", SOURCE_PACKAGE, "SHA256SUMS"}
    sums = dict(reversed(line.split("  ")) for line in (dist / "SHA256SUMS").read_text().splitlines())
    assert sums == {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in dist.iterdir() if path.name in sums
    }
    assert sums.keys() == {WHEEL, f"{PROGRAM}.tar.gz", SOURCE_PACKAGE}


@pytest.fixture
def unpacked(dist, tmp_path):
    """A folder with what the wheel and the archive of the program hold."""
    with tarfile.open(dist / f"{PROGRAM}.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    with zipfile.ZipFile(dist / WHEEL) as wheel:
        wheel.extractall(tmp_path / "wheel")
    return tmp_path


def test_the_binaries_need_only_glibc(unpacked):
    binaries = [path for path in unpacked.rglob("*") if path.is_file() and path.read_bytes()[:4] == b"\x7fELF"]
    assert sorted(binary.name for binary in binaries) == ["_ckptfs.abi3.so", "ckptfs"]
    for binary in binaries:
        needed = readelf("--dynamic", binary)
        libraries = re.findall(r"\(NEEDED\).*\[(.+)\]", needed)
        assert "libc.so.6" in libraries and all(map(LIBRARIES.fullmatch, libraries)), (binary, libraries)
        assert not re.search(r"RPATH|RUNPATH", needed), binary
        # The versions that must be there, and not those that the file itself has.
        versions = set(re.findall(r"Name: (\w+?)_([\d.]+) ", readelf("--version-info", binary)))
        assert {name for name, _ in versions} == {"GLIBC"}, (binary, versions)
        assert max(tuple(map(int, number.split("."))) for _, number in versions) <= GLIBC, (binary, versions)


def test_no_path_of_the_machine_that_built_them_is_in_them(unpacked):
    for file in (path for path in unpacked.rglob("*") if path.is_file()):
        content = file.read_bytes()
        for path in (f"{REPOSITORY}/target", "/.cargo/", "/rustup/toolchains"):
            assert path.encode() not in content, (file, path)


def readelf(what, binary):
    return subprocess.run(["readelf", "-W", what, binary], check=True, capture_output=True, text=True).stdout


def test_the_links_of_the_documents_lead_to_files_of_the_archive(unpacked):
    folder = unpacked / PROGRAM / "share/doc/ckptfs"
    pages = [folder / "README.md", *folder.rglob("docs/**/*.md")]
    assert len(pages) > 15
    for page in pages:
        for target in re.findall(r"\]\((?!https?:)([^)#\s]+)", page.read_text()):
            assert (page.parent / target).exists(), (page, target)


def test_the_wheel_is_for_every_python_from_3_11_on(dist):
    with zipfile.ZipFile(dist / WHEEL) as wheel:
        folder = f"ckptfs-{VERSION}.dist-info"
        assert f"Tag: {WHEEL.removeprefix(f'ckptfs-{VERSION}-').removesuffix('.whl')}\n" in (
            wheel.read(f"{folder}/WHEEL").decode()
        )
        about = wheel.read(f"{folder}/METADATA").decode()
    assert "Requires-Python: >=3.11\n" in about
    assert "Requires-Dist" not in about


def test_the_source_package_has_what_builds_it_and_no_tests_of_the_repository(dist):
    with tarfile.open(dist / SOURCE_PACKAGE) as package:
        names = {name.partition("/")[2] for name in package.getnames()}
    assert {"Cargo.lock", "Cargo.toml", "pyproject.toml", "README.md", "src/main.rs", "LICENSE-MIT"} <= names
    assert "python/ckptfs/__init__.py" in names
    assert not [name for name in names if name.startswith(("tests/python", "tests/dist", "scripts", "fuzz", ".github"))]


@pytest.mark.parametrize("python", pythons(), ids=lambda python: python.name)
def test_a_user_installs_the_wheel_and_loads_through_a_mount(dist, user, python):
    wheel = user.take(dist / WHEEL)
    user(python, "-m", "venv", "env")
    env = user.home / "env"
    # It needs no other package, and so no network.
    user(env / "bin/pip", "install", "--no-index", wheel)
    command = env / "bin/ckptfs"
    assert user(command, "--version") == f"ckptfs {VERSION}\n"
    user(env / "bin/python", "-c", "import ckptfs; ckptfs.mount, ckptfs.safe_open")
    assert "/dev/fuse" in user(command, "doctor")
    for page in PAGES | PYTHON_PAGES:
        assert (env / page).read_text(), page

    user(env / "bin/pip", "install", "numpy", "safetensors")
    demo = user.take(DEMO)
    user(env / "bin/python", demo, "make", "models")
    user.mount(command, "models", "mnt")
    told = user(env / "bin/python", demo, "safetensors", "mnt")
    assert told.count("equal to those that were saved") == 2
    user.unmount()
    direct = "import ckptfs.numpy as c; print(len(c.load_file('models/pickled')) == len(c.load_file('models/sharded')))"
    assert user(env / "bin/python", "-c", direct) == "True\n"
    block = "import ckptfs\nwith ckptfs.mount('models') as path: print(sorted(x.name for x in path.iterdir()))"
    assert user(env / "bin/python", "-c", block) == "['pickled', 'sharded']\n"


def test_a_user_unpacks_the_program_and_mounts(dist, user):
    """The way for machines with an older Python than the wheel needs, or with none."""
    user("mkdir", "-p", ".local", "models", "programs")
    user("mkdir", "-m", "700", ".local/share")
    user("ln", "-s", "../programs", ".local/bin")
    user("tar", "-xzf", user.take(dist / f"{PROGRAM}.tar.gz"), "--strip-components=1", "-C", ".local")
    local = user.home / ".local"
    assert (local / "bin").is_symlink() and (local / "share").stat().st_mode & 0o777 == 0o700
    for page in PAGES:
        assert (local / page).read_text(), page
    assert not any((local / page).exists() for page in PYTHON_PAGES)
    command = local / "bin/ckptfs"
    assert user(command, "--version") == f"ckptfs {VERSION}\n"
    assert "/dev/fuse" in user(command, "doctor")
    user("cp", user.take(REPOSITORY / "fuzz/seeds/zip/plain"), "models/pytorch_model.bin")
    user(command, "export", "models/pytorch_model.bin", "exported.safetensors")
    user.mount(command, "models", "mnt")
    user("cmp", "mnt/model.safetensors", "exported.safetensors")
    user.unmount()
