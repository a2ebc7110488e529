//! Descriptors of a mount that outlive its process. Who keeps them is the business of who implements the trait.

use std::os::fd::{BorrowedFd, OwnedFd};

/// The name of a kept descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum KeptFileKey {
    /// An open file, by its handle.
    File(u64),
    /// An open directory, by its handle.
    Directory(u64),
    /// The locks that an owner has set through a handle.
    Lock {
        /// The handle.
        fh: u64,
        /// The owner.
        owner: u64,
    },
    /// The changed bytes of an open file, by the source's number of the file.
    ChangedBytes(u64),
}

/// Keeps descriptors open that outlive this process.
pub trait KeptFiles: Send + Sync {
    /// Keeps a duplicate of `file`, in place of another one with this key.
    fn keep_file(&self, key: KeptFileKey, file: BorrowedFd<'_>);

    /// Closes the duplicate.
    fn drop_file(&self, key: KeptFileKey);

    /// A descriptor of the process before, which stays kept.
    fn take_file(&self, key: KeptFileKey) -> Option<OwnedFd>;

    /// Closes what was kept by the processes before, and was not taken.
    fn drop_untaken(&self);
}
