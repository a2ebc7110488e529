//! What a source needs so that its open files, and changes under way, outlive the process that makes them. Knows neither keepers nor
//! records.
//!
//! | source | an open file is continued by | a repeated change is recognised by |
//! |---|---|---|
//! | a directory | its descriptor | names, identities and times |
//! | a directory through nodes | what its node has | its number |
//! | a bucket | the log of its changes; a folder by its name | its mark |

use crate::kept_client::HeldFile;
use crate::kept_files::KeptFiles;
use crate::writes::{Caller, NodePath, WritableDirectory, WritableFile};
use spurline_types::errno::EOPNOTSUPP;
use spurline_types::{Error, ErrorKind, Result};
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// The means by which the next process continues an open file or directory. `D` is a descriptor here, and the duplicate there.
#[derive(Debug)]
pub enum OpenHold<D> {
    /// By no more than the name.
    Name,
    /// By a descriptor.
    Descriptor(D),
    /// By what a node has.
    Node(HeldFile),
}

impl<D> OpenHold<D> {
    /// What a node has.
    pub fn at_node(&self) -> Option<HeldFile> {
        match self {
            OpenHold::Node(held) => Some(*held),
            OpenHold::Name | OpenHold::Descriptor(_) => None,
        }
    }
}

/// An open file or directory of a process that has ended.
#[derive(Debug)]
pub struct LeftOpen<'a> {
    /// The object, with an empty path if it has no name any more.
    pub at: NodePath<'a>,
    /// The flags of the open.
    pub flags: u32,
    /// The opener.
    pub caller: &'a Caller,
    /// The rest.
    pub hold: OpenHold<OwnedFd>,
}

/// How a source recognises that a process which has ended has made a change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RepeatRule {
    /// By names and identities of the source, and by times where the clock of the source is that of this host.
    Names {
        /// The clocks are the same.
        host_clock: bool,
    },
    /// By the number of the change: the source makes the change, or finds the change made.
    Numbers,
    /// By the mark of the change ([`crate::repeated::repeat_marked`]).
    Marks,
}

/// A source whose open files outlive a process.
pub trait HandOver: Send + Sync {
    /// What open files need in the process after this one is kept by `files` from now on.
    fn keep(&self, files: Arc<dyn KeptFiles>);

    /// Continues with an open file.
    ///
    /// # Errors
    /// `EBADF` for a file that was closed at its node; [`not_left`]; the source's errno.
    fn adopt(&self, left: LeftOpen<'_>) -> Result<Box<dyn WritableFile>>;

    /// Continues with an open directory.
    ///
    /// # Errors
    /// As [`HandOver::adopt`].
    fn adopt_directory(&self, left: LeftOpen<'_>) -> Result<Box<dyn WritableDirectory>>;

    /// How a change is recognised. The rule stays.
    fn repeat_rule(&self) -> RepeatRule;
}

/// The error of an open file of which too little is left for its source.
pub fn not_left() -> Error {
    Error::new(ErrorKind::Io(EOPNOTSUPP), "too little is left of an open file of the process before")
}
