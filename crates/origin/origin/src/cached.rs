//! Metadata of an under-store held for a short time: attributes, absences and pages of listings.
//! It deliberately holds no bytes of objects, and nothing for longer than the time given.
//!
//! Many lookups in one directory within a short time lead to one listing of it that answers the rest: 10,000 files
//! opened one after the other cost tens of requests instead of tens of thousands. Equal questions asked at the same
//! time are asked once.

use crate::{Capabilities, InCommon, Read, StatFs, UnderStore};
use parking_lot::{Condvar, Mutex};
use spurline_types::{Attr, Error, ErrorKind, ListPage, ObjectRef, Result, Sink, Stats};
use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// How long and how much is held.
#[derive(Debug, Clone)]
pub struct MetadataConfig {
    /// Attributes and pages count for this long from the moment they were asked for: the attribute cache time.
    /// Zero holds nothing, and no answer is of a moment before its question (equal questions at the same time are still asked
    /// once).
    pub ttl: Duration,
    /// A name that is not there counts as absent for this long.
    pub negative_ttl: Duration,
    /// Names held at most, in attributes and pages together, by all that have the same [`InCommon`]; about 300 bytes each.
    pub max_entries: usize,
}

impl Default for MetadataConfig {
    fn default() -> Self {
        MetadataConfig { ttl: Duration::from_secs(1), negative_ttl: Duration::from_millis(500), max_entries: 200_000 }
    }
}

/// Names of a directory looked up one by one before it is listed instead.
const LIST_AFTER: u32 = 8;
/// Within this time.
const WINDOW: Duration = Duration::from_secs(2);
/// Names per page of such a listing, as many as an object store answers at once.
const PAGE: usize = 1000;
/// Pages of such a listing: larger directories are looked up name by name.
const PAGES: usize = 32;
/// A directory found too large, or too slow to list, is not tried again for this long.
const TOO_LARGE: Duration = Duration::from_secs(60);
/// A lookup waits for a listing at most this long before it asks by itself, and the one that lists for a page of it.
const PATIENCE: Duration = Duration::from_secs(2);
/// What is held of a file that somebody writes counts for so long.
const UNSETTLED: Duration = Duration::from_secs(1);

type Path = Box<[u8]>;
type PageKey = (Path, Option<Path>, usize);

/// An answer that may be handed to several askers.
type Known<T> = (Instant, Result<T>);

/// A page, and when it was asked for.
type Page = (Instant, Arc<ListPage>);

/// A question under way and, once it is there, its answer for all who wait for it: also one that took longer than
/// answers are held.
type Flight<T> = Arc<Question<T>>;

struct Question<T> {
    /// When it was asked: the answer is of no earlier moment.
    asked: Instant,
    answer: OnceLock<Result<T>>,
}

impl<T> Question<T> {
    fn now() -> Flight<T> {
        Arc::new(Question { asked: Instant::now(), answer: OnceLock::new() })
    }
}

/// Who waits for an answer: since when, of what age at that moment it may be, and until when.
#[derive(Clone, Copy)]
struct Asker {
    began: Instant,
    max_age: Duration,
    deadline: Instant,
}

#[derive(Default)]
struct State {
    names: HashMap<Path, Known<Attr>>,
    pages: HashMap<PageKey, Page>,
    /// Names in `pages`.
    paged: usize,
    folders: HashMap<Path, Folder>,
    asking: HashMap<Path, Flight<Attr>>,
    asking_pages: HashMap<PageKey, Flight<Page>>,
    /// How often names were dropped that were not too old: what is being listed meanwhile may be among them.
    forgotten: u64,
    /// How many names it was told that there are.
    told: usize,
}

impl State {
    /// Drops what is too old.
    fn forget_old(&mut self, ttl: Duration) {
        self.names.retain(|_, (at, _)| at.elapsed() < ttl);
        self.pages.retain(|_, (at, _)| at.elapsed() < ttl);
        self.folders.retain(|_, f| f.listing || f.since.elapsed() < TOO_LARGE);
        self.paged = self.pages.values().map(|(_, p)| p.entries.len()).sum();
        let room = 2 * self.names.len();
        self.names.shrink_to(room);
    }

