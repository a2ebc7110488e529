//! A short-lived cache of an origin's metadata: attributes, absences and pages of listings. It deliberately holds no
//! object data, and nothing for longer than configured.
//!
//! Many lookups in one directory within a short time lead to one listing, which answers the rest: 10,000 files opened
//! one after the other cost tens of requests instead of tens of thousands. In a larger directory the page of the name is listed
//! again, if a program has listed the directory. Concurrent equal requests are sent once.

use crate::store_outage::{
    Outage, PROBE_LIMIT, PROBE_PAUSE, begin_outage, end_outage, is_unanswered, is_unserved, shows_silence,
    silence_error,
};
use crate::{OriginCapabilities, OriginCapacity, OriginRead, OriginStore, forward_to};
use parking_lot::{Condvar, Mutex};
use spurline_object_store::SharedBuckets;
use spurline_sys::{join_path, split_path};
use spurline_types::{ByteSink, Error, ErrorKind, ListPage, ObjectAttr, ObjectHeaders, ObjectRef, Result, Stats};
use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

/// Lifetime and number of cached names.
#[derive(Debug, Clone)]
pub struct MetadataConfig {
    /// Lifetime of attributes and pages, counted from their request: the attribute cache time. Zero caches nothing:
    /// no answer is older than its request. Concurrent equal requests are still sent once.
    pub ttl: Duration,
    /// Lifetime of an absence.
    pub negative_ttl: Duration,
    /// Most names held, in attributes and pages together, by all with the same [`SharedBuckets`]; about 300 bytes
    /// each.
    pub max_entries: usize,
    /// While the origin does not respond, the last known names, attributes and listings stay valid for this long;
    /// zero for never. Counted from the first request without an answer.
    pub stale_if_error: Duration,
}

impl Default for MetadataConfig {
    fn default() -> Self {
        MetadataConfig {
            ttl: Duration::from_secs(1),
            negative_ttl: Duration::from_millis(500),
            max_entries: 200_000,
            stale_if_error: Duration::ZERO,
        }
    }
}

/// Lookups in one directory before it is listed instead.
const LIST_AFTER: u32 = 8;
/// The time window of these lookups.
const WINDOW: Duration = Duration::from_secs(2);
/// Names per page of such a listing, the maximum of an object store.
const PAGE: usize = 1000;
/// Most pages of such a listing: larger directories are looked up name by name.
const PAGES: usize = 32;
/// A directory that is too large, or too slow to list, is not tried again for this long.
const TOO_LARGE: Duration = Duration::from_secs(60);
/// Longest wait of a lookup for a listing before it sends its own request, and of the listing for one page.
const PATIENCE: Duration = Duration::from_secs(2);
/// Lifetime of the attributes of a file that is being written.
const UNSETTLED: Duration = Duration::from_secs(1);

/// Longest wait for an answer if the last known one may be served instead; the request continues in the background.
const SPARE_PATIENCE: Duration = Duration::from_secs(3);
/// Most requests that continue in the background; without room a caller waits for its own.
const MOST_LATE: usize = 64;
/// Pause between the requests that test whether the origin responds again.
const PROBE_EVERY: Duration = Duration::from_secs(1);

type PathBytes = Box<[u8]>;
type PageKey = (PathBytes, Option<PathBytes>, usize);

/// An answer with the time of its request.
type TimedAnswer<T> = (Instant, Result<T>);

/// A page with the time of its request.
type TimedPage = (Instant, Arc<ListPage>);

/// A request in flight and its answer, shared by all waiting callers. An answer that took longer than the lifetime of
/// cached names counts too.
type SharedRequest<T> = Arc<PendingRequest<T>>;

struct PendingRequest<T> {
    /// When it was sent: the answer is not older than this.
    sent_at: Instant,
    answer: OnceLock<Result<T>>,
}

impl<T> PendingRequest<T> {
    fn start_now() -> SharedRequest<T> {
        Arc::new(PendingRequest { sent_at: Instant::now(), answer: OnceLock::new() })
    }
}

/// The bounds of a waiting caller: start, the greatest age of the answer at that time, and deadline.
#[derive(Clone, Copy)]
struct WaitBounds {
    began: Instant,
    max_age: Duration,
    deadline: Instant,
}

