//! The coordinator: the list of nodes behind gRPC, and on a small file, so that a restart does not come up empty.
//! It knows nothing of what nodes hold.

use crate::book::{self, Books, Merge};
use crate::coordinator::{SIGN, from_wire, to_wire};
use crate::door;
use crate::jobs::{Jobs, Worker};
use crate::local::Local;
use crate::pb::group_server::{Group, GroupServer};
use crate::pb::rules_server::RulesServer;
use crate::{LEASE, Limits, Registry, Roll, kept, pb, record, runtime_of};
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

/// Nodes in one message to a watcher.
const PART: usize = 1000;
/// Changes within this time are told together.
const GATHER: Duration = Duration::from_millis(100);
/// How often leases are looked at and the file is written.
const ROUND: Duration = Duration::from_millis(500);
/// How often one refusal is logged.
const REPEAT: Duration = Duration::from_secs(60);
/// Watchers at one time: the mounts of a large cluster; each costs a task and a connection.
const MAX_WATCHERS: usize = 50_000;

/// What a coordinator is told.
#[derive(Debug, Clone)]
pub struct CoordinatorConfig {
    /// Where to listen; port 0 takes a free one.
    pub listen: Vec<SocketAddr>,
    /// Where the list is kept over a restart; `None` keeps it in memory only.
    pub file: Option<PathBuf>,
    /// How long a registration lasts.
    pub lease: Duration,
    /// What everybody who connects has to show, and is shown.
    pub trust: Arc<Trust>,
    /// What comes of two texts that a group is to go by.
    pub merge: Merge,
}

impl Default for CoordinatorConfig {
    fn default() -> Self {
        CoordinatorConfig {
            listen: vec![SocketAddr::from(([127, 0, 0, 1], 0))],
            file: None,
            lease: LEASE,
            trust: Trust::anyone(),
            merge: book::later,
        }
    }
}

/// A running coordinator; dropping it ends it.
pub struct Coordinator {
    addresses: Vec<SocketAddr>,
    shared: Arc<Shared>,
    runtime: Option<Runtime>,
}

struct Shared {
    roll: Arc<Mutex<Roll>>,
    changed: watch::Sender<u64>,
    dirty: AtomicBool,
    file: Option<PathBuf>,
    watchers: AtomicUsize,
    /// The last refusal that was logged, and when.
    refused: Mutex<Option<(String, Instant)>>,
    stats: Arc<Stats>,
    jobs: Worker,
    books: Arc<Books>,
    /// Keeps other coordinators off the file.
    _lock: Option<std::fs::File>,
}

impl Coordinator {
    /// Reads the file, listens and serves.
    ///
    /// # Errors
    /// When an address can't be had, a file of before can't be read, or its directory can't be written to.
    pub fn start(config: CoordinatorConfig, stats: Arc<Stats>) -> Result<Self> {
        let mut roll = Roll::new(config.lease, Limits::default());
        let lock = config.file.as_deref().map(own).transpose()?;
        if let Some(file) = &config.file {
            for (group, members) in kept::read(file, record::groups_of)?.unwrap_or_default() {
                for member in members {
                    // Twice the lease: its node has time to notice that this process is there again.
                    let from = Instant::now() + config.lease;
                    if let Err(error) = roll.announce(from, &group, &member) {
                        tracing::warn!("{}: {error}; left out", file.display());
                    }
                }
            }
            write(file, &roll.all())?;
            tracing::info!("{}: {} nodes known from before", file.display(), roll.len());
        }
        let books = Books::open(config.file.as_ref().map(|file| file.with_extension("rules")), config.merge)?;
        let shared = Arc::new(Shared {
            roll: Arc::new(Mutex::new(roll)),
            changed: watch::Sender::new(0),
            dirty: AtomicBool::new(false),
            books: Arc::new(books),
            file: config.file,
            watchers: AtomicUsize::new(0),
            refused: Mutex::new(None),
            stats,
            jobs: Worker::default(),
            _lock: lock,
        });
        // Thousands of watchers that come at once are each told of all nodes.
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let runtime = runtime_of("coordinator", threads)?;
        let mut addresses = Vec::new();
        for at in &config.listen {
            let io = |e: std::io::Error| cant_listen(*at, &e);
            let listener = TcpListener::bind(at).map_err(io)?;
            listener.set_nonblocking(true).map_err(io)?;
            addresses.push(listener.local_addr().map_err(io)?);
            let inside = runtime.enter();
            let listener = tokio::net::TcpListener::from_std(listener).map_err(io)?;
            let incoming = door::admit(listener, Arc::clone(&config.trust), Arc::clone(&shared.stats));
            drop(inside);
            let service = GroupServer::new(Service(Arc::clone(&shared)));
            let jobs = crate::jobs::Service(Arc::clone(&shared.jobs)).server();
            let rules = RulesServer::new(book::Service(Arc::clone(&shared.books)));
            runtime.spawn(async move {
                let server = tonic::transport::Server::builder()
                    .http2_keepalive_interval(Some(SIGN))
                    .http2_keepalive_timeout(Some(2 * SIGN))
                    .add_service(service)
                    .add_service(jobs)
                    .add_service(rules);
                if let Err(error) = server.serve_with_incoming(incoming).await {
                    tracing::error!("the coordinator's server ended: {error}");
                }
            });
        }
        runtime.spawn(keep(Arc::clone(&shared)));
        Ok(Coordinator { addresses, shared, runtime: Some(runtime) })
    }

