//! Staged files of a node: the disks, the other nodes and the registry, as the stage needs them. Knows no flag.

use crate::group::NodeGroup;
use crate::setup;
use spurline_client::{NodeCallFailure, NodeCalls};
use spurline_config::{Fault, NodeConfig};
use spurline_membership::{GroupRecord, RecordName, Registry, RegistryFollower};
use spurline_node::{CacheNode, FolderRule, StageHandler, StageReply, WriteClass};
use spurline_object_store::{
    HeldBucket, OriginOptions, SharedBuckets, SourceLocation, SourceRequests, SourceScheme, open_bucket,
};
use spurline_stage::{
    FolderDisk, PeerFailure, StageClass, StageParts, StagePeers, StageService, StageSlot, StageSpace, StagedBackend,
    TermFacts, TermRecord,
};
use spurline_types::{Error, ErrorKind, Result, Stats};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

/// How long scratch files stay.
const SCRATCH_TTL_S: u64 = 7 * 24 * 3600;
/// Uploads of a leader at once.
const UPLOADS: usize = 8;
/// How long the stop of a node waits for uploads.
const STOP_TIME: Duration = Duration::from_secs(20);
/// How often the node says to mounts whether files can be staged.
const ANNOUNCE_INTERVAL: Duration = Duration::from_secs(1);

/// Most memory of the bytes that a node sends to the store for the group, and its share of --buffer-size.
const UPLOAD_MEMORY: u64 = 64 << 20;
const UPLOAD_SHARE: u64 = 8;

/// The memory of uploads of staged files, a part of --buffer-size.
pub fn upload_memory(config: &NodeConfig) -> u64 {
    if config.stage.is_some() { UPLOAD_MEMORY.min(config.budget.total / UPLOAD_SHARE) } else { 0 }
}

/// The stage of a node, before and after its start.
pub struct NodeStage {
    slot: Arc<StageSlot>,
    /// The rules of folders.
    node: Arc<OnceLock<Weak<CacheNode>>>,
    /// How the stores are reached below the stage.
    direct: OriginOptions,
    _held: Vec<HeldBucket>,
}

/// Has all origins of the node's buckets use the stage. Without a registry that keeps terms, nothing is staged, and the result is `None`.
///
/// # Errors
/// For an impossible configuration.
pub fn prepare_stage(
    config: &NodeConfig,
    buckets: &SharedBuckets,
    stats: &Arc<Stats>,
) -> Result<Option<NodeStage>, Fault> {
    if config.group.is_none() {
        return Ok(None);
    }
    let direct = setup::origin_options(&config.under, &SharedBuckets::default());
    let shared = setup::origin_options(&config.under, buckets);
    let slot = Arc::<StageSlot>::default();
    let node = Arc::new(OnceLock::<Weak<CacheNode>>::new());
    let mut held = Vec::new();
    for source in &config.sources {
        let location = SourceLocation::parse(source.as_str())?;
        if location.scheme() != SourceScheme::S3 {
            continue;
        }
        let bucket = format!("{}{}", location.scheme().url_start(), location.bucket());
        let below = open_bucket(&location, &direct, Arc::clone(stats))?;
        let Some(inner) = below.backend.try_clone() else { continue };
        let rules = Arc::clone(&node);
        let url = bucket.clone();
        let class_of = Arc::new(move |key: &str| {
            let node = rules.get().and_then(Weak::upgrade)?;
            node.with_folder_rule(&url, key, class_of)
        });
        let staged = StagedBackend::new(inner, Arc::clone(&slot), &bucket, class_of);
        held.push(buckets.open_over(&location, &shared, Arc::clone(stats), Box::new(staged))?);
    }
    Ok((!held.is_empty()).then_some(NodeStage { slot, node, direct, _held: held }))
}

