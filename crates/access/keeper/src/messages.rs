//! The messages between a keeper and the process of its mount: a word, fields of text, and descriptors with names. The keeper outlives
//! releases, so unknown words, fields and descriptors are ignored, and a version that differs is refused: a change that the other side
//! must not ignore takes another version.

use crate::descriptor_socket::{receive_message, send_message};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::time::{ClockId, clock_gettime};
use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};

/// The version of the conversation.
const PROTOCOL_VERSION: u32 = 2;
/// The keeper's answer to an accepted upgrade; any other answer is the reason of a refusal.
pub const UPGRADE_ACCEPTED: &str = "accepted";
/// The cause of a restart by an upgrade begins with this; the path of the program follows.
pub const UPGRADE_CAUSE: &str = "upgrade to ";
/// The longest message.
const MESSAGE_MAX_BYTES: usize = 16 << 10;

/// What outlives a mount's process.
#[derive(Debug)]
pub struct KeptDescriptors {
    /// The connection to the kernel.
    pub device: OwnedFd,
    /// The memory file with the state.
    pub state: OwnedFd,
}

impl KeptDescriptors {
    /// The same descriptors once more.
    ///
    /// # Errors
    /// When no descriptor is free.
    pub fn duplicate(&self) -> io::Result<KeptDescriptors> {
        Ok(KeptDescriptors { device: self.device.try_clone()?, state: self.state.try_clone()? })
    }

    /// Whether the connection to the kernel has ended: unmounted, or aborted.
    pub(crate) fn is_dead(&self) -> bool {
        let mut events = [PollFd::new(&self.device, PollFlags::IN)];
        let polled = poll(&mut events, Some(&Timespec::default()));
        polled.is_ok() && events[0].revents().contains(PollFlags::ERR)
    }
}

/// A mount in a store.
#[derive(Debug)]
pub(crate) struct KeptMount {
    pub descriptors: KeptDescriptors,
    /// Processes before the process that is about to serve.
    pub takeovers: u64,
    /// Why the process before ended; empty at first.
    pub cause: String,
    /// The keeper's socket of the conversation about open files with that process.
    pub files: Option<OwnedFd>,
}

/// Now, on the clock of [`LifeOrder::ended_at_ns`].
pub fn monotonic_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// What a keeper tells a process of the mount at its start.
#[derive(Debug, Default)]
pub struct LifeOrder {
    /// The process number of the keeper.
    pub keeper: u32,
    /// Processes that have served the mount before.
    pub takeovers: u64,
    /// Why the process before ended; empty at first.
    pub cause: String,
    /// When the process before ended, by [`monotonic_ns`].
    pub ended_at_ns: u64,
    /// Only check whether this program can take over.
    pub check_only: bool,
    /// The conversation about open files; absent for a check.
    pub files: Option<OwnedFd>,
    /// The conversation about notifications to the kernel; absent for a check.
    pub notifications: Option<OwnedFd>,
    /// From a store: the socket with the messages about open files that the keeper before has not read.
    pub unread_files: Option<OwnedFd>,
    /// Absent at first.
    pub kept: Option<KeptDescriptors>,
}

/// A message.
#[derive(Debug)]
pub(crate) enum KeeperMessage {
    /// From the keeper, first.
    Order(LifeOrder),
    /// The mount exists.
    Mounted(KeptDescriptors),
    /// Requests are served.
    Ready,
    /// Continue with this program.
    Upgrade(String),
    UpgradeAnswer(String),
    /// From the keeper to the store.
    Keep(KeptMount),
    /// From the store: the mount is to end.
    End,
    /// Of another release, and ignored.
    Unknown,
}

/// A line of a message holds no line break.
fn field(text: &mut String, key: &str, value: &str) {
    text.push_str(key);
    text.push('=');
    text.push_str(&value.replace('\n', " "));
    text.push('\n');
}

fn value_of<'a>(text: &'a str, key: &str) -> Option<&'a str> {
    text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix('='))
}

fn text_of(text: &str, key: &str) -> String {
    value_of(text, key).unwrap_or_default().to_owned()
}

