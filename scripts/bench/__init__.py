"""The measurements of docs/performance.md: `scripts/bench/run` runs them."""

from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]

# The results, and the charts of them.
FOLDER = REPOSITORY / "docs/performance"
