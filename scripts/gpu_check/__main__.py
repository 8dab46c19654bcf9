"""`scripts/gpu-check`: checks ckptfs on a GPU, and measures it there beside others.

The packages come from a pack that `scripts/gpu-check --pack` made, or with --installed from where Python finds them.
The table is printed, and written as Markdown and JSON. The exit code is 1 if a check failed, 2 if there is no GPU.
"""

import argparse
import contextlib
import os
import re
import sys
import tempfile
import time
from pathlib import Path

from gpu_check import REPOSITORY, wheels

OK, FAILED, NO_GPU = 0, 1, 2

# What --only takes.
PARTS = ["correctness", "leaks", "ceilings", "bench", "tuning"]


def make_parser():
    parser = argparse.ArgumentParser(
        prog="scripts/gpu-check", description="Check ckptfs on a GPU, and measure it there beside others.",
        epilog="`scripts/gpu-check --pack [DIR]` makes the pack, where Rust and the registries are.",
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="fewer repetitions and smaller models")
    parser.add_argument("--sizes", type=parse_sizes, metavar="GB,...", help="of the large models (4,16; quick: 1)")
    parser.add_argument("--runs", type=int, metavar="N", help="loads of each kind (5; quick: 2)")
    parser.add_argument("--only", choices=PARTS, help="one part; only this option runs tuning")
    parser.add_argument("--device", type=parse_device, default="cuda:0",
                        help="cuda:0; cpu tries out all that needs no GPU")  # fmt: skip
    parser.add_argument("--from", type=Path, dest="pack", metavar="DIR", default=REPOSITORY / "gpu-check-pack",
                        help="the pack (gpu-check-pack)")  # fmt: skip
    parser.add_argument("--installed", action="store_true", help="no pack: the packages that Python finds")
    parser.add_argument("--out", type=Path, metavar="DIR", default=REPOSITORY / "gpu-check-out",
                        help="where the table goes (gpu-check-out)")  # fmt: skip
    parser.add_argument("--minutes", type=float, metavar="N", help="begin nothing after so long")
    return parser


def parse_device(text):
    if not re.fullmatch(r"cpu|cuda(:\d+)?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is neither cpu nor a device such as cuda:0")
    # The device of a tensor has the number, too.
    return "cuda:0" if text == "cuda" else text


def parse_sizes(text):
    sizes = [float(size) for size in text.split(",")]
    if not all(0 < size < 1000 for size in sizes):
        raise argparse.ArgumentTypeError(f"{text!r}: give sizes in GB, such as 4,16")
    return sizes


def run_parts(job, only):
    """Runs one part, or all but tuning. Shares of a ceiling need the ceilings."""
    from gpu_check.benchmarks import run_benchmarks, run_tuning
    from gpu_check.checks import check_correctness
    from gpu_check.hardware_limits import measure_ceilings
    from gpu_check.leaks import check_leaks

    for run_part in {
        "correctness": [check_correctness], "leaks": [check_leaks], "ceilings": [measure_ceilings],
        "bench": [measure_ceilings, run_benchmarks], "tuning": [measure_ceilings, run_tuning],
        None: [check_correctness, check_leaks, measure_ceilings, run_benchmarks],
    }[only]:  # fmt: skip
        run_part(job)


def main():
    options = make_parser().parse_args()
    deadline = None if options.minutes is None else time.monotonic() + 60 * options.minutes
    if not options.installed and not options.pack.is_dir():
        sys.exit(f"gpu-check: {options.pack}: no pack: make one with `scripts/gpu-check --pack`, or give --installed")
    with contextlib.ExitStack() as stack:
        disk = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gpu-check-")))
        shm = None
        if os.access("/dev/shm", os.W_OK):
            shm = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gpu-check-", dir="/dev/shm")))
        if options.installed:
            folders, missing_packages = {}, wheels.find_missing()
        else:
            folders, missing_packages = wheels.install_wheels(options.pack, disk / "packages")
        if "ckptfs" in missing_packages:
            sys.exit(f"gpu-check: ckptfs: {missing_packages['ckptfs']}")
        # This process and its workers are those of `ckptfs.bench`.
        sys.path[:0] = map(str, [folders["ckptfs"]] if folders else [])
        from gpu_check import hardware
        from gpu_check.job import Job
        from gpu_check.table import CheckTable

        report = hardware.describe(options.device, {"disk": str(disk)})
        if "fault" in report:
            sys.exit(f"gpu-check: torch cannot be used: {report['fault']}")
        if not report["is_available"]:
            print(f"gpu-check: no GPU: torch finds no CUDA here ({report['known']['python']})", file=sys.stderr)
            return NO_GPU
        job = Job(
            device=options.device, quick=options.quick,
            sizes=options.sizes or ([1.0] if options.quick else [4.0, 16.0]),
            runs=options.runs or (2 if options.quick else 5), disk=disk, shm=shm, folders=folders,
            missing_packages=missing_packages, free_device_bytes=report["free"], deadline=deadline,
            rust_test=None if options.installed else options.pack / "loads_to_a_gpu",
            table=CheckTable(options.out, report["known"]),
        )  # fmt: skip
        run_parts(job, options.only)
        job.table.end()
    return FAILED if job.table.failures else OK


if __name__ == "__main__":
    sys.exit(main())
