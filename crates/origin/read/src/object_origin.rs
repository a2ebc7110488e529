//! An object store as an origin: folders derived from keys, retries, deadlines, resumed transfers. It deliberately
//! knows no HTTP and no particular store; a backend makes single attempts.

use crate::listing::ListCursor;
use crate::validated::{validate_path, validate_range};
use crate::{OriginCapabilities, OriginCapacity, OriginRead, OriginStore};
use futures::StreamExt as _;
use futures::future::{BoxFuture, Either, select};
use futures::stream::FuturesUnordered;
use spurline_object_store::{
    HIDDEN_NAME, ListingEtags, ObjectBackend, RawBody, RawObject, RawPage, RequestFailure, RetryHint, RetryState,
    SharedBucket, SourceLocation, StoredObject, bare_etag, bucket_unavailable, without_mark,
};
use spurline_sys::show_path;
use spurline_types::{
    ByteSink, DirEntry, Error, ErrorKind, FileKind, ListPage, ObjectAttr, ObjectHeaders, ObjectRef, Result, Version,
};
use std::collections::HashSet;
use std::future::Future;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};
use tokio::time::timeout;

/// Most keys of one listing, on every known store.
const PAGE: usize = 1000;
/// Attempts of the check at start: a wrong endpoint must show at once.
const CHECK_ATTEMPTS: u32 = 3;
/// Concurrent attempts of one request without an answer.
const MAX_PARALLEL_ATTEMPTS: usize = 3;
/// Time before the deadline that is left for reporting the failure; less than any pause, so that no attempt starts in
/// it.
const REPORT_MARGIN: Duration = Duration::from_millis(10);

/// A read's destination and how much of it is filled.
struct ReadDestination<'a> {
    /// Offset in the object of the sink's first byte.
    offset: u64,
    sink: &'a mut dyn ByteSink,
    len: usize,
    landed: usize,
}

/// What a path leads to, with the attributes that are stored with it.
pub enum StoredNode {
    /// A folder, and its marker if there is one.
    Folder(Option<StoredObject>),
    /// A file.
    Object(StoredObject),
}

/// A bucket seen as folders and files.
pub struct ObjectOrigin {
    source: SourceLocation,
    /// The source's prefix with a trailing slash, or empty.
    root: String,
    bucket: Arc<SharedBucket>,
    /// Files have the etags of heads as versions, whatever listings have.
    versions_of_heads: bool,
}

impl ObjectOrigin {
    /// The folders and files below `source`, whose bucket this is.
    pub fn new(source: SourceLocation, bucket: Arc<SharedBucket>) -> Self {
        let root = if source.prefix().is_empty() { String::new() } else { format!("{}/", source.prefix()) };
        ObjectOrigin { source, root, bucket, versions_of_heads: false }
    }

    /// The same for changes, whose conditions require etags. An entry of a listing may then have another version than a lookup
    /// ([`ObjectOrigin::has_own_versions`]).
    pub fn for_changes(self) -> Self {
        ObjectOrigin { versions_of_heads: true, ..self }
    }

    /// Whether the version of an entry of a listing is not that of a lookup.
    pub fn has_own_versions(&self, entry: &ObjectAttr) -> bool {
        self.versions_of_heads && is_weak(&entry.version) && self.bucket.listed_etags.state() == ListingEtags::Missing
    }

    /// The source's prefix with a trailing slash, or empty.
    pub fn root(&self) -> &str {
        &self.root
    }

    async fn with_deadline<T>(&self, deadline: Instant, future: impl Future<Output = Result<T>>) -> Result<T> {
        match tokio::time::timeout_at(deadline.into(), future).await {
            Ok(answer) => answer,
            Err(_) => Err(Error::new(
                ErrorKind::Timeout,
                format!("{} did not answer in time; check the endpoint, or raise --origin-timeout", self.source.url()),
            )),
        }
    }

