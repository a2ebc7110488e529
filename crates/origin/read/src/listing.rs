//! Where the listing of a folder in an object store continues, and whether its pages move on. It deliberately sends no
//! request and knows no folder.
//!
//! A store may return a token a second time, or names of earlier pages under new tokens: such a listing never ends. The
//! record of earlier pages has a fixed size and travels in the cursor, so that any process can continue a listing. A page
//! is compared with the most recent pages, and with one older page: the last whose number is a power of two, which finds
//! a circle of any length (Brent's algorithm).

use spurline_object_store::{RawObject, RawPage};
use spurline_types::{Error, ErrorKind};
use std::collections::HashSet;
use std::fmt::Write as _;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::{Duration, SystemTime};

/// Pages, objects and prefixes that are compared directly.
const RECENT: usize = 8;
/// Most pages of one listing that consist of objects of earlier pages.
const MAX_REPEATED_PAGES: u64 = 16;
/// Most pages in a row without a new name. Stores with versions skip deleted objects, and return empty pages meanwhile.
const MAX_EMPTY_PAGES: u64 = 10_000;
/// Length of a record of earlier pages in a cursor.
const RECORD_LEN: usize = 8 * (5 + 4 * RECENT);

/// Hashes of a page; zero for none.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct PageHashes {
    /// The continuation token that the page ends with.
    token: u64,
    /// All names of a page that has objects. Pages of prefixes alone may honestly repeat: a store may fold the names of
    /// each page on its own.
    names: u64,
}

/// The record of a listing's earlier pages.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct EarlierPages {
    pages: u64,
    /// Pages that had objects, and none of them new.
    repeated_pages: u64,
    /// Pages since the last new name.
    empty_pages: u64,
    /// The last page whose number is a power of two.
    anchor: PageHashes,
    recent_pages: [PageHashes; RECENT],
    /// The last names shown, newest first.
    recent_objects: [u64; RECENT],
    recent_prefixes: [u64; RECENT],
}

impl EarlierPages {
    /// Adds a page of the names that begin with `prefix`, and removes the names from it that an earlier page has, or that
    /// it has twice.
    ///
    /// # Errors
    /// The fault of a store whose listing does not move on, or has other names.
    pub(crate) fn add_page(&mut self, prefix: &str, page: &mut RawPage) -> Result<(), String> {
        if let Some(name) = page.names().find(|name| !name.starts_with(prefix)) {
            return Err(format!("it has the name '{}', which does not begin with the prefix", name.escape_debug()));
        }
        let hashes = PageHashes::of_page(page);
        let has_objects = !page.objects.is_empty();
        if hashes.names != 0 && self.is_known(|earlier| earlier.names == hashes.names) {
            page.objects.clear();
            page.prefixes.clear();
        }
        keep_new_names(&mut page.objects, &mut self.recent_objects, |object| &object.key);
        keep_new_names(&mut page.prefixes, &mut self.recent_prefixes, |prefix| prefix);
        if page.next.is_none() {
            return Ok(());
        }
        if self.is_known(|earlier| earlier.token == hashes.token) {
            return Err("its pages do not move on: the continuation token of an earlier page came again".into());
        }
        if !page.is_empty() {
            self.empty_pages = 0;
        } else if has_objects {
            self.repeated_pages += 1;
        } else {
            self.empty_pages += 1;
        }
        if self.repeated_pages > MAX_REPEATED_PAGES {
            return Err(format!("its pages do not move on: {MAX_REPEATED_PAGES} had only names of earlier pages"));
        }
        if self.empty_pages > MAX_EMPTY_PAGES {
            return Err(format!("its pages do not move on: {MAX_EMPTY_PAGES} in a row had no new name"));
        }
        self.pages += 1;
        self.recent_pages.rotate_right(1);
        self.recent_pages[0] = hashes;
        if self.pages.is_power_of_two() {
            self.anchor = hashes;
        }
        Ok(())
    }

    fn is_known(&self, is_same: impl Fn(&PageHashes) -> bool) -> bool {
        is_same(&self.anchor) || self.recent_pages.iter().any(is_same)
    }

    fn to_bytes(self) -> Vec<u8> {
        let mut numbers = vec![self.pages, self.repeated_pages, self.empty_pages];
        for page in [self.anchor].iter().chain(&self.recent_pages) {
            numbers.extend([page.token, page.names]);
        }
        numbers.extend(self.recent_objects.iter().chain(&self.recent_prefixes));
        numbers.into_iter().flat_map(u64::to_le_bytes).collect()
    }

