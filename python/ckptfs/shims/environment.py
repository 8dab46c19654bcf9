"""The start of ckptfs in an environment that `ckptfs enable` prepared. The line in its site-packages calls `find_spec`.

This name and its arguments stay: a line that an older ckptfs wrote calls the newer package.
"""

from ckptfs.shims import install

_has_started = False


def find_spec(name, path=None, target=None):
    """Finds a module of safetensors, and puts the shims in place from its import on. `None` from the second call on:
    the finder of `install` then comes first."""
    global _has_started
    if _has_started:
        return None
    _has_started = True
    install.install_for_environment()
    return install.find_spec(name, path, target)
