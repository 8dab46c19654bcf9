"""Compares loads from a store, and mounts of it, with those of other programs.

The store is a server on this machine, whose answers begin after 30 ms and come at 50 MB/s a connection. The results have
its processor time: on few cores, server and reader share the processor, which limits both.

Arguments name the cases to run; SIZE scales the model for trials. Free memory is left to the system, except in the row
with a ballast (see `memory_ballast`).
"""

import os
import subprocess
import tempfile
import time
from contextlib import closing, contextmanager
from pathlib import Path

from ckptfs.bench.usage import processor_seconds

from bench import workloads
from bench.fixtures import CKPTFS, RUNS, alternate, mounted, uniform, write_model
from bench.machine import Machine, load
from bench.memory_ballast import Ballast, NoBallast
from bench.models import Models
from bench.results import Results
from bench.store_server import BYTES_PER_SECOND, StoreServer
from bench.workloads import make_request

SIZE = float(os.environ.get("SIZE", "1"))

FROM_PRETRAINED = load(f"{workloads.__name__}:from_pretrained")
DOWNLOAD = load(f"{workloads.__name__}:boto3_then_from_pretrained")
OURS = load("ckptfs owned")
RUNAI = load("runai")

BUCKET = "bucket"

# At this speed the network limits any number of connections, and the processor does not.
SLOW_BYTES_PER_SECOND = 1_000_000

# The maximum of CKPTFS_CONNECTIONS.
MAX_CONNECTIONS = 256

MOUNT_TIMEOUT_SECONDS = 30

# Seconds of faults and reads of the mapping.
STALL_SECONDS = float(os.environ.get("STALL_SECONDS", "20"))


@contextmanager
def environment(**variables):
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


class Bench:
    def __init__(self, machine, server, models, peers):
        self.machine, self.server, self.models, self.peers = machine, server, models, peers
        self.peaks = []

    def url(self, path):
        return f"s3://{path.relative_to(self.machine.folder / 'store')}"

    def warm_store(self, folder=None):
        """Drops all caches but the server's: its answers wait for no disk."""
        self.machine.warm(*sorted((folder or self.models.shards()).glob("*")))

    def time(self, request, path, source=None, prepare=None, bytes_per_second=BYTES_PER_SECOND):
        """Measures a request. `source` is the context manager of a mount that it needs, if any."""
        worker = self.machine.worker(request, path, self.models.shards("tiny"), self.peers)
        try:
            (prepare or self.warm_store)()
            self.server.limit(bytes_per_second)
            used = self.server.cpu
            with source() if source else closing(NoDaemon()) as daemon:
                worker.go()
                result = worker.result()
                spent = daemon.cpu
                # Its mappings keep the mount busy.
                worker.close()
        finally:
            worker.close()
        if "fault" in result:
            raise SystemExit(f"failed: {result['fault']}")
        return {
            "seconds": result["end"] - result["start"], "cpu": result["cpu"] + spent, "server": self.server.cpu - used,
            "connections": self.server.stats["most_at_once"], "bytes": self.server.stats["bytes"],
        }  # fmt: skip

    def compare(self, loads):
        """Measures both loads in turns. Each run has the numbers of the first load, and those of the second as `other`."""
        (ours, measure), (other, measure_other) = loads.items()
        runs = alternate([ours, other], lambda name: loads[name](), RUNS)
        return [{**run[ours], **{f"other {key}": value for key, value in run[other].items()}} for run in runs]

    @contextmanager
    def mount(self, source, cache=None):
        with mounted(source, self.machine.point, cache=cache) as daemon:
            yield daemon
            self.peaks.append({"peak": daemon.peak, "budget": daemon.budget})

    @contextmanager
    def foreign_mount(self, *command):
        """Mounts by another program, which runs in the foreground with its own cache."""
        point = self.machine.point
        with tempfile.TemporaryDirectory(dir=self.machine.folder) as cache:
            words = [str(word).format(cache=cache, point=point) for word in command]
            # Certificates of an authority of one's own are none of rclone's.
            variables = {name: value for name, value in os.environ.items() if name != "AWS_CA_BUNDLE"}
            process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=variables)
            try:
                deadline = time.monotonic() + MOUNT_TIMEOUT_SECONDS
                while not os.path.ismount(point):
                    if process.poll() is not None or time.monotonic() > deadline:
                        raise SystemExit(f"failed: {command[0]} did not mount")
                    time.sleep(0.01)
                yield ForeignDaemon(process.pid)
            finally:
                subprocess.run(["umount", "--lazy", point], check=False)
                process.terminate()
                process.wait()


class NoDaemon:
    cpu = 0

    def close(self):
        pass


class ForeignDaemon:
    def __init__(self, pid):
        self.pid = pid

    @property
    def cpu(self):
        return processor_seconds(self.pid)


