//! Listings of a bucket in the order of keys, page by page, from listings of folders in the order of names. A folder `a` has the
//! key `a/`, which comes after `a-b`: a folder waits until no earlier name can follow. An empty folder of a directory is
//! an object, and so is the marker of a bucket's folder. Memory: one page of each folder on the way down. Knows no XML.

use crate::bucket::OpenBucket;
use crate::changes::BucketChanges;
use crate::keys::{KeyPath, common_prefix, is_left_behind, is_listed};
use base64::Engine as _;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use spurline_types::{ErrorKind, FileKind, ObjectAttr, Result};
use std::collections::BTreeMap;

/// Names of a page of a folder.
const PAGE_NAMES: usize = 1000;
/// The most folders above each other.
const KEY_DEPTH_MAX: usize = 512;

/// What to list.
#[derive(Debug, Clone, Default)]
pub(crate) struct ListRequest {
    pub prefix: String,
    pub delimiter: String,
    /// Keys behind this key.
    pub start_after: String,
    /// The token of the page before.
    pub token: Option<ListToken>,
    pub max_keys: usize,
}

/// Where a page ended.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct ListToken {
    /// The last key or prefix.
    pub last: String,
    /// For each folder on the way to the next key, the page that has the next name.
    cursors: Vec<Option<Vec<u8>>>,
}

impl ListToken {
    /// The token as a client gets it.
    pub fn to_text(&self) -> String {
        let mut bytes = Vec::new();
        put_part(&mut bytes, Some(self.last.as_bytes()));
        for cursor in &self.cursors {
            put_part(&mut bytes, cursor.as_deref());
        }
        BASE64_URL_SAFE_NO_PAD.encode(bytes)
    }

    /// Reads what [`ListToken::to_text`] has written; `None` for any other text.
    pub fn from_text(text: &str) -> Option<Self> {
        let bytes = BASE64_URL_SAFE_NO_PAD.decode(text).ok()?;
        let mut rest = bytes.as_slice();
        let last = String::from_utf8(take_part(&mut rest)??).ok()?;
        let mut cursors = Vec::new();
        while !rest.is_empty() && cursors.len() < KEY_DEPTH_MAX {
            cursors.push(take_part(&mut rest)?);
        }
        rest.is_empty().then_some(ListToken { last, cursors })
    }
}

/// Appends a part with its length; the length 0 means no part.
fn put_part(bytes: &mut Vec<u8>, part: Option<&[u8]>) {
    let len = part.map_or(0, |part| part.len() as u32 + 1);
    bytes.extend_from_slice(&len.to_le_bytes());
    bytes.extend_from_slice(part.unwrap_or_default());
}

/// The next part; `None` for bytes that are no part.
fn take_part(rest: &mut &[u8]) -> Option<Option<Vec<u8>>> {
    let (len, behind) = rest.split_first_chunk()?;
    *rest = behind;
    let Some(len) = u32::from_le_bytes(*len).checked_sub(1) else { return Some(None) };
    let part = rest.split_off(..len as usize)?;
    Some(Some(part.to_vec()))
}

/// An object or a common prefix.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum ListedItem {
    Object(ListedObject),
    Prefix(String),
}

/// An object of a listing.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ListedObject {
    pub key: String,
    pub attr: ObjectAttr,
    pub etag: String,
}

/// A page of a listing.
#[derive(Debug, Default)]
pub(crate) struct ListedPage {
    pub items: Vec<ListedItem>,
    /// `None` for the last page.
    pub next: Option<ListToken>,
}

/// A page of a folder.
#[derive(Clone, Default)]
struct FolderPage {
    number: u64,
    cursor: Option<Vec<u8>>,
}

/// A name that waits for its turn.
struct WaitingName {
    attr: ObjectAttr,
    page: FolderPage,
}

