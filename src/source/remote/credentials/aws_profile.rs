//! The profiles of `~/.aws/config` and `~/.aws/credentials`.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::{home, non_empty};

/// The largest file of settings that is read.
const MAX_SETTINGS_BYTES: u64 = 1 << 20;

/// The profile without a name.
const DEFAULT_PROFILE: &str = "default";

/// Sections by their names, as in brackets, each with its values.
type Sections = BTreeMap<String, BTreeMap<String, String>>;

/// Sections of both files.
#[derive(Debug, Default)]
pub struct AwsFiles {
    config: Sections,
    secrets: Sections,
}

/// A profile: its values in both files.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AwsProfile {
    pub name: String,
    values: BTreeMap<String, String>,
    /// The session of single sign-on that it names.
    session: BTreeMap<String, String>,
}

impl AwsProfile {
    /// A value that is not empty.
    pub fn value(&self, name: &str) -> Option<&str> {
        self.values.get(name).map(String::as_str).filter(|value| !value.is_empty())
    }

    /// A value of the profile, or of its session of single sign-on.
    pub fn session_value(&self, name: &str) -> Option<&str> {
        let session_entry = || self.session.get(name).map(String::as_str);
        self.value(name).or_else(session_entry).filter(|value| !value.is_empty())
    }

    /// The option by which commands of AWS take this profile.
    pub fn option(&self) -> String {
        match self.name == DEFAULT_PROFILE {
            true => String::new(),
            false => format!(" --profile {}", crate::shell_word::shell_text(&self.name)),
        }
    }
}

/// The paths of both files, or of the files that stand for them.
fn aws_paths() -> [PathBuf; 2] {
    let path = |variable: &str, default_path: &str| {
        non_empty(variable)
            .map_or_else(|| home().join(default_path), |path| PathBuf::from(OsString::from(path)))
    };
    [
        path("AWS_CONFIG_FILE", ".aws/config"),
        path("AWS_SHARED_CREDENTIALS_FILE", ".aws/credentials"),
    ]
}

/// Inode, size and time of a file, which change with its content.
pub type FileStamp = Option<(u64, u64, i64, i64)>;

fn stamp(path: &Path) -> FileStamp {
    let found = std::fs::metadata(path).ok()?;
    Some((found.ino(), found.size(), found.mtime(), found.mtime_nsec()))
}

/// The stamps of `~/.aws/config` and `~/.aws/credentials`.
pub fn aws_stamps() -> [FileStamp; 2] {
    aws_paths().map(|path| stamp(&path))
}

impl AwsFiles {
    /// Reads both files. One that is missing has no profile.
    pub fn read() -> AwsFiles {
        let [config, secrets] = aws_paths().map(|path| parse_sections(&read_settings(&path)));
        AwsFiles { config, secrets }
    }

    #[cfg(test)]
    pub fn parse(config: &str, secrets: &str) -> AwsFiles {
        AwsFiles { config: parse_sections(config), secrets: parse_sections(secrets) }
    }

    /// The profile of a name; `None` if neither file has it.
    pub fn profile(&self, name: &str) -> Option<AwsProfile> {
        let section = format!("profile {name}");
        let config_values = self.config.get(&section);
        let config_values =
            config_values.or_else(|| self.config.get(name).filter(|_| name == DEFAULT_PROFILE));
        let secret_values = self.secrets.get(name);
        if config_values.is_none() && secret_values.is_none() {
            return None;
        }
        let values: BTreeMap<String, String> = config_values
            .into_iter()
            .chain(secret_values)
            .flatten()
            .map(|(k, v)| (k.clone(), v.clone()))
            .collect();
        let session = values
            .get("sso_session")
            .and_then(|session| self.config.get(&format!("sso-session {session}")).cloned());
        Some(AwsProfile { name: name.to_owned(), values, session: session.unwrap_or_default() })
    }

    /// The profile that the environment names, or the default one, which may be missing. The error is the
    /// missing profile that the environment names.
    pub fn current_profile(&self) -> Result<AwsProfile, String> {
        let named = non_empty("AWS_PROFILE").or_else(|| non_empty("AWS_DEFAULT_PROFILE"));
        let name = named.as_deref().unwrap_or(DEFAULT_PROFILE);
        match self.profile(name) {
            Some(profile) => Ok(profile),
            None if named.is_some() => Err(name.to_owned()),
            None => Ok(AwsProfile { name: name.to_owned(), ..AwsProfile::default() }),
        }
    }
}

/// The text of a file of settings; empty if it cannot be read.
fn read_settings(path: &Path) -> String {
    let is_small = std::fs::metadata(path).is_ok_and(|found| found.len() <= MAX_SETTINGS_BYTES);
    if is_small { std::fs::read_to_string(path).unwrap_or_default() } else { String::new() }
}

fn parse_sections(text: &str) -> Sections {
    let mut sections = Sections::new();
    let mut current: Option<String> = None;
    for line in text.lines() {
        let trimmed = line.trim();
        if trimmed.is_empty() || trimmed.starts_with(['#', ';']) {
            continue;
        }
        // A comment can stand behind the bracket.
        if let Some((name, _)) = trimmed.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
            let words: Vec<&str> = name.split_whitespace().collect();
            let name = words.join(" ").replace(['"', '\''], "");
            sections.entry(name.clone()).or_default();
            current = Some(name);
        } else if let Some(section) = &current
            // Lines of a nested setting are indented.
            && !line.starts_with([' ', '\t'])
            && let Some((name, value)) = trimmed.split_once('=')
            && let Some(values) = sections.get_mut(section)
        {
            // A comment begins behind a space.
            let value = value.split(" #").next().unwrap_or_default().trim();
            values.insert(name.trim().to_ascii_lowercase(), value.to_owned());
        }
    }
    sections
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_profile_has_the_values_of_both_files_and_of_its_session() {
        let config = "[default]\nregion = a\n# comment\n[profile  me] # mine\nregion=b # near\ns3 =\n  max = 3\n\
            sso_session = work\n[sso-session work]\nsso_region = c\nsso_start_url = https://x/start#/\n";
        let files =
            AwsFiles::parse(config, "[me]\naws_access_key_id = k\n[you]\naws_access_key_id = y\n");
        let me = files.profile("me").unwrap();
        assert_eq!(me.value("region"), Some("b"));
        assert_eq!(me.value("aws_access_key_id"), Some("k"));
        assert_eq!((me.value("s3"), me.value("max"), me.value("sso_region")), (None, None, None));
        assert_eq!(me.session_value("sso_region"), Some("c"));
        assert_eq!(me.session_value("sso_start_url"), Some("https://x/start#/"));
        assert_eq!(me.option(), " --profile me");
        assert_eq!(files.profile("default").unwrap().value("region"), Some("a"));
        assert_eq!(files.profile("you").unwrap().value("region"), None);
        assert_eq!(files.profile("work"), None);
    }
}
