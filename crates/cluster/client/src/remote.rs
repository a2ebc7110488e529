//! The volume of a mount that consumes a cache group: every name and every byte comes from a node. The only
//! memory it uses is for blocks fetched ahead of their readers.

use crate::ahead::{Ahead, PIECE_FROM};
use crate::hedge::{Hedge, Hedger};
use crate::peer::{NOWHERE, Patience, ask};
use crate::placement::{Copies, Standpoint, Wanted};
use crate::pulse::Pulse;
use crate::reads::Order;
use crate::roster::{Roster, View};
use crate::spread::Spread;
use spurline_mem::{Pool, Tier};
use spurline_proto::{Request, StatFs};
use spurline_transport::CallError;
use spurline_types::{Attr, BlockId, Error, ErrorKind, ListPage, Member, ObjectId, ObjectRef, Result, Stats};
use spurline_volume::{Capacity, Data, Volume, Workers};
use std::cell::RefCell;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Nodes that are tried at most to find out whether any can be reached.
const TRIED: usize = 8;
/// The longest a node is waited for that is asked what it holds, half of what all may take.
const INFO: Duration = Duration::from_secs(4);
/// Nodes that are asked that at once.
const INFO_AT_ONCE: usize = 64;

thread_local! {
    /// Bodies of answers and the ranking of peers, reused from request to request.
    pub(crate) static SCRATCH: RefCell<(Vec<u8>, Vec<u32>)> = const { RefCell::new((Vec::new(), Vec::new())) };
}

/// How a [`Remote`] behaves.
#[derive(Debug, Clone)]
pub struct RemoteConfig {
    /// How long requests may take.
    pub patience: Patience,
    /// Blocks fetched ahead at the same time.
    pub fetchers: usize,
    /// How old metadata may be that a node answers from memory.
    pub metadata_age: Duration,
    /// How many nodes hold each file.
    pub copies: Copies,
    /// Where this reader stands.
    pub standpoint: Standpoint,
    /// A node that owes answers and gives no sign of life for this long is given up, when there are others.
    pub silence: Duration,
    /// A read is never late before this; zero and none is ever asked of a second node.
    pub hedge_after: Duration,
}

/// A cache group as a volume.
pub struct Remote {
    inner: Arc<Inner>,
    workers: Workers,
    _pulse: Pulse,
    _hedger: Option<Hedger>,
}

pub(crate) struct Inner {
    source: String,
    pub(crate) block_size: u64,
    pub(crate) roster: Arc<Roster>,
    pub(crate) tier: Arc<Tier>,
    pub(crate) config: RemoteConfig,
    pub(crate) stats: Arc<Stats>,
    /// Bytes of the buffers that are being filled ahead.
    ahead_bytes: AtomicU64,
    /// Whether there may be paths beside TCP, over which large reads are split.
    pub(crate) rails: bool,
    pub(crate) ahead: Arc<Ahead>,
    pub(crate) hedge: Hedge,
    pub(crate) spread: Spread,
}

impl Remote {
    /// Greets the nodes of `roster` until one answers and takes the block size from it. `make_tier` builds the memory
    /// for read-ahead once that size is known.
    ///
    /// # Errors
    /// What the nodes answered, or why none did.
    pub fn connect(
        source: &str,
        roster: Arc<Roster>,
        config: RemoteConfig,
        stats: Arc<Stats>,
        make_tier: impl FnOnce(u64) -> Result<Arc<Tier>>,
    ) -> Result<Arc<Remote>> {
        let mut block_size = 0;
        let everyone = |view: &View, _, ranked: &mut Vec<u32>| {
            ranked.clear();
            ranked.extend(0..view.members().len() as u32);
        };
        let retries = &stats.remotecache.retries;
        let waits = config.patience.asked_now();
        ask(&roster, NOWHERE, everyone, &mut Vec::new(), waits, retries, |_, lease, deadline| {
            block_size = lease.welcome().block_size;
            lease.call(&Request::Ping, &mut Vec::new(), &mut [], &mut |_| {}, deadline).map(drop)
        })?;
        if !(4096..=64 << 20).contains(&block_size) {
            return Err(Error::new(ErrorKind::Protocol, format!("the node says its blocks have {block_size} bytes")));
        }
        let tier = make_tier(block_size)?;
        // As many as are fetched into memory at once; as many channels are left for what is waited for.
        let ahead = Ahead::new(config.fetchers);
        let sweeper = Arc::clone(&ahead);
        std::thread::Builder::new()
            .name("asked-ahead".into())
            .spawn(move || sweeper.sweep())
            .map_err(|e| Error::io("can't start a thread", &e))?;
        let pulse = Pulse::start(&roster, config.silence, &stats)?;
        let hedge = Hedge::new(config.hedge_after);
        let fetchers = config.fetchers;
        let inner = Arc::new(Inner {
            source: source.to_owned(),
            block_size,
            rails: roster.equipped(),
            roster,
            tier,
            config,
            stats,
            ahead_bytes: AtomicU64::new(0),
            ahead,
            hedge,
            spread: Spread::new(),
        });
        let hedger = Hedger::start(&inner)?;
        Ok(Arc::new(Remote { _pulse: pulse, _hedger: hedger, workers: Workers::new("fetch", fetchers), inner }))
    }

