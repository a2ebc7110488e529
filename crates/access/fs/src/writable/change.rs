//! Changes of names and attributes: each is made by the source, and then applied to the inode table.

use super::life::made_object;
use super::names::{MountNames, NodeEntry};
use crate::errno::{FsError, FsResult, errno_error};
use crate::kept_records::MadeChange;
use crate::service::{DirName, FsCaller, NewNode};
use spurline_volume::capabilities::LimitedCall;
use spurline_volume::repeated::{ChangeOutcome, RepeatedCall, find_name};
use spurline_volume::writes::{AttrChange, Change, NamePath, NodeAttr, NodePath, OpenAttrCall};
use std::time::Duration;

/// The attribute with a file's capabilities.
const CAPABILITIES: &[u8] = b"security.capability";
/// `RENAME_EXCHANGE` of renameat2(2).
const RENAME_EXCHANGE: u32 = 2;

impl MountNames {
    /// Makes `new` as `name` in `parent`; raises its lookup count.
    pub fn make(&self, parent: u64, name: &[u8], new: NewNode<'_>, caller: &FsCaller) -> FsResult<NodeEntry> {
        if matches!(new, NewNode::Symlink { .. }) {
            self.can.check(LimitedCall::Symlink)?;
        }
        let _changing = self.directory_attrs.changing(parent);
        let repeat = self.life.find_repeat(caller);
        let mode = match new {
            NewNode::Directory { mode } | NewNode::ImpliedDirectory { mode } | NewNode::Node { mode, .. } => mode,
            NewNode::Symlink { .. } => 0,
        };
        let attr = self.on_name(parent, name, caller, mode & libc::S_ISGID != 0, |at, by| {
            let change = match new {
                NewNode::Directory { mode } => Change::Mkdir { at, mode, implied: false },
                NewNode::ImpliedDirectory { mode } => Change::Mkdir { at, mode, implied: true },
                NewNode::Node { mode, rdev } => Change::Mknod { at, mode, rdev },
                NewNode::Symlink { target } => Change::Symlink { at, target },
            };
            self.life.change_names(&change, repeat, None, by, caller)
        })?;
        let attr = with_attr(attr)?;
        self.life.note_names_made(caller, made_object(attr.identity));
        self.stats.fuse.change_ops.add(1);
        let entry = self.intern(parent, name, attr);
        if self.can.publishes && matches!(new, NewNode::ImpliedDirectory { .. }) {
            self.nodes.note_implied(entry.ino);
        }
        Ok(entry)
    }

    /// Gives the object of `ino` the name `name` in `parent`; raises its lookup count.
    pub fn link(&self, ino: u64, parent: u64, name: &[u8], caller: &FsCaller) -> FsResult<NodeEntry> {
        self.can.check(LimitedCall::Link)?;
        let _changing = self.directory_attrs.changing(parent);
        if let Some(repeat) = self.life.find_repeat(caller) {
            let known = self.nodes.identity_of(ino);
            let outcome = self.on_name(parent, name, caller, false, |at, by| {
                self.life.find_outcome(RepeatedCall::LinkOpen(at), repeat, known, by)
            })?;
            if let ChangeOutcome::Made(Some(attr)) = outcome {
                return Ok(self.intern(parent, name, attr));
            }
        }
        let by_path = self.while_moving(0, || {
            let from = self.nodes.resolve(ino).ok_or_else(|| self.missing(ino))?;
            let to = self.nodes.resolve(parent).ok_or_else(|| self.missing(parent))?;
            Ok(self.as_caller(caller, false, |caller| {
                let from = NodePath { path: &from.path, expected: Some(from.identity) };
                let directory = NodePath { path: &to.path, expected: Some(to.identity) };
                self.source.change(&Change::Link { from, to: NamePath { directory, name } }, caller)
            })?)
        });
        let attr = match by_path {
            Ok(attr) => with_attr(attr)?,
            Err(error) => {
                // An open file without a name, made by O_TMPFILE.
                let nameless = self.nodes.resolve(ino).is_none();
                let Some(file) = self.open_nodes.any_file(ino).filter(|_| nameless) else { return Err(error) };
                self.on_name(parent, name, caller, false, |at, caller| self.source.link_open(&*file.file, at, caller))?
            }
        };
        self.stats.fuse.change_ops.add(1);
        Ok(self.intern(parent, name, attr))
    }

    /// Removes a name of anything but a directory, or an empty directory.
    pub fn remove(&self, parent: u64, name: &[u8], directory: bool, caller: &FsCaller) -> FsResult<()> {
        let _changing = self.directory_attrs.changing(parent);
        let repeat = self.life.find_repeat(caller);
        let known = self.nodes.identity_at(parent, name);
        self.on_name(parent, name, caller, false, |at, by| {
            let change = if directory { Change::Rmdir { at } } else { Change::Unlink { at } };
            self.life.change_names(&change, repeat, known, by, caller)
        })?;
        self.life.note_names_made(caller, MadeChange::default());
        self.nodes.remove(parent, name);
        self.stats.fuse.change_ops.add(1);
        Ok(())
    }

