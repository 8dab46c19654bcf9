//! Helpers of the fuzz targets: they parse bytes as a checkpoint, and check what must then hold.

#[allow(dead_code)] // The tests use more of it.
#[path = "../../tests/common/pickle.rs"]
mod pickle;
#[allow(dead_code)] // The tests use more of it.
#[path = "../../tests/common/zip.rs"]
mod zip;

use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use ckptfs::checkpoint::{self, ParseOptions};
use ckptfs::virtual_file::{VirtualFile, VirtualFileReader};

/// The length of the first range that is read from a virtual file.
const FIRST_RANGE_BYTES: usize = 64 << 10;

/// The length of each other range that is read.
const RANGE_BYTES: usize = 1000;

/// Virtual files up to this size are read whole, and parsed by the reference reader.
const MAX_WHOLE_BYTES: u64 = 1 << 20;

/// The sizes of the storages `0` to `3` of an archive with a pickle: six floats, eight long integers,
/// four halves, none.
const STORAGE_BYTES: [usize; 4] = [24, 64, 8, 0];

/// The pieces of a folder of torch.distributed.checkpoint, by `make_seeds.py`: the tables among the seeds place them.
const DCP_PIECES: &[u8] = include_bytes!("../dcp_pieces/__0_0.distcp");

/// A valid archive with that pickle and some storages.
pub fn archive(pickle: &[u8]) -> Vec<u8> {
    let mut records = vec![zip::Record::stored("archive/data.pkl", pickle)];
    for (key, &len) in STORAGE_BYTES.iter().enumerate() {
        let bytes: Vec<u8> = (0..len).map(|n| (n * 7 + key) as u8).collect();
        records.push(zip::Record::stored(&format!("archive/data/{key}"), &bytes));
    }
    zip::archive(&records)
}

/// Parses bytes as a checkpoint of that name, strictly and then partially. Returns whether they are one.
pub fn read(bytes: &[u8], name: &str) -> bool {
    let all = read_with(bytes, name, &ParseOptions::default());
    let part =
        read_with(bytes, name, &ParseOptions { allow_partial: true, ..ParseOptions::default() });
    assert!(part || !all, "what is shown whole is shown in part");
    all
}

/// Parses archives with these pickles as the files of the ranks of a run, in a folder of this process, strictly and then
/// partially.
pub fn read_ranks(pickles: &[&[u8]]) {
    let folder = std::env::temp_dir().join(format!("ckptfs-fuzz-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder for the files");
    let world = pickles.len();
    for (rank, pickle) in pickles.iter().enumerate() {
        let path = folder.join(format!("model_world_size_{world}_rank_{rank}.pt"));
        std::fs::write(path, archive(pickle)).expect("a file of a rank");
    }
    for allow_partial in [false, true] {
        let options = ParseOptions { allow_partial, ..ParseOptions::default() };
        let opened = checkpoint::open(&folder, &options);
        if let Some(virtual_file) = opened.ok().and_then(|found| VirtualFile::new(found).ok()) {
            check(&Arc::new(virtual_file));
        }
    }
}

fn read_with(bytes: &[u8], name: &str, options: &ParseOptions) -> bool {
    let Ok(checkpoint) = checkpoint::parse_bytes(bytes, Path::new(name), options) else {
        return false;
    };
    let Ok(virtual_file) = VirtualFile::new(checkpoint) else {
        return false;
    };
    check(&Arc::new(virtual_file));
    true
}

/// Parses bytes as the table of a folder of torch.distributed.checkpoint, beside one file of pieces. Returns whether they
/// are one.
pub fn read_dcp_table(bytes: &[u8]) -> bool {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    let folder = FOLDER.get_or_init(|| {
        let folder = std::env::temp_dir().join(format!("ckptfs-fuzz-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a temporary folder");
        std::fs::write(folder.join("__0_0.distcp"), DCP_PIECES).expect("a temporary file");
        folder
    });
    std::fs::write(folder.join(".metadata"), bytes).expect("a temporary file");
    let Ok(checkpoint) = checkpoint::open(folder, &ParseOptions::default()) else {
        return false;
    };
    let Ok(virtual_file) = VirtualFile::new(checkpoint) else {
        return false;
    };
    check(&Arc::new(virtual_file));
    true
}

/// Checks what holds for every virtual file: each range can be read, segments and tensors tile it, and it is valid
/// safetensors.
fn check(virtual_file: &Arc<VirtualFile>) {
    let reader = VirtualFileReader::open(virtual_file).expect("the sources do not change");
    let size = virtual_file.size();
    let read = |start: u64, len: usize| {
        let mut out = vec![0; len];
        let read = reader.read_at(&mut out, start).expect("every byte is there");
        assert_eq!(read as u64, size.saturating_sub(start).min(len as u64));
        out.truncate(read);
        out
    };
    let front = read(0, FIRST_RANGE_BYTES);
    let starts =
        [virtual_file.header_size().saturating_sub(3), size / 2, size.saturating_sub(7), size];
    for start in starts {
        let part = read(start, RANGE_BYTES);
        if let Some(same) = front.get(start as usize..).filter(|same| same.len() >= part.len()) {
            assert_eq!(part, same[..part.len()]);
        }
        let end = start + part.len() as u64;
        let at = virtual_file.segments(start..end).fold(start, |at, segment| {
            assert_eq!(segment.range.start, at);
            segment.range.end
        });
        assert_eq!(at, end);
    }
    let mut at = virtual_file.header_size();
    for place in 0..virtual_file.tensors().len() {
        let range = virtual_file.tensor_range(place);
        assert_eq!(range.start, at);
        at = range.end;
        if !range.is_empty() {
            assert_eq!(virtual_file.tensor_at(range.start), Some(place));
            assert_eq!(virtual_file.tensor_at(range.end - 1), Some(place));
        }
    }
    assert_eq!(at, size);
    if size <= MAX_WHOLE_BYTES {
        let whole = read(0, size as usize);
        safetensors::SafeTensors::deserialize(&whole).expect("valid for the reference reader");
    }
}
