//! The file system a mount shows: inodes, handles, the rules of POSIX, and read-ahead, over any volume.
//! It knows neither FUSE nor a socket nor what stands behind the volume, so all of it is tested unmounted.
//!
//! A file's inode is bound to one version of its path, so its bytes never change and whatever the kernel
//! holds of them stays right. A lookup that finds another version answers another inode; readers of the old
//! one get its bytes, or [`FsError::Stale`], and never a mix.
#![forbid(unsafe_code)]

mod attr;
mod dir;
mod errno;
mod fs;
mod handle;
mod inode;
mod list;
mod passthrough;
pub mod readahead;
mod starts;
mod xattr;

pub use attr::{Config, Entry, FileAttr, Lookup, StatFs};
pub use errno::{FsError, Result};
pub use fs::{Clock, Fs, Opened};
pub use inode::ROOT;
pub use list::DirItem;
pub use passthrough::{BackingId, LiveBacking, RegisterBacking};

/// The longest name a file can have, in bytes.
pub const NAME_MAX: usize = 255;
