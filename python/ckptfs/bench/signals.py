"""Signals that end a program which must clean up first.

In a block of `defer_signals`, a signal raises `SignalExit` only inside a block of `interruptible`, so that no cleanup is
interrupted. Further signals are ignored.
"""

import contextlib
import os
import signal
import sys
import threading

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class SignalExit(BaseException):
    """A signal that ends this program."""

    def die(self):
        """Ends this process by the signal, as a shell expects."""
        sys.stdout.flush()
        signal.signal(self.args[0], signal.SIG_DFL)
        os.kill(os.getpid(), self.args[0])


class _Pending:
    number, may_interrupt = None, False


@contextlib.contextmanager
def defer_signals():
    """Lets signals end this block only where it is `interruptible`, and at its end. Outside the main thread, which
    alone receives signals, it changes nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # A signal that is ignored, as after nohup, stays ignored.
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    before = {number: handler for number, handler in before.items() if handler not in (signal.SIG_IGN, None)}
    try:
        for number in before:
            signal.signal(number, _receive)
        yield
        if _Pending.number:
            raise SignalExit(_Pending.number)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _Pending.number = None


@contextlib.contextmanager
def interruptible():
    """A block that a signal may interrupt."""
    try:
        _Pending.may_interrupt = True
        if _Pending.number:
            raise SignalExit(_Pending.number)
        yield
    finally:
        _Pending.may_interrupt = False


def _receive(number, _frame):
    if _Pending.number:
        return
    _Pending.number = number
    if _Pending.may_interrupt:
        _Pending.may_interrupt = False
        raise SignalExit(number)
