//! The contents of a view in words, and files to show.

use std::fs;
use std::path::Path;

use ckptfs::source::FileKind;
use ckptfs::view::{Listing, View, ViewEntry, ViewOptions};

use super::zip;

/// A torch checkpoint with one tensor, `w`.
pub fn torch() -> Vec<u8> {
    zip::archive(&zip::one_tensor())
}

/// The same with a tensor of another name.
pub fn torch_with(name: &str) -> Vec<u8> {
    let state = super::pickle::dict(&[(name, super::pickle::Tensor::default().bytes())]);
    zip::archive(&zip::checkpoint(&super::pickle::pickle(&state)))
}

/// Writes files beneath a directory, and their parent directories.
pub fn write(folder: &Path, files: &[(&str, &[u8])]) {
    for (name, bytes) in files {
        let path = folder.join(name);
        fs::create_dir_all(path.parent().expect("a folder")).expect("made");
        fs::write(path, bytes).expect("written");
    }
}

pub fn view(path: &Path) -> View {
    View::new(path, ViewOptions::default()).expect("a view")
}

/// A view that shows originals beside their virtual files.
pub fn view_of_all(path: &Path) -> View {
    View::new(path, ViewOptions { show_originals: true, ..ViewOptions::default() }).expect("a view")
}

/// A view that follows links anywhere.
pub fn view_following(path: &Path) -> View {
    let mut options = ViewOptions::default();
    options.parse.follow_symlinks = true;
    View::new(path, options).expect("a view")
}

/// An entry in words. A file is `name`, a virtual file `name*`, its index `name+`, a directory `name/`. A link
/// is `name -> target`, or `name -> !` where it is refused.
pub fn word(name: &str, entry: &ViewEntry) -> String {
    match entry {
        ViewEntry::VirtualFile(_) => format!("{name}*"),
        ViewEntry::Index(_) | ViewEntry::Config(_) => format!("{name}+"),
        ViewEntry::Source(found) if found.kind == FileKind::Directory => format!("{name}/"),
        ViewEntry::Source(_) => name.to_owned(),
        ViewEntry::Link(_, Some(target)) => format!("{name} -> {}", target.display()),
        ViewEntry::Link(_, None) => format!("{name} -> !"),
    }
}

/// The listing of a view's directory, in words. Looking a name up must give what the listing has.
pub fn shown(view: &View, place: impl AsRef<Path>) -> Vec<String> {
    let place = place.as_ref();
    let Listing { entries, hidden, .. } = view.list(place).expect("listed");
    for (name, why) in hidden {
        let entry = view.lookup(place, &name).expect("looked up");
        assert!(entry.is_none(), "{} is hidden ({why}) and found", name.display());
    }
    let words = entries.iter().map(|named| {
        let name = named.name.to_string_lossy();
        let listed = word(&name, &named.entry);
        let found = view.lookup(place, &named.name).expect("looked up").expect("found");
        assert_eq!(word(&name, &found), listed);
        listed
    });
    words.collect()
}

/// The names that are hidden in a directory.
pub fn hidden(view: &View, place: impl AsRef<Path>) -> Vec<String> {
    let hidden = view.list(place.as_ref()).expect("listed").hidden;
    hidden.into_iter().map(|(name, _)| name.to_string_lossy().into_owned()).collect()
}
