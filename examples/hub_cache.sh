#!/bin/sh
# Runs a program on the Hugging Face cache through ckptfs: models that were downloaded as pickles or in shards load as
# single safetensors files.
#
#     hub_cache.sh ~/.cache/huggingface/hub python my_program.py
#
# The view is read-only, so the program works offline: the models that it needs must be in the cache.
set -eu

cache=$1
shift
view=$(mktemp -d)

# A mount there is another filesystem than the folder's.
before=$(stat -c %d "$view")
leave() {
    # A second Ctrl-C does not stop this.
    trap '' INT TERM HUP
    # Lazily: a file may still be open in a program that is ending.
    [ "$(stat -c %d "$view")" = "$before" ] || ckptfs unmount --lazy "$view"
    rmdir "$view"
}
trap leave EXIT
# Not every shell runs the EXIT trap when a signal ends it.
trap 'exit 130' INT
trap 'exit 143' TERM
trap 'exit 129' HUP

ckptfs mount "$cache" "$view"
HF_HUB_CACHE=$view HF_HUB_OFFLINE=1 "$@"
