//! S3 as an origin: the conformance suite on embedded servers and an independent one, and its failures.

use crate::common;
use common::{Fixture, conformance, list_all, object, pattern, read, read_until, soon};
use spurline_object_store::{AwsCredentials, EnvironmentSource, OriginOptions};
use spurline_origin::{OriginRead, OriginStore, open};
use spurline_testkit::{ACCESS_KEY, ChaosProxy, ProxyFault, S3Server, SECRET_KEY};
use spurline_types::{ErrorKind, FileKind, SliceSink, Stats};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;

fn config(endpoint: &str) -> OriginOptions {
    OriginOptions {
        endpoint: Some(endpoint.into()),
        credentials: Some(AwsCredentials {
            access_key_id: ACCESS_KEY.into(),
            secret_access_key: SECRET_KEY.into(),
            session_token: None,
        }),
        env: EnvironmentSource::fixed([]),
        ..OriginOptions::default()
    }
}

fn open_with(url: &str, config: &OriginOptions) -> (Arc<dyn OriginStore>, Arc<Stats>) {
    let stats = Arc::new(Stats::default());
    (open(url, config, Arc::clone(&stats)).unwrap(), stats)
}

struct Memory(S3Server);

impl Fixture for Memory {
    fn put(&self, path: &str, bytes: &[u8]) {
        self.0.put("bucket", &format!("some/prefix/{path}"), bytes);
    }
    fn remove(&self, path: &str) {
        self.0.remove("bucket", &format!("some/prefix/{path}"));
    }
    fn folder(&self, path: &str) {
        self.put(&format!("{path}/"), b"");
    }
    fn any_character(&self) -> bool {
        true
    }
}

struct Folder(PathBuf);

impl Fixture for Folder {
    fn put(&self, path: &str, bytes: &[u8]) {
        let path = self.0.join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        // A new inode, as an object store's put is: never the old object with new bytes in it.
        let _ = std::fs::remove_file(&path);
        std::fs::write(path, bytes).unwrap();
    }
    fn remove(&self, path: &str) {
        std::fs::remove_file(self.0.join(path)).unwrap();
    }
    fn folder(&self, path: &str) {
        std::fs::create_dir_all(self.0.join(path)).unwrap();
    }
    fn any_character(&self) -> bool {
        true
    }
}

/// A server in memory with one bucket, a proxy before it, and a store that goes through the proxy.
struct Rig {
    server: S3Server,
    proxy: ChaosProxy,
    store: Arc<dyn OriginStore>,
    stats: Arc<Stats>,
}

fn rig_with(change: impl FnOnce(&mut OriginOptions)) -> Rig {
    let server = S3Server::in_memory().unwrap();
    server.create_bucket("bucket");
    let proxy = ChaosProxy::start(server.address()).unwrap();
    let mut config = config(&proxy.endpoint());
    // Long enough for a slow machine's answers: each is requested once.
    config.stall_timeout = Duration::from_secs(2);
    config.timeout = Duration::from_secs(20);
    change(&mut config);
    let (store, stats) = open_with("s3://bucket", &config);
    Rig { server, proxy, store, stats }
}

fn rig() -> Rig {
    rig_with(|_| {})
}

fn after(seconds: u64) -> Instant {
    Instant::now() + Duration::from_secs(seconds)
}

#[test]
fn keeps_the_common_rules_in_memory() {
    let server = S3Server::in_memory().unwrap();
    server.create_bucket("bucket");
    let (store, stats) = open_with("s3://bucket/some/prefix/", &config(&server.endpoint()));
    conformance(&*store, &stats, &Memory(server));
}

#[test]
fn keeps_the_common_rules_on_a_directory() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("bucket")).unwrap();
    let server = S3Server::start(dir.path()).unwrap();
    let (store, stats) = open_with("s3://bucket/p", &config(&server.endpoint()));
    conformance(&*store, &stats, &Folder(dir.path().join("bucket/p")));
}

#[test]
fn google_protocol_keeps_most_of_them() {
    // Google's XML interface speaks S3's listing and reads; without credentials the two do not differ here.
    let server = S3Server::in_memory_open().unwrap();
    server.create_bucket("bucket");
    server.put("bucket", "d/f", &pattern(100_000, 1));
    server.put("bucket", "d/g h%", b"x");
    server.put("bucket", "d/empty/", b"");
    let config = OriginOptions {
        endpoint: Some(server.endpoint()),
        anonymous: true,
        env: EnvironmentSource::fixed([]),
        ..OriginOptions::default()
    };
    let (store, _) = open_with("gs://bucket", &config);
    store.check(soon()).unwrap();
    let (found, _) = object(&*store, b"d/f");
    assert!(read(&*store, &found, 5, 99_000).unwrap() == pattern(100_000, 1)[5..99_005]);
    let names: Vec<_> = list_all(&*store, b"d", 10).into_iter().map(|e| (e.name, e.attr.kind)).collect();
    assert_eq!(names.len(), 3);
    assert!(names.contains(&(b"g h%".to_vec(), FileKind::File)));
    assert!(names.contains(&(b"empty".to_vec(), FileKind::Directory)));
    assert!(list_all(&*store, b"d/empty", 10).is_empty());
    server.put("bucket", "d/f", &pattern(100_000, 2));
    assert_eq!(read(&*store, &found, 0, 10).unwrap_err().kind(), ErrorKind::Stale);
    assert_eq!(store.lookup(b"d/no", soon()).unwrap_err().kind(), ErrorKind::NotFound);
    let (missing, _) = open_with("gs://missing", &config);
    assert_eq!(missing.check(soon()).unwrap_err().kind(), ErrorKind::NotFound);
    assert_eq!(missing.list(b"", None, 10, soon()).unwrap_err().kind(), ErrorKind::Unavailable);
}

