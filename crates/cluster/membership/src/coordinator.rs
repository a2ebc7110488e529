//! `coordinator://`: the embedded coordinator as a registry, over gRPC. Of several, a node tells all and a watcher
//! follows one, the next when that fails; they know nothing of each other.

use crate::book::{Book, Merge, OfCoordinators};
use crate::pb::group_client::GroupClient;
use crate::{ANSWER, LEASE, Lease, Registry, Watch, door, pb, runtime};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use spurline_trust::Trust;
use spurline_types::HostPort;
use spurline_types::{Error, ErrorKind, Member, Result};
use std::collections::BTreeMap;
use std::error::Error as _;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::runtime::Runtime;
use tokio::task::JoinSet;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status, Streaming};

/// A coordinator that says nothing for this long is gone: it gives a sign of life every [`SIGN`].
const SILENCE: Duration = Duration::from_secs(20);
/// How often a coordinator says to a watcher that nothing changed.
pub(crate) const SIGN: Duration = Duration::from_secs(5);
/// Changes that come together are given together.
const GATHER: Duration = Duration::from_millis(100);
/// A message of the coordinator: a thousand nodes with long names and many addresses.
const MAX_MESSAGE: usize = 16 << 20;

/// One or more coordinators as a registry.
pub(crate) struct Client {
    url: String,
    group: String,
    at: Arc<Vec<At>>,
    runtime: Arc<Runtime>,
}

pub(crate) struct At {
    pub(crate) address: String,
    pub(crate) channel: Channel,
    /// The digest of the rules that it keeps, and when it said so.
    pub(crate) rules: Mutex<Option<(String, Instant)>>,
}

impl At {
    /// It keeps the rules of this digest now.
    pub(crate) fn keeps(&self, digest: String) {
        *self.rules.lock() = Some((digest, Instant::now()));
    }

    /// Whether it said not long ago that it keeps the rules of this digest.
    pub(crate) fn said(&self, digest: &str) -> bool {
        self.rules.lock().as_ref().is_some_and(|(said, when)| said == digest && when.elapsed() < LEASE)
    }
}

impl Client {
    pub(crate) fn new(addresses: &[HostPort], group: &str, trust: &Arc<Trust>) -> Result<Self> {
        let runtime = runtime("coordinator")?;
        let inside = runtime.enter();
        let connect = |address: &HostPort| {
            Ok(At { address: address.to_string(), channel: channel(address, trust)?, rules: Mutex::default() })
        };
        let at = addresses.iter().map(connect).collect::<Result<Vec<_>>>()?;
        drop(inside);
        let names: Vec<&str> = at.iter().map(|at| at.address.as_str()).collect();
        Ok(Client {
            url: format!("coordinator://{}", names.join(",")),
            group: group.to_owned(),
            at: Arc::new(at),
            runtime: Arc::new(runtime),
        })
    }
}

impl Registry for Client {
    fn describe(&self) -> &str {
        &self.url
    }

    fn watch(&self) -> Box<dyn Watch> {
        Box::new(Following {
            group: self.group.clone(),
            at: Arc::clone(&self.at),
            runtime: Arc::clone(&self.runtime),
            next: 0,
            stream: None,
            known: BTreeMap::new(),
        })
    }

    fn lease(&self) -> Option<Box<dyn Lease>> {
        Some(Box::new(Held {
            group: self.group.clone(),
            at: Arc::clone(&self.at),
            runtime: Arc::clone(&self.runtime),
            name: None,
            silent: Vec::new(),
        }))
    }

    fn book(&self, merge: Merge) -> Option<Box<dyn Book>> {
        let (at, runtime) = (Arc::clone(&self.at), Arc::clone(&self.runtime));
        Some(Box::new(OfCoordinators { group: self.group.clone(), merge, at, runtime }))
    }
}

/// A way to a coordinator that is connected to when it is used, inside a runtime.
pub(crate) fn channel(address: &HostPort, trust: &Arc<Trust>) -> Result<Channel> {
    let endpoint = Endpoint::from_shared(format!("http://{address}"))
        .map_err(|e| Error::new(ErrorKind::Invalid, format!("coordinator://{address}: {e}")))?;
    let (address, trust) = (address.clone(), Arc::clone(trust));
    let knock = move |_| {
        let stream = door::knock(address.clone(), Arc::clone(&trust));
        async { stream.await.map(TokioIo::new) }
    };
    let endpoint = endpoint.http2_keep_alive_interval(SIGN).keep_alive_timeout(ANSWER);
    Ok(endpoint.connect_with_connector_lazy(tower::service_fn(knock)))
}