    /// Tells how many names it holds; how many all hold together.
    fn tell(&mut self, in_common: &InCommon) -> usize {
        let now = self.names.len() + self.paged;
        in_common.names(std::mem::replace(&mut self.told, now), now)
    }
}

impl Drop for Cached {
    fn drop(&mut self) {
        let mut state = self.state.lock();
        (state.names, state.pages, state.paged) = Default::default();
        state.tell(&self.in_common);
    }
}

/// What is known of a directory's lookups and listings.
struct Folder {
    /// Start of the window and lookups asked in it.
    since: Instant,
    asked: u32,
    listing: bool,
    /// All its names are in `names`, as of this moment.
    complete: Option<Instant>,
    too_large: Option<Instant>,
}

/// A wrapper around any under-store.
pub struct Cached {
    inner: Arc<dyn UnderStore>,
    config: MetadataConfig,
    stats: Arc<Stats>,
    in_common: InCommon,
    state: Arc<Mutex<State>>,
    changed: Condvar,
}

impl Cached {
    /// Wraps `inner`.
    pub fn new(inner: Arc<dyn UnderStore>, config: MetadataConfig, stats: Arc<Stats>) -> Self {
        Self::with(&InCommon::default(), inner, config, stats)
    }

    /// The same, one of several that hold names together.
    pub fn with(in_common: &InCommon, inner: Arc<dyn UnderStore>, config: MetadataConfig, stats: Arc<Stats>) -> Self {
        let state: Arc<Mutex<State>> = Arc::default();
        let (held, ttl) = (Arc::downgrade(&state), config.ttl);
        in_common.holds_names(Box::new(move |in_common| {
            let Some(state) = held.upgrade() else { return false };
            if let Some(mut state) = state.try_lock() {
                state.forget_old(ttl);
                state.tell(in_common);
            }
            true
        }));
        Cached { inner, config, stats, in_common: in_common.clone(), state, changed: Condvar::new() }
    }

    /// Forgets what is held about `path` and the listings it stands in, so that the next question is asked anew.
    pub fn invalidate(&self, path: &[u8]) {
        let mut state = self.state.lock();
        state.forgotten += 1;
        state.names.remove(path);
        let (folder, _) = split(path);
        if let Some(folder) = state.folders.get_mut(folder) {
            folder.complete = None;
        }
        let mut dropped = 0;
        state.pages.retain(|(of, _, _), (_, page)| {
            let keep = **of != *folder;
            dropped += if keep { 0 } else { page.entries.len() };
            keep
        });
        state.paged -= dropped;
    }

    /// Names held now.
    pub fn held(&self) -> usize {
        let state = self.state.lock();
        state.names.len() + state.paged
    }

    fn timed_out(&self, what: &str) -> Error {
        Error::new(
            ErrorKind::Timeout,
            format!("{} has not answered {what} in time; look at the endpoint and its load", self.inner.source()),
        )
    }

    /// Drops what is too old, here and then elsewhere, and half of the rest when that is not enough.
    fn shrink(&self, state: &mut State) {
        let most = self.config.max_entries;
        if state.tell(&self.in_common) <= most {
            return;
        }
        state.forget_old(self.config.ttl);
        if state.tell(&self.in_common) > most {
            self.in_common.forget_old();
        }
        if state.tell(&self.in_common) > most {
            state.forgotten += 1;
            state.pages.clear();
            state.paged = 0;
            let mut odd = false;
            state.names.retain(|_, _| {
                odd = !odd;
                odd
            });
            for folder in state.folders.values_mut() {
                folder.complete = None;
            }
            state.tell(&self.in_common);
        }
    }

    /// What is held about `path`, if it still counts.
    fn known(&self, state: &State, path: &[u8], max_age: Duration) -> Option<Result<Attr>> {
        let negative_ttl = self.config.negative_ttl.min(max_age);
        if let Some((at, answer)) = state.names.get(path) {
            let ttl = match answer {
                // Whether somebody still writes it is asked again before long.
                Ok(attr) if attr.version.is_unsettled() => self.config.ttl.min(max_age).min(UNSETTLED),
                Ok(_) => self.config.ttl.min(max_age),
                Err(_) => negative_ttl,
            };
            if at.elapsed() < ttl {
                return Some(answer.clone());
            }
        }
        let (folder, name) = split(path);
        let complete = state.folders.get(folder).and_then(|f| f.complete)?;
        // A name that was listed but has been dropped or grown old is asked for; one that was not listed is absent.
        // What is too old is dropped at any time.
        let whole = complete.elapsed() < negative_ttl.min(self.config.ttl);
        (whole && !state.names.contains_key(path)).then(|| {
            let (name, folder) = (String::from_utf8_lossy(name), String::from_utf8_lossy(folder));
            Err(Error::new(ErrorKind::NotFound, format!("'{name}' is not in '{folder}'")))
        })
    }

