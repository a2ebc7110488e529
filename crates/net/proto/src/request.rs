//! The requests of a reader. Paths are bytes below the source, without a leading slash; the root is empty.

use crate::codec::{ByteCursor, PutValue};
use crate::header::check_len;
use crate::proof::{Challenge, TokenProof};
use crate::{
    FrameError, FrameHeader, FrameOp, HEADER_LEN, MAX_REQUEST_BODY, MAX_VERSION, MAX_WRITE, MIN_VERSION, ObjectRanges,
    StageRequest, StoreRequest, WriteRequest, frame_padding,
};
use std::fmt;

/// A node's number for a volume, valid on the connection of the `WelcomeAnswer` that contained it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct VolumeId(pub u32);

/// The handshake: the first request on a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HelloRequest<'a> {
    /// Oldest protocol version the peer speaks.
    pub min_version: u16,
    /// Newest protocol version the peer speaks.
    pub max_version: u16,
    /// The peer's name for logs: host and process.
    pub peer: &'a str,
    /// The source to read; empty on a connection for heartbeats only.
    pub source: &'a str,
}

impl<'a> HelloRequest<'a> {
    /// A handshake with the versions of this build.
    pub fn new(peer: &'a str, source: &'a str) -> Self {
        HelloRequest { min_version: MIN_VERSION, max_version: MAX_VERSION, peer, source }
    }

    /// The newest version that both sides speak.
    ///
    /// # Errors
    /// When there is none.
    pub fn negotiate_version(&self) -> Result<u16, FrameError> {
        let version = self.max_version.min(MAX_VERSION);
        if version < self.min_version.max(MIN_VERSION) {
            Err(FrameError::Version(self.max_version))
        } else {
            Ok(version)
        }
    }
}

/// Options of a read, as bits. A decoder refuses unknown bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct ReadFlags(u8);

impl ReadFlags {
    /// A read of a mount, served by this node in any case.
    pub const NONE: ReadFlags = ReadFlags(0);
    /// A node that neither caches nor is fetching the block may answer with no bytes and
    /// [`REDIRECT_BODY`](crate::REDIRECT_BODY): another node fetches the block for all.
    pub const MAY_REDIRECT: ReadFlags = ReadFlags(1);
    /// A read by another node: an uncached block is an error and is not fetched.
    pub const CACHED_ONLY: ReadFlags = ReadFlags(2);
    /// With [`ReadFlags::CACHED_ONLY`]: an uncached block is also fetched in the background. Alone: the same, and a cached block is
    /// answered without bytes.
    pub const BEGIN_FETCH: ReadFlags = ReadFlags(4);
    const ALL: u8 = 7;

    /// The flags of both.
    #[must_use]
    pub const fn with(self, other: ReadFlags) -> ReadFlags {
        ReadFlags(self.0 | other.0)
    }

    /// Whether all flags of `other` are set.
    pub const fn contains(self, other: ReadFlags) -> bool {
        self.0 & other.0 == other.0
    }

    /// The flags of a wire number.
    ///
    /// # Errors
    /// When it has unknown bits.
    pub fn from_bits(bits: u8) -> Result<ReadFlags, FrameError> {
        if bits & !Self::ALL != 0 {
            return Err(FrameError::Value { what: "the flags of a read", value: bits.into() });
        }
        Ok(ReadFlags(bits))
    }
}

/// Requests bytes of an object at one version.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReadRequest<'a> {
    /// The volume.
    pub volume: VolumeId,
    /// The object's path.
    pub path: &'a [u8],
    /// The required version of its bytes.
    pub version: &'a str,
    /// The object's length at that version.
    pub size: u64,
    /// Offset of the first byte.
    pub offset: u64,
    /// Number of bytes; the answer is shorter only at the object's end.
    pub len: u32,
    /// Options.
    pub flags: ReadFlags,
}

