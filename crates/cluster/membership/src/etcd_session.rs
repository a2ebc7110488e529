//! Connections to etcd: choice of server, TLS, login, and the meaning of errors. Knows nothing of the requests'
//! contents.

use crate::ANSWER_TIMEOUT;
use crate::coordinator_client::status_error;
use crate::etcdpb::{
    AuthenticateRequest, AuthenticateResponse, Event, LeaseGrantRequest, LeaseGrantResponse, LeaseKeepAliveRequest,
    LeaseRevokeRequest, LeaseRevokeResponse, RangeRequest, RangeResponse, TxnRequest, TxnResponse, WatchCreateRequest,
    WatchRequest, WatchResponse, lease_client::LeaseClient, watch_client::WatchClient, watch_request::RequestUnion,
};
use crate::url::EtcdUrl;
use parking_lot::Mutex;
use spurline_types::{Error, ErrorKind, Result};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity};
use tonic::{Code, Request, Status, Streaming};
use tonic_prost::ProstCodec;

/// Upper limit for connecting.
const ETCD_CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
/// etcd accepts pings at most every 5 s.
const PING_INTERVAL: Duration = Duration::from_secs(10);
/// All servers are tried within this time, so that a node whose first server hangs keeps the lease.
const ROUND_TIMEOUT: Duration = Duration::from_secs(10);
/// The largest answer: all nodes of a very large group.
const MAX_ETCD_MESSAGE: usize = 256 << 20;

/// A client of several etcd servers.
pub(crate) struct EtcdSession {
    servers: Vec<(String, Channel)>,
    /// The server to try first: the server that answered last, or the next after a failure.
    preferred: AtomicUsize,
    user: Option<(String, String)>,
    token: Mutex<Option<MetadataValue<Ascii>>>,
    /// Consecutive requests without an answer in time.
    timeouts: AtomicUsize,
}

/// A watch of a key range.
pub(crate) struct KeyWatch {
    answers: Streaming<WatchResponse>,
    server: String,
    /// etcd ends the watch when this sender is dropped.
    _requests: mpsc::Sender<WatchRequest>,
}

fn read_file(path: &Path) -> Result<Vec<u8>> {
    std::fs::read(path).map_err(|e| Error::new(ErrorKind::Invalid, format!("etcd: {}: {e}", path.display())))
}

fn tls_config(url: &EtcdUrl) -> Result<Option<ClientTlsConfig>> {
    let Some(ca) = &url.ca else { return Ok(None) };
    let mut config = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(read_file(ca)?));
    if let (Some(cert), Some(key)) = (&url.cert, &url.key) {
        config = config.identity(Identity::from_pem(read_file(cert)?, read_file(key)?));
    }
    Ok(Some(config))
}

impl EtcdSession {
    /// Prepares connections, and opens none; must be called inside a runtime.
    pub(crate) fn new(url: &EtcdUrl) -> Result<Self> {
        let tls = tls_config(url)?;
        let scheme = if tls.is_some() { "https" } else { "http" };
        let mut servers = Vec::new();
        for node in &url.nodes {
            let wrong = |e: tonic::transport::Error| {
                let cause = std::error::Error::source(&e).map_or(String::new(), |cause| format!(": {cause}"));
                invalid_error(format!("etcd://{node}: {e}{cause}"))
            };
            let mut endpoint = Endpoint::from_shared(format!("{scheme}://{node}"))
                .map_err(wrong)?
                .connect_timeout(ETCD_CONNECT_TIMEOUT)
                .tcp_nodelay(true)
                .http2_keep_alive_interval(PING_INTERVAL)
                .keep_alive_timeout(ANSWER_TIMEOUT)
                .keep_alive_while_idle(true);
            if let Some(tls) = &tls {
                endpoint = endpoint.tls_config(tls.clone()).map_err(wrong)?;
            }
            servers.push((node.to_string(), endpoint.connect_lazy()));
        }
        let user = match &url.user {
            None => None,
            Some(user) => {
                let password = match &url.password_file {
                    Some(path) => String::from_utf8_lossy(&read_file(path)?).trim_end_matches(['\r', '\n']).to_owned(),
                    None => std::env::var("SPURLINE_ETCD_PASSWORD").map_err(|_| {
                        invalid_error(format!(
                            "etcd: user {user} has no password: name a file with password-file=, or set \
                             SPURLINE_ETCD_PASSWORD"
                        ))
                    })?,
                };
                Some((user.clone(), password))
            }
        };
        Ok(EtcdSession {
            servers,
            preferred: AtomicUsize::new(0),
            user,
            token: Mutex::new(None),
            timeouts: AtomicUsize::new(0),
        })
    }

