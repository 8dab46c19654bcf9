//! One directory as it was at one time: its names, and what came of its checkpoints.
//!
//! Its checkpoints are parsed when they are asked for. What links and hub notes show depends on other
//! directories, and is not known here.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use crate::recipe::RecipeFile;
use crate::source::{self, FileKind, FileMetadata, FileState, Root, SourceError};
use crate::threads::lock;

use super::base_links::{BaseLinks, find_base_links};
use super::context::ViewContext;
use super::directory_plan::{DirectoryPlan, plan_directory};
use super::entry::CheckpointCounts;
use super::error::{Refusal, ViewError};
use super::hf_cache::{HubNotes, find_hub_notes};
use super::names::SortedNames;
use super::planned_file::{BuildOutcome, PlannedFile};
use super::recipe_open::watched_sources;
use super::recipe_plan::{CONFIG_NAME, RecipePlan, link_in_path};
use super::recipe_store::RecipeSnapshot;
use super::rules::{PlanSource, VirtualFilePlan};
use super::virtual_index;

/// A directory as it was at one time.
#[derive(Debug)]
pub struct DirectoryView {
    /// The path from the root.
    pub path: PathBuf,
    state: DirectoryState,
    pub names: SortedNames,
    /// The kind of each name, in the same order.
    kinds: Box<[FileKind]>,
    pub files: Vec<Arc<PlannedFile>>,
    /// The place in `files` by the name of the virtual file.
    pub virtual_files: HashMap<OsString, usize>,
    /// The place in `files` by the name of an original.
    pub originals: HashMap<OsString, usize>,
    /// The place in `files` by the name of an index that stays.
    pub indexes: HashMap<OsString, usize>,
    /// Names that stay as they are by a rule, and why; sorted.
    pub skipped: Box<[(OsString, String)]>,
    /// The place in `files` by the name of what a recipe shows beside a file.
    pub beside: HashMap<OsString, usize>,
    /// The place in `files` of the file whose recipe writes a configuration.
    pub config: Option<usize>,
    /// Names of directories that only a recipe has, sorted.
    pub recipe_directories: Box<[OsString]>,
    /// Why the recipe is refused; in the directory that the view is of.
    pub recipe_refusal: Option<Arc<Refusal>>,
    /// Refusals of files of the recipe beneath a name that is a link or a file here.
    pub misplaced_recipes: Box<[Arc<Refusal>]>,
    /// The recipe that it was planned by.
    recipe_generation: u64,
    pub hub_notes: Option<HubNotes>,
    /// Links to files beside the base of a delta, shown where the delta is.
    pub base_links: BaseLinks,
    /// Links that lead out, and were logged.
    logged_links: Mutex<HashSet<OsString>>,
}

/// A directory's state, and whether every later change must leave another one.
#[derive(Debug, PartialEq, Eq)]
struct DirectoryState {
    state: FileState,
    is_settled: bool,
}

impl DirectoryState {
    fn from_metadata(metadata: &FileMetadata) -> DirectoryState {
        let state = metadata.state();
        DirectoryState { state, is_settled: source::is_past_clock_step(&state) }
    }
}

