//! The tables of requests on objects, each with the answer that S3 gives.

use crate::cases::{PLAIN, SuiteCase};

/// Metadata and content headers.
pub const METADATA: &[SuiteCase] = &[
    SuiteCase {
        name: "put with metadata",
        head: "PUT /m/x.json",
        headers: &[
            ("Content-Type", "audio/ogg"),
            ("Cache-Control", "public, max-age=14400"),
            ("Content-Encoding", "gzip"),
            ("x-amz-meta-Key1", "value1"),
            ("x-amz-meta-empty", ""),
            ("x-amz-meta-blanks", "two  and   three"),
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
            ("x-amz-meta-blanks", "two  and   three"),
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
        shows: &[
            ("content-type", "audio/ogg"),
            ("x-amz-meta-key1", "value1"),
            ("x-amz-meta-blanks", "two  and   three"),
        ],
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
        name: "its end with another document",
        head: "POST /m/parts?uploadId={id}",
        headers: &[("Content-MD5", "XrY7u+Ae7tCTyyK7j1rNww==")],
        body: "<CompleteMultipartUpload><Part><PartNumber>1</PartNumber></Part></CompleteMultipartUpload>",
        status: 400,
        code: "BadDigest",
        ..PLAIN
    },
    SuiteCase {
        name: "its end with another checksum of the object",
        head: "POST /m/parts?uploadId={id}",
        headers: &[("x-amz-checksum-crc32", "AAAAAA==")],
        body: "<CompleteMultipartUpload><Part><PartNumber>1</PartNumber></Part></CompleteMultipartUpload>",
        status: 400,
        code: "BadDigest",
        ..PLAIN
    },
    SuiteCase { name: "nothing has happened", head: "HEAD /m/parts", status: 404, ..PLAIN },
    SuiteCase {
        name: "its end",
        head: "POST /m/parts?uploadId={id}",
        headers: &[("Content-MD5", "cZaU8/l9xc2UdQdTN7owlw==")],
        body: "<CompleteMultipartUpload><Part><PartNumber>1</PartNumber></Part></CompleteMultipartUpload>",
        elements: &[("Location", "http://{host}/{bucket}/m/parts"), ("Key", "m/parts")],
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
pub const FOLDERS: &[SuiteCase] = &[
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
    SuiteCase {
        name: "a folder is listed below itself",
        head: "GET ?list-type=2&prefix=folder/&delimiter=/&max-keys=1",
        elements: &[("Key", "folder/"), ("KeyCount", "1"), ("IsTruncated", "false"), ("Size", "0")],
        ..PLAIN
    },
    SuiteCase {
        name: "and among all objects",
        head: "GET ?list-type=2",
        elements: &[("Key", "folder/"), ("KeyCount", "1")],
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
    SuiteCase { name: "nothing is listed", head: "GET ?list-type=2", elements: &[("Key", "")], ..PLAIN },
    SuiteCase { name: "the folder is removed", head: "DELETE /folder/", status: 204, ..PLAIN },
    SuiteCase { name: "it is gone", head: "HEAD /folder/", status: 404, ..PLAIN },
];

/// Reads, conditions, parts and listings.
pub const CALLS: &[SuiteCase] = &[
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
        name: "the head of that part",
        head: "HEAD /foo?partNumber=1",
        status: 206,
        shows: &[("content-length", "11"), ("content-range", "bytes 0-10/11")],
        ..PLAIN
    },
    SuiteCase {
        name: "a part that it has not",
        head: "GET /foo?partNumber=2",
        status: 416,
        code: "InvalidPartNumber",
        ..PLAIN
    },
    SuiteCase {
        name: "a part that no object has",
        head: "GET /foo?partNumber=0",
        status: 400,
        code: "InvalidArgument",
        ..PLAIN
    },
    SuiteCase {
        name: "the head of a range",
        head: "HEAD /foo",
        headers: &[("Range", "bytes=4-7")],
        status: 206,
        shows: &[("content-length", "4"), ("content-range", "bytes 4-7/11")],
        ..PLAIN
    },
    SuiteCase {
        name: "the head of a range past the end",
        head: "HEAD /foo",
        headers: &[("Range", "bytes=40-50")],
        status: 416,
        shows: &[("content-range", "bytes */11")],
        ..PLAIN
    },
    SuiteCase {
        name: "changed since a date of RFC 850",
        head: "GET /foo",
        headers: &[("If-Modified-Since", "Sunday, 06-Nov-94 08:49:37 GMT")],
        bytes: Some("testcontent"),
        ..PLAIN
    },
    SuiteCase {
        name: "unchanged since a date as C writes it",
        head: "HEAD /foo",
        headers: &[("If-Unmodified-Since", "Sun Nov  6 08:49:37 1994")],
        status: 412,
        ..PLAIN
    },
    SuiteCase {
        name: "a date that is none is ignored",
        head: "GET /foo",
        headers: &[("If-Unmodified-Since", "1994-11-06T08:49:37Z"), ("If-Modified-Since", "yesterday")],
        bytes: Some("testcontent"),
        ..PLAIN
    },
    SuiteCase {
        name: "a range if not changed since a date",
        head: "GET /foo",
        headers: &[("Range", "bytes=0-3"), ("If-Range", "Sun, 06 Nov 1994 08:49:37 GMT")],
        bytes: Some("testcontent"),
        ..PLAIN
    },
    SuiteCase {
        name: "read if one of several versions",
        head: "GET /foo",
        headers: &[("If-Match", "\"ABCORZ\", \"other\"")],
        status: 412,
        code: "PreconditionFailed",
        ..PLAIN
    },
    SuiteCase {
        name: "a digest that is none",
        head: "PUT /foo",
        headers: &[("Content-MD5", "garbage")],
        body: "zar",
        status: 400,
        code: "InvalidDigest",
        ..PLAIN
    },
    SuiteCase {
        name: "a checksum that is none",
        head: "PUT /foo",
        headers: &[("x-amz-checksum-sha256", "AAAAAA==")],
        body: "zar",
        status: 400,
        code: "InvalidRequest",
        ..PLAIN
    },
    SuiteCase {
        name: "a copy with a directive that is none",
        head: "PUT /copied",
        headers: &[("x-amz-copy-source", "{bucket}/foo"), ("x-amz-metadata-directive", "BOGUS")],
        status: 400,
        code: "InvalidArgument",
        ..PLAIN
    },
    SuiteCase {
        name: "a copy with another directive that is none",
        head: "PUT /copied",
        headers: &[("x-amz-copy-source", "{bucket}/foo"), ("x-amz-tagging-directive", "replace")],
        status: 400,
        code: "InvalidArgument",
        ..PLAIN
    },
    SuiteCase {
        name: "a copy if changed since a date of RFC 850",
        head: "PUT /copied",
        headers: &[
            ("x-amz-copy-source", "{bucket}/foo"),
            ("x-amz-copy-source-if-unmodified-since", "Sunday, 06-Nov-94 08:49:37 GMT"),
        ],
        status: 412,
        code: "PreconditionFailed",
        ..PLAIN
    },
    SuiteCase {
        name: "the region of a bucket",
        head: "HEAD ",
        shows: &[("x-amz-bucket-region", "us-east-1")],
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
    SuiteCase { name: "another below a folder", head: "POST /u/parts?uploads", ..PLAIN },
    SuiteCase {
        name: "the uploads by folders",
        head: "GET ?uploads&delimiter=/&max-uploads=1",
        elements: &[("Key", "parts"), ("NextKeyMarker", "parts"), ("IsTruncated", "true")],
        ..PLAIN
    },
    SuiteCase {
        name: "the uploads by folders, goes on",
        head: "GET ?uploads&delimiter=/&key-marker=parts",
        elements: &[("Key", ""), ("CommonPrefixes", "<Prefix>u/"), ("IsTruncated", "false")],
        ..PLAIN
    },
    SuiteCase {
        name: "the uploads of a folder",
        head: "GET ?uploads&delimiter=/&prefix=u/",
        elements: &[("Key", "u/parts"), ("IsTruncated", "false")],
        ..PLAIN
    },
    SuiteCase { name: "it is abandoned", head: "DELETE /u/parts?uploadId={id}", status: 204, ..PLAIN },
    SuiteCase { name: "the upload in parts again", head: "POST /parts?uploads", ..PLAIN },
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
        name: "removals with another digest",
        head: "POST ?delete",
        headers: &[("Content-MD5", "XrY7u+Ae7tCTyyK7j1rNww==")],
        body: "<Delete><Object><Key>foo</Key></Object></Delete>",
        status: 400,
        code: "BadDigest",
        ..PLAIN
    },
    SuiteCase {
        name: "removals with another checksum",
        head: "POST ?delete",
        headers: &[("x-amz-checksum-crc32", "AAAAAA==")],
        body: "<Delete><Object><Key>foo</Key></Object></Delete>",
        status: 400,
        code: "BadDigest",
        ..PLAIN
    },
    SuiteCase {
        name: "removals with another checksum behind the document",
        head: "POST ?delete",
        headers: &[
            ("x-amz-content-sha256", "STREAMING-UNSIGNED-PAYLOAD-TRAILER"),
            ("x-amz-trailer", "x-amz-checksum-crc32"),
            ("x-amz-decoded-content-length", "48"),
        ],
        body: "30\r\n<Delete><Object><Key>foo</Key></Object></Delete>\r\n0\r\nx-amz-checksum-crc32:AAAAAA==\r\n\r\n",
        status: 400,
        code: "BadDigest",
        ..PLAIN
    },
    SuiteCase { name: "nothing is removed", head: "HEAD /foo", ..PLAIN },
    SuiteCase {
        name: "removals with the digest",
        head: "POST ?delete",
        headers: &[("Content-MD5", "C1MAbV0BRxjLuyvkpEQajw=="), ("x-amz-checksum-crc32", "5U4W7Q==")],
        body: "<Delete><Object><Key>never</Key></Object></Delete>",
        elements: &[("Key", "never")],
        ..PLAIN
    },
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
