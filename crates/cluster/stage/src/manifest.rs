//! What a group keeps of a staged object: the place of the bytes, the object of the store, and the order. Knows no disk and no node.

use serde::{Deserialize, Serialize};
use spurline_object_store::{ObjectAttributes, WriteCondition, bare_etag, mark_in, marked_as};
use spurline_types::{CONTENT_HEADERS, STAGED_ETAG};
use std::collections::HashSet;

/// A key of a bucket.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct BucketKey {
    /// The bucket, with its scheme.
    pub bucket: String,
    /// The key there.
    pub key: String,
}

impl BucketKey {
    /// The key `key` of `bucket`.
    pub fn new(bucket: &str, key: &str) -> BucketKey {
        BucketKey { bucket: bucket.to_owned(), key: key.to_owned() }
    }
}

/// What must be true of the store's object when a staged one replaces it there.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum StoreBase {
    /// Nothing.
    Any,
    /// No object has the name.
    Absent,
    /// The object has this etag, which may be that of a staged object that was uploaded since.
    Version(String),
}

impl From<&WriteCondition> for StoreBase {
    fn from(condition: &WriteCondition) -> StoreBase {
        match condition {
            WriteCondition::None => StoreBase::Any,
            WriteCondition::Absent => StoreBase::Absent,
            WriteCondition::Version(etag) => StoreBase::Version(etag.clone()),
        }
    }
}

impl From<&StoreBase> for WriteCondition {
    fn from(base: &StoreBase) -> WriteCondition {
        match base {
            StoreBase::Any => WriteCondition::None,
            StoreBase::Absent => WriteCondition::Absent,
            StoreBase::Version(etag) => WriteCondition::Version(etag.clone()),
        }
    }
}

/// The attributes of an object, as text.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeptAttributes {
    content: Vec<(String, String)>,
    user: Vec<(String, String)>,
    storage_class: Option<String>,
}

impl From<&ObjectAttributes> for KeptAttributes {
    fn from(attributes: &ObjectAttributes) -> KeptAttributes {
        KeptAttributes {
            content: attributes.content.iter().map(|(name, value)| ((*name).to_owned(), value.clone())).collect(),
            user: attributes.user.clone(),
            storage_class: attributes.storage_class.clone(),
        }
    }
}

impl From<&KeptAttributes> for ObjectAttributes {
    fn from(kept: &KeptAttributes) -> ObjectAttributes {
        let content = kept.content.iter().filter_map(|(name, value)| {
            let known = CONTENT_HEADERS.iter().find(|known| *known == name)?;
            Some((*known, value.clone()))
        });
        ObjectAttributes {
            content: content.collect(),
            user: kept.user.clone(),
            storage_class: kept.storage_class.clone(),
        }
    }
}

impl KeptAttributes {
    /// The mark of the change that made the object.
    pub fn mark(&self) -> Option<String> {
        mark_in(&ObjectAttributes::from(self)).map(str::to_owned)
    }

    /// The attributes with another mark.
    pub fn marked(&self, mark: &str) -> KeptAttributes {
        KeptAttributes::from(&marked_as(ObjectAttributes::from(self), mark))
    }
}

/// Bytes of a part file, which lies on each of the holders' disks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Slice {
    /// The name of the part.
    pub part: String,
    /// The first byte.
    pub from: u64,
    /// The number of bytes.
    pub len: u64,
    /// The nodes that have the part.
    pub holders: Vec<String>,
}

/// A part of the object at the store.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Piece {
    /// The bytes, in order.
    pub slices: Vec<Slice>,
}

impl Piece {
    /// The number of bytes.
    pub fn size(&self) -> u64 {
        self.slices.iter().map(|slice| slice.len).sum()
    }
}

/// How long an object stays with the group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum StageClass {
    /// Two nodes have it until the store does.
    Staged,
    /// Two nodes have it, the store never: bytes of a file that is being written, until the writer removes these.
    Part,
    /// One node has it, the store never, for this many seconds.
    Scratch {
        /// Seconds since the close.
        ttl_s: u64,
        /// Most bytes of the folder; the oldest objects go first.
        quota: u64,
        /// The folder, as a number.
        folder: u64,
    },
}

impl StageClass {
    /// Failure domains that have an object.
    pub fn domains(self) -> usize {
        match self {
            StageClass::Staged | StageClass::Part => 2,
            StageClass::Scratch { .. } => 1,
        }
    }

    /// A folder as a number.
    pub fn folder_number(url: &str) -> u64 {
        u64::from(crc32c::crc32c(url.as_bytes())) << 32 | url.len() as u64
    }
}

