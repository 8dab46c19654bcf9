"""The results of a part in a file of its own: the raw numbers of each run, the machine and the command.

`docs/performance/PART.json` is what scripts/bench/render_docs.py makes the page of. Each row is printed at once, as it
will stand there.

    {"command": "…", "machine": {…}, "tables": {NAME: [{"row": ["…"], "runs": [{"…": 0.1}]}]}}

A row that was measured again, with another number of runs, has a command of its own.

Results of less than the whole model (SIZE) or of another program (CKPTFS) are kept only where CKPTFS_BENCH_RESULTS
names a folder for them.
"""

import json
import os
import shlex
import subprocess
from pathlib import Path

from ckptfs.bench.machine import describe

from bench import FOLDER
from bench.fixtures import CKPTFS
from bench.tables import TABLES

SETTINGS = ("RUNS", "SIZE")


def results_folder():
    """The folder for results; `None` if these are for no page."""
    if named := os.environ.get("CKPTFS_BENCH_RESULTS"):
        return Path(named)
    return None if {"SIZE", "CKPTFS"} & os.environ.keys() else FOLDER


def machine():
    """What the numbers depend on. The filesystem is that of $TMPDIR, which has the models."""
    about = describe(os.environ.get("TMPDIR", "/tmp"), ["transformers"])
    version = subprocess.run([CKPTFS, "--version"], check=True, capture_output=True, text=True).stdout.split()[-1]
    versions = {"ckptfs": version, "python": about["python"]}
    return {
        "cores": about["cores"], "memory_gb": round(about["memory_bytes"] / 1e9),
        "kernel": about["system"].split()[1].split("-")[0], "filesystem": about["filesystem"],
        "versions": versions | {name: one for name, one in about["libraries"].items() if name not in versions},
    }  # fmt: skip


def select_shared(results):
    """What all rows of one file share: the machine, and the command but for its number of runs."""
    words = [word for word in shlex.split(results["command"]) if not word.startswith("RUNS=")]
    return {"command": words, "machine": results["machine"]}


class Results:
    """The results of a part. They replace all that the file had; if cases are named, only the rows that it has too."""

    def __init__(self, part, cases=()):
        self.printed = None
        settings = [f"{name}={shlex.quote(os.environ[name])}" for name in SETTINGS if name in os.environ]
        whole = [*settings, "scripts/bench/run", part]
        self.found = {"command": " ".join(whole), "machine": machine(), "tables": {}}
        self.row_command = {}
        folder = results_folder()
        self.file = folder / f"{part}.json" if folder else None
        if self.file and cases and self.file.exists():
            before = json.loads(self.file.read_text())
            found = select_shared(self.found)
            for key, value in select_shared(before).items():
                if found[key] != value:
                    raise SystemExit(f"{self.file} has results of another {key}: measure all of it, or let "
                                     "CKPTFS_BENCH_RESULTS name another folder")  # fmt: skip
            if before["command"] != self.found["command"]:
                self.row_command = {"command": " ".join([*whole, *map(shlex.quote, cases)])}
            self.found = before

    def add(self, table, row, runs):
        """Adds a row with its runs, each a dictionary of numbers. It is printed, and in the file, when this returns."""
        rows = self.found["tables"].setdefault(table, [])
        new = {"row": list(row), "runs": [{key: round_number(value) for key, value in run.items()} for run in runs]}
        new |= self.row_command
        places = [n for n, old in enumerate(rows) if old["row"] == new["row"]]
        if places:
            rows[places[0]] = new
        else:
            rows.append(new)
            rows.sort(key=TABLES[table].place)
        if self.file:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self.file.write_text(to_text(self.found))
        *head, line = TABLES[table].lines([new], rows)
        if table != self.printed:
            print("", *head, sep="\n")
            self.printed = table
        print(line, flush=True)

    def add_all(self, table, state, runs):
        """Adds a row for each of those that were compared, in a state if there is one."""
        for name in runs[0]:
            self.add(table, [name, state] if state else [name], [run[name] for run in runs])


def round_number(value):
    """To microseconds; whole numbers are bytes."""
    return round(value, 6) if isinstance(value, float) else value


def to_text(found):
    """The text of a file: a row to a line."""
    def lines(rows):
        return "[\n" + ",\n".join(f"  {json.dumps(row, ensure_ascii=False)}" for row in rows) + "\n ]"

    tables = ",\n".join(f" {json.dumps(name)}: {lines(rows)}" for name, rows in found["tables"].items())
    head = ",\n".join(f"{json.dumps(key)}: {json.dumps(found[key])}" for key in ("command", "machine"))
    return f'{{{head},\n"tables": {{\n{tables}\n}}}}\n'
