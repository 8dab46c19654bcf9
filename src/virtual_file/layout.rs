//! Decides the order of the tensors and builds the virtual file.
//!
//! A safetensors file has no hole between tensors, so alignment comes from order alone: larger
//! elements first, and then every tensor starts at a multiple of its element. Within one size they
//! stand as they lie in the sources, so that reading the virtual file in order reads the disk in order.

use std::sync::{Arc, OnceLock};

use crate::checkpoint::{
    Checkpoint, MAX_HEADER_BYTES, Origin, OriginId, ParseOptions, Tensor, TensorBytes,
};
use crate::source::{FileIdentity, FileState, SourceFile};

use super::{Digest, FileLayout, LayoutPiece, VirtualFile, VirtualFileError, header};

/// Part of the identity: another way of laying out is another virtual file.
const LAYOUT_VERSION: u8 = 2;

/// The most that a file can hold after any header.
const MAX_DATA_BYTES: u64 = i64::MAX as u64 - 2 * MAX_HEADER_BYTES;

pub fn build(checkpoint: Checkpoint) -> Result<VirtualFile, VirtualFileError> {
    let files: Vec<Arc<SourceFile>> = checkpoint.source_files().cloned().collect();
    let Checkpoint { path, origins, mut tensors, metadata, refused, options, .. } = checkpoint;
    if !refused.is_empty() {
        if !options.allow_partial {
            return Err(VirtualFileError::from_refused(path, refused));
        }
        if tensors.is_empty() {
            return Err(VirtualFileError::Empty { path });
        }
    }
    tensors.sort_by(|a, b| sort_key(a).cmp(&sort_key(b)));
    let mut starts = Vec::with_capacity(tensors.len() + 1);
    let mut end = 0u64;
    let mut header = header::HeaderBound::default();
    for tensor in &tensors {
        header.add_tensor(tensor);
        starts.push(end);
        end = end
            .checked_add(tensor.bytes.len())
            .filter(|&end| end <= MAX_DATA_BYTES)
            .ok_or_else(|| VirtualFileError::TooLarge { path: path.clone() })?;
    }
    starts.push(end);
    // Readers ask for it, and a checkpoint that states another keeps it: it is then not torch's.
    let states_metadata = metadata.is_some();
    let mut metadata = metadata.unwrap_or_default();
    let states_format = metadata.contains_key("format");
    metadata.entry("format".to_owned()).or_insert_with(|| "pt".to_owned());
    if header.max_header_bytes(&metadata) > MAX_HEADER_BYTES
        && header::encode_header(&tensors, &starts, &metadata).is_none()
    {
        return Err(VirtualFileError::HeaderTooLong { path, limit: MAX_HEADER_BYTES });
    }
    Ok(VirtualFile {
        tensors: tensors.into(),
        starts: starts.into(),
        origins: origins.into(),
        source_files: files.into(),
        metadata,
        source_has_metadata: states_metadata,
        source_has_format: states_format,
        options,
        file_layout: OnceLock::new(),
        memory_bytes: OnceLock::new(),
    })
}

/// What stands before the data of a virtual file that was built.
pub fn lay_out(file: &VirtualFile) -> FileLayout {
    let VirtualFile { tensors, starts, source_files: files, metadata, options, .. } = file;
    let header =
        header::encode_header(tensors, starts, metadata).expect("one too long was refused");
    let (piece_starts, pieces) = merge_pieces(tensors, starts, header.len() as u64);
    let layout = Digest::compute(&header);
    let identity = identity(layout, files, options);
    FileLayout { header: header.into(), piece_starts, pieces, layout_hash: layout, identity }
}

/// The virtual file of a file as it is.
pub fn plain(file: Arc<SourceFile>) -> VirtualFile {
    let size = file.identity().size;
    let piece = LayoutPiece::Run { origin: OriginId(0), offset: 0 };
    single_piece(piece, Arc::from([]), size, Box::new([file]))
}

