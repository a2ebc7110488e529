//! Requests of a mount to the store of a bucket, sent by nodes over TCP: every kind of request, refusals, lost nodes, lost answers
//! and flipped bits.

use crate::rig::{BLOCK, OldHandshake, connect_through};
use crate::{O_EXCL, O_RDWR, create, dir, name, pattern, rename, root};
use bytes::Bytes;
use futures::StreamExt as _;
use spurline_cache::CacheContext;
use spurline_client::{GroupVolume, RemoteStore};
use spurline_mem::{BufferPool, MemTier};
use spurline_net_sim::{FaultPlan, FaultRates, FaultyConnector};
use spurline_net_tcp::{ServerConfig, TcpServer};
use spurline_node::CacheNode;
use spurline_object_store::{
    AnswerProgress, AwsCredentials, CopySource, ObjectAttributes, ObjectBackend as _, ObjectBody,
    ObjectWriteBackend as _, OriginOptions, RetryHint, SourceLocation, SourceRequests, UploadedPart, WriteCondition,
};
use spurline_objects::{BucketWriteOptions, WritableBucket};
use spurline_proto::{MAX_VERSION, MIN_STORE_VERSION, NodeRequest, StoreCall, StoreRequest, StoreSettings};
use spurline_testkit::{ACCESS_KEY, S3Server, SECRET_KEY};
use spurline_transport::{CallAnswer, CallError, Channel, ConnectionEndpoints, Connector, TransportKind};
use spurline_types::errno::{EAGAIN, EPERM};
use spurline_types::{Error, ErrorKind, Member, Result, Stats};
use spurline_volume::Volume as _;
use spurline_volume::delayed::DelayedWrites as _;
use spurline_volume::locks::LAST_BYTE;
use spurline_volume::path_locks::PathLocks as _;
use spurline_volume::writes::{Change, FileLock, LockFamily, LockKind, LockRange, WritableFile, WritableVolume};
use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

const BUCKET: &str = "bucket";
const REQUEST_TIME: Duration = Duration::from_secs(30);

/// A node of a bucket.
struct BucketNode {
    at: SocketAddr,
    url: String,
    origin: OriginOptions,
    takes_changes: bool,
    server: Option<(TcpServer, Arc<CacheNode>)>,
}

impl BucketNode {
    fn start(store: &S3Server, url: &str, takes_changes: bool) -> BucketNode {
        let credentials = AwsCredentials {
            access_key_id: ACCESS_KEY.to_owned(),
            secret_access_key: SECRET_KEY.to_owned(),
            session_token: None,
        };
        let origin = OriginOptions {
            endpoint: Some(store.endpoint()),
            credentials: Some(credentials),
            ..OriginOptions::default()
        };
        let at = "127.0.0.1:0".parse().unwrap();
        let mut node = BucketNode { at, url: url.to_owned(), origin, takes_changes, server: None };
        node.start_process();
        node.at = node.server.as_ref().unwrap().0.local_addrs()[0];
        node
    }

    fn start_process(&mut self) {
        let stats = Arc::new(Stats::default());
        let pool = BufferPool::new(64 * BLOCK, BLOCK as usize).unwrap();
        let tier = MemTier::new(Arc::clone(&pool));
        let shared = CacheContext::new(tier, None, BLOCK, 16, REQUEST_TIME, false, Arc::clone(&stats));
        let options = OriginOptions { within: vec![self.url.clone()], ..self.origin.clone() };
        let of_reads = options.clone();
        let counted = Arc::clone(&stats);
        let open = move |source: &str| spurline_origin::open(source, &of_reads, Arc::clone(&counted));
        let node = CacheNode::new("n", shared, vec![self.url.clone()], Box::new(open));
        let counted = Arc::clone(&stats);
        node.accept_store_requests(
            self.takes_changes.then(StoreSettings::default),
            Box::new(move |source| SourceRequests::open(source, &options, Arc::clone(&counted))),
        );
        if self.takes_changes {
            node.accept_writes(Box::new(|_| Err(Error::new(ErrorKind::Unsupported, "the mounts write the bucket"))));
        }
        let config = ServerConfig { payload_pool: Some(pool), ..ServerConfig::default() };
        let server = TcpServer::bind(&[self.at], Arc::clone(&node) as _, config, stats).unwrap();
        self.server = Some((server, node));
    }

