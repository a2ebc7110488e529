//! The calls of S3 on directories, buckets and groups.

use crate::rig::*;
use spurline_rig::world::*;
use spurline_testkit::S3Server;
use std::fs;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

#[test]
fn objects_of_a_directory_are_read_with_ranges_and_conditions() {
    let world = World::new();
    let data = bytes(3, 3 * MIB + 17);
    make_files(&world.dir("data"), &[("a/big", &data), ("a/b/small.json", b"{}"), ("empty", b"")]);
    let at = Endpoint::gateway(&world, world.dir("data").to_str().unwrap(), &[]);
    let whole = at.get("/data/a/big").expect(200, "");
    assert!(whole.body == data);
    assert_eq!(whole.header("content-length"), Some(data.len().to_string().as_str()));
    let etag = whole.header("etag").unwrap().to_owned();
    assert!(etag.ends_with("-1\"") && whole.header("last-modified").is_some());
    assert_eq!(at.get("/data/a/b/small.json").header("content-type"), Some("application/json"));
    assert_eq!(at.get("/data/empty").expect(200, "").body, b"");

    let part = at.send("GET /data/a/big", &[("Range", "bytes=1048570-2097160")], b"").expect(206, "");
    assert!(part.body == data[1_048_570..=2_097_160]);
    assert_eq!(part.header("content-range"), Some("bytes 1048570-2097160/3145745"));
    let tail = at.send("GET /data/a/big", &[("Range", "bytes=-5")], b"").expect(206, "");
    assert_eq!(tail.body, data[data.len() - 5..]);
    at.send("GET /data/a/big", &[("Range", "bytes=3145745-")], b"").expect(416, "InvalidRange");
    at.send("GET /data/empty", &[("Range", "bytes=0-")], b"").expect(416, "InvalidRange");

    at.send("GET /data/a/big", &[("If-None-Match", &etag)], b"").expect(304, "");
    at.send("GET /data/a/big", &[("If-Match", "\"other\"")], b"").expect(412, "PreconditionFailed");
    at.send("GET /data/a/big", &[("If-Match", &etag)], b"").expect(200, "");
    let later = [("If-Modified-Since", "Fri, 01 Jan 2100 00:00:00 GMT")];
    at.send("GET /data/a/big", &later, b"").expect(304, "");
    let earlier = [("If-Unmodified-Since", "Fri, 01 Jan 1999 00:00:00 GMT")];
    at.send("GET /data/a/big", &earlier, b"").expect(412, "PreconditionFailed");
    let other_version = [("If-Range", "\"other\""), ("Range", "bytes=0-3")];
    assert!(at.send("GET /data/a/big", &other_version, b"").expect(200, "").body == data);

    let head = at.send("HEAD /data/a/big", &[], b"").expect(200, "");
    assert_eq!((head.header("etag"), head.body.len()), (Some(etag.as_str()), 0));
    at.send("HEAD /data/a/b", &[], b"").expect(404, "");
    at.send("HEAD /data/a/b/", &[], b"").expect(200, "");
    for key in ["a/b", "missing", "a//big", "a/./big", "../data/empty", "a/big/", "a/big/below"] {
        at.get(&format!("/data/{key}")).expect(404, "NoSuchKey");
    }
    at.get("/other/a").expect(404, "NoSuchBucket");
    at.put("/data/new", b"x").expect(403, "AccessDenied");
    at.delete("/data/empty").expect(403, "AccessDenied");
    at.send("GET /data?tagging", &[], b"").expect(501, "NotImplemented");
    at.send("PUT /data/empty?acl", &[], b"").expect(501, "NotImplemented");
    at.send("PUT /fresh", &[], b"").expect(501, "NotImplemented");

    // A replaced file is seen within the time that names are kept.
    fs::write(world.path("data/empty"), b"no more").unwrap();
    eventually("the new bytes are read", || at.get("/data/empty").body == b"no more");
    let stats = stats(&world.path("run"), at.address.as_ref());
    assert!(count(&stats, "s3", "ops") > 20 && count(&stats, "s3", "read_bytes") > 2 * data.len() as u64, "{stats}");
    assert_eq!(count(&stats, "s3", "errors"), 0, "{stats}");
}