struct WalkedFolder {
    /// The key of the folder: empty, or with a slash at the end.
    key: String,
    /// `None` for the folder of the prefix, which may not exist.
    attr: Option<ObjectAttr>,
    has_names: bool,
    /// There is nothing below the key.
    is_absent: bool,
    /// By key: a folder's with a slash.
    waiting: BTreeMap<String, WaitingName>,
    /// All names up to here were read.
    read_to: String,
    /// `None` after the last page.
    next: Option<FolderPage>,
    /// The marker of a bucket's folder is the first object, and was looked for.
    marker_taken: bool,
    /// The page of the name that was taken last.
    taken_from: FolderPage,
}

impl WalkedFolder {
    fn new(key: String, attr: Option<ObjectAttr>, cursor: Option<Vec<u8>>) -> Self {
        let first = FolderPage { number: 0, cursor };
        WalkedFolder {
            key,
            attr,
            // Pages before the cursor have names.
            has_names: first.cursor.is_some(),
            is_absent: false,
            waiting: BTreeMap::new(),
            read_to: String::new(),
            next: Some(first.clone()),
            // A page behind the first begins behind the marker.
            marker_taken: first.cursor.is_some(),
            taken_from: first,
        }
    }

    /// The first page that has a name which was not listed completely.
    fn resume_cursor(&self) -> Option<Vec<u8>> {
        let waiting = self.waiting.values().map(|name| &name.page);
        let first = waiting.chain([&self.taken_from]).min_by_key(|page| page.number);
        first.and_then(|page| page.cursor.clone())
    }

    /// The next key in order, with the attributes; reads pages until the order is certain.
    fn next_name(&mut self, bucket: &OpenBucket, wanted: &WantedKeys<'_>) -> Result<Option<(String, ObjectAttr)>> {
        loop {
            let is_certain = self.next.is_none()
                || self.waiting.keys().next().is_some_and(|key| key[self.key.len()..] <= *self.read_to);
            if is_certain {
                let Some((key, name)) = self.waiting.pop_first() else { return Ok(None) };
                self.taken_from = name.page;
                return Ok(Some((key, name.attr)));
            }
            self.read_page(bucket, wanted)?;
        }
    }

    /// The marker of a bucket's folder, once.
    fn take_marker(&mut self, bucket: &OpenBucket, wanted: &WantedKeys<'_>) -> Result<Option<ListedObject>> {
        let is_open = !std::mem::replace(&mut self.marker_taken, true);
        if !is_open || self.key.is_empty() || bucket.is_directory() || !wanted.has(&self.key) {
            return Ok(None);
        }
        // The first page tells whether there is a marker, and costs no request of its own.
        if self.next.is_some() && self.waiting.is_empty() {
            self.read_page(bucket, wanted)?;
        }
        if self.is_absent {
            return Ok(None);
        }
        let path = self.key.trim_end_matches('/');
        match bucket.lookup_folder(path) {
            Ok(attr) => {
                let etag = bucket.etag(path.as_bytes(), &attr);
                Ok(Some(ListedObject { key: self.key.clone(), attr, etag }))
            }
            // A node of an older release knows no markers.
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::Unsupported) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The object that a folder without names is.
    fn into_object(self, bucket: &OpenBucket) -> Option<ListedObject> {
        let is_empty = bucket.is_directory() && !self.has_names;
        let path = self.key.strip_suffix('/').filter(|_| is_empty)?;
        let attr = self.attr.or_else(|| bucket.lookup(path).ok()).filter(|attr| attr.kind == FileKind::Directory)?;
        let etag = bucket.etag(path.as_bytes(), &attr);
        Some(ListedObject { key: self.key, attr: ObjectAttr { size: 0, ..attr }, etag })
    }

    fn read_page(&mut self, bucket: &OpenBucket, wanted: &WantedKeys<'_>) -> Result<()> {
        let Some(this) = self.next.take() else { return Ok(()) };
        let path = self.key.strip_suffix('/').unwrap_or(&self.key);
        let page = match bucket.list(path.as_bytes(), this.cursor.as_deref(), PAGE_NAMES) {
            Ok(page) => page,
            // Removed since its name was read, or never there.
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
                self.is_absent = true;
                return Ok(());
            }
            Err(error) => return Err(error),
        };
        self.next = page.next.map(|cursor| FolderPage { number: this.number + 1, cursor: Some(cursor) });
        self.has_names |= !page.entries.is_empty();
        for entry in page.entries {
            // Requests and answers are UTF-8.
            let Ok(name) = String::from_utf8(entry.name) else { continue };
            if is_left_behind(&name, entry.attr.mtime)
                && let Ok(changes) = BucketChanges::of(bucket)
            {
                changes.remove_left_behind(path, &name);
            }
            let slash = if entry.attr.kind == FileKind::Directory { "/" } else { "" };
            let key = format!("{}{name}{slash}", self.key);
            if entry.attr.kind != FileKind::Symlink && is_listed(name.as_bytes()) && wanted.may_have(&key) {
                self.waiting.insert(key, WaitingName { attr: entry.attr, page: this.clone() });
            }
            self.read_to = name;
        }
        if wanted.is_past(&self.key, &self.read_to) {
            self.next = None;
        }
        Ok(())
    }
}

