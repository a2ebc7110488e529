//! Serves the requests of a cache node: names, attributes and bytes of its permitted sources. Knows no socket;
//! transports deliver requests and answers.
#![forbid(unsafe_code)]

mod held_objects;
mod hot;
mod path_locks;
mod recent;
mod stage;
mod store;
mod writes;

use hot::HotBlocks;
use parking_lot::{Mutex, RwLock};
use recent::RecentObjects;
use spurline_cache::{Cache, CacheContext, PinOutcome, RemovedBytes, WarmBatch};
use spurline_origin::OriginStore;
use spurline_proto::{
    AnswerBody, CapacityAnswer, HOT_BODY, HelloRequest, MAX_PAYLOAD, NodeRequest, ObjectRange, ObjectRanges,
    REDIRECT_BODY, RailInfo, RangeDone, RangesDone, ReadFlags, ReadRequest, VolumeId, WelcomeAnswer,
};
use spurline_rules::{HeldRule, NodeRules, RuleSet};
use spurline_sys::random;
use spurline_transport::{ConnState, Responder, Service};
use spurline_types::{BlockId, Error, ErrorKind, ListPage, ObjectId, ObjectRef, Result, Version};
use spurline_volume::writes::WritableVolume;
use spurline_volume::{ReadData, Volume as _};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::Range;
use std::os::fd::AsFd as _;
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// Maximum names per listing answer.
const LIST_MAX: usize = 1000;
/// Maximum blocks of one part to warm or drop; clients split longer ranges.
const BLOCKS_MAX: u64 = 1 << 16;
/// Maximum volumes opened below the node's sources. Each costs a few KiB permanently; threads, connections and name
/// memory are shared with its source.
const VOLUMES_MAX: usize = 4096;