#[test]
fn listings_have_pages_prefixes_and_the_order_of_keys() {
    let world = World::new();
    let names = ["a-b", "a/1", "a/2/x", "a/2/y", "a0", "b c", "d/e/f", "z%"];
    let files: Vec<(&str, &[u8])> = names.iter().map(|name| (*name, b"x".as_slice())).collect();
    make_files(&world.dir("data"), &files);
    let at = Endpoint::gateway(&world, world.dir("data").to_str().unwrap(), &[]);
    let list = |query: &str| at.get(&format!("/data?list-type=2&{query}")).expect(200, "");
    assert_eq!(list("").elements("Key"), names);
    let page = list("delimiter=/");
    assert_eq!(page.elements("Key"), ["a-b", "a0", "b c", "z%"]);
    assert_eq!(page.elements("Prefix"), ["", "a/", "d/"], "that of the request, and those of the page");
    assert_eq!(list("delimiter=/&prefix=a/").elements("Key"), ["a/1"]);
    assert_eq!(list("prefix=a/2/").elements("Key"), ["a/2/x", "a/2/y"]);
    assert_eq!(list("start-after=a/2/x").elements("Key"), names[3..]);
    assert_eq!(list("encoding-type=url&prefix=b").elements("Key"), ["b%20c"]);
    assert_eq!(list("max-keys=0").elements("Key"), [""; 0]);
    assert_eq!(list("prefix=nothing").elements("Key"), [""; 0]);
    // Prefixes are text: no key has these.
    for prefix in
        ["/", "/a", "a//", "./", "a/./", "a/../", "../data/", ".spurline-upload-1/", &"n".repeat(300), "a/2/x/"]
    {
        for more in ["", "&delimiter=/"] {
            let page = list(&format!("prefix={prefix}{more}"));
            assert_eq!((page.elements("Key"), page.elements("Prefix")), (vec![], vec![prefix.to_owned()]));
        }
    }
    let mut found = Vec::new();
    let mut token = String::new();
    loop {
        let page = list(&format!("max-keys=3{token}"));
        found.extend(page.elements("Key"));
        match page.elements("NextContinuationToken").first() {
            Some(next) => token = format!("&continuation-token={next}"),
            None => break,
        }
    }
    assert_eq!(found, names);
    // An empty folder is an object.
    fs::create_dir(world.dir("data").join("a/empty")).unwrap();
    eventually("the folder is listed", || list("prefix=a/e").elements("Key") == ["a/empty/"]);
    assert_eq!(list("prefix=a/empty/&delimiter=/").elements("Key"), ["a/empty/"]);
    assert_eq!(list("prefix=a/&delimiter=/").elements("Prefix"), ["a/", "a/2/", "a/empty/"]);
    assert_eq!(list("start-after=a/empty/&max-keys=1").elements("Key"), ["a0"]);
    at.get("/data?list-type=2&continuation-token=nonsense").expect(400, "InvalidArgument");
    let first = at.get("/data?max-keys=2&delimiter=/").expect(200, "");
    assert_eq!((first.elements("Key"), first.elements("NextMarker")), (vec!["a-b".into()], vec!["a/".into()]));
    assert_eq!(at.get("/data?marker=a/&delimiter=/").elements("Key"), ["a0", "b c", "z%"]);
    assert_eq!(at.get("/").elements("Name"), ["data"]);
    at.send("HEAD /data", &[], b"").expect(200, "");
    at.get("/data?location").expect(200, "");
}

#[test]
fn objects_of_a_bucket_keep_their_etags() {
    let world = World::new();
    let server = S3Server::in_memory().unwrap();
    let data = bytes(4, 2 * MIB);
    let etag = server.put("source", "p/x", &data);
    let at = Endpoint::gateway(&world, "s3://source/p", &["--endpoint-url", &server.endpoint(), "--s3-bucket", "mine"]);
    let found = at.get("/mine/x").expect(200, "");
    assert!(found.body == data);
    assert_eq!(found.header("etag"), Some(format!("\"{etag}\"").as_str()));
    assert_eq!(at.get("/mine?list-type=2").elements("ETag"), [format!("\"{etag}\"")]);
    at.get("/mine/x").expect(200, "");
    at.get("/source/x").expect(404, "NoSuchBucket");
}

/// The keys of a listing, and those of the page behind the first.
fn listed_keys(at: &Endpoint, bucket: &str, prefix: &str) -> Vec<String> {
    let mut keys = Vec::new();
    let mut token = String::new();
    loop {
        let page = at.get(&format!("/{bucket}?list-type=2&max-keys=2&prefix={prefix}{token}")).expect(200, "");
        keys.extend(page.elements("Key"));
        match page.elements("NextContinuationToken").first() {
            Some(next) => token = format!("&continuation-token={next}"),
            None => return keys,
        }
    }
}

