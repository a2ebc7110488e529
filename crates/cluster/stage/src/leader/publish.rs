//! Uploads of staged objects, oldest first, by the nodes that have the bytes; what follows after a conflict; and the end of objects that are
//! done.

use super::{Leader, is_mark_of};
use crate::manifest::{BucketKey, Manifest, Phase, Piece, StoreBase, staged_mark};
use crate::message::{Answer, StageCall};
use crate::peers::no_holder;
use crate::shared::{text_of, thread_ended};
use spurline_object_store::{
    AnswerProgress, BucketSides, ObjectAttributes, RequestFailure, RetryHint, UploadedPart, WriteCondition,
    assembly_time, bare_etag, mark_in, transfer_time,
};
use spurline_types::ErrorKind;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Parts of an object on their way at once.
const STAGED_PARTS_AT_ONCE: usize = 8;
/// The time of an upload by another node, beside that of the bytes.
const UPLOAD_TIME: Duration = Duration::from_secs(90);
/// How often holders get the records that are done.
const DONE_INTERVAL: Duration = Duration::from_millis(200);
/// Longest wait of a thread of uploads.
const IDLE_WAIT: Duration = Duration::from_secs(1);
/// Records that are kept after their end while nodes may know of earlier objects.
const ENDS_MAX: usize = 200_000;
/// Records that a call names.
const RECORDS_AT_ONCE: usize = 500;

#[derive(Debug)]
enum Published {
    /// The store has the object under this etag.
    Saved(String),
    /// The store has another object of the name.
    Conflict,
}

impl Leader {
    /// Uploads objects until the term is over.
    pub fn run_uploads(self: &Arc<Self>) {
        while !self.is_over() {
            let mut ledger = self.ledger.lock();
            let manifest = match ledger.take_job(Instant::now()) {
                Ok(manifest) => manifest,
                Err(next) => {
                    let latest = Instant::now() + IDLE_WAIT;
                    drop(self.wait_change(ledger, next.map_or(latest, |next| next.min(latest))));
                    continue;
                }
            };
            drop(ledger);
            match manifest.phase {
                Phase::Waiting => self.upload(&manifest),
                Phase::Removing | Phase::Done | Phase::Withdrawn => self.end_removal(&manifest),
            }
            self.changed.notify_all();
        }
    }

    /// Removes an object at the store, in this content or an earlier one.
    fn end_removal(self: &Arc<Self>, manifest: &Manifest) {
        let removed = self.remove_at_store(manifest);
        let mut ledger = self.ledger.lock();
        match removed {
            Ok(told) => ledger.note_removed(manifest, &told, Instant::now()),
            Err(failure) => {
                tracing::debug!("'{}' is not removed yet: {}", manifest.at.key, failure.error);
                ledger.note_failed(manifest, failure.error.message(), Instant::now());
            }
        }
    }

    /// The nodes that know the end of the removal.
    fn remove_at_store(self: &Arc<Self>, manifest: &Manifest) -> Answer<BTreeSet<String>> {
        let at = &manifest.at;
        let found = self.shared.head_at_store(at)?;
        // Another object that has the name since replaces the store's.
        let found = found.filter(|_| self.is_newest(manifest));
        if let Some(found) = found
            && let Some(etag) = found.raw.etag.as_deref().map(|etag| bare_etag(etag).to_owned())
        {
            let is_ours = mark_in(&found.attributes).is_some_and(|mark| is_mark_of(manifest, mark));
            let is_base = match &manifest.base {
                StoreBase::Any => true,
                StoreBase::Absent => false,
                StoreBase::Version(base) => *base == etag,
            };
            // Another writer's object of the name stays.
            if is_ours || is_base {
                let condition = WriteCondition::Version(etag);
                let delete = async |sides: BucketSides<'_>| sides.writes.delete(&at.key, &condition).await;
                self.check_valid()?;
                match self.shared.at_store(&at.bucket, Duration::ZERO, delete) {
                    Err(failure) if failure.error.kind() != ErrorKind::NotFound => return Err(failure),
                    _ => {}
                }
            }
        }
        self.settle(manifest, Phase::Done)
    }