    /// Keeps a page's names; `at` is when it was asked for.
    fn keep_page(&self, state: &mut State, key: PageKey, at: Instant, page: &Arc<ListPage>) {
        let folder = &key.0;
        for entry in &page.entries {
            state.names.insert(join(folder, &entry.name), (at, Ok(entry.attr.clone())));
        }
        state.paged += page.entries.len();
        if let Some((_, old)) = state.pages.insert(key, (at, Arc::clone(page))) {
            state.paged -= old.entries.len();
        }
        self.shrink(state);
    }

    /// One page, from what is held or asked for once.
    fn page(
        &self,
        path: &[u8],
        cursor: Option<&[u8]>,
        max: usize,
        max_age: Duration,
        deadline: Instant,
    ) -> Result<Page> {
        let ttl = self.config.ttl.min(max_age);
        let asker = Asker { began: Instant::now(), max_age, deadline };
        let key: PageKey = (path.into(), cursor.map(Into::into), max);
        let mut state = self.state.lock();
        loop {
            if let Some((at, page)) = state.pages.get(&key)
                && at.elapsed() < ttl
            {
                self.stats.metadata.cache_hits.add(1);
                return Ok((*at, Arc::clone(page)));
            }
            let Some(flight) = state.asking_pages.get(&key).map(Arc::clone) else { break };
            if let Some(answer) = self.join_flight(&mut state, &flight, asker, "a listing")? {
                return answer;
            }
        }
        let flight = Question::now();
        state.asking_pages.insert(key.clone(), Arc::clone(&flight));
        drop(state);
        let at = Instant::now();
        let asked = Asking { cached: self, done: Some(Done::Page(key.clone(), Arc::clone(&flight))) };
        let page = self.inner.list(path, cursor, max, deadline).map(|page| (at, Arc::new(page)));
        let mut state = self.state.lock();
        land(&mut state.asking_pages, &key, &flight, page.clone());
        if let Ok((_, page)) = &page {
            self.keep_page(&mut state, key, at, page);
        }
        drop(state);
        drop(asked);
        page
    }

    /// Waits for somebody else's question. `None` when it came to nothing that is ours too: its asker had less time, or it
    /// was asked too long before us. The next one is not, so that nobody waits for more than two.
    fn join_flight<T: Clone>(
        &self,
        state: &mut parking_lot::MutexGuard<'_, State>,
        flight: &Flight<T>,
        asker: Asker,
        what: &str,
    ) -> Result<Option<Result<T>>> {
        while flight.answer.get().is_none() {
            if self.changed.wait_until(state, asker.deadline).timed_out() {
                return Err(self.timed_out(what));
            }
        }
        if asker.began.saturating_duration_since(flight.asked) > asker.max_age {
            return Ok(None);
        }
        let answer = flight.answer.get().cloned();
        let ours = answer.filter(|a| a.as_ref().map_or_else(|e| e.kind() != ErrorKind::Timeout, |_| true));
        if ours.is_some() {
            self.stats.metadata.cache_hits.add(1);
        }
        Ok(ours)
    }

