//! An open directory: the current page of names, and the cursors of earlier pages, so that a reader can return to any
//! earlier position. Positions count names from the start of the listing. It knows no inodes and keeps two pages of
//! names: after many names of a page, a thread lists the next.

use crate::NAME_MAX;
use crate::errno::FsResult;
use crate::page_starts::PageStarts;
use spurline_types::{DirEntry, Error, ErrorKind, ListPage, Result, Stats};
use spurline_volume::Volume;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

/// The name of a page that begins the listing of the next: the reader goes on.
const AHEAD_NAME: usize = 500;

/// An open directory's current page of names.
#[derive(Default)]
pub struct DirState {
    /// The names of the page that may be shown.
    names: Vec<DirEntry>,
    /// The position of the page's first name.
    first: u64,
    /// Cursor of the next page; `None` after the last.
    next: Option<Vec<u8>>,
    /// When the page was listed, by the file system's clock.
    listed_at: Duration,
    loaded: bool,
    /// The first position of every page listed by this handle, with its cursor, in order. Not shared between handles:
    /// two listings of a directory that changed in between have different positions.
    pages: Vec<(u64, Option<Vec<u8>>)>,
    /// The page is read from its first name.
    is_read_whole: bool,
    /// The page of `next`.
    ahead: Option<PageAhead>,
}

/// A page that a thread lists.
struct PageAhead {
    begun_at: Duration,
    thread: JoinHandle<Result<ListPage>>,
}

/// What a listing needs beside the directory's state.
pub struct ListContext<'a> {
    pub volume: &'a Arc<dyn Volume>,
    pub stats: &'a Stats,
    pub path: &'a [u8],
    pub page: usize,
    pub now: &'a dyn Fn() -> Duration,
    /// Page positions found by other handles.
    pub starts: &'a PageStarts,
}

/// Why `name` cannot be a file name, if so.
fn unfit_reason(name: &[u8]) -> Option<&'static str> {
    match name {
        b"" => Some("it is empty"),
        b"." | b".." => Some("it has a meaning of its own"),
        _ if name.len() > NAME_MAX => Some("it is longer than 255 bytes"),
        _ if name.contains(&b'/') || name.contains(&0) => Some("it has a slash or a NUL in it"),
        _ => None,
    }
}

impl DirState {
    /// Discards the page: the next read lists again.
    pub fn rewind(&mut self) {
        *self = DirState::default();
    }

    /// The name at `position` and when it was listed; `None` past the last one.
    pub fn entry_at(&mut self, position: u64, lister: &ListContext<'_>) -> FsResult<Option<(&DirEntry, Duration)>> {
        if !self.loaded || position < self.first || self.knows_nearer_page(position) {
            self.load_page_before(position, lister)?;
        }
        while position >= self.first + self.names.len() as u64 {
            let Some(cursor) = self.next.clone() else { return Ok(None) };
            let first = self.first + self.names.len() as u64;
            self.load_page(first, Some(cursor), lister)?;
        }
        let index = (position - self.first) as usize;
        self.is_read_whole |= index == 0;
        if index == AHEAD_NAME && self.is_read_whole && self.ahead.is_none() {
            self.list_ahead(lister);
        }
        Ok(self.names.get(index).map(|entry| (entry, self.listed_at)))
    }

    /// Whether the name at `position` is in the current page.
    pub fn is_loaded(&self, position: u64) -> bool {
        self.loaded && (self.first..self.first + self.names.len() as u64).contains(&position)
    }

    /// Whether a page that this handle has listed starts between the current page and `position`: a program that seeks
    /// ahead does not need the pages before it.
    fn knows_nearer_page(&self, position: u64) -> bool {
        let page = self.pages.partition_point(|(first, _)| *first <= position);
        let nearest = page.checked_sub(1).map_or(0, |page| self.pages[page].0);
        nearest >= self.first + self.names.len() as u64 && nearest > self.first
    }

    /// Loads the page nearest before `position`.
    fn load_page_before(&mut self, position: u64, lister: &ListContext<'_>) -> FsResult<()> {
        let page = self.pages.partition_point(|(first, _)| *first <= position);
        if let Some(page) = page.checked_sub(1) {
            let (first, cursor) = self.pages[page].clone();
            return self.load_page(first, cursor, lister);
        }
        // A handle that starts in the middle, or goes beyond its own pages: another handle may have listed this
        // position.
        let Some((first, cursor)) = lister.starts.nearest_before(lister.path, position, (lister.now)()) else {
            return self.load_page(0, None, lister);
        };
        // If the volume no longer accepts the cursor, the next attempt starts at the beginning.
        self.load_page(first, Some(cursor), lister).inspect_err(|_| lister.starts.forget_directory(lister.path))
    }

    /// Begins to list the next page, if there is one.
    fn list_ahead(&mut self, lister: &ListContext<'_>) {
        let Some(cursor) = self.next.clone() else { return };
        let volume = Arc::clone(lister.volume);
        let path = lister.path.to_vec();
        let page = lister.page;
        let thread = std::thread::Builder::new().name("list-ahead".into());
        let begun_at = (lister.now)();
        let thread = thread.spawn(move || volume.list(&path, Some(&cursor), page));
        self.ahead = thread.ok().map(|thread| PageAhead { begun_at, thread });
    }

    /// The page of a cursor, and when its listing began.
    fn list(&mut self, cursor: Option<&[u8]>, lister: &ListContext<'_>) -> FsResult<(ListPage, Duration)> {
        let ahead = self.ahead.take().filter(|_| cursor.is_some() && self.next.as_deref() == cursor);
        let page = ahead.and_then(|ahead| Some((ahead.thread.join().ok()?.ok()?, ahead.begun_at)));
        if let Some(page) = page {
            return Ok(page);
        }
        let now = (lister.now)();
        Ok((lister.volume.list(lister.path, cursor, lister.page)?, now))
    }

    fn load_page(&mut self, first: u64, cursor: Option<Vec<u8>>, lister: &ListContext<'_>) -> FsResult<()> {
        let (mut listed, now) = self.list(cursor.as_deref(), lister)?;
        if listed.next.is_some() && listed.next == cursor {
            return Err(Error::new(
                ErrorKind::Protocol,
                "the next cursor of a listing is its own; the listing would never end",
            )
            .into());
        }
        listed.entries.retain(|entry| {
            let why = unfit_reason(&entry.name);
            if let Some(why) = why {
                lister.stats.metadata.skipped_names.add(1);
                tracing::debug!(name = %entry.name.escape_ascii(), why, "a name is left out of a listing");
            }
            why.is_none()
        });
        self.names = listed.entries;
        self.first = first;
        self.next = listed.next;
        self.listed_at = now;
        self.loaded = true;
        self.is_read_whole = false;
        // Positions within this page are from a listing before a change, and count other names.
        let end = first + self.names.len() as u64;
        self.pages.retain(|(at, _)| *at <= first || *at >= end);
        // A page without any name to show starts where the next page starts; both cursors lead to the same names.
        match self.pages.binary_search_by_key(&first, |(first, _)| *first) {
            Ok(page) => self.pages[page].1 = cursor,
            Err(page) => self.pages.insert(page, (first, cursor)),
        }
        if let Some(next) = &self.next {
            lister.starts.record_page(lister.path, first, end, next, now);
        }
        Ok(())
    }
}
