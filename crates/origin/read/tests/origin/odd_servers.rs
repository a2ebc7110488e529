//! S3 servers with odd answers: listings that do not move on, empty pages, repeated names, objects that are unpacked on
//! the way, and another protocol than the one of the endpoint.

use crate::common;
use common::soon;
use spurline_object_store::{EnvironmentSource, OriginOptions};
use spurline_origin::OriginStore;
use spurline_types::{Error, ErrorKind, FileKind, ObjectRef, SliceSink, Stats};
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// The heads of all requests so far, in lower case.
type RequestHeads = Arc<Mutex<Vec<String>>>;

/// A server that answers each request, given by its head, with a text of this function, and closes the connection. It
/// serves until the test ends.
fn serve(answer: impl Fn(&str) -> String + Send + Sync + 'static) -> (String, RequestHeads) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    let heads = RequestHeads::default();
    let log = Arc::clone(&heads);
    let answer = Arc::new(answer);
    std::thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            let log = Arc::clone(&log);
            let answer = Arc::clone(&answer);
            std::thread::spawn(move || answer_once(stream, &log, &*answer));
        }
    });
    (endpoint, heads)
}

fn answer_once(mut stream: TcpStream, log: &Mutex<Vec<String>>, answer: &dyn Fn(&str) -> String) {
    let mut head = String::new();
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    while reader.read_line(&mut head).is_ok_and(|len| len > 2) {}
    log.lock().unwrap().push(head.to_ascii_lowercase());
    // The client may have closed the connection.
    let _ = stream.write_all(answer(&head).as_bytes());
}

fn open(url: &str, endpoint: &str) -> Arc<dyn OriginStore> {
    open_with(url, endpoint, &Arc::default())
}

fn open_with(url: &str, endpoint: &str, stats: &Arc<Stats>) -> Arc<dyn OriginStore> {
    let config = OriginOptions {
        endpoint: Some(endpoint.to_owned()),
        anonymous: true,
        env: EnvironmentSource::fixed([]),
        connect_timeout: Duration::from_secs(1),
        ..OriginOptions::default()
    };
    spurline_origin::open(url, &config, Arc::clone(stats)).unwrap()
}

fn whole(status: &str, headers: &str, body: &str) -> String {
    format!("HTTP/1.1 {status}\r\nConnection: close\r\nContent-Length: {}\r\n{headers}\r\n{body}", body.len())
}

fn absent() -> String {
    whole("404 Not Found", "", "<Error><Code>NoSuchKey</Code></Error>")
}

/// A page of a listing: names that end with a slash are prefixes.
fn page(names: &[&str], next: Option<&str>) -> String {
    let mut text = String::from("<ListBucketResult>");
    for name in names {
        text.push_str(&if name.ends_with('/') {
            format!("<CommonPrefixes><Prefix>{name}</Prefix></CommonPrefixes>")
        } else {
            format!("<Contents><Key>{name}</Key><ETag>\"e\"</ETag><Size>1</Size></Contents>")
        });
    }
    match next {
        Some(token) => text.push_str(&format!(
            "<IsTruncated>true</IsTruncated><NextContinuationToken>{token}</NextContinuationToken>"
        )),
        None => text.push_str("<IsTruncated>false</IsTruncated>"),
    }
    whole("200 OK", "", &(text + "</ListBucketResult>"))
}

/// A parameter of a request's query, as it was sent.
fn parameter<'a>(head: &'a str, name: &str) -> &'a str {
    let query = head.split(' ').nth(1).and_then(|url| url.split_once('?')).map_or("", |(_, query)| query);
    let found = query.split('&').filter_map(|pair| pair.split_once('=')).find(|(key, _)| *key == name);
    found.map_or("", |(_, value)| value)
}

