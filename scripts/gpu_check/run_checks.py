"""The checks, one after the other. A program of `subprocesses`.

In: the device, a folder, and the names of those to run. Out: of each that it began, and then ok, FAILED or skipped
and why.
"""

import gc
import shutil
import sys
import tempfile
import time
import traceback
from pathlib import Path

import subprocesses
from assertions import CHECKS, Place, Skipped
import check_api  # noqa: F401 What is imported is in `CHECKS`.
import check_streams  # noqa: F401
import check_formats  # noqa: F401
import check_interop  # noqa: F401


def answer(device, folder, quick, names):
    names = [*CHECKS] if names is None else names
    subprocesses.tell(names=names)
    for name in names:
        subprocesses.tell(began=name)
        place = Place(device, Path(tempfile.mkdtemp(dir=folder)), quick)
        start = time.perf_counter()
        try:
            result, why = "ok", CHECKS[name](place) or ""
        except Skipped as skipped:
            result, why = "skipped", str(skipped)
        except Exception as fault:
            traceback.print_exc()
            result, why = "FAILED", subprocesses.in_words(fault)
        seconds = time.perf_counter() - start
        shutil.rmtree(place.folder, ignore_errors=True)
        gc.collect()
        subprocesses.tell(result=result, why=why, seconds=seconds)


if __name__ == "__main__":
    sys.exit(subprocesses.serve(answer))
