//! What the names of a directory stand for: one of them, or all.

use std::ffi::{OsStr, OsString};
use std::sync::Arc;

use crate::source::{FileKind, SourceError};

use super::directory_query::{DirectoryQuery, QueryError};
use super::directory_store::{DirectoryStore, MAX_READ_TRIES};
use super::entry::{ListedEntry, Listing, NamedEntry, ViewEntry};
use super::error::ViewError;
use super::names::SortedNames;
use super::planned_file::BuildOutcome;
use super::recipe_plan::CONFIG_NAME;
use super::shown_file::ShownFile;
use super::symlinks;

/// A directory that is asked, and the others, which its links may lead to.
#[derive(Clone, Copy, Debug)]
pub struct Lookup<'a> {
    pub store: &'a DirectoryStore,
    pub query: DirectoryQuery<'a>,
}

impl Lookup<'_> {
    /// What a name stands for; `None` if it is not shown.
    pub fn entry(&self, name: &OsStr) -> Result<Option<ViewEntry>, QueryError> {
        if let Some(built) = self.query.virtual_file(name)? {
            return Ok(built.file.shown_file(&built.summary).map(virtual_file_entry));
        }
        if let Some(built) = self.query.indexed_file(name)? {
            let shown = built.file.shown_file(&built.summary);
            return Ok(shown.map(|shown| ViewEntry::Index(Arc::new(shown.into_index()))));
        }
        if let Some(built) = self.query.config_file(name)? {
            let shown = built.file.shown_file(&built.summary).and_then(ShownFile::into_config);
            return Ok(shown.map(|shown| ViewEntry::Config(Arc::new(shown))));
        }
        if let Some(entry) = self.beside_entry(name)? {
            return Ok(Some(entry));
        }
        if self.query.directory.has_recipe_directory(name) {
            let path = self.query.directory.path.join(name);
            let found = self.query.context.metadata(&path).map_err(ViewError::from)?;
            return Ok(Some(ViewEntry::Source(self.store.with_change_time(&path, found))));
        }
        if self.store.query_shows_as_is(&self.query, name)? {
            return Ok(self.source_entry(name)?);
        }
        self.base_link(name)
    }

    /// A file beside the base of a delta, if the delta is shown here.
    fn base_link(&self, name: &OsStr) -> Result<Option<ViewEntry>, QueryError> {
        let Some((link, target)) = self.query.directory.base_links.get(name) else {
            return Ok(None);
        };
        let is_shown = self.query.hides_originals()?;
        Ok(is_shown.then(|| ViewEntry::Link(*link, Some(target.clone()))))
    }

    /// The names of these files.
    fn base_link_names(&self, outcomes: &[BuildOutcome]) -> impl Iterator<Item = &OsStr> {
        let is_shown = outcomes.iter().any(BuildOutcome::is_virtual_file)
            && !self.query.context.options.show_originals;
        let links = self.query.directory.base_links.keys();
        links.filter(move |_| is_shown).map(OsString::as_os_str)
    }

    /// A link to what a recipe shows beside its file, if that is shown as it is.
    fn beside_entry(&self, name: &OsStr) -> Result<Option<ViewEntry>, QueryError> {
        let Some(directory) = self.query.beside_directory(name)? else { return Ok(None) };
        let (path, root) = (directory.join(name), &self.query.context.root);
        let is_shown =
            directory == self.query.directory.path || self.store.shows_as_is(directory, name);
        let Ok(found) = root.metadata(&path) else { return Ok(None) };
        Ok(is_shown.then(|| symlinks::relative_link(&self.query.directory.path, &path, found)))
    }

    /// The names that recipes add to the directory.
    fn recipe_names(&self) -> Result<Vec<OsString>, QueryError> {
        let directory = self.query.directory;
        let mut names: Vec<OsString> = directory.recipe_directories.to_vec();
        let config = OsString::from(CONFIG_NAME);
        for name in directory.config.iter().map(|_| &config).chain(directory.beside.keys()) {
            if self.query.config_file(name)?.is_some() || self.beside_entry(name)?.is_some() {
                names.push(name.clone());
            }
        }
        Ok(names)
    }

    /// What a shown name stands for; `None` if it is gone. An error where only its kind is known.
    ///
    /// A listing must not wait for another filesystem, which may be a mount whose daemon is stuck. So a directory
    /// there has the metadata that the system last knew.
    pub fn listed_entry(&self, name: &OsStr) -> Result<ListedEntry, QueryError> {
        match self.query.directory.source_kind(name) {
            Some(kind) => Ok(self.listed_source_entry(name, kind).map_err(|error| (kind, error))),
            None => self.entry(name).map(Ok),
        }
    }

    /// Lists everything. Each checkpoint is parsed for it.
    pub fn list(&self) -> Result<Listing, QueryError> {
        let outcomes = self.query.outcomes()?;
        let directory = self.query.directory;
        let mut listing = Listing { skipped: directory.skipped.to_vec(), ..Listing::default() };
        for (file, outcome) in directory.files.iter().zip(&outcomes) {
            match outcome {
                BuildOutcome::Refused(refusal) => listing.refused.push(Arc::clone(refusal)),
                BuildOutcome::VirtualFile(summary) => {
                    if let Some(shown) = file.shown_file(summary) {
                        let name = OsString::from(&file.plan.name);
                        listing.entries.push(NamedEntry { name, entry: virtual_file_entry(shown) });
                    }
                }
            }
        }
        listing.refused.extend(directory.recipe_refusal.clone());
        listing.refused.extend(directory.misplaced_recipes.iter().cloned());
        for name in self.recipe_names()? {
            if let Some(entry) = self.entry(&name)? {
                listing.entries.push(NamedEntry { name, entry });
            }
        }
        for name in directory.names.iter().chain(self.base_link_names(&outcomes)) {
            if let Some(reason) = self.hidden_reason(name, &outcomes) {
                listing.hidden.push((name.to_owned(), reason));
                continue;
            }
            match self.listed_entry(name)? {
                Ok(Some(entry)) => {
                    listing.entries.push(NamedEntry { name: name.to_owned(), entry });
                }
                Ok(None) => {}
                Err((kind, error)) => listing.unreadable.push((name.to_owned(), kind, error)),
            }
        }
        listing.entries.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(listing)
    }

    /// The names that the directory shows. Parses each checkpoint, and reads nothing of other files.
    pub fn shown_names(&self) -> Result<SortedNames, QueryError> {
        let outcomes = self.query.outcomes()?;
        let recipe_names = self.recipe_names()?;
        let recipe_names = recipe_names.iter().map(OsString::as_os_str);
        let directory = self.query.directory;
        let files = directory.files.iter().zip(&outcomes);
        let virtual_files = files.filter(|(_, outcome)| outcome.is_virtual_file());
        let virtual_names = virtual_files.map(|(file, _)| OsStr::new(&file.plan.name));
        let others =
            directory.names.iter().filter(|name| self.hidden_reason(name, &outcomes).is_none());
        let links = self.base_link_names(&outcomes);
        let mut names: Vec<&OsStr> =
            virtual_names.chain(others).chain(links).chain(recipe_names).collect();
        names.sort();
        names.dedup();
        Ok(SortedNames::from_sorted(names))
    }

    /// Why a name is hidden, given the outcomes of all planned files; `None` if it is shown.
    fn hidden_reason(&self, name: &OsStr, outcomes: &[BuildOutcome]) -> Option<String> {
        let directory = self.query.directory;
        let replaced_by = directory.originals.get(name).filter(|n| outcomes[**n].is_virtual_file());
        match replaced_by {
            Some(_) if directory.indexes.contains_key(name) => None,
            Some(&n) if !self.query.context.options.show_originals => {
                Some(format!("is in {}", directory.files[n].plan.name))
            }
            _ => self.store.hidden_note_reason(directory, name).map(str::to_owned),
        }
    }

    /// A name of the source as it is.
    fn source_entry(&self, name: &OsStr) -> Result<Option<ViewEntry>, ViewError> {
        let directory = self.query.directory;
        let root = &self.query.context.root;
        let path = directory.path.join(name);
        for _ in 0..MAX_READ_TRIES {
            let found = match root.link_metadata(&path) {
                Err(SourceError::Missing { .. }) => return Ok(None),
                found => self.store.with_change_time(&path, found?),
            };
            if found.kind != FileKind::Link {
                return Ok(Some(ViewEntry::Source(found)));
            }
            // A link that is gone by now was replaced by something else.
            if let Some(entry) = symlinks::link_entry(self.store, &directory.path, name, found) {
                if matches!(entry, ViewEntry::Link(_, None)) && directory.log_link_once(name) {
                    tracing::warn!(
                        link = %root.shown_path(&path).display(),
                        "leads out of the directory: not followed without --follow-symlinks"
                    );
                }
                return Ok(Some(entry));
            }
        }
        Ok(None)
    }

    fn listed_source_entry(
        &self,
        name: &OsStr,
        kind: FileKind,
    ) -> Result<Option<ViewEntry>, ViewError> {
        let directory = self.query.directory;
        if kind == FileKind::Directory
            && let Ok(found) = self.query.context.root.cached_metadata(&directory.path.join(name))
            && found.kind == FileKind::Directory
            && !directory.is_on_device(found.dev)
        {
            return Ok(Some(ViewEntry::Source(found)));
        }
        self.source_entry(name)
    }
}

fn virtual_file_entry(shown: ShownFile) -> ViewEntry {
    ViewEntry::VirtualFile(Arc::new(shown))
}
