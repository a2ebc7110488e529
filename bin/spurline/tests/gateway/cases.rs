//! Requests in a table, each with the answer that S3 gives, on a directory, a bucket, and a bucket through a node. The subjects are
//! the same as in the public suites of S3 servers, for the calls that exist.

use crate::case_tables::{CALLS, FOLDERS, METADATA};
use crate::rig::*;
use spurline_rig::world::*;
use spurline_testkit::S3Server;
use std::fs;

/// A request with the expected answer. Paths begin below the bucket; `{id}` is the last upload's.
pub struct SuiteCase {
    /// What is tried.
    pub name: &'static str,
    /// Method and path.
    pub head: &'static str,
    pub headers: &'static [(&'static str, &'static str)],
    pub body: &'static str,
    pub status: u16,
    /// The code of an error, or nothing.
    pub code: &'static str,
    /// Headers of the answer; an empty value for a header that is absent.
    pub shows: &'static [(&'static str, &'static str)],
    /// Elements of the answer's document, joined by a space.
    pub elements: &'static [(&'static str, &'static str)],
    /// The answer's body, where that is bytes of an object.
    pub bytes: Option<&'static str>,
}

pub const PLAIN: SuiteCase = SuiteCase {
    name: "",
    head: "",
    headers: &[],
    body: "",
    status: 200,
    code: "",
    shows: &[],
    elements: &[],
    bytes: None,
};

/// Headers that want what objects do not have, and whether the value is harmless.
const WISHES: &[(&str, &str, bool)] = &[
    ("x-amz-acl", "private", true),
    ("x-amz-acl", "public-read", false),
    ("x-amz-grant-read", "id=1", false),
    ("x-amz-storage-class", "STANDARD", true),
    ("x-amz-storage-class", "GLACIER", false),
    ("x-amz-server-side-encryption", "AES256", true),
    ("x-amz-server-side-encryption", "aws:kms", false),
    ("x-amz-server-side-encryption-customer-algorithm", "AES256", false),
    ("x-amz-tagging", "", true),
    ("x-amz-tagging", "a=b", false),
    ("x-amz-tagging-directive", "COPY", true),
    ("x-amz-website-redirect-location", "/other", false),
    ("x-amz-object-lock-mode", "COMPLIANCE", false),
];

/// Puts, copies and uploads in parts with these headers.
fn refuse_wishes(at: &Endpoint, bucket: &str) {
    at.put(&format!("/{bucket}/w"), b"x").expect(200, "");
    for (name, value, is_harmless) in WISHES {
        let source = format!("{bucket}/w");
        let copied = ("x-amz-copy-source", source.as_str());
        let wish = (*name, *value);
        for (head, headers) in [
            (format!("PUT /{bucket}/w"), vec![wish]),
            (format!("PUT /{bucket}/copied"), vec![copied, wish]),
            (format!("POST /{bucket}/w?uploads"), vec![wish]),
        ] {
            let answer = at.send(&head, &headers, b"");
            if *is_harmless {
                let upload = answer.expect(200, "").elements("UploadId");
                upload.iter().for_each(|id| drop(at.delete(&format!("/{bucket}/w?uploadId={id}"))));
            } else {
                let why = answer.expect(501, "NotImplemented").elements("Message").remove(0);
                assert!(why.contains(&format!("{name}: ")), "{why}");
            }
        }
    }
    at.delete(&format!("/{bucket}/w")).expect(204, "");
    at.delete(&format!("/{bucket}/copied")).expect(204, "");
}

impl SuiteCase {
    /// Sends the request, and compares the answer; the id of an upload that has begun.
    fn run(&self, at: &Endpoint, bucket: &str, upload: &str) -> Option<String> {
        let (method, path) = self.head.split_once(' ').unwrap();
        let head = format!("{method} /{bucket}{}", path.replace("{id}", upload));
        let headers = self.headers.iter().map(|(name, value)| (*name, value.replace("{bucket}", bucket)));
        let headers: Vec<(&str, String)> = headers.collect();
        let headers: Vec<(&str, &str)> = headers.iter().map(|(name, value)| (*name, value.as_str())).collect();
        let answer = at.send(&head, &headers, self.body.as_bytes());
        let about = format!("{}: {head}: {answer:?}: {}", self.name, answer.text());
        assert_eq!(answer.status, self.status, "{about}");
        if !self.code.is_empty() {
            assert_eq!(answer.elements("Code"), [self.code], "{about}");
        }
        for (name, value) in self.shows {
            assert_eq!(answer.header(name).unwrap_or_default(), *value, "{name}: {about}");
        }
        for (name, values) in self.elements {
            let values = values.replace("{bucket}", bucket).replace("{host}", &at.address);
            assert_eq!(answer.elements(name).join(" "), values, "{name}: {about}");
        }
        if let Some(bytes) = self.bytes {
            assert_eq!(answer.body, bytes.as_bytes(), "{about}");
        }
        answer.elements("UploadId").pop()
    }
}

