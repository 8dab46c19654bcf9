//! Checkpoints that are open for loading, and loads from one or several of them.
//!
//! A load of several checkpoints is one plan, with one set of threads and one memory limit: those with which the
//! first was opened.

use std::collections::HashMap;
use std::collections::btree_map::BTreeMap;
use std::fmt;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use crate::checkpoint::{AxisSlice, Format, NameIndex, OriginId, Tensor, TensorBytes};
use crate::source::FileReader;
use crate::virtual_file::{
    PlanItem, SplitPolicy, Target, VirtualFile, VirtualFileReader, plan_jobs,
};

use super::error::LoadError;
use super::execute::{ByteTally, Concurrency, LoadContext, LoadReport, LoadSource, execute};
use super::memory::{
    BufferAlignment, FileMappings, HostTarget, MapRefusal, MappedTensor, TensorBuffer,
};
use super::sink::{BufferPool, Sink};
use super::stream::stream;

static NEVER_STOP: AtomicBool = AtomicBool::new(false);

/// How the bytes of a checkpoint are reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Route {
    /// The path is on no mount of ours.
    Plain,
    /// The path is on a mount, and the bytes are read from the source of the mount.
    Direct {
        /// The path of the source.
        source: PathBuf,
    },
    /// The path is on a mount, and the bytes are read through it.
    ThroughMount {
        /// Why they are not read from the source.
        reason: String,
    },
}

impl Route {
    /// Why the bytes are read through a mount, if they are.
    pub fn fallback(&self) -> Option<&str> {
        match self {
            Route::Plain | Route::Direct { .. } => None,
            Route::ThroughMount { reason } => Some(reason),
        }
    }
}

/// A checkpoint whose files are open. Any number of threads load from it at once.
pub struct OpenCheckpoint {
    path: PathBuf,
    format: Format,
    route: Route,
    notes: Vec<String>,
    reader: VirtualFileReader,
    files: Box<[Option<FileReader>]>,
    buffers: BufferPool,
    mappings: FileMappings,
    name_index: OnceLock<NameIndex>,
    concurrency: Concurrency,
}

impl OpenCheckpoint {
    pub(super) fn new(
        path: &Path,
        format: Format,
        notes: Vec<String>,
        reader: VirtualFileReader,
        route: Route,
        concurrency: Concurrency,
    ) -> OpenCheckpoint {
        let origins = reader.virtual_file().origins().len();
        let files = (0..origins as u32).map(|n| reader.origins().file(OriginId(n)));
        let files: Box<[_]> = files.map(|file| file.map(FileReader::new)).collect();
        let preferred = files.iter().flatten().find_map(|file| file.preferred_requests());
        let concurrency = match preferred {
            Some(preferred) => concurrency.for_requests(preferred.max_count),
            None => concurrency,
        };
        OpenCheckpoint {
            path: path.to_path_buf(),
            format,
            route,
            notes,
            reader,
            files,
            buffers: BufferPool::default(),
            mappings: FileMappings::new(origins),
            name_index: OnceLock::new(),
            concurrency,
        }
    }

    /// The path that it was opened by.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The format of its files.
    pub fn format(&self) -> Format {
        self.format
    }

    /// How its bytes are reached.
    pub fn route(&self) -> &Route {
        &self.route
    }

    /// Whether reading it never waits for another program or machine.
    pub fn is_local(&self) -> bool {
        self.files.iter().flatten().all(FileReader::is_local)
    }

    /// Whether all of its files lie in stores.
    pub fn is_remote(&self) -> bool {
        let mut files = self.files.iter().flatten().peekable();
        files.peek().is_some() && files.all(FileReader::is_remote)
    }

    /// What was chosen and what was left out, in words.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// The checkpoint as one safetensors file.
    pub fn virtual_file(&self) -> &VirtualFile {
        self.reader.virtual_file()
    }

