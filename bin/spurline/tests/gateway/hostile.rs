//! Clients without keys, with wrong ones, slow ones, and those that go away in the middle.

use crate::rig::*;
use spurline_rig::world::*;
use std::fs;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;

fn with_keys(world: &World) -> Endpoint {
    make_files(&world.dir("data"), &[("x", b"secret")]);
    let source = world.dir("data");
    Endpoint::gateway_with_keys(world, source.to_str().unwrap(), "client:0123456789abcdef\n")
}

#[test]
fn requests_without_a_valid_signature_are_refused() {
    let world = World::new();
    let at = with_keys(&world);
    at.get("/data/x").expect(403, "AccessDenied");
    at.put("/data/new", b"x").expect(403, "AccessDenied");
    at.get("/").expect(403, "AccessDenied");
    let signed = |access_key: &str, day: &str, signature: &str| {
        let authorization = format!(
            "AWS4-HMAC-SHA256 Credential={access_key}/{day}/us-east-1/s3/aws4_request, \
             SignedHeaders=host;x-amz-content-sha256;x-amz-date, Signature={signature}"
        );
        let date = format!("{day}T000000Z");
        let headers = [
            ("Authorization", authorization.as_str()),
            ("x-amz-date", date.as_str()),
            ("x-amz-content-sha256", "UNSIGNED-PAYLOAD"),
        ];
        at.send("GET /data/x", &headers, b"")
    };
    let zeros = "0".repeat(64);
    signed("client", "20200101", &zeros).expect(403, "RequestTimeTooSkewed");
    signed("client", "20990101", &zeros).expect(403, "RequestTimeTooSkewed");
    for (wrong, code) in [
        ("", "InvalidArgument"),
        ("Basic Y2xpZW50OnNlY3JldA==", "InvalidArgument"),
        ("AWS4-HMAC-SHA256", "AuthorizationHeaderMalformed"),
        ("AWS4-HMAC-SHA256 x", "AuthorizationHeaderMalformed"),
        ("AWS4-HMAC-SHA256 Credential=a/b/c", "AuthorizationHeaderMalformed"),
        ("AWS4-HMAC-SHA256 Credential=none,SignedHeaders=host,Signature=0a", "AuthorizationHeaderMalformed"),
    ] {
        let answer = at.send("GET /data/x", &[("Authorization", wrong)], b"").expect(400, code);
        assert!(!answer.text().contains("secret"));
    }
    let expired = "X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential=client%2F20200101%2Fus-east-1%2Fs3%2Faws4_request\
                   &X-Amz-Date=20200101T000000Z&X-Amz-Expires=60&X-Amz-SignedHeaders=host&X-Amz-Signature=";
    at.get(&format!("/data/x?{expired}{zeros}")).expect(403, "AccessDenied");
    let too_long = expired.replace("X-Amz-Expires=60", "X-Amz-Expires=604801");
    at.get(&format!("/data/x?{too_long}{zeros}")).expect(400, "AuthorizationQueryParametersError");
    assert!(!world.path("data/new").exists());
}