    /// Logs in, when there is a user and no token yet.
    async fn log_in(&self, channel: &Channel) -> Result<(), Status> {
        let Some((name, password)) = &self.user else { return Ok(()) };
        if self.token.lock().is_some() {
            return Ok(());
        }
        let request = AuthenticateRequest { name: name.clone(), password: password.clone() };
        let answer: AuthenticateResponse =
            grpc_call(channel, "/etcdserverpb.Auth/Authenticate", Request::new(request)).await.map_err(|status| {
                match status.code() {
                    // Retrying with the same password is useless.
                    Code::InvalidArgument => Status::permission_denied(format!("user {name}: {}", status.message())),
                    _ => status,
                }
            })?;
        let token = answer.token.parse().map_err(|_| Status::internal("the token is no word"))?;
        *self.token.lock() = Some(token);
        Ok(())
    }

    fn with_token<T>(&self, message: T) -> Request<T> {
        let mut request = Request::new(message);
        if let Some(token) = self.token.lock().clone() {
            request.metadata_mut().insert("token", token);
        }
        request
    }

    /// Runs `what` with each server in turn until an answer; logs in again when the token is stale.
    async fn on_any_server<T>(&self, what: impl AsyncFn(&Channel) -> Result<T, Status>) -> Result<(T, String)> {
        let mut failed = Vec::new();
        let first = self.preferred.load(Ordering::Relaxed);
        let limit = (ROUND_TIMEOUT / self.servers.len().max(1) as u32).clamp(Duration::from_secs(1), ANSWER_TIMEOUT);
        for tried in 0..self.servers.len() {
            let index = (first + tried) % self.servers.len();
            let (server, channel) = &self.servers[index];
            let attempt = async {
                self.log_in(channel).await?;
                match what(channel).await {
                    Err(status) if is_stale_token(&status) && self.user.is_some() => {
                        *self.token.lock() = None;
                        self.log_in(channel).await?;
                        // A second change of users or rights in the meantime is no fault of the request.
                        what(channel).await.map_err(|status| {
                            if is_stale_token(&status) {
                                Status::unavailable(status.message().to_owned())
                            } else {
                                status
                            }
                        })
                    }
                    other => other,
                }
            };
            let status = match tokio::time::timeout(limit, attempt).await {
                Ok(Ok(value)) => {
                    self.timeouts.store(0, Ordering::Relaxed);
                    self.preferred.store(index, Ordering::Relaxed);
                    return Ok((value, server.clone()));
                }
                Ok(Err(status)) => status,
                Err(_) => {
                    // An emptied server waits for as many revisions as the token refers to before it refuses the token. A server
                    // that only stalled answers before the second timeout, so clients need not log in again.
                    if self.timeouts.fetch_add(1, Ordering::Relaxed) > 0 {
                        *self.token.lock() = None;
                    }
                    Status::unavailable(format!("no answer within {:.1} s", limit.as_secs_f64()))
                }
            };
            let error = status_error(&format!("etcd {server}"), &status);
            if !matches!(error.kind(), ErrorKind::Unavailable) {
                return Err(error);
            }
            // A caller with too little time for all servers begins with the next server in the next call.
            let next = (index + 1) % self.servers.len();
            let _ = self.preferred.compare_exchange(index, next, Ordering::Relaxed, Ordering::Relaxed);
            failed.push(error.message().to_owned());
        }
        Err(Error::new(ErrorKind::Unavailable, failed.join("; ")))
    }