    /// From now on `jobs` does the jobs it is asked for; said once.
    pub fn employ(&self, jobs: Arc<dyn Jobs>) {
        // A second time nothing happens.
        let _ = self.shared.jobs.set(jobs);
    }

    /// Where it listens.
    pub fn addresses(&self) -> &[SocketAddr] {
        &self.addresses
    }

    /// Its own list of one group as a registry for this very process, which has nothing to prove to itself.
    pub fn registry(&self, group: &str) -> Arc<dyn Registry> {
        let describe =
            format!("coordinator://{}", self.addresses.first().map_or_else(String::new, ToString::to_string));
        Arc::new(Local::new(describe, group, Arc::clone(&self.shared.roll)))
    }

    /// The nodes of every group.
    pub fn groups(&self) -> BTreeMap<String, Vec<Member>> {
        self.shared.roll.lock().all()
    }
}

impl Drop for Coordinator {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
        self.shared.save();
    }
}

impl Shared {
    fn change(&self) {
        self.dirty.store(true, Ordering::Release);
        self.stats.group.changes.add(1);
        self.changed.send_modify(|count| *count += 1);
    }

    /// Logs a refusal; the same again only after a while, as whoever is refused tries again.
    fn say_refused(&self, text: &str) {
        let mut last = self.refused.lock();
        if last.as_ref().is_none_or(|(said, when)| said != text || when.elapsed() > REPEAT) {
            tracing::warn!("{text}");
            *last = Some((text.to_owned(), Instant::now()));
        }
    }

    fn save(&self) {
        let Some(file) = &self.file else { return };
        if self.dirty.swap(false, Ordering::AcqRel) {
            let all = self.roll.lock().all();
            if let Err(error) = write(file, &all) {
                self.dirty.store(true, Ordering::Release);
                tracing::warn!("{error}; a restart now would begin with an older list");
            }
        }
    }
}

/// Takes off who is silent, and writes the file.
async fn keep(shared: Arc<Shared>) {
    loop {
        tokio::time::sleep(ROUND).await;
        let (gone, left) = {
            let mut roll = shared.roll.lock();
            (roll.sweep(Instant::now()), roll.len())
        };
        for (group, member) in &gone {
            tracing::warn!(
                "group {group}: node {} at {} said nothing for a whole lease and is taken off",
                member.name,
                member.addresses.join(",")
            );
        }
        if !gone.is_empty() {
            shared.change();
        }
        shared.stats.group.members.set(left as u64);
        shared.stats.group.watchers.set(shared.watchers.load(Ordering::Relaxed) as u64);
        let saver = Arc::clone(&shared);
        let _ = tokio::task::spawn_blocking(move || saver.save()).await;
    }
}