    /// Replaces the list of the group's nodes; see [`Roster::set_members`].
    pub fn set_members(&self, members: &[Arc<Member>]) {
        self.inner.roster.set_members(members);
    }

    pub(crate) fn inner(&self) -> &Inner {
        &self.inner
    }

    /// Whether a node of the group can be reached. Where none is known to be up, some are tried until `deadline`: nobody
    /// else tries them while nothing is read.
    ///
    /// # Errors
    /// Why the last one tried can't be reached.
    pub fn reachable(&self, deadline: Instant) -> Result<()> {
        let view = self.inner.roster.view();
        if view.all_made().any(|peer| peer.is_up()) {
            return Ok(());
        }
        let mut why = Error::new(ErrorKind::Unavailable, "the group has no nodes");
        let all = 0..view.members().len() as u32;
        let (made, rest): (Vec<u32>, Vec<u32>) = all.partition(|index| view.made(*index).is_some());
        for index in made.into_iter().chain(rest).take(TRIED) {
            let peer = view.peer(index);
            match peer.tcp().checkout(deadline) {
                Ok(_) => return Ok(()),
                Err(error) => why = error.context(peer.name()),
            }
            if Instant::now() >= deadline {
                break;
            }
        }
        Err(why.context("no node of the group can be reached"))
    }

    /// The nodes.
    pub fn roster(&self) -> &Arc<Roster> {
        &self.inner.roster
    }
}

impl Inner {
    pub(crate) fn roster(&self) -> &Roster {
        &self.roster
    }

    /// Nodes that hold each block of the object at `path`.
    pub(crate) fn copies_of(&self, path: &[u8]) -> u32 {
        self.config.copies.of(path)
    }

    pub(crate) fn block_size(&self) -> u64 {
        self.block_size
    }

    pub(crate) fn patience(&self) -> Patience {
        self.config.patience
    }

    pub(crate) fn retries(&self) -> &spurline_types::stats::Metric {
        &self.stats.remotecache.retries
    }

    fn max_age_ms(&self) -> u32 {
        u32::try_from(self.config.metadata_age.as_millis()).unwrap_or(u32::MAX)
    }

