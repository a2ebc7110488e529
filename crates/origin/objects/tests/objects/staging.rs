//! Files that are written through nodes which keep new objects and upload later, as the writer sees these nodes: versions and uploads
//! have names of their own, and the request to keep an object comes with the attributes.

use crate::common::PlainReads;
use futures::FutureExt as _;
use futures::future::BoxFuture;
use parking_lot::Mutex;
use spurline_object_store::{
    AnswerProgress, AwsCredentials, CopySource, EnvironmentSource, ObjectAttributes, ObjectBackend, ObjectBody,
    ObjectWriteBackend, OriginOptions, RawBody, RawObject, RawPage, RequestFailure, STAGE_ATTRIBUTE, STAGED_ETAG,
    STAGED_UPLOAD, SharedBucket, SharedBuckets, SourceLocation, StoredObject, UploadedPart, WriteCondition,
    is_staged_upload, open_bucket,
};
use spurline_objects::{BucketWriteOptions, WritableBucket};
use spurline_origin::open;
use spurline_testkit::{ACCESS_KEY, S3Server, SECRET_KEY, pattern};
use spurline_types::{ErrorKind, STAGED_XATTR, Stats};
use spurline_volume::writes::{Caller, Change, FileIdentity, NamePath, NodePath, WritableVolume as _, WritePlace};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

const URL: &str = "s3://bucket";
type Answer<T> = Result<T, RequestFailure>;

/// What reached the nodes.
#[derive(Default)]
struct Seen {
    /// The keys of new objects, and whether these were to be staged.
    objects: Vec<(String, bool)>,
    /// Keys of hidden objects that were to be staged.
    staged_hidden: Vec<String>,
    /// The store has what was staged.
    uploaded: bool,
}

/// Nodes that send everything to the store at once and name versions as if nothing were sent.
struct Nodes {
    store: Arc<SharedBucket>,
    seen: Arc<Mutex<Seen>>,
}

impl Nodes {
    fn writer(&self) -> &dyn ObjectWriteBackend {
        self.store.backend.writes().unwrap()
    }

    /// The attributes that the store gets, and whether the object is to be staged.
    fn take(&self, key: &str, attributes: &ObjectAttributes) -> (ObjectAttributes, bool) {
        let mut stored = attributes.clone();
        let staged = stored.take_stage();
        let mut seen = self.seen.lock();
        if key.starts_with(".spurline-") {
            seen.staged_hidden.extend(staged.then(|| key.to_owned()));
        } else {
            seen.objects.push((key.to_owned(), staged));
        }
        (stored, staged)
    }

    /// An ETag of the store, as mounts see the version.
    fn shown(&self, etag: String) -> String {
        format!("{STAGED_ETAG}{}", etag.trim_matches('"'))
    }

    fn shown_object(&self, object: RawObject) -> RawObject {
        RawObject { etag: object.etag.map(|etag| self.shown(etag)), ..object }
    }
}

/// The ETag that the store has.
fn stored_etag(etag: &str) -> &str {
    etag.trim_matches('"').strip_prefix(STAGED_ETAG).unwrap_or(etag)
}

fn stored_condition(condition: &WriteCondition) -> WriteCondition {
    match condition {
        WriteCondition::Version(etag) => WriteCondition::Version(stored_etag(etag).to_owned()),
        other => other.clone(),
    }
}

fn stored_source<'a>(from: CopySource<'a>) -> CopySource<'a> {
    CopySource { etag: from.etag.map(stored_etag), ..from }
}

fn stored_upload(upload: &str) -> &str {
    upload.strip_prefix(STAGED_UPLOAD).unwrap_or(upload)
}

impl ObjectBackend for Nodes {
    fn describe(&self) -> String {
        "nodes of the tests".to_owned()
    }

    fn writes(&self) -> Option<&dyn ObjectWriteBackend> {
        Some(self)
    }

    fn list<'a>(&'a self, prefix: &'a str, token: Option<&'a str>, max: usize) -> BoxFuture<'a, Answer<RawPage>> {
        self.store.backend.list(prefix, token, max)
    }

    fn head<'a>(&'a self, key: &'a str) -> BoxFuture<'a, Answer<RawObject>> {
        async move { Ok(self.shown_object(self.store.backend.head(key).await?)) }.boxed()
    }

    fn get<'a>(&'a self, key: &'a str, from: u64, to: u64, etag: Option<&'a str>) -> BoxFuture<'a, Answer<RawBody>> {
        async move {
            let body = self.store.backend.get(key, from, to, etag.map(stored_etag)).await?;
            Ok(RawBody { etag: body.etag.map(|etag| self.shown(etag)), ..body })
        }
        .boxed()
    }
}

impl ObjectWriteBackend for Nodes {
    fn head_all<'a>(&'a self, key: &'a str) -> BoxFuture<'a, Answer<StoredObject>> {
        async move {
            let StoredObject { raw, mut attributes } = self.writer().head_all(key).await?;
            // As of an object that is not uploaded yet.
            if !self.seen.lock().uploaded {
                attributes.set_stage();
            }
            Ok(StoredObject { raw: self.shown_object(raw), attributes })
        }
        .boxed()
    }

