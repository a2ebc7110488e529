//! A store whose listings have no ETags, which its heads have: the endpoint shows one version of an object everywhere, and names the
//! store.

use crate::rig::*;
use spurline_rig::world::*;
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{TcpListener, TcpStream};

const CONTENT: &str = "content";

/// Serves a bucket with the object `f`, until the test ends.
fn serve_untagged() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            std::thread::spawn(move || answer_once(stream));
        }
    });
    endpoint
}

fn answer_once(mut stream: TcpStream) {
    let mut head = String::new();
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    while reader.read_line(&mut head).is_ok_and(|len| len > 2) {}
    let len = CONTENT.len();
    let object = format!("ETag: \"e\"\r\nLast-Modified: Fri, 02 Jan 2026 03:04:05 GMT\r\nContent-Length: {len}\r\n");
    let (status, headers, body) = if head.contains("list-type=2") {
        let found = format!(
            "<Contents><Key>f</Key><LastModified>2026-01-02T03:04:05.000Z</LastModified><Size>{len}</Size></Contents>"
        );
        let found = if head.contains("prefix=f%2F") { String::new() } else { found };
        let document = format!("<ListBucketResult><IsTruncated>false</IsTruncated>{found}</ListBucketResult>");
        ("200 OK", format!("Content-Length: {}\r\n", document.len()), document)
    } else if head.starts_with("HEAD") {
        ("200 OK", object, String::new())
    } else {
        ("206 Partial Content", format!("{object}Content-Range: bytes 0-{}/{len}\r\n", len - 1), CONTENT.to_owned())
    };
    let _ = stream.write_all(format!("HTTP/1.1 {status}\r\nConnection: close\r\n{headers}\r\n{body}").as_bytes());
}

#[test]
fn a_store_without_etags_in_listings_has_one_version_of_each_object() {
    let world = World::new();
    let endpoint = serve_untagged();
    let at = Endpoint::gateway(&world, "s3://bucket", &["--endpoint-url", &endpoint]);
    let found = at.get("/bucket/f").expect(200, "");
    assert_eq!(found.body, CONTENT.as_bytes());
    let etag = found.header("etag").unwrap().to_owned();
    let listed = at.get("/bucket?list-type=2").expect(200, "");
    assert_eq!(
        (listed.elements("ETag"), listed.elements("Size")),
        (vec![etag.clone()], vec![CONTENT.len().to_string()])
    );
    let shown = at.send("HEAD /bucket/f", &[("If-Match", &etag)], b"").expect(200, "");
    assert_eq!(shown.header("etag"), Some(etag.as_str()));
    assert!(at.log().contains("have no ETags: a file's version is made of size and time"), "{}", at.log());
    let status = world.run(&["status", &at.address]);
    let text = String::from_utf8_lossy(&status.stdout).into_owned();
    assert!(text.contains("versions: of size and time in whole seconds"), "{status:?}");
}