/// An error of gRPC as one sentence with all its causes.
pub(crate) fn told(what: &str, status: &Status) -> Error {
    let mut kind = match status.code() {
        Code::AlreadyExists => ErrorKind::Invalid,
        Code::InvalidArgument | Code::ResourceExhausted | Code::Unimplemented => ErrorKind::Unsupported,
        Code::Unauthenticated | Code::PermissionDenied => ErrorKind::PermissionDenied,
        _ => ErrorKind::Unavailable,
    };
    let mut text = status.message().to_owned();
    let mut cause = status.source();
    while let Some(error) = cause {
        cause = error.source();
        // The words of either side's door say all there is to say.
        let refused = match error.downcast_ref::<Error>() {
            Some(own) => Some((own.kind(), own.message().to_owned())),
            None => refusal(&error.to_string()).map(|words| (ErrorKind::PermissionDenied, words)),
        };
        if let Some((of_door, words)) = refused {
            kind = if of_door == ErrorKind::PermissionDenied { of_door } else { kind };
            text = words;
            break;
        }
        let words = error.to_string();
        if !text.contains(&words) {
            text = if text.is_empty() { words } else { format!("{text}: {words}") };
        }
    }
    match kind {
        ErrorKind::Invalid => Error::new(kind, text),
        _ => Error::new(kind, format!("{what}: {text}")),
    }
}

/// The words of the door in a GOAWAY, as the HTTP/2 library shows them.
fn refusal(words: &str) -> Option<String> {
    let (_, rest) = words.split_once("(b\"")?;
    let (why, _) = rest.rsplit_once("\")")?;
    why.contains("--").then(|| why.to_owned())
}

pub(crate) fn to_wire(member: &Member) -> pb::Node {
    pb::Node {
        name: member.name.clone(),
        instance: member.instance,
        addresses: member.addresses.clone(),
        weight: member.weight,
        zone: member.zone.clone(),
    }
}

pub(crate) fn from_wire(node: pb::Node) -> Member {
    let pb::Node { name, instance, addresses, weight, zone } = node;
    Member { name, instance, addresses, weight, zone }
}

struct Following {
    group: String,
    at: Arc<Vec<At>>,
    runtime: Arc<Runtime>,
    /// The coordinator to ask when there is no stream.
    next: usize,
    stream: Option<Streaming<pb::Change>>,
    known: BTreeMap<String, Arc<Member>>,
}

impl Following {
    /// Opens a stream to one coordinator after the other.
    async fn open(&mut self) -> Result<Streaming<pb::Change>> {
        let (mut failed, mut refused) = (Vec::new(), 0);
        for _ in 0..self.at.len() {
            let at = &self.at[self.next % self.at.len()];
            let mut client = GroupClient::new(at.channel.clone()).max_decoding_message_size(MAX_MESSAGE);
            let request = pb::WatchRequest { group: self.group.clone() };
            match tokio::time::timeout(ANSWER, client.watch(request)).await {
                Ok(Ok(answer)) => return Ok(answer.into_inner()),
                Ok(Err(status)) => {
                    let error = told(&at.address, &status);
                    refused += usize::from(error.kind() == ErrorKind::PermissionDenied);
                    failed.push(error.message().to_owned());
                }
                Err(_) => failed.push(format!("{}: no answer within {} s", at.address, ANSWER.as_secs())),
            }
            self.next += 1;
        }
        let kind = if refused == failed.len() { ErrorKind::PermissionDenied } else { ErrorKind::Unavailable };
        Err(Error::new(kind, failed.join("; ")))
    }

    /// Takes one message in; whether the members changed.
    fn take(&mut self, change: pb::Change) -> bool {
        let mut changed = false;
        if change.reset {
            changed = !self.known.is_empty() || change.put.is_empty();
            self.known.clear();
        }
        for node in change.put {
            changed = true;
            let member = from_wire(node);
            self.known.insert(member.name.clone(), Arc::new(member));
        }
        for name in change.gone {
            changed |= self.known.remove(&name).is_some();
        }
        changed
    }

    async fn changes(&mut self, until: Instant) -> Result<Option<Vec<Arc<Member>>>> {
        if self.stream.is_none() {
            self.stream = Some(self.open().await?);
        }
        let (mut changed, mut whole) = (false, true);
        let mut limit = until;
        loop {
            let Some(stream) = &mut self.stream else { return Ok(None) };
            // What is begun is waited for: half a view is none.
            let wait = if whole { limit.saturating_duration_since(Instant::now()) } else { SILENCE };
            let lost = match tokio::time::timeout(wait.min(SILENCE), stream.message()).await {
                Ok(Ok(Some(change))) => {
                    whole = !change.more;
                    if self.take(change) && !changed {
                        changed = true;
                        limit = limit.min(Instant::now() + GATHER);
                    }
                    continue;
                }
                Ok(Ok(None)) => "it ended the conversation".to_owned(),
                Ok(Err(status)) => told("", &status).message().trim_start_matches(": ").to_owned(),
                Err(_) if whole && wait < SILENCE => {
                    return Ok(changed.then(|| self.known.values().cloned().collect()));
                }
                Err(_) => format!("it said nothing for {} s", SILENCE.as_secs()),
            };
            let address = &self.at[self.next % self.at.len()].address;
            let error = Error::new(ErrorKind::Unavailable, format!("{address}: {lost}"));
            self.stream = None;
            self.next += 1;
            return Err(error);
        }
    }
}