/// How long new files of a folder stay with the group.
fn class_of(rule: Option<&FolderRule>) -> Option<StageClass> {
    let rule = rule?;
    match rule.write_class() {
        WriteClass::Direct => None,
        WriteClass::Staged => Some(StageClass::Staged),
        WriteClass::Scratch => Some(StageClass::Scratch {
            ttl_s: rule.ttl_seconds.unwrap_or(SCRATCH_TTL_S),
            quota: rule.quota_bytes.unwrap_or(u64::MAX),
            folder: StageClass::folder_number(&rule.url),
        }),
    }
}

impl NodeStage {
    /// The node has its rules, and answers soon: a node with disks for staged files knows names only when the stage runs. Calls wait for
    /// that, and are not refused for ever.
    pub fn set_node(&self, node: &Arc<CacheNode>, config: &NodeConfig) {
        let _ = self.node.set(Arc::downgrade(node));
        if config.stage.is_some() {
            self.slot.await_start();
            node.accept_stage(Arc::new(StageCalls(Arc::clone(&self.slot))));
        }
    }

    /// Starts the stage, in a group whose registry keeps terms.
    ///
    /// # Errors
    /// When the disks can't be used.
    pub fn start(
        &self,
        config: &NodeConfig,
        name: &str,
        node: &Arc<CacheNode>,
        group: &NodeGroup,
        stats: &Arc<Stats>,
    ) -> Result<Option<RunningStage>, Fault> {
        let Some(record) = GroupTermRecord::open(&group.registry) else { return Ok(None) };
        let space = match &config.stage {
            Some(stage) => Some(StageSpace {
                domain: stage.failure_domain.clone(),
                size: stage.size_bytes,
                disk: Arc::new(FolderDisk::open(&config.cache.dirs)?),
            }),
            None => None,
        };
        if let Some(stage) = &config.stage {
            stats.stage.size_bytes.set(stage.size_bytes);
            tracing::info!(
                "staged files: up to {} bytes here, in failure domain {}",
                stage.size_bytes,
                stage.failure_domain
            );
        }
        let direct = self.direct.clone();
        let counted = Arc::clone(stats);
        let service = StageService::start(StageParts {
            name: name.to_owned(),
            space,
            peers: Arc::new(GroupPeers {
                calls: Arc::clone(&group.calls),
                follower: Arc::clone(&group.follower),
                block_size: config.cache.block_size,
            }),
            record: Arc::new(record),
            open_store: Box::new(move |bucket| SourceRequests::open(bucket, &direct, Arc::clone(&counted))),
            stats: Arc::clone(stats),
            uploads: UPLOADS,
            upload_memory: upload_memory(config),
        })?;
        self.slot.set(Arc::clone(&service));
        node.accept_stage(Arc::new(StageCalls(Arc::clone(&self.slot))));
        announce_stage(&service, node, stats)?;
        Ok(Some(RunningStage(service)))
    }
}

/// Whether the node has kept staged files on these disks before: its store may be away at the start, and the group needs the files.
pub fn has_kept_files(config: &NodeConfig) -> bool {
    config.stage.is_some() && FolderDisk::has_records(&config.cache.dirs)
}

/// Starts the stage of a node that is in a group.
///
/// # Errors
/// As [`NodeStage::start`].
pub fn start_stage(
    staging: Option<&NodeStage>,
    config: &NodeConfig,
    name: &str,
    node: &Arc<CacheNode>,
    group: Option<&NodeGroup>,
    stats: &Arc<Stats>,
) -> Result<Option<RunningStage>, Fault> {
    match (staging, group) {
        (Some(staging), Some(group)) => staging.start(config, name, node, group, stats),
        _ => Ok(None),
    }
}

/// A running stage.
pub struct RunningStage(Arc<StageService>);

impl RunningStage {
    /// Waits for uploads, and counts the files that are left.
    pub fn stop(self) {
        if self.0.kept_objects() > 0 {
            tracing::info!("{} staged files of this node wait for their upload", self.0.kept_objects());
        }
        let left = self.0.drain(STOP_TIME);
        self.0.stop();
        if left > 0 {
            tracing::warn!(
                "{left} staged files on this node's disks are not uploaded: the other nodes of the group go on, and this one \
                 does when started again; 'spurline status --unsaved' lists these files"
            );
        }
    }
}