/// Markers of folders, in an endpoint of the bucket `source` with a marker of another program.
fn change_markers(at: &Endpoint, server: &S3Server) {
    let list = |prefix: &str| listed_keys(at, "source", prefix);
    assert_eq!(list(""), ["others/", "others/x"]);
    assert_eq!(list("others/"), ["others/", "others/x"]);
    at.put("/source/a/b/c/x", b"x").expect(200, "");
    let stored = server.keys("source");
    assert_eq!(stored, ["a/b/c/x", "others/", "others/x"], "a folder on the way to an object leaves no marker");
    at.send("HEAD /source/a/b/", &[], b"").expect(404, "");
    at.get("/source/a/b/").expect(404, "NoSuchKey");
    let put = at.put("/source/a/b/", b"").expect(200, "");
    let etag = put.header("etag").unwrap().to_owned();
    let shown = at.send("HEAD /source/a/b/", &[], b"").expect(200, "");
    assert_eq!((shown.header("etag"), shown.header("content-length")), (Some(etag.as_str()), Some("0")));
    assert!(!shown.header("last-modified").unwrap().contains("1970"), "{shown:?}");
    at.put("/source/e1/", b"").expect(200, "");
    assert_eq!(list(""), ["a/b/", "a/b/c/x", "e1/", "others/", "others/x"]);
    assert_eq!(list("e1/"), ["e1/"]);
    let page = at.get("/source?list-type=2&prefix=a/b/&delimiter=/").expect(200, "");
    assert_eq!((page.elements("Key"), page.elements("ETag")), (vec!["a/b/".to_owned()], vec![etag.clone()]));
    assert_eq!(page.elements("Prefix"), ["a/b/", "a/b/c/"]);
    at.send("PUT /source/e1/", &[("If-None-Match", "*")], b"").expect(412, "PreconditionFailed");
    at.send("PUT /source/a/", &[("If-None-Match", "*")], b"").expect(200, "");
    at.send("DELETE /source/a/", &[("If-Match", "\"other\"")], b"").expect(412, "PreconditionFailed");
    // A removed marker is not the folder, and a removed object takes no marker along.
    at.delete("/source/a/").expect(204, "");
    at.delete("/source/a/b/").expect(204, "");
    at.delete("/source/others/x").expect(204, "");
    assert_eq!(at.get("/source/a/b/c/x").body, b"x");
    assert_eq!(list(""), ["a/b/c/x", "e1/", "others/"]);
    for key in ["a/b/c/x", "e1/"] {
        at.delete(&format!("/source/{key}")).expect(204, "");
    }
    assert_eq!(server.keys("source"), ["others/"]);
    put_at_once(at, server);
    at.put("/source/others/x", b"x").expect(200, "");
}

/// Objects that several clients put at once into folders that are not there yet, as Hadoop's committers do.
fn put_at_once(at: &Endpoint, server: &S3Server) {
    const CLIENTS: usize = 8;
    const FOLDERS: usize = 5;
    std::thread::scope(|scope| {
        for client in 0..CLIENTS {
            scope.spawn(move || {
                for folder in 0..FOLDERS {
                    at.put(&format!("/source/new/{folder}/a/{client}"), b"x").expect(200, "");
                }
            });
        }
    });
    let keys = server.keys("source");
    assert_eq!(keys.len(), CLIENTS * FOLDERS + 1, "{keys:?}");
    for key in keys.iter().filter(|key| key.starts_with("new/")) {
        at.delete(&format!("/source/{key}")).expect(204, "");
    }
    assert_eq!(listed_keys(at, "source", ""), ["others/"]);
}

#[test]
fn markers_of_a_bucket_are_objects_alone_and_through_a_node() {
    let world = World::new();
    let server = S3Server::in_memory().unwrap();
    server.put("source", "others/", b"");
    server.put("source", "others/x", b"x");
    let flags = ["--writable", "--endpoint-url", &server.endpoint()];
    change_markers(&Endpoint::gateway(&world, "s3://source", &flags), &server);
    let node = world.node(&["s3://source"], 0, &flags);
    let registry = format!("static:{}", node.address);
    change_markers(&Endpoint::gateway(&world, "s3://source", &["--writable", "--registry", &registry]), &server);
    let at = Endpoint::gateway(&world, "s3://source", &["--registry", &registry]);
    eventually("the names that the node keeps are old", || listed_keys(&at, "source", "") == ["others/", "others/x"]);
    let at = Endpoint::gateway(&world, "s3://source", &flags[1..]);
    assert_eq!(listed_keys(&at, "source", "others/"), ["others/", "others/x"]);
    at.send("HEAD /source/others/", &[], b"").expect(200, "");
}

