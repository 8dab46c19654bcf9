"""Loads of the ranks of a process group, which read a checkpoint once together."""
