#!/bin/sh
# Tries a line of /etc/fstab, as root, before it is put there to mount models at every boot:
#
#     fstab.sh MODEL_DIR
#
# Wants ckptfs in /usr/bin or /usr/local/bin, where mount(8) looks, and mount.fuse3 (Debian: package
# fuse3).
# A space in a path is written \040.
set -eu

models=$(realpath "$1")
trial=$(mktemp -d)
mkdir "$trial/models"
trap 'ckptfs unmount "$trial/models"; rm -r "$trial"' EXIT

# In /etc/fstab the second word is where you want the models, /srv/models say. `allow_other` lets all
# users read; `_netdev` waits for the network, where MODEL_DIR lies on one.
echo "$models  $trial/models  fuse.ckptfs  ro,allow_other,memory=1G,_netdev  0  0" >"$trial/fstab"
mount --fstab "$trial/fstab" "$trial/models"

cat "$trial/fstab"
ls -R "$trial/models"