/// Puts, copies, conditions and removals; `other` sees the same objects as files or objects.
fn change_objects(at: &Endpoint, bucket: &str, other: &dyn Fn(&str) -> Option<Vec<u8>>) {
    let path = |key: &str| format!("/{bucket}/{key}");
    let big = bytes(9, 3 * MIB + 5);
    let put = at.put(&path("d/e/big"), &big).expect(200, "");
    assert!(other("d/e/big").unwrap() == big);
    let got = at.get(&path("d/e/big")).expect(200, "");
    assert!(got.body == big);
    assert_eq!(got.header("etag"), put.header("etag"), "the answer to a change names the version that is read next");
    at.put(&path("d/e/big"), b"small").expect(200, "");
    assert_eq!(at.get(&path("d/e/big")).body, b"small");
    at.send(&format!("PUT {}", path("d/e/big")), &[("If-None-Match", "*")], b"no").expect(412, "PreconditionFailed");
    at.send(&format!("PUT {}", path("d/new")), &[("If-None-Match", "*")], b"yes").expect(200, "");
    at.send(&format!("PUT {}", path("d/new")), &[("If-Match", "\"other\"")], b"no").expect(412, "PreconditionFailed");
    assert_eq!(other("d/new").unwrap(), b"yes");
    at.send(&format!("PUT {}", path("wrong")), &[("Content-MD5", "XrY7u+Ae7tCTyyK7j1rNww==")], b"no")
        .expect(400, "BadDigest");
    at.send(&format!("PUT {}", path("wrong")), &[("x-amz-checksum-crc32", "AAAAAA==")], b"no").expect(400, "BadDigest");
    at.get(&path("wrong")).expect(404, "NoSuchKey");
    put_in_chunks(at, bucket);
    let right = [("Content-MD5", "XrY7u+Ae7tCTyyK7j1rNww==")];
    at.send(&format!("PUT {}", path("right")), &right, b"hello world").expect(200, "");
    let source = format!("/{bucket}/d/new");
    at.send(&format!("PUT {}", path("copy")), &[("x-amz-copy-source", &source)], b"").expect(200, "");
    assert_eq!(other("copy").unwrap(), b"yes");
    at.put(&path("empty"), b"").expect(200, "");
    assert_eq!(other("empty").unwrap(), b"");
    at.put(&path("a//b"), b"x").expect(400, "InvalidArgument");

    for key in ["d/e/big", "d/new", "never-there", "copy", "right"] {
        at.delete(&path(key)).expect(204, "");
        at.get(&path(key)).expect(404, "NoSuchKey");
    }
    let names = "<Delete><Object><Key>empty</Key></Object><Object><Key>nothing</Key></Object></Delete>";
    let removed = at.send(&format!("POST /{bucket}?delete"), &[], names.as_bytes()).expect(200, "");
    assert_eq!(removed.elements("Key"), ["empty", "nothing"]);
    assert_eq!(at.get(&format!("/{bucket}?list-type=2")).elements("Key"), [""; 0]);
}

/// Uploads whose bodies are in chunks: the bytes of the object alone are stored, and checked.
fn put_in_chunks(at: &Endpoint, bucket: &str) {
    let path = format!("/{bucket}/chunks");
    let signed = ("x-amz-content-sha256", "STREAMING-AWS4-HMAC-SHA256-PAYLOAD-TRAILER");
    let encoded = ("Content-Encoding", "aws-chunked");
    let announced = ("x-amz-trailer", "x-amz-checksum-crc32");
    let len = ("x-amz-decoded-content-length", "11");
    let put = |headers: &[(&str, &str)], body: &str| at.send(&format!("PUT {path}"), headers, body.as_bytes());
    let body = |sum: &str| format!("6;chunk-signature=0\r\nhello \r\n5\r\nworld\r\n0\r\n{sum}\r\n");
    let sum = "x-amz-checksum-crc32:DUoRhQ==\r\n";
    put(&[signed, announced, len], &body(sum)).expect(200, "");
    assert_eq!(at.get(&path).body, b"hello world");
    put(&[encoded, len], &body("")).expect(200, "");
    assert_eq!(at.get(&path).body, b"hello world");
    let other_sum = "x-amz-checksum-crc32:AAAAAA==\r\n";
    put(&[signed, announced, len], &body(other_sum)).expect(400, "BadDigest");
    put(&[signed, announced, len], &body("")).expect(400, "InvalidRequest");
    put(&[signed, len], "hello world\r\n").expect(400, "InvalidRequest");
    put(&[signed, len], "b\r\nhello world\r\n").expect(400, "IncompleteBody");
    put(&[signed, len], "6\r\nhello \r\n0\r\n\r\n").expect(400, "IncompleteBody");
    put(&[signed], &body("")).expect(411, "MissingContentLength");
    assert_eq!(at.get(&path).body, b"hello world");
    at.delete(&path).expect(204, "");
}

