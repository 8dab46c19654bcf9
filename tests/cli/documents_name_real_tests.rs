//! Every test that a document names as proof exists, and every promise names one.

use std::fs;
use std::path::{Path, PathBuf};

fn repository() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn read(page: &Path) -> String {
    fs::read_to_string(page).unwrap()
}

/// The pages of docs/semantics, whose tables hold the promises.
fn semantics_pages() -> Vec<PathBuf> {
    let entries = fs::read_dir(repository().join("docs/semantics")).unwrap();
    entries.map(|entry| entry.unwrap().path()).collect()
}

/// The files that a text names as tests.
fn named_tests(text: &str) -> impl Iterator<Item = &str> {
    let is_test =
        |word: &&str| ["tests/", "src/", "proofs/"].iter().any(|top| word.starts_with(top));
    text.split('`').filter(is_test)
}

/// Whether there is this file, and in it the function that may follow: `tests/x.rs::function`.
fn exists(name: &str) -> bool {
    let (file, function) = name.split_once("::").unwrap_or((name, ""));
    let Ok(text) = fs::read_to_string(repository().join(file)) else {
        return function.is_empty() && repository().join(file).exists();
    };
    let is_defined = |keyword: &str| text.contains(&format!("{keyword} {function}("));
    let has_tests = !file.starts_with("src/") || text.contains("#[test]");
    has_tests && (function.is_empty() || is_defined("fn") || is_defined("def"))
}

#[test]
fn a_function_that_is_not_there_is_missed() {
    assert!(exists("tests/cli/documents_name_real_tests.rs::every_named_test_exists"));
    assert!(!exists("tests/cli/documents_name_real_tests.rs::every_named_test"));
    assert!(!exists("src/lib.rs") && exists("src/view/rules_tests.rs"));
    assert!(exists("tests/cli") && !exists("tests/cli::every_named_test_exists"));
}

#[test]
fn every_named_test_exists() {
    let others = ["docs/loaders.md", "SECURITY.md"].map(|name| repository().join(name));
    let pages = semantics_pages().into_iter().chain(others);
    let text: String = pages.map(|page| read(&page)).collect();
    let named: Vec<&str> = named_tests(&text).collect();
    assert!(named.len() > 250, "{named:?}");
    let missing: Vec<_> = named.iter().filter(|name| !exists(name)).collect();
    assert!(missing.is_empty(), "{missing:?}");
}

#[test]
fn every_promise_names_its_test() {
    let mut promises = 0;
    for page in semantics_pages() {
        let text = read(&page);
        for line in text.lines().filter(|line| line.starts_with("| ") && !line.ends_with(" test |"))
        {
            let cells: Vec<&str> = line.trim_matches(['|', ' ']).split(" | ").collect();
            assert_eq!(cells.len(), 3, "{}: {line}", page.display());
            assert!(named_tests(cells[2]).next().is_some(), "{}: {line}", page.display());
            promises += 1;
        }
    }
    assert!(promises > 220, "{promises}");
}

#[test]
fn the_index_names_every_page() {
    let index = read(&repository().join("docs/semantics.md"));
    for page in semantics_pages() {
        let link = format!("(semantics/{})", page.file_name().unwrap().to_str().unwrap());
        assert!(index.contains(&link), "{link}");
    }
}
