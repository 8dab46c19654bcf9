# Sourced by the other scripts: installs what a bare Debian 12 machine with Rust lacks, and says so. Sets $python to an
# interpreter that has what the tests need.

# The scripts look for builds here, wherever this user's cargo builds by default.
export CARGO_TARGET_DIR=$PWD/target

say() { printf '== %s (%d s)\n' "$*" "$SECONDS"; }

as_root() {
    if [ "$(id -u)" -eq 0 ]; then "$@"; else sudo "$@"; fi
}

# Debian's Python has no venv, and Rust needs a linker. Ordinary users mount with fuse3. The tests of the mount need
# fio and getfattr, those of the loader fincore.
packages=""
command -v fusermount3 >/dev/null || packages="$packages fuse3"
command -v fio >/dev/null || packages="$packages fio"
command -v getfattr >/dev/null || packages="$packages attr"
command -v fincore >/dev/null || packages="$packages util-linux-extra"
command -v cc >/dev/null || packages="$packages gcc libc6-dev"
python3 -c 'import ensurepip, venv' 2>/dev/null || packages="$packages python3 python3-venv"
if [ -n "$packages" ]; then
    say "installing$packages"
    as_root apt-get update -qq
    # shellcheck disable=SC2086 # A list of words.
    as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $packages
fi
command -v cargo >/dev/null || { echo "Rust is not installed: see https://rustup.rs" >&2; exit 1; }

[ -e /dev/fuse ] || {
    echo "there is no /dev/fuse: modprobe fuse; in a container, --device /dev/fuse --cap-add SYS_ADMIN" >&2
    exit 1
}

# The Python environment lies outside the tree. It is made again when its requirements change.
requirements=tests/python/requirements.txt
cache=${CKPTFS_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/ckptfs}
venv=$cache/venv-$(sha256sum "$requirements" | cut -c1-12)
python=$venv/bin/python
if [ ! -e "$venv/complete" ]; then
    say "making the Python environment $venv (torch and the rest: some gigabytes, some minutes)"
    rm -rf "$venv"
    python3 -m venv "$venv"
    "$python" -m pip install --quiet --disable-pip-version-check -r "$requirements"
    touch "$venv/complete"
fi

# safetensors' own tests, which the Python package must pass. Only its source package has them.
safetensors_source=safetensors-0.9.0rc1
if [ ! -e "$cache/$safetensors_source" ]; then
    say "fetching the tests of $safetensors_source"
    fetched=$(mktemp -d "$cache/fetched-XXXXXX")
    "$python" -m pip download --quiet --disable-pip-version-check --no-deps --no-binary safetensors \
        --dest "$fetched" "safetensors==${safetensors_source#safetensors-}"
    tar -xzf "$fetched/$safetensors_source.tar.gz" -C "$fetched"
    mv "$fetched/$safetensors_source" "$cache/"
    rm -rf "$fetched"
fi
export CKPTFS_SAFETENSORS=$cache/$safetensors_source

# Installs the Python package of this tree for $python.
install_package() {
    rm -rf target/python
    "$python" -m pip install --quiet --disable-pip-version-check --no-deps --target target/python .
    export PYTHONPATH=$PWD/target/python
}
