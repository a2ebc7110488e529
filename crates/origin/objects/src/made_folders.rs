//! The names of folders in which this mount makes many files, as one listing had them: a name that is not among these needs no request of
//! its own. A new file is published under the condition that its name leads to no object, so a listing that is not true any more
//! overwrites nothing. Knows no store.
//!
//! | event | then |
//! |---|---|
//! | this mount makes a folder | the folder has no names |
//! | this mount makes many files in a folder, and no fresh listing is known | one lookup lists the folder |
//! | the listing has more pages than a quarter of the files made in a second | lookups ask for each name |
//! | this process publishes a name | the listing has the name, also one that is under way |
//! | this process changes names in another way | no listing is known |

use parking_lot::Mutex;
use spurline_sys::split_path;
use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasher as _, RandomState};
use std::time::{Duration, Instant};

/// Files of a folder within this time make a listing worth its requests.
const FILES_MIN: u32 = 8;
const FILES_TIME: Duration = Duration::from_secs(1);
/// Files for each page of a listing: the requests for pages come one after the other, and a lookup waits.
const FILES_OF_PAGE: u32 = 4;
/// Most pages of a listing, and most folders: the names take up to 6 MB.
const PAGES_MAX: u32 = 10;
const FOLDERS_MAX: usize = 32;

/// What is known of a name without a request.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum ListedName {
    /// It was absent at this time.
    Absent(Instant),
    Unknown,
    /// The caller is to list the folder.
    List(ListingStart),
}

/// The number of a listing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ListingStart(u64);

/// The names of a folder, as hashes: names with the same one need requests.
pub(crate) struct FolderNames {
    pub names: HashSet<u64>,
    pub pages: u32,
}

struct MadeFolder {
    used_at: Instant,
    /// Files made since `counted_from`, and in the time before.
    files: u32,
    files_before: u32,
    counted_from: Instant,
    names: HashSet<u64>,
    /// Pages of the last listing.
    pages: u32,
    listed_at: Option<Instant>,
    /// When the last listing began, and its number as long as the listing is under way.
    begun_at: Option<Instant>,
    under_way: Option<ListingStart>,
    /// The names that were published since then.
    published: Vec<u64>,
}

impl MadeFolder {
    fn new(now: Instant) -> MadeFolder {
        MadeFolder {
            used_at: now,
            files: 0,
            files_before: 0,
            counted_from: now,
            names: HashSet::new(),
            pages: 0,
            listed_at: None,
            begun_at: None,
            under_way: None,
            published: Vec::new(),
        }
    }

    fn count_file(&mut self, now: Instant) {
        let passed = now.saturating_duration_since(self.counted_from);
        if passed >= FILES_TIME {
            let files = std::mem::take(&mut self.files);
            self.files_before = if passed < 2 * FILES_TIME { files } else { 0 };
            self.counted_from = now;
        }
        self.files += 1;
        self.used_at = now;
    }

    fn forget_names(&mut self) {
        self.listed_at = None;
        self.names = HashSet::new();
    }

    fn is_worth_listing(&self, age_max: Duration) -> bool {
        let is_recent = self.begun_at.is_some_and(|at| at.elapsed() < age_max);
        let files = self.files.max(self.files_before);
        !is_recent && self.pages <= PAGES_MAX && files >= FILES_MIN.max(FILES_OF_PAGE * self.pages)
    }
}

#[derive(Default)]
struct MadeFoldersState {
    by_path: HashMap<Vec<u8>, MadeFolder>,
    listings: u64,
}

/// The folders, for all mounts.
pub(crate) struct MadeFolders {
    /// How long a listing counts; zero for never.
    age_max: Duration,
    hasher: RandomState,
    state: Mutex<MadeFoldersState>,
}

impl MadeFolders {
    pub fn new(age_max: Duration) -> MadeFolders {
        MadeFolders { age_max, hasher: RandomState::new(), state: Mutex::default() }
    }

    /// A name as [`FolderNames`] has names.
    pub fn hash(&self, name: &[u8]) -> u64 {
        self.hasher.hash_one(name)
    }

    /// The most pages of a listing.
    pub fn pages_max(&self) -> u32 {
        PAGES_MAX
    }

    /// This mount makes a file.
    pub fn note_file(&self, path: &[u8]) {
        if !self.age_max.is_zero() {
            let now = Instant::now();
            self.state.lock().folder(split_path(path).0, now).count_file(now);
        }
    }

    /// This mount has made a folder, which did not exist at `since`.
    pub fn note_folder(&self, path: &[u8], since: Instant) {
        if !self.age_max.is_zero() {
            let mut state = self.state.lock();
            *state.folder(path, since) = MadeFolder { listed_at: Some(since), ..MadeFolder::new(since) };
        }
    }

    /// What is known of a name.
    pub fn look(&self, path: &[u8]) -> ListedName {
        let (parent, name) = split_path(path);
        let mut state = self.state.lock();
        let start = ListingStart(state.listings + 1);
        let Some(folder) = state.by_path.get_mut(parent) else { return ListedName::Unknown };
        match folder.listed_at {
            Some(at) if at.elapsed() < self.age_max => {
                let is_listed = folder.names.contains(&self.hash(name));
                return if is_listed { ListedName::Unknown } else { ListedName::Absent(at) };
            }
            _ => {}
        }
        if folder.under_way.is_some() || !folder.is_worth_listing(self.age_max) {
            return ListedName::Unknown;
        }
        folder.begun_at = Some(Instant::now());
        folder.under_way = Some(start);
        folder.published.clear();
        state.listings = start.0;
        ListedName::List(start)
    }

