//! Requests in a table, each with the answer that S3 gives, on a directory, a bucket, and a bucket through a node. The subjects are
//! the same as in the public suites of S3 servers, for the calls that exist.

use crate::rig::*;
use spurline_rig::world::*;
use spurline_testkit::S3Server;
use std::fs;

/// A request with the expected answer. Paths begin below the bucket; `{id}` is the last upload's.
struct SuiteCase {
    /// What is tried.
    name: &'static str,
    /// Method and path.
    head: &'static str,
    headers: &'static [(&'static str, &'static str)],
    body: &'static str,
    status: u16,
    /// The code of an error, or nothing.
    code: &'static str,
    /// Headers of the answer; an empty value for a header that is absent.
    shows: &'static [(&'static str, &'static str)],
    /// Elements of the answer's document, joined by a space.
    elements: &'static [(&'static str, &'static str)],
    /// The answer's body, where that is bytes of an object.
    bytes: Option<&'static str>,
}

const PLAIN: SuiteCase = SuiteCase {
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

/// Metadata and content headers.
const METADATA: &[SuiteCase] = &[
    SuiteCase {
        name: "put with metadata",
        head: "PUT /m/x.json",
        headers: &[
            ("Content-Type", "audio/ogg"),
            ("Cache-Control", "public, max-age=14400"),
            ("Content-Encoding", "gzip"),
            ("x-amz-meta-Key1", "value1"),
            ("x-amz-meta-empty", ""),
        ],
        body: "bytes",
        ..PLAIN
    },
    SuiteCase {
        name: "head shows them",
        head: "HEAD /m/x.json",
        shows: &[
            ("content-type", "audio/ogg"),
            ("cache-control", "public, max-age=14400"),
            ("content-encoding", "gzip"),
            ("x-amz-meta-key1", "value1"),
            ("x-amz-meta-spurline-op", ""),
        ],
        ..PLAIN
    },
    SuiteCase {
        name: "get shows them with a range",
        head: "GET /m/x.json",
        headers: &[("Range", "bytes=1-2")],
        status: 206,
        shows: &[("content-type", "audio/ogg"), ("x-amz-meta-key1", "value1"), ("content-length", "2")],
        bytes: Some("yt"),
        ..PLAIN
    },
    SuiteCase {
        name: "a request chooses headers of the answer",
        head: "GET /m/x.json?response-content-type=foo%2Fbar&response-content-disposition=bla&response-content-language=esperanto&response-cache-control=no-cache&response-content-encoding=aaa",
        shows: &[
            ("content-type", "foo/bar"),
            ("content-disposition", "bla"),
            ("content-language", "esperanto"),
            ("cache-control", "no-cache"),
            ("content-encoding", "aaa"),
        ],
        bytes: Some("bytes"),
        ..PLAIN
    },
    SuiteCase {
        name: "a copy keeps them",
        head: "PUT /m/copy",
        headers: &[("x-amz-copy-source", "{bucket}/m/x.json")],
        ..PLAIN
    },
    SuiteCase {
        name: "the copy has them",
        head: "GET /m/copy",
        shows: &[("content-type", "audio/ogg"), ("x-amz-meta-key1", "value1")],
        bytes: Some("bytes"),
        ..PLAIN
    },
    SuiteCase {
        name: "a copy with others",
        head: "PUT /m/copy",
        headers: &[
            ("x-amz-copy-source", "{bucket}/m/x.json"),
            ("x-amz-metadata-directive", "REPLACE"),
            ("Content-Type", "audio/mpeg"),
            ("x-amz-meta-key3", "value3"),
        ],
        ..PLAIN
    },
    SuiteCase {
        name: "the copy has the others",
        head: "HEAD /m/copy",
        shows: &[
            ("content-type", "audio/mpeg"),
            ("x-amz-meta-key3", "value3"),
            ("x-amz-meta-key1", ""),
            ("cache-control", ""),
        ],
        ..PLAIN
    },
    SuiteCase {
        name: "a copy onto itself changes nothing",
        head: "PUT /m/copy",
        headers: &[("x-amz-copy-source", "{bucket}/m/copy")],
        status: 400,
        code: "InvalidRequest",
        ..PLAIN
    },
    SuiteCase {
        name: "a copy onto itself with others",
        head: "PUT /m/copy",
        headers: &[
            ("x-amz-copy-source", "{bucket}/m/copy"),
            ("x-amz-metadata-directive", "REPLACE"),
            ("x-amz-meta-foo", "bar"),
        ],
        ..PLAIN
    },
    SuiteCase {
        name: "the bytes stay",
        head: "GET /m/copy",
        shows: &[("x-amz-meta-foo", "bar"), ("x-amz-meta-key3", "")],
        bytes: Some("bytes"),
        ..PLAIN
    },
    SuiteCase { name: "new bytes without metadata", head: "PUT /m/x.json", body: "{}", ..PLAIN },
    SuiteCase {
        name: "the old ones are gone",
        head: "HEAD /m/x.json",
        shows: &[
            ("content-type", "application/json"),
            ("x-amz-meta-key1", ""),
            ("content-encoding", ""),
            ("cache-control", ""),
        ],
        ..PLAIN
    },
    SuiteCase {
        name: "the coding of chunks is not the object's",
        head: "PUT /m/chunks",
        headers: &[("Content-Encoding", "aws-chunked"), ("x-amz-decoded-content-length", "3")],
        body: "3\r\nabc\r\n0\r\n\r\n",
        ..PLAIN
    },
    SuiteCase {
        name: "it is not shown",
        head: "GET /m/chunks",
        shows: &[("content-encoding", "")],
        bytes: Some("abc"),
        ..PLAIN
    },
    SuiteCase {
        name: "an upload in parts with metadata",
        head: "POST /m/parts?uploads",
        headers: &[("Content-Type", "text/x"), ("x-amz-meta-foo", "bar")],
        ..PLAIN
    },
    SuiteCase { name: "its part", head: "PUT /m/parts?partNumber=1&uploadId={id}", body: "part", ..PLAIN },
    SuiteCase {
        name: "its end",
        head: "POST /m/parts?uploadId={id}",
        body: "<CompleteMultipartUpload><Part><PartNumber>1</PartNumber></Part></CompleteMultipartUpload>",
        ..PLAIN
    },
    SuiteCase {
        name: "the object has the metadata of the begin",
        head: "GET /m/parts",
        shows: &[("content-type", "text/x"), ("x-amz-meta-foo", "bar")],
        bytes: Some("part"),
        ..PLAIN
    },
];

/// Folders: keys that end with a slash.
const FOLDERS: &[SuiteCase] = &[
    SuiteCase {
        name: "a folder with metadata",
        head: "PUT /folder/",
        headers: &[("Content-Type", "application/x-directory"), ("x-amz-meta-note", "kept")],
        ..PLAIN
    },
    SuiteCase {
        name: "head shows them",
        head: "HEAD /folder/",
        shows: &[
            ("content-type", "application/x-directory"),
            ("x-amz-meta-note", "kept"),
            ("content-length", "0"),
            ("x-amz-meta-spurline-op", ""),
        ],
        ..PLAIN
    },
    SuiteCase {
        name: "a folder is not replaced by itself",
        head: "PUT /folder/",
        headers: &[("If-None-Match", "*")],
        status: 412,
        code: "PreconditionFailed",
        ..PLAIN
    },
    SuiteCase {
        name: "a copy onto itself with others, as a change of mode",
        head: "PUT /folder/",
        headers: &[
            ("x-amz-copy-source", "{bucket}/folder/"),
            ("x-amz-metadata-directive", "REPLACE"),
            ("x-amz-meta-other", "new"),
        ],
        ..PLAIN
    },
    SuiteCase {
        name: "the folder has the others",
        head: "HEAD /folder/",
        shows: &[("x-amz-meta-other", "new"), ("x-amz-meta-note", "")],
        ..PLAIN
    },
    SuiteCase { name: "the folder without metadata", head: "PUT /folder/", ..PLAIN },
    SuiteCase {
        name: "the old ones are gone",
        head: "HEAD /folder/",
        shows: &[("content-type", "application/x-directory"), ("x-amz-meta-other", "")],
        ..PLAIN
    },
    SuiteCase {
        name: "a folder has no bytes",
        head: "PUT /folder/",
        body: "x",
        status: 400,
        code: "InvalidRequest",
        ..PLAIN
    },
    SuiteCase { name: "an object in the folder", head: "PUT /folder/x", body: "x", ..PLAIN },
    SuiteCase {
        name: "an object with the folder's name",
        head: "PUT /folder",
        body: "x",
        status: 400,
        code: "InvalidRequest",
        ..PLAIN
    },
    SuiteCase { name: "the folder with an object stays", head: "DELETE /folder/", status: 204, ..PLAIN },
    SuiteCase { name: "the object", head: "DELETE /folder/x", status: 204, ..PLAIN },
    SuiteCase { name: "the folder is removed", head: "DELETE /folder/", status: 204, ..PLAIN },
    SuiteCase { name: "it is gone", head: "HEAD /folder/", status: 404, ..PLAIN },
];

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

/// Reads, conditions, parts and listings.
const CALLS: &[SuiteCase] = &[
    SuiteCase { name: "an object", head: "PUT /foo", body: "testcontent", ..PLAIN },
    SuiteCase {
        name: "bytes of a range",
        head: "GET /foo",
        headers: &[("Range", "bytes=4-7")],
        status: 206,
        shows: &[("content-range", "bytes 4-7/11")],
        bytes: Some("cont"),
        ..PLAIN
    },
    SuiteCase {
        name: "a range to the end",
        head: "GET /foo",
        headers: &[("Range", "bytes=4-")],
        status: 206,
        bytes: Some("content"),
        ..PLAIN
    },
    SuiteCase {
        name: "the last bytes",
        head: "GET /foo",
        headers: &[("Range", "bytes=-7")],
        status: 206,
        shows: &[("content-range", "bytes 4-10/11")],
        bytes: Some("content"),
        ..PLAIN
    },
    SuiteCase {
        name: "a range past the end",
        head: "GET /foo",
        headers: &[("Range", "bytes=40-50")],
        status: 416,
        code: "InvalidRange",
        ..PLAIN
    },
    SuiteCase {
        name: "a range that ends before its start is ignored",
        head: "GET /foo",
        headers: &[("Range", "bytes=3-1")],
        shows: &[("content-range", "")],
        bytes: Some("testcontent"),
        ..PLAIN
    },
    SuiteCase {
        name: "a malformed range is ignored",
        head: "HEAD /foo",
        headers: &[("Range", "abc")],
        shows: &[("content-length", "11")],
        ..PLAIN
    },
    SuiteCase {
        name: "several ranges are not served",
        head: "GET /foo",
        headers: &[("Range", "bytes=0-1,4-5")],
        bytes: Some("testcontent"),
        ..PLAIN
    },
    SuiteCase {
        name: "no range of nothing",
        head: "GET /nothing",
        headers: &[("Range", "abc")],
        status: 404,
        code: "NoSuchKey",
        ..PLAIN
    },
    SuiteCase {
        name: "the only part of an object",
        head: "GET /foo?partNumber=1",
        status: 206,
        bytes: Some("testcontent"),
        ..PLAIN
    },
    SuiteCase {
        name: "a part that it has not",
        head: "GET /foo?partNumber=2",
        status: 400,
        code: "InvalidPart",
        ..PLAIN
    },
    SuiteCase {
        name: "written only over nothing",
        head: "PUT /foo",
        headers: &[("If-None-Match", "*")],
        body: "zar",
        status: 412,
        code: "PreconditionFailed",
        ..PLAIN
    },
    SuiteCase {
        name: "written only over a version",
        head: "PUT /foo",
        headers: &[("If-Match", "\"ABCORZ\"")],
        body: "zar",
        status: 412,
        code: "PreconditionFailed",
        ..PLAIN
    },
    SuiteCase {
        name: "written only over something",
        head: "PUT /foo",
        headers: &[("If-Match", "*")],
        body: "zar",
        ..PLAIN
    },
    SuiteCase {
        name: "over something that is not there",
        head: "PUT /absent",
        headers: &[("If-Match", "*")],
        body: "zar",
        status: 404,
        code: "NoSuchKey",
        ..PLAIN
    },
    SuiteCase { name: "the new bytes", head: "GET /foo", bytes: Some("zar"), ..PLAIN },
    SuiteCase {
        name: "read unless known, unknown",
        head: "GET /foo",
        headers: &[("If-None-Match", "\"ABCORZ\"")],
        bytes: Some("zar"),
        ..PLAIN
    },
    SuiteCase {
        name: "a copy of another version",
        head: "PUT /copied",
        headers: &[("x-amz-copy-source", "{bucket}/foo"), ("x-amz-copy-source-if-match", "\"ABCORZ\"")],
        status: 412,
        code: "PreconditionFailed",
        ..PLAIN
    },
    SuiteCase {
        name: "a copy of what is absent",
        head: "PUT /copied",
        headers: &[("x-amz-copy-source", "{bucket}/nothing")],
        status: 404,
        code: "NoSuchKey",
        ..PLAIN
    },
    SuiteCase {
        name: "a copy from another bucket",
        head: "PUT /copied",
        headers: &[("x-amz-copy-source", "nowhere/foo")],
        status: 404,
        code: "NoSuchBucket",
        ..PLAIN
    },
    SuiteCase {
        name: "a copy only over nothing",
        head: "PUT /foo",
        headers: &[
            ("x-amz-copy-source", "{bucket}/foo"),
            ("x-amz-metadata-directive", "REPLACE"),
            ("If-None-Match", "*"),
        ],
        status: 412,
        code: "PreconditionFailed",
        ..PLAIN
    },
    SuiteCase {
        name: "a copy of a version that there is not",
        head: "PUT /copied",
        headers: &[("x-amz-copy-source", "{bucket}/foo?versionId=1")],
        status: 501,
        code: "NotImplemented",
        ..PLAIN
    },
    SuiteCase {
        name: "a removal of a version that there is not",
        head: "DELETE /foo?versionId=1",
        status: 501,
        code: "NotImplemented",
        ..PLAIN
    },
    SuiteCase { name: "the tags of an object", head: "GET /foo?tagging", ..PLAIN },
    SuiteCase {
        name: "the tags of what is absent",
        head: "GET /nothing?tagging",
        status: 404,
        code: "NoSuchKey",
        ..PLAIN
    },
    SuiteCase { name: "the only version", head: "GET /foo?versionId=null", bytes: Some("zar"), ..PLAIN },
    SuiteCase {
        name: "a copy of a name with signs",
        head: "PUT /copied%20%26%3F%2B",
        headers: &[("x-amz-copy-source", "{bucket}/foo")],
        ..PLAIN
    },
    SuiteCase {
        name: "a copy from a name with signs",
        head: "PUT /copied",
        headers: &[("x-amz-copy-source", "/{bucket}/copied%20%26%3F%2B")],
        ..PLAIN
    },
    SuiteCase { name: "the copy", head: "GET /copied", bytes: Some("zar"), ..PLAIN },
    SuiteCase { name: "an upload in parts", head: "POST /parts?uploads", ..PLAIN },
    SuiteCase {
        name: "without a part",
        head: "POST /parts?uploadId={id}",
        body: "<CompleteMultipartUpload></CompleteMultipartUpload>",
        status: 400,
        code: "MalformedXML",
        ..PLAIN
    },
    SuiteCase {
        name: "a part from a range",
        head: "PUT /parts?partNumber=1&uploadId={id}",
        headers: &[("x-amz-copy-source", "{bucket}/foo"), ("x-amz-copy-source-range", "bytes=0-1")],
        ..PLAIN
    },
    SuiteCase {
        name: "a part from a range past the end",
        head: "PUT /parts?partNumber=2&uploadId={id}",
        headers: &[("x-amz-copy-source", "{bucket}/foo"), ("x-amz-copy-source-range", "bytes=40-50")],
        status: 416,
        code: "InvalidRange",
        ..PLAIN
    },
    SuiteCase {
        name: "a part from a range that ends past the end",
        head: "PUT /parts?partNumber=2&uploadId={id}",
        headers: &[("x-amz-copy-source", "{bucket}/foo"), ("x-amz-copy-source-range", "bytes=0-21")],
        status: 416,
        code: "InvalidRange",
        ..PLAIN
    },
    SuiteCase {
        name: "a part from a range without an end",
        head: "PUT /parts?partNumber=2&uploadId={id}",
        headers: &[("x-amz-copy-source", "{bucket}/foo"), ("x-amz-copy-source-range", "bytes=1-")],
        status: 400,
        code: "InvalidArgument",
        ..PLAIN
    },
    SuiteCase {
        name: "a part from a malformed range",
        head: "PUT /parts?partNumber=2&uploadId={id}",
        headers: &[("x-amz-copy-source", "{bucket}/foo"), ("x-amz-copy-source-range", "bytes=hello-world")],
        status: 400,
        code: "InvalidArgument",
        ..PLAIN
    },
    SuiteCase {
        name: "the first part is small, but the last",
        head: "POST /parts?uploadId={id}",
        body: "<CompleteMultipartUpload><Part><PartNumber>1</PartNumber></Part></CompleteMultipartUpload>",
        ..PLAIN
    },
    SuiteCase { name: "the object of the part", head: "GET /parts", bytes: Some("za"), ..PLAIN },
    SuiteCase {
        name: "an upload that is not there",
        head: "DELETE /parts?uploadId=56788",
        status: 404,
        code: "NoSuchUpload",
        ..PLAIN
    },
    SuiteCase {
        name: "a listing by an odd delimiter",
        head: "GET ?delimiter=%0A&encoding-type=url",
        elements: &[("Key", "copied copied%20%26%3F%2B foo parts"), ("MaxKeys", "1000"), ("IsTruncated", "false")],
        ..PLAIN
    },
    SuiteCase {
        name: "a listing below a prefix that no key has",
        head: "GET ?list-type=2&prefix=/&delimiter=/",
        elements: &[("Key", ""), ("Prefix", "/"), ("IsTruncated", "false")],
        ..PLAIN
    },
    SuiteCase {
        name: "a listing behind a key that is not there",
        head: "GET ?list-type=2&start-after=e&max-keys=1",
        elements: &[("Key", "foo"), ("KeyCount", "1"), ("IsTruncated", "true")],
        ..PLAIN
    },
    SuiteCase {
        name: "a listing behind the last key",
        head: "GET ?marker=zzz",
        elements: &[("Key", ""), ("IsTruncated", "false")],
        ..PLAIN
    },
    SuiteCase {
        name: "a listing with owners",
        head: "GET ?list-type=2&fetch-owner=true&prefix=foo",
        elements: &[("DisplayName", "spurline")],
        ..PLAIN
    },
    SuiteCase { name: "a listing of blah", head: "GET ?max-keys=blah", status: 400, code: "InvalidArgument", ..PLAIN },
    SuiteCase {
        name: "removals",
        head: "POST ?delete",
        body: "<Delete><Object><Key>foo</Key></Object><Object><Key>never</Key></Object>\
               <Object><Key>parts</Key><VersionId>1</VersionId></Object></Delete>",
        elements: &[("Key", "foo never parts"), ("Code", "NotImplemented")],
        ..PLAIN
    },
    SuiteCase { name: "it is gone", head: "GET /foo", status: 404, code: "NoSuchKey", ..PLAIN },
    SuiteCase {
        name: "a removal of another version",
        head: "DELETE /parts",
        headers: &[("If-Match", "\"ABCORZ\"")],
        status: 412,
        code: "PreconditionFailed",
        ..PLAIN
    },
    SuiteCase { name: "a removal twice", head: "DELETE /foo", status: 204, ..PLAIN },
];

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
            assert_eq!(answer.elements(name).join(" "), *values, "{name}: {about}");
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
