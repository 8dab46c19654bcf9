//! A virtual file as a directory shows it, without its header in memory.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, Weak};

use crate::checkpoint::{self, Checkpoint, CheckpointError, Format, ParseOptions, SelectError};
use crate::recipe::RecipeFile;
use crate::source::{FileMetadata, SourceError, SourceFile};
use crate::threads::lock;
use crate::virtual_file::{Digest, VirtualFile};

use super::context::ViewContext;
use super::error::{Refusal, ViewError};
use super::recipe_open::open_recipe_plan;
use super::rules::{PlanSource, VirtualFilePlan};
use super::virtual_index;

/// What is known of a virtual file without holding it.
#[derive(Debug)]
pub struct VirtualFileSummary {
    /// The directory's path from the root.
    directory: PathBuf,
    plan: VirtualFilePlan,
    options: ParseOptions,
    size: u64,
    /// Bytes of the index that names the virtual file, where there is one.
    index_size: u64,
    /// The configuration that a recipe shows beside it.
    config: Option<Arc<[u8]>>,
    identity: Digest,
    layout_hash: Digest,
    tensors: usize,
    format: Format,
    notes: Vec<String>,
    /// Why a newer version is not shown.
    withheld: Option<Arc<Refusal>>,
    /// The source file on this machine that the virtual file equals byte for byte, if there is one.
    identical_source: Option<Arc<SourceFile>>,
    /// Whether every change to its files since they were read shows in their states.
    is_settled: bool,
    virtual_file: Mutex<Weak<VirtualFile>>,
}

/// A virtual file as it is shown now, or the index that names it.
#[derive(Clone, Debug)]
pub struct ShownFile {
    summary: Arc<VirtualFileSummary>,
    metadata: Arc<FileMetadata>,
    content: ShownContent,
}

/// What a shown file holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ShownContent {
    Tensors,
    /// The index that names the virtual file.
    Index,
    /// The configuration of a recipe.
    Config,
}

impl VirtualFileSummary {
    /// Reads what is planned, and keeps the virtual file for the next open if its files are settled.
    pub fn read(
        context: &ViewContext,
        directory: &Path,
        plan: &VirtualFilePlan,
        is_settled: bool,
    ) -> Result<VirtualFileSummary, ViewError> {
        let (mut checkpoint, withheld) = parse(context, directory, plan, &context.options.parse)?;
        let mut notes = std::mem::take(&mut checkpoint.obvious_choices);
        notes.append(&mut checkpoint.notes);
        notes.extend(checkpoint.refused.iter().map(|entry| format!("left out: {entry}")));
        let Checkpoint { format, options, .. } = &checkpoint;
        let (format, options) = (*format, options.clone());
        let file = Arc::new(VirtualFile::new(checkpoint)?);
        let config = match plan.recipe() {
            Some(recipe) => recipe.config_text(&context.root, &context.base)?.map(Arc::from),
            None => None,
        };
        let index_size = match plan.index_name() {
            Some(_) => virtual_index::index_json(&file, &plan.name).len() as u64,
            None => 0,
        };
        if is_settled {
            context.virtual_files.insert(&file);
        }
        Ok(VirtualFileSummary {
            directory: directory.to_path_buf(),
            plan: plan.clone(),
            options,
            size: file.size(),
            index_size,
            config,
            identity: file.identity(),
            layout_hash: file.layout_hash(),
            tensors: file.tensors().len(),
            format,
            notes,
            withheld: withheld
                .map(|error| Arc::new(Refusal::new(plan.original_names(), &error.into()))),
            identical_source: file.identical_source().filter(|file| !file.is_remote()).cloned(),
            is_settled,
            virtual_file: Mutex::new(Arc::downgrade(&file)),
        })
    }

    pub fn size(&self) -> u64 {
        self.size
    }

    pub fn identity(&self) -> Digest {
        self.identity
    }

    /// What was chosen and left out.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Why a newer version of its chain is not shown.
    pub fn withheld(&self) -> Option<&Arc<Refusal>> {
        self.withheld.as_ref()
    }

    /// The virtual file: that which is open, a cached one, or one that is read again.
    fn virtual_file(&self, context: &ViewContext) -> Result<Arc<VirtualFile>, ViewError> {
        let known = || {
            let open = lock(&self.virtual_file).upgrade();
            open.or_else(|| context.virtual_files.get(self.identity))
        };
        if let Some(file) = self.is_settled.then(known).flatten() {
            return Ok(file);
        }
        let (checkpoint, _) = parse(context, &self.directory, &self.plan, &self.options)?;
        let file = Arc::new(VirtualFile::new(checkpoint)?);
        if file.identity() != self.identity {
            let path = context.root.shown_path(&self.source());
            return Err(SourceError::changed(path).into());
        }
        if !self.is_settled {
            return Ok(file);
        }
        let mut open = lock(&self.virtual_file);
        // Another thread may have read it meanwhile; one is enough.
        let file = open.upgrade().unwrap_or(file);
        *open = Arc::downgrade(&file);
        drop(open);
        context.virtual_files.insert(&file);
        Ok(file)
    }

    fn source(&self) -> PathBuf {
        self.directory.join(self.plan.source_name())
    }
}

