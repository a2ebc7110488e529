//! Identities on the wire: the device of the source's root is 0 there, because each host numbers its mounts itself. It
//! knows no request that does more than name objects.

use spurline_proto::{WriteAnswer, WriteCall};
use spurline_volume::writes::{Change, FileIdentity, NamePath, NodeAttr, NodePath};

/// The device of a source's root on this host.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RootDevice(pub u64);

impl RootDevice {
    /// An identity from the wire.
    pub fn inward(self, identity: FileIdentity) -> FileIdentity {
        FileIdentity { device: if identity.device == 0 { self.0 } else { identity.device }, ..identity }
    }

    fn outward_attr(self, attr: NodeAttr) -> NodeAttr {
        let device = if attr.identity.device == self.0 { 0 } else { attr.identity.device };
        NodeAttr { identity: FileIdentity { device, ..attr.identity }, ..attr }
    }

    fn node(self, at: NodePath<'_>) -> NodePath<'_> {
        NodePath { expected: at.expected.map(|expected| self.inward(expected)), ..at }
    }

    fn name(self, at: NamePath<'_>) -> NamePath<'_> {
        NamePath { directory: self.node(at.directory), ..at }
    }

    /// A call from the wire.
    pub fn inward_call<'a>(self, call: &WriteCall<'a>) -> WriteCall<'a> {
        match *call {
            WriteCall::Stat(at) => WriteCall::Stat(self.node(at)),
            WriteCall::Lookup(at) => WriteCall::Lookup(self.name(at)),
            WriteCall::ReadLink(at) => WriteCall::ReadLink(self.node(at)),
            WriteCall::Access(at, mask) => WriteCall::Access(self.node(at), mask),
            WriteCall::GetXattr(at, name) => WriteCall::GetXattr(self.node(at), name),
            WriteCall::ListXattr(at) => WriteCall::ListXattr(self.node(at)),
            WriteCall::Open { at, flags, file } => WriteCall::Open { at: self.node(at), flags, file },
            WriteCall::Create { at, flags, mode, file } => WriteCall::Create { at: self.name(at), flags, mode, file },
            WriteCall::CreateUnnamed { directory, flags, mode, file } => {
                WriteCall::CreateUnnamed { directory: self.node(directory), flags, mode, file }
            }
            WriteCall::LinkOpen { file, to } => WriteCall::LinkOpen { file, to: self.name(to) },
            WriteCall::OpenDirectory { at, file } => WriteCall::OpenDirectory { at: self.node(at), file },
            WriteCall::Change(change) => WriteCall::Change(self.inward_change(change)),
            other => other,
        }
    }

    fn inward_change(self, change: Change<'_>) -> Change<'_> {
        match change {
            Change::Mkdir { at, mode } => Change::Mkdir { at: self.name(at), mode },
            Change::Mknod { at, mode, rdev } => Change::Mknod { at: self.name(at), mode, rdev },
            Change::Symlink { at, target } => Change::Symlink { at: self.name(at), target },
            Change::Link { from, to } => Change::Link { from: self.node(from), to: self.name(to) },
            Change::Unlink { at } => Change::Unlink { at: self.name(at) },
            Change::Rmdir { at } => Change::Rmdir { at: self.name(at) },
            Change::Rename { from, to, flags } => Change::Rename { from: self.name(from), to: self.name(to), flags },
            Change::SetAttr { of, set } => Change::SetAttr { of: self.node(of), set },
            Change::SetXattr { of, name, value, flags } => Change::SetXattr { of: self.node(of), name, value, flags },
            Change::RemoveXattr { of, name } => Change::RemoveXattr { of: self.node(of), name },
        }
    }

    /// An answer to the wire.
    pub fn outward(self, answer: WriteAnswer) -> WriteAnswer {
        match answer {
            WriteAnswer::Attr(attr) => WriteAnswer::Attr(self.outward_attr(attr)),
            WriteAnswer::Created(attr, directory) => {
                WriteAnswer::Created(self.outward_attr(attr), directory.map(|attr| self.outward_attr(attr)))
            }
            WriteAnswer::Names(mut names) => {
                names.iter_mut().for_each(|listed| listed.attr = listed.attr.map(|attr| self.outward_attr(attr)));
                WriteAnswer::Names(names)
            }
            other => other,
        }
    }
}

/// The path of `name` in `directory`.
pub(crate) fn join_path(directory: &[u8], name: &[u8]) -> Vec<u8> {
    if directory.is_empty() { name.to_vec() } else { [directory, name].join(&b'/') }
}
