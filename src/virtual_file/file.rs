//! A virtual file: as a value, and held open to be read from its sources.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ops::{DerefMut, Range};
use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock};

use crate::checkpoint::{
    ByteRun, Checkpoint, Format, MAX_ELEMENT_BYTES, MAX_HEADER_BYTES, OpenOrigins, Origin,
    OriginId, ParseOptions, Tensor, TensorBytes, header_describes,
};
use crate::source::{OpenFile, SourceFile};
use crate::threads::lock;

use super::digest::Digest;
use super::error::VirtualFileError;
use super::layout::{FileLayout, HeaderBound, Segment, SegmentSource, encode_header, sort_key};
use super::read_plan::PlanItem;
use super::store_reads::{interleaved_tensors, read_items, window_bytes};

/// Maximum bytes of data: what a file can hold after any header.
const MAX_DATA_BYTES: u64 = i64::MAX as u64 - 2 * MAX_HEADER_BYTES;

/// A checkpoint as one virtual safetensors file.
#[derive(Debug)]
pub struct VirtualFile {
    /// In the order of the virtual file.
    tensors: Box<[Tensor]>,
    /// The start of each tensor in the data, and the end of the data.
    starts: Box<[u64]>,
    origins: Box<[Origin]>,
    source_files: Box<[Arc<SourceFile>]>,
    metadata: BTreeMap<String, String>,
    source_has_metadata: bool,
    source_has_format: bool,
    options: ParseOptions,
    /// What was done with the tensors since they were read.
    recipe: Option<Arc<str>>,
    /// The header of the only source file, until the layout is computed.
    source_header: Mutex<Option<Arc<[u8]>>>,
    /// Computed at the first use: programs that only load tensors never need it.
    layout: OnceLock<FileLayout>,
    /// Computed once: it is a sum over all tensors, and every open needs it.
    memory_bytes: OnceLock<u64>,
}

impl VirtualFile {
    /// Lays a checkpoint out. Refuses one with refused entries, unless its options allow a part.
    pub fn new(checkpoint: Checkpoint) -> Result<VirtualFile, VirtualFileError> {
        let source_files: Vec<Arc<SourceFile>> = checkpoint.source_files().cloned().collect();
        let Checkpoint {
            path,
            is_sharded,
            origins,
            mut tensors,
            metadata,
            header,
            refused,
            options,
            recipe,
            ..
        } = checkpoint;
        if !refused.is_empty() && (tensors.is_empty() || !options.allow_partial) {
            return Err(VirtualFileError::from_refused(path, refused, tensors.len()));
        }
        tensors.sort_by(|a, b| sort_key(a, &origins).cmp(&sort_key(b, &origins)));
        let mut starts = Vec::with_capacity(tensors.len() + 1);
        let mut end = 0u64;
        let mut header_bound = HeaderBound::default();
        for tensor in &tensors {
            header_bound.add_tensor(tensor);
            starts.push(end);
            end = end
                .checked_add(tensor.bytes.len())
                .filter(|&end| end <= MAX_DATA_BYTES)
                .ok_or_else(|| VirtualFileError::TooLarge { path: path.clone() })?;
        }
        starts.push(end);
        // Readers need `format`. A checkpoint that states another format keeps it: it is then not torch's.
        let source_has_metadata = metadata.is_some();
        let mut metadata = metadata.unwrap_or_default();
        let source_has_format = metadata.contains_key("format");
        metadata.entry("format".to_owned()).or_insert_with(|| "pt".to_owned());
        if header_bound.max_header_bytes(&metadata) > MAX_HEADER_BYTES
            && encode_header(&tensors, &starts, &metadata).is_none()
        {
            return Err(VirtualFileError::HeaderTooLong { path, limit: MAX_HEADER_BYTES });
        }
        Ok(VirtualFile {
            tensors: tensors.into(),
            starts: starts.into(),
            origins: origins.into(),
            source_files: source_files.into(),
            metadata,
            source_has_metadata,
            source_has_format,
            options,
            // A single file without a recipe gets a new header: `export` aligns its data.
            source_header: Mutex::new(header.filter(|_| is_sharded || recipe.is_some())),
            recipe,
            layout: OnceLock::new(),
            memory_bytes: OnceLock::new(),
        })
    }