#[derive(Default)]
struct MetadataState {
    names: HashMap<PathBytes, TimedAnswer<ObjectAttr>>,
    pages: HashMap<PageKey, TimedPage>,
    /// Names in `pages`.
    page_names: usize,
    folders: HashMap<PathBytes, FolderState>,
    pending_lookups: HashMap<PathBytes, SharedRequest<ObjectAttr>>,
    pending_pages: HashMap<PageKey, SharedRequest<TimedPage>>,
    /// Counts drops of unexpired names: a concurrent listing may have lost some of its own.
    early_drops: u64,
    /// Last reported number of names.
    reported: usize,
    outage: Option<Outage>,
    /// Requests that continue in the background.
    late_requests: usize,
    /// The origin is a bucket.
    has_markers: bool,
}

/// A request that continues without its caller.
enum LateRequest {
    Name(PathBytes),
    Page(PageKey),
}

/// Stores a page and its names, requested at `at`; the first page of a bucket's folder also tells whether the folder has a marker.
fn store_page(state: &mut MetadataState, key: PageKey, at: Instant, page: &Arc<ListPage>) {
    if state.has_markers && !key.0.is_empty() && key.1.is_none() {
        let marker = page.marker.clone().ok_or_else(|| Error::new(ErrorKind::NotFound, "the folder has no marker"));
        state.names.insert([&key.0[..], b"/"].concat().into(), (at, marker));
    }
    for entry in &page.entries {
        state.names.insert(join_path(&key.0, &entry.name).into(), (at, Ok(entry.attr.clone())));
    }
    state.page_names += page.entries.len();
    if let Some((_, old)) = state.pages.insert(key, (at, Arc::clone(page))) {
        state.page_names -= old.entries.len();
    }
}

impl MetadataState {
    /// Drops expired names.
    fn drop_expired(&mut self, ttl: Duration) {
        self.names.retain(|_, (at, _)| at.elapsed() < ttl);
        self.pages.retain(|_, (at, _)| at.elapsed() < ttl);
        self.folders.retain(|_, f| f.listing || f.window_start.elapsed() < TOO_LARGE);
        self.page_names = self.pages.values().map(|(_, p)| p.entries.len()).sum();
        let room = 2 * self.names.len();
        self.names.shrink_to(room);
    }

    /// Reports the number of held names; returns the sum over all holders.
    fn report_names(&mut self, in_common: &SharedBuckets) -> usize {
        let now = self.names.len() + self.page_names;
        in_common.count_names(std::mem::replace(&mut self.reported, now), now)
    }
}

impl Drop for CachedOrigin {
    fn drop(&mut self) {
        let mut state = self.state.lock();
        (state.names, state.pages, state.page_names) = Default::default();
        if state.outage.take().is_some_and(|outage| !outage.refused) {
            self.stats.metadata.silent_origins.sub(1);
        }
        state.report_names(&self.shared);
    }
}

/// Lookups and listings of one directory.
struct FolderState {
    /// Start of the window, and the lookups in it.
    window_start: Instant,
    lookups: u32,
    listing: bool,
    /// At this time, `names` had all names of the directory.
    complete: Option<Instant>,
    too_large: Option<Instant>,
    /// How long a page took then.
    page_time: Duration,
}

impl FolderState {
    fn new(now: Instant) -> FolderState {
        let page_time = Duration::ZERO;
        FolderState { window_start: now, lookups: 0, listing: false, complete: None, too_large: None, page_time }
    }
}

/// An origin with a cache of its metadata.
pub struct CachedOrigin {
    inner: Arc<dyn OriginStore>,
    config: MetadataConfig,
    stats: Arc<Stats>,
    shared: SharedBuckets,
    state: Arc<Mutex<MetadataState>>,
    changed: Condvar,
}

impl CachedOrigin {
    /// Wraps `inner`.
    pub fn new(inner: Arc<dyn OriginStore>, config: MetadataConfig, stats: Arc<Stats>) -> Self {
        Self::with_shared(&SharedBuckets::default(), inner, config, stats)
    }

    /// As [`CachedOrigin::new`], with a limit on names shared through `in_common`.
    pub fn with_shared(
        in_common: &SharedBuckets,
        inner: Arc<dyn OriginStore>,
        config: MetadataConfig,
        stats: Arc<Stats>,
    ) -> Self {
        let has_markers = inner.capabilities().etags;
        let state = Arc::new(Mutex::new(MetadataState { has_markers, ..MetadataState::default() }));
        let held = Arc::downgrade(&state);
        let ttl = config.ttl;
        in_common.register_holder(Box::new(move |in_common| {
            let Some(state) = held.upgrade() else { return false };
            if let Some(mut state) = state.try_lock() {
                state.drop_expired(ttl);
                state.report_names(in_common);
            }
            true
        }));
        CachedOrigin { inner, config, stats, shared: in_common.clone(), state, changed: Condvar::new() }
    }

