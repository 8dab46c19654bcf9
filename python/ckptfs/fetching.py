"""Fetches checkpoints of a store into the cache on disk, ahead of loads and mounts."""

from typing import NamedTuple

from ckptfs import _ckptfs
from ckptfs.progress import TransferProgress
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
    bar = TransferProgress() if progress else None
    try:
        report = FetchReport(*_ckptfs.fetch(parse_path(url), options, bar.show if bar else None))
        if bar:
            bar.show(report.bytes, report.bytes)
        return report
    finally:
        if bar:
            bar.end()
