//! Notes to nodes about new objects: which node has which bytes, so that reads need no request to the store. After a node has sent
//! an object or a part to the store, the bytes stay with the node for some time, under the number of the transfer; the version of
//! the object is known at the end. A note that is lost costs requests, and never a wrong byte.
//!
//! | event | note |
//! |---|---|
//! | an object is written | to the nodes that hold the blocks, but not to the node that sent all of the bytes |
//! | an upload ends | to the nodes that hold blocks, with the transfers of all parts |
//! | an object is copied that was made so | the same, under the new name and version |
//! | a part is copied whole from such an object | the end of the upload names the transfer of that part |
//!
//! A thread sends the notes, so that no writer waits. The module knows what a note says, and not how a node gets the note.

use crate::members::MembersSnapshot;
use crate::placement::WantedBlock;
use crate::remote::GroupClient;
use parking_lot::{Condvar, Mutex};
use spurline_object_store::{CopySource, UploadedPart};
use spurline_proto::{AnswerBody as _, SentPart, SentParts};
use spurline_types::ObjectId;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Most notes that wait; the oldest go.
const NOTES_MAX: usize = 1024;
/// The thread ends when there was no note for this long.
const THREAD_IDLE: Duration = Duration::from_secs(5);
/// Most objects whose copies are noted too, and most parts of these objects.
const COPIED_OBJECTS_MAX: usize = 256;
const COPIED_PARTS_MAX: usize = 16 << 10;
/// Most uploads whose parts are known.
const UPLOADS_MAX: usize = 1024;

/// Bytes that a node has sent.
#[derive(Clone, Copy)]
pub(super) struct SentBytes<'a> {
    pub node: &'a str,
    /// The number of the transfer.
    pub transfer: u64,
    pub len: u64,
}

/// How the bytes of a part came to the store.
struct PartRoute {
    etag: String,
    len: u64,
    /// The node and the number of the transfer; `None` for bytes that the store has copied from elsewhere.
    sent: Option<(Box<str>, u64)>,
}

/// An object whose bytes nodes have sent.
#[derive(Clone)]
pub(super) struct SentObject {
    pub key: String,
    pub etag: String,
    pub size: u64,
    sent: SentParts,
    /// The node that knows all of this.
    known_by: Option<Box<str>>,
}

impl SentObject {
    /// The encoded transfers, in payloads of at most `most` bytes.
    pub fn payloads(&self, most: usize) -> Vec<Vec<u8>> {
        let names: usize = self.sent.nodes.iter().map(|name| name.len() + 4).sum();
        let count = most.saturating_sub(names + 8) / SentPart::ENCODED_LEN;
        let chunks = self.sent.parts.chunks(count.max(1)).map(|parts| {
            let mut payload = Vec::new();
            SentParts { nodes: self.sent.nodes.clone(), parts: parts.to_vec() }.encode(&mut payload);
            payload
        });
        chunks.collect()
    }

    /// The node that has sent exactly the bytes of this range in a transfer, and the number of the transfer.
    fn sender_of(&self, range: Range<u64>) -> Option<(&str, u64)> {
        let found = self.sent.parts.binary_search_by_key(&range.start, |part| part.offset).ok()?;
        let part = &self.sent.parts[found];
        let node = self.sent.nodes.get(part.node as usize)?;
        (part.len == range.end - range.start).then_some((node, part.transfer))
    }

    /// The nodes that hold blocks of the object at `path`, without the node that knows all.
    pub fn receivers(&self, client: &GroupClient, view: &MembersSnapshot, path: &[u8]) -> Vec<u32> {
        let id = ObjectId::from_text(client.source(), path, &self.etag);
        let copies = client.copies_of(path);
        let sharing = view.members().iter().filter(|member| member.weight > 0).count();
        let count = u32::try_from(self.size.div_ceil(client.block_size())).unwrap_or(u32::MAX);
        let mut holders = Vec::new();
        let mut ranked = Vec::new();
        for block in 0..count {
            if holders.len() >= sharing.max(1) {
                break;
            }
            view.find_holders(WantedBlock::of_block(id, block, copies), copies as usize, &mut ranked);
            ranked.retain(|index| !holders.contains(index));
            holders.append(&mut ranked);
        }
        holders.retain(|index| self.known_by.as_deref() != Some(&*view.members()[*index as usize].name));
        holders
    }
}

