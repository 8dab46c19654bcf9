//! A checkpoint that is open for loading.

use std::collections::btree_map::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::AtomicBool;

use crate::checkpoint::{AxisSlice, Format, NameIndex, Tensor};
use crate::source::ReadStrategy;
use crate::virtual_file::{VirtualFile, VirtualFileReader};

use super::execute::{self, BUFFER_BYTES, ByteTally, Concurrency, LoadSource};
use super::memory::{BufferPool, TensorBuffer};
use super::mmap::{FileMappings, MapRefusal, MappedTensor};
use super::report::LoadReport;
use super::{LoadError, LoadOptions, LoadRequest, Route, load_many, load_many_owned};

static NEVER_STOP: AtomicBool = AtomicBool::new(false);

/// A checkpoint whose files are open. Any number of threads load from it at once.
pub struct OpenCheckpoint {
    path: PathBuf,
    format: Format,
    route: Route,
    notes: Vec<String>,
    reader: VirtualFileReader,
    strategies: Box<[Option<ReadStrategy>]>,
    buffers: BufferPool,
    maps: FileMappings,
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
        options: &LoadOptions,
    ) -> OpenCheckpoint {
        let ways = execute::read_strategies(
            reader.sources(),
            reader.virtual_file().origins().len() as u32,
        );
        let maps = FileMappings::new(reader.virtual_file().origins().len());
        OpenCheckpoint {
            path: path.to_path_buf(),
            format,
            route,
            notes,
            reader,
            strategies: ways,
            buffers: BufferPool::new(BUFFER_BYTES),
            maps,
            name_index: OnceLock::new(),
            concurrency: options.concurrency(),
        }
    }

    /// The path as it was asked for.
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
        self.strategies.iter().flatten().all(ReadStrategy::is_local)
    }

    /// What was chosen and what was left out, in words.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// The checkpoint as one safetensors file.
    pub fn virtual_file(&self) -> &VirtualFile {
        self.reader.virtual_file()
    }

    /// What the checkpoint says of itself.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        self.virtual_file().metadata()
    }

    /// Its tensors, in the order in which reading them is fastest.
    pub fn tensors(&self) -> &[Tensor] {
        self.virtual_file().tensors()
    }

    /// The tensor of a name.
    pub fn tensor(&self, name: &str) -> Result<&Tensor, LoadError> {
        let tensors = self.tensors();
        let name_of = |place: usize| &*tensors[place].name;
        let places = self.name_index.get_or_init(|| {
            NameIndex::build(tensors.len(), name_of).expect("names are unique in a checkpoint")
        });
        let place = places.find(name, name_of).ok_or_else(|| self.unknown_tensor(name))?;
        Ok(&tensors[place])
    }

    /// A part of a tensor: the named steps of its first axes. Loading it reads little more than its
    /// own bytes.
    pub fn slice(&self, name: &str, steps: &[AxisSlice]) -> Result<Tensor, LoadError> {
        self.slice_of(self.tensor(name)?, steps)
    }

    /// The same of a tensor at hand.
    pub fn slice_of(&self, tensor: &Tensor, steps: &[AxisSlice]) -> Result<Tensor, LoadError> {
        tensor.slice(steps).map_err(|fault| LoadError::Slice {
            path: self.path.clone(),
            name: tensor.name.to_string(),
            fault,
        })
    }

    /// Loads one tensor, or part of one.
    pub fn load(&self, tensor: &Tensor) -> Result<TensorBuffer, LoadError> {
        let mut memory = self.allocate(tensor)?;
        self.load_into([(tensor, &mut memory[..])])?;
        Ok(memory)
    }

    /// Loads tensors, or parts of tensors, each into memory of its own.
    pub fn load_all<'a>(
        &self,
        tensors: impl IntoIterator<Item = &'a Tensor>,
    ) -> Result<Vec<TensorBuffer>, LoadError> {
        let tensors: Vec<&Tensor> = tensors.into_iter().collect();
        Ok(self.load_owned(&tensors, &NEVER_STOP, None)?.0)
    }

    /// The same, until it is done or whoever wants it sets `stop`, on so many threads at the most if they
    /// are said; and what that did.
    pub fn load_owned(
        &self,
        tensors: &[&Tensor],
        stop: &AtomicBool,
        threads: Option<usize>,
    ) -> Result<(Vec<TensorBuffer>, LoadReport), LoadError> {
        let tensors: Vec<_> = tensors.iter().map(|tensor| (self, *tensor)).collect();
        load_many_owned(&tensors, stop, threads)
    }

    /// Loads tensors, or parts of tensors, into memory of exactly their length. After an error what is
    /// there is of no worth.
    pub fn load_into<'a>(
        &self,
        wanted: impl IntoIterator<Item = (&'a Tensor, &'a mut [u8])>,
    ) -> Result<LoadReport, LoadError> {
        self.load_until(wanted, &NEVER_STOP)
    }

    /// The same, until it is done or whoever wants it sets `stop`.
    pub fn load_until<'a>(
        &self,
        wanted: impl IntoIterator<Item = (&'a Tensor, &'a mut [u8])>,
        stop: &AtomicBool,
    ) -> Result<LoadReport, LoadError> {
        let wanted = wanted.into_iter().map(|(tensor, target)| LoadRequest {
            checkpoint: self,
            tensor,
            target,
        });
        load_many(wanted, stop, None)
    }

    /// The bytes of a tensor where they lie in its file, without reading them: in memory that may be
    /// written, and whose writes never reach the file. A file that is truncated while this is in use
    /// ends the process (SIGBUS). Not all tensors lie so that this can be.
    pub fn map(&self, tensor: &Tensor) -> Result<Result<MappedTensor, MapRefusal>, LoadError> {
        Ok(self.maps.map(self.reader.sources(), tensor)?)
    }

    /// Whether [`OpenCheckpoint::map`] asks no other program or machine whether the file is what it was.
    pub fn maps_without_waiting(&self, tensor: &Tensor) -> bool {
        self.is_local() || self.maps.is_mapped(tensor)
    }

    pub(super) fn allocate(&self, tensor: &Tensor) -> Result<TensorBuffer, LoadError> {
        let bytes = tensor.bytes.len();
        let memory = usize::try_from(bytes).ok().and_then(TensorBuffer::new);
        memory.ok_or_else(|| LoadError::OutOfMemory { path: self.path.clone(), bytes })
    }

    pub(super) fn concurrency(&self) -> Concurrency {
        self.concurrency
    }

    pub(super) fn buffers(&self) -> &BufferPool {
        &self.buffers
    }

    /// What a load of it reads from.
    pub(super) fn load_source(&self) -> LoadSource<'_> {
        let (path, sources) = (&*self.path, self.reader.sources());
        LoadSource { path, sources, strategies: &self.strategies, tally: ByteTally::default() }
    }

    fn unknown_tensor(&self, name: &str) -> LoadError {
        let names = self.tensors().iter().map(|tensor| &*tensor.name);
        let alike = |other: &&str| common_affix_len(name, other);
        // Of names that share nothing with it none is near.
        let near = names.max_by_key(alike).filter(|near| alike(near) * 2 >= name.len().max(1));
        let near = near.map(str::to_owned);
        LoadError::UnknownTensor { path: self.path.clone(), name: name.to_owned(), near }
    }
}

impl fmt::Debug for OpenCheckpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let OpenCheckpoint { path, format, route, .. } = self;
        let mut shown = f.debug_struct("Opened");
        shown.field("path", path).field("format", format).field("route", route);
        shown.field("tensors", &self.tensors().len()).finish_non_exhaustive()
    }
}

/// Bytes at which two names begin or end alike.
fn common_affix_len(a: &str, b: &str) -> usize {
    let same = |(a, b): &(u8, u8)| a == b;
    let ends = a.bytes().rev().zip(b.bytes().rev()).take_while(same).count();
    a.bytes().zip(b.bytes()).take_while(same).count().max(ends)
}
