"""Every link of the documents to another of the project's files, or to a heading there, leads somewhere."""

import re

import pytest

from program import REPOSITORY

PAGES = [REPOSITORY / "README.md", REPOSITORY / "CHANGELOG.md", *sorted((REPOSITORY / "docs").glob("*.md"))]


def anchors(page):
    """Its headings as they are linked to."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
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
