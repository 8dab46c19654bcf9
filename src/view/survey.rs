//! Surveys a view: whether anything in it becomes a virtual file.

use std::collections::VecDeque;
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::time::Instant;

use crate::checkpoint::UnreadFormat;
use crate::source::FileKind;

use super::directory_query::{DirectoryQuery, QueryError};
use super::directory_store::DirectoryStore;
use super::planned_file::BuildOutcome;
use super::safetensors_headers::unread_format;

/// What a view shows of checkpoints.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Survey {
    /// Whether there is a virtual file. The rest was then not counted.
    pub has_virtual_file: bool,
    /// Checkpoints that are refused.
    pub refused: usize,
    /// Checkpoints that stay as they are by a rule.
    pub kept: usize,
    /// Safetensors files, which are shown as they are.
    pub safetensors: usize,
    /// Files that are named as checkpoints and are none, such as LFS pointers.
    pub not_checkpoints: usize,
}

/// Directories of a survey: as many as half a second is enough for, if the system knows them.
const MAX_SURVEYED_DIRECTORIES: usize = 10_000;

/// Files of one directory that are opened to see what they are.
const MAX_EXAMINED_FILES: usize = 64;

/// One directory of a survey.
struct SurveyedDirectory {
    survey: Survey,
    folders: Vec<OsString>,
    /// Whether everything in it was looked at: not what lies on other filesystems, which may hang.
    is_complete: bool,
}

/// Surveys a directory and all beneath it, up to the first virtual file. `None` if there is too much to look at, or if
/// some of it lies elsewhere.
pub fn survey(store: &DirectoryStore, base: &Path, until: Instant) -> Option<Survey> {
    let mut total = Survey::default();
    let mut is_complete = true;
    let mut pending = VecDeque::from([base.to_path_buf()]);
    let mut count = 0;
    while let Some(path) = pending.pop_front() {
        count += 1;
        if count > MAX_SURVEYED_DIRECTORIES || Instant::now() >= until {
            return None;
        }
        // A directory that cannot be read shows nothing.
        let surveyed = store.query(&path, |query| survey_directory(store, &query, &path, until));
        let Ok(SurveyedDirectory { survey, folders, is_complete: is_whole }) = surveyed else {
            continue;
        };
        if survey.has_virtual_file {
            return Some(survey);
        }
        total.refused += survey.refused;
        total.kept += survey.kept;
        total.safetensors += survey.safetensors;
        total.not_checkpoints += survey.not_checkpoints;
        is_complete &= is_whole;
        pending.extend(folders.into_iter().map(|folder| path.join(folder)));
    }
    is_complete.then_some(total)
}

fn survey_directory(
    store: &DirectoryStore,
    query: &DirectoryQuery<'_>,
    path: &Path,
    until: Instant,
) -> Result<SurveyedDirectory, QueryError> {
    let directory = query.directory;
    let survey = Survey::default();
    let mut surveyed = SurveyedDirectory { survey, folders: Vec::new(), is_complete: true };
    for file in &directory.files {
        if Instant::now() >= until {
            surveyed.is_complete = false;
            return Ok(surveyed);
        }
        if query.has_virtual_file(OsStr::new(&file.plan.name))? {
            surveyed.survey.has_virtual_file = true;
            return Ok(surveyed);
        }
        match file.known_outcome() {
            Some(BuildOutcome::Refused(refusal)) if refusal.is_not_checkpoint => {
                surveyed.survey.not_checkpoints += 1;
            }
            Some(BuildOutcome::Refused(_)) => surveyed.survey.refused += 1,
            _ => {}
        }
    }
    surveyed.folders.extend(directory.recipe_directories.iter().cloned());
    let mut left_to_examine = MAX_EXAMINED_FILES;
    // By their first bytes. What is not looked at counts as what its name says.
    let mut is_other = |name: &OsStr, is_telling: fn(&UnreadFormat) -> bool| {
        if left_to_examine == 0 || Instant::now() >= until {
            return false;
        }
        left_to_examine -= 1;
        unread_format(store, &path.join(name)).is_some_and(|format| is_telling(&format))
    };
    for (name, _) in &directory.skipped {
        // Training state may be of any format.
        match is_other(name, UnreadFormat::is_failed_download) {
            true => surveyed.survey.not_checkpoints += 1,
            false => surveyed.survey.kept += 1,
        }
    }
    let follows_links = store.context.options.parse.follow_symlinks;
    for name in directory.names.iter() {
        match directory.source_kind(name) {
            Some(FileKind::Directory) => {
                let folder: PathBuf = path.join(name);
                // Only what the system knows already: a directory of another filesystem may hang.
                let metadata = store.context.root.cached_metadata(&folder);
                match metadata.is_ok_and(|metadata| directory.is_on_device(metadata.dev)) {
                    true => surveyed.folders.push(name.to_owned()),
                    false => surveyed.is_complete = false,
                }
            }
            // Inside the source, it leads to what is surveyed anyway.
            Some(FileKind::Link) if follows_links => surveyed.is_complete = false,
            Some(FileKind::File | FileKind::Link)
                if is_safetensors(name) && !directory.is_skipped(name) =>
            {
                match is_other(name, |_| true) {
                    true => surveyed.survey.not_checkpoints += 1,
                    false => surveyed.survey.safetensors += 1,
                }
            }
            _ => {}
        }
    }
    Ok(surveyed)
}

