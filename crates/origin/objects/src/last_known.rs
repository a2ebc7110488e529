//! What names of a bucket led to, and what folders had, when the store answered last: for the time in which the store does not
//! respond. It makes no request. An answer to a request that began before a change of this process is not kept.

use crate::found::FoundObject;
use parking_lot::Mutex;
use spurline_sys::join_path;
use spurline_sys::split_path;
use spurline_types::{DirEntry, Error, ErrorKind, FileKind, ListPage, ObjectAttr, Result};
use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};

/// Groups of names, each with the number of its changes.
const NAME_GROUPS: usize = 1024;

/// What a path leads to in the store.
#[derive(Clone)]
pub(crate) enum StoredName {
    /// A folder; with `object_attrs` its marker, if it has one.
    Folder(Option<FoundObject>),
    Object(FoundObject),
}

/// A page of a folder, by the folder and the start.
type PageKey = (Vec<u8>, Option<Vec<u8>>);

/// The changes of a name's group when a request began.
#[derive(Clone, Copy)]
pub(crate) struct AnswerStart(u64);

/// The last answers of a store, for all mounts.
pub(crate) struct LastKnown {
    /// The most names; 0 to keep none.
    names_max: usize,
    state: Mutex<KnownAnswers>,
}

#[derive(Default)]
struct KnownAnswers {
    names: HashMap<Vec<u8>, Result<StoredName>>,
    pages: HashMap<PageKey, ListPage>,
    page_names: usize,
    changes: Vec<u64>,
}

fn group_of(path: &[u8]) -> usize {
    let mut hasher = DefaultHasher::new();
    path.hash(&mut hasher);
    hasher.finish() as usize % NAME_GROUPS
}

fn is_below(path: &[u8], folder: &[u8]) -> bool {
    path.strip_prefix(folder).is_some_and(|rest| rest.is_empty() || rest[0] == b'/')
}

impl LastKnown {
    pub fn new(names_max: usize) -> LastKnown {
        let state = KnownAnswers { changes: vec![0; NAME_GROUPS], ..KnownAnswers::default() };
        LastKnown { names_max, state: Mutex::new(state) }
    }

    /// A request about a name, or about the names of a folder, begins.
    pub fn begin(&self, path: &[u8]) -> AnswerStart {
        AnswerStart(self.state.lock().changes[group_of(path)])
    }

    /// Keeps the answer about a name, if it is one.
    pub fn note_name(&self, path: &[u8], start: AnswerStart, answer: &Result<StoredName>) {
        let mut state = self.state.lock();
        let is_answer = answer.as_ref().map_or_else(|error| error.kind() == ErrorKind::NotFound, |_| true);
        if self.names_max > 0 && is_answer && state.changes[group_of(path)] == start.0 {
            state.names.insert(path.to_vec(), answer.clone());
            state.limit(self.names_max);
        }
    }

    /// Keeps a page of a folder. `has_all`: whether a page has all that a lookup of the name finds.
    pub fn note_page(&self, key: PageKey, start: AnswerStart, page: &ListPage, has_all: impl Fn(&ObjectAttr) -> bool) {
        let mut state = self.state.lock();
        if self.names_max == 0 || state.changes[group_of(&key.0)] != start.0 {
            return;
        }
        for DirEntry { name, attr } in page.entries.iter().filter(|entry| has_all(&entry.attr)) {
            let found = match attr.kind {
                FileKind::Directory => StoredName::Folder(None),
                FileKind::File | FileKind::Symlink => {
                    StoredName::Object(FoundObject { attr: attr.clone(), attributes: None })
                }
            };
            state.names.insert(join_path(&key.0, name), Ok(found));
        }
        state.page_names += page.entries.len();
        if let Some(old) = state.pages.insert(key, page.clone()) {
            state.page_names -= old.entries.len();
        }
        state.limit(self.names_max);
    }

    /// What a name led to.
    pub fn name(&self, path: &[u8]) -> Option<Result<StoredName>> {
        self.state.lock().names.get(path).cloned()
    }

    /// A page that a folder had.
    pub fn page(&self, key: &PageKey) -> Option<ListPage> {
        self.state.lock().pages.get(key).cloned()
    }

    /// This process has made the object at a path.
    pub fn note_published(&self, path: &[u8], found: FoundObject) {
        let mut state = self.state.lock();
        for changed in [path, split_path(path).0] {
            state.changes[group_of(changed)] += 1;
        }
        // Folders on the way are there with it.
        let mut folder = split_path(path).0;
        while !folder.is_empty() {
            if matches!(state.names.get(folder), Some(Err(_))) {
                state.names.remove(folder);
            }
            folder = split_path(folder).0;
        }
        state.change_entry(path, Some(&found.attr));
        if self.names_max > 0 {
            state.names.insert(path.to_vec(), Ok(StoredName::Object(found)));
        }
    }

    /// This process may have changed a path, or names below: the next lookup asks the store.
    pub fn forget(&self, path: &[u8]) {
        let mut state = self.state.lock();
        state.forget_below(path);
        let (parent, _) = split_path(path);
        state.pages.retain(|(folder, _), _| folder != parent);
        state.count_page_names();
    }

