//! `coordinator://`: the embedded coordinator as a registry, over gRPC. With several, a node registers at all of them
//! and a watcher follows one, then the next when that fails; the coordinators share no data.

use crate::pb::group_client::GroupClient;
use crate::rule_store::{CoordinatorRuleStore, MergeRules, RuleStore};
use crate::{ANSWER_TIMEOUT, LEASE_TIME, MemberWatch, NodeLease, Registry, handshake_gate, pb, small_runtime};
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

/// A coordinator silent for this long is lost: it sends a heartbeat every [`HEARTBEAT`].
const SILENCE_LIMIT: Duration = Duration::from_secs(20);
/// How often a coordinator sends a watcher an empty change.
pub(crate) const HEARTBEAT: Duration = Duration::from_secs(5);
/// Changes within this time are delivered together.
const GATHER_WINDOW: Duration = Duration::from_millis(100);
/// Largest message of a coordinator: a thousand nodes with long names and many addresses.
const MAX_MESSAGE: usize = 16 << 20;

/// One or more coordinators as a registry.
pub(crate) struct CoordinatorClient {
    url: String,
    group: String,
    coordinators: Arc<Vec<CoordinatorHandle>>,
    runtime: Arc<Runtime>,
}

pub(crate) struct CoordinatorHandle {
    pub(crate) address: String,
    pub(crate) channel: Channel,
    /// Digest of the coordinator's rules, and when it reported it.
    pub(crate) rules: Mutex<Option<(String, Instant)>>,
}

impl CoordinatorHandle {
    /// Notes the digest of the rules that the coordinator has.
    pub(crate) fn record_digest(&self, digest: String) {
        *self.rules.lock() = Some((digest, Instant::now()));
    }

    /// Whether the coordinator reported this digest within the last lease time.
    pub(crate) fn has_digest(&self, digest: &str) -> bool {
        self.rules.lock().as_ref().is_some_and(|(said, when)| said == digest && when.elapsed() < LEASE_TIME)
    }
}

impl CoordinatorClient {
    pub(crate) fn new(addresses: &[HostPort], group: &str, trust: &Arc<Trust>) -> Result<Self> {
        let runtime = small_runtime("coordinator")?;
        let inside = runtime.enter();
        let connect = |address: &HostPort| {
            Ok(CoordinatorHandle {
                address: address.to_string(),
                channel: lazy_channel(address, trust)?,
                rules: Mutex::default(),
            })
        };
        let at = addresses.iter().map(connect).collect::<Result<Vec<_>>>()?;
        drop(inside);
        let names: Vec<&str> = at.iter().map(|at| at.address.as_str()).collect();
        Ok(CoordinatorClient {
            url: format!("coordinator://{}", names.join(",")),
            group: group.to_owned(),
            coordinators: Arc::new(at),
            runtime: Arc::new(runtime),
        })
    }
}

impl Registry for CoordinatorClient {
    fn description(&self) -> &str {
        &self.url
    }

    fn watch_members(&self) -> Box<dyn MemberWatch> {
        Box::new(CoordinatorWatch {
            group: self.group.clone(),
            coordinators: Arc::clone(&self.coordinators),
            runtime: Arc::clone(&self.runtime),
            next: 0,
            stream: None,
            known: BTreeMap::new(),
        })
    }

    fn node_lease(&self) -> Option<Box<dyn NodeLease>> {
        Some(Box::new(CoordinatorLease {
            group: self.group.clone(),
            coordinators: Arc::clone(&self.coordinators),
            runtime: Arc::clone(&self.runtime),
            name: None,
            unreached: Vec::new(),
        }))
    }

    fn rule_store(&self, merge: MergeRules) -> Option<Box<dyn RuleStore>> {
        let (at, runtime) = (Arc::clone(&self.coordinators), Arc::clone(&self.runtime));
        Some(Box::new(CoordinatorRuleStore { group: self.group.clone(), merge, coordinators: at, runtime }))
    }
}

/// A channel to a coordinator that connects on first use; must be called inside a runtime.
pub(crate) fn lazy_channel(address: &HostPort, trust: &Arc<Trust>) -> Result<Channel> {
    let endpoint = Endpoint::from_shared(format!("http://{address}"))
        .map_err(|e| Error::new(ErrorKind::Invalid, format!("coordinator://{address}: {e}")))?;
    let (address, trust) = (address.clone(), Arc::clone(trust));
    let knock = move |_| {
        let stream = handshake_gate::connect_coordinator(address.clone(), Arc::clone(&trust));
        async { stream.await.map(TokioIo::new) }
    };
    let endpoint = endpoint.http2_keep_alive_interval(HEARTBEAT).keep_alive_timeout(ANSWER_TIMEOUT);
    Ok(endpoint.connect_with_connector_lazy(tower::service_fn(knock)))
}