/// Tells mounts whether files can be staged, and follows the node's weight, while the node runs.
fn announce_stage(service: &Arc<StageService>, node: &Arc<CacheNode>, stats: &Arc<Stats>) -> Result<(), Fault> {
    let service = Arc::downgrade(service);
    let node = Arc::downgrade(node);
    let stats = Arc::clone(stats);
    let spawned = std::thread::Builder::new().name("stage-state".into()).spawn(move || {
        while let (Some(service), Some(node)) = (service.upgrade(), node.upgrade()) {
            node.set_stages(service.can_stage());
            // Of weight 0: drained.
            service.set_closed(stats.group.weight.get() == 0);
            drop((service, node));
            std::thread::sleep(ANNOUNCE_INTERVAL);
        }
    });
    spawned.map(drop).map_err(|e| Error::io("can't start a thread", &e).into())
}

/// Calls of other nodes.
struct StageCalls(Arc<StageSlot>);

impl StageHandler for StageCalls {
    fn serve(&self, call: &[u8], payload: &[u8]) -> Result<StageReply> {
        let (body, payload) = self.0.serve_encoded(call, payload)?;
        Ok(StageReply { body, payload })
    }
}

/// The other nodes.
struct GroupPeers {
    calls: Arc<NodeCalls>,
    follower: Arc<RegistryFollower>,
    block_size: u64,
}

impl StagePeers for GroupPeers {
    fn names(&self) -> Vec<String> {
        let members = self.follower.group_status().members.into_iter();
        members.filter(|placed| placed.present).map(|placed| placed.member.name.clone()).collect()
    }

    fn frame_len(&self) -> usize {
        (4 << 20).min(self.block_size as usize)
    }

    fn call(
        &self,
        node: &str,
        call: &[u8],
        bytes: &[u8],
        room: usize,
        deadline: Instant,
    ) -> Result<(Vec<u8>, Vec<u8>), PeerFailure> {
        call_peer(&self.calls, node, call, bytes, room, deadline)
    }
}

/// Sends a call about staged files to a node.
///
/// # Errors
/// Why there is no answer.
pub(crate) fn call_peer(
    calls: &NodeCalls,
    node: &str,
    call: &[u8],
    bytes: &[u8],
    room: usize,
    deadline: Instant,
) -> Result<(Vec<u8>, Vec<u8>), PeerFailure> {
    let reply = calls.call(node, call, bytes, room, deadline);
    reply.map(|reply| (reply.body, reply.payload)).map_err(|failure| match failure {
        NodeCallFailure::NotSent(error) => PeerFailure::NotSent(error),
        NodeCallFailure::Lost(error) => PeerFailure::Lost(error),
        NodeCallFailure::Answered(error) => PeerFailure::Answered(error),
    })
}

/// The record of the registry.
struct GroupTermRecord(Box<dyn GroupRecord>);

impl GroupTermRecord {
    fn open(registry: &Arc<dyn Registry>) -> Option<GroupTermRecord> {
        registry.group_record(RecordName::Stage).map(GroupTermRecord)
    }
}

impl TermRecord for GroupTermRecord {
    fn read(&self) -> Result<(u64, TermFacts)> {
        let Some(stored) = self.0.read(None)? else {
            return Err(Error::new(ErrorKind::Protocol, "the registry returned no record"));
        };
        let facts = if stored.value.is_null() {
            TermFacts::default()
        } else {
            serde_json::from_value(stored.value).map_err(|error| {
                Error::new(ErrorKind::Invalid, format!("the registry's record of staged files: {error}"))
            })?
        };
        Ok((stored.version, facts))
    }

    fn replace(&self, version: u64, facts: &TermFacts) -> Result<bool> {
        let value = serde_json::to_value(facts)
            .map_err(|error| Error::new(ErrorKind::Invalid, format!("the record of staged files: {error}")))?;
        self.0.replace(version, &value)
    }
}
