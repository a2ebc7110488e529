//! Where S3's credentials, region and endpoint come from: configuration, AWS variables, AWS files, roles.
//! It deliberately sends no request to S3 and never shows a secret.

use crate::roots::Roots;
use crate::{Environment, UnderConfig};
use object_store::aws::{AmazonS3Builder, AwsCredential, AwsCredentialProvider};
use object_store::{BackoffConfig, ClientOptions, RetryConfig, StaticCredentialProvider};
use spurline_types::{Error, ErrorKind, Result};
use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tokio::runtime::Handle;

/// All that is needed to talk to S3 but the bucket.
pub(crate) struct AwsSettings {
    /// `None`: AWS itself.
    pub endpoint: Option<String>,
    pub region: String,
    /// Who may sign for it.
    pub roots: Roots,
    /// `None`: nothing is signed.
    pub credentials: Option<AwsCredentialProvider>,
    /// Which credentials those are and where they come from, for a person.
    pub origin: String,
    /// A role's credentials are asked for on the shared runtime: their connections must not live on a reader's lane.
    pub role_runtime: Option<OnceLock<Handle>>,
}

/// The variables looked at, for messages.
pub(crate) const LOOKED_AT: &str = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (AWS_SESSION_TOKEN), AWS_PROFILE in \
     ~/.aws/credentials (AWS_SHARED_CREDENTIALS_FILE), AWS_WEB_IDENTITY_TOKEN_FILE with AWS_ROLE_ARN, \
     AWS_CONTAINER_CREDENTIALS_RELATIVE_URI and the instance's role";

/// Sections of an AWS file with their keys.
type Ini = HashMap<String, HashMap<String, String>>;

impl AwsSettings {
    /// Gathers the settings; asks nothing of the network.
    ///
    /// # Errors
    /// `Invalid` when only half a key pair is set, a named profile is missing, an endpoint is no URL, or nobody could
    /// have signed for it.
    pub(crate) fn gather(config: &UnderConfig) -> Result<Self> {
        let env = &config.env;
        let named = env.get("AWS_PROFILE").or_else(|| env.get("AWS_DEFAULT_PROFILE"));
        let profile = named.clone().unwrap_or_else(|| "default".into());
        let read = |variable: &str, file: &str| {
            let path = env.get(variable).map(PathBuf::from).or_else(|| {
                let home = env.get("HOME")?;
                Some(PathBuf::from(home).join(".aws").join(file))
            });
            path.and_then(|p| Some((std::fs::read_to_string(&p).ok()?, p)))
        };
        let (secrets, secrets_path) = match read("AWS_SHARED_CREDENTIALS_FILE", "credentials") {
            Some((text, path)) => (parse_ini(&text), path.display().to_string()),
            None => (Ini::new(), "~/.aws/credentials".into()),
        };
        let settings = read("AWS_CONFIG_FILE", "config").map(|(text, _)| parse_ini(&text)).unwrap_or_default();
        let section = settings.get(&format!("profile {profile}")).or_else(|| settings.get(&profile));
        let of_profile = |key: &str| {
            let secret = secrets.get(&profile).and_then(|s| s.get(key));
            secret.or_else(|| section.and_then(|s| s.get(key))).filter(|v| !v.is_empty()).cloned()
        };

        let endpoint = config
            .endpoint
            .clone()
            .or_else(|| env.get("AWS_ENDPOINT_URL_S3"))
            .or_else(|| env.get("AWS_ENDPOINT_URL"))
            .or_else(|| env.get("AWS_ENDPOINT"))
            .or_else(|| of_profile("endpoint_url"));
        let endpoint = endpoint.map(|e| check_endpoint(&e)).transpose()?;
        let region = config
            .region
            .clone()
            .or_else(|| env.get("AWS_REGION"))
            .or_else(|| env.get("AWS_DEFAULT_REGION"))
            .or_else(|| of_profile("region"))
            .unwrap_or_else(|| "us-east-1".into());
        let roots = Roots::of_aws(env)?;
        if endpoint.as_deref().is_none_or(|e| e.starts_with("https://")) {
            roots.check(endpoint.as_deref().unwrap_or("AWS S3"))?;
        }

        if config.anonymous || env.get("AWS_SKIP_SIGNATURE").is_some_and(|v| v.eq_ignore_ascii_case("true")) {
            let origin = "anonymous access".into();
            return Ok(AwsSettings { endpoint, region, roots, credentials: None, origin, role_runtime: None });
        }
        let fixed = |key_id: String, secret_key: String, token: Option<String>, origin: String| {
            let shown: String = key_id.chars().take(4).collect();
            let credential = AwsCredential { key_id, secret_key, token };
            let provider: AwsCredentialProvider = Arc::new(StaticCredentialProvider::new(credential));
            (Some(provider), format!("access key {shown}… from {origin}"))
        };
        let mut role_runtime = None;
        let (credentials, origin) = if let Some(c) = &config.credentials {
            let (id, secret) = (c.access_key_id.clone(), c.secret_access_key.clone());
            fixed(id, secret, c.session_token.clone(), "the configuration".into())
        } else {
            match (env.get("AWS_ACCESS_KEY_ID"), env.get("AWS_SECRET_ACCESS_KEY")) {
                (Some(id), Some(secret)) => fixed(id, secret, env.get("AWS_SESSION_TOKEN"), "AWS_ACCESS_KEY_ID".into()),
                (Some(_), None) => return Err(half("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")),
                (None, Some(_)) => return Err(half("AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID")),
                (None, None) => match (of_profile("aws_access_key_id"), of_profile("aws_secret_access_key")) {
                    (Some(id), Some(secret)) => {
                        let origin = format!("profile '{profile}' in {secrets_path}");
                        fixed(id, secret, of_profile("aws_session_token"), origin)
                    }
                    _ if named.is_some() => {
                        return Err(Error::new(
                            ErrorKind::Invalid,
                            format!(
                                "AWS_PROFILE names the profile '{profile}', but {secrets_path} has no access key for \
                                 it; add aws_access_key_id and aws_secret_access_key there, or set \
                                 AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
                            ),
                        ));
                    }
                    _ => {
                        role_runtime = Some(OnceLock::new());
                        (Some(role(env, &region, &roots, config.connect_timeout)?), "a role".into())
                    }
                },
            }
        };
        Ok(AwsSettings { endpoint, region, roots, credentials, origin, role_runtime })
    }

