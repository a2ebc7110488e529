//! Directories that this mount has removed or replaced while the kernel still uses them: the working directory of a program
//! is open nowhere, and no path of the source leads to it any more. As in any file system, such a directory has no links and
//! no entries, and its rights can still be changed. It knows neither handles nor the source.

use super::nodes::NodeTable;
use spurline_types::{Error, ErrorKind, Result};
use spurline_volume::writes::{
    AttrChange, Caller, FileTime, ListedName, NewTime, NodeAttr, OpenAttrCall, WritableDirectory, WritableObject,
};
use std::sync::Arc;
use std::time::SystemTime;

/// A removed directory, as an open one.
pub(super) struct RemovedDirectory {
    nodes: Arc<NodeTable>,
    ino: u64,
}

impl RemovedDirectory {
    /// The directory of a node, if this mount has removed it.
    pub fn find(nodes: &Arc<NodeTable>, ino: u64) -> Option<RemovedDirectory> {
        nodes.removed_attr(ino)?;
        Some(RemovedDirectory { nodes: Arc::clone(nodes), ino })
    }
}

fn failed(errno: i32, why: &'static str) -> Error {
    Error::new(ErrorKind::Io(errno), why)
}

impl WritableObject for RemovedDirectory {
    fn stat(&self) -> Result<NodeAttr> {
        self.nodes.removed_attr(self.ino).ok_or_else(|| failed(libc::ESTALE, "another host has moved the directory"))
    }

    fn set_attr(&self, set: &AttrChange, caller: &Caller) -> Result<NodeAttr> {
        let mut attr = self.stat()?;
        let owner_only = set.mode.is_some() || set.uid.is_some() || set.gid.is_some();
        if owner_only && caller.uid != 0 && caller.uid != attr.uid {
            return Err(failed(libc::EPERM, "only its owner changes a removed directory"));
        }
        change_attr(&mut attr, set);
        self.nodes.note_sent(self.ino, &attr);
        Ok(attr)
    }

    fn call_attr(&self, call: &OpenAttrCall<'_>, _caller: &Caller) -> Result<Vec<u8>> {
        match call {
            OpenAttrCall::Access(_) | OpenAttrCall::List => Ok(Vec::new()),
            OpenAttrCall::Get(_) | OpenAttrCall::Remove(_) => {
                Err(failed(libc::ENODATA, "a removed directory has no extended attributes"))
            }
            OpenAttrCall::Set { .. } => {
                Err(failed(libc::EOPNOTSUPP, "a removed directory gets no extended attributes"))
            }
        }
    }

    fn sync(&self, _data_only: bool) -> Result<()> {
        Ok(())
    }
}

impl WritableDirectory for RemovedDirectory {
    fn read(&self, _from: u64, _max: usize, _attrs: bool, _caller: &Caller) -> Result<Vec<ListedName>> {
        Ok(Vec::new())
    }
}

/// Sets attributes as the source would.
fn change_attr(attr: &mut NodeAttr, set: &AttrChange) {
    let since_1970 = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let now = FileTime { seconds: since_1970.as_secs() as i64, nanos: since_1970.subsec_nanos() };
    if let Some(mode) = set.mode {
        attr.mode = attr.mode & !0o7777 | mode & 0o7777;
    }
    attr.uid = set.uid.unwrap_or(attr.uid);
    attr.gid = set.gid.unwrap_or(attr.gid);
    for (time, new) in [(&mut attr.atime, set.atime), (&mut attr.mtime, set.mtime)] {
        match new {
            Some(NewTime::Now) => *time = now,
            Some(NewTime::At(at)) => *time = at,
            None => {}
        }
    }
    attr.ctime = now;
}
