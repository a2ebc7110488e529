//! Requests for the store behind a bucket, which a node sends with its own credentials: each is a single attempt, and the writer
//! decides what follows. The module knows keys and bytes, and neither files nor folders.
//!
//! The bytes of an object or a part, or the list of parts of an upload, are the payloads of a request or more: the first names the change, the length and
//! the checksum of all, and [`StoreCall::Piece`] has what follows, in order. The answer to the request with the last bytes is that
//! of the store; the node answers the others with [`StoreAnswer::Taken`].
//!
//! A store takes its time to make an object of parts. The node answers [`StoreAnswer::Working`] meanwhile, and the mount asks again
//! ([`StoreCall::Await`]).

use crate::codec::{ByteCursor, PutValue};
use crate::request::take_volume;
use crate::wire_value::{WireValue, wire_enum, wire_struct};
use crate::{AnswerBody, FrameError, VolumeId};
use spurline_types::Error;

/// Texts in a row, each with a length. Decoding borrows and checks all texts: iterating can't fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TextList<'a>(&'a [u8]);

impl<'a> TextList<'a> {
    /// The texts, encoded into `scratch`.
    pub fn new<'t>(texts: impl IntoIterator<Item = &'t str>, scratch: &'a mut Vec<u8>) -> Self {
        scratch.clear();
        texts.into_iter().for_each(|text| scratch.put_bytes(text.as_bytes()));
        TextList(scratch)
    }

    /// The texts, in order.
    pub fn iter(self) -> impl Iterator<Item = &'a str> {
        let mut take = ByteCursor(self.0);
        std::iter::from_fn(move || if take.0.is_empty() { None } else { take.take_text("a text").ok() })
    }
}

impl<'a> WireValue<'a> for TextList<'a> {
    fn put(&self, out: &mut Vec<u8>) {
        out.put_bytes(self.0);
    }

    fn take(take: &mut ByteCursor<'a>, what: &'static str) -> Result<Self, FrameError> {
        let all = take.take_bytes(what)?;
        let mut texts = ByteCursor(all);
        while !texts.0.is_empty() {
            texts.take_text(what)?;
        }
        Ok(TextList(all))
    }
}

/// The attributes of an object: names and values in turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StoreAttributes<'a> {
    /// Headers about the content.
    pub content: TextList<'a>,
    /// Attributes of the user.
    pub user: TextList<'a>,
    /// The storage class.
    pub storage_class: Option<&'a str>,
}

/// What must be true of an object when a request changes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StoreCondition<'a> {
    /// Nothing.
    None,
    /// No object has the name.
    Absent,
    /// The object has this etag.
    Version(&'a str),
}

/// The bytes of a change: an object, a part, or a list of parts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StoreBody {
    /// A number that the writer draws at random, under which the rest of the bytes follows.
    pub transfer: u64,
    /// Length of all bytes.
    pub len: u64,
    /// CRC64NVME of all bytes.
    pub checksum: u64,
}

/// The object that is copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StoreSource<'a> {
    /// The key.
    pub key: &'a str,
    /// The version to copy; by default the newest.
    pub etag: Option<&'a str>,
}

