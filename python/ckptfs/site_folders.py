"""The folders from which an interpreter takes `.pth` files, and whether it has ckptfs.

`enable` also runs this source in other interpreters, which may be older and may lack ckptfs.
"""

import json
import os
import site
import sys
import sysconfig


def find_folders():
    """The folders of this interpreter.

    - `own`: those of its environment; the first is where pip installs
    - `user`: the user site-packages, if the interpreter reads them
    - `inherited`: those of the base environment
    """
    every = [os.path.realpath(folder) for folder in site.getsitepackages()]
    prefix = os.path.realpath(sys.prefix) + os.sep
    installed = [os.path.realpath(sysconfig.get_path(name)) for name in ("purelib", "platlib")]
    own = [folder for folder in installed + every if folder in every and folder.startswith(prefix)]
    user = site.getusersitepackages() if site.ENABLE_USER_SITE else None
    return {
        "prefix": sys.prefix,
        "own": list(dict.fromkeys(own)),
        "user": user,
        "inherited": [folder for folder in dict.fromkeys(every) if folder not in own],
    }


def describe_interpreter():
    """Its folders, its version, and whether it can use ckptfs: `fault` says why not."""
    found = {"version": list(sys.version_info[:2]), "fault": None, "home": None}
    try:
        import ckptfs
        from ckptfs.shims import environment  # noqa: F401

        found["home"] = os.path.dirname(os.path.dirname(os.path.abspath(ckptfs.__file__)))
        ckptfs.__version__  # noqa: B018 - It is that of the extension module.
    except Exception as fault:
        found["fault"] = "%s: %s" % (type(fault).__name__, fault)
    found["by_variable"] = found["home"] in os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return {**find_folders(), **found}


if __name__ == "__main__":
    print(json.dumps(describe_interpreter()))
