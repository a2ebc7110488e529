//! The test suite that every transport must pass, run by each transport's own tests. Knows a transport only as a
//! [`TransportRig`].

use crate::{CallError, Channel, ConnState, Connector, Responder, Service, call_decoded, perform_handshake};
use spurline_proto::{
    AnswerBody as _, FrameHeader, FrameOp, HEADER_LEN, HelloRequest, MAX_REQUEST_BODY, MAX_VERSION, NodeRequest,
    ReadFlags, ReadRequest, frame_padding,
};
use spurline_proto::{
    CapacityAnswer, MAX_WRITE, VolumeId, WelcomeAnswer, WireCaller, WriteAnswer, WriteCall, WriteRequest,
};
use spurline_types::errno::ENOSPC;
use spurline_types::{DirEntry, Error, ErrorKind, FileKind, ListPage, ObjectAttr, Result, Version};
use std::fs::File;
use std::io::Write as _;
use std::os::fd::AsFd as _;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant, UNIX_EPOCH};

/// What follows the bytes of a script.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScriptEnd {
    /// The next request.
    Continue,
    /// The connection ends.
    Close,
    /// Nothing, for ever.
    Stall,
}

/// A peer that breaks the protocol: maps a request to the bytes to send and what follows.
pub type PeerScript = Arc<dyn Fn(&FrameHeader) -> (Vec<u8>, ScriptEnd) + Send + Sync>;

/// A running peer, which ends when dropped.
pub trait TestPeer {
    /// Connects to the peer.
    fn connector(&self) -> Arc<dyn Connector>;
    /// Ends the peer and all connections, as the death of the process would.
    fn kill(&mut self);
}

/// A transport to test.
pub trait TransportRig {
    /// A peer that serves correctly.
    fn serve_with(&self, service: Arc<dyn Service>) -> Box<dyn TestPeer>;
    /// A peer that plays a script.
    fn play_script(&self, script: PeerScript) -> Box<dyn TestPeer>;
}

