//! What all parts of a node's stage use: the other nodes, the stores, the node's own disks; and the calls that any node answers.

use crate::holder::{Holder, READ_MAX};
use crate::manifest::{BucketKey, Manifest, Piece, Slice, StoreBase};
use crate::message::{Answer, NodeFacts, Reply, StageCall, StageReply, unexpected};
use crate::peers::{PeerFailure, StagePeers, call_node, failure_of, first_bytes, no_leader, reply_of, succeeded};
use bytes::Bytes;
use parking_lot::{Condvar, Mutex};
use spurline_object_store::{
    AnswerProgress, BucketSides, ObjectAttributes, ObjectBody, RequestFailure, SourceRequests, StoredObject,
    WriteCondition, transfer_time,
};
use spurline_sys::random;
use spurline_types::{Error, ErrorKind, Result, Stats};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Opens the requests to a bucket that pass by the stage.
pub type OpenStore = dyn Fn(&str) -> Result<SourceRequests> + Send + Sync;

/// The time of a call without many bytes.
pub const STAGE_CALL_TIME: Duration = Duration::from_secs(5);
/// The time of a request to the store, beside that of the bytes.
const STORE_TIME: Duration = Duration::from_secs(60);

/// The memory of the bytes that this node sends to the store.
pub struct UploadMemory {
    size: u64,
    used: Mutex<u64>,
    freed: Condvar,
}

/// A share of the memory, returned when dropped.
struct UploadShare<'a> {
    memory: &'a UploadMemory,
    bytes: u64,
}

impl Drop for UploadShare<'_> {
    fn drop(&mut self) {
        *self.memory.used.lock() -= self.bytes;
        self.memory.freed.notify_all();
    }
}

impl UploadMemory {
    /// Memory of this many bytes.
    pub fn new(size: u64) -> UploadMemory {
        UploadMemory { size, used: Mutex::new(0), freed: Condvar::new() }
    }

    /// Waits for memory. A body that is larger than all waits until no other has a share.
    fn take(&self, bytes: u64) -> UploadShare<'_> {
        let bytes = bytes.min(self.size);
        let mut used = self.used.lock();
        while *used + bytes > self.size {
            self.freed.wait(&mut used);
        }
        *used += bytes;
        UploadShare { memory: self, bytes }
    }
}

/// See the head of this file.
pub struct StageShared {
    /// The name of this node.
    pub name: String,
    /// The objects of this node; `None` without disks for staged objects.
    pub holder: Option<Holder>,
    /// The other nodes.
    pub peers: Arc<dyn StagePeers>,
    /// Counters.
    pub stats: Arc<Stats>,
    /// The memory of uploads.
    pub upload_memory: UploadMemory,
    /// Opens stores.
    pub open_store: Box<OpenStore>,
    /// By bucket.
    pub stores: Mutex<HashMap<String, Arc<SourceRequests>>>,
}

/// A mark, or a name of a part.
pub fn new_name() -> String {
    format!("{:016x}{:016x}", random(), random())
}

impl StageShared {
    /// Sends a call to any node, this node too.
    ///
    /// # Errors
    /// Why there is no answer.
    pub fn call(
        self: &Arc<Self>,
        node: &str,
        call: &StageCall,
        bytes: &[u8],
        time: Duration,
    ) -> std::result::Result<Reply, PeerFailure> {
        if node == self.name {
            return Ok(reply_of(self.serve(call.clone(), bytes)));
        }
        let room = match call {
            StageCall::ReadPart { len, .. } => (*len).min(READ_MAX) as usize,
            StageCall::ReadInline { .. } => READ_MAX as usize,
            _ => 0,
        };
        call_node(&*self.peers, node, call, bytes, room, Instant::now() + time)
    }

    /// Has a node refuse earlier leaders; the node's facts, and all that the node keeps.
    ///
    /// # Errors
    /// Of the way, or of the calls.
    pub fn fence(self: &Arc<Self>, node: &str, term: u64) -> Answer<(NodeFacts, Vec<Manifest>)> {
        let call = StageCall::Fence { term, leader: self.name.clone() };
        let facts = match self.ask(node, &call, &[], STAGE_CALL_TIME)?.reply {
            StageReply::Facts(facts) => facts,
            other => return Err(unexpected(&other)),
        };
        let mut all: Vec<Manifest> = Vec::new();
        loop {
            let after = all.last().map_or_else(String::new, |manifest| manifest.record.clone());
            match self.ask(node, &StageCall::ListKept { after }, &[], STAGE_CALL_TIME)?.reply {
                StageReply::Kept(some, has_more) => {
                    let is_empty = some.is_empty();
                    all.extend(some);
                    if !has_more || is_empty {
                        return Ok((facts, all));
                    }
                }
                other => return Err(unexpected(&other)),
            }
        }
    }

    /// As [`Self::call`], where any failure is that of the request.
    ///
    /// # Errors
    /// Of the way, or of the call.
    pub fn ask(self: &Arc<Self>, node: &str, call: &StageCall, bytes: &[u8], time: Duration) -> Answer<Reply> {
        succeeded(self.call(node, call, bytes, time)?)
    }

