//! The bytes of staged objects: where a part goes, how uploads are named, and how bytes are read.

use super::{StagedBackend, time_at};
use crate::lapsing::call_upload;
use crate::manifest::{KeptAttributes, Manifest, Piece, Slice, StageClass, staged_mark};
use crate::message::{Answer, KnownName, StageCall};
use crate::service::StageService;
use crate::shared::{STAGE_CALL_TIME, new_name, thread_ended};
use bytes::Bytes;
use futures::StreamExt as _;
use serde::{Deserialize, Serialize};
use spurline_object_store::{CopySource, ObjectBackend as _, ObjectBody, RawBody, RequestFailure, bare_etag};
use spurline_types::{ErrorKind, STAGED_UPLOAD};
use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;

/// Nodes that are tried for a part.
const PLACE_TRIES: usize = 4;
/// Bytes that are read at once.
const READ_LEN: u64 = 4 << 20;

/// An upload to the group. The id has everything, so that no node keeps anything of an upload but its parts.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct StagedUpload {
    /// Names the parts.
    pub id: String,
    /// The attributes of the object.
    pub attributes: KeptAttributes,
    /// How long the object stays.
    pub class: StageClass,
}

impl StagedUpload {
    /// A new upload.
    pub fn new(attributes: KeptAttributes, class: StageClass) -> StagedUpload {
        StagedUpload { id: new_name(), attributes, class }
    }

    /// The upload of a single call.
    pub fn of_call(attributes: KeptAttributes, class: StageClass) -> StagedUpload {
        StagedUpload { id: call_upload(&new_name()), attributes, class }
    }

    /// The id by which the writer names the upload.
    pub fn to_id(&self) -> String {
        let text = serde_json::to_string(self).unwrap_or_default();
        let digits: String = text.bytes().map(|byte| format!("{byte:02x}")).collect();
        format!("{STAGED_UPLOAD}{digits}")
    }

    /// The upload of an id; `None` for an upload of the store.
    ///
    /// # Errors
    /// For an id that no node has given.
    pub fn from_id(id: &str) -> Answer<Option<StagedUpload>> {
        let Some(digits) = id.strip_prefix(STAGED_UPLOAD) else { return Ok(None) };
        let pairs = digits.as_bytes().chunks(2);
        let bytes: Option<Vec<u8>> =
            pairs.map(|pair| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()).collect();
        let upload = bytes.and_then(|bytes| serde_json::from_slice(&bytes).ok());
        upload.map(Some).ok_or_else(|| RequestFailure::fatal(ErrorKind::NotFound, "there is no such upload".to_owned()))
    }
}

/// The etag of a part: where the bytes lie.
///
/// # Errors
/// Never.
pub fn etag_of(piece: &Piece) -> Answer<String> {
    serde_json::to_string(&piece.slices).map_err(|error| RequestFailure::fatal(ErrorKind::Invalid, error.to_string()))
}

/// The part of an etag.
///
/// # Errors
/// For an etag that no node has given.
pub fn piece_of(etag: &str) -> Answer<Piece> {
    let slices = serde_json::from_str(etag);
    slices
        .map(|slices| Piece { slices })
        .map_err(|_| RequestFailure::fatal(ErrorKind::Invalid, "a part that no node has staged".to_owned()))
}

impl StageService {
    /// The nodes that keep objects, as far as this node knows.
    pub fn holders(&self) -> Vec<String> {
        self.known_nodes().into_iter().map(|(node, _)| node).collect()
    }

