"""Mutation testing: each mutation must make its test fail.

A mutation replaces a text, which must be there exactly once, in a copy of the files that git tracks. It is noticed if
the mutated copy builds and its test fails. Each file in scripts/mutations says how to build and to test, and has:

    [[mutation]]
    breaks = "the wrong behavior"
    file = "its file"
    find = "the text"
    with = "the text instead"
    test = "the test that must fail"
    hangs = true    # the test may hang instead: it is killed, which counts as noticed
"""

import argparse
import fcntl
import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.append(str(REPOSITORY / "tests/python/common"))
import cuda_stubs  # noqa: E402 From the tests.
import preloaded  # noqa: E402

MUTATIONS = REPOSITORY / "scripts" / "mutations"
MUTATED = REPOSITORY / "target" / "mutated"
TREE, PACKAGE, OUTPUT = MUTATED / "tree", MUTATED / "python", MUTATED / "output"

# The limits of a build, of a test, and of a test that may hang. All tests together take less without a mutation.
BUILD_SECONDS, TEST_SECONDS, HANG_SECONDS = 1800, 120, 40

# The signals that end this program.
ENDS = {signal.SIGINT, signal.SIGTERM}

# The exit status of failed tests; any other status is no failed test.
FAILED = {"cargo": 101, "pytest": 1}


def copy_changed(files, source, target):
    """Copies files that differ from one folder to another. Equal files keep their times, so that they are not built
    again."""
    for name in files:
        path, content = target / name, (source / name).read_bytes()
        if not path.is_file() or path.read_bytes() != content:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            path.chmod((source / name).stat().st_mode)


def copy_tree():
    """Makes the copy equal to the files that git tracks."""
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, check=True, capture_output=True, text=True)
    names = [name for name in tracked.stdout.split("\0") if name and (REPOSITORY / name).is_file()]
    for old in TREE.rglob("*"):
        if old.is_file() and "__pycache__" not in old.parts and str(old.relative_to(TREE)) not in names:
            old.unlink()
    copy_changed(names, REPOSITORY, TREE)


def copy_package():
    """Makes the Python package beside the copy: the compiled parts as installed, the rest from the copy."""
    installed = REPOSITORY / "target" / "python" / "ckptfs"
    files = [path.relative_to(installed) for path in installed.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    copy_changed(files, installed, PACKAGE / "ckptfs")
    copy_changed([path.relative_to(TREE / "python") for path in TREE.glob("python/**/*.py")], TREE / "python", PACKAGE)


def unblock():
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDS)


def run(command, seconds, output):
    """The exit status of a command in the copy; `None` if it was killed after so many seconds."""
    # The copy shares the compiled dependencies of other builds.
    environment = os.environ | {"CARGO_TARGET_DIR": str(REPOSITORY / "target"), "PYTHONPATH": str(PACKAGE)}
    environment |= {"PYTHONDONTWRITEBYTECODE": "1"}
    if command[0] == "python":
        # Tests run in forks of one process, which has imported torch on the stubs of CUDA.
        environment |= cuda_stubs.libraries()
        command = preloaded.command(*command[1:], **cuda_stubs.libraries())
    with open(output, "ab") as out:
        # These signals are blocked until there is a process to end.
        signal.pthread_sigmask(signal.SIG_BLOCK, ENDS)
        process = subprocess.Popen(command, cwd=TREE, env=environment, stdin=subprocess.DEVNULL, stdout=out,
                                   stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=unblock)  # fmt: skip
        try:
            unblock()
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            # Also the processes that it has started and left.
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()