    /// Ends all connections of the process, with all that it knows.
    fn kill(&mut self) {
        drop(self.server.take());
    }
}

fn run<T>(requests: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(requests)
}

fn bucket() -> S3Server {
    let store = S3Server::in_memory().unwrap();
    store.create_bucket(BUCKET);
    store
}

fn open_store(url: &str, nodes: &[&BucketNode]) -> Result<RemoteStore> {
    let addresses: Vec<_> = nodes.iter().map(|node| node.at).collect();
    connect_through(url, &addresses, |tcp, _| tcp)?.open_store(REQUEST_TIME)
}

#[test]
fn a_mount_learns_whether_the_nodes_keep_staged_files() {
    let server = bucket();
    let url = "s3://bucket/folder";
    let node = BucketNode::start(&server, url, true);
    let stages = || open_store(url, &[&node]).unwrap().settings().stages;
    assert!(!stages());
    let cache = &node.server.as_ref().unwrap().1;
    cache.set_stages(true);
    assert!(stages());
    cache.set_stages(false);
    assert!(!stages());
}

#[test]
fn a_node_sends_every_request_to_the_store() {
    let server = bucket();
    let url = "s3://bucket/folder";
    let node = BucketNode::start(&server, url, true);
    let store = open_store(url, &[&node]).unwrap();
    assert!(store.describe().contains(&server.endpoint()), "{}", store.describe());
    let mut attributes = ObjectAttributes::with_content_type("text/plain");
    attributes.set("mark", "value".to_owned());
    run(async {
        // In one frame, and in pieces.
        for len in [0, 10, 5_000_000] {
            let bytes = pattern(len, len);
            let body = ObjectBody::new(bytes.clone().into());
            let etag = store.put("folder/object", body, &attributes, &WriteCondition::None).await.unwrap();
            let found = store.head_all("folder/object").await.unwrap();
            assert_eq!((found.raw.size, found.attributes), (len as u64, attributes.clone()));
            assert_eq!(store.read_all("folder/object").await.unwrap(), (bytes, etag));
        }
        let taken = ObjectBody::new(Bytes::from_static(b"other"));
        let taken = store.put("folder/object", taken, &attributes, &WriteCondition::Absent).await.unwrap_err();
        assert_eq!(taken.error.kind(), ErrorKind::Stale, "{}", taken.error);
        // An upload of several parts, one of which is copied.
        let upload = store.begin_upload("folder/large", &attributes).await.unwrap();
        let first = pattern(9 << 20, 1);
        let from = CopySource { key: "folder/object", etag: None };
        let sent = store.upload_part("folder/large", &upload, 1, ObjectBody::new(first.clone().into())).await.unwrap();
        let copied = store.copy_part("folder/large", &upload, 2, from, 100..2_000_000).await.unwrap();
        let parts = [UploadedPart { number: 1, etag: sent }, UploadedPart { number: 2, etag: copied }];
        let progress = AnswerProgress::default();
        let condition = WriteCondition::Absent;
        let etag = store.complete("folder/large", &upload, &parts, &condition, &progress).await.unwrap();
        let wanted = [&first[..], &pattern(5_000_000, 5_000_000)[100..2_000_000]].concat();
        assert!(server.bytes(BUCKET, "folder/large").unwrap() == wanted);
        let second = store.complete("folder/large", &upload, &parts, &condition, &progress).await.unwrap_err();
        assert_eq!(second.error.kind(), ErrorKind::NotFound, "{}", second.error);
        let left = store.begin_upload("folder/left", &attributes).await.unwrap();
        store.abort("folder/left", &left).await.unwrap();
        assert_eq!(server.open_uploads(), 0);
        // Copies, listings, removals.
        let from = CopySource { key: "folder/large", etag: Some(&etag) };
        store.copy(from, "folder/below/copy", None, &WriteCondition::Absent, Duration::ZERO).await.unwrap();
        assert!(server.bytes(BUCKET, "folder/below/copy").unwrap() == wanted);
        let page = store.list("folder/", None, 1000).await.unwrap();
        let keys: Vec<_> = page.objects.iter().map(|object| object.key.as_str()).collect();
        assert_eq!((keys, page.prefixes), (vec!["folder/large", "folder/object"], vec!["folder/below/".to_owned()]));
        let all = store.list_below("folder/", None).await.unwrap();
        assert_eq!((all.objects.len(), all.prefixes.len()), (3, 0));
        let of_another = WriteCondition::Version("another".to_owned());
        let stale = store.delete("folder/large", &of_another).await.unwrap_err();
        assert_eq!(stale.error.kind(), ErrorKind::Stale, "{}", stale.error);
        store.delete("folder/large", &WriteCondition::Version(etag)).await.unwrap();
        assert_eq!(server.keys(BUCKET), ["folder/below/copy", "folder/object"]);
    });
}

