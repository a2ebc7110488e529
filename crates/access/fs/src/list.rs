//! Reading directories: which number and attributes go with each name, and where the next read goes on.

use crate::attr::Entry;
use crate::dir::{DirState, Lister};
use crate::errno::{FsError, Result};
use crate::fs::{Fs, with_child};
use crate::handle::Open;
use spurline_types::FileKind;

/// What stands for an inode's number where a name was listed but never looked up; no inode has it.
const UNKNOWN_INO: u64 = 0xffff_ffff;
/// Positions before the first name: `.` and `..`.
const DOTS: u64 = 2;

/// One name of a directory.
pub struct DirItem<'a> {
    /// Where reading goes on after this name.
    pub next: u64,
    /// The name.
    pub name: &'a [u8],
    /// Inode number, 4294967295 where the name was never looked up.
    pub ino: u64,
    /// File, directory or symbolic link.
    pub kind: FileKind,
    /// For [`Fs::readdirplus`], and other names than `.` and `..`: the inode, counted as looked up once.
    pub entry: Option<Entry>,
}

impl Fs {
    /// Hands the names of an open directory from position `from` on to `take`, until it says false (that
    /// name is not taken, and comes first the next time) or the names at hand are all told: there is no more only when
    /// none was. Position 0 starts over and sees the directory as it is then; any position told before leads to the
    /// name it led to, as long as the directory does not change.
    ///
    /// # Errors
    /// `BadHandle`, `NotADirectory`, or the volume's own when not one name could be handed out.
    pub fn readdir(&self, ino: u64, fh: u64, from: u64, take: &mut dyn FnMut(&DirItem<'_>) -> bool) -> Result<()> {
        self.list(ino, fh, from, false, take)
    }

    /// The same, and every name that is taken, other than `.` and `..`, is looked up by the way.
    ///
    /// # Errors
    /// As for [`Fs::readdir`].
    pub fn readdirplus(&self, ino: u64, fh: u64, from: u64, take: &mut dyn FnMut(&DirItem<'_>) -> bool) -> Result<()> {
        self.list(ino, fh, from, true, take)
    }

    fn list(&self, ino: u64, fh: u64, from: u64, plus: bool, take: &mut dyn FnMut(&DirItem<'_>) -> bool) -> Result<()> {
        let handle = self.handles.get(fh).filter(|handle| handle.inode.ino == ino).ok_or(FsError::BadHandle(fh))?;
        let Open::Dir(state) = &handle.open else { return Err(FsError::NotADirectory) };
        let path = &*handle.inode.object.path;
        let mut state = state.lock();
        if from == 0 {
            state.rewind();
        }
        let mut position = from;
        while position < DOTS {
            let (name, ino): (&[u8], u64) = if position == 0 { (b".", ino) } else { (b"..", self.parent_number(path)) };
            position += 1;
            if !take(&DirItem { next: position, name, ino, kind: FileKind::Directory, entry: None }) {
                return Ok(());
            }
        }
        let now = || self.now();
        let (volume, page) = (&*self.volume, self.config.list_page.max(1));
        let lister = Lister { volume, stats: &self.stats, path, page, now: &now, starts: &self.starts };
        let handed_out = position > from;
        match self.list_names(&mut state, &lister, position, plus, take) {
            // What was handed out is not taken back; the next read meets the error again.
            Err(_) if handed_out => Ok(()),
            answer => answer,
        }
    }

    /// An error comes before any name was handed out.
    fn list_names(
        &self,
        state: &mut DirState,
        lister: &Lister<'_>,
        mut position: u64,
        plus: bool,
        take: &mut dyn FnMut(&DirItem<'_>) -> bool,
    ) -> Result<()> {
        let start = position;
        // Names at hand don't wait for another page, which may take long: only an answer without any is the end.
        while position == start || state.holds(position - DOTS) {
            let Some((listed, at)) = state.at(position - DOTS, lister)? else { break };
            position += 1;
            let (name, kind) = (&*listed.name, listed.attr.kind);
            let taken = with_child(lister.path, name, |path| {
                if plus {
                    let inode = self.intern(path, &listed.attr, at);
                    // A page read ahead of its use ages, and one that took long to come was old by then; what the
                    // kernel is told of its names holds that much shorter.
                    let entry = Some(self.entry(&inode, self.now().saturating_sub(at)));
                    let taken = take(&DirItem { next: position, name, ino: inode.ino, kind, entry });
                    if !taken {
                        self.forget(inode.ino, 1);
                    }
                    taken
                } else {
                    let ino = self.inodes.number(path, &listed.attr).unwrap_or(UNKNOWN_INO);
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
