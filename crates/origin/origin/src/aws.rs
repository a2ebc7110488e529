//! The sources of S3's credentials, region and endpoint: configuration, AWS variables, AWS files, roles. It
//! deliberately sends no request to S3 and never shows a secret.

use crate::ca_store::CaStore;
use crate::role::RoleCredentials;
use crate::{EnvironmentSource, OriginOptions};
use object_store::aws::{AmazonS3Builder, AwsCredential};
use object_store::{BackoffConfig, ClientOptions, RetryConfig};
use spurline_types::{Error, ErrorKind, Result};
use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// Everything needed to access S3 except the bucket.
pub(crate) struct AwsSettings {
    /// `None`: AWS itself.
    pub endpoint: Option<String>,
    pub region: String,
    /// The trusted authorities.
    pub roots: CaStore,
    pub signer: RequestSigner,
    /// The source of the credentials in use, for messages.
    pub origin: String,
}

/// How requests are signed.
pub(crate) enum RequestSigner {
    /// Requests are not signed.
    Anonymous,
    Key(Arc<AwsCredential>),
    Role(RoleCredentials),
}

/// Least time for attempts and connections of a role's requests, whatever the limits of other connections.
const ROLE_TIME: Duration = Duration::from_secs(2);

/// The variables that are checked, for messages.
pub(crate) const LOOKED_AT: &str = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (AWS_SESSION_TOKEN), AWS_PROFILE in \
     ~/.aws/credentials (AWS_SHARED_CREDENTIALS_FILE), AWS_WEB_IDENTITY_TOKEN_FILE with AWS_ROLE_ARN, \
     AWS_CONTAINER_CREDENTIALS_RELATIVE_URI and the instance's role";

/// Sections of an AWS file with their keys.
type IniSections = HashMap<String, HashMap<String, String>>;

impl AwsSettings {
    /// Gathers the settings without any network request.
    ///
    /// # Errors
    /// `Invalid` when only half a key pair is set, a named profile is missing, an endpoint is not a URL, or no
    /// authority is trusted.
    pub(crate) fn gather(config: &OriginOptions) -> Result<Self> {
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
            None => (IniSections::new(), "~/.aws/credentials".into()),
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
        let region = require_graphic("the region (AWS_REGION)", &region)?;
        let roots = CaStore::of_aws(env)?;
        if endpoint.as_deref().is_none_or(|e| e.starts_with("https://")) {
            roots.require_any(endpoint.as_deref().unwrap_or("AWS S3"))?;
        }

        if config.anonymous || env.get("AWS_SKIP_SIGNATURE").is_some_and(|v| v.eq_ignore_ascii_case("true")) {
            let origin = "anonymous access".into();
            return Ok(AwsSettings { endpoint, region, roots, signer: RequestSigner::Anonymous, origin });
        }
        // Each with its name, for messages.
        type Named<'a> = (&'a str, String);
        let key = |id: Named<'_>, secret: Named<'_>, token: Option<Named<'_>>, origin: &str| {
            let shown: String = id.1.trim().chars().take(4).collect();
            let key_id = require_graphic(id.0, &id.1)?;
            let secret_key = require_graphic(secret.0, &secret.1)?;
            let token = token.map(|(name, token)| require_graphic(name, &token)).transpose()?;
            let credential = AwsCredential { key_id, secret_key, token };
            Ok::<_, Error>((RequestSigner::Key(Arc::new(credential)), format!("access key {shown}… from {origin}")))
        };
        let set = |name: &str| env.get(name).filter(|value| !value.trim().is_empty());
        let (signer, origin) = if let Some(c) = &config.credentials {
            let token = c.session_token.clone().map(|t| ("the session token", t));
            let (id, secret) = (c.access_key_id.clone(), c.secret_access_key.clone());
            key(("the access key's id", id), ("the secret", secret), token, "the configuration")?
        } else {
            const ID: &str = "AWS_ACCESS_KEY_ID";
            const SECRET: &str = "AWS_SECRET_ACCESS_KEY";
            const TOKEN: &str = "AWS_SESSION_TOKEN";
            match (set(ID), set(SECRET)) {
                (Some(id), Some(secret)) => key((ID, id), (SECRET, secret), set(TOKEN).map(|t| (TOKEN, t)), ID)?,
                (Some(_), None) => return Err(half_pair_error(ID, SECRET)),
                (None, Some(_)) => return Err(half_pair_error(SECRET, ID)),
                (None, None) => match (of_profile("aws_access_key_id"), of_profile("aws_secret_access_key")) {
                    (Some(id), Some(secret)) => {
                        let name = |key: &str| format!("{key} of the profile '{profile}' in {secrets_path}");
                        let token = name("aws_session_token");
                        key(
                            (&name("aws_access_key_id"), id),
                            (&name("aws_secret_access_key"), secret),
                            of_profile("aws_session_token").map(|t| (token.as_str(), t)),
                            &format!("profile '{profile}' in {secrets_path}"),
                        )?
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
                    _ => (
                        RequestSigner::Role(library_role(env, &region, &roots, config.connect_timeout)?),
                        "a role".into(),
                    ),
                },
            }
        };
        Ok(AwsSettings { endpoint, region, roots, signer, origin })
    }

    /// The current credentials; a role's are requested when they have expired.
    pub(crate) async fn credential(&self) -> Result<Option<Arc<AwsCredential>>> {
        match &self.signer {
            RequestSigner::Anonymous => Ok(None),
            RequestSigner::Key(credential) => Ok(Some(Arc::clone(credential))),
            RequestSigner::Role(role) => role.credential().await.map(Some),
        }
    }
}

