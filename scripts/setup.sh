# Sourced by the other scripts: installs what the tests need on a bare Debian 12 machine with Rust, and says so. Sets
# $python to an interpreter that has what the tests need.
. scripts/machine.sh

# The scripts look for builds here, wherever this user's cargo builds by default.
export CARGO_TARGET_DIR=$PWD/target

install_build_tools
install_mount_tools
# The tests of the mount need fio and getfattr, those of the loader fincore, those of saving strace,
# those of stores rclone and npm.
missing=()
command -v fio >/dev/null || missing+=(fio)
command -v getfattr >/dev/null || missing+=(attr)
command -v fincore >/dev/null || missing+=(util-linux-extra)
command -v strace >/dev/null || missing+=(strace)
command -v rclone >/dev/null || missing+=(rclone)
command -v npm >/dev/null || missing+=(npm)
install_packages "${missing[@]}"

requirements=tests/python/requirements.txt
venv=$(venv_path venv "$requirements")
python=$venv/bin/python
if [ ! -e "$venv/complete" ]; then
    say "making the Python environment $venv (torch and the rest: some gigabytes, some minutes)"
    make_venv "$venv" "$requirements"
fi

# DeepSpeed, whose checkpoints tests join. It takes torch from the environment above, and none of its kernels is built.
deepspeed_requirements=tests/python/deepspeed-requirements.txt
deepspeed_venv=$(venv_path deepspeed "$deepspeed_requirements" "$requirements")
if [ ! -e "$deepspeed_venv/complete" ]; then
    say "making the Python environment $deepspeed_venv (DeepSpeed: some megabytes, a minute)"
    DS_BUILD_OPS=0 make_venv_beside "$deepspeed_venv" "$deepspeed_requirements" "$venv" setuptools wheel ninja py-cpuinfo
fi
export CKPTFS_DEEPSPEED_PYTHON=$deepspeed_venv/bin/python

# moto, which plays S3 for the tests of stores.
stores_requirements=tests/python/remote-requirements.txt
stores_venv=$(venv_path stores "$stores_requirements")
if [ ! -e "$stores_venv/complete" ]; then
    say "making the Python environment $stores_venv (moto: some megabytes)"
    make_venv "$stores_venv" "$stores_requirements"
fi
export CKPTFS_MOTO_PYTHON=$stores_venv/bin/python

# s3s-fs, which plays S3 and compares signatures. A version that this project's Rust builds.
s3s_fs=$cache/s3s-fs-0.14.1
if [ ! -e "$s3s_fs/bin/s3s-fs" ]; then
    wait_for "building s3s-fs for the tests of stores (some minutes)" env -u CARGO_TARGET_DIR \
        cargo install --quiet --locked --root "$s3s_fs" --features binary "s3s-fs@${s3s_fs##*-}"
fi
export CKPTFS_S3S_FS=$s3s_fs/bin/s3s-fs

# azurite, which plays Azure.
azurite=$cache/azurite-3.35.0
if [ ! -e "$azurite/complete" ]; then
    rm -rf "$azurite"
    mkdir -p "$azurite"
    wait_for "installing azurite for the tests of stores (some 180 MB)" \
        npm install --silent --no-fund --no-audit --ignore-scripts --prefix "$azurite" "azurite@${azurite##*-}"
    touch "$azurite/complete"
fi
export CKPTFS_AZURITE=$azurite/node_modules/.bin/azurite-blob

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
