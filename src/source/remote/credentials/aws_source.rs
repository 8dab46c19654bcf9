//! Finds the source of S3 credentials in the environment and the profiles of `~/.aws`. No request is sent.

use std::path::PathBuf;

use super::super::failure::CredentialError;
use super::aws_container::ContainerService;
use super::aws_profile::{AwsFiles, AwsProfile};
use super::non_empty;

/// Maximum length of a chain of profiles, each with credentials of the next: each costs a request.
const MAX_PROFILE_DEPTH: usize = 5;

/// The name of a session of a role, where the user gives none.
const SESSION_NAME: &str = "ckptfs";

/// Keys that are stated, with the token of a session if they are temporary.
#[derive(Clone, PartialEq, Eq)]
pub struct AwsKeys {
    pub key_id: String,
    pub secret_key: String,
    pub token: Option<String>,
}

impl std::fmt::Debug for AwsKeys {
    // Keys are never shown.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AwsKeys").finish_non_exhaustive()
    }
}

/// The source of credentials.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AwsSource {
    /// Keys in the environment or in a profile.
    Keys(AwsKeys),
    /// A role that other credentials assume.
    Role { role: AwsRole, base: Box<AwsSource> },
    /// A role that an identity assumes, by its token in a file.
    WebIdentity { role: AwsRole, token_file: PathBuf },
    /// Single sign-on: a token that `aws sso login` has left.
    SingleSignOn(SsoAccount),
    /// A command that prints credentials.
    Process { command: String, profile: String },
    /// The service of a container.
    Container(ContainerService),
}

/// A role, and the parameters to assume it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AwsRole {
    pub arn: String,
    pub session_name: String,
    pub external_id: Option<String>,
    pub duration_seconds: Option<u32>,
}

/// A role of an account of single sign-on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SsoAccount {
    /// The name of the session, or the address where an older profile logs in: the cached token is found by it.
    pub cache_name: String,
    pub region: String,
    pub account_id: String,
    pub role_name: String,
    /// The command that logs in.
    pub login: String,
}

/// The source that the environment and the current profile state, if any.
pub fn find_source(
    files: &AwsFiles,
    profile: &AwsProfile,
) -> Result<Option<AwsSource>, CredentialError> {
    if let Some(keys) = environment_keys() {
        return Ok(Some(AwsSource::Keys(keys)));
    }
    // A role of the profile comes before the identity of the environment, as in AWS's own programs.
    let takes_role = profile.value("role_arn").is_some()
        && ["source_profile", "credential_source"].iter().any(|name| profile.value(name).is_some());
    if !takes_role
        && let (Some(token_file), Some(arn)) =
            (non_empty("AWS_WEB_IDENTITY_TOKEN_FILE"), non_empty("AWS_ROLE_ARN"))
    {
        let session_name = non_empty("AWS_ROLE_SESSION_NAME");
        let role = AwsRole {
            arn,
            session_name: session_name.unwrap_or_else(|| SESSION_NAME.to_owned()),
            external_id: None,
            duration_seconds: None,
        };
        return Ok(Some(AwsSource::WebIdentity { role, token_file: token_file.into() }));
    }
    match source_of_profile(files, profile, &mut Vec::new())? {
        Some(source) => Ok(Some(source)),
        None => Ok(ContainerService::from_environment()?.map(AwsSource::Container)),
    }
}

fn environment_keys() -> Option<AwsKeys> {
    Some(AwsKeys {
        key_id: non_empty("AWS_ACCESS_KEY_ID")?,
        secret_key: non_empty("AWS_SECRET_ACCESS_KEY")?,
        token: non_empty("AWS_SESSION_TOKEN"),
    })
}

