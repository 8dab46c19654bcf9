"""Errors as exceptions: the one place that decides their classes.

`SafetensorError` is ours. Where the program has imported safetensors, what is raised is one of its own too, so that
handlers written for that package catch it. No package is imported for that.
"""

import errno
import functools
import json
import os
import re
import sys


class SafetensorError(Exception):
    """A checkpoint that cannot be read, or tensors that cannot be had from it."""

    __module__ = "ckptfs"


# What the note of a refusal with its remedy begins with.
REMEDY_MARK = "what to do: "


def error(message, remedy=None, also=None):
    """A refusal, with what the user can do about it. `also` is a class of Python that it has too, where programs
    catch that."""
    return _with_remedy(_build(also, (message,)), remedy)


def _with_remedy(raised, remedy):
    if remedy:
        raised.add_note(REMEDY_MARK + remedy)
    return raised


def in_words(raised):
    """A refusal and its remedy, on one line."""
    return "; ".join([str(raised), *getattr(raised, "__notes__", [])])


def one_line(text):
    """Text that cannot drive a terminal, on one line: names of files may have control characters."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


def print_error(message, remedy, code, is_json=False):
    """Prints an error as every command does, and returns its exit code."""
    if is_json:
        shown = json.dumps({"error": {"code": code, "message": message, "remedy": remedy}})
    else:
        shown = f"ckptfs: {one_line(message)}" + (f"\n  what to do: {one_line(remedy)}" if remedy else "")
    print(shown, file=sys.stderr)
    return code


def of_system(fault, path, remedy=None):
    """An error of the system about the path that the user knows; still the same `OSError`."""
    return _with_remedy(_build(type(fault), (fault.errno, fault.strerror, path)), remedy)


def _build(also, arguments):
    theirs = getattr(sys.modules.get("safetensors"), "SafetensorError", SafetensorError)
    return _class(theirs, also)(*arguments)


@functools.cache
def _class(theirs, also):
    # Where ckptfs stands for safetensors, theirs is ours.
    bases = tuple(base for base in (theirs, also) if base and not issubclass(SafetensorError, base))
    if not bases:
        return SafetensorError
    members = {
        "__module__": "ckptfs", "__doc__": SafetensorError.__doc__, "__reduce__": _reduce, "_also": also,
    }  # fmt: skip
    return type("SafetensorError", (SafetensorError, *bases), members)


def _reduce(raised):
    # The process that unpickles it may not have safetensors.
    arguments = raised.args
    if isinstance(raised, OSError):
        arguments = (raised.errno, raised.strerror, raised.filename)
    # The notes are among its attributes.
    return _build, (raised._also, arguments), raised.__dict__


class _MissingFile(FileNotFoundError):
    """Python's own exception, with the message of safetensors: with a file name, that class shows one of its own."""

    __module__, __qualname__ = "builtins", "FileNotFoundError"

    def __init__(self, path, words):
        super().__init__(errno.ENOENT, os.strerror(errno.ENOENT), path)
        self._words = words

    def __str__(self):
        return self._words

    def __reduce__(self):
        return missing_file, (self.filename, self._words), self.__dict__


_MissingFile.__name__ = "FileNotFoundError"


def missing_file(path, words):
    """A `FileNotFoundError` about a path, with this message."""
    return _MissingFile(path, words)


# A wrong value that is longer is named by its type.
_MAX_SHOWN_CHARACTERS = 80

# The help of a command.
_HELP = re.compile(r"ckptfs (\w+) --help")

# A command to type, which stays; an option of the command, with the placeholder of its value; or an option that
# names a dictionary.
_OPTION = re.compile(
    r"\b(?:ckptfs (?:[a-z]+ )|python |git |curl |aws |gcloud |hf |sed |umount )[^;]*"
    r"|--root (?!KEY)(?P<root>'[^']*'|[^\s;]+)"
    r"|(?<![\w-])--(?P<name>[a-z]+(?:-[a-z]+)*)(?P<value> [A-Z]+\b| <[A-Z]+>|=<[A-Z]+>)?"
)


def in_python(words):
    """The same text, with arguments of Python in the place of the command's options."""

    def named(option):
        if option["root"]:
            return f"root={option['root'].strip(chr(39))!r}"
        if not option["name"]:
            return option[0]
        return option["name"].replace("-", "_") + ("=" if option["value"] else "=True")

    return words and _OPTION.sub(named, _HELP.sub(r"help(ckptfs.\1)", words))


def from_loader(kind, message, remedy, path, number):
    """The exception for an error of the Rust part, which calls this. `number` is the `errno` of a system call."""
    remedy = in_python(remedy)
    if kind in ("missing", "dangling", "remote"):
        words = path if kind == "missing" else message.replace(": no such file or directory; ", ": ", 1)
        words = f"No such file or directory: {words}"
        return _with_remedy(missing_file(os.fspath(path), words), remedy)
    if kind == "system":
        return of_system(OSError(number, os.strerror(number)), os.fspath(path), remedy)
    if kind == "memory":
        return MemoryError(message)
    if kind == "unknown":
        message = f"File does not contain tensor: {message}"
    return error(message, remedy)


def list_tensors(path):
    """The remedy for the name of a tensor that is not there."""
    import shlex

    return f"see which there are: ckptfs inspect --tensors {shlex.quote(os.fsdecode(path))}"


def wrong_type(name, expected, value):
    """The refusal of an argument of another type."""
    shown = repr(value)
    shown = shown if len(shown) <= _MAX_SHOWN_CHARACTERS else f"a {type(value).__name__}"
    return error(f"{name} must be {expected}, got {shown}", also=TypeError)


def refuse_target(name, reason, remedy="give a contiguous tensor in memory of the tensor's own type and shape"):
    """The refusal of a tensor to load into."""
    return error(f"{name}: cannot be loaded into what was given: {reason}", remedy)


def closed():
    """The refusal of a handle that was closed."""
    return error("File is closed")
