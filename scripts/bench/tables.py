"""The tables of docs/performance.md, by the names in their markers: the part that measures each, its columns, and its
chart."""

from bench import target_table
from bench.charts import Chart
from bench.columns import (
    PageTable, columns_by_ballast, for_selected_runs, growth_exponent, label, maximum, median, numbers, promise,
    ratio_to_first, ratios, runs_with_ballast, speed_of_first, spreads,
)  # fmt: skip

SPEED = ratios("plain", "mount")

MOUNT_TARGETS = {
    ("sequential `read`, 1 MiB", "cold"): "1.0",
    ("sequential `read`, 1 MiB", "source cached"): "0.35",
    ("sequential `read`, 1 MiB", "second read"): "0.70",
    ("sequential through `mmap`", "cold"): "1.0",
}


seconds_of = for_selected_runs(runs_with_ballast, numbers("seconds"))


def milliseconds_more(row, rows):
    return [(run["enabled"] - run["plain"]) * 1000 for run in row["runs"]]


def seconds_more(row, rows):
    return [run["view"] - run["plain"] for run in row["runs"]]


def is_ours(row):
    return row["row"][0].startswith("ckptfs")


def loads(title):
    """Loaders beside the first of them, which is ours."""
    columns = (
        label(title), label(place=1),
        *columns_by_ballast(
            median("seconds", "seconds"), median("CPU seconds", "cpu"), median("peak memory", "peak"),
            spreads("ratio to ckptfs: median (least to most)", ratio_to_first("seconds")),
        ),
    )  # fmt: skip
    return PageTable("loader", columns, Chart(f"{title}: seconds", seconds_of, is_ours))


REMOTE_TARGETS = {
    ("`load_file`, 50 MB/s a connection, equal connections", "Run:ai's streamer"): "1.02",
    ("`load_file`, 1 MB/s, equal connections", "Run:ai's streamer"): "1.02",
    ("`load_file`, 50 MB/s a connection", "Run:ai's streamer"): "0.7",
    ("`from_pretrained` through the mount, nothing cached, with ballast", "boto3's download, then the load"): "0.7",
    ("`from_pretrained` through the mount, nothing cached", "boto3's download, then the load"): "0.7",
    ("`from_pretrained` through the mount, nothing cached", "rclone mount"): "0.5",
    ("`from_pretrained` through the mount, nothing cached", "s3fs"): "0.5",
    "the second start, page cache cold": "1.15",
    "`from_pretrained` through the mount, no cache on disk, again": "0.95",
}

REMOTE_LIMITS = {
    "first byte of a tensor after `ckptfs mount`, 160 shards: seconds": "1",
    "`ckptfs ls` of 160 shards: seconds": "2",
    "bytes fetched to load everything, of the model's": "1.03",
    "MB fetched to load one tensor of 10 MB": "12",
    "the longest fault or read, 32 threads at random and 8 in order: seconds": "5",
    "memory of the daemon beyond its `--memory`: MB": "64",
}


def sizes(title):
    """Loaders beside the first of them, which is safetensors. They are too few for a chart."""
    return PageTable("tensor-sizes", (
        label(title), label(place=1),
        *columns_by_ballast(
            median("seconds", "seconds"), median("CPU seconds", "cpu"),
            spreads("ratio to the first: median (least to most)", ratio_to_first("seconds")),
        ),
    ))  # fmt: skip


def growth(title, unit):
    """What a mount takes for more and more of something. The exponent is from the row before: 1 is linear growth."""
    def exponents(key):
        def cell(row, rows):
            place = rows.index(row) if row in rows else 0
            return f"{growth_exponent(rows[place - 1], row, key):.2f}" if place else ""

        return cell

    columns = (
        label(title), spreads("seconds: median (least to most)", numbers("seconds"), 3), ("exponent", exponents("seconds")),
        median("CPU seconds of the daemon", "cpu"), median("peak memory, MB", "peak", 0, 1e-6),
        ("exponent", exponents("peak")),
    )  # fmt: skip
    chart = Chart(f"{title}: microseconds for each {unit}", lambda row, rows: [
        run["seconds"] / run["count"] * 1e6 for run in row["runs"]
    ])  # fmt: skip
    memory_chart = Chart(f"{title}: peak memory, MB", numbers("peak", 1e-6))
    return PageTable("growth", columns, chart, more_charts=(("memory", memory_chart),))


def beside_files(title, target, others):
    """Something that is done with training checkpoints, beside the same with their own files."""
    def find_target(row, rows):
        return others.get(row["row"][0], target)

    return PageTable("training", (
        label(title), median("seconds", "ours"), median("their own files, seconds", "other"),
        spreads("speed: median (least to most)", ratios("other", "ours")), ("target", find_target),
    ))  # fmt: skip


def targets(title, has_row):
    """The targets that are reached, or those that are missed."""
    chart = Chart(
        f"{title}: ratio to the baseline; the mark is the target", target_table.compute_figures,
        mark=lambda row: target_table.find_target(row).limit,
        is_drawn=lambda row: not target_table.find_target(row).is_absolute,
    )  # fmt: skip
    return PageTable("targets", target_table.COLUMNS, chart, tuple(target_table.TARGETS), "targets", has_row)


