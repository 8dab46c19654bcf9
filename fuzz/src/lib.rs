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

/// The index of a delta whose only tensor is `t`.
const DELTA_INDEX: &str = r#"{"metadata": {"version": 1, "base_version": 0, "delta_encoding": "ENCODING",
    "compression_format": "zstd", "checksum_format": "adler32"}, "weight_map": {"t": "model.safetensors"}}"#;

/// Reads a version whose index or whose changes are these bytes, and compares what is served with what a trainer's engine
/// makes.
pub fn read_delta(bytes: &[u8]) {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    let folder = FOLDER.get_or_init(|| {
        let folder = std::env::temp_dir().join(format!("ckptfs-fuzz-{}", std::process::id()));
        for version in ["weight_v000000", "weight_v000001"] {
            std::fs::create_dir_all(folder.join(version)).expect("a temporary folder");
        }
        folder
    });
    let Some((&[kind, low, high], changes)) = bytes.split_first_chunk() else { return };
    let before: Vec<u8> = (0..u16::from_le_bytes([low, high])).map(|n| (u32::from(n) * 7) as u8).collect();
    let is_xor = kind & 1 == 0;
    let after = apply(is_xor, &before, changes);
    let checksum = format!("{:08x}", adler32(after.as_deref().unwrap_or_default()));
    let write = |name: &str, bytes: &[u8]| {
        std::fs::write(folder.join(name), bytes).expect("a temporary file");
    };
    let file = |bytes: &[u8], metadata: &str| {
        let header = format!(
            r#"{{"__metadata__":{{{metadata}}},"t":{{"dtype":"U8","shape":[{len}],"data_offsets":[0,{len}]}}}}"#,
            len = bytes.len()
        );
        [&(header.len() as u64).to_le_bytes(), header.as_bytes(), bytes].concat()
    };
    write("weight_v000000/model.safetensors", &file(&before, ""));
    let metadata = format!(r#""t":"{checksum}""#);
    write("weight_v000001/model.safetensors", &file(changes, &metadata));
    let index = DELTA_INDEX.replace("ENCODING", if is_xor { "xor" } else { "overwrite" });
    let index = if kind & 2 == 0 { index.as_bytes() } else { changes };
    write("weight_v000001/model.safetensors.index.json", index);
    let opened = checkpoint::open(&folder.join("weight_v000001"), &ParseOptions::default());
    let Some(virtual_file) = opened.ok().and_then(|found| VirtualFile::new(found).ok()) else {
        return;
    };
    let virtual_file = Arc::new(virtual_file);
    let reader = VirtualFileReader::open(&virtual_file).expect("the sources do not change");
    let mut served = vec![0; before.len()];
    match reader.read_at(&mut served, virtual_file.header_size()) {
        // Another index may be that of a whole version, and of a tensor without bytes nothing is read.
        Ok(_) if kind & 2 != 0 || before.is_empty() => {}
        Ok(len) => assert_eq!(Some(&served[..len]), after.as_deref(), "other bytes are served"),
        Err(error) => assert!(!error.remedy().is_empty()),
    }
}

/// The bytes that an applier makes of changes, if it makes any.
fn apply(is_xor: bool, before: &[u8], changes: &[u8]) -> Option<Vec<u8>> {
    let max_bytes = 4 + 5 * before.len().max(1);
    let decoded = zstd::bulk::decompress(changes, max_bytes).ok()?;
    let mut after = before.to_vec();
    if is_xor {
        after.iter_mut().zip(&decoded).for_each(|(byte, change)| *byte ^= change);
        return (decoded.len() == before.len()).then_some(after);
    }
    let (count, rest) = decoded.split_first_chunk::<4>()?;
    let count = u32::from_le_bytes(*count) as usize;
    let (positions, values) = rest.split_at_checked(count.checked_mul(4)?)?;
    for (position, &value) in positions.chunks_exact(4).zip(values) {
        let position = u32::from_le_bytes(position.try_into().ok()?);
        *after.get_mut(position as usize)? = value;
    }
    (values.len() == count).then_some(after)
}

fn adler32(bytes: &[u8]) -> u32 {
    let (a, b) = bytes.iter().fold((1, 0), |(a, b), &byte| {
        let a = (a + u32::from(byte)) % 65_521;
        (a, (b + a) % 65_521)
    });
    b << 16 | a
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
