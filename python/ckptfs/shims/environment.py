"""The start of ckptfs in an environment that `ckptfs enable` prepared. The line in its site-packages calls `find_spec`.

This name and its arguments stay: a line that an older ckptfs wrote calls the newer package.
"""

from ckptfs.shims import install


def find_spec(name, path=None, target=None):
    """Finds a module of safetensors, and puts the shims in place from its import on. Every call does: a thread that
    began its import before another one's call does not ask the finder of `install`."""
    install.install_for_environment()
    return install.find_spec(name, path, target)