/// The object-store library obtains web identity, container and instance roles.
fn library_role(
    env: &EnvironmentSource,
    region: &str,
    roots: &CaStore,
    connect_timeout: Duration,
) -> Result<RoleCredentials> {
    let time = connect_timeout.max(ROLE_TIME);
    let options = ClientOptions::new().with_connect_timeout(time).with_timeout(time);
    let mut builder = AmazonS3Builder::new().with_client_options(roots.apply_to(options));
    for (name, value) in env.starting_with("AWS_") {
        if let (Ok(key), false) = (name.to_ascii_lowercase().parse(), value.trim().is_empty()) {
            builder = builder.with_config(key, value.trim());
        }
    }
    let retry = RetryConfig { backoff: BackoffConfig::default(), max_retries: 1, retry_timeout: time };
    let store =
        builder.with_bucket_name("unused").with_region(region).with_retry(retry).build().map_err(|e| {
            Error::new(ErrorKind::Invalid, format!("the AWS variables can't be used: {}", root_cause(&e)))
        })?;
    Ok(RoleCredentials::new(Arc::clone(store.credentials())))
}

/// The message of the innermost error, which names the cause.
pub(crate) fn root_cause(error: &(dyn std::error::Error + 'static)) -> String {
    let mut cause = error;
    while let Some(source) = cause.source() {
        cause = source;
    }
    cause.to_string()
}

fn half_pair_error(has: &str, lacks: &str) -> Error {
    Error::new(ErrorKind::Invalid, format!("{has} is set but {lacks} is not; set both, or neither"))
}

/// `value` without surrounding white space, such as the line break at the end of a file.
///
/// # Errors
/// `Invalid` where it contains characters that no request can carry; the message has `name`, not the value.
pub(crate) fn require_graphic(name: &str, value: &str) -> Result<String> {
    let value = value.trim();
    let odd = value.chars().position(|c| !c.is_ascii_graphic());
    if odd.is_none() && !value.is_empty() {
        return Ok(value.to_owned());
    }
    let why = match odd {
        None => "is empty".to_owned(),
        Some(at) => {
            let all = value.chars().count();
            format!("contains a character that is not visible ASCII, at position {} of {all}", at + 1)
        }
    };
    Err(Error::new(ErrorKind::Invalid, format!("{name} {why}; set it again, without line breaks, spaces and the like")))
}

fn check_endpoint(endpoint: &str) -> Result<String> {
    let endpoint = endpoint.trim();
    let rest = endpoint.strip_prefix("https://").or_else(|| endpoint.strip_prefix("http://"));
    let well = rest.is_some_and(|r| !r.trim_matches('/').is_empty() && !r.contains(['@', '?', '#', ' ']));
    if let (true, Ok(_), Ok(_)) = (well, endpoint.parse::<http::Uri>(), reqwest::Url::parse(endpoint)) {
        return Ok(endpoint.trim_end_matches('/').to_owned());
    }
    // An endpoint with a user and password in it is not repeated.
    let shown = if endpoint.contains('@') { "(holding an '@')" } else { endpoint };
    let why = reqwest::Url::parse(endpoint).err().map(|e| format!(" ({e})")).unwrap_or_default();
    Err(Error::new(
        ErrorKind::Invalid,
        format!("the S3 endpoint '{shown}' is not a URL{why}; write http://host:port or https://host"),
    ))
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

#[cfg(test)]
mod tests {
    use super::*;

    fn config(env: EnvironmentSource) -> OriginOptions {
        OriginOptions { env, ..OriginOptions::default() }
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
            AwsSettings::gather(&config(EnvironmentSource::fixed([("AWS_SHARED_CREDENTIALS_FILE", file)]))).unwrap();
        assert_eq!(credential(&from_file).key_id, "FILEKEY");
        assert_eq!(from_file.region, "us-east-1");
        let other = EnvironmentSource::fixed([("AWS_SHARED_CREDENTIALS_FILE", file), ("AWS_PROFILE", "other")]);
        let other = AwsSettings::gather(&config(other)).unwrap();
        assert_eq!(credential(&other).token.as_deref(), Some("tok"));
        assert_eq!((other.endpoint.as_deref(), other.region.as_str()), (Some("http://o:1"), "eu-1"));
        assert!(other.origin.contains("profile 'other'") && !other.origin.contains("othersecret"));
        let both = EnvironmentSource::fixed([
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

    fn of(id: &str, secret: &str, token: &str) -> EnvironmentSource {
        let keys = [("AWS_ACCESS_KEY_ID", id), ("AWS_SECRET_ACCESS_KEY", secret), ("AWS_SESSION_TOKEN", token)];
        EnvironmentSource::fixed(keys)
    }

    #[test]
    fn white_space_around_credentials_is_none_of_them() {
        let config = OriginOptions {
            endpoint: Some(" http://h:1/\n".into()),
            region: Some("eu-1\n".into()),
            ..config(of("ID\n", " secret\r\n", "token\n"))
        };
        let settings = AwsSettings::gather(&config).unwrap();
        assert_eq!((settings.endpoint.as_deref(), settings.region.as_str()), (Some("http://h:1"), "eu-1"));
        let credential = credential(&settings);
        assert_eq!((credential.key_id.as_str(), credential.secret_key.as_str()), ("ID", "secret"));
        assert_eq!(credential.token.as_deref(), Some("token"));
        let blank = AwsSettings::gather(&self::config(of("ID", "secret", "\n"))).unwrap();
        assert_eq!(self::credential(&blank).token, None);
    }

    #[test]
    fn what_can_not_be_right() {
        for (env, part) in [
            (EnvironmentSource::fixed([("AWS_ACCESS_KEY_ID", "x")]), "AWS_SECRET_ACCESS_KEY is not"),
            (EnvironmentSource::fixed([("AWS_PROFILE", "missing")]), "profile 'missing'"),
            (EnvironmentSource::fixed([("AWS_ENDPOINT_URL", "localhost:9000")]), "is not a URL"),
            (EnvironmentSource::fixed([("AWS_ENDPOINT_URL", "http://u:hush@h")]), "is not a URL"),
            (
                EnvironmentSource::fixed([("AWS_ENDPOINT_URL", "http://host:90000")]),
                "is not a URL (invalid port number)",
            ),
            (EnvironmentSource::fixed([("AWS_REGION", "eu\n-1")]), "AWS_REGION"),
            (of("K", "hush\u{e9}", "t"), "AWS_SECRET_ACCESS_KEY contains a character"),
            (
                of("K", "hush", "hush hush"),
                "AWS_SESSION_TOKEN contains a character that is not visible ASCII, at position 5 of",
            ),
            (of("K\u{feff}", "hush", "t"), "AWS_ACCESS_KEY_ID contains a character"),
        ] {
            let error = AwsSettings::gather(&config(env)).map(|_| ()).unwrap_err();
            assert!(error.message().contains(part) && !error.message().contains("hush"), "{error}");
        }
    }

    #[test]
    fn secrets_are_not_shown() {
        let c = crate::AwsCredentials {
            access_key_id: "AKIAEXAMPLE".into(),
            secret_access_key: "hush".into(),
            session_token: Some("hush".into()),
        };
        let config = OriginOptions { credentials: Some(c), ..config(EnvironmentSource::fixed([])) };
        assert!(!format!("{config:?}").contains("hush") && !format!("{config:?}").contains("EXAMPLE"));
        assert!(!AwsSettings::gather(&config).unwrap().origin.contains("hush"));
    }
}