/// An independent S3 server in front of a directory.
struct Versity(Child);

impl Drop for Versity {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Puts through the server itself, which keeps etags beside the files.
struct VersityFolder {
    endpoint: String,
    runtime: tokio::runtime::Runtime,
    store: object_store::aws::AmazonS3,
}

impl VersityFolder {
    fn new(endpoint: String) -> Self {
        let store = object_store::aws::AmazonS3Builder::new()
            .with_endpoint(&endpoint)
            .with_bucket_name("bucket")
            .with_access_key_id(ACCESS_KEY)
            .with_secret_access_key(SECRET_KEY)
            .with_region("us-east-1")
            .with_allow_http(true)
            .build()
            .unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        VersityFolder { endpoint, runtime, store }
    }
}

impl Fixture for VersityFolder {
    fn put(&self, path: &str, bytes: &[u8]) {
        use object_store::ObjectStoreExt as _;
        let path = object_store::path::Path::parse(format!("p/{path}")).unwrap();
        self.runtime.block_on(self.store.put(&path, bytes.to_vec().into())).unwrap_or_else(|e| panic!("{path}: {e}"));
    }
    fn remove(&self, path: &str) {
        use object_store::ObjectStoreExt as _;
        self.runtime
            .block_on(self.store.delete(&object_store::path::Path::parse(format!("p/{path}")).unwrap()))
            .unwrap();
    }
    fn folder(&self, path: &str) {
        // The library can't put a key that ends with a slash, but its signer and client can.
        use object_store::aws::{AwsAuthorizer, AwsCredential};
        use object_store::client::{HttpConnector as _, HttpRequest, HttpRequestBody, ReqwestConnector};
        let mut request = HttpRequest::new(HttpRequestBody::empty());
        *request.method_mut() = http::Method::PUT;
        *request.uri_mut() = format!("{}/bucket/p/{path}/", self.endpoint).parse().unwrap();
        request.headers_mut().insert(http::header::CONTENT_LENGTH, 0.into());
        let (key_id, secret_key) = (ACCESS_KEY.into(), SECRET_KEY.into());
        let credential = AwsCredential { key_id, secret_key, token: None };
        AwsAuthorizer::new(&credential, "s3", "us-east-1").try_authorize(&mut request, None).unwrap();
        let options = object_store::ClientOptions::new().with_allow_http(true);
        let client = ReqwestConnector::default().connect(&options).unwrap();
        let answer = self.runtime.block_on(client.execute(request)).unwrap();
        assert!(answer.status().is_success(), "{}", answer.status());
    }
    fn any_character(&self) -> bool {
        false
    }
    fn many(&self) -> usize {
        1050
    }
}

#[test]
fn a_folder_has_the_name_of_an_object_beside_it() {
    let rig = rig();
    let put = |key: &str| rig.server.put("bucket", key, key.as_bytes());
    for key in ["a", "a/b", "a-1", "a-2", "a.x", "c", "c/", "d//e", "d/./f", "d/../g", "d/ok", "//x", "e/"] {
        put(key);
    }
    for max in [1, 2, 3, 1000] {
        let before = rig.stats.metadata.skipped_names.get();
        let mut names: Vec<_> = list_all(&*rig.store, b"", max)
            .into_iter()
            .map(|e| (String::from_utf8(e.name).unwrap(), e.attr.kind == FileKind::Directory))
            .collect();
        names.sort();
        let expected =
            [("a", true), ("a-1", false), ("a-2", false), ("a.x", false), ("c", true), ("d", true), ("e", true)];
        let expected: Vec<_> = expected.map(|(n, d)| (n.to_owned(), d)).into();
        assert_eq!(names, expected, "with pages of {max}");
        // `a`, `c` and the prefix `/`.
        assert_eq!(rig.stats.metadata.skipped_names.get() - before, 3, "with pages of {max}");
    }
    assert_eq!(rig.store.lookup(b"a", soon()).unwrap().kind, FileKind::Directory);
    assert_eq!(rig.store.lookup(b"c", soon()).unwrap().kind, FileKind::Directory);
    let names: Vec<_> = list_all(&*rig.store, b"d", 1000).into_iter().map(|e| e.name).collect();
    assert_eq!(names, [b"ok".to_vec()]);
    let (inner, _) = object(&*rig.store, b"a/b");
    assert_eq!(read(&*rig.store, &inner, 0, 3).unwrap(), b"a/b");
    assert_eq!(rig.store.lookup(b"\xff", soon()).unwrap_err().kind(), ErrorKind::NotFound);
}

#[test]
fn a_store_lists_in_any_order() {
    let rig = rig();
    let object = |key: &str| format!("<Contents><Key>{key}</Key><ETag>e</ETag><Size>1</Size></Contents>");
    let prefix = "<CommonPrefixes><Prefix>d/a/</Prefix></CommonPrefixes>";
    let keys = ["d/z", "d/b", "d/a-b", "d/a.b", "d/a0"].map(object).concat();
    let page = format!("<ListBucketResult><IsTruncated>false</IsTruncated>{keys}{prefix}</ListBucketResult>");
    let answer = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{page}", page.len());
    rig.proxy.inject_on(Some("GET"), "list-type", ProxyFault::Raw(answer), 1);
    let mut names: Vec<_> = list_all(&*rig.store, b"d", 1000).into_iter().map(|entry| entry.name).collect();
    names.sort();
    assert_eq!(names, [&b"a"[..], b"a-b", b"a.b", b"a0", b"b", b"z"]);
}

/// The user's rights may end at the prefix.
#[test]
fn no_request_leaves_the_prefix() {
    let server = S3Server::in_memory().unwrap();
    let proxy = ChaosProxy::start(server.address()).unwrap();
    for (url, bucket, prefix) in [
        ("s3://my.bucket.name/first.last/a b+c", "my.bucket.name", "first.last/a b+c/"),
        ("s3://my.bucket.name/dot.dir/.x/end.", "my.bucket.name", "dot.dir/.x/end./"),
    ] {
        server.create_bucket(bucket);
        server.put(bucket, &format!("{prefix}d/f"), b"bytes");
        server.put(bucket, "other", b"other");
        proxy.forget_requests();
        let (store, _) = open_with(url, &config(&proxy.endpoint()));
        store.check(soon()).unwrap();
        assert_eq!(store.lookup(b"", soon()).unwrap().kind, FileKind::Directory);
        let (f, _) = object(&*store, b"d/f");
        assert_eq!(read(&*store, &f, 0, 5).unwrap(), b"bytes");
        assert_eq!(list_all(&*store, b"", 10).len(), 1);
        assert_eq!(store.lookup(b"other", soon()).unwrap_err().kind(), ErrorKind::NotFound);
        let in_path = prefix.replace(' ', "%20").replace('+', "%2B");
        let in_query = format!("prefix={}", in_path.replace('/', "%2F"));
        for (method, path) in proxy.requests() {
            let below = path.contains(&format!("/{bucket}/{in_path}")) || path.contains(&in_query);
            assert!(below, "{method} {path}");
        }
    }
}

#[test]
fn a_page_of_something_between_makes_no_file_absent() {
    let rig = rig();
    rig.server.put("bucket", "d/f", b"bytes");
    let (f, _) = object(&*rig.store, b"d/f");
    // For a moment: it passes.
    rig.proxy.inject_on(Some("GET"), "/bucket", ProxyFault::Page(404), 2);
    assert_eq!(rig.store.list(b"d", None, 10, soon()).unwrap().entries.len(), 1);
    assert_eq!(rig.store.lookup(b"d/f", soon()).unwrap().size, 5);
    assert_eq!(read(&*rig.store, &f, 0, 5).unwrap(), b"bytes");
    rig.proxy.inject_on(Some("GET"), "/bucket", ProxyFault::Page(404), 100_000);
    let error = rig.store.list(b"d", None, 10, after(1)).unwrap_err();
    assert!(error.kind() == ErrorKind::OriginFailed && error.message().contains("no S3 error"), "{error}");
    let error = rig.store.lookup(b"d", after(1)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::OriginFailed, "{error}");
    let error = read_until(&*rig.store, &f, 5, after(1)).0.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::OriginFailed, "{error}");
    rig.proxy.clear_faults();
    assert_eq!(rig.store.lookup(b"d/no", soon()).unwrap_err().kind(), ErrorKind::NotFound);
}