    /// This process has changed the marker of a folder, if there is a folder at the path.
    pub fn forget_marker(&self, path: &[u8]) {
        let mut state = self.state.lock();
        if !matches!(state.names.get(path), Some(Ok(StoredName::Object(_)))) {
            state.changes[group_of(path)] += 1;
            state.names.remove(path);
        }
    }

    /// This process has removed what was at a path, and all below.
    pub fn note_removed(&self, path: &[u8]) {
        let mut state = self.state.lock();
        state.forget_below(path);
        state.change_entry(path, None);
        state.count_page_names();
        if self.names_max > 0 {
            let absent = Error::new(ErrorKind::NotFound, "this mount has removed it");
            state.names.insert(path.to_vec(), Err(absent));
        }
    }
}

impl KnownAnswers {
    fn forget_below(&mut self, path: &[u8]) {
        // A lookup of any name below may be under way.
        self.changes.iter_mut().for_each(|changes| *changes += 1);
        if let Some(Ok(StoredName::Object(_))) = self.names.remove(path) {
            return;
        }
        self.names.retain(|known, _| !is_below(known, path));
        self.pages.retain(|(folder, _), _| !is_below(folder, path));
    }

    /// The folder of a path has the name with these attributes from now on, or not any more.
    fn change_entry(&mut self, path: &[u8], attr: Option<&ObjectAttr>) {
        let (parent, name) = split_path(path);
        let mut is_listed = attr.is_none();
        for (_, page) in self.pages.iter_mut().filter(|((folder, _), _)| folder == parent) {
            let at = page.entries.iter().position(|entry| entry.name == name);
            match (at, attr) {
                (Some(at), Some(attr)) => page.entries[at].attr = attr.clone(),
                (Some(at), None) => drop(page.entries.remove(at)),
                (None, Some(attr)) if page.next.is_none() => {
                    page.entries.push(DirEntry { name: name.to_vec(), attr: attr.clone() });
                }
                (None, _) => continue,
            }
            is_listed = true;
        }
        if !is_listed {
            self.pages.retain(|(folder, _), _| folder != parent);
        }
    }

    fn count_page_names(&mut self) {
        self.page_names = self.pages.values().map(|page| page.entries.len()).sum();
    }

    /// Drops half of the names above the limit.
    fn limit(&mut self, names_max: usize) {
        if self.names.len() + self.page_names <= names_max {
            return;
        }
        self.pages.clear();
        self.page_names = 0;
        let mut is_odd = false;
        self.names.retain(|_, _| {
            is_odd = !is_odd;
            is_odd
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use spurline_origin::object_attr;
    use std::time::UNIX_EPOCH;

    fn found(etag: &str) -> FoundObject {
        FoundObject { attr: object_attr(7, UNIX_EPOCH, etag.to_owned()), attributes: None }
    }

    fn etag_of(known: &LastKnown, path: &[u8]) -> Option<String> {
        match known.name(path) {
            Some(Ok(StoredName::Object(object))) => object.attr.etag,
            _ => None,
        }
    }

    fn names_of(known: &LastKnown, folder: &[u8]) -> Option<Vec<Vec<u8>>> {
        let page = known.page(&(folder.to_vec(), None))?;
        Some(page.entries.into_iter().map(|entry| entry.name).collect())
    }

    #[test]
    fn changes_of_this_process_count_at_once_and_older_answers_do_not() {
        let known = LastKnown::new(1000);
        let entries = [b"a", b"b"].map(|name| DirEntry { name: name.to_vec(), attr: found("1").attr });
        let page = ListPage { entries: entries.into(), next: None, marker: None };
        known.note_page((b"d".to_vec(), None), known.begin(b"d"), &page, |_| true);
        assert_eq!(etag_of(&known, b"d/a").as_deref(), Some("1"));
        let early = known.begin(b"d/a");
        let early_page = known.begin(b"d");
        known.note_published(b"d/a", found("2"));
        known.note_published(b"d/c", found("3"));
        known.note_name(b"d/a", early, &Ok(StoredName::Object(found("1"))));
        known.note_page((b"d".to_vec(), None), early_page, &page, |_| true);
        assert_eq!(etag_of(&known, b"d/a").as_deref(), Some("2"), "the lookup began before the publication");
        assert_eq!(names_of(&known, b"d").unwrap(), [b"a", b"b", b"c"]);
        known.note_removed(b"d/a");
        assert_eq!(names_of(&known, b"d").unwrap(), [b"b", b"c"]);
        assert!(known.name(b"d/a").is_some_and(|answer| answer.is_err()));
        // A folder is renamed.
        known.note_removed(b"d");
        assert!(names_of(&known, b"d").is_none() && known.name(b"d/b").is_none());
    }

    #[test]
    fn a_limit_bounds_names_and_pages() {
        let known = LastKnown::new(100);
        for n in 0..1000_u32 {
            known.note_name(&n.to_le_bytes(), known.begin(&n.to_le_bytes()), &Ok(StoredName::Object(found("1"))));
        }
        let state = known.state.lock();
        assert!((50..=100).contains(&state.names.len()));
    }
}