    async fn unary_call<Q, A>(&self, path: &'static str, message: Q) -> Result<A>
    where
        Q: prost::Message + Clone + 'static,
        A: prost::Message + Default + 'static,
    {
        self.on_any_server(async |channel| grpc_call(channel, path, self.with_token(message.clone())).await)
            .await
            .map(|(answer, _)| answer)
    }

    pub(crate) async fn range(&self, request: RangeRequest) -> Result<RangeResponse> {
        self.unary_call("/etcdserverpb.KV/Range", request).await
    }

    pub(crate) async fn txn(&self, request: TxnRequest) -> Result<TxnResponse> {
        self.unary_call("/etcdserverpb.KV/Txn", request).await
    }

    pub(crate) async fn grant_lease(&self, request: LeaseGrantRequest) -> Result<LeaseGrantResponse> {
        self.unary_call("/etcdserverpb.Lease/LeaseGrant", request).await
    }

    pub(crate) async fn revoke_lease(&self, request: LeaseRevokeRequest) -> Result<LeaseRevokeResponse> {
        self.unary_call("/etcdserverpb.Lease/LeaseRevoke", request).await
    }

    /// Renews a lease; returns the remaining seconds, 0 or less after the end.
    pub(crate) async fn keep_alive(&self, id: i64) -> Result<i64> {
        self.on_any_server(async |channel| {
            let one = tokio_stream::once(LeaseKeepAliveRequest { id });
            let mut answers =
                LeaseClient::new(channel.clone()).lease_keep_alive(self.with_token(one)).await?.into_inner();
            match answers.message().await? {
                Some(answer) => Ok(answer.ttl),
                None => Err(Status::unavailable("the server closed the connection")),
            }
        })
        .await
        .map(|(ttl, _)| ttl)
    }

    /// Watches the keys from `key` to before `end`, from a revision on.
    pub(crate) async fn watch_range(&self, key: Vec<u8>, end: Vec<u8>, revision: i64) -> Result<KeyWatch> {
        let create = WatchCreateRequest { key, range_end: end, start_revision: revision, progress_notify: false };
        let ((answers, open), server) = self
            .on_any_server(async |channel| {
                let (open, requests) = mpsc::channel(1);
                let first = WatchRequest { request_union: Some(RequestUnion::CreateRequest(create.clone())) };
                let _ = open.send(first).await;
                let mut request = self.with_token(ReceiverStream::new(requests));
                // A server without a quorum then ends the watch instead of staying silent.
                request.metadata_mut().insert("hasleader", MetadataValue::from_static("true"));
                let mut client = WatchClient::new(channel.clone()).max_decoding_message_size(MAX_ETCD_MESSAGE);
                Ok((client.watch(request).await?.into_inner(), open))
            })
            .await?;
        Ok(KeyWatch { answers, server, _requests: open })
    }
}

fn invalid_error(what: String) -> Error {
    Error::new(ErrorKind::Invalid, what)
}

/// etcd's messages for an unusable token: after a restart, or when users or rights have changed since a JWT was
/// issued.
fn is_stale_token(status: &Status) -> bool {
    const WORDS: [&str; 3] = ["invalid auth token", "revision of auth store is old", "user name is empty"];
    status.code() == Code::Unauthenticated || WORDS.iter().any(|words| status.message().contains(words))
}

async fn grpc_call<Q, A>(channel: &Channel, path: &'static str, request: Request<Q>) -> Result<A, Status>
where
    Q: prost::Message + 'static,
    A: prost::Message + Default + 'static,
{
    let mut grpc = tonic::client::Grpc::new(channel.clone()).max_decoding_message_size(MAX_ETCD_MESSAGE);
    grpc.ready().await.map_err(|error| Status::from_error(error.into()))?;
    let codec = ProstCodec::<Q, A>::default();
    grpc.unary(request, PathAndQuery::from_static(path), codec).await.map(tonic::Response::into_inner)
}

impl KeyWatch {
    /// Waits for the next changes.
    ///
    /// # Errors
    /// When the watch has ended: read the keys again and open a new watch.
    pub(crate) async fn next_events(&mut self) -> Result<Vec<Event>> {
        let ended = |why: String| Err(Error::new(ErrorKind::Unavailable, format!("etcd {}: {why}", self.server)));
        match self.answers.message().await {
            Ok(Some(answer)) if answer.canceled => ended(format!(
                "the watch was ended: {}",
                if answer.compact_revision > 0 { "its start revision was compacted" } else { &answer.cancel_reason }
            )),
            Ok(Some(answer)) => Ok(answer.events),
            Ok(None) => ended("the watch was ended".to_owned()),
            Err(status) => Err(status_error(&format!("etcd {}", self.server), &status)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_of_before_a_change_of_users_is_got_anew() {
        let old = |code, words: &str| is_stale_token(&Status::new(code, words));
        assert!(old(Code::Unauthenticated, "etcdserver: invalid auth token"));
        assert!(old(Code::InvalidArgument, "etcdserver: revision of auth store is old"));
        assert!(old(Code::InvalidArgument, "etcdserver: user name is empty"));
        assert!(!old(Code::InvalidArgument, "etcdserver: authentication failed, invalid user ID or password"));
        assert!(!old(Code::PermissionDenied, "etcdserver: permission denied"));
    }
}
