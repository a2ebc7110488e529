//! The sources of AWS credentials: profiles with keys, roles, SSO and processes, then web identity, container and
//! instance roles. The library makes the requests; this module chooses the source, because the library's own chain knows
//! profiles with keys alone and passes over the errors of a configured source (docs/design/tried.md), and gives the library
//! its environment, files, HTTP client and processes. It deliberately keeps no credentials.

use crate::config::EnvironmentSource;
use crate::credential_store::CredentialSource;
use bytes::Bytes;
use reqsign_aws_v4::{
    AssumeRoleCredentialProvider, AssumeRoleWithWebIdentityCredentialProvider, Credential, ECSCredentialProvider,
    EnvCredentialProvider, IMDSv2CredentialProvider, ProcessCredentialProvider, RequestSigner, SSOCredentialProvider,
    StaticCredentialProvider,
};
use reqsign_core::{
    CommandExecute, CommandOutput, Context, Env, Error, FileRead, HttpSend, ProvideCredential, Result, Signer,
};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

/// Deadline of a `credential_process`.
const PROCESS_TIME: Duration = Duration::from_secs(60);
/// Longest chain of `source_profile`s.
const MAX_PROFILES: usize = 5;
/// The session name of roles, where the profile has none.
const SESSION: &str = "spurline";

/// Files of a directory in the place of the credentials file, as a secret of Kubernetes is mounted, and the key of the default
/// profile in each file.
const KEY_FILES: [(&str, &str); 3] = [
    ("AWS_ACCESS_KEY_ID", "aws_access_key_id"),
    ("AWS_SECRET_ACCESS_KEY", "aws_secret_access_key"),
    ("AWS_SESSION_TOKEN", "aws_session_token"),
];

/// Sections of an AWS file with their keys.
type IniSections = HashMap<String, HashMap<String, String>>;

/// The paths of the two AWS files, where there are any.
#[derive(Debug, Clone)]
pub(crate) struct AwsFiles {
    pub credentials: Option<PathBuf>,
    pub config: Option<PathBuf>,
}

impl AwsFiles {
    pub(crate) fn of(env: &EnvironmentSource) -> Self {
        let path = |variable: &str, file: &str| {
            // A background process changes its working directory.
            let given = env.get(variable).map(|path| std::path::absolute(&path).unwrap_or_else(|_| path.into()));
            given.or_else(|| Some(PathBuf::from(env.get("HOME")?).join(".aws").join(file)))
        };
        AwsFiles {
            credentials: path("AWS_SHARED_CREDENTIALS_FILE", "credentials"),
            config: path("AWS_CONFIG_FILE", "config"),
        }
    }

    /// Reads both files; an absent one is empty.
    pub(crate) fn read(&self) -> AwsProfiles {
        AwsProfiles {
            credentials: self.credentials.as_deref().map(read_sections).unwrap_or_default(),
            config: self.config.as_deref().map(read_sections).unwrap_or_default(),
        }
    }

    /// The files to watch for changes.
    pub(crate) fn paths(&self) -> Vec<PathBuf> {
        let all = self.credentials.iter().chain(&self.config);
        let mut files = Vec::new();
        for path in all {
            if path.is_dir() {
                files.extend(KEY_FILES.iter().map(|(file, _)| path.join(file)));
            } else {
                files.push(path.clone());
            }
        }
        files
    }

    /// The credentials file, for messages.
    pub(crate) fn shown(&self) -> String {
        self.credentials.as_deref().map_or("~/.aws/credentials".into(), |path: &Path| path.display().to_string())
    }
}

/// The content of the two AWS files.
pub(crate) struct AwsProfiles {
    credentials: IniSections,
    config: IniSections,
}

impl AwsProfiles {
    /// The value of `key` in `profile`; the credentials file comes first.
    pub(crate) fn get(&self, profile: &str, key: &str) -> Option<String> {
        let section = self.config.get(&format!("profile {profile}")).or_else(|| self.config.get(profile));
        let value = self.credentials.get(profile).and_then(|s| s.get(key)).or_else(|| section.and_then(|s| s.get(key)));
        value.filter(|v| !v.is_empty()).cloned()
    }