    /// A checkpoint with the tensors of this file, for further steps with them. `path` is the path to print.
    pub fn to_checkpoint(&self, path: &Path, format: Format) -> Checkpoint {
        let file_count = self.origins.iter().filter_map(Origin::file).count();
        let mut metadata = self.source_has_metadata.then(|| self.metadata.clone());
        if let (Some(metadata), false) = (&mut metadata, self.source_has_format) {
            metadata.remove("format");
        }
        Checkpoint {
            path: path.to_path_buf(),
            format,
            is_sharded: file_count > 1,
            origins: self.origins.to_vec(),
            open_file: None,
            index_files: self.source_files[file_count..].to_vec(),
            tensors: self.tensors.to_vec(),
            metadata,
            header: None,
            obvious_choices: Vec::new(),
            notes: Vec::new(),
            refused: Vec::new(),
            options: self.options.clone(),
            recipe: self.recipe.clone(),
        }
    }

    /// A source file as it is, whatever it holds: one piece, without header and tensors.
    pub fn plain(file: Arc<SourceFile>) -> VirtualFile {
        let (size, layout) = (file.identity().size, FileLayout::of_plain_file(&file));
        VirtualFile::without_tensors(layout, size, Box::new([file]))
    }

    /// A file of these bytes, without a source: all of it is header.
    pub fn from_bytes(bytes: Vec<u8>) -> VirtualFile {
        VirtualFile::without_tensors(FileLayout::of_bytes(bytes), 0, Box::default())
    }

    fn without_tensors(
        layout: FileLayout,
        data_bytes: u64,
        source_files: Box<[Arc<SourceFile>]>,
    ) -> VirtualFile {
        VirtualFile {
            tensors: Box::default(),
            starts: Box::new([data_bytes]),
            origins: source_files.iter().cloned().map(Origin::File).collect(),
            source_files,
            metadata: BTreeMap::new(),
            source_has_metadata: false,
            source_has_format: false,
            options: ParseOptions::default(),
            recipe: None,
            source_header: Mutex::default(),
            layout: layout.into(),
            memory_bytes: OnceLock::new(),
        }
    }

    /// Whether it is a source file as it is.
    pub fn is_plain(&self) -> bool {
        self.header().is_empty()
    }

    /// The source file that this virtual file equals byte for byte, if there is one.
    pub fn identical_source(&self) -> Option<&Arc<SourceFile>> {
        self.origins.first().and_then(Origin::file).filter(|_| self.layout().is_identical)
    }

    fn layout(&self) -> &FileLayout {
        self.layout.get_or_init(|| {
            let VirtualFile { tensors, starts, metadata, source_files, options, recipe, .. } = self;
            let recipe = recipe.as_deref();
            let source_header =
                lock(&self.source_header).take().filter(|header| self.matches_header(header));
            let is_identical =
                source_header.as_ref().is_some_and(|header| self.is_identical_behind(header));
            let encode = || encode_header(tensors, starts, metadata).map(Arc::from);
            let header = source_header.or_else(encode).expect("a longer one was refused");
            FileLayout::of_tensors(
                header,
                is_identical,
                tensors,
                starts,
                source_files,
                options,
                recipe,
            )
        })
    }

    /// Whether the header of a source is valid for this file: the same tensors, order and metadata, and aligned data.
    fn matches_header(&self, header: &Arc<[u8]>) -> bool {
        let size = header.len() as u64 + self.data_bytes();
        self.source_has_format
            && (header.len() as u64).is_multiple_of(MAX_ELEMENT_BYTES)
            && header_describes(header, size, &self.tensors, &self.metadata)
    }

