//! `coordinator://`: the embedded coordinator as a registry, over gRPC.

use crate::group_record::{CoordinatorRecord, GroupRecord, RecordName};
use crate::pb::group_client::GroupClient;
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
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Response, Status, Streaming};

/// A coordinator silent for this long is lost: heartbeats come every [`HEARTBEAT`].
const SILENCE_LIMIT: Duration = Duration::from_secs(20);
/// How often a coordinator sends a watcher an empty change.
pub(crate) const HEARTBEAT: Duration = Duration::from_secs(5);
/// Changes within this time are delivered together.
const GATHER_WINDOW: Duration = Duration::from_millis(100);
/// Largest message of a coordinator: a thousand nodes with long names and many addresses.
const MAX_COORDINATOR_MESSAGE: usize = 16 << 20;
/// The cause of an error, in the HTTP library's words, when the other side did not answer a ping within [`ANSWER_TIMEOUT`].
const KEEP_ALIVE_CAUSE: &str = "keep-alive timed out";

/// A coordinator as the registry of a group.
pub(crate) struct CoordinatorClient {
    url: String,
    coordinator: Arc<CoordinatorHandle>,
}

/// The connection to a coordinator, for a group.
pub(crate) struct CoordinatorHandle {
    pub(crate) address: String,
    pub(crate) group: String,
    pub(crate) channel: Channel,
    runtime: Runtime,
    /// The version of the group's rules, and the time of the coordinator's report.
    rules: Mutex<Option<(u64, Instant)>>,
}

impl CoordinatorHandle {
    /// Notes the version of the group's rules.
    pub(crate) fn note_rules(&self, version: u64) {
        *self.rules.lock() = Some((version, Instant::now()));
    }

    /// Whether the coordinator reported this version of the rules within the last lease time.
    pub(crate) fn has_rules(&self, version: u64) -> bool {
        self.rules.lock().is_some_and(|(noted, when)| noted == version && when.elapsed() < LEASE_TIME)
    }

    /// Waits for the answer to a request.
    pub(crate) fn call<T>(
        &self,
        limit: Duration,
        request: impl Future<Output = Result<Response<T>, Status>>,
    ) -> Result<T> {
        match self.runtime.block_on(async { tokio::time::timeout(limit, request).await }) {
            Ok(Ok(reply)) => Ok(reply.into_inner()),
            Ok(Err(status)) => Err(status_error(&self.address, &status)),
            Err(_) => Err(self.no_answer(limit)),
        }
    }

    fn no_answer(&self, limit: Duration) -> Error {
        let text = format!("{}: no answer within {:.0} s", self.address, limit.as_secs_f64());
        Error::new(ErrorKind::Unavailable, text)
    }
}

impl CoordinatorClient {
    pub(crate) fn new(address: &HostPort, group: &str, trust: &Arc<Trust>) -> Result<Self> {
        let runtime = small_runtime("coordinator")?;
        let inside = runtime.enter();
        let channel = lazy_channel(address, trust)?;
        drop(inside);
        let url = format!("coordinator://{address}");
        let address = address.to_string();
        let group = group.to_owned();
        let rules = Mutex::default();
        let coordinator = CoordinatorHandle { address, group, channel, runtime, rules };
        Ok(CoordinatorClient { url, coordinator: Arc::new(coordinator) })
    }
}

impl Registry for CoordinatorClient {
    fn description(&self) -> &str {
        &self.url
    }

    fn watch_members(&self) -> Box<dyn MemberWatch> {
        let coordinator = Arc::clone(&self.coordinator);
        Box::new(CoordinatorWatch { coordinator, stream: None, known: BTreeMap::new() })
    }

    fn node_lease(&self) -> Option<Box<dyn NodeLease>> {
        Some(Box::new(CoordinatorLease { coordinator: Arc::clone(&self.coordinator), name: None }))
    }

    fn group_record(&self, name: RecordName) -> Option<Box<dyn GroupRecord>> {
        Some(Box::new(CoordinatorRecord::new(Arc::clone(&self.coordinator), name)))
    }
}