def measure_load(bench):
    model = bench.models.shards()
    url = bench.url(model)
    runai = RUNAI | {"files": [f"{url}/{path.name}" for path in sorted(model.glob("*.safetensors"))]}
    for label, speed in (("50 MB/s a connection", BYTES_PER_SECOND), ("1 MB/s", SLOW_BYTES_PER_SECOND)):
        def measure_peer(speed=speed):
            return bench.time(runai, url, bytes_per_second=speed)

        def measure_ours(speed=speed, **variables):
            with environment(CKPTFS_NO_CACHE="1", **variables):
                return bench.time(OURS, url, bytes_per_second=speed)

        count = min(measure_peer()["connections"], MAX_CONNECTIONS)
        yield f"`load_file`, {label}, equal connections", "Run:ai's streamer", bench.compare({
            "ours": lambda: measure_ours(CKPTFS_CONNECTIONS=str(count)), "other": measure_peer,
        })  # fmt: skip
        if speed == BYTES_PER_SECOND:
            yield f"`load_file`, {label}", "Run:ai's streamer", bench.compare(
                {"ours": measure_ours, "other": measure_peer}
            )


MOUNT_LOAD_ROW = "`from_pretrained` through the mount, nothing cached"


def measure_download(bench):
    url, point = bench.url(bench.models.shards()), bench.machine.point

    def ours():
        return bench.time(FROM_PRETRAINED, point, lambda: bench.mount(url))

    def download():
        with tempfile.TemporaryDirectory(dir=bench.machine.folder) as folder:
            return bench.time(DOWNLOAD | {"folder": folder}, url)

    sides, peer = {"ours": ours, "other": download}, "boto3's download, then the load"
    # First without ballast: the host takes back what a ballast frees, which slows later loads.
    yield MOUNT_LOAD_ROW, peer, bench.compare(sides)
    with bench.machine.with_ballast(Ballast()):
        yield f"{MOUNT_LOAD_ROW}, with ballast", peer, bench.compare(sides)


def measure_mounts(bench):
    model, point = bench.models.shards(), bench.machine.point
    url, address = bench.url(model), bench.server.address
    path = url.removeprefix("s3://")
    remote = f":s3,provider=Other,env_auth=true,endpoint='{address}',region=us-east-1,force_path_style=true:{path}"
    rclone = ["rclone", "mount", remote, "{point}", "--vfs-cache-mode", "full", "--cache-dir", "{cache}", "--read-only",
              "--config", "/dev/null"]  # fmt: skip
    bucket, _, prefix = path.partition("/")
    s3fs = ["s3fs", bucket, "{point}", "-f", "-o", f"url={address},use_path_request_style,ro"]

    def through(*command, inside=""):
        return bench.time(FROM_PRETRAINED, point / inside, lambda: bench.foreign_mount(*command))

    def ours():
        return bench.time(FROM_PRETRAINED, point, lambda: bench.mount(url))

    os.environ |= {"AWSACCESSKEYID": "key", "AWSSECRETACCESSKEY": "secret"}
    yield MOUNT_LOAD_ROW, "rclone mount", bench.compare({"ours": ours, "other": lambda: through(*rclone)})
    yield MOUNT_LOAD_ROW, "s3fs", bench.compare({"ours": ours, "other": lambda: through(*s3fs, inside=prefix)})


def measure_second_start(bench):
    model, point = bench.models.shards(), bench.machine.point
    with tempfile.TemporaryDirectory(dir=bench.machine.folder) as caches:
        sources = {"ours": bench.url(model), "other": str(model)}

        def measure(side):
            def mount():
                return bench.mount(sources[side], cache=Path(caches) / side)

            return bench.time(FROM_PRETRAINED, point, mount, prepare=bench.machine.cold)

        for side in sources:
            measure(side)
        yield "the second start, page cache cold", "a mount of the model on disk", bench.compare(
            {side: lambda side=side: measure(side) for side in sources}
        )


def measure_trace_replay(bench):
    """A load in the order of an earlier one, without the cache on disk that would have its bytes."""
    url = bench.url(bench.models.shards())
    with tempfile.TemporaryDirectory() as traces, environment(CKPTFS_NO_CACHE="1"):
        def measure(cache):
            return bench.time(FROM_PRETRAINED, bench.machine.point, lambda: bench.mount(url, cache=cache))

        measure(Path(traces))
        yield "`from_pretrained` through the mount, no cache on disk, again", "the first load", bench.compare(
            {"ours": lambda: measure(Path(traces)), "other": lambda: measure(None)}
        )


FIRST_BYTE = "first byte of a tensor after `ckptfs mount`, 160 shards: seconds"