/// A server with one listing, whose pages this function returns by their token (empty for the first), and no object.
fn list_server(page: impl Fn(&str) -> String + Send + Sync + 'static) -> Arc<dyn OriginStore> {
    let (endpoint, _) =
        serve(
            move |head| {
                if head.contains("list-type=2") { page(parameter(head, "continuation-token")) } else { absent() }
            },
        );
    open("s3://bucket", &endpoint)
}

/// The names of a folder, in order, and the error that ended its listing.
fn list_names(store: &dyn OriginStore, path: &[u8], max: usize) -> (Vec<String>, Option<Error>) {
    let mut names = Vec::new();
    let mut cursor: Option<Vec<u8>> = None;
    loop {
        match store.list(path, cursor.as_deref(), max, soon()) {
            Ok(page) => {
                assert!(page.next.as_ref().is_none_or(|next| next.len() < 600), "the cursor grows");
                names.extend(page.entries.into_iter().map(|entry| String::from_utf8(entry.name).unwrap()));
                match page.next {
                    Some(next) => cursor = Some(next),
                    None => return (names, None),
                }
            }
            Err(error) => return (names, Some(error)),
        }
    }
}

#[test]
fn a_listing_whose_token_returns_is_an_error() {
    for circle in [1, 2, 3, 20] {
        let store = list_server(move |token| {
            let number: usize = token.parse().unwrap_or(0);
            let name = if token.is_empty() { "first".to_owned() } else { format!("f{number:02}") };
            page(&[&name], Some(&((number + 1) % circle).to_string()))
        });
        let (names, error) = list_names(&*store, b"", 1000);
        let error = error.unwrap();
        assert_eq!(error.kind(), ErrorKind::Io(libc::EIO), "{error}");
        for part in ["do not move on", "continuation token of an earlier page", "fault of that server"] {
            assert!(error.message().contains(part), "{error}");
        }
        if circle < 8 {
            // Found before a name is repeated. The last name of a page is shown with the next page.
            assert_eq!(names.len(), circle - 1, "{names:?}");
        }
    }
}

#[test]
fn a_listing_that_begins_anew_under_new_tokens_is_an_error() {
    let store = list_server(|token| {
        let number: usize = token.parse().unwrap_or(0);
        page(&["a", "b", "d/"], Some(&(number + 1).to_string()))
    });
    let (names, error) = list_names(&*store, b"", 1000);
    let error = error.unwrap();
    assert_eq!(names, ["d", "a", "b"]);
    assert_eq!(error.kind(), ErrorKind::Io(libc::EIO), "{error}");
    assert!(error.message().contains("only names of earlier pages"), "{error}");
}

#[test]
fn repeated_names_are_listed_once() {
    let store = list_server(|token| match token {
        "" => page(&["a", "a", "d/", "d/"], Some("1")),
        "1" => page(&["a", "b", "d/", "b"], Some("2")),
        // Folded page by page.
        "2" => page(&["d/"], Some("3")),
        "3" => page(&["d/"], Some("4")),
        _ => page(&["d/", "b", "c"], None),
    });
    let (names, error) = list_names(&*store, b"", 4);
    assert_eq!((names, error), (["d", "a", "b", "c"].map(str::to_owned).into(), None));
}

#[test]
fn empty_pages_before_a_name_hide_nothing() {
    let store = {
        let (endpoint, _) = serve(|head| {
            if !head.contains("list-type=2") {
                return absent();
            }
            match (parameter(head, "prefix"), parameter(head, "continuation-token")) {
                ("d%2F", "") => page(&[], Some("d1")),
                ("d%2F", "d1") => page(&[], Some("d2")),
                ("d%2F", "d2") => page(&["d/f"], None),
                ("none%2F", "") => page(&[], Some("n1")),
                ("", "") => page(&[], Some("r1")),
                ("", "r1") => page(&["d/"], None),
                _ => page(&[], None),
            }
        });
        open("s3://bucket", &endpoint)
    };
    assert_eq!(list_names(&*store, b"", 1000), (vec!["d".to_owned()], None));
    assert_eq!(store.lookup(b"d", soon()).unwrap().kind, FileKind::Directory);
    assert_eq!(list_names(&*store, b"d", 1000), (vec!["f".to_owned()], None));
    assert_eq!(store.lookup(b"none", soon()).unwrap_err().kind(), ErrorKind::NotFound);
    assert_eq!(store.list(b"none", None, 1000, soon()).unwrap_err().kind(), ErrorKind::NotFound);
}