    fn ask_path<T>(
        &self,
        path: &[u8],
        mut call: impl FnMut(
            &mut spurline_transport::Lease<'_>,
            &mut Vec<u8>,
            Instant,
        ) -> Result<T, spurline_transport::CallError>,
    ) -> Result<T> {
        let started = Instant::now();
        let place = ObjectId::hash(&self.source, path, "");
        let wanted = Wanted::block(place, 0, self.config.copies.of(path));
        let result = self.ask(wanted, Order::NearFirst, NOWHERE, self.deadline(), |_, lease, body, deadline| {
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

    /// What one node holds of a file, and the node's name. Nobody waits for one that is away.
    fn info_of(&self, name: &str, path: &[u8], until: Instant) -> Result<(String, serde_json::Value)> {
        let answer = until.saturating_duration_since(Instant::now()).min(self.config.patience.answer).min(INFO);
        self.ask_named(name, Patience { answer, absence: Duration::ZERO }, |lease, body, deadline| {
            let (volume, node) = (lease.welcome().volume, lease.welcome().node.clone());
            lease.call(&Request::Info { volume, path }, body, &mut [], &mut |_| {}, deadline)?;
            let info = serde_json::from_slice(body).map_err(|error| {
                CallError::Answered(Error::new(
                    ErrorKind::Protocol,
                    format!("what {node} knows of a file makes no sense: {error}"),
                ))
            })?;
            Ok((node, info))
        })
    }
}

impl Drop for Remote {
    fn drop(&mut self) {
        self.inner.ahead.close();
    }
}

/// Takes its bytes off the count when the job that carries it has run or was dropped.
struct AheadBytes {
    inner: Arc<Inner>,
    bytes: u64,
}

impl Drop for AheadBytes {
    fn drop(&mut self) {
        self.inner.ahead_bytes.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

impl Volume for Remote {
    fn source(&self) -> &str {
        &self.inner.source
    }

    fn block_size(&self) -> u64 {
        self.inner.block_size
    }

    fn lookup(&self, path: &[u8]) -> Result<Attr> {
        let max_age_ms = self.inner.max_age_ms();
        self.inner.ask_path(path, |lease, body, deadline| {
            let volume = lease.welcome().volume;
            lease.call_for(&Request::Lookup { volume, path, max_age_ms }, body, deadline)
        })
    }

    fn list(&self, path: &[u8], cursor: Option<&[u8]>, max: usize) -> Result<ListPage> {
        let max_age_ms = self.inner.max_age_ms();
        self.inner.ask_path(path, |lease, body, deadline| {
            let volume = lease.welcome().volume;
            lease.call_for(&Request::List { volume, path, cursor, max: max as u32, max_age_ms }, body, deadline)
        })
    }

    fn readlink(&self, path: &[u8]) -> Result<Vec<u8>> {
        self.inner.ask_path(path, |lease, body, deadline| {
            let volume = lease.welcome().volume;
            lease.call(&Request::ReadLink { volume, path }, body, &mut [], &mut |_| {}, deadline)?;
            Ok(body.clone())
        })
    }

    fn read(&self, object: &ObjectRef, offset: u64, dst: &mut [u8]) -> Result<Data> {
        let inner = &self.inner;
        object.numbered(inner.block_size)?;
        let want = object.size.saturating_sub(offset).min(dst.len() as u64) as usize;
        let (mut done, mut deadline) = (0, inner.deadline());
        while done < want {
            let at = offset + done as u64;
            let start = (at % inner.block_size) as usize;
            let index = (at / inner.block_size) as u32;
            let len = (want - done).min(object.block_len(index, inner.block_size) - start);
            let id = BlockId { object: object.id, index };
            let held = inner.tier.find(&id).map(|block| block.wait(start..start + len, deadline));
            if let Some(Ok(slice)) = held {
                inner.stats.blockcache.hit_bytes.add(len as u64);
                inner.stats.blockcache.mem_hit_bytes.add(len as u64);
                if len == want {
                    return Ok(Data::Shared(slice));
                }
                dst[done..done + len].copy_from_slice(&slice);
            } else {
                inner.stats.blockcache.miss_bytes.add(len as u64);
                // A fetch ahead that failed says nothing about this read: it asks for itself, in the time that it has left.
                if let Some(Err(error)) = held {
                    deadline = inner.goes_on(deadline, error)?;
                }
                let mut order = Order::NearFirst;
                if len == want && len >= PIECE_FROM && !inner.rails {
                    match inner.read_asked(object, at, &mut dst[..len], deadline)? {
                        None => return Ok(Data::Copied(len)),
                        Some(then) => (order, deadline) = then,
                    }
                }
                inner.read_into(object, at, &mut dst[done..done + len], order, deadline)?;
            }
            done += len;
        }
        Ok(Data::Copied(done))
    }

    fn prefetch(&self, object: &ObjectRef, blocks: Range<u32>, piece: usize) {
        if piece >= PIECE_FROM && !self.inner.rails {
            let end = (u64::from(blocks.end) * self.inner.block_size).min(object.size);
            return self.inner.ahead.follow(object.id, end);
        }
        for index in blocks {
            let inner = &self.inner;
            let len = object.block_len(index, inner.block_size);
            let bytes = Pool::footprint(len);
            if len == 0 || inner.ahead_bytes.load(Ordering::Relaxed) + bytes > inner.tier.pool().limit_bytes() / 2 {
                return;
            }
            let Some(fill) = inner.tier.try_fill(BlockId { object: object.id, index }, len) else { continue };
            inner.ahead_bytes.fetch_add(bytes, Ordering::Relaxed);
            let (count, object) = (AheadBytes { inner: Arc::clone(inner), bytes }, object.clone());
            self.workers.ahead(move || {
                count.inner.run_fill(&object, fill);
                count.inner.stats.blockcache.prefetch_bytes.add(len as u64);
            });
        }
    }

    fn capacity(&self) -> Result<Capacity> {
        let stat: StatFs = self.inner.ask_path(b"", |lease, body, deadline| {
            let volume = lease.welcome().volume;
            lease.call_for(&Request::StatFs { volume }, body, deadline)
        })?;
        Ok(Capacity {
            total_bytes: stat.total_bytes,
            free_bytes: stat.free_bytes,
            files: stat.total_files,
            files_free: stat.free_files,
        })
    }

    fn info(&self, path: &[u8]) -> Result<serde_json::Value> {
        // Each node knows only what it holds itself, so all are asked; one that does not answer is left out, said.
        let mut whole: Option<serde_json::Value> = None;
        let (mut held, mut silent, mut last) = (Vec::new(), Vec::new(), None);
        let names: Vec<String> = self.inner.roster.view().members().iter().map(|m| m.name.clone()).collect();
        let until = Instant::now() + INFO * 2;
        let ask = |name: &str| self.inner.info_of(name, path, until);
        // Side by side: what is waited for those that are down would add up to more than anybody waits for.
        let answers = names.chunks(INFO_AT_ONCE).flat_map(|names| {
            std::thread::scope(|scope| {
                let thread = || std::thread::Builder::new().name("ask-info".into());
                let asked = names.iter().map(|name| (name.clone(), thread().spawn_scoped(scope, || ask(name))));
                let answer = |asked: std::io::Result<std::thread::ScopedJoinHandle<'_, _>>| {
                    let asked = asked.map_err(|e| Error::io("no thread to ask a node", &e))?;
                    asked.join().unwrap_or_else(|_| Err(Error::new(ErrorKind::Io(5), "asking a node panicked")))
                };
                let asked: Vec<_> = asked.collect();
                asked.into_iter().map(|(name, asked)| (name, answer(asked))).collect::<Vec<_>>()
            })
        });
        for (name, answer) in answers {
            match answer {
                Ok((node, mut info)) => {
                    for mut run in info["held"].as_array_mut().map(std::mem::take).unwrap_or_default() {
                        run["holder"] = node.clone().into();
                        held.push(run);
                    }
                    let whole = whole.get_or_insert(info);
                    let nodes = whole["nodes"].as_array().cloned().unwrap_or_default();
                    whole["nodes"] = nodes.into_iter().chain([node.into()]).collect();
                }
                Err(error) => {
                    silent.push(name);
                    last = Some(error);
                }
            }
        }
        let (Some(mut whole), _) = (whole, &last) else {
            return Err(last.unwrap_or_else(|| Error::new(ErrorKind::Unavailable, "there is no node to ask")));
        };
        let blocks = |place: &str| -> u64 {
            let there = held.iter().filter(|run| run["where"].as_str().is_some_and(|w| w.contains(place)));
            there.map(|run| run["last"].as_u64().unwrap_or(0) + 1 - run["first"].as_u64().unwrap_or(0)).sum()
        };
        let (memory, disk, all) = (blocks("memory"), blocks("disk"), blocks(""));
        whole["blocks"]["memory"] = memory.into();
        whole["blocks"]["disk"] = disk.into();
        whole["blocks"]["cached"] = all.into();
        whole["held"] = held.into();
        if !silent.is_empty() {
            whole["silent"] = silent.into();
        }
        Ok(whole)
    }
}
