"""Loads of checkpoints: resolve, plan, read and place."""
