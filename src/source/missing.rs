//! What a path that does not exist was most likely meant as: a URL, or the name of a model on a hub.

use std::path::Path;

use crate::shell_word::{shell_text, shell_word};

/// The two addresses of the hub, as they stand in URLs.
const HUB_HOSTS: [&str; 2] = ["huggingface.co", "hf.co"];

/// What names a model that is not on this machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RemoteName<'a> {
    /// `org/name`, or an address of such a repository.
    HubModel { repository: &'a str, is_url: bool },
    /// The path in a URL of the scheme `file`.
    FileUrl(&'a str),
    /// Any other URL, by its scheme.
    Url { scheme: &'a str },
}

/// Whether a missing path names something on another machine.
pub fn is_remote_name(path: &Path) -> bool {
    remote_name(path).is_some()
}

/// What to say of a path that does not exist.
pub fn describe_missing(path: &Path) -> &'static str {
    match remote_name(path) {
        Some(RemoteName::HubModel { is_url: false, .. }) => {
            "no such file or directory; it looks like the name of a model on the Hugging Face hub, and ckptfs reads files on disk"
        }
        Some(_) => "is a URL, and ckptfs reads files on disk",
        None => "no such file or directory",
    }
}

/// What the user can do about a path that does not exist.
pub fn missing_remedy(path: &Path) -> String {
    match remote_name(path) {
        Some(RemoteName::HubModel { repository, .. }) => format!(
            "fetch it first, and give the directory that this prints: hf download {repository}"
        ),
        Some(RemoteName::FileUrl(inner)) => format!("give the path alone: {}", shell_text(inner)),
        Some(RemoteName::Url { scheme }) => {
            let url = shell_word(path);
            let command = match scheme {
                "http" | "https" if is_file_url(path) => format!("curl -L -O {url}"),
                "s3" if is_file_url(path) => format!("aws s3 cp {url} ."),
                "s3" => format!("aws s3 sync {url} model"),
                "gs" => format!("gcloud storage cp -r {url} ."),
                _ => return "fetch it first, and give the path of the file on disk".to_owned(),
            };
            format!("fetch it first: {command}")
        }
        None => match existing_ancestor(path) {
            Some(directory) => format!("check the path: ls {}", shell_word(directory)),
            None => "check the path".to_owned(),
        },
    }
}

/// The longest part of a path that is an existing directory.
fn existing_ancestor(path: &Path) -> Option<&Path> {
    let mut above = path.ancestors().skip(1);
    let found = above.find(|above| !above.as_os_str().is_empty() && above.is_dir());
    found.or_else(|| path.is_relative().then_some(Path::new(".")))
}

fn remote_name(path: &Path) -> Option<RemoteName<'_>> {
    let text = path.to_str()?;
    match text.split_once(":/") {
        Some((scheme, rest)) if is_scheme(scheme) => {
            // Python's paths have one slash where a URL has two.
            let rest = rest.trim_start_matches('/');
            let hub_path = match scheme {
                "hf" => Some(rest.strip_prefix("models/").unwrap_or(rest)),
                "http" | "https" => {
                    HUB_HOSTS.iter().find_map(|host| rest.strip_prefix(host)?.strip_prefix('/'))
                }
                _ => None,
            };
            let repository = hub_path.and_then(first_two_parts);
            Some(match (repository, scheme) {
                (Some(repository), _) => RemoteName::HubModel { repository, is_url: true },
                (None, "file") => RemoteName::FileUrl(&text[text.len() - rest.len() - 1..]),
                (None, _) => RemoteName::Url { scheme },
            })
        }
        _ => {
            let host_path =
                HUB_HOSTS.iter().find_map(|host| text.strip_prefix(host)?.strip_prefix('/'));
            match host_path.and_then(first_two_parts).filter(|_| !path.exists()) {
                Some(repository) => Some(RemoteName::HubModel { repository, is_url: true }),
                None => {
                    // Shells complete the name of a directory with a slash.
                    let repository = text.strip_suffix('/').unwrap_or(text);
                    is_hub_name(path, repository)
                        .then_some(RemoteName::HubModel { repository, is_url: false })
                }
            }
        }
    }
}