#[test]
fn clients_that_stop_in_the_middle_leave_nothing_and_delay_no_others() {
    let world = World::new();
    let data = world.dir("data");
    let big = bytes(1, 8 * MIB);
    make_files(&data, &[("big", &big)]);
    let at = Endpoint::gateway(&world, data.to_str().unwrap(), &["--writable"]);
    // A body that ends early, one that never goes on, and answers that no client takes.
    let mut half = TcpStream::connect(&at.address).unwrap();
    half.write_all(b"PUT /data/half HTTP/1.1\r\nHost: x\r\nContent-Length: 4000000\r\n\r\n").unwrap();
    half.write_all(&big[..1_000_000]).unwrap();
    drop(half);
    let mut waiting = TcpStream::connect(&at.address).unwrap();
    waiting.write_all(b"PUT /data/waiting HTTP/1.1\r\nHost: x\r\nContent-Length: 4000000\r\n\r\nabc").unwrap();
    let idle: Vec<TcpStream> = (0..30)
        .map(|_| {
            let mut stream = TcpStream::connect(&at.address).unwrap();
            stream.write_all(b"GET /data/big HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
            stream.read_exact(&mut [0; 100]).unwrap();
            stream
        })
        .collect();
    let mut slow_head = TcpStream::connect(&at.address).unwrap();
    slow_head.write_all(b"GET /data/big HTTP/1.1\r\nHo").unwrap();
    assert!(at.get("/data/big").expect(200, "").body == big);
    at.put("/data/other", b"x").expect(200, "");
    drop((idle, waiting, slow_head));
    let connections = || count(&stats(&world.path("run"), at.address.as_ref()), "s3", "connections");
    eventually("no connection is left", || connections() == 0);
    at.get("/data/half").expect(404, "NoSuchKey");
    eventually("only whole objects are left", || fs::read_dir(&data).unwrap().count() == 2);
}

/// The status of the answer to these bytes; `None` without an answer.
fn status_of(at: &Endpoint, request: &[u8]) -> Option<u16> {
    let mut stream = TcpStream::connect(&at.address).unwrap();
    // The endpoint may close the connection before all is sent.
    let _ = stream.write_all(request);
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    assert!(!String::from_utf8_lossy(&answer).contains("outside"));
    let words = String::from_utf8_lossy(&answer).into_owned();
    words.split(' ').nth(1).and_then(|word| word.parse().ok())
}

#[test]
fn malformed_requests_get_an_answer_and_no_bytes() {
    let world = World::new();
    let data = world.dir("data");
    make_files(&data, &[("x", b"inside")]);
    world.file("outside", b"outside");
    let at = Endpoint::gateway(&world, data.to_str().unwrap(), &["--writable"]);
    let head = |line: &str| format!("{line} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").into_bytes();
    assert!(matches!(status_of(&at, b"\x16\x03\x01 hello\r\n\r\n"), Some(400) | None));
    for path in ["/data/../outside", "/data/%2e%2e/outside", "/data/..%2foutside", "/data/%00", "/data/%ff", "//data/x"]
    {
        assert!(matches!(status_of(&at, &head(&format!("GET {path}"))), Some(400 | 403 | 404)), "{path}");
    }
    assert!(matches!(status_of(&at, &head("BREW /data/x")), Some(400..=501)));
    let form = [("Content-Type", "multipart/form-data; boundary=b")];
    at.send("POST /data", &form, b"--b--").expect(501, "NotImplemented");
    at.send("POST /data?delete", &[], b"<Delete><Object>").expect(400, "MalformedXML");
    let endless = "<a>".repeat(2_000_000);
    let answer = at.send("POST /data?delete", &[], endless.as_bytes());
    assert!(matches!(answer.status, 400 | 413), "{answer:?}");
    at.send("PUT /data/y?partNumber=0&uploadId=none", &[], b"x").expect(400, "");
    let refused = at.send("PUT /data/y?partNumber=1&uploadId=none", &[], b"x").expect(404, "NoSuchUpload");
    assert!(refused.elements("Message")[0].contains("there is no such upload"), "{}", refused.text());
    assert_eq!(refused.elements("RequestId"), [refused.header("x-amz-request-id").unwrap()]);
    at.put(&format!("/data/{}", "n".repeat(300)), b"x").expect(400, "");
    at.put(&format!("/data/{}", "k/".repeat(600)), b"x").expect(400, "");
    assert_eq!(at.get("/data/x").expect(200, "").body, b"inside");
}

#[test]
fn buckets_are_names_of_hosts_in_any_case() {
    let world = World::new();
    let data = world.dir("data");
    make_files(&data, &[("x", b"inside")]);
    let at = Endpoint::gateway(&world, data.to_str().unwrap(), &["--s3-domain", "s3.local"]);
    for (host, path, status) in [
        ("data.s3.local", "/x", 200),
        ("DATA.S3.local:9000", "/x", 200),
        ("other.s3.local", "/x", 404),
        ("s3.local", "/data/x", 200),
        ("10.0.0.7", "/data/x", 200),
    ] {
        let request = format!("GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n");
        assert_eq!(status_of(&at, request.as_bytes()), Some(status), "{host}");
    }
}

#[test]
fn heads_have_the_limit_of_s3() {
    let world = World::new();
    let data = world.dir("data");
    make_files(&data, &[("x", b"inside")]);
    let at = Endpoint::gateway(&world, data.to_str().unwrap(), &["--writable"]);
    let large = |length: usize| "h".repeat(length);
    at.send("GET /data/x", &[("Large", &large(7500))], b"").expect(200, "");
    at.get(&format!("/data/x?x-id=GetObject&large={}", large(7500))).expect(200, "");
    for length in [8200, 20_000, 60_000] {
        at.send("GET /data/x", &[("Large", &large(length))], b"").expect(400, "RequestHeaderSectionTooLarge");
        at.get(&format!("/data/x?large={}", large(length))).expect(400, "RequestHeaderSectionTooLarge");
        at.send("PUT /data/new", &[("Large", &large(length))], b"new").expect(400, "RequestHeaderSectionTooLarge");
    }
    // Many small headers, fewer than the library takes.
    let many: Vec<(String, String)> = (0..90).map(|number| (format!("H-{number}"), large(100))).collect();
    let many: Vec<(&str, &str)> = many.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
    at.send("GET /data/x", &many, b"").expect(400, "RequestHeaderSectionTooLarge");
    // A head that is larger than the buffer of the connection.
    for length in [100_000, 200_000, 2_000_000] {
        let request = format!("GET /data/x HTTP/1.1\r\nHost: x\r\nLarge: {}\r\n\r\n", large(length));
        assert!(matches!(status_of(&at, request.as_bytes()), Some(400 | 431) | None), "{length}");
    }
    assert!(!data.join("new").exists());
    assert_eq!(at.get("/data/x").expect(200, "").body, b"inside");
}

/// An answer to one request of a connection that stays open; `None` at its end.
fn next_answer(stream: &mut TcpStream) -> Option<String> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        if stream.read(&mut byte).unwrap_or(0) == 0 {
            return None;
        }
        head.push(byte[0]);
    }
    Some(String::from_utf8_lossy(&head).to_lowercase())
}