    fn from_bytes(bytes: &[u8; RECORD_LEN]) -> EarlierPages {
        let mut numbers = bytes.as_chunks().0.iter().copied().map(u64::from_le_bytes);
        let mut next = || numbers.next().unwrap_or_default();
        let mut earlier = EarlierPages {
            pages: next(),
            repeated_pages: next(),
            empty_pages: next(),
            anchor: PageHashes { token: next(), names: next() },
            ..EarlierPages::default()
        };
        for page in &mut earlier.recent_pages {
            *page = PageHashes { token: next(), names: next() };
        }
        for name in earlier.recent_objects.iter_mut().chain(&mut earlier.recent_prefixes) {
            *name = next();
        }
        earlier
    }
}

impl PageHashes {
    fn of_page(page: &RawPage) -> PageHashes {
        PageHashes {
            token: page.next.as_ref().map_or(0, hash_of),
            names: if page.objects.is_empty() { 0 } else { hash_of(&page.names().collect::<Vec<_>>()) },
        }
    }
}

/// Never zero. The same in all processes.
fn hash_of(value: &(impl Hash + ?Sized)) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish().max(1)
}

/// Removes the names that are among the recent ones or stand twice, and adds the last of the others to the recent ones.
fn keep_new_names<T>(names: &mut Vec<T>, recent: &mut [u64; RECENT], name_of: impl Fn(&T) -> &str) {
    let mut known: HashSet<u64> = recent.iter().copied().collect();
    names.retain(|name| known.insert(hash_of(name_of(name))));
    for name in names.iter().skip(names.len().saturating_sub(RECENT)) {
        recent.rotate_right(1);
        recent[0] = hash_of(name_of(name));
    }
}

/// Where a listing continues: the store's token, objects of earlier pages that the next page decides on, and the record
/// of earlier pages.
#[derive(Default)]
pub(crate) struct ListCursor {
    pub token: Option<String>,
    pub held_back: Vec<RawObject>,
    pub earlier: EarlierPages,
}

impl ListCursor {
    /// The record of earlier pages, then the token, then key, length, time and etag of each object, separated by NUL,
    /// which no name contains. `None` at the end.
    pub(crate) fn to_bytes(&self) -> Option<Vec<u8>> {
        if self.token.is_none() && self.held_back.is_empty() {
            return None;
        }
        let mut text = self.token.clone().unwrap_or_default();
        for object in &self.held_back {
            let seconds = object.mtime.duration_since(SystemTime::UNIX_EPOCH).map_or(0, |d| d.as_secs());
            let etag = object.etag.as_deref().unwrap_or_default();
            let _ = write!(text, "\0{}\0{}\0{seconds}\0{etag}", object.key, object.size);
        }
        let mut bytes = self.earlier.to_bytes();
        bytes.extend_from_slice(text.as_bytes());
        Some(bytes)
    }

    /// # Errors
    /// `Invalid` for bytes that are no cursor.
    pub(crate) fn parse(bytes: &[u8]) -> Result<ListCursor, Error> {
        Self::parse_parts(bytes).ok_or_else(|| Error::new(ErrorKind::Invalid, "the listing cursor is not valid"))
    }

