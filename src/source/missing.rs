//! What a path that does not exist was most likely meant as: a URL, or the name of a model on a hub.

use std::borrow::Cow;
use std::path::Path;

use crate::shell_word::{shell_text, shell_word};

use super::url::{HIDDEN_QUERY, HUB_HOSTS, is_source_url};

/// What names a model that is not on this machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RemoteName<'a> {
    /// `org/name`, or an address of such a repository.
    HubModel { model: HubModel<'a>, is_url: bool },
    /// The path in a URL of the scheme `file`.
    FileUrl(&'a str),
    /// Any other URL, by its scheme.
    Url { scheme: &'a str },
}

/// A model of a hub, and the revision of it that was named.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct HubModel<'a> {
    repository: &'a str,
    revision: Option<&'a str>,
}

impl<'a> HubModel<'a> {
    /// Parses `NAME`, `NAME@REVISION` or `NAME:REVISION`, where `is_repository` decides what a name is.
    fn parse(text: &'a str, is_repository: impl Fn(&str) -> bool) -> Option<Self> {
        let (repository, revision) = match text.split_once(['@', ':']) {
            Some((repository, revision)) => (repository, Some(revision)),
            None => (text, None),
        };
        let is_file = |text: &str| FILE_EXTENSIONS.iter().any(|end| text.ends_with(end));
        let is_model = is_repository(repository) && revision.is_none_or(is_revision);
        let is_file_name = is_file(repository) || is_file(text);
        (is_model && !is_file_name).then_some(HubModel { repository, revision })
    }

    /// The command that fetches it.
    fn download_command(&self) -> String {
        let HubModel { repository, revision } = self;
        let option = revision.map_or(String::new(), |revision| format!(" --revision {revision}"));
        format!("hf download {repository}{option}")
    }
}

/// Whether a missing path names something on another machine.
pub fn is_remote_name(path: &Path) -> bool {
    remote_name(path).is_some()
}

/// Whether this build reads what a URL names.
fn has_client(url: &Path) -> bool {
    cfg!(feature = "remote") && is_source_url(url)
}

/// A path that does not exist, as messages show it: of a URL of any kind without user name and query string.
pub fn shown_missing_path(path: &Path) -> Cow<'_, str> {
    let text = path.to_string_lossy();
    if url_scheme(path).is_none() {
        return text;
    }
    let (url, query) = match text.find(['?', '#']) {
        Some(at) => (&text[..at], HIDDEN_QUERY),
        None => (&*text, ""),
    };
    let host_start =
        url.find(":/").map_or(0, |at| url.len() - url[at + 2..].trim_start_matches('/').len());
    let host_end = url[host_start..].find('/').map_or(url.len(), |at| host_start + at);
    match url[host_start..host_end].rfind('@') {
        Some(at) => format!("{}…{}{query}", &url[..host_start], &url[host_start + at..]).into(),
        None => format!("{url}{query}").into(),
    }
}

/// What to say of a path that does not exist.
pub fn describe_missing(path: &Path) -> &'static str {
    match remote_name(path) {
        Some(RemoteName::Url { .. }) if has_client(path) => {
            "the store has no such object or directory"
        }
        Some(RemoteName::HubModel { is_url: false, .. }) => {
            "no such file or directory; it looks like the name of a model on the Hugging Face hub, and ckptfs reads files on disk"
        }
        Some(_) => "is a URL of a kind that ckptfs does not read",
        None => "no such file or directory",
    }
}