#[derive(Default)]
struct NoteQueue {
    waiting: VecDeque<Arc<SentObject>>,
    has_thread: bool,
}

/// The notes of a mount.
#[derive(Default)]
pub(super) struct SentNotes {
    uploads: Mutex<HashMap<String, BTreeMap<u32, PartRoute>>>,
    /// The oldest first.
    objects: Mutex<VecDeque<Arc<SentObject>>>,
    queue: Mutex<NoteQueue>,
    added: Condvar,
}

impl SentNotes {
    fn add_route(&self, upload: &str, number: u32, route: PartRoute) {
        let mut uploads = self.uploads.lock();
        if uploads.len() >= UPLOADS_MAX && !uploads.contains_key(upload) {
            // Uploads that were given up without an end.
            uploads.clear();
        }
        uploads.entry(upload.to_owned()).or_default().insert(number, route);
    }

    /// A node has sent a part.
    pub fn add_part(&self, upload: &str, number: u32, etag: &str, bytes: SentBytes<'_>) {
        let sent = Some((bytes.node.into(), bytes.transfer));
        self.add_route(upload, number, PartRoute { etag: etag.to_owned(), len: bytes.len, sent });
    }

    /// The store has copied a part from this range of an object.
    pub fn add_copied_part(&self, upload: &str, number: u32, etag: &str, from: CopySource<'_>, range: Range<u64>) {
        let len = range.end - range.start;
        let known = self.find_object(from);
        let sent = known.and_then(|known| known.sender_of(range).map(|(node, transfer)| (node.into(), transfer)));
        self.add_route(upload, number, PartRoute { etag: etag.to_owned(), len, sent });
    }

    /// The object of this version, if nodes have sent it lately.
    fn find_object(&self, object: CopySource<'_>) -> Option<Arc<SentObject>> {
        let objects = self.objects.lock();
        objects.iter().find(|known| known.key == object.key && Some(&*known.etag) == object.etag).map(Arc::clone)
    }

    /// Keeps an object for the notes of copies; the oldest go.
    fn remember(&self, object: &Arc<SentObject>) {
        let mut objects = self.objects.lock();
        objects.push_back(Arc::clone(object));
        while objects.len() > COPIED_OBJECTS_MAX
            || objects.iter().map(|known| known.sent.parts.len()).sum::<usize>() > COPIED_PARTS_MAX
        {
            objects.pop_front();
        }
    }

    /// An upload has ended without an object.
    pub fn forget_upload(&self, upload: &str) {
        self.uploads.lock().remove(upload);
    }

    /// The transfers of the object that an upload has made; `None` if parts are not known.
    fn parts_of(&self, upload: &str, parts: &[UploadedPart]) -> Option<(SentParts, u64)> {
        let known = self.uploads.lock().remove(upload)?;
        let mut sent = SentParts::default();
        let mut offset = 0;
        for part in parts {
            let route = known.get(&part.number).filter(|route| route.etag == part.etag)?;
            if let Some((node, transfer)) = &route.sent {
                let place = sent.nodes.iter().position(|known| known == node).unwrap_or_else(|| {
                    sent.nodes.push(node.clone());
                    sent.nodes.len() - 1
                });
                sent.parts.push(SentPart { offset, len: route.len, transfer: *transfer, node: place as u32 });
            }
            offset += route.len;
        }
        Some((sent, offset))
    }

    /// A node has written an object.
    pub fn add_object(&self, key: &str, etag: &str, bytes: SentBytes<'_>) {
        let SentBytes { node, transfer, len: size } = bytes;
        if size == 0 {
            return;
        }
        let part = SentPart { offset: 0, len: size, transfer, node: 0 };
        self.add(SentObject {
            key: key.to_owned(),
            etag: etag.to_owned(),
            size,
            sent: SentParts { nodes: vec![node.into()], parts: vec![part] },
            known_by: Some(node.into()),
        });
    }

    /// An upload has made an object.
    pub fn add_upload(&self, key: &str, etag: &str, upload: &str, parts: &[UploadedPart]) {
        if let Some((sent, size)) = self.parts_of(upload, parts) {
            self.add(SentObject { key: key.to_owned(), etag: etag.to_owned(), size, sent, known_by: None });
        }
    }