/// The virtual file of a file that is made of no source.
pub fn from_bytes(bytes: Vec<u8>) -> VirtualFile {
    single_piece(LayoutPiece::Header, bytes.into(), 0, Box::default())
}

fn single_piece(
    piece: LayoutPiece,
    header: Arc<[u8]>,
    data: u64,
    files: Box<[Arc<SourceFile>]>,
) -> VirtualFile {
    let (layout, options) = (Digest::compute(&header), ParseOptions::default());
    let written = FileLayout {
        header,
        piece_starts: Box::new([0]),
        pieces: Box::new([piece]),
        layout_hash: layout,
        identity: identity(layout, &files, &options),
    };
    VirtualFile {
        tensors: Box::default(),
        starts: Box::new([data]),
        origins: files.iter().cloned().map(Origin::File).collect(),
        source_files: files,
        metadata: Default::default(),
        source_has_metadata: false,
        source_has_format: false,
        options,
        file_layout: written.into(),
        memory_bytes: OnceLock::new(),
    }
}

/// What tensors are sorted by: the name settles what is left, so that there is one order.
fn sort_key(tensor: &Tensor) -> (std::cmp::Reverse<u32>, u32, u64, u64, &str) {
    let (origin, first, span) = tensor.bytes.extent();
    (std::cmp::Reverse(tensor.dtype.bits()), origin.0, first, span, &tensor.name)
}

fn merge_pieces(tensors: &[Tensor], starts: &[u64], data: u64) -> (Box<[u64]>, Box<[LayoutPiece]>) {
    let mut piece_starts = vec![0];
    let mut pieces = vec![LayoutPiece::Header];
    for (place, (tensor, &start)) in tensors.iter().zip(starts).enumerate() {
        if tensor.bytes.is_empty() {
            continue;
        }
        let start = data + start;
        match &tensor.bytes {
            TensorBytes::Run(run) => {
                let follows = match (pieces.last(), piece_starts.last()) {
                    (Some(&LayoutPiece::Run { origin, offset }), Some(&before)) => {
                        origin == run.origin && offset + (start - before) == run.offset
                    }
                    _ => false,
                };
                if follows {
                    continue;
                }
                pieces.push(LayoutPiece::Run { origin: run.origin, offset: run.offset });
            }
            TensorBytes::Grid(_) | TensorBytes::Swapped { .. } => {
                pieces.push(LayoutPiece::Tensor(place as u32))
            }
        }
        piece_starts.push(start);
    }
    (piece_starts.into(), pieces.into())
}

fn identity(layout: Digest, files: &[Arc<SourceFile>], options: &ParseOptions) -> Digest {
    let ParseOptions { root_key, allow_partial, follow_symlinks } = options;
    let mut bytes = vec![LAYOUT_VERSION, u8::from(*allow_partial), u8::from(*follow_symlinks)];
    bytes.extend_from_slice(&layout.0);
    bytes.push(u8::from(root_key.is_some()));
    let key = root_key.as_deref().unwrap_or_default();
    bytes.extend_from_slice(&(key.len() as u64).to_le_bytes());
    bytes.extend_from_slice(key.as_bytes());
    for file in files {
        let FileState { identity, ctime, ctime_nsec } = file.state();
        let FileIdentity { dev, ino, size, mtime, mtime_nsec } = identity;
        for number in [dev, ino, size, mtime as u64, ctime as u64] {
            bytes.extend_from_slice(&number.to_le_bytes());
        }
        for number in [mtime_nsec, ctime_nsec] {
            bytes.extend_from_slice(&number.to_le_bytes());
        }
    }
    Digest::compute(&bytes)
}

impl Digest {
    fn compute(bytes: &[u8]) -> Digest {
        let mut hash = [0; 16];
        hash.copy_from_slice(&blake3::hash(bytes).as_bytes()[..16]);
        Digest(hash)
    }
}