/// The keys that a listing is about.
struct WantedKeys<'a> {
    prefix: &'a str,
    /// Keys up to here were listed.
    after: &'a str,
    /// The last item was a prefix: all keys below were listed too.
    after_prefix: bool,
}

impl WantedKeys<'_> {
    /// Whether the object, or an object of the folder, is wanted.
    fn may_have(&self, key: &str) -> bool {
        let in_prefix = key.starts_with(self.prefix) || key.ends_with('/') && self.prefix.starts_with(key);
        let is_listed_prefix = self.after_prefix && key.starts_with(self.after);
        // A folder that begins before the last key may have keys behind the last key.
        let is_behind = key > self.after || key.ends_with('/') && self.after.starts_with(key);
        in_prefix && is_behind && !is_listed_prefix
    }

    /// Whether the object itself is wanted.
    fn has(&self, key: &str) -> bool {
        self.may_have(key) && key.starts_with(self.prefix) && key > self.after
    }

    /// Whether no later name of the folder can have the prefix.
    fn is_past(&self, folder: &str, name: &str) -> bool {
        match self.prefix.strip_prefix(folder) {
            // Names are in order.
            Some(rest) => {
                let first = rest.split('/').next().unwrap_or_default();
                name > first && !name.starts_with(first)
            }
            None => false,
        }
    }
}

