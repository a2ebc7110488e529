//! S3 and what stands beside and between: answers in the store's place, redirects, credentials of roles.

use crate::common;
use common::{object, pattern, read, soon};
use spurline_object_store::{AwsCredentials, EnvironmentSource, OriginOptions};
use spurline_origin::{OriginStore, open};
use spurline_testkit::{
    ACCESS_KEY, AwsIdentityServer, ChaosProxy, ProxyFault, ROLE_KEY, S3Server, SECRET_KEY, SSO_TOKEN,
};
use spurline_types::{ErrorKind, ObjectRef, SliceSink, Stats, Version};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

fn config(endpoint: &str) -> OriginOptions {
    OriginOptions {
        endpoint: Some(endpoint.into()),
        credentials: Some(AwsCredentials {
            access_key_id: ACCESS_KEY.into(),
            secret_access_key: SECRET_KEY.into(),
            session_token: None,
        }),
        env: EnvironmentSource::fixed([]),
        timeout: Duration::from_secs(20),
        ..OriginOptions::default()
    }
}

fn open_with(config: &OriginOptions) -> Arc<dyn OriginStore> {
    open("s3://bucket", config, Arc::new(Stats::default())).unwrap()
}

/// A server in memory with one bucket, and a proxy before it.
fn server() -> (S3Server, ChaosProxy) {
    let server = S3Server::in_memory().unwrap();
    server.create_bucket("bucket");
    let proxy = ChaosProxy::start(server.address()).unwrap();
    (server, proxy)
}

const PAGE: &str = "<html>who are you?</html>";

/// An answer with `head`, which says nothing of its length, and `body` in one chunk.
fn chunked(head: &str, body: &str) -> ProxyFault {
    ProxyFault::Raw(format!(
        "HTTP/1.1 {head}\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n{:x}\r\n{body}\r\n0\r\n\r\n",
        body.len()
    ))
}

fn whole(head: &str, body: &str) -> ProxyFault {
    ProxyFault::Raw(format!("HTTP/1.1 {head}\r\nConnection: close\r\nContent-Length: {}\r\n\r\n{body}", body.len()))
}

/// Its versions are etags.
#[test]
fn a_page_with_status_200_is_not_the_object() {
    let (server, proxy) = server();
    let store = open_with(&config(&proxy.endpoint()));
    let bytes = pattern(1000, 3);
    server.put("bucket", "f", &bytes);
    let (f, _) = object(&*store, b"f");
    let html = "200 OK\r\nContent-Type: text/html";
    let now = "200 OK\r\nLast-Modified: Mon, 23 Nov 2026 04:00:00 GMT";
    let partial = "206 Partial Content\r\nContent-Range: bytes";
    let of_ten = &PAGE[..10];
    for (at, page) in [
        (0, chunked(html, PAGE)),
        (0, whole(html, PAGE)),
        (0, chunked(now, PAGE)),
        (5, chunked(html, PAGE)),
        (5, whole(html, PAGE)),
        (0, whole(&format!("{partial} 0-9/*"), of_ten)),
    ] {
        // For a moment: it passes.
        proxy.inject_on(Some("GET"), "/bucket/f", page.clone(), 1);
        assert!(read(&*store, &f, at, 10).unwrap() == bytes[at as usize..at as usize + 10], "{page:?}");
        // For longer: it is no other version.
        proxy.inject_on(Some("GET"), "/bucket/f", page.clone(), 1000);
        let error = read_briefly(&*store, &f, at).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::OriginFailed, "{page:?}: {error}");
        assert!(error.message().contains("does not identify"), "{page:?}: {error}");
        proxy.clear_faults();
    }
}

/// Ten bytes, or the error after a second.
fn read_briefly(store: &dyn OriginStore, object: &ObjectRef, at: u64) -> spurline_types::Result<Vec<u8>> {
    let mut bytes = vec![0; 10];
    let deadline = Instant::now() + Duration::from_secs(1);
    store.read(object, at, &mut SliceSink::new(&mut bytes), deadline).map(|()| bytes)
}

