"""Caches that `ckptfs bench` clears before each cold load, and fills before the cached ones.

`clear` returns the means that it used, and `fill` returns notes. Both raise `SafetensorError` where they fail.
"""

import json

from ckptfs import child_process
from ckptfs.bench import page_cache
from ckptfs.errors import error
from ckptfs.settings import setting

# The share of the files that must be in the page cache for a load to count as cached.
_MIN_CACHED_SHARE = 0.99

_NO_CACHE = "CKPTFS_NO_CACHE=1"


class LocalCacheState:
    """The page cache, for a checkpoint on this machine. With `drops_all`, `clear` drops all caches of the machine."""

    def __init__(self, files, drops_all):
        self._files, self._drops_all = files, drops_all

    def clear(self):
        """Evicts the files."""
        return page_cache.clear(self._files, self._drops_all)

    def fill(self, virtual_files):
        """Reads the files, and these virtual files, into the page cache."""
        page_cache.warm([*self._files, *virtual_files])
        share = page_cache.cached(self._files)
        if share is None or share >= _MIN_CACHED_SHARE:
            return []
        return [f"only {share:.0%} of the files stay in the page cache: there is no memory for more"]


class StoreCacheState:
    """The cache on disk, for a checkpoint in a store of these files and so many bytes of tensors. `load` loads it once. With
    `drops_all`, `clear` drops all caches of the machine, too."""

    def __init__(self, files, size, load, drops_all):
        self._files, self._size, self._load, self._drops_all = files, size, load, drops_all

    def clear(self):
        """Removes the checkpoint's files from the cache on disk."""
        if setting("no_cache"):
            means = _NO_CACHE
        else:
            means = "ckptfs cache prune"
            self._cache("prune")
        return f"{means}, {page_cache.drop_all()}" if self._drops_all else means

    def fill(self, virtual_files):
        """Has the checkpoint loaded, and these virtual files read, into the caches."""
        if setting("no_cache"):
            raise error(f"{_NO_CACHE} turns the cache on disk off", "unset CKPTFS_NO_CACHE")
        self._load()
        page_cache.warm(virtual_files)
        size = min(self._size, sum(file["size"] for file in self._files))
        share = sum(entry["cached_bytes"] for entry in json.loads(self._cache("ls", "--json"))) / max(1, size)
        if share < _MIN_CACHED_SHARE:
            raise error(f"the cache on disk holds only {share:.0%} of it", "set CKPTFS_CACHE_SIZE, or free space on its disk")
        return []

    def _cache(self, *words):
        paths = [file["path"] for file in self._files]
        return child_process.run("cache", *words, "--", *paths, is_command=True).text
