//! Finds credentials where users of each cloud keep them. Those of some clouds the clients find by themselves.
//!
//! No metadata server is asked unless the user allows it: on another network, any host may have its address.

mod authorization;
mod aws_container;
mod aws_profile;
mod aws_source;
mod aws_sso;
mod aws_token;
mod azure;
mod credential_process;
mod renewal;
mod token_service;

use std::path::PathBuf;
use std::sync::Arc;

use object_store::aws::{AwsCredential, AwsCredentialProvider};
use object_store::client::HttpConnector;
use object_store::gcp::{GcpCredential, GcpCredentialProvider};
use object_store::{ClientOptions, StaticCredentialProvider};

use crate::source::url::StoreKind;

use super::error::RemoteError;
use super::options::RemoteOptions;
use super::transport::Connector;

pub use authorization::Authorization;
use aws_profile::AwsFiles;
use aws_source::{AwsSource, find_source};
pub use azure::{azure_builder, azure_credentials};
use renewal::{RenewedCredentials, missing_profile};
use token_service::TokenServices;

/// The region of requests where none is stated.
const DEFAULT_REGION: &str = "us-east-1";

/// Settings of S3 in the profile and the environment that the client does not find by itself.
#[derive(Debug, Default)]
pub struct AwsSettings {
    pub region: Option<String>,
    pub endpoint: Option<String>,
    /// `None` if the client finds credentials itself, or needs none.
    pub provider: Option<AwsCredentialProvider>,
    /// The same provider, if it renews its credentials.
    pub renewed: Option<Arc<RenewedCredentials>>,
}

/// The value of a variable that is not empty.
pub fn non_empty(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

fn is_set(name: &str) -> bool {
    std::env::var_os(name).is_some_and(|value| !value.is_empty())
}

fn home() -> PathBuf {
    std::env::var_os("HOME").map_or_else(PathBuf::new, PathBuf::from)
}

/// The state of the file with the regions and endpoints of profiles: a change may need another client. The file of
/// credentials is left out, because clients read it again.
pub fn aws_config_state() -> String {
    let [config, _] = aws_profile::aws_stamps();
    format!("{config:?}")
}

/// The endpoint of the current profile; `None` if there is no such profile, or it states none.
pub fn aws_profile_endpoint() -> Option<String> {
    let files = AwsFiles::read();
    files.current_profile().ok()?.value("endpoint_url").map(str::to_owned)
}

/// Finds the profile's settings, and the source of the credentials of S3. No request is sent yet.
pub fn aws_settings(options: &RemoteOptions) -> Result<AwsSettings, RemoteError> {
    let files = AwsFiles::read();
    let profile = files.current_profile().map_err(missing_profile)?;
    let setting = |name: &str, variables: &[&str]| {
        let is_stated = variables.iter().any(|variable| is_set(variable));
        if is_stated { None } else { profile.value(name).map(str::to_owned) }
    };
    let mut settings = AwsSettings {
        region: setting("region", &["AWS_REGION", "AWS_DEFAULT_REGION"]),
        endpoint: setting(
            "endpoint_url",
            &["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT"],
        ),
        ..AwsSettings::default()
    };
    if options.anonymous {
        // A client without credentials would look for some. These are never sent.
        let none = AwsCredential { key_id: String::new(), secret_key: String::new(), token: None };
        settings.provider = Some(Arc::new(StaticCredentialProvider::new(none)));
        return Ok(settings);
    }
    let source = find_source(&files, &profile)?;
    let has_environment_keys = non_empty("AWS_ACCESS_KEY_ID").is_some();
    match source {
        // Keys of the environment stay as they are for as long as the process lives.
        Some(AwsSource::Keys(_)) if has_environment_keys => {}
        Some(_) => {
            let region = non_empty("AWS_REGION")
                .or_else(|| non_empty("AWS_DEFAULT_REGION"))
                .or_else(|| settings.region.clone());
            let connector = Connector::new(options, StoreKind::S3, None)?;
            let other =
                |error: object_store::Error| RemoteError::Other { message: error.to_string() };
            let client_options = ClientOptions::new().with_allow_http(options.allow_http);
            let services = TokenServices {
                client: connector.connect(&client_options).map_err(other)?,
                connector,
                region: region.unwrap_or_else(|| DEFAULT_REGION.to_owned()),
                endpoint: settings.endpoint.clone(),
            };
            let renewed = Arc::new(RenewedCredentials::new(services));
            settings.provider = Some(Arc::clone(&renewed) as AwsCredentialProvider);
            settings.renewed = Some(renewed);
        }
        None if options.instance_metadata => {}
        None => return Err(RemoteError::NoCredentials { store: "S3" }),
    }
    Ok(settings)
}

/// Names the source of S3 credentials, without their values; `None` if there is none.
pub fn describe_aws_source() -> Option<String> {
    let files = AwsFiles::read();
    let profile = files.current_profile().ok()?;
    Some(match find_source(&files, &profile).ok()?? {
        AwsSource::Keys(_) if is_set("AWS_ACCESS_KEY_ID") => {
            "keys of the environment (AWS_ACCESS_KEY_ID)".to_owned()
        }
        AwsSource::WebIdentity { .. } if is_set("AWS_WEB_IDENTITY_TOKEN_FILE") => {
            "a web identity (AWS_WEB_IDENTITY_TOKEN_FILE)".to_owned()
        }
        AwsSource::Container(service) => format!("this container's ({})", service.variable),
        _ => format!("the profile {} of ~/.aws", profile.name),
    })
}

/// Variables that state credentials of Google Cloud.
const GCP_VARIABLES: [&str; 5] = [
    "GOOGLE_APPLICATION_CREDENTIALS",
    "GOOGLE_SERVICE_ACCOUNT",
    "GOOGLE_SERVICE_ACCOUNT_PATH",
    "GOOGLE_SERVICE_ACCOUNT_KEY",
    "SERVICE_ACCOUNT",
];

/// Credentials of Google Cloud for a request without any; `None` if the client finds credentials itself.
pub fn gcp_provider(options: &RemoteOptions) -> Result<Option<GcpCredentialProvider>, RemoteError> {
    let none = || {
        let credential = GcpCredential { bearer: String::new() };
        Some(Arc::new(StaticCredentialProvider::new(credential)) as GcpCredentialProvider)
    };
    let is_emulator = is_set("STORAGE_EMULATOR_HOST");
    if options.anonymous || is_emulator {
        return Ok(none());
    }
    let has_any = GCP_VARIABLES.iter().any(|name| is_set(name)) || gcp_default_path().is_file();
    match has_any || options.instance_metadata {
        true => Ok(None),
        false => Err(RemoteError::NoCredentials { store: "Google Cloud Storage" }),
    }
}

/// The file in which `gcloud auth application-default login` leaves credentials.
fn gcp_default_path() -> PathBuf {
    let folder = std::env::var_os("CLOUDSDK_CONFIG").filter(|folder| !folder.is_empty());
    let folder = folder.map_or_else(|| home().join(".config/gcloud"), PathBuf::from);
    folder.join("application_default_credentials.json")
}

/// The file of `gcloud`'s login, where the client does not look for it by itself.
pub fn gcp_default_file() -> Option<PathBuf> {
    let is_stated = GCP_VARIABLES.iter().any(|name| is_set(name));
    let moved = (!is_stated && is_set("CLOUDSDK_CONFIG")).then(gcp_default_path);
    moved.filter(|path| path.is_file())
}