/// A case of the suite: name and code.
pub type ConformanceCase = (&'static str, fn(&dyn TransportRig));

/// The whole suite.
pub const CASES: &[ConformanceCase] = &[
    ("handshake first", greeting_first),
    ("every operation is answered", every_operation),
    ("payloads of all lengths and ways", all_payloads),
    ("requests with payloads of all lengths", request_payloads),
    ("a destination that is too short", short_destination),
    ("errors are answers", errors_are_answers),
    ("a service that breaks its promise", broken_promises),
    ("progress is monotonic", progress_is_monotonic),
    ("a peer that stalls", stalled_peer),
    ("a peer that dies within the payload", dies_within_payload),
    ("a peer that is killed", killed_peer),
    ("garbage and wrong frames", garbage_frames),
    ("a request that is too large", oversize_request),
    ("many callers at once", many_callers),
    ("answers over two channels to one thread", overlapped_calls),
    ("a call ended from another thread", broken_off),
];

/// Runs the whole suite on a transport.
///
/// # Panics
/// When a case fails.
pub fn run_suite(rig: &dyn TransportRig) {
    for (name, case) in CASES {
        println!("conformance: {name}");
        case(rig);
    }
}

const DATA_LEN: usize = 6 << 20;

fn test_data() -> &'static [u8] {
    static DATA: OnceLock<Vec<u8>> = OnceLock::new();
    DATA.get_or_init(|| (0..DATA_LEN as u64).map(|i| (i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8).collect())
}

/// For events that happen at once, on a machine that may be suspended for a minute meanwhile.
fn far_deadline() -> Instant {
    Instant::now() + Duration::from_secs(150)
}

fn in_ms(ms: u64) -> Instant {
    Instant::now() + Duration::from_millis(ms)
}

/// Serves [`test_data`] in every supported way, chosen by the path.
pub struct TestService {
    file: File,
    path: std::path::PathBuf,
}

impl TestService {
    /// A service with a file to send from.
    ///
    /// # Panics
    /// When the file can't be written.
    pub fn new() -> Arc<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name = format!("spurline-conformance-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(name);
        let mut file = File::options().create(true).truncate(true).read(true).write(true).open(&path).unwrap();
        file.write_all(test_data()).unwrap();
        Arc::new(TestService { file, path })
    }
}

impl Drop for TestService {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

fn test_attr(path: &[u8]) -> ObjectAttr {
    ObjectAttr {
        kind: FileKind::File,
        size: path.len() as u64,
        mtime: UNIX_EPOCH + Duration::new(7, 9),
        mode: 0o640,
        version: Version::new("v1"),
        etag: Some("\"e\"".into()),
    }
}

fn test_page(path: &[u8], cursor: Option<&[u8]>, max: u32) -> ListPage {
    let entries = (0..max).map(|i| DirEntry { name: format!("n{i}").into(), attr: test_attr(path) }).collect();
    ListPage { entries, next: cursor.map(<[u8]>::to_vec), marker: None }
}

impl Service for TestService {
    fn handle_hello(&self, _: &ConnState, hello: &HelloRequest<'_>) -> Result<WelcomeAnswer> {
        if hello.source == "no-such" {
            return Err(Error::new(ErrorKind::NotFound, "no such source"));
        }
        let volume = VolumeId(hello.source.len() as u32);
        let node = hello.peer.to_owned();
        Ok(WelcomeAnswer {
            version: 0,
            volume,
            block_size: 4 << 20,
            node,
            placement_rule: 5,
            ..WelcomeAnswer::default()
        })
    }

    fn serve_request(&self, _: &ConnState, request: NodeRequest<'_>, to: &mut dyn Responder) -> Result<()> {
        let mut body = Vec::new();
        match request {
            NodeRequest::Lookup { path, .. } => test_attr(path).encode(&mut body),
            NodeRequest::List { path, cursor, max, .. } => test_page(path, cursor, max).encode(&mut body),
            NodeRequest::ReadLink { path, .. } | NodeRequest::Info { path, .. } => body.extend_from_slice(path),
            NodeRequest::HeldObjects { after } => body.extend_from_slice(&after.unwrap_or_default().to_le_bytes()),
            NodeRequest::StatFs { volume } => {
                CapacityAnswer { total_bytes: volume.0.into(), ..CapacityAnswer::default() }.encode(&mut body);
            }
            NodeRequest::Read(ReadRequest { path, offset, len, .. }) => {
                let start = (offset as usize).min(DATA_LEN);
                let bytes = &test_data()[start..DATA_LEN.min(start + len as usize)];
                return self.answer_read(path, offset, bytes, to);
            }
            NodeRequest::Write(write) => WriteAnswer::Number(checksum(write.payload)).encode(&mut body),
            _ => return Err(Error::new(ErrorKind::Unsupported, "not here")),
        }
        to.send_data(&body, &[])
    }
}

impl TestService {
    fn answer_read(&self, path: &[u8], offset: u64, bytes: &[u8], to: &mut dyn Responder) -> Result<()> {
        let body: &[u8] = if path.starts_with(b"with-body/") { b"a body" } else { b"" };
        match path.rsplit(|b| *b == b'/').next().unwrap_or_default() {
            b"slice" => to.send_data(body, &[bytes]),
            b"slices" => {
                let pieces: Vec<&[u8]> = bytes.chunks((bytes.len() / 100).max(1)).collect();
                to.send_data(body, &pieces)
            }
            b"file" => to.send_file(body, self.file.as_fd(), offset, bytes.len()),
            b"push" => {
                to.begin_payload(body, bytes.len())?;
                bytes.chunks(100_000).try_for_each(|piece| to.push_payload(piece))
            }
            b"stale" => Err(Error::new(ErrorKind::Stale, "the object changed")),
            b"newer-kind" => to.send_error(&Error::new(ErrorKind::Unknown(4000), "from the future")),
            b"errno" => Err(Error::new(ErrorKind::Io(ENOSPC), "disk full")),
            b"silent" => Ok(()),
            b"fails-late" => {
                to.begin_payload(body, bytes.len())?;
                to.push_payload(&bytes[..bytes.len() / 2])?;
                Err(Error::new(ErrorKind::Corrupt, "the rest is damaged"))
            }
            b"too-little" => {
                to.begin_payload(body, bytes.len())?;
                to.push_payload(&bytes[..bytes.len() / 2])
            }
            b"too-much" => {
                to.begin_payload(body, bytes.len() / 2)?;
                to.push_payload(bytes)
            }
            b"short-file" => to.send_file(body, self.file.as_fd(), DATA_LEN as u64 - 10, bytes.len()),
            b"twice" => {
                to.send_data(body, &[bytes])?;
                to.send_data(body, &[bytes])
            }
            b"huge" => to.send_data(body, &[&[0u8; 1 << 20][..]; 65]),
            _ => Err(Error::new(ErrorKind::NotFound, "no such path")),
        }
    }
}

fn connect_channel(peer: &dyn TestPeer) -> Box<dyn Channel> {
    let mut channel = peer.connector().connect(far_deadline()).unwrap();
    let welcome = perform_handshake(&mut *channel, &HelloRequest::new("tester", "src"), far_deadline()).unwrap();
    assert_eq!((welcome.volume, welcome.node.as_str()), (VolumeId(3), "tester"));
    channel
}

fn read_request(path: &str, offset: u64, len: usize) -> NodeRequest<'_> {
    let version = "v1";
    let size = DATA_LEN as u64;
    NodeRequest::Read(ReadRequest {
        volume: VolumeId(3),
        path: path.as_bytes(),
        version,
        size,
        offset,
        len: len as u32,
        flags: ReadFlags::NONE,
    })
}

fn send_ping(channel: &mut dyn Channel) -> Result<(), CallError> {
    channel.call(&NodeRequest::Ping, &mut Vec::new(), &mut [], &mut |_| {}, far_deadline()).map(|_| ())
}

#[track_caller]
fn assert_broken(channel: &mut dyn Channel, result: Result<crate::CallAnswer, CallError>, kind: ErrorKind) {
    let error = result.expect_err("a broken exchange was reported as success");
    assert!(error.is_broken(), "{error}");
    assert_eq!(error.error().kind(), kind, "{error}");
    let again = send_ping(channel).expect_err("a broken channel was used again");
    assert!(again.is_broken(), "{again}");
    assert!(!channel.looks_alive(), "a broken channel looks alive");
}

fn greeting_first(rig: &dyn TransportRig) {
    let peer = rig.serve_with(TestService::new());
    let mut channel = peer.connector().connect(far_deadline()).unwrap();
    let early = channel
        .call(&read_request("slice", 0, 10), &mut Vec::new(), &mut [0; 10], &mut |_| {}, far_deadline())
        .unwrap_err();
    assert_eq!(early.error().kind(), ErrorKind::Protocol, "{early}");
    // A source that is not served is an answer, and another handshake may follow.
    let mut channel = peer.connector().connect(far_deadline()).unwrap();
    let refused =
        perform_handshake(&mut *channel, &HelloRequest::new("tester", "no-such"), far_deadline()).unwrap_err();
    assert!(!refused.is_broken() && refused.error().kind() == ErrorKind::NotFound, "{refused}");
    assert_eq!(
        perform_handshake(&mut *channel, &HelloRequest::new("tester", "src"), far_deadline()).unwrap().version,
        MAX_VERSION
    );
    // No version in common.
    let mut channel = peer.connector().connect(far_deadline()).unwrap();
    let future = HelloRequest { min_version: 900, max_version: 901, peer: "tester", source: "src" };
    let refused = perform_handshake(&mut *channel, &future, far_deadline()).unwrap_err();
    assert_eq!(refused.error().kind(), ErrorKind::Protocol, "{refused}");
}

fn every_operation(rig: &dyn TransportRig) {
    let peer = rig.serve_with(TestService::new());
    let mut channel = connect_channel(&*peer);
    let channel = &mut *channel;
    let volume = VolumeId(9);
    let mut body = Vec::new();
    let odd: &[u8] = b"d\xff\xfe/\n\x01";
    for _ in 0..3 {
        assert_eq!(
            call_decoded::<ObjectAttr>(
                channel,
                &NodeRequest::Lookup { volume, path: odd, max_age_ms: 0 },
                &mut body,
                far_deadline()
            ),
            Ok(test_attr(odd))
        );
        for max in [0, 1, 3000] {
            let request = NodeRequest::List { volume, path: b"", cursor: Some(b"\0c"), max, max_age_ms: 0 };
            let got = call_decoded::<ListPage>(channel, &request, &mut body, far_deadline()).unwrap();
            assert_eq!(got, test_page(b"", Some(b"\0c"), max));
        }
        let stat: CapacityAnswer =
            call_decoded(channel, &NodeRequest::StatFs { volume }, &mut body, far_deadline()).unwrap();
        assert_eq!(stat.total_bytes, 9);
        for request in [NodeRequest::ReadLink { volume, path: odd }, NodeRequest::Info { volume, path: odd }] {
            channel.call(&request, &mut body, &mut [], &mut |_| {}, far_deadline()).unwrap();
            assert_eq!(body, odd);
        }
        let request = NodeRequest::HeldObjects { after: Some(7 << 64) };
        channel.call(&request, &mut body, &mut [], &mut |_| {}, far_deadline()).unwrap();
        assert_eq!(body, (7u128 << 64).to_le_bytes());
        // A body larger than one receive call takes, with a destination that stays unused.
        let long: Vec<u8> = (0..40_000).map(|i| if i % 200 == 199 { b'/' } else { b'a' + (i % 26) as u8 }).collect();
        let request = NodeRequest::ReadLink { volume, path: &long[..39_999] };
        let answer = channel.call(&request, &mut body, &mut [7; 100], &mut |_| {}, far_deadline()).unwrap();
        assert!(answer.payload_len == 0 && body == long[..39_999]);
        send_ping(channel).unwrap();
        let unknown = NodeRequest::Unknown { op: 999, body: b"xyz" };
        let refused = channel.call(&unknown, &mut body, &mut [], &mut |_| {}, far_deadline()).unwrap_err();
        assert!(!refused.is_broken() && refused.error().kind() == ErrorKind::Unsupported, "{refused}");
        // A path that leads out of the source is refused before the service gets the request.
        let out = NodeRequest::Lookup { volume, path: b"../etc/passwd", max_age_ms: 0 };
        let refused = channel.call(&out, &mut body, &mut [], &mut |_| {}, far_deadline()).unwrap_err();
        assert!(!refused.is_broken() && refused.error().kind() == ErrorKind::Invalid, "{refused}");
    }
}

fn all_payloads(rig: &dyn TransportRig) {
    let peer = rig.serve_with(TestService::new());
    let mut channel = connect_channel(&*peer);
    let mut dst = vec![0u8; DATA_LEN];
    let mut body = Vec::new();
    for way in ["slice", "slices", "file", "push"] {
        for len in [0, 1, 31, 32, 33, 4095, 4096, 4097, 65_536, 262_145, 1 << 20, (4 << 20) + 13] {
            for with_body in [false, true] {
                let path = if with_body { format!("with-body/{way}") } else { way.to_owned() };
                let offset = (len as u64 * 31) % 1_000_003;
                // An exact destination, and a longer destination.
                for room in [0, 1000] {
                    let dst = &mut dst[..len + room];
                    dst.fill(0xa5);
                    let what = read_request(&path, offset, len);
                    let answer = channel.call(&what, &mut body, dst, &mut |_| {}, far_deadline()).unwrap();
                    assert_eq!(answer.payload_len, len, "{path}");
                    assert!(dst[..len] == test_data()[offset as usize..][..len], "{path} {len}: wrong bytes");
                    assert_eq!(body, if with_body { b"a body".as_slice() } else { b"" }, "{path} {len}");
                }
            }
        }
        // Past the end the answer is short.
        let answer = channel
            .call(&read_request(way, DATA_LEN as u64 - 5, 100), &mut body, &mut dst, &mut |_| {}, far_deadline())
            .unwrap();
        assert_eq!(answer.payload_len, 5);
    }
}

/// A number that depends on all bytes and on the order.
fn checksum(bytes: &[u8]) -> u64 {
    bytes.iter().fold(bytes.len() as u64, |sum, byte| sum.rotate_left(5) ^ u64::from(*byte))
}

fn request_payloads(rig: &dyn TransportRig) {
    let peer = rig.serve_with(TestService::new());
    let mut channel = connect_channel(&*peer);
    let mut body = Vec::new();
    for len in [0, 1, 63, 64, 65, 1900, 2048, 4096, 65_535, 65_536, 70_000, 1 << 20, MAX_WRITE - 1, MAX_WRITE] {
        let payload = &test_data()[len % 777..][..len];
        let write = WriteRequest {
            volume: VolumeId(1),
            id: spurline_proto::ChangeId { session: 1, number: 2 },
            answered: 0,
            again: false,
            marked: false,
            known: [None; 2],
            caller: WireCaller::default(),
            call: WriteCall::Write { file: 1, offset: 2, append: false, lose_privileges: false, flush: false },
            payload,
        };
        let sent = call_decoded(&mut *channel, &NodeRequest::Write(write), &mut body, far_deadline());
        assert_eq!(sent, Ok(WriteAnswer::Number(checksum(payload))), "{len} bytes");
        send_ping(&mut *channel).unwrap();
    }
}

fn short_destination(rig: &dyn TransportRig) {
    let peer = rig.serve_with(TestService::new());
    for (room, len) in [(0, 1), (99, 100), (4096, 1 << 20)] {
        let mut channel = connect_channel(&*peer);
        let mut dst = vec![0u8; room];
        let result =
            channel.call(&read_request("slice", 0, len), &mut Vec::new(), &mut dst, &mut |_| {}, far_deadline());
        assert_broken(&mut *channel, result, ErrorKind::Protocol);
    }
}

fn errors_are_answers(rig: &dyn TransportRig) {
    let peer = rig.serve_with(TestService::new());
    let mut channel = connect_channel(&*peer);
    let mut dst = vec![0u8; 1 << 20];
    for room in [0, 3, 1 << 20] {
        for (path, kind, text) in [
            ("stale", ErrorKind::Stale, "the object changed"),
            ("newer-kind", ErrorKind::Unknown(4000), "from the future"),
            ("errno", ErrorKind::Io(ENOSPC), "disk full"),
            ("silent", ErrorKind::Unsupported, "not served"),
            ("huge", ErrorKind::Invalid, "does not fit"),
            ("else", ErrorKind::NotFound, "no such path"),
        ] {
            let error = channel
                .call(&read_request(path, 0, 1 << 20), &mut Vec::new(), &mut dst[..room], &mut |_| {}, far_deadline())
                .unwrap_err();
            assert!(!error.is_broken(), "{path}: {error}");
            assert_eq!(error.error().kind(), kind, "{path}");
            assert!(error.error().message().contains(text), "{path}: {error}");
        }
        send_ping(&mut *channel).unwrap();
    }
}

fn broken_promises(rig: &dyn TransportRig) {
    let peer = rig.serve_with(TestService::new());
    for path in ["fails-late", "too-little", "short-file", "too-much"] {
        let mut channel = connect_channel(&*peer);
        let mut dst = vec![0u8; 1 << 20];
        let result =
            channel.call(&read_request(path, 0, 1 << 20), &mut Vec::new(), &mut dst, &mut |_| {}, far_deadline());
        assert_broken(&mut *channel, result, ErrorKind::Unavailable);
    }
    // An answer given twice reaches the reader once, or the connection ends; the second never looks like the answer to the next
    // request.
    let mut channel = connect_channel(&*peer);
    let mut dst = vec![0u8; 1 << 20];
    let first =
        channel.call(&read_request("twice", 0, 1 << 20), &mut Vec::new(), &mut dst, &mut |_| {}, far_deadline());
    if first.is_ok() {
        assert!(dst[..] == test_data()[..1 << 20]);
        let _ = send_ping(&mut *channel);
    }
    // The peer itself keeps serving.
    send_ping(&mut *connect_channel(&*peer)).unwrap();
}

fn progress_is_monotonic(rig: &dyn TransportRig) {
    let peer = rig.serve_with(TestService::new());
    let mut channel = connect_channel(&*peer);
    for way in ["slice", "file", "push"] {
        let len = 3 << 20;
        let mut dst = vec![0u8; len + 5];
        let mut seen = Vec::new();
        let what = read_request(way, 77, len);
        channel.call(&what, &mut Vec::new(), &mut dst, &mut |n| seen.push(n), far_deadline()).unwrap();
        assert!(seen.is_sorted() && seen.last() == Some(&len), "{way}: {seen:?}");
        assert!(seen.len() > 4, "{way}: bytes are reported late: {seen:?}");
    }
}

/// The frame of a proper answer with `payload`.
fn answer_frame(request: &FrameHeader, payload: &[u8]) -> Vec<u8> {
    let mut out = request.new_answer(0, 0, payload.len()).unwrap().encode().to_vec();
    out.extend_from_slice(payload);
    out.extend_from_slice(frame_padding(payload.len()));
    out
}

/// Completes the handshake, then plays `then`.
fn after_greeting(then: impl Fn(&FrameHeader) -> (Vec<u8>, ScriptEnd) + Send + Sync + 'static) -> PeerScript {
    Arc::new(move |header| {
        if header.op != FrameOp::Hello {
            return then(header);
        }
        let mut body = Vec::new();
        let node = "tester".to_owned();
        let block_size = 4 << 20;
        WelcomeAnswer { version: MAX_VERSION, volume: VolumeId(3), block_size, node, ..WelcomeAnswer::default() }
            .encode(&mut body);
        let mut out = header.new_answer(0, body.len(), 0).unwrap().encode().to_vec();
        out.extend_from_slice(&body);
        out.extend_from_slice(frame_padding(body.len()));
        (out, ScriptEnd::Continue)
    })
}

fn stalled_peer(rig: &dyn TransportRig) {
    // Before the first byte, within the header, behind the header, within the payload.
    for sent in [0, 10, HEADER_LEN, HEADER_LEN + 1000, HEADER_LEN + 700_000] {
        let peer = rig.play_script(after_greeting(move |header| {
            let mut bytes = answer_frame(header, &test_data()[..1 << 20]);
            bytes.truncate(sent);
            (bytes, ScriptEnd::Stall)
        }));
        let mut channel = connect_channel(&*peer);
        let mut dst = vec![0u8; 1 << 20];
        let result = channel.call(&read_request("x", 0, 1 << 20), &mut Vec::new(), &mut dst, &mut |_| {}, in_ms(150));
        assert_broken(&mut *channel, result, ErrorKind::Timeout);
    }
    // A peer that never answers the handshake.
    let peer = rig.play_script(Arc::new(|_| (Vec::new(), ScriptEnd::Stall)));
    let mut channel = peer.connector().connect(far_deadline()).unwrap();
    let error = perform_handshake(&mut *channel, &HelloRequest::new("tester", "src"), in_ms(150)).unwrap_err();
    assert_eq!(error.error().kind(), ErrorKind::Timeout, "{error}");
    // A deadline that has passed already.
    let peer = rig.serve_with(TestService::new());
    let mut channel = connect_channel(&*peer);
    let mut dst = [0u8; 10];
    let late = channel.call(&read_request("slice", 0, 10), &mut Vec::new(), &mut dst, &mut |_| {}, Instant::now());
    if let Err(error) = late {
        assert_eq!(error.error().kind(), ErrorKind::Timeout, "{error}");
    }
}

/// A call made within another's `meanwhile`, as in a read split over rails.
fn overlapped_calls(rig: &dyn TransportRig) {
    let peer = rig.serve_with(TestService::new());
    let mut first = connect_channel(&*peer);
    let mut second = connect_channel(&*peer);
    let mut dst = vec![0u8; 2 << 20];
    let (low, high) = dst.split_at_mut(1 << 20);
    let mut inner = None;
    let outer = first.call_while(
        &read_request("slice", 0, 1 << 20),
        &mut Vec::new(),
        low,
        &mut |_| {},
        far_deadline(),
        &mut || {
            assert!(inner.is_none(), "meanwhile ran twice");
            let request = read_request("slice", 1 << 20, 1 << 20);
            inner = Some(second.call(&request, &mut Vec::new(), high, &mut |_| {}, far_deadline()));
        },
    );
    assert_eq!((outer.unwrap().payload_len, inner.unwrap().unwrap().payload_len), (1 << 20, 1 << 20));
    assert!(dst == test_data()[..2 << 20], "two answers at once are wrong");
}

fn broken_off(rig: &dyn TransportRig) {
    let peer = rig.play_script(after_greeting(|_| (Vec::new(), ScriptEnd::Stall)));
    let mut channel = connect_channel(&*peer);
    let Some(breaker) = channel.breaker() else { return };
    let result = std::thread::scope(|scope| {
        scope.spawn(|| {
            // The call usually waits by then; a call that has not begun must fail all the same.
            std::thread::sleep(Duration::from_millis(50));
            breaker.break_channel();
        });
        channel.call(&read_request("x", 0, 9), &mut Vec::new(), &mut [0; 9], &mut |_| {}, far_deadline())
    });
    assert_broken(&mut *channel, result, ErrorKind::Unavailable);
    drop(channel);
    breaker.break_channel();
}

fn dies_within_payload(rig: &dyn TransportRig) {
    for sent in [0, HEADER_LEN - 1, HEADER_LEN, HEADER_LEN + 1, HEADER_LEN + 500_000, HEADER_LEN + (1 << 20) - 1] {
        let peer = rig.play_script(after_greeting(move |header| {
            let mut bytes = answer_frame(header, &test_data()[..1 << 20]);
            bytes.truncate(sent);
            (bytes, ScriptEnd::Close)
        }));
        let mut channel = connect_channel(&*peer);
        let mut dst = vec![0u8; 1 << 20];
        let mut landed = 0;
        let result = channel.call(
            &read_request("x", 0, 1 << 20),
            &mut Vec::new(),
            &mut dst,
            &mut |n| landed = n,
            far_deadline(),
        );
        assert_broken(&mut *channel, result, ErrorKind::Unavailable);
        assert!(landed <= sent.saturating_sub(HEADER_LEN), "more was reported than was sent");
        assert!(dst[..landed] == test_data()[..landed], "what was reported as landed is wrong");
    }
}

fn killed_peer(rig: &dyn TransportRig) {
    let mut peer = rig.serve_with(TestService::new());
    let mut channel = connect_channel(&*peer);
    assert!(channel.looks_alive(), "a fresh channel looks dead");
    peer.kill();
    let result = channel.call(&read_request("slice", 0, 9), &mut Vec::new(), &mut [0; 9], &mut |_| {}, far_deadline());
    assert_broken(&mut *channel, result, ErrorKind::Unavailable);
    match peer.connector().connect(far_deadline()) {
        Err(error) => assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}"),
        Ok(mut channel) => {
            assert!(perform_handshake(&mut *channel, &HelloRequest::new("t", "s"), far_deadline()).is_err())
        }
    }
}

