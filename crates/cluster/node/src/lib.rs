//! What a cache node answers its peers: names, attributes and bytes of the sources it may fetch. It knows no
//! socket; the transports bring requests and take answers.
#![forbid(unsafe_code)]

mod held;
mod hot;
mod recent;

use hot::Hot;
use parking_lot::RwLock;
use recent::Recent;
use spurline_cache::{Batch, Cache, Pinned, RuleSet, Shared};
use spurline_origin::UnderStore;
use spurline_proto::{
    Body, Capabilities, HOT, Hello, MAX_PAYLOAD, Part, PartDone, Parts, PartsDone, Rail, Read, Request, SENT_ON,
    StatFs, VolumeId, Welcome,
};
use spurline_transport::{ConnState, Responder, Service};
use spurline_types::{BlockId, Error, ErrorKind, ListPage, ObjectId, ObjectRef, Result, Version};
use spurline_volume::{Data, Volume as _};
use std::cell::RefCell;
use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::ops::Range;
use std::os::fd::AsFd as _;
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// The most names one answer lists; a reader asks again for more.
const LIST_MAX: usize = 1000;
/// The most blocks of one part to warm or drop: an asker splits what is longer.
const BLOCKS_MAX: u64 = 1 << 16;
/// The most places below the node's sources that mounts may open; each costs a few KiB for good. Threads, connections and
/// the memory for names are those of its source.
const VOLUMES_MAX: usize = 4096;