    /// Drops the cached state of `path` and of the listings that contain it, so that the next request goes to the
    /// origin.
    pub fn invalidate(&self, path: &[u8]) {
        let mut state = self.state.lock();
        state.early_drops += 1;
        state.names.remove(path);
        let (folder, _) = split_path(path);
        if let Some(folder) = state.folders.get_mut(folder) {
            folder.complete = None;
        }
        let mut dropped = 0;
        state.pages.retain(|(of, _, _), (_, page)| {
            let keep = **of != *folder;
            dropped += if keep { 0 } else { page.entries.len() };
            keep
        });
        state.page_names -= dropped;
    }

    /// Number of names held.
    pub fn held_names(&self) -> usize {
        let state = self.state.lock();
        state.names.len() + state.page_names
    }

    fn timeout_error(&self, what: &str) -> Error {
        Error::new(
            ErrorKind::Timeout,
            format!("{} has not answered {what} in time; check the endpoint and its load", self.inner.source_url()),
        )
    }

    /// Drops expired names, here and then in other holders, and half of the rest if that is not enough.
    fn enforce_limit(&self, state: &mut MetadataState) {
        let most = self.config.max_entries;
        if state.report_names(&self.shared) <= most {
            return;
        }
        // Names for an outage are dropped last.
        state.drop_expired(self.config.ttl.saturating_add(self.config.stale_if_error));
        if state.report_names(&self.shared) > most {
            state.drop_expired(self.config.ttl);
        }
        if state.report_names(&self.shared) > most {
            self.shared.forget_expired();
        }
        if state.report_names(&self.shared) > most {
            state.early_drops += 1;
            state.pages.clear();
            state.page_names = 0;
            let mut odd = false;
            state.names.retain(|_, _| {
                odd = !odd;
                odd
            });
            for folder in state.folders.values_mut() {
                folder.complete = None;
            }
            state.report_names(&self.shared);
        }
    }

    /// The cached answer for `path`, if it is still valid.
    fn held_answer(&self, state: &MetadataState, path: &[u8], max_age: Duration) -> Option<Result<ObjectAttr>> {
        let negative_ttl = self.config.negative_ttl.min(max_age);
        if let Some((at, answer)) = state.names.get(path) {
            let ttl = match answer {
                // A file that is being written is checked again soon.
                Ok(attr) if attr.version.is_unsettled() => self.config.ttl.min(max_age).min(UNSETTLED),
                Ok(_) => self.config.ttl.min(max_age),
                Err(_) => negative_ttl,
            };
            if at.elapsed() < ttl {
                return Some(answer.clone());
            }
        }
        let (folder, name) = split_path(path);
        let complete = state.folders.get(folder).and_then(|f| f.complete)?;
        // A listed name that was dropped or has expired is requested; a name that was not listed is absent. Expired
        // names may be dropped at any time.
        let whole = complete.elapsed() < negative_ttl.min(self.config.ttl);
        (whole && !state.names.contains_key(path)).then(|| {
            let name = String::from_utf8_lossy(name);
            let folder = String::from_utf8_lossy(folder);
            Err(Error::new(ErrorKind::NotFound, format!("'{name}' is not in '{folder}'")))
        })
    }

    /// Serves the last known answer during an outage, and tests now and then whether the origin responds again.
    fn spare_in_outage<T>(
        &self,
        state: &mut MetadataState,
        spare: Option<T>,
        late: impl Fn() -> LateRequest,
    ) -> Option<T> {
        let spare = spare?;
        let outage = state.outage.as_mut().filter(|outage| outage.since.elapsed() < self.config.stale_if_error)?;
        outage.stale_answers += 1;
        self.stats.metadata.stale_answers.add(1);
        if !outage.probing && outage.last_probe.elapsed() >= PROBE_EVERY {
            outage.probing = true;
            outage.last_probe = Instant::now();
            if !self.continue_late(state, late(), true)
                && let Some(outage) = &mut state.outage
            {
                outage.probing = false;
            }
        }
        Some(spare)
    }