#[test]
fn an_object_of_google_whose_name_holds_a_status_is_not_throttled() {
    let server = S3Server::in_memory_open().unwrap();
    server.create_bucket("bucket");
    server.put("bucket", "run-503/429", b"bytes");
    let proxy = ChaosProxy::start(server.address()).unwrap();
    let config = OriginOptions {
        endpoint: Some(proxy.endpoint()),
        anonymous: true,
        env: EnvironmentSource::fixed([]),
        ..OriginOptions::default()
    };
    let (store, stats) = open_with("gs://bucket", &config);
    let (found, _) = object(&*store, b"run-503/429");
    proxy.inject_on(Some("GET"), "/bucket/run", ProxyFault::Error(500, "InternalError", "again"), 2);
    assert_eq!(read(&*store, &found, 0, 5).unwrap(), b"bytes");
    assert_eq!((stats.object.throttled.get(), stats.object.retries.get()), (0, 2));
    proxy.inject_on(Some("GET"), "/bucket/run", ProxyFault::SlowDown, 1);
    assert_eq!(read(&*store, &found, 0, 5).unwrap(), b"bytes");
    assert_eq!(stats.object.throttled.get(), 1);
}

#[test]
fn a_transfer_cut_or_stalled_is_resumed_where_it_broke() {
    let rig = rig();
    let bytes = pattern(4 << 20, 7);
    rig.server.put("bucket", "f", &bytes);
    let (f, _) = object(&*rig.store, b"f");
    for fault in [
        ProxyFault::CutHalf,
        ProxyFault::StallAfter(1_000_000),
        ProxyFault::CutAfter(1),
        ProxyFault::Close,
        ProxyFault::Stall,
    ] {
        rig.proxy.forget_requests();
        let retries = rig.stats.object.retries.get();
        rig.proxy.inject_on(Some("GET"), "/bucket/f", fault.clone(), 1);
        assert!(read(&*rig.store, &f, 0, 4 << 20).unwrap() == bytes, "{fault:?}");
        assert_eq!(rig.proxy.count_requests("GET", "/bucket/f"), 2, "{fault:?}");
        assert_eq!(rig.stats.object.retries.get() - retries, 1, "{fault:?}");
    }
    // Cut again and again, as long as something comes.
    rig.proxy.inject_on(Some("GET"), "/bucket/f", ProxyFault::CutAfter(200_000), 20);
    assert!(read(&*rig.store, &f, 0, 4 << 20).unwrap() == bytes);
    assert!(rig.stats.object.get_bytes.get() >= 6 * (4 << 20));
}