/// The phase of a staged object. Phases only grow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Phase {
    /// Waits for the upload.
    Waiting,
    /// Is being removed, at the store too.
    Removing,
    /// The store has the object, or something has replaced or removed it.
    Done,
    /// Never counted: two domains did not take it. The writer may have sent the object again since, as another record.
    Withdrawn,
}

/// A staged object, as its holders keep it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    /// Its name.
    pub at: BucketKey,
    /// Identifies this state at the holders: an object that is sent again after a failure is another record.
    pub record: String,
    /// Identifies this content; also in the attributes.
    pub mark: String,
    /// The term of the leader that has taken it.
    pub term: u64,
    /// Its place among all changes of the group in that term.
    pub order: u64,
    /// The phase.
    pub phase: Phase,
    /// How long it stays.
    pub class: StageClass,
    /// The condition on the object at the store.
    pub base: StoreBase,
    /// Marks of contents that this one replaces and whose upload had begun: the store may have one of them.
    pub begun: Vec<String>,
    /// An earlier object of the name was being removed: the store may have none.
    #[serde(default)]
    pub may_be_absent: bool,
    /// The attributes.
    pub attributes: KeptAttributes,
    /// The number of bytes.
    pub size: u64,
    /// Where the bytes lie; empty if they lie beside the manifest.
    pub pieces: Vec<Piece>,
    /// Seconds since 1970 at the close, by the leader's clock, for people and as the object's time.
    pub closed_s: u64,
    /// The nodes that have this manifest.
    pub holders: Vec<String>,
    /// Nodes that had the object or may have got it, and were lost: if they come back, they forget the object.
    pub former: Vec<String>,
    /// Counts the changes of the holders and of the phase: the manifest with the highest is the newest.
    pub revision: u32,
}

impl Manifest {
    /// The version that readers see.
    pub fn etag(&self) -> String {
        staged_etag(&self.mark)
    }

    /// Which of two changes is later.
    pub fn place(&self) -> (u64, u64) {
        (self.term, self.order)
    }

    /// Whether the object waits for the upload or for the removal.
    pub fn is_live(&self) -> bool {
        self.phase < Phase::Done
    }

    /// Whether a node is to have the object.
    pub fn is_at(&self, node: &str) -> bool {
        self.nodes().any(|holder| holder == node)
    }

    /// All nodes with bytes or the manifest.
    pub fn nodes(&self) -> impl Iterator<Item = &str> {
        let slices = self.pieces.iter().flat_map(|piece| &piece.slices);
        self.holders.iter().chain(slices.flat_map(|slice| &slice.holders)).map(String::as_str)
    }

    /// Names a node that has told an earlier state of this record, and that still has the bytes: a further copy that was under way has a
    /// state without the node.
    pub fn note_holder(&mut self, told: &Manifest, node: &str) {
        if self.is_at(node) || !told.is_at(node) {
            return;
        }
        self.holders.push(node.to_owned());
        let parts: HashSet<&str> = told.parts_at(node).map(|slice| slice.part.as_str()).collect();
        for slice in self.pieces.iter_mut().flat_map(|piece| &mut piece.slices) {
            if parts.contains(slice.part.as_str()) {
                slice.holders.push(node.to_owned());
            }
        }
        self.former.retain(|other| other != node);
    }

    /// The manifest without the fields that only an upload needs, if there will be none.
    pub fn without_needless(mut self) -> Manifest {
        if !self.is_live() {
            self.begun.clear();
            self.attributes = KeptAttributes::default();
        }
        self
    }

    /// The store may have a content with this mark.
    pub fn add_begun(&mut self, mark: &str) {
        if !self.begun.iter().any(|begun| begun == mark) {
            self.begun.push(mark.to_owned());
        }
    }

    /// Takes over the knowledge of an earlier object of the name: the store may have that, or what that was to replace.
    pub fn absorb(&mut self, earlier: &Manifest) {
        earlier.begun.iter().chain([&earlier.mark]).for_each(|mark| self.add_begun(mark));
        if self.base == StoreBase::Version(earlier.etag()) {
            self.base = earlier.base.clone();
            self.may_be_absent |= earlier.may_be_absent;
        }
    }

    /// The parts that a node has.
    pub fn parts_at<'a>(&'a self, node: &'a str) -> impl Iterator<Item = &'a Slice> {
        let slices = self.pieces.iter().flat_map(|piece| &piece.slices);
        slices.filter(move |slice| slice.holders.iter().any(|holder| holder == node))
    }
}

/// The version of the object with this mark.
pub fn staged_etag(mark: &str) -> String {
    format!("{STAGED_ETAG}{mark}")
}

/// The mark in a version; `None` for a version of the store.
pub fn staged_mark(etag: &str) -> Option<&str> {
    bare_etag(etag).strip_prefix(STAGED_ETAG)
}