thread_local! {
    /// The object of this thread's last read; the next read is often of the same.
    static LAST: RefCell<Option<ObjectRef>> = const { RefCell::new(None) };
    static BODY: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

pub use held_objects::{HeldObject, HeldPage, RecentRecord};
pub use hot::HotRule;
pub use spurline_cache::{FolderRule, WriteClass};
pub use stage::{StageHandler, StageReply};
pub use store::OpenRequests;
pub use writes::{OpenWritable, WritesInUse};

/// Describes state and counters of the node as JSON.
pub type DescribeNode = dyn Fn() -> Vec<u8> + Send + Sync;

/// Changes the node's share of its group's blocks.
pub type SetWeight = dyn Fn(u32) -> Result<()> + Send + Sync;

/// Opens the origin of a source.
pub type OpenOrigin = dyn Fn(&str) -> Result<Arc<dyn OriginStore>> + Send + Sync;

/// A source of a node.
pub struct OpenSource {
    /// What is read.
    pub volume: Arc<Cache>,
    /// `None` for a node that takes no changes.
    pub writes: Option<Arc<dyn WritableVolume>>,
}

/// The service of a cache node.
pub struct CacheNode {
    name: String,
    /// The name with the port, once it listens.
    group_name: OnceLock<String>,
    shared: Arc<CacheContext>,
    allowed: Vec<String>,
    open: Box<OpenOrigin>,
    volumes: RwLock<Vec<Arc<Cache>>>,
    /// Random number of this process, so that readers detect a restart.
    instance: u64,
    rails: RwLock<Vec<RailInfo>>,
    describe: OnceLock<Box<DescribeNode>>,
    hot: HotBlocks,
    recent: RecentObjects,
    weigh: OnceLock<Box<SetWeight>>,
    /// The placement rule sent in handshakes.
    rule: AtomicU16,
    rules: RwLock<Arc<RuleSet>>,
    /// Serialises changes of the rules.
    changing_rules: Mutex<()>,
    writes: writes::WriteService,
    store: store::StoreService,
    stage: OnceLock<Arc<dyn StageHandler>>,
}

impl CacheNode {
    /// A node called `name` that may serve `sources` (normalised URLs) and all below them.
    pub fn new(name: &str, shared: Arc<CacheContext>, sources: Vec<String>, open: Box<OpenOrigin>) -> Arc<CacheNode> {
        Self::with_rule(name, shared, sources, open, HotRule::default())
    }

    /// As [`CacheNode::new`], with another definition of hot blocks.
    pub fn with_rule(
        name: &str,
        shared: Arc<CacheContext>,
        sources: Vec<String>,
        open: Box<OpenOrigin>,
        rule: HotRule,
    ) -> Arc<CacheNode> {
        Arc::new(CacheNode {
            name: name.to_owned(),
            group_name: OnceLock::new(),
            shared,
            allowed: sources,
            open,
            volumes: RwLock::default(),
            // 0 means "unknown".
            instance: random().max(1),
            rails: RwLock::default(),
            describe: OnceLock::new(),
            hot: HotBlocks::new(rule),
            recent: RecentObjects::default(),
            weigh: OnceLock::new(),
            rule: AtomicU16::new(0),
            rules: RwLock::default(),
            changing_rules: Mutex::default(),
            writes: writes::WriteService::default(),
            store: store::StoreService::default(),
            stage: OnceLock::new(),
        })
    }

    /// The name in handshakes and messages.
    pub fn name(&self) -> &str {
        self.group_name.get().unwrap_or(&self.name)
    }

    /// Sets the name, which may contain the port: several nodes of a host must differ. Only the first call has an effect.
    pub fn set_name(&self, name: String) {
        let _ = self.group_name.set(name);
    }

    /// The random number of this process.
    pub fn instance(&self) -> u64 {
        self.instance
    }

    /// Sets the answer to info requests about the node itself. Only the first call has an effect.
    pub fn set_describe(&self, describe: Box<DescribeNode>) {
        // A request may be reading the first one.
        let _ = self.describe.set(describe);
    }

    /// The description of the node; JSON's `null` while it starts.
    fn description(&self) -> Vec<u8> {
        self.describe.get().map_or_else(|| b"null".to_vec(), |describe| describe())
    }

    /// The sources that the node can't fetch from now, each with the error.
    pub fn origin_errors(&self) -> BTreeMap<String, String> {
        let mut origin_errors = BTreeMap::new();
        for cache in self.volumes.read().iter() {
            if let Some(error) = cache.origin_error() {
                origin_errors.insert(cache.source().to_owned(), error.message().to_owned());
            }
        }
        origin_errors
    }

    /// Sets the placement rule sent in later handshakes.
    pub fn set_placement_rule(&self, rule: u16) {
        self.rule.store(rule, Ordering::Relaxed);
    }

    /// Sets the handler of weight changes. Only the first call has an effect.
    pub fn set_weigh(&self, weigh: Box<SetWeight>) {
        // A request may be using the first one.
        let _ = self.weigh.set(weigh);
    }

    /// Applies the group's folder rules, unless newer ones are known.
    pub fn take_rules(&self, set: &RuleSet) {
        let _one = self.changing_rules.lock();
        let known = self.rules();
        if set.revision < known.revision || *set == *known {
            return;
        }
        self.shared.set_folder_rules(set.rules.iter().cloned());
        *self.rules.write() = Arc::new(set.clone());
        tracing::info!("folder rules: {}, revision {}", set.rules.len(), set.revision);
    }

    /// The folder rules.
    pub fn rules(&self) -> Arc<RuleSet> {
        Arc::clone(&self.rules.read())
    }

    /// The result of `look` at the folder rule of a file: that of the deepest folder. Allocates nothing.
    pub fn with_folder_rule<T>(&self, source_url: &str, path: &str, look: impl FnOnce(Option<&FolderRule>) -> T) -> T {
        self.shared.with_rule(source_url, path, look)
    }

    /// The rules with the bytes held by each, and the node's pinned and pinnable bytes.
    pub fn node_rules(&self) -> NodeRules {
        let set = self.rules();
        let rules = set.rules.iter();
        let held = rules.map(|rule| HeldRule { rule: rule.clone(), held_bytes: self.shared.bytes_under_rule(rule) });
        NodeRules {
            revision: set.revision,
            rules: held.collect(),
            sources: self.allowed.clone(),
            volumes: self.volumes().iter().map(|volume| volume.source().to_owned()).collect(),
            block_size: self.shared.block_size,
            pinned_bytes: self.shared.stats.blockcache.pinned_bytes.get(),
            most_pinned_bytes: self.shared.store.as_ref().map_or(0, |store| store.most_pinned()),
            capacity_bytes: self.shared.capacity_bytes(),
        }
    }

    fn exchange_rules(&self, text: &str, responder: &mut dyn Responder) -> Result<()> {
        if !text.is_empty() {
            let given: RuleSet =
                serde_json::from_str(text).map_err(|error| Error::new(ErrorKind::Invalid, error.to_string()))?;
            self.take_rules(&given);
        }
        responder.send_data(&as_json(&self.node_rules())?, &[])
    }

    /// Sets the RDMA rails sent in later handshakes.
    pub fn announce_rails(&self, rails: Vec<RailInfo>) {
        *self.rails.write() = rails;
    }

    /// The volumes opened so far.
    pub fn volumes(&self) -> Vec<Arc<Cache>> {
        self.volumes.read().clone()
    }

    fn volume_for(&self, source: &str) -> Result<VolumeId> {
        // Normalised first: an escaped or dotted path may lie outside the prefix it shows.
        let source = &*spurline_object_store::normal_url(source);
        if let Some(index) = volume_index(&self.volumes.read(), source) {
            return Ok(VolumeId(index as u32));
        }
        if !self.allowed.iter().any(|allowed| is_at_or_below(source, allowed)) {
            // Not "not found": after a node restarts with other sources, its mounts must not report missing files.
            return Err(Error::new(
                ErrorKind::PermissionDenied,
                format!(
                    "node {} does not serve {source}: it was started with --source {}",
                    self.name(),
                    self.allowed.join(" --source ")
                ),
            ));
        }
        let under = (self.open)(source)?;
        let mut volumes = self.volumes.write();
        if let Some(index) = volume_index(&volumes, under.source_url()) {
            return Ok(VolumeId(index as u32));
        }
        if volumes.len() >= VOLUMES_MAX {
            return Err(Error::new(
                ErrorKind::NoSpace,
                format!("node {} serves {VOLUMES_MAX} volumes already", self.name()),
            ));
        }
        volumes.push(Cache::for_node(Arc::clone(&self.shared), under));
        Ok(VolumeId(volumes.len() as u32 - 1))
    }

    /// Opens one of the node's sources for another service of this process.
    ///
    /// # Errors
    /// `PermissionDenied` for any other source; the origin's failure.
    pub fn open_source(&self, source: &str) -> Result<OpenSource> {
        let id = self.volume_for(source)?;
        let volume = self.volume_by_id(id)?;
        let writes = if self.writes.is_on() { Some(self.writable_source(id)?) } else { None };
        Ok(OpenSource { volume, writes })
    }

    fn volume_by_id(&self, id: VolumeId) -> Result<Arc<Cache>> {
        self.volumes.read().get(id.0 as usize).cloned().ok_or_else(|| {
            Error::new(ErrorKind::Protocol, format!("node {} has no volume {}: connect again", self.name(), id.0))
        })
    }

    /// Serves a read of a mount, or of another node (from the cache only).
    fn serve_read(
        &self,
        read: &ReadRequest<'_>,
        asker: ReadRequester<'_>,
        responder: &mut dyn Responder,
    ) -> Result<()> {
        let cache = self.volume_by_id(read.volume)?;
        let end = read.size.min(read.offset.saturating_add(u64::from(read.len)));
        let len = end.saturating_sub(read.offset) as usize;
        if len == 0 {
            return responder.send_data(&[], &[]);
        }
        if len > MAX_PAYLOAD {
            return Err(Error::new(
                ErrorKind::Invalid,
                format!("a read of {len} bytes exceeds the maximum of {MAX_PAYLOAD}"),
            ));
        }
        let (reader, may_go_on) = match asker {
            ReadRequester::Mount { name, may_go_on } => (Some(name), may_go_on),
            ReadRequester::Node { .. } | ReadRequester::Ahead => (None, false),
        };
        let id = ObjectId::from_text(cache.source(), read.path, read.version);
        let object = LAST
            .take()
            .filter(|last| last.id == id && last.size == read.size && *last.path == *read.path)
            .unwrap_or_else(|| {
                let path = read.path.into();
                let version = Version::new(read.version);
                let object = ObjectRef { id, path, version, size: read.size };
                if reader.is_some() {
                    self.recent.note_object(read.volume.0 as usize, &object);
                }
                object
            });
        if reader.is_none() && !cache.has_range(&object, read.offset, len) {
            if !matches!(asker, ReadRequester::Node { begins: false }) {
                cache.begin_fetch(&object, read.offset);
            }
            return Err(Error::new(ErrorKind::NotFound, format!("node {} does not hold it", self.name())));
        }
        if matches!(asker, ReadRequester::Ahead) {
            return responder.send_data(&[], &[]);
        }
        let counted = &self.shared.stats.remotecache;
        let hot = self.is_hot(&object, read.offset, len, reader);
        if hot && reader.is_some() {
            counted.hot_answers.add(1);
        }
        let result = answer_read(&cache, &object, read.offset, len, AnswerTerms { hot, may_go_on }, responder);
        if reader.is_some() {
            // Reads of other nodes do not count as use by a reader.
            LAST.set(Some(object));
        }
        counted.send_bytes.add(result? as u64);
        Ok(())
    }

    /// Whether the block is hot. A read by a mount is counted first.
    fn is_hot(&self, object: &ObjectRef, offset: u64, len: usize, reader: Option<&str>) -> bool {
        let size = self.shared.block_size;
        let now = self.hot.current_window();
        let id = BlockId { object: object.id, index: (offset / size) as u32 };
        let Some(reader) = reader else { return self.hot.is_hot(&id, now) };
        let seen = self.hot.note_read(&id, object.block_len(id.index, size) as u64, len as u64, reader, now);
        if seen.begins {
            self.shared.drop_cooled(|id| self.hot.is_cool(id, now));
        }
        seen.hot
    }

    /// The object of a part, and the blocks it touches.
    fn blocks_of(&self, cache: &Cache, part: &ObjectRange<'_>) -> Result<(ObjectRef, Range<u32>)> {
        let size = self.shared.block_size;
        let object = ObjectRef::new(cache.source(), part.path, Version::new(part.version), part.size);
        object.check_block_count(size)?;
        let end = part.offset.saturating_add(part.len).min(part.size);
        let blocks = part.offset / size..end.div_ceil(size).max(part.offset / size);
        if blocks.end - blocks.start > BLOCKS_MAX {
            let why = format!("{} blocks in one part exceed the maximum of {BLOCKS_MAX}", blocks.end - blocks.start);
            return Err(Error::new(ErrorKind::Invalid, why));
        }
        let first = u32::try_from(blocks.start).unwrap_or(u32::MAX);
        let end = u32::try_from(blocks.end).unwrap_or(u32::MAX);
        Ok((object, first..end))
    }

    fn warm_parts(
        &self,
        volume: VolumeId,
        verify: bool,
        parts: ObjectRanges<'_>,
        responder: &mut dyn Responder,
    ) -> Result<()> {
        let cache = self.volume_by_id(volume)?;
        let deadline = Instant::now() + cache.origin_timeout();
        let batch = Arc::new(WarmBatch::default());
        let mut count = 0;
        for part in parts.iter() {
            let (object, blocks) = self.blocks_of(&cache, &part)?;
            self.recent.note_object(volume.0 as usize, &object);
            cache.warm_blocks(&object, blocks, verify, &batch, count);
            count += 1;
        }
        responder.before_wait();
        let done = batch.wait_parts(count, deadline).into_iter().map(|part| RangeDone {
            moved_bytes: part.fetched_bytes,
            held_bytes: part.held_bytes,
            error: part.error,
        });
        Self::send_body(&RangesDone(done.collect()), responder)
    }

    fn drop_parts(
        &self,
        volume: VolumeId,
        with_pinned: bool,
        parts: ObjectRanges<'_>,
        responder: &mut dyn Responder,
    ) -> Result<()> {
        let cache = self.volume_by_id(volume)?;
        let done = parts.iter().map(|part| {
            let (object, blocks) = self.blocks_of(&cache, &part)?;
            Ok(removal_done(cache.drop_blocks(&object, blocks, with_pinned)))
        });
        Self::send_body(&RangesDone(done.collect::<Result<_>>()?), responder)
    }

    fn classify_parts(&self, volume: VolumeId, parts: ObjectRanges<'_>, responder: &mut dyn Responder) -> Result<()> {
        let cache = self.volume_by_id(volume)?;
        let done = parts.iter().map(|part| {
            let (object, blocks) = self.blocks_of(&cache, &part)?;
            Ok(RangeDone { held_bytes: cache.classify_blocks(&object, blocks), ..RangeDone::default() })
        });
        let done = RangesDone(done.collect::<Result<_>>()?);
        // One sync for all, before the answer reports success.
        cache.sync_index();
        Self::send_body(&done, responder)
    }

    fn send_body<T: AnswerBody>(value: &T, responder: &mut dyn Responder) -> Result<()> {
        let mut body = BODY.take();
        body.clear();
        value.encode(&mut body);
        let result = responder.send_data(&body, &[]);
        body.shrink_to(64 << 10);
        BODY.set(body);
        result
    }
}

fn removal_done(bytes: RemovedBytes) -> RangeDone {
    RangeDone { moved_bytes: bytes.removed, held_bytes: bytes.kept_pinned, error: None }
}

/// The text of an answer.
fn as_json(answer: &impl serde::Serialize) -> Result<Vec<u8>> {
    serde_json::to_vec(answer).map_err(|error| Error::new(ErrorKind::Protocol, error.to_string()))
}

fn max_age(ms: u32) -> Duration {
    Duration::from_millis(u64::from(ms))
}

/// Sender of a read request.
#[derive(Clone, Copy)]
enum ReadRequester<'a> {
    /// A mount; `may_go_on` permits a redirect to another node.
    Mount { name: &'a str, may_go_on: bool },
    /// Another node; `begins` starts a fetch of a missing block.
    Node { begins: bool },
    /// A mount whose reader comes later, for a missing block.
    Ahead,
}

impl<'a> ReadRequester<'a> {
    fn of(conn: &'a ConnState, flags: ReadFlags) -> Self {
        let begins = flags.contains(ReadFlags::BEGIN_FETCH);
        if flags.contains(ReadFlags::CACHED_ONLY) {
            return ReadRequester::Node { begins };
        }
        if begins {
            return ReadRequester::Ahead;
        }
        ReadRequester::Mount {
            name: conn.peer_name().unwrap_or_default(),
            may_go_on: flags.contains(ReadFlags::MAY_REDIRECT),
        }
    }
}

/// What an answer to a read may say beside the bytes.
#[derive(Clone, Copy)]
struct AnswerTerms {
    /// Several readers want the block.
    hot: bool,
    /// The reader may be redirected to another node.
    may_go_on: bool,
}

/// Sends the bytes; returns their number, or 0 after a redirect.
fn answer_read(
    cache: &Arc<Cache>,
    object: &ObjectRef,
    offset: u64,
    len: usize,
    terms: AnswerTerms,
    responder: &mut dyn Responder,
) -> Result<usize> {
    let hint = if terms.hot { HOT_BODY } else { &[] };
    if let Some(range) = cache.file_range(object, offset, len) {
        return responder.send_file(hint, range.file().as_fd(), range.offset, len).map(|()| len);
    }
    let near = responder.numa_node();
    let pinned = match cache.pin_cached(object, offset, len, near, &mut || responder.before_wait())? {
        PinOutcome::Slice(slice) => Some(slice),
        PinOutcome::Small => None,
        PinOutcome::Missing
            if terms.may_go_on && !cache.has_range(object, offset, len) && cache.redirects_reader(object, offset) =>
        {
            return responder.send_data(REDIRECT_BODY, &[]).map(|()| 0);
        }
        PinOutcome::Missing => {
            responder.before_wait();
            Some(cache.pin_fetched(object, offset, len)?)
        }
    };
    if let Some(slice) = pinned.filter(|slice| slice.len() == len) {
        return responder.send_data(hint, &[&slice]).map(|()| len);
    }
    // On disk, or in several blocks: read into a buffer of the budget.
    responder.before_wait();
    let pool = cache.pool();
    let mut scratch = pool.alloc_near(len, near, Instant::now() + cache.origin_timeout())?;
    match cache.read(object, offset, &mut scratch)? {
        ReadData::Copied(n) => responder.send_data(hint, &[&scratch[..n]])?,
        ReadData::Shared(slice) => responder.send_data(hint, &[&slice])?,
    }
    Ok(len)
}

impl Service for CacheNode {
    fn handle_hello(&self, conn: &ConnState, hello: &HelloRequest<'_>) -> Result<WelcomeAnswer> {
        let volume = if hello.source.is_empty() { VolumeId(u32::MAX) } else { self.volume_for(hello.source)? };
        tracing::debug!(peer = hello.peer, source = hello.source, endpoints = %conn.endpoints(), "a reader connected");
        Ok(WelcomeAnswer {
            version: 0,
            volume,
            block_size: self.shared.block_size,
            node: self.name().to_owned(),
            placement_rule: self.rule.load(Ordering::Relaxed),
            instance: self.instance,
            rails: self.rails.read().clone(),
        })
    }

    fn serve_request(&self, conn: &ConnState, request: NodeRequest<'_>, responder: &mut dyn Responder) -> Result<()> {
        let counted = &self.shared.stats.remotecache;
        counted.served_ops.add(1);
        let result = self.serve_kind(conn, request, responder);
        if result.as_ref().is_err_and(|error| error.kind() == ErrorKind::OriginDown) {
            counted.origin_declines.add(1);
        }
        result
    }
}

impl CacheNode {
    /// Serves a request of a mount that writes, which has `len` bytes.
    fn count_change(&self, len: usize, serve: impl FnOnce() -> Result<()>) -> Result<()> {
        let start = Instant::now();
        let result = serve();
        let counted = &self.shared.stats.writes;
        counted.served_ops.add(1);
        counted.served_bytes.add(len as u64);
        counted.served_us.add_us(start.elapsed());
        result
    }

    fn serve_kind(&self, conn: &ConnState, request: NodeRequest<'_>, responder: &mut dyn Responder) -> Result<()> {
        match request {
            NodeRequest::Read(read) => self.serve_read(&read, ReadRequester::of(conn, read.flags), responder),
            NodeRequest::Lookup { volume, path, max_age_ms } => {
                Self::send_body(&self.volume_by_id(volume)?.lookup_within(path, max_age(max_age_ms))?, responder)
            }
            NodeRequest::FolderMarker { volume, path, max_age_ms } => {
                let marker = [path, b"/"].concat();
                Self::send_body(&self.volume_by_id(volume)?.lookup_within(&marker, max_age(max_age_ms))?, responder)
            }
            NodeRequest::List { volume, path, cursor, max, max_age_ms } => {
                let max = (max as usize).clamp(1, LIST_MAX);
                let page: ListPage = self.volume_by_id(volume)?.list_within(path, cursor, max, max_age(max_age_ms))?;
                Self::send_body(&page, responder)
            }
            NodeRequest::ReadLink { volume, path } => {
                responder.send_data(&self.volume_by_id(volume)?.readlink(path)?, &[])
            }
            NodeRequest::ObjectHeaders { volume, path } => {
                responder.send_data(&self.volume_by_id(volume)?.object_headers(path)?.to_xattr(), &[])
            }
            NodeRequest::StatFs { volume } => {
                let capacity = self.volume_by_id(volume)?.capacity()?;
                let stat = CapacityAnswer {
                    total_bytes: capacity.total_bytes,
                    free_bytes: capacity.free_bytes,
                    total_files: capacity.files,
                    free_files: capacity.files_free,
                };
                Self::send_body(&stat, responder)
            }
            NodeRequest::Classify { volume, parts } => self.classify_parts(volume, parts, responder),
            NodeRequest::Rules { text } => self.exchange_rules(text, responder),
            NodeRequest::Weigh { weight } => {
                let why = "the weight cannot change: the node is starting, or belongs to no group";
                let weigh = self.weigh.get().ok_or_else(|| Error::new(ErrorKind::Unsupported, why))?;
                weigh(weight)?;
                responder.send_data(&[], &[])
            }
            NodeRequest::Describe => responder.send_data(&self.description(), &[]),
            NodeRequest::HeldObjects { after } => {
                responder.send_data(&as_json(&self.held_page(after.map(ObjectId)))?, &[])
            }
            NodeRequest::Info { volume, path } => {
                let info = self.volume_by_id(volume)?.info(path)?;
                let document = serde_json::to_vec(&info).map_err(|error| {
                    Error::new(ErrorKind::Invalid, format!("the file's description is no JSON: {error}"))
                })?;
                responder.send_data(&document, &[])
            }
            NodeRequest::Warm { volume, verify, parts } => self.warm_parts(volume, verify, parts, responder),
            NodeRequest::Drop { volume, with_pinned, parts } => self.drop_parts(volume, with_pinned, parts, responder),
            NodeRequest::DropAll { volume, every_source, with_pinned, part } => {
                responder.before_wait();
                let dropped = self.volume_by_id(volume)?.drop_part(part as usize, every_source, with_pinned);
                Self::send_body(&RangesDone(dropped.map(removal_done).into_iter().collect()), responder)
            }
            NodeRequest::Write(write) => self.count_change(write.payload.len(), || self.serve_write(&write, responder)),
            NodeRequest::Store(store) => self.count_change(store.payload.len(), || self.serve_store(&store, responder)),
            NodeRequest::Stage(stage) => self.serve_stage(&stage, responder),
            other => Err(Error::new(ErrorKind::Unsupported, format!("{other} is not served here"))),
        }
    }
}

/// Whether `source`, a normal URL, is the source `allowed` or a folder of it.
fn is_at_or_below(source: &str, allowed: &str) -> bool {
    let rest = source.strip_prefix(spurline_object_store::normal_url(allowed).trim_end_matches('/'));
    rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

fn volume_index(volumes: &[Arc<Cache>], source: &str) -> Option<usize> {
    volumes.iter().position(|volume| volume.source() == source)
}
