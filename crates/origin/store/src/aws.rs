//! The settings of S3: endpoint, region, authorities and signer, from the configuration, AWS variables and AWS files. It
//! deliberately sends no request to S3 and never shows a secret.

use crate::aws_sources::{AwsFiles, FirstSource, ProfileSource, library_context};
use crate::ca_store::CaStore;
use crate::config::{EnvironmentSource, OriginOptions};
use crate::credential_store::{CredentialSource, CredentialStore, shown_key};
use crate::messages::{require_graphic, root_cause};

use reqsign_aws_v4::Credential;
use spurline_types::{Error, ErrorKind, Result};
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
    /// With a key of the configuration or the environment, which does not change.
    Key(Arc<Credential>),
    Store(CredentialStore),
}

/// Least time for requests for credentials, whatever the limits of other connections.
const CREDENTIAL_TIME: Duration = Duration::from_secs(2);

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
        let files = AwsFiles::of(env);
        let profiles = files.read();

        let endpoint = config
            .endpoint
            .clone()
            .or_else(|| env.get("AWS_ENDPOINT_URL_S3"))
            .or_else(|| env.get("AWS_ENDPOINT_URL"))
            .or_else(|| env.get("AWS_ENDPOINT"))
            .or_else(|| profiles.get(&profile, "endpoint_url"));
        let endpoint = endpoint.map(|e| check_endpoint(&e)).transpose()?;
        let region = config
            .region
            .clone()
            .or_else(|| env.get("AWS_REGION"))
            .or_else(|| env.get("AWS_DEFAULT_REGION"))
            .or_else(|| profiles.get(&profile, "region"))
            .unwrap_or_else(|| "us-east-1".into());
        let region = require_graphic("the region (AWS_REGION)", &region)?;
        let roots = CaStore::of_aws(env)?;
        if endpoint.as_deref().is_none_or(|e| e.starts_with("https://")) {
            roots.require_any(endpoint.as_deref().unwrap_or("AWS S3"))?;
        }

        if config.anonymous || env.get("AWS_SKIP_SIGNATURE").is_some_and(|v| v.eq_ignore_ascii_case("true")) {
            let origin = if config.anonymous {
                "anonymous access by --anonymous"
            } else {
                "anonymous access by AWS_SKIP_SIGNATURE"
            };
            let origin = origin.to_owned();
            return Ok(AwsSettings { endpoint, region, roots, signer: RequestSigner::Anonymous, origin });
        }
        let (signer, origin) = if let Some(c) = &config.credentials {
            let token = c.session_token.as_deref().map(|token| ("the session token", token));
            let id = ("the access key's id", c.access_key_id.as_str());
            fixed_key(id, ("the secret", &c.secret_access_key), token, "the configuration")?
        } else if let Some(fixed) = environment_key(env)? {
            fixed
        } else {
            let kind = profiles.kind(&profile);
            if named.is_some() && kind.is_none() {
                let message = format!(
                    "AWS_PROFILE names the profile '{profile}', but neither {} nor the config file has credentials for it: \
                     aws_access_key_id and aws_secret_access_key, role_arn, sso_account_id or credential_process; add one, \
                     or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
                    files.shown()
                );
                return Err(Error::new(ErrorKind::Invalid, message));
            }
            let origin = match kind {
                Some(kind) => format!("{kind} of profile '{profile}' in {}", files.shown()),
                None => "a role".into(),
            };
            let client = credential_client(&roots, config.connect_timeout.max(CREDENTIAL_TIME))?;
            let context = library_context(env, client);
            let paths = files.paths();
            let of_profile = ProfileSource { profile, files, region: region.clone() };
            let source: CredentialSource =
                if kind.is_some() { Arc::new(of_profile) } else { Arc::new(FirstSource::new(of_profile)) };
            (RequestSigner::Store(CredentialStore::new(source, context, paths)), origin)
        };
        Ok(AwsSettings { endpoint, region, roots, signer, origin })
    }

    /// The credentials to sign with now.
    ///
    /// # Errors
    /// When there are none: `PermissionDenied`, or `Unavailable` where their source did not answer.
    pub(crate) async fn credential(&self) -> Result<Option<Arc<Credential>>> {
        match &self.signer {
            RequestSigner::Anonymous => Ok(None),
            RequestSigner::Key(credential) => Ok(Some(Arc::clone(credential))),
            RequestSigner::Store(store) => store.current().await.map(Some),
        }
    }

    /// Whether the source has other credentials than the `refused` ones; they are used from now on.
    pub(crate) async fn replaced(&self, refused: &Arc<Credential>) -> bool {
        match &self.signer {
            RequestSigner::Anonymous | RequestSigner::Key(_) => false,
            RequestSigner::Store(store) => store.replace(refused).await.is_some(),
        }
    }
}