    /// Tests whether anything answers, as long as the outage lasts. An origin that answers these tests first is slow, or fails
    /// some requests, and unknown names are requested.
    fn test_outage(&self) {
        let inner = Arc::clone(&self.inner);
        let shared = Arc::downgrade(&self.state);
        let stats = Arc::clone(&self.stats);
        let thread = std::thread::Builder::new().name("test-origin".into());
        if let Err(error) = thread.spawn(move || test_until_answered(&*inner, &shared, &stats)) {
            tracing::warn!(%error, "no thread can test whether the origin responds");
        }
    }

    /// Refuses a request for something that is not known while nothing answers.
    fn refuse_unknown(&self, state: &MetadataState) -> Result<()> {
        match &state.outage {
            Some(outage) if outage.is_tested => Err(silence_error(self.inner.source_url())),
            _ => Ok(()),
        }
    }

    /// The result of a request without an answer: the last known one, if it is still valid and `timed_out` requests
    /// can continue in the background.
    fn spare_after_error<T>(
        &self,
        state: &mut MetadataState,
        error: Error,
        spare: Option<T>,
        late: Option<LateRequest>,
    ) -> Result<T> {
        let allowed = !self.config.stale_if_error.is_zero();
        if begin_outage(&mut state.outage, &self.stats, self.inner.source_url(), &error, self.config.stale_if_error)
            && allowed
        {
            self.test_outage();
        }
        let continues = late.is_none_or(|late| self.continue_late(state, late, false));
        let valid = state.outage.as_ref().is_some_and(|outage| outage.since.elapsed() < self.config.stale_if_error);
        match spare.filter(|_| continues && valid) {
            Some(spare) => {
                if let Some(outage) = &mut state.outage {
                    outage.stale_answers += 1;
                }
                self.stats.metadata.stale_answers.add(1);
                Ok(spare)
            }
            None => Err(error),
        }
    }

    /// Sends a request from a thread of its own, with the time it would have had; its answer is stored, and ends an
    /// outage. False if there are too many.
    fn continue_late(&self, state: &mut MetadataState, late: LateRequest, probe: bool) -> bool {
        if state.late_requests >= MOST_LATE {
            return false;
        }
        let inner = Arc::clone(&self.inner);
        let shared = Arc::downgrade(&self.state);
        let stats = Arc::clone(&self.stats);
        let sent = std::thread::Builder::new().name("origin-late".into()).spawn(move || {
            let at = Instant::now();
            let deadline = Instant::now() + LATE_LIMIT;
            let answer = match &late {
                LateRequest::Name(path) => inner.lookup(path, deadline).map(Ok),
                LateRequest::Page((path, cursor, max)) => inner.list(path, cursor.as_deref(), *max, deadline).map(Err),
            };
            let is_late_unserved = answer.as_ref().is_err_and(|error| is_unserved(&*inner, error, deadline));
            let Some(state) = shared.upgrade() else { return };
            let mut state = state.lock();
            state.late_requests -= 1;
            if let Some(outage) = state.outage.as_mut().filter(|_| probe) {
                outage.probing = false;
            }
            if is_late_unserved {
                return;
            }
            if !matches!(&late, LateRequest::Name(path) if !is_requested(&*inner, path)) {
                end_outage(&mut state.outage, &stats, inner.source_url());
            }
            match (late, answer) {
                (LateRequest::Name(path), Ok(Ok(attr))) => drop(state.names.insert(path, (at, Ok(attr)))),
                (LateRequest::Page(key), Ok(Err(page))) => store_page(&mut state, key, at, &Arc::new(page)),
                (LateRequest::Name(path), Err(error)) if error.kind() == ErrorKind::NotFound => {
                    state.names.insert(path, (at, Err(error)));
                }
                // An answer that says otherwise: the last known one is wrong.
                (LateRequest::Name(path), _) => drop(state.names.remove(&path)),
                (LateRequest::Page(key), _) => {
                    let old = state.pages.remove(&key).map_or(0, |(_, page)| page.entries.len());
                    state.page_names -= old;
                }
            }
        });
        state.late_requests += usize::from(sent.is_ok());
        sent.is_ok()
    }