    /// Whether the only source has all data at the same places, behind this header.
    fn is_identical_behind(&self, header: &[u8]) -> bool {
        let [Origin::File(file)] = &*self.origins else { return false };
        let data_start = header.len() as u64;
        let is_in_place = |(tensor, start): (&Tensor, &u64)| match tensor.bytes {
            TensorBytes::Run(run) => run.offset == data_start + start,
            _ => false,
        };
        file.identity().size == data_start + self.data_bytes()
            && self.tensors.iter().zip(&self.starts).all(is_in_place)
    }

    fn data_bytes(&self) -> u64 {
        self.starts.last().copied().unwrap_or(0)
    }

    /// The size in bytes.
    pub fn size(&self) -> u64 {
        self.header_size() + self.data_bytes()
    }

    /// Bytes before the data, the eight bytes of the length included. A multiple of 4,096, unless the header is that of
    /// the source file.
    pub fn header_size(&self) -> u64 {
        self.header().len() as u64
    }

    /// The header as it is in the file, its length first.
    pub fn header(&self) -> &[u8] {
        &self.layout().header
    }

    /// The tensors in the order of the file.
    pub fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    /// The part of the file that a tensor takes, by its index in [`VirtualFile::tensors`].
    pub fn tensor_range(&self, index: usize) -> Range<u64> {
        let data_start = self.header_size();
        data_start + self.starts[index]..data_start + self.starts[index + 1]
    }

    /// The index of the tensor that has a byte of the file; `None` in the header and past the end.
    pub fn tensor_at(&self, offset: u64) -> Option<usize> {
        let offset = offset.checked_sub(self.header_size())?;
        // Of tensors that start at the same byte, all but the last are empty.
        let index = self.starts.partition_point(|&start| start <= offset).checked_sub(1)?;
        (index < self.tensors.len()).then_some(index)
    }

    /// What holds the bytes.
    pub fn origins(&self) -> &[Origin] {
        &self.origins
    }

    /// The source files, including the index of a set.
    pub fn source_files(&self) -> &[Arc<SourceFile>] {
        &self.source_files
    }

    /// The metadata in the header.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }

    /// Whether the source has metadata, even if empty.
    pub fn source_has_metadata(&self) -> bool {
        self.source_has_metadata
    }

    /// Whether `format` in the metadata is from the source.
    pub fn source_has_format(&self) -> bool {
        self.source_has_format
    }

    /// What was done with the tensors since they were read, in a canonical form; `None` if nothing.
    pub fn recipe(&self) -> Option<&str> {
        self.recipe.as_deref()
    }

    /// A hash of the header, and of the recipe if there is one: names, types, shapes and order. It does not depend on
    /// where the checkpoint is.
    pub fn layout_hash(&self) -> Digest {
        self.layout().layout_hash
    }

    /// A hash of the sources' states, the options and the layout. Equal identities mean equal bytes.
    pub fn identity(&self) -> Digest {
        self.layout().identity
    }

    /// The approximate bytes of memory that it takes.
    pub fn memory_bytes(&self) -> u64 {
        *self.memory_bytes.get_or_init(|| self.compute_memory_bytes())
    }

    fn compute_memory_bytes(&self) -> u64 {
        let tensor_bytes = |tensor: &Tensor| {
            let spilled = if tensor.shape.spilled() { tensor.shape.capacity() } else { 0 };
            tensor.name.len() + spilled * size_of::<u64>()
        };
        let tensors =
            size_of_val(&*self.tensors) + self.tensors.iter().map(tensor_bytes).sum::<usize>();
        let origins = self.origins.iter().map(|origin| match origin {
            Origin::File(file) => file.memory_bytes(),
            Origin::Memory(bytes) => bytes.len(),
            Origin::Patched(patched) => patched.memory_bytes(),
        });
        let parts = tensors + size_of_val(&*self.starts) + self.layout().memory_bytes();
        (parts + origins.sum::<usize>()) as u64
    }

    /// The segments of a range in order, cut to the range. Past the end there is no segment.
    pub fn segments(&self, range: Range<u64>) -> impl Iterator<Item = Segment> {
        self.layout().segments(range, self.size())
    }
}