fn run_cases(at: &Endpoint, bucket: &str) {
    for cases in [METADATA, CALLS, FOLDERS] {
        let mut upload = String::new();
        for case in cases {
            upload = case.run(at, bucket, &upload).unwrap_or(upload);
        }
        let keys = at.get(&format!("/{bucket}?list-type=2")).elements("Key");
        for key in keys {
            at.delete(&format!("/{bucket}/{}", key.replace(' ', "%20").replace("&amp;", "%26").replace('?', "%3F")));
        }
        assert_eq!(at.get(&format!("/{bucket}?list-type=2")).elements("Key"), [""; 0]);
    }
}

#[test]
fn a_directory_answers_as_s3_does() {
    let world = World::new();
    let data = world.dir("data");
    let at = Endpoint::gateway(&world, data.to_str().unwrap(), &["--writable"]);
    let log = at.log();
    assert!(!log.contains("a mount with") && !log.contains("index of cache disks"), "{log}");
    run_cases(&at, "data");
    refuse_wishes(&at, "data");
    assert_eq!(fs::read_dir(&data).unwrap().count(), 0);
}

#[test]
fn a_bucket_answers_as_s3_does_alone_and_through_a_node() {
    let world = World::new();
    let server = S3Server::in_memory().unwrap();
    server.create_bucket("source");
    let flags = ["--writable", "--endpoint-url", &server.endpoint()];
    let at = Endpoint::gateway(&world, "s3://source", &flags);
    run_cases(&at, "source");
    let note = [("x-amz-meta-note", "kept")];
    at.send("PUT /source/stored", &note, b"x").expect(200, "");
    assert_eq!(
        server.metadata("source", "stored", "note").as_deref(),
        Some("kept"),
        "the store has the metadata itself"
    );
    server.put_with_metadata("source", "of-others", b"x", &[("note", "of another program")]);
    let shown = at.send("HEAD /source/of-others", &[], b"").expect(200, "");
    assert_eq!(shown.header("x-amz-meta-note"), Some("of another program"));
    at.send("PUT /source/large", &[("x-amz-meta-note", &"x".repeat(2100))], b"x").expect(400, "MetadataTooLarge");
    at.delete("/source/stored").expect(204, "");
    at.delete("/source/of-others").expect(204, "");
    drop(at);

    let node = world.node(&["s3://source"], 0, &flags);
    let registry = format!("static:{}", node.address);
    let at = Endpoint::gateway(&world, "s3://source", &["--writable", "--registry", &registry]);
    run_cases(&at, "source");
}

/// Reads an object with stored headers from an endpoint without `--writable`.
fn read_stored_headers(at: &Endpoint, bucket: &str) {
    let path = format!("/{bucket}/x.json");
    let unread = at.get(&path).expect(200, "");
    assert_eq!(unread.header("content-type"), Some("application/json"), "a read costs no further request");
    assert_eq!(unread.header("x-amz-meta-note"), None);
    let etag = unread.header("etag").unwrap().to_owned();
    at.send(&format!("HEAD {path}"), &[("If-None-Match", &etag)], b"").expect(304, "");
    for method in ["HEAD", "GET"] {
        let shown = at.send(&format!("{method} {path}"), &[], b"").expect(200, "");
        assert_eq!(shown.header("content-type"), Some("audio/ogg"), "{method}");
        assert_eq!(shown.header("content-encoding"), Some("gzip"), "{method}");
        assert_eq!(shown.header("x-amz-meta-note"), Some("kept"), "{method}");
    }
    let plain = at.send(&format!("HEAD /{bucket}/plain.csv"), &[], b"").expect(200, "");
    assert_eq!(plain.header("content-type"), Some("text/csv"));
    let folder = at.send(&format!("HEAD /{bucket}/folder/"), &[], b"").expect(200, "");
    assert_eq!(folder.header("x-amz-meta-note"), Some("of the folder"));
}

#[test]
fn stored_headers_are_shown_where_the_source_is_only_read() {
    let world = World::new();
    let server = S3Server::in_memory().unwrap();
    server.create_bucket("source");
    let data = world.dir("data");
    let store = ["--endpoint-url", &server.endpoint()];
    for (bucket, source) in [("source", "s3://source"), ("data", data.to_str().unwrap())] {
        let at = Endpoint::gateway(&world, source, &[["--writable"].as_slice(), &store].concat());
        let headers = [("Content-Type", "audio/ogg"), ("Content-Encoding", "gzip"), ("x-amz-meta-note", "kept")];
        at.send(&format!("PUT /{bucket}/x.json"), &headers, b"bytes").expect(200, "");
        at.put(&format!("/{bucket}/plain.csv"), b"1,2").expect(200, "");
        at.send(&format!("PUT /{bucket}/folder/"), &[("x-amz-meta-note", "of the folder")], b"").expect(200, "");
        drop(at);
        read_stored_headers(&Endpoint::gateway(&world, source, &store), bucket);
        let node = world.node(&[source], 0, &store);
        let registry = format!("static:{}", node.address);
        read_stored_headers(&Endpoint::gateway(&world, source, &["--registry", &registry]), bucket);
    }
}