/// ETag, total length and range of an answer, each missing, empty or different, with both statuses.
#[test]
fn an_answer_that_does_not_identify_the_object_is_none() {
    let (server, proxy) = server();
    let store = open_with(&config(&proxy.endpoint()));
    let bytes = pattern(1000, 3);
    let etag = server.put("bucket", "f", &bytes);
    let (f, _) = object(&*store, b"f");
    let foreign = "z".repeat(1000);
    let etag = format!("ETag: \"{etag}\"\r\n");
    let range = |text: &str| format!("Content-Range: bytes {text}\r\n");
    let (partial, all) = ("206 Partial Content\r\n", "200 OK\r\n");
    use ErrorKind::{OriginFailed, Stale, Unsupported};
    for (status, etag, range, body, at, kind) in [
        (partial, "", &*range("0-9/1000"), 10, 0, OriginFailed),
        (partial, "ETag: \r\n", &*range("0-9/1000"), 10, 0, OriginFailed),
        (partial, "ETag: \"\"\r\n", &*range("0-9/1000"), 10, 0, OriginFailed),
        (partial, "ETag: \"other\"\r\n", &*range("0-9/1000"), 10, 0, Stale),
        (partial, &*etag, "", 10, 0, OriginFailed),
        (partial, &*etag, "Content-Range: \r\n", 10, 0, OriginFailed),
        (partial, &*etag, &*range("0-9/*"), 10, 0, OriginFailed),
        (partial, &*etag, &*range("*/1000"), 10, 0, OriginFailed),
        (partial, &*etag, &*range("0-9/999"), 10, 0, Stale),
        (partial, &*etag, &*range("10-19/1000"), 10, 0, OriginFailed),
        (partial, &*etag, &*range("0-4/1000"), 5, 0, OriginFailed),
        (partial, &*etag, &*range("0-9/1000"), 11, 0, OriginFailed),
        (all, "", "", 1000, 0, OriginFailed),
        (all, "ETag: \"\"\r\n", "", 1000, 0, OriginFailed),
        (all, "ETag: \"other\"\r\n", "", 1000, 0, Stale),
        (all, &*etag, "", 10, 0, Unsupported),
        (all, &*etag, "", 1000, 5, Unsupported),
        (all, "", "", 1000, 5, OriginFailed),
    ] {
        let head = format!("{status}{etag}{range}");
        let answer = whole(head.trim_end(), &foreign[..body]);
        proxy.inject_on(Some("GET"), "/bucket/f", answer, 1000);
        let error = read_briefly(&*store, &f, at).unwrap_err();
        assert_eq!(error.kind(), kind, "{head}: {error}");
        proxy.clear_faults();
    }
    proxy.inject_on(Some("GET"), "/bucket/f", chunked(format!("{all}{etag}").trim_end(), &foreign), 1000);
    assert_eq!(read_briefly(&*store, &f, 0).unwrap_err().kind(), Unsupported, "no total length");
    proxy.clear_faults();
    // As the object identifies itself, in part and as a whole.
    for head in [format!("{partial}{etag}{}", range("0-9/1000")), format!("{all}{etag}")] {
        let body = if head.starts_with("200") { 1000 } else { 10 };
        proxy.inject_on(Some("GET"), "/bucket/f", whole(head.trim_end(), &foreign[..body]), 1);
        assert_eq!(read_briefly(&*store, &f, 0).unwrap(), b"zzzzzzzzzz", "{head}");
    }
    assert!(read_briefly(&*store, &f, 0).unwrap() == bytes[..10]);
}