    fn list_below<'a>(&'a self, prefix: &'a str, token: Option<&'a str>) -> BoxFuture<'a, Answer<RawPage>> {
        self.writer().list_below(prefix, token)
    }

    fn read_all<'a>(&'a self, key: &'a str) -> BoxFuture<'a, Answer<(Vec<u8>, String)>> {
        self.writer().read_all(key)
    }

    fn put<'a>(
        &'a self,
        key: &'a str,
        body: ObjectBody,
        attributes: &'a ObjectAttributes,
        condition: &'a WriteCondition,
    ) -> BoxFuture<'a, Answer<String>> {
        async move {
            let (attributes, _) = self.take(key, attributes);
            Ok(self.shown(self.writer().put(key, body, &attributes, &stored_condition(condition)).await?))
        }
        .boxed()
    }

    fn begin_upload<'a>(&'a self, key: &'a str, attributes: &'a ObjectAttributes) -> BoxFuture<'a, Answer<String>> {
        async move {
            let (attributes, staged) = self.take(key, attributes);
            let id = self.writer().begin_upload(key, &attributes).await?;
            Ok(if staged { format!("{STAGED_UPLOAD}{id}") } else { id })
        }
        .boxed()
    }

    fn upload_part<'a>(
        &'a self,
        key: &'a str,
        upload: &'a str,
        number: u32,
        body: ObjectBody,
    ) -> BoxFuture<'a, Answer<String>> {
        self.writer().upload_part(key, stored_upload(upload), number, body)
    }

    fn copy_part<'a>(
        &'a self,
        key: &'a str,
        upload: &'a str,
        number: u32,
        from: CopySource<'a>,
        range: Range<u64>,
    ) -> BoxFuture<'a, Answer<String>> {
        self.writer().copy_part(key, stored_upload(upload), number, stored_source(from), range)
    }

    fn complete<'a>(
        &'a self,
        key: &'a str,
        upload: &'a str,
        parts: &'a [UploadedPart],
        condition: &'a WriteCondition,
        progress: &'a AnswerProgress,
    ) -> BoxFuture<'a, Answer<String>> {
        async move {
            let condition = stored_condition(condition);
            let made = self.writer().complete(key, stored_upload(upload), parts, &condition, progress).await?;
            Ok(if is_staged_upload(upload) { self.shown(made) } else { made })
        }
        .boxed()
    }

    fn abort<'a>(&'a self, key: &'a str, upload: &'a str) -> BoxFuture<'a, Answer<()>> {
        self.writer().abort(key, stored_upload(upload))
    }

    fn copy<'a>(
        &'a self,
        from: CopySource<'a>,
        to: &'a str,
        attributes: Option<&'a ObjectAttributes>,
        condition: &'a WriteCondition,
        work_time: Duration,
    ) -> BoxFuture<'a, Answer<String>> {
        async move {
            let stored = attributes.map(|attributes| self.take(to, attributes).0);
            let condition = stored_condition(condition);
            let copied = self.writer().copy(stored_source(from), to, stored.as_ref(), &condition, work_time).await?;
            Ok(self.shown(copied))
        }
        .boxed()
    }

    fn delete<'a>(&'a self, key: &'a str, condition: &'a WriteCondition) -> BoxFuture<'a, Answer<()>> {
        async move { self.writer().delete(key, &stored_condition(condition)).await }.boxed()
    }
}

/// A bucket behind nodes, and the writer of a mount.
struct StagingRig {
    server: S3Server,
    seen: Arc<Mutex<Seen>>,
    bucket: Arc<WritableBucket>,
}

impl StagingRig {
    fn start(stage: bool) -> StagingRig {
        let server = S3Server::in_memory().unwrap();
        server.create_bucket("bucket");
        let config = OriginOptions {
            endpoint: Some(server.endpoint()),
            credentials: Some(AwsCredentials {
                access_key_id: ACCESS_KEY.into(),
                secret_access_key: SECRET_KEY.into(),
                session_token: None,
            }),
            env: EnvironmentSource::fixed([]),
            ..OriginOptions::default()
        };
        let location = SourceLocation::parse(URL).unwrap();
        let store = open_bucket(&location, &config, Arc::default()).unwrap();
        let seen = Arc::<Mutex<Seen>>::default();
        let nodes = Box::new(Nodes { store, seen: Arc::clone(&seen) });
        // The buckets of the mount are others than those of the nodes.
        let of_mount = OriginOptions { shared_buckets: SharedBuckets::default(), ..config.clone() };
        let stats = Arc::<Stats>::default();
        let held = of_mount.shared_buckets.open_over(&location, &of_mount, Arc::clone(&stats), nodes).unwrap();
        let reads = Arc::new(PlainReads(open(URL, &of_mount, Arc::clone(&stats)).unwrap()));
        let mut options = BucketWriteOptions::new(0, 0);
        options.object_attrs = true;
        options.stage = stage;
        let bucket = WritableBucket::open(URL, &of_mount, options, reads, Arc::default(), stats).unwrap();
        drop(held);
        StagingRig { server, seen, bucket }
    }

