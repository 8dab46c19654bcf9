"""Loading in the background: a plan in, tensors out as they come.

One thread reads batch after batch in the order in which the bytes lie; those who want a tensor wait for
its batch. What was read and not yet taken is held until it is taken or the loader is closed.
"""

import atexit
import contextlib
import operator
import os
import threading
import traceback
import weakref

from ckptfs import _ckptfs
from ckptfs._errors import error
from ckptfs._frameworks import Torch
from ckptfs._placement import Placement
from ckptfs._reading import batches, of_each
from ckptfs._report import Load, is_last
from ckptfs._settings import PREAD

# So much is handed out at once: large enough to be read fast, small enough that the first come soon.
_AT_ONCE = 64 << 20


def parts_of(opened, plan):
    """What a plan asks for: parts of tensors by their names, in the order in which they lie."""
    if plan is None:
        return {name: opened.tensor(name) for name in opened.names}
    parts = {}
    for name, rows in plan.items():
        if not isinstance(name, str):
            raise error("prefetch plan keys must be tensor names")
        parts[name] = _part(opened.tensor(name), rows)
    if not parts:
        raise error("prefetch plan selects no tensors")
    return {name: parts[name] for name in opened.names if name in parts}


def _part(tensor, rows):
    name = tensor.name
    if rows is None:
        return tensor
    if not isinstance(rows, slice):
        raise error(f"prefetch plan values must be None or a slice, got {type(rows)} for {name}")
    if not tensor.shape:
        raise error(f"cannot slice rows of the 0-d tensor {name}")
    count = tensor.shape[0]
    for which, bound in (("start", rows.start), ("stop", rows.stop)):
        if bound is not None and not -count <= operator.index(bound) <= count:
            raise error(f"prefetch plan slice {which} {bound} for {name} is out of range for {count} rows")
    try:
        start, stop, step = rows.indices(count)
    except (TypeError, ValueError) as fault:
        raise error(f"invalid prefetch plan slice for {name}: {fault}") from None
    if step != 1:
        raise error(f"prefetch plan slices must have step 1, got {step} for {name}")
    return tensor.part([(start, max(stop - start, 0), 1)])


def aside(device):
    """What a load in the background makes tensors of a device with, if the device has streams."""
    if isinstance(device, Placement):
        raise error("prefetch loads to one device", "name it, or load with get_tensors")
    if device is None or device.type != "cuda":
        return None
    from ckptfs._devices import Aside

    return Aside(device)


_all = weakref.WeakSet()


class PrefetchLoader:
    """Tensors that load in the background, each handed out once: by `take`, or by iterating. `report` is
    the `ckptfs.Report` of what was read, once all of it was."""

    def __init__(self, parts, device, threads):
        self._parts, self._device = parts, device
        # A number that the Rust part can take; it has no more than have something to do.
        self._threads = min(threads, 1 << 20)
        self.report, self._aside = None, aside(device)
        self._changed, self._stop = threading.Condition(), _ckptfs.Stop()
        self._ready, self._taken, self._fault, self._closed = {}, set(), None, False
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name="ckptfs prefetch", daemon=True)
        _all.add(self)
        self._thread.start()

    def names(self):
        """The names that it hands out, in the order in which they lie."""
        return list(self._parts)

    def __len__(self):
        return len(self._parts)

    def take(self, name):
        """The tensor of a name, waiting for it if it must. Each can be taken once."""
        if name not in self._parts:
            raise error(f"tensor {name} is not in the prefetch plan")
        with self._changed:
            while True:
                self._check()
                if name in self._taken:
                    raise error(f"{name}: was already delivered")
                if name in self._ready:
                    return self._hand_out(name)
                self._changed.wait()

    def __iter__(self):
        """Names and tensors as they come; those that were taken are left out."""
        while True:
            with self._changed:
                self._check()
                while not self._ready:
                    if len(self._taken) == len(self._parts):
                        return
                    self._changed.wait()
                    self._check()
                name = next(iter(self._ready))
                tensor = self._hand_out(name)
            yield name, tensor

    def close(self):
        """Ends the load, and lets go of what nobody took. Tensors that were handed out stay."""
        self._stop.set()
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()

    def __enter__(self):
        return self

    def __exit__(self, _exc_type, _exc_value, _traceback):
        self.close()

    def _hand_out(self, name):
        self._taken.add(name)
        tensor, mark = self._ready.pop(name)
        if mark is not None:
            self._aside.hand_over(tensor, mark)
        if len(self._taken) == len(self._parts):
            while self.report is None and self._fault is None:
                self._changed.wait()
            is_last(self.report)
        return tensor

    def _check(self):
        if self._closed:
            raise error("the prefetch loader is closed")
        if self._process != os.getpid():
            raise error("a prefetch loader loads in the process that made it", "make one here")
        if self._fault is not None:
            raise error(f"the prefetch failed: {self._fault}") from self._fault

    def _run(self):
        try:
            with Load() as load, self._aside or contextlib.nullcontext():
                for batch in batches(self._parts.values(), _AT_ONCE):
                    if not self._goes_on(batch, load):
                        return
            with self._changed:
                self.report = load.report
                self._changed.notify_all()
        except BaseException as fault:
            _let_go(fault)
            with self._changed:
                self._fault = fault
                self._changed.notify_all()

    def _goes_on(self, batch, load):
        """Reads a batch. Nothing holds what it read once this returns, but those who may take it."""
        made = of_each(batch, Torch, PREAD, load, self._device, self._stop, self._threads)
        mark = self._aside and self._aside.mark()
        with self._changed:
            if self._closed:
                return False
            self._ready.update({part.name: (tensor, mark) for part, tensor in zip(batch, made, strict=True)})
            self._changed.notify_all()
        return True


def _let_go(fault):
    """Of an exception that is kept: what the calls held that it came through is theirs no more."""
    while fault is not None:
        traceback.clear_frames(fault.__traceback__)
        fault = fault.__cause__ or fault.__context__


def _after_fork():
    # A lock that another thread held when this process began is held for ever here, and nobody loads.
    for loader in list(_all):
        loader._changed = threading.Condition()


def _at_exit():
    # A thread that came back to Python once that is gone would end the process.
    for loader in list(_all):
        if loader._process == os.getpid():
            loader.close()
            loader._thread.join()


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)
