//! What `--help` shows below the options of each command: what they leave unsaid, and examples.
//!
//! Each paragraph is one line, which the terminal's width breaks.

pub const CKPTFS: &str = "\
Reads .safetensors files (single and sharded), files of torch.save (.pt .pth .bin .ckpt, single and sharded), \
and folders of training runs (DCP, FSDP, DeepSpeed). Never executes a pickle.

Exit codes: 0 done, 1 failed, 2 usage, 3 refused checkpoint. Of several paths, the highest code counts.

Examples:
  ckptfs ls -r models         # what a mount would show
  ckptfs mount models mnt     # show it, until `ckptfs unmount mnt`
  ckptfs help mount           # the options of a command";

pub const LS: &str = "\
Reports each name, its kind and its source files, and why a name is hidden, kept as it is or refused.

Examples:
  ckptfs ls                               # this directory
  ckptfs ls -r models                     # a directory and all beneath it
  ckptfs ls models/llama runs/last.ckpt   # one after the other
  ckptfs ls --json models                 # for programs";

pub const INSPECT: &str = "\
Examples:
  ckptfs inspect runs/last.ckpt
  ckptfs inspect --tensors models/llama
  ckptfs inspect --root ema runs/last.ckpt
  ckptfs inspect --json a.safetensors b.safetensors   # a list with both";

pub const EXPORT: &str = "\
The file appears under its name once it is complete and on disk. In a directory, it takes the name that a mount \
would show. Standard output gets the bytes as they are read: after an error, what was written is not whole.

Examples:
  ckptfs export runs/last.ckpt last.safetensors
  mkdir -p out
  ckptfs export pytorch_model.bin out/    # writes out/model.safetensors
  ckptfs export --root ema --force runs/last.ckpt ema.safetensors
  ckptfs export --cast '*=bfloat16' --drop '*.inv_freq' models/llama llama-bf16.safetensors
  ckptfs export --rename '^model\\.=' models/llama renamed.safetensors
  ckptfs export models/llama - | ssh host 'cat > llama.safetensors'";

pub const VERIFY: &str = "\
With --against, compares names, types, shapes and values across formats. Exits with 1 if they differ.

Examples:
  ckptfs verify models/llama
  ckptfs verify a.safetensors b.safetensors
  ckptfs verify runs/last.ckpt --against last.safetensors";

pub const VIEWS: &str = "\
A recipe says which checkpoints are shown cast, renamed, selected, sliced, stacked or split, or as the newest version \
of a chain of deltas. Exits with 3 if one of its files cannot be shown.

Examples:
  ckptfs views check models/views.toml
  ckptfs views check views.toml /srv/models";

#[cfg(feature = "remote")]
pub const FETCH: &str = "\
Fetches everything that a mount of URL would show: checkpoints, and the files beside them. Cached bytes \
are not fetched again, so a fetch that was stopped resumes. Later loads and mounts read from the cache, after one \
request that compares versions; with --offline, without any. If the cache is too small for everything, nothing is fetched.

Every command takes URLs. The query string of a presigned URL is a secret, and must not be typed. End the URL with \
?@FILE, where FILE has the URL or its query string, or with ?@- for standard input.

Examples:
  ckptfs fetch s3://bucket/models/llama
  ckptfs fetch --cache-dir /scratch/blocks gs://bucket/models az://container/runs/step-9000
  ckptfs fetch 'https://host/model.safetensors?@query.txt'";

#[cfg(feature = "remote")]
pub const CACHE: &str = "\
The cache is shared by all processes of a user. You may remove any file of it at any time. `prune` \
without --to removes everything, or everything beneath the URLs. `verify` removes blocks that differ from their \
checksums, and exits with 1 if any did.

Examples:
  ckptfs cache ls
  ckptfs cache prune --to 50G
  ckptfs cache prune s3://bucket/models/llama
  ckptfs cache verify";

#[cfg(feature = "mount")]
pub const MOUNT: &str = "\
Returns when the mount answers. A daemon serves the mount until it is unmounted; with --foreground, this process does.

The daemon logs to --log-file; without it to the journal or the syslog, else to a file of at most 1 MiB in \
$XDG_STATE_HOME/ckptfs (~/.local/state/ckptfs). `ckptfs status` says where.

-o takes the long options above as one list, as fstab has them: memory=2G for --memory 2G. Words of fstab that mean \
nothing to ckptfs (defaults, nofail, _netdev, x-...) are ignored. A mount is always read-only: ro is ignored, and rw is \
an error unless mount(8) added it.

