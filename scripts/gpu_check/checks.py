"""Whether what is loaded is right: each check is a row, ok, FAILED or skipped.

Checks run one after the other in one process, and the rest in a new one when one hangs or ends it.
"""

import os
import subprocess

# A check that reports nothing for so long hangs.
_LIMIT_SECONDS = 240


def check_correctness(job):
    remaining = None
    while remaining is None or remaining:
        if job.is_out_of_time(f"correctness: {', '.join(remaining) if remaining else 'all of it'}"):
            break
        with job.worker("ckptfs", "safetensors 0.8") as worker:
            messages = worker.call("gpu_check.run_checks:run", _LIMIT_SECONDS, device=job.device,
                                   folder=str(job.disk), quick=job.quick, names=remaining)  # fmt: skip
            remaining = add_checks(job, messages, remaining or [])
    if job.rust_test and job.rust_test.exists() and not job.is_out_of_time("correctness: the Rust test"):
        run_rust_test(job)


def add_checks(job, messages, remaining):
    """Adds the checks that one process reports. Returns those that remain where it ended before its end."""
    current = None
    for message in messages:
        if "names" in message:
            remaining = message["names"]
        elif "began" in message:
            current = message["began"]
        elif "result" in message:
            job.table.add("correctness", current, message["result"], seconds=[message["seconds"]],
                          reason=message["why"])  # fmt: skip
            remaining = remaining[remaining.index(current) + 1 :]
            current = None
            if job.deadline is not None and remaining and job.is_out_of_time(f"correctness: {', '.join(remaining)}"):
                return []
        elif "fault" in message:
            if current is None:
                reason = f"{message['fault']}; not checked: {', '.join(remaining) or 'all of it'}"
                job.table.add("correctness", "the process of the checks", "FAILED", reason=reason)
                return []
            job.table.add("correctness", current, "FAILED", reason=message["fault"])
            return remaining[remaining.index(current) + 1 :]
    return []


def run_rust_test(job):
    """Runs the Rust test that needs a device, as a program."""
    program = job.disk / job.rust_test.name
    program.write_bytes(job.rust_test.read_bytes())
    program.chmod(0o700)
    environment = {**os.environ, "TMPDIR": str(job.disk)}
    try:
        done = subprocess.run([program, "--nocapture"], capture_output=True, text=True, timeout=_LIMIT_SECONDS,
                              env=environment)  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as fault:
        job.table.add("correctness", job.rust_test.name, "FAILED", reason=str(fault))
        return
    output = (done.stdout + done.stderr).splitlines()
    skipped = [line for line in output if line.startswith("skipped: ")]
    if done.returncode:
        failure_lines = [line for line in output if "panicked" in line or "assert" in line or "Err" in line]
        job.table.add("correctness", job.rust_test.name, "FAILED", reason=" ".join(failure_lines or output[-1:])[:300])
    elif skipped:
        job.table.add("correctness", job.rust_test.name, "skipped", reason=skipped[0].removeprefix("skipped: "))
    else:
        job.table.add("correctness", job.rust_test.name, "ok")