#[test]
fn an_object_replaced_while_it_is_read_is_stale_and_never_a_mix() {
    let rig = rig();
    let bytes = pattern(1 << 20, 8);
    rig.server.put("bucket", "f", &bytes);
    let (f, _) = object(&*rig.store, b"f");
    // The first half arrives, the connection breaks, the object is replaced: the rest must not be the other's.
    rig.proxy.inject_on(Some("GET"), "/bucket/f", ProxyFault::CutHalf, 1);
    let gets = std::sync::atomic::AtomicU32::new(0);
    let server = Arc::new(rig.server);
    let hooked = Arc::clone(&server);
    rig.proxy.on_request(move |method, path| {
        let again =
            method == "GET" && path.contains("/f") && gets.fetch_add(1, std::sync::atomic::Ordering::Relaxed) > 0;
        if again {
            hooked.put("bucket", "f", &pattern(1 << 20, 9));
        }
    });
    let (answer, landed) = read_until(&*rig.store, &f, 1 << 20, soon());
    let error = answer.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Stale, "{error}");
    assert!(!landed.is_empty() && landed == bytes[..landed.len()], "what landed is of the requested version");
}

#[test]
fn many_reads_at_once_are_each_answered_for_themselves() {
    let rig = rig();
    let bytes: Vec<Vec<u8>> = (0..30).map(|n| pattern(1000 + n as usize * 77, n)).collect();
    let mut objects = Vec::new();
    for (n, bytes) in bytes.iter().enumerate() {
        rig.server.put("bucket", &format!("f{n}"), bytes);
        objects.push(object(&*rig.store, format!("f{n}").as_bytes()).0);
    }
    // One is replaced, one is gone, one connection breaks in the middle, one answer is an error: the first two are reported,
    // the others go well, and so do all beside them.
    rig.server.put("bucket", "f3", b"another");
    rig.server.remove("bucket", "f4");
    rig.proxy.inject_on(Some("GET"), "/bucket/f7", ProxyFault::CutHalf, 1);
    rig.proxy.inject_on(Some("GET"), "/bucket/f9", ProxyFault::Error(500, "InternalError", "again"), 1);
    for at_once in [1, 8, 100] {
        let mut buffers: Vec<Vec<u8>> = bytes.iter().map(|bytes| vec![0; bytes.len()]).collect();
        let mut sinks: Vec<SliceSink<'_>> = buffers.iter_mut().map(|buffer| SliceSink::new(buffer)).collect();
        let mut reads = objects.iter().zip(&mut sinks).map(|(object, sink)| OriginRead { object, offset: 0, sink });
        let answers = rig.store.read_many(&mut reads, at_once, Duration::from_secs(20));
        assert_eq!(answers.len(), objects.len());
        for (n, answer) in answers.into_iter().enumerate() {
            match n {
                3 | 4 => assert_eq!(answer.unwrap_err().kind(), ErrorKind::Stale, "f{n}"),
                _ => assert!(answer.is_ok() && buffers[n] == bytes[n], "f{n}: {answer:?}"),
            }
        }
    }
    assert!(rig.store.read_many(&mut std::iter::empty(), 8, Duration::from_secs(1)).is_empty());
    assert_eq!(rig.stats.object.in_flight.get(), 0);
    // Each has a time of its own.
    rig.proxy.inject(ProxyFault::Stall, 1000);
    let mut buffers = [[0; 10]; 3];
    let mut sinks = buffers.each_mut().map(|buffer| SliceSink::new(buffer));
    let mut reads = objects.iter().zip(&mut sinks).map(|(object, sink)| OriginRead { object, offset: 0, sink });
    for answer in rig.store.read_many(&mut reads, 2, Duration::from_millis(300)) {
        assert_eq!(answer.unwrap_err().kind(), ErrorKind::Timeout);
    }
}

/// As in the product: a request may take as long as its caller's whole time, and one attempt gets no answer.
#[test]
fn a_request_that_is_never_answered_is_sent_once_more() {
    let time = Duration::from_secs(60);
    let rig = rig_with(|config| {
        config.stall_timeout = Duration::from_secs(1);
        config.timeout = time;
    });
    rig.server.put("bucket", "d/f", b"bytes");
    let within = || Instant::now() + time;
    let (f, _) = object(&*rig.store, b"d/f");
    let once = |method, path| rig.proxy.inject_on(Some(method), path, ProxyFault::Stall, 1);
    once("HEAD", "/bucket/d/f");
    once("GET", "prefix=d%2Ff%2F");
    assert_eq!(rig.store.lookup(b"d/f", within()).unwrap().size, 5);
    once("GET", "prefix=d%2F");
    assert_eq!(rig.store.list(b"d", None, 10, within()).unwrap().entries.len(), 1);
    once("GET", "list-type");
    rig.store.check(within()).unwrap();
    once("GET", "/bucket/d/f");
    let (answer, landed) = read_until(&*rig.store, &f, 5, within());
    answer.unwrap();
    assert_eq!(landed, b"bytes");
    assert!(rig.stats.object.retries.get() >= 5);
    assert_eq!(rig.stats.object.errors.get(), 0);
}