/// A page of the objects of a bucket; blocks.
pub(crate) fn list_objects(bucket: &OpenBucket, request: &ListRequest) -> Result<ListedPage> {
    // A prefix that was listed last can be before the start key, and its token counts.
    let after = request.token.as_ref().map_or(request.start_after.as_str(), |token| token.last.as_str());
    let delimiter = request.delimiter.as_str();
    let wanted = WantedKeys {
        prefix: &request.prefix,
        after,
        after_prefix: common_prefix(after, &request.prefix, delimiter).is_some_and(|common| common == *after),
    };
    let mut page = ListedPage::default();
    let top = folder_of(&request.prefix);
    // A prefix is text: no key begins with the name of a folder that no source has (`/`, `a//`, `../`).
    let can_have_keys = top.is_empty() || matches!(KeyPath::of_key(top), KeyPath::Folder(_));
    if request.max_keys == 0 || !can_have_keys {
        return Ok(page);
    }
    let mut folders = vec![WalkedFolder::new(top.to_owned(), None, known_cursor(request, 0))];
    while let Some(folder) = folders.last_mut() {
        if let Some(marker) = folder.take_marker(bucket, &wanted)? {
            if page.items.len() == request.max_keys {
                page.next = Some(token_of(&page.items, &folders));
                return Ok(page);
            }
            page.items.push(ListedItem::Object(marker));
            continue;
        }
        let Some((key, attr)) = folder.next_name(bucket, &wanted)? else {
            let ended = folders.pop().filter(|folder| wanted.has(&folder.key));
            if let Some(object) = ended.and_then(|folder| folder.into_object(bucket)) {
                if page.items.len() == request.max_keys {
                    page.next = Some(token_of(&page.items, &folders));
                    return Ok(page);
                }
                page.items.push(ListedItem::Object(object));
            }
            continue;
        };
        let common = common_prefix(&key, &request.prefix, delimiter);
        // A prefix that was the last item stands for all keys below it.
        let is_known =
            matches!((page.items.last(), &common), (Some(ListedItem::Prefix(last)), Some(new)) if last == new);
        if is_known || common.as_deref().is_some_and(|common| wanted.after_prefix && common == after) {
            continue;
        }
        let is_folder = attr.kind == FileKind::Directory;
        // The last key is in this folder: whether a key of the prefix comes behind it, only the folder's names tell.
        let has_last_key = is_folder && after.len() > key.len() && after.starts_with(&key);
        if is_folder && (common.is_none() || has_last_key) {
            if folders.len() < KEY_DEPTH_MAX {
                let cursor = if after.starts_with(&key) { known_cursor(request, folders.len()) } else { None };
                folders.push(WalkedFolder::new(key, Some(attr), cursor));
            }
            continue;
        }
        if page.items.len() == request.max_keys {
            page.next = Some(token_of(&page.items, &folders));
            return Ok(page);
        }
        page.items.push(match common {
            Some(prefix) => {
                // The prefix stands for all keys of these folders.
                while folders.last().is_some_and(|folder| folder.key.starts_with(&prefix)) {
                    folders.pop();
                }
                ListedItem::Prefix(prefix)
            }
            None => {
                let etag = bucket.etag(key.as_bytes(), &attr);
                ListedItem::Object(ListedObject { key, attr, etag })
            }
        });
    }
    Ok(page)
}

/// The key of the folder that a prefix leads to.
fn folder_of(prefix: &str) -> &str {
    prefix.rfind('/').map_or("", |at| &prefix[..=at])
}

/// The page of a folder on the way to the last key, with which the listing goes on; `depth` below the folder of the prefix.
fn known_cursor(request: &ListRequest, depth: usize) -> Option<Vec<u8>> {
    request.token.as_ref()?.cursors.get(depth)?.clone()
}

