//! Distributes the capacity among the disks, by the last known space of the file systems. Queries no file system and evicts
//! nothing.

use crate::config::{CacheCapacity, StoreConfig, StoreFinding};
use crate::disk::CacheDisk;
use crate::io::DiskSpace;
use spurline_types::units::human_bytes;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// What each disk can hold: its free space and the cache's own blocks, less the space to keep free, divided between the
/// directories on the same file system. A file system that has not answered yet has no room.
fn usable_bytes(spaces: &[(u64, DiskSpace, u64)], ratio: f64) -> Vec<u64> {
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

fn disk_rooms(config: &StoreConfig, disks: &[Arc<CacheDisk>]) -> Vec<u64> {
    let spaces: Vec<_> = disks
        .iter()
        .map(|disk| {
            let device = disk.root_lock.device_number().unwrap_or(u64::MAX - u64::from(disk.number));
            let space =
                DiskSpace { total: disk.total.load(Ordering::Relaxed), free: disk.free.load(Ordering::Relaxed) };
            (device, space, disk.used.load(Ordering::Relaxed))
        })
        .collect();
    usable_bytes(&spaces, config.free_space_ratio)
}

fn requested_bytes(capacity: CacheCapacity, sum: u64) -> u64 {
    match capacity {
        CacheCapacity::Bytes(bytes) | CacheCapacity::Default(bytes) => bytes,
        CacheCapacity::All | CacheCapacity::None => sum,
    }
}

/// Shares of the requested capacity, in proportion to the room; the sum never exceeds the request.
fn capacity_shares(rooms: &[u64], asked: u64) -> Vec<u64> {
    let sum: u64 = rooms.iter().sum();
    rooms
        .iter()
        .map(|room| (*room).min((u128::from(asked) * u128::from(*room) / u128::from(sum.max(1))) as u64))
        .collect()
}

/// Distributes the capacity at start; returns findings for the operator.
pub fn distribute(config: &StoreConfig, disks: &[Arc<CacheDisk>]) -> Vec<StoreFinding> {
    let mut findings = Vec::new();
    let rooms = disk_rooms(config, disks);
    let sum: u64 = rooms.iter().sum();
    let asked = requested_bytes(config.capacity, sum);
    let is_default = matches!(config.capacity, CacheCapacity::Default(_));
    if asked > sum && !is_default && !disks.is_empty() {
        findings.push(StoreFinding {
            subject: "--cache-size".into(),
            evidence: format!(
                "{} requested, the cache disks have room for {} with {:.0} % kept free: {} will be used",
                human_bytes(asked),
                human_bytes(sum),
                config.free_space_ratio * 100.0,
                human_bytes(sum)
            ),
            remedy: "give a smaller --cache-size or --free-space-ratio, or more --cache-dir".into(),
        });
    }
    for (disk, limit) in disks.iter().zip(capacity_shares(&rooms, asked)) {
        disk.limit.store(limit, Ordering::Relaxed);
        if limit < u64::from(config.block_size) {
            findings.push(StoreFinding {
                subject: disk.root.display().to_string(),
                evidence: format!("room for {}, less than one block: nothing is cached there", human_bytes(limit)),
                remedy: "free some space, or give a smaller --free-space-ratio or a larger --cache-size".into(),
            });
        }
    }
    findings
}

/// Whether shares must be recomputed: a share exceeds its disk's room, a disk begins or ceases to hold a block, or the usable
/// total grows by more than a hundredth. Otherwise the shares stay, and so does the placement of files.
fn shares_outdated(shares: &[u64], rooms: &[u64], next: &[u64], block: u64) -> bool {
    shares.iter().zip(rooms).any(|(share, room)| share > room)
        || shares.iter().zip(next).any(|(share, next)| (*share < block) != (*next < block))
        || next.iter().sum::<u64>().saturating_sub(shares.iter().sum::<u64>()) > next.iter().sum::<u64>() / 100
}

/// Redistributes the capacity when the capacity changed or the shares are outdated; returns whether that was so. Callers must
/// serialise.
pub fn redistribute(config: &StoreConfig, capacity: CacheCapacity, resized: bool, disks: &[Arc<CacheDisk>]) -> bool {
    let rooms = disk_rooms(config, disks);
    let next = capacity_shares(&rooms, requested_bytes(capacity, rooms.iter().sum()));
    let now: Vec<u64> = disks.iter().map(|disk| disk.limit.load(Ordering::Relaxed)).collect();
    let block = u64::from(config.block_size);
    if !resized && !shares_outdated(&now, &rooms, &next, block) {
        return false;
    }
    for (disk, (now, next)) in disks.iter().zip(now.into_iter().zip(next)) {
        disk.limit.store(next, Ordering::Relaxed);
        let path = disk.root.display();
        let room = human_bytes(next);
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
    use crate::Store;

    #[test]
    fn only_a_size_that_was_requested_is_found_too_large() {
        for (capacity, findings) in [(CacheCapacity::Bytes(1 << 60), 1), (CacheCapacity::Default(1 << 60), 0)] {
            let dir = tempfile::tempdir().unwrap();
            let config = StoreConfig::new(vec![dir.path().into()], capacity);
            let store = Store::open(config, Arc::default()).unwrap();
            assert_eq!(store.findings().len(), findings, "{capacity:?}");
        }
    }

    #[test]
    fn directories_of_one_file_system_share_it() {
        let space = DiskSpace { total: 1000, free: 500 };
        assert_eq!(usable_bytes(&[(1, space, 100), (1, space, 0), (2, space, 0)], 0.1), [250, 250, 400]);
        assert_eq!(usable_bytes(&[(1, DiskSpace { total: 1000, free: 50 }, 10)], 0.1), [0]);
        assert_eq!(usable_bytes(&[(1, DiskSpace::default(), 10)], 0.1), [0]);
    }

    #[test]
    fn shares_are_in_proportion_and_dealt_anew_when_the_room_changes() {
        assert_eq!(capacity_shares(&[300, 100], 200), [150, 50]);
        assert_eq!(capacity_shares(&[300, 100], 1000), [300, 100]);
        assert_eq!(capacity_shares(&[0, 0], 1000), [0, 0]);
        let outdated =
            |now: &[u64], rooms: &[u64], asked| shares_outdated(now, rooms, &capacity_shares(rooms, asked), 10);
        assert!(!outdated(&[150, 50], &[300, 100], 200));
        // Others fill a disk, and there is room for all still.
        assert!(!outdated(&[150, 50], &[200, 100], 200));
        assert!(outdated(&[150, 50], &[140, 100], 200), "less room than the share");
        assert!(outdated(&[0], &[100], 100), "there was no room");
        assert!(outdated(&[200, 0], &[300, 100], 200), "a disk that had none has room");
        assert!(outdated(&[500], &[600], 1000) && !outdated(&[595], &[600], 1000));
    }
}