    fn holder(&self) -> Answer<&Holder> {
        self.holder.as_ref().ok_or_else(|| {
            let why = format!("node {} keeps no staged files: start it with --stage-size", self.name);
            RequestFailure::fatal(ErrorKind::Unsupported, why)
        })
    }

    /// Answers a call to any node.
    ///
    /// # Errors
    /// That of the call.
    pub fn serve(self: &Arc<Self>, call: StageCall, bytes: &[u8]) -> Answer<Reply> {
        match call {
            StageCall::Fence { term, .. } => self.holder()?.fence(term),
            StageCall::ListKept { after } => Ok(self.holder()?.list_kept(&after)),
            StageCall::Describe { term, .. } => {
                let Some(holder) = &self.holder else {
                    return Ok(StageReply::Facts(NodeFacts {
                        domain: String::new(),
                        size: 0,
                        used: 0,
                        process: 0,
                        disk: 0,
                    })
                    .into());
                };
                if term < holder.term() {
                    return Ok(StageReply::OldTerm(holder.term()).into());
                }
                Ok(StageReply::Facts(holder.facts()).into())
            }
            StageCall::AppendPart { part, offset, is_last } => {
                self.holder()?.append_part(&part, offset, bytes, is_last)
            }
            StageCall::ReadPart { part, from, len } => self.holder()?.read_part(&part, from, len),
            StageCall::LinkParts(names) => self.holder()?.link_parts(&names),
            StageCall::SendPart { part, to } => self.send_part(&part, &to),
            StageCall::Hold { term, manifest } => self.holder()?.hold(term, *manifest, bytes),
            StageCall::ReadInline { record } => self.holder()?.read_inline(&record),
            StageCall::SetPhases { term, records, phase } => self.holder()?.set_phases(term, &records, phase),
            StageCall::Forget { term, records } => self.holder()?.forget(term, &records),
            StageCall::DropUpload(upload) => self.holder()?.drop_upload(&upload),
            StageCall::PutAtStore { manifest, condition, term } => self.put_at_store(&manifest, &condition, term),
            StageCall::UploadAtStore { at, upload, number, piece } => {
                self.upload_at_store(&at, &upload, number, &piece)
            }
            for_leader => {
                debug_assert!(for_leader.is_for_leader(), "{for_leader:?}");
                Ok(StageReply::NotLeader(None).into())
            }
        }
    }

    /// The requests to a bucket that pass by the stage.
    ///
    /// # Errors
    /// When the store can't be opened.
    pub fn store(&self, bucket: &str) -> Answer<Arc<SourceRequests>> {
        if let Some(open) = self.stores.lock().get(bucket) {
            return Ok(Arc::clone(open));
        }
        let opened = Arc::new((self.open_store)(bucket).map_err(failure_of)?);
        Ok(Arc::clone(self.stores.lock().entry(bucket.to_owned()).or_insert(opened)))
    }