/// One request. Decoding borrows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
#[allow(clippy::large_enum_variant, reason = "a request lives on the stack: a box would cost an allocation")]
pub enum NodeRequest<'a> {
    /// Opens a connection; answered by a `WelcomeAnswer`.
    Hello(HelloRequest<'a>),
    /// A heartbeat; answered by an empty frame.
    Ping,
    /// Answered by a `ChallengeAnswer`.
    Challenge(Challenge<'a>),
    /// Answered by a `TokenProof`.
    Prove(TokenProof),
    /// Answered by an `Attr`.
    Lookup {
        /// The volume.
        volume: VolumeId,
        /// The path.
        path: &'a [u8],
        /// Limit of the answer's age since the origin was queried, in milliseconds.
        max_age_ms: u32,
    },
    /// Answered by an `Attr`.
    FolderMarker {
        /// The volume.
        volume: VolumeId,
        /// The folder of a bucket.
        path: &'a [u8],
        /// Limit of the answer's age since the origin was queried, in milliseconds.
        max_age_ms: u32,
    },
    /// Answered by a `ListPage`.
    List {
        /// The volume.
        volume: VolumeId,
        /// The directory.
        path: &'a [u8],
        /// Where the page starts; `None` for the first.
        cursor: Option<&'a [u8]>,
        /// Limit of the number of names.
        max: u32,
        /// Limit of the answer's age since the origin was queried, in milliseconds.
        max_age_ms: u32,
    },
    /// Answered by the target's bytes.
    ReadLink {
        /// The volume.
        volume: VolumeId,
        /// The symbolic link.
        path: &'a [u8],
    },
    /// Answered by JSON text, as in the extended attribute of a file.
    ObjectHeaders {
        /// The volume.
        volume: VolumeId,
        /// The object or the folder.
        path: &'a [u8],
    },
    /// Answered by a payload.
    Read(ReadRequest<'a>),
    /// Answered by a `CapacityAnswer`.
    StatFs {
        /// The volume.
        volume: VolumeId,
    },
    /// Queries which blocks of an object are cached; answered by JSON text.
    Info {
        /// The volume.
        volume: VolumeId,
        /// The object.
        path: &'a [u8],
    },
    /// Brings ranges into the node's cache without sending them; answered by a `RangesDone`.
    Warm {
        /// The volume.
        volume: VolumeId,
        /// Whether cached blocks are read back and checked.
        verify: bool,
        /// The ranges to bring in.
        parts: ObjectRanges<'a>,
    },
    /// Removes ranges from the node's cache, whole blocks only; answered by a `RangesDone`, in which bytes held are
    /// those kept because they are pinned.
    Drop {
        /// The volume.
        volume: VolumeId,
        /// Whether pinned blocks are removed as well.
        with_pinned: bool,
        /// The ranges to remove.
        parts: ObjectRanges<'a>,
    },
    /// Removes one part of all blocks from the node's cache, of any file and version; answered by a `RangesDone` with one
    /// result as for a `Drop`, or with none beyond the last part.
    DropAll {
        /// The volume.
        volume: VolumeId,
        /// Whether the blocks of all other sources are removed as well.
        every_source: bool,
        /// Whether pinned blocks are removed as well.
        with_pinned: bool,
        /// The number of the part, from 0.
        part: u32,
    },
    /// Queries the node itself: configuration, disks, counters; answered by JSON text.
    Describe,
    /// Queries the objects a node caches, by pages; answered by JSON text with the id of the next page.
    HeldObjects {
        /// The id of the object before the page; `None` for the first page.
        after: Option<u128>,
    },
    /// Changes the node's share of its group's blocks until its next start; answered by an empty frame.
    Weigh {
        /// The share; 0 drains it.
        weight: u32,
    },
    /// Sends rules for folders to a node, which adopts them if they are newer than its own; answered by the node's
    /// rules.
    Rules {
        /// The rules as JSON; empty for a query.
        text: &'a str,
    },
    /// Applies the rules for folders to the cached blocks of the ranges, and fetches nothing; answered by a
    /// `RangesDone`.
    Classify {
        /// The volume.
        volume: VolumeId,
        /// The ranges to classify.
        parts: ObjectRanges<'a>,
    },
    /// An operation on a writable volume; answered by a `WriteAnswer`, and a payload if it reads.
    Write(WriteRequest<'a>),
    /// A request for the store of a bucket; answered by a `StoreAnswer`, and a payload for reads.
    Store(StoreRequest<'a>),
    /// A call about staged files; answered by bytes, and a payload for reads.
    Stage(StageRequest<'a>),
    /// A request of a newer peer.
    Unknown {
        /// Its operation number.
        op: u16,
        /// Its body, not decoded.
        body: &'a [u8],
    },
}

impl<'a> NodeRequest<'a> {
    /// The operation.
    pub fn op(&self) -> FrameOp {
        match self {
            NodeRequest::Hello(_) => FrameOp::Hello,
            NodeRequest::Ping => FrameOp::Ping,
            NodeRequest::Challenge(_) => FrameOp::Challenge,
            NodeRequest::Prove(_) => FrameOp::Prove,
            NodeRequest::Lookup { .. } => FrameOp::Lookup,
            NodeRequest::FolderMarker { .. } => FrameOp::FolderMarker,
            NodeRequest::List { .. } => FrameOp::List,
            NodeRequest::ReadLink { .. } => FrameOp::ReadLink,
            NodeRequest::ObjectHeaders { .. } => FrameOp::ObjectHeaders,
            NodeRequest::Read(_) => FrameOp::Read,
            NodeRequest::StatFs { .. } => FrameOp::StatFs,
            NodeRequest::Info { .. } => FrameOp::Info,
            NodeRequest::Warm { .. } => FrameOp::Warm,
            NodeRequest::Drop { .. } => FrameOp::Drop,
            NodeRequest::DropAll { .. } => FrameOp::DropAll,
            NodeRequest::Describe => FrameOp::Describe,
            NodeRequest::HeldObjects { .. } => FrameOp::HeldObjects,
            NodeRequest::Weigh { .. } => FrameOp::Weigh,
            NodeRequest::Rules { .. } => FrameOp::Rules,
            NodeRequest::Classify { .. } => FrameOp::Classify,
            NodeRequest::Write(_) => FrameOp::Write,
            NodeRequest::Store(_) => FrameOp::Store,
            NodeRequest::Stage(_) => FrameOp::Stage,
            NodeRequest::Unknown { op, .. } => FrameOp::from_code(*op),
        }
    }

    /// The bytes that follow the frame; empty except for a write, a request for a store and a call about staged files.
    pub fn payload(&self) -> &'a [u8] {
        match self {
            NodeRequest::Write(write) => write.payload,
            NodeRequest::Store(store) => store.payload,
            NodeRequest::Stage(stage) => stage.payload,
            _ => &[],
        }
    }

    /// The request with the bytes that followed its frame.
    ///
    /// # Errors
    /// When it has none.
    pub fn with_payload(self, payload: &'a [u8]) -> Result<Self, FrameError> {
        match self {
            NodeRequest::Write(write) => write.with_payload(payload).map(NodeRequest::Write),
            NodeRequest::Store(store) => store.with_payload(payload).map(NodeRequest::Store),
            NodeRequest::Stage(stage) => Ok(NodeRequest::Stage(StageRequest { payload, ..stage })),
            other if payload.is_empty() => Ok(other),
            _ => Err(FrameError::Value { what: "the payload of a request", value: payload.len() as u64 }),
        }
    }

    /// Appends the frame to `out`, without its payload. On an error `out` is as it was.
    ///
    /// # Errors
    /// When the body is longer than [`MAX_REQUEST_BODY`], or the payload longer than [`MAX_WRITE`].
    pub fn encode(&self, id: u64, out: &mut Vec<u8>) -> Result<(), FrameError> {
        let start = out.len();
        out.resize(start + HEADER_LEN, 0);
        self.encode_body(out);
        let len = out.len() - start - HEADER_LEN;
        let lens = check_len("a request's body", len, MAX_REQUEST_BODY)
            .and_then(|body| Ok((body, check_len("a request's payload", self.payload().len(), MAX_WRITE)?)));
        match lens {
            Ok((body_len, payload_len)) => {
                out.extend_from_slice(frame_padding(len));
                let header = FrameHeader { payload_len, ..FrameHeader::new_request(self.op(), id, body_len) };
                out[start..start + HEADER_LEN].copy_from_slice(&header.encode());
                Ok(())
            }
            Err(e) => {
                out.truncate(start);
                Err(e)
            }
        }
    }

    fn encode_body(&self, out: &mut Vec<u8>) {
        match *self {
            NodeRequest::Hello(HelloRequest { min_version, max_version, peer, source }) => {
                out.put_u16(min_version);
                out.put_u16(max_version);
                out.put_bytes(peer.as_bytes());
                out.put_bytes(source.as_bytes());
            }
            NodeRequest::Ping | NodeRequest::Describe => {}
            NodeRequest::HeldObjects { after } => {
                out.put_option(after.map(u128::to_le_bytes).as_ref().map(<[u8; 16]>::as_slice))
            }
            NodeRequest::Challenge(challenge) => challenge.encode(out),
            NodeRequest::Prove(proof) => out.extend_from_slice(&proof.0),
            NodeRequest::Lookup { volume, path, max_age_ms }
            | NodeRequest::FolderMarker { volume, path, max_age_ms } => {
                out.put_u32(volume.0);
                out.put_bytes(path);
                out.put_u32(max_age_ms);
            }
            NodeRequest::ReadLink { volume, path }
            | NodeRequest::ObjectHeaders { volume, path }
            | NodeRequest::Info { volume, path } => {
                out.put_u32(volume.0);
                out.put_bytes(path);
            }
            NodeRequest::List { volume, path, cursor, max, max_age_ms } => {
                out.put_u32(volume.0);
                out.put_bytes(path);
                out.put_option(cursor);
                out.put_u32(max);
                out.put_u32(max_age_ms);
            }
            NodeRequest::Read(ref read) => put_read(read, out),
            NodeRequest::Warm { volume, verify, parts } => {
                out.put_u32(volume.0);
                out.put_u8(u8::from(verify));
                out.extend_from_slice(parts.bytes());
            }
            NodeRequest::Drop { volume, with_pinned, parts } => {
                out.put_u32(volume.0);
                out.put_u8(u8::from(with_pinned));
                out.extend_from_slice(parts.bytes());
            }
            NodeRequest::DropAll { volume, every_source, with_pinned, part } => {
                out.put_u32(volume.0);
                out.put_u8(u8::from(every_source));
                out.put_u8(u8::from(with_pinned));
                out.put_u32(part);
            }
            NodeRequest::Classify { volume, parts } => {
                out.put_u32(volume.0);
                out.extend_from_slice(parts.bytes());
            }
            NodeRequest::StatFs { volume } => out.put_u32(volume.0),
            NodeRequest::Weigh { weight } => out.put_u32(weight),
            NodeRequest::Rules { text } => out.put_bytes(text.as_bytes()),
            NodeRequest::Write(ref write) => write.encode(out),
            NodeRequest::Store(ref store) => store.encode(out),
            NodeRequest::Stage(ref stage) => stage.encode(out),
            NodeRequest::Unknown { body, .. } => out.extend_from_slice(body),
        }
    }

    /// Decodes the body of a request for `op`; its payload is added by [`NodeRequest::with_payload`].
    ///
    /// # Errors
    /// When the bytes do not encode such a body, or contain a path that no file can have.
    pub fn decode(op: FrameOp, body: &'a [u8]) -> Result<Self, FrameError> {
        let mut take = ByteCursor(body);
        let request = match op {
            FrameOp::Hello => NodeRequest::Hello(HelloRequest {
                min_version: take.take_u16("a version")?,
                max_version: take.take_u16("a version")?,
                peer: take.take_text("a peer's name")?,
                source: take.take_text("a source")?,
            }),
            FrameOp::Ping => NodeRequest::Ping,
            FrameOp::Challenge => NodeRequest::Challenge(Challenge::take_challenge(&mut take)?),
            FrameOp::Prove => NodeRequest::Prove(TokenProof(take.take_array("a proof")?)),
            FrameOp::Lookup => NodeRequest::Lookup {
                volume: take_volume(&mut take)?,
                path: take_path(&mut take)?,
                max_age_ms: take.take_u32("an age")?,
            },
            FrameOp::FolderMarker => NodeRequest::FolderMarker {
                volume: take_volume(&mut take)?,
                path: take_path(&mut take)?,
                max_age_ms: take.take_u32("an age")?,
            },
            FrameOp::List => NodeRequest::List {
                volume: take_volume(&mut take)?,
                path: take_path(&mut take)?,
                cursor: take.take_option("a cursor")?,
                max: take.take_u32("a page's length")?,
                max_age_ms: take.take_u32("an age")?,
            },
            FrameOp::ReadLink => NodeRequest::ReadLink { volume: take_volume(&mut take)?, path: take_path(&mut take)? },
            FrameOp::ObjectHeaders => {
                NodeRequest::ObjectHeaders { volume: take_volume(&mut take)?, path: take_path(&mut take)? }
            }
            FrameOp::Read => NodeRequest::Read(take_read(&mut take)?),
            FrameOp::Describe => NodeRequest::Describe,
            FrameOp::HeldObjects => NodeRequest::HeldObjects { after: take_object_id(&mut take)? },
            FrameOp::Warm => NodeRequest::Warm {
                volume: take_volume(&mut take)?,
                verify: take_switch(&mut take, "whether to verify")?,
                parts: ObjectRanges::take_ranges(&mut take)?,
            },
            FrameOp::Drop => NodeRequest::Drop {
                volume: take_volume(&mut take)?,
                with_pinned: take_switch(&mut take, "whether to drop pinned blocks")?,
                parts: ObjectRanges::take_ranges(&mut take)?,
            },
            FrameOp::DropAll => NodeRequest::DropAll {
                volume: take_volume(&mut take)?,
                every_source: take_switch(&mut take, "whether to drop other sources")?,
                with_pinned: take_switch(&mut take, "whether to drop pinned blocks")?,
                part: take.take_u32("a part of the cache")?,
            },
            FrameOp::Weigh => NodeRequest::Weigh { weight: take.take_u32("a weight")? },
            FrameOp::Classify => {
                NodeRequest::Classify { volume: take_volume(&mut take)?, parts: ObjectRanges::take_ranges(&mut take)? }
            }
            FrameOp::Rules => NodeRequest::Rules { text: take.take_text("rules for folders")? },
            FrameOp::StatFs => NodeRequest::StatFs { volume: take_volume(&mut take)? },
            FrameOp::Info => NodeRequest::Info { volume: take_volume(&mut take)?, path: take_path(&mut take)? },
            FrameOp::Write => NodeRequest::Write(WriteRequest::take(&mut take)?),
            FrameOp::Store => NodeRequest::Store(StoreRequest::take(&mut take)?),
            FrameOp::Stage => NodeRequest::Stage(StageRequest::take(&mut take)?),
            FrameOp::Unknown(op) => return Ok(NodeRequest::Unknown { op, body }),
        };
        take.expect_end()?;
        Ok(request)
    }
}

/// The request for messages and logs: the operation, the range and the path, never more.
impl fmt::Display for NodeRequest<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NodeRequest::Hello(hello) => write!(f, "handshake for source '{}'", hello.source),
            NodeRequest::Ping => f.write_str("ping"),
            NodeRequest::Describe => f.write_str("description of the node"),
            NodeRequest::HeldObjects { .. } => f.write_str("page of cached objects"),
            NodeRequest::Challenge(_) => f.write_str("challenge"),
            NodeRequest::Prove(_) => f.write_str("proof of the group token"),
            NodeRequest::Lookup { path, .. } => write!(f, "lookup of {}", quoted_path(path)),
            NodeRequest::FolderMarker { path, .. } => write!(f, "lookup of the marker of {}", quoted_path(path)),
            NodeRequest::List { path, .. } => write!(f, "listing of {}", quoted_path(path)),
            NodeRequest::ReadLink { path, .. } => write!(f, "target of link {}", quoted_path(path)),
            NodeRequest::ObjectHeaders { path, .. } => write!(f, "headers of {}", quoted_path(path)),
            NodeRequest::Read(ReadRequest { path, offset, len, flags, .. }) => {
                let reader = if flags.contains(ReadFlags::CACHED_ONLY) { "another node's " } else { "" };
                write!(f, "{reader}read of {len} bytes at {offset} of {}", quoted_path(path))
            }
            NodeRequest::StatFs { .. } => f.write_str("capacity of a volume"),
            NodeRequest::Info { path, .. } => write!(f, "cached blocks of {}", quoted_path(path)),
            NodeRequest::Warm { parts, .. } => write!(f, "warming of {} ranges", parts.iter().count()),
            NodeRequest::Drop { parts, .. } => write!(f, "dropping of {} ranges", parts.iter().count()),
            NodeRequest::DropAll { part, .. } => write!(f, "dropping of part {part} of the cache"),
            NodeRequest::Weigh { weight } => write!(f, "a share of {weight}"),
            NodeRequest::Rules { .. } => f.write_str("rules for folders"),
            NodeRequest::Classify { parts, .. } => write!(f, "classification of {} ranges", parts.iter().count()),
            NodeRequest::Write(write) => match write.call.path() {
                Some(path) => write!(f, "{} of {}", write.call.name(), quoted_path(path)),
                None => f.write_str(write.call.name()),
            },
            NodeRequest::Store(store) => match store.call.keys().next() {
                Some(key) => write!(f, "{} '{key}'", store.call.name()),
                None => f.write_str(store.call.name()),
            },
            NodeRequest::Stage(_) => f.write_str("call about staged files"),
            NodeRequest::Unknown { op, .. } => write!(f, "operation {op}"),
        }
    }
}

pub(crate) fn take_volume(take: &mut ByteCursor<'_>) -> Result<VolumeId, FrameError> {
    take.take_u32("a volume").map(VolumeId)
}

fn put_read(read: &ReadRequest<'_>, out: &mut Vec<u8>) {
    out.put_u32(read.volume.0);
    out.put_u32(read.len);
    out.put_u64(read.offset);
    out.put_u64(read.size);
    out.put_u8(read.flags.0);
    out.put_bytes(read.version.as_bytes());
    out.put_bytes(read.path);
}

fn take_read<'a>(take: &mut ByteCursor<'a>) -> Result<ReadRequest<'a>, FrameError> {
    let volume = take_volume(take)?;
    let len = take.take_u32("a read's length")?;
    let offset = take.take_u64("an offset")?;
    let size = take.take_u64("an object's size")?;
    let flags = ReadFlags::from_bits(take.take_u8("the flags of a read")?)?;
    let version = take.take_text("a version text")?;
    Ok(ReadRequest { volume, path: take_path(take)?, version, size, offset, len, flags })
}

