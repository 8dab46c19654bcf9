"""Fails unless the files of a folder may be published: `publish_check.py FOLDER [TAG]`.

The metadata of the packages must name a real repository, and a tag the version of the packages.
"""

import email
import sys
import tarfile
import zipfile
from pathlib import Path

# The domain that stands for one that is not chosen yet (RFC 2606).
PLACEHOLDER = "example.invalid"

PRIVATE = "Private :: Do Not Upload"


def metadata_of(path):
    """The metadata of a wheel or a source package."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            name = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
            return wheel.read(name).decode()
    with tarfile.open(path) as package:
        name = next(name for name in package.getnames() if name.count("/") == 1 and name.endswith("/PKG-INFO"))
        return package.extractfile(name).read().decode()


def faults(folder, tag):
    """What forbids to publish, each with the remedy."""
    packages = sorted(path for path in folder.glob("ckptfs-*") if path.suffix == ".whl" or "linux" not in path.name)
    if not any(path.suffix == ".whl" for path in packages):
        yield f"{folder}: no wheel", "scripts/dist"
    for path in packages:
        about = email.message_from_string(metadata_of(path))
        urls = [url for value in about.get_all("Project-URL", []) for _, _, url in [value.partition(", ")]]
        if not urls or any(PLACEHOLDER in url for url in urls):
            yield (
                f"{path}: its project URLs are placeholders: {', '.join(urls)}",
                "put the repository's address into pyproject.toml ([project.urls]) and Cargo.toml (repository)",
            )
        if PRIVATE in about.get_all("Classifier", []):
            yield (
                f"{path}: has the classifier {PRIVATE!r}",
                "claim the name ckptfs in the index, then remove the classifier from pyproject.toml, and "
                "`publish = false` from Cargo.toml",
            )
        if tag and tag != f"v{about['Version']}":
            yield f"{path}: the tag is {tag}", f"git tag v{about['Version']}, or change version in Cargo.toml"


def main():
    folder, tag = Path(sys.argv[1]), (sys.argv[2:] or [None])[0]
    found = list(faults(folder, tag))
    for fault, remedy in found:
        print(f"scripts/dist: {fault}\n  what to do: {remedy}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