/// A gRPC error as one sentence with all its causes.
pub(crate) fn status_error(what: &str, status: &Status) -> Error {
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
        // The handshake gate's own error needs no context.
        let refused = match error.downcast_ref::<Error>() {
            Some(own) => Some((own.kind(), own.message().to_owned())),
            None => goaway_reason(&error.to_string()).map(|words| (ErrorKind::PermissionDenied, words)),
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

/// The gate's reason in a GOAWAY, as the HTTP/2 library prints it.
fn goaway_reason(words: &str) -> Option<String> {
    let (_, rest) = words.split_once("(b\"")?;
    let (why, _) = rest.rsplit_once("\")")?;
    why.contains("--").then(|| why.to_owned())
}

pub(crate) fn member_to_wire(member: &Member) -> pb::Node {
    pb::Node {
        name: member.name.clone(),
        instance: member.instance,
        addresses: member.addresses.clone(),
        weight: member.weight,
        zone: member.zone.clone(),
    }
}

pub(crate) fn member_from_wire(node: pb::Node) -> Member {
    let pb::Node { name, instance, addresses, weight, zone } = node;
    Member { name, instance, addresses, weight, zone }
}

struct CoordinatorWatch {
    group: String,
    coordinators: Arc<Vec<CoordinatorHandle>>,
    runtime: Arc<Runtime>,
    /// The coordinator to try when there is no stream.
    next: usize,
    stream: Option<Streaming<pb::Change>>,
    known: BTreeMap<String, Arc<Member>>,
}

impl CoordinatorWatch {
    /// Opens a stream to the first coordinator that accepts one.
    async fn open_stream(&mut self) -> Result<Streaming<pb::Change>> {
        let (mut failed, mut refused) = (Vec::new(), 0);
        for _ in 0..self.coordinators.len() {
            let at = &self.coordinators[self.next % self.coordinators.len()];
            let mut client = GroupClient::new(at.channel.clone()).max_decoding_message_size(MAX_MESSAGE);
            let request = pb::WatchRequest { group: self.group.clone() };
            match tokio::time::timeout(ANSWER_TIMEOUT, client.watch(request)).await {
                Ok(Ok(answer)) => return Ok(answer.into_inner()),
                Ok(Err(status)) => {
                    let error = status_error(&at.address, &status);
                    refused += usize::from(error.kind() == ErrorKind::PermissionDenied);
                    failed.push(error.message().to_owned());
                }
                Err(_) => failed.push(format!("{}: no answer within {} s", at.address, ANSWER_TIMEOUT.as_secs())),
            }
            self.next += 1;
        }
        let kind = if refused == failed.len() { ErrorKind::PermissionDenied } else { ErrorKind::Unavailable };
        Err(Error::new(kind, failed.join("; ")))
    }

    /// Applies one message; returns whether the members changed.
    fn apply_change(&mut self, change: pb::Change) -> bool {
        let mut changed = false;
        if change.reset {
            changed = !self.known.is_empty() || change.put.is_empty();
            self.known.clear();
        }
        for node in change.put {
            changed = true;
            let member = member_from_wire(node);
            self.known.insert(member.name.clone(), Arc::new(member));
        }
        for name in change.gone {
            changed |= self.known.remove(&name).is_some();
        }
        changed
    }

    async fn next_changes(&mut self, until: Instant) -> Result<Option<Vec<Arc<Member>>>> {
        if self.stream.is_none() {
            self.stream = Some(self.open_stream().await?);
        }
        let (mut changed, mut whole) = (false, true);
        let mut limit = until;
        loop {
            let Some(stream) = &mut self.stream else { return Ok(None) };
            // A list in several messages is read to its end: half a list is none.
            let wait = if whole { limit.saturating_duration_since(Instant::now()) } else { SILENCE_LIMIT };
            let lost = match tokio::time::timeout(wait.min(SILENCE_LIMIT), stream.message()).await {
                Ok(Ok(Some(change))) => {
                    whole = !change.more;
                    if self.apply_change(change) && !changed {
                        changed = true;
                        limit = limit.min(Instant::now() + GATHER_WINDOW);
                    }
                    continue;
                }
                Ok(Ok(None)) => "the coordinator closed the connection".to_owned(),
                Ok(Err(status)) => status_error("", &status).message().trim_start_matches(": ").to_owned(),
                Err(_) if whole && wait < SILENCE_LIMIT => {
                    return Ok(changed.then(|| self.known.values().cloned().collect()));
                }
                Err(_) => format!("no heartbeat for {} s", SILENCE_LIMIT.as_secs()),
            };
            let address = &self.coordinators[self.next % self.coordinators.len()].address;
            let error = Error::new(ErrorKind::Unavailable, format!("{address}: {lost}"));
            self.stream = None;
            self.next += 1;
            return Err(error);
        }
    }
}

impl MemberWatch for CoordinatorWatch {
    fn next_members(&mut self, until: Instant) -> Result<Option<Vec<Arc<Member>>>> {
        let runtime = Arc::clone(&self.runtime);
        runtime.block_on(self.next_changes(until))
    }
}

struct CoordinatorLease {
    group: String,
    coordinators: Arc<Vec<CoordinatorHandle>>,
    runtime: Arc<Runtime>,
    /// The name to remove at the end.
    name: Option<(String, u64)>,
    /// Coordinators that did not answer, so that each is logged once.
    unreached: Vec<usize>,
}

impl NodeLease for CoordinatorLease {
    fn renew(&mut self, member: &Member, until: Instant) -> Result<Duration> {
        let limit = ANSWER_TIMEOUT.min(until.saturating_duration_since(Instant::now()));
        let mut asked = JoinSet::new();
        for (index, at) in self.coordinators.iter().enumerate() {
            let mut client = GroupClient::new(at.channel.clone());
            let request = pb::AnnounceRequest { group: self.group.clone(), node: Some(member_to_wire(member)) };
            let call = async move { (index, tokio::time::timeout(limit, client.announce(request)).await) };
            asked.spawn_on(call, self.runtime.handle());
        }
        let (mut lease, mut failed, mut refused) = (None::<Duration>, Vec::new(), None);
        while let Some(answer) = self.runtime.block_on(asked.join_next()) {
            let Ok((index, answer)) = answer else { continue };
            let address = &self.coordinators[index].address;
            let error = match answer {
                Ok(Ok(reply)) => {
                    let pb::AnnounceReply { lease_ms, rules } = reply.into_inner();
                    let this = Duration::from_millis(lease_ms);
                    self.coordinators[index].record_digest(rules);
                    lease = Some(lease.map_or(this, |other| other.min(this)));
                    self.unreached.retain(|silent| *silent != index);
                    continue;
                }
                Ok(Err(status)) => status_error(address, &status),
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
                    if !self.unreached.contains(&index) {
                        self.unreached.push(index);
                        tracing::warn!("this node is not registered at one of the coordinators: {error}");
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
        for at in self.coordinators.iter() {
            let mut client = GroupClient::new(at.channel.clone());
            let request = pb::LeaveRequest { group: self.group.clone(), name: name.clone(), instance };
            asked.spawn_on(async move { client.leave(request).await.map(drop) }, self.runtime.handle());
        }
        let all = async { while asked.join_next().await.is_some() {} };
        // At a coordinator that does not get the request, the lease runs out.
        let limit = until.saturating_duration_since(Instant::now());
        let _ = self.runtime.block_on(async { tokio::time::timeout(limit, all).await });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rule_store::{later_revision, rules_digest};
    use crate::{CoordinatorServer, CoordinatorServerConfig};

    /// Retries for longer than the slowest machine needs.
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
        let coordinator = CoordinatorServer::start(CoordinatorServerConfig::default(), Arc::default()).unwrap();
        let address = coordinator.addresses()[0].to_string().parse().unwrap();
        let client = CoordinatorClient::new(&[address], "g", &Trust::without_checks()).unwrap();
        let (book, rules) = (client.rule_store(later_revision).unwrap(), serde_json::json!({"revision": 1}));
        assert_eq!(done(|| book.exchange_rules(&rules)), rules);
        *client.coordinators[0].rules.lock() = None;
        let (mut lease, node) = (client.node_lease().unwrap(), Member::from_address("127.0.0.1:1", 1));
        done(|| lease.renew(&node, Instant::now() + ANSWER_TIMEOUT));
        let said = client.coordinators[0].rules.lock().clone().map(|(said, _)| said);
        assert_eq!(said, Some(rules_digest(&rules)));
        drop(coordinator);
        // The coordinator is gone, but no request is needed while its report is recent.
        let answer = done(|| {
            client.coordinators[0].record_digest(rules_digest(&rules));
            book.exchange_rules(&rules)
        });
        assert_eq!(answer, rules);
        *client.coordinators[0].rules.lock() = None;
        assert!(book.exchange_rules(&rules).is_err());
    }
}
