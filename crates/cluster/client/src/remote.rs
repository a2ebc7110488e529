//! The volume of a mount that reads from a cache group: every name and byte comes from a node. Its only memory holds
//! blocks fetched ahead of their readers.

use crate::hedge::{HedgeThread, HedgedReads};
use crate::hot_spread::HotSpread;
use crate::members::{GroupMembers, MembersSnapshot};
use crate::path_monitor::PathMonitor;
use crate::peer::{RequestPatience, call_ranked};
use crate::pipeline::{PIECE_FROM, PipelinedReads};
use crate::placement::{CopyCounts, ReaderLocation, WantedBlock};
use crate::read_plan::{CallPlan, HolderOrder};
use crate::writes::{GroupPathLocks, GroupWrites};
use spurline_exec::PriorityWorkers;
use spurline_mem::{BufferPool, MemTier};
use spurline_proto::{CapacityAnswer, NodeRequest};
use spurline_transport::CallError;
use spurline_types::errno::EIO;
use spurline_types::{
    BlockId, Error, ErrorKind, ListPage, Member, ObjectAttr, ObjectHeaders, ObjectId, ObjectRef, Result, Stats,
};
use spurline_volume::info::{BlockRun, FileInfo};
use spurline_volume::kept_client::KeptClient;
use spurline_volume::{ReadData, Volume, VolumeSpace};
use std::cell::RefCell;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Maximum nodes that are connected to again for a status.
const RETRIED: usize = 16;
/// Maximum nodes tried to find one that is reachable.
const TRIED: usize = 8;
/// Timeout of one node's info request, half of the total.
const INFO: Duration = Duration::from_secs(4);
/// Parallel info requests.
const INFO_AT_ONCE: usize = 64;

thread_local! {
    /// Answer bodies and peer rankings, reused between requests.
    pub(crate) static SCRATCH: RefCell<(Vec<u8>, Vec<u32>)> = const { RefCell::new((Vec::new(), Vec::new())) };
}

/// Behaviour of a [`GroupVolume`].
#[derive(Debug, Clone)]
pub struct GroupVolumeConfig {
    /// Request timeouts.
    pub patience: RequestPatience,
    /// Blocks fetched ahead in parallel.
    pub fetchers: usize,
    /// Maximum age of metadata that a node answers from its cache.
    pub metadata_age: Duration,
    /// Number of holders for each file.
    pub copies: CopyCounts,
    /// Location of this reader.
    pub standpoint: ReaderLocation,
    /// A node with outstanding requests and no heartbeat for this long is abandoned if there are others.
    pub silence: Duration,
    /// Minimum time before a read counts as late; zero disables second requests.
    pub hedge_after: Duration,
}

/// A cache group as a volume.
pub struct GroupVolume {
    client: Arc<GroupClient>,
    workers: PriorityWorkers,
    _monitor: PathMonitor,
    _hedger: Option<HedgeThread>,
}

pub(crate) struct GroupClient {
    source: String,
    pub(crate) block_size: u64,
    pub(crate) members: Arc<GroupMembers>,
    pub(crate) tier: Arc<MemTier>,
    pub(crate) config: GroupVolumeConfig,
    pub(crate) stats: Arc<Stats>,
    /// Bytes of buffers being filled ahead.
    ahead_bytes: AtomicU64,
    /// Whether there may be paths beside TCP, over which large reads are split.
    pub(crate) rails: bool,
    pub(crate) ahead: Arc<PipelinedReads>,
    pub(crate) hedge: HedgedReads,
    pub(crate) spread: HotSpread,
}