impl DirectoryView {
    /// Reads the names in a directory. Checkpoints that stayed what they were in `former` are kept.
    pub fn read(
        context: &ViewContext,
        path: &Path,
        metadata: &FileMetadata,
        recipe: &RecipeSnapshot,
        former: Option<&DirectoryView>,
    ) -> Result<DirectoryView, SourceError> {
        let mut state = DirectoryState::from_metadata(metadata);
        let failures = source::store_failures();
        let (root, options) = (&context.root, &context.options);
        let target = context.target.as_ref().filter(|_| path == context.base);
        let plan = plan_directory(root, path, &options.keep, target);
        let view_path = context.view_path(path);
        let mut plan = match (plan, view_path) {
            // A directory that only the recipe has.
            (Err(SourceError::Missing { .. }), Some(inside)) if recipe.has_directory(inside) => {
                DirectoryPlan::default()
            }
            (plan, _) => plan?,
        };
        if options.show_originals {
            // A loader must not find a virtual file beside the pieces that it is joined from.
            plan.files.retain(|file| !file.excludes_originals());
        }
        let recipes = view_path.map(|path| recipe.in_directory(path)).unwrap_or_default();
        add_recipe_files(context, &mut plan, &recipes.files);
        let is_new = |name: &&OsString| plan.names.find(name).is_err();
        let recipe_directories = recipes.directories.keys().filter(is_new).cloned().collect();
        let misplaced_recipes = misplaced_recipes(context, &plan, &recipes.directories);
        let (mut beside, mut config) = (HashMap::new(), None);
        for (n, file) in plan.files.iter().enumerate() {
            let Some(recipe) = file.recipe() else { continue };
            for name in &recipe.beside {
                beside.entry(name.clone()).or_insert(n);
            }
            if !recipe.file.config.is_empty() {
                config.get_or_insert(n);
            }
        }
        let mut virtual_files = HashMap::new();
        let mut originals = HashMap::new();
        for (n, file) in plan.files.iter().enumerate() {
            virtual_files.insert(OsString::from(&file.name), n);
            for original in file.hidden_names() {
                originals.insert(original.into(), n);
            }
        }
        let has_config = |name: &OsStr| config.is_some() && name == CONFIG_NAME;
        let is_taken = |name: &OsString, directories: &BTreeMap<OsString, _>| {
            virtual_files.contains_key(name) || directories.contains_key(name) || has_config(name)
        };
        beside.retain(|name, _| !is_taken(name, &recipes.directories));
        // Originals that are shown have their own index.
        let indexes = match options.show_originals {
            true => HashMap::new(),
            false => virtual_index::kept_indexes(&plan.files, plan.names.iter(), &originals),
        };
        // What a store did not give may be a checkpoint: the next look reads the directory again.
        state.is_settled &= failures == source::store_failures();
        let DirectoryPlan { names, kinds, files, skipped } = plan;
        let candidates = files.iter().filter_map(|file| file.own_candidate());
        let mut base_links = find_base_links(context, path, &names, candidates);
        base_links
            .retain(|name, _| !is_taken(name, &recipes.directories) && !beside.contains_key(name));
        let former_files = former.iter().flat_map(|former| &former.files);
        let former_files: HashMap<&str, &Arc<PlannedFile>> =
            former_files.map(|file| (file.plan.name.as_str(), file)).collect();
        let files = files.into_iter().map(|plan| match former_files.get(plan.name.as_str()) {
            Some(former) => PlannedFile::replan(former, root, path, plan),
            None => Arc::new(PlannedFile::new(path, plan)),
        });
        Ok(DirectoryView {
            path: path.to_path_buf(),
            state,
            names,
            kinds,
            files: files.collect(),
            virtual_files,
            originals,
            indexes,
            skipped,
            beside,
            config,
            recipe_directories,
            recipe_refusal: recipe.refusal.clone().filter(|_| path == context.base),
            misplaced_recipes,
            recipe_generation: recipe.generation,
            hub_notes: find_hub_notes(root.real_path(), path),
            base_links,
            logged_links: former
                .map(|former| lock(&former.logged_links).clone())
                .unwrap_or_default()
                .into(),
        })
    }

    /// Whether only a recipe has a directory of this name.
    pub fn has_recipe_directory(&self, name: &OsStr) -> bool {
        self.recipe_directories.binary_search_by(|other| other.as_os_str().cmp(name)).is_ok()
    }

    /// Whether this is what the directory holds now, given its present metadata.
    pub fn matches(&self, metadata: &FileMetadata, recipe: &RecipeSnapshot) -> bool {
        if self.recipe_generation != recipe.generation {
            return false;
        }
        let now = DirectoryState { is_settled: true, ..DirectoryState::from_metadata(metadata) };
        self.state == now
    }

    /// Whether this directory lies on the filesystem of a device.
    pub fn is_on_device(&self, device: u64) -> bool {
        self.state.state.identity.dev == device
    }

    /// Takes over the checkpoints that another thread's look at the same directory began to parse.
    pub fn adopt_outcomes(&mut self, other: &DirectoryView) {
        for file in &mut self.files {
            if let Some(&n) = other.virtual_files.get(OsStr::new(&file.plan.name))
                && other.files[n].plan == file.plan
            {
                *file = Arc::clone(&other.files[n]);
            }
        }
    }