    /// Renames; `flags` as for `renameat2(2)`.
    pub fn rename(&self, from: DirName<'_>, to: DirName<'_>, flags: u32, caller: &FsCaller) -> FsResult<()> {
        let exchange = flags & RENAME_EXCHANGE != 0;
        if self.nodes.is_directory(from.parent, from.name) || exchange && self.nodes.is_directory(to.parent, to.name) {
            self.can.check(LimitedCall::RenameDirectory)?;
        }
        let _changing = [from.parent, to.parent].map(|directory| self.directory_attrs.changing(directory));
        // Until the table has the new name, paths below the old one lead nowhere.
        let under_way = self.nodes.begin_rename();
        let repeat = self.life.find_repeat(caller);
        let known = self.nodes.identity_at(from.parent, from.name);
        let renamed = self.while_moving(1, || {
            let old = self.nodes.resolve(from.parent).ok_or_else(|| self.missing(from.parent))?;
            let new = self.nodes.resolve(to.parent).ok_or_else(|| self.missing(to.parent))?;
            Ok(self.as_caller(caller, false, |by| {
                let old = NodePath { path: &old.path, expected: Some(old.identity) };
                let new = NodePath { path: &new.path, expected: Some(new.identity) };
                let from = NamePath { directory: old, name: from.name };
                let to = NamePath { directory: new, name: to.name };
                self.life.change_names(&Change::Rename { from, to, flags }, repeat, known, by, caller)
            })?)
        })?;
        self.life.note_names_made(caller, MadeChange::default());
        // The process before may have come so far.
        if repeat.is_none() || !self.knows_name(to, caller)? {
            self.nodes.rename(from, to, exchange);
        }
        if let Some(attr) = renamed
            && let Some(ino) = self.nodes.node_at(to.parent, to.name)
        {
            self.nodes.set_identity(ino, attr.identity);
        }
        drop(under_way);
        self.stats.fuse.change_ops.add(1);
        Ok(())
    }

    /// Sets attributes; with `fh`, of an open file.
    pub fn setattr(
        &self,
        ino: u64,
        fh: Option<u64>,
        set: &AttrChange,
        caller: &FsCaller,
    ) -> FsResult<(NodeAttr, Duration)> {
        let set = &self.can.stored_attributes(set);
        if *set == AttrChange::default() && self.open_nodes.is_passed_through(ino) {
            self.take_privileges(ino, caller)?;
        }
        let _changing = self.directory_attrs.changing(ino);
        // Without its groups, a caller would silently lose the set-group-ID bit.
        let groups_decide = set.mode.is_some_and(|mode| mode & libc::S_ISGID != 0);
        let attr = match fh.and_then(|fh| self.open_nodes.file(ino, fh).ok()) {
            Some(file) => self.as_caller(caller, groups_decide, |caller| file.file.set_attr(set, caller))?,
            None => {
                let by_path = self.on_node(ino, caller, groups_decide, |of, caller| {
                    self.source.change(&Change::SetAttr { of, set: *set }, caller)
                });
                match by_path {
                    Ok(attr) => with_attr(attr)?,
                    Err(error) => self.or_open_object(ino, Err(error), |open| {
                        self.as_caller(caller, groups_decide, |caller| open.set_attr(set, caller))
                    })?,
                }
            }
        };
        self.nodes.set_identity(ino, attr.identity);
        self.note_sent(ino, &attr);
        self.stats.fuse.change_ops.add(1);
        Ok((attr, self.attr_ttl(ino)))
    }

    /// The kernel is about to change a file itself, for a caller whose changes take set-user-ID and set-group-ID bits away. It
    /// does so with the rights of the first that opened the file, which may keep the bits. A caller that may not write has made
    /// the request in another way.
    fn take_privileges(&self, ino: u64, caller: &FsCaller) -> FsResult<()> {
        if self.access(ino, libc::W_OK as u32, caller).is_err() {
            return Ok(());
        }
        let mode = self.getattr(ino, None, caller)?.0.mode & 0o7777;
        let group = if mode & libc::S_IXGRP != 0 { libc::S_ISGID } else { 0 };
        let left = mode & !libc::S_ISUID & !group;
        if left == mode {
            return Ok(());
        }
        let owner = FsCaller { uid: self.config.owner.0, gid: self.config.owner.1, ..*caller };
        let set = AttrChange { mode: Some(left), ..AttrChange::default() };
        self.setattr(ino, None, &set, &owner).map(|_| ())
    }

    /// Target of a symbolic link.
    pub fn readlink(&self, ino: u64, caller: &FsCaller) -> FsResult<Vec<u8>> {
        self.on_node(ino, caller, false, |at, caller| self.source.readlink(at, caller))
    }

    /// access(2).
    pub fn access(&self, ino: u64, mask: u32, caller: &FsCaller) -> FsResult<()> {
        let answer = self.on_node(ino, caller, true, |at, caller| self.source.access(at, mask, caller));
        self.or_attr_of_open(ino, answer, OpenAttrCall::Access(mask), caller, drop)
    }