    /// The metadata of the checkpoint.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        self.virtual_file().metadata()
    }

    /// Its tensors, in the order in which reading them is fastest.
    pub fn tensors(&self) -> &[Tensor] {
        self.virtual_file().tensors()
    }

    /// Finds a tensor by name.
    pub fn tensor(&self, name: &str) -> Result<&Tensor, LoadError> {
        let tensors = self.tensors();
        let name_of = |index: usize| &*tensors[index].name;
        let names = self.name_index.get_or_init(|| {
            NameIndex::build(tensors.len(), name_of).expect("names are unique in a checkpoint")
        });
        let index = names.find(name, name_of).ok_or_else(|| self.unknown_tensor(name))?;
        Ok(&tensors[index])
    }

    /// A slice of a tensor, by steps of its first axes. Loading it reads little more than its own bytes.
    pub fn slice(&self, name: &str, axes: &[AxisSlice]) -> Result<Tensor, LoadError> {
        self.slice_of(self.tensor(name)?, axes)
    }

    /// A slice of a tensor of this checkpoint.
    pub fn slice_of(&self, tensor: &Tensor, axes: &[AxisSlice]) -> Result<Tensor, LoadError> {
        tensor.slice(axes).map_err(|error| LoadError::Slice {
            path: self.path.clone(),
            name: tensor.name.to_string(),
            error,
        })
    }

    /// Loads one tensor, or a slice of one.
    pub fn load(&self, tensor: &Tensor) -> Result<TensorBuffer, LoadError> {
        let (mut buffers, _) = self.load_owned(&[tensor], &NEVER_STOP, None)?;
        Ok(buffers.remove(0))
    }

    /// Loads tensors or slices, each into memory of its own.
    pub fn load_all<'a>(
        &self,
        tensors: impl IntoIterator<Item = &'a Tensor>,
    ) -> Result<Vec<TensorBuffer>, LoadError> {
        let tensors: Vec<&Tensor> = tensors.into_iter().collect();
        Ok(self.load_owned(&tensors, &NEVER_STOP, None)?.0)
    }

    /// Loads tensors or slices, each into memory of its own, until it is done or the caller sets `stop`.
    /// `threads` replaces the number that the checkpoint was opened with.
    pub fn load_owned(
        &self,
        tensors: &[&Tensor],
        stop: &AtomicBool,
        threads: Option<usize>,
    ) -> Result<(Vec<TensorBuffer>, LoadReport), LoadError> {
        let tensors: Vec<_> = tensors.iter().map(|tensor| (self, *tensor)).collect();
        load_many_owned(&tensors, BufferAlignment::default(), stop, threads)
    }

    /// Loads tensors or slices into memory of exactly their length. On error its contents are unspecified.
    pub fn load_into<'a>(
        &self,
        targets: impl IntoIterator<Item = (&'a Tensor, &'a mut [u8])>,
    ) -> Result<LoadReport, LoadError> {
        self.load_until(targets, &NEVER_STOP)
    }

    /// Like [`OpenCheckpoint::load_into`], until it is done or the caller sets `stop`.
    pub fn load_until<'a>(
        &self,
        targets: impl IntoIterator<Item = (&'a Tensor, &'a mut [u8])>,
        stop: &AtomicBool,
    ) -> Result<LoadReport, LoadError> {
        let requests = targets.into_iter().map(|(tensor, target)| LoadRequest {
            checkpoint: self,
            tensor,
            target,
        });
        load_many(requests, stop, None)
    }

    /// Loads tensors or slices in the order in which their bytes lie, and hands each out as soon as it is loaded.
    /// Meanwhile the next are read. Holds at most `limit_bytes` of them at once, those that `each` works on included.
    /// Ends when all were handed out, or `each` breaks.
    ///
    /// ```no_run
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use std::ops::ControlFlow;
    ///
    /// let model = ckptfs::open("models/llama".as_ref())?;
    /// let mut sum = 0u64;
    /// model.stream(model.tensors(), 1 << 30, |tensor, buffer| {
    ///     sum += buffer.iter().map(|&byte| u64::from(byte)).sum::<u64>();
    ///     println!("{}: {} bytes", tensor.name, buffer.len());
    ///     ControlFlow::Continue(())
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn stream<'a>(
        &self,
        tensors: impl IntoIterator<Item = &'a Tensor>,
        limit_bytes: u64,
        each: impl FnMut(&'a Tensor, TensorBuffer) -> ControlFlow<()>,
    ) -> Result<LoadReport, LoadError> {
        let load = |batch: &[&Tensor], stop: &AtomicBool| self.load_owned(batch, stop, None);
        stream(&self.path, tensors.into_iter().collect(), limit_bytes, load, each)
    }

    /// Maps the bytes of a tensor where they lie in its file, without reading them. Writes to the mapping never
    /// reach the file. A file that is truncated while its mapping is in use ends the process (SIGBUS). Not all
    /// tensors lie so that they can be mapped.
    pub fn map(&self, tensor: &Tensor) -> Result<Result<MappedTensor, MapRefusal>, LoadError> {
        Ok(self.mappings.map(self.reader.origins(), tensor)?)
    }

    /// Whether [`OpenCheckpoint::map`] asks no other program or machine whether the file has changed.
    pub fn maps_without_waiting(&self, tensor: &Tensor) -> bool {
        self.is_local() || self.mappings.is_mapped(tensor)
    }

    fn allocate(
        &self,
        tensor: &Tensor,
        alignment: BufferAlignment,
    ) -> Result<TensorBuffer, LoadError> {
        TensorBuffer::for_tensor(&tensor.bytes, alignment).ok_or_else(|| LoadError::OutOfMemory {
            path: self.path.clone(),
            bytes: tensor.bytes.len(),
        })
    }

    fn load_source(&self) -> LoadSource<'_> {
        LoadSource {
            path: &self.path,
            sources: self.reader.origins(),
            files: &self.files,
            tally: ByteTally::default(),
        }
    }

    fn unknown_tensor(&self, name: &str) -> LoadError {
        let names = self.tensors().iter().map(|tensor| &*tensor.name);
        let similarity = |other: &&str| common_affix_len(name, other);
        // A name that shares less than half with it is not similar.
        let similar = names.max_by_key(similarity);
        let similar = similar.filter(|other| similarity(other) * 2 >= name.len().max(1));
        let similar = similar.map(str::to_owned);
        LoadError::UnknownTensor { path: self.path.clone(), name: name.to_owned(), similar }
    }
}

