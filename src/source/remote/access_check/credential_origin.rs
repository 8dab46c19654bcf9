//! Names the origin of a store's credentials, without their values.

use crate::source::url::StoreKind;

use super::super::credentials::{aws_settings, azure_credentials};
use super::super::options::RemoteOptions;

/// The variables that hold credentials or lead to them, in the order in which the clients look for them.
const S3_VARIABLES: [(&str, &str); 4] = [
    ("AWS_ACCESS_KEY_ID", "keys of the environment"),
    ("AWS_WEB_IDENTITY_TOKEN_FILE", "a web identity"),
    ("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "this container's"),
    ("AWS_CONTAINER_CREDENTIALS_FULL_URI", "this container's"),
];

const GCS_VARIABLES: [(&str, &str); 5] = [
    ("STORAGE_EMULATOR_HOST", "none, as for an emulator"),
    ("GOOGLE_SERVICE_ACCOUNT", "a service account"),
    ("GOOGLE_SERVICE_ACCOUNT_PATH", "a service account"),
    ("GOOGLE_SERVICE_ACCOUNT_KEY", "a service account"),
    ("GOOGLE_APPLICATION_CREDENTIALS", "the file of application default credentials"),
];

/// Names the origin of the credentials of an open store.
pub fn describe_origin(kind: StoreKind, options: &RemoteOptions) -> String {
    if options.anonymous {
        return "none are sent, as --anonymous says".to_owned();
    }
    let variables: &[(&str, &str)] = match kind {
        StoreKind::Http => return "none are needed".to_owned(),
        StoreKind::S3 => &S3_VARIABLES,
        StoreKind::Gcs => &GCS_VARIABLES,
        StoreKind::Azure => &[],
    };
    let is_set =
        |(name, _): &&(&str, &str)| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    if let Some((name, what)) = variables.iter().find(is_set) {
        return format!("{what} ({name})");
    }
    if let (StoreKind::Azure, Some((what, name))) = (kind, azure_credentials()) {
        return format!("{what} ({name})");
    }
    match kind {
        StoreKind::S3 if aws_settings(options).is_ok_and(|found| found.provider.is_some()) => {
            let profile = std::env::var("AWS_PROFILE").ok().filter(|name| !name.is_empty());
            format!("the profile {} of ~/.aws", profile.as_deref().unwrap_or("default"))
        }
        StoreKind::Gcs if !options.instance_metadata => {
            "those of gcloud auth application-default login".to_owned()
        }
        _ if options.instance_metadata => "the metadata server's (--instance-metadata)".to_owned(),
        _ => "other variables of the environment".to_owned(),
    }
}