/// Uploads over an object that fail: the object stays. The bytes of uploads lie in `uploads`.
fn fail_to_replace(at: &Endpoint, bucket: &str, uploads: &Path, other: &dyn Fn(&str) -> Option<Vec<u8>>) {
    let path = format!("/{bucket}/kept");
    let old = bytes(21, 6 * MIB);
    let etag = at.put(&path, &old).expect(200, "").header("etag").unwrap().to_owned();
    let check_kept = || {
        let found = at.get(&path).expect(200, "");
        assert!(found.body == old && found.header("etag") == Some(etag.as_str()), "{etag}: {:?}", found.header("etag"));
        assert!(other("kept").unwrap() == old);
    };
    let new = bytes(22, 6 * MIB);
    at.send(&format!("PUT {path}"), &[("Content-MD5", "XrY7u+Ae7tCTyyK7j1rNww==")], &new).expect(400, "BadDigest");
    check_kept();
    drop(begin_put(at, &path, "", &new[..5 * MIB], new.len()));
    check_kept();

    // The disk loses bytes of uploads, which shows while an object is being written.
    let begin =
        |path: &str| at.send(&format!("POST {path}?uploads"), &[], b"").expect(200, "").elements("UploadId").remove(0);
    let upload = format!("{path}?uploadId={}", begin(&path));
    at.put(&format!("{upload}&partNumber=1"), &new[..5 * MIB]).expect(200, "");
    at.put(&format!("{upload}&partNumber=2"), &new[5 * MIB..]).expect(200, "");
    let fresh = format!("/{bucket}/fresh");
    let fresh_upload = format!("{fresh}?uploadId={}", begin(&fresh));
    at.put(&format!("{fresh_upload}&partNumber=1"), &new).expect(200, "");
    cut_uploads(at.pid(), uploads, 5 * MIB as u64);
    let complete = |upload: &str, parts: &str| {
        let document = format!("<CompleteMultipartUpload>{parts}</CompleteMultipartUpload>");
        at.send(&format!("POST {upload}"), &[], document.as_bytes())
    };
    let first = "<Part><PartNumber>1</PartNumber></Part>";
    let both = format!("{first}<Part><PartNumber>2</PartNumber></Part>");
    complete(&upload, &both).expect(500, "InternalError");
    check_kept();
    complete(&upload, &both).expect(500, "InternalError");
    check_kept();
    complete(&fresh_upload, first).expect(500, "InternalError");
    // At once: no trace of the failed upload is in the way.
    at.send(&format!("PUT {fresh}"), &[("If-None-Match", "*")], b"first").expect(200, "");
    at.delete(&fresh).expect(204, "");
    complete(&fresh_upload, first).expect(500, "InternalError");
    at.get(&fresh).expect(404, "NoSuchKey");
    assert!(other("fresh").is_none());
    at.delete(&fresh_upload).expect(204, "");
    // The upload goes on with the part that is whole, and a new one in place of the other.
    at.put(&format!("{upload}&partNumber=2"), b"end").expect(200, "");
    complete(&upload, &both).expect(200, "");
    assert!(other("kept").unwrap() == [&new[..5 * MIB], b"end"].concat());
    at.put(&path, b"replaced").expect(200, "");
    assert_eq!(other("kept").unwrap(), b"replaced");
    at.delete(&path).expect(204, "");
}

/// A PUT with a further header, whose body has `len` bytes and goes on after `first`.
fn begin_put(at: &Endpoint, path: &str, header: &str, first: &[u8], len: usize) -> TcpStream {
    let mut stream = TcpStream::connect(&at.address).unwrap();
    let head = format!("PUT {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len}\r\n{header}\r\n");
    stream.write_all(head.as_bytes()).unwrap();
    stream.write_all(first).unwrap();
    stream
}

/// Sends the rest of the body; the first line of the answer.
fn end_put(mut stream: TcpStream, rest: &[u8]) -> String {
    stream.write_all(rest).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer.lines().next().unwrap_or_default().to_owned()
}

