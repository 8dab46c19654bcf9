"""Fetches checkpoints of a store into the cache on disk, ahead of loads and mounts."""

from typing import NamedTuple

from ckptfs import _ckptfs
from ckptfs.progress import ProgressBar
from ckptfs.settings import LoadOptions, parse_path


class FetchReport(NamedTuple):
    """The result of a fetch: the files that a mount of the URL would show, their bytes, and the bytes cached before."""

    files: int
    bytes: int
    cached_bytes: int


def fetch(url, *, root=None, allow_partial=False, follow_symlinks=False, ranks=None, delta_base=None, progress=False):
    """Fetches everything that a mount of `url` would show into the cache on disk: checkpoints, and the files beside
    them. Later loads and mounts of any process read from it.

    Cached bytes are not fetched again, so a fetch that was stopped resumes. If the cache is too small for everything, it
    raises `SafetensorError` before the first byte. The arguments are those of loads. `progress` shows a bar.

        ckptfs.fetch("s3://bucket/models/llama", progress=True)
        ckptfs.configure(offline=True)
        weights = ckptfs.torch.load_file("s3://bucket/models/llama")
    """
    options = LoadOptions.resolve(
        root=root, allow_partial=allow_partial, follow_symlinks=follow_symlinks, ranks=ranks, delta_base=delta_base, progress=progress,
    )  # fmt: skip
    bar = ProgressBar() if progress else None

    def show(done, total):
        bar.show(done / total if total else 1.0, f"{done / 1e9:.2f} of {total / 1e9:.2f} GB")

    try:
        report = FetchReport(*_ckptfs.fetch(parse_path(url), options, show if bar else None))
        if bar:
            show(report.bytes, report.bytes)
        return report
    finally:
        if bar:
            bar.end()