/// Makes the file this process's own; what is given back keeps it so.
fn own(file: &Path) -> Result<std::fs::File> {
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

fn cant_listen(at: SocketAddr, e: &std::io::Error) -> Error {
    let remedy = match e.kind() {
        std::io::ErrorKind::AddrInUse => format!(
            "another process does ('ss -ltnp sport = :{}' says which); choose another --group-port or stop it",
            at.port()
        ),
        std::io::ErrorKind::AddrNotAvailable => "it is no address of this host; see --group-network".to_owned(),
        std::io::ErrorKind::PermissionDenied => "ports below 1024 need root; choose another --group-port".to_owned(),
        _ => return Error::io(format_args!("the coordinator can't listen at {at}"), e),
    };
    Error::new(ErrorKind::Unavailable, format!("the coordinator can't listen at {at}: {e}: {remedy}"))
}

fn write(file: &Path, groups: &BTreeMap<String, Vec<Member>>) -> Result<()> {
    kept::write(file, "next", record::of_groups(groups).as_bytes()).map_err(|e| Error::io(file.display(), &e))
}

struct Service(Arc<Shared>);

/// Counts a watcher as long as it is kept.
struct Watching(Arc<Shared>);

impl Drop for Watching {
    fn drop(&mut self) {
        self.0.watchers.fetch_sub(1, Ordering::Relaxed);
    }
}

#[tonic::async_trait]
impl Group for Service {
    async fn announce(&self, request: Request<pb::AnnounceRequest>) -> Result<Response<pb::AnnounceReply>, Status> {
        let pb::AnnounceRequest { group, node } = request.into_inner();
        let member = from_wire(node.ok_or_else(|| Status::invalid_argument("no node is named"))?);
        let (lease, done) = {
            let mut roll = self.0.roll.lock();
            (roll.lease(), roll.announce(Instant::now(), &group, &member))
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
                    self.0.change();
                }
                let rules = self.0.books.digest(&group);
                Ok(Response::new(pb::AnnounceReply { lease_ms: lease.as_millis() as u64, rules }))
            }
            Err(error) => {
                self.0.stats.group.refused.add(1);
                let code = match error.kind() {
                    ErrorKind::Invalid => Code::AlreadyExists,
                    _ => Code::InvalidArgument,
                };
                self.0.say_refused(error.message());
                Err(Status::new(code, error.message()))
            }
        }
    }

    async fn leave(&self, request: Request<pb::LeaveRequest>) -> Result<Response<pb::LeaveReply>, Status> {
        let pb::LeaveRequest { group, name, instance } = request.into_inner();
        let left = self.0.roll.lock().leave(&group, &name, instance);
        if left {
            tracing::info!("group {group}: node {name} has left");
            self.0.change();
        }
        Ok(Response::new(pb::LeaveReply {}))
    }

    type WatchStream = ReceiverStream<Result<pb::Change, Status>>;

    async fn watch(&self, request: Request<pb::WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        if self.0.watchers.fetch_add(1, Ordering::Relaxed) >= MAX_WATCHERS {
            self.0.watchers.fetch_sub(1, Ordering::Relaxed);
            return Err(Status::unavailable(format!("{MAX_WATCHERS} watchers are enough for one coordinator")));
        }
        let watching = Watching(Arc::clone(&self.0));
        let (out, stream) = mpsc::channel(2);
        tokio::spawn(feed(watching, request.into_inner().group, out));
        Ok(Response::new(ReceiverStream::new(stream)))
    }
}

/// Tells one watcher what changes, until it is gone.
async fn feed(watching: Watching, group: String, out: mpsc::Sender<Result<pb::Change, Status>>) {
    let shared = &watching.0;
    let mut changed = shared.changed.subscribe();
    let (mut since, mut first) = (0, true);
    let mut told = tokio::time::Instant::now();
    loop {
        changed.borrow_and_update();
        let changes = shared.roll.lock().changes(&group, since);
        // A group that is not there yet is told of as empty once.
        let again = changes.reset && since > 0;
        since = changes.revision;
        if first || again || !changes.put.is_empty() || !changes.gone.is_empty() || told.elapsed() >= SIGN {
            for part in parts(changes) {
                if out.send(Ok(part)).await.is_err() {
                    return;
                }
            }
            told = tokio::time::Instant::now();
            first = false;
        }
        tokio::select! {
            // A watcher that is gone is let go of at once, not at the next change.
            () = out.closed() => return,
            another = changed.changed() => match another {
                Ok(()) => tokio::time::sleep(GATHER).await,
                Err(_) => return,
            },
            () = tokio::time::sleep_until(told + SIGN) => {}
        }
    }
}

/// Cuts changes into messages; without any, one that says nothing.
fn parts(changes: crate::roll::Changes) -> Vec<pb::Change> {
    let mut parts: Vec<pb::Change> = changes
        .put
        .chunks(PART)
        .map(|put| pb::Change { put: put.iter().map(to_wire).collect(), more: true, ..pb::Change::default() })
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