fn is_safetensors(name: &OsStr) -> bool {
    Path::new(name).extension().is_some_and(|extension| extension == "safetensors")
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;
    use std::time::Duration;

    use super::*;
    use crate::view::{KeepRules, View, ViewOptions};

    fn survey_of(folder: &Path, options: ViewOptions) -> Option<Survey> {
        let until = Instant::now() + Duration::from_secs(600);
        View::new(folder, options).unwrap().survey(until)
    }

    #[test]
    fn every_checkpoint_that_is_no_virtual_file_is_counted() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, bytes: &[u8]| {
            let path = folder.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, bytes).unwrap();
        };
        write("notes.txt", b"words");
        assert_eq!(survey_of(folder.path(), ViewOptions::default()), Some(Survey::default()));
        write("a/step/__0_0.distcp", b"a rank of torch.distributed.checkpoint");
        write("a/step/.metadata", b"");
        write("a/broken.ckpt", b"PK\x03\x04 and no archive");
        write("a/optimizer.bin", b"kept");
        write("b/c/whole.safetensors", b"\x02\0\0\0\0\0\0\0{}");
        let keep = KeepRules::new(&["optimizer*".to_owned()]).unwrap();
        let found = survey_of(folder.path(), ViewOptions { keep, ..ViewOptions::default() });
        let expected = Survey { refused: 2, kept: 1, safetensors: 1, ..Survey::default() };
        assert_eq!(found, Some(expected));
    }

    #[test]
    fn what_a_failed_download_left_is_no_checkpoint() {
        let folder = tempfile::tempdir().unwrap();
        let pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n";
        for name in ["model.safetensors", "pytorch_model.bin", "optimizer.pt"] {
            fs::write(folder.path().join(name), pointer).unwrap();
        }
        fs::create_dir(folder.path().join("a")).unwrap();
        fs::write(folder.path().join("a/x.ckpt"), "<!DOCTYPE html><html>").unwrap();
        let found = survey_of(folder.path(), ViewOptions::default());
        assert_eq!(found, Some(Survey { not_checkpoints: 4, ..Survey::default() }));
        // Training state of a format of its own is kept, and nothing is wrong with it.
        fs::write(folder.path().join("optimizer.pt"), "text").unwrap();
        let found = survey_of(folder.path(), ViewOptions::default());
        assert_eq!(found, Some(Survey { kept: 1, not_checkpoints: 3, ..Survey::default() }));
    }

    #[test]
    fn what_was_not_looked_at_is_not_judged() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("source")).unwrap();
        let source = folder.path().join("source");
        let view = View::new(&source, ViewOptions::default()).unwrap();
        assert_eq!(view.survey(Instant::now()), None);
        // A link out of the source counts for nothing, unless it is followed.
        symlink(folder.path(), source.join("link")).unwrap();
        assert_eq!(survey_of(&source, ViewOptions::default()), Some(Survey::default()));
        let mut options = ViewOptions::default();
        options.parse.follow_symlinks = true;
        assert_eq!(survey_of(&source, options), None);
    }
}