    /// One read with its counters.
    async fn counted_read(
        &self,
        backend: &dyn ObjectBackend,
        read: &mut OriginRead<'_>,
        deadline: Instant,
    ) -> Result<()> {
        let OriginRead { object, offset, sink } = read;
        let len = sink.spare().len();
        validate_range(object, *offset, len)?;
        if len == 0 {
            return Ok(());
        }
        let started = Instant::now();
        self.bucket.stats.object.in_flight.add(1);
        let answer = self.with_deadline(deadline, self.read_range(backend, object, *offset, *sink, deadline)).await;
        self.bucket.stats.object.in_flight.sub(1);
        self.bucket.stats.object.get_ops.add(1);
        self.bucket.stats.object.get_us.add_us(started.elapsed());
        if let Err(error) = &answer {
            self.bucket.stats.object.errors.add(1);
            self.bucket.note_failure(&self.root, error);
        }
        answer.map_err(|e| e.context(format!("reading '{}' at {offset}", show_path(&object.path))))
    }

    /// A metadata request with its counters; its refusal makes the credentials be checked.
    fn counted_query<T>(
        &self,
        deadline: Instant,
        query: impl AsyncFnOnce(&dyn ObjectBackend) -> Result<T>,
    ) -> Result<T> {
        let answer = self.counted_request(deadline, query);
        answer.inspect_err(|error| self.bucket.note_failure(&self.root, error))
    }

    /// A metadata request with its counters.
    fn counted_request<T>(
        &self,
        deadline: Instant,
        query: impl AsyncFnOnce(&dyn ObjectBackend) -> Result<T>,
    ) -> Result<T> {
        let started = Instant::now();
        self.bucket.stats.object.in_flight.add(1);
        let answer = self.bucket.run_transfer(
            async |backend: &dyn ObjectBackend| {
                let permitted = async {
                    let _place = self.bucket.metadata_permits.acquire().await;
                    query(backend).await
                };
                self.with_deadline(deadline, permitted).await
            },
            is_answered,
        );
        let answer = answer.unwrap_or_else(|| Err(closed_error()));
        self.bucket.stats.object.in_flight.sub(1);
        self.bucket.stats.metadata.ops.add(1);
        self.bucket.stats.metadata.lat_us.add_us(started.elapsed());
        if answer.as_ref().is_err_and(|e| e.kind() != ErrorKind::NotFound) {
            self.bucket.stats.metadata.errors.add(1);
            self.bucket.stats.object.errors.add(1);
        }
        answer
    }