/// An archive takes its time for each request anew: the first one has to be heard out.
#[test]
fn an_answer_that_takes_long_to_begin_is_waited_for() {
    let rig = rig_with(|config| {
        config.stall_timeout = Duration::from_millis(500);
        config.timeout = Duration::from_secs(60);
    });
    rig.server.put("bucket", "f", b"bytes");
    let (f, _) = object(&*rig.store, b"f");
    rig.proxy.forget_requests();
    rig.proxy.inject_on(Some("GET"), "/bucket/f", ProxyFault::Delay(Duration::from_secs(3)), 1);
    rig.proxy.inject_on(Some("GET"), "/bucket/f", ProxyFault::Stall, 100);
    let (answer, landed) = read_until(&*rig.store, &f, 5, Instant::now() + Duration::from_secs(60));
    answer.unwrap();
    assert_eq!(landed, b"bytes");
    assert!(rig.proxy.count_requests("GET", "/bucket/f") <= 3, "no more than three at a time");
}

#[test]
fn what_fails_beside_a_request_without_an_answer_is_made_again() {
    let rig = rig_with(|config| {
        config.stall_timeout = Duration::from_millis(500);
        config.timeout = Duration::from_secs(60);
    });
    rig.server.put("bucket", "f", b"bytes");
    let (f, _) = object(&*rig.store, b"f");
    let within = |seconds| Instant::now() + Duration::from_secs(seconds);
    rig.proxy.inject_on(Some("GET"), "/bucket/f", ProxyFault::Stall, 1);
    rig.proxy.inject_on(Some("GET"), "/bucket/f", ProxyFault::Error(500, "InternalError", "again"), 1);
    rig.proxy.inject_on(Some("GET"), "/bucket/f", ProxyFault::Close, 1);
    let (answer, landed) = read_until(&*rig.store, &f, 5, within(60));
    answer.unwrap();
    assert_eq!(landed, b"bytes");
    // When all fail but the first, which says nothing until the end, their errors are returned.
    let told = [2, 10, 50].into_iter().any(|seconds| {
        rig.proxy.clear_faults();
        rig.proxy.inject_on(Some("GET"), "/bucket/f", ProxyFault::Stall, 1);
        rig.proxy.inject_on(Some("GET"), "/bucket/f", ProxyFault::SlowDown, 1000);
        read_until(&*rig.store, &f, 5, within(seconds)).0.unwrap_err().kind() == ErrorKind::OriginFailed
    });
    assert!(told, "the errors of the others are lost");
}

/// A request to the store with a deadline.
type TimedCall<'a> = &'a dyn Fn(Instant) -> spurline_types::Result<()>;

#[test]
fn throttling_backs_off_and_is_counted() {
    let rig = rig();
    rig.server.put("bucket", "f", b"bytes");
    rig.proxy.inject(ProxyFault::SlowDown, 3);
    let (f, _) = object(&*rig.store, b"f");
    rig.proxy.inject_on(Some("GET"), "/bucket/f", ProxyFault::Error(429, "TooManyRequests", "slower"), 2);
    assert_eq!(read(&*rig.store, &f, 0, 5).unwrap(), b"bytes");
    assert_eq!(rig.stats.object.throttled.get(), 5);
    rig.proxy.inject_on(Some("GET"), "/bucket/f", ProxyFault::Page(529), 1);
    rig.proxy.inject_on(Some("GET"), "/bucket/f", ProxyFault::Page(509), 1);
    assert_eq!(read(&*rig.store, &f, 0, 5).unwrap(), b"bytes");
    assert_eq!(rig.stats.object.throttled.get(), 7);
    // Other numbers of something between pass as well.
    rig.proxy.inject_on(Some("GET"), "/bucket/f", ProxyFault::Page(520), 2);
    assert_eq!(read(&*rig.store, &f, 0, 5).unwrap(), b"bytes");
    // Throttled until the deadline: the server failed, with the count of attempts.
    rig.proxy.inject(ProxyFault::SlowDown, 1000);
    let error = read_until(&*rig.store, &f, 5, after(2)).0.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::OriginFailed, "{error}");
    assert!(error.message().contains("SlowDown") && error.message().contains("attempts"), "{error}");
    assert_eq!(rig.stats.object.in_flight.get(), 0);
}

#[test]
fn every_transient_failure_is_retried_until_the_deadline() {
    let rig = rig();
    rig.server.put("bucket", "d/f", b"bytes");
    let (f, _) = object(&*rig.store, b"d/f");
    for (fault, kind) in [
        (ProxyFault::Error(500, "InternalError", "again"), ErrorKind::OriginFailed),
        (ProxyFault::SlowDown, ErrorKind::OriginFailed),
        (ProxyFault::Page(502), ErrorKind::OriginFailed),
        (ProxyFault::Close, ErrorKind::OriginFailed),
        (ProxyFault::Stall, ErrorKind::Timeout),
    ] {
        let time = Duration::from_secs(3);
        let calls: [(&str, TimedCall); 3] = [
            ("read", &|deadline| read_until(&*rig.store, &f, 5, deadline).0),
            ("lookup", &|deadline| rig.store.lookup(b"d/f", deadline).map(drop)),
            ("listing", &|deadline| rig.store.list(b"d", None, 10, deadline).map(drop)),
        ];
        for (call, run) in calls {
            rig.proxy.inject(fault.clone(), 100_000);
            let started = Instant::now();
            let error = run(started + time).unwrap_err();
            assert_eq!(error.kind(), kind, "{call}, {fault:?}: {error}");
            assert!(started.elapsed() > time * 3 / 4, "{call}, {fault:?}: after {:?}", started.elapsed());
            rig.proxy.clear_faults();
            run(soon()).unwrap();
        }
    }
    // More failures in a row than any fixed number of attempts would allow.
    rig.proxy.inject_on(Some("GET"), "/bucket/d/f", ProxyFault::Close, 8);
    assert_eq!(read(&*rig.store, &f, 0, 5).unwrap(), b"bytes");
    // A server that does not listen gives no answer.
    let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let (store, _) = open_with("s3://bucket", &config(&format!("http://{closed}")));
    assert_eq!(read_until(&*store, &f, 5, after(1)).0.unwrap_err().kind(), ErrorKind::Timeout);
}