/// A value with its name for messages.
type Named<'a> = (&'a str, &'a str);

fn fixed_key(
    id: Named<'_>,
    secret: Named<'_>,
    token: Option<Named<'_>>,
    source: &str,
) -> Result<(RequestSigner, String)> {
    let access_key_id = require_graphic(id.0, id.1)?;
    let secret_access_key = require_graphic(secret.0, secret.1)?;
    let session_token = token.map(|(name, token)| require_graphic(name, token)).transpose()?;
    let shown = format!("access key {} from {source}", shown_key(&access_key_id));
    let credential = Credential { access_key_id, secret_access_key, session_token, expires_in: None };
    Ok((RequestSigner::Key(Arc::new(credential)), shown))
}

/// The key of the AWS variables, if they are set.
fn environment_key(env: &EnvironmentSource) -> Result<Option<(RequestSigner, String)>> {
    const ID: &str = "AWS_ACCESS_KEY_ID";
    const SECRET: &str = "AWS_SECRET_ACCESS_KEY";
    const TOKEN: &str = "AWS_SESSION_TOKEN";
    let set = |name: &str| env.get(name).filter(|value| !value.trim().is_empty());
    match (set(ID), set(SECRET)) {
        (Some(id), Some(secret)) => {
            let token = set(TOKEN);
            let token = token.as_deref().map(|token| (TOKEN, token));
            fixed_key((ID, &id), (SECRET, &secret), token, "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY").map(Some)
        }
        (Some(_), None) => Err(half_pair_error(ID, SECRET)),
        (None, Some(_)) => Err(half_pair_error(SECRET, ID)),
        (None, None) => Ok(None),
    }
}

/// The client for requests for credentials: to AWS over TLS, to this host's services without.
fn credential_client(roots: &CaStore, time: Duration) -> Result<reqwest::Client> {
    let client = reqwest::Client::builder()
        .redirect(reqwest::redirect::Policy::none())
        .tls_certs_only(roots.for_client())
        .connect_timeout(time)
        .timeout(2 * time)
        .build();
    client.map_err(|e| Error::new(ErrorKind::Invalid, format!("the HTTP client can't be set up: {}", root_cause(&e))))
}

fn half_pair_error(has: &str, lacks: &str) -> Error {
    Error::new(ErrorKind::Invalid, format!("{has} is set but {lacks} is not; set both, or neither"))
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

#[cfg(test)]
mod tests {
    use super::*;

    fn config(env: EnvironmentSource) -> OriginOptions {
        OriginOptions { env, ..OriginOptions::default() }
    }

    fn credential(settings: &AwsSettings) -> Arc<Credential> {
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
        assert_eq!(credential(&from_file).access_key_id, "FILEKEY");
        assert_eq!(from_file.region, "us-east-1");
        let other = EnvironmentSource::fixed([("AWS_SHARED_CREDENTIALS_FILE", file), ("AWS_PROFILE", "other")]);
        let other = AwsSettings::gather(&config(other)).unwrap();
        assert_eq!(credential(&other).session_token.as_deref(), Some("tok"));
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
        assert_eq!(credential(&both).access_key_id, "ENVKEY");
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
        assert_eq!((credential.access_key_id.as_str(), credential.secret_access_key.as_str()), ("ID", "secret"));
        assert_eq!(credential.session_token.as_deref(), Some("token"));
        let blank = AwsSettings::gather(&self::config(of("ID", "secret", "\n"))).unwrap();
        assert_eq!(self::credential(&blank).session_token, None);
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
        let c = crate::config::AwsCredentials {
            access_key_id: "AKIAEXAMPLE".into(),
            secret_access_key: "hush".into(),
            session_token: Some("hush".into()),
        };
        let config = OriginOptions { credentials: Some(c), ..config(EnvironmentSource::fixed([])) };
        assert!(!format!("{config:?}").contains("hush") && !format!("{config:?}").contains("EXAMPLE"));
        assert!(!AwsSettings::gather(&config).unwrap().origin.contains("hush"));
    }
}