impl fmt::Debug for OpenCheckpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let OpenCheckpoint { path, format, route, .. } = self;
        let mut shown = f.debug_struct("OpenCheckpoint");
        shown.field("path", path).field("format", format).field("route", route);
        shown.field("tensors", &self.tensors().len()).finish_non_exhaustive()
    }
}

/// The length of the longer of the common prefix and the common suffix.
fn common_affix_len(a: &str, b: &str) -> usize {
    let is_same = |(a, b): &(u8, u8)| a == b;
    let suffix = a.bytes().rev().zip(b.bytes().rev()).take_while(is_same).count();
    a.bytes().zip(b.bytes()).take_while(is_same).count().max(suffix)
}

/// A tensor or a slice to load, and its target.
#[derive(Debug)]
pub struct LoadRequest<'a> {
    /// The checkpoint that has the tensor.
    pub checkpoint: &'a OpenCheckpoint,
    /// The tensor, or a slice of one.
    pub tensor: &'a Tensor,
    /// Memory of exactly the tensor's length.
    pub target: &'a mut [u8],
}

/// Loads tensors of any number of checkpoints, one checkpoint after the other and each in the order in which its
/// bytes lie. Ends when it is done or the caller sets `stop`. `threads` replaces the number that the first was
/// opened with. On error the targets' contents are unspecified.
///
/// ```no_run
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use ckptfs::loader::{LoadRequest, load_many};
///
/// let parts = ["pipeline/unet", "pipeline/vae"].map(|path| ckptfs::open(path.as_ref()));
/// let parts = parts.into_iter().collect::<Result<Vec<_>, _>>()?;
/// let all = || parts.iter().flat_map(|part| part.tensors().iter().map(move |tensor| (part, tensor)));
/// let mut memory: Vec<Vec<u8>> = all().map(|(_, t)| vec![0; t.bytes.len() as usize]).collect();
/// let requests = all()
///     .zip(&mut memory)
///     .map(|((checkpoint, tensor), target)| LoadRequest { checkpoint, tensor, target });
/// let report = load_many(requests, &false.into(), None)?;
/// # Ok(())
/// # }
/// ```
pub fn load_many<'a>(
    requests: impl IntoIterator<Item = LoadRequest<'a>>,
    stop: &AtomicBool,
    threads: Option<usize>,
) -> Result<LoadReport, LoadError> {
    let mut requests = requests.into_iter().peekable();
    let Some(LoadRequest { checkpoint, .. }) = requests.peek() else {
        return Ok(LoadReport::default());
    };
    let sink = &checkpoint.buffers;
    let requests = requests.map(|LoadRequest { checkpoint, tensor, target }| SinkRequest {
        checkpoint,
        tensor,
        bytes: &tensor.bytes,
        target: HostTarget::new(target),
    });
    load_with_sink(requests, sink, stop, threads)
}

