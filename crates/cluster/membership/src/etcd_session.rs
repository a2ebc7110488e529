//! Which of several etcd servers is asked, over TLS or not, with whose rights, and what its errors mean. What is asked
//! it does not know.

use crate::ANSWER;
use crate::coordinator::told;
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

/// A connection has to be there after this long.
const CONNECT: Duration = Duration::from_secs(3);
/// etcd's server takes pings at most every 5 s.
const PING: Duration = Duration::from_secs(10);
/// All servers are tried within this time, so that a node that begins with a hung one keeps its lease.
const ROUND: Duration = Duration::from_secs(10);
/// The largest answer: all nodes of a very large group.
const MAX_MESSAGE: usize = 256 << 20;

/// A way to etcd.
pub(crate) struct Session {
    servers: Vec<(String, Channel)>,
    /// The server asked first: the one that answered last, or the one behind it when it no longer does.
    at: AtomicUsize,
    user: Option<(String, String)>,
    token: Mutex<Option<MetadataValue<Ascii>>>,
    /// Times in a row that a server did not answer in time.
    silent: AtomicUsize,
}

/// Changes of keys, as they come.
pub(crate) struct Stream {
    answers: Streaming<WatchResponse>,
    server: String,
    /// etcd ends the watch when this side of the conversation ends.
    _open: mpsc::Sender<WatchRequest>,
}

fn file(path: &Path) -> Result<Vec<u8>> {
    let context = |e: std::io::Error| Error::new(ErrorKind::Invalid, format!("etcd: {}: {e}", path.display()));
    std::fs::read(path).map_err(context)
}

fn tls(url: &EtcdUrl) -> Result<Option<ClientTlsConfig>> {
    let Some(ca) = &url.ca else { return Ok(None) };
    let mut config = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(file(ca)?));
    if let (Some(cert), Some(key)) = (&url.cert, &url.key) {
        config = config.identity(Identity::from_pem(file(cert)?, file(key)?));
    }
    Ok(Some(config))
}