/// The token behind the last item. The name that was read beyond it is read again.
fn token_of(items: &[ListedItem], folders: &[WalkedFolder]) -> ListToken {
    let last = match items.last() {
        Some(ListedItem::Object(object)) => object.key.clone(),
        Some(ListedItem::Prefix(prefix)) => prefix.clone(),
        None => String::new(),
    };
    // Only folders above the last key; deeper folders begin with the next key.
    let above = folders.iter().enumerate().take_while(|(depth, folder)| *depth == 0 || last.starts_with(&folder.key));
    let cursors = above.map(|(_, folder)| folder.resume_cursor()).collect();
    ListToken { last, cursors }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bucket::SourceBucket;
    use proptest::prelude::*;
    use spurline_types::{DirEntry, Error, ListPage, ObjectRef, Version};
    use spurline_volume::info::FileInfo;
    use spurline_volume::{ReadData, Volume, VolumeSpace};
    use std::collections::BTreeSet;
    use std::ops::{Bound, Range};
    use std::sync::Arc;

    /// Keys as a tree, whose folders are listed by name a few names at a time.
    struct KeyTree {
        source: &'static str,
        /// The names of each folder, by path; true for a name of a folder.
        folders: BTreeMap<String, BTreeMap<Vec<u8>, bool>>,
        /// Keys with a slash at the end: folders of a directory, markers of a bucket.
        markers: BTreeSet<String>,
        page_names: usize,
    }

    impl KeyTree {
        fn new(keys: &BTreeSet<String>, page_names: usize) -> Self {
            let mut folders = BTreeMap::<String, BTreeMap<Vec<u8>, bool>>::new();
            for key in keys {
                let mut path = String::new();
                for part in key.split_inclusive('/') {
                    let name = part.trim_end_matches('/');
                    folders.entry(path.clone()).or_default().insert(name.into(), part.ends_with('/'));
                    path = if path.is_empty() { name.to_owned() } else { format!("{path}/{name}") };
                }
            }
            let markers = keys.iter().filter(|key| key.ends_with('/')).cloned().collect();
            KeyTree { source: "file:///tree", folders, markers, page_names }
        }
    }

    fn attr(kind: FileKind) -> ObjectAttr {
        let version = Version::new("v");
        ObjectAttr { kind, size: 1, mtime: std::time::SystemTime::UNIX_EPOCH, mode: 0o644, version, etag: None }
    }

    impl Volume for KeyTree {
        fn source(&self) -> &str {
            self.source
        }
        fn block_size(&self) -> u64 {
            1 << 20
        }
        fn lookup(&self, path: &[u8]) -> Result<ObjectAttr> {
            let path = std::str::from_utf8(path).unwrap();
            if path.ends_with('/') {
                let is_marker = self.markers.contains(path);
                return is_marker.then(|| attr(FileKind::File)).ok_or_else(|| Error::new(ErrorKind::NotFound, path));
            }
            let (folder, name) = path.rsplit_once('/').unwrap_or(("", path));
            let found = self.folders.get(folder).and_then(|names| names.get(name.as_bytes()));
            let found = found.ok_or_else(|| Error::new(ErrorKind::NotFound, path))?;
            Ok(attr(if *found { FileKind::Directory } else { FileKind::File }))
        }
        fn list(&self, path: &[u8], cursor: Option<&[u8]>, _: usize) -> Result<ListPage> {
            let Some(folder) = self.folders.get(std::str::from_utf8(path).unwrap()) else {
                return Ok(ListPage::default());
            };
            let after = cursor.map_or(Bound::Unbounded, Bound::Excluded);
            let mut names = folder.range::<[u8], _>((after, Bound::Unbounded));
            let entries: Vec<DirEntry> = names
                .by_ref()
                .take(self.page_names)
                .map(|(name, is_folder)| DirEntry {
                    name: name.clone(),
                    attr: attr(if *is_folder { FileKind::Directory } else { FileKind::File }),
                })
                .collect();
            let next = names.next().and(entries.last()).map(|entry| entry.name.clone());
            Ok(ListPage { entries, next, marker: None })
        }
        fn readlink(&self, _: &[u8]) -> Result<Vec<u8>> {
            unreachable!("there is no link")
        }
        fn read(&self, _: &ObjectRef, _: u64, _: &mut [u8]) -> Result<ReadData> {
            unreachable!("a listing reads no object")
        }
        fn prefetch(&self, _: &ObjectRef, _: Range<u32>, _: usize) {}
        fn capacity(&self) -> Result<VolumeSpace> {
            unreachable!("a listing needs no space")
        }
        fn info(&self, _: &[u8]) -> Result<FileInfo> {
            unreachable!("a listing is no description")
        }
    }

    /// What S3 lists: keys in order, those with a common prefix as one item.
    fn listed_by_s3(keys: &BTreeSet<String>, request: &ListRequest) -> Vec<String> {
        let mut items: Vec<String> = Vec::new();
        for key in keys.iter().filter(|key| key.starts_with(&request.prefix) && **key > request.start_after) {
            let item = common_prefix(key, &request.prefix, &request.delimiter).unwrap_or_else(|| key.clone());
            if items.last() != Some(&item) && item != request.start_after {
                items.push(item);
            }
        }
        items
    }

    /// All items, page by page, and the number of pages.
    fn listed_here(tree: KeyTree, mut request: ListRequest) -> Vec<String> {
        let bucket = OpenBucket::new(SourceBucket { name: "tree".into(), volume: Arc::new(tree), writes: None });
        let mut all = Vec::new();
        loop {
            let page = list_objects(&bucket, &request).unwrap();
            assert!(page.items.len() <= request.max_keys);
            assert!(page.next.is_none() || page.items.len() == request.max_keys, "a page that ends early");
            all.extend(page.items.into_iter().map(|item| match item {
                ListedItem::Object(object) => object.key,
                ListedItem::Prefix(prefix) => prefix,
            }));
            let Some(next) = page.next else { return all };
            assert_ne!(request.token.as_ref(), Some(&next), "the same page again");
            request.token = Some(ListToken::from_text(&next.to_text()).unwrap());
        }
    }

    #[test]
    fn a_prefix_before_the_start_key_is_listed_once() {
        let keys: BTreeSet<String> = ["a-/x", "b"].map(str::to_owned).into();
        let start_after = "a-.".to_owned();
        let request = ListRequest { delimiter: "-".to_owned(), start_after, max_keys: 1, ..ListRequest::default() };
        assert_eq!(listed_here(KeyTree::new(&keys, 4), request), ["a-", "b"]);
    }

    /// Keys that sources have: without names that no file has, and without a file that is also a folder.
    fn keys_of_buckets() -> impl Strategy<Value = BTreeSet<String>> {
        proptest::collection::btree_set("[ab\\-.]{1,2}(/[ab\\-.0]{1,2}){0,3}/?", 0..40).prop_map(|keys| {
            let keys: BTreeSet<String> =
                keys.into_iter().filter(|key| KeyPath::of_key(key) != KeyPath::Nowhere).collect();
            let is_folder = |key: &String| keys.iter().any(|other| other.starts_with(&format!("{key}/")));
            keys.iter().filter(|key| key.ends_with('/') || !is_folder(key)).cloned().collect()
        })
    }

    /// The same, with empty folders only.
    fn keys_of_directories() -> impl Strategy<Value = BTreeSet<String>> {
        keys_of_buckets().prop_map(|keys| {
            let is_above = |key: &String| keys.iter().any(|other| other != key && other.starts_with(key.as_str()));
            keys.iter().filter(|key| !key.ends_with('/') || !is_above(key)).cloned().collect()
        })
    }

    fn list_requests() -> impl Strategy<Value = ListRequest> {
        let delimiters = prop_oneof![Just(""), Just("/"), Just("-"), Just("b/")];
        ("/?([ab\\-.]{1,2}/{0,2}){0,2}", "([ab\\-./]{0,4})", delimiters, 1usize..8).prop_map(
            |(prefix, start_after, delimiter, max_keys)| ListRequest {
                prefix,
                start_after,
                delimiter: delimiter.to_owned(),
                token: None,
                max_keys,
            },
        )
    }

    proptest! {
        #[test]
        fn any_text_is_a_token_or_none(text in ".*", bytes in proptest::collection::vec(any::<u8>(), 0..64)) {
            for text in [text, BASE64_URL_SAFE_NO_PAD.encode(bytes)] {
                if let Some(token) = ListToken::from_text(&text) {
                    let again = ListToken::from_text(&token.to_text()).unwrap();
                    prop_assert_eq!((again.last, again.cursors), (token.last, token.cursors));
                }
            }
        }

        #[test]
        fn pages_have_the_order_of_s3(
            keys in keys_of_directories(),
            request in list_requests(),
            page_names in 1usize..5,
        ) {
            let wanted = listed_by_s3(&keys, &request);
            prop_assert_eq!(listed_here(KeyTree::new(&keys, page_names), request), wanted);
        }

        #[test]
        fn markers_of_buckets_are_objects_beside_those_below(
            keys in keys_of_buckets(),
            request in list_requests(),
            page_names in 1usize..5,
        ) {
            let wanted = listed_by_s3(&keys, &request);
            let tree = KeyTree { source: "s3://tree", ..KeyTree::new(&keys, page_names) };
            prop_assert_eq!(listed_here(tree, request), wanted);
        }

        #[test]
        fn tokens_of_strangers_are_refused_or_harmless(text in "[A-Za-z0-9_-]{0,60}") {
            if let Some(token) = ListToken::from_text(&text) {
                prop_assert_eq!(ListToken::from_text(&token.to_text()), Some(token));
            }
        }
    }
}
