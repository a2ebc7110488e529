//! The embedded coordinator: the lease table behind gRPC, and in a small file, so that a restart does not start
//! empty. Knows nothing of the nodes' contents.

use crate::coordinator_client::{HEARTBEAT, member_from_wire, member_to_wire};
use crate::group_record::{RecordTable, RecordsService};
use crate::handshake_gate;
use crate::job_service::{JobHandler, JobHandlerCell};
use crate::local_registry::LocalRegistry;
use crate::pb::group_server::{Group, GroupServer};
use crate::pb::records_server::RecordsServer;
use crate::{LEASE_TIME, LeaseTable, Registry, TableLimits, node_record, pb, runtime_with, state_file};
use parking_lot::Mutex;
use spurline_trust::Trust;
use spurline_types::{Error, ErrorKind, Member, Result, Stats};
use std::collections::BTreeMap;
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use tokio::runtime::Runtime;
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Request, Response, Status};

/// Most nodes in a message to a watcher.
const MAX_NODES_PER_MESSAGE: usize = 1000;
/// Changes within this time are sent together.
const SEND_WINDOW: Duration = Duration::from_millis(100);
/// How often leases are checked and the file is written.
const UPKEEP_INTERVAL: Duration = Duration::from_millis(500);
/// How often the same refusal is logged.
const REPEAT_AFTER: Duration = Duration::from_secs(60);
/// Most watchers at a time: the mounts of a large cluster. Each costs a task and a connection.
const MAX_WATCHERS: usize = 50_000;

/// Configuration of a coordinator.
#[derive(Debug, Clone)]
pub struct CoordinatorServerConfig {
    /// Addresses to listen on; port 0 takes a free port.
    pub listen: Vec<SocketAddr>,
    /// File that keeps the table across restarts; `None` keeps the table in memory only.
    pub file: Option<PathBuf>,
    /// How long a registration lasts.
    pub lease: Duration,
    /// What both sides of a connection have to prove.
    pub trust: Arc<Trust>,
}

impl Default for CoordinatorServerConfig {
    fn default() -> Self {
        CoordinatorServerConfig {
            listen: vec![SocketAddr::from(([127, 0, 0, 1], 0))],
            file: None,
            lease: LEASE_TIME,
            trust: Trust::without_checks(),
        }
    }
}

/// A running coordinator; a drop stops the coordinator.
pub struct CoordinatorServer {
    addresses: Vec<SocketAddr>,
    shared: Arc<CoordinatorShared>,
    runtime: Option<Runtime>,
}

struct CoordinatorShared {
    roll: Arc<Mutex<LeaseTable>>,
    changed: watch::Sender<u64>,
    dirty: AtomicBool,
    file: Option<PathBuf>,
    watchers: AtomicUsize,
    /// The last refusal that was logged, and when.
    refused: Mutex<Option<(String, Instant)>>,
    stats: Arc<Stats>,
    jobs: JobHandlerCell,
    records: Arc<RecordTable>,
    /// Locks the file against other coordinators.
    _lock: Option<std::fs::File>,
}

