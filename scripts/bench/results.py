"""What a part measured, as a file of its own: the raw numbers of each run, the machine and the command.

In: rows as they are measured. Out: `docs/performance/PART.json`, from which scripts/bench/render_docs.py makes the page; and
each row at once, as it will stand there.

    {"command": "…", "machine": {…}, "tables": {NAME: [{"row": ["…"], "runs": [{"…": 0.1}]}]}}

What was measured with less than the whole model (SIZE) or another program (CKPTFS) is kept only where
CKPTFS_BENCH_RESULTS names a folder for it.
"""

import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
from pathlib import Path

from bench.fixtures import CKPTFS, REPOSITORY
from bench.tables import TABLES

SETTINGS = ("RUNS", "SIZE")
LIBRARIES = ("torch", "safetensors", "transformers", "fastsafetensors", "runai-model-streamer")
FOLDER = REPOSITORY / "docs/performance"


def kept_in():
    """The folder for results; None if these are for no page."""
    if named := os.environ.get("CKPTFS_BENCH_RESULTS"):
        return Path(named)
    return None if {"SIZE", "CKPTFS"} & os.environ.keys() else FOLDER


def machine():
    """What the numbers depend on. Who measures in $TMPDIR has its filesystem measured."""
    folder = os.environ.get("TMPDIR", "/tmp")
    kind = subprocess.run(["stat", "-f", "-c", "%T", folder], check=True, capture_output=True, text=True).stdout
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    version = subprocess.run([CKPTFS, "--version"], check=True, capture_output=True, text=True).stdout.split()[-1]
    versions = {name: importlib.metadata.version(name) for name in LIBRARIES}
    return {
        "cores": os.cpu_count(), "memory_gb": round(memory / 1e9), "kernel": platform.release().split("-")[0],
        "filesystem": "ext4" if kind.strip() == "ext2/ext3" else kind.strip(),
        "versions": {"ckptfs": version, "python": platform.python_version(), **versions},
    }  # fmt: skip


class Results:
    """`whole`: what is measured takes the place of all that the file had; else of the rows that it has too."""

    def __init__(self, part, whole=True):
        self.told = None
        said = [f"{name}={shlex.quote(os.environ[name])}" for name in SETTINGS if name in os.environ]
        self.found = {"command": " ".join([*said, "scripts/bench/run", part]), "machine": machine(), "tables": {}}
        folder = kept_in()
        self.file = folder / f"{part}.json" if folder else None
        if self.file and not whole and self.file.exists():
            before = json.loads(self.file.read_text())
            for key in ("command", "machine"):
                if before[key] != self.found[key]:
                    raise SystemExit(f"{self.file} has results of another {key}: measure all of it, or let "
                                     "CKPTFS_BENCH_RESULTS name another folder")  # fmt: skip
            self.found = before

    def add(self, table, row, runs):
        """A row with its runs, each a dictionary of numbers. It is told, and in the file, when this returns."""
        rows = self.found["tables"].setdefault(table, [])
        new = {"row": list(row), "runs": [{key: rounded(value) for key, value in run.items()} for run in runs]}
        places = [n for n, old in enumerate(rows) if old["row"] == new["row"]]
        if places:
            rows[places[0]] = new
        else:
            rows.append(new)
            rows.sort(key=TABLES[table].place)
        if self.file:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self.file.write_text(written(self.found))
        if table != self.told:
            print(f"\n{TABLES[table].head()}")
            self.told = table
        print(TABLES[table].line(new, rows), flush=True)


def rounded(value):
    """To microseconds; whole numbers are bytes."""
    return round(value, 6) if isinstance(value, float) else value


def written(found):
    """A row to a line."""
    def lines(rows):
        return "[\n" + ",\n".join(f"  {json.dumps(row, ensure_ascii=False)}" for row in rows) + "\n ]"

    tables = ",\n".join(f" {json.dumps(name)}: {lines(rows)}" for name, rows in found["tables"].items())
    head = ",\n".join(f"{json.dumps(key)}: {json.dumps(found[key])}" for key in ("command", "machine"))
    return f'{{{head},\n"tables": {{\n{tables}\n}}}}\n'