/// What the user can do about a path that does not exist.
pub fn missing_remedy(path: &Path) -> String {
    match remote_name(path) {
        Some(RemoteName::Url { .. }) if has_client(path) => {
            "check the URL, and the endpoint that the environment states".to_owned()
        }
        Some(RemoteName::HubModel { model, .. }) => format!(
            "fetch it first, and give the directory that this prints: {}",
            model.download_command()
        ),
        Some(RemoteName::FileUrl(inner)) => format!("give the path alone: {}", shell_text(inner)),
        Some(RemoteName::Url { .. }) => no_client_remedy(path),
        None => {
            let check = match existing_ancestor(path) {
                Some(directory) => format!("check the path: ls {}", shell_word(directory)),
                None => "check the path".to_owned(),
            };
            match single_word(path) {
                Some(model) => format!(
                    "{check}; or, if it is the name of a model on the Hugging Face hub, fetch it, \
                     and give the directory that this prints: {}",
                    model.download_command()
                ),
                None => check,
            }
        }
    }
}

/// What the user can do about a URL that is not read.
pub fn no_client_remedy(url: &Path) -> String {
    let scheme = url_scheme(url).unwrap_or_default();
    let word = shell_word(url);
    let command = match scheme {
        "http" | "https" if is_file_url(url) => format!("curl -L -O {word}"),
        "s3" if is_file_url(url) => format!("aws s3 cp {word} ."),
        "s3" => format!("aws s3 sync {word} model"),
        "gs" => format!("gcloud storage cp -r {word} ."),
        _ => return "fetch it first, and give the path of the file on disk".to_owned(),
    };
    format!("fetch it first: {command}")
}

