"""What a load may find cached: pages of its files, or bytes of a store in the cache on disk.

Both are cleared before a cold load, and filled before the cached ones. `clear` returns by which means. What cannot be
done is a `SafetensorError`.
"""

from ckptfs import child_process
from ckptfs.bench import page_cache
from ckptfs.errors import error
from ckptfs.settings import setting

# The share of the files that must be in the page cache for a load to count as cached.
_MIN_CACHED_SHARE = 0.99

_NO_CACHE = "CKPTFS_NO_CACHE=1"


class PageCache:
    """The page cache, for a checkpoint on this machine. With `drops_all`, it is cleared of everything."""

    def __init__(self, files, drops_all):
        self._files, self._drops_all = files, drops_all

    def clear(self):
        return page_cache.clear(self._files, self._drops_all)

    def fill(self, shown):
        """Also with the files that a mount shows. Returns notes."""
        page_cache.warm([*self._files, *shown])
        share = page_cache.cached(self._files)
        if share is None or share >= _MIN_CACHED_SHARE:
            return []
        return [f"only {share:.0%} of the files stay in the page cache: there is no memory for more"]


class DiskCache:
    """The cache on disk, for a checkpoint in a store. With `drops_all`, all caches of the machine are dropped, too."""

    def __init__(self, url, drops_all):
        self._url, self._drops_all = url, drops_all

    def clear(self):
        if setting("no_cache"):
            means = _NO_CACHE
        else:
            means = "ckptfs cache prune"
            child_process.run("cache", "prune", "--", self._url, is_command=True)
        return f"{means}, {page_cache.drop_all()}" if self._drops_all else means

    def fill(self, shown):
        """As for the page cache, which then has the fetched bytes, too."""
        if setting("no_cache"):
            raise error(f"{_NO_CACHE} turns the cache on disk off", "unset it")
        child_process.run("fetch", "--", self._url, is_command=True)
        page_cache.warm(shown)
        return []