    /// `answer`, or that of an open file or directory of the node to `call` if it has lost its name.
    fn or_attr_of_open<T>(
        &self,
        ino: u64,
        answer: FsResult<T>,
        call: OpenAttrCall<'_>,
        caller: &FsCaller,
        found: impl Fn(Vec<u8>) -> T,
    ) -> FsResult<T> {
        let groups_decide = match call {
            OpenAttrCall::Access(_) => true,
            OpenAttrCall::Set { name, .. } => acl_name(name),
            OpenAttrCall::Get(_) | OpenAttrCall::List | OpenAttrCall::Remove(_) => false,
        };
        self.or_open_object(ino, answer, |open| {
            self.as_caller(caller, groups_decide, |caller| open.call_attr(&call, caller)).map(&found)
        })
    }

    /// An extended attribute's value.
    pub fn getxattr(&self, ino: u64, name: &[u8], caller: &FsCaller) -> FsResult<Vec<u8>> {
        self.can.check(LimitedCall::Xattr(name))?;
        // The kernel requests them before the first write. The source's kernel removes them at a write, whatever is known here.
        if name == CAPABILITIES && self.nodes.is_bare(ino) {
            return Err(errno_error(libc::ENODATA, "a new file has no capabilities"));
        }
        let answer = self.on_node(ino, caller, false, |at, caller| self.source.get_xattr(at, name, caller));
        self.or_attr_of_open(ino, answer, OpenAttrCall::Get(name), caller, |value| value)
    }

    /// The names of the extended attributes.
    pub fn listxattr(&self, ino: u64, caller: &FsCaller) -> FsResult<Vec<u8>> {
        let answer = self.on_node(ino, caller, false, |at, caller| self.source.list_xattr(at, caller));
        self.or_attr_of_open(ino, answer, OpenAttrCall::List, caller, |names| names)
    }

    /// Sets an extended attribute; `flags` as for `setxattr(2)`.
    pub fn setxattr(&self, ino: u64, name: &[u8], value: &[u8], flags: u32, caller: &FsCaller) -> FsResult<()> {
        self.can.check(LimitedCall::Xattr(name))?;
        let _changing = self.directory_attrs.changing(ino);
        if name == CAPABILITIES {
            self.nodes.note_bare(ino, Duration::ZERO);
        }
        let answer = self.on_node(ino, caller, acl_name(name), |of, caller| {
            self.source.change(&Change::SetXattr { of, name, value, flags }, caller)
        });
        let answer = answer.map(|changed| self.follow_change(ino, changed));
        let set = self.or_attr_of_open(ino, answer, OpenAttrCall::Set { name, value, flags }, caller, drop);
        match set {
            // The first attempt has made the attribute.
            Err(error)
                if error.errno() == libc::EEXIST
                    && caller.request.repeated
                    && self.getxattr(ino, name, caller).is_ok_and(|found| found == value) => {}
            set => set?,
        }
        self.stats.fuse.change_ops.add(1);
        Ok(())
    }

    /// Removes an extended attribute.
    pub fn removexattr(&self, ino: u64, name: &[u8], caller: &FsCaller) -> FsResult<()> {
        self.can.check(LimitedCall::Xattr(name))?;
        let _changing = self.directory_attrs.changing(ino);
        let answer = self
            .on_node(ino, caller, false, |of, caller| self.source.change(&Change::RemoveXattr { of, name }, caller));
        let answer = answer.map(|changed| self.follow_change(ino, changed));
        match self.or_attr_of_open(ino, answer, OpenAttrCall::Remove(name), caller, drop) {
            // The first attempt has removed the attribute.
            Err(error) if error.errno() == libc::ENODATA && caller.request.repeated => {}
            removed => removed?,
        }
        self.stats.fuse.change_ops.add(1);
        Ok(())
    }

    /// A node keeps its number when the source has made another object of a change of its attributes.
    fn follow_change(&self, ino: u64, changed: Option<NodeAttr>) {
        if let Some(attr) = changed {
            self.nodes.set_identity(ino, attr.identity);
        }
    }

    /// Whether the table of nodes has the name as the source has.
    fn knows_name(&self, at: DirName<'_>, caller: &FsCaller<'_>) -> FsResult<bool> {
        let found = self.on_name(at.parent, at.name, caller, false, |at, by| find_name(&*self.source, at, by))?;
        Ok(found.map(|found| found.identity) == self.nodes.identity_at(at.parent, at.name))
    }
}

/// Whether it is the name of an ACL, which may cost the caller the set-group-ID bit, as a mode does.
fn acl_name(name: &[u8]) -> bool {
    name.starts_with(b"system.")
}

/// The attributes of a change that has some.
fn with_attr(attr: Option<NodeAttr>) -> Result<NodeAttr, FsError> {
    attr.ok_or_else(|| errno_error(libc::EPROTO, "the source's answer to a change has no attributes"))
}
