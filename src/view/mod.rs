//! What a directory shows: virtual files in the place of checkpoints, everything else as it is.
//!
//! Nothing is read before it is asked for. A checkpoint is parsed once: when its directory is first listed, or
//! one of its names looked up. It is parsed again when its files have changed, which every look at it finds out.
//!
//! From the ground up: `rules` decides by names, and `directory_plan` applies that to a directory. `planned_file`
//! parses one checkpoint; `directory` and `directory_query` hold those of a directory, `directory_store` all
//! directories. `lookup` says what each name stands for. How a virtual file is read is not known here.

mod base_links;
mod config_json;
mod context;
mod directory;
mod directory_plan;
mod directory_query;
mod directory_store;
mod entry;
mod error;
mod hf_cache;
mod lookup;
mod names;
mod near_misses;
mod options;
mod planned_file;
mod recipe_open;
mod recipe_plan;
mod recipe_store;
mod relative_path;
mod rules;
mod safetensors_headers;
mod shown_file;
mod single_target;
mod survey;
mod symlinks;
mod virtual_file_cache;
mod virtual_index;
mod walk;

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use crate::recipe::RecipeFile;
use crate::source::{self, FileKind, FileMetadata, LinkPolicy, OpenFile, Root, SourceError};
use crate::virtual_file::VirtualFile;

use context::ViewContext;
use directory_plan::SingleTarget;
use directory_query::QueryError;
use directory_store::DirectoryStore;
pub use entry::{CheckpointCounts, ListedEntry, Listing, NamedEntry, ViewEntry};
pub use error::{RecipeFault, Refusal, RefusedView, ViewError};
use lookup::Lookup;
pub use names::SortedNames;
pub use options::{KeepPatternError, KeepRules, RecipeSource, ViewOptions};
pub use recipe_open::{open_recipe_file, open_shown};
pub use rules::virtual_file_name;
pub use safetensors_headers::SafetensorsHeader;
pub use shown_file::ShownFile;
pub use single_target::open;
pub use survey::Survey;
pub use walk::walk;

/// The view of a directory and all beneath it.
#[derive(Debug)]
pub struct View {
    directories: DirectoryStore,
}

impl View {
    /// The view of what a path names: a directory, or a single checkpoint, which is then shown alone.
    pub fn new(path: &Path, options: ViewOptions) -> Result<View, ViewError> {
        View::with_cache(path, options, 0)
    }

    /// The same with `cache_bytes` for virtual files that are not open, and about as many again for directories.
    pub fn with_cache(
        path: &Path,
        options: ViewOptions,
        cache_bytes: u64,
    ) -> Result<View, ViewError> {
        let links = options.parse.link_policy();
        let is_directory = match source::is_directory(path) {
            // A numbered set is called by a name that no file has.
            Err(SourceError::Missing { .. }) => false,
            is_directory => is_directory?,
        };
        let (root, base, target) = if is_directory {
            let (root, base) = Root::for_directory(path, links)?;
            (root, base, None)
        } else {
            let (parent, name) = source::split_parent(path)?;
            // The error is about the path that the user typed.
            let whole_path = |error| match error {
                SourceError::Missing { .. } => SourceError::Missing { path: path.to_path_buf() },
                error => error,
            };
            let (root, base) = Root::for_directory(&parent, links).map_err(whole_path)?;
            let target = single_target::resolve(&root, &base, &name, &options.keep);
            match target.map_err(|error| error.with_typed_path(path))? {
                // Where the links of a typed path lead is for the user to say.
                target @ SingleTarget::File(_) => {
                    let (root, base) = Root::for_directory(&parent, LinkPolicy::Anywhere)?;
                    (root, base, Some(target))
                }
                target @ SingleTarget::Files(_) => (root, base, Some(target)),
            }
        };
        let is_single = target.is_some();
        let context = ViewContext::new(root, base, target, options, cache_bytes);
        let view = View { directories: DirectoryStore::new(context, cache_bytes) };
        if is_single {
            let listing = view.list(Path::new(""))?;
            if let Some(refusal) = listing.refused.into_iter().next() {
                return Err(ViewError::Refused(refusal));
            }
        }
        Ok(view)
    }

    /// The root beneath which everything is opened.
    pub fn root(&self) -> &Arc<Root> {
        &self.context().root
    }

    /// Whether it shows a single checkpoint, and not a directory.
    pub fn is_single(&self) -> bool {
        self.context().target.is_some()
    }

    /// The options that the view was made with.
    pub fn options(&self) -> &ViewOptions {
        &self.context().options
    }

    /// The path from the root to a path in the view.
    pub fn source_path(&self, path: &Path) -> PathBuf {
        self.context().source_path(path)
    }

    /// The metadata of the file or directory at a path, links followed. A directory's time is its source's, or
    /// later where what it shows has changed without that.
    pub fn metadata(&self, path: &Path) -> Result<FileMetadata, ViewError> {
        let path = self.source_path(path);
        Ok(self.directories.with_change_time(&path, self.context().metadata(&path)?))
    }

    /// The metadata of the root of a store as it was last seen; `None` for any other source. Sends no request: the
    /// kernel looks up the root even before reads that need no source, such as those of statistics.
    pub fn known_store_root(&self) -> Option<FileMetadata> {
        let root = self.source_path(Path::new(""));
        if self.root().descriptor().is_some() {
            return None;
        }
        let metadata = self.root().cached_metadata(&root).ok()?;
        let is_directory = metadata.kind == FileKind::Directory;
        is_directory.then(|| self.directories.with_known_change_time(&root, metadata))
    }