    fn is_newest(&self, manifest: &Manifest) -> bool {
        self.ledger.lock().entry_of(manifest).is_some()
    }

    fn upload(self: &Arc<Self>, manifest: &Manifest) {
        let published = self.publish(manifest);
        let known = published.as_ref().map_err(|failure| failure.error.message());
        tracing::debug!(key = manifest.at.key, mark = manifest.mark, base = ?manifest.base, "an upload ended: {known:?}");
        let stats = &self.shared.stats.stage;
        let published = match published {
            Ok(Published::Conflict) => self.keep_both(manifest),
            Ok(Published::Saved(real)) => self.end_upload(manifest, &real),
            Err(failure) => Err(failure),
        };
        if let Err(failure) = published {
            stats.upload_failures.add(1);
            let why = failure.error.message();
            tracing::warn!("the staged file '{}' is not uploaded yet: {why}", manifest.at.key);
            self.ledger.lock().note_failed(manifest, why, Instant::now());
        }
    }

    /// The store has the object. No removal is acknowledged meanwhile: the nodes would forget that with the record.
    fn end_upload(self: &Arc<Self>, manifest: &Manifest, real: &str) -> Answer<()> {
        let _lock = self.lock_name(&manifest.at, Instant::now() + UPLOAD_TIME)?;
        let told = self.settle_saved(manifest);
        {
            let mut ledger = self.ledger.lock();
            ledger.note_saved(manifest, real, &told, Instant::now());
            if self.nodes.count_domains(&told) < super::DOMAINS {
                ledger.unsettled.insert(manifest.at.clone(), manifest.record.clone());
            }
        }
        let stats = &self.shared.stats.stage;
        stats.uploaded_objects.add(1);
        stats.uploaded_bytes.add(manifest.size);
        Ok(())
    }

    /// Has two failure domains know that the store has an object, before the name is that of the store again: a later change there must
    /// not be undone by a leader that finds the object waiting.
    fn settle_saved(self: &Arc<Self>, manifest: &Manifest) -> BTreeSet<String> {
        let newest = {
            let ledger = self.ledger.lock();
            let waiting = ledger.entry_of(manifest).filter(|entry| entry.manifest.phase == Phase::Waiting);
            waiting.map(|entry| entry.manifest.clone())
        };
        let settled = newest.map(|newest| self.settle(&newest, Phase::Done));
        settled.and_then(Result::ok).unwrap_or_default()
    }

    /// The condition of an upload; or the etag, if the store has the object already. There is always a condition: a request without a
    /// condition that the store executes late would undo later changes.
    fn resolve_base(&self, manifest: &Manifest) -> Answer<Result<StoreBase, String>> {
        let is_of_group = matches!(&manifest.base, StoreBase::Version(etag) if staged_mark(etag).is_some());
        let is_certain = manifest.begun.is_empty() && !manifest.may_be_absent;
        if is_certain && !is_of_group && manifest.base != StoreBase::Any {
            return Ok(Ok(manifest.base.clone()));
        }
        self.compare_with_store(manifest).map(|found| found.unwrap_or(Ok(manifest.base.clone())))
    }

    /// The meaning of the store's object for an upload; `None` if nothing is known of the object there.
    fn compare_with_store(&self, manifest: &Manifest) -> Answer<Option<Result<StoreBase, String>>> {
        let is_any = manifest.base == StoreBase::Any;
        let Some(found) = self.shared.head_at_store(&manifest.at)? else {
            return Ok((is_any || manifest.may_be_absent).then_some(Ok(StoreBase::Absent)));
        };
        let etag = bare_etag(found.raw.etag.as_deref().unwrap_or_default()).to_owned();
        Ok(match mark_in(&found.attributes) {
            Some(mark) if mark == manifest.mark => Some(Err(etag)),
            Some(mark) if is_mark_of(manifest, mark) => Some(Ok(StoreBase::Version(etag))),
            _ if is_any => Some(Ok(StoreBase::Version(etag))),
            _ => None,
        })
    }