    /// Stores a part at nodes of as many failure domains as the class demands, this node first.
    fn place_part(self: &Arc<Self>, upload: &StagedUpload, pieces: &[Bytes]) -> Answer<Piece> {
        let wanted = upload.class.domains();
        let part = format!("{}-{}", upload.id, new_name());
        let mut left = self.known_nodes();
        let start = spurline_sys::random() as usize % left.len().max(1);
        left.rotate_left(start);
        left.sort_by_key(|(node, _)| (self.has_refused_part(node), *node != self.shared().name));
        let mut holders: Vec<String> = Vec::new();
        let mut domains: BTreeSet<String> = BTreeSet::new();
        let mut last = None;
        for _ in 0..PLACE_TRIES {
            let chosen = choose(&left, &domains, wanted - domains.len());
            if chosen.is_empty() {
                break;
            }
            left.retain(|(node, _)| !chosen.iter().any(|(taken, _)| taken == node));
            for ((node, domain), written) in self.write_at(&chosen, &part, pieces) {
                match written {
                    Ok(()) => {
                        holders.push(node);
                        domains.insert(domain);
                    }
                    Err(failure) => {
                        self.note_refused_part(&node);
                        last = Some(failure);
                    }
                }
            }
            if domains.len() >= wanted {
                let len = pieces.iter().map(|piece| piece.len() as u64).sum();
                return Ok(Piece { slices: vec![Slice { part, from: 0, len, holders }] });
            }
        }
        Err(last.unwrap_or_else(too_few_nodes))
    }

    /// Writes a part at several nodes at once.
    fn write_at(
        self: &Arc<Self>,
        nodes: &[(String, String)],
        part: &str,
        pieces: &[Bytes],
    ) -> Vec<((String, String), Answer<()>)> {
        let shared = self.shared();
        std::thread::scope(|scope| {
            let started: Vec<_> = nodes
                .iter()
                .skip(1)
                .map(|node| (node, scope.spawn(move || shared.write_part(&node.0, part, pieces))))
                .collect();
            let own = nodes.first().map(|node| (node.clone(), shared.write_part(&node.0, part, pieces)));
            let others = started
                .into_iter()
                .map(|(node, thread)| (node.clone(), thread.join().unwrap_or_else(|_| Err(thread_ended()))));
            own.into_iter().chain(others).collect()
        })
    }
}

fn too_few_nodes() -> RequestFailure {
    let why = "no two nodes of different failure domains keep staged files now: start nodes with --stage-size";
    RequestFailure::transient(ErrorKind::Unavailable, why.to_owned())
}

/// Nodes of further failure domains, at most `count`.
fn choose(nodes: &[(String, String)], domains: &BTreeSet<String>, count: usize) -> Vec<(String, String)> {
    let mut seen = domains.clone();
    let new = nodes.iter().filter(|(_, domain)| seen.insert(domain.clone()));
    new.take(count).cloned().collect()
}

impl StagedBackend {
    pub(super) async fn place(&self, upload: &StagedUpload, pieces: Vec<Bytes>) -> Answer<Piece> {
        let upload = upload.clone();
        self.run_apart(move |service| service.place_part(&upload, &pieces)).await
    }

    /// Has the nodes remove the parts of an upload that no manifest names. Nothing waits for that.
    pub(super) fn drop_upload(&self, id: String) {
        let Ok(service) = self.stage.service().map(Arc::clone) else { return };
        let ask_all = move || {
            let call = StageCall::DropUpload(id);
            for node in service.holders() {
                // What stays is removed by its age.
                let _ = service.shared().ask(&node, &call, &[], STAGE_CALL_TIME);
            }
        };
        drop(tokio::task::spawn_blocking(ask_all));
    }

    /// Bytes of a staged object, read as they are asked for.
    pub(super) fn body_of(&self, manifest: Manifest, from: u64, to: u64) -> Answer<RawBody> {
        let end = to.min(manifest.size);
        let etag = manifest.etag();
        let mtime = time_at(manifest.closed_s);
        let total = manifest.size;
        let service = Arc::clone(self.stage.service()?);
        let manifest = Arc::new(manifest);
        let stream = futures::stream::unfold(from, move |at| {
            let service = Arc::clone(&service);
            let manifest = Arc::clone(&manifest);
            let reader = Arc::clone(&service);
            let version = manifest.etag();
            async move {
                if at >= end {
                    return None;
                }
                let read = tokio::task::spawn_blocking(move || read_some(&service, &manifest, at, end)).await;
                let read = read.unwrap_or_else(|_| Err(thread_ended()));
                if read.is_err() {
                    reader.forget_located(&version);
                }
                let next = read.as_ref().map_or(end, |bytes| at + bytes.len() as u64);
                Some((read, next))
            }
        });
        Ok(RawBody {
            etag: Some(etag),
            mtime: Some(mtime),
            total: Some(total),
            range: Some(from..end),
            partial: true,
            stream: stream.boxed(),
        })
    }

