//! An upload in parts under way: the lengths of parts, and which of them the store has. It knows neither the bytes of a file
//! nor requests.

use crate::file_attrs::FileAttrs;
use crate::requests::OpenUpload;
use bytes::Bytes;
use futures::FutureExt as _;
use futures::future::select_all;
use parking_lot::Mutex;
use spurline_object_store::ObjectAttributes;
use spurline_types::{Error, ErrorKind, Result};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use tokio::task::{JoinError, JoinHandle};

/// Length of the first parts of an upload. A file of at most one part is one request.
pub(crate) const FIRST_PART: u64 = 8 << 20;
/// Parts of one length; those behind are twice as long, so that the most parts that S3 allows (10,000) hold its largest
/// object (5 TiB).
const PARTS_PER_LENGTH: u32 = 1000;

/// The lengths of the parts of all files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PartLengths {
    pub first: u64,
}

impl PartLengths {
    /// The range of a part, whose numbers begin at 1.
    pub fn range(self, number: u32) -> Range<u64> {
        let mut start = 0;
        let mut len = self.first;
        let mut left = number - 1;
        while left >= PARTS_PER_LENGTH {
            start += u64::from(PARTS_PER_LENGTH) * len;
            len *= 2;
            left -= PARTS_PER_LENGTH;
        }
        start += u64::from(left) * len;
        start..start + len
    }

    /// The number of the part with this byte.
    pub fn at(self, offset: u64) -> u32 {
        let mut number = 1;
        let mut start = 0;
        let mut len = self.first;
        loop {
            let all = u64::from(PARTS_PER_LENGTH) * len;
            if offset < start + all {
                return number + ((offset - start) / len) as u32;
            }
            start += all;
            number += PARTS_PER_LENGTH;
            len *= 2;
        }
    }
}

/// The memory for the bytes of parts of an upload. A part takes the memory of a part before: pages that the kernel has to clear
/// cost as much as the copy into them.
#[derive(Default)]
pub(crate) struct PartBuffers {
    free: Arc<Mutex<Vec<Vec<u8>>>>,
}

impl PartBuffers {
    /// Memory for a part of `len` bytes, with any bytes in it.
    pub fn take(&self, len: usize) -> PartBuffer {
        let used_before = self.free.lock().pop().filter(|bytes| bytes.len() >= len);
        PartBuffer { bytes: used_before.unwrap_or_else(|| vec![0; len]), len, free: Arc::clone(&self.free) }
    }
}

/// The bytes of a part, whose memory returns to the upload.
pub(crate) struct PartBuffer {
    bytes: Vec<u8>,
    len: usize,
    free: Arc<Mutex<Vec<Vec<u8>>>>,
}

impl PartBuffer {
    /// The memory, to be filled.
    pub fn spare(&mut self) -> &mut [u8] {
        &mut self.bytes[..self.len]
    }

    /// The first `len` bytes.
    pub fn into_bytes(mut self, len: usize) -> Bytes {
        self.len = len;
        Bytes::from_owner(self)
    }
}

