//! The side of the mount's process: the order at the start, and reports to the keeper.

use crate::messages::{KeeperMessage, KeptDescriptors, LifeOrder, UPGRADE_ACCEPTED};
use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::Path;

/// Set in a process that a keeper has started; its standard input is the conversation.
pub const LIFE_VARIABLE: &str = "SPURLINE_MOUNT_LIFE";

/// The connection to the keeper.
#[derive(Debug)]
pub struct KeeperLink {
    socket: OwnedFd,
    upgrades: Mutex<()>,
}

/// A process of a kept mount: one of several in the life of the mount.
#[derive(Debug)]
pub struct MountLife {
    /// The connection to the keeper.
    pub link: KeeperLink,
    /// The keeper's words at the start.
    pub order: LifeOrder,
}

impl MountLife {
    /// The life that a keeper has given to this process; `None` in any other process.
    ///
    /// # Errors
    /// When the keeper is gone, or is of another version.
    pub fn begin() -> io::Result<Option<MountLife>> {
        if std::env::var_os(LIFE_VARIABLE).is_none() {
            return Ok(None);
        }
        let socket = io::stdin().as_fd().try_clone_to_owned()?;
        match KeeperMessage::receive(&socket)? {
            Some(KeeperMessage::Order(order)) => {
                Ok(Some(MountLife { link: KeeperLink { socket, upgrades: Mutex::default() }, order }))
            }
            _ => Err(io::Error::other("the keeper of this mount gave no order")),
        }
    }
}

impl KeeperLink {
    /// Whether the keeper lives.
    pub fn has_keeper(&self) -> bool {
        let mut events = [PollFd::new(&self.socket, PollFlags::empty())];
        let polled = poll(&mut events, Some(&Timespec::default()));
        polled.is_err() || !events[0].revents().contains(PollFlags::HUP)
    }

    /// Waits for the end of the keeper.
    ///
    /// # Errors
    /// When the kernel can't wait.
    pub fn wait_for_end(&self) -> io::Result<()> {
        loop {
            // A hang-up is reported in any case, and a message is not.
            match poll(&mut [PollFd::new(&self.socket, PollFlags::empty())], None) {
                Err(rustix::io::Errno::INTR) => {}
                polled => return polled.map(drop).map_err(io::Error::from),
            }
        }
    }

    /// Gives the connection and the state of a new mount to the keeper.
    ///
    /// # Errors
    /// When the keeper is gone.
    pub fn report_mounted(&self, kept: KeptDescriptors) -> io::Result<()> {
        KeeperMessage::Mounted(kept).send(&self.socket)
    }

    /// Reports that requests are served.
    ///
    /// # Errors
    /// When the keeper is gone.
    pub fn report_ready(&self) -> io::Result<()> {
        KeeperMessage::Ready.send(&self.socket)
    }

    /// Requests that the mount continues with another program. Does not return if the keeper accepts: this process is ended.
    ///
    /// # Errors
    /// The reason of the refusal.
    pub fn request_upgrade(&self, program: &Path) -> Result<(), String> {
        let _one = self.upgrades.lock();
        let gone = |error: io::Error| format!("the keeper of the mount does not answer: {error}");
        KeeperMessage::Upgrade(program.display().to_string()).send(&self.socket).map_err(gone)?;
        match KeeperMessage::receive(&self.socket).map_err(gone)? {
            Some(KeeperMessage::UpgradeAnswer(answer)) if answer == UPGRADE_ACCEPTED => Ok(()),
            Some(KeeperMessage::UpgradeAnswer(refusal)) => Err(refusal),
            _ => Err("the keeper of the mount is gone".into()),
        }
    }
}
