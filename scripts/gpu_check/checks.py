"""Whether what is loaded is right: each check a line, ok, FAILED or skipped.

In: a `Job`. Out: rows of the table. Checks run one after the other in one process, and the rest in a new one when
one hangs or ends it.
"""

import os
import subprocess

from subprocesses import Child

# Seconds without a word after which a check hangs.
_LIMIT = 240


def correctness(job):
    packages = job.packages("ckptfs", "safetensors 0.8")
    left = None
    while left is None or left:
        if job.is_over(f"correctness: {', '.join(left) if left else 'all of it'}"):
            break
        with Child("run_checks.py", packages) as child:
            asked = {"device": job.device, "folder": str(job.disk), "quick": job.quick, "names": left}
            left = round_of(job, child.ask(asked, _LIMIT), left or [])
    if job.test and job.test.exists() and not job.is_over("correctness: the test of Rust"):
        of_rust(job)


def round_of(job, told, left):
    """Adds what one process tells. Gives what is left to check when it ended before its end."""
    doing = None
    for one in told:
        if "names" in one:
            left = one["names"]
        elif "began" in one:
            doing = one["began"]
        elif "result" in one:
            job.table.add("correctness", doing, one["result"], seconds=[one["seconds"]], why=one["why"])
            left = left[left.index(doing) + 1 :]
            doing = None
            if job.until is not None and left and job.is_over(f"correctness: {', '.join(left)}"):
                return []
        elif "fault" in one:
            if doing is None:
                why = f"{one['fault']}; not checked: {', '.join(left) or 'all of it'}"
                job.table.add("correctness", "the process of the checks", "FAILED", why=why)
                return []
            job.table.add("correctness", doing, "FAILED", why=one["fault"])
            return left[left.index(doing) + 1 :]
    return []


def of_rust(job):
    """The test of Rust that needs a device, as a program."""
    program = job.disk / job.test.name
    program.write_bytes(job.test.read_bytes())
    program.chmod(0o700)
    environment = {**os.environ, "TMPDIR": str(job.disk)}
    try:
        done = subprocess.run([program, "--nocapture"], capture_output=True, text=True, timeout=_LIMIT, env=environment)
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
