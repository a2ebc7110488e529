//! The limit of the memory for the inodes of a writable mount: which of them the kernel is requested to forget.

use super::names::MountNames;
use crate::inode_limit::{AgeHistogram, ForgetCandidate, LimitAlarm, LimitedInodes, RequestForgets, send_forgets};
use std::io;
use std::sync::Arc;

impl LimitedInodes for MountNames {
    fn limit_alarm(&self) -> &LimitAlarm {
        &self.limit_alarm
    }

    fn inode_limit(&self) -> u64 {
        self.config.inode_bytes
    }

    fn inode_memory(&self) -> u64 {
        self.nodes.bytes()
    }

    fn inode_count(&self) -> usize {
        self.nodes.len()
    }

    fn request_forgets(&self, kernel: &dyn RequestForgets, bytes: u64) -> io::Result<bool> {
        let open = self.open_nodes.inodes();
        let mut ages = AgeHistogram::new();
        self.nodes
            .for_each_idle(|ino| open.contains(&ino), |node| ages.add_memory(AgeHistogram::step(node.age), node.bytes));
        let newest = ages.step_reaching(bytes);
        // Of the newest step only a part is needed: during a walk most inodes have one age.
        let (newest_step, mut left) = newest.unwrap_or((0, u64::MAX));
        let mut cold = Vec::new();
        self.nodes.for_each_idle(
            |ino| open.contains(&ino),
            |node| {
                let age = AgeHistogram::step(node.age);
                if age < newest_step || (age == newest_step && left == 0) {
                    return;
                }
                if age == newest_step {
                    left = left.saturating_sub(node.bytes);
                }
                let (parent, name) = match node.name {
                    Some(name) => (Some(name.parent), Arc::clone(&name.name)),
                    None => (None, Arc::default()),
                };
                cold.push(ForgetCandidate { ino: node.ino, directory: node.directory, parent, name });
            },
        );
        send_forgets(kernel, &self.stats, cold.into_iter())?;
        Ok(newest.is_none())
    }
}
