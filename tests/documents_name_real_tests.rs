//! Every test that the semantics name as proof is there.

use std::path::Path;

#[test]
fn every_test_that_is_named_exists() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(root.join("docs/semantics.md")).unwrap();
    let named: Vec<&str> = text
        .split('`')
        .filter(|word| word.starts_with("tests/") || word.starts_with("src/"))
        .collect();
    assert!(named.len() > 40, "{named:?}");
    let missing: Vec<_> = named.iter().filter(|name| !root.join(name).is_file()).collect();
    assert!(missing.is_empty(), "{missing:?}");
}