    /// The end of a listing of the folder of `path`; `None` if it failed.
    pub fn end_listing(&self, path: &[u8], start: ListingStart, found: Option<FolderNames>) {
        let mut state = self.state.lock();
        let Some(folder) = state.by_path.get_mut(split_path(path).0) else { return };
        if folder.under_way.take_if(|under_way| *under_way == start).is_none() {
            return;
        }
        let published = std::mem::take(&mut folder.published);
        let Some(FolderNames { names, pages }) = found else { return };
        folder.pages = pages;
        if pages <= PAGES_MAX {
            folder.names = names;
            folder.names.extend(published);
            folder.listed_at = folder.begun_at;
        }
    }

    /// This process has published a name.
    pub fn note_published(&self, path: &[u8]) {
        let (parent, name) = split_path(path);
        let mut state = self.state.lock();
        let Some(folder) = state.by_path.get_mut(parent) else { return };
        let hash = self.hash(name);
        if folder.listed_at.is_some_and(|at| at.elapsed() < self.age_max) {
            folder.names.insert(hash);
        } else {
            folder.forget_names();
        }
        if folder.under_way.is_some() {
            folder.published.push(hash);
        }
    }

    /// Names appear in any folder.
    pub fn forget_listings(&self) {
        for folder in self.state.lock().by_path.values_mut() {
            folder.forget_names();
            folder.under_way = None;
        }
    }
}

impl MadeFoldersState {
    /// A folder; the folder that was not used for longest makes room.
    fn folder(&mut self, path: &[u8], now: Instant) -> &mut MadeFolder {
        if self.by_path.len() >= FOLDERS_MAX && !self.by_path.contains_key(path) {
            let oldest = self.by_path.iter().min_by_key(|(_, folder)| folder.used_at).map(|(path, _)| path.clone());
            oldest.iter().for_each(|oldest| drop(self.by_path.remove(oldest)));
        }
        self.by_path.entry(path.to_vec()).or_insert_with(|| MadeFolder::new(now))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(1000);

    fn make_files(folders: &MadeFolders, count: u32) {
        (0..count).for_each(|n| folders.note_file(format!("d/f{n}").as_bytes()));
    }

    fn begin_listing(folders: &MadeFolders) -> ListingStart {
        match folders.look(b"d/x") {
            ListedName::List(start) => start,
            other => panic!("{other:?}"),
        }
    }

    fn names(folders: &MadeFolders, names: &[&str], pages: u32) -> Option<FolderNames> {
        Some(FolderNames { names: names.iter().map(|name| folders.hash(name.as_bytes())).collect(), pages })
    }

    fn is_absent(folders: &MadeFolders, path: &[u8]) -> bool {
        matches!(folders.look(path), ListedName::Absent(_))
    }

    #[test]
    fn a_listing_excludes_names_that_it_does_not_have() {
        let folders = MadeFolders::new(LONG);
        make_files(&folders, FILES_MIN - 1);
        assert_eq!(folders.look(b"d/x"), ListedName::Unknown);
        make_files(&folders, 1);
        let start = begin_listing(&folders);
        assert_eq!(folders.look(b"d/x"), ListedName::Unknown, "one lists");
        folders.note_published(b"d/own");
        folders.end_listing(b"d/x", start, names(&folders, &["old"], 1));
        folders.note_published(b"d/later");
        assert!(is_absent(&folders, b"d/x") && !is_absent(&folders, b"e/x"));
        assert!([&b"d/own"[..], b"d/old", b"d/later"].iter().all(|path| !is_absent(&folders, path)));
        folders.forget_listings();
        assert!(!is_absent(&folders, b"d/x"));
    }

    #[test]
    fn a_listing_that_a_change_of_names_overtakes_does_not_count() {
        let folders = MadeFolders::new(LONG);
        make_files(&folders, FILES_MIN);
        let start = begin_listing(&folders);
        folders.forget_listings();
        folders.end_listing(b"d/x", start, names(&folders, &[], 1));
        assert!(!is_absent(&folders, b"d/x"));
    }

    #[test]
    fn a_folder_with_many_names_is_not_listed_for_few_files() {
        let folders = MadeFolders::new(Duration::from_nanos(1));
        make_files(&folders, FILES_MIN);
        let start = begin_listing(&folders);
        folders.end_listing(b"d/x", start, names(&folders, &[], FILES_MIN / 2));
        assert_eq!(folders.look(b"d/x"), ListedName::Unknown, "two files for a page");
        make_files(&folders, FILES_MIN);
        let start = begin_listing(&folders);
        folders.end_listing(b"d/x", start, names(&folders, &[], PAGES_MAX + 1));
        make_files(&folders, 100 * FILES_MIN);
        assert_eq!(folders.look(b"d/x"), ListedName::Unknown, "too many");
    }

    #[test]
    fn a_new_folder_is_empty_for_a_while() {
        let folders = MadeFolders::new(LONG);
        folders.note_folder(b"d", Instant::now());
        folders.note_published(b"d/a");
        assert!(is_absent(&folders, b"d/x") && !is_absent(&folders, b"d/a"));
        let never = MadeFolders::new(Duration::ZERO);
        never.note_folder(b"d", Instant::now());
        make_files(&never, FILES_MIN);
        assert_eq!(never.look(b"d/x"), ListedName::Unknown);
    }
}
