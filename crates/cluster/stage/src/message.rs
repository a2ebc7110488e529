//! What nodes ask each other about staged objects. Calls and answers travel as JSON; bytes of objects beside them.

use crate::manifest::{BucketKey, KeptAttributes, Manifest, Phase, Piece, StageClass, StoreBase};
use serde::{Deserialize, Serialize};
use spurline_object_store::{RequestFailure, RetryHint};
use spurline_types::{Error, ErrorKind};
use std::time::Duration;

/// Most unsaved objects in an answer.
const UNSAVED_MAX: usize = 5000;
/// Bytes of an answer for unsaved objects, of the 4 MiB that an answer may have.
const UNSAVED_LEN: usize = 3 << 20;

/// The result of a request.
pub type Answer<T> = std::result::Result<T, RequestFailure>;

/// An object to be staged.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct NewObject {
    /// Its name.
    pub at: BucketKey,
    /// The attributes, with a mark.
    pub attributes: KeptAttributes,
    /// The writer's condition on the name.
    pub condition: StoreBase,
    /// How long it stays.
    pub class: StageClass,
    /// The number of bytes.
    pub size: u64,
    /// Where the bytes lie; empty if they come with the call.
    pub pieces: Vec<Piece>,
}

/// A copy within the bucket.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct CopyCall {
    /// The source.
    pub from: BucketKey,
    /// The source's version, if a certain one is wanted.
    pub etag: Option<String>,
    /// The new name.
    pub to: BucketKey,
    /// Other attributes, with a mark.
    pub attributes: Option<KeptAttributes>,
    /// The mark of the copy if the attributes stay.
    pub mark: String,
    /// The writer's condition on the new name.
    pub condition: StoreBase,
    /// The time of the store's work, beside that of a request.
    pub work_time: Duration,
}

/// A call of a node.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum StageCall {
    /// To the leader: the knowledge of a name.
    Find(BucketKey),
    /// To the leader: the knowledge of names that start with `prefix`, after `after`.
    FindBelow {
        /// Bucket and prefix.
        prefix: BucketKey,
        /// Names up to this name are known.
        after: String,
        /// Names of folders stand for all names there.
        is_folded: bool,
    },
    /// To the leader: what a version of the group is now.
    Locate {
        /// The name.
        at: BucketKey,
        /// The version.
        etag: String,
    },
    /// To the leader: takes an object.
    Commit(NewObject),
    /// To the leader: copies an object.
    Copy(CopyCall),
    /// To the leader: removes an object.
    Remove {
        /// The name.
        at: BucketKey,
        /// The writer's condition on the object.
        condition: StoreBase,
    },
    /// To the leader: all objects that the store does not have.
    ListUnsaved,
    /// To the leader: gives up the upload of an object, for good.
    Drop(BucketKey),
    /// To any node: earlier leaders are refused from now on.
    Fence {
        /// The term.
        term: u64,
        /// The leader's name.
        leader: String,
    },
    /// To any node: the node's manifests, by record.
    ListKept {
        /// Records up to this record are known.
        after: String,
    },
    /// To any node: space and place of the node.
    Describe {
        /// The leader's term.
        term: u64,
        /// The leader's name.
        leader: String,
    },
    /// To any node: whether the leader of this term has called the node lately.
    HearsLeader {
        /// The term.
        term: u64,
    },
    /// To a holder: bytes of a part, in order.
    AppendPart {
        /// The part.
        part: String,
        /// Where these bytes begin.
        offset: u64,
        /// The part is complete with these bytes.
        is_last: bool,
    },
    /// To a holder: bytes of a part.
    ReadPart {
        /// The part.
        part: String,
        /// The first byte.
        from: u64,
        /// The number of bytes.
        len: u64,
    },
    /// To a holder: further names of parts, old and new.
    LinkParts(Vec<(String, String)>),
    /// To a holder: sends a part to another node.
    SendPart {
        /// The part.
        part: String,
        /// The node.
        to: String,
    },
    /// To a holder: keeps a manifest, with the bytes of a small object.
    Hold {
        /// The leader's term.
        term: u64,
        /// The manifest.
        manifest: Box<Manifest>,
    },
    /// To a holder: the bytes of a small object.
    ReadInline {
        /// The record.
        record: String,
    },
    /// To a holder: the phases of objects have changed.
    SetPhases {
        /// The leader's term.
        term: u64,
        /// The records.
        records: Vec<String>,
        /// The phase of all of them.
        phase: Phase,
    },
    /// To a holder: all holders know that these are done.
    Forget {
        /// The leader's term.
        term: u64,
        /// The records.
        records: Vec<String>,
    },
    /// To any node: removes the parts of an upload that was given up.
    DropUpload(String),
    /// To a holder: writes an object to the store; the answer is the etag.
    PutAtStore {
        /// The object.
        manifest: Box<Manifest>,
        /// The condition, resolved.
        condition: StoreBase,
        /// The leader's term.
        term: u64,
    },
    /// To a holder: uploads a part; the answer is the etag.
    UploadAtStore {
        /// The key.
        at: BucketKey,
        /// The store's upload.
        upload: String,
        /// From 1.
        number: u32,
        /// The bytes.
        piece: Piece,
    },
}