/// The model that a missing path of one word may name, such as `gpt2`: old models of the hub have no organization.
fn single_word(path: &Path) -> Option<HubModel<'_>> {
    HubModel::parse(path.to_str()?, |word| is_hub_word(word) && !word.contains('.'))
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
            let model = hub_path.and_then(|path| match scheme {
                // Old models of the hub have no organization.
                "hf" if !path.contains('/') => HubModel::parse(path, is_hub_word),
                _ => model_of_url(path),
            });
            Some(match (model, scheme) {
                (Some(model), _) => RemoteName::HubModel { model, is_url: true },
                (None, "file") => RemoteName::FileUrl(&text[text.len() - rest.len() - 1..]),
                (None, _) => RemoteName::Url { scheme },
            })
        }
        _ => {
            let host_path =
                HUB_HOSTS.iter().find_map(|host| text.strip_prefix(host)?.strip_prefix('/'));
            match host_path.and_then(model_of_url).filter(|_| !path.exists()) {
                Some(model) => Some(RemoteName::HubModel { model, is_url: true }),
                None => {
                    // Shells complete the name of a directory with a slash.
                    let text = text.strip_suffix('/').unwrap_or(text);
                    let model = HubModel::parse(text, is_hub_name)?;
                    Some(RemoteName::HubModel { model, is_url: false })
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

/// The scheme of a path that is a URL of any kind.
pub fn url_scheme(path: &Path) -> Option<&str> {
    let (scheme, _) = path.to_str()?.split_once(":/")?;
    is_scheme(scheme).then_some(scheme)
}

fn is_scheme(text: &str) -> bool {
    text.len() > 1 && text.bytes().all(|b| b.is_ascii_alphanumeric() || b"+-.".contains(&b))
}

/// The model in the path of a hub's URL: `org/name`, with the revision behind it.
fn model_of_url(path: &str) -> Option<HubModel<'_>> {
    let path = path.split(['?', '#']).next().unwrap_or_default();
    let (organization, rest) = path.split_once('/')?;
    let (name, pages) = rest.split_once('/').unwrap_or((rest, ""));
    // Pages of the hub that are no models.
    let is_other = ["datasets", "spaces", "docs", "blog", "api", "papers"].contains(&organization);
    let model = HubModel::parse(&path[..organization.len() + 1 + name.len()], is_repository)?;
    let page_revision = pages.split_once('/').and_then(|(page, rest)| {
        let revision = rest.split('/').next().filter(|revision| is_revision(revision))?;
        (["tree", "blob", "resolve"].contains(&page) && revision != "main").then_some(revision)
    });
    (!is_other).then(|| HubModel { revision: model.revision.or(page_revision), ..model })
}

/// Whether a text is `org/name`.
fn is_repository(text: &str) -> bool {
    text.split_once('/')
        .is_some_and(|(organization, name)| is_hub_word(organization) && is_hub_word(name))
}

/// Whether a missing path reads as `org/name`, where no directory `org` exists.
fn is_hub_name(text: &str) -> bool {
    let organization = text.split('/').next().unwrap_or_default();
    is_repository(text) && !Path::new(organization).exists()
}

/// Names of models on the hub do not end like these.
const FILE_EXTENSIONS: [&str; 7] =
    [".safetensors", ".ckpt", ".pt", ".pth", ".bin", ".json", ".gguf"];

/// Whether a text can be the name of a user or of a model on the hub.
fn is_hub_word(text: &str) -> bool {
    let is_allowed = |b: u8| b.is_ascii_alphanumeric() || b"-_.".contains(&b);
    (1..=96).contains(&text.len()) && !text.starts_with('.') && text.bytes().all(is_allowed)
}

/// Whether a text can be a branch, a tag or a commit of a model.
fn is_revision(text: &str) -> bool {
    let is_allowed = |b: u8| b.is_ascii_alphanumeric() || b"-_./".contains(&b);
    (1..=256).contains(&text.len())
        && !text.starts_with(['-', '/', '.'])
        && text.bytes().all(is_allowed)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn remedy(path: &str) -> String {
        let path = Path::new(path);
        if has_client(path) { no_client_remedy(path) } else { missing_remedy(path) }
    }

    #[test]
    fn a_url_that_is_not_read_is_shown_without_secrets() {
        for (path, shown) in [
            ("ftp://me:secret@host/a", "ftp://…@host/a"),
            ("abfs://files@account/a?secret", "abfs://…@account/a?…"),
            ("hf:/me:secret@host", "hf:/…@host"),
            ("hf://org/name@v1", "hf://org/name@v1"),
            ("ftp://host?a=b@secret/c", "ftp://host?…"),
            ("models/a@b?c", "models/a@b?c"),
        ] {
            assert_eq!(shown_missing_path(Path::new(path)), shown);
        }
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
            ("hf://gpt2", "hf download gpt2"),
            ("org/name@v1.0", "hf download org/name --revision v1.0"),
            ("org/name:tag", "hf download org/name --revision tag"),
            ("org/name@refs/pr/1", "hf download org/name --revision refs/pr/1"),
            ("hf://org/name@v1.0/model.safetensors", "hf download org/name --revision v1.0"),
            ("https://huggingface.co/org/name/tree/v1", "hf download org/name --revision v1"),
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
            "o/m.bin@v1",
            "o/m@v1.pt",
            "src/nothing@v1",
            "m@v1.pt",
            "m@-x",
        ] {
            assert!(!is_remote_name(Path::new(path)), "{path}");
            assert!(remedy(path).starts_with("check the path: ls "), "{path}: {}", remedy(path));
            assert!(!remedy(path).contains("hf download"), "{path}: {}", remedy(path));
        }
        assert_eq!(remedy("src/nothing/at/all"), "check the path: ls src");
        assert_eq!(remedy("nothing.pt"), "check the path: ls .");
        assert_eq!(remedy("/nowhere/m.pt"), "check the path: ls /");
    }

    #[test]
    fn a_single_word_is_a_path_and_perhaps_a_model() {
        for (path, command) in [
            ("gpt2", "hf download gpt2"),
            ("bert-base-uncased", "hf download bert-base-uncased"),
            ("gpt2@v1.0", "hf download gpt2 --revision v1.0"),
        ] {
            assert!(!is_remote_name(Path::new(path)), "{path}");
            assert_eq!(describe_missing(Path::new(path)), "no such file or directory");
            let expected = format!(
                "check the path: ls .; or, if it is the name of a model on the Hugging Face hub, \
                 fetch it, and give the directory that this prints: {command}"
            );
            assert_eq!(remedy(path), expected);
        }
    }
}
