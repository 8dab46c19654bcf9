"""The checks, one after the other. A program of `children`.

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

import children
from asked import CHECKS, Place, Skipped
import checks_of_calls  # noqa: F401 What is imported is in `CHECKS`.
import checks_of_devices  # noqa: F401
import checks_of_loads  # noqa: F401
import checks_of_others  # noqa: F401


def answer(device, folder, quick, names):
    names = [*CHECKS] if names is None else names
    children.tell(names=names)
    for name in names:
        children.tell(began=name)
        place = Place(device, Path(tempfile.mkdtemp(dir=folder)), quick)
        start = time.perf_counter()
        try:
            result, why = "ok", CHECKS[name](place) or ""
        except Skipped as skipped:
            result, why = "skipped", str(skipped)
        except Exception as fault:
            traceback.print_exc()
            result, why = "FAILED", children.in_words(fault)
        seconds = time.perf_counter() - start
        shutil.rmtree(place.folder, ignore_errors=True)
        gc.collect()
        children.tell(result=result, why=why, seconds=seconds)


if __name__ == "__main__":
    sys.exit(children.serve(answer))