    /// The value of `key` for SSO in `profile`, or in the SSO session that it names.
    fn sso(&self, profile: &str, key: &str) -> Option<String> {
        let session = self.get(profile, "sso_session").map(|session| format!("sso-session {session}"));
        let of_session = session.and_then(|session| self.config.get(&session)?.get(key).cloned());
        of_session.or_else(|| self.get(profile, key))
    }

    /// How `profile` gets its credentials, for messages; `None` when it has no source of any.
    pub(crate) fn kind(&self, profile: &str) -> Option<&'static str> {
        let has = |key: &str| self.get(profile, key).is_some();
        match () {
            () if has("role_arn") => Some("role"),
            () if has("aws_access_key_id") && has("aws_secret_access_key") => Some("access key"),
            () if has("sso_account_id") && has("sso_role_name") => Some("SSO role"),
            () if has("credential_process") => Some("credential process"),
            () => None,
        }
    }
}

/// The credentials of one profile. Its files are read anew each time.
#[derive(Debug)]
pub(crate) struct ProfileSource {
    pub profile: String,
    pub files: AwsFiles,
    pub region: String,
}

impl ProvideCredential for ProfileSource {
    type Credential = Credential;

    async fn provide_credential(&self, context: &Context) -> Result<Option<Credential>> {
        let files = self.files.clone();
        let profiles = tokio::task::spawn_blocking(move || files.read());
        let profiles = profiles.await.map_err(|e| Error::unexpected("reading the AWS files").with_source(e))?;
        match self.source_of(&profiles, &self.profile, context, 0)? {
            Some(source) => source.provide_credential_dyn(context).await,
            None => Ok(None),
        }
    }
}

impl ProfileSource {
    fn source_of(
        &self,
        profiles: &AwsProfiles,
        profile: &str,
        context: &Context,
        depth: usize,
    ) -> Result<Option<CredentialSource>> {
        let get = |key: &str| profiles.get(profile, key);
        if depth > MAX_PROFILES {
            return Err(Error::config_invalid(format!(
                "the source_profile of '{profile}' leads to a loop of profiles"
            )));
        }
        if let Some(arn) = get("role_arn").filter(|_| depth == 0 || get("source_profile").as_deref() != Some(profile)) {
            return self.role(profiles, profile, arn, context, depth).map(Some);
        }
        if let (Some(id), Some(secret)) = (get("aws_access_key_id"), get("aws_secret_access_key")) {
            let keys = StaticCredentialProvider::new(&id, &secret);
            return Ok(Some(Arc::new(match get("aws_session_token") {
                Some(token) => keys.with_session_token(&token),
                None => keys,
            })));
        }
        if let (Some(account), Some(role)) = (get("sso_account_id"), get("sso_role_name")) {
            let missing = |key: &str| Error::config_invalid(format!("the profile '{profile}' has no {key}"));
            // The library derives the name of the token's file from the start URL; with a session it is the session's.
            let start = get("sso_session").or_else(|| profiles.sso(profile, "sso_start_url"));
            let mut sso = SSOCredentialProvider::new()
                .with_account_id(account)
                .with_role_name(role)
                .with_region(profiles.sso(profile, "sso_region").ok_or_else(|| missing("sso_region"))?)
                .with_start_url(start.ok_or_else(|| missing("sso_start_url"))?);
            if let Some(endpoint) = context.env_var("AWS_ENDPOINT_URL_SSO") {
                sso = sso.with_endpoint(format!("{}/federation/credentials", endpoint.trim_end_matches('/')));
            }
            return Ok(Some(Arc::new(sso)));
        }
        if let Some(command) = get("credential_process") {
            return Ok(Some(Arc::new(ProcessCredentialProvider::new().with_command(command))));
        }
        Ok(None)
    }

