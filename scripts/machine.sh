# Sourced by the other scripts: installs what a bare Debian 12 machine lacks for building and mounting, and says so.

say() { printf '== %s (%d s)\n' "$*" "$SECONDS"; }

fail() {
    printf '%s: %s\n' "$0" "$1" >&2
    printf '  what to do: %s\n' "$2" >&2
    exit 1
}

as_root() {
    if [ "$(id -u)" -eq 0 ]; then "$@"; else sudo "$@"; fi
}

# Installs Debian's packages.
install_packages() {
    [ $# -gt 0 ] || return 0
    # A password is asked for here: what is waited for has no terminal.
    as_root true
    wait_for "updating the list of Debian's packages" as_root apt-get update
    wait_for "installing $*" as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y \
        --no-install-recommends "$@"
}

# The interpreter that environments are made with.
base_python=${PYTHON:-python3}

# Rust needs a linker, and Debian's Python has no venv.
install_build_tools() {
    local packages=()
    command -v cc >/dev/null || packages+=(gcc libc6-dev)
    "$base_python" -c 'import ensurepip, venv' 2>/dev/null || packages+=(python3 python3-venv)
    install_packages "${packages[@]}"
    local needed found
    needed=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)
    command -v cargo >/dev/null || fail "Rust is not installed" "install Rust $needed or later from https://rustup.rs"
    found=$(rustc --version | cut -d ' ' -f 2)
    [ "$(printf '%s\n' "$needed" "$found" | sort -V | head -n 1)" = "$needed" ] ||
        fail "Rust $found is too old" "rustup update stable (Rust $needed or later)"
}

# Ordinary users mount with fuse3.
install_mount_tools() {
    command -v fusermount3 >/dev/null || install_packages fuse3
    [ -e /dev/fuse ] ||
        fail "there is no /dev/fuse" "modprobe fuse; in a container, --device /dev/fuse --cap-add SYS_ADMIN"
}

# Python environments lie outside the tree, so that all checkouts share them.
cache=${CKPTFS_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/ckptfs}

# The environment for files of requirements: `venv_path NAME FILE...`. Other requirements are another environment.
venv_path() { printf '%s/%s-%s' "$cache" "$1" "$(cat "${@:2}" | sha256sum | cut -c1-12)"; }

# Makes an environment unless it is complete: `make_venv VENV FILE`.
make_venv() {
    [ ! -e "$1/complete" ] || return 0
    rm -rf "$1"
    "$base_python" -m venv "$1"
    "$1/bin/python" -m pip install --quiet --disable-pip-version-check -r "$2"
    touch "$1/complete"
}

# Makes an environment that sees the packages of another one, unless it is complete: `make_venv_beside VENV FILE OTHER
# BUILDERS...`. The builders are installed first: packages that are built use them, and the packages of the other one.
make_venv_beside() {
    [ ! -e "$1/complete" ] || return 0
    rm -rf "$1"
    "$base_python" -m venv "$1"
    local packages='import sysconfig; print(sysconfig.get_path("purelib"))'
    "$3/bin/python" -c "$packages" >"$("$1/bin/python" -c "$packages")/beside.pth"
    "$1/bin/python" -m pip install --quiet --disable-pip-version-check --constraint "$2" "${@:4}"
    "$1/bin/python" -m pip install --quiet --disable-pip-version-check --no-build-isolation -r "$2"
    touch "$1/complete"
}

# Starts a command in a process group of its own, to end all of it: `start_in_background LOG COMMAND...`.
start_in_background() {
    set -m
    "${@:2}" >"$1" 2>&1 &
    background=$!
    set +m
}

# Runs a command that takes a while: `wait_for LINE COMMAND...`. A line every five seconds has the time and the last
# line of its output, which is shown whole if it fails.
wait_for() {
    local log started=$SECONDS due=$((SECONDS + 5)) last
    say "$1"
    shift
    log=$(mktemp)
    start_in_background "$log" "$@"
    while kill -0 "$background" 2>/dev/null; do
        sleep 1
        ((SECONDS >= due)) || continue
        due=$((SECONDS + 5))
        last=$(tail -n 1 "$log" | tr -d '\r' | cut -c 1-60)
        printf '   %3d s  %s\n' $((SECONDS - started)) "${last#"${last%%[![:space:]]*}"}"
    done
    if ! wait "$background"; then
        cat "$log" >&2
        rm -f "$log"
        return 1
    fi
    background=
    rm -f "$log"
}

# The process in the background. A script that ends early ends its group: Ctrl-C does not reach it.
background=
end_background() { [ -z "$background" ] || kill -- "-$background" 2>/dev/null || true; }