impl Session {
    /// Prepares connections, without making one yet; inside a runtime.
    pub(crate) fn new(url: &EtcdUrl) -> Result<Self> {
        let tls = tls(url)?;
        let scheme = if tls.is_some() { "https" } else { "http" };
        let invalid = |what: String| Error::new(ErrorKind::Invalid, what);
        let mut servers = Vec::new();
        for node in &url.nodes {
            let wrong = |e: tonic::transport::Error| {
                let cause = std::error::Error::source(&e).map_or(String::new(), |cause| format!(": {cause}"));
                invalid(format!("etcd://{node}: {e}{cause}"))
            };
            let mut endpoint = Endpoint::from_shared(format!("{scheme}://{node}"))
                .map_err(wrong)?
                .connect_timeout(CONNECT)
                .tcp_nodelay(true)
                .http2_keep_alive_interval(PING)
                .keep_alive_timeout(ANSWER)
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
                    Some(path) => String::from_utf8_lossy(&file(path)?).trim_end_matches(['\r', '\n']).to_owned(),
                    None => std::env::var("SPURLINE_ETCD_PASSWORD").map_err(|_| {
                        invalid(format!(
                            "etcd: user {user} has no password: name a file with password-file=, or set \
                             SPURLINE_ETCD_PASSWORD"
                        ))
                    })?,
                };
                Some((user.clone(), password))
            }
        };
        Ok(Session { servers, at: AtomicUsize::new(0), user, token: Mutex::new(None), silent: AtomicUsize::new(0) })
    }

    /// Gets a token for the user, when there is one and there is no token yet.
    async fn log_in(&self, channel: &Channel) -> Result<(), Status> {
        let Some((name, password)) = &self.user else { return Ok(()) };
        if self.token.lock().is_some() {
            return Ok(());
        }
        let request = AuthenticateRequest { name: name.clone(), password: password.clone() };
        let answer: AuthenticateResponse =
            call(channel, "/etcdserverpb.Auth/Authenticate", Request::new(request)).await.map_err(|status| {
                match status.code() {
                    // Not to be tried again with the same words.
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

    /// Does `what` with one server after the other until one answers; with a new token when the old one is too old.
    async fn anywhere<T>(&self, what: impl AsyncFn(&Channel) -> Result<T, Status>) -> Result<(T, String)> {
        let mut failed = Vec::new();
        let first = self.at.load(Ordering::Relaxed);
        let limit = (ROUND / self.servers.len().max(1) as u32).clamp(Duration::from_secs(1), ANSWER);
        for tried in 0..self.servers.len() {
            let index = (first + tried) % self.servers.len();
            let (server, channel) = &self.servers[index];
            let attempt = async {
                self.log_in(channel).await?;
                match what(channel).await {
                    Err(status) if is_old_token(&status) && self.user.is_some() => {
                        *self.token.lock() = None;
                        self.log_in(channel).await?;
                        // Users or rights that change again at this very moment are no fault of the request.
                        what(channel).await.map_err(|status| match is_old_token(&status) {
                            true => Status::unavailable(status.message().to_owned()),
                            false => status,
                        })
                    }
                    other => other,
                }
            };
            let status = match tokio::time::timeout(limit, attempt).await {
                Ok(Ok(value)) => {
                    self.silent.store(0, Ordering::Relaxed);
                    self.at.store(index, Ordering::Relaxed);
                    return Ok((value, server.clone()));
                }
                Ok(Err(status)) => status,
                Err(_) => {
                    // A server that was emptied waits until it has as many entries as the token tells of before it refuses it.
                    // One that only stood still is spared the logins of everybody: it answers before the second time.
                    if self.silent.fetch_add(1, Ordering::Relaxed) > 0 {
                        *self.token.lock() = None;
                    }
                    Status::unavailable(format!("no answer within {:.1} s", limit.as_secs_f64()))
                }
            };
            let error = told(&format!("etcd {server}"), &status);
            if !matches!(error.kind(), ErrorKind::Unavailable) {
                return Err(error);
            }
            // Who has no time for them all begins with the next one when it asks again.
            let next = (index + 1) % self.servers.len();
            let _ = self.at.compare_exchange(index, next, Ordering::Relaxed, Ordering::Relaxed);
            failed.push(error.message().to_owned());
        }
        Err(Error::new(ErrorKind::Unavailable, failed.join("; ")))
    }

    async fn ask<Q, A>(&self, path: &'static str, message: Q) -> Result<A>
    where
        Q: prost::Message + Clone + 'static,
        A: prost::Message + Default + 'static,
    {
        let asked = async |channel: &Channel| call(channel, path, self.with_token(message.clone())).await;
        self.anywhere(asked).await.map(|(answer, _)| answer)
    }

    pub(crate) async fn range(&self, request: RangeRequest) -> Result<RangeResponse> {
        self.ask("/etcdserverpb.KV/Range", request).await
    }

    pub(crate) async fn txn(&self, request: TxnRequest) -> Result<TxnResponse> {
        self.ask("/etcdserverpb.KV/Txn", request).await
    }

    pub(crate) async fn grant(&self, request: LeaseGrantRequest) -> Result<LeaseGrantResponse> {
        self.ask("/etcdserverpb.Lease/LeaseGrant", request).await
    }

    pub(crate) async fn revoke(&self, request: LeaseRevokeRequest) -> Result<LeaseRevokeResponse> {
        self.ask("/etcdserverpb.Lease/LeaseRevoke", request).await
    }

    /// Renews a lease; answers its seconds, 0 or less when it is over.
    pub(crate) async fn keep_alive(&self, id: i64) -> Result<i64> {
        let asked = async |channel: &Channel| {
            let one = tokio_stream::once(LeaseKeepAliveRequest { id });
            let mut answers =
                LeaseClient::new(channel.clone()).lease_keep_alive(self.with_token(one)).await?.into_inner();
            match answers.message().await? {
                Some(answer) => Ok(answer.ttl),
                None => Err(Status::unavailable("it ended the conversation")),
            }
        };
        self.anywhere(asked).await.map(|(ttl, _)| ttl)
    }

    /// Follows the keys from `key` to before `end` from a revision on.
    pub(crate) async fn watch(&self, key: Vec<u8>, end: Vec<u8>, revision: i64) -> Result<Stream> {
        let create = WatchCreateRequest { key, range_end: end, start_revision: revision, progress_notify: false };
        let asked = async |channel: &Channel| {
            let (open, requests) = mpsc::channel(1);
            let first = WatchRequest { request_union: Some(RequestUnion::CreateRequest(create.clone())) };
            let _ = open.send(first).await;
            let mut request = self.with_token(ReceiverStream::new(requests));
            // A server that lost the others ends the watch instead of being silent.
            request.metadata_mut().insert("hasleader", MetadataValue::from_static("true"));
            let mut client = WatchClient::new(channel.clone()).max_decoding_message_size(MAX_MESSAGE);
            Ok((client.watch(request).await?.into_inner(), open))
        };
        let ((answers, open), server) = self.anywhere(asked).await?;
        Ok(Stream { answers, server, _open: open })
    }
}

/// etcd's words for a token that is no use any more: after a restart, or when users or rights have changed since a JWT was
/// given out.
fn is_old_token(status: &Status) -> bool {
    const WORDS: [&str; 3] = ["invalid auth token", "revision of auth store is old", "user name is empty"];
    status.code() == Code::Unauthenticated || WORDS.iter().any(|words| status.message().contains(words))
}

async fn call<Q, A>(channel: &Channel, path: &'static str, request: Request<Q>) -> Result<A, Status>
where
    Q: prost::Message + 'static,
    A: prost::Message + Default + 'static,
{
    let mut grpc = tonic::client::Grpc::new(channel.clone()).max_decoding_message_size(MAX_MESSAGE);
    grpc.ready().await.map_err(|error| Status::from_error(error.into()))?;
    let codec = ProstCodec::<Q, A>::default();
    grpc.unary(request, PathAndQuery::from_static(path), codec).await.map(tonic::Response::into_inner)
}

impl Stream {
    /// Waits for the next changes.
    ///
    /// # Errors
    /// When the watch has ended: it has to be opened anew, from what is there then.
    pub(crate) async fn next(&mut self) -> Result<Vec<Event>> {
        let ended = |why: String| Err(Error::new(ErrorKind::Unavailable, format!("etcd {}: {why}", self.server)));
        match self.answers.message().await {
            Ok(Some(answer)) if answer.canceled => ended(format!(
                "the watch was ended: {}",
                if answer.compact_revision > 0 { "it lagged too far behind" } else { &answer.cancel_reason }
            )),
            Ok(Some(answer)) => Ok(answer.events),
            Ok(None) => ended("the watch was ended".to_owned()),
            Err(status) => Err(told(&format!("etcd {}", self.server), &status)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_of_before_a_change_of_users_is_got_anew() {
        let old = |code, words: &str| is_old_token(&Status::new(code, words));
        assert!(old(Code::Unauthenticated, "etcdserver: invalid auth token"));
        assert!(old(Code::InvalidArgument, "etcdserver: revision of auth store is old"));
        assert!(old(Code::InvalidArgument, "etcdserver: user name is empty"));
        assert!(!old(Code::InvalidArgument, "etcdserver: authentication failed, invalid user ID or password"));
        assert!(!old(Code::PermissionDenied, "etcdserver: permission denied"));
    }
}