/// Its versions are times and sizes.
#[test]
fn a_page_with_status_200_is_no_object_of_a_store_without_etags() {
    let (_server, proxy) = server();
    let store = open_with(&config(&proxy.endpoint()));
    let f = |version: &str| ObjectRef::new(store.source_url(), b"f", Version::new(version), 10);
    let answer = |head: &str, body: &str| {
        proxy.clear_faults();
        proxy.inject_on(Some("GET"), "/bucket/f", whole(head, body), 1000);
    };
    let time = "Last-Modified: Thu, 01 Jan 1970 00:01:00 GMT";
    let range = "Content-Range: bytes 0-9/10";
    for (head, version) in [
        (format!("200 OK\r\n{time}"), "~3c-a"),
        (format!("206 Partial Content\r\n{time}\r\n{range}"), "~3c-a"),
        (format!("206 Partial Content\r\n{range}"), "~0-a"),
        (format!("206 Partial Content\r\nETag: \"\"\r\n{range}"), "~0-a"),
    ] {
        answer(&head, "ten bytes.");
        assert_eq!(read(&*store, &f(version), 0, 10).unwrap(), b"ten bytes.", "{head}");
    }
    for (head, version, kind) in [
        (format!("200 OK\r\n{time}"), "~3d-a", ErrorKind::Stale),
        ("200 OK".into(), "~3c-a", ErrorKind::OriginFailed),
        ("200 OK".into(), "~0-a", ErrorKind::OriginFailed),
        (format!("206 Partial Content\r\n{range}"), "~3c-a", ErrorKind::OriginFailed),
        (format!("206 Partial Content\r\n{time}\r\nContent-Range: bytes 0-9/*"), "~3c-a", ErrorKind::OriginFailed),
    ] {
        answer(&head, "ten bytes.");
        let error = read_briefly(&*store, &f(version), 0).unwrap_err();
        assert_eq!(error.kind(), kind, "{head}: {error}");
    }
    let timed = format!("200 OK\r\n{time}");
    proxy.clear_faults();
    proxy.inject_on(Some("GET"), "/bucket/f", chunked(&timed, PAGE), 1000);
    assert_eq!(read_briefly(&*store, &f("~3c-a"), 0).unwrap_err().kind(), ErrorKind::OriginFailed);
    assert!(store.lookup(b"f", soon()).is_err());
}

#[test]
fn a_redirect_is_told_and_not_followed() {
    let (server, proxy) = server();
    let elsewhere = ChaosProxy::start(server.address()).unwrap();
    let store = open_with(&config(&proxy.endpoint()));
    server.put("bucket", "f", b"ten bytes.");
    let (f, _) = object(&*store, b"f");
    for status in
        ["301 Moved Permanently", "302 Found", "303 See Other", "307 Temporary Redirect", "308 Permanent Redirect"]
    {
        let sent_on = whole(&format!("{status}\r\nLocation: {}/bucket/f?pass=hush", elsewhere.endpoint()), "");
        proxy.inject(sent_on, 1000);
        let permanent = status.contains("Permanent");
        let of_read = if permanent { ErrorKind::Unavailable } else { ErrorKind::OriginFailed };
        for (error, kind) in [
            (store.check(soon()).unwrap_err(), ErrorKind::Unavailable),
            (read_briefly(&*store, &f, 0).unwrap_err(), of_read),
        ] {
            assert_eq!(error.kind(), kind, "{status}: {error}");
            let named = error.message().contains(&elsewhere.endpoint()) && error.message().contains("AWS_ENDPOINT_URL");
            assert!(named && !error.message().contains("hush"), "{status}: {error}");
        }
        proxy.clear_faults();
    }
    assert_eq!(elsewhere.count_requests("", ""), 0);
    // What is not signed may go anywhere.
    let server = S3Server::in_memory_open().unwrap();
    server.create_bucket("bucket");
    let elsewhere = ChaosProxy::start(server.address()).unwrap();
    proxy.inject(whole(&format!("307 X\r\nLocation: {}/bucket?list-type=2", elsewhere.endpoint()), ""), 1);
    let anonymous = OriginOptions { credentials: None, anonymous: true, ..config(&proxy.endpoint()) };
    open_with(&anonymous).check(soon()).unwrap();
    assert_eq!(elsewhere.count_requests("GET", "/bucket"), 1);
}

#[test]
fn a_redirect_into_another_region_is_followed() {
    let (_server, proxy) = server();
    let store = open_with(&config(&proxy.endpoint()));
    let there = "Location: https://bucket.s3.eu-central-1.amazonaws.com/?list-type=2";
    proxy.inject(whole(&format!("307 Temporary Redirect\r\n{there}"), ""), 1);
    store.check(soon()).unwrap();
    assert!(store.describe().contains("eu-central-1"), "{}", store.describe());
}

#[test]
fn an_object_in_an_archive_is_to_be_restored() {
    let (server, proxy) = server();
    let store = open_with(&config(&proxy.endpoint()));
    server.put("bucket", "f", b"bytes");
    let (f, _) = object(&*store, b"f");
    let told = "The operation is not valid for the object's storage class";
    proxy.inject_on(Some("GET"), "/bucket/f", ProxyFault::Error(403, "InvalidObjectState", told), 1);
    let error = read(&*store, &f, 0, 5).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::PermissionDenied, "{error}");
    assert!(error.message().contains("restore it") && !error.message().contains("AWS_ACCESS_KEY_ID"), "{error}");
}