    /// Repeats a request until it is answered, can't succeed, or is out of time.
    async fn retry_until_answered<'a, T>(
        &self,
        mut retry: RetryState<'_>,
        mut send: impl FnMut() -> BoxFuture<'a, Result<T, RequestFailure>>,
    ) -> Result<T> {
        loop {
            let answer = self.first_answer(&mut retry, || {
                self.bucket.stats.object.list_ops.add(1);
                send()
            });
            match answer.await {
                Ok(answer) => return Ok(answer),
                Err(failure) => retry.pause(failure).await?,
            }
        }
    }

    /// The first good answer of the attempts that begin before the deadline.
    ///
    /// A request without an answer for a while may have gone to a server that no longer exists, so it is repeated.
    /// The first attempt continues beside it, because a slow store (an archive) would start anew each time. Repeated
    /// attempts take no permit of `max_downloads`: when all permits wait for a dead server, none would be left.
    async fn first_answer<'a, T>(
        &self,
        retry: &mut RetryState<'_>,
        mut send: impl FnMut() -> BoxFuture<'a, Result<T, RequestFailure>>,
    ) -> Result<T, RequestFailure> {
        // It ends before the caller's deadline, so that the failure can still be reported.
        let limit = self.bucket.config.timeout.min(retry.time_left().saturating_sub(REPORT_MARGIN));
        let end = Instant::now() + limit;
        let patience = self.bucket.config.resend_after();
        let mut under_way = FuturesUnordered::new();
        under_way.push(send());
        let mut sent = 1;
        let mut failed = None;
        let mut next = retry.allows(sent).then(|| Instant::now() + patience);
        loop {
            let wake = next.filter(|_| under_way.len() < MAX_PARALLEL_ATTEMPTS).map_or(end, |next| next.min(end));
            match tokio::time::timeout_at(wake.into(), under_way.next()).await {
                // It is repeated while the other attempts continue.
                Ok(Some(Err(failure))) if failure.advice != RetryHint::Never && !under_way.is_empty() => {
                    failed = Some(match retry.next_pause(failure.clone()) {
                        Ok(pause) => {
                            next = Some(Instant::now() + pause);
                            // The requested pause has been made by the time this is returned.
                            RequestFailure { advice: RetryHint::AfterPause, ..failure }
                        }
                        Err(error) => {
                            next = None;
                            RequestFailure { error, advice: RetryHint::Never }
                        }
                    });
                }
                Ok(Some(answer)) => return answer,
                Err(_) if wake < end => {
                    tracing::debug!(server = %self.bucket.backend.describe(), "repeating a request that has no answer yet");
                    self.bucket.stats.object.retries.add(1);
                    under_way.push(send());
                    sent += 1;
                    next = retry.allows(sent).then(|| Instant::now() + patience);
                }
                Ok(None) | Err(_) => return Err(failed.unwrap_or_else(|| self.no_answer_failure(limit))),
            }
        }
    }

    fn new_retry(&self, deadline: Instant) -> RetryState<'_> {
        RetryState::new(deadline, &self.bucket.stats)
    }

    fn no_answer_failure(&self, limit: Duration) -> RequestFailure {
        RequestFailure::transient(
            ErrorKind::Timeout,
            format!(
                "no answer from {} within {:.1} s; check the endpoint, its load and the network between",
                self.bucket.backend.describe(),
                limit.as_secs_f64()
            ),
        )
    }

    /// The key of `path`; `None` when it is not UTF-8.
    fn object_key(&self, path: &[u8]) -> Option<String> {
        Some(format!("{}{}", self.root, std::str::from_utf8(path).ok()?))
    }

    async fn head_raw(&self, backend: &dyn ObjectBackend, key: &str, deadline: Instant) -> Result<RawObject> {
        self.retry_until_answered(self.new_retry(deadline), || backend.head(key)).await
    }

    /// The page after `cursor`, without names of earlier pages.
    async fn next_page(
        &self,
        backend: &dyn ObjectBackend,
        prefix: &str,
        cursor: &mut ListCursor,
        max: usize,
        deadline: Instant,
    ) -> Result<RawPage> {
        let token = cursor.token.as_deref();
        let page = self.retry_until_answered(self.new_retry(deadline), || backend.list(prefix, token, max)).await;
        let mut page = page.map_err(bucket_unavailable)?;
        cursor.earlier.add_page(prefix, &mut page).map_err(|fault| {
            let message = format!(
                "the listing of '{prefix}' by {} is wrong: {fault}; names would be missing. It is a fault of that server, \
                 or of a proxy before it that answers from a cache",
                self.bucket.backend.describe()
            );
            Error::new(ErrorKind::Io(libc::EIO), message)
        })?;
        cursor.token.clone_from(&page.next);
        Ok(page)
    }

    /// The next page with a name, or the last page. Its length is `max`, or more if empty pages come before.
    async fn next_filled_page(
        &self,
        backend: &dyn ObjectBackend,
        prefix: &str,
        cursor: &mut ListCursor,
        max: usize,
        deadline: Instant,
    ) -> Result<RawPage> {
        let mut page = self.next_page(backend, prefix, cursor, max, deadline).await?;
        let mut empty_pages = 0;
        // Before a request of its own can report that it has no answer in time.
        let until = deadline.checked_sub(2 * REPORT_MARGIN).unwrap_or(deadline);
        while page.is_empty() && page.next.is_some() {
            empty_pages += 1;
            let next = self.next_page(backend, prefix, cursor, PAGE, deadline);
            page = tokio::time::timeout_at(until.into(), next).await.unwrap_or_else(|_| {
                let message = format!(
                    "the listing of '{prefix}' by {} had {empty_pages} pages without a new name in a row and is not at its \
                     end; if the bucket holds as many deleted versions, raise --origin-timeout",
                    self.bucket.backend.describe()
                );
                Err(Error::new(ErrorKind::Timeout, message))
            })?;
        }
        Ok(page)
    }

    fn note_times(&self, folder: &str, objects: &[RawObject]) {
        self.bucket.folder_times.note(folder, objects.iter().map(|object| (object.key.as_str(), object.mtime)));
    }

    /// The time of the folder at `path`, if an answer had one.
    pub fn folder_time(&self, path: &[u8]) -> Option<SystemTime> {
        let key = self.object_key(path)?;
        self.bucket.folder_times.find(&if path.is_empty() { key } else { format!("{key}/") })
    }

    /// The attributes of the folder with this key, which ends with a slash.
    fn folder_attr_of(&self, folder: &str) -> ObjectAttr {
        let mtime = self.bucket.folder_times.find(folder).unwrap_or(SystemTime::UNIX_EPOCH);
        ObjectAttr { mtime, ..folder_attr() }
    }

    /// Whether any key starts with `prefix`.
    async fn any_below(&self, backend: &dyn ObjectBackend, prefix: &str, deadline: Instant) -> Result<bool> {
        let page = self.next_filled_page(backend, prefix, &mut ListCursor::default(), 1, deadline).await?;
        self.note_times(prefix, &page.objects);
        Ok(!page.is_empty())
    }

    async fn lookup_key(&self, backend: &dyn ObjectBackend, key: &str, deadline: Instant) -> Result<ObjectAttr> {
        if key.ends_with('/') {
            return Ok(file_attr(&self.head_raw(backend, key, deadline).await?));
        }
        let object = self.find_object(backend, key, deadline, self.head_raw(backend, key, deadline)).await?;
        match object {
            Some(object) if self.versions_of_heads => Ok(file_attr(&object)),
            Some(object) => self.attr_as_listed(backend, object, deadline).await,
            None => Ok(self.folder_attr_of(&format!("{key}/"))),
        }
    }

    /// The attributes of an object that a head has shown, with the version that a listing gives it.
    async fn attr_as_listed(
        &self,
        backend: &dyn ObjectBackend,
        object: RawObject,
        deadline: Instant,
    ) -> Result<ObjectAttr> {
        if object.etag.is_some() && self.bucket.listed_etags.state() == ListingEtags::Unknown {
            let prefix = object.key.as_str();
            let listed = self.retry_until_answered(self.new_retry(deadline), || backend.list(prefix, None, 1)).await?;
            match listed.objects.first().filter(|listed| listed.key == object.key) {
                Some(RawObject { etag: None, .. }) => self.bucket.listed_etags.note_missing(&backend.describe()),
                // Nothing is known of a store that does not list the object now.
                _ => self.bucket.listed_etags.note_as_in_heads(),
            }
        }
        Ok(self.listed_attr(object))
    }

    /// The attributes of an object, once it is known what listings have.
    fn listed_attr(&self, object: RawObject) -> ObjectAttr {
        match self.bucket.listed_etags.state() {
            ListingEtags::Missing => file_attr(&RawObject { etag: None, ..object }),
            ListingEtags::Unknown | ListingEtags::AsInHeads => file_attr(&object),
        }
    }

    /// Compares an object of a page without an etag with the head: a store may leave out the etags that it has.
    async fn note_listed_etags(
        &self,
        backend: &dyn ObjectBackend,
        objects: &[RawObject],
        deadline: Instant,
    ) -> Result<()> {
        if self.bucket.listed_etags.state() == ListingEtags::Missing {
            return Ok(());
        }
        let Some(without) = objects.iter().find(|object| object.etag.is_none()) else {
            if !objects.is_empty() {
                self.bucket.listed_etags.note_as_in_heads();
            }
            return Ok(());
        };
        match self.head_raw(backend, &without.key, deadline).await {
            Ok(head) if head.etag.is_some() => self.bucket.listed_etags.note_missing(&backend.describe()),
            Ok(_) => self.bucket.listed_etags.note_as_in_heads(),
            // Removed since the listing.
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// What `path` leads to, with the attributes that are stored with it.
    ///
    /// # Errors
    /// As [`OriginStore::lookup`]; `ReadOnly` for a store whose attributes can't be read.
    pub fn lookup_stored(&self, path: &[u8], deadline: Instant) -> Result<StoredNode> {
        validate_path(path)?;
        let key = self.object_key(path).ok_or_else(|| not_utf8(path))?;
        self.counted_query(deadline, async |backend| {
            if !path.is_empty()
                && let Some(object) =
                    self.find_object(backend, &key, deadline, self.head_stored(backend, &key, deadline)).await?
            {
                return Ok(StoredNode::Object(object));
            }
            // The root is the prefix itself, and without a prefix there is no name for its marker.
            let marker = if path.is_empty() { key } else { format!("{key}/") };
            if marker.is_empty() {
                return Ok(StoredNode::Folder(None));
            }
            match self.head_stored(backend, &marker, deadline).await {
                Ok(object) => Ok(StoredNode::Folder(Some(object))),
                Err(error) if error.kind() == ErrorKind::NotFound => Ok(StoredNode::Folder(None)),
                Err(error) => Err(error),
            }
        })
    }

    async fn head_stored(&self, backend: &dyn ObjectBackend, key: &str, deadline: Instant) -> Result<StoredObject> {
        let Some(backend) = backend.writes() else {
            return Err(Error::new(ErrorKind::ReadOnly, "the attributes of this store's objects can't be read"));
        };
        self.retry_until_answered(self.new_retry(deadline), || backend.head_all(key)).await
    }

    /// The object `key`, which `head` requests; `None` for a folder of this name.
    async fn find_object<T>(
        &self,
        backend: &dyn ObjectBackend,
        key: &str,
        deadline: Instant,
        head: impl Future<Output = Result<T>>,
    ) -> Result<Option<T>> {
        let folder = format!("{key}/");
        let list = std::pin::pin!(self.any_below(backend, &folder, deadline));
        let head = std::pin::pin!(head);
        let (is_folder, head) = match select(list, head).await {
            // Folders have the name whatever the head returns.
            Either::Left((Ok(true), _)) => return Ok(None),
            Either::Left((is_folder, head)) => (is_folder, head.await),
            Either::Right((head, list)) => (list.await, head),
        };
        match (is_folder?, head) {
            (true, _) => Ok(None),
            (false, Ok(object)) => Ok(Some(object)),
            (false, Err(error)) if error.kind() == ErrorKind::NotFound => {
                Err(Error::new(ErrorKind::NotFound, format!("no object '{key}' and none below '{folder}'")))
            }
            (false, Err(error)) => Err(error),
        }
    }

    async fn list_page(
        &self,
        backend: &dyn ObjectBackend,
        path: &[u8],
        cursor: Option<&[u8]>,
        max: usize,
        deadline: Instant,
    ) -> Result<ListPage> {
        let key = self.object_key(path).ok_or_else(|| not_utf8(path))?;
        let prefix = if path.is_empty() { key } else { format!("{key}/") };
        let max = max.clamp(1, PAGE);
        let mut next = cursor.map(ListCursor::parse).transpose()?.unwrap_or_default();
        let raw = if cursor.is_none() || next.token.is_some() {
            self.next_filled_page(backend, &prefix, &mut next, max, deadline).await?
        } else {
            // Only objects held back are left.
            RawPage::default()
        };
        if cursor.is_none() && !path.is_empty() && raw.next.is_none() && raw.is_empty() {
            // Nothing below: either a file, or an absent name.
            let kind = match self.head_raw(backend, prefix.trim_end_matches('/'), deadline).await {
                Ok(_) => ErrorKind::NotADirectory,
                Err(error) => error.kind(),
            };
            return Err(Error::new(kind, format!("there is no folder '{}'", show_path(path))));
        }

        self.note_listed_etags(backend, &raw.objects, deadline).await?;
        let mut skipped = 0;
        self.note_times(&prefix, &raw.objects);
        let marker = raw.objects.iter().find(|object| object.key == prefix && !path.is_empty());
        let mut page = ListPage {
            entries: Vec::with_capacity(raw.objects.len() + raw.prefixes.len()),
            next: None,
            marker: marker.map(|marker| self.listed_attr(marker.clone())),
        };
        let mut folders = HashSet::with_capacity(raw.prefixes.len());
        for folder in &raw.prefixes {
            match folder.strip_prefix(prefix.as_str()).and_then(|n| n.strip_suffix('/')).filter(|n| is_name(n)) {
                Some(name) => {
                    folders.insert(name);
                    page.entries.push(DirEntry { name: name.as_bytes().to_vec(), attr: self.folder_attr_of(folder) });
                }
                None => skipped += 1,
            }
        }
        // A page of a store that returns more names than requested is passed on as a whole: the cursor has a limited size.
        let room = max.max(raw.objects.len() + raw.prefixes.len()).saturating_sub(page.entries.len());
        let mut objects = std::mem::take(&mut next.held_back);
        let held_back = objects.len();
        for object in raw.objects {
            if objects[..held_back].iter().all(|held| held.key != object.key) {
                objects.push(object);
            }
        }
        let last_object = objects.iter().map(|o| o.key.as_str()).max();
        let last = last_object.max(raw.prefixes.iter().map(String::as_str).max()).unwrap_or_default();
        let mut files = Vec::with_capacity(objects.len());
        for object in &objects {
            // The folder's own marker is not an entry of it.
            let Some(name) = object.key.strip_prefix(prefix.as_str()).filter(|n| !n.is_empty()) else { continue };
            if path.is_empty() && name.starts_with(HIDDEN_NAME) {
                continue;
            }
            if !is_name(name) || folders.contains(name) {
                skipped += 1;
                continue;
            }
            // Keys such as `a-b` sort between `a` and `a/`, so the folder may come on a later page. The object waits for it,
            // which costs no request.
            let undecided =
                next.token.is_some() && last.starts_with(&object.key) && *last < *format!("{}/", object.key);
            if undecided || files.len() >= room {
                next.held_back.push(object.clone());
            } else {
                files.push((name, object));
            }
        }
        page.entries.extend(
            files.into_iter().map(|(name, object)| DirEntry {
                name: name.as_bytes().to_vec(),
                attr: self.listed_attr(object.clone()),
            }),
        );
        page.next = next.to_bytes();
        self.bucket.stats.metadata.skipped_names.add(skipped);
        Ok(page)
    }

    /// One GET of the bytes that are still missing.
    async fn transfer_rest(
        &self,
        backend: &dyn ObjectBackend,
        key: &str,
        object: &ObjectRef,
        landing: &mut ReadDestination<'_>,
        retry: &mut RetryState<'_>,
    ) -> Result<(), RequestFailure> {
        let ReadDestination { offset, sink, len, landed } = landing;
        let len = *len;
        let etag = expected_etag(&object.version);
        let from = *offset + *landed as u64;
        let to = *offset + len as u64;
        let body = self.first_answer(retry, || backend.get(key, from, to, etag)).await?;
        verify_answer(object, from..to, &body, || self.bucket.backend.describe())?;
        let RawBody { mut stream, .. } = body;
        while *landed < len {
            let stall = self.bucket.config.stall_timeout;
            let chunk = match timeout(stall, stream.next()).await {
                Ok(Some(chunk)) => chunk?,
                Ok(None) => {
                    let message =
                        format!("{} ended a transfer {} bytes early", self.bucket.backend.describe(), len - *landed);
                    return Err(RequestFailure::transient(ErrorKind::Unavailable, message));
                }
                Err(_) => {
                    let message = format!(
                        "{} sent no byte for {:.1} s in the middle of a transfer",
                        self.bucket.backend.describe(),
                        stall.as_secs_f64()
                    );
                    return Err(RequestFailure::transient(ErrorKind::Timeout, message));
                }
            };
            let n = chunk.len().min(len - *landed);
            sink.spare()[..n].copy_from_slice(&chunk[..n]);
            sink.commit(n);
            *landed += n;
            self.bucket.stats.object.get_bytes.add(n as u64);
        }
        Ok(())
    }

    async fn read_range(
        &self,
        backend: &dyn ObjectBackend,
        object: &ObjectRef,
        offset: u64,
        sink: &mut dyn ByteSink,
        deadline: Instant,
    ) -> Result<()> {
        let key = self.object_key(&object.path).ok_or_else(|| not_utf8(&object.path))?;
        let _place = self.bucket.read_permits.acquire().await;
        let mut retry = self.new_retry(deadline);
        let len = sink.spare().len();
        let mut landing = ReadDestination { offset, sink, len, landed: 0 };
        loop {
            let before = landing.landed;
            let failure = match self.transfer_rest(backend, &key, object, &mut landing, &mut retry).await {
                Ok(()) => return Ok(()),
                Err(failure) => failure,
            };
            if landing.landed > before {
                retry.note_progress();
            }
            retry.pause(failure).await.map_err(|error| match error.kind() {
                // The object was deleted after its lookup.
                ErrorKind::NotFound => Error::new(
                    ErrorKind::Stale,
                    format!("'{}' is gone; version {} was requested", show_path(&object.path), object.version),
                ),
                _ => error,
            })?;
        }
    }
}

impl OriginStore for ObjectOrigin {
    fn source_url(&self) -> &str {
        self.source.url()
    }

    fn describe(&self) -> String {
        format!("{} at {}", self.source.url(), self.bucket.backend.describe())
    }

    fn capabilities(&self) -> OriginCapabilities {
        OriginCapabilities { symlinks: false, byte_names: false, modes: false, etags: true, concurrent_reads: true }
    }

    fn check(&self, deadline: Instant) -> Result<()> {
        let answer = self.counted_request(deadline, async |backend| {
            let retry = RetryState::new(deadline, &self.bucket.stats).at_most(CHECK_ATTEMPTS);
            self.retry_until_answered(retry, || backend.list(&self.root, None, 1)).await
        });
        answer.map(|_| ()).map_err(|e| e.context(self.source.url()))
    }

    fn refusal(&self, deadline: Instant) -> Option<Error> {
        self.bucket.await_refusal(deadline)
    }

    fn lookup(&self, path: &[u8], deadline: Instant) -> Result<ObjectAttr> {
        if path.is_empty() {
            return Ok(self.folder_attr_of(&self.root));
        }
        validate_path(path.strip_suffix(b"/").unwrap_or(path))?;
        let key = self.object_key(path).ok_or_else(|| not_utf8(path))?;
        self.counted_query(deadline, async |backend| self.lookup_key(backend, &key, deadline).await)
    }

    fn list(&self, path: &[u8], cursor: Option<&[u8]>, max: usize, deadline: Instant) -> Result<ListPage> {
        validate_path(path)?;
        self.counted_query(deadline, async |backend| self.list_page(backend, path, cursor, max, deadline).await)
    }

    fn readlink(&self, path: &[u8], _deadline: Instant) -> Result<Vec<u8>> {
        Err(Error::new(ErrorKind::Unsupported, format!("'{}' is not a link: object stores have none", show_path(path))))
    }

    fn object_headers(&self, path: &[u8], deadline: Instant) -> Result<ObjectHeaders> {
        validate_path(path)?;
        // The root of a bucket is no object.
        if path.is_empty() {
            return Ok(ObjectHeaders::default());
        }
        let key = self.object_key(path).ok_or_else(|| not_utf8(path))?;
        let stored = self.counted_query(deadline, async |backend| {
            match self.head_stored(backend, &key, deadline).await {
                // The headers of a folder are those of its marker.
                Err(error) if error.kind() == ErrorKind::NotFound => {
                    self.head_stored(backend, &format!("{key}/"), deadline).await
                }
                stored => stored,
            }
        });
        match stored {
            Ok(stored) => Ok(without_mark(stored.attributes).headers()),
            // This kind of store does not show them.
            Err(error) if error.kind() == ErrorKind::ReadOnly => Ok(ObjectHeaders::default()),
            Err(error) => Err(error),
        }
    }

    fn read(&self, object: &ObjectRef, offset: u64, sink: &mut dyn ByteSink, deadline: Instant) -> Result<()> {
        let mut read = OriginRead { object, offset, sink };
        self.bucket
            .run_transfer(async |backend| self.counted_read(backend, &mut read, deadline).await, Result::is_ok)
            .unwrap_or_else(|| Err(closed_error()))
    }

    fn read_many<'a>(
        &self,
        reads: &mut dyn Iterator<Item = OriginRead<'a>>,
        at_once: usize,
        time: Duration,
    ) -> Vec<Result<()>> {
        let mut answers: Vec<(usize, Result<()>)> = Vec::new();
        let mut numbered = reads.enumerate();
        let work = async |backend: &dyn ObjectBackend| {
            // In any order, so that a slow read does not delay others.
            let mut ended = futures::stream::iter(numbered.by_ref().map(async |(number, mut read)| {
                (number, self.counted_read(backend, &mut read, Instant::now() + time).await)
            }))
            .buffer_unordered(at_once.max(1));
            while let Some(answer) = ended.next().await {
                answers.push(answer);
            }
            answers.iter().all(|(_, answer)| answer.is_ok())
        };
        if self.bucket.run_transfer(work, |well| *well).is_none() {
            return numbered.map(|_| Err(closed_error())).collect();
        }
        answers.sort_unstable_by_key(|(number, _)| *number);
        answers.into_iter().map(|(_, answer)| answer).collect()
    }

    fn statfs(&self, _deadline: Instant) -> Result<Option<OriginCapacity>> {
        Ok(None)
    }
}

