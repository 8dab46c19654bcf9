"""Nothing is published, and nobody is sent to a package index, while ckptfs has no name there and no public address."""

import io
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile

import pytest
import yaml

from program import REPOSITORY

CARGO = tomllib.loads((REPOSITORY / "Cargo.toml").read_text())["package"]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]

WORKFLOWS = sorted((REPOSITORY / ".github/workflows").glob("*.yml"))


def make_dist(folder, urls=PROJECT["urls"], classifiers=PROJECT["classifiers"]):
    """A folder with a wheel and a source package that have only metadata."""
    lines = ["Metadata-Version: 2.4", "Name: ckptfs", f"Version: {CARGO['version']}"]
    lines += [f"Project-URL: {name}, {url}" for name, url in urls.items()]
    about = "\n".join([*lines, *(f"Classifier: {words}" for words in classifiers), "", "Text"]).encode()
    stem = f"ckptfs-{CARGO['version']}"
    with zipfile.ZipFile(folder / f"{stem}-cp311-abi3-manylinux_2_28_x86_64.whl", "w") as wheel:
        wheel.writestr(f"{stem}.dist-info/METADATA", about)
    with tarfile.open(folder / f"{stem}.tar.gz", "w:gz") as package:
        record = tarfile.TarInfo(f"{stem}/PKG-INFO")
        record.size = len(about)
        package.addfile(record, io.BytesIO(about))
    # Has no metadata.
    (folder / f"{stem}-linux-x86_64.tar.gz").write_bytes(b"")


def publish_check(folder, *tag):
    command = [sys.executable, REPOSITORY / "scripts/publish_check.py", folder, *tag]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.returncode, done.stderr


REAL = {name: url.replace("example.invalid", "example.org") for name, url in PROJECT["urls"].items()}
PUBLIC = [words for words in PROJECT["classifiers"] if not words.startswith("Private")]


def test_what_is_there_today_may_not_be_published(tmp_path):
    make_dist(tmp_path)
    code, told = publish_check(tmp_path)
    assert code == 1
    assert told.count("its project URLs are placeholders") == 2 and "example.invalid" in told
    assert told.count("Private :: Do Not Upload") == 2
    assert "put the repository's address into pyproject.toml" in told
    # The other ways to publish: cargo, and an upload of the wheel.
    assert CARGO["publish"] is False and CARGO["repository"] == PROJECT["urls"]["Repository"]


@pytest.mark.parametrize(
    "left", [{"urls": REAL}, {"classifiers": PUBLIC}, {"urls": {}, "classifiers": PUBLIC}], ids=["name", "urls", "none"]
)
def test_each_placeholder_alone_is_refused(tmp_path, left):
    make_dist(tmp_path, **left)
    assert publish_check(tmp_path)[0] == 1


def test_packages_with_an_address_may_be_published_under_their_own_version(tmp_path):
    make_dist(tmp_path, REAL, PUBLIC)
    assert publish_check(tmp_path) == (0, "")
    assert publish_check(tmp_path, f"v{CARGO['version']}") == (0, "")
    code, told = publish_check(tmp_path, "v9.9.9")
    assert code == 1 and f"git tag v{CARGO['version']}" in told


def test_no_packages_are_no_release(tmp_path):
    code, told = publish_check(tmp_path)
    assert code == 1 and told.endswith("what to do: scripts/dist\n")


def test_no_file_sends_people_to_the_package_index():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, check=True).stdout
    files = [REPOSITORY / name.decode() for name in listed.split(b"\0") if name]
    advice = re.compile(rb"(pip|pipx|uv|cargo)\s+(tool\s+|pip\s+)?install\s+ckptfs\b")
    advising = [file for file in files if file.is_file() and not file.is_symlink() and advice.search(file.read_bytes())]
    assert not advising


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_run_scripts_that_exist(path):
    runs = [step.get("run", "") for job in yaml.safe_load(path.read_text())["jobs"].values() for step in job["steps"]]
    named = re.findall(r"\bscripts/[\w./-]+", "\n".join(runs))
    assert named and all((REPOSITORY / name).is_file() for name in named), named


def test_a_release_has_only_what_passed_its_test():
    jobs = yaml.safe_load((REPOSITORY / ".github/workflows/release.yml").read_text())["jobs"]
    steps = jobs["dist"]["steps"]
    assert not any(step.keys() & {"if", "continue-on-error"} for step in steps)
    runs = [step.get("run", step.get("uses", "")) for step in steps]
    order = [next(n for n, words in enumerate(runs) if part in words) for part in (
        "scripts/dist", "scripts/dist --test", "almalinux:8", "actions/upload-artifact"
    )]  # fmt: skip
    assert order == sorted(order) and len(set(order)) == 4
    assert {entry["arch"] for entry in jobs["dist"]["strategy"]["matrix"]["include"]} == {"x86_64", "aarch64"}
    published = [step.get("run", "") for step in jobs["publish"]["steps"]]
    check = next(n for n, words in enumerate(published) if "--publish-check" in words)
    assert check < next(n for n, words in enumerate(published) if "gh release create" in words)