impl CoordinatorServer {
    /// Reads the file, listens and serves.
    ///
    /// # Errors
    /// When an address can't be used, the file can't be read, or the file's directory can't be written to.
    pub fn start(config: CoordinatorServerConfig, stats: Arc<Stats>) -> Result<Self> {
        let mut roll = LeaseTable::new(config.lease, TableLimits::default());
        let lock = config.file.as_deref().map(lock_file).transpose()?;
        if let Some(file) = &config.file {
            for (group, members) in state_file::read_file(file, node_record::parse_groups)?.unwrap_or_default() {
                for member in members {
                    // Twice the lease: the node needs time to notice that the coordinator is back.
                    let from = Instant::now() + config.lease;
                    if let Err(error) = roll.enter_node(from, &group, &member) {
                        tracing::warn!("{}: {error}; left out", file.display());
                    }
                }
            }
            write_groups(file, &roll.all_groups())?;
            tracing::info!("{}: {} nodes read", file.display(), roll.len());
        }
        let records = RecordTable::open(config.file.as_ref().map(|file| file.with_extension("rules")))?;
        let shared = Arc::new(CoordinatorShared {
            roll: Arc::new(Mutex::new(roll)),
            changed: watch::Sender::new(0),
            dirty: AtomicBool::new(false),
            records: Arc::new(records),
            file: config.file,
            watchers: AtomicUsize::new(0),
            refused: Mutex::new(None),
            stats,
            jobs: JobHandlerCell::default(),
            _lock: lock,
        });
        // Thousands of watchers that connect at once each get the whole list.
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let runtime = runtime_with("coordinator", threads)?;
        let mut addresses = Vec::new();
        for at in &config.listen {
            let io = |e: std::io::Error| listen_error(*at, &e);
            let listener = TcpListener::bind(at).map_err(io)?;
            listener.set_nonblocking(true).map_err(io)?;
            addresses.push(listener.local_addr().map_err(io)?);
            let inside = runtime.enter();
            let listener = tokio::net::TcpListener::from_std(listener).map_err(io)?;
            let incoming =
                handshake_gate::admit_connections(listener, Arc::clone(&config.trust), Arc::clone(&shared.stats));
            drop(inside);
            let service = GroupServer::new(GroupService(Arc::clone(&shared)));
            let jobs = crate::job_service::JobsService(Arc::clone(&shared.jobs)).into_server();
            let records = RecordsServer::new(RecordsService(Arc::clone(&shared.records)));
            runtime.spawn(async move {
                let server = tonic::transport::Server::builder()
                    .http2_keepalive_interval(Some(HEARTBEAT))
                    .http2_keepalive_timeout(Some(2 * HEARTBEAT))
                    .add_service(service)
                    .add_service(jobs)
                    .add_service(records);
                if let Err(error) = server.serve_with_incoming(incoming).await {
                    tracing::error!("the coordinator's server ended: {error}");
                }
            });
        }
        runtime.spawn(run_upkeep(Arc::clone(&shared)));
        Ok(CoordinatorServer { addresses, shared, runtime: Some(runtime) })
    }

    /// Sets the job handler; only the first call has an effect.
    pub fn set_job_handler(&self, jobs: Arc<dyn JobHandler>) {
        // Already set: keep the first.
        let _ = self.shared.jobs.set(jobs);
    }

    /// Addresses in use.
    pub fn addresses(&self) -> &[SocketAddr] {
        &self.addresses
    }

    /// The table of a group as a registry for this process, without a proof.
    pub fn local_registry(&self, group: &str) -> Arc<dyn Registry> {
        let describe =
            format!("coordinator://{}", self.addresses.first().map_or_else(String::new, ToString::to_string));
        Arc::new(LocalRegistry::new(describe, group, Arc::clone(&self.shared.roll)))
    }

    /// The nodes of every group.
    pub fn list_groups(&self) -> BTreeMap<String, Vec<Member>> {
        self.shared.roll.lock().all_groups()
    }
}

impl Drop for CoordinatorServer {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
        self.shared.save_file();
    }
}

impl CoordinatorShared {
    fn notify_change(&self) {
        self.dirty.store(true, Ordering::Release);
        self.stats.group.changes.add(1);
        self.changed.send_modify(|count| *count += 1);
    }

    /// Logs a refusal; the same refusal again only after a while, because refused clients retry.
    fn log_refusal(&self, text: &str) {
        let mut last = self.refused.lock();
        if last.as_ref().is_none_or(|(said, when)| said != text || when.elapsed() > REPEAT_AFTER) {
            tracing::warn!("{text}");
            *last = Some((text.to_owned(), Instant::now()));
        }
    }

