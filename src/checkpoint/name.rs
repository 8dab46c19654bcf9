//! The name of a tensor.
//!
//! In: text, or all the names of a file. Out: [`Name`]s. Those of a file share one text, because asking for
//! memory for each of 100,000 takes longer than reading them.

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

/// The name of a tensor: text, part of one that it may share with others.
#[derive(Clone)]
pub struct TensorName {
    /// Behind one more step, so that a name is no larger than text of its own would be.
    text: Arc<Box<str>>,
    start: u32,
    end: u32,
}

impl TensorName {
    /// The names of a file.
    pub(super) fn pack<'a>(
        names: impl ExactSizeIterator<Item = &'a str> + Clone,
    ) -> impl Iterator<Item = TensorName> {
        let mut text = String::with_capacity(names.clone().map(str::len).sum());
        text.extend(names.clone());
        let text = Arc::new(text.into_boxed_str());
        let mut end = 0;
        names.map(move |name| {
            let start = end;
            end += name.len();
            TensorName::slice(&text, start, end)
        })
    }

    fn slice(text: &Arc<Box<str>>, start: usize, end: usize) -> TensorName {
        let place =
            |at| u32::try_from(at).expect("names fit a header, which takes 100,000,000 bytes");
        TensorName { text: Arc::clone(text), start: place(start), end: place(end) }
    }
}

impl Deref for TensorName {
    type Target = str;

    fn deref(&self) -> &str {
        &self.text[self.start as usize..self.end as usize]
    }
}

impl From<&str> for TensorName {
    fn from(name: &str) -> Self {
        TensorName::slice(&Arc::new(name.into()), 0, name.len())
    }
}

impl fmt::Display for TensorName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}

impl fmt::Debug for TensorName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}

impl PartialEq for TensorName {
    fn eq(&self, other: &TensorName) -> bool {
        **self == **other
    }
}

impl Eq for TensorName {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_a_file_are_those_that_were_given() {
        let given = ["a.weight", "", "å", "a.bias"];
        let names: Vec<TensorName> = TensorName::pack(given.iter().copied()).collect();
        assert!(names.iter().map(|name| &**name).eq(given));
        assert_eq!(names[0], TensorName::from("a.weight"));
    }
}