fn number_of(text: &str, key: &str) -> u64 {
    value_of(text, key).and_then(|value| value.parse().ok()).unwrap_or(0)
}

fn malformed(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("a message between a mount and its keeper {what}"))
}

impl KeeperMessage {
    pub(crate) fn send(&self, socket: &OwnedFd) -> io::Result<()> {
        let mut text = String::new();
        let mut kept = None;
        let mut conversations = Vec::new();
        match self {
            KeeperMessage::Order(order) => {
                text.push_str("order\n");
                field(&mut text, "protocol", &PROTOCOL_VERSION.to_string());
                field(&mut text, "keeper", &order.keeper.to_string());
                field(&mut text, "takeovers", &order.takeovers.to_string());
                field(&mut text, "cause", &order.cause);
                field(&mut text, "ended_at_ns", &order.ended_at_ns.to_string());
                field(&mut text, "check_only", if order.check_only { "yes" } else { "no" });
                kept = order.kept.as_ref();
                conversations.push(("files", &order.files));
                conversations.push(("notifications", &order.notifications));
                conversations.push(("unread_files", &order.unread_files));
            }
            KeeperMessage::Mounted(descriptors) => {
                text.push_str("mounted\n");
                kept = Some(descriptors);
            }
            KeeperMessage::Ready => text.push_str("ready\n"),
            KeeperMessage::Upgrade(program) => {
                text.push_str("upgrade\n");
                field(&mut text, "program", program);
            }
            KeeperMessage::UpgradeAnswer(answer) => {
                text.push_str("upgrade-answer\n");
                field(&mut text, "answer", answer);
            }
            KeeperMessage::Keep(mount) => {
                text.push_str("keep\n");
                field(&mut text, "takeovers", &mount.takeovers.to_string());
                field(&mut text, "cause", &mount.cause);
                kept = Some(&mount.descriptors);
                conversations.push(("files", &mount.files));
            }
            KeeperMessage::End => text.push_str("end\n"),
            KeeperMessage::Unknown => text.push_str("unknown\n"),
        }
        let kept = kept.iter().flat_map(|kept| [("device", &kept.device), ("state", &kept.state)]);
        let present = conversations.iter().filter_map(|(name, socket)| Some((*name, socket.as_ref()?)));
        let descriptors: Vec<(&str, &OwnedFd)> = kept.chain(present).collect();
        let names: Vec<&str> = descriptors.iter().map(|(name, _)| *name).collect();
        field(&mut text, "descriptors", &names.join(","));
        let sent: Vec<BorrowedFd<'_>> = descriptors.iter().map(|(_, descriptor)| descriptor.as_fd()).collect();
        send_message(socket, text.as_bytes(), &sent)
    }

    /// The next message; `None` at the end of the other side.
    pub(crate) fn receive(socket: &OwnedFd) -> io::Result<Option<KeeperMessage>> {
        let mut bytes = vec![0; MESSAGE_MAX_BYTES];
        let received = receive_message(socket, &mut bytes)?;
        if received.len == 0 {
            return Ok(None);
        }
        let text = std::str::from_utf8(&bytes[..received.len]).map_err(|_| malformed("is no text"))?;
        let (word, fields) = text.split_once('\n').unwrap_or((text, ""));
        let names = value_of(fields, "descriptors").unwrap_or_default().split(',');
        let mut descriptors: HashMap<&str, OwnedFd> = names.zip(received.descriptors).collect();
        let kept = match (descriptors.remove("device"), descriptors.remove("state")) {
            (Some(device), Some(state)) => Some(KeptDescriptors { device, state }),
            _ => None,
        };
        let files = descriptors.remove("files");
        Ok(Some(match word {
            "order" => {
                let notifications = descriptors.remove("notifications");
                let unread_files = descriptors.remove("unread_files");
                KeeperMessage::Order(LifeOrder { files, notifications, unread_files, kept, ..parse_order(fields)? })
            }
            "mounted" => KeeperMessage::Mounted(kept.ok_or_else(|| malformed("lacks descriptors"))?),
            "ready" => KeeperMessage::Ready,
            "upgrade" => KeeperMessage::Upgrade(text_of(fields, "program")),
            "keep" => KeeperMessage::Keep(KeptMount {
                descriptors: kept.ok_or_else(|| malformed("lacks descriptors"))?,
                takeovers: number_of(fields, "takeovers"),
                cause: text_of(fields, "cause"),
                files,
            }),
            "end" => KeeperMessage::End,
            "upgrade-answer" => KeeperMessage::UpgradeAnswer(text_of(fields, "answer")),
            _ => KeeperMessage::Unknown,
        }))
    }
}