impl GroupVolume {
    /// Connects to the nodes of `members` until one answers, and takes the block size from it. `make_tier` creates the
    /// read-ahead memory for that size.
    ///
    /// # Errors
    /// The answers of the nodes, or why none answered.
    pub fn connect(
        source: &str,
        members: Arc<GroupMembers>,
        config: GroupVolumeConfig,
        stats: Arc<Stats>,
        make_tier: impl FnOnce(u64) -> Result<Arc<MemTier>>,
    ) -> Result<Arc<GroupVolume>> {
        let mut block_size = 0;
        let everyone = |view: &MembersSnapshot, _, ranked: &mut Vec<u32>| {
            ranked.clear();
            ranked.extend(0..view.members().len() as u32);
        };
        let retries = &stats.remotecache.retries;
        let plan = CallPlan::without_payload(config.patience);
        call_ranked(&members, &plan, everyone, &mut Vec::new(), retries, |_, lease, deadline| {
            block_size = lease.welcome().block_size;
            lease.call(&NodeRequest::Ping, &mut Vec::new(), &mut [], &mut |_| {}, deadline).map(drop)
        })?;
        if !(4096..=64 << 20).contains(&block_size) {
            return Err(Error::new(
                ErrorKind::Protocol,
                format!("the node reports a block size of {block_size} bytes; valid are 4 KiB to 64 MiB"),
            ));
        }
        let tier = make_tier(block_size)?;
        // As many as blocks fetched into memory at once; the other half of the channels serves waiting readers.
        let ahead = PipelinedReads::new(config.fetchers);
        let sweeper = Arc::clone(&ahead);
        std::thread::Builder::new()
            .name("pipelined-reads".into())
            .spawn(move || sweeper.sweep_stale())
            .map_err(|e| Error::io("can't start a thread", &e))?;
        let monitor = PathMonitor::start(&members)?;
        monitor.watch_nodes(config.silence, &stats);
        let hedge = HedgedReads::new(config.hedge_after);
        let fetchers = config.fetchers;
        let inner = Arc::new(GroupClient {
            source: source.to_owned(),
            block_size,
            rails: members.has_rail_factory(),
            members,
            tier,
            config,
            stats,
            ahead_bytes: AtomicU64::new(0),
            ahead,
            hedge,
            spread: HotSpread::new(),
        });
        let hedger = HedgeThread::start(&inner)?;
        Ok(Arc::new(GroupVolume {
            _monitor: monitor,
            _hedger: hedger,
            workers: PriorityWorkers::new("fetch", fetchers),
            client: inner,
        }))
    }

    /// Opens the writable side, as a session of its own. With `squash`, all changes are made as this user and group. Written
    /// bytes take up to `memory` bytes of the pool until they are durable.
    ///
    /// # Errors
    /// `ReadOnly` when the nodes take no changes; the node's error.
    pub fn open_writes(&self, squash: Option<(u32, u32)>, memory: u64) -> Result<Arc<GroupWrites>> {
        GroupWrites::connect(Arc::clone(&self.client), squash, memory, None)
    }

    /// As [`GroupVolume::open_writes`], in the session of `kept`, which outlives this process.
    pub fn open_kept_writes(
        &self,
        squash: Option<(u32, u32)>,
        memory: u64,
        kept: Arc<dyn KeptClient>,
    ) -> Result<Arc<GroupWrites>> {
        GroupWrites::connect(Arc::clone(&self.client), squash, memory, Some(kept))
    }

    /// Opens the locks of a bucket's paths, for a mount that writes the objects itself; in the session of `kept`, if that outlives this
    /// process.
    ///
    /// # Errors
    /// When a thread can't be started.
    pub fn open_path_locks(&self, kept: Option<Arc<dyn KeptClient>>) -> Result<Arc<GroupPathLocks>> {
        GroupPathLocks::connect(Arc::clone(&self.client), kept)
    }

    /// Replaces the list of the group's nodes; see [`GroupMembers::set_members`].
    pub fn set_members(&self, members: &[Arc<Member>]) {
        self.client.members.set_members(members);
    }

    pub(crate) fn inner(&self) -> &GroupClient {
        &self.client
    }

    pub(crate) fn shared_client(&self) -> &Arc<GroupClient> {
        &self.client
    }

    /// Whether a node of the group is reachable. If none is known to be up, some are tried until `deadline`, since an
    /// idle mount makes no other attempt.
    ///
    /// # Errors
    /// Why the last node tried is not reachable.
    pub fn check_reachable(&self, deadline: Instant) -> Result<()> {
        let view = self.client.members.snapshot();
        if view.existing_peers().any(|peer| peer.is_up()) {
            return Ok(());
        }
        let mut why = Error::new(ErrorKind::Unavailable, "the group has no nodes");
        let all = 0..view.members().len() as u32;
        let (made, rest): (Vec<u32>, Vec<u32>) = all.partition(|index| view.existing_peer(*index).is_some());
        for index in made.into_iter().chain(rest).take(TRIED) {
            let peer = view.peer(index);
            match peer.tcp_pool().checkout(deadline) {
                Ok(_) => return Ok(()),
                Err(error) => why = error.context(peer.name()),
            }
            if Instant::now() >= deadline {
                break;
            }
        }
        Err(why.context("no node of the group can be reached"))
    }

