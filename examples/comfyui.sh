#!/bin/sh
# Runs ComfyUI with every checkpoint of its models folder as one .safetensors file, shards too:
#
#     comfyui.sh MODELS_DIR python main.py
#
# The view is mounted over the folder itself, so that no path changes, and is gone when ComfyUI ends.
# Without a command it lists what ComfyUI would find. While it is mounted the folder is read-only:
# put new models there before, or give ComfyUI the view as one more place (extra_model_paths.yaml).
set -eu

models=$1
shift
ckptfs mount "$models" "$models"
# Lazily: a file may still be open in a program that is ending.
trap 'ckptfs unmount --lazy "$models"' EXIT

if [ $# -gt 0 ]; then
    "$@"
else
    find "$models" -name '*.safetensors'
fi
