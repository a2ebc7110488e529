//! The HTTP client for S3: as the object-store library's own one, which follows redirects, and this does not.
//! A request is signed for one host and path; sent on to another it would be nobody's, and the answer to that a wrong one.
//! It deliberately knows neither requests nor answers.

use crate::aws::{AwsSettings, Signer, root_cause};
use object_store::client::HttpClient;
use reqwest::dns::{Addrs, Name, Resolve, Resolving};
use reqwest::redirect::Policy;
use spurline_types::{Error, ErrorKind, Result};
use std::hash::{BuildHasher as _, RandomState};
use std::net::{SocketAddr, ToSocketAddrs as _};
use std::sync::Arc;
use std::time::Duration;

/// A client with connections of its own.
///
/// # Errors
/// `Invalid` when TLS can't be set up.
pub(crate) fn connect(settings: &AwsSettings, connect_timeout: Duration, idle_timeout: Duration) -> Result<HttpClient> {
    let plain = settings.endpoint.as_deref().is_some_and(|e| e.starts_with("http://"));
    // What is not signed may be sent anywhere.
    let redirects = if matches!(settings.signer, Signer::Nobody) { Policy::default() } else { Policy::none() };
    // Deadlines and stalls are watched one layer up, where a transfer that moves is told from one that does not.
    let client = reqwest::Client::builder()
        .redirect(redirects)
        .https_only(!plain)
        .http1_only()
        // An answer's length is the object's.
        .no_gzip()
        .no_brotli()
        .no_zstd()
        .no_deflate()
        .tls_certs_only(settings.roots.for_client())
        .dns_resolver(Arc::new(AnyOrder))
        .connect_timeout(connect_timeout)
        .pool_idle_timeout(idle_timeout)
        .user_agent(concat!("spurline/", env!("CARGO_PKG_VERSION")))
        .build()
        .map_err(|e| Error::new(ErrorKind::Invalid, format!("the HTTP client can't be set up: {}", root_cause(&e))))?;
    Ok(HttpClient::new(client))
}

/// A name's addresses in any order, so that not all connections go to the first of many servers.
struct AnyOrder;

impl Resolve for AnyOrder {
    fn resolve(&self, name: Name) -> Resolving {
        Box::pin(async move {
            let look_up = move || Ok::<_, std::io::Error>((name.as_str(), 0).to_socket_addrs()?.collect::<Vec<_>>());
            let mut found: Vec<SocketAddr> = tokio::task::spawn_blocking(look_up).await??;
            let random = RandomState::new();
            found.sort_by_cached_key(|address| random.hash_one(address));
            Ok(Box::new(found.into_iter()) as Addrs)
        })
    }
}
