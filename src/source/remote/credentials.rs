//! Credentials as users of each cloud have them. What the clients find in the environment by themselves is left to them.
//!
//! None is asked of a metadata server unless the user says so: on another network, such an address belongs to anybody.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;

use object_store::StaticCredentialProvider;
use object_store::aws::{AwsCredential, AwsCredentialProvider};
use object_store::gcp::{GcpCredential, GcpCredentialProvider};

use super::error::RemoteError;
use super::options::RemoteOptions;

/// Settings of a profile in `~/.aws`, where the environment does not state them.
#[derive(Debug, Default)]
pub struct AwsSettings {
    pub region: Option<String>,
    pub endpoint: Option<String>,
    /// `None` if the client finds credentials itself, or needs none.
    pub provider: Option<AwsCredentialProvider>,
}

/// The largest file of settings that is read.
const MAX_SETTINGS_BYTES: u64 = 1 << 20;

fn is_set(name: &str) -> bool {
    std::env::var_os(name).is_some_and(|value| !value.is_empty())
}

fn home() -> PathBuf {
    std::env::var_os("HOME").map_or_else(PathBuf::new, PathBuf::from)
}

/// Finds the profile's settings, and the credentials of S3.
pub fn aws_settings(options: &RemoteOptions) -> Result<AwsSettings, RemoteError> {
    let profile = AwsProfile::read()?;
    let setting = |name: &str, variables: &[&str]| {
        let is_stated = variables.iter().any(|variable| is_set(variable));
        if is_stated { None } else { profile.values.get(name).cloned() }
    };
    let mut settings = AwsSettings {
        region: setting("region", &["AWS_REGION", "AWS_DEFAULT_REGION"]),
        endpoint: setting(
            "endpoint_url",
            &["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT"],
        ),
        provider: None,
    };
    let in_environment = is_set("AWS_ACCESS_KEY_ID")
        || (is_set("AWS_WEB_IDENTITY_TOKEN_FILE") && is_set("AWS_ROLE_ARN"))
        || is_set("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI")
        || is_set("AWS_CONTAINER_CREDENTIALS_FULL_URI");
    if options.anonymous {
        // The client asks for credentials all the same, unless it has some. They are not sent.
        let none = AwsCredential { key_id: String::new(), secret_key: String::new(), token: None };
        settings.provider = Some(Arc::new(StaticCredentialProvider::new(none)));
    } else if !in_environment {
        settings.provider = profile.credentials()?;
        if settings.provider.is_none() && !options.instance_metadata {
            return Err(RemoteError::NoCredentials { store: "S3" });
        }
    }
    Ok(settings)
}

/// A profile of `~/.aws/config` and `~/.aws/credentials`.
#[derive(Debug, Default)]
struct AwsProfile {
    name: String,
    values: HashMap<String, String>,
}

impl AwsProfile {
    /// Reads the profile that the environment names, or the default one. Without files it is empty.
    fn read() -> Result<AwsProfile, RemoteError> {
        let named = std::env::var("AWS_PROFILE").ok().filter(|name| !name.is_empty());
        let name = named.clone().unwrap_or_else(|| "default".to_owned());
        let [config, secrets] = read_aws_files();
        let section = if name == "default" { name.clone() } else { format!("profile {name}") };
        let mut values = HashMap::new();
        let of_config = section_of(&config, &section);
        let of_secrets = section_of(&secrets, &name);
        if named.is_some() && of_config.is_none() && of_secrets.is_none() {
            let why = format!("there is no profile {name} in ~/.aws");
            return Err(RemoteError::BadCredentials { why });
        }
        values.extend(of_config.into_iter().flatten());
        values.extend(of_secrets.into_iter().flatten());
        Ok(AwsProfile { name, values })
    }

    /// The profile's credentials, if it has any.
    fn credentials(&self) -> Result<Option<AwsCredentialProvider>, RemoteError> {
        let value = |name: &str| self.values.get(name).cloned();
        if let (Some(key_id), Some(secret_key)) =
            (value("aws_access_key_id"), value("aws_secret_access_key"))
        {
            let credential =
                AwsCredential { key_id, secret_key, token: value("aws_session_token") };
            return Ok(Some(Arc::new(StaticCredentialProvider::new(credential))));
        }
        let others = ["sso_session", "sso_start_url", "role_arn", "credential_process"];
        match others.into_iter().find(|name| self.values.contains_key(*name)) {
            Some(other) => {
                let name = &self.name;
                let why = format!(
                    "the profile {name} has `{other}`; let AWS's program resolve it: eval \"$(aws configure export-credentials --profile {name} --format env)\""
                );
                Err(RemoteError::BadCredentials { why })
            }
            None => Ok(None),
        }
    }
}