    /// Lists a directory whose names are being looked up one by one, within half of the time there is: the other half is
    /// for the lookup itself, should the listing not answer it.
    fn list_for_lookups(&self, folder: &[u8], max_age: Duration, deadline: Instant) {
        let _listing = Asking { cached: self, done: Some(Done::Folder(folder.into())) };
        let forgotten = self.state.lock().forgotten;
        let began = Instant::now();
        let until = began + deadline.saturating_duration_since(began) / 2;
        let counts = self.config.ttl.min(max_age);
        let mut oldest = began;
        let mut cursor: Option<Vec<u8>> = None;
        let pages = PAGES.min((self.config.max_entries / 4).div_ceil(PAGE));
        for _ in 0..pages {
            let until = until.min(Instant::now() + PATIENCE);
            let (at, page) = match self.page(folder, cursor.as_deref(), PAGE, max_age, until) {
                Ok(page) => page,
                // Nothing to be slow: it may be made at any moment.
                Err(error) if error.kind() == ErrorKind::NotFound => return,
                // The lookups that wait for it ask by themselves and see their own error.
                Err(_) => break,
            };
            self.changed.notify_all();
            oldest = oldest.min(at);
            cursor = page.next.clone();
            // What it told first does not count any more: another listing would answer as little.
            if began.elapsed() >= counts {
                break;
            }
            if cursor.is_none() {
                let whole = self.inner.lists_all(folder);
                let mut state = self.state.lock();
                // There was no room for them: to list it again soon would cost as much again.
                if state.forgotten != forgotten
                    && let Some(folder) = state.folders.get_mut(folder)
                {
                    folder.too_large = Some(Instant::now());
                }
                // Names that were dropped while it was listed, or were left out of it, are not absent.
                if state.forgotten == forgotten
                    && whole
                    && let Some(folder) = state.folders.get_mut(folder)
                {
                    folder.complete = Some(oldest);
                }
                return;
            }
        }
        if let Some(folder) = self.state.lock().folders.get_mut(folder) {
            folder.too_large = Some(Instant::now());
        }
    }
}

/// Something being asked for, which must not look so any more whatever comes of it.
struct Asking<'a> {
    cached: &'a Cached,
    done: Option<Done>,
}

enum Done {
    Name(Path, Flight<Attr>),
    Page(PageKey, Flight<Page>),
    Folder(Path),
}

/// Answers a question and takes it off the list of those being asked, both under the lock that `asking` is under: who finds
/// a question there can wait for its answer. Nothing happens to one that is answered already, nor to another's equal one.
fn land<K: Eq + Hash, T>(asking: &mut HashMap<K, Flight<T>>, key: &K, flight: &Flight<T>, answer: Result<T>) {
    let _ = flight.answer.set(answer);
    if asking.get(key).is_some_and(|now| Arc::ptr_eq(now, flight)) {
        asking.remove(key);
    }
}

/// The answer to a question whose asker broke off: whoever waits for it asks by itself.
fn broken_off<T>() -> Result<T> {
    Err(Error::new(ErrorKind::Timeout, "who asked for it broke off"))
}

impl Drop for Asking<'_> {
    fn drop(&mut self) {
        let mut state = self.cached.state.lock();
        match self.done.take() {
            Some(Done::Name(path, flight)) => land(&mut state.asking, &path, &flight, broken_off()),
            Some(Done::Page(key, flight)) => land(&mut state.asking_pages, &key, &flight, broken_off()),
            Some(Done::Folder(path)) => {
                if let Some(folder) = state.folders.get_mut(&path) {
                    folder.listing = false;
                }
            }
            None => {}
        }
        drop(state);
        self.cached.changed.notify_all();
    }
}

/// The folder that a name stands in, and the name.
pub(crate) fn split(path: &[u8]) -> (&[u8], &[u8]) {
    match path.iter().rposition(|b| *b == b'/') {
        Some(i) => (&path[..i], &path[i + 1..]),
        None => (b"", path),
    }
}

fn join(folder: &[u8], name: &[u8]) -> Path {
    match folder {
        b"" => name.into(),
        _ => [folder, b"/", name].concat().into(),
    }
}

