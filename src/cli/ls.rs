//! `ckptfs ls`: the view of a directory, without mounting it.

use std::io::Write;
use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::checkpoint::Format;
use crate::source::Kind;
use crate::view::{self, Entry, Shown, View};

use super::Failure;
use super::args::Ls;
use super::words::{bytes, count, one_line};

/// A directory of the view, as docs/formats.md documents it.
#[derive(Debug, Serialize)]
struct Directory {
    /// From the path that was given.
    path: String,
    entries: Vec<Named>,
    hidden: Vec<Why>,
    left: Vec<Why>,
    refused: Vec<Refused>,
}

#[derive(Debug, Serialize)]
struct Named {
    name: String,
    kind: &'static str,
    size: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    target: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    image: Option<Image>,
}

#[derive(Debug, Serialize)]
struct Image {
    from: Vec<String>,
    format: Format,
    tensors: usize,
    layout: String,
    identity: String,
    notes: Vec<String>,
}

#[derive(Debug, Serialize)]
struct Why {
    name: String,
    reason: String,
}

#[derive(Debug, Serialize)]
struct Refused {
    names: Vec<String>,
    reason: String,
    remedy: String,
}

pub fn run(args: &Ls, out: &mut dyn Write) -> Result<(), Failure> {
    let view = View::new(&args.path, args.shows.options()?)?;
    let mut directories = Vec::new();
    let mut todo = vec![PathBuf::new()];
    while let Some(place) = todo.pop() {
        let listing = view.list(&place)?;
        if args.recursive {
            let folders = listing.entries.iter().rev().filter(
                |named| matches!(&named.entry, Entry::Source(a) if a.kind == Kind::Directory),
            );
            todo.extend(folders.map(|named| place.join(&named.name)));
        }
        let directory = Directory::of(&place, listing);
        if args.json {
            directories.push(directory);
        } else {
            if args.recursive {
                let gap = if place.as_os_str().is_empty() { "" } else { "\n" };
                let path = args.path.join(&place);
                writeln!(out, "{gap}{}:", one_line(&path.display().to_string()))?;
            }
            directory.print(out)?;
        }
    }
    if args.json {
        let json = serde_json::to_string_pretty(&directories).map_err(std::io::Error::from)?;
        writeln!(out, "{json}")?;
    }
    Ok(())
}

impl Directory {
    fn of(place: &Path, listing: view::Listing) -> Directory {
        let why = |name: String, reason: String| Why { name, reason };
        let hidden = listing.hidden.into_iter();
        let (other, refused): (Vec<_>, Vec<_>) =
            listing.refused.into_iter().partition(|refusal| refusal.is_other);
        let mut left: Vec<Why> = listing.left.into_iter().map(|(n, w)| why(n, w)).collect();
        for refusal in other {
            left.extend(refusal.originals.iter().map(|n| why(n.clone(), refusal.reason.clone())));
        }
        Directory {
            path: place.display().to_string(),
            entries: listing.entries.iter().map(Named::of).collect(),
            hidden: hidden.map(|(n, w)| why(n.to_string_lossy().into_owned(), w)).collect(),
            left,
            refused: refused
                .into_iter()
                .map(|refusal| Refused {
                    names: refusal.originals.clone(),
                    reason: refusal.reason.clone(),
                    remedy: refusal.remedy.clone(),
                })
                .collect(),
        }
    }

    fn print(&self, out: &mut dyn Write) -> Result<(), Failure> {
        for named in &self.entries {
            let what = match (&named.image, &named.target) {
                (Some(image), _) => format!("  image of {}", image.words()),
                (None, Some(target)) => format!(" -> {}", one_line(target)),
                (None, None) if named.kind == "directory" => "/".to_owned(),
                _ => String::new(),
            };
            writeln!(out, "{:>10}  {}{what}", named.size_in_words(), one_line(&named.name))?;
            for note in named.image.iter().flat_map(|image| &image.notes) {
                writeln!(out, "{:>10}    note: {}", "", one_line(note))?;
            }
        }
        for hidden in &self.hidden {
            writeln!(out, "    hidden  {}: {}", one_line(&hidden.name), one_line(&hidden.reason))?;
        }
        for left in &self.left {
            writeln!(out, "     as is  {}: {}", one_line(&left.name), one_line(&left.reason))?;
        }
        for refused in &self.refused {
            writeln!(out, "   refused  {}", one_line(&refused.reason))?;
            writeln!(out, "{:>10}    what to do: {}", "", one_line(&refused.remedy))?;
        }
        Ok(())
    }
}

impl Named {
    fn of(named: &view::Named) -> Named {
        let name = named.name.to_string_lossy().into_owned();
        let (kind, size, target, image) = match &named.entry {
            Entry::Image(shown) => ("image", shown.attributes().size, None, Some(Image::of(shown))),
            Entry::Source(attributes) => (word(attributes.kind), attributes.size, None, None),
            Entry::Link(attributes, target) => {
                let target = match target {
                    Some(target) => target.display().to_string(),
                    None => "refused: leads out of the directory (--follow-symlinks)".to_owned(),
                };
                ("link", attributes.size, Some(target), None)
            }
        };
        Named { name, kind, size, target, image }
    }

    fn size_in_words(&self) -> String {
        match self.kind {
            "file" | "image" => bytes(self.size),
            _ => String::new(),
        }
    }
}

impl Image {
    fn of(shown: &Shown) -> Image {
        Image {
            from: shown.originals(),
            format: shown.format(),
            tensors: shown.tensors(),
            layout: shown.layout().to_string(),
            identity: shown.identity().to_string(),
            notes: shown.notes().to_vec(),
        }
    }

    fn words(&self) -> String {
        let from = match self.from.as_slice() {
            [one] => one_line(one),
            [first, ..] => format!("{} and others", one_line(first)),
            [] => String::new(),
        };
        let files = count(self.from.len(), "file");
        format!("{from} ({files}, {}, {})", self.format.name(), count(self.tensors, "tensor"))
    }
}

fn word(kind: Kind) -> &'static str {
    match kind {
        Kind::File => "file",
        Kind::Directory => "directory",
        Kind::Link => "link",
        Kind::Pipe => "pipe",
        Kind::Socket => "socket",
        Kind::CharDevice | Kind::BlockDevice => "device",
    }
}
