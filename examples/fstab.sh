#!/bin/sh
# Tries a line of /etc/fstab, as root, before it is put there to mount models at every boot:
#
#     fstab.sh MODEL_DIR
#
# Wants ckptfs in /usr/bin or /usr/local/bin, where mount(8) looks, and mount.fuse3 (Debian: package
# fuse3).
set -eu

models=$(realpath "$1")
trial=$(mktemp -d)
mkdir "$trial/models"

# What is mounted there is another filesystem than the folder is on.
before=$(stat -c %d "$trial")
leave() {
    # A second Ctrl-C does not stop this.
    trap '' INT TERM HUP
    [ "$(stat -c %d "$trial/models")" = "$before" ] || ckptfs unmount "$trial/models"
    rm -r "$trial"
}
trap leave EXIT
# Not every shell leaves by EXIT where a signal ends it.
trap 'exit 130' INT
trap 'exit 143' TERM
trap 'exit 129' HUP

# A path as one word of fstab: a space is \040 there.
word() {
    printf %s "$1" | sed 's/\\/\\134/g; s/ /\\040/g; s/\t/\\011/g'
}

# In /etc/fstab the second word is where you want the models, /srv/models say. `allow_other` lets all
# users read; `_netdev` waits for the network, where MODEL_DIR lies on one.
line="$(word "$models")  $(word "$trial/models")  fuse.ckptfs  ro,allow_other,memory=1G,_netdev  0  0"
printf '%s\n' "$line" >"$trial/fstab"
mount --fstab "$trial/fstab" "$trial/models"

cat "$trial/fstab"
ls -R "$trial/models"