impl UnderStore for Cached {
    fn source(&self) -> &str {
        self.inner.source()
    }
    fn describe(&self) -> String {
        self.inner.describe()
    }
    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }
    fn check(&self, deadline: Instant) -> Result<()> {
        self.inner.check(deadline)
    }

    fn lookup(&self, path: &[u8], deadline: Instant) -> Result<Attr> {
        self.lookup_within(path, self.config.ttl, deadline)
    }

    fn lookup_within(&self, path: &[u8], max_age: Duration, deadline: Instant) -> Result<Attr> {
        if path.is_empty() {
            return self.inner.lookup(path, deadline);
        }
        let (folder, _) = split(path);
        let began = Instant::now();
        let asker = Asker { began, max_age, deadline };
        let mut state = self.state.lock();
        let mut counted = false;
        loop {
            if let Some(answer) = self.known(&state, path, max_age) {
                self.stats.metadata.cache_hits.add(1);
                return answer;
            }
            if let Some(flight) = state.asking.get(path).map(Arc::clone) {
                match self.join_flight(&mut state, &flight, asker, "a lookup")? {
                    Some(answer) => return answer,
                    None => continue,
                }
            }
            let now = Instant::now();
            if !state.folders.contains_key(folder) {
                let fresh = Folder { since: now, asked: 0, listing: false, complete: None, too_large: None };
                state.folders.insert(folder.into(), fresh);
            }
            let Some(of) = state.folders.get_mut(folder) else { break };
            // It answers nobody who wants nothing that is held.
            if of.listing && !max_age.is_zero() && began.elapsed() < PATIENCE {
                let until = deadline.min(began + PATIENCE);
                if self.changed.wait_until(&mut state, until).timed_out() && Instant::now() >= deadline {
                    return Err(self.timed_out("a lookup"));
                }
                continue;
            }
            if !counted {
                counted = true;
                if now.duration_since(of.since) > WINDOW {
                    (of.since, of.asked) = (now, 0);
                }
                of.asked += 1;
                let large = of.too_large.is_some_and(|at| at.elapsed() < TOO_LARGE);
                if of.asked > LIST_AFTER && !large && !of.listing && !self.config.ttl.min(max_age).is_zero() {
                    (of.since, of.asked, of.listing) = (now, 0, true);
                    drop(state);
                    self.list_for_lookups(folder, max_age, deadline);
                    state = self.state.lock();
                    continue;
                }
            }
            break;
        }
        let flight = Question::now();
        state.asking.insert(path.into(), Arc::clone(&flight));
        drop(state);
        let at = Instant::now();
        let key: Path = path.into();
        let asked = Asking { cached: self, done: Some(Done::Name(key.clone(), Arc::clone(&flight))) };
        let answer = self.inner.lookup(path, deadline);
        let mut state = self.state.lock();
        land(&mut state.asking, &key, &flight, answer.clone());
        // Failures are not held, but the absence of a name is.
        if answer.as_ref().map_or_else(|e| e.kind() == ErrorKind::NotFound, |_| true) {
            state.names.insert(key, (at, answer.clone()));
            self.shrink(&mut state);
        }
        drop(state);
        drop(asked);
        answer
    }

    fn list(&self, path: &[u8], cursor: Option<&[u8]>, max: usize, deadline: Instant) -> Result<ListPage> {
        self.list_within(path, cursor, max, self.config.ttl, deadline)
    }

    fn list_within(
        &self,
        path: &[u8],
        cursor: Option<&[u8]>,
        max: usize,
        max_age: Duration,
        deadline: Instant,
    ) -> Result<ListPage> {
        self.page(path, cursor, max, max_age, deadline).map(|(_, page)| ListPage::clone(&page))
    }

    fn lists_all(&self, path: &[u8]) -> bool {
        self.inner.lists_all(path)
    }

    fn readlink(&self, path: &[u8], deadline: Instant) -> Result<Vec<u8>> {
        self.inner.readlink(path, deadline)
    }

    fn read(&self, object: &ObjectRef, offset: u64, sink: &mut dyn Sink, deadline: Instant) -> Result<()> {
        let answer = self.inner.read(object, offset, sink, deadline);
        if answer.as_ref().is_err_and(|e| e.kind() == ErrorKind::Stale) {
            self.invalidate(&object.path);
        }
        answer
    }

    fn read_many<'a>(
        &self,
        reads: &mut dyn Iterator<Item = Read<'a>>,
        at_once: usize,
        time: Duration,
    ) -> Vec<Result<()>> {
        let mut objects = Vec::new();
        let answers = self.inner.read_many(&mut reads.inspect(|read| objects.push(read.object)), at_once, time);
        for (object, answer) in objects.into_iter().zip(&answers) {
            if answer.as_ref().is_err_and(|e| e.kind() == ErrorKind::Stale) {
                self.invalidate(&object.path);
            }
        }
        answers
    }

    fn statfs(&self, deadline: Instant) -> Result<Option<StatFs>> {
        self.inner.statfs(deadline)
    }
}