/// A request for the store. Etags are bare in requests that change something.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StoreCall<'a> {
    /// The server and the bucket, for messages, and how mounts change the bucket; no request of the store.
    Describe,
    /// An object with attributes.
    Head {
        /// The key.
        key: &'a str,
    },
    /// A page of keys.
    List {
        /// The start of the keys.
        prefix: &'a str,
        /// The token of the page.
        token: Option<&'a str>,
        /// Most names.
        max: u32,
        /// Whether keys with a further `/` are folded into prefixes.
        is_folded: bool,
    },
    /// Bytes of an object, which are the payload of the answer.
    Get {
        /// The key.
        key: &'a str,
        /// First byte.
        from: u64,
        /// The byte behind the last.
        to: u64,
        /// The version; any by default.
        etag: Option<&'a str>,
    },
    /// Writes an object.
    Put {
        /// The key.
        key: &'a str,
        /// The attributes of the object.
        attributes: StoreAttributes<'a>,
        /// The condition.
        condition: StoreCondition<'a>,
        /// The bytes; the payload has the first of these.
        body: StoreBody,
    },
    /// Begins an upload in parts.
    BeginUpload {
        /// The key.
        key: &'a str,
        /// The attributes of the object.
        attributes: StoreAttributes<'a>,
    },
    /// Uploads a part.
    UploadPart {
        /// The key.
        key: &'a str,
        /// The upload.
        upload: &'a str,
        /// From 1.
        number: u32,
        /// The bytes; the payload has the first of these.
        body: StoreBody,
    },
    /// Makes a part from bytes of an object.
    CopyPart {
        /// The key.
        key: &'a str,
        /// The upload.
        upload: &'a str,
        /// From 1.
        number: u32,
        /// The object that is copied.
        source: StoreSource<'a>,
        /// First byte.
        from: u64,
        /// The byte behind the last.
        to: u64,
    },
    /// Makes the object of an upload.
    Complete {
        /// The key.
        key: &'a str,
        /// The upload.
        upload: &'a str,
        /// The condition.
        condition: StoreCondition<'a>,
        /// The parts ([`UploadParts`]).
        body: StoreBody,
    },
    /// Ends an upload without an object.
    Abort {
        /// The key.
        key: &'a str,
        /// The upload.
        upload: &'a str,
    },
    /// Copies an object.
    Copy {
        /// The object that is copied.
        source: StoreSource<'a>,
        /// The key of the copy.
        key: &'a str,
        /// The attributes of the copy; by default the object's.
        attributes: Option<StoreAttributes<'a>>,
        /// The condition.
        condition: StoreCondition<'a>,
    },
    /// Removes an object.
    Delete {
        /// The key.
        key: &'a str,
        /// The condition.
        condition: StoreCondition<'a>,
    },
    /// The next bytes of a transfer.
    Piece {
        /// The number of the transfer.
        transfer: u64,
        /// The first byte of the payload among all bytes.
        offset: u64,
    },
    /// The answer to [`StoreCall::Complete`], which the node did not have yet.
    Await {
        /// The number of the transfer.
        transfer: u64,
    },
    /// Names the transfers with the bytes of a new object ([`SentParts`], the payload); no request of the store.
    NoteSent {
        /// The key.
        key: &'a str,
        /// The version.
        etag: &'a str,
        /// Length in bytes.
        size: u64,
    },
}

