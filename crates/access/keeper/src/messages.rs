//! The messages between a keeper and the process of its mount: a word, fields of text, and descriptors. The keeper outlives
//! releases, so unknown fields are ignored, and a version that differs is refused.

use crate::descriptor_socket::{receive_message, send_message};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::time::{ClockId, clock_gettime};
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};

/// The version of the conversation.
pub const PROTOCOL_VERSION: u32 = 1;
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
    /// From the keeper.
    UpgradeAnswer(String),
    /// From the keeper to the store.
    Keep(KeptMount),
    /// From the store: the mount is to end.
    End,
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

fn yes_or_no(value: bool) -> &'static str {
    if value { "yes" } else { "no" }
}

fn is_yes(text: &str, key: &str) -> bool {
    value_of(text, key) == Some("yes")
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
                field(&mut text, "check_only", yes_or_no(order.check_only));
                field(&mut text, "files", yes_or_no(order.files.is_some()));
                field(&mut text, "notifications", yes_or_no(order.notifications.is_some()));
                kept = order.kept.as_ref();
                field(&mut text, "unread_files", yes_or_no(order.unread_files.is_some()));
                conversations.extend(order.files.iter().chain(&order.notifications).chain(&order.unread_files));
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
                field(&mut text, "files", yes_or_no(mount.files.is_some()));
                kept = Some(&mount.descriptors);
                conversations.extend(&mount.files);
            }
            KeeperMessage::End => text.push_str("end\n"),
        }
        let mut sent: Vec<BorrowedFd<'_>> = conversations.into_iter().map(OwnedFd::as_fd).collect();
        sent.extend(kept.iter().flat_map(|kept| [kept.device.as_fd(), kept.state.as_fd()]));
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
        let mut descriptors = received.descriptors.into_iter();
        let files = if is_yes(fields, "files") { descriptors.next() } else { None };
        let notifications = if is_yes(fields, "notifications") { descriptors.next() } else { None };
        let unread_files = if is_yes(fields, "unread_files") { descriptors.next() } else { None };
        let kept = match (descriptors.next(), descriptors.next()) {
            (Some(device), Some(state)) => Some(KeptDescriptors { device, state }),
            _ => None,
        };
        Ok(Some(match word {
            "order" => {
                KeeperMessage::Order(LifeOrder { files, notifications, unread_files, kept, ..parse_order(fields)? })
            }
            "mounted" => KeeperMessage::Mounted(kept.ok_or_else(|| malformed("lacks descriptors"))?),
            "ready" => KeeperMessage::Ready,
            "upgrade" => KeeperMessage::Upgrade(value_of(fields, "program").unwrap_or_default().to_owned()),
            "keep" => KeeperMessage::Keep(KeptMount {
                descriptors: kept.ok_or_else(|| malformed("lacks descriptors"))?,
                takeovers: number_of(fields, "takeovers"),
                cause: value_of(fields, "cause").unwrap_or_default().to_owned(),
                files,
            }),
            "end" => KeeperMessage::End,
            "upgrade-answer" => KeeperMessage::UpgradeAnswer(value_of(fields, "answer").unwrap_or_default().to_owned()),
            _ => return Err(malformed("has an unknown word")),
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
        cause: value_of(fields, "cause").unwrap_or_default().to_owned(),
        ended_at_ns: number_of(fields, "ended_at_ns"),
        check_only: is_yes(fields, "check_only"),
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
        assert!(parse_order("protocol=2\n").is_err());
    }
}