/// Objects whose bytes come slowly; `in_source` is the number of bodies whose bytes the source has already.
fn put_slowly(at: &Endpoint, bucket: &str, uploads: &Path, in_source: &dyn Fn() -> usize) {
    let path = format!("/{bucket}/slow/deep/object");
    let big = bytes(31, 20 * MIB);
    let (first, rest) = big.split_at(12 * MIB);
    for other in [false, true] {
        let slow = begin_put(at, &path, "", first, big.len());
        eventually("the source has bytes of the body", || in_source() == 1);
        assert_eq!(files_of_uploads(at.pid(), uploads).count(), 0, "bytes of a PUT are staged in the source only");
        if other {
            // The last one to end counts.
            at.put(&path, b"quick").expect(200, "");
            assert_eq!(at.get(&path).body, b"quick");
        } else {
            at.get(&path).expect(404, "NoSuchKey");
        }
        assert_eq!(end_put(slow, rest), "HTTP/1.1 200 OK");
        assert!(at.get(&path).body == big && in_source() == 0);
    }
    let fresh = format!("/{bucket}/slow/fresh");
    let slow = begin_put(at, &fresh, "If-None-Match: *\r\n", first, big.len());
    eventually("the source has bytes of the body", || in_source() == 1);
    at.put(&fresh, b"quick").expect(200, "");
    assert_eq!(end_put(slow, rest), "HTTP/1.1 412 Precondition Failed");
    let etag = at.get(&fresh).header("etag").unwrap().to_owned();
    let slow = begin_put(at, &fresh, &format!("If-Match: {etag}\r\n"), first, big.len());
    eventually("the source has bytes of the body", || in_source() == 1);
    at.put(&fresh, b"another").expect(200, "");
    assert_eq!(end_put(slow, rest), "HTTP/1.1 412 Precondition Failed");
    assert_eq!(at.get(&fresh).body, b"another");
    for key in [path, fresh] {
        at.delete(&key).expect(204, "");
    }
    // A client that leaves in the middle.
    let left = format!("/{bucket}/slow/left");
    let slow = begin_put(at, &left, "", first, big.len());
    eventually("the source has bytes of the body", || in_source() == 1);
    drop(slow);
    eventually("nothing is left", || in_source() == 0);
    at.get(&left).expect(404, "NoSuchKey");
}

/// The files of uploads that a process has open, which have no names.
fn files_of_uploads(pid: u32, uploads: &Path) -> impl Iterator<Item = PathBuf> {
    let open = fs::read_dir(format!("/proc/{pid}/fd")).unwrap().map(|open| open.unwrap().path());
    open.filter(move |open| fs::read_link(open).is_ok_and(|file| file.starts_with(uploads)))
}

/// Cuts the files of uploads, which have no names.
fn cut_uploads(pid: u32, uploads: &Path, len: u64) {
    for open in files_of_uploads(pid, uploads) {
        fs::File::options().write(true).open(open).unwrap().set_len(len).unwrap();
    }
}

/// An upload in parts, with the calls around it.
fn upload_parts(at: &Endpoint, bucket: &str) -> Vec<u8> {
    let path = format!("/{bucket}/parts/whole");
    let begun = at.send(&format!("POST {path}?uploads"), &[], b"").expect(200, "");
    let id = begun.elements("UploadId").remove(0);
    let data = bytes(11, 12 * MIB);
    let (first, rest) = data.split_at(5 * MIB);
    let (second, third) = rest.split_at(5 * MIB);
    let part = |number: usize, bytes: &[u8]| {
        let answer = at.put(&format!("{path}?partNumber={number}&uploadId={id}"), bytes).expect(200, "");
        answer.header("etag").unwrap().to_owned()
    };
    // In any order, and again.
    let third = part(3, third);
    part(1, b"replaced");
    let etags = [part(1, first), part(2, second), third];
    let listed = at.get(&format!("{path}?uploadId={id}"));
    assert_eq!(listed.elements("PartNumber"), ["1", "2", "3"]);
    assert_eq!(at.get(&format!("/{bucket}?uploads")).elements("Key"), ["parts/whole"]);
    at.get(&path).expect(404, "NoSuchKey");
    let document = |parts: &[(usize, &str)]| {
        let parts = parts
            .iter()
            .map(|(number, etag)| format!("<Part><PartNumber>{number}</PartNumber><ETag>{etag}</ETag></Part>"));
        format!("<CompleteMultipartUpload>{}</CompleteMultipartUpload>", parts.collect::<String>())
    };
    let complete = |document: String| at.send(&format!("POST {path}?uploadId={id}"), &[], document.as_bytes());
    complete(document(&[(2, &etags[1]), (1, &etags[0])])).expect(400, "InvalidPartOrder");
    complete(document(&[(1, "\"other\"")])).expect(400, "InvalidPart");
    complete(document(&[(4, &etags[0])])).expect(400, "InvalidPart");
    complete(document(&[(1, &etags[0]), (2, &etags[1]), (3, &etags[2])])).expect(200, "");
    complete(document(&[(1, &etags[0])])).expect(404, "NoSuchUpload");
    assert!(at.get(&path).expect(200, "").body == data);
    let begun = at.send(&format!("POST {path}?uploads"), &[], b"").expect(200, "");
    let id = begun.elements("UploadId").remove(0);
    at.delete(&format!("{path}?uploadId={id}")).expect(204, "");
    at.put(&format!("{path}?partNumber=1&uploadId={id}"), b"x").expect(404, "NoSuchUpload");
    data
}