impl StageCall {
    /// Whether the leader changes something.
    pub fn is_change(&self) -> bool {
        matches!(self, StageCall::Commit(_) | StageCall::Copy(_) | StageCall::Remove { .. })
    }

    /// The time of the leader's work, beside that of an answer.
    pub fn work_time(&self) -> Duration {
        match self {
            StageCall::Copy(copy) => copy.work_time,
            _ => Duration::ZERO,
        }
    }

    /// Whether the leader alone answers.
    pub fn is_for_leader(&self) -> bool {
        matches!(
            self,
            StageCall::Find(_)
                | StageCall::FindBelow { .. }
                | StageCall::Locate { .. }
                | StageCall::Commit(_)
                | StageCall::Copy(_)
                | StageCall::Remove { .. }
                | StageCall::ListUnsaved
                | StageCall::Drop(_)
        )
    }
}

/// The leader's knowledge of a name.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum KnownName {
    /// The store decides.
    Unknown,
    /// A staged object.
    Object(Box<Manifest>),
    /// Being removed.
    Removing,
    /// A folder of staged objects, whose name ends with a slash.
    Folder,
    /// The store has the object, under another version than readers know.
    Saved(SavedName),
}

/// Staged names below a prefix.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct NamesBelow {
    /// In order.
    pub names: Vec<(String, KnownName)>,
    /// The leader has more.
    pub has_more: bool,
    /// The prefix is the name of a staged object and a slash: no folder has the name.
    pub is_object: bool,
}

/// An uploaded object whose readers know the version of the group.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedName {
    /// The store's etag.
    pub real: String,
    /// The version that readers know.
    pub etag: String,
    /// The time that readers know, if that is not the store's.
    pub closed_s: Option<u64>,
}

/// What a version of the group is now.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Located {
    /// A staged object.
    Here(Box<Manifest>),
    /// An object of the store with this etag.
    Saved(String),
    /// The leader does not know.
    Unknown,
}

/// A node, as the leader needs to know.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeFacts {
    /// The failure domain.
    pub domain: String,
    /// Bytes that may be staged here, and bytes that are.
    pub size: u64,
    /// See above.
    pub used: u64,
    /// Identifies the process: another may have other disks.
    pub process: u64,
    /// Identifies the contents of the disks.
    pub disk: u64,
}

/// An answer.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum StageReply {
    /// To `Find`.
    Known(KnownName),
    /// To `FindBelow`.
    Names(NamesBelow),
    /// To `Locate`.
    Located(Located),
    /// An etag.
    Text(String),
    /// To `ListUnsaved`.
    Unsaved(UnsavedList),
    /// To `ListKept`: manifests by record, and whether there are more.
    Kept(Vec<Manifest>, bool),
    /// To `Fence` and `Describe`.
    Facts(NodeFacts),
    /// Bytes come beside the answer.
    Bytes,
    /// Done.
    Done,
    /// This node does not lead; the other does, as far as it knows.
    NotLeader(Option<String>),
    /// The caller's term is over.
    OldTerm(u64),
    /// A failure.
    Failed(SentFailure),
}