impl<'a> StoreCall<'a> {
    /// A name for messages.
    pub fn name(&self) -> &'static str {
        match self {
            StoreCall::Describe => "description of the store",
            StoreCall::Head { .. } => "head of an object",
            StoreCall::List { .. } => "listing of keys",
            StoreCall::Get { .. } => "read of an object",
            StoreCall::Put { .. } => "write of an object",
            StoreCall::BeginUpload { .. } => "start of an upload",
            StoreCall::UploadPart { .. } => "part of an upload",
            StoreCall::CopyPart { .. } => "copy of a part",
            StoreCall::Complete { .. } | StoreCall::Abort { .. } => "end of an upload",
            StoreCall::Copy { .. } => "copy of an object",
            StoreCall::Delete { .. } => "removal of an object",
            StoreCall::Piece { .. } => "piece of a transfer",
            StoreCall::Await { .. } => "wait for the end of an upload",
            StoreCall::NoteSent { .. } => "note of sent bytes",
        }
    }

    /// The keys, or the start of keys, that the request names.
    pub fn keys(&self) -> impl Iterator<Item = &'a str> {
        let (key, other) = match *self {
            StoreCall::Describe | StoreCall::Piece { .. } | StoreCall::Await { .. } => (None, None),
            StoreCall::List { prefix, .. } => (Some(prefix), None),
            StoreCall::Head { key }
            | StoreCall::Get { key, .. }
            | StoreCall::Put { key, .. }
            | StoreCall::BeginUpload { key, .. }
            | StoreCall::UploadPart { key, .. }
            | StoreCall::Complete { key, .. }
            | StoreCall::Abort { key, .. }
            | StoreCall::Delete { key, .. }
            | StoreCall::NoteSent { key, .. } => (Some(key), None),
            StoreCall::CopyPart { key, source, .. } | StoreCall::Copy { key, source, .. } => {
                (Some(key), Some(source.key))
            }
        };
        key.into_iter().chain(other)
    }

    /// The bytes of the change, which may come in pieces.
    pub fn body(&self) -> Option<StoreBody> {
        match *self {
            StoreCall::Put { body, .. } | StoreCall::UploadPart { body, .. } | StoreCall::Complete { body, .. } => {
                Some(body)
            }
            _ => None,
        }
    }

    /// Whether the request may be executed several times with the same answer.
    pub fn is_query(&self) -> bool {
        self.is_read() || matches!(self, StoreCall::Describe)
    }

    /// Whether the request only reads the store: nodes that take no changes answer as well.
    pub fn is_read(&self) -> bool {
        matches!(self, StoreCall::Head { .. } | StoreCall::List { .. } | StoreCall::Get { .. })
    }

    /// The encoded call, which outlives the values.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = Vec::new();
        self.put(&mut out);
        out
    }

    /// The call of [`StoreCall::to_bytes`].
    ///
    /// # Errors
    /// When the bytes encode no call.
    pub fn from_bytes(bytes: &'a [u8]) -> Result<Self, FrameError> {
        let mut take = ByteCursor(bytes);
        let call = StoreCall::take(&mut take, "a call")?;
        take.expect_end()?;
        Ok(call)
    }
}

/// A request for the store of a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StoreRequest<'a> {
    /// The volume.
    pub volume: VolumeId,
    /// How long the node waits for the store's answer, in milliseconds.
    pub time_ms: u32,
    /// The request.
    pub call: StoreCall<'a>,
    /// The bytes.
    pub payload: &'a [u8],
}

impl<'a> StoreRequest<'a> {
    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        out.put_u32(self.volume.0);
        out.put_u32(self.time_ms);
        self.call.put(out);
    }

    pub(crate) fn take(take: &mut ByteCursor<'a>) -> Result<Self, FrameError> {
        let volume = take_volume(take)?;
        let time_ms = take.take_u32("the time of a request")?;
        Ok(StoreRequest { volume, time_ms, call: StoreCall::take(take, "a call")?, payload: &[] })
    }

    /// The request with bytes.
    pub(crate) fn with_payload(self, payload: &'a [u8]) -> Result<Self, FrameError> {
        let takes_bytes = match self.call {
            StoreCall::Piece { .. } | StoreCall::NoteSent { .. } => true,
            call => call.body().is_some(),
        };
        if !takes_bytes && !payload.is_empty() {
            return Err(FrameError::Value { what: "the payload of a request", value: payload.len() as u64 });
        }
        Ok(StoreRequest { payload, ..self })
    }
}

/// The parts of an object, as the bytes of [`StoreCall::Complete`]: numbers and etags.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UploadParts(pub Vec<(u32, Box<str>)>);

impl AnswerBody for UploadParts {
    fn encode(&self, out: &mut Vec<u8>) {
        for (number, etag) in &self.0 {
            out.put_u32(*number);
            etag.put(out);
        }
    }

    fn decode(bytes: &[u8]) -> Result<Self, FrameError> {
        let mut take = ByteCursor(bytes);
        let mut parts = Vec::new();
        while !take.0.is_empty() {
            parts.push((take.take_u32("a part's number")?, WireValue::take(&mut take, "a part's etag")?));
        }
        Ok(UploadParts(parts))
    }
}

