"""`scripts/mutate` leaves no test behind, however it ends, and what it replaces is there."""

import os
import subprocess
import sys

from mounts import PATIENCE, until
from program import REPOSITORY

# `mutate.py` with a part whose baseline is a test that never ends.
ENDLESS = """
import sys
from pathlib import Path
sys.path.insert(0, "scripts")
import mutate

class EndlessPart:
    def __init__(self, name):
        self.name = name

    def check_baseline(self):
        mutate.run(["bash", "-c", f"echo $$ >{mutate.TREE}/pid; sleep 1000"], 1000, mutate.TREE / "output")

mutate.TREE = mutate.MUTATED = Path(sys.argv[1])
mutate.copy_tree = lambda: None
mutate.Part = EndlessPart
sys.argv[1:] = ["ring"]
mutate.main()
"""

# What scripts/test does when another step fails meanwhile.
FAILED_STEP = """
set -euo pipefail
. scripts/machine.sh
trap end_background EXIT
start_in_background "$1/log" "$2" -c "$3" "$1"
until [ -s "$1/pid" ]; do
    sleep 0.1
    kill -0 "$background"
done
exit 3
"""


def test_a_step_that_fails_ends_the_mutations_and_their_test(tmp_path):
    command = ["bash", "-c", FAILED_STEP, "bash", tmp_path, sys.executable, ENDLESS]
    assert subprocess.run(command, cwd=REPOSITORY, timeout=PATIENCE).returncode == 3
    pid = (tmp_path / "pid").read_text().strip()
    until("the test has ended", lambda: not os.path.exists(f"/proc/{pid}"))


def test_every_text_that_a_mutation_replaces_is_there_once():
    code = """
import sys
from pathlib import Path
sys.path.insert(0, "scripts")
import mutate

mutate.TREE = Path.cwd()
for path in mutate.MUTATIONS.glob("*.toml"):
    mutate.Part(path.stem).check_texts()
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
