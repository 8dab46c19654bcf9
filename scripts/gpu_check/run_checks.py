"""The checks, one after the other, in a worker."""

import gc
import shutil
import tempfile
import time
import traceback
from pathlib import Path

from ckptfs.bench.tables import fault_line

from gpu_check.assertions import CHECKS, CheckContext, Skipped
from gpu_check import check_api, check_formats, check_interop, check_streams  # noqa: F401 Importing fills `CHECKS`.


def run(report, device, folder, quick, names):
    """Reports of each check that it began, and then its result. `names` are the checks to run, `None` all."""
    names = [*CHECKS] if names is None else names
    report({"names": names})
    for name in names:
        report({"began": name})
        context = CheckContext(device, Path(tempfile.mkdtemp(dir=folder)), quick)
        start = time.perf_counter()
        try:
            result, reason = "ok", CHECKS[name](context) or ""
        except Skipped as skipped:
            result, reason = "skipped", str(skipped)
        except Exception as fault:
            traceback.print_exc()
            result, reason = "FAILED", fault_line(fault)
        seconds = time.perf_counter() - start
        shutil.rmtree(context.folder, ignore_errors=True)
        gc.collect()
        report({"result": result, "why": reason, "seconds": seconds})
