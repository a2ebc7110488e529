//! What a reader asks of a node. Paths are bytes below the source, without a leading slash; the root is empty.

use crate::codec::{Put, Take};
use crate::header::check_len;
use crate::proof::{Challenge, Proof};
use crate::{FrameError, HEADER_LEN, Header, MAX_REQUEST_BODY, MAX_VERSION, MIN_VERSION, Op, Parts, padding};
use std::fmt;

/// A node's number for a volume, good on the connection whose `Welcome` gave it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct VolumeId(pub u32);

/// The first request on a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hello<'a> {
    /// Oldest protocol version the peer speaks.
    pub min_version: u16,
    /// Newest protocol version the peer speaks.
    pub max_version: u16,
    /// The peer's name for logs: host and process.
    pub peer: &'a str,
    /// The source the peer wants to read; empty when it only asks for signs of life.
    pub source: &'a str,
}

impl<'a> Hello<'a> {
    /// A greeting with the versions of this build.
    pub fn new(peer: &'a str, source: &'a str) -> Self {
        Hello { min_version: MIN_VERSION, max_version: MAX_VERSION, peer, source }
    }

    /// The newest version both sides speak.
    ///
    /// # Errors
    /// When there is none.
    pub fn negotiate(&self) -> Result<u16, FrameError> {
        let version = self.max_version.min(MAX_VERSION);
        if version < self.min_version.max(MIN_VERSION) {
            Err(FrameError::Version(self.max_version))
        } else {
            Ok(version)
        }
    }
}

/// Asks for bytes of an object at one version.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Read<'a> {
    /// The volume.
    pub volume: VolumeId,
    /// The object.
    pub path: &'a [u8],
    /// The version its bytes must have.
    pub version: &'a str,
    /// Its length at that version.
    pub size: u64,
    /// First byte wanted.
    pub offset: u64,
    /// How many; the answer is shorter only where the object ends.
    pub len: u32,
}