TABLES = {
    "targets": targets("reached", target_table.is_reached),
    "targets-missed": targets("missed", target_table.is_missed),
    "growth-tensors": growth("mount and first byte, by tensors", "tensor"),
    "growth-files": growth("mount and first byte, by files", "file"),
    "growth-readers": growth("512 MiB read by each reader, by readers", "reader"),
    "growth-gigabytes": growth("read whole, by gigabytes", "gigabyte"),
    "ablations": PageTable("ablations", (
        label("left out"), label(place=1), median("with all, s", "all"), median("without it, s", "without"),
        spreads("ratio without it: median (least to most)", ratios("without", "all")),
        spreads("the daemon's processor time, ratio", ratios("without cpu", "all cpu")),
        spreads("bytes read from the disk, ratio", ratios("without read", "all read")),
    )),
    "engine": PageTable("engine", (
        label(), median("seconds", "seconds", 3),
        promise("target", {"virtual file of 100,000 tensors in 160 shards with an index": "0.5",
                           "virtual file of a `.pt` of 10,000 tensors": "0.2"}),
    )),
    "headers": PageTable("engine", (
        label("`ckptfs inspect --json` of"), median("seconds", "seconds", 3), maximum("peak MB", "peak", 1e-6),
        promise("target", {"100,000 tensors in 160 shards": "150 MB"}),
    )),
    "reads": PageTable("engine", (
        label(), median("milliseconds", "seconds", 1, 1000),
        spreads("speed relative to `pread`: median (least to most)", speed_of_first("seconds")),
        promise("target", {"`VirtualFileReader::read_at`": "0.9"}),
    )),
    "copies": PageTable("engine", (
        label(), median("`export` s", "export"), median("other s", "other"),
        spreads("speed of `export`: median (least to most)", ratios("other", "export")),
        promise("target", {"beside `cp`, which does not wait for the disk": "0.9"}),
    )),
    "mount": PageTable("mount", (
        label(), label(place=1),
        *columns_by_ballast(
            median("plain s", "plain"), median("mount s", "mount"),
            spreads("speed against plain: median (least to most)", SPEED),
        ),
        promise("target", MOUNT_TARGETS),
    ), Chart("speed of the mount relative to the plain file; the mark is 1", for_selected_runs(runs_with_ballast, SPEED), mark=lambda row: 1)),
    "checkpoints": PageTable("mount", (
        label("checkpoints in the directory"), median("`ckptfs mount` s", "mount", 3),
        median("first byte of one s", "byte", 3), median("listing all s", "listed", 3),
    )),
    "first-byte": PageTable("mount", (
        label("first byte of 100,000 tensors in 160 shards"), median("ms", "seconds", 1, 1000),
        promise("target", {"after the mount, caches dropped": "500", "once built": "10"}),
    )),
    "owned": loads("owned, 2.1 GB in 4 shards of `.safetensors`"),
    "owned-bin": loads("owned, 2.1 GB in 4 shards of `.bin`"),
    "mapped": loads("mapped, 2.1 GB in 4 shards of `.safetensors`"),
    "mapped-bin": loads("mapped, 2.1 GB in 4 shards of `.bin`"),
    "opening": PageTable("opening", (
        label("opening 100,000 tensors in 160 shards"), label(place=1),
        median("seconds", "seconds", 3), median("CPU seconds", "cpu", 3),
        spreads("ratio to ckptfs: median (least to most)", ratio_to_first("seconds")),
    )),
    "training-exports": beside_files("`export` of 2.1 GB", "0.7", {"DCP, 8 ranks, cut by columns": "0.4"}),
    "training-reads": beside_files(
        "`cat` of the virtual file, cold", "0.8", {"DCP, 8 ranks, cut by columns": ""}
    ),
    "training-loads": PageTable("training", (
        label("`load_file` of the folder, 2.1 GB, cold"), median("seconds", "ours"), median("other seconds", "other"),
        spreads("ratio: median (least to most)", ratios("ours", "other")), ("target", lambda row, rows: "0.3"),
    )),
    "training-opens": PageTable("training", (
        label("`ckptfs inspect --json` of, cached"), median("seconds", "seconds"), maximum("peak MB", "peak", 1e-6),
        promise("target", {"100,000 items in 64 files of DCP": "2 s, 400 MB",
                           "ZeRO-3, 8 ranks, 1,000 parameters": "0.3 s"}),
    )),
    "versions-first-byte": PageTable("versions", (
        label("from the arrival of a version to its first byte"), median("seconds", "ours", 3),
        median("copied and patched, seconds", "other"),
        spreads("ratio: median (least to most)", ratios("ours", "other"), 3), ("target", lambda row, rows: "0.1"),
    )),
    "versions-loads": PageTable("versions", (
        label("`load_file` of a version"), median("seconds", "ours"),
        median("copied, patched and loaded, seconds", "other"),
        spreads("ratio: median (least to most)", ratios("ours", "other")),
    )),
    "versions-reads": PageTable("versions", (
        label("a version read whole through a mount"), median("seconds", "ours"),
        median("copied, patched and read, seconds", "other"),
        spreads("ratio: median (least to most)", ratios("ours", "other")),
        maximum("the daemon's peak memory, MB", "peak", 1e-6), maximum("its `--memory`, MB", "budget", 1e-6),
    )),
    "views-casts": PageTable("views", (
        label("`VirtualFileReader::read_at`, source cached, one thread"), median("seconds", "cast", 3),
        median("`memcpy` of as many bytes, seconds", "memcpy", 3),
        spreads("speed: median (least to most)", ratios("memcpy", "cast")), ("target", lambda row, rows: "0.5"),
    )),
    "views-loads": PageTable("views", (
        label("a bf16 view of 4.4 GB of fp32"), median("seconds", "seconds"),
        median("the files with `dtype=torch.bfloat16`, seconds", "other seconds"),
        spreads("ratio: median (least to most)", ratios("seconds", "other seconds")), ("target", lambda row, rows: "0.9"),
        median("the disk alone, seconds", "disk"),
        median("peak GB", "peak", 2, 1e-9), median("of the daemon", "daemon", 2, 1e-9),
        median("of the files", "other peak", 2, 1e-9),
    )),
    "views-renames": PageTable("views", (
        label("`cat` of 4.4 GB with other names, cold"), median("view, seconds", "view"),
        median("own names, seconds", "plain"), spreads("ratio: median (least to most)", ratios("view", "plain")),
        promise("target", {"time": "1.11", "the daemon's processor time": "1.03"}),
    )),
    "views-slices": PageTable("views", (
        label("a view, read cold"), median("MB", "view", 0, 1e-6), median("MB read from the disk", "read", 0, 1e-6),
        spreads("ratio: median (least to most)", ratios("read", "view"), 3), ("target", lambda row, rows: "1.05"),
    )),
    "views-names": PageTable("views", (
        label("mount and first byte, all names changed by one regular expression"), median("seconds", "view", 3),
        median("own names, seconds", "plain", 3), spreads("seconds more: median (least to most)", seconds_more, 3),
        ("target", lambda row, rows: "0.3"),
    )),
    "remote": PageTable("remote", (
        label("a model of 2.2 GB in a store"), label("beside", place=1), median("seconds", "seconds"),
        median("other seconds", "other seconds"),
        spreads("ratio: median (least to most)", ratios("seconds", "other seconds")),
        promise("target", REMOTE_TARGETS), median("connections", "connections", 0),
        median("other's", "other connections", 0), median("CPU seconds", "cpu"), median("other's", "other cpu"),
        median("server's", "server"),
    )),
    "remote-limits": PageTable("remote", (
        label(), spreads("measured: median (least to most)", numbers("value")), promise("limit", REMOTE_LIMITS),
    )),
    "few-huge": sizes("4 tensors of 512 MiB in 2 shards"),
    "many-small": sizes("100,000 tensors of 16 KiB in 4 shards"),
    "saving": PageTable("saving", (
        label("saving 2.1 GB in 4 shards"), spreads("seconds (least to most)", seconds_of),
        median("CPU seconds", "cpu"), median("peak memory above them", "peak"),
    ), Chart("saving: seconds", seconds_of, lambda row: not row["row"][0].startswith("safetensors"))),
    "install-overhead": PageTable("install-overhead", (
        label(), label(place=1), median("seconds", "seconds"), median("CPU seconds", "cpu"),
        spreads("ratio to the first: median (least to most)", ratio_to_first("seconds"), 3),
    ), Chart("from_pretrained: seconds", seconds_of, lambda row: "mount" in row["row"][0])),
    "enabled": PageTable("enabled", (
        label("cached, after `ckptfs enable`"), label("free memory", place=1), median("directory s", "plain"),
        median("enabled s", "enabled"), spreads("ratio: median (least to most)", ratios("enabled", "plain")),
        ("target", lambda row, rows: "1.0" if row["row"][0].endswith("again") else "1.1"),
    )),
    "enabled-start": PageTable("enabled", (
        label("start of an interpreter"), median("ms", "plain", 2, 1000), median("enabled, ms", "enabled", 2, 1000),
        spreads("ms more: median (least to most)", milliseconds_more),
        ("target", lambda row, rows: "2 ms" if row["row"][0].startswith("Python") else ""),
    )),
    "small-files": PageTable("install-overhead", (
        label(), label(place=1),
        median("`mmap`", "mmap", 0, 1e6), spreads("ratio to safetensors", ratio_to_first("mmap")),
        median("`pread`", "pread", 0, 1e6), spreads("ratio to safetensors", ratio_to_first("pread")),
    )),
    "arrays": PageTable("install-overhead", (
        label(), label(place=1), median("microseconds", "seconds", 0, 1e6),
        spreads("ratio to safetensors", ratio_to_first("seconds")),
    )),
}  # fmt: skip
