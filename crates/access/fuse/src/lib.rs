//! A FUSE session: the kernel's protocol over /dev/fuse or io_uring, mount and unmount. An adapter of `spurline_fs::FileService`,
//! the interface of both file systems, which knows no caches, origins or inodes.
//!
//! All code is synchronous. A *slot* is a thread with a buffer: the slot takes a request, calls the file system and sends the
//! reply, without allocations. A call that blocks holds up only that slot.

mod abi;
mod backing;
mod buffer;
mod caller_fate;
mod change_request;
mod config;
mod dev;
mod dispatch;
mod dispatch_change;
mod errno;
mod failed_reads;
mod init;
mod kept_state;
mod kernel;
mod mount;
mod notify;
mod nullfs;
mod options;
mod reply;
mod request;
mod ring;
mod session;
mod taken_back;
mod under_way;
mod waiting;
mod watch;

pub use buffer::{AnonymousPages, BufferSource, HEAD_LEN, PoolAnnex, SlotBuffer};
pub use config::{FuseIo, KeptSession, SessionConfig, SessionWrites, TransportChoice, WorkloadHint};
pub use dispatch::RequestRecorder;
pub use kept_state::KeptState;
pub use mount::{MountError, check_mountpoint, unmount_path};
pub use notify::{KernelNotifier, NotificationRelay};
pub use nullfs::NullFs;
pub use options::{MountOptions, UnknownOption};
pub use session::{FuseSession, SessionUnmounter, UnmountOutcome};

pub(crate) use request::FuseRequest;
