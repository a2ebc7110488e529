//! The HTTP client for S3: like that of the object-store library, but it follows no redirect of a signed request. A
//! signature is valid for one host and path; at any other, the request would be refused as unsigned. It deliberately
//! knows neither requests nor answers.

use crate::aws::{AwsSettings, RequestSigner};
use crate::messages::root_cause;
use object_store::client::HttpClient;
use reqwest::dns::{Addrs, Name, Resolve, Resolving};
use reqwest::redirect::Policy;
use spurline_sys::random;
use spurline_types::{Error, ErrorKind, Result};
use std::net::{SocketAddr, ToSocketAddrs as _};
use std::sync::Arc;
use std::time::Duration;

/// A client with connections of its own.
///
/// # Errors
/// `Invalid` when TLS can't be set up.
pub(crate) fn build_client(
    settings: &AwsSettings,
    connect_timeout: Duration,
    idle_timeout: Duration,
) -> Result<HttpClient> {
    let plain = settings.endpoint.as_deref().is_some_and(|e| e.starts_with("http://"));
    // An unsigned request may follow any redirect.
    let redirects =
        if matches!(settings.signer, RequestSigner::Anonymous) { Policy::default() } else { Policy::none() };
    // The layer above checks deadlines and stalls, because it knows whether a transfer makes progress.
    let client = reqwest::Client::builder()
        .redirect(redirects)
        .https_only(!plain)
        .http1_only()
        // The content length must be the object's.
        .no_gzip()
        .no_brotli()
        .no_zstd()
        .no_deflate()
        .tls_certs_only(settings.roots.for_client())
        .dns_resolver(Arc::new(ShuffledResolver))
        .connect_timeout(connect_timeout)
        .pool_idle_timeout(idle_timeout)
        .user_agent(concat!("spurline/", env!("CARGO_PKG_VERSION")))
        .build()
        .map_err(|e| Error::new(ErrorKind::Invalid, format!("the HTTP client can't be set up: {}", root_cause(&e))))?;
    Ok(HttpClient::new(client))
}

/// Returns a name's addresses in random order, so that connections spread over all servers.
struct ShuffledResolver;

impl Resolve for ShuffledResolver {
    fn resolve(&self, name: Name) -> Resolving {
        Box::pin(async move {
            let mut found: Vec<SocketAddr> = tokio::task::spawn_blocking(move || {
                Ok::<_, std::io::Error>((name.as_str(), 0).to_socket_addrs()?.collect::<Vec<_>>())
            })
            .await??;
            found.sort_by_cached_key(|_| random());
            Ok(Box::new(found.into_iter()) as Addrs)
        })
    }
}
