"""Our reads behind the calls of safetensors, in unchanged programs."""