/// A virtual file whose sources are held open.
///
/// Any number of threads may read at once: there is no lock. A read of contiguous bytes allocates nothing, and no
/// allocation is larger than the request.
#[derive(Debug)]
pub struct VirtualFileReader {
    virtual_file: Arc<VirtualFile>,
    origins: OpenOrigins,
    /// Whether its sources lie in stores.
    is_remote: bool,
}

impl VirtualFileReader {
    /// Opens the sources. Fails if any is not what was parsed.
    pub fn open(virtual_file: &Arc<VirtualFile>) -> Result<VirtualFileReader, VirtualFileError> {
        VirtualFileReader::open_with(virtual_file, None)
    }

    /// Opens the sources, of which `open_file` is still open since it was parsed.
    pub fn open_with(
        virtual_file: &Arc<VirtualFile>,
        open_file: Option<OpenFile>,
    ) -> Result<VirtualFileReader, VirtualFileError> {
        let origins = OpenOrigins::open(virtual_file.origins(), open_file)?;
        let is_remote = origins.files().any(|file| file.descriptor().is_none());
        Ok(VirtualFileReader { virtual_file: Arc::clone(virtual_file), origins, is_remote })
    }

    /// The virtual file.
    pub fn virtual_file(&self) -> &Arc<VirtualFile> {
        &self.virtual_file
    }

    /// The open origins, to read bytes in the order of the source.
    pub fn origins(&self) -> &OpenOrigins {
        &self.origins
    }

    /// The open file of an origin, to copy from it without reading it; `None` if the origin is in memory.
    pub fn file(&self, origin: OriginId) -> Option<&Arc<OpenFile>> {
        self.origins.file(origin)
    }

    /// Fills `buf` with bytes from `offset` on, and returns their number: less than requested only at the end.
    ///
    /// Fails if a source changed since it was parsed. The contents of `buf` are then unspecified.
    pub fn read_at(&self, buf: &mut [u8], offset: u64) -> Result<usize, VirtualFileError> {
        let end = offset.saturating_add(buf.len() as u64).min(self.virtual_file.size());
        if offset >= end {
            return Ok(0);
        }
        let buf = &mut buf[..(end - offset) as usize];
        if self.is_remote {
            let len = buf.len();
            self.read_from_stores(&mut [(offset, buf)], 1, |len| vec![0; len], || false)?;
            return Ok(len);
        }
        let mut rest = buf;
        // Each source is checked once, after the last read from it.
        let mut unchecked = None;
        for segment in self.virtual_file.segments(offset..end) {
            let len = segment.range.end - segment.range.start;
            let (out, after) = rest.split_at_mut(len as usize);
            rest = after;
            match segment.bytes {
                SegmentSource::Header(from) => {
                    let from = from as usize;
                    out.copy_from_slice(&self.virtual_file.header()[from..from + out.len()]);
                }
                SegmentSource::Run { origin, offset } => {
                    if let Some(before) = unchecked.replace(origin)
                        && before != origin
                    {
                        self.origins.check_unchanged(before)?;
                    }
                    self.origins.origin(origin).read_exact_at(out, offset)?;
                }
                SegmentSource::Tensor { index, offset } => {
                    let bytes = &self.virtual_file.tensors()[index].bytes;
                    self.origins.read(bytes, offset, out)?;
                    self.origins.check_tensor_unchanged(bytes)?;
                }
            }
        }
        if let Some(last) = unchecked {
            self.origins.check_unchanged(last)?;
        }
        Ok((end - offset) as usize)
    }

    /// Whether the sources lie in stores.
    pub fn is_remote(&self) -> bool {
        self.is_remote
    }