/// A channel to a coordinator that connects on first use; must be called inside a runtime.
pub(crate) fn lazy_channel(address: &HostPort, trust: &Arc<Trust>) -> Result<Channel> {
    let endpoint = Endpoint::from_shared(format!("http://{address}"))
        .map_err(|e| Error::new(ErrorKind::Invalid, format!("coordinator://{address}: {e}")))?;
    let address = address.clone();
    let trust = Arc::clone(trust);
    let endpoint = endpoint.http2_keep_alive_interval(HEARTBEAT).keep_alive_timeout(ANSWER_TIMEOUT);
    Ok(endpoint.connect_with_connector_lazy(tower::service_fn(move |_| {
        let stream = handshake_gate::connect_coordinator(address.clone(), Arc::clone(&trust));
        async { stream.await.map(TokioIo::new) }
    })))
}

/// A gRPC error as a sentence with all causes.
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
        if words == KEEP_ALIVE_CAUSE {
            text = format!("no answer to a ping within {} s", ANSWER_TIMEOUT.as_secs());
            break;
        }
        if !text.contains(&words) {
            text = if text.is_empty() { words } else { format!("{text}: {words}") };
        }
    }
    match kind {
        ErrorKind::Invalid => Error::new(kind, text),
        _ => Error::new(kind, format!("{what}: {text}")),
    }
}

/// The gate's reason in a GOAWAY, as printed by the HTTP/2 library.
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
    coordinator: Arc<CoordinatorHandle>,
    stream: Option<Streaming<pb::Change>>,
    known: BTreeMap<String, Arc<Member>>,
}

impl CoordinatorWatch {
    async fn open_stream(&mut self) -> Result<Streaming<pb::Change>> {
        let at = &self.coordinator;
        let mut client = GroupClient::new(at.channel.clone()).max_decoding_message_size(MAX_COORDINATOR_MESSAGE);
        let request = pb::WatchRequest { group: at.group.clone() };
        match tokio::time::timeout(ANSWER_TIMEOUT, client.watch(request)).await {
            Ok(Ok(answer)) => Ok(answer.into_inner()),
            Ok(Err(status)) => Err(status_error(&at.address, &status)),
            Err(_) => Err(at.no_answer(ANSWER_TIMEOUT)),
        }
    }

    /// Applies a message; returns whether the members changed.
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
        let mut changed = false;
        let mut whole = true;
        let mut limit = until;
        loop {
            let Some(stream) = &mut self.stream else { return Ok(None) };
            // A list in several messages is read to the end: half a list is none.
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
            self.stream = None;
            return Err(Error::new(ErrorKind::Unavailable, format!("{}: {lost}", self.coordinator.address)));
        }
    }
}

impl MemberWatch for CoordinatorWatch {
    fn next_members(&mut self, until: Instant) -> Result<Option<Vec<Arc<Member>>>> {
        let coordinator = Arc::clone(&self.coordinator);
        coordinator.runtime.block_on(self.next_changes(until))
    }
}

struct CoordinatorLease {
    coordinator: Arc<CoordinatorHandle>,
    /// The name to remove at the end.
    name: Option<(String, u64)>,
}

impl NodeLease for CoordinatorLease {
    fn renew(&mut self, member: &Member, until: Instant) -> Result<Duration> {
        let limit = ANSWER_TIMEOUT.min(until.saturating_duration_since(Instant::now()));
        let at = &self.coordinator;
        self.name = Some((member.name.clone(), member.instance));
        let request = pb::AnnounceRequest { group: at.group.clone(), node: Some(member_to_wire(member)) };
        let mut client = GroupClient::new(at.channel.clone());
        let pb::AnnounceReply { lease_ms, record_version } = at.call(limit, client.announce(request))?;
        at.note_rules(record_version);
        Ok(Duration::from_millis(lease_ms))
    }