#[test]
fn a_bucket_and_an_endpoint_that_make_no_url_are_refused() {
    let at = |endpoint: &str, virtual_hosted: bool| {
        let config = OriginOptions { virtual_hosted: Some(virtual_hosted), ..config(endpoint) };
        open("s3://bucket", &config, Arc::new(Stats::default())).map(|_| ()).map_err(|e| (e.kind(), e.to_string()))
    };
    assert_eq!(at("http://127.0.0.1:1", false), Ok(()));
    let (kind, message) = at("http://127.0.0.1:1", true).unwrap_err();
    assert!(kind == ErrorKind::Invalid && message.contains("'bucket' has no URL"), "{message}");
    assert_eq!(at("http://127.0.0.1:90000", false).unwrap_err().0, ErrorKind::Invalid);
}

/// As a service that gives a role's credentials: an answer that is valid for `seconds`.
fn credentials(seconds: u64) -> ProxyFault {
    let end = chrono::DateTime::<chrono::Utc>::from(SystemTime::now() + Duration::from_secs(seconds));
    let json = format!(
        r#"{{"AccessKeyId":"{ACCESS_KEY}","SecretAccessKey":"{SECRET_KEY}","Token":"t","Expiration":"{}"}}"#,
        end.format("%Y-%m-%dT%H:%M:%SZ")
    );
    whole("200 OK\r\nContent-Type: application/json", &json)
}

#[test]
fn credentials_of_a_role_that_are_still_good_serve_while_nobody_gives_others() {
    let (server, proxy) = server();
    let bytes = pattern(1000, 4);
    server.put("bucket", "f", &bytes);
    let giver = ChaosProxy::start(server.address()).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let token = dir.path().join("token");
    std::fs::write(&token, "token").unwrap();
    let uri = format!("{}/credentials", giver.endpoint());
    for silence in [ProxyFault::Stall, ProxyFault::Error(500, "InternalFailure", "later"), ProxyFault::Close] {
        giver.clear_faults();
        // They must be requested again at once.
        giver.inject(credentials(200), 1);
        giver.inject(silence.clone(), 1000);
        let env = EnvironmentSource::fixed([
            ("AWS_CONTAINER_CREDENTIALS_FULL_URI", uri.as_str()),
            ("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", token.to_str().unwrap()),
        ]);
        let store = open_with(&OriginOptions { credentials: None, env, ..config(&proxy.endpoint()) });
        let (f, _) = object(&*store, b"f");
        // After the moment for which one is simply used.
        std::thread::sleep(Duration::from_millis(1200));
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| assert!(read(&*store, &f, 0, 1000).unwrap() == bytes, "{silence:?}"));
            }
        });
        for _ in 0..20 {
            assert!(read(&*store, &f, 0, 1000).unwrap() == bytes, "{silence:?}");
        }
        store.lookup(b"f", soon()).unwrap();
    }
}

/// Reads an object of `server` with the credentials that `variables` and the two AWS files in `home` name.
fn read_as(server: &S3Server, home: &std::path::Path, variables: &[(&str, &str)]) -> spurline_types::Result<Vec<u8>> {
    server.put("bucket", "f", b"ten bytes.");
    let env = [&[("HOME", home.to_str().unwrap())][..], variables].concat();
    let env = EnvironmentSource::Fixed(Arc::new(env.iter().map(|(k, v)| ((*k).into(), (*v).into())).collect()));
    let store = open_with(&OriginOptions { credentials: None, env, ..config(&server.endpoint()) });
    store.check(soon())?;
    let (f, _) = object(&*store, b"f");
    read(&*store, &f, 0, 10)
}