    /// A role of `profile`, assumed with a web identity or with the credentials of its source.
    fn role(
        &self,
        profiles: &AwsProfiles,
        profile: &str,
        arn: String,
        context: &Context,
        depth: usize,
    ) -> Result<CredentialSource> {
        let get = |key: &str| profiles.get(profile, key);
        let session = get("role_session_name").unwrap_or_else(|| SESSION.into());
        let region = get("region").unwrap_or_else(|| self.region.clone());
        let duration = get("duration_seconds").and_then(|seconds| seconds.parse().ok());
        if let Some(file) = get("web_identity_token_file") {
            let mut role = AssumeRoleWithWebIdentityCredentialProvider::with_config(arn, file.into())
                .with_role_session_name(session)
                .with_region(region)
                .with_regional_sts_endpoint();
            if let Some(seconds) = duration {
                role = role.with_duration_seconds(seconds);
            }
            return Ok(Arc::new(role));
        }
        if get("mfa_serial").is_some() {
            let why =
                format!("the profile '{profile}' needs a one-time password (mfa_serial), which can't be entered here");
            return Err(Error::config_invalid(why));
        }
        let none = |source: &str| {
            Error::config_invalid(format!("'{source}', the source of profile '{profile}', has no credentials"))
        };
        let source: CredentialSource = match (get("source_profile"), get("credential_source").as_deref()) {
            (Some(source), _) => self.source_of(profiles, &source, context, depth + 1)?.ok_or_else(|| none(&source))?,
            (None, Some("Environment")) => Arc::new(EnvCredentialProvider::new()),
            (None, Some("EcsContainer")) => Arc::new(ECSCredentialProvider::new()),
            (None, Some("Ec2InstanceMetadata")) => Arc::new(IMDSv2CredentialProvider::new()),
            (None, Some(other)) => return Err(none(other)),
            (None, None) => {
                let why =
                    format!("the profile '{profile}' has a role_arn and neither source_profile nor credential_source");
                return Err(Error::config_invalid(why));
            }
        };
        let signer = Signer::new(context.clone(), source, RequestSigner::new("sts", &region));
        let mut role = AssumeRoleCredentialProvider::new(arn, signer)
            .with_role_session_name(session)
            .with_region(region)
            .with_regional_sts_endpoint();
        if let Some(id) = get("external_id") {
            role = role.with_external_id(id);
        }
        if let Some(seconds) = duration {
            role = role.with_duration_seconds(seconds);
        }
        Ok(Arc::new(role))
    }
}

/// The first of several sources that is configured. An error of a configured source is not passed over.
#[derive(Debug)]
pub(crate) struct FirstSource(Vec<CredentialSource>);

impl FirstSource {
    /// The profile, then web identity, container and instance roles.
    pub(crate) fn new(profile: ProfileSource) -> Self {
        let web = AssumeRoleWithWebIdentityCredentialProvider::new();
        FirstSource(vec![
            Arc::new(profile),
            Arc::new(web),
            Arc::new(ECSCredentialProvider::new()),
            Arc::new(IMDSv2CredentialProvider::new()),
        ])
    }
}

impl ProvideCredential for FirstSource {
    type Credential = Credential;

    async fn provide_credential(&self, context: &Context) -> Result<Option<Credential>> {
        for source in &self.0 {
            if let Some(credential) = source.provide_credential_dyn(context).await? {
                return Ok(Some(credential));
            }
        }
        Ok(None)
    }
}

/// The library's environment: variables from `env`, files and processes of this host, requests with `client`.
pub(crate) fn library_context(env: &EnvironmentSource, client: reqwest::Client) -> Context {
    let sts = env.get("AWS_ENDPOINT_URL_STS").and_then(|url| reqwest::Url::parse(&url).ok());
    Context::new()
        .with_env(env.clone())
        .with_file_read(HostFiles)
        .with_command_execute(HostProcesses)
        .with_http_send(HttpClient { client, sts })
}

impl Env for EnvironmentSource {
    fn var(&self, key: &str) -> Option<String> {
        self.get(key)
    }
    fn vars(&self) -> HashMap<String, String> {
        self.starting_with("").into_iter().filter(|(_, value)| !value.trim().is_empty()).collect()
    }
    fn home_dir(&self) -> Option<PathBuf> {
        self.get("HOME").map(PathBuf::from)
    }
}

#[derive(Debug)]
struct HostFiles;