    fn release(&mut self, until: Instant) {
        let Some((name, instance)) = self.name.take() else { return };
        let at = &self.coordinator;
        let mut client = GroupClient::new(at.channel.clone());
        let request = pb::LeaveRequest { group: at.group.clone(), name, instance };
        // If the coordinator does not get the request, the lease runs out.
        let _ = at.call(until.saturating_duration_since(Instant::now()), client.leave(request));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::group_record::{RecordTable, RecordsService};
    use crate::pb::records_server::{Records, RecordsServer};
    use crate::{CoordinatorServer, CoordinatorServerConfig};
    use tonic::Request;

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
    fn an_announced_version_saves_a_request() {
        let coordinator = CoordinatorServer::start(CoordinatorServerConfig::default(), Arc::default()).unwrap();
        let address = coordinator.addresses()[0].to_string().parse().unwrap();
        let client = CoordinatorClient::new(&address, "g", &Trust::without_checks()).unwrap();
        let record = client.group_record(RecordName::Rules).unwrap();
        assert!(done(|| record.replace(0, &serde_json::json!({"revision": 1}))));
        let version = done(|| record.read(None)).unwrap().version;
        *client.coordinator.rules.lock() = None;
        let (mut lease, node) = (client.node_lease().unwrap(), Member::from_address("127.0.0.1:1", 1));
        done(|| lease.renew(&node, Instant::now() + ANSWER_TIMEOUT));
        assert!(client.coordinator.has_rules(version));
        drop(coordinator);
        // The coordinator is gone, but no request is needed while its report is recent.
        client.coordinator.note_rules(version);
        assert_eq!(record.read(Some(version)).unwrap(), None);
        // Nor do announcements have the version of another record.
        assert!(client.group_record(RecordName::Stage).unwrap().read(Some(version)).is_err());
        *client.coordinator.rules.lock() = None;
        assert!(record.read(Some(version)).is_err());
    }

    /// The records of a coordinator whose release knows one record of a group.
    struct OldRecords(RecordsService);

    #[tonic::async_trait]
    impl Records for OldRecords {
        async fn read(&self, request: Request<pb::ReadRecordRequest>) -> Result<Response<pb::ReadRecordReply>, Status> {
            let request = pb::ReadRecordRequest { name: String::new(), ..request.into_inner() };
            self.0.read(Request::new(request)).await
        }

        async fn replace(
            &self,
            request: Request<pb::ReplaceRecordRequest>,
        ) -> Result<Response<pb::ReplaceRecordReply>, Status> {
            let request = pb::ReplaceRecordRequest { name: String::new(), ..request.into_inner() };
            self.0.replace(Request::new(request)).await
        }
    }

    #[test]
    fn an_older_coordinator_stores_the_rules_and_no_other_record() {
        let runtime = small_runtime("old-coordinator").unwrap();
        let inside = runtime.enter();
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let address = listener.local_addr().unwrap().to_string().parse().unwrap();
        let listener = tokio::net::TcpListener::from_std(listener).unwrap();
        let incoming = handshake_gate::admit_connections(listener, Trust::without_checks(), Arc::default());
        let table = Arc::new(RecordTable::open(None).unwrap());
        let records = RecordsServer::new(OldRecords(RecordsService(Arc::clone(&table))));
        let server = tonic::transport::Server::builder().add_service(records);
        runtime.spawn(server.serve_with_incoming(incoming));
        drop(inside);
        let client = CoordinatorClient::new(&address, "g", &Trust::without_checks()).unwrap();
        let rules = client.group_record(RecordName::Rules).unwrap();
        let stage = client.group_record(RecordName::Stage).unwrap();
        assert_eq!(done(|| rules.read(None)).unwrap().version, 0);
        for refused in [stage.replace(0, &serde_json::json!(1)).map(drop), stage.read(None).map(drop)] {
            let error = refused.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
            assert!(error.message().contains("the coordinator's release is older"), "{error}");
        }
        assert_eq!(table.record_of("g", RecordName::Rules).version, 0, "the rules were not replaced");
        assert!(rules.replace(0, &serde_json::json!({"revision": 1})).unwrap());
        assert!(stage.replace(table.rules_version("g"), &serde_json::json!(1)).is_err());
        assert_eq!(table.record_of("g", RecordName::Rules).value, serde_json::json!({"revision": 1}));
    }

    mod test_all {
        use super::*;

        #[test]
        fn a_silent_coordinator_gives_no_answer_to_a_ping() {
            let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
            let address = silent.local_addr().unwrap();
            let client =
                CoordinatorClient::new(&address.to_string().parse().unwrap(), "g", &Trust::without_checks()).unwrap();
            let at = &client.coordinator;
            let mut group = GroupClient::new(at.channel.clone());
            let answer = at.call(Duration::from_secs(600), group.watch(pb::WatchRequest::default()));
            let error = answer.map(drop).unwrap_err();
            assert_eq!(error.message(), format!("{address}: no answer to a ping within 5 s"));
        }
    }
}