/// Each kind of profile, and each role of a host, gets its credentials from a local server of AWS's services.
#[test]
fn roles_sso_processes_and_the_host_give_credentials() {
    let server = S3Server::in_memory().unwrap();
    server.create_bucket("bucket");
    let aws = AwsIdentityServer::start().unwrap();
    let home = tempfile::tempdir().unwrap();
    let at = |file: &str| home.path().join(file);
    std::fs::create_dir_all(at(".aws/sso/cache")).unwrap();
    let keys = format!("[base]\naws_access_key_id={ACCESS_KEY}\naws_secret_access_key={SECRET_KEY}\n");
    std::fs::write(at(".aws/credentials"), keys).unwrap();
    std::fs::write(at("token"), "web-identity").unwrap();
    let process = format!(
        r#"echo '{{"Version":1,"AccessKeyId":"{ROLE_KEY}","SecretAccessKey":"{}"}}'"#,
        spurline_testkit::ROLE_SECRET
    );
    std::fs::write(at("process"), process).unwrap();
    let arn = "arn:aws:iam::123456789012:role/reader";
    let (token, script) = (at("token").display().to_string(), at("process").display().to_string());
    let profiles = format!(
        "[profile role]\nrole_arn={arn}\nsource_profile=base\nexternal_id=x1\n\
         [profile chain]\nrole_arn={arn}-2\nsource_profile=role\n\
         [profile web]\nrole_arn={arn}\nweb_identity_token_file={token}\n\
         [profile sso]\nsso_start_url=https://start\nsso_region=eu-west-1\nsso_account_id=1\nsso_role_name=r\n\
         [profile session]\nsso_session=corp\nsso_account_id=1\nsso_role_name=r\n\
         [sso-session corp]\nsso_start_url=https://start\nsso_region=eu-west-1\n\
         [profile process]\ncredential_process=sh \"{script}\"\n\
         [profile loop]\nrole_arn={arn}\nsource_profile=loop2\n[profile loop2]\nrole_arn={arn}\nsource_profile=loop\n"
    );
    std::fs::write(at(".aws/config"), profiles).unwrap();
    // The library names the token's file by the hash of the start URL, or of the session.
    for name in [sha1_hex("https://start"), sha1_hex("corp")] {
        let token = format!(r#"{{"accessToken":"{SSO_TOKEN}","expiresAt":"2099-01-01T00:00:00Z"}}"#);
        std::fs::write(at(&format!(".aws/sso/cache/{name}.json")), token).unwrap();
    }
    let endpoint = aws.endpoint();
    let services = [
        ("AWS_ENDPOINT_URL_STS", endpoint.as_str()),
        ("AWS_ENDPOINT_URL_SSO", &endpoint),
        ("AWS_EC2_METADATA_SERVICE_ENDPOINT", &endpoint),
    ];
    let read = |more: &[(&str, &str)]| read_as(&server, home.path(), &[&services[..], more].concat());
    for (profile, request) in [
        ("base", ""),
        ("role", "AssumeRole arn%3Aaws%3Aiam%3A%3A123456789012%3Arole%2Freader"),
        ("chain", "AssumeRole arn%3Aaws%3Aiam%3A%3A123456789012%3Arole%2Freader-2"),
        ("web", "AssumeRoleWithWebIdentity"),
        ("sso", "/federation/credentials"),
        ("session", "/federation/credentials"),
        ("process", ""),
    ] {
        let before = aws.requests().len();
        assert_eq!(read(&[("AWS_PROFILE", profile)]).unwrap(), b"ten bytes.", "{profile}");
        let sent = aws.requests()[before..].join("\n");
        assert!(sent.contains(request) && sent.is_empty() == request.is_empty(), "{profile}: {sent}");
    }
    let container = format!("{endpoint}/container");
    for (variables, request) in [
        (vec![("AWS_ROLE_ARN", arn), ("AWS_WEB_IDENTITY_TOKEN_FILE", token.as_str())], "AssumeRoleWithWebIdentity"),
        (
            vec![
                ("AWS_CONTAINER_CREDENTIALS_FULL_URI", container.as_str()),
                ("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", token.as_str()),
            ],
            "/container",
        ),
        (vec![], "/security-credentials/test-role"),
    ] {
        let before = aws.requests().len();
        assert_eq!(read(&variables).unwrap(), b"ten bytes.", "{request}");
        assert!(aws.requests()[before..].join("\n").contains(request), "{request}: {:?}", aws.requests());
    }
    let error = read(&[("AWS_PROFILE", "loop")]).unwrap_err();
    assert!(error.kind() == ErrorKind::PermissionDenied && error.message().contains("loop"), "{error}");
}

fn sha1_hex(text: &str) -> String {
    reqsign_core::hash::hex_sha1(text.as_bytes())
}

/// The key is replaced at the server first, or in the file first.
#[test]
fn a_replaced_key_in_the_credentials_file_is_used_without_a_restart() {
    let home = tempfile::tempdir().unwrap();
    let file = home.path().join("credentials");
    replace_keys(&file, &|id| {
        let text = format!("[default]\naws_access_key_id={id}\naws_secret_access_key=secret-of-{id}\n");
        std::fs::write(&file, text).unwrap();
    });
}

/// A directory in the place of the file, as a secret of Kubernetes is mounted: a link leads to the present files.
#[test]
fn a_replaced_key_in_a_directory_of_keys_is_used_without_a_restart() {
    let home = tempfile::tempdir().unwrap();
    let secret = home.path().join("secret");
    std::fs::create_dir(&secret).unwrap();
    for name in ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"] {
        std::os::unix::fs::symlink(format!("..data/{name}"), secret.join(name)).unwrap();
    }
    replace_keys(&secret, &|id| {
        let files = secret.join(format!("..{id}"));
        std::fs::create_dir(&files).unwrap();
        std::fs::write(files.join("AWS_ACCESS_KEY_ID"), id).unwrap();
        std::fs::write(files.join("AWS_SECRET_ACCESS_KEY"), format!("secret-of-{id}\n")).unwrap();
        std::os::unix::fs::symlink(&files, secret.join("..next")).unwrap();
        std::fs::rename(secret.join("..next"), secret.join("..data")).unwrap();
    });
}