/// The source that a profile states. `above` are the profiles that take their credentials from it.
fn source_of_profile(
    files: &AwsFiles,
    profile: &AwsProfile,
    above: &mut Vec<String>,
) -> Result<Option<AwsSource>, CredentialError> {
    // A profile may name itself as the source, if it has keys.
    let names_itself = above.last() == Some(&profile.name);
    if !names_itself && let Some(arn) = profile.value("role_arn") {
        let role = role_of_profile(profile, arn);
        if let Some(token_file) = profile.value("web_identity_token_file") {
            return Ok(Some(AwsSource::WebIdentity { role, token_file: token_file.into() }));
        }
        if profile.value("mfa_serial").is_some() {
            return Err(export_error(profile, "asks for a code of a second factor (mfa_serial)"));
        }
        let base = base_of_role(files, profile, above)?;
        return Ok(Some(AwsSource::Role { role, base: Box::new(base) }));
    }
    if let Some(account) = sso_account(profile)? {
        return Ok(Some(AwsSource::SingleSignOn(account)));
    }
    if let (Some(key_id), Some(secret_key)) =
        (profile.value("aws_access_key_id"), profile.value("aws_secret_access_key"))
    {
        return Ok(Some(AwsSource::Keys(AwsKeys {
            key_id: key_id.to_owned(),
            secret_key: secret_key.to_owned(),
            token: profile.value("aws_session_token").map(str::to_owned),
        })));
    }
    Ok(profile.value("credential_process").map(|command| AwsSource::Process {
        command: command.to_owned(),
        profile: profile.name.clone(),
    }))
}

fn role_of_profile(profile: &AwsProfile, arn: &str) -> AwsRole {
    AwsRole {
        arn: arn.to_owned(),
        session_name: profile.value("role_session_name").unwrap_or(SESSION_NAME).to_owned(),
        external_id: profile.value("external_id").map(str::to_owned),
        duration_seconds: profile.value("duration_seconds").and_then(|text| text.parse().ok()),
    }
}

/// The source of the credentials that assume a role.
fn base_of_role(
    files: &AwsFiles,
    profile: &AwsProfile,
    above: &mut Vec<String>,
) -> Result<AwsSource, CredentialError> {
    let wrong = |why: &str| CredentialError {
        why: format!("the profile {} {why}", profile.name),
        remedy: "correct it in ~/.aws/config".to_owned(),
    };
    match (profile.value("source_profile"), profile.value("credential_source")) {
        (Some(name), _) => {
            if above.len() >= MAX_PROFILE_DEPTH || (above.iter().any(|known| known == name)) {
                return Err(wrong("takes its credentials from itself by source_profile"));
            }
            let source = files.profile(name).ok_or_else(|| {
                wrong(&format!("has source_profile = {name}, and there is no such profile"))
            })?;
            above.push(profile.name.clone());
            source_of_profile(files, &source, above)?.ok_or_else(|| {
                wrong(&format!("has source_profile = {name}, which has no credentials"))
            })
        }
        (None, Some("Environment")) => environment_keys().map(AwsSource::Keys).ok_or_else(|| {
            wrong("has credential_source = Environment, and AWS_ACCESS_KEY_ID is not set")
        }),
        (None, Some("EcsContainer")) => {
            ContainerService::from_environment()?.map(AwsSource::Container).ok_or_else(|| {
                wrong(
                    "has credential_source = EcsContainer, and this is no container of ECS or EKS",
                )
            })
        }
        (None, Some(other)) => {
            Err(export_error(profile, &format!("has credential_source = {other}")))
        }
        (None, None) => Err(wrong("has role_arn without source_profile")),
    }
}

/// Single sign-on, if a profile logs in by it.
fn sso_account(profile: &AwsProfile) -> Result<Option<SsoAccount>, CredentialError> {
    let session = profile.value("sso_session");
    if session.is_none() && profile.value("sso_start_url").is_none() {
        return Ok(None);
    }
    let required = |name: &str| {
        profile.session_value(name).map(str::to_owned).ok_or_else(|| CredentialError {
            why: format!("the profile {} logs in with SSO, and has no {name}", profile.name),
            remedy: format!("complete it: aws configure sso{}", profile.option()),
        })
    };
    let cache_name =
        session.map_or_else(|| required("sso_start_url"), |name| Ok(name.to_owned()))?;
    Ok(Some(SsoAccount {
        cache_name,
        region: required("sso_region")?,
        account_id: required("sso_account_id")?,
        role_name: required("sso_role_name")?,
        login: format!("aws sso login{}", profile.option()),
    }))
}