    /// Makes a part from bytes of an object.
    pub(super) async fn copy_any_part(
        &self,
        key: &str,
        upload: &str,
        number: u32,
        from: CopySource<'_>,
        range: Range<u64>,
    ) -> Answer<String> {
        let source = self.staged_source(from).await?;
        let Some(staged) = StagedUpload::from_id(upload)? else {
            if source.is_none() {
                let real = self.real_source(from).await?;
                let from = CopySource { key: from.key, etag: real.as_deref() };
                return self.store()?.copy_part(key, upload, number, from, range).await;
            }
            let bytes = self.read_range(from, range).await?;
            return self.store()?.upload_part(key, upload, number, ObjectBody::new(bytes.concat().into())).await;
        };
        let piece = match source {
            Some(manifest) if !manifest.pieces.is_empty() => {
                self.run_apart(move |service| service.link_range(&staged, &manifest, range)).await?
            }
            _ => self.place(&staged, self.read_range(from, range).await?).await?,
        };
        etag_of(&piece)
    }

    /// The source of a copy, if it is staged.
    async fn staged_source(&self, from: CopySource<'_>) -> Answer<Option<Manifest>> {
        let known = self.find(from.key).await?;
        let wanted = from.etag.map(|etag| bare_etag(etag).to_owned());
        Ok(match known {
            KnownName::Object(manifest) if wanted.is_none_or(|etag| etag == manifest.etag()) => Some(*manifest),
            _ => None,
        })
    }

    async fn real_source(&self, from: CopySource<'_>) -> Answer<Option<String>> {
        match from.etag {
            Some(etag) if staged_mark(etag).is_some() => self.real_version(from.key, etag).await,
            other => Ok(other.map(str::to_owned)),
        }
    }

    /// Bytes of any object.
    async fn read_range(&self, from: CopySource<'_>, range: Range<u64>) -> Answer<Vec<Bytes>> {
        let mut body = self.get(from.key, range.start, range.end, from.etag).await?;
        let mut pieces = Vec::new();
        let mut len = 0;
        while let Some(piece) = body.stream.next().await {
            let piece = piece?;
            len += piece.len() as u64;
            pieces.push(piece);
        }
        if len != range.end - range.start {
            let why = format!("a read of '{}' ended early", from.key);
            return Err(RequestFailure::transient(ErrorKind::Unavailable, why));
        }
        Ok(pieces)
    }
}

/// Some bytes of a staged object from `at` on.
fn read_some(service: &Arc<StageService>, manifest: &Manifest, at: u64, end: u64) -> Answer<Bytes> {
    let shared = service.shared();
    if manifest.pieces.is_empty() {
        let all = shared.read_manifest(manifest)?;
        return Ok(all.slice(at as usize..end as usize));
    }
    let mut start = 0;
    for slice in manifest.pieces.iter().flat_map(|piece| &piece.slices) {
        if at < start + slice.len {
            let from = at - start;
            let len = (slice.len - from).min(end - at).min(READ_LEN);
            return shared.read_slice(slice, from, len).map(Bytes::from);
        }
        start += slice.len;
    }
    Err(RequestFailure::fatal(ErrorKind::Invalid, format!("'{}' has no byte {at}", manifest.at.key)))
}

impl StageService {
    /// A range of a staged object as parts of another object, on the same disks.
    fn link_range(self: &Arc<Self>, upload: &StagedUpload, source: &Manifest, range: Range<u64>) -> Answer<Piece> {
        let mut slices = Vec::new();
        let mut start = 0;
        for slice in source.pieces.iter().flat_map(|piece| &piece.slices) {
            let from = range.start.max(start);
            let end = range.end.min(start + slice.len);
            if from < end {
                let part = format!("{}-{}", upload.id, new_name());
                let names = vec![(slice.part.clone(), part.clone())];
                for node in &slice.holders {
                    self.shared().ask(node, &StageCall::LinkParts(names.clone()), &[], STAGE_CALL_TIME)?;
                }
                let holders = slice.holders.clone();
                slices.push(Slice { part, from: slice.from + from - start, len: end - from, holders });
            }
            start += slice.len;
        }
        Ok(Piece { slices })
    }
}

#[cfg(test)]
mod tests;