    fn publish(self: &Arc<Self>, manifest: &Manifest) -> Answer<Published> {
        let mut base = match self.resolve_base(manifest)? {
            Ok(base) => base,
            Err(etag) => return Ok(Published::Saved(etag)),
        };
        for is_second in [false, true] {
            match self.send_object(manifest, &base) {
                Ok(etag) => return Ok(Published::Saved(etag)),
                Err(failure) if !matches!(failure.error.kind(), ErrorKind::Stale | ErrorKind::NotFound) => {
                    return Err(failure);
                }
                Err(_) => {}
            }
            match self.compare_with_store(manifest)? {
                Some(Err(etag)) => return Ok(Published::Saved(etag)),
                Some(Ok(found)) if !is_second => base = found,
                Some(Ok(_)) => {
                    let why = "the object at the store changes again and again".to_owned();
                    return Err(RequestFailure::transient(ErrorKind::Unavailable, why));
                }
                None if self.may_nodes_know_more(manifest) => {
                    let why = "nodes that may know the object at the store give no answer".to_owned();
                    return Err(RequestFailure::transient(ErrorKind::Unavailable, why));
                }
                None => break,
            }
        }
        Ok(Published::Conflict)
    }

    /// Whether the writer has seen a version of the group that a node may bring back.
    fn may_nodes_know_more(&self, manifest: &Manifest) -> bool {
        let is_of_group = matches!(&manifest.base, StoreBase::Version(etag) if staged_mark(etag).is_some());
        is_of_group && !self.is_complete.load(Ordering::Acquire)
    }

    /// Writes the object to the store.
    fn send_object(self: &Arc<Self>, manifest: &Manifest, base: &StoreBase) -> Answer<String> {
        if manifest.pieces.len() > 1 {
            return self.send_pieces(manifest, base);
        }
        let holders = match manifest.pieces.first().and_then(|piece| piece.slices.first()) {
            Some(slice) => &slice.holders,
            None => &manifest.holders,
        };
        let call =
            StageCall::PutAtStore { manifest: Box::new(manifest.clone()), condition: base.clone(), term: self.term };
        self.check_valid()?;
        self.ask_holder(holders, &call, manifest.size)
    }

    /// Has the first holder that can be reached send bytes to the store; the etag.
    fn ask_holder(self: &Arc<Self>, holders: &[String], call: &StageCall, size: u64) -> Answer<String> {
        let (silent, answering): (Vec<_>, Vec<_>) = holders.iter().partition(|node| self.nodes.is_silent(node));
        let mut last = None;
        for node in answering.into_iter().chain(silent) {
            match self.shared.call(node, call, &[], UPLOAD_TIME + transfer_time(size)) {
                Ok(reply) => match crate::peers::succeeded(reply) {
                    // The store's answer.
                    Err(failure) if failure.advice == RetryHint::Never => return Err(failure),
                    Err(failure) => last = Some(failure),
                    Ok(reply) => return text_of(reply),
                },
                Err(failure) => last = Some(RequestFailure::from(failure)),
            }
        }
        let failure = last.unwrap_or_else(no_holder);
        Err(RequestFailure::transient(ErrorKind::Unavailable, failure.error.message().to_owned()))
    }