    fn parse_parts(bytes: &[u8]) -> Option<ListCursor> {
        let (record, text) = bytes.split_first_chunk()?;
        let mut fields = std::str::from_utf8(text).ok()?.split('\0');
        let token = fields.next().filter(|token| !token.is_empty()).map(str::to_owned);
        let mut held_back = Vec::new();
        while let Some(key) = fields.next() {
            let size = fields.next()?.parse().ok()?;
            let seconds = fields.next()?.parse().ok()?;
            let etag = fields.next()?;
            held_back.push(RawObject {
                key: key.to_owned(),
                size,
                mtime: SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(seconds))?,
                etag: Some(etag).filter(|etag| !etag.is_empty()).map(str::to_owned),
            });
        }
        Some(ListCursor { token, held_back, earlier: EarlierPages::from_bytes(record) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(objects: &[&str], prefixes: &[&str], next: Option<&str>) -> RawPage {
        let object = |key: &&str| RawObject {
            key: (*key).to_owned(),
            size: 1,
            mtime: SystemTime::UNIX_EPOCH,
            etag: Some("e".into()),
        };
        RawPage {
            objects: objects.iter().map(object).collect(),
            prefixes: prefixes.iter().map(|prefix| (*prefix).to_owned()).collect(),
            next: next.map(str::to_owned),
        }
    }

    /// The names shown of a listing until its end, or until the fault.
    fn shown(pages: impl Iterator<Item = RawPage>) -> (Vec<String>, Result<(), String>) {
        let mut earlier = EarlierPages::default();
        let mut names = Vec::new();
        for mut page in pages {
            // As it travels in a cursor.
            earlier = EarlierPages::from_bytes(earlier.to_bytes().as_slice().try_into().unwrap());
            if let Err(fault) = earlier.add_page("", &mut page) {
                return (names, Err(fault));
            }
            names.extend(page.objects.into_iter().map(|object| object.key));
            names.extend(page.prefixes);
            if page.next.is_none() {
                break;
            }
        }
        (names, Ok(()))
    }

    #[test]
    fn a_cursor_is_parsed_as_it_was_written() {
        let mut cursor = ListCursor { token: Some("t".into()), ..ListCursor::default() };
        cursor.earlier.add_page("", &mut page(&["a", "b"], &["c/"], Some("t"))).unwrap();
        cursor.held_back = page(&["a", "a-"], &[], None).objects;
        let bytes = cursor.to_bytes().unwrap();
        let again = ListCursor::parse(&bytes).unwrap();
        assert_eq!(again.to_bytes().unwrap(), bytes);
        assert_eq!((again.token.as_deref(), again.held_back.len()), (Some("t"), 2));
        assert_eq!(again.earlier, cursor.earlier);
        for wrong in
            [&b""[..], b"t", &bytes[..RECORD_LEN - 1], &bytes[..bytes.len() - 4], b"\xff".repeat(400).as_slice()]
        {
            assert_eq!(ListCursor::parse(wrong).map(|_| ()).unwrap_err().kind(), ErrorKind::Invalid, "{wrong:?}");
        }
        assert_eq!(ListCursor::default().to_bytes(), None);
    }

    #[test]
    fn repeated_names_are_shown_once() {
        let pages = [
            page(&["a", "a", "b"], &["d/", "d/"], Some("1")),
            page(&["b", "c", "c"], &["d/"], Some("2")),
            // A store that folds each page on its own.
            page(&[], &["d/"], Some("3")),
            page(&[], &["d/"], Some("4")),
            page(&["c"], &["d/", "e/"], None),
        ];
        assert_eq!(shown(pages.into_iter()), (["a", "b", "d/", "c", "e/"].map(str::to_owned).into(), Ok(())));
    }

    #[test]
    fn a_token_that_returns_is_a_fault() {
        for circle in 1..40_usize {
            let pages = (0..).map(|number: usize| {
                let token = if number < 3 { format!("first {number}") } else { format!("{}", number % circle) };
                page(&[&format!("f{number}")], &[], Some(&token))
            });
            let (names, fault) = shown(pages);
            assert!(fault.unwrap_err().contains("continuation token of an earlier page"), "{circle}");
            assert!(names.len() <= 3 + 4 * circle, "{circle}: {}", names.len());
        }
    }

    #[test]
    fn names_that_return_under_new_tokens_are_a_fault() {
        for circle in 1..40_usize {
            let pages =
                (0..).map(|number: usize| page(&[&format!("f{}", number % circle)], &[], Some(&number.to_string())));
            let (names, fault) = shown(pages);
            assert!(fault.unwrap_err().contains("only names of earlier pages"), "{circle}");
            if circle <= RECENT {
                assert_eq!(names.len(), circle, "each name once");
            }
        }
    }

    #[test]
    fn a_name_outside_the_prefix_is_a_fault() {
        let mut earlier = EarlierPages::default();
        earlier.add_page("d/", &mut page(&["d/", "d/a"], &["d/e/"], None)).unwrap();
        for (objects, prefixes) in [(["d/a", "c"], ["d/e/"]), (["d/a", "d/b"], ["e/"])] {
            let fault = earlier.add_page("d/", &mut page(&objects, &prefixes, None)).unwrap_err();
            assert!(fault.contains("does not begin with the prefix"), "{fault}");
        }
    }

    #[test]
    fn empty_pages_end_at_some_time() {
        let pages = (0..).map(|number: usize| page(&[], &[], Some(&number.to_string())));
        assert!(shown(pages).1.unwrap_err().contains("had no new name"));
        let long = (0..MAX_EMPTY_PAGES).map(|number| page(&[], &[], Some(&number.to_string())));
        assert_eq!(shown(long.chain([page(&["a"], &[], None)])), (vec!["a".to_owned()], Ok(())));
    }

    proptest::proptest! {
        /// In any order, and in pages of any length.
        #[test]
        fn all_names_of_a_right_listing_are_shown(
            names in proptest::collection::hash_set("[a-c]{1,4}", 0..60),
            lens in proptest::collection::vec(0usize..5, 60..120),
        ) {
            let all: Vec<String> = names.into_iter().collect();
            let mut left = all.as_slice();
            let mut pages = Vec::new();
            for (number, len) in lens.into_iter().enumerate() {
                let (now, rest) = left.split_at(len.min(left.len()));
                left = rest;
                let now: Vec<&str> = now.iter().map(String::as_str).collect();
                pages.push(page(&now, &[], Some(&number.to_string())));
            }
            let rest: Vec<&str> = left.iter().map(String::as_str).collect();
            pages.push(page(&rest, &[], None));
            proptest::prop_assert_eq!(shown(pages.into_iter()), (all, Ok(())));
        }
    }
}