#[test]
fn empty_pages_without_end_are_an_error_in_time() {
    let store = list_server(|token| page(&[], Some(&format!("{token}x"))));
    let deadline = Instant::now() + Duration::from_millis(500);
    let listed = store.list(b"", None, 1000, deadline).unwrap_err();
    let looked_up = store.lookup(b"d", Instant::now() + Duration::from_millis(500)).unwrap_err();
    for error in [listed, looked_up] {
        assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
        for part in ["pages without a new name in a row", "--origin-timeout"] {
            assert!(error.message().contains(part), "{error}");
        }
    }
}

/// Without the check each absent name would be a folder.
#[test]
fn a_server_that_ignores_the_prefix_is_an_error() {
    let store = list_server(|_| page(&["a", "d/"], None));
    assert_eq!(list_names(&*store, b"", 1000), (vec!["d".to_owned(), "a".to_owned()], None));
    for error in [store.lookup(b"absent", soon()).unwrap_err(), list_names(&*store, b"d", 1000).1.unwrap()] {
        assert_eq!(error.kind(), ErrorKind::Io(libc::EIO), "{error}");
        assert!(error.message().contains("does not begin with the prefix"), "{error}");
    }
}

#[test]
fn a_page_longer_than_requested_is_shown_whole() {
    let store = list_server(|token| match token {
        "" => page(&["a", "b", "c", "d/"], Some("1")),
        _ => page(&["e", "f", "g"], None),
    });
    let names = ["d", "a", "b", "c", "e", "f", "g"].map(str::to_owned);
    assert_eq!(list_names(&*store, b"", 1), (names.into(), None));
    let long = "n".repeat(1000);
    let store = list_server(move |_| page(&vec![long.as_str(); 9000], None));
    let error = list_names(&*store, b"", 1000).1.unwrap();
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
    assert!(error.message().contains("does not divide listings into pages"), "{error}");
}

/// What a store sends of an object that it stored packed, in ten bytes.
const PACKED: &str = "packed.gz.";
const UNPACKED: &str = "what was packed";

/// A store with such an object. It unpacks what is not requested as it is stored, and always if `stubborn`.
fn packing_server(stubborn: bool, with_length: bool) -> (String, RequestHeads) {
    serve(move |head| {
        let packed = !stubborn && head.to_ascii_lowercase().contains("\r\naccept-encoding: gzip\r\n");
        let identity = "ETag: \"e\"\r\nx-goog-generation: 1\r\nLast-Modified: Fri, 02 Jan 2026 03:04:05 GMT\r\n";
        if head.starts_with("HEAD") {
            let len = if packed || stubborn { PACKED.len() } else { UNPACKED.len() };
            return format!("HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: {len}\r\n{identity}\r\n");
        }
        if head.contains("list-type=2") {
            return page(&[], None);
        }
        if packed {
            let range = format!("{identity}Content-Encoding: gzip\r\nContent-Range: bytes 0-9/10\r\n");
            return whole("206 Partial Content", &range, PACKED);
        }
        if with_length {
            return whole("200 OK", identity, UNPACKED);
        }
        format!("HTTP/1.1 200 OK\r\nConnection: close\r\n{identity}\r\n{UNPACKED}")
    })
}

fn read_ten(store: &dyn OriginStore, object: &ObjectRef) -> spurline_types::Result<Vec<u8>> {
    let mut bytes = vec![0; 10];
    store.read(object, 0, &mut SliceSink::new(&mut bytes), soon()).map(|()| bytes)
}

