//! Messages with descriptors, over sockets that keep messages apart. Knows no content.

use rustix::cmsg_space;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
};
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};

/// Descriptors of a message, with some of another release.
const DESCRIPTORS_MAX: usize = 8;

/// A message that has arrived.
pub(crate) struct ReceivedMessage {
    /// Its bytes in the buffer; 0 at the end of the other side.
    pub len: usize,
    pub descriptors: Vec<OwnedFd>,
}

/// The two sides of a conversation.
pub(crate) fn conversation() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?)
}

/// Sends a message with duplicates of descriptors.
pub(crate) fn send_message(socket: &OwnedFd, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(io::Error::other("a message between a mount and its keeper has no room for descriptors"));
    }
    loop {
        match sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL) {
            Err(Errno::INTR) => {}
            sent => return sent.map(drop).map_err(io::Error::from),
        }
    }
}

/// Waits for the next message.
pub(crate) fn receive_message(socket: &OwnedFd, buffer: &mut [u8]) -> io::Result<ReceivedMessage> {
    receive_as(socket, buffer, RecvFlags::empty())
}

/// As [`receive_message`], with more flags.
pub(crate) fn receive_as(socket: &OwnedFd, buffer: &mut [u8], flags: RecvFlags) -> io::Result<ReceivedMessage> {
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let len = loop {
        match recvmsg(socket, &mut [IoSliceMut::new(buffer)], &mut control, flags | RecvFlags::CMSG_CLOEXEC) {
            Err(Errno::INTR) => {}
            received => break received?.bytes,
        }
    };
    let mut descriptors = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(sent) = message {
            descriptors.extend(sent);
        }
    }
    Ok(ReceivedMessage { len, descriptors })
}