fn parse(
    context: &ViewContext,
    directory: &Path,
    plan: &VirtualFilePlan,
    options: &ParseOptions,
) -> Result<(Checkpoint, Option<CheckpointError>), ViewError> {
    let parse = |options: &ParseOptions| match &plan.source {
        PlanSource::Candidate(candidate) => {
            Ok((checkpoint::open_candidate(&context.root, directory, candidate, options)?, None))
        }
        PlanSource::Recipe(recipe) => {
            let opened = open_recipe_plan(&context.root, &context.base, recipe, options)?;
            Ok((opened.checkpoint, opened.withheld))
        }
    };
    match parse(options) {
        // Of a directory, the key is for those checkpoints that have it.
        Err(ViewError::Checkpoint(CheckpointError::Selection {
            error: SelectError::NoSuchKey { key, .. },
            ..
        })) if context.target.is_none() => {
            let (mut checkpoint, withheld) = parse(&options.without_root_key())?;
            checkpoint.notes.push(format!("has no `{key}`: shown by the default rules instead"));
            Ok((checkpoint, withheld))
        }
        parsed => parsed,
    }
}

impl ShownFile {
    /// A virtual file with the present metadata of its sources.
    pub fn new(summary: &Arc<VirtualFileSummary>, metadata: Arc<FileMetadata>) -> ShownFile {
        ShownFile { summary: Arc::clone(summary), metadata, content: ShownContent::Tensors }
    }

    /// The index that names this virtual file.
    pub fn into_index(self) -> ShownFile {
        let metadata = Arc::new(with_size(*self.metadata, self.summary.index_size));
        ShownFile { metadata, content: ShownContent::Index, ..self }
    }

    /// The configuration that its recipe shows beside it, if there is one.
    pub fn into_config(self) -> Option<ShownFile> {
        let size = self.summary.config.as_ref()?.len() as u64;
        let metadata = Arc::new(with_size(*self.metadata, size));
        Some(ShownFile { metadata, content: ShownContent::Config, ..self })
    }

    /// Mode, owner, size and times.
    pub fn metadata(&self) -> &FileMetadata {
        &self.metadata
    }

    /// A hash of the sources' states and the options: another hash is another file.
    pub fn identity(&self) -> Digest {
        match (self.content, &self.summary.config) {
            (ShownContent::Config, Some(text)) => Digest::compute(text),
            _ => self.summary.identity,
        }
    }

    /// A hash of the header.
    pub fn layout_hash(&self) -> Digest {
        self.summary.layout_hash
    }

    /// The source file on this machine that it equals byte for byte, if there is one.
    pub fn identical_source(&self) -> Option<&Arc<SourceFile>> {
        self.summary.identical_source.as_ref().filter(|_| !self.is_written())
    }

    /// The number of tensors.
    pub fn tensors(&self) -> usize {
        self.summary.tensors
    }

    /// The format of the sources.
    pub fn format(&self) -> Format {
        self.summary.format
    }

    /// The options that the sources were read with.
    pub fn options(&self) -> &ParseOptions {
        &self.summary.options
    }

    /// Whether every change to the sources since they were read shows in their states. If not, bytes that were
    /// read before an open may be older than what the open must show.
    pub fn is_settled(&self) -> bool {
        self.summary.is_settled
    }

    /// What was chosen and left out.
    pub fn notes(&self) -> &[String] {
        &self.summary.notes
    }

    /// The names of the files that it takes the place of.
    pub fn originals(&self) -> Vec<String> {
        self.summary.plan.original_names()
    }

    /// The path from the root to the source: its file, its index, or a numbered set's name.
    pub fn source(&self) -> PathBuf {
        self.summary.source()
    }

    /// Whether this is the index that names the virtual file, and not the virtual file.
    pub fn is_index(&self) -> bool {
        self.content == ShownContent::Index
    }

    /// Whether this is text that the view writes, an index or a configuration, and not the virtual file.
    pub fn is_written(&self) -> bool {
        self.content != ShownContent::Tensors
    }

    /// Whether its name shows each new version of a chain.
    pub fn follows_versions(&self) -> bool {
        self.recipe().is_some_and(|recipe| recipe.versions.is_some())
    }

    /// The file of a recipe that it is made by, if any.
    pub fn recipe(&self) -> Option<&RecipeFile> {
        Some(&self.summary.plan.recipe()?.file)
    }

    /// The virtual file itself: remembered, or made again.
    pub(super) fn virtual_file(
        &self,
        context: &ViewContext,
    ) -> Result<Arc<VirtualFile>, ViewError> {
        if let (ShownContent::Config, Some(text)) = (self.content, &self.summary.config) {
            return Ok(Arc::new(VirtualFile::from_bytes(text.to_vec())));
        }
        let file = self.summary.virtual_file(context)?;
        if self.is_index() {
            let text = virtual_index::index_json(&file, &self.summary.plan.name);
            return Ok(Arc::new(VirtualFile::from_bytes(text)));
        }
        Ok(file)
    }
}

/// The metadata of a file of another size.
pub fn with_size(mut metadata: FileMetadata, size: u64) -> FileMetadata {
    metadata.size = size;
    metadata.blocks = size.div_ceil(512);
    metadata
}