#[test]
fn requests_outside_the_source_and_to_nodes_without_changes_are_refused() {
    let server = bucket();
    server.put(BUCKET, "secret", b"bytes");
    let url = "s3://bucket/folder";
    let node = BucketNode::start(&server, url, true);
    let store = open_store(url, &[&node]).unwrap();
    run(async {
        for key in ["secret", "folder", "folder/../secret"] {
            let refused = store.head_all(key).await.unwrap_err().error;
            assert_eq!(refused.kind(), ErrorKind::PermissionDenied, "{refused}");
            assert!(refused.message().contains("is not below s3://bucket/folder"), "{refused}");
        }
        let from = CopySource { key: "secret", etag: None };
        let refused =
            store.copy(from, "folder/copy", None, &WriteCondition::None, Duration::ZERO).await.unwrap_err().error;
        assert_eq!(refused.kind(), ErrorKind::PermissionDenied, "{refused}");
    });
    let reader = BucketNode::start(&server, url, false);
    let refused = open_store(url, &[&reader]).err().unwrap();
    assert_eq!(refused.kind(), ErrorKind::ReadOnly);
    assert!(refused.message().contains("start it with --writable"), "{refused}");
    // Another node takes the changes.
    assert!(open_store(url, &[&reader, &node]).is_ok());
    let paths = connect_through(url, &[reader.at, node.at], |tcp, _| tcp).unwrap().open_path_locks(None).unwrap();
    for number in 0..20 {
        paths.reserve(format!("new-{number}").as_bytes()).unwrap();
    }
    let old = |offered| {
        let is_old = Arc::new(AtomicBool::new(true));
        let wrap = move |inner, _: &Member| -> Arc<dyn Connector> {
            Arc::new(OldHandshake { inner, offered: MAX_VERSION, found: offered, is_old: Arc::clone(&is_old) })
        };
        connect_through(url, &[node.at], wrap).unwrap().open_store(REQUEST_TIME)
    };
    assert!(old(MIN_STORE_VERSION).is_ok());
    let refused = old(MIN_STORE_VERSION - 1).err().unwrap();
    assert_eq!(refused.kind(), ErrorKind::Unsupported);
    assert!(refused.message().contains("the node's release is older"), "{refused}");
}

#[test]
fn a_node_with_another_store_gets_no_request() {
    let servers = [bucket(), bucket()];
    let nodes = [0, 1].map(|number: usize| BucketNode::start(&servers[number], "s3://bucket", true));
    let store = open_store("s3://bucket", &[&nodes[0], &nodes[1]]).unwrap();
    let attributes = ObjectAttributes::default();
    run(async {
        for number in 0..10 {
            let key = format!("key-{number}");
            let body = ObjectBody::new(Bytes::from_static(b"bytes"));
            store.put(&key, body, &attributes, &WriteCondition::Absent).await.unwrap();
        }
    });
    let mut counts = [0, 1].map(|number: usize| servers[number].keys(BUCKET).len());
    counts.sort_unstable();
    assert_eq!(counts, [0, 10]);
    assert!(servers.iter().all(|server| server.open_uploads() == 0));
}

/// Flips a bit in the bytes of some requests.
struct FlippingConnector {
    inner: Arc<dyn Connector>,
    flips: Arc<BitFlips>,
}

#[derive(Default)]
struct BitFlips {
    requests: AtomicUsize,
    flipped: AtomicUsize,
}

impl BitFlips {
    /// Whether this request is one of those.
    fn draw(&self) -> bool {
        let is_flipped = self.requests.fetch_add(1, Ordering::Relaxed) % 29 == 3;
        self.flipped.fetch_add(usize::from(is_flipped), Ordering::Relaxed);
        is_flipped
    }
}

