#!/bin/sh
# Tries, as root, a line for /etc/fstab that mounts models at every boot:
#
#     fstab.sh MODEL_DIR
#
# Needs ckptfs in /usr/bin or /usr/local/bin, where mount(8) looks, and mount.fuse3 (Debian: package
# fuse3).
set -eu

models=$(realpath "$1")
trial=$(mktemp -d)
mkdir "$trial/models"

# A mount there is another filesystem than the folder's.
before=$(stat -c %d "$trial")
leave() {
    # A second Ctrl-C does not stop this.
    trap '' INT TERM HUP
    [ "$(stat -c %d "$trial/models")" = "$before" ] || ckptfs unmount "$trial/models"
    rm -r "$trial"
}
trap leave EXIT
# Not every shell runs the EXIT trap when a signal ends it.
trap 'exit 130' INT
trap 'exit 143' TERM
trap 'exit 129' HUP

# A path as one word of fstab: a space is \040 there.
word() {
    printf %s "$1" | sed 's/\\/\\134/g; s/ /\\040/g; s/\t/\\011/g'
}

# In /etc/fstab the second word is the mountpoint, such as /srv/models. `allow_other` lets all users read;
# `_netdev` waits for the network, if MODEL_DIR needs it.
line="$(word "$models")  $(word "$trial/models")  fuse.ckptfs  ro,allow_other,memory=1G,_netdev  0  0"
printf '%s\n' "$line" >"$trial/fstab"
mount --fstab "$trial/fstab" "$trial/models"

cat "$trial/fstab"
ls -R "$trial/models"