/// Whether the path in a URL ends like a file, and not like a page about one.
fn is_file_url(url: &Path) -> bool {
    let text = url.to_string_lossy();
    let path = text.split(['?', '#']).next().unwrap_or_default();
    FILE_EXTENSIONS.iter().any(|extension| path.ends_with(extension)) && !path.contains("/blob/")
}

fn is_scheme(text: &str) -> bool {
    text.len() > 1 && text.bytes().all(|b| b.is_ascii_alphanumeric() || b"+-.".contains(&b))
}

/// The repository in the path of a hub's URL: `org/name`.
fn first_two_parts(path: &str) -> Option<&str> {
    let (organization, rest) = path.split_once('/')?;
    let name = rest.split(['/', '?', '#']).next().unwrap_or_default();
    // Pages of the hub that are no models.
    let is_other = ["datasets", "spaces", "docs", "blog", "api", "papers"].contains(&organization);
    let is_repository = is_hub_word(organization) && is_hub_word(name) && !is_other;
    is_repository.then(|| &path[..organization.len() + 1 + name.len()])
}

/// Whether a missing path reads as `org/name`, where no directory `org` exists.
fn is_hub_name(path: &Path, text: &str) -> bool {
    let Some((organization, name)) = text.split_once('/') else { return false };
    let is_file_name = FILE_EXTENSIONS.iter().any(|extension| name.ends_with(extension));
    let is_name = is_hub_word(organization) && is_hub_word(name) && !is_file_name;
    is_name && !path.parent().is_some_and(Path::exists)
}

/// Names of models on the hub do not end like these.
const FILE_EXTENSIONS: [&str; 7] =
    [".safetensors", ".ckpt", ".pt", ".pth", ".bin", ".json", ".gguf"];

/// Whether a text can be the name of a user or of a model on the hub.
fn is_hub_word(text: &str) -> bool {
    let is_allowed = |b: u8| b.is_ascii_alphanumeric() || b"-_.".contains(&b);
    (1..=96).contains(&text.len()) && !text.starts_with('.') && text.bytes().all(is_allowed)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn remedy(path: &str) -> String {
        missing_remedy(Path::new(path))
    }

    #[test]
    fn names_of_other_machines_are_told_apart_from_paths() {
        for (path, command) in [
            ("meta-llama/Llama-3", "hf download meta-llama/Llama-3"),
            ("hf://org/name/model.safetensors", "hf download org/name"),
            ("https://huggingface.co/org/name/resolve/main/x.bin", "hf download org/name"),
            ("https:/hf.co/org/name", "hf download org/name"),
            ("https://example.com/a/m.pt", "curl -L -O https://example.com/a/m.pt"),
            ("https://example.com/m.pt?a&b", "curl -L -O 'https://example.com/m.pt?a&b'"),
            ("https://example.com/a/m", "give the path of the file on disk"),
            ("https://example.com/a/blob/main/m.pt", "give the path of the file on disk"),
            ("https://huggingface.co/datasets/org/name", "give the path of the file on disk"),
            ("huggingface.co/org/name", "hf download org/name"),
            ("meta-llama/Llama-3/", "hf download meta-llama/Llama-3"),
            ("s3://bucket/m", "aws s3 sync s3://bucket/m model"),
            ("s3://bucket/m.pt", "aws s3 cp s3://bucket/m.pt ."),
            ("gs://bucket/m", "gcloud storage cp -r gs://bucket/m ."),
            ("file:///nowhere/m.pt", "give the path alone: /nowhere/m.pt"),
            ("azure://m/x", "fetch it first"),
        ] {
            assert!(is_remote_name(Path::new(path)), "{path}");
            assert!(remedy(path).contains(command), "{path}: {}", remedy(path));
        }
    }

    #[test]
    fn paths_are_paths() {
        for path in [
            "/nowhere/m.pt",
            "m.pt",
            "./org/name",
            "../name",
            "a/b/c",
            "src/nothing",
            "c:/x",
            "runs/m.ckpt",
            "o/m.bin",
        ] {
            assert!(!is_remote_name(Path::new(path)), "{path}");
            assert!(remedy(path).starts_with("check the path: ls "), "{path}: {}", remedy(path));
        }
        assert_eq!(remedy("src/nothing/at/all"), "check the path: ls src");
        assert_eq!(remedy("/nowhere/m.pt"), "check the path: ls /");
    }
}