    /// Sends a request to the store.
    ///
    /// # Errors
    /// The store's.
    pub fn at_store<T>(
        &self,
        bucket: &str,
        more_time: Duration,
        request: impl AsyncFnOnce(BucketSides<'_>) -> Answer<T>,
    ) -> Answer<T> {
        self.store(bucket)?.send(STORE_TIME + more_time, &AnswerProgress::default(), request)
    }

    /// The object of the store; `None` without one.
    ///
    /// # Errors
    /// The store's.
    pub fn head_at_store(&self, at: &BucketKey) -> Answer<Option<StoredObject>> {
        let found = self.at_store(&at.bucket, Duration::ZERO, async |sides| sides.writes.head_all(&at.key).await);
        match found {
            Err(failure) if failure.error.kind() == ErrorKind::NotFound => Ok(None),
            found => found.map(Some),
        }
    }

    fn put_at_store(self: &Arc<Self>, manifest: &Manifest, condition: &StoreBase, term: u64) -> Answer<Reply> {
        let _share = self.upload_memory.take(manifest.size);
        let bytes = self.read_manifest(manifest)?;
        if self.holder()?.term() > term {
            return Err(no_leader());
        }
        let attributes = ObjectAttributes::from(&manifest.attributes);
        let condition = WriteCondition::from(condition);
        let body = ObjectBody::new(bytes);
        let put =
            async |sides: BucketSides<'_>| sides.writes.put(&manifest.at.key, body, &attributes, &condition).await;
        let etag = self.at_store(&manifest.at.bucket, transfer_time(manifest.size), put)?;
        Ok(StageReply::Text(etag).into())
    }

    fn upload_at_store(self: &Arc<Self>, at: &BucketKey, upload: &str, number: u32, piece: &Piece) -> Answer<Reply> {
        let _share = self.upload_memory.take(piece.size());
        let body = ObjectBody::new(self.read_piece(piece)?);
        let send = async |sides: BucketSides<'_>| sides.writes.upload_part(&at.key, upload, number, body).await;
        let etag = self.at_store(&at.bucket, transfer_time(piece.size()), send)?;
        Ok(StageReply::Text(etag).into())
    }

    /// All bytes of a small object, or of an object with a single piece.
    ///
    /// # Errors
    /// When no holder has them.
    pub fn read_manifest(self: &Arc<Self>, manifest: &Manifest) -> Answer<Bytes> {
        if !manifest.pieces.is_empty() {
            let all = Piece { slices: manifest.pieces.iter().flat_map(|piece| piece.slices.clone()).collect() };
            return self.read_piece(&all);
        }
        if manifest.size == 0 {
            return Ok(Bytes::new());
        }
        let call = StageCall::ReadInline { record: manifest.record.clone() };
        self.first_bytes(&manifest.holders, &call, manifest.size).map(Bytes::from)
    }

    fn read_piece(self: &Arc<Self>, piece: &Piece) -> Answer<Bytes> {
        let mut all = Vec::with_capacity(piece.size() as usize);
        for slice in &piece.slices {
            let mut done = 0;
            while done < slice.len {
                let part = self.read_slice(slice, done, (slice.len - done).min(READ_MAX))?;
                done += part.len() as u64;
                all.extend_from_slice(&part);
            }
        }
        Ok(all.into())
    }

    /// Bytes of a slice, from the first holder that has them: this node, if possible.
    ///
    /// # Errors
    /// When no holder has them.
    pub fn read_slice(self: &Arc<Self>, slice: &Slice, from: u64, len: u64) -> Answer<Vec<u8>> {
        let call = StageCall::ReadPart { part: slice.part.clone(), from: slice.from + from, len };
        self.first_bytes(&slice.holders, &call, len)
    }

    fn first_bytes(self: &Arc<Self>, holders: &[String], call: &StageCall, len: u64) -> Answer<Vec<u8>> {
        let own = holders.iter().filter(|node| **node == self.name);
        let others = holders.iter().filter(|node| **node != self.name);
        // The leader may know other holders, or the store may have the object by now. No kind of the store's answers: an upload would
        // take `NotFound` for one.
        first_bytes(own.chain(others), len, |node| self.ask(node, call, &[], STAGE_CALL_TIME))
            .map_err(|failure| RequestFailure::transient(ErrorKind::Unavailable, failure.error.message().to_owned()))
    }

    /// Writes a part at a node.
    ///
    /// # Errors
    /// The node's.
    pub fn write_part(self: &Arc<Self>, node: &str, part: &str, pieces: &[Bytes]) -> Answer<()> {
        let total: usize = pieces.iter().map(Bytes::len).sum();
        let mut offset = 0;
        if total == 0 {
            let call = StageCall::AppendPart { part: part.to_owned(), offset: 0, is_last: true };
            self.ask(node, &call, &[], part_time(true))?;
        }
        for piece in pieces {
            for frame in piece.chunks(self.peers.frame_len()) {
                let is_last = offset + frame.len() == total;
                let call = StageCall::AppendPart { part: part.to_owned(), offset: offset as u64, is_last };
                self.ask(node, &call, frame, part_time(is_last))?;
                offset += frame.len();
            }
        }
        Ok(())
    }

    /// Sends a part of this node to another node.
    fn send_part(self: &Arc<Self>, part: &str, to: &str) -> Answer<Reply> {
        let holder = self.holder()?;
        let len = holder.part_len(part)?;
        let mut offset = 0;
        if len == 0 {
            return self.write_part(to, part, &[]).map(|()| StageReply::Done.into());
        }
        while offset < len {
            let Reply { bytes, .. } =
                holder.read_part(part, offset, (len - offset).min(self.peers.frame_len() as u64))?;
            let is_last = offset + bytes.len() as u64 == len;
            let call = StageCall::AppendPart { part: part.to_owned(), offset, is_last };
            self.ask(to, &call, &bytes, part_time(is_last))?;
            offset += bytes.len() as u64;
        }
        Ok(StageReply::Done.into())
    }
}

/// The time of a call with bytes of a part: the disk is synced with the last ones.
fn part_time(is_last: bool) -> Duration {
    if is_last { 2 * STAGE_CALL_TIME } else { STAGE_CALL_TIME }
}

/// The etag in an answer.
///
/// # Errors
/// For another answer.
pub fn text_of(reply: Reply) -> Answer<String> {
    match reply.reply {
        StageReply::Text(text) => Ok(text),
        other => Err(unexpected(&other)),
    }
}

/// The failure of a call whose thread has ended.
pub fn thread_ended() -> RequestFailure {
    RequestFailure::transient(ErrorKind::Unavailable, "the thread of a call ended".to_owned())
}

/// The failure of a condition.
pub fn stale(at: &BucketKey) -> RequestFailure {
    let why = format!("'{}' has been replaced or removed since", at.key);
    RequestFailure { error: Error::new(ErrorKind::Stale, why), advice: spurline_object_store::RetryHint::Never }
}