/// A tensor to load through a sink, and its target.
pub struct SinkRequest<'a, T> {
    pub checkpoint: &'a OpenCheckpoint,
    pub tensor: &'a Tensor,
    /// The bytes of the tensor, or of its values before a cast that the sink does.
    pub bytes: &'a TensorBytes,
    /// As long as the bytes.
    pub target: T,
}

/// Like [`load_many`], through a sink that knows the targets.
pub fn load_with_sink<'a, T: Target + Send>(
    requests: impl IntoIterator<Item = SinkRequest<'a, T>>,
    sink: &impl Sink<T>,
    stop: &AtomicBool,
    threads: Option<usize>,
) -> Result<LoadReport, LoadError> {
    let started = Instant::now();
    let mut checkpoints: Vec<(&OpenCheckpoint, usize)> = Vec::new();
    let mut numbers = HashMap::new();
    let (mut items, mut total_bytes) = (Vec::new(), 0);
    for SinkRequest { checkpoint, tensor, bytes, target } in requests {
        let (needed, provided) = (bytes.len(), target.len());
        if needed != provided {
            let (path, name) = (checkpoint.path.clone(), tensor.name.to_string());
            return Err(LoadError::TargetLength { path, name, needed, provided });
        }
        let number = *numbers.entry(std::ptr::from_ref(checkpoint)).or_insert_with(|| {
            checkpoints.push((checkpoint, 0));
            checkpoints.len() - 1
        });
        total_bytes += tensor.bytes.len();
        checkpoints[number].1 += 1;
        items.push(PlanItem { checkpoint: number, bytes, offset: 0, target });
    }
    let Some((first, _)) = checkpoints.first() else { return Ok(LoadReport::default()) };
    let context = LoadContext { concurrency: first.concurrency.with_threads(threads), sink, stop };
    let sources: Vec<LoadSource<'_>> =
        checkpoints.iter().map(|(checkpoint, _)| checkpoint.load_source()).collect();
    let policy = |number: usize| split_policy(checkpoints[number].0.is_remote(), sink);
    execute(&sources, plan_jobs(items, policy), &context)?;
    let seconds = started.elapsed().as_secs_f64();
    let mut report = LoadReport { bytes: total_bytes, seconds, ..LoadReport::default() };
    for ((checkpoint, tensors), source) in checkpoints.into_iter().zip(sources) {
        report.add_checkpoint(tensors, &source.tally, checkpoint.route.fallback());
    }
    Ok(report)
}

/// Where extents of a checkpoint end. Those of stores are larger than what is read of a local file at once.
fn split_policy<T, S: Sink<T>>(is_remote: bool, _sink: &S) -> SplitPolicy {
    if is_remote && S::IS_HOST_MEMORY { SplitPolicy::REMOTE } else { SplitPolicy::LOCAL }
}

/// Like [`load_many`], each tensor into memory of its own.
pub fn load_many_owned(
    tensors: &[(&OpenCheckpoint, &Tensor)],
    alignment: BufferAlignment,
    stop: &AtomicBool,
    threads: Option<usize>,
) -> Result<(Vec<TensorBuffer>, LoadReport), LoadError> {
    let buffers = tensors.iter().map(|(checkpoint, tensor)| checkpoint.allocate(tensor, alignment));
    let mut buffers = buffers.collect::<Result<Vec<_>, _>>()?;
    let Some((first, _)) = tensors.first() else { return Ok(Default::default()) };
    let requests =
        tensors.iter().zip(&mut buffers).map(|(&(checkpoint, tensor), buffer)| SinkRequest {
            checkpoint,
            tensor,
            bytes: &tensor.bytes,
            target: HostTarget::for_new_buffer(buffer),
        });
    let report = load_with_sink(requests, &first.buffers, stop, threads)?;
    buffers.iter().for_each(TensorBuffer::advise_huge_pages);
    Ok((buffers, report))
}