    /// Connects to the nodes that were down at the last attempt and that are due for another, until `deadline`: an idle mount makes
    /// no attempt, and would report a node as down that is up again.
    pub fn retry_down_nodes(&self, deadline: Instant) {
        let view = self.client.members.snapshot();
        let down: Vec<_> = view.existing_peers().filter(|peer| peer.is_down()).take(RETRIED).collect();
        std::thread::scope(|scope| {
            for peer in down {
                // Without a thread, the state stays that of the last attempt.
                let _ = std::thread::Builder::new()
                    .name("retry-node".into())
                    .spawn_scoped(scope, move || drop(peer.tcp_pool().checkout(deadline)));
            }
        });
    }

    /// The nodes.
    pub fn members(&self) -> &Arc<GroupMembers> {
        &self.client.members
    }
}

impl GroupClient {
    pub(crate) fn members(&self) -> &GroupMembers {
        &self.members
    }

    /// Number of holders for the object at `path`.
    pub(crate) fn copies_of(&self, path: &[u8]) -> u32 {
        self.config.copies.copies_of(path)
    }

    pub(crate) fn source(&self) -> &str {
        &self.source
    }

    pub(crate) fn block_size(&self) -> u64 {
        self.block_size
    }

    pub(crate) fn patience(&self) -> RequestPatience {
        self.config.patience
    }

    pub(crate) fn retries(&self) -> &spurline_types::stats::Metric {
        &self.stats.remotecache.retries
    }

    fn max_age_ms(&self, max_age: Duration) -> u32 {
        u32::try_from(max_age.min(self.config.metadata_age).as_millis()).unwrap_or(u32::MAX)
    }

    fn call_for_path<T>(
        &self,
        path: &[u8],
        mut call: impl FnMut(
            &mut spurline_transport::ChannelLease<'_>,
            &mut Vec<u8>,
            Instant,
        ) -> Result<T, spurline_transport::CallError>,
    ) -> Result<T> {
        let started = Instant::now();
        let place = ObjectId::from_text(&self.source, path, "");
        let wanted = WantedBlock::of_block(place, 0, self.config.copies.copies_of(path));
        let plan = CallPlan::without_payload(self.config.patience);
        let result = self.call_holders(wanted, HolderOrder::NearFirst, &plan, |_, lease, body, deadline| {
            call(lease, body, deadline)
        });
        let counted = &self.stats.metadata;
        counted.ops.add(1);
        counted.lat_us.add_us(started.elapsed());
        if result.as_ref().is_err_and(|error| error.kind() != ErrorKind::NotFound) {
            counted.errors.add(1);
        }
        result
    }

    /// One node's cache information for a file, and the node's name. Does not wait for a node that is away.
    fn node_info(&self, name: &str, path: &[u8], until: Instant) -> Result<(String, FileInfo)> {
        let answer = until.saturating_duration_since(Instant::now()).min(self.config.patience.answer).min(INFO);
        self.call_named(name, RequestPatience { answer, absence: Duration::ZERO }, |lease, body, deadline| {
            let volume = lease.welcome().volume;
            let node = lease.welcome().node.clone();
            lease.call(&NodeRequest::Info { volume, path }, body, &mut [], &mut |_| {}, deadline)?;
            let info = serde_json::from_slice(body).map_err(|error| {
                CallError::Answered(Error::new(
                    ErrorKind::Protocol,
                    format!("the info of {node} about a file is not valid JSON: {error}"),
                ))
            })?;
            Ok((node, info))
        })
    }
}

impl Drop for GroupVolume {
    fn drop(&mut self) {
        self.client.ahead.close();
    }
}

/// Subtracts its bytes when the job that carries it ends or is dropped.
struct FillAheadBytes {
    inner: Arc<GroupClient>,
    bytes: u64,
}

