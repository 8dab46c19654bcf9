//! A checkpoint that is open for loading.

use std::collections::btree_map::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::AtomicBool;

use crate::checkpoint::{Format, Places, Steps, Tensor};
use crate::image::{Image, Reader};
use crate::source::Ways;

use super::execute::{self, BUFFER, From, How, Tally};
use super::memory::{Buffers, Memory};
use super::mmap::{Mapped, Maps, Unmappable};
use super::report::Report;
use super::{Error, Options, Route, Wanted, load_many, load_many_owned};

static NEVER: AtomicBool = AtomicBool::new(false);

/// A checkpoint whose files are open. Any number of threads load from it at once.
pub struct Opened {
    path: PathBuf,
    format: Format,
    route: Route,
    notes: Vec<String>,
    reader: Reader,
    ways: Box<[Option<Ways>]>,
    buffers: Buffers,
    maps: Maps,
    places: OnceLock<Places>,
    how: How,
}

impl Opened {
    pub(super) fn new(
        path: &Path,
        format: Format,
        notes: Vec<String>,
        reader: Reader,
        route: Route,
        options: &Options,
    ) -> Opened {
        let ways = execute::ways(reader.sources(), reader.image().origins().len() as u32);
        let maps = Maps::of(reader.image().origins().len());
        Opened {
            path: path.to_path_buf(),
            format,
            route,
            notes,
            reader,
            ways,
            buffers: Buffers::new(BUFFER),
            maps,
            places: OnceLock::new(),
            how: options.how(),
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
        self.ways.iter().flatten().all(Ways::is_local)
    }

    /// What was chosen and what was left out, in words.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// The checkpoint as one safetensors file.
    pub fn image(&self) -> &Image {
        self.reader.image()
    }

    /// What the checkpoint says of itself.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        self.image().metadata()
    }

    /// Its tensors, in the order in which reading them is fastest.
    pub fn tensors(&self) -> &[Tensor] {
        self.image().tensors()
    }

    /// The tensor of a name.
    pub fn tensor(&self, name: &str) -> Result<&Tensor, Error> {
        let tensors = self.tensors();
        let name_of = |place: usize| &*tensors[place].name;
        let places = self.places.get_or_init(|| {
            Places::of(tensors.len(), name_of).expect("names are unique in a checkpoint")
        });
        let place = places.find(name, name_of).ok_or_else(|| self.unknown(name))?;
        Ok(&tensors[place])
    }

    /// A part of a tensor: the named steps of its first axes. Loading it reads little more than its
    /// own bytes.
    pub fn part(&self, name: &str, steps: &[Steps]) -> Result<Tensor, Error> {
        self.part_of(self.tensor(name)?, steps)
    }

    /// The same of a tensor at hand.
    pub fn part_of(&self, tensor: &Tensor, steps: &[Steps]) -> Result<Tensor, Error> {
        tensor.part(steps).map_err(|fault| Error::Part {
            path: self.path.clone(),
            name: tensor.name.to_string(),
            fault,
        })
    }

    /// Loads one tensor, or part of one.
    pub fn load(&self, tensor: &Tensor) -> Result<Memory, Error> {
        let mut memory = self.memory(tensor)?;
        self.load_into([(tensor, &mut memory[..])])?;
        Ok(memory)
    }

    /// Loads tensors, or parts of tensors, each into memory of its own.
    pub fn load_all<'a>(
        &self,
        tensors: impl IntoIterator<Item = &'a Tensor>,
    ) -> Result<Vec<Memory>, Error> {
        let tensors: Vec<&Tensor> = tensors.into_iter().collect();
        Ok(self.load_owned(&tensors, &NEVER, None)?.0)
    }

    /// The same, until it is done or whoever wants it sets `stop`, on so many threads at the most if they
    /// are said; and what that did.
    pub fn load_owned(
        &self,
        tensors: &[&Tensor],
        stop: &AtomicBool,
        threads: Option<usize>,
    ) -> Result<(Vec<Memory>, Report), Error> {
        let tensors: Vec<_> = tensors.iter().map(|tensor| (self, *tensor)).collect();
        load_many_owned(&tensors, stop, threads)
    }

    /// Loads tensors, or parts of tensors, into memory of exactly their length. After an error what is
    /// there is of no worth.
    pub fn load_into<'a>(
        &self,
        wanted: impl IntoIterator<Item = (&'a Tensor, &'a mut [u8])>,
    ) -> Result<Report, Error> {
        self.load_until(wanted, &NEVER)
    }

    /// The same, until it is done or whoever wants it sets `stop`.
    pub fn load_until<'a>(
        &self,
        wanted: impl IntoIterator<Item = (&'a Tensor, &'a mut [u8])>,
        stop: &AtomicBool,
    ) -> Result<Report, Error> {
        let wanted = wanted.into_iter().map(|(tensor, target)| Wanted { of: self, tensor, target });
        load_many(wanted, stop, None)
    }

    /// The bytes of a tensor where they lie in its file, without reading them: in memory that may be
    /// written, and whose writes never reach the file. A file that is truncated while this is in use
    /// ends the process (SIGBUS). Not all tensors lie so that this can be.
    pub fn map(&self, tensor: &Tensor) -> Result<Result<Mapped, Unmappable>, Error> {
        Ok(self.maps.map(self.reader.sources(), tensor)?)
    }

    /// Whether [`Opened::map`] asks no other program or machine whether the file is what it was.
    pub fn maps_at_once(&self, tensor: &Tensor) -> bool {
        self.is_local() || self.maps.has(tensor)
    }

    pub(super) fn memory(&self, tensor: &Tensor) -> Result<Memory, Error> {
        let bytes = tensor.bytes.len();
        let memory = usize::try_from(bytes).ok().and_then(Memory::new);
        memory.ok_or_else(|| Error::Memory { path: self.path.clone(), bytes })
    }

    pub(super) fn how(&self) -> How {
        self.how
    }

    pub(super) fn buffers(&self) -> &Buffers {
        &self.buffers
    }

    /// What a load of it reads from.
    pub(super) fn from(&self) -> From<'_> {
        let (path, sources) = (&*self.path, self.reader.sources());
        From { path, sources, ways: &self.ways, tally: Tally::default() }
    }

    fn unknown(&self, name: &str) -> Error {
        let names = self.tensors().iter().map(|tensor| &*tensor.name);
        let alike = |other: &&str| common(name, other);
        // Of names that share nothing with it none is near.
        let near = names.max_by_key(alike).filter(|near| alike(near) * 2 >= name.len().max(1));
        let near = near.map(str::to_owned);
        Error::Unknown { path: self.path.clone(), name: name.to_owned(), near }
    }
}

impl fmt::Debug for Opened {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Opened { path, format, route, .. } = self;
        let mut shown = f.debug_struct("Opened");
        shown.field("path", path).field("format", format).field("route", route);
        shown.field("tensors", &self.tensors().len()).finish_non_exhaustive()
    }
}

/// Bytes at which two names begin or end alike.
fn common(a: &str, b: &str) -> usize {
    let same = |(a, b): &(u8, u8)| a == b;
    let ends = a.bytes().rev().zip(b.bytes().rev()).take_while(same).count();
    a.bytes().zip(b.bytes()).take_while(same).count().max(ends)
}
