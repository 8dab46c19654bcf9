"""Loading in the background: a plan in, tensors out as they come.

One thread reads batch after batch in the order of the bytes. A thread that takes a tensor waits for its batch. What was
read is held until it is taken or the loader is closed.
"""

import atexit
import contextlib
import operator
import os
import threading
import weakref

from ckptfs import _ckptfs
from ckptfs.errors import error
from ckptfs.load.pipeline import batches, load_batch
from ckptfs.load.report import Load, set_last_report
from ckptfs.load.torch import DeviceMap, Torch
from ckptfs.settings import LoadOptions

# Bytes that become ready together: enough to be read fast, few enough that the first come soon.
_BATCH_BYTES = 64 << 20

# The largest number of threads that the Rust part takes; it starts no more than have work.
_MAX_THREADS = 1 << 20


def parts_of(checkpoint, plan):
    """The parts of tensors in a plan by their names, in the order of their bytes."""
    if plan is None:
        return {name: checkpoint.tensor(name) for name in checkpoint.names}
    if not hasattr(plan, "items"):
        raise error(f"prefetch plan must be a dictionary, got {type(plan)}",
                    "for a list of names give dict.fromkeys(names)", TypeError)  # fmt: skip
    parts = {}
    for name, rows in plan.items():
        if not isinstance(name, str):
            raise error("prefetch plan keys must be tensor names")
        parts[name] = _part(checkpoint.tensor(name), rows)
    if not parts:
        raise error("prefetch plan selects no tensors")
    return {name: parts[name] for name in checkpoint.names if name in parts}


def _part(tensor, rows):
    name = tensor.name
    if rows is None:
        return tensor
    if not isinstance(rows, slice):
        raise error(f"prefetch plan values must be None or a slice, got {type(rows)} for {name}")
    if not tensor.shape:
        raise error(f"cannot slice rows of the 0-d tensor {name}")
    count = tensor.shape[0]
    if not all(bound is None or hasattr(bound, "__index__") for bound in (rows.start, rows.stop, rows.step)):
        raise error(f"prefetch plan slices must have integers, got {rows} for {name}", also=TypeError)
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


def _background_stream(device):
    """The stream on which tensors of a device are made; `None` where it has none."""
    if isinstance(device, DeviceMap):
        raise error("prefetch loads to one device", "name it, or load with get_tensors")
    if device is None or device.type != "cuda":
        return None
    from ckptfs.load.cuda import BackgroundStream

    return BackgroundStream(device)


# The states of loads whose thread or loader still exists.
_all = weakref.WeakSet()


class _State:
    """The state that a loader and its thread share. It must not refer to the loader: an unreferenced loader is then
    freed at once, which ends its thread."""

    def __init__(self, parts, device, threads):
        self.parts, self.device = parts, device
        self.threads = min(threads, _MAX_THREADS)
        self.stream = _background_stream(device)
        self.changed, self.stop = threading.Condition(), _ckptfs.Stop()
        self.ready, self.taken = {}, set()
        self.report = self.fault = self.thread = None
        self.is_closed, self.process = False, os.getpid()

    def close(self):
        """Ends the load, frees tensors that were not taken, and wakes waiting threads."""
        self.stop.set()
        with self.changed:
            self.is_closed, self.fault = True, None
            self.ready.clear()
            self.changed.notify_all()

    def abandon(self):
        """Ends the load when its loader is freed. A finalizer runs in any thread, which may hold any lock, so this
        must take none. No thread can be waiting on a loader that is freed."""
        self.is_closed = True
        self.stop.set()
        self.ready.clear()


