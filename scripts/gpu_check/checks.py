"""Whether what is loaded is right: each check is a row, ok, FAILED or skipped.

Checks run one after the other in one process, and the rest in a new one when one hangs or ends it.
"""

import os
import subprocess

# A check that reports nothing for so long hangs.
_LIMIT_SECONDS = 240


def correctness(job):
    left = None
    while left is None or left:
        if job.is_over(f"correctness: {', '.join(left) if left else 'all of it'}"):
            break
        with job.worker("ckptfs", "safetensors 0.8") as worker:
            messages = worker.call("gpu_check.run_checks:run", _LIMIT_SECONDS, device=job.device,
                                   folder=str(job.disk), quick=job.quick, names=left)  # fmt: skip
            left = add_checks(job, messages, left or [])
    if job.test and job.test.exists() and not job.is_over("correctness: the Rust test"):
        run_rust_test(job)


def add_checks(job, messages, left):
    """Adds the checks that one process reports. Returns those that remain where it ended before its end."""
    doing = None
    for message in messages:
        if "names" in message:
            left = message["names"]
        elif "began" in message:
            doing = message["began"]
        elif "result" in message:
            job.table.add("correctness", doing, message["result"], seconds=[message["seconds"]], why=message["why"])
            left = left[left.index(doing) + 1 :]
            doing = None
            if job.until is not None and left and job.is_over(f"correctness: {', '.join(left)}"):
                return []
        elif "fault" in message:
            if doing is None:
                why = f"{message['fault']}; not checked: {', '.join(left) or 'all of it'}"
                job.table.add("correctness", "the process of the checks", "FAILED", why=why)
                return []
            job.table.add("correctness", doing, "FAILED", why=message["fault"])
            return left[left.index(doing) + 1 :]
    return []


def run_rust_test(job):
    """Runs the Rust test that needs a device, as a program."""
    program = job.disk / job.test.name
    program.write_bytes(job.test.read_bytes())
    program.chmod(0o700)
    environment = {**os.environ, "TMPDIR": str(job.disk)}
    try:
        done = subprocess.run([program, "--nocapture"], capture_output=True, text=True, timeout=_LIMIT_SECONDS,
                              env=environment)  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as fault:
        job.table.add("correctness", job.test.name, "FAILED", why=str(fault))
        return
    said = (done.stdout + done.stderr).splitlines()
    skipped = [line for line in said if line.startswith("skipped: ")]
    if done.returncode:
        words = [line for line in said if "panicked" in line or "assert" in line or "Err" in line]
        job.table.add("correctness", job.test.name, "FAILED", why=" ".join(words or said[-1:])[:300])
    elif skipped:
        job.table.add("correctness", job.test.name, "skipped", why=skipped[0].removeprefix("skipped: "))
    else:
        job.table.add("correctness", job.test.name, "ok")
