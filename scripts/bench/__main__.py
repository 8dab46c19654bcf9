"""Measures one part of docs/performance.md: see `scripts/bench/run`, which gives each a process of its own.

The peak memory of a child counts that of the process it was forked from, which no other part may have filled.
"""

import importlib
import sys

name, *words = sys.argv[1:]
importlib.import_module(f"bench.{name.replace('-', '_')}").main(*words)
