//! Directory reads: the number and attributes of each name, and the position of the next read.

use crate::attr::InodeEntry;
use crate::dir::ListContext;
use crate::errno::{FsError, FsResult};
use crate::fs::{FileSystem, with_child};
use crate::handle::{OpenDirectory, OpenKind};
use crate::inode_limit::LimitedInodes as _;
use spurline_types::FileKind;

/// Positions before the first name: `.` and `..`.
const DOTS: u64 = 2;

/// One name of a directory.
pub struct DirItem<'a> {
    /// The position of the next name.
    pub next: u64,
    /// The name.
    pub name: &'a [u8],
    /// Inode number.
    pub ino: u64,
    /// File, directory or symbolic link.
    pub kind: FileKind,
    /// For [`FileSystem::readdirplus`] and names other than `.` and `..`: the inode, with its lookup count raised by
    /// one.
    pub entry: Option<InodeEntry>,
}

impl FileSystem {
    /// Passes the names of an open directory from position `from` to `take`, until `take` returns false or the
    /// current page ends. A name refused by `take` comes first in the next call. The directory ends where a call
    /// passes no name. Position 0 rewinds and lists the directory anew. Any earlier position leads to the same name
    /// again, if the directory did not change.
    ///
    /// # Errors
    /// `BadHandle`, `NotADirectory`, or an error of the volume if no name was passed.
    pub fn readdir(&self, ino: u64, fh: u64, from: u64, take: &mut dyn FnMut(&DirItem<'_>) -> bool) -> FsResult<()> {
        self.list_from(ino, fh, from, false, take)
    }

    /// As [`FileSystem::readdir`], and looks up every accepted name other than `.` and `..`.
    pub fn readdirplus(
        &self,
        ino: u64,
        fh: u64,
        from: u64,
        take: &mut dyn FnMut(&DirItem<'_>) -> bool,
    ) -> FsResult<()> {
        self.list_from(ino, fh, from, true, take)
    }

    fn list_from(
        &self,
        ino: u64,
        fh: u64,
        from: u64,
        plus: bool,
        take: &mut dyn FnMut(&DirItem<'_>) -> bool,
    ) -> FsResult<()> {
        let handle = self.handles.get(fh).filter(|handle| handle.inode.ino == ino).ok_or(FsError::BadHandle(fh))?;
        let OpenKind::Dir(state) = &handle.open else { return Err(FsError::NotADirectory) };
        let path = handle.inode.path();
        let mut directory = state.lock();
        if from == 0 {
            directory.state.rewind();
        }
        let mut position = from;
        while position < DOTS {
            let (name, ino): (&[u8], u64) = if position == 0 { (b".", ino) } else { (b"..", self.parent_number(path)) };
            position += 1;
            if !take(&DirItem { next: position, name, ino, kind: FileKind::Directory, entry: None }) {
                return Ok(());
            }
        }
        let volume = &self.volume;
        let page = self.config.list_page.max(1);
        let lister = ListContext { volume, stats: &self.stats, path, page, now: &|| self.now(), starts: &self.starts };
        let handed_out = position > from;
        // Without inodes in listings a walk takes longer, so that forgets catch up.
        let plus = plus && !self.is_far_over_limit();
        match self.list_names(&mut directory, &lister, position, plus, take) {
            // Names already passed stay valid; the next call returns the error.
            Err(_) if handed_out => Ok(()),
            answer => answer,
        }
    }

    /// Returns an error only if no name was passed.
    fn list_names(
        &self,
        directory: &mut OpenDirectory,
        lister: &ListContext<'_>,
        mut position: u64,
        plus: bool,
        take: &mut dyn FnMut(&DirItem<'_>) -> bool,
    ) -> FsResult<()> {
        let OpenDirectory { state, order } = directory;
        let start = position;
        // The current page is returned without waiting for the next, which may take long: only an empty result means
        // the end.
        while position == start || state.is_loaded(position - DOTS) {
            let Some((listed, at)) = state.entry_at(position - DOTS, lister)? else { break };
            position += 1;
            let name = &*listed.name;
            let kind = listed.attr.kind;
            let taken = with_child(lister.path, name, |path| {
                if plus {
                    let inode = self.intern_inode(path, &listed.attr, at);
                    // The page may have been listed some time ago; the kernel's cache times are shortened by its age.
                    let entry = Some(self.inode_entry(&inode, self.now().saturating_sub(at)));
                    let taken = take(&DirItem { next: position, name, ino: inode.ino, kind, entry });
                    if taken {
                        order.note_listed(position, &inode);
                    } else {
                        self.forget(inode.ino, 1);
                    }
                    taken
                } else {
                    let ino = self.inodes.number_of(path, &listed.attr);
                    take(&DirItem { next: position, name, ino, kind, entry: None })
                }
            });
            if !taken {
                break;
            }
        }
        Ok(())
    }
}