    /// The store has copied an object.
    pub fn add_copy(&self, from: CopySource<'_>, key: &str, etag: &str) {
        let known = self.find_object(from);
        if let Some(known) = known.filter(|known| known.key != key || known.etag != etag) {
            self.add(SentObject { key: key.to_owned(), etag: etag.to_owned(), known_by: None, ..(*known).clone() });
        }
    }

    fn add(&self, object: SentObject) {
        let object = Arc::new(object);
        self.remember(&object);
        let mut queue = self.queue.lock();
        if queue.waiting.len() >= NOTES_MAX {
            queue.waiting.pop_front();
        }
        queue.waiting.push_back(object);
        self.added.notify_one();
    }

    /// Whether the caller has to start the thread that sends notes.
    pub fn claim_thread(&self) -> bool {
        let mut queue = self.queue.lock();
        let is_missing = !queue.has_thread && !queue.waiting.is_empty();
        queue.has_thread |= is_missing;
        is_missing
    }

    /// The next note for the thread; `None` when there was none for a while: the thread ends.
    pub fn wait_next(&self) -> Option<Arc<SentObject>> {
        let mut queue = self.queue.lock();
        let until = Instant::now() + THREAD_IDLE;
        while queue.waiting.is_empty() {
            if self.added.wait_until(&mut queue, until).timed_out() && queue.waiting.is_empty() {
                queue.has_thread = false;
                return None;
            }
        }
        queue.waiting.pop_front()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(number: u32, etag: &str) -> UploadedPart {
        UploadedPart { number, etag: etag.to_owned() }
    }

    const UNKNOWN: CopySource<'static> = CopySource { key: "elsewhere", etag: Some("e") };

    #[test]
    fn an_object_has_the_transfers_of_the_parts_that_it_was_made_of() {
        let notes = SentNotes::default();
        notes.add_part("upload", 1, "a", SentBytes { node: "n1", transfer: 11, len: 100 });
        notes.add_copied_part("upload", 2, "b", UNKNOWN, 0..50);
        notes.add_part("upload", 3, "c", SentBytes { node: "n2", transfer: 13, len: 100 });
        // The last part was sent again, with other bytes.
        notes.add_part("upload", 3, "d", SentBytes { node: "n1", transfer: 14, len: 70 });
        let (sent, size) = notes.parts_of("upload", &[part(1, "a"), part(2, "b"), part(3, "d")]).unwrap();
        assert_eq!((sent.nodes.len(), size), (1, 220));
        let first = SentPart { offset: 0, len: 100, transfer: 11, node: 0 };
        assert_eq!(sent.parts, [first, SentPart { offset: 150, len: 70, transfer: 14, node: 0 }]);
        assert!(notes.parts_of("upload", &[part(1, "a")]).is_none(), "the upload has ended");
        // Bytes of a part that this process has not sent, or of other bytes than the object has.
        for parts in [[part(1, "a"), part(2, "b")], [part(1, "b"), part(3, "c")]] {
            notes.add_part("upload", 1, "a", SentBytes { node: "n1", transfer: 11, len: 100 });
            assert!(notes.parts_of("upload", &parts).is_none());
        }
    }

    #[test]
    fn a_part_that_is_copied_whole_has_the_transfer_of_its_source() {
        let notes = SentNotes::default();
        notes.add_object("hidden", "h", SentBytes { node: "n2", transfer: 21, len: 100 });
        let source = |etag| CopySource { key: "hidden", etag: Some(etag) };
        notes.add_copied_part("upload", 1, "a", source("h"), 0..100);
        // A part of the bytes, and another version.
        notes.add_copied_part("upload", 2, "b", source("h"), 0..60);
        notes.add_copied_part("upload", 3, "c", source("i"), 0..100);
        let parts = [part(1, "a"), part(2, "b"), part(3, "c")];
        notes.add_upload("file", "f", "upload", &parts);
        let made = notes.find_object(CopySource { key: "file", etag: Some("f") }).unwrap();
        assert_eq!((made.size, made.sender_of(0..100)), (260, Some(("n2", 21))));
        assert_eq!(made.sent.parts.len(), 1);
        // The next version of the file keeps its first part.
        notes.add_copied_part("next", 1, "a", CopySource { key: "file", etag: Some("f") }, 0..100);
        assert_eq!(notes.parts_of("next", &[part(1, "a")]).unwrap().0.parts[0].transfer, 21);
    }
}
