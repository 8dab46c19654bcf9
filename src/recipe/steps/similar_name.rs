//! Finds the name that a pattern was most likely meant for.

use std::collections::HashSet;

/// Maximum number of names that are compared: a message is worth some milliseconds.
const MAX_COMPARED_COUNT: usize = 100_000;

/// Maximum bytes that are compared at the start of a pattern, and of a name.
const MAX_COMPARED_BYTES: usize = 256;

/// The name that has most of the pattern's runs of three letters or digits, if any has one. Of several, the first.
pub fn find_similar<'n>(pattern: &str, names: impl Iterator<Item = &'n str>) -> Option<String> {
    let runs: HashSet<&[u8]> = runs_of(pattern).collect();
    let mut best: Option<(usize, &str)> = None;
    for name in names.take(MAX_COMPARED_COUNT) {
        let shared = runs_of(name).filter(|run| runs.contains(run)).collect::<HashSet<_>>().len();
        if shared > best.map_or(0, |(most, _)| most) {
            best = Some((shared, name));
        }
    }
    best.map(|(_, name)| name.to_owned())
}

fn runs_of(text: &str) -> impl Iterator<Item = &[u8]> {
    let bytes = &text.as_bytes()[..text.len().min(MAX_COMPARED_BYTES)];
    bytes.windows(3).filter(|run| run.iter().all(u8::is_ascii_alphanumeric))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_most_similar_name_is_found() {
        let names = ["lm_head.weight", "layers.0.q_proj.weight", "layers.0.mlp.up_proj.weight"];
        let similar = |pattern| find_similar(pattern, names.into_iter());
        assert_eq!(similar("*.mlp.up_projection.weight").as_deref(), Some(names[2]));
        assert_eq!(similar(r"^head\.(.*)$").as_deref(), Some(names[0]));
        assert_eq!(similar("*.inv_freq"), None);
        assert_eq!(similar(""), None);
    }
}