For loads that --remember names, $XDG_CACHE_HOME/ckptfs/orders (~/.cache/ckptfs/orders) keeps a few kB for each layout \
of a model. The next cold load is prefetched in that order.

The extended attributes user.ckptfs.source, .layout and .identity of a file tell where its bytes lie. The root's \
attribute user.ckptfs.stats has the statistics of the mount (docs/formats.md).

Examples:
  ckptfs mount models mnt
  ckptfs mount models models              # over itself: no path changes
  ckptfs mount runs/last.ckpt mnt --root ema
  ckptfs mount models mnt --memory 2G --allow-other
  ckptfs mount models mnt -o allow_other,memory=2G";

#[cfg(feature = "mount")]
pub const UNMOUNT: &str = "\
Also removes dead mounts, whose daemon was killed.

Examples:
  ckptfs unmount mnt
  ckptfs unmount mnt other/mnt
  ckptfs unmount --lazy mnt    # its daemon ends with the last reader";

#[cfg(feature = "mount")]
pub const STATUS: &str = "\
Examples:
  ckptfs status
  ckptfs status --watch
  ckptfs status --json";

#[cfg(feature = "mount")]
pub const DOCTOR: &str = "\
Exits with 1 if mounting cannot work, or the source cannot be read. Access to a URL is tried step by step, until one \
fails.

Examples:
  ckptfs doctor
  ckptfs doctor models                  # and whether this can be a source
  ckptfs doctor s3://bucket/models      # and what is missing to read it";

pub const COMPLETIONS: &str = "\
Examples:
  mkdir -p ~/.local/share/bash-completion/completions
  ckptfs completions bash > ~/.local/share/bash-completion/completions/ckptfs
  mkdir -p ~/.zfunc
  ckptfs completions zsh > ~/.zfunc/_ckptfs    # ~/.zfunc must be in fpath
  mkdir -p ~/.config/fish/completions
  ckptfs completions fish > ~/.config/fish/completions/ckptfs.fish";

pub const MAN: &str = "\
Examples:
  ckptfs man | man -l -
  ckptfs man --dir ~/.local/share/man/man1";

#[cfg(feature = "mount")]
pub const RUN: &str = "\
What is replaced: python -c 'import ckptfs; help(ckptfs.install)'. The program runs in this process, as Python itself \
would run it. With --quiet, only errors of ckptfs are logged.

Environment: CKPTFS_BACKEND, CKPTFS_THREADS, CKPTFS_MEMORY, CKPTFS_PINNED, CKPTFS_GPUDIRECT, CKPTFS_LOG, \
CKPTFS_DISABLE; python -c 'import ckptfs; help(ckptfs.configure)' explains them.

Examples:
  ckptfs run generate.py --model models/llama
  CKPTFS_LOG=info ckptfs run -m my_package.serve";

#[cfg(feature = "mount")]
pub const BENCH: &str = "\
Loaders: ckptfs is this package; mount is safetensors reading a file of a mount that is made for this run. Both are \
measured owned (in memory of their own; for safetensors backend=\"pread\") and mapped.

Cold: before each load the checkpoint's files are evicted from the page cache; with --cold all caches of the machine \
are dropped, the loaders' code too. Cached: the files, and what the mount shows, are in the page cache.

For a URL, bench runs `ckptfs cache prune` before each cold load, which then fetches the whole checkpoint. Cached loads \
read the cache on disk.

Examples:
  ckptfs bench models/llama
  ckptfs bench models/llama --device cuda:0 --runs 3
  ckptfs bench models/llama --against safetensors,runai --html llama.html
  ckptfs bench s3://bucket/models/llama --runs 2
  sudo ckptfs bench models/llama --cold --runs 10";

#[cfg(feature = "mount")]
pub const ENABLE: &str = "\
Writes one file, ckptfs-enable.pth, to the site-packages of a Python environment. From then on its programs read files \
of mounts from their sources, unchanged, if they load them with safetensors, transformers, diffusers, accelerate or \
peft. All other files are loaded as before, and so are files that ckptfs fails to load. CKPTFS_DISABLE=1 switches it off.

`ckptfs disable` removes the file. `ckptfs status` says whether an environment is enabled.

Examples:
  ckptfs enable
  ckptfs enable --python ~/venv
  ckptfs enable --user
  ckptfs disable";

#[cfg(feature = "mount")]
pub const DISABLE: &str = "\
Examples:
  ckptfs disable
  ckptfs disable --python ~/venv";
