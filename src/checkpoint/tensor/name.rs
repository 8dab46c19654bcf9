//! The name of a tensor.
//!
//! The names of a file share one text: 100,000 allocations take longer than reading the names.

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

/// The name of a tensor: a part of a text that other names may share.
#[derive(Clone)]
pub struct TensorName {
    /// A box in the `Arc`: the name is then no larger than a `String`.
    text: Arc<Box<str>>,
    start: u32,
    end: u32,
}

impl TensorName {
    /// Packs the names of a file into one text.
    pub fn pack<'a>(
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
        let narrow =
            |at| u32::try_from(at).expect("names fit a header, which takes 100,000,000 bytes");
        TensorName { text: Arc::clone(text), start: narrow(start), end: narrow(end) }
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
    fn packed_names_read_back_unchanged() {
        let texts = ["a.weight", "", "å", "a.bias"];
        let names: Vec<TensorName> = TensorName::pack(texts.iter().copied()).collect();
        assert!(names.iter().map(|name| &**name).eq(texts));
        assert_eq!(names[0], TensorName::from("a.weight"));
    }
}