class Part:
    """A file of mutations, with its commands to build and to test."""

    def __init__(self, name):
        read = tomllib.loads((MUTATIONS / f"{name}.toml").read_text())
        self.name, self.build, self.test, self.mutations = name, read["build"], read["test"], read["mutation"]
        # What the names of the tests begin with.
        self.prefix = read.get("tests", "")
        self.failed = FAILED["cargo" if self.test[0] == "cargo" else "pytest"]

    def output(self, number):
        """A new file for the output of a mutation."""
        OUTPUT.mkdir(parents=True, exist_ok=True)
        output = OUTPUT / f"{self.name}-{number}"
        output.unlink(missing_ok=True)
        return output

    def run_tests(self, tests, seconds, output):
        """The exit status of tests; `None` if they were killed."""
        return run([*self.test, *(self.prefix + test for test in tests)], seconds, output)

    def check_baseline(self):
        """Fails unless every mutation applies, and every test exists and passes without a mutation."""
        self.check_texts()
        output = self.output("baseline")
        tests = list(dict.fromkeys(mutation["test"] for mutation in self.mutations))
        failed = run(self.build, BUILD_SECONDS, output)
        if failed or self.run_tests(tests, HANG_SECONDS * len(tests), output):
            sys.exit(f"{self.name}: fails without a mutation: see {output}")
        if f"{len(tests)} passed" not in output.read_text():
            sys.exit(f"{self.name}: not all of the named tests exist: see {output}")

    def check_texts(self):
        """Fails unless each text is exactly once in its file."""
        for mutation in self.mutations:
            count = (TREE / mutation["file"]).read_text().count(mutation["find"])
            if count != 1:
                sys.exit(f"{self.name}: {mutation['breaks']}: {count} times in {mutation['file']}, not once: "
                         f"{mutation['find']!r}")  # fmt: skip

    def try_out(self, number, mutation):
        """Tests a mutation. Returns why it was not noticed; `None` if it was."""
        output, hangs = self.output(number), mutation.get("hangs", False)
        file = TREE / mutation["file"]
        whole = file.read_text()
        try:
            file.write_text(whole.replace(mutation["find"], mutation["with"]))
            if self.name == "python":
                copy_package()
            if run(self.build, BUILD_SECONDS, output):
                return "IT DOES NOT BUILD, which proves nothing"
            status = self.run_tests([mutation["test"]], HANG_SECONDS if hangs else TEST_SECONDS, output)
        finally:
            file.write_text(whole)
        if status is None:
            return None if hangs else "THE TEST HANGS"
        if status == 0:
            return "THE TEST PASSES"
        return None if status == self.failed else f"THE TEST DID NOT RUN: {status}"


def share(text):
    """The remainder and the divisor of `K/N`."""
    remainder, divisor = map(int, text.split("/"))
    if not 0 <= remainder < divisor:
        raise ValueError
    return remainder, divisor


def main():
    parser = argparse.ArgumentParser(prog="scripts/mutate")
    parser.add_argument("parts", nargs="+", choices=sorted(path.stem for path in MUTATIONS.glob("*.toml")))
    parser.add_argument("--share", type=share, default=(0, 1), metavar="K/N",
                        help="try the mutations whose number modulo N is K, with K from 0 to N - 1")  # fmt: skip
    arguments = parser.parse_args()
    remainder, divisor = arguments.share
    # An exception, so that `run` ends its test.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    MUTATED.mkdir(parents=True, exist_ok=True)
    lock = open(MUTATED / "lock", "w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    copy_tree()
    survived = 0
    for part in map(Part, arguments.parts):
        if part.name == "python":
            copy_package()
        part.check_baseline()
        tried = [pair for pair in enumerate(part.mutations, 1) if pair[0] % divisor == remainder]
        print(f"{part.name}: {len(tried)} of {len(part.mutations)} mutations", flush=True)
        for number, mutation in tried:
            why = part.try_out(number, mutation)
            survived += why is not None
            print(f"{mutation['breaks']}: {why or 'noticed by ' + mutation['test']}", flush=True)
            if why:
                print(f"    see {OUTPUT / f'{part.name}-{number}'}", flush=True)
    if survived:
        sys.exit(f"{survived} mutations were not noticed as they should be")


if __name__ == "__main__":
    main()
