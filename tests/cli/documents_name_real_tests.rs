//! Every test that a document names as proof exists.

use std::path::Path;

#[test]
fn every_named_test_exists() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let pages = ["docs/semantics.md", "docs/loaders.md"];
    let text = pages.map(|page| std::fs::read_to_string(root.join(page)).unwrap()).concat();
    let named: Vec<&str> = text
        .split('`')
        .filter(|word| word.starts_with("tests/") || word.starts_with("src/"))
        .collect();
    assert!(named.len() > 40, "{named:?}");
    let missing: Vec<_> = named.iter().filter(|name| !root.join(name).is_file()).collect();
    assert!(missing.is_empty(), "{missing:?}");
}