thread_local! {
    /// The object of the last read on this thread: the next is most often of the same.
    static LAST: RefCell<Option<ObjectRef>> = const { RefCell::new(None) };
    static BODY: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

pub use held::HELD;
pub use hot::HotRule;

/// Tells of the node itself what only its surroundings know: disks, weight, counters.
pub type Describe = dyn Fn() -> serde_json::Value + Send + Sync;

/// Changes the node's share of its group's blocks.
pub type Weigh = dyn Fn(u32) -> Result<()> + Send + Sync;

/// Opens the under-store of a source; the node itself does not know how.
pub type Open = dyn Fn(&str) -> Result<Arc<dyn UnderStore>> + Send + Sync;

/// The service of a cache node.
pub struct Node {
    name: String,
    shared: Arc<Shared>,
    allowed: Vec<String>,
    open: Box<Open>,
    volumes: RwLock<Vec<Arc<Cache>>>,
    /// Drawn at start, so that readers see that they talk to another process than before.
    instance: u64,
    rails: RwLock<Vec<Rail>>,
    describe: OnceLock<Box<Describe>>,
    hot: Hot,
    recent: Recent,
    weigh: OnceLock<Box<Weigh>>,
    /// The number of the rule by which holders are found, as readers are told it.
    rule: AtomicU16,
}

impl Node {
    /// A node called `name` that may fetch the `sources` (normalised URLs) and all below them.
    pub fn new(name: &str, shared: Arc<Shared>, sources: Vec<String>, open: Box<Open>) -> Arc<Node> {
        Self::with_rule(name, shared, sources, open, HotRule::default())
    }

    /// The same with a rule of its own for what is hot.
    pub fn with_rule(
        name: &str,
        shared: Arc<Shared>,
        sources: Vec<String>,
        open: Box<Open>,
        rule: HotRule,
    ) -> Arc<Node> {
        Arc::new(Node {
            name: name.to_owned(),
            shared,
            allowed: sources,
            open,
            volumes: RwLock::default(),
            // Keyed by the operating system's randomness; 0 means "not known".
            instance: RandomState::new().build_hasher().finish().max(1),
            rails: RwLock::default(),
            describe: OnceLock::new(),
            hot: Hot::new(rule),
            recent: Recent::default(),
            weigh: OnceLock::new(),
            rule: AtomicU16::new(0),
        })
    }

    /// The number of this process, as readers are told it.
    pub fn instance(&self) -> u64 {
        self.instance
    }

    /// Whoever greets without a source and asks about nothing is answered this, once it is given.
    pub fn describe_by(&self, describe: Box<Describe>) {
        // A second time nothing happens: somebody may be asking.
        let _ = self.describe.set(describe);
    }

    /// Tells whoever greets from now on by which rule this release finds the holders of blocks.
    pub fn place_by(&self, rule: u16) {
        self.rule.store(rule, Ordering::Relaxed);
    }

    /// Whoever changes this node's share is served by this, once it is given.
    pub fn weigh_by(&self, weigh: Box<Weigh>) {
        // A second time nothing happens: somebody may be asking.
        let _ = self.weigh.set(weigh);
    }

    /// Goes by these rules for folders from now on, together with those it knows.
    pub fn take_rules(&self, set: &RuleSet) {
        if self.shared.take_rules(set) {
            let now = self.shared.rules();
            tracing::info!("rules for folders: {}, revision {}", now.rules.len(), now.revision);
        }
    }

    /// The rules for folders.
    pub fn rules(&self) -> Arc<RuleSet> {
        self.shared.rules()
    }

    /// The rules as JSON, each with the bytes held by it, and how much this node has pinned and may pin.
    pub fn rules_told(&self) -> serde_json::Value {
        let set = self.shared.rules();
        let mut told = set.to_json();
        for (rule, known) in told["rules"].as_array_mut().into_iter().flatten().zip(&set.rules) {
            rule["held_bytes"] = self.shared.held_by_rule(known).into();
        }
        told["sources"] = self.allowed.clone().into();
        told["volumes"] = self.volumes().iter().map(|volume| volume.source().to_owned()).collect::<Vec<_>>().into();
        told["block_size"] = self.shared.block_size.into();
        told["pinned_bytes"] = self.shared.stats.blockcache.pinned_bytes.get().into();
        told["capacity_bytes"] = self.shared.capacity_bytes().into();
        told["most_pinned_bytes"] = self.shared.store.as_ref().map_or(0, |store| store.most_pinned()).into();
        told
    }

    fn exchange_rules(&self, text: &str, responder: &mut dyn Responder) -> Result<()> {
        if !text.is_empty() {
            let given =
                serde_json::from_str(text).map_err(|error| Error::new(ErrorKind::Invalid, error.to_string()))?;
            self.take_rules(&RuleSet::from_json(&given)?);
        }
        responder.data(self.rules_told().to_string().as_bytes(), &[])
    }

    /// Tells readers that greet from now on where RDMA reaches this node.
    pub fn announce(&self, rails: Vec<Rail>) {
        *self.rails.write() = rails;
    }

    /// The volumes that were asked for so far.
    pub fn volumes(&self) -> Vec<Arc<Cache>> {
        self.volumes.read().clone()
    }

    fn volume_for(&self, source: &str) -> Result<VolumeId> {
        // In one form: what is escaped, or named by a detour, is not below what its letters begin with.
        let source = &*spurline_origin::normal(source);
        let place = |volumes: &[Arc<Cache>], url: &str| volumes.iter().position(|v| v.source() == url);
        if let Some(index) = place(&self.volumes.read(), source) {
            return Ok(VolumeId(index as u32));
        }
        let below = |allowed: &String| {
            source
                .strip_prefix(spurline_origin::normal(allowed).trim_end_matches('/'))
                .is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
        };
        if !self.allowed.iter().any(below) {
            // Not "not found": a mount whose node came back with other sources must not say that its files are gone.
            return Err(Error::new(
                ErrorKind::PermissionDenied,
                format!(
                    "node {} does not serve {source}: it was started with --source {}",
                    self.name,
                    self.allowed.join(" --source ")
                ),
            ));
        }
        let under = (self.open)(source)?;
        let mut volumes = self.volumes.write();
        if let Some(index) = place(&volumes, under.source()) {
            return Ok(VolumeId(index as u32));
        }
        if volumes.len() >= VOLUMES_MAX {
            return Err(Error::new(
                ErrorKind::NoSpace,
                format!("node {} serves {VOLUMES_MAX} volumes already", self.name),
            ));
        }
        volumes.push(Cache::new(Arc::clone(&self.shared), under));
        Ok(VolumeId(volumes.len() as u32 - 1))
    }

    fn volume(&self, id: VolumeId) -> Result<Arc<Cache>> {
        self.volumes.read().get(id.0 as usize).cloned().ok_or_else(|| {
            Error::new(ErrorKind::Protocol, format!("node {} has no volume {}: greet it again", self.name, id.0))
        })
    }

    /// Answers a read of a mount, or of another node: to that only when nothing has to be fetched for it.
    fn read(&self, read: &Read<'_>, asker: Asker<'_>, responder: &mut dyn Responder) -> Result<()> {
        let cache = self.volume(read.volume)?;
        let end = read.size.min(read.offset.saturating_add(u64::from(read.len)));
        let len = end.saturating_sub(read.offset) as usize;
        if len == 0 {
            return responder.data(&[], &[]);
        }
        if len > MAX_PAYLOAD {
            return Err(Error::new(ErrorKind::Invalid, format!("a read of {len} bytes, more than {MAX_PAYLOAD}")));
        }
        let (reader, may_go_on) = match asker {
            Asker::Mount { name, may_go_on } => (Some(name), may_go_on),
            Asker::Node { .. } => (None, false),
        };
        let id = ObjectId::hash(cache.source(), read.path, read.version);
        let object = LAST
            .take()
            .filter(|last| last.id == id && last.size == read.size && *last.path == *read.path)
            .unwrap_or_else(|| {
                let (path, version) = (read.path.into(), Version::new(read.version));
                let object = ObjectRef { id, path, version, size: read.size };
                if reader.is_some() {
                    self.recent.asked(read.volume.0 as usize, &object);
                }
                object
            });
        if let Asker::Node { begins } = asker
            && !cache.has(&object, read.offset, len)
        {
            if begins {
                cache.begin(&object, read.offset);
            }
            return Err(Error::new(ErrorKind::NotFound, format!("node {} does not hold it", self.name)));
        }
        let counted = &self.shared.stats.remotecache;
        let hot = self.is_hot(&object, read.offset, len, reader);
        if hot && reader.is_some() {
            counted.hot_answers.add(1);
        }
        let result = answer_read(&cache, &object, read.offset, len, (hot, may_go_on), responder);
        if reader.is_some() {
            // What another node reads is no reader's, and is not remembered as one's.
            LAST.set(Some(object));
        }
        counted.send_bytes.add(result? as u64);
        Ok(())
    }

    /// Whether many readers ask for the block at once; a read by a mount counts as one more.
    fn is_hot(&self, object: &ObjectRef, offset: u64, len: usize, reader: Option<&str>) -> bool {
        let (size, now) = (self.shared.block_size, self.hot.now());
        let id = BlockId { object: object.id, index: (offset / size) as u32 };
        let Some(reader) = reader else { return self.hot.is_hot(&id, now) };
        let seen = self.hot.asked(&id, object.block_len(id.index, size) as u64, len as u64, reader, now);
        if seen.begins {
            self.shared.drop_cooled(|id| self.hot.is_cool(id, now));
        }
        seen.hot
    }

    /// The object a part is of, and the blocks that it covers, wholly or in part.
    fn blocks_of(&self, cache: &Cache, part: &Part<'_>) -> Result<(ObjectRef, Range<u32>)> {
        let size = self.shared.block_size;
        let object = ObjectRef::new(cache.source(), part.path, Version::new(part.version), part.size);
        object.numbered(size)?;
        let end = part.offset.saturating_add(part.len).min(part.size);
        let blocks = part.offset / size..end.div_ceil(size).max(part.offset / size);
        if blocks.end - blocks.start > BLOCKS_MAX {
            let why = format!("{} blocks in one part, more than {BLOCKS_MAX}", blocks.end - blocks.start);
            return Err(Error::new(ErrorKind::Invalid, why));
        }
        let number = |n: u64| u32::try_from(n).unwrap_or(u32::MAX);
        Ok((object, number(blocks.start)..number(blocks.end)))
    }

    fn warm(&self, volume: VolumeId, verify: bool, parts: Parts<'_>, responder: &mut dyn Responder) -> Result<()> {
        let cache = self.volume(volume)?;
        let deadline = Instant::now() + cache.timeout();
        let batch = Arc::new(Batch::default());
        let mut count = 0;
        for part in parts.iter() {
            let (object, blocks) = self.blocks_of(&cache, &part)?;
            self.recent.asked(volume.0 as usize, &object);
            cache.warm(&object, blocks, verify, &batch, count);
            count += 1;
        }
        responder.waits();
        let done = batch.wait(count, deadline).into_iter().map(|part| PartDone {
            moved_bytes: part.fetched_bytes,
            held_bytes: part.held_bytes,
            error: part.error,
        });
        Self::answer(&PartsDone(done.collect()), responder)
    }

    fn drop_parts(&self, volume: VolumeId, parts: Parts<'_>, responder: &mut dyn Responder) -> Result<()> {
        let cache = self.volume(volume)?;
        let done = parts.iter().map(|part| {
            let (object, blocks) = self.blocks_of(&cache, &part)?;
            Ok(PartDone { moved_bytes: cache.drop_blocks(&object, blocks), ..PartDone::default() })
        });
        Self::answer(&PartsDone(done.collect::<Result<_>>()?), responder)
    }

    fn classify(&self, volume: VolumeId, parts: Parts<'_>, responder: &mut dyn Responder) -> Result<()> {
        let cache = self.volume(volume)?;
        let done = parts.iter().map(|part| {
            let (object, blocks) = self.blocks_of(&cache, &part)?;
            Ok(PartDone { held_bytes: cache.classify(&object, blocks), ..PartDone::default() })
        });
        let done = PartsDone(done.collect::<Result<_>>()?);
        // Once for all of them, and before anybody is told that it is done.
        cache.sync();
        Self::answer(&done, responder)
    }

    fn answer<T: Body>(value: &T, responder: &mut dyn Responder) -> Result<()> {
        let mut body = BODY.take();
        body.clear();
        value.encode(&mut body);
        let result = responder.data(&body, &[]);
        body.shrink_to(64 << 10);
        BODY.set(body);
        result
    }
}

fn age(ms: u32) -> Duration {
    Duration::from_millis(u64::from(ms))
}

/// Who asks for bytes.
#[derive(Clone, Copy)]
enum Asker<'a> {
    /// A mount; it may be told to ask another node for what is not here.
    Mount { name: &'a str, may_go_on: bool },
    /// Another node; what is not here may be what this node is to fetch for all.
    Node { begins: bool },
}

impl<'a> Asker<'a> {
    fn mount(conn: &'a ConnState, may_go_on: bool) -> Self {
        Asker::Mount { name: conn.peer_name().unwrap_or_default(), may_go_on }
    }
}

/// How many bytes were sent: all, or none where the reader `may_go_on` to another node and is to.
fn answer_read(
    cache: &Arc<Cache>,
    object: &ObjectRef,
    offset: u64,
    len: usize,
    (hot, may_go_on): (bool, bool),
    responder: &mut dyn Responder,
) -> Result<usize> {
    let hint = if hot { HOT } else { &[] };
    if let Some(range) = cache.file_range(object, offset, len) {
        return responder.file(hint, range.file().as_fd(), range.offset, len).map(|()| len);
    }
    let near = responder.numa_node();
    let pinned = match cache.pin_held(object, offset, len, near, &mut || responder.waits())? {
        Pinned::Here(slice) => Some(slice),
        Pinned::Small => None,
        Pinned::Missing if may_go_on && !cache.has(object, offset, len) && cache.sends_on(object, offset) => {
            return responder.data(SENT_ON, &[]).map(|()| 0);
        }
        Pinned::Missing => {
            responder.waits();
            Some(cache.pin_fetched(object, offset, len)?)
        }
    };
    if let Some(slice) = pinned.filter(|slice| slice.len() == len) {
        return responder.data(hint, &[&slice]).map(|()| len);
    }
    // On disk, or more than one block: read into a buffer of the budget.
    responder.waits();
    let pool = cache.pool();
    let mut scratch = pool.alloc_near(len, near, Instant::now() + cache.timeout())?;
    match cache.read(object, offset, &mut scratch)? {
        Data::Copied(n) => responder.data(hint, &[&scratch[..n]])?,
        Data::Shared(slice) => responder.data(hint, &[&slice])?,
    }
    Ok(len)
}

impl Service for Node {
    fn hello(&self, conn: &ConnState, hello: &Hello<'_>) -> Result<Welcome> {
        let volume = if hello.source.is_empty() { VolumeId(u32::MAX) } else { self.volume_for(hello.source)? };
        tracing::debug!(peer = hello.peer, source = hello.source, endpoints = %conn.endpoints(), "a reader greets");
        Ok(Welcome {
            version: 0,
            volume,
            block_size: self.shared.block_size,
            node: self.name.clone(),
            capabilities: Capabilities::default().sending_on().placing_by(self.rule.load(Ordering::Relaxed)),
            instance: self.instance,
            rails: self.rails.read().clone(),
        })
    }

    fn serve(&self, conn: &ConnState, request: Request<'_>, responder: &mut dyn Responder) -> Result<()> {
        self.shared.stats.remotecache.served_ops.add(1);
        match request {
            Request::Read(read) => self.read(&read, Asker::mount(conn, false), responder),
            Request::ReadHere(read) => self.read(&read, Asker::mount(conn, true), responder),
            Request::Pull(read) => self.read(&read, Asker::Node { begins: false }, responder),
            Request::Seek(read) => self.read(&read, Asker::Node { begins: true }, responder),
            Request::Lookup { volume, path, max_age_ms } => {
                Self::answer(&self.volume(volume)?.lookup_within(path, age(max_age_ms))?, responder)
            }
            Request::List { volume, path, cursor, max, max_age_ms } => {
                let max = (max as usize).clamp(1, LIST_MAX);
                let page: ListPage = self.volume(volume)?.list_within(path, cursor, max, age(max_age_ms))?;
                Self::answer(&page, responder)
            }
            Request::ReadLink { volume, path } => responder.data(&self.volume(volume)?.readlink(path)?, &[]),
            Request::StatFs { volume } => {
                let capacity = self.volume(volume)?.capacity()?;
                let stat = StatFs {
                    total_bytes: capacity.total_bytes,
                    free_bytes: capacity.free_bytes,
                    total_files: capacity.files,
                    free_files: capacity.files_free,
                };
                Self::answer(&stat, responder)
            }
            Request::Classify { volume, parts } => self.classify(volume, parts, responder),
            Request::Rules { text } => self.exchange_rules(text, responder),
            Request::Weigh { weight } => {
                let why = "the node is starting, or in no group that is told of its weight";
                let weigh = self.weigh.get().ok_or_else(|| Error::new(ErrorKind::Unsupported, why))?;
                weigh(weight)?;
                responder.data(&[], &[])
            }
            // Of no volume: about the node itself.
            Request::Info { volume: VolumeId(u32::MAX), path } => {
                if let Some(after) = held::page_after(path) {
                    return responder.data(self.held(after).to_string().as_bytes(), &[]);
                }
                let status = self.describe.get().map_or(serde_json::Value::Null, |describe| describe());
                responder.data(status.to_string().as_bytes(), &[])
            }
            Request::Info { volume, path } => {
                let info = self.volume(volume)?.info(path)?;
                responder.data(info.to_string().as_bytes(), &[])
            }
            Request::Warm { volume, verify, parts } => self.warm(volume, verify, parts, responder),
            Request::Drop { volume, parts } => self.drop_parts(volume, parts, responder),
            other => Err(Error::new(ErrorKind::Unsupported, format!("{other} is not served here"))),
        }
    }
}