#[test]
fn nothing_blocks_past_its_deadline() {
    let rig = rig_with(|c| {
        c.stall_timeout = Duration::from_secs(60);
        c.timeout = Duration::from_secs(60);
    });
    rig.server.put("bucket", "f", &pattern(1 << 20, 1));
    let (f, _) = object(&*rig.store, b"f");
    rig.proxy.inject(ProxyFault::Stall, 1000);
    let in_300 = || Instant::now() + Duration::from_millis(300);
    for kind in [
        rig.store.lookup(b"f", in_300()).map(|_| ()).unwrap_err().kind(),
        rig.store.list(b"", None, 10, in_300()).map(|_| ()).unwrap_err().kind(),
        rig.store.check(in_300()).unwrap_err().kind(),
        read_until(&*rig.store, &f, 10, in_300()).0.unwrap_err().kind(),
    ] {
        assert_eq!(kind, ErrorKind::Timeout);
    }
    rig.proxy.clear_faults();
    assert_eq!(rig.store.lookup(b"f", soon()).unwrap().size, 1 << 20);
}

#[test]
fn a_server_that_goes_and_comes_back() {
    let rig = rig();
    rig.server.put("bucket", "f", b"bytes");
    let (f, _) = object(&*rig.store, b"f");
    rig.proxy.refuse_connections(true);
    let deadline = Instant::now() + Duration::from_secs(1);
    let error = read_until(&*rig.store, &f, 5, deadline).0.unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::OriginFailed | ErrorKind::Timeout), "{error}");
    rig.proxy.clear_faults();
    assert_eq!(read(&*rig.store, &f, 0, 5).unwrap(), b"bytes");
}

/// A server that restarts refuses connections for a while. At a start there are only a few attempts.
#[test]
fn a_server_that_restarts_costs_a_pause() {
    let server = S3Server::in_memory().unwrap();
    server.create_bucket("bucket");
    server.put("bucket", "f", b"bytes");
    let (direct, _) = open_with("s3://bucket", &config(&server.endpoint()));
    let (f, _) = object(&*direct, b"f");
    // There again, it is not ready at once.
    let proxy = ChaosProxy::start(server.address()).unwrap();
    proxy.inject_on(Some("GET"), "/bucket/f", ProxyFault::Error(503, "ServiceUnavailable", "not ready"), 1);
    proxy.inject_on(Some("GET"), "/bucket/f", ProxyFault::Close, 1);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    // A port of its own that refuses until a server listens.
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let endpoint = format!("http://{}", socket.local_addr().unwrap());
    let (store, stats) = open_with("s3://bucket", &config(&endpoint));
    let error = store.check(soon()).unwrap_err();
    assert!(error.message().contains("refused") && error.message().contains("3 attempts"), "{error}");
    let before = stats.object.retries.get();
    std::thread::scope(|scope| {
        let reads = scope.spawn(|| read_until(&*store, &f, 5, Instant::now() + Duration::from_secs(60)));
        while stats.object.retries.get() < before + 4 && !reads.is_finished() {
            std::thread::sleep(Duration::from_millis(5));
        }
        let (listener, to) = (runtime.block_on(async { socket.listen(16) }).unwrap(), proxy.address());
        runtime.spawn(async move {
            while let Ok((mut outside, _)) = listener.accept().await {
                let mut inside = tokio::net::TcpStream::connect(to).await.unwrap();
                tokio::spawn(async move { tokio::io::copy_bidirectional(&mut outside, &mut inside).await.ok() });
            }
        });
        let (answer, landed) = reads.join().unwrap();
        answer.unwrap();
        assert_eq!(landed, b"bytes");
    });
}