fn garbage_frames(rig: &dyn TransportRig) {
    type Damage = fn(&FrameHeader, Vec<u8>) -> Vec<u8>;
    let damages: &[(&str, Damage)] = &[
        ("zeros", |_, bytes| vec![0; bytes.len()]),
        ("a web server", |_, _| b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n".to_vec()),
        ("random bytes", |_, _| test_data()[..9999].to_vec()),
        ("another magic", |_, mut bytes| {
            bytes[0] ^= 1;
            bytes
        }),
        ("another version", |_, mut bytes| {
            bytes[4..6].copy_from_slice(&999u16.to_le_bytes());
            bytes
        }),
        ("another operation", |_, mut bytes| {
            bytes[6] ^= 0x40;
            bytes
        }),
        ("another request's answer", |header, mut bytes| {
            bytes[8..16].copy_from_slice(&(header.id + 1).to_le_bytes());
            bytes
        }),
        ("no answer", |_, mut bytes| {
            bytes[16] = 0;
            bytes
        }),
        ("a payload over all limits", |_, mut bytes| {
            bytes[24..28].copy_from_slice(&u32::MAX.to_le_bytes());
            bytes
        }),
        ("a body over all limits", |_, mut bytes| {
            bytes[20..24].copy_from_slice(&u32::MAX.to_le_bytes());
            bytes
        }),
        ("a payload one byte longer than requested", |header, _| answer_frame(header, &test_data()[..1001])),
        ("an error with a payload", |_, mut bytes| {
            bytes[18] = 1;
            bytes
        }),
    ];
    for (name, damage) in damages {
        let damage = *damage;
        println!("  {name}");
        let peer = rig.play_script(after_greeting(move |header| {
            (damage(header, answer_frame(header, &test_data()[..1000])), ScriptEnd::Stall)
        }));
        let mut channel = connect_channel(&*peer);
        let mut dst = vec![0u8; 1000];
        let result = channel.call(&read_request("x", 0, 1000), &mut Vec::new(), &mut dst, &mut |_| {}, far_deadline());
        assert_broken(&mut *channel, result, ErrorKind::Protocol);
    }
    // Stray bytes behind an answer never become part of the next: detected at once, or by the next call.
    let peer = rig.play_script(after_greeting(|header| {
        let mut bytes = answer_frame(header, &test_data()[..1000]);
        bytes.extend_from_slice(&test_data()[..77]);
        (bytes, ScriptEnd::Continue)
    }));
    let mut channel = connect_channel(&*peer);
    let mut dst = vec![0u8; 1000];
    let mut call =
        |dst: &mut [u8]| channel.call(&read_request("x", 0, 1000), &mut Vec::new(), dst, &mut |_| {}, far_deadline());
    let error = call(&mut dst).and_then(|_| call(&mut dst)).unwrap_err();
    assert!(error.is_broken() && error.error().kind() == ErrorKind::Protocol, "{error}");
}

fn oversize_request(rig: &dyn TransportRig) {
    let peer = rig.serve_with(TestService::new());
    let mut channel = connect_channel(&*peer);
    let path = vec![b'a'; MAX_REQUEST_BODY];
    let request = NodeRequest::Lookup { volume: VolumeId(3), path: &path, max_age_ms: 0 };
    let error = channel.call(&request, &mut Vec::new(), &mut [], &mut |_| {}, far_deadline()).unwrap_err();
    assert!(!error.is_broken() && error.error().kind() == ErrorKind::Invalid, "{error}");
    // The largest that fits.
    let request = NodeRequest::ReadLink { volume: VolumeId(3), path: &path[..MAX_REQUEST_BODY - 8] };
    let mut body = Vec::new();
    channel.call(&request, &mut body, &mut [], &mut |_| {}, far_deadline()).unwrap();
    assert_eq!(body.len(), MAX_REQUEST_BODY - 8);
}

fn many_callers(rig: &dyn TransportRig) {
    let peer = rig.serve_with(TestService::new());
    let connector = peer.connector();
    std::thread::scope(|scope| {
        for caller in 0..24usize {
            let connector = &connector;
            scope.spawn(move || {
                let mut channel = connector.connect(far_deadline()).unwrap();
                perform_handshake(&mut *channel, &HelloRequest::new("tester", "src"), far_deadline()).unwrap();
                let mut dst = vec![0u8; 300_000];
                for i in 0..40usize {
                    let len = (caller * 7919 + i * 104_729) % dst.len();
                    let offset = caller * 1000 + i;
                    let way = ["slice", "slices", "file", "push"][i % 4];
                    let what = read_request(way, offset as u64, len);
                    let answer = channel.call(&what, &mut Vec::new(), &mut dst, &mut |_| {}, far_deadline()).unwrap();
                    assert_eq!(answer.payload_len, len);
                    assert!(dst[..len] == test_data()[offset..offset + len], "bytes of another caller");
                }
            });
        }
    });
}