impl Drop for FillAheadBytes {
    fn drop(&mut self) {
        self.inner.ahead_bytes.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

impl Volume for GroupVolume {
    fn source(&self) -> &str {
        &self.client.source
    }

    fn block_size(&self) -> u64 {
        self.client.block_size
    }

    fn lookup(&self, path: &[u8]) -> Result<ObjectAttr> {
        self.lookup_within(path, Duration::MAX)
    }

    fn list(&self, path: &[u8], cursor: Option<&[u8]>, max: usize) -> Result<ListPage> {
        self.list_within(path, cursor, max, Duration::MAX)
    }

    fn lookup_within(&self, path: &[u8], max_age: Duration) -> Result<ObjectAttr> {
        let max_age_ms = self.client.max_age_ms(max_age);
        // By the folder's path, so that the node answers that has listed the folder.
        let folder = path.strip_suffix(b"/");
        self.client.call_for_path(folder.unwrap_or(path), |lease, body, deadline| {
            let volume = lease.welcome().volume;
            let request = match folder {
                Some(path) => NodeRequest::FolderMarker { volume, path, max_age_ms },
                None => NodeRequest::Lookup { volume, path, max_age_ms },
            };
            lease.call_for(&request, body, deadline)
        })
    }

    fn list_within(&self, path: &[u8], cursor: Option<&[u8]>, max: usize, max_age: Duration) -> Result<ListPage> {
        let max_age_ms = self.client.max_age_ms(max_age);
        self.client.call_for_path(path, |lease, body, deadline| {
            let volume = lease.welcome().volume;
            lease.call_for(&NodeRequest::List { volume, path, cursor, max: max as u32, max_age_ms }, body, deadline)
        })
    }

    fn readlink(&self, path: &[u8]) -> Result<Vec<u8>> {
        self.client.call_for_path(path, |lease, body, deadline| {
            let volume = lease.welcome().volume;
            lease.call(&NodeRequest::ReadLink { volume, path }, body, &mut [], &mut |_| {}, deadline)?;
            Ok(body.clone())
        })
    }

    fn object_headers(&self, path: &[u8]) -> Result<ObjectHeaders> {
        self.client.call_for_path(path, |lease, body, deadline| {
            let volume = lease.welcome().volume;
            lease.call(&NodeRequest::ObjectHeaders { volume, path }, body, &mut [], &mut |_| {}, deadline)?;
            Ok(ObjectHeaders::from_xattr(body).unwrap_or_default())
        })
    }

    fn read(&self, object: &ObjectRef, offset: u64, dst: &mut [u8]) -> Result<ReadData> {
        let inner = &self.client;
        object.check_block_count(inner.block_size)?;
        let want = object.size.saturating_sub(offset).min(dst.len() as u64) as usize;
        let mut done = 0;
        let mut deadline = inner.new_deadline();
        while done < want {
            let at = offset + done as u64;
            let start = (at % inner.block_size) as usize;
            let index = (at / inner.block_size) as u32;
            let len = (want - done).min(object.block_len(index, inner.block_size) - start);
            let id = BlockId { object: object.id, index };
            let held = inner.tier.find(&id).map(|block| block.wait_range(start..start + len, deadline));
            if let Some(Ok(slice)) = held {
                inner.stats.blockcache.hit_bytes.add(len as u64);
                inner.stats.blockcache.mem_hit_bytes.add(len as u64);
                if len == want {
                    return Ok(ReadData::Shared(slice));
                }
                dst[done..done + len].copy_from_slice(&slice);
            } else {
                inner.stats.blockcache.miss_bytes.add(len as u64);
                // A failed fetch ahead says nothing about this read, which sends its own request in the remaining
                // time.
                if let Some(Err(error)) = held {
                    deadline = inner.extend_deadline(deadline, error)?;
                }
                let mut plan = inner.plan_read(object, at, &dst[done..done + len], deadline);
                if len == want && len >= PIECE_FROM && !inner.rails {
                    match inner.read_pipelined(plan, &mut dst[..len])? {
                        None => return Ok(ReadData::Copied(len)),
                        Some(then) => plan = then,
                    }
                }
                inner.read_planned(&plan, &mut dst[done..done + len])?;
            }
            done += len;
        }
        Ok(ReadData::Copied(done))
    }

    fn prefetch(&self, object: &ObjectRef, blocks: Range<u32>, piece: usize) {
        let pipelined = piece >= PIECE_FROM && !self.client.rails;
        let end = (u64::from(blocks.end) * self.client.block_size).min(object.size);
        if pipelined && !self.client.ahead.follow_reader(object.id, end) {
            return;
        }
        if pipelined || piece == 0 {
            let inner = Arc::clone(&self.client);
            let object = object.clone();
            self.workers.run_ahead(move || inner.begin_fetches(&object, blocks));
            return;
        }
        for index in blocks {
            let inner = &self.client;
            let len = object.block_len(index, inner.block_size);
            let bytes = BufferPool::footprint(len);
            if len == 0 || inner.ahead_bytes.load(Ordering::Relaxed) + bytes > inner.tier.pool().limit_bytes() / 2 {
                return;
            }
            let Some(fill) = inner.tier.try_fill(BlockId { object: object.id, index }, len) else { continue };
            inner.ahead_bytes.fetch_add(bytes, Ordering::Relaxed);
            let count = FillAheadBytes { inner: Arc::clone(inner), bytes };
            let object = object.clone();
            self.workers.run_ahead(move || {
                count.inner.fill_block(&object, fill);
                count.inner.stats.blockcache.prefetch_bytes.add(len as u64);
            });
        }
    }

    fn capacity(&self) -> Result<VolumeSpace> {
        let stat: CapacityAnswer = self.client.call_for_path(b"", |lease, body, deadline| {
            let volume = lease.welcome().volume;
            lease.call_for(&NodeRequest::StatFs { volume }, body, deadline)
        })?;
        Ok(VolumeSpace {
            total_bytes: stat.total_bytes,
            free_bytes: stat.free_bytes,
            files: stat.total_files,
            files_free: stat.free_files,
        })
    }

    fn info(&self, path: &[u8]) -> Result<FileInfo> {
        // Each node knows its own blocks only. Nodes that do not answer are listed as such.
        let mut whole: Option<FileInfo> = None;
        let mut silent = Vec::new();
        let mut last_error = None;
        let names: Vec<String> = self.client.members.snapshot().members().iter().map(|m| m.name.clone()).collect();
        let until = Instant::now() + INFO * 2;
        let ask = |name: &str| self.client.node_info(name, path, until);
        // In parallel: the timeouts of several dead nodes would add up.
        let answers = names.chunks(INFO_AT_ONCE).flat_map(|names| {
            std::thread::scope(|scope| {
                let thread = || std::thread::Builder::new().name("ask-info".into());
                let asked = names.iter().map(|name| (name.clone(), thread().spawn_scoped(scope, || ask(name))));
                let asked: Vec<_> = asked.collect();
                asked.into_iter().map(|(name, asked)| (name, join_asked(asked))).collect::<Vec<_>>()
            })
        });
        for (name, answer) in answers {
            match answer {
                Ok((node, info)) => {
                    let held: Vec<BlockRun> =
                        info.held.into_iter().map(|run| BlockRun { holder: Some(node.clone()), ..run }).collect();
                    let whole = whole.get_or_insert(FileInfo { held: Vec::new(), ..info });
                    whole.held.extend(held);
                    whole.nodes.push(node);
                }
                Err(error) => {
                    silent.push(name);
                    last_error = Some(error);
                }
            }
        }
        let Some(mut whole) = whole else {
            return Err(last_error.unwrap_or_else(|| Error::new(ErrorKind::Unavailable, "the cache group has no node")));
        };
        whole.blocks.memory = whole.held.iter().filter(|run| run.is_in_memory()).map(BlockRun::count).sum();
        whole.blocks.disk = whole.held.iter().filter(|run| run.is_on_disk()).map(BlockRun::count).sum();
        whole.blocks.cached = whole.held.iter().map(BlockRun::count).sum();
        whole.silent = silent;
        Ok(whole)
    }
}

/// The answer of a thread that calls a node.
fn join_asked<T>(asked: std::io::Result<std::thread::ScopedJoinHandle<'_, Result<T>>>) -> Result<T> {
    let asked = asked.map_err(|e| Error::io("no thread to ask a node", &e))?;
    asked
        .join()
        .unwrap_or_else(|_| Err(Error::new(ErrorKind::Io(EIO), "a thread that called a node panicked; see the log")))
}