/// Bytes of an object that one transfer had.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SentPart {
    /// The first byte.
    pub offset: u64,
    /// Number of bytes.
    pub len: u64,
    /// The number of the transfer.
    pub transfer: u64,
    /// The place of the node's name.
    pub node: u32,
}

/// The transfers that had the bytes of an object, as the bytes of [`StoreCall::NoteSent`].
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SentParts {
    /// The names of the nodes that sent the bytes.
    pub nodes: Vec<Box<str>>,
    /// The transfers.
    pub parts: Vec<SentPart>,
}

impl AnswerBody for SentParts {
    fn encode(&self, out: &mut Vec<u8>) {
        self.nodes.put(out);
        put_list(&self.parts, out);
    }

    fn decode(bytes: &[u8]) -> Result<Self, FrameError> {
        let mut take = ByteCursor(bytes);
        let nodes = WireValue::take(&mut take, "the name of a node")?;
        let parts = take_list(&mut take, SentPart::ENCODED_LEN, "a part that was sent")?;
        take.expect_end()?;
        Ok(SentParts { nodes, parts })
    }
}

impl SentPart {
    /// Bytes of an encoded part.
    pub const ENCODED_LEN: usize = 3 * 8 + 4;
}

/// Whether another attempt may succeed, and when.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StoreRetry {
    /// Another attempt fails likewise.
    Never,
    /// After the usual pause.
    AfterPause,
    /// Once the server listens again.
    AfterRestart,
    /// At once.
    AtOnce,
    /// After the store has had time: this many milliseconds if the store has stated a time.
    SlowDown(Option<u64>),
}

/// An object of the store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoreObject {
    /// The key.
    pub key: Box<str>,
    /// Length in bytes.
    pub size: u64,
    /// Seconds since 1970.
    pub mtime_s: u64,
    /// As the store returned.
    pub etag: Option<Box<str>>,
}

/// The answer to a read of bytes, which are the payload.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoreBytes {
    /// As the store returned.
    pub etag: Option<Box<str>>,
    /// Seconds since 1970.
    pub mtime_s: Option<u64>,
    /// Length of the whole object.
    pub total: Option<u64>,
    /// First byte of the store's answer.
    pub from: Option<u64>,
    /// The byte behind the last of the store's answer.
    pub to: Option<u64>,
    /// Whether the answer is that to a request for a range.
    pub partial: bool,
}

/// How mounts change a bucket through a node, by the flags of the node.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StoreSettings {
    /// `--last-writer-wins`.
    pub last_writer_wins: bool,
    /// `--allow-unguarded-writes`.
    pub allow_unguarded_writes: bool,
    /// `--object-attrs`.
    pub object_attrs: bool,
    /// `--rename-limit`.
    pub rename_limit: u64,
    /// `--abort-uploads-after`, in seconds.
    pub abort_uploads_after_s: u64,
    /// `--squash`.
    pub squash: Option<StoreOwner>,
    /// The nodes keep staged files. On the wire a last byte, which only such a node sends.
    pub stages: bool,
}

/// The owner of all changes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StoreOwner {
    /// The user.
    pub uid: u32,
    /// The group.
    pub gid: u32,
}

/// Answers a [`StoreRequest`]. A failure of the store is an answer like any other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StoreAnswer {
    /// Done, without a result.
    Done,
    /// The node has the bytes, and more follow.
    Taken,
    /// The store has not answered yet. How many milliseconds ago the last byte of the answer came, if any did.
    Working(Option<u64>),
    /// An etag, or the id of an upload.
    Text(Box<str>),
    /// An object; then names and values of the content headers and of the user's attributes in turn, and the storage class.
    Object(StoreObject, Vec<Box<str>>, Vec<Box<str>>, Option<Box<str>>),
    /// Objects of a page, prefixes, and the token of the next page.
    Page(Vec<StoreObject>, Vec<Box<str>>, Option<Box<str>>),
    /// Facts about the payload.
    Bytes(StoreBytes),
    /// The request failed.
    Failed(Error, StoreRetry),
    /// The server and the bucket, and how mounts change the bucket.
    Described(Box<str>, StoreSettings),
}