/// Whether the store has answered, so that its connection can be used again.
fn is_answered<T>(answer: &Result<T>) -> bool {
    answer.as_ref().err().is_none_or(|error| error.kind() == ErrorKind::NotFound)
}

fn closed_error() -> Error {
    Error::new(ErrorKind::Unavailable, "the object store is closed")
}

/// A version made without an etag, for stores that have none, starts with this character; no etag does.
const WEAK: char = '~';

/// The attributes of an object that this process has made.
pub fn object_attr(size: u64, mtime: SystemTime, etag: String) -> ObjectAttr {
    file_attr(&RawObject { key: String::new(), size, mtime, etag: Some(etag) })
}

/// The attributes of an object as a file.
pub fn file_attr(object: &RawObject) -> ObjectAttr {
    let version = match &object.etag {
        Some(etag) => Version::new(bare_etag(etag)),
        None => weak_version(object.mtime, object.size),
    };
    ObjectAttr {
        kind: FileKind::File,
        size: object.size,
        mtime: object.mtime,
        mode: 0o444,
        version,
        etag: object.etag.clone(),
    }
}

fn weak_version(mtime: SystemTime, size: u64) -> Version {
    let seconds = mtime.duration_since(SystemTime::UNIX_EPOCH).map_or(0, |d| d.as_secs());
    Version::new(&format!("{WEAK}{seconds:x}-{size:x}"))
}