class PrefetchLoader:
    """Tensors that load in the background, each handed out once: by `take`, or by iterating. `report` is
    the `ckptfs.Report` of what was read, once all of it was. The load ends with its block, with `close`, or
    when the loader is no longer referenced."""

    def __init__(self, parts, device, threads):
        state = self._state = _State(parts, device, threads)
        # At exit of the interpreter, `_at_exit` ends the load and waits for the thread.
        weakref.finalize(self, state.abandon).atexit = False
        _all.add(state)
        state.thread = threading.Thread(target=_run, args=(state,), name="ckptfs prefetch", daemon=True)
        try:
            state.thread.start()
        except RuntimeError:
            # Thread and state would keep each other alive.
            state.thread = None
            raise error("the system refuses a thread to prefetch with",
                        "raise the limit on threads: `ulimit -u`, or the limit of the container",
                        RuntimeError) from None  # fmt: skip

    @property
    def report(self):
        return self._state.report

    def names(self):
        """The names of its tensors, in the order of their bytes."""
        return list(self._state.parts)

    def __len__(self):
        return len(self._state.parts)

    def take(self, name):
        """The tensor of a name, once it is loaded. Each can be taken once."""
        state = self._state
        if name not in state.parts:
            raise error(f"tensor {name} is not in the prefetch plan")
        with state.changed:
            while True:
                self._check()
                if name in state.taken:
                    raise error(f"{name}: was already delivered")
                if name in state.ready:
                    return self._hand_out(name)
                state.changed.wait()

    def __iter__(self):
        """Names and tensors as they come, without those that were taken."""
        state = self._state
        while True:
            with state.changed:
                self._check()
                while not state.ready:
                    if len(state.taken) == len(state.parts):
                        return
                    state.changed.wait()
                    self._check()
                name = next(iter(state.ready))
                tensor = self._hand_out(name)
            yield name, tensor

    def close(self):
        """Ends the load, and frees tensors that were not taken. Those that were stay."""
        self._state.close()

    def __enter__(self):
        return self

    def __exit__(self, _exc_type, _exc_value, _traceback):
        self.close()

    def _hand_out(self, name):
        state = self._state
        state.taken.add(name)
        tensor, mark = state.ready.pop(name)
        if mark is not None:
            state.stream.hand_over(tensor, mark)
        if len(state.taken) == len(state.parts):
            while state.report is None and state.fault is None and not state.is_closed:
                state.changed.wait()
            if state.report is not None:
                set_last_report(state.report)
        return tensor

    def _check(self):
        state = self._state
        if state.is_closed:
            raise error("the prefetch loader is closed")
        if state.process != os.getpid():
            raise error("a prefetch loader works only in the process that made it", "make one here")
        if state.fault is not None:
            raise error(f"the prefetch failed: {state.fault}") from state.fault


def _run(state):
    """Runs in the thread of a loader, and must not refer to the loader."""
    try:
        _read_all(state)
    except BaseException as fault:
        _drop_traceback(fault)
        with state.changed:
            if not state.is_closed:
                state.fault = fault
            state.changed.notify_all()


def _read_all(state):
    with Load(stop=state.stop, threads=state.threads) as load, state.stream or contextlib.nullcontext():
        for batch in batches(state.parts.values(), _BATCH_BYTES):
            if not _load_next(state, batch, load):
                return
    with state.changed:
        state.report = load.report
        state.changed.notify_all()


def _load_next(state, batch, load):
    """Reads a batch, and returns whether the load goes on. Afterwards only `state` refers to the tensors."""
    tensors = load_batch(batch, state.device, LoadOptions(framework=Torch), load)
    mark = state.stream and state.stream.mark()
    with state.changed:
        if state.is_closed:
            return False
        state.ready.update({part.name: (tensor, mark) for part, tensor in zip(batch, tensors, strict=True)})
        state.changed.notify_all()
    return True


def _drop_traceback(fault):
    """Drops the traceback of an exception and of its causes. Its frames refer to tensors, and to the state that keeps
    the exception."""
    fault.__traceback__ = None
    for earlier in (fault.__cause__, fault.__context__):
        if earlier is not None and earlier.__traceback__ is not None:
            _drop_traceback(earlier)


def _after_fork():
    # A lock that another thread held at the fork is held for ever here. Nothing loads in this process.
    for state in list(_all):
        state.changed = threading.Condition()


def _at_exit():
    # A thread that returns to an interpreter which is gone ends the process.
    for state in list(_all):
        if state.process == os.getpid() and state.thread is not None:
            state.close()
            state.thread.join()


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)
