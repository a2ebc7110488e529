//! What of the capacity each disk has, by the room that its file system was last known to have. It asks no file system and
//! evicts nothing.

use crate::config::{Capacity, Finding, StoreConfig};
use crate::disk::Disk;
use crate::io::Space;
use spurline_types::units::human_bytes;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// What each disk can hold: its free space and what the cache has there already, less what must stay free, shared
/// between the directories that lie on one file system. One that has not answered yet has room for nothing.
fn usable(spaces: &[(u64, Space, u64)], ratio: f64) -> Vec<u64> {
    spaces
        .iter()
        .map(|(device, space, _)| {
            let here = spaces.iter().filter(|(d, ..)| d == device);
            let (count, ours) = here.fold((0, 0), |(n, sum), (_, _, used)| (n + 1, sum + used));
            let known = u64::from(space.total > 0);
            known * (space.free + ours).saturating_sub((space.total as f64 * ratio) as u64) / count
        })
        .collect()
}

fn rooms(config: &StoreConfig, disks: &[Arc<Disk>]) -> Vec<u64> {
    let spaces: Vec<_> = disks
        .iter()
        .map(|disk| {
            let device = disk.held.device().unwrap_or(u64::MAX - u64::from(disk.number));
            let space = Space { total: disk.total.load(Ordering::Relaxed), free: disk.free.load(Ordering::Relaxed) };
            (device, space, disk.used.load(Ordering::Relaxed))
        })
        .collect();
    usable(&spaces, config.free_space_ratio)
}

fn asked(config: &StoreConfig, sum: u64) -> u64 {
    match config.capacity {
        Capacity::Bytes(bytes) => bytes,
        _ => sum,
    }
}

/// Shares of what was asked for, in proportion to the room; never more than that in all.
fn shares(rooms: &[u64], asked: u64) -> Vec<u64> {
    let sum: u64 = rooms.iter().sum();
    rooms
        .iter()
        .map(|room| (*room).min((u128::from(asked) * u128::from(*room) / u128::from(sum.max(1))) as u64))
        .collect()
}

/// Shares the capacity out at the start; what an operator should know about it.
pub fn share(config: &StoreConfig, disks: &[Arc<Disk>]) -> Vec<Finding> {
    let mut findings = Vec::new();
    let rooms = rooms(config, disks);
    let sum: u64 = rooms.iter().sum();
    let asked = asked(config, sum);
    if asked > sum && !disks.is_empty() {
        findings.push(Finding {
            subject: "--cache-size".into(),
            evidence: format!(
                "{} asked for, the cache disks have room for {} with {:.0} % kept free: {} will be used",
                human_bytes(asked),
                human_bytes(sum),
                config.free_space_ratio * 100.0,
                human_bytes(sum)
            ),
            remedy: "give a smaller --cache-size or --free-space-ratio, or more --cache-dir".into(),
        });
    }
    for (disk, limit) in disks.iter().zip(shares(&rooms, asked)) {
        disk.limit.store(limit, Ordering::Relaxed);
        if limit < u64::from(config.block_size) {
            findings.push(Finding {
                subject: disk.root.display().to_string(),
                evidence: format!("room for {}, less than one block: nothing is cached there", human_bytes(limit)),
                remedy: "free some space, or give a smaller --free-space-ratio or a larger --cache-size".into(),
            });
        }
    }
    findings
}

/// Whether shares are to be dealt anew: one is more than its disk has room for, one begins or ceases to hold a block, or a
/// hundredth more can be used in all. Else they stay, and files with them on the disks that drew them.
fn outdated(shares: &[u64], rooms: &[u64], next: &[u64], block: u64) -> bool {
    let sum = |shares: &[u64]| shares.iter().sum::<u64>();
    shares.iter().zip(rooms).any(|(share, room)| share > room)
        || shares.iter().zip(next).any(|(share, next)| (*share < block) != (*next < block))
        || sum(next).saturating_sub(sum(shares)) > sum(next) / 100
}

/// Shares the capacity out again where the shares are outdated; whether they were. Called by one at a time.
pub fn share_again(config: &StoreConfig, disks: &[Arc<Disk>]) -> bool {
    let rooms = rooms(config, disks);
    let next = shares(&rooms, asked(config, rooms.iter().sum()));
    let now: Vec<u64> = disks.iter().map(|disk| disk.limit.load(Ordering::Relaxed)).collect();
    let block = u64::from(config.block_size);
    if !outdated(&now, &rooms, &next, block) {
        return false;
    }
    for (disk, (now, next)) in disks.iter().zip(now.into_iter().zip(next)) {
        disk.limit.store(next, Ordering::Relaxed);
        let (path, room) = (disk.root.display(), human_bytes(next));
        match (now >= block, next >= block) {
            (false, true) => tracing::info!("cache disk {path} has room for {room} now: blocks are cached there"),
            (true, false) => {
                tracing::warn!("cache disk {path} has room for {room}, less than one block: nothing is cached there");
            }
            _ => {}
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directories_of_one_file_system_share_it() {
        let space = Space { total: 1000, free: 500 };
        assert_eq!(usable(&[(1, space, 100), (1, space, 0), (2, space, 0)], 0.1), [250, 250, 400]);
        assert_eq!(usable(&[(1, Space { total: 1000, free: 50 }, 10)], 0.1), [0]);
        assert_eq!(usable(&[(1, Space::default(), 10)], 0.1), [0]);
    }

    #[test]
    fn shares_are_in_proportion_and_dealt_anew_when_the_room_changes() {
        assert_eq!(shares(&[300, 100], 200), [150, 50]);
        assert_eq!(shares(&[300, 100], 1000), [300, 100]);
        assert_eq!(shares(&[0, 0], 1000), [0, 0]);
        let outdated = |now: &[u64], rooms: &[u64], asked| outdated(now, rooms, &shares(rooms, asked), 10);
        assert!(!outdated(&[150, 50], &[300, 100], 200));
        // Others fill a disk, and there is room for all still.
        assert!(!outdated(&[150, 50], &[200, 100], 200));
        assert!(outdated(&[150, 50], &[140, 100], 200), "less room than the share");
        assert!(outdated(&[0], &[100], 100), "there was no room");
        assert!(outdated(&[200, 0], &[300, 100], 200), "a disk that had none has room");
        assert!(outdated(&[500], &[600], 1000) && !outdated(&[595], &[600], 1000));
    }
}