/// The texts of `~/.aws/config` and `~/.aws/credentials`, or of the files that stand for them.
fn read_aws_files() -> [String; 2] {
    let file = |(variable, usual): (&str, &str)| {
        let path = std::env::var_os(variable).map(PathBuf::from);
        read_settings(&path.unwrap_or_else(|| home().join(usual)))
    };
    let files =
        [("AWS_CONFIG_FILE", ".aws/config"), ("AWS_SHARED_CREDENTIALS_FILE", ".aws/credentials")];
    files.map(file)
}

/// Both texts in one: another text may be other credentials.
pub fn aws_files() -> String {
    read_aws_files().join("\0")
}

/// The text of a file of settings; empty if it cannot be read.
fn read_settings(path: &PathBuf) -> String {
    let is_small = std::fs::metadata(path).is_ok_and(|found| found.len() <= MAX_SETTINGS_BYTES);
    if is_small { std::fs::read_to_string(path).unwrap_or_default() } else { String::new() }
}

/// The values of a section; `None` if there is no such section.
fn section_of(text: &str, section: &str) -> Option<Vec<(String, String)>> {
    let mut found: Option<Vec<(String, String)>> = None;
    let mut is_inside = false;
    for line in text.lines() {
        let trimmed = line.trim();
        if trimmed.is_empty() || trimmed.starts_with(['#', ';']) {
            continue;
        }
        if let Some(name) = trimmed.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
            let name: Vec<&str> = name.split_whitespace().collect();
            is_inside = name.join(" ") == section;
            if is_inside {
                found.get_or_insert_default();
            }
        } else if is_inside
            // Lines of a nested setting are indented.
            && !line.starts_with([' ', '\t'])
            && let Some((name, value)) = trimmed.split_once('=')
            && let Some(values) = &mut found
        {
            values.push((name.trim().to_ascii_lowercase(), value.trim().to_owned()));
        }
    }
    found
}

/// Credentials of Google Cloud for a request without any; `None` if the client finds credentials itself.
pub fn gcp_provider(options: &RemoteOptions) -> Result<Option<GcpCredentialProvider>, RemoteError> {
    const VARIABLES: [&str; 5] = [
        "GOOGLE_APPLICATION_CREDENTIALS",
        "GOOGLE_SERVICE_ACCOUNT",
        "GOOGLE_SERVICE_ACCOUNT_PATH",
        "GOOGLE_SERVICE_ACCOUNT_KEY",
        "SERVICE_ACCOUNT",
    ];
    let none = || {
        let credential = GcpCredential { bearer: String::new() };
        Some(Arc::new(StaticCredentialProvider::new(credential)) as GcpCredentialProvider)
    };
    let is_emulator = is_set("STORAGE_EMULATOR_HOST");
    if options.anonymous || is_emulator {
        return Ok(none());
    }
    let default = home().join(".config/gcloud/application_default_credentials.json");
    let has_any = VARIABLES.iter().any(|name| is_set(name)) || default.exists();
    match has_any || options.instance_metadata {
        true => Ok(None),
        false => Err(RemoteError::NoCredentials { store: "Google Cloud Storage" }),
    }
}

/// Fails if the environment has no credentials of Azure.
pub fn require_azure(options: &RemoteOptions) -> Result<(), RemoteError> {
    const VARIABLES: [&str; 9] = [
        "AZURE_STORAGE_ACCOUNT_KEY",
        "AZURE_STORAGE_ACCESS_KEY",
        "AZURE_STORAGE_KEY",
        "AZURE_STORAGE_SAS_TOKEN",
        "AZURE_STORAGE_SAS_KEY",
        "AZURE_STORAGE_TOKEN",
        "AZURE_CLIENT_SECRET",
        "AZURE_FEDERATED_TOKEN_FILE",
        "AZURE_STORAGE_USE_EMULATOR",
    ];
    let has_any = VARIABLES.iter().any(|name| is_set(name)) || is_set("AZURE_USE_AZURE_CLI");
    match has_any || options.anonymous || options.instance_metadata {
        true => Ok(()),
        false => Err(RemoteError::NoCredentials { store: "Azure" }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_section_has_its_own_values() {
        let text = "[default]\nregion = a\n# comment\n[profile  me]\nregion=b\ns3 =\n  max = 3\nendpoint_url = http://x\n";
        let values = |section: &str| section_of(text, section);
        let pair = |a: &str, b: &str| (a.to_owned(), b.to_owned());
        assert_eq!(values("default"), Some(vec![pair("region", "a")]));
        let own = vec![pair("region", "b"), pair("s3", ""), pair("endpoint_url", "http://x")];
        assert_eq!(values("profile me"), Some(own));
        assert_eq!(values("me"), None);
    }
}