    /// The credentials now; a role's are asked for when they have run out.
    pub(crate) async fn credential(&self) -> Result<Option<Arc<AwsCredential>>> {
        let Some(provider) = &self.credentials else { return Ok(None) };
        let answer = match self.role_runtime.as_ref().and_then(OnceLock::get) {
            None => provider.get_credential().await,
            Some(runtime) => {
                let provider = Arc::clone(provider);
                let asked = runtime.spawn(async move { provider.get_credential().await }).await;
                asked
                    .map_err(|_| Error::new(ErrorKind::Unavailable, "asking for a role's credentials was broken off"))?
            }
        };
        match answer {
            Ok(credential) => Ok(Some(credential)),
            Err(error) => Err(Error::new(
                ErrorKind::PermissionDenied,
                format!(
                    "no credentials for S3: looked at {LOOKED_AT}; the last said: {}; set one of them, or ask for \
                     anonymous access to a public bucket",
                    root_cause(&error)
                ),
            )),
        }
    }
}

/// Web identity, container and instance roles are the object-store library's.
fn role(env: &Environment, region: &str, roots: &Roots, connect_timeout: Duration) -> Result<AwsCredentialProvider> {
    let mut builder = AmazonS3Builder::new().with_client_options(roots.alone(ClientOptions::new()));
    for (name, value) in env.starting_with("AWS_") {
        if let Ok(key) = name.to_ascii_lowercase().parse() {
            builder = builder.with_config(key, value);
        }
    }
    let retry = RetryConfig { backoff: BackoffConfig::default(), max_retries: 1, retry_timeout: connect_timeout };
    let store =
        builder.with_bucket_name("unused").with_region(region).with_retry(retry).build().map_err(|e| {
            Error::new(ErrorKind::Invalid, format!("the AWS variables can't be used: {}", root_cause(&e)))
        })?;
    Ok(Arc::clone(store.credentials()))
}

