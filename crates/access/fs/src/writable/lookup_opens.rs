//! Files that were opened with the lookup of their name. For a program's `open` the kernel looks up the name and then opens the file, and a
//! source on another host answers both with one request. It knows neither names nor the source.
//!
//! | event | then |
//! |---|---|
//! | a thread opens the name that it has looked up last | one more open in the habit of the folder |
//! | enough of these since the last miss | lookups in this folder open the file. The kernel gets the name for no time |
//! | the thread opens the file, as the same user, with the same flags and within a moment | the open has its file |
//! | the thread looks up another name, or opens the file in another way | a miss: the file is closed, and the folder needs more opens |
//! | other threads look up 64 names, and the open has not come within a moment | a miss, too |
//!
//! An answer to a lookup so counts for the call that has made the lookup: any later open by the name looks up again.

use super::open_nodes::may_write;
use crate::service::FsCaller;
use parking_lot::Mutex;
use spurline_volume::writes::WritableFile;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Threads that look up at the same time, and folders in use; more share entries.
const ENTRIES: usize = 64;
/// Opens that make a habit: at first, and after many misses.
const OPENS_FIRST: u32 = 2;
const OPENS_MAX: u32 = 1024;
/// How much rarer files are opened after a miss.
const MISS_FACTOR: u32 = 4;
/// The longest time between the two requests of a call.
const CALL_TIME: Duration = Duration::from_millis(10);
/// Flags that need more of a source than its bytes.
const OTHER_FLAGS: i32 = libc::O_TRUNC | libc::O_APPEND | libc::O_DIRECT | libc::O_DSYNC | FMODE_EXEC;
/// The file is opened to be executed; from `linux/fs.h`.
const FMODE_EXEC: i32 = 0x20;

/// A file that a lookup has opened.
pub(super) struct LookupOpen {
    pub file: Box<dyn WritableFile>,
    pub flags: i32,
    /// The count of events of the file before the source was asked.
    pub events: u64,
    pub since: Instant,
}

/// The last lookup of a thread.
struct ThreadLookup {
    thread: u32,
    user: (u32, u32),
    parent: u64,
    ino: u64,
    opened: Option<LookupOpen>,
}

/// What programs do after lookups in a folder.
#[derive(Clone, Copy)]
struct FolderHabit {
    parent: u64,
    opens: u32,
    opens_needed: u32,
    /// Of the last open.
    flags: i32,
}

impl FolderHabit {
    const NONE: FolderHabit = FolderHabit { parent: 0, opens: 0, opens_needed: OPENS_FIRST, flags: 0 };
}

/// The files, in tables of fixed size.
pub(super) struct LookupOpens {
    threads: [Mutex<Option<ThreadLookup>>; ENTRIES],
    folders: [Mutex<FolderHabit>; ENTRIES],
    /// The number of lookups: each ends an old lookup of one entry, in turn.
    lookups: AtomicUsize,
}

impl Default for LookupOpens {
    fn default() -> Self {
        LookupOpens {
            threads: std::array::from_fn(|_| Mutex::default()),
            folders: std::array::from_fn(|_| Mutex::new(FolderHabit::NONE)),
            lookups: AtomicUsize::new(0),
        }
    }
}

impl LookupOpens {
    fn change_habit<T>(&self, parent: u64, change: impl FnOnce(&mut FolderHabit) -> T) -> T {
        let mut habit = self.folders[parent as usize % ENTRIES].lock();
        if habit.parent != parent {
            *habit = FolderHabit { parent, ..FolderHabit::NONE };
        }
        change(&mut habit)
    }

    /// A lookup in a folder has opened a file for nothing, or could not open the file.
    pub fn note_miss(&self, parent: u64) {
        self.change_habit(parent, |habit| {
            habit.opens = 0;
            habit.opens_needed = (habit.opens_needed * MISS_FACTOR).min(OPENS_MAX);
        });
    }

    /// The flags with which a lookup in a folder is to open the file.
    pub fn flags_for(&self, parent: u64, caller: &FsCaller<'_>) -> Option<i32> {
        if caller.pid == 0 {
            return None;
        }
        for entry in [caller.pid as usize, self.lookups.fetch_add(1, Ordering::Relaxed)] {
            let unused = self.threads[entry % ENTRIES].lock().take_if(|last| {
                let opened = last.opened.as_ref();
                opened.is_some_and(|opened| last.thread == caller.pid || opened.since.elapsed() >= CALL_TIME)
            });
            self.end_lookup(unused);
        }
        self.change_habit(parent, |habit| (habit.opens >= habit.opens_needed).then_some(habit.flags))
    }

    /// A lookup has found `ino`, and may have opened the file.
    pub fn note_lookup(&self, parent: u64, ino: u64, caller: &FsCaller<'_>, opened: Option<LookupOpen>) {
        if caller.pid != 0 {
            let lookup = ThreadLookup { thread: caller.pid, user: (caller.uid, caller.gid), parent, ino, opened };
            let before = self.threads[caller.pid as usize % ENTRIES].lock().replace(lookup);
            self.end_lookup(before);
        }
    }

    fn end_lookup(&self, lookup: Option<ThreadLookup>) {
        if let Some(ThreadLookup { parent, opened: Some(_), .. }) = lookup {
            self.note_miss(parent);
        }
    }

    /// The file that the lookup of this open has opened.
    pub fn take(&self, ino: u64, flags: i32, caller: &FsCaller<'_>) -> Option<LookupOpen> {
        let mut last = self.threads[caller.pid as usize % ENTRIES].lock();
        let user = (caller.uid, caller.gid);
        let lookup = last.take_if(|last| last.thread == caller.pid && last.ino == ino && last.user == user)?;
        drop(last);
        match lookup.opened {
            Some(opened) if opened.flags == flags && opened.since.elapsed() < CALL_TIME => {
                self.change_habit(lookup.parent, |habit| habit.opens_needed = OPENS_FIRST);
                Some(opened)
            }
            Some(_) => {
                self.note_miss(lookup.parent);
                None
            }
            None if may_write(flags) || flags & OTHER_FLAGS != 0 => None,
            None => {
                self.change_habit(lookup.parent, |habit| {
                    habit.opens = habit.opens.saturating_add(1);
                    habit.flags = flags;
                });
                None
            }
        }
    }
}