impl Connector for FlippingConnector {
    fn connect(&self, deadline: Instant) -> Result<Box<dyn Channel>> {
        let inner = self.inner.connect(deadline)?;
        Ok(Box::new(FlippingChannel { inner, flips: Arc::clone(&self.flips) }))
    }
    fn kind(&self) -> TransportKind {
        self.inner.kind()
    }
    fn peer(&self) -> &str {
        self.inner.peer()
    }
}

struct FlippingChannel {
    inner: Box<dyn Channel>,
    flips: Arc<BitFlips>,
}

impl Channel for FlippingChannel {
    fn call(
        &mut self,
        request: &NodeRequest<'_>,
        body: &mut Vec<u8>,
        dst: &mut [u8],
        progress: &mut dyn FnMut(usize),
        deadline: Instant,
    ) -> Result<CallAnswer, CallError> {
        let mut bytes = request.payload().to_vec();
        let has_content = match request {
            NodeRequest::Store(StoreRequest { call, .. }) => {
                !bytes.is_empty() && (call.body().is_some() || matches!(call, StoreCall::Piece { .. }))
            }
            _ => false,
        };
        if has_content && self.flips.draw() {
            let at = bytes.len() / 2;
            bytes[at] ^= 4;
            let flipped = request.with_payload(&bytes).unwrap();
            return self.inner.call(&flipped, body, dst, progress, deadline);
        }
        self.inner.call(request, body, dst, progress, deadline)
    }
    fn endpoints(&self) -> &ConnectionEndpoints {
        self.inner.endpoints()
    }
    fn looks_alive(&mut self) -> bool {
        self.inner.looks_alive()
    }
}

/// The writer of a mount over the store behind nodes.
fn open_writer(url: &str, volume: &Arc<GroupVolume>) -> Arc<WritableBucket> {
    let origin = OriginOptions { timeout: REQUEST_TIME, ..OriginOptions::default() };
    let stats = Arc::new(Stats::default());
    let store = volume.open_store(REQUEST_TIME).unwrap();
    let location = SourceLocation::parse(url).unwrap();
    let held = origin.shared_buckets.open_over(&location, &origin, Arc::clone(&stats), Box::new(store)).unwrap();
    let mut options = BucketWriteOptions::new(0, 0);
    options.fills_cache = false;
    // For two parts, and less than a third.
    options.staging_max = 20 << 20;
    let reads = Arc::clone(volume) as _;
    let writer = WritableBucket::open(url, &origin, options, reads, Arc::default(), stats).unwrap();
    drop(held);
    writer
}

#[test]
fn a_bucket_is_written_whole_while_nodes_are_lost_and_bits_are_flipped() {
    let server = bucket();
    let url = "s3://bucket/folder";
    let mut nodes: Vec<BucketNode> = (0..3).map(|_| BucketNode::start(&server, url, true)).collect();
    let addresses: Vec<_> = nodes.iter().map(|node| node.at).collect();
    let flips = Arc::<BitFlips>::default();
    let plan = Arc::new(FaultPlan::new(7, FaultRates::default()));
    let drawn_flips = Arc::clone(&flips);
    let drawn_faults = Arc::clone(&plan);
    let volume = connect_through(url, &addresses, move |tcp, _| {
        let flipping = FlippingConnector { inner: tcp, flips: Arc::clone(&drawn_flips) };
        Arc::new(FaultyConnector::new(Arc::new(flipping), Arc::clone(&drawn_faults)))
    });
    let volume = volume.unwrap();
    let writer = open_writer(url, &volume);
    plan.set_rates(FaultRates { drop: 10, cut: 15, ..FaultRates::default() });
    let sizes = [0, 1000, 20 << 20, 60_000, 9 << 20, 5 << 20, 17 << 20, 300, 26 << 20, 70_000];
    let (begun, begins) = mpsc::channel();
    std::thread::scope(|scope| {
        let writer = &writer;
        scope.spawn(move || {
            for (number, size) in sizes.into_iter().enumerate() {
                begun.send(()).unwrap();
                let path = format!("file-{number}");
                let file = create(&**writer, &path, 0).unwrap_or_else(|e| panic!("{path}: {e}"));
                for (piece, bytes) in pattern(size, number).chunks(1 << 20).enumerate() {
                    file.write_at((piece as u64) << 20, bytes, None).unwrap_or_else(|e| panic!("{path}: {e}"));
                }
                file.flush().unwrap_or_else(|e| panic!("{path}: {e}"));
                if number % 3 == 2 {
                    let to = format!("renamed-{number}");
                    let from = name(b"", path.as_bytes());
                    let change = Change::Rename { from, to: name(b"", to.as_bytes()), flags: 0 };
                    writer.change(&change, &root()).unwrap_or_else(|e| panic!("{path}: {e}"));
                }
            }
        });
        // One node is away at any time.
        for (number, ()) in begins.into_iter().enumerate() {
            nodes[(number + 2) % 3].kill();
            if number > 0 {
                nodes[(number + 1) % 3].start_process();
            }
        }
    });
    plan.set_rates(FaultRates::default());
    assert!(writer.unsent_files().is_empty());
    drop(writer);
    for (number, size) in sizes.into_iter().enumerate() {
        let key = if number % 3 == 2 { format!("folder/renamed-{number}") } else { format!("folder/file-{number}") };
        assert!(server.bytes(BUCKET, &key).unwrap() == pattern(size, number), "{key}");
    }
    assert_eq!(server.keys(BUCKET).len(), sizes.len(), "{:?}", server.keys(BUCKET));
    assert!(flips.flipped.load(Ordering::Relaxed) > 1);
    // Read by another mount, through the nodes.
    let mut back = vec![0; 1000];
    let attr = volume.lookup(b"file-1").unwrap();
    let object = spurline_types::ObjectRef::new(url, b"file-1", attr.version, attr.size);
    volume.read(&object, 0, &mut back).unwrap();
    assert_eq!(attr.size, 1000);
}