    /// The last known answer for `path`, of any age.
    fn spare_name(&self, state: &MetadataState, path: &[u8]) -> Option<Result<ObjectAttr>> {
        let allowed = !self.config.stale_if_error.is_zero();
        state.names.get(path).filter(|_| allowed).map(|(_, answer)| answer.clone())
    }

    /// Caches the names of a page requested at `at`.
    fn keep_page(&self, state: &mut MetadataState, key: PageKey, at: Instant, page: &Arc<ListPage>) {
        store_page(state, key, at, page);
        self.enforce_limit(state);
    }

    /// One page, from the cache or from a single shared request.
    fn fetch_page(
        &self,
        path: &[u8],
        cursor: Option<&[u8]>,
        max: usize,
        max_age: Duration,
        deadline: Instant,
    ) -> Result<TimedPage> {
        let began = Instant::now();
        let key: PageKey = (path.into(), cursor.map(Into::into), max);
        let mut state = self.state.lock();
        let allowed = !self.config.stale_if_error.is_zero();
        let spare = state.pages.get(&key).filter(|_| allowed).cloned();
        let fresh = spare.as_ref().is_some_and(|(at, _)| at.elapsed() < self.config.ttl.min(max_age));
        if !fresh && let Some(page) = self.spare_in_outage(&mut state, spare.clone(), || LateRequest::Page(key.clone()))
        {
            return Ok(page);
        }
        if !fresh {
            self.refuse_unknown(&state)?;
        }
        let short = spare.is_some() && began + SPARE_PATIENCE < deadline;
        let until = if short { began + SPARE_PATIENCE } else { deadline };
        match self.fetch_page_fresh(state, key.clone(), WaitBounds { began, max_age, deadline: until }) {
            Err(error) if is_unserved(&*self.inner, &error, until) => {
                let mut state = self.state.lock();
                let late = short.then(|| LateRequest::Page(key.clone()));
                match self.spare_after_error(&mut state, error, spare, late) {
                    Err(_) if short => {
                        let asker = WaitBounds { began, max_age, deadline };
                        self.fetch_page_fresh(state, key.clone(), asker)
                    }
                    answer => answer,
                }
            }
            answer => answer,
        }
    }