def measure_first_byte(bench):
    def measure():
        bench.warm_store(bench.models.many)
        bench.server.limit()
        with bench.mount(bench.url(bench.models.many)) as daemon:
            start = time.perf_counter()
            with open(bench.machine.virtual_file, "rb", buffering=0) as file:
                header = int.from_bytes(file.read(8), "little")
                assert len(os.pread(file.fileno(), 1, 8 + header)) == 1
            seconds = time.perf_counter() - start
            return {"after": {"value": seconds}, "with": {"value": daemon.seconds + seconds}}

    runs = [measure() for _ in range(RUNS)]
    yield FIRST_BYTE, [run["after"] for run in runs]
    yield f"{FIRST_BYTE}, and for the mount itself", [run["with"] for run in runs]


def measure_ls(bench):
    def measure():
        bench.warm_store(bench.models.many)
        bench.server.limit()
        start = time.perf_counter()
        subprocess.run([CKPTFS, "ls", bench.url(bench.models.many)], check=True, stdout=subprocess.DEVNULL)
        return {"value": time.perf_counter() - start}

    # The cache on disk has headers after the first run.
    with environment(CKPTFS_NO_CACHE="1"):
        yield "`ckptfs ls` of 160 shards: seconds", [measure() for _ in range(RUNS)]


def measure_bytes(bench):
    model, folder = bench.models.shards(), bench.models.folder / "tensors"
    if not folder.exists():
        write_model(folder, uniform(4, 10, 5_000_000))
    name = uniform(4, 10, 5_000_000)[2][5][0]
    one = OURS | {"loader": f"{workloads.__name__}:one_tensor", "options": {"name": name}}
    whole, single = [], []
    for _ in range(RUNS):
        with environment(CKPTFS_NO_CACHE="1"):
            found = bench.time(OURS, bench.url(model))
            whole.append({"value": found["bytes"] / sum(path.stat().st_size for path in bench.models.sources)})
            found = bench.time(one, bench.url(folder), prepare=lambda: bench.warm_store(folder))
            single.append({"value": found["bytes"] / 1e6})
    yield "bytes fetched to load everything, of the model's", whole
    yield "MB fetched to load one tensor of 10 MB", single


def measure_stalls(bench):
    request, runs = make_request(workloads.fault_and_read, seconds=STALL_SECONDS), []
    for _ in range(RUNS):
        worker = bench.machine.worker(request, bench.machine.virtual_file, bench.models.plain("tiny"))
        bench.warm_store()
        bench.server.limit()
        with bench.mount(bench.url(bench.models.shards())):
            worker.go()
            result = worker.result(60 + 4 * STALL_SECONDS)
            worker.close()
        if "fault" in result:
            raise SystemExit(f"failed: {result['fault']}")
        runs.append({"value": result["longest"], "faults": result["faults"], "read": result["read"]})
    yield "the longest fault or read, 32 threads at random and 8 in order: seconds", runs


def measure_memory(bench):
    if not bench.peaks:
        url = bench.url(bench.models.shards())
        bench.time(FROM_PRETRAINED, bench.machine.point, lambda: bench.mount(url))
    runs = [{"value": (each["peak"] - each["budget"]) / 1e6} for each in bench.peaks]
    yield "memory of the daemon beyond its `--memory`: MB", runs


COMPARED = {"load": measure_load, "mounts": measure_mounts, "second": measure_second_start,
            "trace": measure_trace_replay, "download": measure_download}

BOUNDED = {"first-byte": measure_first_byte, "ls": measure_ls, "bytes": measure_bytes, "stalls": measure_stalls,
           "memory": measure_memory}

# The ballast of "download" comes last.
CASES = COMPARED | BOUNDED
CASES["download"] = CASES.pop("download")


def main(*names):
    if unknown := [name for name in names if name not in CASES]:
        raise SystemExit(f"no case {unknown[0]!r}; there are: {', '.join(CASES)}")
    assert os.geteuid() == 0, "dropping caches needs root"
    peers = [os.environ["CKPTFS_BENCH_PEERS"]]
    results = Results("remote", names)
    with tempfile.TemporaryDirectory() as folder:
        machine = Machine(Path(folder), NoBallast())
        kept = os.environ.get("CKPTFS_BENCH_MODELS")
        store = machine.folder / "store"
        if kept:
            store.symlink_to(Path(kept) / "store")
            (Path(kept) / "store").mkdir(exist_ok=True)
        models = Models(store / BUCKET, SIZE)
        with closing(StoreServer(store)) as server:
            bench = Bench(machine, server, models, peers)
            for name, measure in CASES.items():
                if names and name not in names:
                    continue
                for row, *rest in measure(bench):
                    if name in COMPARED:
                        peer, runs = rest
                        results.add("remote", [row, peer], runs)
                    else:
                        results.add("remote-limits", [row], rest[0])
