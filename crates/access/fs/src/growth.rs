//! Growth of open files: an open inode may continue with a longer version of its path, after a proof that the bytes
//! already served are a prefix of it. It knows neither handles nor the inode.

use parking_lot::{Mutex, RwLock};
use spurline_types::{ObjectAttr, ObjectId, ObjectRef};
use spurline_volume::{ReadData, Volume};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Most bytes compared per growth. Above, a reader of the old version gets ESTALE: a comparison reads them twice.
const MOST_COMPARED: u64 = 64 << 20;
/// Bytes per read of a comparison.
const PIECE: usize = 256 << 10;
/// Attempts to compare blocks that readers add meanwhile.
const ATTEMPTS: usize = 3;

/// An etag, stored only if it differs from the version.
pub enum EtagForm {
    None,
    SameAsVersion,
    Other(Box<str>),
}

impl EtagForm {
    /// The etag of these attributes.
    pub fn of_attr(attr: &ObjectAttr) -> Self {
        match attr.etag.as_deref() {
            None => EtagForm::None,
            Some(etag) if etag == attr.version.as_str() => EtagForm::SameAsVersion,
            Some(etag) => EtagForm::Other(etag.into()),
        }
    }

    /// The etag of an object at this version.
    pub fn text<'a>(&'a self, object: &'a ObjectRef) -> Option<&'a str> {
        match self {
            EtagForm::None => None,
            EtagForm::SameAsVersion => Some(object.version.as_str()),
            EtagForm::Other(etag) => Some(etag),
        }
    }
}

/// A version that continues the first one of an inode.
pub struct GrownVersion {
    pub object: ObjectRef,
    pub etag: EtagForm,
}

/// The growth of one inode, made at its first open in cached mode.
pub struct InodeGrowth {
    /// 0 at first; odd while a version is published; raised by 2 per version.
    generation: AtomicU64,
    /// The blocks served since the first open: the first, and the one after the last.
    first: AtomicU32,
    end: AtomicU32,
    current: RwLock<Option<Arc<GrownVersion>>>,
    /// Held during a comparison: the last version that was refused.
    refused: Mutex<Option<ObjectId>>,
}

impl InodeGrowth {
    pub fn new() -> Self {
        InodeGrowth {
            generation: AtomicU64::new(0),
            first: AtomicU32::new(u32::MAX),
            end: AtomicU32::new(0),
            current: RwLock::default(),
            refused: Mutex::default(),
        }
    }

    /// The present generation. Bytes read in between belong to one version if it is the same before and after.
    pub fn generation(&self) -> u64 {
        self.generation.load(Ordering::SeqCst)
    }

    /// The version that continues the first one, if any.
    pub fn current(&self) -> Option<Arc<GrownVersion>> {
        if self.generation() == 0 { None } else { self.current.read().clone() }
    }

    /// Takes over a version that a process before has published: every block counts as served.
    pub fn adopt(&self, version: GrownVersion) {
        self.record_served(0..u32::MAX - 1);
        *self.current.write() = Some(Arc::new(version));
        self.generation.fetch_add(2, Ordering::SeqCst);
    }

    /// Records, before they are read, that these blocks are served.
    pub fn record_served(&self, blocks: Range<u32>) {
        if blocks.start < self.first.load(Ordering::SeqCst) {
            self.first.fetch_min(blocks.start, Ordering::SeqCst);
        }
        if blocks.end > self.end.load(Ordering::SeqCst) {
            self.end.fetch_max(blocks.end, Ordering::SeqCst);
        }
    }

    fn served(&self) -> Range<u32> {
        self.first.load(Ordering::SeqCst)..self.end.load(Ordering::SeqCst)
    }

    /// Whether the file, whose first version is `first`, has the version of `attr`, which is the object `id`, or continues with
    /// it from now on: it is longer, and the served blocks are the same in both. Reads those blocks. `opens` locks the
    /// mode of the inode's opens until the new version is published; `None` if the mode forbids it.
    pub fn try_publish<G>(
        &self,
        volume: &dyn Volume,
        first: &ObjectRef,
        id: ObjectId,
        attr: &ObjectAttr,
        opens: impl Fn() -> Option<G>,
    ) -> bool {
        let mut refused = self.refused.lock();
        let grown = self.current();
        let old = grown.as_deref().map_or(first, |grown| &grown.object);
        if old.size == attr.size && old.version == attr.version {
            return true;
        }
        let Some(new) = longer_version(old, id, attr).filter(|_| *refused != Some(id)) else { return false };
        let mut equal = 0..0;
        for _ in 0..ATTEMPTS {
            let served = self.served();
            // Without a served block there is no evidence that the file only grew.
            if served.is_empty() {
                return false;
            }
            if served != equal && !equal_blocks(volume, old, &new.object, served.clone()) {
                break;
            }
            equal = served;
            let Some(_opens) = opens() else { return false };
            // Readers that find an odd generation wait for this lock; a reader that began before has recorded its
            // blocks, or reads again.
            let mut current = self.current.write();
            self.generation.fetch_add(1, Ordering::SeqCst);
            if self.served() != equal {
                self.generation.fetch_sub(1, Ordering::SeqCst);
                continue;
            }
            *current = Some(Arc::new(new));
            self.generation.fetch_add(1, Ordering::SeqCst);
            return true;
        }
        *refused = Some(id);
        false
    }
}

/// Whether both objects have the same bytes in these blocks, as far as `old` goes.
fn equal_blocks(volume: &dyn Volume, old: &ObjectRef, new: &ObjectRef, blocks: Range<u32>) -> bool {
    let block = volume.block_size().max(1);
    let mut at = u64::from(blocks.start) * block;
    let end = (u64::from(blocks.end) * block).min(old.size);
    if end.saturating_sub(at) > MOST_COMPARED {
        return false;
    }
    let mut one = vec![0; PIECE];
    let mut other = vec![0; PIECE];
    while at < end {
        let len = PIECE.min(usize::try_from(end - at).unwrap_or(PIECE));
        match (volume.read(old, at, &mut one[..len]), volume.read(new, at, &mut other[..len])) {
            (Ok(a), Ok(b)) if same_bytes(&a, &one[..len], &b, &other[..len]) => at += len as u64,
            _ => return false,
        }
    }
    true
}

/// Whether two reads of whole buffers returned the same bytes.
fn same_bytes(a: &ReadData, one: &[u8], b: &ReadData, other: &[u8]) -> bool {
    fn bytes<'a>(data: &'a ReadData, buffer: &'a [u8]) -> &'a [u8] {
        match data {
            ReadData::Copied(n) => &buffer[..(*n).min(buffer.len())],
            ReadData::Shared(slice) => slice,
        }
    }
    let a = bytes(a, one);
    let b = bytes(b, other);
    a.len() == one.len() && a == b
}

/// The version of `attr` at the path of `old`, if it may be a longer version of the same file.
fn longer_version(old: &ObjectRef, id: ObjectId, attr: &ObjectAttr) -> Option<GrownVersion> {
    let settled = !attr.version.is_unsettled() && !old.version.is_unsettled();
    (settled && attr.size > old.size).then(|| GrownVersion {
        object: ObjectRef { id, path: Arc::clone(&old.path), version: attr.version.clone(), size: attr.size },
        etag: EtagForm::of_attr(attr),
    })
}