/// Objects that the store does not have.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnsavedList {
    /// The oldest objects that wait for their upload or their removal, and then the oldest of scratch.
    pub oldest: Vec<UnsavedObject>,
    /// The number of all objects that wait.
    pub count: u64,
    /// The bytes of these.
    pub bytes: u64,
    /// The number of all scratch objects.
    pub scratch_count: u64,
    /// The bytes of these.
    pub scratch_bytes: u64,
}

impl UnsavedList {
    /// As many of the oldest objects as fit into an answer. `all` is in the order of age.
    pub fn new(all: Vec<UnsavedObject>) -> UnsavedList {
        let sum = |objects: &[UnsavedObject]| objects.iter().map(|object| object.size).sum();
        let (scratch, waiting): (Vec<_>, Vec<_>) = all.into_iter().partition(|object| object.is_scratch);
        let (count, bytes) = (waiting.len() as u64, sum(&waiting));
        let (scratch_count, scratch_bytes) = (scratch.len() as u64, sum(&scratch));
        let mut room = UNSAVED_LEN;
        let fits = waiting.into_iter().chain(scratch).take(UNSAVED_MAX).take_while(|object| {
            let len = object.text_len();
            let has_room = len <= room;
            room = room.saturating_sub(len);
            has_room
        });
        UnsavedList { oldest: fits.collect(), count, bytes, scratch_count, scratch_bytes }
    }
}

/// A staged object for people.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnsavedObject {
    /// Bucket and key.
    pub at: BucketKey,
    /// The number of bytes.
    pub size: u64,
    /// Seconds since the close.
    pub age_s: u64,
    /// The nodes that have the object.
    pub holders: Vec<String>,
    /// Never uploaded.
    pub is_scratch: bool,
    /// The object is removed, and the store's object of the name is not removed yet.
    pub is_removal: bool,
    /// Why the last upload failed.
    pub error: Option<String>,
}

impl UnsavedObject {
    /// Most bytes of this object in an answer, where each character of a name may be escaped.
    fn text_len(&self) -> usize {
        let texts = self.holders.iter().chain([&self.at.bucket, &self.at.key]).chain(&self.error);
        256 + texts.map(|text| 2 * text.len() + 8).sum::<usize>()
    }
}

/// A failure on its way to another node.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct SentFailure {
    kind: u16,
    message: String,
    advice: SentAdvice,
}

#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
enum SentAdvice {
    Never,
    AfterPause,
    AtOnce,
}

impl From<RequestFailure> for SentFailure {
    fn from(failure: RequestFailure) -> SentFailure {
        SentFailure {
            kind: failure.error.kind().code(),
            message: failure.error.message().to_owned(),
            advice: match failure.advice {
                RetryHint::Never => SentAdvice::Never,
                RetryHint::AtOnce => SentAdvice::AtOnce,
                RetryHint::AfterPause | RetryHint::AfterRestart | RetryHint::SlowDown(_) => SentAdvice::AfterPause,
            },
        }
    }
}

impl From<SentFailure> for RequestFailure {
    fn from(sent: SentFailure) -> RequestFailure {
        RequestFailure {
            error: Error::new(ErrorKind::from_code(sent.kind), sent.message),
            advice: match sent.advice {
                SentAdvice::Never => RetryHint::Never,
                SentAdvice::AfterPause => RetryHint::AfterPause,
                SentAdvice::AtOnce => RetryHint::AtOnce,
            },
        }
    }
}

/// An answer and the bytes beside it.
#[derive(Debug)]
pub struct Reply {
    /// The answer.
    pub reply: StageReply,
    /// The bytes.
    pub bytes: Vec<u8>,
}

impl From<StageReply> for Reply {
    fn from(reply: StageReply) -> Reply {
        Reply { reply, bytes: Vec::new() }
    }
}

/// The failure of an answer of another kind.
pub fn unexpected(reply: &StageReply) -> RequestFailure {
    RequestFailure::transient(ErrorKind::Protocol, format!("a node gave an answer of another kind: {reply:?}"))
}