impl AnswerBody for StoreAnswer {
    fn encode(&self, out: &mut Vec<u8>) {
        self.put(out);
    }

    fn decode(bytes: &[u8]) -> Result<Self, FrameError> {
        let mut take = ByteCursor(bytes);
        let answer = StoreAnswer::take(&mut take, "an answer")?;
        take.expect_end()?;
        Ok(answer)
    }
}

impl<'a> WireValue<'a> for &'a str {
    fn put(&self, out: &mut Vec<u8>) {
        out.put_bytes(self.as_bytes());
    }

    fn take(take: &mut ByteCursor<'a>, what: &'static str) -> Result<Self, FrameError> {
        take.take_text(what)
    }
}

impl WireValue<'_> for Box<str> {
    fn put(&self, out: &mut Vec<u8>) {
        out.put_bytes(self.as_bytes());
    }

    fn take(take: &mut ByteCursor<'_>, what: &'static str) -> Result<Self, FrameError> {
        take.take_text(what).map(Box::from)
    }
}

impl WireValue<'_> for Vec<Box<str>> {
    fn put(&self, out: &mut Vec<u8>) {
        put_list(self, out);
    }

    fn take(take: &mut ByteCursor<'_>, what: &'static str) -> Result<Self, FrameError> {
        // An empty text.
        take_list(take, 4, what)
    }
}

impl WireValue<'_> for Vec<StoreObject> {
    fn put(&self, out: &mut Vec<u8>) {
        put_list(self, out);
    }

    fn take(take: &mut ByteCursor<'_>, what: &'static str) -> Result<Self, FrameError> {
        // An empty key without an etag.
        take_list(take, 4 + 8 + 8 + 1, what)
    }
}

fn put_list<'a>(values: &[impl WireValue<'a>], out: &mut Vec<u8>) {
    out.put_u32(u32::try_from(values.len()).unwrap_or(u32::MAX));
    values.iter().for_each(|value| value.put(out));
}

/// A list of values that have at least `shortest` bytes each.
fn take_list<'a, T: WireValue<'a>>(
    take: &mut ByteCursor<'a>,
    shortest: usize,
    what: &'static str,
) -> Result<Vec<T>, FrameError> {
    let count = take.take_u32("the length of a list")? as usize;
    let mut values = Vec::with_capacity(count.min(take.0.len() / shortest));
    for _ in 0..count {
        values.push(T::take(take, what)?);
    }
    Ok(values)
}

impl<'a> WireValue<'a> for StoreAttributes<'a> {
    fn put(&self, out: &mut Vec<u8>) {
        self.content.put(out);
        self.user.put(out);
        self.storage_class.put(out);
    }

    fn take(take: &mut ByteCursor<'a>, what: &'static str) -> Result<Self, FrameError> {
        Ok(StoreAttributes {
            content: WireValue::take(take, what)?,
            user: WireValue::take(take, what)?,
            storage_class: WireValue::take(take, what)?,
        })
    }
}

impl<'a> WireValue<'a> for StoreSource<'a> {
    fn put(&self, out: &mut Vec<u8>) {
        self.key.put(out);
        self.etag.put(out);
    }

    fn take(take: &mut ByteCursor<'a>, what: &'static str) -> Result<Self, FrameError> {
        Ok(StoreSource { key: WireValue::take(take, what)?, etag: WireValue::take(take, what)? })
    }
}

