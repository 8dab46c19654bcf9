//! Credentials of Azure in the environment.

use std::ffi::OsString;

use object_store::azure::{AzureConfigKey as Setting, MicrosoftAzureBuilder};

use super::super::error::RemoteError;
use super::super::options::RemoteOptions;

/// Variables of the Azure CLI that the client does not read.
const CLI_VARIABLES: [(&str, Setting); 2] =
    [("AZURE_STORAGE_ACCOUNT", Setting::AccountName), ("AZURE_STORAGE_KEY", Setting::AccessKey)];

/// Sets of settings, each with credentials, in the order in which the client looks for them unless a type is selected.
/// With an incomplete set, the client would ask for the machine's managed identity.
const CREDENTIALS: [(&[Setting], &str); 8] = [
    (&[Setting::UseEmulator], "those of the emulator"),
    (
        &[
            Setting::FabricTokenServiceUrl,
            Setting::FabricWorkloadHost,
            Setting::FabricSessionToken,
            Setting::FabricClusterIdentifier,
        ],
        "a session of Fabric",
    ),
    (&[Setting::Token], "a token"),
    (&[Setting::AccessKey], "the account's key"),
    (
        &[Setting::FederatedTokenFile, Setting::ClientId, Setting::AuthorityId],
        "a workload identity",
    ),
    (&[Setting::ClientSecret, Setting::ClientId, Setting::AuthorityId], "a service principal"),
    (&[Setting::SasKey], "a shared access signature"),
    (&[Setting::UseAzureCli], "the login of az"),
];

/// Settings that are on or off.
const SWITCHES: [Setting; 2] = [Setting::UseEmulator, Setting::UseAzureCli];

/// Whether the client takes the value of a switch for yes.
fn is_on(value: &str) -> bool {
    matches!(&*value.to_ascii_lowercase(), "1" | "true" | "on" | "yes" | "y")
}

/// A setting in the environment, and the name of its variable.
struct Variable {
    name: String,
    setting: Setting,
    value: String,
    is_of_cli: bool,
}

/// The settings that are not empty, each once. What is checked and what the client gets are the same.
fn variables() -> Vec<Variable> {
    let parse = |(name, value): (OsString, OsString)| {
        let (name, value) = (name.into_string().ok()?, value.into_string().ok()?);
        let lower_case = name.starts_with("AZURE_").then(|| name.to_ascii_lowercase())?;
        let cli_variable = CLI_VARIABLES.iter().find(|(other, _)| *other == name);
        let is_of_cli = cli_variable.is_some();
        let setting = match cli_variable {
            Some((_, setting)) => *setting,
            None => lower_case.parse().ok()?,
        };
        (!value.is_empty()).then_some(Variable { name, setting, value, is_of_cli })
    };
    let mut variables: Vec<Variable> = std::env::vars_os().filter_map(parse).collect();
    variables.sort_by_key(|variable| variable.is_of_cli);
    let mut known = Vec::new();
    variables.retain(|variable| {
        let is_new = !known.contains(&variable.setting);
        known.push(variable.setting);
        is_new
    });
    variables
}

/// The credentials in the environment, in words, and a variable that holds them or leads to them.
pub fn azure_credentials() -> Option<(&'static str, String)> {
    let variables = variables();
    let find = |setting: &Setting| {
        variables.iter().find(|variable| {
            let is_off = SWITCHES.contains(setting) && !is_on(&variable.value);
            variable.setting == *setting && !is_off
        })
    };
    if let Some(selected) = find(&Setting::CredentialType).filter(|found| found.value != "auto") {
        let is_allowed = selected.value != "managed_identity";
        return is_allowed.then(|| ("those of the selected type", selected.name.clone()));
    }
    CREDENTIALS.iter().find_map(|(settings, description)| {
        let found: Option<Vec<_>> = settings.iter().map(find).collect();
        Some((*description, found?.first()?.name.clone()))
    })
}

/// A client's builder with the settings of the environment. Fails if these have no credentials.
pub fn azure_builder(
    options: &RemoteOptions,
    has_query: bool,
) -> Result<MicrosoftAzureBuilder, RemoteError> {
    let needs_none = has_query || options.anonymous || options.instance_metadata;
    if !needs_none && azure_credentials().is_none() {
        return Err(RemoteError::NoCredentials { store: "Azure" });
    }
    let mut builder = MicrosoftAzureBuilder::new();
    for Variable { setting, value, .. } in variables() {
        builder = builder.with_config(setting, value);
    }
    if let Ok(endpoint) = std::env::var("IDENTITY_ENDPOINT") {
        builder = builder.with_msi_endpoint(endpoint);
    }
    let uses_emulator = builder.get_config_value(&Setting::UseEmulator);
    if uses_emulator.is_some_and(|value| is_on(&value)) && !options.allow_http {
        return Err(RemoteError::PlainHttp);
    }
    Ok(builder)
}