impl AsRef<[u8]> for PartBuffer {
    fn as_ref(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

impl Drop for PartBuffer {
    fn drop(&mut self) {
        self.free.lock().push(std::mem::take(&mut self.bytes));
    }
}

/// A part of an upload.
pub(crate) enum PartState {
    /// On its way; `changed` since.
    Sending { sent: JoinHandle<Result<String>>, changed: bool },
    /// The store has it.
    Sent { etag: String },
}

/// An upload under way.
pub(crate) struct PartUpload {
    pub upload: OpenUpload,
    /// The store knows no such upload: another program has aborted it, or a rule of the bucket.
    pub is_gone: bool,
    /// With the mark of the change.
    pub attributes: ObjectAttributes,
    /// The attributes of the file when the upload began.
    pub file_attrs: FileAttrs,
    pub key: String,
    pub lengths: PartLengths,
    pub buffers: PartBuffers,
    pub parts: BTreeMap<u32, PartState>,
    /// Why a part was not sent.
    pub failure: Option<Error>,
}

impl PartUpload {
    /// An upload without parts.
    pub fn new(
        key: String,
        upload: OpenUpload,
        attributes: ObjectAttributes,
        file_attrs: FileAttrs,
        lengths: PartLengths,
    ) -> PartUpload {
        PartUpload {
            upload,
            is_gone: false,
            attributes,
            file_attrs,
            key,
            lengths,
            buffers: PartBuffers::default(),
            parts: BTreeMap::new(),
            failure: None,
        }
    }

    /// Whether a part found no answer in all its time: others would wait as long.
    pub fn has_timed_out(&self) -> bool {
        self.failure.as_ref().is_some_and(|failure| failure.kind() == ErrorKind::Timeout)
    }

    /// Whether fewer than `limit` parts are on their way to a store that knows the upload.
    pub fn has_place(&self, limit: usize) -> bool {
        !self.is_gone && self.parts.values().filter(|part| is_sending(part)).count() < limit
    }

    /// Notes the parts whose requests have ended, without a wait.
    pub fn note_ended_parts(&mut self) {
        let underway = self.parts.iter_mut().filter_map(|(number, part)| match part {
            PartState::Sending { sent, .. } => {
                sent.now_or_never().map(|outcome| EndedPart { number: *number, outcome })
            }
            PartState::Sent { .. } => None,
        });
        let ended: Vec<EndedPart> = underway.collect();
        ended.into_iter().for_each(|part| self.note_ended(part));
    }

    fn note_ended(&mut self, EndedPart { number, outcome }: EndedPart) {
        let Some(PartState::Sending { changed, .. }) = self.parts.remove(&number) else { return };
        match outcome {
            Ok(Ok(etag)) if !changed => {
                self.parts.insert(number, PartState::Sent { etag });
            }
            Ok(Ok(_)) => {}
            Ok(Err(error)) => {
                // What a changed part was copied from may be removed.
                self.is_gone |= error.kind() == ErrorKind::NotFound && !changed;
                tracing::debug!("part {number} of '{}' is sent again: {error}", self.key);
                self.failure = Some(error);
            }
            Err(error) => tracing::debug!("part {number} of '{}' is sent again: {error}", self.key),
        }
    }

    /// Bytes of these parts were changed.
    pub fn note_changed(&mut self, range: Range<u64>) {
        if range.is_empty() {
            return;
        }
        let last = self.lengths.at(range.end - 1);
        let mut again = Vec::new();
        for (number, part) in self.parts.range_mut(self.lengths.at(range.start)..=last) {
            match part {
                PartState::Sending { changed, .. } => *changed = true,
                PartState::Sent { .. } => again.push(*number),
            }
        }
        for number in again {
            self.parts.remove(&number);
        }
    }

    /// The numbers of the first `count` parts that the store does not have and that are not on their way.
    pub fn missing_parts(&self, count: u32) -> Vec<u32> {
        (1..=count).filter(|number| !self.parts.contains_key(number)).collect()
    }

    /// Bytes of the parts that the store has.
    pub fn sent_bytes(&self) -> u64 {
        let sent = self.parts.iter().filter(|(_, part)| !is_sending(part));
        sent.map(|(number, _)| self.lengths.range(*number)).map(|range| range.end - range.start).sum()
    }

    /// Waits until fewer than `limit` parts are on their way, whichever end first: with several nodes, none waits for the slowest. A part
    /// that failed, or was changed, is sent again later.
    pub async fn wait_for_parts(&mut self, limit: usize) {
        while self.parts.values().filter(|part| is_sending(part)).count() >= limit.max(1) {
            let underway = self.parts.iter_mut().filter_map(|(number, part)| match part {
                PartState::Sending { sent, .. } => Some(sent.map(|outcome| EndedPart { number: *number, outcome })),
                PartState::Sent { .. } => None,
            });
            let ended = select_all(underway).await.0;
            self.note_ended(ended);
        }
    }
}

/// A part whose request has ended.
struct EndedPart {
    number: u32,
    outcome: std::result::Result<Result<String>, JoinError>,
}

fn is_sending(part: &PartState) -> bool {
    matches!(part, PartState::Sending { .. })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_follow_each_other_up_to_the_largest_object() {
        let lengths = PartLengths { first: FIRST_PART };
        let mut end = 0;
        for number in [1, 2, 999, 1000, 1001, 1002, 2000, 2001, 9_999, 10_000] {
            let range = lengths.range(number);
            assert_eq!(lengths.at(range.start), number);
            assert_eq!(lengths.at(range.end - 1), number);
            assert!(range.start >= end, "part {number}");
            assert_eq!(lengths.range(number + 1).start, range.end);
            end = range.end;
        }
        assert!(end >= 5 << 40, "10,000 parts hold 5 TiB");
    }
}