    fn write(&self, name: &str, bytes: &[u8]) {
        let at = NamePath { directory: root(), name: name.as_bytes() };
        let flags = (libc::O_RDWR | libc::O_CREAT | libc::O_EXCL) as u32;
        let file = self.bucket.create(at, flags, 0o644, &Caller::default()).unwrap().file;
        assert_eq!(file.write_placed(WritePlace::Offset, 0, bytes, None).unwrap(), bytes.len());
        file.sync(false).unwrap();
    }

    fn change(&self, change: &Change<'_>) -> spurline_types::Result<()> {
        self.bucket.change(change, &Caller::default()).map(drop)
    }

    fn staged_mark(&self, name: &str) -> spurline_types::Result<Vec<u8>> {
        self.bucket.get_xattr(path(name), STAGED_XATTR, &Caller::default())
    }

    fn take_objects(&self) -> Vec<(String, bool)> {
        std::mem::take(&mut self.seen.lock().objects)
    }
}

fn root() -> NodePath<'static> {
    path("")
}

fn path(name: &str) -> NodePath<'_> {
    NodePath { path: name.as_bytes(), expected: None::<FileIdentity> }
}

fn is_absent(answer: spurline_types::Result<Vec<u8>>) -> bool {
    answer.is_err_and(|error| error.kind() == ErrorKind::Io(libc::ENODATA))
}

#[test]
fn new_objects_carry_the_request_to_be_staged_and_hidden_ones_do_not() {
    let rig = StagingRig::start(true);
    rig.write("small", b"bytes");
    let large = pattern(9 << 20, 1);
    rig.write("large", &large);
    let new_name = NamePath { directory: root(), name: b"renamed" };
    let old_name = NamePath { directory: root(), name: b"small" };
    rig.change(&Change::Rename { from: old_name, to: new_name, flags: 0 }).unwrap();
    let objects = rig.take_objects();
    assert_eq!(objects, [("small".to_owned(), true), ("large".to_owned(), true), ("renamed".to_owned(), true)]);
    assert_eq!(rig.seen.lock().staged_hidden, Vec::<String>::new());
    assert!(rig.server.bytes("bucket", "large").unwrap() == large);
    assert_eq!(rig.server.keys("bucket"), ["large", "renamed"]);
    // What a store has kept of the request is no metadata of the file.
    let headers =
        rig.bucket.get_xattr(path("renamed"), spurline_types::OBJECT_HEADERS_XATTR, &Caller::default()).unwrap();
    assert!(!String::from_utf8(headers).unwrap().contains(STAGE_ATTRIBUTE));
}

#[test]
fn an_upload_that_nodes_keep_has_no_record_in_the_store() {
    for stage in [true, false] {
        let rig = StagingRig::start(stage);
        let at = NamePath { directory: root(), name: b"large" };
        let flags = (libc::O_RDWR | libc::O_CREAT | libc::O_EXCL) as u32;
        let file = rig.bucket.create(at, flags, 0o644, &Caller::default()).unwrap().file;
        file.write_placed(WritePlace::Offset, 0, &pattern(17 << 20, 1), None).unwrap();
        let until = std::time::Instant::now() + Duration::from_secs(20);
        while rig.server.open_uploads() == 0 || !stage && rig.server.keys("bucket").is_empty() {
            assert!(std::time::Instant::now() < until);
            std::thread::sleep(Duration::from_millis(10));
        }
        file.sync(false).unwrap();
        let hidden = rig.seen.lock().staged_hidden.len();
        assert_eq!((hidden, rig.take_objects()), (0, vec![("large".to_owned(), stage)]));
        assert_eq!((rig.server.keys("bucket"), rig.server.open_uploads()), (vec!["large".to_owned()], 0));
    }
}

#[test]
fn a_file_shows_whether_the_store_has_its_version() {
    let rig = StagingRig::start(true);
    rig.write("file", b"bytes");
    assert_eq!(rig.staged_mark("file").unwrap(), b"1");
    assert!(is_absent(rig.staged_mark("")), "a folder is not staged");
    assert_eq!(
        rig.bucket.list_xattr(path("file"), &Caller::default()).unwrap(),
        b"",
        "copies would have the attribute"
    );
    // The attribute is no attribute of the user.
    let set = Change::SetXattr { of: path("file"), name: STAGED_XATTR, value: b"1", flags: 0 };
    assert_eq!(rig.change(&set).unwrap_err().kind(), ErrorKind::Unsupported);
    let remove = Change::RemoveXattr { of: path("file"), name: STAGED_XATTR };
    assert_eq!(rig.change(&remove).unwrap_err().kind(), ErrorKind::Unsupported);
    rig.seen.lock().uploaded = true;
    assert!(is_absent(rig.staged_mark("file")));
}
