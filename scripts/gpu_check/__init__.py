"""Checks ckptfs on a GPU, and measures it there beside others: `scripts/gpu-check` runs it."""

from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