fn parse_order(fields: &str) -> io::Result<LifeOrder> {
    if number_of(fields, "protocol") != u64::from(PROTOCOL_VERSION) {
        return Err(malformed("has another version: unmount, and mount again with this program"));
    }
    Ok(LifeOrder {
        keeper: number_of(fields, "keeper") as u32,
        takeovers: number_of(fields, "takeovers"),
        cause: text_of(fields, "cause"),
        ended_at_ns: number_of(fields, "ended_at_ns"),
        check_only: value_of(fields, "check_only") == Some("yes"),
        ..LifeOrder::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::descriptor_socket::conversation;
    use std::fs::File;

    #[test]
    fn messages_arrive_with_their_descriptors() {
        let (left, right) = conversation().unwrap();
        let open = || File::open("/dev/null").unwrap().into();
        let kept = Some(KeptDescriptors { device: open(), state: open() });
        let order = LifeOrder {
            keeper: 7,
            takeovers: 3,
            cause: "killed\nby 9".into(),
            ended_at_ns: 5,
            files: Some(open()),
            notifications: Some(open()),
            kept,
            ..LifeOrder::default()
        };
        KeeperMessage::Order(order).send(&left).unwrap();
        let Some(KeeperMessage::Order(order)) = KeeperMessage::receive(&right).unwrap() else { panic!("an order") };
        assert_eq!((order.keeper, order.takeovers, order.ended_at_ns, order.check_only), (7, 3, 5, false));
        assert_eq!(order.cause, "killed by 9");
        assert!(order.kept.is_some() && order.files.is_some() && order.notifications.is_some());
        KeeperMessage::Upgrade("/usr/bin/spurline".into()).send(&right).unwrap();
        let got = KeeperMessage::receive(&left).unwrap();
        assert!(matches!(got, Some(KeeperMessage::Upgrade(program)) if program == "/usr/bin/spurline"));
        drop(right);
        assert!(KeeperMessage::receive(&left).unwrap().is_none());
        let refusal = parse_order(&format!("protocol={}\n", PROTOCOL_VERSION + 1)).unwrap_err().to_string();
        assert!(refusal.ends_with("unmount, and mount again with this program"), "{refusal}");
    }

    #[test]
    fn what_another_release_says_more_is_ignored() {
        let (left, right) = conversation().unwrap();
        let zero = File::open("/dev/zero").unwrap();
        let null = File::open("/dev/null").unwrap();
        let text = b"mounted\nlease=5\ndescriptors=lease,state,device,more\n";
        send_message(&left, text, &[zero.as_fd(), zero.as_fd(), null.as_fd(), zero.as_fd()]).unwrap();
        let Some(KeeperMessage::Mounted(kept)) = KeeperMessage::receive(&right).unwrap() else { panic!("a mount") };
        let numbers = [kept.device, kept.state].map(|file| rustix::fs::fstat(file).unwrap().st_rdev);
        assert_eq!(numbers, [&null, &zero].map(|file| rustix::fs::fstat(file).unwrap().st_rdev));
        send_message(&left, b"pause\nseconds=5\n", &[null.as_fd()]).unwrap();
        assert!(matches!(KeeperMessage::receive(&right).unwrap(), Some(KeeperMessage::Unknown)));
        // A message without one of its descriptors is refused.
        send_message(&left, b"mounted\ndescriptors=device\n", &[null.as_fd()]).unwrap();
        assert!(KeeperMessage::receive(&right).is_err());
    }
}