impl FileRead for HostFiles {
    async fn file_read(&self, path: &str) -> Result<Vec<u8>> {
        let path = path.to_owned();
        let read = tokio::task::spawn_blocking(move || std::fs::read(&path).map_err(|e| (path, e))).await;
        match read {
            Ok(Ok(bytes)) => Ok(bytes),
            Ok(Err((path, error))) => Err(Error::config_invalid(format!("{path}: {error}"))),
            Err(error) => Err(Error::unexpected("the read of a file was cancelled").with_source(error)),
        }
    }
}

#[derive(Debug)]
struct HostProcesses;

impl CommandExecute for HostProcesses {
    async fn command_execute<'a>(&'a self, program: &'a str, args: &'a [&'a str]) -> Result<CommandOutput> {
        // The library splits the command at white space; a shell understands its quotes, as with AWS's SDKs.
        let line = [&[program], args].concat().join(" ");
        let run = tokio::task::spawn_blocking(move || {
            Command::new("/bin/sh").arg("-c").arg(line).stdin(Stdio::null()).output()
        });
        let output = tokio::time::timeout(PROCESS_TIME, run).await.map_err(|_| {
            Error::unexpected(format!("credential_process did not end within {} s", PROCESS_TIME.as_secs()))
        })?;
        let output = output.map_err(|e| Error::unexpected("credential_process was cancelled").with_source(e))?;
        let output = output.map_err(|e| Error::unexpected(format!("credential_process can't be started: {e}")))?;
        Ok(CommandOutput { status: output.status.code().unwrap_or(-1), stdout: output.stdout, stderr: output.stderr })
    }
}

#[derive(Debug)]
struct HttpClient {
    client: reqwest::Client,
    /// Where requests to STS go instead of to AWS.
    sts: Option<reqwest::Url>,
}

impl HttpSend for HttpClient {
    async fn http_send(&self, request: http::Request<Bytes>) -> Result<http::Response<Bytes>> {
        let failed = |e: reqwest::Error| {
            let why = crate::messages::root_cause(&e);
            Error::unexpected(why).set_retryable(true)
        };
        let mut request = reqwest::Request::try_from(request.map(reqwest::Body::from)).map_err(failed)?;
        let to_sts = request.url().host_str().is_some_and(|host| host.starts_with("sts."));
        if let Some(sts) = self.sts.as_ref().filter(|_| to_sts) {
            // The signed Host header stays.
            let mut url = sts.clone();
            url.set_query(request.url().query());
            *request.url_mut() = url;
        }
        let response = self.client.execute(request).await.map_err(failed)?;
        let mut answer = http::Response::builder().status(response.status());
        if let Some(headers) = answer.headers_mut() {
            *headers = response.headers().clone();
        }
        let body = response.bytes().await.map_err(failed)?;
        answer.body(body).map_err(|e| Error::unexpected("an answer without a status").with_source(e))
    }
}

fn read_sections(path: &Path) -> IniSections {
    if path.is_dir() {
        let keys = KEY_FILES.iter().filter_map(|(file, key)| {
            let text = std::fs::read_to_string(path.join(file)).ok()?;
            Some(((*key).to_owned(), text.trim().to_owned()))
        });
        return IniSections::from([("default".to_owned(), keys.collect())]);
    }
    std::fs::read_to_string(path).map(|text| parse_ini(&text)).unwrap_or_default()
}

fn parse_ini(text: &str) -> IniSections {
    let mut all = IniSections::new();
    let mut section = String::new();
    for line in text.lines() {
        let trimmed = line.trim();
        if trimmed.is_empty() || trimmed.starts_with(['#', ';']) {
            continue;
        }
        if let Some(name) = trimmed.strip_prefix('[').and_then(|t| t.split_once(']')).map(|(n, _)| n) {
            section = name.split_whitespace().collect::<Vec<_>>().join(" ");
            all.entry(section.clone()).or_default();
        } else if let Some((key, value)) = trimmed.split_once('=') {
            // An indented line belongs to a nested table, which is ignored.
            if !line.starts_with([' ', '\t']) {
                all.entry(section.clone()).or_default().insert(key.trim().to_ascii_lowercase(), value.trim().into());
            }
        }
    }
    all
}