#[test]
fn an_object_that_is_stored_packed_is_read_packed() {
    for url in ["s3://bucket", "gs://bucket"] {
        let (endpoint, heads) = packing_server(false, true);
        let store = open(url, &endpoint);
        let (object, _) = common::object(&*store, b"log.json");
        assert_eq!(object.size, 10, "{url}");
        assert_eq!(read_ten(&*store, &object).unwrap(), PACKED.as_bytes(), "{url}");
        // Listings can't be read packed.
        for head in heads.lock().unwrap().iter() {
            assert_eq!(head.contains("accept-encoding: gzip"), !head.contains("list-type=2"), "{head}");
        }
    }
}

#[test]
fn a_store_that_unpacks_all_the_same_is_named_at_once() {
    for with_length in [true, false] {
        let (endpoint, heads) = packing_server(true, with_length);
        let store = open("s3://bucket", &endpoint);
        let (object, _) = common::object(&*store, b"log.json");
        let error = read_ten(&*store, &object).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
        for part in ["unpacks objects", "Content-Encoding", "instead of the 10 that are stored"] {
            assert!(error.message().contains(part), "{error}");
        }
        let reads = heads.lock().unwrap().iter().filter(|head| head.contains("range: bytes=0-9")).count();
        assert_eq!(reads, 1, "another attempt can't help");
    }
}

