"""docs/performance.md and its charts from the results, `docs/performance/PART.json`: see `results`.

A table replaces what stands between the markers `<!-- table NAME -->` and `<!-- end -->`. All else on the page is
written by hand, and a table without results stays as it is. The same results give the same page.

    python -m bench render-docs            writes the page and its charts
    python -m bench render-docs --check    fails unless they are what the results give
"""

import json
import re
import sys
import textwrap

from bench import FOLDER, overview
from bench.tables import TABLES

BEGIN = re.compile(r"<!-- table (\S+) -->")
END = "<!-- end -->"
MARKER = re.compile(rf"(<!-- table \S+ -->|{END})")


class Refused(Exception):
    """The page is not what can be written into."""


def results_of(folder):
    """Tables by name, each with its rows and, for the first of a part, where they are from."""
    found = {}
    for part in dict.fromkeys(table.part for table in TABLES.values()):
        file = folder / f"{part}.json"
        if not file.exists():
            continue
        results = json.loads(file.read_text())
        for name, rows in results["tables"].items():
            if name not in TABLES or TABLES[name].part != part:
                raise Refused(f"{file} has a table {name!r}, which is none of that part's: measure it anew")
        sources = {name: results["tables"].get(table.source or name) for name, table in TABLES.items()}
        names = [name for name, rows in sources.items() if rows]
        for name in names:
            rows = [row for row in sources[name] if TABLES[name].has_row(row)]
            found[name] = rows, origin(results) if name == names[0] else ""
    return found


def origin(results):
    machine = results["machine"]
    rows = [row for rows in results["tables"].values() for row in rows]
    counts = sorted({len(row["runs"]) for row in rows})
    runs = f"{counts[0]} runs" if len(counts) == 1 else f"{counts[0]} to {counts[-1]} runs"
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    text = (f"`{results['command']}`, {runs}; {machine['cores']} cores, {machine['memory_gb']} GB, "
            f"{machine['filesystem']}, Linux {machine['kernel']}; {versions}.")  # fmt: skip
    for command in dict.fromkeys(row["command"] for row in rows if "command" in row):
        names = ", ".join(f"*{', beside '.join(row['row'])}*" for row in rows if row.get("command") == command)
        text += f" For {names}: `{command}`."
    return "\n".join(textwrap.wrap(text, 110, break_on_hyphens=False))


def block(name, rows, said, charts):
    """What stands between the markers. A blank line before a table makes it one."""
    table = TABLES[name]
    lines = [*([said, ""] if said else []), *(table.lines(rows) if rows else ["None."])]
    if rows:
        for file_name, chart in table.charts(name):
            lines += ["", f"![{chart.title.replace('`', '')}]({charts}/{file_name}.svg)"]
    return "\n".join(lines)


def render(page, results, charts="performance"):
    """The page with the tables of these results in their places."""
    parts, seen, inside = [], [], None
    for text in MARKER.split(page):
        if begin := BEGIN.fullmatch(text):
            if inside:
                raise Refused(f"table {inside!r} has no end on the page: write {END} behind it")
            inside = begin[1]
            if inside not in TABLES:
                raise Refused(f"the page has a marker for a table {inside!r}: no bench measures it; remove the marker")
            if inside in seen:
                raise Refused(f"table {inside!r} stands twice on the page: remove one of its places")
            seen.append(inside)
        elif text == END:
            if not inside:
                raise Refused(f"the page has {END} where nothing began: remove it")
            inside = None
        elif inside in results:
            text = f"\n{block(inside, *results[inside], charts)}\n"
        parts.append(text)
    if inside:
        raise Refused(f"table {inside!r} has no end on the page: write {END} behind it")
    for name in TABLES:
        if name not in seen:
            raise Refused(f"the page has no place for table {name!r}: write <!-- table {name} --> and {END}")
    return "".join(parts)


def files(page, folder):
    """What the page and the charts are to be, by their paths."""
    results = results_of(folder)
    rendered = {page: render(page.read_text(), results, folder.name)}
    for name, (rows, _) in results.items():
        if rows:
            rendered |= {folder / f"{file}.svg": chart.svg(rows) for file, chart in TABLES[name].charts(name)}
    measured = [row for name, (rows, _) in results.items() if TABLES[name].part == overview.PART for row in rows]
    if overview_rows := overview.rows_of(measured):
        rendered[folder / f"{overview.NAME}.svg"] = overview.CHART.svg(overview_rows)
    return rendered


def stray_charts(rendered, folder):
    """Charts of nothing that is there."""
    return sorted(set(folder.glob("*.svg")) - set(rendered))


def changed_files(page, folder):
    """Files that are not what the results give."""
    rendered = files(page, folder)
    changed = [path for path, text in rendered.items() if not path.exists() or path.read_text() != text]
    return changed + stray_charts(rendered, folder)


def write(page, folder):
    rendered = files(page, folder)
    for path, text in rendered.items():
        path.write_text(text)
    for path in stray_charts(rendered, folder):
        path.unlink()


def main(*words, page=FOLDER.with_suffix(".md"), folder=FOLDER):
    try:
        if words != ("--check",):
            write(page, folder)
        elif changed := changed_files(page, folder):
            raise Refused(f"{changed[0]} is not what the results give: run scripts/bench/run docs")
    except Refused as refused:
        sys.exit(f"scripts/bench/run: {refused}")