/// The refusal of a profile that AWS's own program resolves.
fn export_error(profile: &AwsProfile, why: &str) -> CredentialError {
    CredentialError {
        why: format!("the profile {} {why}", profile.name),
        remedy: format!(
            "let AWS's program resolve it: eval \"$(aws configure export-credentials{} --format env)\"",
            profile.option()
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONFIG: &str = "\
[profile keys]\naws_access_key_id = k\naws_secret_access_key = s\n\
[profile role]\nrole_arn = arn:r\nsource_profile = keys\nexternal_id = x\nduration_seconds = 900\n\
[profile chain]\nrole_arn = arn:c\nsource_profile = role\nrole_session_name = me\n\
[profile self]\nrole_arn = arn:s\nsource_profile = self\naws_access_key_id = k\naws_secret_access_key = s\n\
[profile a]\nrole_arn = arn:a\nsource_profile = b\n[profile b]\nrole_arn = arn:b\nsource_profile = a\n\
[profile mfa]\nrole_arn = arn:m\nsource_profile = keys\nmfa_serial = arn:mfa\n\
[profile ec2]\nrole_arn = arn:e\ncredential_source = Ec2InstanceMetadata\n\
[profile lost]\nrole_arn = arn:l\nsource_profile = nobody\n\
[profile web]\nrole_arn = arn:w\nweb_identity_token_file = /token\n\
[profile process]\ncredential_process = /bin/helper --for me\n\
[profile sso]\nsso_session = work\nsso_account_id = 1\nsso_role_name = Reader\n\
[profile old sso]\nsso_start_url = https://x/start\nsso_region = eu-west-1\nsso_account_id = 1\nsso_role_name = Reader\n\
[profile half]\nsso_start_url = https://x/start\n\
[sso-session work]\nsso_region = eu-west-1\nsso_start_url = https://x/start\n";

    fn source(name: &str) -> Result<Option<AwsSource>, CredentialError> {
        let files = AwsFiles::parse(CONFIG, "");
        source_of_profile(&files, &files.profile(name).unwrap(), &mut Vec::new())
    }

    #[test]
    fn a_profile_leads_to_its_source() {
        let keys = source("keys").unwrap().unwrap();
        assert!(matches!(&keys, AwsSource::Keys(keys) if keys.secret_key == "s"));
        let Some(AwsSource::Role { role, base }) = source("chain").unwrap() else { panic!() };
        assert_eq!((role.arn.as_str(), role.session_name.as_str()), ("arn:c", "me"));
        let AwsSource::Role { role, base } = *base else { panic!() };
        assert_eq!((role.external_id.as_deref(), role.duration_seconds), (Some("x"), Some(900)));
        assert_eq!(*base, keys);
        let Some(AwsSource::Role { base, .. }) = source("self").unwrap() else { panic!() };
        assert_eq!(*base, keys);
        assert!(matches!(source("web"), Ok(Some(AwsSource::WebIdentity { .. }))));
        assert!(matches!(source("process"), Ok(Some(AwsSource::Process { .. }))));
        let Some(AwsSource::SingleSignOn(account)) = source("sso").unwrap() else { panic!() };
        assert_eq!((account.cache_name.as_str(), account.region.as_str()), ("work", "eu-west-1"));
        assert_eq!(account.login, "aws sso login --profile sso");
        let Some(AwsSource::SingleSignOn(account)) = source("old sso").unwrap() else { panic!() };
        assert_eq!(account.cache_name, "https://x/start");
        assert_eq!(account.login, "aws sso login --profile 'old sso'");
    }

    #[test]
    fn a_profile_that_leads_nowhere_is_refused_with_a_remedy() {
        for (name, why, remedy) in [
            ("a", "from itself", "~/.aws/config"),
            ("lost", "source_profile = nobody", "~/.aws/config"),
            ("mfa", "second factor", "aws configure export-credentials --profile mfa --format env"),
            ("ec2", "Ec2InstanceMetadata", "export-credentials --profile ec2"),
            ("half", "no sso_region", "aws configure sso --profile half"),
        ] {
            let error = source(name).unwrap_err();
            assert!(error.why.contains(why) && error.remedy.contains(remedy), "{error:?}");
        }
    }

    #[test]
    fn keys_are_not_shown() {
        assert!(!format!("{:?}", source("keys")).contains("\"s\""));
    }
}