#[test]
fn the_end_of_an_open_file_leaves_the_locks_of_other_files() {
    let server = bucket();
    let url = "s3://bucket/folder";
    let node = BucketNode::start(&server, url, true);
    let open_mount = || {
        let volume = connect_through(url, &[node.at], |tcp, _| tcp).unwrap();
        let writer = open_writer(url, &volume);
        writer.share_paths(volume.open_path_locks(None).unwrap());
        writer
    };
    let mount = open_mount();
    let other_mount = open_mount();
    let range = LockRange { start: 0, end: LAST_BYTE };
    // A process has one number in all of its files, and RELEASE arrives after its next requests.
    let lock = |kind| FileLock { family: LockFamily::Posix, owner: 1, range, kind };
    let set = |file: &dyn WritableFile, kind| loop {
        match file.set_lock(&lock(kind), &root()) {
            // The node has just started.
            Err(error) if error.kind() == ErrorKind::Throttled => std::thread::sleep(Duration::from_millis(50)),
            set => return set,
        }
    };
    let first = create(&*mount, "counter", 0).unwrap();
    set(&*first, LockKind::Write).unwrap();
    set(&*first, LockKind::Unlock).unwrap();
    let second = create(&*mount, "counter", 0).unwrap();
    set(&*second, LockKind::Write).unwrap();
    drop(first);
    let others = create(&*other_mount, "counter", 0).unwrap();
    assert_eq!(set(&*others, LockKind::Write).unwrap_err().kind(), ErrorKind::Io(EAGAIN));
    // The end of the file that has the lock releases it.
    drop(second);
    set(&*others, LockKind::Write).unwrap();
}

#[test]
fn an_open_file_stays_readable_and_writable_without_its_name() {
    let server = bucket();
    let url = "s3://bucket/folder";
    let nodes = [0, 1].map(|_| BucketNode::start(&server, url, true));
    let volume = connect_through(url, &[nodes[0].at, nodes[1].at], |tcp, _| tcp).unwrap();
    let writer = open_writer(url, &volume);
    // In no cache; the last one is longer than local space.
    for (number, size) in [1, 300_000, 9 << 20, 30 << 20].into_iter().enumerate() {
        let wanted = pattern(size, number);
        let old = format!("old-{number}");
        server.put(BUCKET, &format!("folder/{old}"), &wanted);
        for is_written in [false, true] {
            let flags = if is_written { O_RDWR } else { 0 };
            writer.lookup(name(b"", old.as_bytes()), &root()).unwrap();
            let file = writer.open(dir(old.as_bytes()), flags, &root()).unwrap();
            if is_written {
                file.write_at(0, b"w", None).unwrap();
            }
            if number == 1 {
                create(&*writer, "new", 0).unwrap().flush().unwrap();
                rename(&*writer, "new", &old).unwrap();
            } else {
                writer.change(&Change::Unlink { at: name(b"", old.as_bytes()) }, &root()).unwrap();
            }
            let mut found = vec![0; size + 5];
            let mut filled = 0;
            while filled < size {
                filled += file.read_at(filled as u64, &mut found[filled..]).unwrap();
            }
            let first = if is_written { b'w' } else { wanted[0] };
            assert!((found[0], &found[1..size]) == (first, &wanted[1..]), "{old}");
            if is_written {
                file.write_at(size as u64 / 2, b"later", None).unwrap();
                let read = file.read_at(size as u64 / 2, &mut found[..5]).unwrap();
                assert_eq!(&found[..read], b"later");
                file.flush().unwrap();
            }
            drop(file);
            let left = server.bytes(BUCKET, &format!("folder/{old}"));
            assert_eq!(left.map(|bytes| bytes.len()), (number == 1).then_some(0), "{old}");
            server.put(BUCKET, &format!("folder/{old}"), &wanted);
        }
    }
    drop(writer);
    assert!(server.keys(BUCKET).iter().all(|key| key.starts_with("folder/old-")), "{:?}", server.keys(BUCKET));
    assert_eq!(server.open_uploads(), 0);
}