#[test]
fn what_is_wrong_is_said_with_evidence_and_remedy() {
    let server = S3Server::in_memory().unwrap();
    server.create_bucket("bucket");
    let good = config(&server.endpoint());
    let check = |url: &str, config: &OriginOptions| open_with(url, config).0.check(soon()).unwrap_err();
    let with_key = |id: &str, secret: &str| OriginOptions {
        credentials: Some(AwsCredentials {
            access_key_id: id.into(),
            secret_access_key: secret.into(),
            session_token: None,
        }),
        ..good.clone()
    };
    let error = check("s3://bucket", &with_key(ACCESS_KEY, "hush-hush"));
    assert_eq!(error.kind(), ErrorKind::PermissionDenied);
    for part in ["SignatureDoesNotMatch", "the secret does not fit", "used access key SPUR…", "s3://bucket"] {
        assert!(error.message().contains(part), "{error}");
    }
    // Of all sources of keys, only the one in use.
    assert!(!error.message().contains("AWS_PROFILE") && error.message().len() < 300, "{error}");
    assert!(!error.message().contains("hush-hush"), "{error}");
    let error = check("s3://bucket", &with_key("UNKNOWNACCESSKEY", "hush-hush"));
    assert_eq!(error.kind(), ErrorKind::PermissionDenied, "{error}");
    assert!(!error.message().contains("hush-hush") && !error.message().contains("KNOWSME"), "{error}");
    let error = check("s3://bucket", &OriginOptions { anonymous: true, ..good.clone() });
    assert_eq!(error.kind(), ErrorKind::PermissionDenied);
    assert!(error.message().contains("credentials are needed; used anonymous access by --anonymous"), "{error}");

    let error = check("s3://missing", &good);
    assert_eq!(error.kind(), ErrorKind::NotFound);
    assert!(error.message().contains("no bucket 'missing'") && error.message().contains("NoSuchBucket"), "{error}");
    // The bucket is missing for names in it, too: they must not look absent.
    let (missing, _) = open_with("s3://missing", &good);
    assert_eq!(missing.lookup(b"f", soon()).unwrap_err().kind(), ErrorKind::Unavailable);
    assert_eq!(missing.list(b"", None, 10, soon()).unwrap_err().kind(), ErrorKind::Unavailable);

    let nobody = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let error = check("s3://bucket", &config(&format!("http://{nobody}")));
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(error.message().contains("refused") && error.message().contains("AWS_ENDPOINT_URL"), "{error}");
    let error = check("s3://bucket", &config("http://no-such-host.invalid:9000"));
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(error.message().contains("no-such-host.invalid"), "{error}");
    let error = check("s3://bucket", &config(&format!("https://{}", server.address())));
    assert!(error.message().contains("does not speak TLS"), "{error}");

    let proxy = ChaosProxy::start(server.address()).unwrap();
    let through = config(&proxy.endpoint());
    proxy.inject(ProxyFault::Html, 1);
    assert!(check("s3://bucket", &through).message().contains("not an S3 server"));
    for (status, code, kind, part) in [
        (403, "AccessDenied", ErrorKind::PermissionDenied, "s3:ListBucket"),
        (403, "RequestTimeTooSkewed", ErrorKind::PermissionDenied, "set this machine's clock"),
        (400, "ExpiredToken", ErrorKind::PermissionDenied, "AWS_SESSION_TOKEN"),
        (301, "PermanentRedirect", ErrorKind::Unavailable, "AWS_REGION"),
        (418, "ImATeapot", ErrorKind::Unavailable, "ImATeapot"),
    ] {
        proxy.inject(ProxyFault::Error(status, code, "as the test wishes"), 1);
        let error = check("s3://bucket", &through);
        assert_eq!(error.kind(), kind, "{error}");
        assert!(error.message().contains(part) && error.message().contains(code), "{error}");
    }
}

/// Listens with TLS before `server`, with a certificate of its own.
fn behind_tls(server: &S3Server) -> (tokio::runtime::Runtime, String, rcgen::CertifiedKey<rcgen::KeyPair>) {
    let own = rcgen::generate_simple_self_signed(vec!["127.0.0.1".into()]).unwrap();
    let key = own.signing_key.serialize_der().try_into().unwrap();
    let tls =
        ServerConfig::builder().with_no_client_auth().with_single_cert(vec![own.cert.der().clone()], key).unwrap();
    let acceptor = TlsAcceptor::from(Arc::new(tls));
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0")).unwrap();
    let (at, to) = (listener.local_addr().unwrap(), server.address());
    runtime.spawn(async move {
        while let Ok((socket, _)) = listener.accept().await {
            let acceptor = acceptor.clone();
            tokio::spawn(async move {
                let mut outside = acceptor.accept(socket).await.ok()?;
                let mut inside = tokio::net::TcpStream::connect(to).await.ok()?;
                tokio::io::copy_bidirectional(&mut outside, &mut inside).await.ok()
            });
        }
    });
    (runtime, format!("https://{at}"), own)
}

#[test]
fn a_server_signed_by_an_authority_of_ones_own_is_read_over_tls() {
    let server = S3Server::in_memory().unwrap();
    server.create_bucket("bucket");
    let data = pattern(300_000, 5);
    server.put("bucket", "file", &data);
    let (_runtime, endpoint, own) = behind_tls(&server);
    let dir = tempfile::tempdir().unwrap();
    let bundle = dir.path().join("ca.pem");
    std::fs::write(&bundle, own.cert.pem()).unwrap();

    let env = EnvironmentSource::fixed([("AWS_CA_BUNDLE", bundle.to_str().unwrap())]);
    let (store, _) = open_with("s3://bucket", &OriginOptions { env, ..config(&endpoint) });
    assert_eq!(read(&*store, &object(&*store, b"file").0, 0, data.len()).unwrap(), data);

    // Its authority is unknown.
    let (store, _) = open_with("s3://bucket", &config(&endpoint));
    let error = store.lookup(b"file", Instant::now() + Duration::from_secs(3)).unwrap_err();
    assert!(error.message().contains("AWS_CA_BUNDLE"), "{error}");
}

