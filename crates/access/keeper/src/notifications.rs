//! Notifications to the kernel that the keeper sends for the mount's process. A notification can wait in the kernel for requests
//! that this process serves, and no signal ends that wait: a process that is killed meanwhile would not end, and so the keeper
//! would start no other. Knows no kind of notification.
//!
//! The process opens a conversation for each notification that is under way at the same time, and uses it again. A thread of the
//! keeper serves each conversation: the thread writes the notification to the connection, and answers with the kernel's error number.

use crate::descriptor_socket::{conversation, receive_message, send_message};
use parking_lot::Mutex;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};

/// The longest notification, with the one that follows.
const NOTIFICATION_MAX_BYTES: usize = 16 << 10;
/// A message begins with the length of the notification.
const LENGTH_BYTES: usize = size_of::<u32>();
/// Besides a notification, the threads of the keeper need little.
const STACK_BYTES: usize = NOTIFICATION_MAX_BYTES + (64 << 10);

/// Serves a process until that has ended; returns the process's side.
pub(crate) fn serve_notifications() -> io::Result<OwnedFd> {
    let (keeper_socket, process_socket) = conversation()?;
    start_thread(move || {
        // A message is a new conversation: its socket, and the connection to the kernel.
        while let Ok(message) = receive_message(&keeper_socket, &mut [0; 1])
            && message.len > 0
        {
            let mut descriptors = message.descriptors.into_iter();
            if let Some(socket) = descriptors.next()
                && let Some(device) = descriptors.next()
            {
                // Without a thread the conversation ends, and the process writes the notification itself.
                let _ = start_thread(move || converse(&socket, &device));
            }
        }
    })?;
    Ok(process_socket)
}

fn start_thread(work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    std::thread::Builder::new().name("notifications".into()).stack_size(STACK_BYTES).spawn(work).map(drop)
}

fn converse(socket: &OwnedFd, device: &OwnedFd) {
    let mut bytes = [0; NOTIFICATION_MAX_BYTES];
    while let Ok(message) = receive_message(socket, &mut bytes)
        && let Some((length, rest)) = bytes[..message.len].split_first_chunk::<LENGTH_BYTES>()
        && let Some((notification, if_ended)) = rest.split_at_checked(u32::from_ne_bytes(*length) as usize)
    {
        let errno = write_notification(device, notification);
        let has_ended = send_message(socket, &errno.to_ne_bytes(), &[]).is_err();
        if has_ended && !if_ended.is_empty() {
            write_notification(device, if_ended);
        }
    }
}

/// Returns the kernel's error number, or 0.
fn write_notification(device: &OwnedFd, notification: &[u8]) -> i32 {
    loop {
        match rustix::io::write(device, notification) {
            Ok(_) => return 0,
            Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return errno.raw_os_error(),
        }
    }
}

/// The side of the mount's process.
#[derive(Debug)]
pub struct KeeperNotifications {
    socket: OwnedFd,
    /// Conversations without a notification under way.
    idle: Mutex<Vec<OwnedFd>>,
}

impl KeeperNotifications {
    /// With the conversation of the order.
    pub fn new(socket: OwnedFd) -> KeeperNotifications {
        KeeperNotifications { socket, idle: Mutex::default() }
    }

    /// Sends a notification to the connection `device`, and `if_ended` if this process has ended before the kernel's answer. Returns the
    /// kernel's error number, or 0.
    ///
    /// # Errors
    /// When the keeper is gone, or has no room for another conversation: the notification was not sent, or again has no effect.
    pub fn send(&self, device: BorrowedFd<'_>, notification: &[u8], if_ended: &[u8]) -> io::Result<i32> {
        if LENGTH_BYTES + notification.len() + if_ended.len() > NOTIFICATION_MAX_BYTES {
            return Err(io::Error::from(io::ErrorKind::InvalidInput));
        }
        let idle = self.idle.lock().pop();
        let conversation = idle.map_or_else(|| self.open_conversation(device), Ok)?;
        let message = [&(notification.len() as u32).to_ne_bytes(), notification, if_ended].concat();
        send_message(&conversation, &message, &[])?;
        let mut errno = [0; size_of::<i32>()];
        if receive_message(&conversation, &mut errno)?.len != errno.len() {
            return Err(io::Error::from(io::ErrorKind::UnexpectedEof));
        }
        self.idle.lock().push(conversation);
        Ok(i32::from_ne_bytes(errno))
    }

    fn open_conversation(&self, device: BorrowedFd<'_>) -> io::Result<OwnedFd> {
        let (process_socket, keeper_socket) = conversation()?;
        send_message(&self.socket, &[0], &[keeper_socket.as_fd(), device])?;
        Ok(process_socket)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read as _;

    #[test]
    fn each_notification_arrives_and_is_answered() {
        let (mut kernel, device) = io::pipe().unwrap();
        let notifications = KeeperNotifications::new(serve_notifications().unwrap());
        let mut got = [0; 3];
        for _ in 0..2 {
            assert_eq!(notifications.send(device.as_fd(), b"one", b"not").unwrap(), 0);
            kernel.read_exact(&mut got).unwrap();
            assert_eq!(&got, b"one");
        }
        assert_eq!(notifications.idle.lock().len(), 1);
        drop(kernel);
        let refusal = notifications.send(device.as_fd(), b"two", b"not").unwrap();
        assert_eq!(refusal, rustix::io::Errno::PIPE.raw_os_error());
        let long = vec![0; NOTIFICATION_MAX_BYTES];
        assert!(notifications.send(device.as_fd(), &long, &[]).is_err());
    }

    #[test]
    fn the_second_notification_follows_the_end_of_the_process() {
        let (mut kernel, device) = io::pipe().unwrap();
        let (process_socket, keeper_socket) = conversation().unwrap();
        let message = [&3u32.to_ne_bytes()[..], b"oneafter"].concat();
        send_message(&process_socket, &message, &[]).unwrap();
        drop(process_socket);
        converse(&keeper_socket, &device.into());
        let mut got = Vec::new();
        kernel.read_to_end(&mut got).unwrap();
        assert_eq!(got, b"oneafter");
    }

    #[test]
    fn a_keeper_that_is_gone_sends_nothing() {
        let (_, device) = io::pipe().unwrap();
        let (socket, keeper) = conversation().unwrap();
        drop(keeper);
        assert!(KeeperNotifications::new(socket).send(device.as_fd(), b"one", &[]).is_err());
    }
}
