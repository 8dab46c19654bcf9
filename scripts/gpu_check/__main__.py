"""`scripts/gpu-check`: checks ckptfs on a GPU, and measures it there beside others.

In: a pack that `scripts/gpu-check --pack` made, or what Python finds with --installed. Out: a table, and the
same as JSON; exit code 1 if a check failed, 2 if there is no GPU.
"""

import argparse
import contextlib
import os
import re
import sys
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.append(str(REPOSITORY / "scripts"))

import benchmarks  # noqa: E402
import checks  # noqa: E402
import measures  # noqa: E402
import wheels  # noqa: E402
from subprocesses import one  # noqa: E402
from job import Job  # noqa: E402
from table import Table  # noqa: E402

OK, FAILED, NOTHING_THERE = 0, 1, 2

# What each of --only begins; shares of a ceiling need the ceilings.
PARTS = {
    "correctness": [checks.correctness], "leaks": [measures.leaks], "ceilings": [measures.ceilings],
    "bench": [measures.ceilings, benchmarks.bench], "tuning": [measures.ceilings, measures.tuning],
    None: [checks.correctness, measures.leaks, measures.ceilings, benchmarks.bench],
}  # fmt: skip


def parser():
    parser = argparse.ArgumentParser(
        prog="scripts/gpu-check", description="Check ckptfs on a GPU, and measure it there beside others.",
        epilog="`scripts/gpu-check --pack [DIR]` makes the pack, where Rust and the registries are.",
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="fewer repetitions and smaller models")
    parser.add_argument("--sizes", type=sizes, metavar="GB,...", help="of the large models (4,16; quick: 1)")
    parser.add_argument("--runs", type=int, metavar="N", help="loads of each kind (5; quick: 2)")
    parser.add_argument("--only", choices=[part for part in PARTS if part], help="one part; tuning is no part else")
    parser.add_argument("--device", type=device, default="cuda:0", help="cuda:0; cpu tries out all that needs no GPU")
    parser.add_argument("--from", type=Path, dest="pack", metavar="DIR", default=REPOSITORY / "gpu-check-pack",
                        help="the pack (gpu-check-pack)")  # fmt: skip
    parser.add_argument("--installed", action="store_true", help="no pack: the packages that Python finds")
    parser.add_argument("--out", type=Path, metavar="DIR", default=REPOSITORY / "gpu-check-out",
                        help="where the table goes (gpu-check-out)")  # fmt: skip
    parser.add_argument("--minutes", type=float, metavar="N", help="begin nothing after so long")
    return parser


def device(text):
    if not re.fullmatch(r"cpu|cuda(:\d+)?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is neither cpu nor a device such as cuda:0")
    # Tensors say the number, too.
    return "cuda:0" if text == "cuda" else text


def sizes(text):
    found = [float(size) for size in text.split(",")]
    if not all(0 < size < 1000 for size in found):
        raise argparse.ArgumentTypeError(f"{text!r}: give sizes in GB, such as 4,16")
    return found


def main():
    asked = parser().parse_args()
    until = None if asked.minutes is None else time.monotonic() + 60 * asked.minutes
    if not asked.installed and not asked.pack.is_dir():
        sys.exit(f"gpu-check: {asked.pack}: no pack: make one with `scripts/gpu-check --pack`, or give --installed")
    with contextlib.ExitStack() as places:
        disk = Path(places.enter_context(tempfile.TemporaryDirectory(prefix="gpu-check-")))
        shm = None
        if os.access("/dev/shm", os.W_OK):
            shm = Path(places.enter_context(tempfile.TemporaryDirectory(prefix="gpu-check-", dir="/dev/shm")))
        found = one("hardware.py", {"device": asked.device, "folders": {"disk": str(disk)}}, 120)
        if "fault" in found:
            sys.exit(f"gpu-check: torch cannot be used: {found['fault']}")
        if not found["there"]:
            print(f"gpu-check: no GPU: torch finds no CUDA here ({found['known']['python']})", file=sys.stderr)
            return NOTHING_THERE
        folders, lacking = ({}, wheels.not_installed()) if asked.installed else wheels.unpacked(asked.pack, disk / "packages")
        if "ckptfs" in lacking:
            sys.exit(f"gpu-check: ckptfs: {lacking['ckptfs']}")
        # Of this process: how files are had out of the page cache.
        sys.path[:0] = map(str, [folders["ckptfs"]] if folders else [])
        job = Job(
            device=asked.device, quick=asked.quick,
            sizes=asked.sizes or ([1.0] if asked.quick else [4.0, 16.0]),
            runs=asked.runs or (2 if asked.quick else 5), disk=disk, shm=shm, folders=folders, lacking=lacking,
            free=found["free"], until=until,
            test=None if asked.installed else asked.pack / "loads_to_a_gpu",
            table=Table(asked.out, found["known"]),
        )  # fmt: skip
        for part in PARTS[asked.only]:
            part(job)
        job.table.end()
    return FAILED if job.table.failed else OK


if __name__ == "__main__":
    sys.exit(main())