#[test]
fn another_region_is_followed() {
    let rig = rig();
    let wrong = "<r/></Message><Region>eu-central-1</Region><Message>expecting 'eu-central-1'";
    rig.proxy.inject(ProxyFault::Error(400, "AuthorizationHeaderMalformed", wrong), 1);
    rig.store.check(soon()).unwrap();
    assert!(rig.store.describe().contains("eu-central-1"), "{}", rig.store.describe());
    assert!(!rig.store.describe().contains(SECRET_KEY));
}

#[test]
fn another_region_is_followed_by_all_that_were_asked_before_it_was_known() {
    const AT_ONCE: usize = 8;
    let rig = rig_with(|config| config.timeout = Duration::from_secs(60));
    rig.server.put("bucket", "f", b"bytes");
    let wrong = "<r/></Message><Region>eu-central-1</Region><Message>expecting 'eu-central-1'";
    let fault = ProxyFault::Error(400, "AuthorizationHeaderMalformed", wrong);
    rig.proxy.inject_on(Some("GET"), "list-type", fault, AT_ONCE as u32);
    // None is answered before all are sent.
    let (together, seen) = (std::sync::Barrier::new(AT_ONCE), std::sync::atomic::AtomicUsize::new(0));
    rig.proxy.on_request(move |_, _| {
        if seen.fetch_add(1, std::sync::atomic::Ordering::Relaxed) < AT_ONCE {
            together.wait();
        }
    });
    std::thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                let deadline = Instant::now() + Duration::from_secs(60);
                assert_eq!(rig.store.list(b"", None, 10, deadline).unwrap().entries.len(), 1);
            });
        }
    });
    assert!(rig.store.describe().contains("eu-central-1"), "{}", rig.store.describe());
    // Asked in the region it named, and sent away again: no end of that.
    rig.proxy.inject(ProxyFault::Error(400, "AuthorizationHeaderMalformed", wrong), 1);
    let error = rig.store.check(soon()).unwrap_err();
    assert!(error.message().contains("AWS_REGION"), "{error}");
}

#[test]
fn beyond_four_gigabytes() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("bucket")).unwrap();
    let file = std::fs::File::create(dir.path().join("bucket/huge")).unwrap();
    let at = (5u64 << 30) + 12_345;
    std::os::unix::fs::FileExt::write_all_at(&file, b"far away", at).unwrap();
    let server = S3Server::start(dir.path()).unwrap();
    let (store, _) = open_with("s3://bucket", &config(&server.endpoint()));
    let (huge, attr) = object(&*store, b"huge");
    assert_eq!(attr.size, at + 8);
    assert_eq!(read(&*store, &huge, at, 8).unwrap(), b"far away");
}

#[test]
fn a_hundred_thousand_names_in_one_folder() {
    let server = S3Server::in_memory().unwrap();
    server.create_bucket("bucket");
    for i in 0..100_000 {
        server.put("bucket", &format!("many/{i:06}"), b"");
    }
    let (store, _) = open_with("s3://bucket", &config(&server.endpoint()));
    let all = list_all(&*store, b"many", 1000);
    assert_eq!(all.len(), 100_000);
    assert!(all.is_sorted_by(|a, b| a.name < b.name));
}

/// A page tells whether the name of the last object of the one before is a folder's.
#[test]
fn a_listing_costs_one_request_a_page() {
    let rig = rig();
    for i in 0..3000 {
        rig.server.put("bucket", &format!("d/{i:05}"), b"");
    }
    rig.proxy.forget_requests();
    assert_eq!(list_all(&*rig.store, b"d", 1000).len(), 3000);
    assert_eq!(rig.proxy.count_requests("", ""), 3, "{:?}", rig.proxy.requests());
    // A file and a folder of one name, with keys between the two that fill pages.
    for i in 0..25 {
        rig.server.put("bucket", &format!("e/a-{i:02}"), b"");
    }
    rig.server.put("bucket", "e/a", b"");
    for max in [1, 2, 10, 1000] {
        let entries = list_all(&*rig.store, b"e", max);
        let files = entries.iter().filter(|entry| entry.attr.kind == FileKind::File).count();
        assert_eq!((entries.len(), files), (26, 26), "{max}");
    }
    rig.server.put("bucket", "e/a/x", b"");
    for max in [1, 2, 10, 1000] {
        let entries = list_all(&*rig.store, b"e", max);
        let folders: Vec<_> = entries.iter().filter(|entry| entry.attr.kind == FileKind::Directory).collect();
        assert_eq!((entries.len(), folders.len(), folders[0].name.as_slice()), (26, 1, &b"a"[..]), "{max}");
    }
}

/// Run by `make test-all` only.
mod test_all {
    use super::*;

    #[test]
    fn keeps_the_common_rules_on_versitygw() {
        let Some(binary) = spurline_testkit::go_program("versitygw", "versitygw") else { return };
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("bucket")).unwrap();
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let child = Command::new(&binary)
            .args(["--access", ACCESS_KEY, "--secret", SECRET_KEY, "--port", &format!("127.0.0.1:{port}"), "posix"])
            .arg(dir.path())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let _server = Versity(child);
        let (store, stats) = open_with("s3://bucket/p", &config(&format!("http://127.0.0.1:{port}")));
        let begun = Instant::now();
        while let Err(error) = store.check(soon()) {
            assert!(begun.elapsed() < Duration::from_secs(20), "{error}");
            std::thread::sleep(Duration::from_millis(100));
        }
        let put = VersityFolder::new(format!("http://127.0.0.1:{port}"));
        conformance(&*store, &stats, &put);
    }
}