fn is_weak(version: &Version) -> bool {
    version.as_str().starts_with(WEAK)
}

fn expected_etag(version: &Version) -> Option<&str> {
    Some(version.as_str()).filter(|_| !is_weak(version))
}

/// The answer must state the version, the total length and the range that were requested, whatever its status and whether
/// or not the server checked `If-Match`. An answer that leaves one of them out comes from something between client and
/// store; `place` names the server for messages.
fn verify_answer(
    object: &ObjectRef,
    wanted: Range<u64>,
    body: &RawBody,
    place: impl Fn() -> String,
) -> Result<(), RequestFailure> {
    let unidentified = || RequestFailure::unidentified_answer(&place());
    let same = match (expected_etag(&object.version), &body.etag, body.mtime) {
        (Some(wanted), Some(got), _) => bare_etag(got) == wanted,
        (None, _, Some(mtime)) => weak_version(mtime, object.size) == object.version,
        // A store without times either: its heads count as the epoch.
        (None, _, None) if body.partial => weak_version(SystemTime::UNIX_EPOCH, object.size) == object.version,
        _ => return Err(unidentified()),
    };
    // An object of a store with times needs one in the answer.
    if !same && body.etag.is_none() && body.mtime.is_none() {
        return Err(unidentified());
    }
    if same && !body.partial && expected_etag(&object.version).is_some() && body.total != Some(object.size) {
        return Err(RequestFailure::unpacked_answer(&place(), object.size, body.total));
    }
    let (Some(total), Some(range)) = (body.total, &body.range) else { return Err(unidentified()) };
    if !same || total != object.size {
        let now = body.etag.as_deref().unwrap_or("another version");
        let message = format!("the object is now {now} of {total} bytes, not {} of {}", object.version, object.size);
        return Err(RequestFailure::fatal(ErrorKind::Stale, message));
    }
    if *range == wanted || (!body.partial && wanted.start == 0 && range.start == 0) {
        return Ok(());
    }
    let got = shown_range(range);
    let wanted = shown_range(&wanted);
    if body.partial {
        let message = format!("{} answered a read of the bytes {wanted} with the bytes {got}", place());
        return Err(RequestFailure::transient(ErrorKind::Unavailable, message));
    }
    let message = format!("{} does not serve ranges: it answered a read of the bytes {wanted} with {got}", place());
    Err(RequestFailure::fatal(ErrorKind::Unsupported, message))
}

/// A range as HTTP writes it.
fn shown_range(range: &Range<u64>) -> String {
    format!("{}-{}", range.start, range.end.saturating_sub(1))
}

/// The attributes of a folder whose time is not known.
pub fn folder_attr() -> ObjectAttr {
    ObjectAttr {
        kind: FileKind::Directory,
        size: 0,
        mtime: SystemTime::UNIX_EPOCH,
        mode: 0o555,
        version: Version::new(""),
        etag: None,
    }
}

fn is_name(name: &str) -> bool {
    !matches!(name, "" | "." | "..") && !name.contains(['/', '\0'])
}

fn not_utf8(path: &[u8]) -> Error {
    Error::new(ErrorKind::NotFound, format!("'{}' is not UTF-8, and keys are", show_path(path)))
}
