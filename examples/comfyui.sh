#!/bin/sh
# Runs ComfyUI with every checkpoint of its models folder as one .safetensors file, shards too:
#
#     comfyui.sh MODELS_DIR python main.py
#
# The view is mounted over the folder itself, so that no path changes, and is gone when ComfyUI ends.
# Without a command it lists what ComfyUI would find. While it is mounted the folder is read-only:
# put new models there before, or give ComfyUI the view as an extra folder (extra_model_paths.yaml).
set -eu

# The folder itself, where its name is a link to another disk.
models=$(realpath "$1")
shift

# A mount there is another filesystem than before.
before=$(stat -c %d "$models")
leave() {
    # A second Ctrl-C does not stop this.
    trap '' INT TERM HUP
    # Lazily: a file may still be open in a program that is ending.
    [ "$(stat -c %d "$models")" = "$before" ] || ckptfs unmount --lazy "$models"
}
trap leave EXIT
# Not every shell runs the EXIT trap when a signal ends it.
trap 'exit 130' INT
trap 'exit 143' TERM
trap 'exit 129' HUP

# Links to other disks are followed. A linked checkpoint is shown as the others; a linked folder is shown as it is, and
# can be mounted by itself.
ckptfs mount --follow-symlinks "$models" "$models"
if [ $# -gt 0 ]; then
    "$@"
else
    find -L "$models" -name '*.safetensors'
fi
