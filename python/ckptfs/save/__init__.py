"""Saves of tensors as safetensors files, whole or not at all."""