/// The innermost sentence of an error, which names the cause.
pub(crate) fn root_cause(error: &(dyn std::error::Error + 'static)) -> String {
    let mut cause = error;
    while let Some(source) = cause.source() {
        cause = source;
    }
    cause.to_string()
}

fn half(has: &str, lacks: &str) -> Error {
    Error::new(ErrorKind::Invalid, format!("{has} is set but {lacks} is not; set both, or neither"))
}

fn check_endpoint(endpoint: &str) -> Result<String> {
    let rest = endpoint.strip_prefix("https://").or_else(|| endpoint.strip_prefix("http://"));
    let well = rest.is_some_and(|r| !r.trim_matches('/').is_empty() && !r.contains(['@', '?', '#', ' ']));
    if !well || endpoint.parse::<http::Uri>().is_err() {
        // An endpoint with a user and password in it is not repeated.
        let shown = if endpoint.contains('@') { "(holding an '@')" } else { endpoint };
        return Err(Error::new(
            ErrorKind::Invalid,
            format!("the S3 endpoint '{shown}' is no URL; write http://host:port or https://host"),
        ));
    }
    Ok(endpoint.trim_end_matches('/').to_owned())
}

fn parse_ini(text: &str) -> Ini {
    let mut all = Ini::new();
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
            // An indented line belongs to a nested table of the line above, which is none of ours.
            if !line.starts_with([' ', '\t']) {
                all.entry(section.clone()).or_default().insert(key.trim().to_ascii_lowercase(), value.trim().into());
            }
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(env: Environment) -> UnderConfig {
        UnderConfig { env, ..UnderConfig::default() }
    }

    fn credential(settings: &AwsSettings) -> Arc<AwsCredential> {
        tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(settings.credential()).unwrap().unwrap()
    }

    #[test]
    fn variables_come_before_files() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("credentials");
        std::fs::write(
            &file,
            "# comment\n[default]\naws_access_key_id = FILEKEY\naws_secret_access_key=filesecret\n\n[ other ]\n\
             aws_access_key_id=OTHER\naws_secret_access_key=othersecret\naws_session_token=tok\n\
             endpoint_url=http://o:1/\nregion=eu-1\ns3 =\n  max_queue_size = 5\n",
        )
        .unwrap();
        let file = file.to_str().unwrap();
        let from_file =
            AwsSettings::gather(&config(Environment::fixed([("AWS_SHARED_CREDENTIALS_FILE", file)]))).unwrap();
        assert_eq!(credential(&from_file).key_id, "FILEKEY");
        assert_eq!(from_file.region, "us-east-1");
        let other = Environment::fixed([("AWS_SHARED_CREDENTIALS_FILE", file), ("AWS_PROFILE", "other")]);
        let other = AwsSettings::gather(&config(other)).unwrap();
        assert_eq!(credential(&other).token.as_deref(), Some("tok"));
        assert_eq!((other.endpoint.as_deref(), other.region.as_str()), (Some("http://o:1"), "eu-1"));
        assert!(other.origin.contains("profile 'other'") && !other.origin.contains("othersecret"));
        let both = Environment::fixed([
            ("AWS_SHARED_CREDENTIALS_FILE", file),
            ("AWS_ACCESS_KEY_ID", "ENVKEY"),
            ("AWS_SECRET_ACCESS_KEY", "s"),
            ("AWS_ENDPOINT_URL", "http://general:1"),
            ("AWS_ENDPOINT_URL_S3", "http://special:1"),
        ]);
        let both = AwsSettings::gather(&config(both)).unwrap();
        assert_eq!(credential(&both).key_id, "ENVKEY");
        assert_eq!(both.endpoint.as_deref(), Some("http://special:1"));
    }

    #[test]
    fn what_can_not_be_right() {
        for (env, part) in [
            (Environment::fixed([("AWS_ACCESS_KEY_ID", "x")]), "AWS_SECRET_ACCESS_KEY is not"),
            (Environment::fixed([("AWS_PROFILE", "nobody")]), "profile 'nobody'"),
            (Environment::fixed([("AWS_ENDPOINT_URL", "localhost:9000")]), "is no URL"),
            (Environment::fixed([("AWS_ENDPOINT_URL", "http://u:hush@h")]), "is no URL"),
        ] {
            let error = AwsSettings::gather(&config(env)).map(|_| ()).unwrap_err();
            assert!(error.message().contains(part) && !error.message().contains("hush"), "{error}");
        }
    }

    #[test]
    fn secrets_are_not_shown() {
        let c = crate::Credentials {
            access_key_id: "AKIAEXAMPLE".into(),
            secret_access_key: "hush".into(),
            session_token: Some("hush".into()),
        };
        let config = UnderConfig { credentials: Some(c), ..config(Environment::fixed([])) };
        assert!(!format!("{config:?}").contains("hush") && !format!("{config:?}").contains("EXAMPLE"));
        assert!(!AwsSettings::gather(&config).unwrap().origin.contains("hush"));
    }
}
