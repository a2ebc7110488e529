//! What several crates need of the operating system: the mount table, files replaced durably, pauses between attempts, paths of
//! names, objects of open descriptors, random numbers, and numbers that depend on the architecture. Knows no format of the callers and no domain words.
#![forbid(unsafe_code)]

mod backoff;
mod descriptors;
mod left_call;
mod mounts;
mod octal;
mod open_flags;
mod path;
mod random;
mod replace_file;

pub use backoff::{Backoff, backoff_pause};
pub use descriptors::{ProcPath, open_by_parts, proc_path, read_growing};
pub use left_call::{is_call_left, set_call_left};
pub use mounts::{MountEntry, MountTable, mounted_at, resolve_mountpoint};
pub use octal::unescape_octal;
pub use open_flags::O_DIRECT;
pub use path::{join_path, show_path, split_path};
pub use random::random;
pub use replace_file::replace_file;
