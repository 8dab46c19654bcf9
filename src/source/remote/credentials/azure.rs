//! Credentials of Azure in the environment.

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

/// A setting in the environment, and the name of its variable.
struct Variable {
    name: String,
    setting: Setting,
    value: String,
}

/// The settings that are not empty.
fn variables() -> Vec<Variable> {
    let variable = |(name, value): (std::ffi::OsString, std::ffi::OsString)| {
        let (name, value) = (name.into_string().ok()?, value.into_string().ok()?);
        let lower_case = name.starts_with("AZURE_").then(|| name.to_ascii_lowercase())?;
        let cli_variable = CLI_VARIABLES.iter().find(|(other, _)| *other == name);
        let setting = match cli_variable {
            Some((_, setting)) => *setting,
            None => lower_case.parse().ok()?,
        };
        (!value.is_empty()).then_some(Variable { name, setting, value })
    };
    std::env::vars_os().filter_map(variable).collect()
}

/// The credentials in the environment, in words, and a variable that holds them or leads to them.
pub fn azure_credentials() -> Option<(&'static str, String)> {
    let variables = variables();
    let find = |setting: &Setting| {
        variables.iter().find(|variable| {
            let is_off = SWITCHES.contains(setting)
                && !matches!(
                    &*variable.value.to_ascii_lowercase(),
                    "1" | "true" | "on" | "yes" | "y"
                );
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
    let mut builder = MicrosoftAzureBuilder::from_env();
    for Variable { name, setting, value } in variables() {
        let is_of_cli = CLI_VARIABLES.iter().any(|(other, _)| *other == name);
        if is_of_cli && builder.get_config_value(&setting).is_none() {
            builder = builder.with_config(setting, value);
        }
    }
    Ok(builder)
}
