//! Names the origin of a store's credentials, without their values.

use crate::source::url::StoreKind;

use super::super::credentials::{azure_credentials, describe_aws_source};
use super::super::options::RemoteOptions;

/// The variables that hold credentials or lead to them, in the order in which the client looks for them.
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
        StoreKind::Gcs => &GCS_VARIABLES,
        StoreKind::S3 | StoreKind::Azure => &[],
    };
    let is_set =
        |(name, _): &&(&str, &str)| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    if let Some((name, what)) = variables.iter().find(is_set) {
        return format!("{what} ({name})");
    }
    if let (StoreKind::Azure, Some((what, name))) = (kind, azure_credentials()) {
        return format!("{what} ({name})");
    }
    if let (StoreKind::S3, Some(source)) = (kind, describe_aws_source()) {
        return source;
    }
    match kind {
        StoreKind::Gcs if !options.instance_metadata => {
            "those of gcloud auth application-default login".to_owned()
        }
        _ if options.instance_metadata => "the metadata server's (--instance-metadata)".to_owned(),
        _ => "other variables of the environment".to_owned(),
    }
}
