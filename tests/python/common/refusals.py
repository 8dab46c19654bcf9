"""Asserts that a checkpoint is refused in the way that every refusal promises."""

from program import REFUSED


def check_refused(ckptfs, path, *words, tensor=None, options=()):
    """Asserts exit code 3, quickly, in bounded memory, in words that help, with nothing written. `words` must stand
    in the message; `tensor` is the entry at fault, if there is one."""
    before = sorted(path.parent.iterdir())
    export = ckptfs("export", path, path.with_name("out.safetensors"), *options, bounded=True)
    assert sorted(path.parent.iterdir()) == before, "something was written"
    inspect = ckptfs("inspect", "--json", path, *options, bounded=True)
    named = [] if tensor is None else [f"`{tensor}`"]
    for outcome in export, inspect:
        assert outcome.code == REFUSED, outcome
        for word in [path.name, "what to do: ", *named, *words]:
            assert word in outcome.error
    report = inspect.json()
    assert report["virtual_file"] is None
    assert report["refused"]
    assert all(entry["reason"] and entry["remedy"] for entry in report["refused"])
    if tensor is not None:
        assert tensor in [entry["tensor"] for entry in report["refused"]]
