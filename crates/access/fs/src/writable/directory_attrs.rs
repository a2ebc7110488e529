//! Attributes of directories as they came with the answers to own changes of their names. The kernel drops its own at each such
//! change, and requests them again before the next. It knows no source.

use parking_lot::Mutex;
use spurline_volume::writes::NodeAttr;
use std::time::{Duration, Instant};

/// Directories that are changed at the same time; more share entries.
const ENTRIES: usize = 64;
/// A request for attributes may be one for the source's own (`AT_STATX_FORCE_SYNC`): older ones are not used.
const RECENT: Duration = Duration::from_millis(100);

#[derive(Default)]
struct DirectoryEntry {
    /// Counts what happened to the entry.
    events: u64,
    /// Events up to this one make attributes of calls that began earlier useless.
    dropped: u64,
    known: Option<KnownAttr>,
}

struct KnownAttr {
    ino: u64,
    attr: NodeAttr,
    seen: Instant,
    /// The event that brought it.
    event: u64,
}

/// The attributes, in a table of fixed size.
pub(super) struct DirectoryAttrs {
    entries: [Mutex<DirectoryEntry>; ENTRIES],
}

impl Default for DirectoryAttrs {
    fn default() -> Self {
        DirectoryAttrs { entries: std::array::from_fn(|_| Mutex::default()) }
    }
}

impl DirectoryAttrs {
    fn entry(&self, ino: u64) -> &Mutex<DirectoryEntry> {
        &self.entries[ino as usize % ENTRIES]
    }

    /// A mark for [`DirectoryAttrs::note`], taken before the change is requested.
    pub fn mark(&self, ino: u64) -> u64 {
        self.entry(ino).lock().events
    }

    /// Stores the attributes that came with the answer to a change, unless they may be older than another one's.
    pub fn note(&self, ino: u64, mark: u64, attr: NodeAttr) {
        let mut entry = self.entry(ino).lock();
        if entry.dropped > mark {
            return;
        }
        entry.events += 1;
        let event = entry.events;
        let known = KnownAttr { ino, attr, seen: Instant::now(), event };
        match &entry.known {
            Some(other) if other.ino != ino => {
                entry.dropped = event;
                entry.known = None;
            }
            // Both changes were under way at once.
            Some(other) if other.event > mark => match changed_at(&attr).cmp(&changed_at(&other.attr)) {
                std::cmp::Ordering::Greater => entry.known = Some(known),
                std::cmp::Ordering::Equal if attr != other.attr => {
                    entry.dropped = event;
                    entry.known = None;
                }
                _ => {}
            },
            _ => entry.known = Some(known),
        }
    }

    /// The directory was changed, or its attributes were, and the answer did not have them.
    pub fn drop_attr(&self, ino: u64) {
        let mut entry = self.entry(ino).lock();
        entry.events += 1;
        entry.dropped = entry.events;
        entry.known = None;
    }

    /// A change of the inode, if it is a directory, or of names in it. Its end, whatever the outcome, is
    /// [`DirectoryAttrs::drop_attr`].
    pub fn changing(&self, ino: u64) -> ChangingDirectory<'_> {
        ChangingDirectory { attrs: self, ino }
    }

    /// The attributes if they are recent, and how much of `ttl` is left of them.
    pub fn find(&self, ino: u64, ttl: Duration) -> Option<(NodeAttr, Duration)> {
        let entry = self.entry(ino).lock();
        let known = entry.known.as_ref().filter(|known| known.ino == ino)?;
        let age = known.seen.elapsed();
        let left = ttl.checked_sub(age).filter(|left| !left.is_zero() && age < RECENT)?;
        Some((known.attr, left))
    }
}

/// See [`DirectoryAttrs::changing`].
pub(super) struct ChangingDirectory<'a> {
    attrs: &'a DirectoryAttrs,
    ino: u64,
}

impl Drop for ChangingDirectory<'_> {
    fn drop(&mut self) {
        self.attrs.drop_attr(self.ino);
    }
}

/// Seconds and nanoseconds of the last change.
fn changed_at(attr: &NodeAttr) -> (i64, u32) {
    (attr.ctime.seconds, attr.ctime.nanos)
}

#[cfg(test)]
mod tests {
    use super::*;
    use spurline_volume::writes::{FileIdentity, FileTime};

    const TTL: Duration = Duration::from_secs(3600);

    fn seen(at: i64, size: u64) -> NodeAttr {
        let ctime = FileTime { seconds: at, nanos: 0 };
        let identity = FileIdentity::from_number(1);
        NodeAttr {
            identity,
            inode: 1,
            mode: 0,
            nlink: 2,
            uid: 0,
            gid: 0,
            rdev: 0,
            size,
            blocks: 0,
            blksize: 4096,
            atime: ctime,
            mtime: ctime,
            ctime,
        }
    }

    fn size(attrs: &DirectoryAttrs, ino: u64) -> Option<u64> {
        attrs.entry(ino).lock().known.as_mut().into_iter().for_each(|known| known.seen = Instant::now());
        attrs.find(ino, TTL).map(|(attr, _)| attr.size)
    }

    #[test]
    fn the_newest_attributes_are_found_and_doubtful_ones_are_not() {
        let attrs = DirectoryAttrs::default();
        let first = attrs.mark(1);
        attrs.note(1, first, seen(1, 10));
        assert_eq!((size(&attrs, 1), attrs.find(1, Duration::ZERO)), (Some(10), None));
        // One after the other: the clock may show the same time.
        attrs.note(1, attrs.mark(1), seen(1, 20));
        assert_eq!(size(&attrs, 1), Some(20));
        // Both at once: the source's time decides, and within one tick nothing does.
        let (one, other, late) = (attrs.mark(1), attrs.mark(1), attrs.mark(1));
        attrs.note(1, one, seen(3, 40));
        attrs.note(1, other, seen(2, 30));
        assert_eq!(size(&attrs, 1), Some(40));
        attrs.note(1, late, seen(3, 35));
        assert_eq!(size(&attrs, 1), None);
        attrs.note(1, attrs.mark(1), seen(4, 50));
        // A removal ends while a creation is under way.
        let under_way = attrs.mark(1);
        attrs.drop_attr(1);
        attrs.note(1, under_way, seen(5, 60));
        assert_eq!(size(&attrs, 1), None);
        // Two directories with one entry.
        let under_way = attrs.mark(1);
        attrs.note(1, attrs.mark(1), seen(6, 70));
        let other = 1 + ENTRIES as u64;
        attrs.note(other, attrs.mark(other), seen(6, 1));
        attrs.note(1, under_way, seen(5, 60));
        assert_eq!((size(&attrs, 1), size(&attrs, other)), (None, None));
    }
}