    /// Whether all outcomes still hold.
    pub fn is_fresh(&self, root: &Root) -> bool {
        self.files.iter().all(|file| file.is_fresh(root))
    }

    /// Invalidates the last look at the files of a virtual file.
    pub fn invalidate(&self, name: &OsStr) {
        if let Some(&n) = self.virtual_files.get(name) {
            self.files[n].invalidate();
        }
    }

    /// Whether it was not yet logged that a link leads out.
    pub fn log_link_once(&self, name: &OsStr) -> bool {
        lock(&self.logged_links).insert(name.to_owned())
    }

    /// The kind of a name of the source that no virtual file or index has.
    pub fn source_kind(&self, name: &OsStr) -> Option<FileKind> {
        let is_virtual = self.virtual_files.contains_key(name) || self.indexes.contains_key(name);
        let place = self.names.find(name).ok().filter(|_| !is_virtual)?;
        Some(self.kinds[place])
    }

    /// Whether a name stays as it is by a rule.
    pub fn is_skipped(&self, name: &OsStr) -> bool {
        self.skipped.binary_search_by(|(skipped, _)| skipped.as_os_str().cmp(name)).is_ok()
    }

    /// The names of its directories.
    pub fn directories(&self) -> impl Iterator<Item = &OsStr> {
        let entries = self.names.iter().zip(&self.kinds);
        entries.filter(|(_, kind)| **kind == FileKind::Directory).map(|(name, _)| name)
    }

    /// The number of bytes that its names take, and what belongs to each.
    pub fn memory_bytes(&self) -> usize {
        let link_bytes = |(name, (_, target)): (&OsString, &(FileMetadata, PathBuf))| {
            size_of::<(OsString, FileMetadata, PathBuf)>() + name.len() + target.as_os_str().len()
        };
        let links: usize = self.base_links.iter().map(link_bytes).sum();
        size_of::<DirectoryView>() + self.names.memory_bytes() + self.kinds.len() + links
    }

    /// Adds up the outcomes that are known.
    pub fn count(&self, counts: &mut CheckpointCounts) {
        for file in &self.files {
            match file.known_outcome() {
                Some(BuildOutcome::VirtualFile(_)) => counts.virtual_files += 1,
                Some(BuildOutcome::Refused(refusal)) if !refusal.is_not_checkpoint => {
                    counts.refused += 1;
                }
                _ => {}
            }
        }
    }
}

/// The refusals of files beneath names of a directory that are links or files: no lookup reaches them.
fn misplaced_recipes(
    context: &ViewContext,
    plan: &DirectoryPlan,
    directories: &BTreeMap<OsString, Vec<Arc<RecipeFile>>>,
) -> Box<[Arc<Refusal>]> {
    let is_directory = |name: &OsString| match plan.names.find(name) {
        Ok(place) => plan.kinds.get(place) == Some(&FileKind::Directory),
        Err(_) => true,
    };
    let files = directories.iter().filter(|(name, _)| !is_directory(name));
    let files = files.flat_map(|(_, files)| files);
    let refusal = |file: &Arc<RecipeFile>| {
        let fault = Box::new(link_in_path(&context.root, &context.base, &file.path)?);
        let path = context.root.shown_path(&context.source_path(file.path.as_path()));
        Some(Arc::new(Refusal::new(Vec::new(), &ViewError::Recipe { path, fault })))
    };
    files.filter_map(refusal).collect()
}

/// Adds the files of a recipe to the plan of their directory. One takes the place of a checkpoint's virtual file of its
/// name.
fn add_recipe_files(context: &ViewContext, plan: &mut DirectoryPlan, files: &[Arc<RecipeFile>]) {
    for file in files {
        let name = file.path.name();
        let place = plan.files.iter().position(|other| other.name == name);
        let replaced = place.and_then(|place| match plan.files.remove(place).source {
            PlanSource::Candidate(candidate) => Some(candidate),
            PlanSource::Recipe(_) => None,
        });
        let ViewContext { root, base, .. } = context;
        let watched = watched_sources(root, base, file);
        let recipe = RecipePlan::new(root, base, &plan.names, file, watched, replaced);
        let source = PlanSource::Recipe(Arc::new(recipe));
        plan.files.push(VirtualFilePlan { source, name: name.to_owned() });
    }
}
