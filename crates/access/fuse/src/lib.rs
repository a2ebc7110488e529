//! A FUSE session: the kernel's protocol over /dev/fuse or io_uring, mount and unmount. It knows nothing of caches,
//! origins or inodes: a [`FuseHandler`] implements one typed method per request. [`FsHandler`] implements it over
//! `spurline-fs`.
//!
//! All code is synchronous. A *slot* is a thread with a buffer: it takes a request, calls the handler and sends the
//! reply, without allocations. A handler that blocks holds up only its own slot.

mod abi;
mod adapter;
mod backing;
mod buffer;
mod change_request;
mod config;
mod dev;
mod dispatch;
mod dispatch_change;
mod errno;
mod failed_reads;
mod handler;
mod init;
mod mount;
mod mountinfo;
mod notify;
mod nullfs;
mod options;
mod reply;
mod request;
mod ring;
mod session;
mod under_way;
mod waiting;
mod writable_adapter;

pub use adapter::FsHandler;
pub use backing::{BackingId, BackingRegistrar, RegisteredFile};
pub use buffer::{AnonymousPages, BufferSource, HEAD_LEN, PoolAnnex, SlotBuffer};
pub use config::{FuseIo, SessionConfig, SessionWrites, TransportChoice, WorkloadHint};
pub use dispatch::RequestRecorder;
pub use errno::Errno;
pub use handler::{FuseHandler, HandleReply, InitInfo, LookupReply, RequestCaller, StatAttr, StatfsReply};
pub use mount::{MountError, check_mountpoint, unmount_path};
pub use mountinfo::{MountEntry, MountTable, mounted_at};
pub use notify::KernelNotifier;
pub use nullfs::NullFs;
pub use options::{MountOptions, UnknownOption};
pub use reply::{DirPlusSink, DirSink, ReadReply, ReplyReceipt, XattrReply};
pub use session::{FuseSession, SessionUnmounter, UnmountOutcome};
pub use waiting::{WaitingSlot, WaitingSlots};
pub use writable_adapter::WritableFsHandler;

pub(crate) use request::FuseRequest;

/// The inode number of the root directory.
pub const ROOT_INO: u64 = abi::ROOT_ID;