#[test]
fn a_server_of_another_protocol_is_named() {
    let (endpoint, _) = serve(|_| whole("400 Bad Request", "", "not HTTP"));
    let error = open("s3://bucket", &endpoint.replace("http:", "https:")).check(soon()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    for part in ["does not speak TLS", "write http://", "AWS_ENDPOINT_URL"] {
        assert!(error.message().contains(part), "{error}");
    }
    // The alert of a server with TLS.
    let (endpoint, _) = serve(|_| "\u{15}\u{3}\u{1}\0\u{2}\u{2}\u{a}".to_owned());
    let error = open("s3://bucket", &endpoint).check(soon()).unwrap_err();
    for part in ["does not speak HTTP", "write https://", "AWS_ENDPOINT_URL"] {
        assert!(error.message().contains(part), "{error}");
    }
}

#[test]
fn refusals_of_google_and_azure_are_known_by_their_status() {
    for (status, kind, part) in [
        ("401 Unauthorized", ErrorKind::PermissionDenied, "check "),
        ("403 Forbidden", ErrorKind::PermissionDenied, "check "),
        ("404 Not Found", ErrorKind::NotFound, "no such bucket or container"),
    ] {
        for url in ["gs://bucket", "az://bucket"] {
            // A body of a proxy, which is not read to its end.
            let (endpoint, _) = serve(move |_| whole(status, "", &format!("503 429 SlowDown{}", "x".repeat(1 << 20))));
            let config = OriginOptions {
                endpoint: Some(endpoint),
                anonymous: true,
                env: EnvironmentSource::fixed([("AZURE_STORAGE_ACCOUNT_NAME", "account")]),
                ..OriginOptions::default()
            };
            let store = spurline_origin::open(url, &config, Arc::new(Stats::default())).unwrap();
            let error = store.check(soon()).unwrap_err();
            assert_eq!(error.kind(), kind, "{url}: {status}: {}", &error.message()[..200]);
            assert!(error.message().contains(part) && error.message().contains(status), "{}", &error.message()[..200]);
            assert!(error.message().len() < 8192, "{}", error.message().len());
        }
    }
}

#[test]
fn a_token_that_azure_does_not_have_is_no_absent_object() {
    let (endpoint, heads) = serve(|_| whole("404 Not Found", "", "no identity is assigned"));
    let token_endpoint = format!("{endpoint}/token");
    let config = OriginOptions {
        endpoint: Some(endpoint),
        env: EnvironmentSource::fixed([
            ("AZURE_STORAGE_ACCOUNT_NAME", "account"),
            ("AZURE_MSI_ENDPOINT", token_endpoint.as_str()),
        ]),
        ..OriginOptions::default()
    };
    let store = spurline_origin::open("az://bucket", &config, Arc::new(Stats::default())).unwrap();
    let error = store.lookup(b"f", Instant::now() + Duration::from_secs(2)).unwrap_err();
    let heads = heads.lock().unwrap();
    assert!(!heads.is_empty() && heads.iter().all(|head| head.contains("/token")), "{heads:?}");
    assert_ne!(error.kind(), ErrorKind::NotFound, "{error}");
}

/// The bytes of each object of a store whose listings have no ETags.
const UNTAGGED: &str = "0123456789";

/// Such a store, with objects whose names begin with `f`. Heads and reads have ETags, or have none either.
fn untagged_server(heads_have_etags: bool) -> (String, RequestHeads) {
    serve(move |head| {
        let identity = "Last-Modified: Fri, 02 Jan 2026 03:04:05 GMT\r\n";
        let etag = if heads_have_etags { "ETag: \"e\"\r\n" } else { "" };
        let identity = format!("{etag}{identity}");
        if head.contains("list-type=2") {
            let prefix = parameter(head, "prefix");
            let names = (0..5).map(|number| format!("f{number}")).filter(|name| name.starts_with(prefix));
            let objects = names.map(|name| {
                let time = "<LastModified>2026-01-02T03:04:05.678Z</LastModified>";
                format!("<Contents><Key>{name}</Key>{time}<Size>{}</Size></Contents>", UNTAGGED.len())
            });
            let end = "<IsTruncated>false</IsTruncated></ListBucketResult>";
            return whole("200 OK", "", &format!("<ListBucketResult>{}{end}", objects.collect::<String>()));
        }
        if !head.contains("/bucket/f") {
            return absent();
        }
        if head.starts_with("HEAD") {
            return format!(
                "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: {}\r\n{identity}\r\n",
                UNTAGGED.len()
            );
        }
        whole("206 Partial Content", &format!("{identity}Content-Range: bytes 0-9/10\r\n"), UNTAGGED)
    })
}

/// A listing costs no head for each name, and its versions are those of lookups, whichever comes first.
#[test]
fn a_listing_without_etags_costs_no_head_for_each_name() {
    for (heads_have_etags, lists_first) in [(true, true), (true, false), (false, true), (false, false)] {
        let (endpoint, heads) = untagged_server(heads_have_etags);
        let stats = Arc::new(Stats::default());
        let store = open_with("s3://bucket", &endpoint, &stats);
        let list = || store.list(b"", None, 1000, soon()).unwrap().entries;
        let looked_up = || store.lookup(b"f3", soon()).unwrap();
        let first = if lists_first { None } else { Some(looked_up()) };
        let listed = list();
        assert_eq!(listed.len(), 5);
        let listed = &listed[3].attr;
        assert_eq!((listed.size, &listed.etag), (10, &None));
        assert_eq!(first.as_ref().unwrap_or(&looked_up()), listed);
        assert_eq!(&looked_up(), listed);
        let object = ObjectRef::new(store.source_url(), b"f3", listed.version.clone(), listed.size);
        assert_eq!(read_ten(&*store, &object).unwrap(), UNTAGGED.as_bytes());
        let before = heads.lock().unwrap().len();
        list();
        let more: Vec<String> = heads.lock().unwrap()[before..].to_vec();
        let asked = more.iter().filter(|head| head.starts_with("head")).count();
        // A page of a store without any ETags is compared with a single head.
        assert_eq!(asked, usize::from(!heads_have_etags), "{more:?}");
        assert_eq!(stats.metadata.etagless_buckets.get(), u64::from(heads_have_etags));
        drop(store);
        assert_eq!(stats.metadata.etagless_buckets.get(), 0);
    }
}