#[test]
fn a_node_without_changes_answers_reads_while_the_others_are_away() {
    let server = bucket();
    server.put(BUCKET, "object", b"bytes");
    let url = "s3://bucket";
    let reader = BucketNode::start(&server, url, false);
    let mut node = BucketNode::start(&server, url, true);
    let store = open_store(url, &[&reader, &node]).unwrap();
    let put = |key: &str| {
        let body = ObjectBody::new(Bytes::from_static(b"bytes"));
        run(async { store.put(key, body, &ObjectAttributes::default(), &WriteCondition::None).await })
    };
    for number in 0..10 {
        put(&format!("key-{number}")).unwrap();
    }
    let begun = server.writes();
    node.kill();
    run(async {
        assert_eq!(store.head("object").await.unwrap().size, 5);
        assert_eq!(store.list("", None, 1000).await.unwrap().objects.len(), 11);
        let mut read = store.get("object", 0, 5, None).await.unwrap();
        assert_eq!(&read.stream.next().await.unwrap().unwrap()[..], b"bytes");
    });
    let lost = put("lost").unwrap_err();
    assert!(lost.error.message().contains("no node that takes changes can be reached"), "{}", lost.error);
    assert_ne!(lost.advice, RetryHint::Never);
    assert_eq!(server.writes(), begun);
    node.start_process();
    let until = Instant::now() + REQUEST_TIME;
    while let Err(failure) = put("again") {
        assert!(Instant::now() < until, "{}", failure.error);
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn names_of_the_mounts_own_objects_are_refused() {
    let server = bucket();
    server.put(BUCKET, "folder/.spurline-part-old", b"part");
    let url = "s3://bucket/folder";
    let node = BucketNode::start(&server, url, true);
    let volume = connect_through(url, &[node.at], |tcp, _| tcp).unwrap();
    let writer = open_writer(url, &volume);
    create(&*writer, "file", 0).unwrap().flush().unwrap();
    let hidden = name(b"", b".spurline-part-new");
    let whole = writer.whole_files().unwrap();
    let refused = [
        create(&*writer, ".spurline-upload-new", O_EXCL).map(drop),
        create(&*writer, ".spurline-x/file", 0).map(drop),
        writer.change(&Change::Mkdir { at: hidden, mode: 0o755, implied: false }, &root()).map(drop),
        writer.change(&Change::Rename { from: name(b"", b"file"), to: hidden, flags: 0 }, &root()).map(drop),
        whole.begin_file(b".spurline-rename-new", 0o644, &root()).map(drop),
    ];
    for outcome in refused {
        assert_eq!(outcome.unwrap_err().kind(), ErrorKind::Io(EPERM));
    }
    let mut found = [0; 4];
    let file = writer.open(dir(b".spurline-part-old"), 0, &root()).unwrap();
    assert_eq!(file.read_at(0, &mut found).unwrap(), 4);
    assert_eq!(&found, b"part");
    create(&*writer, "folder/.spurline-part-new", 0).unwrap().flush().unwrap();
    drop((file, writer));
    let keys = ["folder/.spurline-part-old", "folder/file", "folder/folder/.spurline-part-new"];
    assert_eq!(server.keys(BUCKET), keys);
}