    fn save_file(&self) {
        let Some(file) = &self.file else { return };
        if self.dirty.swap(false, Ordering::AcqRel) {
            let all = self.roll.lock().all_groups();
            if let Err(error) = write_groups(file, &all) {
                self.dirty.store(true, Ordering::Release);
                tracing::warn!("{error}; after a restart the list of nodes would be older");
            }
        }
    }
}

/// Removes expired nodes, and writes the file.
async fn run_upkeep(shared: Arc<CoordinatorShared>) {
    loop {
        tokio::time::sleep(UPKEEP_INTERVAL).await;
        let (gone, left) = {
            let mut roll = shared.roll.lock();
            (roll.remove_expired(Instant::now()), roll.len())
        };
        for (group, member) in &gone {
            tracing::warn!(
                "group {group}: node {} at {} did not renew its lease and is removed",
                member.name,
                member.addresses.join(",")
            );
        }
        if !gone.is_empty() {
            shared.notify_change();
        }
        shared.stats.group.members.set(left as u64);
        shared.stats.group.watchers.set(shared.watchers.load(Ordering::Relaxed) as u64);
        let saver = Arc::clone(&shared);
        let _ = tokio::task::spawn_blocking(move || saver.save_file()).await;
    }
}

/// Locks the file for this process; a drop of the result unlocks the file.
fn lock_file(file: &Path) -> Result<std::fs::File> {
    let remedy = "name another by --state-file, or keep the list in memory only by --state-file none";
    let cant = |e: std::io::Error| {
        let what = format!("the list of nodes can't be kept in {}: {e}; {remedy}", file.display());
        Error::new(Error::io("", &e).kind(), what)
    };
    if let Some(dir) = file.parent() {
        std::fs::create_dir_all(dir).map_err(cant)?;
    }
    let lock = std::fs::File::create(file.with_extension("lock")).map_err(cant)?;
    match lock.try_lock() {
        Ok(()) => Ok(lock),
        Err(std::fs::TryLockError::Error(e)) => Err(cant(e)),
        Err(std::fs::TryLockError::WouldBlock) => {
            let what = format!("another coordinator keeps its list of nodes in {}; {remedy}", file.display());
            Err(Error::new(ErrorKind::Unavailable, what))
        }
    }
}

fn listen_error(at: SocketAddr, e: &std::io::Error) -> Error {
    let remedy = match e.kind() {
        std::io::ErrorKind::AddrInUse => format!(
            "another process listens there ('ss -ltnp sport = :{}' shows it); choose another --group-port or stop it",
            at.port()
        ),
        std::io::ErrorKind::AddrNotAvailable => "it is no address of this host; see --group-network".to_owned(),
        std::io::ErrorKind::PermissionDenied => "ports below 1024 need root; choose another --group-port".to_owned(),
        _ => return Error::io(format_args!("the coordinator can't listen at {at}"), e),
    };
    Error::new(ErrorKind::Unavailable, format!("the coordinator can't listen at {at}: {e}: {remedy}"))
}

fn write_groups(file: &Path, groups: &BTreeMap<String, Vec<Member>>) -> Result<()> {
    spurline_sys::replace_file(file, node_record::format_groups(groups).as_bytes(), 0o600)
        .map_err(|e| Error::io(file.display(), &e))
}

struct GroupService(Arc<CoordinatorShared>);

/// Counts a watcher until the drop.
struct WatcherCount(Arc<CoordinatorShared>);

impl Drop for WatcherCount {
    fn drop(&mut self) {
        self.0.watchers.fetch_sub(1, Ordering::Relaxed);
    }
}

