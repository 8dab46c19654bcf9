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

# What is mounted there is another filesystem than the folder is on.
before=$(stat -c %d "$view")
leave() {
    # A second Ctrl-C does not stop this.
    trap '' INT TERM HUP
    # Lazily: a file may still be open in a program that is ending.
    [ "$(stat -c %d "$view")" = "$before" ] || ckptfs unmount --lazy "$view"
    rmdir "$view"
}
trap leave EXIT
# Not every shell leaves by EXIT where a signal ends it.
trap 'exit 130' INT
trap 'exit 143' TERM
trap 'exit 129' HUP

ckptfs mount "$cache" "$view"
HF_HUB_CACHE=$view HF_HUB_OFFLINE=1 "$@"