/// The last byte is absent in the answer of an earlier release, and of a node that keeps no staged files: mounts of earlier releases
/// read the latter.
impl WireValue<'_> for StoreSettings {
    fn put(&self, out: &mut Vec<u8>) {
        self.last_writer_wins.put(out);
        self.allow_unguarded_writes.put(out);
        self.object_attrs.put(out);
        self.rename_limit.put(out);
        self.abort_uploads_after_s.put(out);
        self.squash.put(out);
        if self.stages {
            self.stages.put(out);
        }
    }

    fn take(take: &mut ByteCursor<'_>, _: &'static str) -> Result<Self, FrameError> {
        const WHAT: &str = "the settings of a bucket";
        Ok(StoreSettings {
            last_writer_wins: WireValue::take(take, WHAT)?,
            allow_unguarded_writes: WireValue::take(take, WHAT)?,
            object_attrs: WireValue::take(take, WHAT)?,
            rename_limit: WireValue::take(take, WHAT)?,
            abort_uploads_after_s: WireValue::take(take, WHAT)?,
            squash: WireValue::take(take, WHAT)?,
            stages: if take.0.is_empty() { false } else { WireValue::take(take, WHAT)? },
        })
    }
}

wire_struct!(StoreOwner, "an owner": uid, gid);
wire_struct!(StoreBody, "the bytes of a change": transfer, len, checksum);
wire_struct!(SentPart, "a part that was sent": offset, len, transfer, node);
wire_struct!(StoreObject, "an object": key, size, mtime_s, etag);
wire_struct!(StoreBytes, "the answer to a read": etag, mtime_s, total, from, to, partial);

wire_enum! { 'a StoreCondition<'a>, "a condition":
    0 None,
    1 Absent,
    2 Version(etag),
}

wire_enum! { 'a StoreRetry, "advice":
    0 Never,
    1 AfterPause,
    2 AfterRestart,
    3 AtOnce,
    4 SlowDown(pause_ms),
}

wire_enum! { 'a StoreCall<'a>, "a request for the store":
    0 Describe,
    1 Head { key },
    2 List { prefix, token, max, is_folded },
    3 Get { key, from, to, etag },
    4 Put { key, attributes, condition, body },
    5 BeginUpload { key, attributes },
    6 UploadPart { key, upload, number, body },
    7 CopyPart { key, upload, number, source, from, to },
    8 Complete { key, upload, condition, body },
    9 Abort { key, upload },
    10 Copy { source, key, attributes, condition },
    11 Delete { key, condition },
    12 Piece { transfer, offset },
    13 Await { transfer },
    14 NoteSent { key, etag, size },
}

wire_enum! { 'a StoreAnswer, "an answer of the store":
    0 Done,
    1 Taken,
    2 Text(text),
    3 Object(object, content, user, storage_class),
    4 Page(objects, prefixes, next),
    5 Bytes(bytes),
    6 Failed(error, retry),
    7 Working(quiet_ms),
    8 Described(text, settings),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_of_nodes_without_staged_files_have_the_form_of_earlier_releases() {
        let squash = Some(StoreOwner { uid: 7, gid: 8 });
        let plain = StoreSettings {
            object_attrs: true,
            rename_limit: 9,
            abort_uploads_after_s: 10,
            squash,
            ..StoreSettings::default()
        };
        let mut earlier = Vec::new();
        StoreAnswer::Described("server".into(), plain).encode(&mut earlier);
        assert_eq!(earlier.len(), 1 + 4 + 6 + 3 + 8 + 8 + 1 + 4 + 4);
        let mut staging = Vec::new();
        StoreAnswer::Described("server".into(), StoreSettings { stages: true, ..plain }).encode(&mut staging);
        assert_eq!(staging, [&earlier[..], &[1]].concat());
        for (bytes, stages) in [(&earlier, false), (&staging, true)] {
            let settings = StoreSettings { stages, ..plain };
            assert_eq!(StoreAnswer::decode(bytes).unwrap(), StoreAnswer::Described("server".into(), settings));
            assert!(StoreAnswer::decode(&bytes[..bytes.len() - 2]).is_err());
        }
        *staging.last_mut().unwrap() = 2;
        assert!(StoreAnswer::decode(&staging).is_err());
    }
}