#[tonic::async_trait]
impl Group for GroupService {
    async fn announce(&self, request: Request<pb::AnnounceRequest>) -> Result<Response<pb::AnnounceReply>, Status> {
        let pb::AnnounceRequest { group, node } = request.into_inner();
        let member = member_from_wire(node.ok_or_else(|| Status::invalid_argument("no node is named"))?);
        let (lease, done) = {
            let mut roll = self.0.roll.lock();
            (roll.lease(), roll.enter_node(Instant::now(), &group, &member))
        };
        match done {
            Ok(changed) => {
                if changed {
                    tracing::info!(
                        "group {group}: node {} at {}, weight {}, zone '{}'",
                        member.name,
                        member.addresses.join(","),
                        member.weight,
                        member.zone
                    );
                    self.0.notify_change();
                }
                let record_version = self.0.records.rules_version(&group);
                Ok(Response::new(pb::AnnounceReply { lease_ms: lease.as_millis() as u64, record_version }))
            }
            Err(error) => {
                self.0.stats.group.refused.add(1);
                let code = match error.kind() {
                    ErrorKind::Invalid => Code::AlreadyExists,
                    _ => Code::InvalidArgument,
                };
                self.0.log_refusal(error.message());
                Err(Status::new(code, error.message()))
            }
        }
    }

    async fn leave(&self, request: Request<pb::LeaveRequest>) -> Result<Response<pb::LeaveReply>, Status> {
        let pb::LeaveRequest { group, name, instance } = request.into_inner();
        let left = self.0.roll.lock().remove_own(&group, &name, instance);
        if left {
            tracing::info!("group {group}: node {name} has left");
            self.0.notify_change();
        }
        Ok(Response::new(pb::LeaveReply {}))
    }

    type WatchStream = ReceiverStream<Result<pb::Change, Status>>;

    async fn watch(&self, request: Request<pb::WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        if self.0.watchers.fetch_add(1, Ordering::Relaxed) >= MAX_WATCHERS {
            self.0.watchers.fetch_sub(1, Ordering::Relaxed);
            return Err(Status::unavailable(format!("the coordinator has {MAX_WATCHERS} watchers, the most possible")));
        }
        let watching = WatcherCount(Arc::clone(&self.0));
        let (out, stream) = mpsc::channel(2);
        tokio::spawn(feed_watcher(watching, request.into_inner().group, out));
        Ok(Response::new(ReceiverStream::new(stream)))
    }
}

/// Sends changes to a watcher until the end of the connection.
async fn feed_watcher(watching: WatcherCount, group: String, out: mpsc::Sender<Result<pb::Change, Status>>) {
    let shared = &watching.0;
    let mut changed = shared.changed.subscribe();
    let mut since = 0;
    let mut first = true;
    let mut told = tokio::time::Instant::now();
    loop {
        changed.borrow_and_update();
        let changes = shared.roll.lock().changes_since(&group, since);
        // An unknown group is reported as empty once.
        let again = changes.reset && since > 0;
        since = changes.revision;
        if first || again || !changes.put.is_empty() || !changes.gone.is_empty() || told.elapsed() >= HEARTBEAT {
            for part in split_changes(changes) {
                if out.send(Ok(part)).await.is_err() {
                    return;
                }
            }
            told = tokio::time::Instant::now();
            first = false;
        }
        tokio::select! {
            // Notice a closed watcher at once, not at the next change.
            () = out.closed() => return,
            another = changed.changed() => match another {
                Ok(()) => tokio::time::sleep(SEND_WINDOW).await,
                Err(_) => return,
            },
            () = tokio::time::sleep_until(told + HEARTBEAT) => {}
        }
    }
}

/// Divides changes into messages; without changes, a single empty message.
fn split_changes(changes: crate::lease_table::MemberChanges) -> Vec<pb::Change> {
    let mut parts: Vec<pb::Change> = changes
        .put
        .chunks(MAX_NODES_PER_MESSAGE)
        .map(|put| pb::Change { put: put.iter().map(member_to_wire).collect(), more: true, ..pb::Change::default() })
        .collect();
    if parts.is_empty() {
        parts.push(pb::Change::default());
    }
    parts[0].reset = changes.reset;
    if let Some(last) = parts.last_mut() {
        last.gone = changes.gone;
        last.more = false;
    }
    parts
}