fn take_object_id(take: &mut ByteCursor<'_>) -> Result<Option<u128>, FrameError> {
    let Some(bytes) = take.take_option("an object id")? else { return Ok(None) };
    match bytes.try_into() {
        Ok(bytes) => Ok(Some(u128::from_le_bytes(bytes))),
        Err(_) => Err(FrameError::Value { what: "the length of an object id", value: bytes.len() as u64 }),
    }
}

pub(crate) fn take_switch(take: &mut ByteCursor<'_>, what: &'static str) -> Result<bool, FrameError> {
    match take.take_u8(what)? {
        0 => Ok(false),
        1 => Ok(true),
        value => Err(FrameError::Value { what, value: value.into() }),
    }
}

pub(crate) fn take_path<'a>(take: &mut ByteCursor<'a>) -> Result<&'a [u8], FrameError> {
    let path = take.take_bytes("a path")?;
    check_path(path)?;
    Ok(path)
}

/// Refuses paths that no file below a source can have, so that none can lead out of it.
///
/// # Errors
/// When a component is empty, `.` or `..`, or contains NUL. The empty path is the root and valid.
pub fn check_path(path: &[u8]) -> Result<(), FrameError> {
    if path.is_empty() {
        return Ok(());
    }
    path.split(|byte| *byte == b'/').try_for_each(check_name)
}

/// The same for one name.
pub(crate) fn check_name(name: &[u8]) -> Result<(), FrameError> {
    match name {
        b"" => Err(FrameError::Path("an empty component")),
        b"." | b".." => Err(FrameError::Path("'.' or '..'")),
        _ if name.contains(&0) => Err(FrameError::Path("a NUL byte")),
        _ => Ok(()),
    }
}

fn quoted_path(path: &[u8]) -> String {
    format!("'/{}'", String::from_utf8_lossy(path))
}