fn replace_keys(path: &std::path::Path, write: &dyn Fn(&str)) {
    let (server, proxy) = server();
    server.put("bucket", "f", b"ten bytes.");
    let allow = |id: &str| server.allow_key(id, &format!("secret-of-{id}"));
    allow("KEY1");
    write("KEY1");
    let env = EnvironmentSource::fixed([("AWS_SHARED_CREDENTIALS_FILE", path.to_str().unwrap())]);
    let store = open_with(&OriginOptions { credentials: None, env, ..config(&proxy.endpoint()) });
    let (f, _) = object(&*store, b"f");
    // The file first: its change is noticed within a second, before anything is refused.
    allow("KEY2");
    write("KEY2");
    std::thread::sleep(Duration::from_millis(1100));
    assert_eq!(read(&*store, &f, 0, 10).unwrap(), b"ten bytes.");
    server.revoke_key("KEY1");
    assert_eq!(read(&*store, &f, 0, 10).unwrap(), b"ten bytes.");
    // The file and the server together: the refusal loads the file at once.
    allow("KEY3");
    write("KEY3");
    server.revoke_key("KEY2");
    assert_eq!(read(&*store, &f, 0, 10).unwrap(), b"ten bytes.");
    assert_eq!(store.lookup(b"f", soon()).unwrap().size, 10);
    // The server first: refused until the file follows.
    server.revoke_key("KEY3");
    assert_eq!(read(&*store, &f, 0, 10).unwrap_err().kind(), ErrorKind::PermissionDenied);
    allow("KEY4");
    write("KEY4");
    std::thread::sleep(Duration::from_millis(1100));
    assert_eq!(read(&*store, &f, 0, 10).unwrap(), b"ten bytes.");
}

/// The server's time is taken from its refusal, and given up when it agrees again.
#[test]
fn requests_are_signed_with_the_time_of_the_server() {
    for ahead in [3600, -3600] {
        let (server, proxy) = server();
        server.put("bucket", "f", b"ten bytes.");
        proxy.set_clock_ahead(ahead);
        let store = open_with(&config(&proxy.endpoint()));
        store.check(soon()).unwrap();
        let (f, _) = object(&*store, b"f");
        proxy.forget_requests();
        assert_eq!(read(&*store, &f, 0, 10).unwrap(), b"ten bytes.");
        assert_eq!(proxy.count_requests("GET", "/bucket/f"), 1, "the difference is remembered");
        proxy.set_clock_ahead(0);
        assert_eq!(read(&*store, &f, 0, 10).unwrap(), b"ten bytes.");
        // An answer to HEAD has no error document.
        proxy.set_clock_ahead(ahead);
        let store = open_with(&config(&proxy.endpoint()));
        assert_eq!(store.lookup(b"f", soon()).unwrap().size, 10);
    }
}