    /// As [`CachedOrigin::fetch_page`], without expired pages.
    fn fetch_page_fresh<'a>(
        &'a self,
        mut state: parking_lot::MutexGuard<'a, MetadataState>,
        key: PageKey,
        asker: WaitBounds,
    ) -> Result<TimedPage> {
        let ttl = self.config.ttl.min(asker.max_age);
        loop {
            if let Some((at, page)) = state.pages.get(&key)
                && at.elapsed() < ttl
            {
                self.stats.metadata.cache_hits.add(1);
                return Ok((*at, Arc::clone(page)));
            }
            let Some(flight) = state.pending_pages.get(&key).map(Arc::clone) else { break };
            if let Some(answer) = self.await_request(&mut state, &flight, asker, "a listing")? {
                return answer;
            }
        }
        let flight = PendingRequest::start_now();
        state.pending_pages.insert(key.clone(), Arc::clone(&flight));
        drop(state);
        let at = Instant::now();
        let asked = RequestGuard { cached: self, done: Some(GuardedRequest::Page(key.clone(), Arc::clone(&flight))) };
        let (path, cursor, max) = &key;
        let page = self.inner.list(path, cursor.as_deref(), *max, asker.deadline).map(|page| (at, Arc::new(page)));
        let is_served = !page.as_ref().is_err_and(|error| is_unserved(&*self.inner, error, asker.deadline));
        let mut state = self.state.lock();
        if is_served {
            end_outage(&mut state.outage, &self.stats, self.inner.source_url());
        }
        complete_request(&mut state.pending_pages, &key, &flight, page.clone());
        if let Ok((_, page)) = &page {
            self.keep_page(&mut state, key, at, page);
        }
        drop(state);
        drop(asked);
        page
    }

    /// Waits for another caller's request. `None` when its answer can't be used: its caller had less time, or it was
    /// sent too long before this call. The next request can be used, so that a caller waits for at most two.
    fn await_request<T: Clone>(
        &self,
        state: &mut parking_lot::MutexGuard<'_, MetadataState>,
        flight: &SharedRequest<T>,
        asker: WaitBounds,
        what: &str,
    ) -> Result<Option<Result<T>>> {
        while flight.answer.get().is_none() {
            if self.changed.wait_until(state, asker.deadline).timed_out() {
                return Err(self.timeout_error(what));
            }
        }
        if asker.began.saturating_duration_since(flight.sent_at) > asker.max_age {
            return Ok(None);
        }
        let answer = flight.answer.get().cloned();
        let ours = answer.filter(|a| a.as_ref().map_or_else(|e| e.kind() != ErrorKind::Timeout, |_| true));
        if ours.is_some() {
            self.stats.metadata.cache_hits.add(1);
        }
        Ok(ours)
    }

    /// A lookup that serves no expired answer.
    fn lookup_fresh<'a>(
        &'a self,
        mut state: parking_lot::MutexGuard<'a, MetadataState>,
        path: &[u8],
        asker: WaitBounds,
    ) -> Result<ObjectAttr> {
        let (folder, _) = split_path(path);
        let WaitBounds { began, max_age, deadline } = asker;
        let mut counted = false;
        loop {
            if path.is_empty() {
                break;
            }
            if let Some(answer) = self.held_answer(&state, path, max_age) {
                self.stats.metadata.cache_hits.add(1);
                return answer;
            }
            if let Some(flight) = state.pending_lookups.get(path).map(Arc::clone) {
                match self.await_request(&mut state, &flight, asker, "a lookup")? {
                    Some(answer) => return answer,
                    None => continue,
                }
            }
            let now = Instant::now();
            if !state.folders.contains_key(folder) {
                state.folders.insert(folder.into(), FolderState::new(now));
            }
            let held = &mut *state;
            let Some(of) = held.folders.get_mut(folder) else { break };
            // A listing is of no use to a caller that accepts no cached answer.
            if of.listing && !max_age.is_zero() && began.elapsed() < PATIENCE {
                let until = deadline.min(began + PATIENCE);
                if self.changed.wait_until(&mut state, until).timed_out() && Instant::now() >= deadline {
                    return Err(self.timeout_error("a lookup"));
                }
                continue;
            }
            if !counted {
                counted = true;
                if now.duration_since(of.window_start) > WINDOW {
                    of.window_start = now;
                    of.lookups = 0;
                }
                of.lookups += 1;
                let large = of.too_large.is_some_and(|at| at.elapsed() < TOO_LARGE);
                let lists = of.lookups > LIST_AFTER && !of.listing && !self.config.ttl.min(max_age).is_zero();
                // A page is listed again where that takes less time than the answers count.
                let again = lists && large && 2 * of.page_time < self.config.ttl.min(max_age);
                let page = if again { find_page(&held.pages, folder, path) } else { None };
                if lists && (!large || page.is_some()) {
                    of.window_start = now;
                    of.lookups = 0;
                    of.listing = true;
                    drop(state);
                    match page {
                        Some(page) => self.list_page_again(&page, max_age, deadline),
                        None => self.list_for_lookups(folder, max_age, deadline),
                    }
                    state = self.state.lock();
                    continue;
                }
            }
            break;
        }
        let flight = PendingRequest::start_now();
        state.pending_lookups.insert(path.into(), Arc::clone(&flight));
        drop(state);
        let at = Instant::now();
        let key: PathBytes = path.into();
        let asked = RequestGuard { cached: self, done: Some(GuardedRequest::Name(key.clone(), Arc::clone(&flight))) };
        let answer = self.inner.lookup(path, deadline);
        let is_served = !answer.as_ref().is_err_and(|error| is_unserved(&*self.inner, error, deadline));
        let mut state = self.state.lock();
        complete_request(&mut state.pending_lookups, &key, &flight, answer.clone());
        if is_served && is_requested(&*self.inner, path) {
            end_outage(&mut state.outage, &self.stats, self.inner.source_url());
        }
        // Errors are not cached, but absences are.
        if answer.as_ref().map_or_else(|e| e.kind() == ErrorKind::NotFound, |_| true) {
            if !path.is_empty() || !self.config.stale_if_error.is_zero() {
                state.names.insert(key, (at, answer.clone()));
            }
            self.enforce_limit(&mut state);
        }
        drop(state);
        drop(asked);
        answer
    }

    /// Lists a page of a large directory for pending lookups, within half of the available time.
    fn list_page_again(&self, page: &PageKey, max_age: Duration, deadline: Instant) {
        let (folder, cursor, max) = page;
        let _listing = RequestGuard { cached: self, done: Some(GuardedRequest::Folder(folder.clone())) };
        let until = Instant::now() + (deadline.saturating_duration_since(Instant::now()) / 2).min(PATIENCE);
        // After a failure, the waiting lookups send their own requests and get their own errors.
        let _ = self.fetch_page(folder, cursor.as_deref(), *max, max_age, until);
    }

    /// Lists a directory for pending lookups, within half of the available time. The other half is left for the
    /// lookup itself, in case the listing does not answer it.
    fn list_for_lookups(&self, folder: &[u8], max_age: Duration, deadline: Instant) {
        let _listing = RequestGuard { cached: self, done: Some(GuardedRequest::Folder(folder.into())) };
        let forgotten = self.state.lock().early_drops;
        let began = Instant::now();
        let until = began + deadline.saturating_duration_since(began) / 2;
        let counts = self.config.ttl.min(max_age);
        let mut oldest = began;
        let mut cursor: Option<Vec<u8>> = None;
        let pages = PAGES.min((self.config.max_entries / 4).div_ceil(PAGE));
        let mut listed = 0;
        while listed < pages {
            listed += 1;
            let until = until.min(Instant::now() + PATIENCE);
            let (at, page) = match self.fetch_page(folder, cursor.as_deref(), PAGE, max_age, until) {
                Ok(page) => page,
                // An absent directory is not slow: it may be created at any time.
                Err(error) if error.kind() == ErrorKind::NotFound => return,
                // The waiting lookups send their own requests and get their own errors.
                Err(_) => break,
            };
            self.changed.notify_all();
            oldest = oldest.min(at);
            cursor = page.next.clone();
            // The first page has expired: another listing would have the same result.
            if began.elapsed() >= counts {
                break;
            }
            if cursor.is_none() {
                let whole = self.inner.lists_all(folder);
                let mut state = self.state.lock();
                // There was no room for the names: listing again soon would cost as much again.
                if state.early_drops != forgotten
                    && let Some(folder) = state.folders.get_mut(folder)
                {
                    folder.too_large = Some(Instant::now());
                }
                // Names that were dropped during the listing, or skipped by it, are not absent.
                if state.early_drops == forgotten
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
            folder.page_time = began.elapsed() / listed as u32;
        }
    }
}

