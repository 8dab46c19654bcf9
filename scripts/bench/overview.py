"""The chart of README.md: seconds of some targets, a bar for each side."""

from bench.charts import Chart

NAME, PART = "overview", "targets"

PLAIN, MOUNT = ("ext4", "the directory itself"), ("mount", "the mount")
LOADERS = (
    ("ckptfs", "ckptfs"), ("runai-model-streamer", "Run:ai"), ("fastsafetensors", "fastsafetensors"),
    ("safetensors", "safetensors"),
)  # fmt: skip

# A target, what it is called here, and its sides.
CASES = (
    ("from_pretrained", "transformers, cold", (PLAIN, MOUNT)),
    (".bin", "transformers, .bin, cold", (PLAIN, MOUNT)),
    ("owned, cold", "load_file, copied, cold", LOADERS),
    ("owned, cached", "load_file, copied, cached", LOADERS),
)

OURS = {MOUNT[1], "ckptfs"}

CHART = Chart(
    "seconds to load 2.2 GB in 4 shards, median and spread; ckptfs is green; less is better",
    lambda row, rows: row["runs"],
    lambda row: row["row"][1] in OURS,
)


def rows_of(targets):
    """A row for each side of each case that was measured."""
    runs = {row["row"][0]: row["runs"] for row in targets}
    return [
        {"row": [title, side], "runs": [run[name] for run in runs[target]]}
        for target, title, sides in CASES
        if target in runs
        for name, side in sides
    ]
