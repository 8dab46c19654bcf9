#!/bin/sh
# Runs a program with the Hugging Face cache seen through ckptfs, so that models that were downloaded
# as pickles or in shards load as single safetensors files:
#
#     hub_cache.sh ~/.cache/huggingface/hub python my_program.py
#
# The view is read-only, so that the program works offline: what it needs must be in the cache.
set -eu

cache=$1
shift
view=$(mktemp -d)
trap 'ckptfs unmount --lazy "$view" && rmdir "$view"' EXIT
ckptfs mount "$cache" "$view"

HF_HUB_CACHE=$view HF_HUB_OFFLINE=1 "$@"