/// The page that had the name of `path` when the directory was listed.
fn find_page(pages: &HashMap<PageKey, TimedPage>, folder: &[u8], path: &[u8]) -> Option<PageKey> {
    let (_, name) = split_path(path);
    let had = |page: &ListPage| page.entries.iter().any(|entry| *entry.name == *name);
    pages.iter().find(|(key, (_, page))| *key.0 == *folder && had(page)).map(|(key, _)| key.clone())
}

/// Deadline of a request in the background.
const LATE_LIMIT: Duration = Duration::from_secs(30);

/// Whether a lookup of `path` sends a request. The root of a bucket has constant attributes: its lookup proves nothing.
fn is_requested(inner: &dyn OriginStore, path: &[u8]) -> bool {
    !path.is_empty() || inner.capabilities().modes
}

/// A pending request; dropping the guard ends it, whatever the result.
struct RequestGuard<'a> {
    cached: &'a CachedOrigin,
    done: Option<GuardedRequest>,
}

enum GuardedRequest {
    Name(PathBytes, SharedRequest<ObjectAttr>),
    Page(PageKey, SharedRequest<TimedPage>),
    Folder(PathBytes),
}

/// Stores the answer of a request and removes it from the pending ones, both under one lock: a caller that finds a
/// pending request can wait for its answer. It does not change an answered request, nor another one for the same key.
fn complete_request<K: Eq + Hash, T>(
    asking: &mut HashMap<K, SharedRequest<T>>,
    key: &K,
    flight: &SharedRequest<T>,
    answer: Result<T>,
) {
    let _ = flight.answer.set(answer);
    if asking.get(key).is_some_and(|now| Arc::ptr_eq(now, flight)) {
        asking.remove(key);
    }
}

/// The answer of a cancelled request: its waiting callers send their own.
fn cancelled_lookup<T>() -> Result<T> {
    Err(Error::new(ErrorKind::Timeout, "the lookup this one was waiting for was cancelled"))
}