/// One request. Decoding borrows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Request<'a> {
    /// Opens a connection; answered by a `Welcome`.
    Hello(Hello<'a>),
    /// Answered by nothing but an empty frame.
    Ping,
    /// Answered by a `Challenged`.
    Challenge(Challenge<'a>),
    /// Answered by a `Proof`.
    Prove(Proof),
    /// Answered by an `Attr`.
    Lookup {
        /// The volume.
        volume: VolumeId,
        /// The path.
        path: &'a [u8],
        /// How long ago the answer may have been asked of the under-store, in milliseconds.
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
        /// The most names wanted.
        max: u32,
        /// How long ago the answer may have been asked of the under-store, in milliseconds.
        max_age_ms: u32,
    },
    /// Answered by the target's bytes.
    ReadLink {
        /// The volume.
        volume: VolumeId,
        /// The symbolic link.
        path: &'a [u8],
    },
    /// Answered by a payload.
    Read(Read<'a>),
    /// Answered by a `StatFs`.
    StatFs {
        /// The volume.
        volume: VolumeId,
    },
    /// Which blocks of an object are held; answered by JSON text.
    Info {
        /// The volume.
        volume: VolumeId,
        /// The object.
        path: &'a [u8],
    },
    /// Brings parts into the node's cache and sends nothing of them; answered by a `PartsDone`.
    Warm {
        /// The volume.
        volume: VolumeId,
        /// Whether what is held already is read back and checked.
        verify: bool,
        /// What to bring.
        parts: Parts<'a>,
    },
    /// Takes parts out of the node's cache, whole blocks of them; answered by a `PartsDone`.
    Drop {
        /// The volume.
        volume: VolumeId,
        /// What to take out.
        parts: Parts<'a>,
    },
    /// A read by another node, of what this node holds: what it does not hold is an error, and fetched from nowhere.
    Pull(Read<'a>),
    /// A read of a block that another node fetches for all: answered as a `Read` is when this node holds the block or is
    /// fetching it, and by no bytes and [`SENT_ON`](crate::SENT_ON) otherwise. Only for nodes that say they
    /// [send on](crate::Capabilities::sends_on).
    ReadHere(Read<'a>),
    /// As `Pull`, and what the node does not hold it begins to fetch. Only for nodes that say they
    /// [send on](crate::Capabilities::sends_on).
    Seek(Read<'a>),
    /// Changes the node's share of its group's blocks until it is started again; answered by nothing but an empty frame.
    Weigh {
        /// The share; 0 drains it.
        weight: u32,
    },
    /// Gives a node rules for folders, which it takes if they are later than its own; answered by those it has then.
    Rules {
        /// The rules as JSON; empty to ask only.
        text: &'a str,
    },
    /// Brings what the node holds of parts under the rules for their folders, and fetches nothing; answered by a
    /// `PartsDone`.
    Classify {
        /// The volume.
        volume: VolumeId,
        /// What to bring under them.
        parts: Parts<'a>,
    },
    /// A request of a newer peer.
    Unknown {
        /// Its operation number.
        op: u16,
        /// Its body, not understood.
        body: &'a [u8],
    },
}

impl<'a> Request<'a> {
    /// The operation.
    pub fn op(&self) -> Op {
        match self {
            Request::Hello(_) => Op::Hello,
            Request::Ping => Op::Ping,
            Request::Challenge(_) => Op::Challenge,
            Request::Prove(_) => Op::Prove,
            Request::Lookup { .. } => Op::Lookup,
            Request::List { .. } => Op::List,
            Request::ReadLink { .. } => Op::ReadLink,
            Request::Read(_) => Op::Read,
            Request::StatFs { .. } => Op::StatFs,
            Request::Info { .. } => Op::Info,
            Request::Warm { .. } => Op::Warm,
            Request::Drop { .. } => Op::Drop,
            Request::Pull(_) => Op::Pull,
            Request::ReadHere(_) => Op::ReadHere,
            Request::Seek(_) => Op::Seek,
            Request::Weigh { .. } => Op::Weigh,
            Request::Rules { .. } => Op::Rules,
            Request::Classify { .. } => Op::Classify,
            Request::Unknown { op, .. } => Op::from_code(*op),
        }
    }

    /// Appends the whole frame to `out`. On an error `out` is as it was.
    ///
    /// # Errors
    /// When the body is longer than [`MAX_REQUEST_BODY`].
    pub fn encode(&self, id: u64, out: &mut Vec<u8>) -> Result<(), FrameError> {
        let start = out.len();
        out.resize(start + HEADER_LEN, 0);
        self.encode_body(out);
        let len = out.len() - start - HEADER_LEN;
        match check_len("a request's body", len, MAX_REQUEST_BODY) {
            Ok(body_len) => {
                out.extend_from_slice(padding(len));
                let header = Header::request(self.op(), id, body_len);
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
            Request::Hello(Hello { min_version, max_version, peer, source }) => {
                out.put_u16(min_version);
                out.put_u16(max_version);
                out.put_bytes(peer.as_bytes());
                out.put_bytes(source.as_bytes());
            }
            Request::Ping => {}
            Request::Challenge(challenge) => challenge.encode(out),
            Request::Prove(proof) => out.extend_from_slice(&proof.0),
            Request::Lookup { volume, path, max_age_ms } => {
                out.put_u32(volume.0);
                out.put_bytes(path);
                out.put_u32(max_age_ms);
            }
            Request::ReadLink { volume, path } | Request::Info { volume, path } => {
                out.put_u32(volume.0);
                out.put_bytes(path);
            }
            Request::List { volume, path, cursor, max, max_age_ms } => {
                out.put_u32(volume.0);
                out.put_bytes(path);
                out.put_option(cursor);
                out.put_u32(max);
                out.put_u32(max_age_ms);
            }
            Request::Read(ref read)
            | Request::Pull(ref read)
            | Request::ReadHere(ref read)
            | Request::Seek(ref read) => {
                put_read(read, out);
            }
            Request::Warm { volume, verify, parts } => {
                out.put_u32(volume.0);
                out.put_u8(u8::from(verify));
                out.extend_from_slice(parts.bytes());
            }
            Request::Drop { volume, parts } | Request::Classify { volume, parts } => {
                out.put_u32(volume.0);
                out.extend_from_slice(parts.bytes());
            }
            Request::StatFs { volume } => out.put_u32(volume.0),
            Request::Weigh { weight } => out.put_u32(weight),
            Request::Rules { text } => out.put_bytes(text.as_bytes()),
            Request::Unknown { body, .. } => out.extend_from_slice(body),
        }
    }

    /// Reads the body of a request for `op`.
    ///
    /// # Errors
    /// When the bytes are no such body, or hold a path that no file can have.
    pub fn decode(op: Op, body: &'a [u8]) -> Result<Self, FrameError> {
        let mut take = Take(body);
        let request = match op {
            Op::Hello => Request::Hello(Hello {
                min_version: take.u16("a version")?,
                max_version: take.u16("a version")?,
                peer: take.text("a peer's name")?,
                source: take.text("a source")?,
            }),
            Op::Ping => Request::Ping,
            Op::Challenge => Request::Challenge(Challenge::take(&mut take)?),
            Op::Prove => Request::Prove(Proof(take.array("a proof")?)),
            Op::Lookup => Request::Lookup {
                volume: take_volume(&mut take)?,
                path: take_path(&mut take)?,
                max_age_ms: take.u32("an age")?,
            },
            Op::List => Request::List {
                volume: take_volume(&mut take)?,
                path: take_path(&mut take)?,
                cursor: take.option("a cursor")?,
                max: take.u32("a page's length")?,
                max_age_ms: take.u32("an age")?,
            },
            Op::ReadLink => Request::ReadLink { volume: take_volume(&mut take)?, path: take_path(&mut take)? },
            Op::Read => Request::Read(take_read(&mut take)?),
            Op::Pull => Request::Pull(take_read(&mut take)?),
            Op::ReadHere => Request::ReadHere(take_read(&mut take)?),
            Op::Seek => Request::Seek(take_read(&mut take)?),
            Op::Warm => Request::Warm {
                volume: take_volume(&mut take)?,
                verify: take_switch(&mut take, "whether to verify")?,
                parts: Parts::take(&mut take)?,
            },
            Op::Drop => Request::Drop { volume: take_volume(&mut take)?, parts: Parts::take(&mut take)? },
            Op::Weigh => Request::Weigh { weight: take.u32("a weight")? },
            Op::Classify => Request::Classify { volume: take_volume(&mut take)?, parts: Parts::take(&mut take)? },
            Op::Rules => Request::Rules { text: take.text("rules for folders")? },
            Op::StatFs => Request::StatFs { volume: take_volume(&mut take)? },
            Op::Info => Request::Info { volume: take_volume(&mut take)?, path: take_path(&mut take)? },
            Op::Unknown(op) => return Ok(Request::Unknown { op, body }),
        };
        take.end()?;
        Ok(request)
    }
}

/// What is asked, for error messages and logs: the operation, the range and the path, never more.
impl fmt::Display for Request<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = |path: &[u8]| format!("'/{}'", String::from_utf8_lossy(path));
        match self {
            Request::Hello(hello) => write!(f, "greeting for source '{}'", hello.source),
            Request::Ping => f.write_str("ping"),
            Request::Challenge(_) => f.write_str("challenge"),
            Request::Prove(_) => f.write_str("proof of the group token"),
            Request::Lookup { path, .. } => write!(f, "lookup of {}", name(path)),
            Request::List { path, .. } => write!(f, "listing of {}", name(path)),
            Request::ReadLink { path, .. } => write!(f, "target of link {}", name(path)),
            Request::Read(Read { path, offset, len, .. }) | Request::ReadHere(Read { path, offset, len, .. }) => {
                write!(f, "read of {len} bytes at {offset} of {}", name(path))
            }
            Request::StatFs { .. } => f.write_str("capacity of a volume"),
            Request::Info { path, .. } => write!(f, "blocks held of {}", name(path)),
            Request::Warm { parts, .. } => write!(f, "warming of {} parts", parts.iter().count()),
            Request::Drop { parts, .. } => write!(f, "dropping of {} parts", parts.iter().count()),
            Request::Pull(Read { path, offset, len, .. }) | Request::Seek(Read { path, offset, len, .. }) => {
                write!(f, "another node's read of {len} bytes at {offset} of {}", name(path))
            }
            Request::Weigh { weight } => write!(f, "a share of {weight}"),
            Request::Rules { .. } => f.write_str("rules for folders"),
            Request::Classify { parts, .. } => write!(f, "rules for {} parts", parts.iter().count()),
            Request::Unknown { op, .. } => write!(f, "operation {op}"),
        }
    }
}

fn take_volume(take: &mut Take<'_>) -> Result<VolumeId, FrameError> {
    take.u32("a volume").map(VolumeId)
}

fn put_read(read: &Read<'_>, out: &mut Vec<u8>) {
    out.put_u32(read.volume.0);
    out.put_u32(read.len);
    out.put_u64(read.offset);
    out.put_u64(read.size);
    out.put_bytes(read.version.as_bytes());
    out.put_bytes(read.path);
}

fn take_read<'a>(take: &mut Take<'a>) -> Result<Read<'a>, FrameError> {
    let volume = take_volume(take)?;
    let (len, offset, size) = (take.u32("a read's length")?, take.u64("an offset")?, take.u64("an object's size")?);
    let version = take.text("a version text")?;
    Ok(Read { volume, path: take_path(take)?, version, size, offset, len })
}

fn take_switch(take: &mut Take<'_>, what: &'static str) -> Result<bool, FrameError> {
    match take.u8(what)? {
        0 => Ok(false),
        1 => Ok(true),
        value => Err(FrameError::Value { what, value: value.into() }),
    }
}

pub(crate) fn take_path<'a>(take: &mut Take<'a>) -> Result<&'a [u8], FrameError> {
    let path = take.bytes("a path")?;
    check_path(path)?;
    Ok(path)
}

/// Refuses paths that no file below a source can have, so that none can lead out of it.
///
/// # Errors
/// When a part is empty, `.` or `..`, or holds NUL. The empty path is the root and fine.
pub fn check_path(path: &[u8]) -> Result<(), FrameError> {
    if path.is_empty() {
        return Ok(());
    }
    path.split(|byte| *byte == b'/').try_for_each(check_name)
}

/// The same for one name.
pub(crate) fn check_name(name: &[u8]) -> Result<(), FrameError> {
    match name {
        b"" => Err(FrameError::Path("an empty one")),
        b"." | b".." => Err(FrameError::Path("'.' or '..'")),
        _ if name.contains(&0) => Err(FrameError::Path("a NUL byte")),
        _ => Ok(()),
    }
}
