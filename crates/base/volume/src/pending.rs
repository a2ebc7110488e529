//! Changes of a file that are not published, and how a mount continues with them in another process. Knows no requests.

use crate::writes::WritableFile;

/// The changes of a file that are not published, by the mount's number: a process that has changes under another number has the
/// changes of an earlier time.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PendingVersion {
    /// The number under which a process has all changes that the mount has sent; 0 for the one that opened the file first.
    pub known: u64,
    /// The number of a file that is opened anew, without changes; with 0 no file is.
    pub next: u64,
    /// The mount has no changes of the file, and takes the version that is there.
    pub follows: bool,
}

/// A file that [`crate::writes::WritableVolume::open_again`] has opened.
pub struct ContinuedFile {
    /// The open file.
    pub file: Box<dyn WritableFile>,
    /// The file has the changes of the known pending version.
    pub has_changes: bool,
}