    /// What a name in a directory stands for; `None` if it is not shown.
    pub fn lookup(&self, directory: &Path, name: &OsStr) -> Result<Option<ViewEntry>, ViewError> {
        self.query(directory, |lookup| lookup.entry(name))
    }

    /// Invalidates what is known of a path, after it did not hold when the path was opened. The next lookup
    /// finds what is there then.
    pub fn invalidate(&self, path: &Path) {
        if let (Some(parent), Some(name)) = (path.parent(), path.file_name()) {
            self.directories.invalidate(&self.source_path(parent), name);
        }
    }

    /// Lists a directory. All its checkpoints are parsed for it, several at once.
    pub fn list(&self, directory: &Path) -> Result<Listing, ViewError> {
        self.query(directory, |lookup| lookup.list())
    }

    /// The names that a directory shows. Parses all its checkpoints, several at once.
    pub fn names(&self, directory: &Path) -> Result<SortedNames, ViewError> {
        self.query(directory, |lookup| lookup.shown_names())
    }

    /// What some names of a directory stand for, in their order.
    pub fn list_entries<'a>(
        &self,
        directory: &Path,
        names: impl Iterator<Item = &'a OsStr> + Clone,
    ) -> Result<Vec<ListedEntry>, ViewError> {
        self.query(directory, |lookup| {
            names.clone().map(|name| lookup.listed_entry(name)).collect()
        })
    }

    /// The headers of the safetensors files that a listing shows as they are. Also what failed downloads left in the
    /// place of checkpoints.
    pub fn safetensors_headers(
        &self,
        directory: &Path,
        listing: &Listing,
    ) -> Vec<(OsString, SafetensorsHeader)> {
        let path = self.source_path(directory);
        safetensors_headers::read_headers(&self.directories, &path, listing)
    }

    /// The virtual file of what was shown: remembered, or made again.
    pub fn virtual_file(&self, shown: &ShownFile) -> Result<Arc<VirtualFile>, ViewError> {
        shown.virtual_file(self.context())
    }

    /// Opens a file that is shown as it is.
    pub fn open(&self, path: &Path) -> Result<OpenFile, ViewError> {
        Ok(OpenFile::open_in_root(self.root(), &self.source_path(path))?)
    }

    /// What a file of the recipe shows, or why it shows nothing.
    pub fn find_recipe_file(&self, file: &RecipeFile) -> Result<Arc<ShownFile>, Arc<Refusal>> {
        let refused = |error: ViewError| Arc::new(Refusal::new(Vec::new(), &error));
        if let Some(error) = self.misplaced_recipe(file) {
            return Err(refused(error));
        }
        let entry = self.lookup(&file.path.directory(), file.path.name().as_ref());
        if let Some(ViewEntry::VirtualFile(shown)) = entry.map_err(refused)? {
            return Ok(shown);
        }
        let refusal = self.directories.recipe_refusal_of(file).or_else(|| self.recipe_refusal());
        Err(refusal.unwrap_or_else(|| {
            // The recipe changed between the two calls.
            let path = self.root().shown_path(&self.source_path(file.path.as_path()));
            refused(ViewError::KeepsChanging { path })
        }))
    }

    /// Looks up the files of the recipe, and passes on those that are refused. Stops at `until`.
    pub fn find_refused_views(&self, until: Instant, mut found: impl FnMut(RefusedView)) {
        let recipe = self.context().recipe();
        if let Some(refusal) = &recipe.refusal {
            found(RefusedView { path: None, refusal: Arc::clone(refusal) });
        }
        for file in recipe.files.iter().take_while(|_| Instant::now() < until) {
            if let Err(refusal) = self.find_recipe_file(file) {
                found(RefusedView { path: Some(file.path.as_str().to_owned()), refusal });
            }
        }
    }

    /// Why no lookup reaches a file of a recipe: its path leads through a link or a file of the source.
    fn misplaced_recipe(&self, file: &RecipeFile) -> Option<ViewError> {
        let context = self.context();
        let fault = recipe_plan::link_in_path(&context.root, &context.base, &file.path)?;
        let path = context.root.shown_path(&context.source_path(file.path.as_path()));
        Some(ViewError::Recipe { path, fault: Box::new(fault) })
    }

    /// Why nothing of the recipe is shown, if it is refused. Reads nothing.
    pub fn recipe_refusal(&self) -> Option<Arc<Refusal>> {
        self.context().known_recipe().refusal.clone()
    }

    /// Why files of the recipe are not shown, of those that were looked at. Reads nothing.
    pub fn recipe_refusals(&self) -> Vec<Arc<Refusal>> {
        let mut refusals: Vec<_> = self.recipe_refusal().into_iter().collect();
        refusals.extend(self.directories.recipe_refusals());
        refusals
    }

    /// The number of bytes of virtual files that are kept for the next open.
    pub fn cached_bytes(&self) -> u64 {
        self.context().virtual_files.used_bytes()
    }

    /// The number of checkpoints that are shown, and refused.
    pub fn counts(&self) -> CheckpointCounts {
        self.directories.counts()
    }

    /// Whether anything becomes a virtual file, up to the first one; `None` if that is not known by `until`. What
    /// lies on other filesystems is not looked at.
    pub fn survey(&self, until: Instant) -> Option<Survey> {
        survey::survey(&self.directories, &self.source_path(Path::new("")), until)
    }

    fn context(&self) -> &ViewContext {
        &self.directories.context
    }

    fn query<T>(
        &self,
        directory: &Path,
        ask: impl Fn(Lookup<'_>) -> Result<T, QueryError>,
    ) -> Result<T, ViewError> {
        let store = &self.directories;
        store.query(&self.source_path(directory), |query| ask(Lookup { store, query }))
    }
}