impl Watch for Following {
    fn next(&mut self, until: Instant) -> Result<Option<Vec<Arc<Member>>>> {
        let runtime = Arc::clone(&self.runtime);
        runtime.block_on(self.changes(until))
    }
}

struct Held {
    group: String,
    at: Arc<Vec<At>>,
    runtime: Arc<Runtime>,
    /// What is given back.
    name: Option<(String, u64)>,
    /// Coordinators that could not be told, so that it is said once of each.
    silent: Vec<usize>,
}

impl Lease for Held {
    fn renew(&mut self, member: &Member, until: Instant) -> Result<Duration> {
        let limit = ANSWER.min(until.saturating_duration_since(Instant::now()));
        let mut asked = JoinSet::new();
        for (index, at) in self.at.iter().enumerate() {
            let mut client = GroupClient::new(at.channel.clone());
            let request = pb::AnnounceRequest { group: self.group.clone(), node: Some(to_wire(member)) };
            let call = async move { (index, tokio::time::timeout(limit, client.announce(request)).await) };
            asked.spawn_on(call, self.runtime.handle());
        }
        let (mut lease, mut failed, mut refused) = (None::<Duration>, Vec::new(), None);
        while let Some(answer) = self.runtime.block_on(asked.join_next()) {
            let Ok((index, answer)) = answer else { continue };
            let address = &self.at[index].address;
            let error = match answer {
                Ok(Ok(reply)) => {
                    let pb::AnnounceReply { lease_ms, rules } = reply.into_inner();
                    let this = Duration::from_millis(lease_ms);
                    self.at[index].keeps(rules);
                    lease = Some(lease.map_or(this, |other| other.min(this)));
                    self.silent.retain(|silent| *silent != index);
                    continue;
                }
                Ok(Err(status)) => told(address, &status),
                Err(_) => {
                    let text = format!("{address}: no answer within {:.0} s", limit.as_secs_f64());
                    Error::new(ErrorKind::Unavailable, text)
                }
            };
            if error.kind() == ErrorKind::Unavailable {
                failed.push((index, error));
            } else {
                refused.get_or_insert(error);
            }
        }
        self.name = Some((member.name.clone(), member.instance));
        match (refused, lease) {
            (Some(error), _) => Err(error),
            (None, Some(lease)) => {
                for (index, error) in failed {
                    if !self.silent.contains(&index) {
                        self.silent.push(index);
                        tracing::warn!("one of the coordinators can't be told of this node: {error}");
                    }
                }
                Ok(lease)
            }
            (None, None) => {
                let words: Vec<_> = failed.iter().map(|(_, error)| error.message()).collect();
                Err(Error::new(ErrorKind::Unavailable, words.join("; ")))
            }
        }
    }

    fn release(&mut self, until: Instant) {
        let Some((name, instance)) = self.name.take() else { return };
        let mut asked = JoinSet::new();
        for at in self.at.iter() {
            let mut client = GroupClient::new(at.channel.clone());
            let request = pb::LeaveRequest { group: self.group.clone(), name: name.clone(), instance };
            asked.spawn_on(async move { client.leave(request).await.map(drop) }, self.runtime.handle());
        }
        let all = async { while asked.join_next().await.is_some() {} };
        // A coordinator that does not hear it sees the lease run out.
        let limit = until.saturating_duration_since(Instant::now());
        let _ = self.runtime.block_on(async { tokio::time::timeout(limit, all).await });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::book::{digest, later};
    use crate::{Coordinator, CoordinatorConfig};

    /// Tries until it is done, for longer than the slowest machine takes.
    fn done<T>(mut what: impl FnMut() -> Result<T>) -> T {
        let begun = Instant::now();
        loop {
            match what() {
                Ok(done) => return done,
                Err(error) => assert!(begun.elapsed() < Duration::from_secs(120), "{error}"),
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    #[test]
    fn who_is_told_that_the_rules_are_those_it_knows_asks_for_nothing() {
        let coordinator = Coordinator::start(CoordinatorConfig::default(), Arc::default()).unwrap();
        let address = coordinator.addresses()[0].to_string().parse().unwrap();
        let client = Client::new(&[address], "g", &Trust::anyone()).unwrap();
        let (book, rules) = (client.book(later).unwrap(), serde_json::json!({"revision": 1}));
        assert_eq!(done(|| book.exchange(&rules)), rules);
        *client.at[0].rules.lock() = None;
        let (mut lease, node) = (client.lease().unwrap(), Member::at("127.0.0.1:1", 1));
        done(|| lease.renew(&node, Instant::now() + ANSWER));
        let said = client.at[0].rules.lock().clone().map(|(said, _)| said);
        assert_eq!(said, Some(digest(&rules)));
        drop(coordinator);
        // Nobody is there, and nobody has to be asked; as long as that was said not long ago.
        let answer = done(|| {
            client.at[0].keeps(digest(&rules));
            book.exchange(&rules)
        });
        assert_eq!(answer, rules);
        *client.at[0].rules.lock() = None;
        assert!(book.exchange(&rules).is_err());
    }
}