#[test]
fn objects_of_a_directory_are_written_whole() {
    let world = World::new();
    let data = world.dir("data");
    let uploads = world.dir("uploads");
    let flags = ["--writable", "--s3-upload-dir", uploads.to_str().unwrap()];
    let at = Endpoint::gateway(&world, data.to_str().unwrap(), &flags);
    let other = |key: &str| fs::read(data.join(key)).ok();
    change_objects(&at, "data", &other);
    fail_to_replace(&at, "data", &uploads, &other);
    put_slowly(&at, "data", &uploads, &|| hidden_below(&data));
    assert_eq!(fs::read_dir(&data).unwrap().count(), 0, "folders go with their last object, and nothing else is left");
    let parts = upload_parts(&at, "data");
    assert!(fs::read(data.join("parts/whole")).unwrap() == parts);
    at.put("/data/folder/", b"").expect(200, "");
    assert!(data.join("folder").is_dir());
    let why = at.put("/data/folder", b"x").expect(400, "InvalidRequest").text();
    assert!(why.contains("the name of a folder"), "{why}");
    let why = at.put("/data/parts/whole/below", b"x").expect(400, "InvalidRequest").text();
    assert!(why.contains("the name of a file"), "{why}");
    // Any text, as S3 stores it.
    at.send("PUT /data/old", &[("Expires", "0")], b"x").expect(200, "");
    assert_eq!(at.send("HEAD /data/old", &[], b"").header("expires"), Some("0"));
    // What other programs write is read, without a wait for the time that names are kept: the source is asked.
    fs::write(data.join("parts/whole"), b"by another program").unwrap();
    assert_eq!(at.get("/data/parts/whole").body, b"by another program");
}

/// The number of files below a folder that are not published.
fn hidden_below(folder: &Path) -> usize {
    let names = fs::read_dir(folder).into_iter().flatten().map(|entry| entry.unwrap().path());
    let counts = names.map(|path| {
        let is_hidden = path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(".spurline-upload-"));
        usize::from(is_hidden) + hidden_below(&path)
    });
    counts.sum()
}

/// An empty file that was written so long ago.
fn create_old(path: &Path, age: Duration) {
    fs::File::create(path).unwrap().set_modified(SystemTime::now() - age).unwrap();
}