#[test]
fn a_body_is_not_taken_for_a_request() {
    let world = World::new();
    let data = world.dir("data");
    make_files(&data, &[("x", b"x")]);
    let at = Endpoint::gateway(&world, data.to_str().unwrap(), &["--writable"]);
    let body = "DELETE /data/x HTTP/1.1\r\nHost: x\r\n\r\n";
    let second = format!("PUT /data/y HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n", body.len());
    for _ in 0..50 {
        let mut stream = TcpStream::connect(&at.address).unwrap();
        let refused = format!(
            "PUT /data/z HTTP/1.1\r\nHost: x\r\nx-amz-tagging: a=b\r\nExpect: 100-continue\r\nContent-Length: {}\r\n\r\n",
            second.len()
        );
        stream.write_all(refused.as_bytes()).unwrap();
        let answer = next_answer(&mut stream).unwrap();
        assert!(answer.starts_with("http/1.1 501") && answer.contains("connection: close"), "{answer}");
        let _ = stream.write_all(format!("{second}{body}").as_bytes());
        let _ = stream.read_to_end(&mut Vec::new());
    }
    at.get("/data/x").expect(200, "");
}

#[test]
fn idle_clients_make_place_for_new_clients_and_busy_clients_do_not() {
    let world = World::new();
    let data = world.dir("data");
    make_files(&data, &[("x", b"x"), ("big", &bytes(1, 8 * MIB))]);
    let at = Endpoint::gateway(&world, data.to_str().unwrap(), &[]);
    let head = b"HEAD /data/x HTTP/1.1\r\nHost: x\r\n\r\n";
    let mut idle = Vec::new();
    loop {
        let mut stream = TcpStream::connect(&at.address).unwrap();
        stream.write_all(head).unwrap();
        assert!(next_answer(&mut stream).unwrap().starts_with("http/1.1 200"));
        idle.push(stream);
        idle[0].set_nonblocking(true).unwrap();
        if matches!(idle[0].read(&mut [0]), Ok(0)) {
            break;
        }
        assert!(idle.len() < 3000, "no connection ends");
    }
    // The others stay.
    let last = idle.last_mut().unwrap();
    last.write_all(head).unwrap();
    assert!(next_answer(last).unwrap().starts_with("http/1.1 200"));
    drop(idle);

    let mut busy = Vec::new();
    loop {
        let mut stream = TcpStream::connect(&at.address).unwrap();
        stream.write_all(b"GET /data/big HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
        let answer = next_answer(&mut stream).unwrap();
        if answer.starts_with("http/1.1 503 slow down") {
            break;
        }
        assert!(answer.starts_with("http/1.1 200") && busy.len() < 3000, "{answer}");
        busy.push(stream);
    }
    assert!(at.log().contains("new clients get 503 SlowDown"), "{}", at.log());
    drop(busy);
    eventually("there is place again", || at.get("/data/x").status == 200);
}

mod test_all {
    use super::*;
    use std::time::Duration;

    /// Calls of a client that takes or sends a byte now and then; far more than in the time that it has.
    const CALLS_MAX: usize = 50_000;
    const PAUSE: Duration = Duration::from_millis(20);

    fn has_ended(stream: &TcpStream) -> bool {
        // Bytes that have arrived before the end can still be read.
        stream.take_error().unwrap().is_some()
    }

    #[test]
    fn clients_that_trickle_lose_their_connections() {
        let world = World::new();
        let data = world.dir("data");
        make_files(&data, &[("big", &vec![7; 64 * MIB])]);
        let at = Endpoint::gateway(&world, data.to_str().unwrap(), &["--writable"]);
        let mut reader = TcpStream::connect(&at.address).unwrap();
        write!(reader, "GET /data/big HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
        let mut writer = TcpStream::connect(&at.address).unwrap();
        write!(writer, "PUT /data/slow HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n", 64 * MIB).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for _ in 0..CALLS_MAX {
                    let taken = reader.read(&mut [0; 1]);
                    if has_ended(&reader) || !matches!(taken, Ok(1)) {
                        return;
                    }
                    std::thread::sleep(PAUSE);
                }
                panic!("a slow reader holds its connection");
            });
            scope.spawn(|| {
                for _ in 0..CALLS_MAX {
                    if writer.write_all(b"x").is_err() {
                        return;
                    }
                    std::thread::sleep(PAUSE);
                }
                panic!("a slow writer holds its connection");
            });
        });
        assert!(!data.join("slow").exists());
        assert_eq!(at.get("/data/big").expect(200, "").body.len(), 64 * MIB);
    }
}
