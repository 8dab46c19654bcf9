//! Long lists of names in messages.

use std::fmt;

/// Names that are listed before the rest is only counted.
const MAX_LISTED_NAMES: usize = 8;

/// The first names of a list, and the number of the others.
#[derive(Debug, Default)]
pub struct TruncatedList {
    first: Vec<String>,
    more: usize,
}

impl TruncatedList {
    pub fn from_names<S: ToString>(names: impl IntoIterator<Item = S>) -> Self {
        let mut listed = TruncatedList::default();
        names.into_iter().for_each(|name| listed.add(|| name.to_string()));
        listed
    }

    /// Adds a name. It is only built if it will be listed.
    pub fn add(&mut self, name: impl FnOnce() -> String) {
        if self.first.len() < MAX_LISTED_NAMES {
            self.first.push(name());
        } else {
            self.more += 1;
        }
    }

    pub fn len(&self) -> usize {
        self.first.len() + self.more
    }

    /// The first name.
    pub fn first(&self) -> Option<&str> {
        self.first.first().map(String::as_str)
    }

    pub fn is_empty(&self) -> bool {
        self.first.is_empty()
    }
}

impl fmt::Display for TruncatedList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (n, name) in self.first.iter().enumerate() {
            write!(f, "{}`{name}`", if n == 0 { "" } else { ", " })?;
        }
        match self.more {
            0 => Ok(()),
            more => write!(f, ", and {more} more"),
        }
    }
}