    fn send_pieces(self: &Arc<Self>, manifest: &Manifest, base: &StoreBase) -> Answer<String> {
        let BucketKey { bucket, key } = &manifest.at;
        let attributes = ObjectAttributes::from(&manifest.attributes);
        let begin = async |sides: BucketSides<'_>| sides.writes.begin_upload(key, &attributes).await;
        let upload = self.shared.at_store(bucket, Duration::ZERO, begin)?;
        let sent = self.send_parts(manifest, &upload).and_then(|parts| {
            // A leader that was stopped or cut off meanwhile makes no object.
            self.check_valid()?;
            let condition = WriteCondition::from(base);
            let complete = async |sides: BucketSides<'_>| {
                let progress = AnswerProgress::default();
                sides.writes.complete(key, &upload, &parts, &condition, &progress).await
            };
            self.shared.at_store(bucket, assembly_time(parts.len()), complete)
        });
        if sent.is_err() {
            let abort = async |sides: BucketSides<'_>| sides.writes.abort(key, &upload).await;
            let _ = self.shared.at_store(bucket, Duration::ZERO, abort);
        }
        sent
    }

    /// Uploads all parts, several at once; each by a node that has the bytes.
    fn send_parts(self: &Arc<Self>, manifest: &Manifest, upload: &str) -> Answer<Vec<UploadedPart>> {
        let next = AtomicUsize::new(0);
        let send_some = || {
            let mut parts = Vec::new();
            while let Some(piece) = manifest.pieces.get(next.fetch_add(1, Ordering::Relaxed)) {
                let number = manifest.pieces.iter().position(|other| std::ptr::eq(other, piece)).unwrap_or_default();
                let number = number as u32 + 1;
                let sent = self.send_part(manifest, upload, number, piece);
                if sent.is_err() {
                    next.store(manifest.pieces.len(), Ordering::Relaxed);
                }
                parts.push(UploadedPart { number, etag: sent? });
            }
            Ok(parts)
        };
        let results: Vec<Answer<Vec<UploadedPart>>> = std::thread::scope(|scope| {
            let threads: Vec<_> =
                (1..STAGED_PARTS_AT_ONCE.min(manifest.pieces.len())).map(|_| scope.spawn(send_some)).collect();
            let own = send_some();
            let others = threads.into_iter().map(|thread| thread.join().unwrap_or_else(|_| Err(thread_ended())));
            others.chain([own]).collect()
        });
        let mut parts = Vec::new();
        for result in results {
            parts.extend(result?);
        }
        parts.sort_by_key(|part| part.number);
        Ok(parts)
    }

    fn send_part(self: &Arc<Self>, manifest: &Manifest, upload: &str, number: u32, piece: &Piece) -> Answer<String> {
        let holders = piece.slices.first().map(|slice| slice.holders.clone()).unwrap_or_default();
        let at = manifest.at.clone();
        let upload = upload.to_owned();
        let call = StageCall::UploadAtStore { at, upload, number, piece: piece.clone() };
        self.ask_holder(&holders, &call, piece.size())
    }

    /// Stages an object, whose name another object has at the store, under a name of its own.
    fn keep_both(self: &Arc<Self>, manifest: &Manifest) -> Answer<()> {
        // The same at each attempt: a leader that comes in between makes no second object.
        let id: String = manifest.mark.chars().rev().take(8).collect();
        let key = format!("{}.conflict-{}-{id}", manifest.at.key, manifest.closed_s);
        let mark: String = manifest.mark.chars().rev().collect();
        tracing::warn!(
            "'{}' was changed at the store while a staged file waited for the upload: the staged one is '{key}' now",
            manifest.at.key
        );
        let deadline = Instant::now() + UPLOAD_TIME;
        let _lock = self.lock_name(&manifest.at, deadline)?;
        let is_wanted = {
            let ledger = self.ledger.lock();
            let entry = ledger.entry_of(manifest).filter(|entry| entry.manifest.phase == Phase::Waiting);
            entry.is_some_and(|entry| entry.manifest.base == manifest.base && entry.manifest.begun == manifest.begun)
        };
        if !is_wanted {
            // Another content has the name since, or none, or a node has told more of the object at the store.
            self.ledger.lock().note_failed(manifest, "a conflict at the store", Instant::now());
            return Ok(());
        }
        let at = BucketKey::new(&manifest.at.bucket, &key);
        let _copy_lock = self.lock_name(&at, deadline)?;
        self.commit_copy(manifest, at.clone(), manifest.attributes.marked(&mark), StoreBase::Absent)?;
        self.shared.stats.stage.conflicts.add(1);
        let told = self.settle_saved(manifest);
        let mut ledger = self.ledger.lock();
        ledger.uploading.remove(&manifest.at);
        ledger.remove(&manifest.at, &told);
        Ok(())
    }

    /// Sends the records that are done to holders, until the term is over.
    pub fn run_ends(self: &Arc<Self>) {
        while !self.is_over() {
            std::thread::sleep(DONE_INTERVAL);
            self.tell_ends();
        }
    }

    fn tell_ends(self: &Arc<Self>) {
        let nodes = self.ledger.lock().ended.untold_nodes();
        for node in nodes {
            let is_gone = self.nodes.is_gone(&node);
            if !is_gone && self.nodes.is_silent(&node) {
                continue;
            }
            let untold = self.ledger.lock().ended.untold_records(&node);
            for (phase, records) in untold {
                for records in records.chunks(RECORDS_AT_ONCE) {
                    let call = StageCall::SetPhases { term: self.term, records: records.to_vec(), phase };
                    if is_gone || self.order(&node, &call, &[]).is_ok() {
                        let mut ledger = self.ledger.lock();
                        records.iter().for_each(|record| ledger.ended.note_told(record, &node));
                    }
                }
            }
        }
        let by_node = {
            let mut ledger = self.ledger.lock();
            // A node that gives no answer may bring an earlier object of the name back.
            if !self.is_complete.load(Ordering::Acquire) && ledger.ended.count() < ENDS_MAX {
                return;
            }
            let by_node = ledger.ended.take_told();
            ledger.forget_settled();
            by_node
        };
        // A node that does not hear this keeps a record without bytes until the next leader asks.
        for (node, records) in by_node {
            for records in records.chunks(RECORDS_AT_ONCE) {
                let _ = self.order(&node, &StageCall::Forget { term: self.term, records: records.to_vec() }, &[]);
            }
        }
    }

    /// Ends scratch objects that are older than their folder allows, and the oldest of folders with more bytes than their quota.
    pub(super) fn expire_scratch(&self) {
        let mut ledger = self.ledger.lock();
        let expired = ledger.expired_scratch(Instant::now());
        expired.iter().for_each(|at| ledger.remove(at, []));
    }

    /// Sets the gauges, and says which uploads are late.
    pub(super) fn set_gauges(&self) {
        let stats = &self.shared.stats.stage;
        let mut ledger = self.ledger.lock();
        for entry in ledger.new_late(Instant::now(), super::UPLOAD_DEADLINE) {
            stats.overdue.add(1);
            let why = entry.error.as_deref().unwrap_or("others come first");
            tracing::warn!(
                "the staged file '{}' waits for its upload for {} s: {why}",
                entry.manifest.at.key,
                entry.closed.elapsed().as_secs()
            );
        }
        let unsaved = &ledger.unsaved;
        stats.unsaved_objects.set(unsaved.count());
        stats.unsaved_bytes.set(unsaved.bytes());
        stats.oldest_unsaved_s.set(unsaved.iter().next().map_or(0, |(closed, _)| closed.elapsed().as_secs()));
        drop(ledger);
        if self.is_over() {
            self.clear_gauges();
        }
    }

    /// The next leader has the figures.
    pub(super) fn clear_gauges(&self) {
        let stats = &self.shared.stats.stage;
        for gauge in [&stats.unsaved_objects, &stats.unsaved_bytes, &stats.oldest_unsaved_s] {
            gauge.set(0);
        }
    }
}
