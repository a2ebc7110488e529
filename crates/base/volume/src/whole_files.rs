//! Files of a source whose files are seen whole only: each new file is apart from all others until its publication. Knows no folder and no
//! other kind of file.

use crate::writes::Caller;
use spurline_types::{ObjectAttr, ObjectHeaders, Result};

/// Whether a publication may replace the file of the name, or nothing.
pub type ReplaceCheck<'a> = dyn Fn(Option<&ObjectAttr>) -> Result<()> + 'a;

/// The file that a publication may replace. No other writer comes between the check and the publication.
#[derive(Clone, Copy)]
pub enum MayReplace<'a> {
    /// Whatever the name leads to: of several publications the last one counts.
    Anything,
    /// The file of the name when the new file was begun.
    Unchanged,
    /// Nothing: the name is free.
    Nothing,
    /// The files that the check lets pass.
    Checked(&'a ReplaceCheck<'a>),
}

/// A source whose files are seen whole only.
pub trait WholeFiles: Send + Sync {
    /// Begins a file for a path, apart from open files and other new files of the same path. `mode` as for `open(2)`.
    ///
    /// # Errors
    /// `EISDIR` for the path of a folder; the source's.
    fn begin_file(&self, path: &[u8], mode: u32, caller: &Caller) -> Result<Box<dyn UnpublishedFile>>;
}

/// A file that no reader sees. A drop without a publication leaves nothing, and may send requests.
pub trait UnpublishedFile: Send {
    /// Whether the path led to nothing when the file was begun.
    fn is_new(&self) -> bool;

    /// Sets the headers that are stored with the file; without a call, the headers of the replaced file stay.
    ///
    /// # Errors
    /// `ENOSPC` for more than the source keeps.
    fn set_headers(&self, headers: &ObjectHeaders) -> Result<()>;

    /// Writes `data` at `offset`. Waits for the source while local space is short.
    ///
    /// # Errors
    /// The local file system's, and the source's.
    fn write_at(&self, offset: u64, data: &[u8]) -> Result<()>;

    /// The name leads to these bytes, durably. After an error the name leads to what was there before, unless the source executes a request
    /// late that was not answered.
    ///
    /// # Errors
    /// `ESTALE` where another writer has changed what may be replaced, `EEXIST` where nothing may; that of the check; the source's.
    fn publish(&self, may_replace: MayReplace<'_>) -> Result<()>;
}