#[test]
fn uploads_end_with_their_endpoint_and_leave_nothing() {
    let world = World::new();
    let data = world.dir("data");
    let uploads = world.dir("uploads");
    let flags = ["--writable", "--s3-upload-dir", uploads.to_str().unwrap()];
    let at = Endpoint::gateway(&world, data.to_str().unwrap(), &flags);
    at.put("/data/d/x", b"before").expect(200, "");
    let id = at.send("POST /data/d/x?uploads", &[], b"").expect(200, "").elements("UploadId").remove(0);
    let upload = format!("/data/d/x?uploadId={id}");
    at.put(&format!("{upload}&partNumber=1"), &bytes(3, 6 * MIB)).expect(200, "");
    at.kill();

    let at = Endpoint::gateway(&world, data.to_str().unwrap(), &flags);
    assert_eq!(fs::read_dir(&uploads).unwrap().count(), 0, "the kernel removes parts with the process");
    at.put(&format!("{upload}&partNumber=2"), b"end").expect(404, "NoSuchUpload");
    let document = b"<CompleteMultipartUpload><Part><PartNumber>1</PartNumber></Part></CompleteMultipartUpload>";
    at.send(&format!("POST {upload}"), &[], document).expect(404, "NoSuchUpload");
    at.delete(&upload).expect(404, "NoSuchUpload");
    assert_eq!(at.get("/data/d/x").body, b"before");

    // Files that endpoints have left which were killed while they wrote into the directory.
    create_old(&data.join("d/.spurline-upload-old"), Duration::from_secs(25 * 3600));
    create_old(&data.join("d/.spurline-upload-new"), Duration::from_secs(3600));
    assert_eq!(at.get("/data?list-type=2").elements("Key"), ["d/x"]);
    let mut left: Vec<_> = fs::read_dir(data.join("d")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    left.sort();
    assert_eq!(left, [".spurline-upload-new", "x"]);
}

#[test]
fn objects_of_a_bucket_are_written_alone_and_through_a_node() {
    let world = World::new();
    let server = S3Server::in_memory().unwrap();
    server.create_bucket("source");
    let uploads = world.dir("uploads");
    let upload_dir = ["--s3-upload-dir", uploads.to_str().unwrap()];
    let flags = ["--writable", "--endpoint-url", &server.endpoint()];
    let at = Endpoint::gateway(&world, "s3://source", &[flags.as_slice(), &upload_dir].concat());
    let other = |key: &str| server.bytes("source", key);
    let in_source = || server.open_uploads();
    change_objects(&at, "source", &other);
    fail_to_replace(&at, "source", &uploads, &other);
    put_slowly(&at, "source", &uploads, &in_source);
    let parts = upload_parts(&at, "source");
    assert!(server.bytes("source", "parts/whole").unwrap() == parts);
    drop(at);
    server.remove("source", "parts/whole");

    let node = world.node(&["s3://source"], 0, &flags);
    let registry = format!("static:{}", node.address);
    let flags = ["--writable", "--registry", &registry];
    let at = Endpoint::gateway(&world, "s3://source", &[flags.as_slice(), &upload_dir].concat());
    change_objects(&at, "source", &other);
    fail_to_replace(&at, "source", &uploads, &other);
    put_slowly(&at, "source", &uploads, &in_source);
    upload_parts(&at, "source");
}

#[test]
fn a_node_serves_its_sources_as_buckets() {
    let world = World::new();
    let first = world.dir("first");
    make_files(&first, &[("x", b"of the first")]);
    make_files(&world.dir("second"), &[("y", b"of the second")]);
    let sources = [first.to_str().unwrap().to_owned(), world.dir("second").to_str().unwrap().to_owned()];
    let mut command = world.command(&[]);
    command.args(world.node_words(&[&sources[0], &sources[1]], 0));
    command.args(["--writable", "--s3-listen", "127.0.0.1:0", "--s3-writable-without-keys"]);
    command.args(["--s3-bucket", &format!("other={}", sources[1])]);
    let at = Endpoint::start(&mut command, &world);
    assert_eq!(at.get("/").elements("Name"), ["first", "other"]);
    assert_eq!(at.get("/first/x").body, b"of the first");
    assert_eq!(at.get("/other/y").body, b"of the second");
    fs::remove_file(first.join("x")).unwrap();
    change_objects(&at, "first", &|key| fs::read(first.join(key)).ok());
}

#[test]
fn wrong_settings_are_refused_with_the_remedy() {
    let world = World::new();
    let data = world.dir("data");
    let source = data.to_str().unwrap();
    let run = |words: &[&str]| world.run(&[&["gateway", source][..], words].concat());
    refused(&run(&[]), 2, &["--s3-listen ADDRESS:PORT"]);
    refused(&run(&["--s3-listen", "0.0.0.0:0"]), 2, &["--s3-keys FILE"]);
    refused(&run(&["--s3-listen", "127.0.0.1:0", "--s3-bucket", "No"]), 2, &["3 to 63"]);
    let keys = world.file("keys", b"client:0123456789abcdef");
    let with_keys = ["--s3-listen", "127.0.0.1:0", "--s3-keys", keys.to_str().unwrap()];
    refused(&run(&with_keys), 2, &["chmod 600"]);
    refused(&run(&["--s3-listen", "127.0.0.1:0", "--s3-keys", "/nowhere/keys"]), 3, &["openssl rand"]);
    // Changes by every local user are a decision.
    let open = ["--s3-listen", "127.0.0.1:0", "--writable"];
    refused(&run(&open), 2, &["every user of this host", "--s3-keys FILE", "--s3-writable-without-keys"]);
    let open_node = ["node", "--group-port", "0", "--source", source, "--cache-size", "0"];
    refused(&world.run(&[&open_node[..], &open].concat()), 2, &["every user of this host"]);
    // Files of the endpoint are read first: neither the source nor the cache disk is there.
    let nowhere = world.path("nowhere");
    let nowhere = nowhere.to_str().unwrap();
    let taken_dir = ["--cache-dir", keys.to_str().unwrap()];
    refused(&world.run(&[&["gateway", nowhere][..], &with_keys, &taken_dir].concat()), 2, &["chmod 600"]);
    let node = ["node", "--group-port", "0", "--source", nowhere];
    refused(&world.run(&[&node[..], &with_keys, &taken_dir].concat()), 2, &["chmod 600"]);
    let no_certificate =
        ["--s3-listen", "127.0.0.1:0", "--s3-tls-cert", "/nowhere/cert", "--s3-tls-key", "/nowhere/key"];
    refused(
        &world.run(&[&["gateway", nowhere][..], &no_certificate, &taken_dir].concat()),
        2,
        &["--s3-tls-cert", "PEM"],
    );
    refused(&world.run(&["node", "--source", source, "--s3-keys", "/k"]), 2, &["--s3-listen"]);
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = taken.local_addr().unwrap().to_string();
    refused(&run(&["--s3-listen", &taken]), 3, &["--s3-listen", "another program listens there"]);

    refused(&run(&["--s3-listen", "somewhere:9000"]), 2, &["write 127.0.0.1:9000, localhost:9000"]);
    let upload_dir =
        ["--s3-listen", "localhost:0", "--writable", "--s3-writable-without-keys", "--s3-upload-dir", "/nowhere"];
    refused(&run(&upload_dir), 3, &["another directory", "--s3-upload-dir"]);
}