impl Drop for RequestGuard<'_> {
    fn drop(&mut self) {
        let mut state = self.cached.state.lock();
        match self.done.take() {
            Some(GuardedRequest::Name(path, flight)) => {
                complete_request(&mut state.pending_lookups, &path, &flight, cancelled_lookup())
            }
            Some(GuardedRequest::Page(key, flight)) => {
                complete_request(&mut state.pending_pages, &key, &flight, cancelled_lookup())
            }
            Some(GuardedRequest::Folder(path)) => {
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

impl OriginStore for CachedOrigin {
    forward_to! { inner:
        fn source_url(&self) -> &str;
        fn describe(&self) -> String;
        fn capabilities(&self) -> OriginCapabilities;
        fn check(&self, deadline: Instant) -> Result<()>;
        fn refusal(&self, deadline: Instant) -> Option<Error>;
        fn lists_all(&self, path: &[u8]) -> bool;
        fn readlink(&self, path: &[u8], deadline: Instant) -> Result<Vec<u8>>;
        fn statfs(&self, deadline: Instant) -> Result<Option<OriginCapacity>>;
    }

    fn lookup(&self, path: &[u8], deadline: Instant) -> Result<ObjectAttr> {
        self.lookup_within(path, self.config.ttl, deadline)
    }

    fn lookup_within(&self, path: &[u8], max_age: Duration, deadline: Instant) -> Result<ObjectAttr> {
        let began = Instant::now();
        let mut state = self.state.lock();
        if !path.is_empty()
            && let Some(answer) = self.held_answer(&state, path, max_age)
        {
            self.stats.metadata.cache_hits.add(1);
            return answer;
        }
        let spare = self.spare_name(&state, path);
        let late = || LateRequest::Name(path.into());
        if let Some(answer) = self.spare_in_outage(&mut state, spare.clone(), late) {
            return answer;
        }
        self.refuse_unknown(&state)?;
        let short = spare.is_some() && began + SPARE_PATIENCE < deadline;
        let until = if short { began + SPARE_PATIENCE } else { deadline };
        match self.lookup_fresh(state, path, WaitBounds { began, max_age, deadline: until }) {
            Err(error) if is_unserved(&*self.inner, &error, until) => {
                let mut state = self.state.lock();
                // A listing on the way may have brought it.
                let spare = self.spare_name(&state, path).or(spare);
                let late = short.then(late);
                match self.spare_after_error(&mut state, error, spare, late) {
                    Ok(answer) => answer,
                    Err(_) if short => self.lookup_fresh(state, path, WaitBounds { began, max_age, deadline }),
                    Err(error) => Err(error),
                }
            }
            answer => answer,
        }
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
        self.fetch_page(path, cursor, max, max_age, deadline).map(|(_, page)| ListPage::clone(&page))
    }

    /// Nothing is kept here, and an origin that does not respond is not requested while known names are served in its place.
    fn object_headers(&self, path: &[u8], deadline: Instant) -> Result<ObjectHeaders> {
        if !self.config.stale_if_error.is_zero()
            && self.state.lock().outage.as_ref().is_some_and(|outage| !outage.refused)
        {
            let message = format!("{} does not respond", self.inner.source_url());
            return Err(Error::new(ErrorKind::Unavailable, message));
        }
        self.inner.object_headers(path, deadline)
    }

    fn read(&self, object: &ObjectRef, offset: u64, sink: &mut dyn ByteSink, deadline: Instant) -> Result<()> {
        let answer = self.inner.read(object, offset, sink, deadline);
        if answer.as_ref().is_err_and(|e| e.kind() == ErrorKind::Stale) {
            self.invalidate(&object.path);
        }
        answer
    }

    fn read_many<'a>(
        &self,
        reads: &mut dyn Iterator<Item = OriginRead<'a>>,
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
}

/// Tests an origin until the outage has ended, or the names are dropped.
fn test_until_answered(origin: &dyn OriginStore, names: &Weak<Mutex<MetadataState>>, stats: &Stats) {
    loop {
        let began = Instant::now();
        let tested = origin.check(began + PROBE_LIMIT);
        let Some(names) = names.upgrade() else { return };
        let mut state = names.lock();
        let Some(outage) = &mut state.outage else { return };
        match &tested {
            Err(error) if shows_silence(origin, error, began) => outage.is_tested = true,
            Err(error) if is_unanswered(error) => {}
            _ if outage.is_tested => return end_outage(&mut state.outage, stats, origin.source_url()),
            _ => return,
        }
        drop(state);
        drop(names);
        std::thread::sleep(PROBE_PAUSE);
    }
}
