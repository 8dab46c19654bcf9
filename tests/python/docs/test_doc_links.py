"""Every link of the documents to another file of the project, or to a heading there, has a target."""

import re

import pytest

from program import REPOSITORY

PAGES = [*sorted(REPOSITORY.glob("*.md")), *sorted((REPOSITORY / "docs").rglob("*.md"))]


def anchors(page):
    """A page's headings, spelled as links to them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_every_link_has_a_target(page):
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text()):
        path, _, anchor = target.partition("#")
        led = page.parent / path if path else page
        assert led.exists(), target
        assert not anchor or anchor in anchors(led), target


def test_design_names_files_that_exist():
    text = (REPOSITORY / "docs/design.md").read_text()
    named = re.findall(r"`([\w/]+\.(?:rs|py))`", text)
    assert len(named) > 20
    files = [str(path.relative_to(REPOSITORY)) for top in ("src", "python") for path in (REPOSITORY / top).rglob("*")]
    missing = [name for name in named if not any(("/" + file).endswith("/" + name) for file in files)]
    assert not missing
