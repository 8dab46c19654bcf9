"""Measures parts of docs/performance.md and writes the page: see `scripts/bench/run`."""

import importlib
import sys

from bench import render_docs

# The parts in their order, each with what is printed before it.
PARTS = {
    "targets": "what is promised",
    "engine": "the engine, and whole processes",
    "mount": "the mount beside the plain filesystem",
    "loader": "the loader beside others",
    "opening": "opening beside safetensors",
    "tensor-sizes": "tensors of other sizes",
    "saving": "saving beside safetensors",
    "install-overhead": "programs that change nothing, or little",
}


def main(name="all", *words):
    """Measures all parts, none, or one by its name, whose further words are its own."""
    parts = {"all": [*PARTS], "docs": [], "loader": ["loader", "opening"]}.get(name, [name])
    for part in parts:
        print(f"== {PARTS[part]}", flush=True)
        importlib.import_module(f"bench.{part.replace('-', '_')}").main(*words)
    print("== the page", flush=True)
    render_docs.main([])


main(*sys.argv[1:])