    /// Fills each target with bytes from its offset on, which are all in the file, by at most `threads` requests at once.
    /// `new_scratch` gives each request memory of so many bytes, if it needs some. Returns false if it was stopped before
    /// the end. For sources in stores.
    pub(crate) fn read_from_stores<S: DerefMut<Target = [u8]> + Send>(
        &self,
        targets: &mut [(u64, &mut [u8])],
        threads: usize,
        new_scratch: impl Fn(usize) -> S + Sync,
        should_stop: impl Fn() -> bool + Sync,
    ) -> Result<bool, VirtualFileError> {
        let mut parts = Vec::new();
        for (start, target) in targets {
            let end = *start + target.len() as u64;
            let mut rest = &mut **target;
            for Segment { range, bytes } in self.virtual_file.segments(*start..end) {
                let len = range.end - range.start;
                let (out, after) = rest.split_at_mut(len as usize);
                rest = after;
                let (bytes, offset) = match bytes {
                    SegmentSource::Header(from) => {
                        let from = from as usize;
                        out.copy_from_slice(&self.virtual_file.header()[from..from + out.len()]);
                        continue;
                    }
                    SegmentSource::Run { origin, offset } => {
                        (Cow::Owned(TensorBytes::Run(ByteRun { origin, offset, len })), 0)
                    }
                    SegmentSource::Tensor { index, offset } => {
                        (Cow::Borrowed(&self.virtual_file.tensors()[index].bytes), offset)
                    }
                };
                parts.push((bytes, offset, out));
            }
        }
        let items = parts.iter_mut().map(|(bytes, offset, target)| PlanItem {
            checkpoint: 0,
            bytes,
            offset: *offset,
            target: &mut **target,
        });
        Ok(read_items(&self.origins, items.collect(), threads, new_scratch, should_stop)?)
    }

    /// The ranges in which to read the whole file. They have `chunk_bytes`. A tensor that is strided in a store may
    /// need windows of up to `window_bytes`, as may tensors whose bytes alternate there.
    pub(crate) fn chunks(&self, chunk_bytes: u64, window_bytes: u64) -> Vec<Range<u64>> {
        let mut chunks = Vec::new();
        let size = self.virtual_file.size();
        let mut cut = |range: Range<u64>, bytes: u64| {
            let starts = range.clone().step_by(bytes as usize);
            chunks.extend(starts.map(|start| start..(start + bytes).min(range.end)));
        };
        let mut at = 0;
        if self.is_remote {
            for Segment { range, bytes } in self.virtual_file.segments(0..size) {
                let SegmentSource::Tensor { index, .. } = bytes else { continue };
                if range.start < at {
                    continue;
                }
                let shared = interleaved_tensors(self.virtual_file.tensors(), index);
                let all = range.start..self.virtual_file.tensor_range(shared.end - 1).end;
                let (range, bytes) = if shared.len() > 1 && all.end - all.start <= window_bytes {
                    (all, window_bytes)
                } else {
                    (range, self.tensor_window(index, chunk_bytes, window_bytes))
                };
                let is_cut = (range.start - at) / chunk_bytes != (range.end - 1 - at) / chunk_bytes;
                if is_cut {
                    cut(at..range.start, chunk_bytes);
                    at = range.start;
                }
                if range.end - range.start > chunk_bytes {
                    at = range.end;
                    cut(range, bytes);
                }
            }
        }
        cut(at..size, chunk_bytes);
        chunks
    }

    /// The error of a buffer that cannot be allocated.
    pub(super) fn out_of_memory(&self, bytes: u64) -> VirtualFileError {
        let path = self.virtual_file.source_files.first().map(|file| file.path());
        VirtualFileError::OutOfMemory { path: path.unwrap_or_default(), bytes }
    }

    /// The bytes of a tensor that are best read together, of at least `min_bytes` and at most `max_bytes`.
    pub(crate) fn tensor_window(&self, index: usize, min_bytes: u64, max_bytes: u64) -> u64 {
        match self.is_remote {
            true => window_bytes(&self.virtual_file.tensors()[index], min_bytes, max_bytes),
            false => min_bytes,
        }
    }

    /// Fails if anything about any source changed since it was parsed, even if the bytes stayed the same. For opens,
    /// which can get a new virtual file instead.
    pub fn check_all_states_unchanged(&self) -> Result<(), VirtualFileError> {
        Ok(self.origins.check_all_states_unchanged()?)
    }

    /// Fails if the bytes of any source changed since it was parsed.
    pub fn check_all_unchanged(&self) -> Result<(), VirtualFileError> {
        Ok(self.origins.check_all_unchanged()?)
    }
}
